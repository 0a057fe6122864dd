#!/bin/bash
# Second stage of the guest, as process 1: sets up the devices, runs the command, writes status and kernel log to the
# control directory /run/vm, powers off. Started by init.sh; run.sh copies it there.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
exec </dev/null
control=/run/vm
release=$(uname -r)

mark() { echo "<5>vm: $*" >/dev/kmsg; }

# finish STATUS: also writes a file "failed" with the reason given as further words.
finish() {
    local status=$1
    shift
    [ $# = 0 ] || echo "$*" >"$control/failed"
    dmesg >"$control/dmesg"
    cat /proc/sys/kernel/tainted >"$control/tainted"
    echo "$status" >"$control/status"
    echo o >/proc/sysrq-trigger
    while :; do sleep 60; done
}

source "$control/boot" # vm_root vm_modules vm_rwdir vm_seconds vm_mtu vm_teardown

ln -sfn /proc/self/fd /dev/fd
ln -sfn /proc/self/fd/0 /dev/stdin
ln -sfn /proc/self/fd/1 /dev/stdout
ln -sfn /proc/self/fd/2 /dev/stderr
mkdir -p /dev/pts /dev/shm /run/lock
mount -t devpts none /dev/pts
mount -t tmpfs -o mode=1777 none /dev/shm
mount -t debugfs none /sys/kernel/debug
echo rdma-vm >/proc/sys/kernel/hostname
echo 240 >/proc/sys/kernel/hung_task_timeout_secs
echo 60 >/proc/sys/kernel/watchdog_thresh
echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad
ulimit -l unlimited
ulimit -n 65536 2>/dev/null

mkdir -p "/lib/modules/$release" "$vm_rwdir"
mount --bind "$vm_modules/$release" "/lib/modules/$release" || finish 1 "mount of the modules"
mount -t 9p -o rw,trans=virtio,version=9p2000.L,msize=512000,cache=mmap rwdir "$vm_rwdir" || finish 1 "mount of $vm_rwdir"

modprobe -a veth ib_uverbs rdma_ucm siw rdma_rxe || finish 1 "modprobe"
# The message of a defect of siw that nothing else shows (see README.md).
echo 'module siw format "proc. read.response failed" +p' >/sys/kernel/debug/dynamic_debug/control || finish 1 "messages of siw"
ip -batch - <<B || finish 1 "ip"
link set lo up
link add w0 mtu $vm_mtu type veth peer name w1 mtu $vm_mtu
addr add 10.77.1.1/24 dev w0
addr add 10.77.1.2/24 dev w0
addr add fd77:1::1/64 dev w0 nodad
addr add fd77:1::2/64 dev w0 nodad
link set w1 up
link set w0 up
link add v0 mtu $vm_mtu type veth peer name v1 mtu $vm_mtu
addr add 10.77.2.1/24 dev v0
addr add 10.77.2.2/24 dev v0
addr add fd77:2::1/64 dev v0 nodad
addr add fd77:2::2/64 dev v0 nodad
link set v1 up
link set v0 up
B
rdma link add siw0 type siw netdev w0 || finish 1 "rdma link add siw0"
rdma link add rxe0 type rxe netdev v0 || finish 1 "rdma link add rxe0"
for _ in {1..1200}; do
    [ "$(cat /sys/class/infiniband/{siw0,rxe0}/ports/1/state | grep -c ACTIVE)" = 2 ] && break
    sleep 0.1
done
[ "$(cat /sys/class/infiniband/{siw0,rxe0}/ports/1/state | grep -c ACTIVE)" = 2 ] || finish 1 "siw0 and rxe0 did not become active"

# Pipes between the command and the ports, so that it can open /dev/stdout again.
mkfifo /run/out /run/err
cat /run/out >/dev/vport0p1 &
ports=$!
cat /run/err >/dev/vport0p2 &
ports="$ports $!"

cut -d ' ' -f 1 /proc/uptime >"$control/ready"
mark "command starts"
(
    source "$control/environment"
    export RDMA_VM=1 VM_RWDIR=$vm_rwdir
    export RDMA_SIW_DEV=siw0 RDMA_SIW_NETDEV=w0 RDMA_SIW_ADDR=10.77.1.1 RDMA_SIW_PEER=10.77.1.2
    export RDMA_SIW_ADDR6=fd77:1::1 RDMA_SIW_PEER6=fd77:1::2
    export RDMA_RXE_DEV=rxe0 RDMA_RXE_NETDEV=v0 RDMA_RXE_ADDR=10.77.2.1 RDMA_RXE_PEER=10.77.2.2
    export RDMA_RXE_ADDR6=fd77:2::1 RDMA_RXE_PEER6=fd77:2::2
    cd "$vm_root" || exit 1
    exec bash "$control/command"
) >/run/out 2>/run/err &
command=$!
limit=$(awk -v all="$vm_seconds" '{ left = all - 10 - $1; print left < 5 ? 5 : left }' /proc/uptime)
(
    sleep "$limit"
    ps -eo pid,ppid,stat,wchan:32,etime,args >"$control/processes"
    for stack in /proc/[0-9]*/stack; do
        pid=${stack%/stack} pid=${pid#/proc/}
        [ -n "$(tr -d '\0' <"/proc/$pid/cmdline")" ] || continue
        echo "-- $pid $(tr '\0' ' ' <"/proc/$pid/cmdline")"
        cat "$stack"
    done >>"$control/processes" 2>/dev/null
    echo w >/proc/sysrq-trigger
    finish 124 "the command did not end within $limit s"
) &
clock=$!
# Not with "wait -n": bash misses the end of the command if another process has ended just before it (`wait_for_any_job` in its jobs.c).
wait "$command"
status=$?
kill "$clock"
wait "$clock" 2>/dev/null
mark "command ended with $status"

# Remaining processes of the command must not keep its output or the devices open.
for _ in {1..20}; do
    kill -0 $ports 2>/dev/null || break
    sleep 0.1
done
kill -KILL -1
wait 2>/dev/null
if [ "$vm_teardown" = 1 ]; then
    for device in $(ls /sys/class/infiniband); do
        timeout -k 1 120 rdma link del "$device" & # does not come back while the kernel holds a reference
        wait $!
        [ ! -e "/sys/class/infiniband/$device" ] || finish "$status" "rdma link del $device does not come back after the command has ended"
    done
fi
finish "$status"
