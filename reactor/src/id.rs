//! Ids of connections, listeners, timers, sends and the like, and the ids of work requests.
//!
//! An id has a slot, a generation that distinguishes successive users of the slot, and the reactor's number. A stale
//! id, or an id of another reactor, is an error and never means another object.

use std::fmt;

/// Bits of a slot in a connection's id and in a work request id.
pub(crate) const SLOT_BITS: u32 = 24;
/// Bits of a generation in a connection's id and in a work request id.
pub(crate) const GENERATION_BITS: u32 = 20;
/// Bits of a reactor's number in a connection's id.
const REACTOR_BITS: u32 = 20;

/// The number of a reactor in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ReactorTag(u32);

impl ReactorTag {
    /// Returns the reactor's number among the reactors of the process.
    pub(crate) const fn number(self) -> u32 {
        self.0
    }

    /// Allocates a number that no other reactor of this process has. Numbers repeat after about a million reactors
    /// (2^20).
    pub(crate) fn next() -> Self {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed) & ((1 << REACTOR_BITS) - 1))
    }
}

/// The id of a connection. A stale id, or an id of another reactor, is an error and never means another connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(u64);

impl ConnectionId {
    pub(crate) const fn new(reactor: ReactorTag, slot: u32, generation: u32) -> Self {
        Self(((reactor.0 as u64) << (SLOT_BITS + GENERATION_BITS)) | ((generation as u64) << SLOT_BITS) | slot as u64)
    }

    /// Returns a small number that is unique among the live connections of a reactor, as an index for the program's
    /// tables. The number is used again after the last callback of the connection.
    #[must_use]
    #[inline]
    pub const fn slot(self) -> usize {
        (self.0 & ((1 << SLOT_BITS) - 1)) as usize
    }

    /// Returns the generation of the slot that the id belongs to.
    #[inline]
    pub(crate) const fn generation(self) -> u32 {
        (self.0 >> SLOT_BITS) as u32 & ((1 << GENERATION_BITS) - 1)
    }

    /// Returns the slot and the generation, as a work request id has them.
    #[inline]
    pub(crate) const fn place(self) -> u64 {
        self.0 & ((1 << (SLOT_BITS + GENERATION_BITS)) - 1)
    }
}

impl fmt::Debug for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "conn#{}.{}", self.slot(), self.generation())
    }
}

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Defines an id type that consists of a slab key and of the number of the reactor that has the slab.
macro_rules! define_id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name {
            key: rdma_transport::slab::Key,
            reactor: $crate::id::ReactorTag,
        }

        impl $name {
            pub(crate) const fn new(reactor: $crate::id::ReactorTag, key: rdma_transport::slab::Key) -> Self {
                Self { key, reactor }
            }

            /// Returns the key in the reactor's slab; `None` if the id belongs to another reactor.
            #[inline]
            pub(crate) fn key(self, reactor: $crate::id::ReactorTag) -> Option<rdma_transport::slab::Key> {
                (self.reactor == reactor).then_some(self.key)
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!($prefix, "#{}"), self.key)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Debug::fmt(self, f)
            }
        }
    };
}

pub(crate) use define_id;

define_id!(
    /// The id of a listener.
    ListenerId, "listener"
);
define_id!(
    /// The id of a timer.
    TimerId, "timer"
);
define_id!(
    /// The id of a registered descriptor. It is stale once the descriptor was deregistered.
    IoId, "io"
);

/// The kind of a send.
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
    /// A datagram.
    Datagram,
}

/// The id of a send: a message, a one-sided operation or a datagram. It is the position among all sends of the
/// connection or endpoint, from 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SendId {
    sequence: u64,
    kind: SendKind,
}

impl SendId {
    pub(crate) const fn new(sequence: u64, kind: SendKind) -> Self {
        Self { sequence, kind }
    }

    /// Returns the name of the send that was posted `count` sends after this one, of the same kind.
    #[inline]
    pub(crate) const fn after(self, count: u32) -> Self {
        Self::new(self.sequence + count as u64, self.kind)
    }

    /// Returns the position among all sends of the connection or endpoint, from 0.
    #[must_use]
    pub const fn sequence(self) -> u64 {
        self.sequence
    }

    /// Returns the kind of the send.
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

/// The id of a message that the peer of a connection offers ([`crate::Handler::on_offer`]). An id is used again after
/// the message has arrived or was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OfferId(pub(crate) u32);

/// The id of a transfer of a list ([`crate::Context::transfer`]) on one connection.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(u64);

impl TransferId {
    pub(crate) const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Returns the position among all transfers of the connection, from 0.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Debug for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Transfer#{}", self.0)
    }
}

