#!/usr/bin/env bash
# Runs each test program with each planted defect, and prints which programs find it, and by which tests.
#
# Usage: PROGRAMS="NAME..." tests/mutants/matrix.sh [DEFECT...]     (default: all defects)
# `make mutants-matrix` names the programs of `make test-host`. MATRIX_SECONDS=N limits each run (default: 60).
#
# The results are in target/mutants/matrix: PROGRAM DEFECT RESULT SECONDS TEST... on a line. What is in the file is not run
# again, so the script can be stopped and continued, also with other programs and defects. Remove it when code has changed.
set -euo pipefail
. "$(dirname "$0")/programs.sh"
known "$@"
[ $# -gt 0 ] || set -- $defects
results=$CARGO_TARGET_DIR/matrix
touch "$results"

# Runs a program with a defect, or with none (`-`), unless the file has the result: pass, FAIL, HANG or DIED.
try() { # PROGRAM DEFECT
    local status=0 result tests
    ! grep -q "^$1 $2 " "$results" || return 0
    SECONDS=0
    run "${MATRIX_SECONDS:-60}" "${2#-}" "$1" || status=$?
    tests=$(failed)
    case $status in
        0) result=pass ;;
        124) result=HANG ;;
        101) result=FAIL ;;
        *) result=DIED ;;
    esac
    echo "$1 $2 $result $SECONDS $tests" | tee -a "$results"
}

build $PROGRAMS
for program in $PROGRAMS; do
    try "$program" -
    if ! grep -q "^$program - pass " "$results"; then
        echo "matrix: $program does not pass within the limit without a defect, and is left out" >&2
        continue
    fi
    for defect in "$@"; do
        try "$program" "$defect"
    done
done

# A row has the number of programs that found the defect, and the first test of three of them.
echo
echo "| defect | found by | first finders |"
echo "|---|---|---|"
for defect in "$@"; do
    awk -v defect="$defect" '
        $2 == "-" && $3 == "pass" { sound[$1] = 1 }
        $2 != defect || !sound[$1] { next }
        { all++ }
        $3 != "pass" { found++ }
        $3 != "pass" && found <= 3 { finders = finders (finders ? ", " : "") "`" $1 ($5 ? "::" $5 : " (" tolower($3) ")") "`" }
        END { printf "| `%s` | %d of %d | %s |\n", defect, found, all, finders }' "$results"
done
