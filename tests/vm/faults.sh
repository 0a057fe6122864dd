#!/usr/bin/env bash
# The verbs provider alone; faults of peers, links and devices; 10,000 connections one after another: on the guest's
# devices. Builds on the host, runs in the guest, always, for it takes devices away. RDMA_CYCLES is another number than
# 10,000.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo=${CARGO:-cargo}

# The test binaries, one path a line; the program rdma-peer is built with them, and is not one.
binaries=$("$cargo" test -p rdma-transport -p rdma-reactor-tests \
    --features rdma-transport/verbs,rdma-reactor-tests/verbs --test verbs --test rdma_faults --test rdma_churn \
    --no-run --message-format=json | sed -n '/"kind":\["test"\]/s/.*"executable":"\([^"]*\)".*/\1/p')
test -n "$binaries" || { echo "no test binary was built" >&2; exit 1; }

script=''
for binary in $binaries; do
    # One test at a time: they take the devices away, and count what is open on them.
    script+="timeout 600 $binary --test-threads=1 $* && "
done
VM_FORCE=1 VM_TIMEOUT=${VM_TIMEOUT:-1200} exec tests/vm/run.sh "ulimit -n 65536; ${script}true"
