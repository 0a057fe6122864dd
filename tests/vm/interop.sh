#!/usr/bin/env bash
# Our programs against those of rdmacm-utils, which know nothing of this library: raw-echo against rdma_client,
# rdma_server and ucmatose, rping-server and rping-client against rping; both roles each, on siw and rxe; the embedded
# provider against the kernel's siw; raw-datagram against udaddy and mckey, both roles each, on rxe, and from another network
# namespace on the embedded provider, there rdma-ud-peer against ibv_ud_pingpong and raw-datagram against group.c, too; and raw-echo
# against solicited.c. Builds on the host, runs in the guest, prints a table, fails when one exchange does.
#
#   tests/vm/interop.sh [PATTERN]     only the exchanges whose line in the table matches
#   INTEROP_LIMIT=300                 seconds per exchange
#   INTEROP_CAPTURE=FILE              has the packets of datagrams from the other network namespace captured in FILE, below target/vm
set -uo pipefail
cd "$(dirname "$0")/../.."

# --- on the host -------------------------------------------------------------------------------------------------

if [ "${1:-}" != --inside ]; then
    bin=$(tests/vm/build.sh raw-echo) || exit 1
    bin=${bin%/*} own=${CARGO_TARGET_DIR:-target}/vm
    mkdir -p "$own" && cc -O2 -Wall -Werror -o "$own/solicited" tests/vm/solicited.c -lrdmacm -libverbs &&
        cc -O2 -Wall -Werror -o "$own/group" tests/vm/group.c -libverbs || exit 1
    command=$(printf '%q ' bash tests/vm/interop.sh --inside "$bin" "$own" "${INTEROP_LIMIT:-300}" "${1:-}")
    VM_PASS="${VM_PASS:-} INTEROP_CAPTURE" VM_TIMEOUT=${VM_TIMEOUT:-5400} exec tests/vm/run.sh "$command"
fi

# --- in the guest ------------------------------------------------------------------------------------------------

bin=$2 own=$3 limit=$4 pattern=$5
logs=$(mktemp -d) || exit 1
trap 'rm -rf "$logs"' EXIT
port=20000 ran=0 failed=0 tries=1

for tool in rdma_client rdma_server ucmatose rping udaddy mckey ibv_ud_pingpong ibv_devinfo; do
    type "$tool" >/dev/null || { echo "$tool is missing: install the packages rdmacm-utils and ibverbs-utils" >&2; exit 1; }
done

# Whether a server listens, or is in its group: ours says so, and mckey; what others have in the kernel is listed.
listening() {
    case $1:${server[*]} in
        ours:*) grep -q '^listening on\|^joined' "$logs/server" ;;
        *mckey*) grep -q 'joined dgid' "$logs/server" ;;
        *"$own/group "*) grep -q '^joined' "$logs/server" ;;
        *ibv_ud_pingpong*) ss -Hltn "sport = :$port" | grep -q . ;;
        *udaddy*) rdma resource show cm_id | grep -q "state LISTEN.*:7174\>" ;;
        *) rdma resource show cm_id | grep -q "state LISTEN.*:$port\>" ;;
    esac
}

# Whether siw has sat on the first frame of a connection, as it does (see README.md). Of ours: the client has sent its only message, which
# is raw and asks for nothing, and has waited for the answer until its time was over. Of rping's: that client has waited for
# an answer to it, and has not had one round, until our server's time was over; the others had all of theirs.
first_frame_held() {
    local rounds each
    [[ $device:$wanted:$whose == siw:done:theirs ]] &&
        grep -q 'longer than --timeout: 0 of 1 connections ended, the last: 0 in, 1 out' "$logs/client" && return
    rounds=$(sed -nE 's/^([0-9]+) rounds for .*/\1/p' "$logs/server")
    each=$(sed -nE 's/.* -C ([0-9]+).*/\1/p' <<<"${server[*]}")
    [[ $device:$provider:$wanted == siw:verbs*:done && -n $rounds && -n $each ]] && [ $((rounds % each)) = 0 ] &&
        grep -q 'it took longer than --timeout' "$logs/server" && grep -q '^wait for RDMA_WRITE_ADV' "$logs/client"
}

