#!/usr/bin/env bash
# valkey-rdma with a valkey-server that has its RDMA transport, and next to its own client, valkey-cli, on rxe. On siw, which lacks writes
# with immediate data, the client must report that. Builds on the host, runs in the guest; the server is built once, in the cache.
#
#   tests/vm/valkey.sh              what holds
#   tests/vm/valkey.sh bench        requests per second, in rounds that alternate with valkey-benchmark, on rxe
#   BENCH_ROUNDS=5                  rounds of it
set -uo pipefail
cd "$(dirname "$0")/../.."

# Debian's source package has what Valkey has released, with all that it is built from. Its archive keeps a version for as long as a
# release of Debian has it; snapshot.debian.org keeps every file, by its SHA-1.
VERSION=9.1.2
SHA256=8e8557da7426a51b4e0fb514a65ef6241dc7c85cb408243af389070abf379cec
SHA1=f9faa46df0782fe6237dd977b3074c5316df3558
PROGRAMS="valkey-server valkey-cli valkey-benchmark"

# --- on the host -------------------------------------------------------------------------------------------------

say() { echo "valkey: $*" >&2; }

# Builds $valkey, which has the three programs, unless it exists.
make_valkey() (
    set -e
    [ ! -e "$valkey/stamp" ] || exit 0
    mkdir -p "${valkey%/*}"
    exec 9>"$valkey.lock"
    flock -w 1800 9 || { say "another run has held $valkey.lock for 30 minutes"; exit 1; }
    [ ! -e "$valkey/stamp" ] || exit 0
    work=$(mktemp -d "$valkey.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    file=pool/main/v/valkey/valkey_$VERSION.orig.tar.gz
    for url in "$(tests/mirror.sh)/$file" "https://snapshot.debian.org/file/$SHA1"; do
        say "fetching $url"
        ! timeout 300 /usr/lib/apt/apt-helper -o APT::Sandbox::User=root download-file "$url" "$work/archive" SHA256:$SHA256 >&2 || break
    done
    [ -s "$work/archive" ] || { say "nobody has $file with the SHA-256 $SHA256"; exit 1; }
    mkdir "$work/source" "$work/made"
    tar -xzf "$work/archive" -C "$work/source" --strip-components=1
    say "building $VERSION"
    env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL timeout 1800 make -j"$(nproc)" -C "$work/source/src" $PROGRAMS BUILD_RDMA=yes BUILD_LUA=no \
        MALLOC=libc >"$work/log" 2>&1 9>&- || { tail -n 40 "$work/log" >&2; say "it did not build"; exit 1; }
    (cd "$work/source/src" && cp $PROGRAMS "$work/made")
    touch "$work/made/stamp"
    rm -rf "$valkey"
    mv "$work/made" "$valkey"
)

if [ "${1:-}" != --inside ]; then
    case ${1:-} in
        '') build=() ;;
        bench) build=(--release) ;;
        *) echo "usage: valkey.sh [bench]" >&2; exit 2 ;;
    esac
    tests/vm/setup.sh || exit 1
    valkey=${XDG_CACHE_HOME:-${HOME:?}/.cache}/rdma-reactor/valkey-$VERSION
    make_valkey
    [ $? = 0 ] || exit 1
    bin=$(tests/vm/build.sh "${build[@]}" valkey-rdma) || exit 1
    VM_TIMEOUT=${VM_TIMEOUT:-600} exec tests/vm/run.sh \
        bash tests/vm/valkey.sh --inside "$bin" "$valkey" "${1:-}" "${BENCH_ROUNDS:-5}"
fi

# --- in the guest ------------------------------------------------------------------------------------------------

bin=$2 valkey=$3 part=$4 rounds=$5 ran=0 failed=0 server=
work=$(mktemp -d) || exit 1
trap '[ -z "$server" ] || kill -KILL $server 2>/dev/null; rm -rf "$work"' EXIT
: "${RDMA_SIW_ADDR:?}" "${RDMA_RXE_ADDR:?}"
port=6379
ulimit -c 0
# One processor for each program, on both sides.
server_cpu='' client_cpu=''
if [ "$(nproc)" -ge 2 ]; then server_cpu='taskset -c 0' client_cpu='taskset -c 1'; fi

# serve OPTION...: the server at $address, with another port each time.
serve() {
    port=$((port + 1))
    timeout -k 5 300 $server_cpu "$valkey/valkey-server" --port 0 --rdma-bind "$address" --rdma-port $port --save '' --protected-mode no \
        "$@" >"$work/server" 2>&1 &
    server=$!
    tests/vm/listens.sh $port $server || { cat "$work/server"; return 1; }
    # A connect that reaches a siw listener during its creation is not noticed, see README.md.
    [ "$device" != siw ] || sleep 0.3
}
unserve() { kill $server 2>/dev/null; wait $server; server=; }

ours() { timeout -k 5 60 $client_cpu "$bin" --provider "${provider:-verbs}" --timeout 50 -p $port "$address" "$@"; }
theirs() { timeout -k 5 60 $client_cpu "$valkey/valkey-cli" --rdma -h "$address" -p $port "$@"; }

# says PATTERN COMMAND...: checks that it fails with status 1 and one line that matches.
says() {
    local status
    "${@:2}" 2>"$work/said"
    status=$?
    cat "$work/said"
    # Bash itself may write a line about a server that was killed.
    [ $status = 1 ] && [ "$(grep -vc ': line [0-9]*: .* Killed ' "$work/said")" = 1 ] && grep -qE -- "$1" "$work/said"
}

