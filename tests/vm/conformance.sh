#!/usr/bin/env bash
# Builds the device tests on the host and runs them in the guest. With arguments only the tests of those names run.
# `SUITES` names the test programs, by default all of them.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck disable=SC2086
binaries=$(tests/vm/build.sh ${SUITES:-verbs rdma_contract rdma rdma_queues rdma_scale rdma_secured})

script='' shuffled=${SHUFFLE:+env RUSTC_BOOTSTRAP=1 RUST_TEST_SHUFFLE_SEED=$SHUFFLE}
for binary in $binaries; do
    names=$*
    # A part of the suite on secured connections is enough each time; tests/vm/secured.sh runs all of it.
    [[ $binary != */rdma_secured-* || -n $names ]] || names=psk
    # One test at a time: the emulated machine is slow, and the tests have time limits.
    script+="$shuffled timeout 3000 $binary --test-threads=1 $names && "
done
VM_TIMEOUT=${VM_TIMEOUT:-5400} exec tests/vm/run.sh "ulimit -n 65536; ${script}true"
