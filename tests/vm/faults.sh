#!/usr/bin/env bash
# Faults of peers, links and devices, the provider of connections when devices are removed and
# added, and the packets between two devices. With RDMA_CYCLES=10000 (at least 4,000) also this
# number of sequential connections on each. Builds on the host, runs in the guest, always, because
# it removes devices and changes routes. `SUITES` names the test programs, by default all of them.
set -euo pipefail
cd "$(dirname "$0")/../.."
all="rdma_faults rdma_witnessed rdma_auto rdma_without_siw rdma_hidden ${RDMA_CYCLES:+rdma_churn} rdma_wire"
# shellcheck disable=SC2086
binaries=$(tests/vm/build.sh ${SUITES:-$all})

script='' shuffled=${SHUFFLE:+env RUSTC_BOOTSTRAP=1 RUST_TEST_SHUFFLE_SEED=$SHUFFLE}
for binary in $binaries; do
    # The settings stay for later steps.
    [[ $binary != */rdma_wire-* ]] || script+="tests/vm/wire.sh && "
    # One test at a time: they remove the devices, and count the open objects on them.
    script+="$shuffled timeout 3000 $binary --test-threads=1 $* && "
done
VM_FORCE=1 VM_TIMEOUT=${VM_TIMEOUT:-5400} exec tests/vm/run.sh "ulimit -n 65536; ${script}true"
