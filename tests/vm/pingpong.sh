#!/usr/bin/env bash
# Runs `rdma-pingpong demo` on siw and on rxe: by the device's name, by an address, and with wrong names. Also runs `rdma-solicited`, which
# counts the wake-ups of a receiver that has armed for solicited completions only. Builds on the host, runs in the guest, fails if one run
# does not behave as it should.
#
#   tests/vm/pingpong.sh
set -uo pipefail
cd "$(dirname "$0")/../.."

if [ "${1:-}" != --inside ]; then
    program=$(tests/vm/build.sh rdma-pingpong) || exit 1
    VM_TIMEOUT=${VM_TIMEOUT:-300} exec tests/vm/run.sh bash tests/vm/pingpong.sh --inside "$program"
fi

program=$2 failed=0
out=$(mktemp) || exit 1
trap 'rm -f "$out"' EXIT

# expect STATUS WORD... -- ARGUMENT...: the exit status, and words that standard output or error must have.
expect() {
    local wanted=$1 words=() word status result=ok
    shift
    while [ "$1" != -- ]; do words+=("$1"); shift; done
    shift
    timeout -k 5 60 "$program" "$@" >"$out" 2>&1 </dev/null
    status=$?
    [ $status = "$wanted" ] || result=FAILED
    # A failure is one line.
    [ "$wanted" != 1 ] || [ "$(wc -l <"$out")" = 1 ] || result=FAILED
    for word in "${words[@]}"; do grep -qF -- "$word" "$out" || result=FAILED; done
    printf '%-6s %3d  %s\n' $result $status "$*"
    [ $result = ok ] && return
    failed=$((failed + 1))
    printf '    wanted %d with: %s\n' "$wanted" "${words[*]}"
    sed 's/^/    /' "$out"
}

: "${RDMA_SIW_DEV:?}" "${RDMA_RXE_DEV:?}"
for kind in SIW RXE; do
    device=RDMA_${kind}_DEV address=RDMA_${kind}_ADDR address6=RDMA_${kind}_ADDR6
    device=${!device} address=${!address} address6=${!address6:-}
    for wait in event spin; do
        expect 0 'provider verbs' t_typical -- demo -d "$device" -s 64 -n 300 --wait $wait
    done
    expect 0 'provider verbs' t_typical -- demo -d "$device" --bind "$address" --provider verbs -s 1 -n 300
    # Auto: both ends select the same provider.
    expect 0 'provider verbs' t_typical -- demo --bind "$address" -s 100K -n 50
    [ -z "$address6" ] || expect 0 'provider verbs' t_typical -- demo -d "$device" --bind "$address6" -n 100
    expect 0 'provider verbs' MsgRate -- demo -d "$device" --mode throughput -s 4K -n 2000 -b
    expect 0 'provider verbs' 1048576 -- demo -d "$device" --all -n 20
    for op in write read; do
        expect 0 'provider verbs' "$op of 64 B" -- demo -d "$device" --op $op -n 300
        expect 0 'provider verbs' "$op of 3 B" -- demo -d "$device" --op $op -s 3 -n 300
        expect 0 'provider verbs' MsgRate -- demo -d "$device" --op $op --mode throughput -s 64K -n 300
    done
    expect 0 'provider verbs' t_typical -- demo -d "$device" --op read --wait event -n 300
    expect 1 '--op write' '--wait event' -- demo -d "$device" --op write -e
    expect 1 "$device" "$address" 127.0.0.1 -- demo -d "$device" --bind 127.0.0.1
    expect 1 "$device" 127.0.0.1 -- client 127.0.0.1 -d "$device"
    expect 1 "$device" '--provider iwarp' -- server -d "$device" --provider iwarp
done
expect 0 'provider iwarp' t_typical -- demo -n 300
expect 0 'provider iwarp' t_typical -- demo -d iwarp0 -n 300
expect 0 'provider verbs' t_typical -- demo --provider verbs -n 300
expect 1 "$RDMA_SIW_DEV" "$RDMA_RXE_DEV" iwarp0 -- demo -d mlx5_9
expect 1 "$RDMA_SIW_DEV" "$RDMA_RXE_DEV" iwarp0 -- server -d mlx5_9
expect 1 "$RDMA_RXE_DEV" "$RDMA_SIW_ADDR" -- client "$RDMA_SIW_ADDR" -d "$RDMA_RXE_DEV"
# Receivers that are woken by each message, or by each tenth, which is solicited. siw has no such events, and the embedded provider raises
# more.
program=${program%/*}/rdma-solicited
expect 0 '300 messages, armed for any: 300 wake-ups' '1 of 10: 30 wake-ups' -- verbs "$RDMA_RXE_ADDR" 300 10
expect 0 'armed for any: 300 wake-ups' 'armed for solicited ones: ' -- verbs "$RDMA_SIW_ADDR" 300 10
expect 0 '300 messages, armed for any: 300 wake-ups' '1 of 10: 300 wake-ups' -- iwarp 127.0.0.1 300 10
echo "$failed failed"
[ $failed = 0 ]
