#!/bin/bash
# Runs a command on a machine with siw0 and rxe0: in a guest, or directly if this machine has RDMA devices. See
# README.md.
set -uo pipefail
exec </dev/null

usage() {
    cat <<'U'
usage: run.sh [--rwdir DIR] [--] COMMAND [WORD...]
COMMAND alone is a line for the shell; with further words it is run as it stands. It starts at the project's root, its
output and exit status are this script's. Changes to files are lost with the guest, except in DIR (VM_RWDIR inside;
by default target/vm). Exit status 124: it did not end in time; 1 also when the guest's kernel complained.
  VM_TIMEOUT=300    seconds for all of it           VM_MEMORY=2G  VM_CPUS=2  VM_MTU=1500
  VM_BOOT=240       seconds to come up: a guest that has not is started once more, three times at most
  VM_FORCE=1        use the guest even if this machine has RDMA devices
  VM_NEED="siw rxe" kinds of devices that must be there when the machine's own are used
  VM_PASS="A B"     further environment variables to hand to the command
  VM_ACCEL=tcg      kvm: hardware acceleration, where it is known to work
  VM_TEARDOWN=1     0: do not remove the devices after the command to see whether they go
  VM_DMESG_ALLOW=RE lines of the kernel log that may contain a complaint
  VM_KEEP=1         keep the control directory (serial output, kernel log)    VM_VERBOSE=1
U
}

say() { echo "vm: $*" >&2; }
die() { say "$*"; exit 1; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
export PATH=$PATH:/usr/sbin:/sbin

arguments=("$@")
rwdir=${CARGO_TARGET_DIR:-$root/target}/vm
while [ $# -gt 0 ]; do
    case $1 in
        --rwdir) [ $# -ge 2 ] || { usage >&2; exit 2; }; rwdir=$2; shift 2 ;;
        --rwdir=*) rwdir=${1#*=}; shift ;;
        --help) usage; exit ;;
        --) shift; break ;;
        -*) usage >&2; exit 2 ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || { usage >&2; exit 2; }
if [ $# = 1 ]; then command=$1; else command=$(printf '%q ' "$@"); fi

timeout=${VM_TIMEOUT:-300}
[[ $timeout =~ ^[0-9]+$ && $timeout -ge 20 ]] || die "VM_TIMEOUT=$timeout: wanted a number of seconds, at least 20"
boot=${VM_BOOT:-240}
[[ $boot =~ ^[0-9]+$ ]] || die "VM_BOOT=$boot: wanted a number of seconds"
mkdir -p "$rwdir" && rwdir=$(cd "$rwdir" && pwd) || die "cannot make $rwdir"

# --- without a guest ---------------------------------------------------------------------------------------------

# Exports RDMA_<KIND>_ADDR and the others for the first active device of each kind: siw for iWARP, rxe for RoCE.
find_devices() {
    local dir name kind netdev i addresses
    for dir in /sys/class/infiniband/*; do
        name=${dir##*/}
        grep -q ACTIVE "$dir/ports/1/state" 2>/dev/null || continue
        netdev=$(rdma link show "$name/1" 2>/dev/null | sed -n 's/.* netdev \([^ ]*\).*/\1/p')
        [ -n "$netdev" ] || netdev=$(cat "$dir/ports/1/gid_attrs/ndevs/0" 2>/dev/null)
        [ -n "$netdev" ] || continue
        case $(cat "$dir/node_type"):$(cat "$dir/ports/1/link_layer") in
            4:*) kind=SIW ;;
            1:*:Ethernet) kind=RXE ;;
            *) continue ;;
        esac
        i=RDMA_${kind}_ADDR
        [ -z "${!i:-}" ] || continue
        addresses=$(ip -o -4 addr show dev "$netdev" scope global | awk '{ sub("/.*", "", $4); print $4 }')
        [ -n "$addresses" ] || continue
        export "RDMA_${kind}_DEV=$name" "RDMA_${kind}_NETDEV=$netdev" "$i=$(sed -n 1p <<<"$addresses")"
        export "RDMA_${kind}_PEER=$(tail -n 1 <<<"$addresses")"
        addresses=$(ip -o -6 addr show dev "$netdev" scope global | awk '{ sub("/.*", "", $4); print $4 }')
        [ -z "$addresses" ] || export "RDMA_${kind}_ADDR6=$(sed -n 1p <<<"$addresses")" "RDMA_${kind}_PEER6=$(tail -n 1 <<<"$addresses")"
    done
}

