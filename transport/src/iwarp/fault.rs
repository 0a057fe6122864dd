//! The faults that end a stream.

use super::wire::ddp::UNTAGGED_FPDU_HEADER_LEN;
use super::wire::opcode::UNTAGGED_HEADER_LEN;
use super::wire::{HeaderError, Quote, Terminate, TerminateCause, Untagged};
use crate::wc::WcStatus;

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
