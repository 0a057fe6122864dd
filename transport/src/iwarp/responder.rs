//! The queue of the peer's RDMA Reads and atomic operations. A request stays in the queue until its response is completely framed. The
//! responses are framed in the order of the requests.

use std::collections::VecDeque;

use super::wire::ddp::READ_REQUEST_FPDU_HEADER_LEN;
use super::wire::opcode::READ_REQUEST_QUEUE;
use super::wire::{AtomicRequest, Opcode, Quote, ReadRequest, TerminateCause, Untagged};
use crate::mem::Span;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ServedRequest {
    Read(ReadRequest),
    Atomic(AtomicRequest),
}

/// A Read or an atomic operation of the peer. `done` is the number of octets of its response that are framed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingResponse {
    pub(crate) request: ServedRequest,
    pub(crate) msn: u32,
    pub(crate) done: u32,
}

impl PendingResponse {
    /// Returns the headers that a Terminate about this request quotes. These headers describe the part of the request for which no response
    /// is framed yet: the number of framed octets is added to the offsets and subtracted from the size.
    pub(crate) fn quote(&self) -> Option<Quote> {
        let mut bytes = [0; READ_REQUEST_FPDU_HEADER_LEN];
        let opcode = match self.request {
            ServedRequest::Read(_) => Opcode::ReadRequest,
            ServedRequest::Atomic(_) => Opcode::AtomicRequest,
        };
        let header =
            Untagged { last: true, opcode, reserved_or_stag: 0, queue: READ_REQUEST_QUEUE, msn: self.msn, offset: 0 };
        header.emit_into(opcode.min_ulpdu_len(), bytes.first_chunk_mut()?);
        if let ServedRequest::Read(read) = self.request {
            let rest = ReadRequest {
                sink_offset: read.sink_offset.wrapping_add(self.done.into()),
                size: read.size - self.done,
                source_offset: read.source_offset.wrapping_add(self.done.into()),
                ..read
            };
            bytes[20..].copy_from_slice(&rest.emit());
        }
        Quote::new(&bytes)
    }
}

#[derive(Debug)]
pub(crate) struct Responder {
    queue: VecDeque<PendingResponse>, // bound: reads
    limit: usize,
    /// The MSN of the next Atomic Response.
    pub(crate) atomic_msn: u32,
}

impl Responder {
    pub(crate) fn new() -> Self {
        Self { queue: VecDeque::new(), limit: 0, atomic_msn: 1 }
    }

    pub(crate) fn establish(&mut self, ird: u16) {
        // The limit is the agreed depth, rounded up to a power of two, plus one, because siw may have more requests outstanding than
        // agreed.
        self.limit = usize::from(ird.max(1)).next_power_of_two() + 1;
    }

    /// Returns an error if the peer already has as many requests outstanding as allowed. The error is an RDMAP error as in siw, not the DDP
    /// error for a missing buffer.
    pub(crate) fn has_room(&self) -> Result<(), TerminateCause> {
        if self.queue.len() < self.limit { Ok(()) } else { Err(TerminateCause::RDMAP_STREAM_CATASTROPHIC) }
    }

    /// Adds a request. The caller has checked [`Responder::has_room`].
    pub(crate) fn push(&mut self, request: ServedRequest, msn: u32) {
        self.queue.push_back(PendingResponse { request, msn, done: 0 });
    }

    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.queue.is_empty()
    }

    #[inline]
    pub(crate) fn front(&self) -> Option<&PendingResponse> {
        self.queue.front()
    }

    /// Records that `n` more octets of the response to the oldest request are framed. If `last` is true, the response is complete, and the
    /// request is removed.
    pub(crate) fn advance(&mut self, n: usize, last: bool) {
        if last {
            self.queue.pop_front();
        } else if let Some(front) = self.queue.front_mut() {
            front.done = front.done.saturating_add(n as u32);
        }
    }

    pub(crate) fn clear(&mut self) {
        self.queue.clear();
    }
}

/// Executes an atomic operation on a word. Returns the old value; `None` if `word` is not a whole
/// word.
pub(super) fn execute(request: &AtomicRequest, word: Span<'_>) -> Option<u64> {
    let AtomicRequest { request_id, stag, offset, operand, compare, .. } = *request;
    // Operations without masks, such as those of this library, are operations of the processor.
    if *request == AtomicRequest::fetch_add(request_id, stag, offset, operand) {
        word.fetch_add(operand)
    } else if *request == AtomicRequest::compare_swap(request_id, stag, offset, compare, operand) {
        word.compare_swap(compare, operand)
    } else {
        word.update(|old| request.apply(old))
    }
}

#[cfg(all(test, not(loom_model)))]
mod tests {
    use super::*;
    use crate::mem::Memory;
    use proptest::prelude::*;

    proptest! {
        /// The operations without masks are those of the processor. They have the same effect.
        #[test]
        fn an_operation_has_the_effect_that_its_header_describes(
            word: u64, operand: u64, other: u64, is_equal: bool, adds: bool, mask in any::<Option<u64>>(),
        ) {
            let compare = if is_equal { word } else { other };
            let request = match adds {
                true => AtomicRequest::fetch_add(1, 2, 3, operand),
                false => AtomicRequest::compare_swap(1, 2, 3, compare, operand),
            };
            let operand_mask = mask.unwrap_or(request.operand_mask);
            let compare_mask = mask.map_or(request.compare_mask, |mask| !mask);
            let request = AtomicRequest { operand_mask, compare_mask, ..request };
            let memory = Memory::new(8).unwrap();
            let span = memory.span(0, 8).unwrap();
            span.fill(&word.to_ne_bytes());
            prop_assert_eq!(execute(&request, span), Some(word));
            prop_assert_eq!(span.fetch_add(0), Some(request.apply(word)));
        }
    }
}
