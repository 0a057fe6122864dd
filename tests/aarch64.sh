#!/usr/bin/env bash
# Checks the library for aarch64, and runs the tests of the transport there under qemu-user. The standard library of that
# architecture comes from Debian's rustc-web, with the compiler that it belongs to: both are unpacked in the cache, not
# installed. The layouts of C structures are asserted at compile time. Needs root only for the cross linker and qemu-user.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${XDG_CACHE_HOME:-${HOME:?}/.cache}/rdma-reactor/aarch64
triple=aarch64-unknown-linux-gnu

say() { echo "aarch64: $*" >&2; }

tests/packages.sh gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static

mkdir -p "$cache"
exec 9>"$cache/lock"
flock -w 1800 9 || { say "another run has held $cache/lock for 30 minutes"; exit 1; }
if [ ! -e "$cache/stamp" ]; then
    say "fetching the compiler and the standard library"
    rm -rf "$cache/apt" "$cache/root" "$cache/debs"
    mkdir -p "$cache"/apt/{lists/partial,archives/partial} "$cache/root" "$cache/debs"
    # Lists of both architectures, beside those of the system.
    apt() {
        apt-get -qq -o APT::Architectures::=amd64 -o APT::Architectures::=arm64 -o APT::Sandbox::User=root \
            -o Dir::State="$cache/apt" -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache="$cache/apt" "$@"
    }
    apt update >&2
    version=$(apt-cache depends rustc-web | sed -n 's/.*Depends: libstd-rust-web-dev.*/libstd-rust-web-dev/p' | head -n 1)
    [ -n "$version" ] || { say "apt offers no rustc-web"; exit 1; }
    library=$(apt-cache depends libstd-rust-web-dev | sed -n 's/.*Depends: \(libstd-rust-web-[0-9.]*\).*/\1/p' | head -n 1)
    llvm=$(apt-cache depends "$library" | sed -n 's/.*Depends: \(libllvm[0-9]*\).*/\1/p' | head -n 1)
    (cd "$cache/debs" && apt download rustc-web "$library" libstd-rust-web-dev "$llvm" libstd-rust-web-dev:arm64)
    for package in "$cache"/debs/*.deb; do dpkg -x "$package" "$cache/root"; done
    rm -rf "$cache/debs" "$cache/apt"
    touch "$cache/stamp"
fi

export LD_LIBRARY_PATH=$cache/root/usr/lib/x86_64-linux-gnu
export RUSTC=$cache/root/usr/bin/rustc
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/aarch64
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu"
say "$("$RUSTC" --version)"
cargo check --target $triple -p rdma-transport -p rdma-reactor
# qemu-user hands no advice about pages to the kernel, which that test reads back.
cargo test --target $triple -p rdma-transport --lib -- --skip large_mappings_are_aligned_and_take_huge_pages
