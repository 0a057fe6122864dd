#!/usr/bin/env bash
# The conformance suite with both bindings, each in a guest of its own at the same time: the declarations of the project, and
# the crate rdma-sys, which differs in those only (`make test-layout` compares them) and so runs the main part alone. The second
# one's output follows when both have ended.
set -uo pipefail
cd "$(dirname "$0")/../.."
log=${CARGO_TARGET_DIR:-target}/vm/rdma-sys.log
mkdir -p "${log%/*}"
BINDING=rdma-sys SUITES='verbs rdma' tests/vm/conformance.sh >"$log" 2>&1 &
other=$!
trap 'kill $other 2>/dev/null' EXIT
tests/vm/conformance.sh
own=$?
wait $other
linked=$?
trap - EXIT
echo "with rdma-sys:"
cat "$log"
[ $own = 0 ] && [ $linked = 0 ]
