//! The ids of connections, listeners, timers, sends and other objects, and the ids of work requests.
//!
//! The id of an object consists of its slot in a table, of a generation, and of the number of its
//! reactor. When a slot is used again, the generation changes. So an id never refers to a later
//! object in the same slot. If the object does not exist any more, or belongs to another reactor,
//! an operation with its id fails.

use std::fmt;

/// The number of bits for the slot in a connection's id and in a work request id.
pub(crate) const SLOT_BITS: u32 = 24;
/// The number of bits for the generation in a connection's id and in a work request id.
pub(crate) const GENERATION_BITS: u32 = 20;
/// The number of bits for the reactor's number in a connection's id.
const REACTOR_BITS: u32 = 20;

/// The number that identifies a reactor in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ReactorTag(u32);

impl ReactorTag {
    /// Returns the number of the reactor.
    pub(crate) const fn number(self) -> u32 {
        self.0
    }

    /// Returns the number for a new reactor. No other reactor of the process has this number, until the numbers repeat after 2^20 reactors,
    /// which is about a million.
    pub(crate) fn next() -> Self {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed) & ((1 << REACTOR_BITS) - 1))
    }
}

/// The id of a connection. The id never refers to another connection: if the connection has ended, or belongs to another reactor, an
/// operation with its id fails.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(u64);

impl ConnectionId {
    pub(crate) const fn new(reactor: ReactorTag, slot: u32, generation: u32) -> Self {
        Self(((reactor.0 as u64) << (SLOT_BITS + GENERATION_BITS)) | ((generation as u64) << SLOT_BITS) | slot as u64)
    }

    /// Returns a small number that is unique among the current connections of a reactor. The program may use it as an index into its
    /// tables. After the last callback of this connection, a new connection may get the same number.
    #[must_use]
    #[inline]
    pub const fn slot(self) -> usize {
        (self.0 & ((1 << SLOT_BITS) - 1)) as usize
    }

    /// Returns the generation, which distinguishes the connections that have used the same slot.
    #[inline]
    pub(crate) const fn generation(self) -> u32 {
        (self.0 >> SLOT_BITS) as u32 & ((1 << GENERATION_BITS) - 1)
    }

    /// Returns the slot and the generation as one number, without the number of the reactor. Work request ids contain this number.
    #[inline]
    pub(crate) const fn entry(self) -> u64 {
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

/// Defines the type of an id. The id consists of a slab key, and of the number of the reactor that contains the slab.
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

            /// Returns the key in the slab of `reactor`; `None` if the id belongs to another reactor.
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
    /// The id of a registered descriptor. After the descriptor is deregistered, operations with the
    /// id have no effect.
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

/// The id of a send: a message, a one-sided operation or a datagram. The id contains the position of the send among all sends of its
/// connection or endpoint, counted from 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SendId {
    sequence: u64,
    kind: SendKind,
}

impl SendId {
    pub(crate) const fn new(sequence: u64, kind: SendKind) -> Self {
        Self { sequence, kind }
    }

    /// Returns the id of a send of the same kind that was posted `count` sends later.
    #[inline]
    pub(crate) const fn after(self, count: u32) -> Self {
        Self::new(self.sequence + count as u64, self.kind)
    }

    /// Returns the position of the send among all sends of its connection or endpoint, counted from 0.
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

/// The id of a message that the peer of a connection offers ([`crate::Handler::on_offer`]). After the message has arrived or was refused, a
/// new offer may get the same id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OfferId(pub(crate) u32);

/// The id of a transfer ([`crate::RemoteContext::transfer`]) on one connection.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(u64);

impl TransferId {
    pub(crate) const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Returns the position of the transfer among all transfers of its connection, counted from 0.
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

/// A decoded work request id: the owner and the purpose of the work request. A work request id is not a pointer, but the key of an entry in
/// a table. So if a completion arrives after its connection has ended, the reactor detects that, even if another connection uses the same
/// slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkRequestId {
    /// A send of a connection. `entry` contains the slot and the generation of the connection.
    /// `sequence` contains the low bits of the position of the send among all sends of the
    /// connection.
    Send { entry: u64, sequence: u16 },
    /// A receive of a connection that does not use a shared receive queue. `entry` contains the
    /// slot and the generation of the connection.
    Recv { entry: u64 },
    /// A receive of a device's shared receive queue. `slot` is the slot of the receive in that
    /// queue.
    SharedRecv { slot: u16 },
    /// A work request of a datagram endpoint. The module `datagram` encodes and decodes the number.
    Endpoint(u64),
    /// An id that the reactor has not created.
    Unknown,
}

const SEND: u64 = 1;
const RECV: u64 = 2;
const SHARED_RECV: u64 = 3;
const ENDPOINT: u64 = 4;
/// The position of the lowest bit of the kind in a work request id. Bits 60 to 62 contain the kind of the work request. The provider uses
/// bit 63, see [`rdma_transport::wr::SendWr::wr_id`].
const KIND: u32 = 60;

/// The width, in bits, of the number of [`WorkRequestId::Endpoint`].
pub(crate) const ENDPOINT_WORK_BITS: u32 = KIND;

/// Returns the work request id of a send of a connection.
#[inline]
pub(crate) const fn send_wr_id(of: ConnectionId, sequence: u16) -> u64 {
    (SEND << KIND) | (of.entry() << 16) | sequence as u64
}

/// Returns the work request id of a receive of a connection.
#[inline]
pub(crate) const fn recv_wr_id(of: ConnectionId) -> u64 {
    (RECV << KIND) | (of.entry() << 16)
}

/// Returns the work request id of a receive of a shared receive queue. `slot` is the slot of the
/// receive.
#[inline]
pub(crate) const fn shared_recv_wr_id(slot: u16) -> u64 {
    (SHARED_RECV << KIND) | slot as u64
}

/// Returns the work request id of a work request of a datagram endpoint. `number` must fit in [`ENDPOINT_WORK_BITS`] bits.
#[inline]
pub(crate) const fn endpoint_wr_id(number: u64) -> u64 {
    (ENDPOINT << KIND) | number
}

impl WorkRequestId {
    #[inline]
    pub(crate) const fn of(wr_id: u64) -> Self {
        let entry = (wr_id >> 16) & ((1 << (SLOT_BITS + GENERATION_BITS)) - 1);
        match wr_id >> KIND {
            SEND => Self::Send { entry, sequence: wr_id as u16 },
            RECV => Self::Recv { entry },
            SHARED_RECV => Self::SharedRecv { slot: wr_id as u16 },
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
                WorkRequestId::Send { entry: id.entry(), sequence }
            );
            assert_eq!(WorkRequestId::of(recv_wr_id(id)), WorkRequestId::Recv { entry: id.entry() });
            assert!(send_wr_id(id, sequence).max(recv_wr_id(id)) < 1 << 63, "the highest bit is the provider's");
        }
        assert_eq!(WorkRequestId::of(shared_recv_wr_id(9)), WorkRequestId::SharedRecv { slot: 9 });
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
