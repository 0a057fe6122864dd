#!/usr/bin/env bash
# Plants a defect in the rights of a peer in shared memory, and requires that a test of the transport finds it.
#
# Usage: tests/mutants/shm.sh NAME
set -euo pipefail
. "$(dirname "$0")/plant.sh"
report "$(found -p rdma-transport --lib shm)"
