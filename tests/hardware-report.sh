#!/usr/bin/env bash
# Writes one text file about this machine's RDMA devices and the library on them, to be attached to an issue: kernel, libraries, devices,
# firmware, ports, the output of rdma-doctor, conformance and perftest side by side, for each device with an IP address. Needs no root and
# changes nothing. Host names, GUIDs and MAC addresses are left out, and only the first half of each address is written.
#
#   tests/hardware-report.sh [FILE]          target/hardware-report.txt by default
#   GUEST=1 tests/hardware-report.sh [FILE]  on siw and rxe, in the guest of tests/vm
#   REPORT_DEVICES='mlx5_0 mlx5_1'           these devices only
#   REPORT_TESTS=connect                     only tests whose names contain this
set -uo pipefail
cd "$(dirname "$0")/.."

# --- building ------------------------------------------------------------------------------------------------------

if [ "${1:-}" != --inside ]; then
    out=$(realpath -m "${1:-target/hardware-report.txt}")
    mkdir -p "$(dirname "$out")" || exit 1
    cargo=${CARGO:-cargo}
    made=$("$cargo" test --release --no-run --message-format=json -p rdma-reactor-tests --test adapter) || exit 1
    test=$(sed -n '/"kind":\["test"\]/s/.*"executable":"\([^"]*\)".*/\1/p' <<<"$made")
    made=$("$cargo" build --release --message-format=json -p rdma-reactor-tools --bin rdma-doctor --bin rdma-pingpong) || exit 1
    programs=$(sed -n 's/.*"executable":"\([^"]*\)\/rdma-doctor".*/\1/p' <<<"$made")
    if [ -n "${GUEST:-}" ]; then
        VM_TIMEOUT=${VM_TIMEOUT:-1500} VM_PASS="REPORT_DEVICES REPORT_TESTS ${VM_PASS:-}" exec tests/vm/run.sh --rwdir "$(dirname "$out")" \
            "bash tests/hardware-report.sh --inside '$test' '$programs' '$out'"
    fi
    exec bash "$0" --inside "$test" "$programs" "$out"
fi

# --- on the machine with the devices -------------------------------------------------------------------------------

test=$2 programs=$3 out=$4
devices=${REPORT_DEVICES:-$(ls /sys/class/infiniband 2>/dev/null)}
[ -n "$devices" ] || { echo "no RDMA device in /sys/class/infiniband: GUEST=1 makes the report in a guest" >&2; exit 1; }
scratch=$(mktemp -d) || exit 1
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$scratch"' EXIT
host=$(cat /proc/sys/kernel/hostname)
case $host in localhost* | '(none)') host= ;; esac # says nothing
failed=0

# Removes everything that names a machine or its place in a network.
clean() {
    sed -E ${host:+-e "s/\b${host//[^[:alnum:]-]/.}\b/HOST/g"} \
        -e 's/(lib[a-z]+(\.so)?[ .][0-9]+|127)\.([0-9]+)\.([0-9]+)/\1@\3@\4/g' \
        -e 's/\b([0-9]{1,3}\.[0-9]{1,3})\.[0-9]{1,3}\.[0-9]{1,3}\b/\1.x.x/g' \
        -e ':again' -e 's/(lib[a-z]+(\.so)?[ .][0-9]+|127)([.0-9]*)@/\1\3./' -e 't again' \
        -e 's/\b([0-9a-f]{2}:){5}[0-9a-f]{2}\b/MAC/gI' \
        -e 's/\b([0-9a-f]{4}:){3}[0-9a-f]{4}\b/GUID/gI' \
        -e 's/\b([0-9a-f]{1,4}):[0-9a-f:]*:[0-9a-f:]+\b/\1:X/gI'
}
section() { printf '\n== %s\n' "$*"; }
value() { printf '%-26s %s\n' "$1" "${2:-?}"; }
read_of() { cat "$1" 2>/dev/null; }

