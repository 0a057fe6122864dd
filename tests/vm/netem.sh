#!/usr/bin/env bash
# Parts of the conformance suite while the wire loses, delays, duplicates, reorders and damages packets (netem): siw and the embedded
# provider on lo, rxe between two devices (wire.sh). Then rdma-doctor and rdma-mesh, which must name the hardware counters of rxe that
# moved, and datagrams over a link that is slower than their sender. With arguments only the tests of those names run. Builds on the host,
# runs in the guest, always, because it changes routes.
set -uo pipefail
cd "$(dirname "$0")/../.."

if [ "${1:-}" != --inside ]; then
    binaries=$(tests/vm/build.sh rdma conformance rdma-doctor raw-datagram) || exit 1
    # shellcheck disable=SC2086
    VM_FORCE=1 VM_TIMEOUT=${VM_TIMEOUT:-900} exec tests/vm/run.sh bash tests/vm/netem.sh --inside $binaries "$@"
fi

devices=$2 embedded=$3 bin=${4%/*} failed=0
shift 5
names=("$@")
[ $# -gt 0 ] || names=(sends_complete_once_and_in_order many_at_once_both_ways every_border_arrives reads_and_writes_of_every_size
    odd_pieces_arrive what_has_no_room accepted_sends_arrive both_close_at_once)
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
modprobe sch_netem && tests/vm/wire.sh || exit 1
# The listeners of rxe are on the far device.
export RDMA_RXE_ADDR=10.77.3.1

# suite KIND LINK BINARY WORD...: runs the tests of a kind while netem treats the packets that leave by the links as the words say.
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
    # A disturbance without packets tests nothing.
    grep -q 'test result: ok. [1-9]' "$log" && [ $packets -gt 100 ] && [[ $* != loss* || $drops -gt 0 ]] || result=FAILED
    printf '%-6s %-6s %-24s %4d s, %6d packets, %4d lost\n' $result "$kind" "$*" $((SECONDS - start)) $packets $drops
    [ $result = ok ] || { failed=1; tail -n 60 "$log" | sed 's/^/    /'; }
}

# counted NAME COMMAND...: fails if the command does.
counted() {
    local name=$1 result=ok start=$SECONDS
    shift
    "$@" >"$log" 2>&1 || result=FAILED failed=1
    printf '%-6s %s %4d s\n' $result "$name" $((SECONDS - start))
    grep -E ' counters  |counted:' "$log" | sed 's/^/    /'
    [ $result = ok ] || tail -n 40 "$log" | sed 's/^/    /'
}

# The output of rdma-doctor about rxe0 during traffic: it must name the retransmissions, and both sides of the traffic.
watched() {
    local server client status=1 listens said
    listens=$(mktemp) said=$(mktemp) || return
    "$bin/rdma-pingpong" server --bind 10.77.3.1 -p 7700 --provider verbs >"$listens" & server=$!
    until grep -q listening "$listens"; do kill -0 $server || return; sleep 0.1; done
    "$bin/rdma-pingpong" client 10.77.3.1 -p 7700 --provider verbs -s 64 -D 300 & client=$!
    # A busy machine sends few messages, of which one in fifty is lost in one direction or the other.
    for _ in {1..12}; do
        "$bin/rdma-doctor" --watch 10 >"$said"
        grep -q '^note .* rxe0 in 10 s: sent again, .*completer_retry_err +' "$said" && grep -q '^ok .* rxe0 in 10 s: .*sent_pkts +' "$said" &&
            status=0 && break
    done
    cat "$said"
    kill $client $server
    wait $client $server
    return $status
}

# rdma-mesh between the two devices.
meshed() {
    local out
    out=$(mktemp -d) || return
    "$bin/rdma-mesh" -d rxe1 --count 2 --root 10.77.2.1 --rank 1 --bind 10.77.3.1 --silence 60 --patience 100 &
    "$bin/rdma-mesh" -d rxe0 --count 2 --root 10.77.2.1 --rank 0 --bind 10.77.2.1 --silence 60 --patience 100 -n 300 --bandwidth 1 \
        --all-to-all 5 --tolerance 1e6 --json "$out/json"
    wait
    jq -c '.ranks[] | [.device, .hw_counters]' "$out/json"
    jq -e '[.ranks[].hw_counters | .sent_pkts > 0] == [true, true] and ([.ranks[].hw_counters | (.completer_retry_err // 0)
        + (.duplicate_request // 0) + (.out_of_seq_request // 0) + (.rcvd_seq_err // 0)] | add) > 0' "$out/json"
}

# A thousand datagrams of the embedded provider from another network namespace, and their echoes. The sender's socket is full most of the
# time, so its datagrams wait until it is writable.
slow_datagrams() {
    local server status
    ip netns add slow && ip link add s0 type veth peer name s1 netns slow && ip addr add 10.77.5.1/24 dev s0 && ip link set s0 up &&
        ip -n slow addr add 10.77.5.2/24 dev s1 && ip -n slow link set s1 up &&
        ip netns exec slow tc qdisc add dev s1 root tbf rate 4mbit burst 3000 limit 10000000 || return
    "$bin/raw-datagram" server --provider iwarp -c 1 -n 1000 -s 1000 10.77.5.1 & server=$!
    until ss -Hln "sport = :7174" | grep -q .; do sleep 0.1; kill -0 $server || return; done
    ip netns exec slow timeout -k 5 120 "$bin/raw-datagram" client --bind 10.77.5.2 --provider iwarp -n 1000 -s 1000 --verify --timeout 100 10.77.5.1
    status=$?
    kill $server
    ip netns del slow
    return $status
}

tcp=('loss 1%' 'delay 2ms 1ms' 'delay 1ms reorder 25%' 'duplicate 5%' 'corrupt 0.5%')
# rxe retransmits everything from a missing or late packet on, and waits for seconds if it was the last one.
rxe=('loss 0.1%' 'delay 2ms' 'delay 1ms reorder 99.9%' 'duplicate 5%' 'corrupt 0.1%')
# shellcheck disable=SC2086
{
    for disturbance in "${tcp[@]}"; do suite iwarp lo "$embedded" $disturbance; done
    for disturbance in "${tcp[@]}"; do suite siw lo "$devices" $disturbance; done
    for disturbance in "${rxe[@]}"; do suite rxe 'v0 v1' "$devices" $disturbance; done
}
for link in v0 v1; do tc qdisc replace dev $link root netem loss 1%; done
counted 'loss 1%, rdma-doctor --watch names what moved' watched
counted 'loss 1%, rdma-mesh names what moved' meshed
for link in v0 v1; do tc qdisc del dev $link root; done
counted '4 Mbit/s, datagrams wait for a writable socket' slow_datagrams
exit $failed
