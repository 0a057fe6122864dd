#!/usr/bin/env bash
# What `make test` leaves out, because it takes hours, root, downloads or a nightly compiler: the
# commands of tests/data/commands.txt with the word soak. soak.sh [WORDS...] runs those that contain
# one of the words. One line follows when a command has ended: its status, its seconds, and the
# first seed of its worlds. One that fails does not stop the others, and the status at the end is 1
# then. The logs are in target/soak.
#
#   FIRST=N       the first seed of the worlds; by default another one each day
#   LIMIT=10800   seconds for each command
set -uo pipefail
cd "$(dirname "$0")/.."
export SIM_FIRST=${FIRST:-$(($(date +%s) / 86400 * 1000000))}
export AIO_FIRST=$SIM_FIRST CALL_FIRST=$SIM_FIRST TRANSFER_FIRST=$SIM_FIRST
logs=${CARGO_TARGET_DIR:-target}/soak failed=0 nth=0
mkdir -p "$logs" && rm -f "$logs"/*.log || exit 1
# Processes in the background do not receive an interrupt by themselves.
trap 'trap - TERM; kill 0' INT TERM HUP
mapfile -t commands < <(sed -n 's/^soak | [^|]* | //p' tests/data/commands.txt | if (($#)); then grep -F "${@/#/-e}"; else cat; fi)
for command in "${commands[@]}"; do
    log=$logs/$((nth += 1)).log SECONDS=0 status=ok
    # Without the variables of make, which name its descriptors.
    env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL timeout "${LIMIT:-10800}" bash -c "$command" >"$log" 2>&1 </dev/null || status=FAILED failed=1
    printf '%-6s %6d s  %s  (first seed %d, %s)\n' $status $SECONDS "$command" "$SIM_FIRST" "$log" | tee -a "$logs/jobs"
done
[ $nth -gt 0 ] || { echo "soak.sh: no command contains $*" >&2; exit 2; }
exit $failed
