# Everything a new machine needs beyond Rust, make and a C compiler is installed from here.
CARGO ?= cargo
export CARGO_TERM_COLOR ?= auto
SEEDS ?= 1000
SECONDS ?= 3600

.DEFAULT_GOAL := help
.PHONY: help build demo quick test test-host test-layout test-dissector test-cluster test-same-host test-rdma test-rdma-full test-repeat \
	soak endurance hostile mutants mutants-matrix loom asan miri fuzz fuzz-smoke coverage instructions instructions-lto instructions-write instructions-rdma \
	bench bench-setup bench-rdma fmt lint lint-all audit doc package publish test-debian13 test-cross vm vm-setup hardware-report clean

help: ## Print this list
	@awk -F':.*## ' '/^##@/ { printf "\n%s\n", substr($$0, 5) } /^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' \
		$(MAKEFILE_LIST)

##@ Try it

demo: ## Ping-pong of two processes, 1 B to 1 MiB: tables, target/demo/latency.svg
	$(CARGO) build --profile demo -p rdma-reactor-tools --no-default-features --features verbs --bin rdma-pingpong
	target/demo/rdma-pingpong demo --all --svg target/demo/latency.svg

build: ## All programs, in target/demo
	$(CARGO) build --profile demo -p rdma-reactor-examples -p rdma-reactor-tools --bins

doc: ## API documentation and the guide, in target/doc
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(LIBRARIES:%=-p %) --no-deps $(TESTED_FEATURES:%=--features %)

clean: ## Remove what was built
	$(CARGO) clean

##@ Test

LIBRARIES = rdma-transport rdma-transport-embedded rdma-transport-verbs rdma-reactor
# The features with which the package of the tests uses the libraries: no unit test is left out, and each library is built once.
TESTED_FEATURES = rdma-transport/conformance $(addprefix rdma-reactor/,async bytes datagram keylog psk tls tokio)

quick: ## After each change, a minute: unit tests, embedded conformance
	$(CARGO) test --profile quick $(LIBRARIES:%=-p %) --lib $(TESTED_FEATURES:%=--features %)
	timeout 600 $(CARGO) test --profile quick -p rdma-reactor-tests --test conformance iwarp::

test: vm-setup ## Before each commit. On two cores 6 minutes; with all building, 12
	$(MAKE) build-host
	$(MAKE) $(TWO) $(HOST_STEPS) test-same-host
	$(MAKE) test-rdma

