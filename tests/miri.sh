#!/usr/bin/env bash
# Miri over the unit tests of the code that manages memory, keys and buffers. It finds accesses out of bounds or after their end, references
# that violate the rules of aliasing, and data races. Registered memory is on the heap there (`cfg(heap_memory)`): Miri has no mappings.
# Tests that call the kernel are left out: huge pages, nodes of memory, sockets, dma-bufs, and memory files, so that of `shm` only
# greetings, packets and records run. So are three tests of many thousand rounds. `miri.sh NAME` runs the tests with this name.
set -euo pipefail
cd "$(dirname "$0")/.."
tests/tools.sh nightly
toolchain=${NIGHTLY:-nightly}
if ! cargo "+$toolchain" miri --version > /dev/null 2>&1 && ! rustup component add --toolchain "$toolchain" miri rust-src; then
    echo "miri: the toolchain $toolchain has no component miri; NIGHTLY=nightly-YYYY-MM-DD names one that has it" >&2
    exit 1
fi
# Property tests store failed cases in a file, so Miri allows them to access the system.
export RUSTFLAGS="--cfg heap_memory" MIRIFLAGS="-Zmiri-disable-isolation ${MIRIFLAGS:-}" PROPTEST_CASES=${PROPTEST_CASES:-4}
run=(timeout 1800 cargo "+$toolchain" miri test --target-dir target/miri --no-default-features --lib)
skip=(--skip mem::file --skip sockets::interfaces --skip packets:: --skip mem::shared --skip passing:: --skip slices_go_through_a_socket)
skip+=(--skip what_cannot_be_preferred --skip poor_entropy --skip soft::keys::tests::as_a_map --skip an_update_ends)
skip+=(--skip direct_regions_are_counted)
if (($#)); then
    "${run[@]}" -p rdma-transport -p rdma-transport-embedded -p rdma-reactor -- "$@" "${skip[@]}"
    exit
fi
"${run[@]}" -p rdma-transport -- mem:: slab:: "${skip[@]}"
"${run[@]}" -p rdma-transport-embedded -- soft:: shm::greeting shm::packet shm::record "${skip[@]}"
"${run[@]}" -p rdma-reactor -- device::pool memory::region_memory memory::block_cache memory::region memory::registry "${skip[@]}"
