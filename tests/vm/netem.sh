#!/usr/bin/env bash
# Parts of the conformance suite while the wire loses, delays, doubles, reorders and damages packets (netem): siw and the embedded
# provider on lo, rxe between two devices (wire.sh). With arguments only the tests of those names run. Builds on the host, runs in
# the guest, always, for it changes routes.
set -uo pipefail
cd "$(dirname "$0")/../.."

if [ "${1:-}" != --inside ]; then
    binaries=$(tests/vm/build.sh rdma conformance) || exit 1
    # shellcheck disable=SC2086
    VM_FORCE=1 VM_TIMEOUT=${VM_TIMEOUT:-900} exec tests/vm/run.sh bash tests/vm/netem.sh --inside $binaries "$@"
fi

devices=$2 embedded=$3 failed=0
shift 3
names=("$@")
[ $# -gt 0 ] || names=(sends_complete_once_and_in_order many_at_once_both_ways every_border_arrives reads_and_writes_of_every_size
    odd_pieces_arrive what_has_no_room accepted_sends_arrive both_close_at_once)
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
modprobe sch_netem && tests/vm/wire.sh || exit 1
# The listeners of rxe are on the far device.
export RDMA_RXE_ADDR=10.77.3.1

# suite KIND LINK BINARY WORD...: the tests of a kind while netem does what the words say to the packets that leave by the links.
suite() {
    local kind=$1 links=$2 binary=$3 link result=ok start=$SECONDS packets=0 drops=0 counts
    shift 3
    for link in $links; do tc qdisc replace dev "$link" root netem "$@" || exit 1; done
    timeout -k 5 200 "$binary" --test-threads=1 "${names[@]/#/$kind::}" >"$log" 2>&1 || result=FAILED
    for link in $links; do
        read -r -a counts < <(tc -s qdisc show dev "$link" | sed -nE 's/.* ([0-9]+) pkt \(dropped ([0-9]+),.*/\1 \2/p')
        packets=$((packets + counts[0])) drops=$((drops + counts[1]))
        tc qdisc del dev "$link" root
    done
    # A disturbance that has met nothing shows nothing.
    grep -q 'test result: ok. [1-9]' "$log" && [ $packets -gt 100 ] && [[ $* != loss* || $drops -gt 0 ]] || result=FAILED
    printf '%-6s %-6s %-24s %4d s, %6d packets, %4d lost\n' $result "$kind" "$*" $((SECONDS - start)) $packets $drops
    [ $result = ok ] || { failed=1; tail -n 60 "$log" | sed 's/^/    /'; }
}

tcp=('loss 1%' 'delay 2ms 1ms' 'delay 1ms reorder 25%' 'duplicate 5%' 'corrupt 0.5%')
# rxe sends everything anew from a packet that is missing or late, and waits for seconds when it was the last one.
rxe=('loss 0.1%' 'delay 2ms' 'delay 1ms reorder 99.9%' 'duplicate 5%' 'corrupt 0.1%')
# shellcheck disable=SC2086
{
    for disturbance in "${tcp[@]}"; do suite iwarp lo "$embedded" $disturbance; done
    for disturbance in "${tcp[@]}"; do suite siw lo "$devices" $disturbance; done
    for disturbance in "${rxe[@]}"; do suite rxe 'v0 v1' "$devices" $disturbance; done
}
exit $failed
