//! The RDMA Reads and atomic operations of the peer.

use super::wire::ddp::READ_REQUEST_FPDU_HEADER_LEN;
use super::wire::opcode::READ_REQUEST_QUEUE;
use super::wire::{AtomicRequest, Opcode, Quote, ReadRequest, Untagged};
use crate::soft::responses::PendingResponse;
use rdma_transport::mem::Span;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ServedOperation {
    Read(ReadRequest),
    Atomic(AtomicRequest),
}

/// A Read or an atomic operation of the peer, with the MSN of its request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServedRequest {
    pub(crate) operation: ServedOperation,
    pub(crate) msn: u32,
}

/// Returns the headers that a Terminate about this request quotes. These headers describe the part
/// of the request for which no response is framed yet: the number of framed octets is added to the
/// offsets and subtracted from the size.
pub(super) fn quote(pending: &PendingResponse<ServedRequest>) -> Option<Quote> {
    let PendingResponse { request: ServedRequest { operation, msn }, done } = *pending;
    let mut bytes = [0; READ_REQUEST_FPDU_HEADER_LEN];
    let opcode = match operation {
        ServedOperation::Read(_) => Opcode::ReadRequest,
        ServedOperation::Atomic(_) => Opcode::AtomicRequest,
    };
    let header = Untagged { last: true, opcode, reserved_or_stag: 0, queue: READ_REQUEST_QUEUE, msn, offset: 0 };
    header.emit_into(opcode.min_ulpdu_len(), bytes.first_chunk_mut()?);
    if let ServedOperation::Read(read) = operation {
        let rest = ReadRequest {
            sink_offset: read.sink_offset.wrapping_add(done.into()),
            size: read.size - done,
            source_offset: read.source_offset.wrapping_add(done.into()),
            ..read
        };
        bytes[20..].copy_from_slice(&rest.emit());
    }
    Quote::new(&bytes)
}

/// Executes an atomic operation on the 8 bytes of `word`. Returns the old value. Returns `None` if
/// `word` has another length or its address is not a multiple of 8.
pub(super) fn execute(request: &AtomicRequest, word: Span<'_>) -> Option<u64> {
    let AtomicRequest { request_id, stag, offset, operand, compare, .. } = *request;
    // Operations without masks, such as those of this library, are atomic instructions of the
    // processor.
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
    use proptest::prelude::*;
    use rdma_transport::mem::Memory;

    proptest! {
        /// The atomic instructions, for operations without masks, have the same effect as
        /// `AtomicRequest::apply`.
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