# Whether siw has called a send failed that had arrived: the peer got everything, was content and went, and that end met the send before
# its completion.
send_misjudged() {
    [[ $device:$provider:$wanted:$theirs == siw:verbs*:done:0 ]] &&
        grep -q 'lost; .*a work request failed: local queue pair operation error' "$logs/server" "$logs/client"
}

# exchange WANTED WHO SERVER... -- CLIENT...: WHO (ours or theirs) says whose the server is; PORT in a command is the
# port. Ours checks sizes, counts and contents, but those of an echo. WANTED is "done": both programs end with 0 in time;
# or "noticed": ours ends with 1, for what was not agreed. The device and our provider are the variables of the callers.
exchange() {
    local again=("$@") wanted=$1 whose=$2 server=() client words line ours theirs result waited=0 mine other began defect=
    shift 2
    while [ "$1" != -- ]; do server+=("$1"); shift; done
    shift
    port=$((port + 1))
    server=("${server[@]/#PORT/$port}") client=("${@/#PORT/$port}")
    words="${server[*]} -- ${client[*]}"
    words=${words//"$bin/"/} words=${words//"$own/"/} words=${words//"${common[*]} "/}
    words=${words//"${three[*]}"/3x} words=${words//"${chain[*]}"/3x}
    line=$(printf '%-4s %-14s %-7s' "$device" "$provider" "$wanted")
    [[ "$line $words" =~ $pattern ]] || return
    ran=$((ran + 1)) began=${EPOCHREALTIME/./}

    timeout -k 5 "$limit" "${server[@]}" >"$logs/server" 2>&1 &
    mine=$!
    until listening "$whose" || [ $((waited += 1)) -gt 1000 ] || ! kill -0 $mine 2>/dev/null; do sleep 0.1; done
    # A connect that meets a siw listener in the moment in which it is made is not noticed, see README.md.
    [ "$device" != siw ] || sleep 0.3
    timeout -k 5 "$limit" "${client[@]}" >"$logs/client" 2>&1 &
    other=$!
    [ "$whose" = ours ] || { other=$mine mine=$!; }
    wait $mine
    ours=$?
    # What another program makes of a connection that ends early is its own affair: rdma_client on RoCE waits for a
    # completion that never comes, because there nothing flushes its queue but its own rdma_disconnect. And a persistent
    # rping never ends by itself; with 143 if nothing else was wrong.
    [[ $wanted = done && "${server[*]}" != "rping -s -P "* ]] || kill $other 2>/dev/null
    wait $other
    theirs=$?
    case $wanted:$ours:$theirs in
        done:0:0 | done:0:143 | noticed:1:*) result=ok ;;
        *) result=FAILED ;;
    esac
    printf '%s  %-6s %4d %6d %6d  %s\n' "$line" $result $ours $theirs $(((${EPOCHREALTIME/./} - began) / 1000)) "$words"
    [ $result = ok ] && return
    if first_frame_held; then defect="siw sat on a first frame"; fi
    if send_misjudged; then defect="siw called a send failed that had arrived"; fi
    # As a guest, at most four times.
    if [ -n "$defect" ] && [ $tries -lt 4 ]; then
        echo "$defect" >>"$own/kernel-defects"
        echo "    $defect: once more"
        tries=$((tries + 1)) exchange "${again[@]}"
        return
    fi
    failed=$((failed + 1))
    for log in server client; do sed "s/^/    $log: /" "$logs/$log"; done
    rdma resource show qp | sed 's/^/    /'
}