/// The id of a work request, decoded: its owner and its purpose. An id is looked up and is never a pointer, so a late
/// completion of a connection that does not exist any more is detected, even if another connection uses the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkRequestId {
    /// A send of a connection. `place` has the slot and the generation of the connection, `sequence` the low bits of its position
    /// among all sends.
    Send { place: u64, sequence: u16 },
    /// A receive of a connection that does not share its receives.
    Recv { place: u64 },
    /// A receive of a device's shared receive queue, by its slot there.
    SharedRecv { place: u16 },
    /// A work request of a datagram endpoint, with a number that the layer `datagram` encodes.
    Endpoint(u64),
    /// An id that the reactor does not create.
    Unknown,
}

const SEND: u64 = 1;
const RECV: u64 = 2;
const SHARED_RECV: u64 = 3;
const ENDPOINT: u64 = 4;
/// Position of the lowest bit of the kind. The highest bit of an id belongs to the provider; see
/// [`rdma_transport::wr::SendWr::wr_id`].
const KIND: u32 = 60;

/// Bits of the number in the id of an endpoint's work request.
pub(crate) const ENDPOINT_WORK_BITS: u32 = KIND;

/// Returns the work request id of a send of a connection.
#[inline]
pub(crate) const fn send_wr_id(of: ConnectionId, sequence: u16) -> u64 {
    (SEND << KIND) | (of.place() << 16) | sequence as u64
}

/// Returns the work request id of a receive of a connection.
#[inline]
pub(crate) const fn recv_wr_id(of: ConnectionId) -> u64 {
    (RECV << KIND) | (of.place() << 16)
}

/// Returns the work request id of a receive of a shared receive queue.
#[inline]
pub(crate) const fn shared_recv_wr_id(place: u16) -> u64 {
    (SHARED_RECV << KIND) | place as u64
}

/// Returns the id of an endpoint's work request. The number has [`ENDPOINT_WORK_BITS`] bits.
#[inline]
pub(crate) const fn endpoint_wr_id(number: u64) -> u64 {
    (ENDPOINT << KIND) | number
}

impl WorkRequestId {
    #[inline]
    pub(crate) const fn of(wr_id: u64) -> Self {
        let place = (wr_id >> 16) & ((1 << (SLOT_BITS + GENERATION_BITS)) - 1);
        match wr_id >> KIND {
            SEND => Self::Send { place, sequence: wr_id as u16 },
            RECV => Self::Recv { place },
            SHARED_RECV => Self::SharedRecv { place: wr_id as u16 },
            ENDPOINT => Self::Endpoint(wr_id & ((1 << ENDPOINT_WORK_BITS) - 1)),
            _ => Self::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use rdma_transport::slab::Key;

    use super::*;

    #[test]
    fn a_work_id_survives_the_trip() {
        for (slot, generation, sequence) in [(0, 1, 0), (0xff_ffff, 0xf_ffff, 0xffff), (77, 3, 1)] {
            let id = ConnectionId::new(ReactorTag(0xf_ffff), slot, generation);
            assert_eq!((id.slot(), id.generation()), (slot as usize, generation));
            assert_eq!(
                WorkRequestId::of(send_wr_id(id, sequence)),
                WorkRequestId::Send { place: id.place(), sequence }
            );
            assert_eq!(WorkRequestId::of(recv_wr_id(id)), WorkRequestId::Recv { place: id.place() });
            assert!(send_wr_id(id, sequence).max(recv_wr_id(id)) < 1 << 63, "the highest bit is the provider's");
        }
        assert_eq!(WorkRequestId::of(shared_recv_wr_id(9)), WorkRequestId::SharedRecv { place: 9 });
        assert_eq!(WorkRequestId::of(endpoint_wr_id(1 << 59)), WorkRequestId::Endpoint(1 << 59));
        assert!(endpoint_wr_id((1 << ENDPOINT_WORK_BITS) - 1) < 1 << 63, "the highest bit is the provider's");
        assert_eq!(WorkRequestId::of(0), WorkRequestId::Unknown);
        assert_eq!(WorkRequestId::of(u64::MAX), WorkRequestId::Unknown);
    }

    #[test]
    fn the_name_of_another_reactor_is_nobody_here() {
        let (here, there) = (ReactorTag::next(), ReactorTag::next());
        assert_ne!(ConnectionId::new(here, 0, 1), ConnectionId::new(there, 0, 1));
        let timer = TimerId::new(here, Key::new(3, 1));
        assert_eq!((timer.key(here), timer.key(there)), (Some(Key::new(3, 1)), None));
    }
}
