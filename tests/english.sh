#!/usr/bin/env bash
# Judges the English of comments, documents and messages, with rustc alone.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p target
CARGO_MANIFEST_DIR=$PWD/tests timeout 120 "${RUSTC:-rustc}" --edition 2024 --test -C opt-level=1 -o target/english tests/tests/english.rs
RUST_BACKTRACE=0 timeout 120 target/english --quiet --nocapture
