#!/usr/bin/env bash
# Our programs with those of rdmacm-utils, which do not use this library: raw-echo with rdma_client, rdma_server and ucmatose, rping-server
# and rping-client with rping; both roles each, on siw and rxe; the embedded provider with the kernel's siw; raw-datagram with udaddy and
# mckey, both roles each, on rxe, and from another network namespace on the embedded provider, where rdma-ud-peer runs with ibv_ud_pingpong
# and raw-datagram with group.c, too; and raw-echo with solicited.c. Builds on the host, runs in the guest, prints a table, fails if one
# exchange does.
#
#   tests/vm/interop.sh [PATTERN]     only the exchanges whose line in the table matches
#   tests/vm/interop.sh --sample      each program of others in each role once, on the device
#                                     where nothing but a defect makes it fail
#   INTEROP_LIMIT=300                 seconds for our program; the other one has twice this time
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
port=20000 ran=0 failed=0 tries=1 unanswered=0
declare -A seen=()
once=''
if [ "$pattern" = --sample ]; then
    once=1 pattern='^siw +iwarp +done |^rxe +verbs +done .*(udaddy|mckey) |^rxe +iwarp +done .*ibv_ud_pingpong '
fi

for tool in rdma_client rdma_server ucmatose rping udaddy mckey ibv_ud_pingpong ibv_devinfo; do
    type "$tool" >/dev/null || { echo "$tool is missing: install the packages rdmacm-utils and ibverbs-utils" >&2; exit 1; }
done

# Returns 0 if a server listens, or is in its group: ours and mckey print it; the state of others in the kernel is
# listed.
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

# Returns 0 if siw has delayed the first frame of a connection, with the listener on siw (see README.md): shortly before ours gave up, the
# kernel had received bytes that siw had not read. It reads them when the peer closes, and may then report a connection that has ended.
first_frame_held() {
    [ "$device:$wanted" = siw:done ] && [ -s "$logs/unread" ] && [[ $whose = theirs || "${server[*]}" == *'--provider verbs'* ]]
}

# Returns 0 if rping has failed after all rounds: its thread waited for an event of the channel that rping had just closed. Later versions
# of rdma-core have this mended.
rping_misended() {
    local log=$logs/client
    [ "$whose" = ours ] || log=$logs/server
    [ "$wanted:$ours:$theirs" = done:0:255 ] && grep -q '^rdma_get_cm_event: Bad file descriptor' "$log"
}

# Returns 0 if a send that had arrived has ended as lost: the peer received everything, succeeded and disconnected, and the disconnect
# preceded the completion of the send. siw fails such a send with an error of its own, before or after it reports the disconnect. On RoCE
# the acknowledgement and the disconnect request are packets of different queue pairs, and the request may be first: then ours has received
# and sent all of its messages.
send_misjudged() {
    local reason='lost.*local queue pair operation error'
    [ "$device" = siw ] || reason='([0-9]+) of \1 received, \1 sent, [0-9]+ of them lost \([^;]+\); closed by the peer'
    [[ $provider:$wanted:$theirs == verbs*:done:0 ]] && grep -qE "$reason" "$logs/server" "$logs/client"
}

# Returns 0 if siw has refused its peer because the peer's first frame arrived together with its reply (see README.md): the server, which
# sends as soon as it has accepted, has accepted and sent.
reply_misread() {
    [ "$device:$wanted" = siw:done ] || return
    if [ "$whose" = theirs ]; then
        [[ $provider = verbs* ]] && grep -q '^initiating data transfers' "$logs/server" &&
            grep -q 'no connection to .*: Invalid argument (os error 22)' "$logs/client"
        return
    fi
    [[ "${server[*]}" == *--speak-first* ]] && grep -qE ': 0 of [0-9]+ received, .*; closed by the peer' "$logs/server" &&
        grep -q '^cmatose: event: RDMA_CM_EVENT_CONNECT_ERROR, error: -22' "$logs/client"
}

