#!/usr/bin/env bash
# Tests the tests: plants one defect after another, and requires that the tests in its row of docs/testing.md find it.
#
# Usage: tests/mutants/run.sh [NAME...]     (default: all)
# MUTANT_WORLDS=N sets how many worlds the simulation gets per defect (default: 1000).
#
# A defect is a line of the code behind `planted("NAME")`. The run fails if one of the tests fails without a defect, if a
# defect is not found, and on an argument that names no defect. `--test structure` compares the table with the code.
set -euo pipefail
. "$(dirname "$0")/programs.sh"
known "$@"
[ $# -gt 0 ] || set -- $defects

# Finders of a defect, one a line: PROGRAM [FILTER], or a script.
finders() { # NAME...
    local name
    for name in "$@"; do
        sed -n "s/^$name=//p" <<<"$rows" | sed 's/, /\n/g'
    done | awk '!seen[$0]++'
}

mapfile -t tests < <(finders "$@" | grep -v '\.sh$')
[ ${#tests[@]} = 0 ] || build $(cut -d ' ' -f 1 < <(printf '%s\n' "${tests[@]}") | sort -u)
printf '%-42s %8s  %s\n' defect seconds "found by"
for finder in "${tests[@]}"; do
    SECONDS=0
    if ! run 900 "" $finder; then
        tail -n 20 "$log" >&2
        echo "mutants: $finder fails without a defect: mend that first" >&2
        exit 1
    fi
    printf '%-42s %8s  %s\n' "(none)" $SECONDS "- ($finder passes)"
done
lost=0
for name in "$@"; do
    SECONDS=0
    found=
    while [ -z "$found" ] && read -r finder; do
        case $finder in
            # A script plants the defect itself.
            *.sh) ! timeout 900 "$finder" >"$log" 2>&1 || found="$finder: $(tail -n 1 "$log")" ;;
            # A run that only dies, or takes too long, has found nothing: a test must fail.
            *) run 900 "$name" $finder || found=$(failed) ;;
        esac
    done < <(finders "$name")
    # The simulation names the world in which it found the defect.
    world=$(sed -nE 's/^(world [0-9]+) of .* failed$/, \1/p' "$log" | head -n 1)
    if [ -z "$found" ]; then
        lost=$((lost + 1))
        cp "$log" "$log.$name"
        found="NOT FOUND, see $log.$name"
    fi
    printf '%-42s %8s  %s\n' "$name" $SECONDS "$found$world"
done
if [ $lost != 0 ]; then
    echo "mutants: $lost of $# planted defects were not found" >&2
    exit 1
fi
echo "all $# planted defects were found"
