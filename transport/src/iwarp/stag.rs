//! The Terminates with which an access with a misused STag is refused.

use super::wire::TerminateCause;
use crate::soft::keys::Miss;

/// Returns the cause of the Terminate for a refused tagged segment. A missing right is reported as an invalid STag, because DDP has no code
/// for it.
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
