#!/usr/bin/env bash
# memlock.sh, valgrind.sh, programs.sh and refusals.sh, in sequence in one guest. Builds on the host.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=$(tests/vm/build.sh raw-echo)
bin=${bin%/*}
script='failed=0; '
# The last one removes the devices.
for name in memlock valgrind programs refusals; do
    script+="echo '== $name'; bash tests/vm/$name.sh --inside '$bin' || { failed=1; echo '$name FAILED'; }; "
done
VM_FORCE=1 VM_TIMEOUT=${VM_TIMEOUT:-900} exec tests/vm/run.sh "${script}exit \$failed"
