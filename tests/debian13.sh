#!/usr/bin/env bash
# Runs `make demo` and `make test-host` in a clean Debian 13 with Debian's own compiler: only rustc, cargo, make and gcc are added to the
# system. It has no package of RDMA, no -dev package but the C library's, and no libclang, because Debian 13 has none that can build the
# crate rdma-sys. The system is created once, with debootstrap, in the cache; only the crates of this machine are mounted into it. Needs
# root.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
cache=${XDG_CACHE_HOME:-${HOME:?}/.cache}/rdma-reactor
system=$cache/debian13
target=${CARGO_TARGET_DIR:-$root/target}/debian13
# debootstrap does not know that libc6-dev is the libc-dev that rustc needs.
packages=rustc,cargo,make,gcc,libc6-dev
mirror=$(tests/mirror.sh)

say() { echo "debian13: $*" >&2; }
[ "$(id -u)" = 0 ] || { say "needs root, for chroot and mounts"; exit 1; }

mkdir -p "$cache" "$target" "$root/target"
exec 9>"$cache/debian13.lock"
flock -w 1800 9 || { say "another run has held $cache/debian13.lock for 30 minutes"; exit 1; }

if [ "$(cat "$system/stamp" 2>/dev/null)" != "$packages" ]; then
    command -v debootstrap >/dev/null || {
        apt-get -qq -o DPkg::Lock::Timeout=600 update >&2
        apt-get -qq -y -o DPkg::Lock::Timeout=600 -o Dpkg::Use-Pty=0 install --no-install-recommends debootstrap >&2
    }
    say "making $system from $mirror"
    rm -rf "$system"
    timeout 1800 debootstrap --variant=minbase --include="$packages" trixie "$system" "$mirror" >"$cache/debian13.log" 2>&1 ||
        { tail -n 20 "$cache/debian13.log" >&2; exit 1; }
    # As an installed system has it.
    printf '127.0.0.1 localhost\n::1 localhost\n' >"$system/etc/hosts"
    echo "$packages" >"$system/stamp"
fi

mounts=()
unmount() {
    # An interrupted process may still have a file open there.
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
mounted "${CARGO_HOME:-$HOME/.cargo}" /cargo ro
mounted "$root" /src ro
mounted "$target" /src/target
mounted /proc /proc
mounted /sys /sys ro
mounted /dev /dev

# Everything must be in the local copy of the registry: the inner system reaches no network.
timeout 600 cargo fetch --locked >&2
inside() { # SECONDS COMMAND
    timeout "$1" chroot "$system" /usr/bin/env -i PATH=/usr/bin:/bin HOME=/root CARGO_HOME=/cargo CARGO_NET_OFFLINE=true \
        sh -c "cd /src && $2"
}
timed() { # SECONDS COMMAND
    local begin=$SECONDS
    inside "$1" "$2" || { say "$2 failed"; exit 1; }
    figures+=("$2: $((SECONDS - begin)) s")
}
inside 60 '! ls /usr/lib/x86_64-linux-gnu | grep -E "libibverbs|librdmacm|libclang"' || { say "the system is not clean"; exit 1; }
inside 60 'grep PRETTY /etc/os-release; rustc --version; cargo --version; gcc --version | head -n 1'
figures=()
timed 1800 'make demo'
timed 5400 'make test-host'
for program in demo/rdma-pingpong debug/rdma-doctor; do
    libraries=$(inside 60 "ldd target/$program")
    if grep -E 'ibverbs|rdmacm' <<<"$libraries"; then say "$program is linked with a library of RDMA"; exit 1; fi
done
said=$(inside 60 'target/debug/rdma-doctor') || { say "rdma-doctor failed"; exit 1; }
echo "$said"
grep -q 'libibverbs' <<<"$said" || { say "rdma-doctor does not speak of the library"; exit 1; }
for figure in "${figures[@]}"; do say "$figure"; done
