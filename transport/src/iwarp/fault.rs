//! Why a stream cannot go on.

use super::wire::ddp::UNTAGGED_FPDU_HEADER_LEN;
use super::wire::opcode::UNTAGGED_HEADER_LEN;
use super::wire::{HeaderError, Quote, Terminate, TerminateCause, Untagged};
use crate::wc::WcStatus;

/// Why a stream cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The peer broke the protocol: it is told so, with the headers it is about.
    Violation(TerminateCause, Option<Quote>),
    /// The peer says that we did.
    Terminated(Option<Terminate>),
    /// A work request of ours cannot be done.
    WorkRequest(WcStatus),
}

impl From<TerminateCause> for Fault {
    fn from(cause: TerminateCause) -> Self {
        Self::Violation(cause, None)
    }
}

/// A violation found behind the header.
pub(crate) fn violation(cause: TerminateCause, header: &Untagged) -> Fault {
    let mut bytes = [0; UNTAGGED_FPDU_HEADER_LEN];
    header.emit_into(header.opcode.min_ulpdu_len().max(UNTAGGED_HEADER_LEN as u16), &mut bytes);
    Fault::Violation(cause, Quote::new(&bytes))
}

/// The fault of a header that cannot be read.
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
