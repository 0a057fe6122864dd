//! What a stream is expected to bring next, from what it has brought.
//!
//! A wrong forecast costs a copy and nothing else, see [`Intake`].

use super::intake::Intake;
use super::placement::Place;
use super::requester::Requester;
use super::wire::ddp::{TAGGED_FPDU_HEADER_LEN, UNTAGGED_FPDU_HEADER_LEN};
use super::wire::mpa::CRC_LEN;
use crate::soft::receive_queue::ReceiveQueue;

/// Segments with payloads from this length on, bytes, are expected to have more of their kind behind them.
const BULK: usize = 8 * 1024;

/// The kinds of segments with payload for memory of the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Send,
    Response,
    Write,
}

/// The place in the stream where a plan begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start {
    /// Octets in front of the next header, behind the payload that has begun.
    pub(crate) gap: usize,
    /// Octets of the next header that have come.
    pub(crate) carried: usize,
    /// Octets of payload that are still to come, and whether its segment is the last of its message.
    pub(crate) left: usize,
    pub(crate) last: bool,
}

/// See the [module](self).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forecast {
    kind: Kind,
    /// Payload of the first segment of the last message, bytes.
    segment: usize,
    /// Length of the last Send that has ended, bytes.
    message: usize,
}

impl Forecast {
    pub(crate) const fn new() -> Self {
        Self { kind: Kind::Send, segment: 0, message: 0 }
    }

    /// Takes note of a segment; `first` says that it begins a message.
    #[inline]
    pub(crate) fn saw(&mut self, kind: Kind, len: usize, first: bool) {
        if first || kind != self.kind {
            (self.kind, self.segment) = (kind, len);
        }
    }

    /// Takes note of the length of a Send.
    #[inline]
    pub(crate) fn ended(&mut self, message: usize) {
        self.message = message;
    }

    /// Whether there are large payloads.
    #[inline]
    pub(crate) const fn is_bulk(&self) -> bool {
        self.segment >= BULK
    }

    /// Whether the last segment was one of a Write.
    pub(crate) fn is_of_writes(&self) -> bool {
        self.kind == Kind::Write
    }

    /// Plans what comes behind the payload that has begun.
    pub(crate) fn plan(
        &self,
        intake: &mut Intake,
        start: &Start,
        queue: &ReceiveQueue,
        shared: bool,
        requester: &Requester,
    ) {
        let header = if self.kind == Kind::Send { UNTAGGED_FPDU_HEADER_LEN } else { TAGGED_FPDU_HEADER_LEN };
        // A header of which more has come is one of another kind.
        let Some(gap) = header.checked_sub(start.carried).filter(|&left| left > 0).map(|left| start.gap + left) else {
            return;
        };
        match self.kind {
            Kind::Send => self.sends(intake, start, gap, queue, shared),
            Kind::Response => self.responses(intake, start, gap, requester),
            // Where the next Write goes only its header says.
            Kind::Write => intake.end(gap),
        }
    }

    fn sends(&self, intake: &mut Intake, start: &Start, mut gap: usize, queue: &ReceiveQueue, shared: bool) {
        let (mut nth, mut offset) = (0, queue.placed() + start.left);
        if start.last {
            (nth, offset) = (1, 0);
        }
        // A shared receive is this connection's when its message begins.
        while let Some(sge) = queue.expected(nth).filter(|_| nth == 0 || !shared) {
            let message = if self.message > offset { self.message.min(sge.len()) } else { sge.len() };
            let len = self.segment.min(message.saturating_sub(offset));
            if len == 0 || !intake.expect(gap, Place::Receive(sge.part(offset, len))) {
                break;
            }
            offset += len;
            gap = trailer(UNTAGGED_FPDU_HEADER_LEN + len) + UNTAGGED_FPDU_HEADER_LEN;
            if offset == message {
                (nth, offset) = (nth + 1, 0);
            }
        }
        intake.end(gap);
    }

    fn responses(&self, intake: &mut Intake, start: &Start, mut gap: usize, requester: &Requester) {
        let mut begun = start.left;
        for (nth, read) in requester.reads().enumerate() {
            let mut done = read.done as usize + std::mem::take(&mut begun);
            // What is taken out of one sink must not have been overwritten in another. The order of their addresses decides nothing: it
            // differs from one run to the next.
            if requester.reads().take(nth).any(|other| read.overlaps(other)) {
                return intake.end(gap);
            }
            while done < read.len as usize {
                let len = self.segment.min(read.len as usize - done);
                let offset = read.offset.wrapping_add(done as u64);
                if len == 0 || !intake.expect(gap, Place::Sink { stag: read.stag, offset, len }) {
                    return intake.end(gap);
                }
                done += len;
                gap = trailer(TAGGED_FPDU_HEADER_LEN + len) + TAGGED_FPDU_HEADER_LEN;
            }
        }
        // No more answers are due: what comes next is something else, and staged.
    }
}

/// Octets behind an FPDU of that many, with its length field: pad and CRC.
const fn trailer(fpdu: usize) -> usize {
    (fpdu.wrapping_neg() & 3) + CRC_LEN
}
