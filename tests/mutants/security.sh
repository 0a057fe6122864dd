#!/usr/bin/env bash
# Plants a defect in the security of connections, and requires that the unit tests of `security` or the middleman's test find it.
#
# Usage: tests/mutants/security.sh NAME
set -euo pipefail
. "$(dirname "$0")/plant.sh"
export FLIP_STEP=101
by=$(found -p rdma-reactor --features tls,psk --lib security::)
if [ -z "$by" ]; then
    by=$(found -p rdma-reactor-tests --no-default-features --test security)
fi
report "$by"