run_directly() {
    local need variable before after status
    unset RDMA_{SIW,RXE}_{DEV,NETDEV,ADDR,PEER,ADDR6,PEER6}
    find_devices
    for need in ${VM_NEED-siw rxe}; do
        variable=RDMA_${need^^}_ADDR
        [ -n "${!variable:-}" ] || die "this machine has /dev/infiniband but no active $need device with an IPv4 address;" \
            "add one (rdma link add ${need}0 type $need netdev ...), set VM_FORCE=1 for the guest, or VM_NEED to what there is"
    done
    ulimit -l unlimited 2>/dev/null
    export VM_RWDIR=$rwdir
    before=$(cat /proc/sys/kernel/tainted)
    (cd "$root" && exec timeout -k 10 "$timeout" bash -c "$command") &
    wait $!
    status=$?
    after=$(cat /proc/sys/kernel/tainted)
    if [ $((~before & after & 17024)) != 0 ]; then
        dmesg | tail -n 200 >&2
        die "the kernel has warned while the command ran (taint $before, then $after); the command's status was $status"
    fi
    exit "$status"
}

[ -e /dev/infiniband ] && [ -z "${VM_FORCE:-}" ] && run_directly

# --- with a guest ------------------------------------------------------------------------------------------------

"$here/setup.sh" || die "setup failed"
made=$("$here/setup.sh" --print)
kernel=${made% *} key=${made##* }

control=$(mktemp -d "${TMPDIR:-/tmp}/rdma-vm.XXXXXX") || exit 1
qemu=
readers=
cleanup() {
    [ -z "$qemu" ] || kill "$qemu" 2>/dev/null
    [ -z "$readers" ] || kill $readers 2>/dev/null
    if [ -n "${VM_KEEP:-}" ]; then say "kept $control"; else rm -rf "$control"; fi
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

cp "$here/guest.sh" "$control/guest.sh"
printf '%s\n' "$command" >"$control/command"
printf '%s=%q\n' vm_root "$root" vm_modules "$kernel/lib/modules" vm_rwdir "$rwdir" vm_seconds "$timeout" \
    vm_mtu "${VM_MTU:-1500}" vm_teardown "${VM_TEARDOWN:-1}" >"$control/boot"
for name in $(compgen -e); do
    case " PATH HOME USER LOGNAME LANG TZ ${VM_PASS:-} " in
        *" $name "*) ;;
        *) [[ $name =~ ^(LC_|RUST|CARGO_|RDMA_|VM_|PROPTEST_|MALLOC_|ASAN_|LSAN_|UBSAN_|TSAN_|MIRI) && $name != CARGO_MAKEFLAGS && ! $name =~ TOKEN ]] || continue ;;
    esac
    printf 'export %s=%q\n' "$name" "${!name}"
done >"$control/environment"

case ${VM_ACCEL:-tcg} in
    # On a busy machine the guest would measure its clock badly, and with it the length of its delays (lpj: ticks of that clock in 1/250 s).
    tcg) accel=(-accel "tcg,thread=multi" -cpu "max,la57=off") khz=$("$kernel/tsc-$key") clock="tsc_early_khz=$khz lpj=$((khz * 4))" ;;
    kvm) accel=(-accel kvm -cpu host) clock= ;;
    *) die "VM_ACCEL=$VM_ACCEL: wanted tcg or kvm" ;;
esac
share() { # TAG DIRECTORY OPTIONS: a directory of the host; commas in its name must be doubled
    printf '%s\n' -fsdev "local,id=$1,path=${2//,/,,},security_model=none,multidevs=remap$3" -device "virtio-9p-pci,fsdev=$1,mount_tag=$1"
}
mapfile -t shares < <(share host / ,readonly=on; share control "$control" ''; share rwdir "$rwdir" '')
mkfifo "$control/out" "$control/err" || exit 1
cat "$control/out" &
readers=$!
cat "$control/err" >&2 &
readers="$readers $!"

timeout -k 5 "$timeout" qemu-system-x86_64 -machine q35 "${accel[@]}" -m "${VM_MEMORY:-2G}" -smp "${VM_CPUS:-2}" \
    -nodefaults -no-user-config -display none -monitor none -no-reboot \
    -kernel "$kernel/vmlinux" -initrd "$kernel/initrd-$key" \
    -append "console=ttyS0 loglevel=6 panic=-1 oops=panic mitigations=off tsc=reliable $clock no_timer_check log_buf_len=8M rcupdate.rcu_cpu_stall_timeout=300" \
    -chardev "file,id=serial,path=${control//,/,,}/serial" -serial chardev:serial -device virtio-serial-pci \
    -chardev "file,id=out,path=${control//,/,,}/out" -device virtserialport,chardev=out,nr=1,name=out \
    -chardev "file,id=err,path=${control//,/,,}/err" -device virtserialport,chardev=err,nr=2,name=err \
    "${shares[@]}" >"$control/qemu" 2>&1 &
qemu=$!
stuck=
for ((waited = 0; waited < boot; waited++)); do
    if [ -s "$control/ready" ] || ! kill -0 "$qemu" 2>/dev/null; then break; fi
    sleep 1
done
[ $waited -lt "$boot" ] || { stuck=1; kill "$qemu" 2>/dev/null; }
wait "$qemu"
emulator=$?
qemu=
if [ -s "$control/ready" ]; then
    wait $readers # the emulator has gone, so they end
    readers=
