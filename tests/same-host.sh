#!/usr/bin/env bash
# Peers of this host of another user, in other namespaces, or without memory: their connections, providers and messages. As root.
#
# Usage: tests/same-host.sh
#
# Each row starts a client that requires shared memory, and one that accepts any provider
# (ProviderChoice::Auto), against a server with ProviderChoice::Auto; some rows, against one with
# ProviderChoice::Shm. After each row another client must connect in shared memory: a row leaves no
# state in the server. In the last rows, a peer lends memory without end to a server whose resources
# are limited. Beside all rows, a link between two processes is away for a time. Killed and stopped
# peers are in tests/tests/same_host.rs.
set -uo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "same-host: run it as root, for it changes users and namespaces" >&2; exit 1; }
built=$(tests/vm/build.sh rdma-peer rdma-hostile) || exit 1
read -r -d '' binary hostile <<<"$built"

work=$(mktemp -d) || exit 1
space=rdma-$$ groups=/sys/fs/cgroup/memory
[ -d $groups ] || groups=/sys/fs/cgroup
group=$groups/rdma-$$
servers=()
finish() {
    [ ${#servers[@]} = 0 ] || kill "${servers[@]}" 2>/dev/null
    ip netns del "$space" 2>/dev/null
    ip netns del "$space-away" 2>/dev/null
    wait
    rmdir "$groups/rdma-$$"* 2>/dev/null
    rm -rf "$work"
}
trap finish EXIT
chmod 755 "$work"
install -m 755 "$binary" "$work/peer" # where nobody may run it
install -m 755 "$hostile" "$work/hostile"
mkfifo "$work/silence"
chmod 666 "$work/silence"

# Two addresses of this host, and another network namespace that reaches one of them.
ip netns add "$space" && ip link add "v$$" type veth peer name "w$$" netns "$space" &&
    ip addr add 10.214.77.1/24 dev "v$$" && ip link set "v$$" up &&
    ip -n "$space" addr add 10.214.77.2/24 dev "w$$" && ip -n "$space" link set "w$$" up ||
    { echo "same-host: no second network namespace" >&2; exit 1; }

# Starts a server by a command, and sets `port`. Its output is in the file `served-NAME`, and its
# log in `log-NAME`.
serve() { # NAME CHOICE [COMMAND...]
    RUST_LOG=rdma=debug "${@:3}" "$work/peer" "$2" serve 0.0.0.0:0 <>"$work/silence" >"$work/served-$1" 2>"$work/log-$1" &
    servers+=($!)
    until port=$(sed -n 's/^listening .*:\([0-9]*\)$/\1/p' "$work/served-$1") && [ -n "$port" ]; do
        kill -0 $! || exit 1
        sleep 0.05
    done
}
serve auto auto

# The link of two processes goes away for 7 s while messages travel, and the connection lives on:
# TCP sends what is unanswered every 1.25 s, an eighth of the keepalive timeout. By default, the
# times between its attempts double, and it would try again after 6.2 s and 12.6 s. Prints a row.
away() {
    local from=6.15 before after
    if [ "$(printf '%s\n' $from "$(uname -r)" | sort -V | head -n 1)" != $from ]; then
        printf 'skipped a link away for 7 s: Linux has the limit of retransmissions (TCP_RTO_MAX_MS) since %s, and this is %s\n' \
            $from "$(uname -r)"
        exit
    fi
    both=() # not local: the trap runs when the function has returned
    local peer=(ip netns exec "$space-away" "$work/peer" keepalive 10 tcp)
    trap 'kill ${both[@]}; wait' EXIT
    trap exit TERM
    ip netns add "$space-away" && ip -n "$space-away" link set lo up || exit
    # Waits until a process has printed a line.
    says() { # FILE PATTERN
        local _
        for _ in $(seq 600); do
            grep -q "$2" "$work/$1" && return
            grep '^failed' "$work/$1" && exit 1
            sleep 0.05
        done
        exit 1
    }
    "${peer[@]}" serve 127.0.0.1:7471 <>"$work/silence" >"$work/away-served" 2>&1 &
    both+=($!)
    says away-served '^listening'
    "${peer[@]}" connect 127.0.0.1:7471 1 4 <>"$work/silence" >"$work/away-client" 2>&1 &
    both+=($!)
    says away-client '^up iwarp'
    packets() { awk '$1 == "lo:" { print $3 }' "/proc/${both[1]}/net/dev"; }
    ip -n "$space-away" link set lo down || exit
    sleep 1
    before=$(packets)
    sleep 6
    [ "$(packets)" = "$before" ] || { echo "packets travel while the link is away"; exit 1; }
    ip -n "$space-away" link set lo up || exit
    sleep 2
    before=$(packets)
    sleep 1
    after=$(packets)
    ! grep -h '^down' "$work/away-served" "$work/away-client" && [ "$after" -gt $((before + 100)) ] || exit
    echo "ok      a link away for 7 s, keepalive 10 s: $((after - before)) packets in the second afterwards"
}
(away) >"$work/away" 2>&1 &
away=$!
servers+=($away)

# Prints the first line of each of COUNT connections, as seen by a client of CHOICE, run by a command; `hangs` after five minutes.
client() { # CHOICE ADDRESS COUNT COMMAND...
    local choice=$1 address=$2 count=$3 pid line=
    shift 3
    : >"$work/out"
    "$@" "$work/peer" "$choice" connect "$address:$port" "$count" 1 <>"$work/silence" >"$work/out" 2>"$work/err" &
    pid=$!
    for _ in $(seq 6000); do
        [ "$(grep -cE '^(up|failed)' "$work/out")" -lt "$count" ] || break
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.05
    done
    if kill -0 "$pid" 2>/dev/null; then
        [ "$(grep -cE '^(up|failed)' "$work/out")" -ge "$count" ] || line="hangs "
        kill "$pid"
        wait "$pid"
    else
        wait "$pid"
        line="ended with status $?: "
    fi 2>/dev/null
    sort "$work/out" | grep -E '^(up|failed)' | sed 's/:[0-9]* *:/:/' | uniq -c | sed 's/^ *1 //; s/^ *//' | paste -sd ';' - |
        sed "s/^/$line/; s/: *$//" | cut -c 1-150
}

failed=0
# A row: patterns for the output of a client with shm, and of one with auto.
row() { # NAME ADDRESS COUNT SHM AUTO [COMMAND...]
    local name=$1 address=$2 count=$3 choice wanted said verdict
    local -A wants=([shm]=$4 [auto]=$5)
    shift 5
    for choice in shm auto; do
        said=$(client "$choice" "$address" "$count" "$@")
        verdict=ok
        [[ $said =~ ${wants[$choice]} ]] && ! [[ $said =~ hangs ]] || { verdict=FAILED failed=$((failed + 1)); }
        printf '%-7s %-34s %-5s %s\n' "$verdict" "$name" "$choice" "$said"
    done
    said=$(client shm 127.0.0.1 1)
    [ "$said" = "up shm" ] || { printf 'FAILED  %-34s then  %s\n' "$name" "$said" && failed=$((failed + 1)); }
}

nobody="setpriv --reuid 65534 --regid 65534 --clear-groups"
other="setpriv --reuid 4242 --regid 4242 --clear-groups"
row "the same user" 127.0.0.1 1 '^up shm$' '^up shm$'
row "the same user, an address" 10.214.77.1 1 '^up shm$' '^up shm$'
row "another user" 127.0.0.1 1 '^failed: .*no shared memory' '^up iwarp$' $other
row "nobody" 127.0.0.1 1 '^failed: .*no shared memory' '^up iwarp$' $nobody
row "unshare -U" 127.0.0.1 1 '^failed: .*no shared memory' '^up iwarp$' unshare -U
row "unshare -Ur: known there" 127.0.0.1 1 '^up shm$' '^up shm$' unshare -Ur
row "another user, unshare -Ur" 127.0.0.1 1 '^failed: .*no shared memory' '^up iwarp$' $other unshare -Ur
row "a network namespace, veth" 10.214.77.1 1 '^failed: .*no shared memory' '^up iwarp$' ip netns exec "$space"
row "no files of 16 KiB, RLIMIT_FSIZE" 127.0.0.1 1 '^failed: .*no shared memory.*File too large' '^up iwarp$' prlimit --fsize=16384
# Each connection needs separate memory; those without memory report it, as they would over TCP.
row "no address space, RLIMIT_AS" 127.0.0.1 40 '^[0-9]+ failed: .*Cannot allocate memory' '^[0-9]+ failed: .*Cannot allocate memory' \
    prlimit --as=20000000
# The kernel ends the process whose group is full. Only its connections are lost.
in_group() { echo "$BASHPID" >"$group/cgroup.procs" && exec "$@"; }
# Without swap, to which the kernel would move the memory of a process instead of ending the
# process.
make_group() { # LIMIT
    local parent=${group%/*}
    if [ -f "$parent/cgroup.subtree_control" ]; then
        # Version 2: a group has the files of its memory only if its parent has enabled them.
        grep -qw memory "$parent/cgroup.subtree_control" || echo +memory >"$parent/cgroup.subtree_control"
        mkdir "$group" && echo "$1" >"$group/memory.max" || return
        # A kernel without swap lacks this file, and version 1's next one.
        [ ! -f "$group/memory.swap.max" ] || echo 0 >"$group/memory.swap.max"
    else
        mkdir "$group" && [ -f "$group/memory.limit_in_bytes" ] && echo "$1" >"$group/memory.limit_in_bytes" &&
            echo 0 >"$group/memory.swappiness" || return
        [ ! -f "$group/memory.memsw.limit_in_bytes" ] || echo "$1" >"$group/memory.memsw.limit_in_bytes"
    fi
}
make_group 16M || { echo "same-host: no control group with a limit of its memory: $group" >&2; exit 1; }
row "a full control group" 127.0.0.1 800 '^ended with status 137' '^ended with status 137' in_group

# A server that requires shared memory: no connection of these clients comes up there, not even for the time of a message, and each client
# gets the reason.
serve shm shm
only='^1000 failed: rejected: the peer accepts only peers in shared memory'
row "required there, another user" 127.0.0.1 1000 '^1000 failed: .*no shared memory' "$only" $other
# A process that may write no file has its output in a pipe.
no_files() { exec prlimit --fsize=0 "$@" > >(cat >>"$work/out"); }
row "required there, RLIMIT_FSIZE 0" 127.0.0.1 1000 '^1000 failed: .*no shared memory' "$only" no_files
# The rows' own checks that another client still connects are the only connections of that server.
if [ "$(grep -c '^up' "$work/served-shm")" != 2 ] || grep -vE '^(listening |up shm$|down: )' "$work/served-shm"; then
    echo "FAILED  the server that requires shared memory has talked to others: $(sort "$work/served-shm" | uniq -c | paste -sd ';' -)"
    failed=$((failed + 1))
fi

# Another user sends a packet on each of 9 connections to the server's Unix listener. Such sockets
# stay open, so the server accepts no peer for a pause, which is longer after each attack.
shut_door() { # PROCESS
    local inodes name
    inodes=$(ls -l "/proc/$1/fd" | sed -n 's/.*socket:\[\([0-9]*\)\].*/\1/p')
    name=$(awk 'NR == FNR { own[$1]; next } $7 in own && $4 == "00010000" { print substr($8, 2) }' \
        <(echo "$inodes") /proc/net/unix)
    kill -STOP "$1"
    python3 -c 'import os, socket, sys
os.setuid(4242)
for _ in range(9):
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.connect("\0" + sys.argv[1])
    peer.send(b"x")' "$name"
    kill -CONT "$1"
}
server=${servers[-1]} said= verdict=FAILED
for _ in $(seq 6); do
    # The listener is opened for the first peer after a pause.
    [ "$(client shm 127.0.0.1 1)" != "up shm" ] || shut_door "$server"
    said=$(client shm 127.0.0.1 1)
    [[ $said =~ "failed: rejected: the peer has reached one of its limits" ]] && verdict=ok && break
done
printf '%-7s %-34s %-5s %s\n' $verdict "another user uses up the sockets" shm "$said"
[ $verdict = ok ] || failed=$((failed + 1))
grep -q 'sockets of other users cannot be closed: for ' "$work/log-shm" ||
    { echo "FAILED  the log of the server does not say why" && failed=$((failed + 1)); }
for _ in $(seq 120); do
    said=$(client shm 127.0.0.1 1)
    [ "$said" != "up shm" ] || break
    sleep 0.5
done
[ "$said" = "up shm" ] || { echo "FAILED  after the pause: $said" && failed=$((failed + 1)); }

# A peer lends memory on 8 connections to a server, 5,000 times: files of 1 TiB, files without
# pages, and more than it may. The server runs under a limit. Other clients are served meanwhile and
# afterwards, and the server is charged for 64 MiB of that memory at most.
limited() { # NAME COMMAND...
    local name=$1 said= report= verdict=ok charged most server from to lender
    shift
    serve "limited-${#servers[@]}" shm "$@"
    server=${servers[-1]}
    coproc LENDER { exec "$work/hostile" lend "{\"server\":\"127.0.0.1:$port\",\"connections\":8,\"lendings\":5000}"; }
    from=${LENDER[0]} to=${LENDER[1]} lender=$LENDER_PID
    servers+=("$lender")
    read -r -t 300 report <&"$from" && echo go >&"$to"
    for _ in $(seq 300); do
        said=$(client shm 127.0.0.1 10)
        [ "$said" = "10 up shm" ] || break
        kill -0 "$lender" && echo report >&"$to" && read -r -t 300 report <&"$from" || break
        [[ $report =~ \"opened\":[5-9][0-9]{3} ]] && break
    done
    charged=${report##*\"charged_kib\":} charged=${charged%%[!0-9]*}
    [ "$said" = "10 up shm" ] && [[ $report =~ \"opened\":[5-9][0-9]{3} ]] && [ "$charged" -le 65536 ] &&
        kill -0 "$server" || { verdict=FAILED failed=$((failed + 1)); }
    most=$(cat "$group"/memory.{max_usage_in_bytes,peak} 2>/dev/null)
    printf '%-7s %-34s %-5s %s\n' $verdict "$name" shm "$said; $report${most:+; $((most >> 20)) MiB at most}"
    kill "$lender" "$server"
    wait "$lender" "$server"
} 2>/dev/null
group=$groups/rdma-$$-none
limited "lent to a server: 64 descriptors" prlimit --nofile=64
limited "lent to a server: RLIMIT_AS 1.5 GiB" prlimit --as=$((1536 << 20))
group=$groups/rdma-$$-limited
make_group 256M || { echo "same-host: no control group with a limit of its memory: $group" >&2; exit 1; }
limited "lent to a server: 256 MiB" in_group
wait $away 2>/dev/null || { echo "FAILED  a link away for 7 s" && failed=$((failed + 1)); }
cat "$work/away"
[ $failed = 0 ] || { echo "same-host: $failed of the rows are not as they have to be" >&2; exit 1; }
