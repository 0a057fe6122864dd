//! Messages in a steady state take no memory from the system.

use rdma_reactor::SecurityMode;
use rdma_reactor_tests::steady::{Side, Steady, Work};

const TIMES: u64 = 10_000;

/// Number of rounds, of which the best one counts.
const ROUNDS: usize = 5;

/// Counts the allocations of both sides while something is done ten thousand times. As many times before do not count.
/// A queue may grow to a length that it did not have before, when the system is slow to carry octets on a busy machine. So
/// the best of some rounds counts; what allocates for each message does so in every round.
fn allocations(work: Work, mode: SecurityMode) -> u64 {
    let mut steady = Steady::secured(work, Side::Client, mode);
    steady.repeat(TIMES);
    let rounds = (0..ROUNDS).map(|_| allocation_counter::measure(|| steady.repeat(TIMES)).count_total);
    rounds.min().expect("there are rounds")
}

#[test]
fn a_message_allocates_nothing() {
    for work in [Work::RoundTrip, Work::Eager, Work::Stream, Work::Write, Work::Idle] {
        assert_eq!(allocations(work, SecurityMode::Plain), 0, "allocations in {TIMES} times {work:?}");
    }
}

#[test]
fn sealing_and_opening_a_message_allocate_nothing() {
    for mode in [SecurityMode::Tls, SecurityMode::Psk] {
        for work in [Work::RoundTrip, Work::Eager, Work::Stream] {
            assert_eq!(allocations(work, mode), 0, "allocations in {TIMES} times {work:?} with {mode:?}");
        }
    }
}

/// The counter of allocations works.
#[test]
fn an_allocation_is_counted() {
    let counted = allocation_counter::measure(|| drop(std::hint::black_box(vec![0_u8; 100])));
    assert_eq!(counted.count_total, 1);
}
