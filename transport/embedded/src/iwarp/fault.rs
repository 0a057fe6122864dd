//! The faults that end a stream.

use super::wire::ddp::{TAGGED_FPDU_HEADER_LEN, UNTAGGED_FPDU_HEADER_LEN};
use super::wire::mpa::LENGTH_LEN;
use super::wire::opcode::UNTAGGED_HEADER_LEN;
use super::wire::read::READ_REQUEST_LEN;
use super::wire::{HeaderError, Opcode, Quote, Terminate, TerminateCause, Untagged, header_len};
use rdma_transport::wc::WcStatus;

/// The reason why a stream cannot continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The peer has violated the protocol. The local side sends a Terminate with this cause. The quote, if there is one, is a copy of the
    /// headers of the invalid segment. The Terminate contains this copy.
    Violation(TerminateCause, Option<Quote>),
    /// The peer has sent this Terminate, or `None` if the payload of the Terminate could not be parsed.
    Terminated(Option<Terminate>),
    /// A local work request has failed with this status.
    WorkRequest(WcStatus),
}

impl From<TerminateCause> for Fault {
    fn from(cause: TerminateCause) -> Self {
        Self::Violation(cause, None)
    }
}

/// Returns the fault for a violation in the payload of an untagged segment with this header.
pub(crate) fn violation(cause: TerminateCause, header: &Untagged) -> Fault {
    let mut bytes = [0; UNTAGGED_FPDU_HEADER_LEN];
    header.emit_into(header.opcode.min_ulpdu_len().max(UNTAGGED_HEADER_LEN as u16), &mut bytes);
    Fault::Violation(cause, Quote::new(&bytes))
}

/// Returns the fault for a header that cannot be parsed. `bytes` are the octets of the header, for the quote in the Terminate. `extensions`
/// is true if both peers agreed to use RFC 7306.
pub(crate) fn refuse(error: &HeaderError, bytes: &[u8], extensions: bool) -> Fault {
    let extension = match error {
        HeaderError::TooShort { opcode: Some(opcode), .. } | HeaderError::TooLong { opcode, .. } => {
            opcode.is_extension()
        }
        _ => false,
    };
    let cause = if extension && !extensions { TerminateCause::RDMAP_OPCODE } else { error.cause() };
    Fault::Violation(cause, Quote::new(bytes))
}

/// Returns the fault of a complete FPDU whose header cannot be parsed.
#[cold]
pub(crate) fn refuse_whole(error: &HeaderError, body: &[u8], extensions: bool) -> Fault {
    let need = body.first_chunk().map_or(0, header_need);
    refuse(error, &body[..need.min(body.len())], extensions)
}

/// Returns the length of the header that begins with `prefix`. If the header is invalid, returns
/// the number of octets that a Terminate quotes.
#[inline]
pub(crate) fn header_need(prefix: &[u8; 4]) -> usize {
    header_len(prefix).unwrap_or_else(|_| {
        let ddp = if prefix[2] & 0x80 != 0 { TAGGED_FPDU_HEADER_LEN } else { UNTAGGED_FPDU_HEADER_LEN };
        let rdmap = if Opcode::from_raw(prefix[3]) == Opcode::ReadRequest { READ_REQUEST_LEN } else { 0 };
        let ulpdu_len = usize::from(u16::from_be_bytes([prefix[0], prefix[1]]));
        (ddp + rdmap).min(LENGTH_LEN + ulpdu_len).max(prefix.len())
    })
}
