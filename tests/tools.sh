#!/usr/bin/env bash
# Installs what a target of the Makefile needs beyond Rust: tools.sh nightly|cargo-fuzz|cargo-llvm-cov|llvm-tools...
set -euo pipefail
for tool in "$@"; do
    case $tool in
        nightly) rustup run nightly rustc --version > /dev/null 2>&1 || rustup toolchain install nightly --profile minimal ;;
        llvm-tools) rustup component add llvm-tools > /dev/null 2>&1 || rustup component add llvm-tools ;;
        *) command -v "$tool" > /dev/null || cargo install --locked "$tool" ;;
    esac
done
