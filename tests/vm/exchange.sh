#!/usr/bin/env bash
# Connecting by exchange: the contract, a part of the conformance suite, and what may go wrong, on rxe where rdma_cm is not there. Builds on
# the host, runs in the guest, always, for it takes rdma_cm away and changes routes.
set -euo pipefail
cd "$(dirname "$0")/../.."
binaries=$(tests/vm/build.sh rdma_exchange rdma_exchange_wire)

# librdmacm has the kernel load the module again when it looks for it.
away="echo 'install rdma_ucm /bin/false' >/etc/modprobe.d/without-rdma-cm.conf && modprobe -r rdma_ucm && test ! -e /dev/infiniband/rdma_cm"

script='' shuffled=${SHUFFLE:+env RUSTC_BOOTSTRAP=1 RUST_TEST_SHUFFLE_SEED=$SHUFFLE}
for binary in $binaries; do
    # Nothing is left of the second device afterwards.
    [[ $binary != */rdma_exchange_wire-* ]] || script+="tests/vm/exchange_wire.sh && "
    # One test at a time: some count what is open on the device.
    script+="$shuffled timeout 1000 $binary --test-threads=1 $* && "
done
VM_FORCE=1 VM_TIMEOUT=${VM_TIMEOUT:-3600} exec tests/vm/run.sh "$away && ulimit -n 65536 && ${script}true"
