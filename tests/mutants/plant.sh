# To be sourced, with the name of a defect: plants it in all later builds of cargo, in a separate folder.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
cargo=${CARGO:-cargo}
name=${1:?the name of a defect}
# `cargo test` builds with its own profile, in a folder for each defect.
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}/$(basename "$0" .sh)"
mkdir -p "$CARGO_TARGET_DIR"
wrapper=$CARGO_TARGET_DIR/rustc-$name
printf '#!/bin/sh\nexec "$@" --cfg '\''planted="%s"'\''\n' "$name" >"$wrapper"
chmod +x "$wrapper"
export RUSTC_WORKSPACE_WRAPPER=$wrapper CARGO_PROFILE_TEST_DEBUG=0

# The finder of the defect: the name of a test that panicked. A test that does not build finds nothing.
found() { # ARGUMENT...: of cargo test
    "$cargo" test -q "$@" --no-run
    { "$cargo" test -q "$@" 2>&1 || true; } | sed -nE "s/^thread '([^']+)' .*panicked at.*/\1/p" | sort -u | head -n 3 | paste -sd ' '
}

# Ends the run: prints the finder of the defect, or fails.
report() { # FOUND
    if [ -z "$1" ]; then
        echo "$(basename "$0"): the planted defect $name was not found" >&2
        exit 1
    fi
    echo "$1"
}
