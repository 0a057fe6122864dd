#!/usr/bin/env bash
# Plants a defect in the calls, and requires that their worlds or their tests in virtual time find it.
#
# Usage: tests/mutants/calls.sh NAME
set -euo pipefail
. "$(dirname "$0")/plant.sh"
export CALL_WORLDS=10000
report "$(found -p rdma-reactor-tests --no-default-features --test call_worlds --test calls)"