# Returns 0 if siw has failed to answer a read since the last time: then it closes the connection (see README.md).
read_unanswered() {
    local before=$unanswered
    unanswered=$(dmesg | grep -c 'siw_qp_sq_process: proc\. read\.response failed: -14$')
    [ "$device" = siw ] && [ "$unanswered" -gt "$before" ]
}

# exchange WANTED WHO SERVER... -- CLIENT...: WHO (ours or theirs) names the owner of the server; PORT in a command is
# the port. Ours checks sizes, counts and contents, except those of an echo. WANTED is "done": both programs end with 0
# in time; or "noticed": ours ends with 1, for a disagreement. The device and our provider are the variables of the
# callers.
exchange() {
    local again=("$@") wanted=$1 whose=$2 server=() client words line row ours theirs result waited=0 mine other began defect=
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
    if [ -n "$once" ] && [ $tries = 1 ]; then
        local program="$whose "
        [[ ! $words =~ (rdma_client|rdma_server|ucmatose|rping|udaddy|mckey|ibv_ud_pingpong)' -' ]] || program+=${BASH_REMATCH[1]}
        [ -z "${seen[$program]:-}" ] || return
        seen[$program]=1
    fi
    ran=$((ran + 1)) began=${EPOCHREALTIME/./}

    # Here, for a process in the background does it only after some time: until then the old log says that a server listens.
    : >"$logs/server" >"$logs/unread"
    # Ours ends by itself when its --timeout is over, and says what is missing. Both programs have time until then.
    timeout -k 5 $((2 * limit)) "${server[@]}" >"$logs/server" 2>&1 &
    mine=$!
    until listening "$whose" || [ $((waited += 1)) -gt 1000 ] || ! kill -0 $mine 2>/dev/null; do sleep 0.1; done
    # A connect that reaches a siw listener during its creation is not noticed, see README.md.
    [ "$device" != siw ] || sleep 0.3
    timeout -k 5 $((2 * limit)) "${client[@]}" >"$logs/client" 2>&1 &
    other=$!
    [ "$whose" = ours ] || { other=$mine mine=$!; }
    timeout $((limit * 3 / 4)) tail --pid=$mine -s 0.1 -f /dev/null || ss -Htn "sport = :$port" | awk '$2 > 0' >"$logs/unread"
    wait $mine
    ours=$?
    # The behaviour of another program after an early end is not judged: rdma_client on RoCE waits for a completion that
    # never arrives, because there only its own rdma_disconnect flushes its queue. And a persistent rping never ends by
    # itself; with 143 if nothing else was wrong. Nor does a server that speaks first whose siw has delayed a frame.
    if [[ $wanted != done || "${server[*]}" == "rping -s -P "* ]] || { [ $ours != 0 ] && first_frame_held; }; then
        kill $other 2>/dev/null
    fi
    wait $other
    theirs=$?
    case $wanted:$ours:$theirs in
        done:0:0 | done:0:143 | noticed:1:*) result=ok ;;
        *) result=FAILED ;;
    esac
    printf -v row '%s  %-6s %4d %6d %6d  %s' "$line" $result $ours $theirs $(((${EPOCHREALTIME/./} - began) / 1000)) "$words"
    echo "$row"
    [ $result = ok ] && return
    if first_frame_held; then defect="siw sat on a first frame"; fi
    if reply_misread; then defect="siw took the peer's first frame for a part of its reply"; fi
    if send_misjudged; then defect="a disconnect preceded the completion of a send that had arrived"; fi
    if read_unanswered; then defect="siw failed to answer a read"; fi
    if rping_misended; then defect="rping waited for an event of a closed channel"; fi
    # As a guest, at most four times.
    if [ -n "$defect" ] && [ $tries -lt 4 ]; then
        echo "$defect" >>"$own/kernel-defects"
        echo "    $defect: once more"
        tries=$((tries + 1)) exchange "${again[@]}"
        return
    fi
    failed=$((failed + 1))
    {
        echo "$row"
        for log in server client; do tail -n 50 "$logs/$log" | sed "s/^/    $log: /"; done
        rdma resource show qp | sed 's/^/    /'
    } >>"$logs/failed"
}

