#!/usr/bin/env bash
# Builds the device tests on the host and runs them in the guest, where the devices are.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo=${CARGO:-cargo}

# The test binaries, one path a line.
build() { "$cargo" test "$@" --features verbs --no-run --message-format=json | sed -n '/"kind":\["test"\]/s/.*"executable":"\([^"]*\)".*/\1/p'; }
binaries=$(build -p rdma-transport --test verbs)
binaries+=" $(build -p rdma-reactor-tests --test rdma --test rdma_scale)"
test -n "$binaries" || { echo "no test binary was built" >&2; exit 1; }

script=''
for binary in $binaries; do
    # One test at a time: the emulated machine is slow, and the tests have time limits.
    script+="timeout 600 $binary --test-threads=1 $* && "
done
VM_TIMEOUT=${VM_TIMEOUT:-1200} exec tests/vm/run.sh "ulimit -n 65536; ${script}true"
