#!/usr/bin/env bash
# Plants a defect in the transfer of large payloads, and requires that their tests find it.
#
# Usage: tests/mutants/bulk.sh NAME
set -euo pipefail
. "$(dirname "$0")/plant.sh"
report "$(found -p rdma-transport --lib bulk)"