# both DEVICE PROVIDER OUR-ADDRESS THEIR-ADDRESS [FLAG...]: all four, then the harder ones.
both() {
    local device=$1 provider="$2 ${*:5}" ours=$3 theirs=$4 common=(--timeout $((limit - 5)) --provider "$2" "${@:5}")
    local server=("$bin/raw-echo" server "${common[@]}" --bind "$ours" -p PORT)
    local client=("$bin/raw-echo" client "${common[@]}" "$theirs" -p PORT)
    exchange done ours "${server[@]}" -c 1 -n 1 -s 16 -- rdma_client -s "$ours" -p PORT
    exchange done theirs rdma_server -s "$theirs" -p PORT -- "${client[@]}" -n 1 -s 16
    exchange done ours "${server[@]}" -c 1 -n 10 -s 100 --speak-first --verify -- ucmatose -s "$ours" -p PORT
    exchange done theirs stdbuf -oL ucmatose -b "$theirs" -p PORT -- "${client[@]}" --echo -n 10 -s 100
    # More, larger, and several connections at once.
    exchange done ours "${server[@]}" -c 3 -n 100 -s 20000 --speak-first --verify -- \
        ucmatose -s "$ours" -p PORT -C 100 -S 20000 -c 3
    exchange done theirs stdbuf -oL ucmatose -b "$theirs" -p PORT -C 100 -S 20000 -c 3 -- \
        "${client[@]}" --echo -n 100 -s 20000 -c 3
    [ $# = 4 ] || return
    # A peer that arms for solicited events only: one message wakes it, those before and behind do not. On siw none
    # wakes it, from any sender: seen on this kernel, cause unknown.
    [ "$device" != rxe ] || exchange done theirs "$own/solicited" "$theirs" PORT 3 2 -- \
        "${client[@]}" -n 3 -s 100 --depth 1 --solicit 2 --verify
    # A check that this table can fail.
    exchange noticed ours "${server[@]}" -c 1 -n 1 -s 15 -- rdma_client -s "$ours" -p PORT
    exchange noticed theirs rdma_server -s "$theirs" -p PORT -- "${client[@]}" -n 1 -s 15
}

# A command three times at the same time; each starts when the previous one has printed something: rping's persistent
# server mistakes two simultaneous requests for one.
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
    local size rounds=200 sizes='64 23 65535'
    # The same messages without CRC: the greeting, and messages of one segment and of many.
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
    exchange done ours "${server[@]}" -C 200 -- "$bin/rping-client" --provider verbs -V -a "$ours" -p PORT -C 200 -S 1
    exchange done ours "$bin/rping-server" --provider verbs -C 20 -V -a "$theirs" -p PORT -S 1000000 -- \
        "${client[@]}" -a "$theirs" -C 20 -S 1000000
    # A check that this table can fail.
    exchange noticed ours "${server[@]}" -S 63 -- rping -c -a "$ours" -p PORT -C 1 -S 64
    exchange noticed theirs rping -s -a "$theirs" -p PORT -S 64 -- "${client[@]}" -a "$theirs" -C 1 -S 65
}

