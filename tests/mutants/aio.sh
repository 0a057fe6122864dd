#!/usr/bin/env bash
# Plants a defect in the futures, and requires that their worlds find it.
#
# Usage: tests/mutants/aio.sh NAME
set -euo pipefail
. "$(dirname "$0")/plant.sh"
export AIO_WORLDS=10000
report "$(found -p rdma-reactor-tests --no-default-features --test aio_worlds)"
