#!/usr/bin/env bash
# Plants a defect in the provider on devices, and requires that its tests on a fake library find it.
#
# Usage: tests/mutants/verbs.sh NAME
set -euo pipefail
. "$(dirname "$0")/plant.sh"
report "$(found -p rdma-transport --lib adapter_tests)"