# datagrams DEVICE PROVIDER OUR-ADDRESS THEIR-ADDRESS GROUP [NAMESPACE]: both roles of both; mckey waits 5 s before it sends. udaddy has one
# port, 7174. It does not echo. In a separate network namespace our side has no device, and RoCE's port.
datagrams() {
    local device=$1 provider=$2 ours=$3 theirs=$4 group=$5 common=(--timeout $((limit - 5)) --provider "$2")
    local program=("$bin/raw-datagram") mckey=(stdbuf -oL mckey)
    [ $# = 5 ] || program=(ip netns exec "$6" "${program[@]}") common+=(--udp-port 4791)
    local server=("${program[@]}" server "${common[@]}" "$ours") client=("${program[@]}" client "${common[@]}")
    [ $# = 5 ] || client+=(--bind "$ours")
    local member=(--bind "$ours" "${common[@]}" "$group")
    exchange done ours "${server[@]}" -- udaddy -s "$ours"
    exchange done theirs udaddy -b "$theirs" -- "${client[@]}" "$theirs"
    # More datagrams, of the largest size, and several at the same time. Nothing limits their senders: without a device they find no room in
    # a socket with its usual size.
    if [ $# = 5 ]; then
        exchange done ours "${server[@]}" -c 3 -n 200 -s 1024 -- udaddy -s "$ours" -C 200 -S 1024 -c 3
        exchange done theirs udaddy -b "$theirs" -C 200 -S 1024 -- "${client[@]}" "$theirs" -n 200 -s 1024
        exchange done ours "${server[@]}" -n 500 -s 1024 -- "${client[@]}" "$ours" -n 500 -s 1024 --verify
    fi
    # A check that this table can fail. In the opposite direction, udaddy would wait forever.
    exchange noticed theirs udaddy -b "$theirs" -C 1 -- "${client[@]}" "$theirs" -n 1 -s 99
    # The kernel's rdma_cm joins no IPv6 group, see README.md: a member on plain verbs is used.
    [[ $group == *:* ]] && return
    exchange done ours "${program[@]}" receive "${member[@]}" -- "${mckey[@]}" -m "$group" -b "$theirs" -s
    exchange done theirs "${mckey[@]}" -m "$group" -b "$theirs" -C 50 -S 1024 -- \
        "${program[@]}" send "${member[@]}" -n 50 -s 1024
}

# Prints the index of the GID of RoCE version 2 for an address of a device.
gid_index() { # DEVICE ADDRESS
    ibv_devinfo -v -d "$1" | sed -nE "s/.*GID\[ *([0-9]+)\]:[[:space:]]*(::ffff:)?$2, RoCE v2.*/\1/p"
}

# plain DEVICE OUR-ADDRESS THEIR-ADDRESS GROUP NAMESPACE: programs without rdma_cm, with the embedded provider in a namespace.
plain() {
    local device=$1 provider=iwarp ours=$2 theirs=$3 group=$4 index
    local inside=(ip netns exec "$5") peer=(ip netns exec "$5" "$bin/rdma-ud-peer") common=(--timeout $((limit - 5)) --provider iwarp)
    index=$(gid_index "$RDMA_RXE_DEV" "$theirs")
    # Its server listens on IPv4, for all GIDs.
    local pingpong=(ibv_ud_pingpong -d "$RDMA_RXE_DEV" -g "$index" -p PORT)
    exchange done ours "${peer[@]}" server "$ours" PORT 1000 64 -- "${pingpong[@]}" -n 1000 -s 64 "$ours"
    exchange done theirs "${pingpong[@]}" -n 1000 -s 64 -- "${peer[@]}" client "$ours" PORT 1000 64 "$RDMA_RXE_ADDR"
    exchange done ours "${peer[@]}" server "$ours" PORT 100 1023 -- "${pingpong[@]}" -e -n 100 -s 1023 "$ours"
    exchange done theirs "${pingpong[@]}" -e -n 100 -s 1024 -- "${peer[@]}" client "$ours" PORT 100 1024 "$RDMA_RXE_ADDR"
    # A check that this table can fail. In the opposite direction, ours would wait for an answer that ibv_ud_pingpong
    # has no receive for.
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
# At the end, where the last lines of a long output show them.
[ $failed = 0 ] || { echo "what failed:"; cat "$logs/failed"; }
echo "$ran exchanges, $failed failed"
[ $ran -gt 0 ] || { echo "nothing matches $pattern" >&2; exit 1; }
[ $failed = 0 ]
