#!/usr/bin/env bash
# Plants a defect in the data that threads share with a reactor, and requires that the model checker finds it.
#
# Usage: tests/mutants/loom.sh NAME
set -euo pipefail
. "$(dirname "$0")/plant.sh"
export RUSTFLAGS="--cfg loom_model" LOOM_MAX_PREEMPTIONS=3
report "$(found -p rdma-transport -p rdma-reactor --lib interleavings)"
