#!/usr/bin/env bash
# The instructions of user mode that a round trip of 2 B with events costs a client, perftest's and ours, on siw and on rxe, counted by
# callgrind. Instructions that two runs of a program have in common do not count. Of ours the turns count, with the callbacks: the table and
# the histogram at the end depend on the latencies. Builds on the host, runs in the guest.
#
#   tests/vm/instructions.sh [siw|rxe]     both by default
set -uo pipefail
cd "$(dirname "$0")/../.."

# --- on the host -------------------------------------------------------------------------------------------------

if [ "${1:-}" != --inside ]; then
    case ${1:-siw} in
        siw | rxe) ;;
        *) echo "usage: instructions.sh [siw|rxe]" >&2; exit 2 ;;
    esac
    program=$(tests/vm/build.sh --release rdma-pingpong) || exit 1
    VM_TIMEOUT=${VM_TIMEOUT:-600} exec tests/vm/run.sh bash tests/vm/instructions.sh --inside "$program" "${1:-siw rxe}"
fi

# --- in the guest ------------------------------------------------------------------------------------------------

work=$(mktemp -d) || exit 1
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
# Valgrind would read hundreds of megabytes of debugging information, and only sums count here.
strip --strip-debug -o "$work/rdma-pingpong" "$2" || exit 1
ours=$work/rdma-pingpong few=200 many=1200 port=22000 only=

# count SERVER... -- CLIENT...: instructions of the client; PORT is the port.
count() {
    local server=() client pid
    while [ "$1" != -- ]; do server+=("$1"); shift; done
    shift
    server=("${server[@]/#PORT/$port}") client=("${@/#PORT/$port}")
    timeout -k 5 120 "${server[@]}" >"$work/server" 2>&1 </dev/null &
    pid=$!
    tests/vm/listens.sh $port $pid || { echo "${server[*]} does not listen" >&2; return 1; }
    timeout -k 5 120 valgrind --tool=callgrind --vgdb=no --callgrind-out-file=/dev/null $only "${client[@]}" \
        >"$work/client" 2>&1 </dev/null || { echo "${client[*]}: status $?" >&2; cat "$work/client" >&2; return 1; }
    kill $pid 2>/dev/null
    wait $pid
    sed -n 's/.*Collected : *\([0-9]*\)$/\1/p' "$work/client"
}

perftest() { # MESSAGES
    local program=(ib_send_lat -R -F -e -d "$device" -s 2 -n "$1" -p PORT)
    count "${program[@]}" -- "${program[@]}" "$address"
}

pingpong() { # MESSAGES
    only='--collect-atstart=no --toggle-collect=*turn_once*' count "$ours" server -d "$device" -p PORT -- \
        "$ours" client "$address" -d "$device" -p PORT -s 2 -n "$1" --warmup 10 --wait event
}

for kind in ${3^^}; do
    device=RDMA_${kind}_DEV address=RDMA_${kind}_ADDR
    device=${!device} address=${!address}
    for whose in perftest pingpong; do
        # A separate port for each: that of a connection which has just ended may not be free yet.
        port=$((port + 2))
        first=$($whose $few) && last=$(port=$((port + 1)) && $whose $many) || exit 1
        [[ $first =~ ^[0-9]+$ && $last =~ ^[0-9]+$ ]] || { echo "$device: $whose was not counted" >&2; exit 1; }
        eval "$whose=$(((last - first) / (many - few)))"
    done
    awk -v device="$device" -v theirs="$perftest" -v ours="$pingpong" 'BEGIN {
        printf "%-6s round trip of 2 B, events: perftest %d, rdma-pingpong %d instructions, ratio %.2f\n",
            device, theirs, ours, ours / theirs }'
done
