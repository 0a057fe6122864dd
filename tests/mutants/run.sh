#!/bin/sh
# Tests the simulation: each patch here plants a bug, and the simulation has to find it.
#
# Usage: tests/mutants/run.sh [patch...]     (default: all)
# MUTANT_SEEDS=N sets how many worlds it gets per bug (default: 1000).
#
# Works on a copy of the tree, under the target directory. Fails when the simulation fails without a bug, when a bug
# survives, or when a patch does not apply any more.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "${CARGO_TARGET_DIR:-$root/target}/mutants"
work=$(cd "${CARGO_TARGET_DIR:-$root/target}/mutants" && pwd)
seeds=${MUTANT_SEEDS:-1000}
tree=$work/tree
log=$work/log

cd "$root"
rm -rf "$tree"
mkdir -p "$tree"
git ls-files --cached --others --exclude-standard | while IFS= read -r file; do
    if [ -f "$file" ]; then
        mkdir -p "$tree/$(dirname "$file")"
        cp "$file" "$tree/$file"
    fi
done

cd "$tree"
export CARGO_TARGET_DIR="$work/target"
# The copy is no part of the repository around it.
export GIT_CEILING_DIRECTORIES="$work"

# simulate NAME: 0 when every promise was kept; the output is in the log.
simulate() {
    if ! cargo test --quiet -p rdma-reactor-tests --test simulation --no-run >"$log" 2>&1; then
        cat "$log"
        echo "$1: does not build"
        exit 1
    fi
    SIM_SEEDS=$seeds timeout 900 cargo test --quiet -p rdma-reactor-tests --test simulation every_promise >"$log" 2>&1
}

if ! simulate "without a bug"; then
    tail -n 20 "$log"
    echo "the simulation fails without a bug: fix that first"
    exit 1
fi
echo "without a bug: $seeds worlds pass"

[ $# -gt 0 ] || set -- "$root"/tests/mutants/*.patch
failed=0
for patch in "$@"; do
    name=$(basename "$patch" .patch)
    if ! git apply "$patch"; then
        echo "$name: does not apply"
        failed=1
        continue
    fi
    if simulate "$name"; then
        echo "$name: SURVIVED $seeds worlds"
        failed=1
    else
        world=$(sed -n 's/^world \([0-9]*\) of .*/\1/p' "$log" | head -n 1)
        seed=$(sed -n 's/.*SIM_SEED=\(0x[0-9a-f]*\).*/\1/p' "$log" | head -n 1)
        what=$(sed -n "s/^seed $seed: //p" "$log" | head -n 1 | cut -c 1-100)
        echo "$name: found in world ${world:-?}, seed ${seed:-?}: ${what:-no answer in 900 s}"
    fi
    git apply -R "$patch"
done
exit $failed
