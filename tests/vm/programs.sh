#!/usr/bin/env bash
# kv, rcp, stream-pipe and stream-bench on siw and rxe: tables that are read while they are written, files that are copied, continued after
# a killed copy and compared, streams in both directions. Builds on the host, runs in the guest.
set -uo pipefail
cd "$(dirname "$0")/../.."

if [ "${1:-}" != --inside ]; then
    kv=$(tests/vm/build.sh kv) || exit 1
    VM_TIMEOUT=${VM_TIMEOUT:-400} exec tests/vm/run.sh bash tests/vm/programs.sh --inside "${kv%/*}"
fi

bin=$2 ran=0 failed=0 servers=
work=$(mktemp -d) || exit 1
trap 'kill $servers 2>/dev/null; rm -rf "$work"' EXIT
cd "$work" || exit 1

# Each has a limit, and the device's provider.
program() { timeout -k 5 60 "$bin/$1" "${@:2}" --provider verbs; }

# serve PROGRAM ARGUMENT...: in the background; its address to $there, its process to $server.
serve() {
    rm -f listening errors
    timeout -k 5 120 "$bin/$1" "${@:2}" -p 0 --provider verbs <"${input:-/dev/null}" >listening 2>errors &
    server=$! there=
    servers+=" $server"
    until there=$(sed -n 's/^listening on //p' listening errors) && [ -n "$there" ]; do
        kill -0 $server 2>/dev/null || { cat errors; return 1; }
        sleep 0.1
    done
}

# check NAME COMMAND...: checks that the command succeeds; its output is shown if it does not.
check() {
    local name=$1 result=ok
    shift
    ran=$((ran + 1))
    "$@" >output 2>&1 || { result=FAILED failed=$((failed + 1)); }
    printf '%-6s %-4s %s\n' $result "$device" "$name"
    [ $result = ok ] || sed 's/^/    /' output errors
}

table() { # SIZE: the largest value
    serve kv server --bind "$address" --slots 64 --max-value "$1" || return
    program kv put "$there" key 'a value' && [ "$(program kv get "$there" key)" = 'a value' ] || return
    # One writer without a pause: the bench fails if a value is torn or older than the previous one.
    program kv bench "$there" --seconds 2 --readers 3 --keys 2 >table || return
    cat table
    awk '/^reads/ { reads = $2 } /^writes/ { writes = $2 } /^every value was whole/ { whole = 1 }
        END { exit !(reads > 100 && writes > 10 && whole) }' table
    kill $server
}

copy() { program rcp "$1" "$host:$2" -p "$port"; }

copies() {
    mkdir to
    serve rcp server to --bind "$address" || return
    host=${there%:*} port=${there##*:}
    head -c 5000000 /dev/urandom >source
    : >nothing
    copy nothing empty && cmp nothing to/empty || return
    copy source whole && cmp source to/whole || return
    # A partial copy of another file is reported, and not used.
    { head -c 3000000 source; echo; } >to/damaged.rcp-part
    copy source damaged 2>&1 | grep 'is damaged or of another file' && cmp source to/damaged || return
    head -c 3145728 source >to/begun.rcp-part
    copy source begun | grep ' 3145728 of them from before' && cmp source to/begun || return
    [ "$(ls to | wc -l)" = 4 ]
}

# A sender that is killed in the middle; the copy continues there.
resumed() {
    local sender pid got
    truncate -s 150M large && printf 'the end' >>large
    timeout -k 5 60 "$bin/rcp" large "$host:large" -p "$port" --provider verbs &
    sender=$!
    until [ "$(stat -c %s to/large.rcp-part 2>/dev/null || echo 0)" -ge 4194304 ]; do
        kill -0 $sender || return
    done
    pid=$(cat /proc/$sender/task/$sender/children)
    kill -KILL $pid
    wait $sender && return 1
    # Its name is free again when the server is notified of the end.
    for _ in {1..100}; do
        got=$(copy large large 2>&1) && break
        grep 'is being copied by another peer' <<<"$got" || break
        sleep 0.1
    done
    echo "$got"
    awk '/ of them from before/ { found = $4 >= 4194304 && $4 < 157286407 } END { exit !found }' <<<"$got" || return
    cmp large to/large && [ ! -e to/large.rcp-part ]
    local result=$?
    rm -f large to/large
    kill $server
    return $result
}

pipes() {
    head -c 3000001 /dev/urandom >up
    head -c 2000003 /dev/urandom >down
    input=down serve stream-pipe server --bind "$address" || return
    program stream-pipe client "$there" <up >came-down && wait $server || return
    cmp up listening && cmp down came-down
}

bench() {
    serve stream-bench -b "$address" --clients 2 --wait event || return
    program stream-bench -s "$there" --wait event -I 30 -C 1 >table && cat table &&
        program stream-bench -s "$there" --wait event -I 3 -C 50 >>table && cat table || return
    wait $server && [ "$(grep -cE '^(64|65536)_(lat|bw) ' table)" = 4 ]
}

for kind in SIW RXE; do
    device=${kind,,} address=RDMA_${kind}_ADDR
    address=${!address}
    check "kv, values of 64 bytes" table 64
    check "kv, values of 64 KiB" table 64K
    check "rcp: copies, partial copies" copies
    check "rcp: goes on after a kill" resumed
    rm -rf to
    check "stream-pipe, both ways" pipes
    check "stream-bench" bench
done
echo "$ran programs, $failed failed"
[ $failed = 0 ]
