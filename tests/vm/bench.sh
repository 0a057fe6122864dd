#!/usr/bin/env bash
# rdma-pingpong against perftest and rstream on siw and on rxe, in alternating rounds of one run. A figure is the median
# of its rounds, a ratio the median of their ratios. Builds on the host, runs in the guest.
#
#   tests/vm/bench.sh [latency|rate|ops|all] [siw|rxe]     all, on both devices, by default; a part takes 20 s a round
#   BENCH_ROUNDS=5                       rounds per figure
#   BENCH_CHECK=1                        exit status 1 when a target is missed, and not only when a program fails
set -uo pipefail
cd "$(dirname "$0")/../.."

# --- on the host -------------------------------------------------------------------------------------------------

if [ "${1:-}" != --inside ]; then
    case ${1:-all}:${2:-siw} in
        latency:siw | latency:rxe | rate:siw | rate:rxe | ops:siw | ops:rxe | all:siw | all:rxe) ;;
        *) echo "usage: bench.sh [latency|rate|ops|all] [siw|rxe]" >&2; exit 2 ;;
    esac
    program=$(tests/vm/build.sh --release rdma-pingpong) || exit 1
    VM_TIMEOUT=${VM_TIMEOUT:-1800} exec tests/vm/run.sh \
        bash tests/vm/bench.sh --inside "$program" "${BENCH_ROUNDS:-5}" "${BENCH_CHECK:-}" "${1:-all}" "${2:-siw rxe}"
fi

# --- in the guest ------------------------------------------------------------------------------------------------

ours=$2 rounds=$3 check=$4 part=$5 kinds=$6
logs=$(mktemp -d) || exit 1
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$logs"' EXIT
port=21000
for tool in ib_send_lat ib_send_bw ib_write_lat ib_read_lat ib_write_bw rstream rdma taskset; do
    type "$tool" >/dev/null || { echo "$tool is missing: install perftest, rdmacm-utils, iproute2, util-linux" >&2; exit 1; }
done
: "${RDMA_SIW_DEV:?}" "${RDMA_SIW_ADDR:?}" "${RDMA_RXE_DEV:?}" "${RDMA_RXE_ADDR:?}"
# One processor for each program, on both sides.
server_cpu='' client_cpu=''
if [ "$(nproc)" -ge 2 ]; then server_cpu='taskset -c 0' client_cpu='taskset -c 1'; fi

fail() {
    echo "$*" >&2
    for log in server client; do sed "s/^/    $log: /" "$logs/$log" >&2; done
    exit 1
}

# pair SERVER... -- CLIENT...: runs both on one port; PORT is the port. The client's output is left in $logs/client.
# perftest and rstream get three attempts: perftest crashes if its connect is rejected, which has
# happened in a slow guest.
pair() {
    local attempts=3 status
    [ "$1" != "$ours" ] || attempts=1
    until attempt "$@"; do
        status=$?
        [ $((attempts -= 1)) -gt 0 ] || fail "$*, port $port: status $status"
        echo "$*, port $port: status $status: once more" >&2
    done
}

attempt() { # SERVER... -- CLIENT...
    local server=() client pid status=0
    while [ "$1" != -- ]; do server+=("$1"); shift; done
    shift
    port=$((port + 1))
    server=("${server[@]/#PORT/$port}") client=("${@/#PORT/$port}")
    timeout -k 5 250 $server_cpu "${server[@]}" >"$logs/server" 2>&1 </dev/null &
    pid=$!
    tests/vm/listens.sh $port $pid || fail "${server[*]} does not listen"
    timeout -k 5 240 $client_cpu "${client[@]}" >"$logs/client" 2>"$logs/client.err" </dev/null || status=$?
    [ $status = 0 ] || cat "$logs/client.err" >>"$logs/client"
    if [ "${server[0]}" = "$ours" ] || [ $status != 0 ]; then kill $pid; fi
    wait $pid
    return $status
}

# note WHAT WHOSE COMMAND...: keeps the number that the command finds in the client's output, or fails.
note() {
    local number
    number=$("${@:3}" "$logs/client")
    [[ $number =~ ^[0-9]+(\.[0-9]+)?$ ]] || fail "no figure of $2 for $device $1:"
    printf '%s\t%s\t%s\n' "$device $1" "$2" "$number" | tee -a "$logs/figures" >&2
}

pingpong() { # CLIENT-FLAG...
    pair "$ours" server -d "$device" -p PORT -- "$ours" client "$address" -d "$device" -p PORT --json - "$@"
}

