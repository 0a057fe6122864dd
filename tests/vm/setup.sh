#!/bin/bash
# Prepares the machine for tests/vm/run.sh: installs the Debian packages that are missing and builds the guest's kernel
# directory in the cache. Does nothing, fast and without network, when all of it is there. See README.md.
set -euo pipefail
exec </dev/null

RECIPE=1 # raise when the way the kernel directory is made changes
SERIES=6.1
PACKAGES="qemu-system-x86 busybox-static cpio xz-utils binutils kmod iproute2 util-linux procps
    rdma-core rdmacm-utils ibverbs-utils ibverbs-providers perftest libibverbs-dev librdmacm-dev
    libclang-14-dev pkg-config valgrind jq libelf1 libssl3 make gcc libc6-dev"

usage() {
    cat <<'U'
usage: setup.sh [--update | --clean | --print]
  (nothing)   make what is missing
  --update    make the kernel directory anew, from the newest kernel package
  --clean     remove the cache
  --print     print the kernel directory and the key of its initial file system
U
}

say() { echo "vm setup: $*" >&2; }
die() { say "$*"; exit 1; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${XDG_CACHE_HOME:-${HOME:?}/.cache}/rdma-reactor/vm
kernel=$cache/kernel-$RECIPE
export PATH=$PATH:/usr/sbin:/sbin

case ${1:-} in
    '' | --update | --print) ;;
    --clean) rm -rf "$cache"; exit ;;
    *) usage >&2; exit 2 ;;
esac

[ "$(uname -m)" = x86_64 ] || die "the test guest is for x86_64 machines, this one is $(uname -m)"
command -v apt-get >/dev/null && command -v dpkg-query >/dev/null || die "needs a Debian 12 machine (apt-get, dpkg)"

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

missing_packages() {
    local have
    have=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' 2>/dev/null | sed -n 's/^installed //p')
    tr -s ' \n' '\n' <<<"$PACKAGES" | sed '/^$/d' | grep -vxF -f <(echo "$have") || true
}

# The initial file system depends on init.sh; building it takes no time, and is repeated when that changes. So is tsc.
init_key() { cat "$here/init.sh" "$here/tsc.c" | cksum | tr ' ' -; }
if [ "${1:-}" = --print ]; then
    echo "$kernel $(init_key)"
    exit
fi
ready() { [ -e "$kernel/stamp" ] && [ -e "$kernel/initrd-$(init_key)" ]; }

missing=$(missing_packages)
[ -z "$missing" ] && [ -z "${1:-}" ] && ready && exit 0

mkdir -p "$cache"
exec 9>"$cache/lock"
flock -n 9 || { say "waiting for another setup"; flock -w 1800 9 || die "another setup has held $cache/lock for 30 minutes"; }

updated=
apt_update() {
    [ -n "$updated" ] || as_root "$here/../packages.sh" --update 9>&-
    updated=1
}

