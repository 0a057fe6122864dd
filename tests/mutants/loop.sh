#!/usr/bin/env bash
# Plants a defect in the hot loop, and requires that its tests find it.
#
# Usage: tests/mutants/loop.sh NAME
set -euo pipefail
. "$(dirname "$0")/plant.sh"
only=
# With this defect, the provider of the other tests returns no message, so they would run for ever.
[ "$name" != immediate-sends-never-rung ] || only=a_message_that_ends_with_its_post
report "$(found -p rdma-reactor-tests --no-default-features --test hot_loop $only)"
