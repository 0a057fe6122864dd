#!/usr/bin/env bash
# rdma-mesh in the guest: four ranks on siw and on rxe, and ranks in network namespaces, of which one link is slow, one is
# cut, and one is cut in the middle. Builds on the host, runs in the guest.
# MESH_RANKS=8 has that many ranks in namespaces; docs/mesh.svg was made with it (target/vm/mesh/links.svg).
set -uo pipefail
cd "$(dirname "$0")/../.."

if [ "${1:-}" != --inside ]; then
    program=$(tests/vm/build.sh rdma-mesh) || exit 1
    VM_PASS=MESH_RANKS VM_TIMEOUT=${VM_TIMEOUT:-400} exec tests/vm/run.sh bash tests/vm/mesh.sh --inside "$program"
fi

mesh=$2 failed=0
count=${MESH_RANKS:-5}
out=$VM_RWDIR/mesh
mkdir -p "$out"

check() { # NAME COMMAND...
    local name=$1 result=ok
    shift
    "$@" >"$out/log" 2>&1 || { result=FAILED failed=1; }
    printf '%-6s %s\n' $result "$name"
    [ $result = ok ] || tail -n 40 "$out/log" | sed 's/^/    /'
}

# ranks NAME COUNT WORD...: runs ranks by hand, with {} for the number; the status is that of rank 0.
ranks() {
    local name=$1 count=$2 rank others=() line
    shift 2
    rm -f "$out/$name".*
    for ((rank = count - 1; rank > 0; rank--)); do
        line=("${@//\{\}/$rank}")
        timeout -k 5 150 "${line[@]}" --rank $rank >/dev/null 2>&1 &
        others+=($!)
    done
    line=("${@//\{\}/0}")
    timeout -k 5 150 "${line[@]}" --rank 0 --json "$out/$name.json" --html "$out/$name.html" --svg "$out/$name.svg" >"$out/$name.table" 2>"$out/$name.progress"
    local status=$?
    cat "$out/$name.progress" "$out/$name.table"
    wait "${others[@]}"
    return $status
}

# The figures of emulated machines depend on other programs.
quick=(-n 50 --bandwidth 0.3 --all-to-all 0.5 --at-once 1 --silence 30 --tolerance 1e6)

on_device() { # DEVICE ADDRESS
    ranks "$1" 4 "$mesh" -d "$1" --count 4 --root "$2" --label "$1" "${quick[@]}" || return
    jq -e --arg device "$1" '.good and (.pairs | length) == 6 and all(.ranks[]; .provider == "verbs" and .device == $device)
        and all(.pairs[]; .latency.p50_us > 0 and .a_to_b.gbit > 0 and .b_to_a.gbit > 0 and .a_to_b.messages > 0)' "$out/$1.json"
}

# Namespaces on a bridge, one per rank: rank 0 at 10.88.0.1, and so on.
namespaces() {
    local rank
    for module in bridge sch_netem sch_prio cls_u32; do modprobe "$module" || return; done
    ip link add mesh type bridge && ip link set mesh up || return
    for ((rank = 0; rank < count; rank++)); do
        ip netns add "r$rank" && ip link add "m$rank" type veth peer name eth0 netns "r$rank" || return
        ip link set "m$rank" master mesh up && ip -n "r$rank" addr add "10.88.0.$((rank + 1))/24" dev eth0 || return
        ip -n "r$rank" link set lo up && ip -n "r$rank" link set eth0 up || return
        # Three bands as usual, and one that packets to some addresses take.
        tc -n "r$rank" qdisc add dev eth0 root handle 1: prio bands 4 priomap 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 || return
    done
}

# netem FROM TO WORD...: sets netem for packets from one rank to another.
netem() {
    local from=$1 to=$2
    shift 2
    tc -n "r$from" qdisc add dev eth0 parent 1:4 handle 40: netem "$@" &&
        tc -n "r$from" filter add dev eth0 parent 1: protocol ip u32 match ip dst "10.88.0.$((to + 1))/32" flowid 1:4
}

in_namespaces=(ip netns exec 'r{}' "$mesh" --provider iwarp --root 10.88.0.1 --label 'host-{}' -n 100
    --bandwidth 0.2 --all-to-all 1 --at-once 1 --silence 4 --patience 8 --wait event --tolerance 6)

slow_and_cut() {
    netem 1 2 delay 1200ms && netem 3 4 loss 100% || return
    # The round-trip time of the slow link is not silence.
    ranks links "$count" "${in_namespaces[@]}" --count "$count" --silence 15 && return 1
    # Both are named with ranks, hosts and figures; nothing else is. On a busy machine all latencies are long, and the
    # slow link stands out by its bandwidth.
    grep -E '^ +3 host-3 +4 host-4 .* no connection' "$out/links.table" &&
        grep -E '^ +1 host-1 +2 host-2 +[^ ]+ +[0-9.]+ .*(latency|bandwidth from . to .) is [0-9.]+ times worse than its row and column' "$out/links.table" &&
        jq -e '[.pairs[] | select(.broken != null) | [.a, .b]] == [[3, 4]]
            and (.pairs[] | select(.a == 1 and .b == 2) | .latency.p50_us > 500000)
            and ([.odd_ways[] | [.from, .to] | sort] | unique) == [[1, 2]]
            and .odd_ranks == [] and all(.ranks[]; .gone == null)' "$out/links.json" &&
        grep -q 'no connection' "$out/links.html" && grep -q 'times worse' "$out/links.html"
}

# A link that is cut during the measurement is noticed, and all others have all figures.
cut_in_the_middle() {
    tc -n r1 qdisc del dev eth0 parent 1:4 2>/dev/null
    tc -n r3 qdisc del dev eth0 parent 1:4 2>/dev/null
    rm -f "$out"/middle.*
    (
        until grep -q 'bandwidth up' "$out/middle.progress" 2>/dev/null; do sleep 0.1; done
        netem 4 2 loss 100%
    ) &
    ranks middle "$count" "${in_namespaces[@]}" --count "$count" --tolerance 1e6 --bandwidth 0.5 && return 1
    jq -e '[.pairs[] | select(.broken != null) | [.a, .b]] == [[2, 4]]
        and all(.pairs[]; .latency.p50_us > 0)
        and all(.pairs[] | select(.broken == null); .b_to_a.gbit > 0 and .a_to_b.messages > 0)
        and all(.ranks[]; .gone == null)' "$out/middle.json"
}

check 'siw: four ranks' on_device "$RDMA_SIW_DEV" "$RDMA_SIW_ADDR"
check 'rxe: four ranks' on_device "$RDMA_RXE_DEV" "$RDMA_RXE_ADDR"
check "$count network namespaces" namespaces
check 'a slow link and a cut link are named, and nothing else' slow_and_cut
check 'a link that is cut in the middle is named' cut_in_the_middle
ip -all netns del
ip link del mesh
exit $failed
