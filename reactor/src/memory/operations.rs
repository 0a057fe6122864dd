//! The local side of a one-sided operation: the scatter/gather entries for the device, and a [`Hold`] on the region of
//! each entry.

use std::ops::Range;

use rdma_transport::slab::Key;
use rdma_transport::wr::{MAX_SGE, Sge, SgeList};

use super::region::Region;
use super::region_memory::Hold;
use crate::error::SendErrorKind;

/// The holds of one work request on the regions that it uses. For each scatter/gather entry, there is one hold, with
/// the key of the region. Unused elements are `None`.
pub(crate) type Holds = [Option<(Key, Hold)>; MAX_SGE];

/// The scatter/gather entries of an operation, and the holds on the regions of these entries. Both are needed to post
/// the operation.
#[derive(Debug)]
pub(crate) struct Locals {
    pub(crate) sges: SgeList,
    pub(crate) holds: Holds,
}

impl Locals {
    /// Returns the entries and the holds of ranges from which the device will read, for a write or a send.
    ///
    /// # Errors
    /// A range is not inside its region.
    #[inline]
    pub(crate) fn to_read(parts: &[(&Region, Range<usize>)]) -> Result<Self, SendErrorKind> {
        if let [(region, range)] = parts {
            let (sge, hold) = region.lend(range.clone()).ok_or_else(|| outside(region, range))?;
            return Ok(Self { sges: SgeList::one(sge), holds: [Some((region.key(), hold)), None, None, None] });
        }
        Self::gather(parts.iter().map(|(region, range)| {
            let (sge, hold) = region.lend(range.clone()).ok_or_else(|| outside(region, range))?;
            Ok((region.key(), sge, hold))
        }))
    }

    /// Returns the entries and the holds of ranges to which the device will write, for a read.
    ///
    /// # Errors
    /// A range is not inside its region.
    pub(crate) fn to_write(parts: &mut [(&mut Region, Range<usize>)]) -> Result<Self, SendErrorKind> {
        Self::gather(parts.iter_mut().map(|(region, range)| {
            let (sge, hold) = region.lend_mut(range.clone()).ok_or_else(|| outside(region, range))?;
            Ok((region.key(), sge, hold))
        }))
    }

    /// Collects the entries and holds of several parts of regions. If the range of a part is not inside its region,
    /// ends the holds on the other parts, and returns the error for that part.
    fn gather(parts: impl Iterator<Item = Result<(Key, Sge, Hold), SendErrorKind>>) -> Result<Self, SendErrorKind> {
        let mut locals = Self { sges: SgeList::default(), holds: Holds::default() };
        for (part, slot) in parts.zip(0..MAX_SGE) {
            match part {
                Ok((key, sge, hold)) => {
                    let pushed = locals.sges.push(sge);
                    debug_assert!(pushed.is_ok(), "as many entries as slots");
                    locals.holds[slot] = Some((key, hold));
                }
                Err(error) => {
                    for (_, hold) in locals.holds.into_iter().flatten() {
                        // The result of `done` says if the owner has dropped the region. The owner cannot have dropped
                        // it here, because the caller borrows the region.
                        let _ = hold.done();
                    }
                    return Err(error);
                }
            }
        }
        Ok(locals)
    }
}

/// Returns the error for a range that is not inside a region.
pub(crate) fn outside(region: &Region, range: &Range<usize>) -> SendErrorKind {
    SendErrorKind::OutOfBounds { end: range.end.max(range.start) as u64, len: region.len() as u64 }
}
