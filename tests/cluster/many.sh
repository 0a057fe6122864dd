#!/usr/bin/env bash
# Many ranks on one machine, by hand, on the embedded provider: 200, or as many as the first argument says. It prints the
# summary of rank 0: the time until all were connected, and the memory of the largest rank.
. "$(dirname "$0")/lib.sh"
ranks=${1:-200}
mesh=${CARGO_TARGET_DIR:-$PWD/target}/${PROFILE:-debug}/rdma-mesh
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
# A short measurement per pair; thousands of pairs have their turn.
few=(--provider iwarp -n 5 --bandwidth 0.01 --all-to-all 0.2 --tolerance 1e6 --patience 120 --silence 60 --at-once 8)

many() {
    local rank hosts status=0 others=()
    hosts=$(printf ',127.0.0.1%.0s' $(seq "$ranks"))
    rm -f "$out"/many.*
    for ((rank = 1; rank < ranks; rank++)); do
        timeout 1500 "$mesh" --hosts "${hosts:1}" --rank $rank -p "$port" "${few[@]}" &
        others+=($!)
    done
    timeout 1500 "$mesh" --hosts "${hosts:1}" --rank 0 -p "$port" "${few[@]}" --json "$out/many.json" --html "$out/many.html" \
        --svg "$out/many.svg" >"$out/many.table" || status=1
    for rank in "${others[@]}"; do wait "$rank" || status=1; done
    [ $status = 0 ] && whole many "$ranks"
}

shown "$ranks ranks on one machine" many
tail -n 1 "$out/many.table"
jq -r '[.ranks[].memory_kib] | sort | "memory per rank: median \(.[length / 2 | floor]) KiB, largest \(.[-1]) KiB"' "$out/many.json"
exit $failed
