#!/usr/bin/env bash
# Compares the declarations of libibverbs and librdmacm with the crate rdma-sys and with the C headers: sizes, alignments,
# offsets, constants, types of functions. Then plants a difference, which must be found. Needs the -dev packages and libclang
# 14 or 15; `make vm-setup` installs them.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}

compare() { # WORD...: further flags of the compiler
    local binary
    # Sizes and offsets are those of an unoptimised build, too.
    binary=$("$cargo" --config 'profile.test.package.rdma-transport-verbs.opt-level=0' rustc -q -p rdma-transport-verbs --lib --profile test --features rdma-sys --message-format=json -- "$@" |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
    "$binary" sys::compare --nocapture
}

compare
if found=$(compare --cfg 'planted="layout"' 2>&1); then
    echo "layout.sh: a planted difference was not found" >&2
    exit 1
fi
grep -o 'ibv_mw_bind_info.mw_access_flags offset 24 size 8' <<<"$found" | sort | uniq -c |
    sed 's/^/the planted difference is found: /'