fi

# The forbidden messages of the kernel, and the taint bits 7 (died), 9 (warned), 14 (soft lockup).
bad='WARNING: |BUG: |BUG at |Oops|Kernel panic|Call Trace:|general protection fault,|INFO: task .* blocked for more than'
bad="$bad|self-detected stall|detected stalls|soft lockup|hard LOCKUP|refcount_t:|use-after-free|double free|list_(add|del) corruption"
bad="$bad|possible (circular|recursive) locking|suspicious RCU|scheduling while atomic|sleeping function called|unregister_netdevice: waiting"
bad="$bad|Unable to handle|page allocation failure|Out of memory:|kernel memory leak"

# Runs the step once more, for a reason that is counted. Nothing runs more than four times.
once_more() { # SHORT LONG
    local again=${VM_AGAIN:-0}
    echo "$1" >>"$rwdir/kernel-defects"
    [ "$again" -lt 3 ] || die "FAILED: $2, four times in a row"
    say "$2: once more"
    cleanup
    trap - EXIT
    VM_AGAIN=$((again + 1)) exec "$0" "${arguments[@]}"
}

# Runs the step once more if the first complaint in a kernel log is a known defect of the kernel's own drivers that no program can avoid.
# All of them are siw's: it releases a listener's endpoint twice when a peer disconnects in the middle of its handshake; it reports a peer's
# close before it has reported the connection; and when its link goes down it walks the list of queue pairs without the lock under which one
# of them may just be destroyed. In that case the kernel crashes in `siw_netdev_down` or in what it calls.
once_more_if_known() { # LOG
    local first defect
    first=$(awk -v bad="$bad" '$0 ~ bad { on = 1 } on { print } on && /---\[ end trace/ { exit }' "$1")
    defect='siw_destroy_listen\+|siw_cep_put\+|kernel BUG at drivers/infiniband/core/iwcm.c:969!'
    ! grep -q 'RIP: 0010:' <<<"$first" || defect+='|siw_netdev_down\+'
    defect=$(grep -oE "$defect" <<<"$first" | head -n 1)
    [ -z "$defect" ] || once_more "$defect" "the guest's kernel has shown a known defect, $defect"
}

section() { # TITLE FILE
    [ ! -s "$2" ] || { echo "vm: ---- $1 ----"; tr -d '\r' <"$2" | sed 's/\x1b\[[0-9;]*[A-Za-z]//g'; } >&2
}

if [ -n "$stuck" ]; then
    section "serial output" "$control/serial"
    once_more 'stuck while it came up' "the guest did not come up within $boot s"
fi

if [ ! -s "$control/status" ]; then
    section "the emulator's messages" "$control/qemu"
    section "serial output" "$control/serial"
    if [ "$emulator" = 124 ] || [ "$emulator" = 137 ]; then
        if [ -s "$control/ready" ]; then say "FAILED: the guest hung: nothing after $timeout s"; exit 124; fi
        die "FAILED: the guest did not come up within $timeout s"
    fi
    if [ -s "$control/ready" ]; then
        once_more_if_known "$control/serial"
        die "FAILED: the guest died while the command ran (emulator status $emulator)"
    fi
    die "FAILED: the guest did not boot (emulator status $emulator)"
fi

status=$(cat "$control/status")
[ -z "${VM_VERBOSE:-}" ] || say "ready $(cat "$control/ready" 2>/dev/null) s after the kernel's start; status $status"

complaints=$(grep -E "$bad" "$control/dmesg" | { if [ -n "${VM_DMESG_ALLOW:-}" ]; then grep -vE "$VM_DMESG_ALLOW"; else cat; fi; } | head -n 20)
if [ -z "$complaints" ] && [ -z "${VM_DMESG_ALLOW:-}" ] && [ $(($(cat "$control/tainted") & 17024)) != 0 ]; then
    complaints="taint $(cat "$control/tainted")"
fi

# siw closes a connection if it fails to answer a read, and complains of nothing (see README.md).
if [ -z "$complaints" ] && [ "$status" != 0 ] && grep -q 'siw_qp_sq_process: proc\. read\.response failed: -14$' "$control/dmesg"; then
    once_more 'siw failed to answer a read' "siw has failed to answer a read"
fi

if [ -n "$complaints" ] || [ -s "$control/failed" ]; then
    once_more_if_known "$control/dmesg"
    section "kernel log of the guest" "$control/dmesg"
    section "its processes" "$control/processes"
    section "serial output" "$control/serial"
    [ -z "$complaints" ] || { say "FAILED: the guest's kernel complained; the command's status was $status:"; sed 's/^/vm:   /' <<<"$complaints" >&2; }
    [ ! -s "$control/failed" ] || say "FAILED: $(cat "$control/failed")"
    [ "$status" = 124 ] && exit 124
    exit 1
fi
exit "$status"
