//! The causes of the Terminates that refuse an access with an invalid STag or without the right to the access.

use super::wire::TerminateCause;
use crate::soft::keys::Miss;

/// Returns the cause of the Terminate for a refused tagged segment. DDP has no code for a missing access right, so a missing right is
/// reported as an invalid STag.
pub(crate) const fn tagged(miss: Miss) -> TerminateCause {
    match miss {
        Miss::Unknown | Miss::Access => TerminateCause::DDP_TAGGED_INVALID_STAG,
        Miss::Bounds | Miss::Misaligned => TerminateCause::DDP_TAGGED_BOUNDS,
        Miss::Wrap => TerminateCause::DDP_TAGGED_TO_WRAP,
    }
}

/// Returns the cause of the Terminate for a refused Read or atomic operation.
pub(crate) const fn request(miss: Miss) -> TerminateCause {
    match miss {
        Miss::Unknown => TerminateCause::RDMAP_INVALID_STAG,
        Miss::Access => TerminateCause::RDMAP_ACCESS,
        Miss::Bounds => TerminateCause::RDMAP_BOUNDS,
        Miss::Wrap => TerminateCause::RDMAP_TO_WRAP,
        Miss::Misaligned => TerminateCause::RDMAP_STREAM_CATASTROPHIC,
    }
}