missing=$(missing_packages) # another setup may have installed them meanwhile
if [ -n "$missing" ]; then
    say "installing" $missing
    if [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
        die "not root: run 'apt-get install --no-install-recommends" $missing"' first"
    fi
    as_root env NEEDRESTART_MODE=a "$here/../packages.sh" $missing >"$cache/apt.log" 2>&1 </dev/null 9>&- ||
        { tail -n 40 "$cache/apt.log" >&2; die "apt-get install failed"; }
    updated=1
fi

tmp=
trap '[ -z "$tmp" ] || rm -rf "$tmp"' EXIT
trap 'exit 1' INT TERM HUP

# Sets $release and $version to the newest kernel for which image, headers and source have one version.
choose_kernel() {
    local sources p v
    sources=$(apt-cache madison linux-source-$SERIES | awk '{print $3}')
    for p in $(apt-cache pkgnames linux-image-$SERIES. | grep -E '^linux-image-[0-9.]+-[0-9]+-amd64-unsigned$' | sort -Vr); do
        release=${p#linux-image-} release=${release%-unsigned}
        for version in $(apt-cache madison "$p" | awk '{print $3}' | sort -Vr | uniq); do
            grep -qxF "$version" <<<"$sources" || continue
            apt-cache madison "linux-headers-$release" | awk '{print $3}' | grep -qxF "$version" && return 0
        done
    done
    return 1
}

make_kernel() {
    apt_update
    choose_kernel || die "apt offers no linux-image-$SERIES.*-amd64-unsigned with headers and linux-source-$SERIES of the same version"
    say "kernel $release ($version)"
    tmp=$(mktemp -d "$cache/tmp.XXXXXX")
    local x=$tmp/x out=$tmp/out f d
    mkdir "$x" "$out"

    (cd "$tmp" && apt-get -qq -o APT::Sandbox::User=root download "linux-image-$release-unsigned=$version" "linux-headers-$release=$version" \
        "linux-headers-${release%-amd64}-common=$version" "linux-kbuild-$SERIES=$version" "linux-source-$SERIES=$version") >&2
    for f in "$tmp"/linux-{image,headers,kbuild}-*.deb; do dpkg -x "$f" "$x"; done

    # siw, which Debian does not build, from the source of the same version.
    say "building siw.ko"
    dpkg --fsys-tarfile "$tmp"/linux-source-*.deb | tar -xO "./usr/src/linux-source-$SERIES.tar.xz" | xz -dc -T0 |
        tar -x -C "$tmp" "linux-source-$SERIES/drivers/infiniband/sw/siw"
    local headers=$x/usr/src/linux-headers-$release siw=$tmp/linux-source-$SERIES/drivers/infiniband/sw/siw
    echo "include $x/usr/src/linux-headers-${release%-amd64}-common/Makefile" >"$headers/Makefile"
    env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL make -s -C "$headers" M="$siw" CC=gcc HOSTCC=gcc CONFIG_RDMA_SIW=m modules \
        >"$tmp/siw.log" 2>&1 9>&- || { cat "$tmp/siw.log" >&2; die "siw.ko did not build"; }

    # The modules that a network test may need, with their dependencies; graphics, sound, adapters and disks are left
    # out.
    local from=$x/lib/modules/$release to=$out/lib/modules/$release
    mkdir -p "$from/updates" "$to"
    strip --strip-debug -o "$from/updates/siw.ko" "$siw/siw.ko"
    depmod -b "$x" "$release"
    awk -v wanted='^(updates/|kernel/(arch|crypto|lib|net|drivers/virtio|fs/(9p|overlayfs|fuse|configfs))/|kernel/drivers/(infiniband/(core|sw|ulp)|net/(bonding|ipvlan))/|kernel/drivers/(net/[^/]*|char/virtio_console)[.]ko)' \
        '{ sub(":", "", $1) } $1 ~ wanted { for (i = 1; i <= NF; i++) if (!seen[$i]++) print $i }' "$from/modules.dep" >"$tmp/modules"
    (cd "$from" && xargs cp --parents -t "$to" modules.builtin modules.builtin.modinfo modules.order <"$tmp/modules")
    depmod -b "$out" "$release"
    for f in siw rdma_rxe rdma_ucm ib_uverbs veth sch_netem 9p 9pnet_virtio overlay virtio_pci virtio_console; do
        modprobe -d "$out" -S "$release" -aDq "$f" >/dev/null || die "the kernel package has no module $f"
    done

    # The kernel itself uncompressed: qemu starts it at its PVH entry, which saves the guest the unpacking.
    local image=$x/boot/vmlinuz-$release sects offset length
    sects=$(od -An -tu1 -j 497 -N 1 "$image") offset=$(od -An -tu4 -j 584 -N 4 "$image") length=$(od -An -tu4 -j 588 -N 4 "$image")
    tail -c +$(((sects + 1) * 512 + offset + 1)) "$image" | head -c "$((length))" | xz -dc --single-stream >"$out/vmlinux" || true
    readelf -h "$out/vmlinux" >/dev/null 2>&1 || die "no ELF kernel inside vmlinuz-$release"
    cp "$x/boot/config-$release" "$out/config"
    echo "$release" >"$out/release"
    make_initrd "$out"
    echo "recipe $RECIPE, kernel $release, package version $version" >"$out/stamp"

    [ ! -e "$kernel" ] || mv "$kernel" "$tmp/old"
    mv "$out" "$kernel"
    rm -rf "$tmp"
    tmp=
}

# make_initrd DIRECTORY: DIRECTORY/tsc-KEY, and DIRECTORY/initrd-KEY from busybox, init.sh and the modules that reach the host's file system.
make_initrd() {
    local dir=$1 release key root f n=100
    release=$(cat "$dir/release") key=$(init_key)
    root=$(mktemp -d "$cache/tmp.XXXXXX")
    mkdir "$root"/{bin,dev,proc,sys,modules,host,cow,new}
    cp /bin/busybox "$root/bin/"
    install -m 755 "$here/init.sh" "$root/init"
    for f in $(modprobe -d "$dir" -S "$release" -aD virtio_pci virtio_console 9p 9pnet_virtio overlay |
        awk '$1 == "insmod" && !seen[$2]++ { print $2 }'); do
        cp "$f" "$root/modules/$n-${f##*/}"
        n=$((n + 1))
    done
    (cd "$root" && find . | cpio -o -H newc --quiet) >"$dir/initrd.tmp"
    gcc -O2 -Wall -o "$dir/tsc-$key" "$here/tsc.c"
    mv "$dir/initrd.tmp" "$dir/initrd-$key"
    find "$dir" -maxdepth 1 \( -name 'initrd-*' -o -name 'tsc-*' \) -mtime +30 -delete
    rm -rf "$root"
}

# Remains of a killed setup; nobody else is working, because this process holds the lock.
rm -rf "$cache"/tmp.??????
if [ ! -e "$kernel/stamp" ] || [ "${1:-}" = --update ]; then
    make_kernel
elif ! ready; then
    make_initrd "$kernel"
fi
say "ready: $(cat "$kernel/stamp"), $(du -sh "$cache" | cut -f1) in $cache"
