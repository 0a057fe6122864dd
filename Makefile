# Everything a new machine needs beyond Rust, make and a C compiler is installed from here.
CARGO ?= cargo
export CARGO_TERM_COLOR ?= auto
SEEDS ?= 1000
SECONDS ?= 3600

.DEFAULT_GOAL := help
.PHONY: help build demo test test-host test-layout package test-debian13 test-aarch64 test-cluster test-rdma test-rdma-full instructions instructions-rdma instructions-write lint audit fmt doc bench bench-setup bench-rdma mutants loom asan coverage fuzz fuzz-smoke soak endurance hardware-report vm vm-setup clean

help: ## What there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

build: ## Library and programs, release
	$(CARGO) build --release --bins

demo: ## Ping-pong between two processes, 1 B to 1 MiB: tables, a histogram, target/demo/latency.svg
	$(CARGO) build --profile demo -p rdma-reactor-examples --no-default-features --features verbs --bin rdma-pingpong
	target/demo/rdma-pingpong demo --all --svg target/demo/latency.svg

test: vm-setup ## What each change is tested with; test-rdma-full and soak have the rest. On two cores about 17 minutes with what they build, 11 when it is built
	$(MAKE) test-host instructions test-layout test-cluster test-rdma

# What needs a device is left to the guest.
DEVICE_TESTS = adapter rdma rdma_auto rdma_churn rdma_faults rdma_queues rdma_scale rdma_secured rdma_wire rdma_without_siw rdma_witnessed interop_siw misbehaviour_siw
HOST_TESTS = libraries corpus $(filter-out $(DEVICE_TESTS),$(basename $(notdir $(wildcard examples/tests/*.rs tests/tests/*.rs))))
HOST = --workspace --lib --bins $(HOST_TESTS:%=--test %)

test-host: ## What needs no RDMA device
	$(CARGO) test $(HOST) --no-run
	timeout 1200 $(CARGO) test $(HOST)
	timeout 300 $(CARGO) test --workspace --doc

instructions: vm-setup ## Instructions of messages, writes and turns under callgrind; 3 % more than tests/data/instructions.txt fails
	$(CARGO) build --release -p rdma-reactor-tests --bin rdma-instructions
	timeout 300 target/release/rdma-instructions

instructions-write: vm-setup ## Counts them anew, and writes that file
	$(CARGO) build --release -p rdma-reactor-tests --bin rdma-instructions
	timeout 300 target/release/rdma-instructions write

instructions-rdma: vm-setup ## Instructions of a round trip on siw and rxe, perftest's and ours, in the guest
	tests/vm/instructions.sh

test-layout: vm-setup ## The declarations of libibverbs and librdmacm against rdma-sys and the C headers
	$(VERBS_ENV) timeout 900 tests/layout.sh

test-aarch64: ## The library for aarch64: checked, and the transport's unit tests under qemu-user
	timeout 1800 tests/aarch64.sh

package: ## Packs both libraries, and tests what was packed in an empty folder
	timeout 1800 tests/package.sh

test-debian13: ## A build in a clean Debian 13, without -dev packages and libclang
	timeout 1800 tests/debian13.sh

lint: vm-setup ## Format, clippy and documentation, warnings are errors; also without the devices, and with rdma-sys; and make audit
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) clippy -p rdma-transport -p rdma-reactor --no-default-features --all-targets -- -D warnings
	$(VERBS_ENV) $(CARGO) clippy -p rdma-transport --features rdma-sys --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --document-private-items
	tests/audit.sh

audit: ## Licences, sources and advisories of the crates below; the API against the last release
	tests/audit.sh

fmt: ## Format the code
	$(CARGO) fmt --all

doc: ## API documentation, target/doc/rdma_reactor/index.html
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps

bench: build ## Against bare TCP and programs by others, in one run; as root on Debian, it installs those first
	@if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then $(MAKE) bench-setup || echo "bench: not all is installed" >&2; fi
	target/release/bench --json target/bench/bench.json --svg target/bench/latency.svg \
		--connections-svg target/bench/connections.svg

bench-setup: ## Installs the programs that make bench compares with
	tests/packages.sh ucx-utils libfabric-bin sockperf iperf3 openssl

bench-rdma: vm-setup ## Against perftest and rstream on siw and rxe, in one run of the guest
	tests/vm/bench.sh

mutants: vm-setup ## Plant defects; a test must find each
	$(VERBS_ENV) tests/mutants/run.sh

loom: ## What threads share with a reactor, in every order in which they can run
	RUSTFLAGS="--cfg loom_model" LOOM_MAX_PREEMPTIONS=$${LOOM_MAX_PREEMPTIONS:-4} timeout 1800 $(CARGO) test --target-dir target/loom -p rdma-reactor --lib interleavings

asan: ## AddressSanitizer and LeakSanitizer over unit tests, conformance, scripted peers and the corpora of the fuzz targets
	tests/asan.sh

coverage: ## Line coverage of the reactor and the embedded provider; fails below 92 per cent
	tests/coverage.sh

fuzz-smoke: ## Each fuzz target for a minute
	tests/fuzz/run.sh 60

fuzz: ## Each fuzz target for SECONDS, an hour unless said otherwise
	tests/fuzz/run.sh $(SECONDS)

soak: vm-setup ## 1,000,000 histories of two connections, 100,000 simulated worlds and 20,000 secured ones, every octet of a secured connection changed, longer property tests, 3,000,000 messages that must not be late, 10,000 connections for ten minutes, 1,000,000 connections one after another, 10,000 connections and all of secured connections on each device
	PROPTEST_CASES=20000 timeout 3600 $(CARGO) test --release -p rdma-reactor -p rdma-transport -p rdma-reactor-tests --lib --test wire
	PROPTEST_CASES=1000000 timeout 3600 $(CARGO) test --release -p rdma-reactor --lib conn::histories
	$(MAKE) loom asan
	RDMA_CYCLES=10000 $(MAKE) test-rdma-full
	tests/vm/secured.sh
	$(VERBS_ENV) BINDING=rdma-sys SUITES='rdma_queues rdma_scale rdma_secured' tests/vm/conformance.sh
	SIM_SEEDS=100000 timeout 7200 $(CARGO) test -p rdma-reactor-tests --test simulation -- --nocapture
	FLIP_STEP=1 timeout 3600 $(CARGO) test -p rdma-reactor-tests --test security -- --nocapture
	WAKEUP_MESSAGES=1000000 timeout 3600 $(CARGO) test -p rdma-reactor-tests --test wakeups -- --nocapture
	$(MAKE) endurance

endurance: ## 1,000,000 connections one after another, and 10,000 for ten minutes with a fault every 10 s, on the embedded provider
	$(CARGO) build --release -p rdma-reactor-tests --bin rdma-endurance
	timeout 1800 target/release/rdma-endurance cycles 1000000
	timeout 1200 target/release/rdma-endurance echo 10000 600 10

# rdma-sys needs a libclang that its bindgen understands: 14 or 15. The guest's set-up installs it.
VERBS_ENV = LIBCLANG_PATH="$$(ls -d /usr/lib/llvm-14/lib /usr/lib/llvm-15/lib 2>/dev/null | head -n 1)"

vm-setup: ## The guest for kernel RDMA, and what the verbs provider is built with
	tests/vm/setup.sh

vm: export VM_CMD = $(CMD)
vm: ## make vm CMD='rdma link': a command in a guest with the devices siw0 and rxe0
	@test -n "$$VM_CMD" || { echo "usage: make vm CMD='rdma link'" >&2; exit 2; }
	@tests/vm/run.sh "$$VM_CMD"

test-rdma: vm-setup ## The kernel's siw and rxe, in the guest: conformance, faults, others' programs and ours
	tests/vm/all.sh

test-rdma-full: vm-setup ## That and the rest of the guest: more settings, rdma-sys, siw against the embedded provider, programs, refusals, Valgrind
	$(VERBS_ENV) tests/vm/all.sh --full

hardware-report: ## One file about the RDMA devices of this machine, for an issue; GUEST=1: about siw and rxe, in the guest
	tests/hardware-report.sh $(REPORT)

test-cluster: ## rdma-mesh under Slurm, Open MPI, MPICH and as Kubernetes starts it, and its page in a browser
	tests/cluster/setup.sh
	tests/vm/build.sh rdma-mesh
	timeout 900 tests/cluster/run.sh

clean: ## Remove what was built
	$(CARGO) clean
