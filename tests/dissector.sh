#!/usr/bin/env bash
# Tests docs/wireshark/rdma-reactor.lua with the messages of programs: tshark captures them on the loopback interface, and names each kind
# of message with its values. Messages that programs send only after a fault are built as bytes. Needs root, to capture.
set -euo pipefail
cd "$(dirname "$0")/.."
tests/packages.sh tshark
cargo=${CARGO:-cargo}
"$cargo" build -q -p rdma-reactor-tools --bin rdma-pingpong --bin rcp --bin stream-pipe --bin raw-echo
bin=$PWD/target/debug lua=$PWD/docs/wireshark/rdma-reactor.lua
folder=$(mktemp -d)
pids=()
trap 'kill "${pids[@]}" 2> /dev/null || true; wait; rm -rf "$folder"' EXIT
cd "$folder"
export HOME=$folder

fail() { echo "dissector.sh: $*" >&2; exit 1; }

# Waits until a file contains these words.
await() { # FILE WORDS
    for _ in $(seq 600); do grep -q -- "$2" "$1" 2> /dev/null && return; sleep 0.05; done
    fail "$1 has no \"$2\": $(cat "$1")"
}

# Servers read from a descriptor without a writer: the stream then has no end.
mkfifo quiet
exec 9<> quiet

declare -A port
start() { # NAME COMMAND...: a server, whose port is in its first line
    local name=$1
    shift
    "$@" > "$name" 2>&1 <&9 &
    pids+=($!)
    await "$name" 'listening on'
    port[$name]=$(sed -n 's/.*listening on [^ ]*:\([0-9]*\).*/\1/p' "$name")
}

"$bin/rdma-pingpong" keygen keys > /dev/null
printf 'cluster:%064d\n' 1 > other-key
mkdir received
here=(--bind 127.0.0.1 -p 0 --provider iwarp)
start pingpong "$bin/rdma-pingpong" server "${here[@]}"
start secured "$bin/rdma-pingpong" server "${here[@]}" --psk-file keys/psk
start rcp "$bin/rcp" server received "${here[@]}"
start pipe "$bin/stream-pipe" server -p 0 --provider iwarp
start raw "$bin/raw-echo" server "${here[@]}"

filter=$(printf ' or tcp port %s' "${port[@]}")
tshark -q -i lo -f "udp port 9$filter" -w capture -B 64 -a duration:60 2> tshark.log &
capture=$!
pids+=($capture)
# The capture has begun when the file has contents.
for _ in $(seq 100); do
    echo > /dev/udp/127.0.0.1/9
    [ "$(stat -c %s capture 2> /dev/null || echo 0)" -gt 1000 ] && break
    sleep 0.05
done

client=(client 127.0.0.1 --provider iwarp --wait event --warmup 0)
"$bin/rdma-pingpong" "${client[@]}" -p "${port[pingpong]}" -s 64 -n 10 > log
"$bin/rdma-pingpong" "${client[@]}" -p "${port[secured]}" -s 64 -n 10 --psk-file keys/psk > log
! "$bin/rdma-pingpong" "${client[@]}" -p "${port[secured]}" -s 64 -n 10 --psk-file other-key > log 2>&1
for size in 20000 9000000; do
    head -c $size /dev/zero > "file-$size"
    "$bin/rcp" "file-$size" 127.0.0.1 -p "${port[rcp]}" --provider iwarp > log
done
# All programs are silent for a while, and then there are enough bytes for grants in separate messages.
(sleep 0.5 && head -c 2000000 /dev/zero) |
    "$bin/stream-pipe" client 127.0.0.1 -p "${port[pipe]}" --provider iwarp > log 2>&1 &
pids+=($!)
"$bin/raw-echo" client 127.0.0.1 -p "${port[raw]}" -n 5 --provider iwarp > log
for _ in $(seq 600); do [ "$(stat -c %s pipe)" -lt 2000000 ] || break; sleep 0.05; done

