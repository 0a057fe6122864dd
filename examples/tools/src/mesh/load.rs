//! The all-to-all load on one link. This rank sends a stream of numbered messages, and checks the stream that the peer sends.

use std::time::{Duration, Instant};

use rdma_reactor::{ConnectionId, Context, SendBuffer};

use super::control::{MOST_COUNT, ReceivedLoad};
use super::frame::{self, LOAD};

/// The outgoing stream, to the peer.
#[derive(Debug, Default)]
pub struct Outbound {
    sent: u64,
    /// The next message, if the connection has refused it. The message is sent again when the connection becomes writable.
    refused: Option<SendBuffer>,
}

impl Outbound {
    /// Sends messages until one is refused or no buffer is available.
    pub fn pump(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        loop {
            let Some(mut buffer) = self.refused.take().or_else(|| cx.buffer(conn)) else { return };
            buffer.set_len(LOAD);
            frame::fill_load(&mut buffer, self.sent);
            match cx.send_buffer(conn, buffer) {
                Ok(_) => self.sent += 1,
                Err(error) => {
                    self.refused = Some(error.buffer);
                    return;
                }
            }
        }
    }

    /// Returns the number of messages sent.
    #[must_use]
    pub const fn sent(&self) -> u64 {
        self.sent
    }
}

/// The incoming stream, with the results of its checks.
#[derive(Clone, Debug, Default)]
pub struct Inbound {
    messages: u64,
    /// The number that the next message must have.
    next: u64,
    errors: u64,
    /// The times of the first and of the last message. After the end of the stream, the second one
    /// is the time of that end.
    span: Option<(Instant, Instant)>,
    complete: bool,
}

impl Inbound {
    /// Records a message. `number` is its number, or `None` if its content was wrong.
    pub fn take(&mut self, number: Option<u64>, now: Instant) {
        self.messages += 1;
        self.span = Some((self.span.map_or(now, |(first, _)| first), now));
        if number != Some(self.next) {
            self.errors = self.errors.saturating_add(1);
        }
        self.next = number.map_or(self.next, |number| number.wrapping_add(1));
    }

    /// Records the end of the stream. `sent` is the number of messages that the peer has sent.
    pub fn end(&mut self, sent: u64, now: Instant) {
        self.errors = self.errors.saturating_add(self.messages.abs_diff(sent));
        self.complete = true;
        // The measured time includes the time until the end of the stream. Otherwise a few messages that arrive together would have a
        // measured time of zero.
        self.span = self.span.map(|(first, _)| (first, now));
    }

    /// Returns true if the end of the stream has arrived.
    #[must_use]
    pub const fn is_complete(&self) -> bool {
        self.complete
    }

    /// Returns the result of the stream, for the report to rank 0.
    #[must_use]
    pub fn result(&self, from: usize) -> ReceivedLoad {
        let span = self.span.map_or(Duration::ZERO, |(first, last)| last - first);
        let bits = (self.messages * LOAD as u64 * 8) as f64;
        let gbit = if span.is_zero() { 0.0 } else { bits / span.as_secs_f64() / 1e9 };
        // A peer can cause any number of errors. Rank 0 would refuse a report with a larger number
        // as implausible.
        let errors = self.errors.min(MOST_COUNT as u64);
        ReceivedLoad { from, messages: self.messages, gbit, errors, complete: self.complete }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::control::{self, RankReport};

    fn audit(numbers: &[Option<u64>], sent: u64) -> ReceivedLoad {
        let (mut inbound, start) = (Inbound::default(), Instant::now());
        for (i, &number) in numbers.iter().enumerate() {
            inbound.take(number, start + Duration::from_micros(i as u64 * 10));
        }
        inbound.end(sent, start + Duration::from_micros(numbers.len() as u64 * 10));
        inbound.result(3)
    }

    #[test]
    fn a_whole_stream_has_no_errors_and_a_rate() {
        let heard = audit(&[Some(0), Some(1), Some(2)], 3);
        assert_eq!((heard.messages, heard.errors, heard.complete), (3, 0, true));
        // Three messages of 4 KiB in 30 us are this rate in Gbit/s.
        assert!((heard.gbit - 3.2768).abs() < 1e-9, "{heard:?}");
        assert_eq!(audit(&[], 0).gbit, 0.0);
    }

    #[test]
    fn every_error_is_counted() {
        assert_eq!(audit(&[Some(0), Some(2)], 3).errors, 2, "one is missing: a gap, and one less than sent");
        assert_eq!(audit(&[Some(0), Some(0), Some(1)], 2).errors, 2, "one came twice: no step, and one more than sent");
        assert_eq!(audit(&[Some(1), Some(0)], 2).errors, 2, "two have changed places");
        assert_eq!(audit(&[Some(0), None, Some(1)], 3).errors, 1, "a wrong content");
        assert_eq!(audit(&[Some(0)], 5).errors, 4, "the rest never came");
    }

    #[test]
    fn a_peer_that_claims_any_number_is_still_reported() {
        let (mut inbound, now) = (Inbound::default(), Instant::now());
        (0..2).for_each(|_| inbound.end(u64::MAX, now));
        inbound.take(None, now);
        let heard = vec![inbound.result(3)];
        assert_eq!(heard[0].errors, 1_000_000_000_000_000);
        let report = RankReport::Loaded { heard, memory_kib: 1 };
        assert_eq!(RankReport::read(&control::write(&report)), Ok(report));
    }
}
