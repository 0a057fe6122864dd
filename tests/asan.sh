#!/usr/bin/env bash
# AddressSanitizer and LeakSanitizer over the unit tests of the libraries, conformance, the recorded connections, scripted peers, the
# corpora of the fuzz targets, and worlds of the simulation (SIM_SEEDS, by default 1,000). Registered memory is on the heap there
# (`cfg(heap_memory)`), so that an access past its end is found. `asan.sh NAME` runs the tests with this name.
set -euo pipefail
cd "$(dirname "$0")/.."
tests/tools.sh nightly
toolchain=${NIGHTLY:-nightly}
export RUSTFLAGS="-Zsanitizer=address --cfg heap_memory" ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1
export PROPTEST_CASES=${PROPTEST_CASES:-64} SIM_SEEDS=${SIM_SEEDS:-1000}
# The fake device of the unit tests lends memory that it never frees, as a C library does for as long as it is loaded. In three tests it
# refuses to release an object that it may still use, so the library keeps that object and its device until the process ends.
mkdir -p target/asan
cat > target/asan/suppressions <<'END'
leak:transport/verbs/src/fake.rs
leak:rdma_transport_verbs::adapter_tests::a_registration_that_is_not_given_back_keeps_its_memory
leak:rdma_transport_verbs::adapter_tests::a_queue_pair_that_is_not_destroyed_is_reported
leak:rdma_transport_verbs::adapter_tests::a_shared_queue_that_is_not_destroyed_is_reported
END
export LSAN_OPTIONS=suppressions=$PWD/target/asan/suppressions:print_suppressions=0
run=(timeout 1800 cargo "+$toolchain" test --target x86_64-unknown-linux-gnu --target-dir target/asan)
packages=(-p rdma-transport -p rdma-transport-embedded -p rdma-transport-verbs -p rdma-reactor -p rdma-reactor-tests -p rdma-reactor-fuzz)
"${run[@]}" "${packages[@]}" --lib --test conformance --test wire --test interop_wire --test corpus --test simulation "$@"