# The capture is written in pieces: it is whole when the end of the last connection is in it.
for _ in $(seq 100); do
    tshark -r capture -Y "tcp.port == ${port[raw]} && tcp.flags.fin == 1" 2> /dev/null | grep -q . && break
    sleep 0.1
done
kill -INT $capture
wait $capture || true

# The bytes of messages that programs send only after a fault: a greeting in each direction, and then Sends of the active side. text2pcap
# builds a connection from them.
packet() { # DIRECTION HEX
    echo "$1"
    printf '0000 '
    sed 's/../& /g' <<< "$2"
}
sends=0
fpdu() { # HEX: a Send of this message, in a packet with its length, the headers of DDP and RDMAP, and a CRC that is not checked
    sends=$((sends + 1))
    local ulpdu
    ulpdu=4143$(printf '%08x%08x%08x%08x' 0 0 $sends 0)$1
    local len=$((${#ulpdu} / 2)) pad
    pad=$(((6 - len % 4) % 4))
    packet O "$(printf '%04x' $len)$ulpdu$(printf '%0*d' $((2 * pad + 8)) 0)"
}
greeting=52445852020008004000000000200000000001 # and one octet
{
    packet O "$(printf 'MPA ID Req Frame' | od -An -v -tx1 | tr -d ' \n')00010018${greeting}0078563412"
    packet I "$(printf 'MPA ID Rep Frame' | od -An -v -tx1 | tr -d ' \n')00010014${greeting}00"
    fpdu 0100000005000000                          # hello
    fpdu 05000000060000002a00000000100000          # immediate 42, of a write of 4,096 bytes
    fpdu 0b00000007000000030000000000000001000000   # progress of transfer 3: 4 GiB
    fpdu 0b000000080000000300000000000000           # progress of another length
    fpdu c800000008000000                          # kind 200
    fpdu 0001000009000000                          # data with a reserved bit
    fpdu 0a000100000a00                            # less than a header
    fpdu 090000000a000000                          # handshake without a part
    fpdu 090000000b00000007                        # of an unknown part
    fpdu 090000000c000000026e6f                    # refusal: "no"
    fpdu 090000000d00000001                        # the last one
    fpdu 080000000e000000                          # nothing is sealed
    fpdu 000000000f0000001122                      # sealed
} > hex
text2pcap -q -D -T 40000,5000 hex made-up 2> /dev/null

# A table of each capture: a line for each packet, with the values of its messages.
fields=(frame.number tcp.srcport tcp.dstport iwarp_ddp.msn _ws.malformed _ws.col.Info)
for name in kind following grant length payload sealed transfer offer.length progress.done immediate.value immediate.length \
    handshake.part handshake.refusal greeting.path greeting.version greeting.buffer greeting.security short unknown; do
    fields+=("rdxr.$name")
done
for file in capture made-up; do
    tshark -r $file -X "lua_script:$lua" -T fields -E header=y -E occurrence=a "${fields[@]/#/-e}" > $file.tsv 2>> errors
    ! tshark -r $file -X "lua_script:$lua" -Y rdxr -V 2>> errors | grep -i 'lua error' || fail "$file: an error of Lua"
done
! grep -i lua errors || fail "an error of Lua"

# Prints the values of a field, a line for each message, in packets of a server with a message of this kind.
show() { # FILE SERVER FIELD [KIND]
    awk -F '\t' -v port="${port[$2]}" -v field="$3" -v kind="${4-}" '
        NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
        port != $at["tcp.srcport"] && port != $at["tcp.dstport"] { next }
        kind != "" && index("," $at["rdxr.kind"] ",", "," kind ",") == 0 { next }
        $at[field] != "" { gsub(",", "\n", $at[field]); print $at[field] }' "$1.tsv"
}

expect() { # WHAT WANTED FOUND
    [ "$2" = "$3" ] || fail "$1: wanted \"$2\", found \"$3\""
    echo "$1: $2"
}

# The number of messages of a kind.
count() { # FILE SERVER KIND
    show "$1" "$2" rdxr.kind | grep -cx "$3" || true
}

at_least() { # WHAT N FOUND
    [ "$3" -ge "$2" ] || fail "$1: at least $2 wanted, found $3"
    echo "$1: $3"
}

joined() { paste -sd ' '; }

p=pingpong
expect 'versions of greetings' '2 2' "$(show capture $p rdxr.greeting.version | joined)"
expect 'buffers' '64 64' "$(show capture $p rdxr.greeting.buffer | joined)"
expect 'plain' '0 0' "$(show capture $p rdxr.greeting.security | joined)"
expect 'hellos' 1 "$(count capture $p 1)"
expect 'messages of 64 bytes' 20 "$(show capture $p rdxr.length | grep -cx 64)"
expect 'their kind, and that of the two that ask for a processor time and say it' 22 "$(count capture $p 0)"
at_least 'goodbyes' 1 "$(count capture $p 8)"
expect 'the grant of the hello' 8 "$(show capture $p rdxr.grant 1 | head -n 1)"

p=rcp
expect 'fragments that follow' '2 1' "$(show capture $p rdxr.following 10 | grep -v '^0$' | joined)"
expect 'fragments' 3 "$(count capture $p 10)"
expect 'offers' '4194304 4194304 611392' "$(show capture $p rdxr.offer.length | joined)"
expect 'fetched' '0 1 2' "$(show capture $p rdxr.transfer 7 | joined)"

p=pipe
at_least 'credits' 1 "$(count capture $p 2)"
at_least 'pings of a connection with nothing to say' 1 "$(count capture $p 3)"
at_least 'their answers' 1 "$(count capture $p 4)"

p=secured
expect 'a pre-shared key' '2 2 2 2' "$(show capture $p rdxr.greeting.security | joined)"
expect 'last parts of handshakes' 2 "$(show capture $p rdxr.handshake.part | grep -cx 1)"
# `show` prints what a comma separates in lines of their own.
expect 'a refusal' $'the pre-shared keys differ\n or the peer has none of that name' "$(show capture $p rdxr.handshake.refusal)"
expect 'sealed messages of 64 bytes' 20 "$(show capture $p rdxr.sealed | grep -cx '[0-9a-f]\{160\}')"
expect 'payload in the clear' '' "$(show capture $p rdxr.payload)"

expect 'messages of a raw connection' '' "$(show capture raw rdxr.kind)"
at_least 'its packets of iWARP' 2 "$(show capture raw iwarp_ddp.msn | wc -l)"

port[made-up]=5000
p=made-up
expect 'made-up kinds' '1 5 11 11 200 0 9 9 9 9 8 0' "$(show $p $p rdxr.kind | joined)"
expect 'immediate data' '0x0000002a 4096' "$(show $p $p rdxr.immediate.value) $(show $p $p rdxr.immediate.length)"
expect 'the hash of a path' 0x12345678 "$(show $p $p rdxr.greeting.path)"
expect 'progress' '3 4294967296' "$(show $p $p rdxr.transfer) $(show $p $p rdxr.progress.done)"
expect 'parts of handshakes' '7 2 1' "$(show $p $p rdxr.handshake.part | joined)"
expect 'a refusal' no "$(show $p $p rdxr.handshake.refusal)"
expect 'sealed behind the last part' 1122 "$(show $p $p rdxr.sealed)"
expect 'faults, by their packets' '6:short 7:unknown 8:unknown 9:short 10:short 11:unknown' "$(awk -F '\t' '
    NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
    { for (fault in at) if (fault ~ /rdxr.(short|unknown)/ && $at[fault] != "") print $1 ":" substr(fault, 6) }' $p.tsv | joined)"

names=$(cat capture.tsv made-up.tsv | grep -o '\[[A-Z][a-z]\+' | sort -u | tr -d '[' | joined)
expect 'kinds by name' 'Credit Data Fetched Fragment Goodbye Handshake Hello Immediate Offer Ping Pong Progress' "$names"

# Other dissectors may report faults in raw data.
for server in pingpong rcp pipe secured; do
    expect "malformed packets of $server" '' "$(show capture $server _ws.malformed)"
done
expect 'malformed packets that were made up' '' "$(show $p $p _ws.malformed)"
