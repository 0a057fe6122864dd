#!/bin/busybox sh
# First process of the guest, in its initial file system: mounts the host's file system copy-on-write and hands over
# to guest.sh. Run by setup.sh's initrd, never by hand.
PATH=/bin
export PATH
/bin/busybox --install -s /bin

mount -t devtmpfs none /dev
mount -t proc none /proc
mount -t sysfs none /sys

fail() {
    echo "vm: init: $*" >/dev/console
    poweroff -f
}

for module in /modules/*.ko; do
    insmod "$module" || fail "insmod $module"
done

p9=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o "ro,$p9,cache=loose" host /host || fail "mount of the host's file system"
mount -t tmpfs -o size=75%,mode=755 none /cow || fail "mount of the memory for changes"
mkdir /cow/upper /cow/work
mount -t overlay -o lowerdir=/host,upperdir=/cow/upper,workdir=/cow/work none /new || fail "overlay mount"

for dir in dev proc sys; do
    mount --move "/$dir" "/new/$dir" || fail "move of /$dir"
done
mount -t tmpfs -o mode=755 none /new/run || fail "mount of /run"
mkdir /new/run/vm
mount -t 9p -o "rw,$p9,cache=none" control /new/run/vm || fail "mount of the control directory"

exec switch_root /new /bin/bash /run/vm/guest.sh
