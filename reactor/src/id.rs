//! The names a handler knows things by.

use std::fmt;

use rdma_transport::slab::Key;

/// Bits of a slot in a work request id.
pub(crate) const SLOT_BITS: u32 = 24;
/// Bits of a generation in a work request id.
pub(crate) const GENERATION_BITS: u32 = 20;

/// Names one connection: slot and generation. A stale one is an error, never another connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub(crate) Key);

impl ConnectionId {
    /// A small number, unique among live connections, to index one's own tables by. Reused after `on_disconnect`.
    #[must_use]
    pub const fn slot(self) -> usize {
        self.0.slot() as usize
    }
}

impl fmt::Debug for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "conn#{}", self.0)
    }
}

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Names one listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ListenerId(pub(crate) Key);

/// Names one timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TimerId(pub(crate) Key);

/// What a send is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum SendKind {
    /// A message.
    Message,
    /// An RDMA Read.
    Read,
    /// An RDMA Write, with or without immediate data.
    Write,
    /// A compare-and-swap.
    CompareSwap,
    /// A fetch-and-add.
    FetchAdd,
    /// A datagram of an endpoint.
    Datagram,
}

/// Names one send of a connection or endpoint, a message or a one-sided operation: its position among all of them,
/// from 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SendId {
    sequence: u64,
    kind: SendKind,
}

impl SendId {
    pub(crate) const fn new(sequence: u64, kind: SendKind) -> Self {
        Self { sequence, kind }
    }

    /// The position.
    #[must_use]
    pub const fn sequence(self) -> u64 {
        self.sequence
    }

    /// What it is.
    #[must_use]
    pub const fn kind(self) -> SendKind {
        self.kind
    }
}

impl fmt::Debug for SendId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}#{}", self.kind, self.sequence)
    }
}

/// What a work request was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkKind {
    Send,
    Recv,
}

/// Kinds of work requests that are no connection's: an endpoint's.
pub(crate) const DATAGRAM_SEND: u64 = 3;
pub(crate) const DATAGRAM_RECV: u64 = 4;
/// A receive of a shared queue: the sequence is its place there.
pub(crate) const SHARED_RECV: u64 = 5;

/// The number of a work request: its kind, whose it is, and the low bits of its position in the queue.
#[inline]
pub(crate) fn pack_work(kind: u64, of: Key, sequence: u16) -> u64 {
    (kind << 60) | (u64::from(of.generation()) << 40) | (u64::from(of.slot()) << 16) | u64::from(sequence)
}

/// The parts of such a number.
#[inline]
pub(crate) fn unpack_work(raw: u64) -> (u64, Key, u16) {
    let generation = (raw >> 40) as u32 & ((1 << GENERATION_BITS) - 1);
    let slot = (raw >> 16) as u32 & ((1 << SLOT_BITS) - 1);
    (raw >> 60, Key::new(slot, generation), raw as u16)
}

/// A work request id: looked up, never a pointer, so that a late completion of a connection that is gone, or of
/// another that took its slot, is seen as such.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WorkId {
    pub(crate) kind: WorkKind,
    pub(crate) connection: ConnectionId,
    /// Low bits of the position in the queue.
    pub(crate) sequence: u16,
}

impl WorkId {
    pub(crate) fn pack(self) -> u64 {
        let kind = match self.kind {
            WorkKind::Send => 1,
            WorkKind::Recv => 2,
        };
        pack_work(kind, self.connection.0, self.sequence)
    }

    pub(crate) fn unpack(raw: u64) -> Option<Self> {
        let (kind, of, sequence) = unpack_work(raw);
        let kind = match kind {
            1 => WorkKind::Send,
            2 => WorkKind::Recv,
            _ => return None,
        };
        Some(Self { kind, connection: ConnectionId(of), sequence })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_work_id_survives_the_trip() {
        for (slot, generation, sequence) in [(0, 1, 0), (0xff_ffff, 0xf_ffff, 0xffff), (77, 3, 1)] {
            for kind in [WorkKind::Send, WorkKind::Recv] {
                let id = WorkId { kind, connection: ConnectionId(Key::new(slot, generation)), sequence };
                assert_eq!(WorkId::unpack(id.pack()), Some(id));
            }
        }
        assert_eq!(WorkId::unpack(0), None);
        assert_eq!(WorkId::unpack(u64::MAX), None);
    }
}
