//! A bare ring: two threads exchange messages through shared memory at the lowest possible cost. It has no connections, does not check the
//! peer's data, and never sleeps. The benchmark compares this library's shared-memory provider with this ring.

use std::hint::black_box;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rdma_reactor::ProviderChoice;

use crate::pingpong::job::Job;
use crate::pingpong::touch;

use super::outcome::median;
use super::pair::Processors;

/// The number of slots in a ring of short messages.
const SLOTS: usize = 1024;
/// The number of exchanges between two readings of the clock. Reading the clock takes longer than an exchange, so it must be rare.
const BATCH: u64 = 20;
/// The number of messages after which the receiver reports that their slots are free. One report covers all of these messages.
const RETURN: u64 = 64;
/// The message number that ends an exchange.
const END: u64 = u64::MAX;

/// A message of 64 B, one cache line. The sender writes the number last, and the receiver reads it first. So a received number shows
/// that the other bytes have arrived.
#[derive(Debug, Default)]
#[repr(align(64))]
struct RingSlot {
    number: AtomicU64,
    payload: [AtomicU64; 7],
}

impl RingSlot {
    fn put(&self, number: u64) {
        for word in &self.payload {
            word.store(number, Ordering::Relaxed);
        }
        self.number.store(number, Ordering::Release);
    }

    /// Waits for the message with this number. Returns false if the sender has ended the exchange.
    fn take(&self, number: u64) -> bool {
        loop {
            match self.number.load(Ordering::Acquire) {
                END => return false,
                found if found == number => break,
                _ => {}
            }
        }
        black_box(self.payload.iter().fold(0, |all, word| all ^ word.load(Ordering::Relaxed)));
        true
    }
}

/// A value in an aligned block of 128 bytes. No other data is in the value's cache line, or in the neighbouring line of the same block.
#[derive(Debug)]
#[repr(align(128))]
struct CachePadded<T>(T);

/// A counter on separate cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
struct RingCount(AtomicU64);

impl RingCount {
    fn is(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    fn set(&self, value: u64) {
        self.0.store(value, Ordering::Release);
    }

    /// Waits until the counter differs from `value`, and returns its new value.
    fn past(&self, value: u64) -> u64 {
        loop {
            match self.is() {
                same if same == value => {}
                other => return other,
            }
        }
    }
}

/// Sends a message of 64 B back and forth, `exchanges` times or until `limit` has passed. Returns the median of half the round trip, in
/// ns. Each sample of this median is the mean of `BATCH` exchanges.
#[must_use]
pub fn half_round_trip(processors: &Processors, exchanges: u64, limit: Duration) -> f64 {
    // `CachePadded` also keeps the two values out of neighbouring cache lines, because a processor may prefetch such lines in pairs.
    let [there, back] = [(); 2].map(|()| CachePadded(RingSlot::default()));
    let [there, back] = [&there.0, &back.0];
    let mut batches_ns = Vec::with_capacity(usize::try_from(exchanges / BATCH).unwrap_or_default());
    thread::scope(|scope| {
        scope.spawn(|| {
            processors.choose(0);
            (1..).take_while(|&number| there.take(number)).for_each(|number| back.put(number));
        });
        scope.spawn(|| {
            processors.choose(1);
            let started = Instant::now();
            let mut last = 0;
            while last < exchanges && started.elapsed() < limit {
                let sent_at = Instant::now();
                for number in last + 1..=last + BATCH {
                    there.put(number);
                    back.take(number);
                }
                last += BATCH;
                batches_ns.push(sent_at.elapsed().as_nanos() as f64);
            }
            there.number.store(END, Ordering::Release);
        });
    });
    median(batches_ns.into_iter()).unwrap_or(f64::NAN) / (2 * BATCH) as f64
}

/// Sends messages of 64 B one way. Returns messages per second.
#[must_use]
pub fn rate(processors: &Processors, count: u64) -> f64 {
    let slots: Vec<RingSlot> = std::iter::repeat_with(RingSlot::default).take(SLOTS).collect();
    let at = |number: u64| &slots[number as usize % SLOTS];
    let free = RingCount::default();
    let started = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            processors.choose(0);
            for number in 1..=count {
                at(number).take(number);
                if number % RETURN == 0 {
                    free.set(number);
                }
            }
        });
        scope.spawn(|| {
            processors.choose(1);
            let mut freed = 0;
            for number in 1..=count {
                while number - freed > SLOTS as u64 {
                    freed = free.past(freed);
                }
                at(number).put(number);
            }
        });
    });
    count as f64 / started.elapsed().as_secs_f64()
}

/// One thread writes each byte of a buffer, and another thread reads each byte. Returns Gbit/s.
#[must_use]
pub fn touched(processors: &Processors, size: u32, count: u64) -> f64 {
    // The number of buffers is the number of messages that `rdma-pingpong` has in flight. Each buffer has a mutex; locking a mutex without
    // contention costs only two writes to a cache line.
    let depth = Job::suited_depth(ProviderChoice::Shm, size);
    let buffers: Vec<_> = (0..depth).map(|_| Mutex::new(vec![1; size as usize])).collect();
    let buffer = |number: u64| &buffers[number as usize % buffers.len()];
    let [written, read] = [RingCount::default(), RingCount::default()];
    let started = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            processors.choose(0);
            let mut ready = 0;
            for number in 0..count {
                if number == ready {
                    ready = written.past(ready);
                }
                touch::read(&buffer(number).lock().expect("the writer does not panic"));
                read.set(number + 1);
            }
        });
        scope.spawn(|| {
            processors.choose(1);
            let (mut freed, mut value) = (0, 0);
            for number in 0..count {
                while number - freed >= buffers.len() as u64 {
                    freed = read.past(freed);
                }
                touch::write(&mut buffer(number).lock().expect("the reader does not panic"), &mut value);
                written.set(number + 1);
            }
        });
    });
    gbit_per_second(size, count, started)
}

/// Copies one buffer to another buffer, `count` times. Returns Gbit/s.
#[must_use]
pub fn memcpy(processors: &Processors, size: u32, count: u64) -> f64 {
    let (from, mut to) = (vec![1_u8; size as usize], vec![0; size as usize]);
    processors.choose(1);
    let started = Instant::now();
    for _ in 0..count {
        to.copy_from_slice(black_box(&from));
        black_box(&mut to);
    }
    gbit_per_second(size, count, started)
}

fn gbit_per_second(size: u32, count: u64, started: Instant) -> f64 {
    (count * u64::from(size)) as f64 * 8.0 / 1e9 / started.elapsed().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_arrives() {
        let processors = Processors::of_this_machine();
        // Moving a cache line between processors takes some nanoseconds. If both threads share a processor, waiting for the other
        // thread takes far longer.
        assert!(half_round_trip(&processors, 3 * BATCH, Duration::MAX) > 1.0);
        assert!(rate(&processors, 3 * SLOTS as u64 + 1) > 0.0);
        assert!(touched(&processors, 64 << 10, 100) > 0.0);
        assert!(memcpy(&processors, 1000, 1) > 0.0);
    }
}
