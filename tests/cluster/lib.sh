# The common parts of the scripts of this folder: the program, a folder for results, a Python environment, and the checks of a matrix.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
mesh=${CARGO_TARGET_DIR:-$PWD/target}/debug/rdma-mesh
out=${CARGO_TARGET_DIR:-$PWD/target}/cluster
mkdir -p "$out"
# The validator of Kubernetes' manifests, which setup.sh installs.
venv=${XDG_CACHE_HOME:-$HOME/.cache}/rdma-reactor/cluster/venv
# Little work, because all ranks share this machine: figures depend on other programs, and no factor is a fault.
quick=(--provider iwarp -n 100 --bandwidth 0.05 --all-to-all 0.3 --at-once 1 --tolerance 1e6 --patience 300)

# whole NAME RANKS [HOST...]: checks that the results in $out/NAME.json are a whole matrix, of ranks on these hosts.
whole() {
    local name=$1 ranks=$2 hosts
    shift 2
    hosts=$(printf '%s\n' "$@" | jq -R . | jq -cs 'map(select(. != "")) | sort')
    jq -e --argjson n "$ranks" --argjson hosts "$hosts" '
        .good
        and (.ranks | length) == $n
        and (.pairs | length) == $n * ($n - 1) / 2
        and all(.pairs[]; .broken == null and .latency.p50_us > 0 and .a_to_b.gbit > 0 and .b_to_a.gbit > 0
            and .a_to_b.messages > 0 and .b_to_a.messages > 0)
        and ($hosts == [] or ([.ranks[].host] | unique) == $hosts)' "$out/$name.json" >/dev/null
}

# shown NAME COMMAND...: runs a check, and prints its result in one line; its output is shown if it failed.
failed=0
shown() {
    local name=$1 start=$SECONDS
    shift
    if "$@" >"$out/log" 2>&1; then
        printf 'ok     %-50s %3d s\n' "$name" $((SECONDS - start))
    else
        printf 'FAILED %-50s %3d s\n' "$name" $((SECONDS - start))
        sed 's/^/    /' "$out/log"
        failed=1
    fi
}
