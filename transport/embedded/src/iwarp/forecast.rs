//! The forecast of a stream: predicts the next segments from the last segments, so that large payloads can be received directly into their
//! destination ([`Intake`]). A wrong forecast only costs a copy.

use super::intake::Intake;
use super::placement::PayloadBuffer;
use super::wire::ddp::{TAGGED_FPDU_HEADER_LEN, UNTAGGED_FPDU_HEADER_LEN};
use super::wire::mpa::CRC_LEN;
use crate::soft::outstanding::OutstandingRequests;
use crate::soft::receive_queue::ReceiveQueue;

/// If the payload of a segment has at least this length in bytes, more segments of the same kind are expected.
const BULK: usize = 8 * 1024;
/// If the last segment of a Write has at most this number of octets, one receive call stages it together with the header behind it. For
/// example, a Write of 64 KiB does not fit in one FPDU, and its last segment is short.
const SHORT: usize = 1024;

/// The kinds of segments whose payload is the program's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PayloadKind {
    Send,
    Response,
    Write,
}

/// The position in the stream at which the next receive call begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start {
    /// The number of octets between the current payload and the next header.
    pub(crate) gap: usize,
    /// The number of octets of the next header that have already arrived.
    pub(crate) carried: usize,
    /// The number of octets of the current payload that are still to arrive. `last` is true if the current payload belongs to the last
    /// segment of a Send.
    pub(crate) left: usize,
    pub(crate) last: bool,
    /// The number of payload octets of the current Write behind its current segment, if the Write
    /// is as long as the previous one. Unused if the current segment does not belong to a Write.
    pub(crate) rest: usize,
}

/// The forecast of one stream: the kind and the size of its recent segments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forecast {
    kind: PayloadKind,
    /// The length in bytes of the payload in the first segment of the most recent message. That message may be incomplete.
    segment: usize,
    /// The length in bytes of the last complete Send.
    message: usize,
}

impl Forecast {
    pub(crate) const fn new() -> Self {
        Self { kind: PayloadKind::Send, segment: 0, message: 0 }
    }

    /// Records a segment that has arrived. `len` is the length of its payload. `first` is true if the segment is the first one of a
    /// message.
    #[inline]
    pub(crate) fn record_segment(&mut self, kind: PayloadKind, len: usize, first: bool) {
        if first || kind != self.kind {
            (self.kind, self.segment) = (kind, len);
        }
    }

    /// Records the length of a Send that is complete.
    #[inline]
    pub(crate) fn record_message(&mut self, message: usize) {
        self.message = message;
    }

    /// Returns true if more large payloads are expected.
    #[inline]
    pub(crate) const fn is_bulk(&self) -> bool {
        self.segment >= BULK
    }

    /// Returns true if the next segments are expected to belong to RDMA Writes.
    pub(crate) fn is_of_writes(&self) -> bool {
        self.kind == PayloadKind::Write
    }

    /// Adds the destinations of the expected segments to the plan of a receive call.
    pub(crate) fn plan(
        &self,
        intake: &mut Intake,
        start: &Start,
        queue: &ReceiveQueue,
        shared: bool,
        outstanding: &OutstandingRequests,
    ) {
        let header = if self.kind == PayloadKind::Send { UNTAGGED_FPDU_HEADER_LEN } else { TAGGED_FPDU_HEADER_LEN };
        // A complete header of the expected kind would already have been parsed. So if `start.carried` is at least the length of such a
        // header, the next segment is of another kind, and nothing is planned for it.
        let Some(gap) = header.checked_sub(start.carried).filter(|&left| left > 0).map(|left| start.gap + left) else {
            return;
        };
        match self.kind {
            PayloadKind::Send => self.sends(intake, start, gap, queue, shared),
            PayloadKind::Response => self.responses(intake, start, gap, outstanding),
            // The destination of a Write is only known after the header of the Write has arrived.
            PayloadKind::Write if (1..=SHORT).contains(&start.rest) => {
                intake.end(gap + start.rest + trailer(header + start.rest) + header);
            }
            PayloadKind::Write => intake.end(gap),
        }
    }

    fn sends(&self, intake: &mut Intake, start: &Start, mut gap: usize, queue: &ReceiveQueue, shared: bool) {
        let (mut nth, mut offset) = (0, queue.placed() + start.left);
        if start.last {
            (nth, offset) = (1, 0);
        }
        // A queue pair takes a receive from a shared queue only when a message begins. So with a shared queue, only the receive of the
        // current message is known.
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

    fn responses(&self, intake: &mut Intake, start: &Start, mut gap: usize, outstanding: &OutstandingRequests) {
        let mut begun = start.left;
        for (nth, read) in outstanding.reads().enumerate() {
            let mut done = read.done as usize + std::mem::take(&mut begun);
            // Two overlapping sinks are never planned for the same receive call. If the forecast was wrong, octets in one sink could
            // overwrite octets in the other one before the provider copies them out.
            if outstanding.reads().take(nth).any(|other| read.overlaps(other)) {
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
        // All outstanding Reads are planned. A segment behind their responses must be of another kind. Its octets are staged.
    }
}

/// Returns the length of the pad and the CRC of an FPDU. `fpdu` is the length of the length field and the ULPDU together.
const fn trailer(fpdu: usize) -> usize {
    (fpdu.wrapping_neg() & 3) + CRC_LEN
}
