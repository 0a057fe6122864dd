#!/usr/bin/env bash
# Runs the tests in guests, two guests at a time, the longest steps first. The output of a step follows when the step has ended. No step
# starts after one that has failed.
#
#   all.sh            the contract of the provider, a sample of the conformance suite, faults in
#                     traffic, and each program of others once: `make test-rdma`, some 3 minutes
#   all.sh --full     everything: `make test-rdma-full`, some 15 minutes. The conformance suite runs with both bindings: the
#                     declarations of the project, and the crate rdma-sys, which differs in those only (`make test-layout`
#                     compares them) and so runs a part of it
#   GUESTS=2          guests at a time; a machine with RDMA devices of its own runs one step at a time
set -uo pipefail
cd "$(dirname "$0")/../.."
case $* in '' | --full) ;; *) echo "usage: all.sh [--full]" >&2; exit 2 ;; esac
# Processes in the background do not receive an interrupt by themselves.
trap 'trap - TERM; kill 0' INT TERM HUP
own=${CARGO_TARGET_DIR:-target}/vm
mkdir -p "$own"
rm -f "$own/kernel-defects" "$own/failed-steps" "$own/ended-steps"
guests=${GUESTS:-2}
[ ! -e /dev/infiniband ] || guests=1

# One build for all steps: cargo runs one build at a time.
tests=(verbs rdma_contract rdma_faults rdma_exchange rdma_exchange_wire)
others=(rdma rdma_witnessed rdma_auto rdma_without_siw rdma_hidden rdma_wire rdma_queues rdma_scale rdma_secured rdma_churn interop_siw misbehaviour_siw)
[ "$*" = --full ] && tests+=("${others[@]}") || tests+=(rdma_sample)
tests/vm/build.sh "${tests[@]}" >/dev/null || exit 1

step() { # NAME COMMAND...: runs a step, then prints what it has said
    local log=$own/$1.log start=$SECONDS status
    "${@:2}" >"$log" 2>&1 </dev/null
    status=$?
    (
        flock 9
        cat "$log"
        echo "==== $1: $([ $status = 0 ] && echo ok || echo "FAILED, status $status"), $((SECONDS - start)) s"
        [ $status = 0 ] || echo "$1" >>"$own/failed-steps"
        echo "$1" >>"$own/ended-steps"
    ) 9>"$own/output.lock"
    return $status
}

# The result of a step is in the files that it writes: bash forgets the status of a job that has ended while it waits for `jobs`.
started=()
start() {
    while [ "$(jobs -rp | wc -l)" -ge "$guests" ]; do wait -n; done
    [ ! -s "$own/failed-steps" ] || return
    started+=("$1")
    step "$@" &
}
if [ "$*" = --full ]; then
    start conformance tests/vm/conformance.sh
    start rdma-sys env BINDING=rdma-sys SUITES='verbs rdma_contract rdma' tests/vm/conformance.sh
    start faults tests/vm/faults.sh
    start small tests/vm/small.sh
    start interop tests/vm/interop.sh
    start dissector tests/vm/dissector.sh
    start pingpong tests/vm/pingpong.sh
    start mesh tests/vm/mesh.sh
    start interop_siw tests/vm/interop_siw.sh
    start netem tests/vm/netem.sh
    start exchange tests/vm/exchange.sh
    start valkey tests/vm/valkey.sh
else
    start verbs env SUITES='verbs rdma_contract' tests/vm/conformance.sh siw:: rxe::
    start sample env SUITES=rdma_sample tests/vm/conformance.sh
    start faults env SUITES=rdma_faults tests/vm/faults.sh in_traffic
    start interop tests/vm/interop.sh --sample
    start exchange tests/vm/exchange.sh contract:: faults:: carries another_network exchanges_private_data
fi
wait
# A step that a signal has killed has written nothing.
failed=0
for name in "${started[@]}"; do
    grep -qxF "$name" "$own/ended-steps" 2>/dev/null && continue
    failed=1
    echo "==== $name: FAILED, killed before its end"
    echo "$name" >>"$own/failed-steps"
done

echo "steps repeated because the guest's kernel has a known defect: $(cat "$own/kernel-defects" 2>/dev/null | wc -l)"
[ ! -s "$own/kernel-defects" ] || sort "$own/kernel-defects" | uniq -c
# Once more, where the last lines of a long output show it.
[ ! -s "$own/failed-steps" ] || while read -r name; do
    echo "==== $name FAILED. Its last lines:"
    tail -n 60 "$own/$name.log"
done <"$own/failed-steps"
[ $failed = 0 ] && [ ! -s "$own/failed-steps" ]
