#!/usr/bin/env bash
# Plants a defect in the hot loop, and requires that its tests find it.
#
# Usage: tests/mutants/loop.sh NAME
set -euo pipefail
. "$(dirname "$0")/plant.sh"
report "$(found -p rdma-reactor-tests --no-default-features --test hot_loop)"
