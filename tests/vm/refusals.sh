#!/usr/bin/env bash
# The messages of programs that cannot work: exit status 1, and one line that names the fault and the cure. Builds on
# the host, runs in the guest, always, because it removes rights and devices.
set -uo pipefail
cd "$(dirname "$0")/../.."

# --- on the host -------------------------------------------------------------------------------------------------

if [ "${1:-}" != --inside ]; then
    echo=$(tests/vm/build.sh raw-echo) || exit 1
    VM_FORCE=1 exec tests/vm/run.sh bash tests/vm/refusals.sh --inside "${echo%/*}"
fi

# --- in the guest ------------------------------------------------------------------------------------------------

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
cp "$2/raw-echo" "$2/rdma-pingpong" "$work/" # where nobody may run them
cd "$work" || exit 1
failed=0 ran=0

# says NAME WORDS -- COMMAND...: WORDS is a pattern that the line must match.
says() {
    local name=$1 words=$2 status result=ok
    shift 3
    timeout -k 5 30 "$@" >out 2>err
    status=$?
    ran=$((ran + 1))
    [ $status = 1 ] && [ "$(wc -l <err)" = 1 ] && grep -qE "$words" err || { result=FAILED failed=$((failed + 1)); }
    printf '%-6s %3d  %-28s %s\n' $result $status "$name" "$(head -n 5 err)"
}

nobody="setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps -all --bounding-set -all"
server() { echo ./raw-echo server --provider verbs -c 1 -n 1 --timeout 20 -p 0 --bind "$1"; }
client() { echo ./raw-echo client --provider verbs -n 1 --timeout 20 "$1"; }
pingpong() { echo ./rdma-pingpong client --provider verbs -n 10 "$1"; }
pingpongs() { echo ./rdma-pingpong server --provider verbs -p 0 --bind "$1"; }

for device in "$RDMA_SIW_ADDR" "$RDMA_RXE_ADDR"; do
    says "nobody listens" 'refused|nothing listens' -- $(client "$device")
    says "nobody listens" 'refused|nothing listens' -- $(pingpong "$device")
    # A neighbour that does not exist.
    says "nobody has the address" "${device%.*}.99" -- $(client "${device%.*}.99")
done
for address in 192.0.2.1 127.0.0.1; do
    says "no device reaches it" 'device|route|unreachable' -- $(client $address)
    says "no device reaches it" 'device|route|unreachable' -- $(pingpong $address)
done
says "not an address of ours" '192\.0\.2\.1' -- $(server 192.0.2.1)
says "not an address of ours" '192\.0\.2\.1' -- $(pingpongs 192.0.2.1)

for device in "$RDMA_SIW_ADDR" "$RDMA_RXE_ADDR"; do
    # The devices are accessible to all users here, and registered memory is limited for all users except root.
    chmod 666 /dev/infiniband/*
    : >listening # the process in the background does it only after some time
    $(server "$device") >listening 2>server &
    until grep -q '^listening on ' listening; do kill -0 $! || break; sleep 0.1; done
    there=$(sed -n 's/^listening on //p' listening)
    ulimit -S -l 64 # below 32 the library has something to say, too
    says "memlock too low" 'ulimit -l|memlock' -- $nobody $(client "$there")
    ulimit -S -l unlimited
    kill %% 2>/dev/null
    wait 2>/dev/null
done

chmod 600 /dev/infiniband/*
says "no permission" '/dev/infiniband.*[Pp]ermission.*access' -- $nobody $(client "$RDMA_SIW_ADDR")
says "no permission" '/dev/infiniband.*[Pp]ermission.*access' -- $nobody $(pingpong "$RDMA_SIW_ADDR")
says "no permission" '/dev/infiniband.*[Pp]ermission.*access' -- $nobody $(server "$RDMA_SIW_ADDR")
chmod 666 /dev/infiniband/*
chmod 600 /dev/infiniband/rdma_cm
says "no permission for the manager" 'rdma_cm.*[Pp]ermission.*access' -- $nobody $(client "$RDMA_SIW_ADDR")

rdma link del "$RDMA_SIW_DEV" && rdma link del "$RDMA_RXE_DEV" || exit 1
says "no device" 'no RDMA device' -- $(client "$RDMA_SIW_ADDR")
says "no device" 'no RDMA device' -- $(server "$RDMA_SIW_ADDR")
says "no device" 'no RDMA device' -- $(pingpong "$RDMA_RXE_ADDR")
says "no device" 'no RDMA device' -- $(pingpongs "$RDMA_RXE_ADDR")

echo "$ran refusals, $failed wrong"
[ $failed = 0 ]