# perftest prints microseconds in the fifth column of its only line of numbers, t_typical; the rate in the fourth and
# fifth.
column() { awk -v column="$1" -v size="$2" '$1 == size && NF >= 5 { print $column; exit }' "$3"; }
json() { sed -n "s/^ *\"$1\": \([0-9.]*\),*\$/\1/p" "$2"; }

latency() { # send|write|read event|spin
    local events=() what="2 B $1, half round trip, $2"
    [ "$2" = spin ] || events=(-e)
    [ "$1" != read ] || what="2 B read, $2"
    local theirs=("ib_$1_lat" -R -F -d "$device" -s 2 -n 1000 -p PORT "${events[@]}")
    pair "${theirs[@]}" -- "${theirs[@]}" "$address"
    note "$what" perftest column 5 2
    pingpong --op "$1" -s 2 -n 1000 --wait "$2"
    note "$what" ours json p50
}

rate() { # send|write LABEL BYTES MESSAGES
    local theirs=("ib_$1_bw" -R -F -d "$device" -s "$3" -n "$4" -p PORT)
    pair "${theirs[@]}" -- "${theirs[@]}" "$address"
    # In MiB/s, with two decimal places, or in millions per second, with six: the more precise one.
    note "$2 $1, one way" perftest awk -v size="$3" '$1 == size && NF >= 5 {
        print (size < 4096 ? $5 * 1e6 : $4 * 1048576 / size); exit }'
    if [ "$1" = send ]; then
        # A block in one direction, a block in the other; the last column is microseconds per message.
        theirs=(rstream -p PORT -S "$3" -C 100 -I 3)
        pair "${theirs[@]}" -b "$address" -- "${theirs[@]}" -s "$address"
        note "$2 $1, one way" rstream awk '$1 == "custom" && NF == 8 { print 1e6 / $8 }'
    fi
    pingpong --op "$1" --mode throughput --wait spin -s "$3" -n "$4"
    note "$2 $1, one way" ours json messages_per_second
}

is_part() { [ "$part" = all ] || [ "$part" = "$1" ]; }

for ((round = 0; round < rounds; round++)); do
    for kind in ${kinds^^}; do
        device=RDMA_${kind}_DEV address=RDMA_${kind}_ADDR
        device=${!device} address=${!address}
        if is_part latency; then latency send event; latency send spin; fi
        if is_part rate; then rate send '64 B' 64 10000; rate send '64 KiB' 65536 500; fi
        if is_part ops; then
            # A write raises no event: ib_write_lat has no events either.
            latency write spin; latency read event; latency read spin
            rate write '64 B' 64 10000; rate write '64 KiB' 65536 500
        fi
    done
done

echo "medians of $rounds rounds, of their ratios too"
awk -F '\t' -v check="$check" '
    function median(list, values, count, i, j, swap) {
        count = split(list, values, " ")
        for (i = 1; i <= count; i++) for (j = i + 1; j <= count; j++)
            if (values[j] + 0 < values[i] + 0) { swap = values[i]; values[i] = values[j]; values[j] = swap }
        return count % 2 ? values[(count + 1) / 2] : (values[count / 2] + values[count / 2 + 1]) / 2
    }
    function ratio(what, other, own, his, count, i, list) {
        count = split(all[what, "ours"], own, " "); split(all[what, other], his, " ")
        for (i = 1; i <= count; i++) list = list " " own[i] / his[i]
        return median(list)
    }
    function row(what, other, target, unit, least, r, met) {
        r = ratio(what, other); met = least ? r >= target : r <= target; missed += !met
        printf "%-36s %-9s %10.1f %10.1f %-5s %6.2f  %s %s  %s\n", what, other, median(all[what, other]),
            median(all[what, "ours"]), unit, r, least ? ">=" : "<=", target, met ? "ok" : "MISSED"
    }
    !($1 in seen) { seen[$1]; order[++n] = $1 }
    { all[$1, $2] = all[$1, $2] " " $3 }
    END {
        printf "%-36s %-9s %10s %10s %-5s %6s  target\n", "", "against", "theirs", "ours", "", "ratio"
        for (i = 1; i <= n; i++) {
            if (order[i] !~ /one way/) { row(order[i], "perftest", 1.1, "us", 0); continue }
            row(order[i], "perftest", "1.0", "/s", 1)
            if (all[order[i], "rstream"] != "") row(order[i], "rstream", "1.0", "/s", 1)
        }
        exit check != "" && missed > 0
    }' "$logs/figures"
