#!/usr/bin/env bash
# Datagrams of the embedded provider and of the kernel's rxe, captured between the two in the guest, field by field as tshark's dissectors
# show them: dissect.py lists the fields that may differ. Installs tshark.
set -euo pipefail
cd "$(dirname "$0")/../.."
tests/packages.sh tshark python3
capture=$PWD/target/vm/roce.pcap
mkdir -p "${capture%/*}" && rm -f "$capture"
INTEROP_CAPTURE=$capture tests/vm/interop.sh '^rxe +iwarp '
python3 tests/vm/dissect.py "$capture"
