#!/usr/bin/env bash
# The whole conformance suite on secured connections over siw and rxe, in the guest.
set -euo pipefail
cd "$(dirname "$0")/../.."
binary=$(tests/vm/build.sh rdma_secured)
VM_TIMEOUT=1500 exec tests/vm/run.sh "ulimit -n 65536; timeout 1200 $binary --test-threads=1"
