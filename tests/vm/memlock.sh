#!/usr/bin/env bash
# Connections on siw and rxe as an unprivileged user who may lock 8 MiB, which is the usual limit; and with 64 KiB,
# where the error must name the limit and the cure. Builds on the host, runs in the guest.
set -uo pipefail
cd "$(dirname "$0")/../.."

if [ "${1:-}" != --inside ]; then
    echo=$(tests/vm/build.sh raw-echo) || exit 1
    VM_TIMEOUT=${VM_TIMEOUT:-200} exec tests/vm/run.sh bash tests/vm/memlock.sh --inside "${echo%/*}"
fi

logs=$(mktemp -d) || exit 1
trap 'rm -rf "$logs"' EXIT
chmod -R a+rw /dev/infiniband
cp "$2/raw-echo" /run/ && chmod 755 /run/raw-echo
failed=0

# as-nobody KIB COMMAND...
as-nobody() {
    local kib=$1
    shift
    setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all bash -c 'ulimit -l "$0"; exec "$@"' "$kib" "$@"
}

for device in siw:$RDMA_SIW_ADDR rxe:$RDMA_RXE_ADDR; do
    address=${device#*:} port=21000
    for kib in 8192 64; do
        as-nobody $kib timeout 40 /run/raw-echo server --provider verbs --timeout 30 --bind "$address" -p $port -c 2 \
            -n 10 -s 100 >"$logs/server" 2>&1 &
        for _ in {1..100}; do grep -q '^listening on' "$logs/server" && break; sleep 0.1; done
        as-nobody $kib timeout 40 /run/raw-echo client --provider verbs --timeout 30 "$address" -p $port -c 2 -n 10 \
            -s 100 >"$logs/client" 2>&1
        status=$?
        case $kib:$status in
            8192:0) wait $! && result=ok || result=FAILED ;;
            64:1)
                kill $! 2>/dev/null
                wait $!
                result=FAILED
                grep -q 'may lock 64 KiB (RLIMIT_MEMLOCK).*ulimit -l' "$logs/client" && result=ok
                ;;
            *) result=FAILED ;;
        esac
        echo "${device%%:*} with $kib KiB: $result"
        [ $result = ok ] || { failed=1; cat "$logs/server" "$logs/client"; kill $! 2>/dev/null; }
        [ $kib = 64 ] && head -3 "$logs/client"
        port=$((port + 1))
    done
done
exit $failed
