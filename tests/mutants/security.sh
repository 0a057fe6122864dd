#!/usr/bin/env bash
# Plants a defect in what secures connections, and requires that the unit tests of `security` or the middleman's test find it.
#
# Usage: tests/mutants/security.sh NAME
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo=${CARGO:-cargo}
name=${1:?usage: tests/mutants/security.sh NAME}
# `cargo test` builds with its own profile, in a folder for each defect.
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}/security"
mkdir -p "$CARGO_TARGET_DIR"
wrapper=$CARGO_TARGET_DIR/rustc-$name
printf '#!/bin/sh\nexec "$@" --cfg '\''planted="%s"'\''\n' "$name" >"$wrapper"
chmod +x "$wrapper"
export RUSTC_WORKSPACE_WRAPPER=$wrapper CARGO_PROFILE_TEST_DEBUG=0
export FLIP_STEP=101

# What has found the defect: the name of a test that panicked. A test that does not build finds nothing.
found() { # ARGUMENT...: of cargo test
    "$cargo" test -q "$@" --no-run
    { "$cargo" test -q "$@" 2>&1 || true; } | sed -nE "s/^thread '([^']+)' .*panicked at.*/\1/p" | sort -u | head -n 3 | paste -sd ' '
}

by=$(found -p rdma-reactor --features tls,psk --lib security::)
if [ -z "$by" ]; then
    by=$(found -p rdma-reactor-tests --no-default-features --test security)
fi
if [ -z "$by" ]; then
    echo "security.sh: the planted defect $name was not found" >&2
    exit 1
fi
echo "$by"
