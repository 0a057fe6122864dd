#!/usr/bin/env bash
# Installs the tools that a target of the Makefile needs besides Rust: tools.sh
# nightly|cargo-fuzz|cargo-llvm-cov|llvm-tools...
set -euo pipefail
# The optimizations of the tools' own release profiles take longer to build than they save: a check of the crates is
# seconds.
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_OPT_LEVEL=0
for tool in "$@"; do
    case $tool in
        nightly) rustup run nightly rustc --version > /dev/null 2>&1 || rustup toolchain install nightly --profile minimal ;;
        llvm-tools) rustup component add llvm-tools > /dev/null 2>&1 || rustup component add llvm-tools ;;
        # In these versions, so that the same commit installs the same tools on each machine. A tool that is installed already stays.
        cargo-deny) command -v "$tool" > /dev/null || cargo install --locked --version 0.20.2 "$tool" ;;
        cargo-fuzz) command -v "$tool" > /dev/null || cargo install --locked --version 0.13.2 "$tool" ;;
        # In the newest version: cargo-semver-checks and cargo-llvm-cov read formats that change with the compiler of the machine.
        *) command -v "$tool" > /dev/null || cargo install --locked "$tool" ;;
    esac
done
