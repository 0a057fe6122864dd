//! A list of pieces to read or write, as the program passes it and gets it back, and the leases of the regions that it names.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use rdma_transport::slab::Key;
use rdma_transport::wc::Failure;
use rdma_transport::wr::Sge;

use super::operations::outside;
use super::region::{Region, RemoteRegion};
use super::region_memory::Lease;
use crate::error::SendErrorKind;

/// A piece of a list: as many bytes as `remote` is long, in a local region and at the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The index of the local region in the list of regions.
    pub region: u32,
    /// The offset in this region, in bytes.
    pub offset: u64,
    /// The range at the peer, with the length of the piece.
    pub remote: RemoteRegion,
}

impl Piece {
    /// Creates a piece of the first region of a list.
    ///
    /// Example: [`crate::Context::transfer`].
    #[must_use]
    pub const fn new(offset: usize, remote: RemoteRegion) -> Self {
        Self { region: 0, offset: offset as u64, remote }
    }

    /// Returns the length, in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.remote.len as usize
    }

    /// Returns true if it contains no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.remote.len == 0
    }

    /// Returns its range in the local region. `None` if there is no such range.
    fn range(&self) -> Option<Range<usize>> {
        let (start, len) = (usize::try_from(self.offset).ok()?, usize::try_from(self.remote.len).ok()?);
        Some(start..start.checked_add(len)?)
    }
}

/// The direction of a transfer, and the local regions that its pieces name by their index.
#[derive(Debug)]
pub enum Transfer<'a> {
    /// The bytes go to the peer.
    Write(&'a [&'a Region]),
    /// The bytes come from the peer.
    Read(&'a mut [&'a mut Region]),
}

impl Transfer<'_> {
    pub(crate) const fn is_read(&self) -> bool {
        matches!(self, Self::Read(_))
    }

    pub(crate) const fn len(&self) -> usize {
        match self {
            Self::Write(regions) => regions.len(),
            Self::Read(regions) => regions.len(),
        }
    }

    pub(crate) fn region(&self, index: usize) -> Option<&Region> {
        match self {
            Self::Write(regions) => regions.get(index).copied(),
            Self::Read(regions) => regions.get(index).map(|region| &**region),
        }
    }

    /// Leases the parts that the pieces use. `longest`: the most bytes of a piece.
    ///
    /// # Errors
    /// A piece is not inside its region, or is too long.
    pub(crate) fn lease(&mut self, pieces: &[Piece], longest: usize) -> Result<Leases, SendErrorKind> {
        // Each range grows to include the pieces of its region.
        let mut parts = vec![Range { start: usize::MAX, end: 0 }; self.len()];
        for (nth, piece) in pieces.iter().enumerate() {
            let index = piece.region as usize;
            let count = parts.len();
            let (Some(part), Some(region)) = (parts.get_mut(index), self.region(index)) else {
                return Err(SendErrorKind::NoSuchRegion { piece: nth, region: index, count });
            };
            let range = piece.range().unwrap_or(usize::MAX..usize::MAX);
            if range.end > region.len() {
                return Err(outside(region, &range));
            }
            if range.len() > longest {
                return Err(SendErrorKind::TooLong { len: range.len(), max: longest });
            }
            *part = part.start.min(range.start)..part.end.max(range.end);
        }
        let mut leases = Vec::with_capacity(parts.len());
        for (index, part) in parts.into_iter().enumerate() {
            // A region that no piece names is not leased.
            let part = if part.start > part.end { 0..0 } else { part };
            let leased = match self {
                Self::Write(regions) => regions[index].lease(part).map(|lease| (regions[index].key(), lease)),
                Self::Read(regions) => regions[index].lease_mut(part).map(|lease| (regions[index].key(), lease)),
            };
            debug_assert!(leased.is_some(), "every part was found to be inside its region");
            leases.extend(leased);
        }
        Ok(Leases(leases.into()))
    }
}

/// The leases of the local regions that a list of pieces uses.
#[derive(Debug, Default)]
pub(crate) struct Leases(Box<[(Key, Lease)]>);

