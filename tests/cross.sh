#!/usr/bin/env bash
# Checks the library for other architectures, and runs the transport's unit tests and the recorded
# exchanges there under qemu-user: aarch64, and s390x, which is big-endian. The layouts of C
# structures are asserted at compile time. Before that, checks the interface of providers
# (rdma-transport) for macOS, so that it does not depend on Linux. Needs the standard library of
# each (rustup fetches it, if there is a rustup), and root for the cross linkers and qemu-user.
#
#   tests/cross.sh [aarch64 | s390x]...    both unless said otherwise
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- aarch64 s390x

export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/cross
# A test that finds a defect of the emulator reports it, and does not fail.
export EMULATED=1

say() { echo "cross: $*" >&2; }

fetch_std() { # TRIPLE
    [ -d "$(rustc --print target-libdir --target "$1")" ] || rustup target add "$1" ||
        { say "no standard library for $1: rustup has one, and Debian's libstd-rust-dev"; exit 1; }
}

fetch_std aarch64-apple-darwin
RUSTFLAGS="-D warnings" cargo check --target aarch64-apple-darwin -p rdma-transport --no-default-features

for machine; do
    triple=$machine-unknown-linux-gnu
    case $machine in
        aarch64) libc=libc6-dev-arm64-cross ;;
        s390x) libc=libc6-dev-s390x-cross ;;
        *) say "$machine: wanted aarch64 or s390x"; exit 2 ;;
    esac
    tests/packages.sh "gcc-$machine-linux-gnu" $libc qemu-user-static
    fetch_std "$triple"
    upper=$(tr a-z- A-Z_ <<< "$triple")
    export "CARGO_TARGET_${upper}_LINKER=$machine-linux-gnu-gcc"
    export "CARGO_TARGET_${upper}_RUNNER=qemu-$machine-static -L /usr/$machine-linux-gnu"
    say "$(rustc --version), $triple"
    cargo check --target "$triple" -p rdma-reactor
    # qemu-user does not forward advice about pages to the kernel (ten tests), does not map a file
    # of 1 TiB, reserves the highest real-time signals, takes the name of a congestion control for a
    # number, and knows no option for the interface of multicast packets, which each UDP socket of
    # datagrams sets.
    cargo test --target "$triple" -p rdma-transport -p rdma-transport-embedded -p rdma-transport-verbs --lib -- \
        --skip large_mappings_are_aligned_and_take_huge_pages --skip a_part_of_a_huge_page_is_mapped_and_unmapped \
        --skip what_may_only_be_read_cannot_be_written_by_any_way --skip the_pages_of_a_mapped_file_stay \
        --skip a_file_without_all_its_pages_is_refused --skip pages_that_a_peer_has_removed_are_counted \
        --skip the_pages_of_a_lent_file_come_back --skip the_pages_that_peers_remove_are_limited \
        --skip a_removed_segment_is_no_violation --skip a_side_that_has_read_nothing_notices_a_removed_segment \
        --skip the_memory_of_a_connection_comes_back_whatever_its_peer_keeps --skip signals_of_the_program_are_left_alone \
        --skip connections_within_the_host_have_their_own_congestion_control \
        --skip iwarp::datagrams --skip a_busy_poll_of_rings_tells_of_unread_datagrams \
        --skip room_is_reported_after_a_refused_send_even_if_another_one_is_accepted
    cargo test --target "$triple" -p rdma-reactor-tests --test wire
done
