#!/usr/bin/env bash
# Runs fuzz targets: run.sh SECONDS [TARGET...], all of them without names. `JOBS` targets run at a time (2). New inputs are written to
# target/fuzz/corpus, and a finding to target/fuzz/artifacts; `run.sh minimise [TARGET...]` copies the inputs that add coverage into the
# corpora of the repository. A finding is a failure.
#
#   RUNS=10000000    a target also ends after this many executions; with 0 seconds only then
#   SANITIZER=none   without AddressSanitizer, which is several times as slow
#   FLAGS=...        for "cargo fuzz build": with --no-trace-compares tapes take half the time
set -euo pipefail
cd "$(dirname "$0")/../.."
what=${1:?"run.sh SECONDS|minimise [TARGET...]"}
shift
toolchain=${NIGHTLY:-nightly}
tests/tools.sh nightly cargo-fuzz
# Instrumented code is slow to link: the settings that make the release fast are left out.
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_DEBUG=line-tables-only
fuzz=(cargo "+$toolchain" fuzz)
sanitizer=${SANITIZER:-address}
options=(--fuzz-dir tests/fuzz --target-dir "target/fuzz/$sanitizer" --features libfuzzer --sanitizer "$sanitizer")
programs=target/fuzz/$sanitizer/x86_64-unknown-linux-gnu/release
all=$(ls tests/fuzz/targets | sed "s,[.]rs$,,")
# shellcheck disable=SC2086
"${fuzz[@]}" build "${options[@]}" ${FLAGS:-}

# The longest input of a target, bytes.
longest() {
    case $1 in
        cuts) echo 1500 ;;
        startup | programs) echo 600 ;;
        greeting | message | headers) echo 128 ;;
        script | datagrams) echo 200 ;;
        hostile) echo 100 ;;
        within_host) echo 1000 ;;
        *) echo 300 ;;
    esac
}

one() {
    local target=$1 own=target/fuzz/corpus/$1 kept=tests/fuzz/corpus/$1 log=target/fuzz/$1.log
    mkdir -p "$own" "target/fuzz/artifacts/$target" "$kept"
    if [ "$what" = minimise ]; then
        # Only inputs that add coverage to the earlier ones stay; the regression inputs always stay.
        local fresh=target/fuzz/minimised/$target
        rm -rf "$fresh" && mkdir -p "$fresh"
        "$programs/$target" -merge=1 -max_len="$(longest "$target")" "$fresh" "$kept" "$own" \
            > "$log" 2>&1
        find "$kept" -type f ! -name 'finding-*' -delete
        cp "$fresh"/* "$kept"/
        return
    fi
    if ! "$programs/$target" -max_total_time="$what" -runs="${RUNS:--1}" -max_len="$(longest "$target")" -timeout=20 \
        -rss_limit_mb=3000 -print_final_stats=1 -artifact_prefix="target/fuzz/artifacts/$target/" "$own" "$kept" > "$log" 2>&1; then
        tail -n 40 "$log" >&2
        echo "$target: a finding, see target/fuzz/artifacts/$target" >&2
        return 1
    fi
    echo "$target: $(sed -n 's/stat::number_of_executed_units: *//p' "$log") executions, $(grep -o 'cov: [0-9]*' "$log" | tail -n 1)"
}
export -f one longest
export what programs
printf '%s\n' "${@:-$all}" | tr ' ' '\n' | xargs -P "${JOBS:-2}" -I{} bash -c 'one {}'
