#!/usr/bin/env bash
# Connect, traffic and close under Valgrind, both ends in one process, on siw and rxe: no invalid access, no definite
# leak of ours. Builds on the host, runs in the guest.
set -uo pipefail
cd "$(dirname "$0")/../.."

# --- on the host -------------------------------------------------------------------------------------------------

if [ "${1:-}" != --inside ]; then
    peer=$(tests/vm/build.sh rdma-peer) || exit 1
    VM_TIMEOUT=${VM_TIMEOUT:-600} exec tests/vm/run.sh bash tests/vm/valgrind.sh --inside "${peer%/*}"
fi

# --- in the guest ------------------------------------------------------------------------------------------------

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
mkfifo "$work/silence" || exit 1
# Valgrind would read hundreds of megabytes of debugging information; names are enough.
strip --strip-debug -o "$work/rdma-peer" "$2/rdma-peer" || exit 1

# Both ends of 3 connections on each device. Values are not followed, only addresses
# and leaks: the libraries here do not tell Valgrind what the kernel has written for them.
timeout -k 5 500 valgrind --quiet --vgdb=no --undef-value-errors=no --error-exitcode=9 --num-callers=30 \
    --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite --gen-suppressions=all \
    "$work/rdma-peer" self 3 300 "$RDMA_SIW_ADDR:0" "$RDMA_RXE_ADDR:0" <>"$work/silence" >"$work/out" 2>"$work/err"
status=$?
up=$(grep -c '^up' "$work/out") down=$(grep -c '^down' "$work/out")
echo "valgrind: status $status, $up ends up, $down down"
[ "$status:$up:$down" = 0:12:12 ] && exit
head -n 300 "$work/err" "$work/out"
exit 1
