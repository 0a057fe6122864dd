//! The forecast of a stream: predicts the next segments from the last ones.
//!
//! A wrong forecast costs one copy and nothing else; see [`Intake`].

use super::intake::Intake;
use super::placement::PayloadBuffer;
use super::requester::Requester;
use super::wire::ddp::{TAGGED_FPDU_HEADER_LEN, UNTAGGED_FPDU_HEADER_LEN};
use super::wire::mpa::CRC_LEN;
use crate::soft::receive_queue::ReceiveQueue;

/// Segments with payloads of at least this length, bytes, are expected to be followed by more of their kind.
const BULK: usize = 8 * 1024;

/// The kinds of segments whose payload goes to memory of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PayloadKind {
    Send,
    Response,
    Write,
}

/// The position in the stream where a plan begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start {
    /// Octets in front of the next header, behind the payload in progress.
    pub(crate) gap: usize,
    /// Octets of the next header that have arrived.
    pub(crate) carried: usize,
    /// Octets of payload that are still to arrive, and true if their segment is the last of its message.
    pub(crate) left: usize,
    pub(crate) last: bool,
}

/// The forecast of one stream; see the [module](self).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forecast {
    kind: PayloadKind,
    /// Payload of the first segment of the last message, bytes.
    segment: usize,
    /// Length of the last complete Send, bytes.
    message: usize,
}

impl Forecast {
    pub(crate) const fn new() -> Self {
        Self { kind: PayloadKind::Send, segment: 0, message: 0 }
    }

    /// Records a segment. `first` is true if it begins a message.
    #[inline]
    pub(crate) fn record_segment(&mut self, kind: PayloadKind, len: usize, first: bool) {
        if first || kind != self.kind {
            (self.kind, self.segment) = (kind, len);
        }
    }

    /// Records the length of a complete Send.
    #[inline]
    pub(crate) fn record_message(&mut self, message: usize) {
        self.message = message;
    }

    /// Returns true if the stream has large payloads.
    #[inline]
    pub(crate) const fn is_bulk(&self) -> bool {
        self.segment >= BULK
    }

    /// Returns true if the last segment belonged to a Write.
    pub(crate) fn is_of_writes(&self) -> bool {
        self.kind == PayloadKind::Write
    }

    /// Plans the segments behind the payload in progress.
    pub(crate) fn plan(
        &self,
        intake: &mut Intake,
        start: &Start,
        queue: &ReceiveQueue,
        shared: bool,
        requester: &Requester,
    ) {
        let header = if self.kind == PayloadKind::Send { UNTAGGED_FPDU_HEADER_LEN } else { TAGGED_FPDU_HEADER_LEN };
        // A header of which more octets have arrived is of another kind.
        let Some(gap) = header.checked_sub(start.carried).filter(|&left| left > 0).map(|left| start.gap + left) else {
            return;
        };
        match self.kind {
            PayloadKind::Send => self.sends(intake, start, gap, queue, shared),
            PayloadKind::Response => self.responses(intake, start, gap, requester),
            // Only the header of the next Write tells where its payload goes.
            PayloadKind::Write => intake.end(gap),
        }
    }

    fn sends(&self, intake: &mut Intake, start: &Start, mut gap: usize, queue: &ReceiveQueue, shared: bool) {
        let (mut nth, mut offset) = (0, queue.placed() + start.left);
        if start.last {
            (nth, offset) = (1, 0);
        }
        // A shared receive belongs to this connection only when its message begins.
        while let Some(sge) = queue.expected(nth).filter(|_| nth == 0 || !shared) {
            let message = if self.message > offset { self.message.min(sge.len()) } else { sge.len() };
            let len = self.segment.min(message.saturating_sub(offset));
            if len == 0 || !intake.expect(gap, PayloadBuffer::Receive(sge.part(offset, len))) {
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
            // Data that is spilled out of one sink must not have been overwritten through another. The order of the addresses must decide
            // nothing: it differs from one run to the next.
            if requester.reads().take(nth).any(|other| read.overlaps(other)) {
                return intake.end(gap);
            }
            while done < read.len as usize {
                let len = self.segment.min(read.len as usize - done);
                let offset = read.offset.wrapping_add(done as u64);
                if len == 0 || !intake.expect(gap, PayloadBuffer::Sink { stag: read.stag, offset, len }) {
                    return intake.end(gap);
                }
                done += len;
                gap = trailer(TAGGED_FPDU_HEADER_LEN + len) + TAGGED_FPDU_HEADER_LEN;
            }
        }
        // No more responses are due: the next segment is of another kind, and is staged.
    }
}

/// Returns the length of pad and CRC behind the first `fpdu` octets of an FPDU: its length field and its ULPDU.
const fn trailer(fpdu: usize) -> usize {
    (fpdu.wrapping_neg() & 3) + CRC_LEN
}
