#!/bin/bash
# Tests that run.sh works: both devices carry traffic of the common tools, output and exit status are returned, and no
# fault in the guest passes. About two minutes. With --inside it is the part in the guest.
set -uo pipefail
exec </dev/null
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# pair NAME SERVER CLIENT: the client must succeed within 40 s against the server started before it.
pair() {
    local name=$1 server=$2 client=$3 log=$VM_RWDIR/selftest.log try status=1
    : >"$log"
    timeout 60 $server >>"$log" 2>&1 &
    local pid=$!
    until rdma resource show cm_id | grep -q 'state LISTEN' || ! kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
    sleep 1 # siw does not notice a connect that reaches a listener during its creation
    timeout 40 $client >>"$log" 2>&1
    status=$?
    kill "$pid" 2>/dev/null
    wait "$pid" 2>/dev/null
    if [ $status = 0 ]; then
        echo "ok   $name"
    else
        echo "FAIL $name (status $status)"
        sed 's/^/     /' "$log"
        failed=1
    fi
}

inside() {
    failed=0
    for device in siw0 rxe0; do
        rdma link show $device/1 | grep -q 'state ACTIVE' && ibv_devinfo -d $device | grep -q PORT_ACTIVE &&
            echo "ok   $device active" || { echo "FAIL $device"; failed=1; }
    done
    [ "$(ulimit -l)" = unlimited ] && echo "ok   memlock unlimited" || { echo "FAIL memlock"; failed=1; }
    for kind in SIW RXE; do
        address=RDMA_${kind}_ADDR peer=RDMA_${kind}_PEER address6=RDMA_${kind}_ADDR6 device=RDMA_${kind}_DEV
        address=${!address} peer=${!peer} address6=${!address6} device=${!device}
        pair "rping $device" "rping -s -a $address -C 20" "rping -c -a $address -I $peer -C 20"
        pair "rping $device, IPv6" "rping -s -a $address6 -C 5" "rping -c -a $address6 -C 5"
        pair "ucmatose $device" "ucmatose -b $address -c 4 -C 4" "ucmatose -s $address -c 4 -C 4"
        pair "ib_send_lat $device" "ib_send_lat -R -d $device -n 200" "ib_send_lat -R -d $device -n 200 $address"
    done
    # The guest is itself a machine with RDMA devices: run.sh must use them directly.
    (
        unset VM_FORCE RDMA_{SIW,RXE}_{ADDR,DEV}
        [ "$("$here/run.sh" 'echo $RDMA_SIW_DEV $RDMA_RXE_DEV; exit 3')" = "siw0 rxe0" ] || exit 1
        "$here/run.sh" 'exit 3'
        [ $? = 3 ] || exit 1
        rdma link del siw0
        ! "$here/run.sh" true 2>/dev/null
    ) && echo "ok   a machine's own devices" || { echo "FAIL a machine's own devices"; failed=1; }
    return $failed
}

if [ "${1:-}" = --inside ]; then
    inside
    exit
fi

rwdir=$(mktemp -d)
trap 'rm -rf "$rwdir"' EXIT
trap 'exit 1' INT TERM HUP
export VM_FORCE=1 VM_TIMEOUT=${VM_TIMEOUT:-180}
bad=0

# check NAME STATUS PATTERN COMMAND...: run.sh's status and something in its output or messages.
check() {
    local name=$1 want=$2 pattern=$3 status
    shift 3
    "$@" >"$rwdir/output" 2>&1
    status=$?
    if [ "$status" = "$want" ] && grep -qE -- "$pattern" "$rwdir/output"; then
        echo "ok   $name"
    else
        echo "FAIL $name: status $status, wanted $want and '$pattern' in:"
        tail -n 60 "$rwdir/output" | sed 's/^/     /'
        bad=1
    fi
}

