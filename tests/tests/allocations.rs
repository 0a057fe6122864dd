//! Messages in a steady state take no memory from the system.

use rdma_reactor_tests::steady::{Side, Steady, Work};

const TIMES: u64 = 10_000;

/// Counts the allocations of both sides while something is done ten thousand times. As many times before do not count.
fn allocations(work: Work) -> u64 {
    let mut steady = Steady::new(work, Side::Client);
    steady.repeat(TIMES);
    allocation_counter::measure(|| steady.repeat(TIMES)).count_total
}

#[test]
fn a_message_allocates_nothing() {
    for work in [Work::RoundTrip, Work::Stream, Work::Write, Work::Idle] {
        assert_eq!(allocations(work), 0, "allocations in {TIMES} times {work:?}");
    }
}

/// The counter of allocations works.
#[test]
fn an_allocation_is_counted() {
    let counted = allocation_counter::measure(|| drop(std::hint::black_box(vec![0_u8; 100])));
    assert_eq!(counted.count_total, 1);
}
