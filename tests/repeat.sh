#!/usr/bin/env bash
# repeat.sh N TARGET: `make TARGET` N times in sequence, each time with the tests of every program in another order. It prints the time of
# each run, stops at the first run that fails, and prints that run's log. At the end it prints the number of steps that were repeated
# because of a known defect of the guest's kernel, with the name of the defect. The logs are in target/repeat.
#
#   BUSY=4      this number of processes that only keep a processor busy at the same time
#   SEED=1      the seed of the first order; each run uses the next one
set -uo pipefail
cd "$(dirname "$0")/.."
count=${1:?usage: repeat.sh N TARGET} target=${2:?usage: repeat.sh N TARGET} seed=${SEED:-1} busy=${BUSY:-0}
case $count$seed$busy in *[!0-9]*) echo "repeat.sh: N, SEED and BUSY are numbers" >&2; exit 2 ;; esac
logs=${CARGO_TARGET_DIR:-target}/repeat
mkdir -p "$logs" && rm -f "$logs"/*.log || exit 1

# Processes in the background do not receive an interrupt by themselves.
trap 'trap - TERM; kill 0' INT TERM HUP
loops=()
trap '[ ${#loops[@]} = 0 ] || kill "${loops[@]}"' EXIT
for ((nth = 0; nth < busy; nth++)); do
    while :; do :; done &
    loops+=($!)
done

repeated() { # LOG...: steps that were repeated because of a known defect
    sed -n 's/^steps repeated because .*: \([0-9]*\)$/\1/p' "$@" | awk '{ sum += $1 } END { print sum + 0 }'
}

passed=0
for ((nth = 0; nth < count; nth++)); do
    log=$logs/$nth.log start=$SECONDS outcome=ok
    # In the background: a trap has to wait for a command in the foreground.
    SHUFFLE=$((seed + nth)) ${MAKE:-make} "$target" >"$log" 2>&1 </dev/null &
    if wait $!; then
        passed=$((passed + 1))
    else
        cat "$log"
        outcome="FAILED; the same order again: SHUFFLE=$((seed + nth)) make $target"
    fi
    echo "run $((nth + 1)) of $count, order $((seed + nth)): $((SECONDS - start)) s, $(repeated "$log") steps repeated, $outcome"
    [ "$outcome" = ok ] || break
done
echo "$passed of $count runs of make $target passed in $SECONDS s, $busy busy processes beside them, $(repeated "$logs"/*.log) steps repeated:"
# The lines that all.sh prints behind its sum: the numbers, and the defects.
awk '/^steps repeated because/ { on = 1; next } !/^ +[0-9]+ / { on = 0 } on { count = $1; $1 = ""; all[$0] += count }
    END { for (defect in all) print "  " all[defect] defect; if (!length(all)) print "  none" }' "$logs"/*.log
[ "$passed" = "$count" ]
