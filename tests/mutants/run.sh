#!/usr/bin/env bash
# Tests the tests: builds the simulation once per planted defect and requires that it finds the defect.
#
# Usage: tests/mutants/run.sh [NAME...]     (default: all)
# MUTANT_WORLDS=N sets how many worlds the simulation gets per defect (default: 1000).
#
# A defect is a line of the code behind `cfg!(planted = "NAME")` or `#[cfg(planted = "NAME")]`. A table in
# docs/testing.md has the effect and the finder of each name. The run fails if the simulation fails without a defect, if
# a defect is not found, if the names in the table and in the code differ, and on an argument that names no defect.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo=${CARGO:-cargo}
worlds=${MUTANT_WORLDS:-1000}
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}/mutants"
# Release code, without the settings that only slow down the build.
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_DEBUG=0
mkdir -p "$CARGO_TARGET_DIR"
log=$CARGO_TARGET_DIR/log

in_code=$(grep -rhoE 'cfg!?\(planted = "[^"]+"' --include='*.rs' reactor/src transport/src | cut -d '"' -f 2 | sort -u)
# Rows of the table: | `name` | effect | finder |
rows=$(sed -n '/^| defect /,/^$/p' docs/testing.md | sed -nE 's/^\| `([^`]+)` \|.*\| ([^|]+) \|$/\1=\2/p' | sort)
in_table=$(cut -d = -f 1 <<<"$rows")
if [ "$in_code" != "$in_table" ]; then
    echo "mutants: the defects in the code (<) and in the table of docs/testing.md (>) differ:" >&2
    diff <(echo "$in_code") <(echo "$in_table") | grep '^[<>]' >&2
    exit 1
fi
for name in "$@"; do
    if ! grep -qxF -- "$name" <<<"$in_code"; then
        echo "mutants: no defect is called \"$name\"; there are:" $in_code >&2
        exit 1
    fi
done

# A program in the place of rustc: cargo runs it for this workspace's packages only, and separates its outputs by its path.
wrapper() { # NAME
    local path=$CARGO_TARGET_DIR/rustc/$1
    mkdir -p "${path%/*}"
    printf '#!/bin/sh\nexec "$@" --cfg '\''planted="%s"'\''\n' "$1" >"$path"
    chmod +x "$path"
    echo "$path"
}

simulate() { # [NAME]: the simulation's exit status; the log has its output
    local binary
    if ! RUSTC_WORKSPACE_WRAPPER=${1:+$(wrapper "$1")} "$cargo" test -q --release -p rdma-reactor-tests --no-default-features \
        --test simulation --no-run --message-format=json >"$log.build" 2>"$log"; then
        cat "$log" >&2
        echo "mutants: ${1:-the code without a defect} does not build" >&2
        exit 1
    fi
    binary=$(sed -n '/"name":"simulation"/s/.*"executable":"\([^"]*\)".*/\1/p' "$log.build" | tail -n 1)
    SIM_SEEDS=$worlds timeout 900 "$binary" every_promise >"$log" 2>&1
}

if ! simulate; then
    tail -n 20 "$log" >&2
    echo "mutants: the simulation fails without a defect: mend that first" >&2
    exit 1
fi
[ $# -gt 0 ] || set -- $in_code
lost=0
printf '%-34s %-16s %s\n' defect "found by" "in, as"
printf '%-34s %-16s %s\n' "(none)" "-" "$worlds worlds pass"
for name in "$@"; do
    finder=$(sed -n "s/^$name=//p" <<<"$rows")
    if [ "$finder" != simulation ]; then
        # Another test plants the defect itself and fails if it does not find it.
        status=0
        timeout 900 "${finder//\`/}" "$name" >"$log" 2>&1 || status=$?
        found=$([ $status = 0 ] && tail -n 1 "$log" || true)
    else
        status=0
        simulate "$name" || status=$?
        world=$(sed -nE 's/^world ([0-9]+) of .* failed$/\1/p' "$log" | head -n 1)
        found=
        # A run that only ends, or takes too long, has found nothing: it must name a world.
        if [ $status != 0 ] && [ -n "$world" ]; then
            seed=$(sed -nE 's/.*SIM_SEED=(0x[0-9a-f]+).*/\1/p' "$log" | head -n 1)
            found="world $world: $(sed -n "s/^seed $seed: //p" "$log" | head -n 1 | cut -c 1-110)"
        fi
    fi
    if [ -z "$found" ]; then
        lost=$((lost + 1))
        found="NOT FOUND (exit status $status), see $log.$name"
        cp "$log" "$log.$name"
    fi
    printf '%-34s %-16s %s\n' "$name" "${finder//\`/}" "$found"
done
if [ $lost != 0 ]; then
    echo "mutants: $lost of $# planted defects were not found" >&2
    exit 1
fi
echo "all $# planted defects were found"
