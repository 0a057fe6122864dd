#!/usr/bin/env bash
# The embedded provider against the kernel's siw, every operation in both directions, over large segments and over those
# of an Ethernet; and what both make of octets that break the rules. Builds on the host, runs in the guest.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo=${CARGO:-cargo}

build() {
    "$cargo" test -p rdma-reactor-tests --features verbs --test "$1" --no-run --message-format=json |
        sed -n '/"kind":\["test"\]/s/.*"executable":"\([^"]*\)".*/\1/p'
}
interop=$(build interop_siw)
misbehaviour=$(build misbehaviour_siw)
test -n "$interop" -a -n "$misbehaviour" || { echo "a test binary was not built" >&2; exit 1; }

# siw's traffic goes through the loopback. One test at a time: the emulated machine is slow.
VM_TIMEOUT=${VM_TIMEOUT:-1200} exec tests/vm/run.sh "ulimit -n 65536
    timeout 300 $interop --test-threads=1 $* && timeout 300 $misbehaviour --test-threads=1 --nocapture $* &&
    ip link set lo mtu 1500 && timeout 500 $interop --test-threads=1 $*"
