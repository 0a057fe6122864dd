#!/usr/bin/env bash
# Builds the device tests on the host and runs them in the guest, where the devices are. With arguments only the tests of
# those names run. Secured connections do not depend on the binding, so they are tested with the project's own.
set -euo pipefail
cd "$(dirname "$0")/../.."
secured=rdma_secured
[ -z "${BINDING:-}" ] || secured=
# shellcheck disable=SC2086 # no name at all is none
binaries=$(tests/vm/build.sh verbs rdma rdma_queues rdma_scale $secured)

script=''
for binary in $binaries; do
    # One test at a time: the emulated machine is slow, and the tests have time limits.
    script+="timeout 600 $binary --test-threads=1 $* && "
done
VM_TIMEOUT=${VM_TIMEOUT:-1200} exec tests/vm/run.sh "ulimit -n 65536; ${script}true"
