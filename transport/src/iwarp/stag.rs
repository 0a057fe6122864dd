//! The Terminates that answer a misused STag.

use super::wire::TerminateCause;
use crate::soft::keys::Miss;

/// Returns the Terminate for a tagged segment. DDP has no code for a missing access right.
pub(crate) const fn tagged(miss: Miss) -> TerminateCause {
    match miss {
        Miss::Unknown | Miss::Access => TerminateCause::DDP_TAGGED_INVALID_STAG,
        Miss::Bounds | Miss::Misaligned => TerminateCause::DDP_TAGGED_BOUNDS,
        Miss::Wrap => TerminateCause::DDP_TAGGED_TO_WRAP,
    }
}

/// Returns the Terminate for a request.
pub(crate) const fn request(miss: Miss) -> TerminateCause {
    match miss {
        Miss::Unknown => TerminateCause::RDMAP_INVALID_STAG,
        Miss::Access => TerminateCause::RDMAP_ACCESS,
        Miss::Bounds => TerminateCause::RDMAP_BOUNDS,
        Miss::Wrap => TerminateCause::RDMAP_TO_WRAP,
        Miss::Misaligned => TerminateCause::RDMAP_STREAM_CATASTROPHIC,
    }
}