# check NAME COMMAND...: checks that the command succeeds; its output is shown if it does not.
check() {
    local name=$1 result=ok
    shift
    ran=$((ran + 1))
    "$@" >"$work/output" 2>&1 || { result=FAILED failed=$((failed + 1)); }
    printf '%-6s %-4s %s\n' $result "$device" "$name"
    [ $result = ok ] || sed 's/^/    /' "$work/output" "$work/server"
}

commands() {
    [ "$(ours PING)" = PONG ] && [ "$(ours SET of-ours 'a b')" = OK ] && [ "$(theirs GET of-ours)" = 'a b' ] || return
    [ "$(theirs SET of-theirs 'c d')" = OK ] && [ "$(ours GET of-theirs)" = 'c d' ] && [ "$(ours GET nothing)" = '(nil)' ] || return
    [ "$(ours DEL of-ours of-theirs)" = 2 ] && says "the server refuses: ERR unknown command 'FLY'" ours FLY away
}

# A value that occupies 48 of the server's buffers, and three of either client's.
between() {
    head -c 2250000 /dev/urandom | base64 -w 0 >"$work/value"
    [ "$(theirs -x SET large <"$work/value")" = OK ] && ours GET large >"$work/got" && [ "$(ours STRLEN large)" = 3000000 ] || return
    echo >>"$work/value" && cmp "$work/value" "$work/got" || return
    ours SET large "$(head -c 120000 "$work/value")" && theirs GET large >"$work/got" && cmp <(head -c 120000 "$work/value"; echo) "$work/got"
}

# values OFFERS FLAG...: sets and gets values, and counts how often the client's buffer was offered.
values() {
    ours "${@:2}" >"$work/line" && cat "$work/line" &&
        awk -v most="$1" '{ for (i = 2; i <= NF; i++) if ($i == "offers") n = $(i - 1) } END { exit !(n >= most) }' "$work/line"
}

# The server sends a keepalive after 3 s and after 6 s, and so does the client.
patient() { [ "$(ours BLPOP nothing 7)" = '(nil)' ]; }

killed() {
    (sleep 2; kill -KILL "$(cat /proc/$server/task/$server/children)") &
    says 'the connection ended after 0 of 1 answers: ' ours BLPOP nothing 0
}

# rates WHOSE REQUESTS PIPELINE BYTES: SET and GET per second.
rates() {
    if [ "$1" = ours ]; then
        ours -n "$2" -P "$3" -s "$4" | sed -nE 's|.*: ([0-9]+) SET/s, ([0-9]+) GET/s.*|\1 \2|p'
    else
        timeout -k 5 60 $client_cpu "$valkey/valkey-benchmark" --rdma -h "$address" -p $port -c 1 -t set,get -q -n "$2" -P "$3" -d "$4" 2>/dev/null |
            tr '\r' '\n' | sed -nE 's/^ *(SET|GET): ([0-9.]+) requests per second.*/\2/p' | tr '\n' ' '
    fi
}

# median EXPRESSION: of the rounds.
median() {
    awk "{ print $1 }" "$work/rounds" | sort -g |
        awk '{ v[NR] = $1 } END { print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'
}

bench() {
    local row requests pipeline size round
    echo "requests per second of one client: medians of $rounds rounds, of their ratios too"
    printf '%9s %9s %9s  %9s %9s %6s  %9s %9s %6s\n' requests 'in flight' bytes SET theirs ratio GET theirs ratio
    for row in '1000 1 64' '5000 16 64' '500 1 16384' '500 16 16384'; do
        read -r requests pipeline size <<<"$row"
        for ((round = 0; round < rounds; round++)); do
            echo "$(rates ours $row) $(rates theirs $row)"
        done >"$work/rounds"
        awk 'NF != 4 { exit 1 }' "$work/rounds" || { echo "no figures: $row"; cat "$work/rounds"; return 1; }
        printf '%9d %9d %9d  %9.0f %9.0f %6.2f  %9.0f %9.0f %6.2f\n' $row "$(median '$1')" "$(median '$3')" "$(median '$1 / $3')" \
            "$(median '$2')" "$(median '$4')" "$(median '$2 / $4')"
    done
}

device=rxe address=$RDMA_RXE_ADDR
if [ "$part" = bench ]; then
    serve || exit 1
    bench
    exit
fi
# The server's smallest buffer.
check 'it listens' serve --rdma-rx-size 65536
check 'commands, of ours and of valkey-cli' commands
check 'a large value, from one client to the other' between
check '500 values of 64 bytes, one request after the other' values 1 -n 500
check '5000 values of 64 bytes, 500 requests at once' values 2 -n 5000 -P 500 --buffer 64K
check '100 values of 100,000 bytes, 10 requests at once' values 10 -n 100 -s 100000 -P 10
check '3 values of 5 MiB, both buffers of 64 KiB' values 240 -n 3 -s 5M -P 3 --buffer 64K
check 'a client that waits for 7 s' patient
check 'a server that is killed' killed
unserve
check 'no server' says 'nothing listens there' ours PING

device=siw address=$RDMA_SIW_ADDR
check 'it listens' serve
# Or siw refuses the connect, because the server sends before the client has, which MPA forbids: see README.md.
check 'a device that lacks writes with immediate data' says 'no writes with immediate data|Invalid argument' ours PING
provider=iwarp check 'a peer that lacks writes with immediate data' says 'the connection ended after 0 of 1 answers: ' ours PING
unserve
echo "$ran checks, $failed failed"
[ $failed = 0 ]
