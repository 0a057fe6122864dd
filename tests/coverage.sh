#!/usr/bin/env bash
# coverage.sh FLAG...: line coverage of the libraries by the tests of `make test-host`, which the
# Makefile names as flags of cargo. Lines of tests do not count. Prints the files with the most
# lines that never run, and fails if a part is below `LEAST` per cent (92), or the part that talks
# to devices below 80 per cent: the tests in the guest run the rest of it.
# `target/coverage/lcov.info` has all lines.
set -euo pipefail
cd "$(dirname "$0")/.."
tests/tools.sh llvm-tools cargo-llvm-cov
# Fewer worlds and histories than usual: running each line needs less than checking a property.
export PROPTEST_CASES=${PROPTEST_CASES:-64} SIM_SEEDS=${SIM_SEEDS:-300} HOSTILE_TAPES=${HOSTILE_TAPES:-300} AIO_WORLDS=${AIO_WORLDS:-500}
export CALL_WORLDS=${CALL_WORLDS:-500} TRANSFER_WORLDS=${TRANSFER_WORLDS:-500} RUST_TEST_THREADS=${RUST_TEST_THREADS:-4}
export CARGO_TARGET_DIR=$PWD/target/coverage
cargo llvm-cov clean --workspace --profraw-only
timeout 7200 cargo llvm-cov test --no-report --workspace --lib "$@"
lines=$CARGO_TARGET_DIR/lcov.info
# The profile of a process that a test has killed may be cut off.
timeout 600 cargo llvm-cov report --failure-mode all --lcov --output-path "$lines"
# One row for each line of code that counts: the file, the line, and the number of its executions.
rows=$(awk -v root="$PWD/" '
    /^SF:/ {
        file = substr($0, 4)
        if (index(file, root) == 1) file = substr(file, length(root) + 1)
        counts = file ~ /^(reactor|transport(\/embedded|\/verbs)?)\/src\// && file !~ /\/(tests|histories)(\/|\.rs)|_tests\.rs|\/(bench|fake|hostile_file|patience|test_memory)\.rs/
        # The lines from here on are tests.
        tests = 0
        if (counts) {
            for (line = 1; (getline text < file) > 0; line++) {
                if (text ~ /^mod [a-z_]+ \{/ && before ~ /^#\[cfg\((all\()?test/) { tests = line; break }
                before = text
            }
            close(file)
        }
    }
    /^DA:/ && counts {
        split(substr($0, 4), at, ",")
        if (!tests || at[1] + 0 < tests) print file, at[1], at[2]
    }' "$lines")
echo "lines that nothing runs:"
awk '$3 == 0 { missed[$1]++ } END { for (file in missed) printf "%5d %s\n", missed[file], file }' <<<"$rows" | sort -rn | awk 'NR <= 30'
awk -v least="${LEAST:-92}" '
    {
        count = split($1, names, "/")
        if (names[1] == "reactor") part = "reactor"
        else if (names[2] == "src") part = count > 3 ? "transport/" names[3] : "transport"
        else if (names[2] == "verbs") part = names[4] == "exchange" ? "verbs/exchange" : "verbs"
        else part = count > 4 ? "embedded/" names[4] : "embedded"
        all[part]++
        if ($3 > 0) run[part]++
    }
    END {
        for (part in all) {
            share = 100 * run[part] / all[part]
            printf "%s: %d of %d lines, %.1f %%\n", part, run[part], all[part], share
            if (share < (part == "verbs" ? 80 : least)) low = 1
        }
        exit low
    }' <<<"$rows"