addresses_of() { # The IPv4 addresses of a device's network devices.
    local netdev
    for netdev in $(cat "/sys/class/infiniband/$1"/ports/*/gid_attrs/ndevs/* 2>/dev/null | sort -u) \
        $(ls "/sys/class/infiniband/$1/device/net" 2>/dev/null) \
        $(rdma link show 2>/dev/null | sed -n "s/^link $1\/.* netdev \([^ ]*\).*/\1/p"); do
        ip -4 -o address show dev "$netdev" 2>/dev/null | awk '{ sub("/.*", "", $4); print $4 }'
    done | awk '!seen[$0]++'
}

describe() { # DEVICE
    local dir=/sys/class/infiniband/$1 port
    value driver "$(basename "$(readlink -f "$dir/device/driver" 2>/dev/null)" 2>/dev/null | grep . || echo "none (software)")"
    for file in node_type hca_type board_id fw_ver hw_rev; do value "$file" "$(read_of "$dir/$file")"; done
    value "NUMA node" "$(read_of "$dir/device/numa_node")"
    value "IPv4 addresses" "$(addresses_of "$1" | wc -l)"
    for port in "$dir"/ports/*; do
        value "port $(basename "$port")" "$(read_of "$port/state"), $(read_of "$port/phys_state"), $(read_of "$port/rate"), $(read_of "$port/link_layer")"
    done
    if type ibv_devinfo >/dev/null 2>&1; then ibv_devinfo -v -d "$1" 2>&1 | grep -Ev 'guid|GID|gid' | sed 's/^/    /'; fi
}

# pair SERVER... -- CLIENT...: runs both; the client's output is in $scratch/client. Only a client can find out when a
# server of perftest listens, so the client retries for a while.
pair() {
    local server=() pid status tries
    while [ "$1" != -- ]; do server+=("$1"); shift; done
    shift
    timeout -k 5 120 "${server[@]}" >"$scratch/server" 2>&1 </dev/null &
    pid=$!
    for tries in 1 2 3 4 5 6 7 8 9 10; do
        sleep 1
        timeout -k 5 60 "$@" >"$scratch/client" 2>&1 </dev/null
        status=$?
        [ $status != 0 ] && kill -0 $pid 2>/dev/null || break
    done
    kill $pid 2>/dev/null
    wait $pid 2>/dev/null
    [ $status = 0 ] || { echo "status $status: $*"; tail -n 5 "$scratch/server" "$scratch/client"; }
    return $status
}

json() { sed -n "s/^ *\"$1\": \([0-9.]*\),*\$/\1/p" "$2"; }
column() { awk -v column="$1" -v size="$2" '$1 == size && NF >= 5 { print $column; exit }' "$3"; }

# Three rounds, in which the two alternate. Rounds that differ by more than a little mean that the processors had other work.
measure() { # DEVICE ADDRESS
    local size round result=0 ours theirs command
    for size in 64 4096; do
        ours='' theirs=''
        for round in 1 2 3; do
            port=$((port + 2))
            if pair "$programs/rdma-pingpong" server -d "$1" -p $port -- \
                "$programs/rdma-pingpong" client "$2" -d "$1" -p $port --json - -s $size -n 1000 --wait spin; then
                ours+=" $(json p50 "$scratch/client")"
            else
                ours+=' failed' result=1
            fi
            type ib_send_lat >/dev/null 2>&1 || continue
            port=$((port + 1))
            command=(ib_send_lat -R -F -d "$1" -s $size -n 1000 -p $port)
            if pair "${command[@]}" -- "${command[@]}" "$2"; then
                theirs+=" $(column 5 $size "$scratch/client")"
            else
                # Perftest is here for comparison only.
                theirs+=' failed'
            fi
        done
        value "$size B, ours, us" "${ours# }"
        value "$size B, ib_send_lat, us" "${theirs# }"
    done
    type ib_send_lat >/dev/null 2>&1 || echo "ib_send_lat is not installed (perftest)"
    return $result
}

kind_of() { # What the tests have to know of the device beforehand.
    case $(read_of "/sys/class/infiniband/$1/node_type") in
        # siw is the only iWARP device in software.
        *RNIC*) if [ -e "/sys/class/infiniband/$1/device/driver" ]; then echo IWARP; else echo SIW; fi ;;
        *) echo IB ;;
    esac
}

report() {
    local device address tests port=22000
    echo "rdma-reactor: report about RDMA devices"
    value version "$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1), $(git rev-parse --short HEAD 2>/dev/null || echo 'no git')"
    value kernel "$(uname -srm)"
    value system "$(sed -n 's/^PRETTY_NAME="\(.*\)"/\1/p' /etc/os-release)"
    value processors "$(nproc) of $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
    value "load average" "$(cut -d ' ' -f 1-3 /proc/loadavg)"
    value "locked memory, KiB" "$(ulimit -l)"
    value "rdma cgroup" "$(read_of "/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)/rdma.max" | tr '\n' ';')"
    section "rdma-core"
    for library in libibverbs.so.1 librdmacm.so.1; do
        value $library "$(readlink -f "$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null | sed -n "s/.*$library .*=> //p" | head -n 1)" | xargs -r basename)"
    done
    if type dpkg-query >/dev/null 2>&1; then
        dpkg-query -W -f '${Package} ${Version}\n' libibverbs1 librdmacm1 ibverbs-providers rdma-core perftest 2>/dev/null
    elif type rpm >/dev/null 2>&1; then
        rpm -q libibverbs librdmacm rdma-core perftest 2>/dev/null
    fi
    section "kernel modules"
    grep -E '^(ib_|rdma|iw_|mlx|irdma|bnxt|siw|erdma|efa|hns|qed|cxgb|mana)[^ ]*' -o /proc/modules | sort | tr '\n' ' '
    echo
    section "rdma-doctor"
    "$programs/rdma-doctor" 2>&1
    echo "exit status $?"
    for device in $devices; do
        section "device $device"
        describe "$device"
        address=$(addresses_of "$device" | head -n 1)
        if [ -z "$address" ]; then
            echo "no IPv4 address: nothing was tried on it"
            continue
        fi
        section "$device: conformance"
        tests=$scratch/tests
        RUST_BACKTRACE=0 RDMA_ADAPTER_ADDR=$address RDMA_ADAPTER_KIND=$(kind_of "$device") \
            timeout -k 5 "${REPORT_TIMEOUT:-900}" "$test" --test-threads=1 ${REPORT_TESTS:-} >"$tests" 2>&1
        status=$?
        [ $status = 0 ] || failed=1
        grep -E '^test |panicked|^test result' "$tests" | grep -v '\.\.\. ok$'
        value "exit status" $status
        [ $status = 0 ] || sed -n '/^failures:/,$p' "$tests" | head -n 100
        section "$device: half round trip, medians of three rounds, beside perftest"
        measure "$device" "$address" || failed=1
    done
    section "end"
    return $failed
}

report > >(clean >"$out") 2>&1
status=$?
wait
echo "$out: $(wc -l <"$out") lines; please read it before you give it away"
exit $status
