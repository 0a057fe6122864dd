#!/usr/bin/env bash
# Plants a defect in the transfers of lists, and requires that their worlds find it.
#
# Usage: tests/mutants/transfers.sh NAME
set -euo pipefail
. "$(dirname "$0")/plant.sh"
export TRANSFER_WORLDS=10000
report "$(found -p rdma-reactor-tests --no-default-features --test transfer_worlds)"
