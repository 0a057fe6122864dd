//! Messages in a steady state allocate no memory, and write nothing to the log.
#![allow(clippy::disallowed_methods, reason = "a thread with a name tells whose lines they are")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use rdma_reactor::SecurityMode;
use rdma_reactor_tests::steady::{Side, Steady, Work};

const TIMES: u64 = 10_000;

/// The largest number of measurements. The test stops earlier if a measurement finds no allocation.
const ROUNDS: usize = 50;

/// Counts the allocations of both sides during ten thousand operations. Returns the smallest count of up to `ROUNDS` measurements, which
/// follow ten thousand operations without a measurement. One measurement without an allocation is enough: code that allocates for each
/// message does so in every measurement, but a queue that grows on a busy machine grows once, and then keeps its length.
fn allocations(work: Work, mode: SecurityMode) -> u64 {
    let mut steady = Steady::secured(work, Side::Client, mode);
    steady.repeat(TIMES);
    let mut least = u64::MAX;
    for _ in 0..ROUNDS {
        least = least.min(allocation_counter::measure(|| steady.repeat(TIMES)).count_total);
        if least == 0 {
            break;
        }
    }
    least
}

#[test]
fn a_message_allocates_nothing() {
    for work in [Work::RoundTrip, Work::Call, Work::Eager, Work::Stream, Work::Write, Work::Idle] {
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

/// Checks the measurement itself: one allocation is counted as one.
#[test]
fn an_allocation_is_counted() {
    let counted = allocation_counter::measure(|| drop(std::hint::black_box(vec![0_u8; 100])));
    assert_eq!(counted.count_total, 1);
}

/// A logger that counts the lines of the project's crates on the thread named `quiet`.
struct Lines(AtomicU64);

impl log::Log for Lines {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.target().starts_with("rdma_") && thread::current().name() == Some("quiet") {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn flush(&self) {}
}

static LINES: Lines = Lines(AtomicU64::new(0));

/// No message writes a line to the log, even at the finest level. So a slow or stalled log does not delay messages.
#[test]
fn messages_log_nothing() {
    log::set_logger(&LINES).expect("the first logger");
    log::set_max_level(log::LevelFilter::Trace);
    let measure = || {
        for work in [Work::RoundTrip, Work::Eager, Work::Stream, Work::Write] {
            let mut steady = Steady::secured(work, Side::Client, SecurityMode::Plain);
            steady.repeat(100);
            assert!(LINES.0.load(Ordering::Relaxed) > 0, "setting up says something");
            let before = LINES.0.load(Ordering::Relaxed);
            steady.repeat(1000);
            assert_eq!(LINES.0.load(Ordering::Relaxed) - before, 0, "lines for 1,000 times {work:?}");
        }
    };
    let thread = thread::Builder::new().name("quiet".into()).spawn(measure).expect("a thread");
    thread.join().expect("nothing was logged");
}