# What needs a device is left to the guest.
DEVICE_TESTS = adapter rdma rdma_auto rdma_churn rdma_contract rdma_exchange rdma_exchange_wire rdma_faults rdma_hidden rdma_queues rdma_sample rdma_scale rdma_secured rdma_wire rdma_without_siw rdma_witnessed interop_siw misbehaviour_siw
# Those that take longest come first.
LONG_TESTS = simulation hostile_connects mesh conformance conformance_virtual fairness secure commands
HOST_TESTS = $(LONG_TESTS) $(filter-out $(LONG_TESTS) $(DEVICE_TESTS),libraries corpus $(sort $(basename $(notdir $(wildcard examples/tests/*.rs examples/tools/tests/*.rs tests/tests/*.rs)))))
# The programs that have tests of their own: each other one would be linked once more, with no test in it.
TESTED_BINS = $(basename $(notdir $(shell grep -l 'cfg(test)' examples/tools/src/bin/*.rs tests/src/bin/*.rs)))
HOST_STEPS = $(HOST_TESTS:%=host-%) host-lib host-bins host-doc
.PHONY: build-host $(HOST_STEPS)

# Most tests wait for something most of the time, so more of them run at the same time than there are processors: two programs, and eight
# tests in each. The output of a program follows when it has ended.
TWO = --no-print-directory -j2 --output-sync=target
$(HOST_STEPS): export RUST_TEST_THREADS ?= 8

# SHUFFLE=SEED: the tests of each program in an order of its own. Only the programs are told; to the compiler it would be a change.
SHUFFLED = $(if $(SHUFFLE),--config 'target."cfg(all())".runner = "env RUSTC_BOOTSTRAP=1 RUST_TEST_SHUFFLE_SEED=$(SHUFFLE)"')

test-host: build-host ## The tests that need no RDMA device, no root and no package
	$(MAKE) $(TWO) $(HOST_STEPS)

build-host:
	$(CARGO) test --workspace --lib $(TESTED_BINS:%=--bin %) $(HOST_TESTS:%=--test %) --no-run

# Without the variables that name descriptors of make, which a compiler in a test would look for.
HOST_TEST = timeout 3600 env -u MAKEFLAGS -u MFLAGS $(CARGO) $(SHUFFLED) test --workspace

$(HOST_TESTS:%=host-%): host-%:
	$(HOST_TEST) --test $*

host-lib:
	$(HOST_TEST) --lib

host-bins:
	$(HOST_TEST) $(TESTED_BINS:%=--bin %)

host-doc:
	$(HOST_TEST) --exclude rdma-reactor-fuzz --exclude rdma-transport-fuzz --doc

test-layout: vm-setup ## The declarations of libibverbs and librdmacm against the C headers
	$(VERBS_ENV) timeout 3600 tests/layout.sh

test-dissector: ## The Wireshark plugin, against captures; as root, it installs tshark
	timeout 600 tests/dissector.sh

test-cluster: ## rdma-mesh under Slurm, Open MPI, MPICH and Kubernetes' environment
	tests/cluster/setup.sh
	tests/vm/build.sh rdma-mesh
	timeout 5400 tests/cluster/run.sh

test-same-host: ## Peers on this host: other users, other namespaces, no memory. As root
	timeout 3600 tests/same-host.sh

test-rdma: vm-setup ## siw and rxe in a virtual machine: a sample of the next one
	tests/vm/all.sh

test-rdma-full: vm-setup ## Conformance, faults, interop, rdma-sys, netem, refusals, Valgrind
	$(VERBS_ENV) tests/vm/all.sh --full

test-repeat: vm-setup ## test-rdma N times (50), new orders; BUSY=8 processes beside; TARGET=test
	tests/repeat.sh $(or $(N),50) $(or $(TARGET),test-rdma)

soak: vm-setup ## Hours: all that make test leaves out, a line per job; JOBS='loom asan'
	tests/soak.sh $(JOBS)

endurance: ## 1,000,000 connections in a row; 10,000 for ten minutes with faults
	$(CARGO) build --release -p rdma-reactor-tests --bin rdma-endurance
	timeout 1800 target/release/rdma-endurance cycles 1000000
	timeout 1200 target/release/rdma-endurance echo 10000 600 10

hostile: ## Attacks beside honest clients, with a control: a table. 35 minutes
	$(CARGO) build --release -p rdma-reactor-tests --bin rdma-hostile
	timeout 5400 target/release/rdma-hostile --minutes 10 --json target/hostile.json

mutants: vm-setup ## Plant defects, each of which a test must find
	$(VERBS_ENV) tests/mutants/run.sh

mutants-matrix: ## Hours, continued where it stopped: which test programs find which defect
	PROGRAMS="$(subst -,_,$(LIBRARIES)) $(filter-out libraries corpus,$(HOST_TESTS))" tests/mutants/matrix.sh

loom: ## What threads share with a reactor, in every order
	RUSTFLAGS="--cfg loom_model" LOOM_MAX_PREEMPTIONS=$${LOOM_MAX_PREEMPTIONS:-4} timeout 1800 $(CARGO) test --target-dir target/loom -p rdma-transport-embedded -p rdma-reactor --lib interleavings

asan: ## Unit tests, conformance and corpora under AddressSanitizer
	tests/asan.sh

miri: ## Unit tests of memory, slabs, buffers and lent regions under Miri
	tests/miri.sh

fuzz-smoke: ## Each fuzz target for a minute
	tests/fuzz/run.sh 60

fuzz: ## Each fuzz target for SECONDS (3600)
	tests/fuzz/run.sh $(SECONDS)

coverage: ## Line coverage of the libraries by test-host; fails below LEAST per cent
	tests/coverage.sh $(TESTED_BINS:%=--bin=%) $(HOST_TESTS:%=--test=%)

##@ Measure

bench: ## Against bare TCP and memory, UCX, libfabric, sockperf, iperf3
	$(CARGO) build --release -p rdma-reactor-tools --bin bench
	@if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then $(MAKE) bench-setup || echo "bench: not all is installed" >&2; fi
	target/release/bench --json target/bench/bench.json --svg target/bench/latency.svg \
		--connections-svg target/bench/connections.svg --open-loop-svg target/bench/open-loop.svg

bench-setup: ## Install the programs that make bench compares with
	tests/packages.sh ucx-utils libfabric-bin sockperf iperf3 openssl

bench-rdma: vm-setup ## Against perftest and rstream on siw and rxe, in the virtual machine
	tests/vm/bench.sh

instructions: vm-setup ## Count the instructions per message; growth past the limit fails
	$(CARGO) build --profile plain -p rdma-reactor-tests --bin rdma-instructions
	timeout 1800 target/plain/rdma-instructions compare tests/data/instructions.txt

instructions-lto: vm-setup ## The same with link-time optimisation
	$(CARGO) build --release -p rdma-reactor-tests --bin rdma-instructions
	timeout 1800 target/release/rdma-instructions compare tests/data/instructions-lto.txt

instructions-write: vm-setup ## Count both, and write tests/data/instructions*.txt
	$(CARGO) build --profile plain -p rdma-reactor-tests --bin rdma-instructions
	timeout 1800 target/plain/rdma-instructions write tests/data/instructions.txt
	$(CARGO) build --release -p rdma-reactor-tests --bin rdma-instructions
	timeout 1800 target/release/rdma-instructions write tests/data/instructions-lto.txt

instructions-rdma: vm-setup ## The instructions of a round trip on siw and rxe, and perftest's
	tests/vm/instructions.sh

##@ Check and release

fmt: ## Format the code
	$(CARGO) fmt --all

lint: ## Format, English, clippy, documentation, the Rust version. Needs no set-up
	@$(MAKE) -s help | awk 'length > 100 { print "longer than 100 characters: " $$0; bad = 1 } END { exit bad }'
	$(CARGO) fmt --all --check
	tests/rust-version.sh
	tests/english.sh
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) clippy $(LIBRARIES:%=-p %) --no-default-features --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --document-private-items

lint-all: vm-setup lint test-layout ## That, audit, test-layout, rdma-sys, loom's models, defects: for CI
	tests/audit.sh --changed
	$(VERBS_ENV) $(CARGO) clippy -p rdma-transport-verbs --features rdma-sys --all-targets -- -D warnings
	RUSTFLAGS="--cfg loom_model --cfg plantable" $(CARGO) check --target-dir target/loom -p rdma-transport-embedded -p rdma-reactor --lib --profile test

audit: ## Licences, sources, advisories of crates; the API against the last release
	tests/audit.sh

package: ## Pack the libraries, and test what was packed in an empty folder
	timeout 1800 tests/package.sh

publish: ## Pack, test and tag a version; uploads nothing, and says what is left to do
	@tests/publish.sh

test-debian13: ## make demo and make test-host in a clean Debian 13 with its own Rust
	timeout 9000 tests/debian13.sh

test-cross: ## Check the library for aarch64 and s390x; tests under qemu-user
	timeout 3600 tests/cross.sh

##@ Devices

# rdma-sys needs a libclang that its bindgen understands: 14 or 15. The guest's set-up installs it.
VERBS_ENV = LIBCLANG_PATH="$$(ls -d /usr/lib/llvm-14/lib /usr/lib/llvm-15/lib 2>/dev/null | head -n 1)"

vm-setup: ## Install and build the virtual machine with the kernel's RDMA devices
	tests/vm/setup.sh

vm: export VM_CMD = $(CMD)
vm: ## make vm CMD='rdma link': a command in that machine, with siw0 and rxe0
	@test -n "$$VM_CMD" || { echo "usage: make vm CMD='rdma link'" >&2; exit 2; }
	@tests/vm/run.sh "$$VM_CMD"

hardware-report: ## A report on the RDMA devices here; GUEST=1: on siw and rxe
	tests/hardware-report.sh $(REPORT)
