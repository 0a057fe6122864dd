#!/usr/bin/env bash
# Builds two release programs in a clean Debian 13 without any package of RDMA, without -dev packages and without libclang, and
# runs them there. Debian 13 has no libclang that the crate rdma-sys can be built with. The system is made once, with
# debootstrap, in the cache; the toolchain and the crates of this machine are mounted into it. Needs root.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
cache=${XDG_CACHE_HOME:-${HOME:?}/.cache}/rdma-reactor
system=$cache/debian13
target=${CARGO_TARGET_DIR:-$root/target}/debian13
mirror=${DEBIAN_MIRROR:-$(awk '$1 == "URIs:" { print $2; exit } $1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /^http/) { print $i; exit } }' \
    /etc/apt/sources.list.d/*.sources /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null)}

say() { echo "debian13: $*" >&2; }
[ "$(id -u)" = 0 ] || { say "needs root, for chroot and mounts"; exit 1; }

mkdir -p "$cache" "$target"
exec 9>"$cache/debian13.lock"
flock -w 1800 9 || { say "another run has held $cache/debian13.lock for 30 minutes"; exit 1; }

if [ ! -e "$system/stamp" ]; then
    command -v debootstrap >/dev/null || {
        apt-get -qq -o DPkg::Lock::Timeout=600 update >&2
        apt-get -qq -y -o DPkg::Lock::Timeout=600 -o Dpkg::Use-Pty=0 install --no-install-recommends debootstrap >&2
    }
    say "making $system from $mirror"
    rm -rf "$system"
    debootstrap --variant=minbase --include=gcc,libc6-dev,ca-certificates trixie "$system" "$mirror" >"$cache/debian13.log" 2>&1 ||
        { tail -n 20 "$cache/debian13.log" >&2; exit 1; }
    touch "$system/stamp"
fi

mounts=()
unmount() {
    # What was interrupted may still have a file open there.
    for ((i = ${#mounts[@]} - 1; i >= 0; i--)); do umount "${mounts[$i]}" || umount --lazy "${mounts[$i]}"; done
}
trap unmount EXIT
trap 'exit 1' INT TERM HUP
mounted() { # FROM TO [OPTIONS]
    mkdir -p "$system$2"
    mount --bind "$1" "$system$2"
    mounts+=("$system$2")
    [ -z "${3:-}" ] || mount -o "remount,bind,$3" "$system$2"
}
toolchain=$(rustc --print sysroot)
mounted "$toolchain" /rust ro
mounted "${CARGO_HOME:-$HOME/.cargo}" /cargo ro
mounted "$root" /src ro
mounted "$target" /target
mounted /proc /proc
mounted /dev /dev

# Everything must be in the local copy of the registry: the system inside reaches no network.
cargo fetch --locked >&2
inside() {
    chroot "$system" /usr/bin/env -i PATH=/rust/bin:/usr/bin:/bin HOME=/root CARGO_HOME=/cargo CARGO_TARGET_DIR=/target \
        CARGO_NET_OFFLINE=true sh -c "cd /src && $*"
}
inside '! ls /usr/lib/x86_64-linux-gnu | grep -E "libibverbs|librdmacm|libclang"' || { say "the system is not clean"; exit 1; }
inside 'grep PRETTY /etc/os-release; gcc --version | head -n 1'
inside 'cargo build --locked --release -p rdma-reactor-examples --bin rdma-doctor --bin rdma-pingpong'
for program in rdma-doctor rdma-pingpong; do
    libraries=$(inside "ldd /target/release/$program")
    if grep -E 'ibverbs|rdmacm' <<<"$libraries"; then say "$program is linked with a library of RDMA"; exit 1; fi
done
said=$(inside '/target/release/rdma-doctor') || { say "rdma-doctor failed"; exit 1; }
echo "$said"
grep -q 'libibverbs' <<<"$said" || { say "rdma-doctor does not speak of the library"; exit 1; }
inside '/target/release/rdma-pingpong demo -s 64 -n 1000' || { say "rdma-pingpong demo failed"; exit 1; }
say "built and run in Debian 13"