impl Leases {
    /// Returns the entry of a piece.
    #[inline]
    pub(crate) fn entry(&self, piece: &Piece) -> Option<Sge> {
        self.0.get(piece.region as usize)?.1.entry(piece.offset as usize, piece.len())
    }

    /// Ends the leases. Returns the regions whose owners have dropped them meanwhile.
    pub(crate) fn done(self) -> impl Iterator<Item = Key> {
        self.0.into_vec().into_iter().filter_map(|(key, lease)| lease.done().then_some(key))
    }
}

/// The notification that follows the last byte of a transfer.
#[derive(Clone)]
pub(crate) enum TransferNotification {
    Message(Box<[u8]>),
    Immediate(u32),
}

impl fmt::Debug for TransferNotification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Message(bytes) => write!(f, "Message({} bytes)", bytes.len()),
            Self::Immediate(value) => write!(f, "Immediate({value:#x})"),
        }
    }
}

/// The options of a transfer: how long it may take, and the notification that follows it.
#[derive(Clone, Debug)]
pub struct TransferOptions {
    pub(crate) within: Duration,
    pub(crate) notification: Option<TransferNotification>,
    pub(crate) confirm: bool,
}

impl TransferOptions {
    /// Returns options of a transfer that ends within this time. When the time is over, nothing more is posted. If pieces are posted then,
    /// the connection ends, which is the only way to reclaim the memory, and the transfer ends with it within another `Timeouts::flush`.
    #[must_use]
    pub const fn within(time: Duration) -> Self {
        Self { within: time, notification: None, confirm: false }
    }

    /// Sends the peer a message behind the last byte: it arrives after the bytes of a write, and is sent after the bytes of a read have
    /// arrived. It uses a credit and must fit one buffer of the peer.
    #[must_use]
    pub fn message(mut self, payload: &[u8]) -> Self {
        self.notification = Some(TransferNotification::Message(payload.into()));
        self
    }

    /// Calls the peer's `on_immediate` behind the last byte, with this value and the number of bytes of the list (at most `u32::MAX`). It
    /// replaces a message.
    #[must_use]
    pub fn immediate(mut self, value: u32) -> Self {
        self.notification = Some(TransferNotification::Immediate(value));
        self
    }

    /// Confirms the bytes of a write by a Read of a few bytes of the last piece, on devices where a Write's completion does not say that
    /// the bytes have arrived (without `Features::ACKNOWLEDGED_WRITES`: iWARP, the embedded provider). The region of the peer needs
    /// `Access::REMOTE_READ` for that. It has no effect on reads.
    #[must_use]
    pub const fn confirm(mut self) -> Self {
        self.confirm = true;
        self
    }
}

/// The outcome of a transfer of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TransferOutcome {
    /// All pieces have completed, and the notification behind them was sent. On devices without `Features::ACKNOWLEDGED_WRITES` the
    /// transport has taken responsibility for the pieces of a write, and only [`TransferOptions::confirm`] or a reply of the peer shows
    /// that they have arrived.
    Done,
    /// The program cancelled the transfer before it was done, and the posted work requests have ended.
    Cancelled,
    /// The deadline passed. If pieces were posted then, the connection has ended.
    Deadline,
    /// A piece failed, or the connection ended first ([`WcStatus::Flushed`](rdma_transport::wc::WcStatus::Flushed)).
    Failed(Failure),
}

/// The end of a transfer of a list, with the state of its pieces. Pieces end in order: the first ones have arrived, the next ones were
/// posted and may have arrived or not, and the others were not posted.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransferEnd {
    /// The outcome.
    pub outcome: TransferOutcome,
    /// The list, for reuse.
    pub pieces: Vec<Piece>,
    /// The number of pieces that have arrived, from the first one on: those of a read are in the local region, and those of a write are
    /// known to be in the peer's memory.
    pub there: usize,
    /// The number of pieces behind these that were posted, and may have arrived, wholly, in part, or not at all.
    pub unknown: usize,
}

impl TransferEnd {
    /// Returns the number of pieces at the end of the list that were not posted: none of their bytes was touched.
    #[must_use]
    pub fn untouched(&self) -> usize {
        self.pieces.len() - self.there - self.unknown
    }

    /// Returns true if the transfer is done.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.outcome == TransferOutcome::Done
    }
}
