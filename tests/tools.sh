#!/usr/bin/env bash
# Installs what a target of the Makefile needs beyond Rust: tools.sh nightly|cargo-fuzz|cargo-llvm-cov|llvm-tools...
set -euo pipefail
# What the tools' own release profiles optimise takes longer to build than it saves: a check of the crates is seconds.
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_OPT_LEVEL=0
for tool in "$@"; do
    case $tool in
        nightly) rustup run nightly rustc --version > /dev/null 2>&1 || rustup toolchain install nightly --profile minimal ;;
        llvm-tools) rustup component add llvm-tools > /dev/null 2>&1 || rustup component add llvm-tools ;;
        *) command -v "$tool" > /dev/null || cargo install --locked "$tool" ;;
    esac
done
