#!/usr/bin/env bash
# The embedded provider with the kernel's siw, every operation in both directions, over the segments of an Ethernet and
# over large ones; and the reactions of both to bytes that violate the rules. Builds on the host, runs in the guest.
set -euo pipefail
cd "$(dirname "$0")/../.."
binaries=$(tests/vm/build.sh interop_siw misbehaviour_siw)
interop=$(sed -n 1p <<<"$binaries") misbehaviour=$(sed -n 2p <<<"$binaries")

# siw's traffic passes through the loopback, whose segments are large. The tests with one of these words depend on
# segments. One test at a time: the emulated machine is slow.
VM_TIMEOUT=${VM_TIMEOUT:-1200} exec tests/vm/run.sh "ulimit -n 65536
    timeout 300 $interop --test-threads=1 ${*:-_with_crc both_ways vectored} &&
    timeout 300 $misbehaviour --test-threads=1 --nocapture $* &&
    ip link set lo mtu 1500 && timeout 500 $interop --test-threads=1 $*"
