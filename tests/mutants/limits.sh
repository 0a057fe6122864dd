#!/usr/bin/env bash
# Plants a defect in the limits on connections, and requires that the tests of the limits find it.
#
# Usage: tests/mutants/limits.sh NAME
set -euo pipefail
. "$(dirname "$0")/plant.sh"
report "$(found -p rdma-reactor-tests --no-default-features --test limits)"
