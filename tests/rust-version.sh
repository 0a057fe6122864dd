#!/usr/bin/env bash
# Fails if a package in Cargo.lock declares a newer Rust than the workspace does. Also fails for the
# one construct of newer Rust that clippy does not know, and that was used here: before Rust 1.89, a
# variable cannot hold `format_args!`. `make test-debian13` finds others.
set -euo pipefail
cd "$(dirname "$0")/.."
most=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
if git grep -n 'let [a-z_]* = format_args!' -- '*.rs' >&2; then
    echo "rust-version.sh: Rust $most does not compile this: write it where it is used" >&2
    exit 1
fi
# The download is not a part of the timed command.
cargo fetch --locked
timeout 300 cargo metadata --locked --all-features --format-version 1 |
    grep -Eo '\{"name":"[^"]+","version":"[^"]+","id"|"rust_version":"[^"]+"' |
    awk -F '"' -v most="$most" -v locked="$(grep -c '^name = ' Cargo.lock)" '
        function number(version, part) { split(version, part, "."); return (part[1] * 1000 + part[2]) * 1000 + part[3] }
        $2 == "name" { name = $4; version = $8; seen++; next }
        number($4) > number(most) {
            printf "rust-version.sh: %s %s needs Rust %s, the workspace declares %s: ", name, version, $4, most
            printf "cargo update -p %s, or with --precise and an older version\n", name
            failed = 1
        }
        END {
            if (seen == locked) exit failed
            printf "rust-version.sh: %d packages of %d in Cargo.lock were found\n", seen, locked
            exit 1
        }' >&2