echo "the tools on both devices:"
"$here/run.sh" --rwdir "$rwdir" "tests/vm/selftest.sh --inside" || bad=1
echo "the runner:"
check "exit status" 7 '^to stderr$' "$here/run.sh" --rwdir "$rwdir" 'echo to stderr >&2; echo kept >$VM_RWDIR/file; echo lost >here-no-more; exit 7'
[ "$(cat "$rwdir/file")" = kept ] && echo "ok   shared directory" || { echo "FAIL shared directory"; bad=1; }
[ ! -e "$here/../../here-no-more" ] && echo "ok   other files untouched" || { echo "FAIL other files touched"; bad=1; }
lines=$("$here/run.sh" --rwdir "$rwdir" seq 1 100000 <&- 2>/dev/null | cksum)
[ "$lines" = "$(seq 1 100000 | cksum)" ] && echo "ok   long output, closed stdin, words" || { echo "FAIL long output: $lines"; bad=1; }
times=$("$here/run.sh" --rwdir "$rwdir" 'echo begin; sleep 5; echo end' | while read -r _; do echo -n "${EPOCHREALTIME/[.,]/} "; done)
took=$(awk '{ print int(($2 - $1) / 1000) }' <<<"$times")
[ "$took" -gt 4500 ] && [ "$took" -lt 6500 ] && echo "ok   clock: 5 s took $took ms" || { echo "FAIL clock: 5 s took $took ms"; bad=1; }
check "a kernel warning fails" 1 'FAILED: the guest.s kernel complained.* status was 0' \
    "$here/run.sh" --rwdir "$rwdir" 'echo "WARNING: planted by the selftest" >/dev/kmsg; true'
check "a kernel crash fails" 1 'FAILED: the guest died' "$here/run.sh" --rwdir "$rwdir" 'echo c >/proc/sysrq-trigger; sleep 60'
# The first message of the kernel decides. The first time the command causes a kernel message; the second time it succeeds.
first='[ -e $VM_RWDIR/again ] || { touch $VM_RWDIR/again; '
for defect in 'WARNING: at siw_cm.c:453 siw_cep_put+0x11d/0x130 [siw]' 'kernel BUG at drivers/infiniband/core/iwcm.c:969!' \
    'general protection fault, probably for non-canonical address: RIP: 0010:siw_netdev_down+0x9b/0xe0 [siw]' \
    'list_del corruption. RIP: 0010:__list_del_entry_valid.cold+0x37/0x6f rwsem_down_write_slowpath+0x37b/0x6f0 siw_netdev_down+0x7f/0xe0 [siw]'; do
    for end in 'exit 1' 'echo c >/proc/sysrq-trigger; sleep 60'; do
        rm -f "$rwdir/again" "$rwdir/kernel-defects"
        check "a known defect of the kernel, then ${end%% *}: once more" 0 'known defect.*once more' \
            "$here/run.sh" --rwdir "$rwdir" "$first echo '$defect' >/dev/kmsg; $end; }"
        [ "$(wc -l <"$rwdir/kernel-defects")" = 1 ] || { echo "FAIL it is not counted"; bad=1; }
    done
done
for end in 'exit 1' 'sleep 1000'; do
    rm -f "$rwdir/again" "$rwdir/kernel-defects"
    VM_TIMEOUT=40 check "a read that siw does not answer, then ${end%% *}: once more" 0 'failed to answer a read: once more' "$here/run.sh" \
        --rwdir "$rwdir" "$first echo 'siw0: QP[2] siw_qp_sq_process: proc. read.response failed: -14' >/dev/kmsg; $end; }"
    [ "$(cat "$rwdir/kernel-defects")" = 'siw failed to answer a read' ] || { echo "FAIL it is not counted"; bad=1; }
done
rm -f "$rwdir/again"
check "an unknown defect before a known one fails" 1 'FAILED: the guest.s kernel complained' "$here/run.sh" --rwdir "$rwdir" \
    "$first echo 'WARNING: planted' >/dev/kmsg; echo -- '---[ end trace 0 ]---' >/dev/kmsg; echo 'WARNING: siw_cep_put+0x0' >/dev/kmsg; }"
VM_TIMEOUT=30 check "a hung command fails" 124 'did not end within' "$here/run.sh" --rwdir "$rwdir" 'sleep 1000'
VM_TIMEOUT=20 check "a guest that does not come up fails" 1 'vm: FAILED' env VM_MEMORY=64M "$here/run.sh" --rwdir "$rwdir" true
rm -f "$rwdir/kernel-defects"
VM_BOOT=1 check "a guest that is stuck is started again, and then fails" 1 'did not come up within 1 s, four times in a row' \
    "$here/run.sh" --rwdir "$rwdir" true
[ "$(wc -l <"$rwdir/kernel-defects")" = 4 ] || { echo "FAIL it is not counted"; bad=1; }
exit $bad
