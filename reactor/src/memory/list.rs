//! The lists of pieces that a program transfers: the pieces, the options, the result, and the leases of the local regions.

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

/// A piece of a list: a range of a local region, and a range of the peer's memory. Both ranges have the same length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The index of the local region in the list that is passed with the pieces ([`Transfer`]).
    pub region: u32,
    /// The offset of the piece in the local region, in bytes.
    pub offset: u64,
    /// The range of the peer's memory. Its length is the length of the piece.
    pub remote: RemoteRegion,
}

impl Piece {
    /// Creates a piece of the first local region of a list. `offset` is the piece's offset in that region, in bytes.
    ///
    /// Example: [`crate::RemoteContext::transfer`].
    #[must_use]
    pub const fn new(offset: usize, remote: RemoteRegion) -> Self {
        Self { region: 0, offset: offset as u64, remote }
    }

    /// Returns the length of the piece, in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.remote.len as usize
    }

    /// Returns true if the piece has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.remote.len == 0
    }

    /// Returns the piece's range in the local region; `None` if its end does not fit in a `usize`.
    fn range(&self) -> Option<Range<usize>> {
        let (start, len) = (usize::try_from(self.offset).ok()?, usize::try_from(self.remote.len).ok()?);
        Some(start..start.checked_add(len)?)
    }
}

/// The direction of a transfer, and its local regions. Each piece names its local region by the index in the list of
/// local regions ([`Piece::region`]).
#[derive(Debug)]
pub enum Transfer<'a> {
    /// The local regions from which the pieces are written to the peer's memory.
    Write(&'a [&'a Region]),
    /// The local regions into which the pieces are read from the peer's memory.
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

    /// Takes a lease on each local region, for the smallest range that contains all pieces of this region. `longest` is
    /// the largest length that a piece may have.
    ///
    /// # Errors
    /// A piece names no region of the list, is not inside its region, or is too long.
    pub(crate) fn lease(&mut self, pieces: &[Piece], longest: usize) -> Result<Leases, SendErrorKind> {
        // For each region, the smallest range that contains the pieces that were examined so far. The initial range
        // contains no byte.
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
            // A region that no piece names gets an empty lease, so that each lease has the same index as its region.
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

/// The leases of the local regions of a list, by the index of the region.
#[derive(Debug, Default)]
pub(crate) struct Leases(Box<[(Key, Lease)]>);

impl Leases {
    /// Returns the scatter/gather entry of a piece's local range; `None` if the range is not leased.
    #[inline]
    pub(crate) fn entry(&self, piece: &Piece) -> Option<Sge> {
        self.0.get(piece.region as usize)?.1.entry(piece.offset as usize, piece.len())
    }

    /// Ends all leases. Returns the keys of the regions that the program has dropped during the transfer: the caller
    /// deregisters these regions.
    pub(crate) fn done(self) -> impl Iterator<Item = Key> {
        self.0.into_vec().into_iter().filter_map(|(key, lease)| lease.done().then_some(key))
    }
}

/// The notification that the reactor sends to the peer after the last byte of a transfer.
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

/// The options of a transfer: the time that the transfer may take, and the notification that the peer gets at the end
/// of the transfer.
#[derive(Clone, Debug)]
pub struct TransferOptions {
    pub(crate) within: Duration,
    pub(crate) notification: Option<TransferNotification>,
    pub(crate) confirm: bool,
}

impl TransferOptions {
    /// Returns the options of a transfer that must end within `time`. After that time, the reactor posts no more pieces. If posted pieces
    /// are still in flight at that time, the reactor also ends the connection, because otherwise the device could still access the memory
    /// of these pieces. In that case, the transfer ends within another `Timeouts::flush`.
    #[must_use]
    pub const fn within(time: Duration) -> Self {
        Self { within: time, notification: None, confirm: false }
    }

    /// Sends a message with this payload to the peer at the end of the transfer. In a write, the message arrives at the peer after the
    /// pieces. In a read, the reactor sends the message when all pieces have arrived. The message uses a credit, and must fit into one
    /// buffer of the peer.
    #[must_use]
    pub fn message(mut self, payload: &[u8]) -> Self {
        self.notification = Some(TransferNotification::Message(payload.into()));
        self
    }

    /// Calls the peer's `on_immediate` at the end of the transfer, with `value` and the number of bytes in the list (at most `u32::MAX`).
    /// This replaces the message of [`TransferOptions::message`].
    #[must_use]
    pub fn immediate(mut self, value: u32) -> Self {
        self.notification = Some(TransferNotification::Immediate(value));
        self
    }

    /// Confirms that the bytes of a write are in the peer's memory, by an RDMA Read of a few bytes of the last piece. The peer's region
    /// must allow `Access::REMOTE_READ`.
    ///
    /// This option is for devices without `Features::ACKNOWLEDGED_WRITES` (iWARP adapters and the embedded provider): these devices
    /// complete a Write before its bytes have arrived at the peer. On other devices, and for reads, the option has no effect.
    #[must_use]
    pub const fn confirm(mut self) -> Self {
        self.confirm = true;
        self
    }
}

/// The outcome of a transfer of a list of pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TransferOutcome {
    /// All pieces have completed, and the notification was sent. On devices without `Features::ACKNOWLEDGED_WRITES`, the pieces of a write
    /// may still be on their way to the peer's memory. On these devices, only [`TransferOptions::confirm`] or a reply of the peer proves
    /// that the pieces have arrived.
    Done,
    /// The program cancelled the transfer before the reactor had posted all pieces and the notification. All work
    /// requests of the transfer that were posted have ended.
    Cancelled,
    /// The time of [`TransferOptions::within`] has passed. If posted pieces were in flight at that time, the reactor
    /// has ended the connection.
    Deadline,
    /// A piece failed, or the connection ended before the transfer was complete
    /// ([`WcStatus::Flushed`](rdma_transport::wc::WcStatus::Flushed)).
    Failed(Failure),
}

/// The end of a transfer, with the state of its pieces. The list has three parts, in this order: pieces that have arrived (`there`), pieces
/// that were posted and may have arrived (`unknown`), and pieces that were never posted ([`TransferEnd::untouched`]).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransferEnd {
    /// The outcome of the transfer.
    pub outcome: TransferOutcome,
    /// The list of pieces as the program passed it, for reuse.
    pub pieces: Vec<Piece>, // local: a list of the program
    /// The number of pieces at the beginning of the list that have arrived. In a read, these pieces are in the local regions. In a write,
    /// they are known to be in the peer's memory.
    pub there: usize,
    /// The number of pieces that follow the first `there` pieces in the list and that were posted but not confirmed.
    /// Their bytes may have arrived wholly, in part, or not at all.
    pub unknown: usize,
}

impl TransferEnd {
    /// Returns the number of pieces at the end of the list that were never posted. None of their bytes has changed.
    #[must_use]
    pub fn untouched(&self) -> usize {
        self.pieces.len() - self.there - self.unknown
    }

    /// Returns true if the outcome is [`TransferOutcome::Done`].
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.outcome == TransferOutcome::Done
    }
}
