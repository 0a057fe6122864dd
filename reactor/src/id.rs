//! The names that a program and its reactor use for connections, sends, timers and the like.
//!
//! Each name carries a slot, a generation that tells the uses of the slot apart, and its reactor. A stale name, or a
//! name of another reactor, is an error and never names something else.

use std::fmt;

/// Bits of a slot in a connection's name and in a work request id.
pub(crate) const SLOT_BITS: u32 = 24;
/// Bits of a generation in a connection's name and in a work request id.
pub(crate) const GENERATION_BITS: u32 = 20;
/// Bits of a reactor's number in a connection's name.
const REACTOR_BITS: u32 = 20;

/// The number of a reactor in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ReactorTag(u32);

impl ReactorTag {
    /// Its number among the reactors of the process.
    pub(crate) const fn number(self) -> u32 {
        self.0
    }

    /// Takes a number that no other reactor of this process has. Numbers repeat after about a million reactors (2^20).
    pub(crate) fn next() -> Self {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed) & ((1 << REACTOR_BITS) - 1))
    }
}

/// Names one connection. A stale name, or a name of another reactor, is an error and never another connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(u64);

impl ConnectionId {
    pub(crate) const fn new(reactor: ReactorTag, slot: u32, generation: u32) -> Self {
        Self(((reactor.0 as u64) << (SLOT_BITS + GENERATION_BITS)) | ((generation as u64) << SLOT_BITS) | slot as u64)
    }

    /// A small number that is unique among the live connections of a reactor, as an index for tables of the program. It
    /// is used again after the last callback of the connection.
    #[must_use]
    #[inline]
    pub const fn slot(self) -> usize {
        (self.0 & ((1 << SLOT_BITS) - 1)) as usize
    }

    /// The generation: the use of the slot that the name means.
    #[inline]
    pub(crate) const fn generation(self) -> u32 {
        (self.0 >> SLOT_BITS) as u32 & ((1 << GENERATION_BITS) - 1)
    }

    /// The slot and the generation, as they stand in a work request id.
    #[inline]
    const fn place(self) -> u64 {
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

/// Declares a name that consists of a table's key and of the reactor that has the table.
macro_rules! name {
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

            /// The key in the tables of a reactor; `None` if the name is another reactor's.
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

pub(crate) use name;

name!(
    /// Names one listener.
    ListenerId, "listener"
);
name!(
    /// Names one timer.
    TimerId, "timer"
);
name!(
    /// Names one registration of a descriptor. The name is stale once the registration was taken back.
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
    /// A datagram of an endpoint.
    Datagram,
}

/// Names one send of a connection or endpoint, a message or a one-sided operation, by its position among all of them,
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

    /// The position among all sends of the connection or endpoint, from 0.
    #[must_use]
    pub const fn sequence(self) -> u64 {
        self.sequence
    }

    /// The kind of the send.
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

/// Name of a message past one buffer that the peer of a connection offers ([`crate::Handler::on_offer`]). Names are used again
/// when a message has arrived or was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OfferId(pub(crate) u32);

/// Name of a transfer of a list ([`crate::Context::transfer`]), on one connection.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(u64);

impl TransferId {
    pub(crate) const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The position among all transfers of the connection, from 0.
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

/// The purpose of a work request, and its owner. The id of a work request is looked up and is never a pointer, so that
/// a late completion of a connection that is gone is recognised, even if another connection has taken the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// A send of a connection. `sequence`: the low bits of its position among all sends.
    Send { slot: u32, generation: u32, sequence: u16 },
    /// A receive of a connection's own.
    Recv { slot: u32, generation: u32 },
    /// A receive of a device's shared queue, by its place there.
    SharedRecv { place: u16 },
    /// A work request of something other than a connection, with a number that its owner has given.
    Guest(u64),
    /// A number that this library does not give.
    Unknown,
}

const SEND: u64 = 1;
const RECV: u64 = 2;
const SHARED_RECV: u64 = 3;
const GUEST: u64 = 4;
/// Lowest bit of the kind. The highest bit of an id belongs to the provider, see [`rdma_transport::wr::SendWr::wr_id`].
const KIND: u32 = 60;

/// Bits of a guest's own number.
pub(crate) const GUEST_BITS: u32 = KIND;

/// The id of a send of a connection.
#[inline]
pub(crate) const fn send_work(of: ConnectionId, sequence: u16) -> u64 {
    (SEND << KIND) | (of.place() << 16) | sequence as u64
}

/// The id of a receive of a connection.
#[inline]
pub(crate) const fn recv_work(of: ConnectionId) -> u64 {
    (RECV << KIND) | (of.place() << 16)
}

/// The id of a receive of a shared queue.
#[inline]
pub(crate) const fn shared_recv_work(place: u16) -> u64 {
    (SHARED_RECV << KIND) | place as u64
}

/// The id of a guest's work request; the number has [`GUEST_BITS`] bits.
#[inline]
pub(crate) const fn guest_work(number: u64) -> u64 {
    (GUEST << KIND) | number
}

impl Work {
    #[inline]
    pub(crate) const fn of(wr_id: u64) -> Self {
        let slot = (wr_id >> 16) as u32 & ((1 << SLOT_BITS) - 1);
        let generation = (wr_id >> (16 + SLOT_BITS)) as u32 & ((1 << GENERATION_BITS) - 1);
        match wr_id >> KIND {
            SEND => Self::Send { slot, generation, sequence: wr_id as u16 },
            RECV => Self::Recv { slot, generation },
            SHARED_RECV => Self::SharedRecv { place: wr_id as u16 },
            GUEST => Self::Guest(wr_id & ((1 << GUEST_BITS) - 1)),
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
            assert_eq!(Work::of(send_work(id, sequence)), Work::Send { slot, generation, sequence });
            assert_eq!(Work::of(recv_work(id)), Work::Recv { slot, generation });
            assert!(send_work(id, sequence).max(recv_work(id)) < 1 << 63, "the highest bit is the provider's");
        }
        assert_eq!(Work::of(shared_recv_work(9)), Work::SharedRecv { place: 9 });
        assert_eq!(Work::of(guest_work(1 << 59)), Work::Guest(1 << 59));
        assert!(guest_work((1 << GUEST_BITS) - 1) < 1 << 63, "the highest bit is the provider's");
        assert_eq!(Work::of(0), Work::Unknown);
        assert_eq!(Work::of(u64::MAX), Work::Unknown);
    }

    #[test]
    fn the_name_of_another_reactor_is_nobody_here() {
        let (here, there) = (ReactorTag::next(), ReactorTag::next());
        assert_ne!(ConnectionId::new(here, 0, 1), ConnectionId::new(there, 0, 1));
        let timer = TimerId::new(here, Key::new(3, 1));
        assert_eq!((timer.key(here), timer.key(there)), (Some(Key::new(3, 1)), None));
    }
}