# both DEVICE PROVIDER OUR-ADDRESS THEIR-ADDRESS [FLAG...]: all four, then the harder ones.
both() {
    local device=$1 provider="$2 ${*:5}" ours=$3 theirs=$4 common=(--timeout $((limit - 5)) --provider "$2" "${@:5}")
    local server=("$bin/raw-echo" server "${common[@]}" --bind "$ours" -p PORT)
    local client=("$bin/raw-echo" client "${common[@]}" "$theirs" -p PORT)
    exchange done ours "${server[@]}" -c 1 -n 1 -s 16 -- rdma_client -s "$ours" -p PORT
    exchange done theirs rdma_server -s "$theirs" -p PORT -- "${client[@]}" -n 1 -s 16
    exchange done ours "${server[@]}" -c 1 -n 10 -s 100 --speak-first --verify -- ucmatose -s "$ours" -p PORT
    exchange done theirs ucmatose -b "$theirs" -p PORT -- "${client[@]}" --echo -n 10 -s 100
    # More, larger, and several connections at once.
    exchange done ours "${server[@]}" -c 3 -n 100 -s 20000 --speak-first --verify -- \
        ucmatose -s "$ours" -p PORT -C 100 -S 20000 -c 3
    exchange done theirs ucmatose -b "$theirs" -p PORT -C 100 -S 20000 -c 3 -- \
        "${client[@]}" --echo -n 100 -s 20000 -c 3
    [ $# = 4 ] || return
    # A peer that asks for solicited events only: one message wakes it, those before and behind do not. On siw none wakes
    # it, whoever sent it: seen on this kernel, cause unknown.
    [ "$device" != rxe ] || exchange done theirs "$own/solicited" "$theirs" PORT 3 2 -- \
        "${client[@]}" -n 3 -s 100 --depth 1 --solicit 2 --verify
    # This table can tell.
    exchange noticed ours "${server[@]}" -c 1 -n 1 -s 15 -- rdma_client -s "$ours" -p PORT
    exchange noticed theirs rdma_server -s "$theirs" -p PORT -- "${client[@]}" -n 1 -s 15
}

# A command three times at once; and so that each starts when the one before has said something: rping's persistent
# server takes two requests that come together for one.
three=(bash -c 'for i in 1 2 3; do "$@" & all+=" $!"; done; for i in $all; do wait $i || exit; done' 3x)
chain=(bash -c 'for i in 1 2 3; do exec {out}< <("$@"); all+=" $!"; read -r <&$out; cat <&$out & done
    for i in $all; do wait $i || exit; done' 3x)

# rpings DEVICE PROVIDER OUR-ADDRESS THEIR-ADDRESS [FLAG...]: memory read and written by the peer, every byte compared
# by ours, and by rping where it can.
rpings() {
    local device=$1 provider="$2 ${*:5}" ours=$3 theirs=$4 common=(--timeout $((limit - 5)) --provider "$2" "${@:5}")
    local server=("$bin/rping-server" "${common[@]}" -V -a "$ours" -p PORT)
    local client=("$bin/rping-client" "${common[@]}" -V -p PORT)
    # rping's default, its smallest, its largest.
    local size rounds=1000 sizes='64 23 65535'
    # What a CRC protects is the same without: the greeting, and messages of one segment and of many.
    [ $# = 4 ] || sizes='64 65535'
    for size in $sizes; do
        exchange done ours "${server[@]}" -C $rounds -- rping -c -a "$ours" -p PORT -V -C $rounds -S $size
        exchange done theirs rping -s -a "$theirs" -p PORT -V -S $size -- "${client[@]}" -a "$theirs" -C $rounds -S $size
        rounds=100
    done
    [ $# = 4 ] || return
    exchange done ours "${server[@]}" -C 100 -P --clients 3 -- "${three[@]}" rping -c -a "$ours" -p PORT -V -C 100
    exchange done theirs rping -s -P -a "$theirs" -p PORT -- "${chain[@]}" "${client[@]}" -v -a "$theirs" -C 100
    # Ours at both ends, one of them on the device.
    exchange done ours "${server[@]}" -C 1000 -- "$bin/rping-client" --provider verbs -V -a "$ours" -p PORT -C 1000 -S 1
    exchange done ours "$bin/rping-server" --provider verbs -C 20 -V -a "$theirs" -p PORT -S 1000000 -- \
        "${client[@]}" -a "$theirs" -C 20 -S 1000000
    # This table can tell.
    exchange noticed ours "${server[@]}" -S 63 -- rping -c -a "$ours" -p PORT -C 1 -S 64
    exchange noticed theirs rping -s -a "$theirs" -p PORT -S 64 -- "${client[@]}" -a "$theirs" -C 1 -S 65
}

# datagrams DEVICE PROVIDER OUR-ADDRESS THEIR-ADDRESS GROUP [NAMESPACE]: both roles of both; mckey waits 5 s before it sends. udaddy has
# one port, 7174. What it sends back is not what came. In a network namespace of its own our side has no device, and RoCE's port.
datagrams() {
    local device=$1 provider=$2 ours=$3 theirs=$4 group=$5 common=(--timeout $((limit - 5)) --provider "$2")
    local program=("$bin/raw-datagram") mckey=(stdbuf -oL mckey)
    [ $# = 5 ] || program=(ip netns exec "$6" "${program[@]}") common+=(--udp-port 4791)
    local server=("${program[@]}" server "${common[@]}" "$ours") client=("${program[@]}" client "${common[@]}")
    [ $# = 5 ] || client+=(--bind "$ours")
    local member=(--bind "$ours" "${common[@]}" "$group")
    exchange done ours "${server[@]}" -- udaddy -s "$ours"
    exchange done theirs udaddy -b "$theirs" -- "${client[@]}" "$theirs"
    # More, of the largest size there is, and several at once. Nothing holds their senders back: without a device they find no room in a
    # socket with its usual size.
    if [ $# = 5 ]; then
        exchange done ours "${server[@]}" -c 3 -n 200 -s 1024 -- udaddy -s "$ours" -C 200 -S 1024 -c 3
        exchange done theirs udaddy -b "$theirs" -C 200 -S 1024 -- "${client[@]}" "$theirs" -n 200 -s 1024
        exchange done ours "${server[@]}" -n 500 -s 1024 -- "${client[@]}" "$ours" -n 500 -s 1024 --verify
    fi
    # This table can tell. The other way round, udaddy would wait for ever.
    exchange noticed theirs udaddy -b "$theirs" -C 1 -- "${client[@]}" "$theirs" -n 1 -s 99
    # The kernel's rdma_cm joins no group of IPv6, see README.md: there a member on plain verbs.
    [[ $group == *:* ]] && return
    exchange done ours "${program[@]}" receive "${member[@]}" -- "${mckey[@]}" -m "$group" -b "$theirs" -s
    exchange done theirs "${mckey[@]}" -m "$group" -b "$theirs" -C 50 -S 1024 -- \
        "${program[@]}" send "${member[@]}" -n 50 -s 1024
}

# The index of the GID of RoCE version 2 that an address of a device is.
gid_index() { # DEVICE ADDRESS
    ibv_devinfo -v -d "$1" | sed -nE "s/.*GID\[ *([0-9]+)\]:[[:space:]]*(::ffff:)?$2, RoCE v2.*/\1/p"
}

# plain DEVICE OUR-ADDRESS THEIR-ADDRESS GROUP NAMESPACE: programs that know no rdma_cm, against the embedded provider in a namespace.
plain() {
    local device=$1 provider=iwarp ours=$2 theirs=$3 group=$4 index
    local inside=(ip netns exec "$5") peer=(ip netns exec "$5" "$bin/rdma-ud-peer") common=(--timeout $((limit - 5)) --provider iwarp)
    index=$(gid_index "$RDMA_RXE_DEV" "$theirs")
    # Its server listens on IPv4, whatever the GIDs are.
    local pingpong=(ibv_ud_pingpong -d "$RDMA_RXE_DEV" -g "$index" -p PORT)
    exchange done ours "${peer[@]}" server "$ours" PORT 1000 64 -- "${pingpong[@]}" -n 1000 -s 64 "$ours"
    exchange done theirs "${pingpong[@]}" -n 1000 -s 64 -- "${peer[@]}" client "$ours" PORT 1000 64 "$RDMA_RXE_ADDR"
    exchange done ours "${peer[@]}" server "$ours" PORT 100 1023 -- "${pingpong[@]}" -e -n 100 -s 1023 "$ours"
    exchange done theirs "${pingpong[@]}" -e -n 100 -s 1024 -- "${peer[@]}" client "$ours" PORT 100 1024 "$RDMA_RXE_ADDR"
    # This table can tell. The other way round, ours would wait for an answer that ibv_ud_pingpong has no receive for.
    exchange noticed ours "${peer[@]}" server "$ours" PORT 10 101 -- "${pingpong[@]}" -n 10 -s 100 "$ours"
    # A group with two embedded providers in it, which share its port.
    local member=("${inside[@]}" "$bin/raw-datagram") where=(--bind "$ours" "${common[@]}" "$group" -n 50 -s 1024)
    exchange done ours "${member[@]}" receive "${where[@]}" -- "${member[@]}" send "${where[@]}"
    [[ $group == *:* ]] || return
    local other=("$own/group" "$RDMA_RXE_DEV" "$index" "$RDMA_RXE_NETDEV" "$group")
    exchange done ours "${member[@]}" receive "${where[@]}" -- "${other[@]}" send 50 1024
    exchange done theirs "${other[@]}" receive 50 1024 -- "${member[@]}" send "${where[@]}"
}

: "${RDMA_SIW_ADDR:?}" "${RDMA_SIW_PEER:?}" "${RDMA_RXE_ADDR:?}" "${RDMA_RXE_PEER:?}"
ulimit -c 0
printf '%-4s %-14s %-7s  %-6s %4s %6s %6s  %s\n' dev 'our provider' wanted result ours theirs ms 'server -- client'
for all in both rpings; do
    $all siw verbs "$RDMA_SIW_ADDR" "$RDMA_SIW_PEER"
    $all rxe verbs "$RDMA_RXE_ADDR" "$RDMA_RXE_PEER"
    # The embedded provider is a TCP program at an address of siw's network device; its peer is the kernel.
    $all siw iwarp "$RDMA_SIW_ADDR" "$RDMA_SIW_PEER"
    $all siw iwarp "$RDMA_SIW_ADDR" "$RDMA_SIW_PEER" --no-crc
done
datagrams rxe verbs "$RDMA_RXE_ADDR" "$RDMA_RXE_PEER" 239.77.2.40
# The other end of rxe's wire gets a namespace, in which port 4791 is free, and an address.
own_end=$(ip -o link show "$RDMA_RXE_NETDEV" | sed -E 's/^[0-9]+: [^@]*@([^:]*):.*/\1/')
ip netns add apart && ip link set "$own_end" netns apart && ip -n apart -batch - <<B || exit 1
link set lo up
addr add 10.77.2.9/24 dev $own_end
addr add fd77:2::9/64 dev $own_end nodad
link set $own_end up
B
if [ -n "${INTEROP_CAPTURE:-}" ]; then
    dumpcap -q -P -i "$RDMA_RXE_NETDEV" -f 'udp port 4791' -w "$INTEROP_CAPTURE" 2>"$logs/dumpcap" &
    capture=$!
    until grep -q '^File:' "$logs/dumpcap"; do kill -0 $capture || { cat "$logs/dumpcap" >&2; exit 1; }; sleep 0.1; done
fi
datagrams rxe iwarp 10.77.2.9 "$RDMA_RXE_ADDR" 239.77.2.41 apart
datagrams rxe iwarp fd77:2::9 "$RDMA_RXE_ADDR6" ff15::4d:41 apart
plain rxe 10.77.2.9 "$RDMA_RXE_ADDR" 239.77.2.42 apart
plain rxe fd77:2::9 "$RDMA_RXE_ADDR6" ff15::4d:42 apart
[ -z "${INTEROP_CAPTURE:-}" ] || { kill -INT $capture; wait $capture; }
ip -n apart link set "$own_end" netns 1 && ip link set "$own_end" up
ip netns del apart
echo "$ran exchanges, $failed failed"
[ $ran -gt 0 ] || { echo "nothing matches $pattern" >&2; exit 1; }
[ $failed = 0 ]
