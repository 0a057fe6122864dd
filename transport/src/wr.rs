//! Work requests: what is posted to a queue pair.

use bitflags::bitflags;

use crate::caps::Features;
use crate::datagram::Destination;
use crate::error::Error;
pub use crate::mem::Sge;
use crate::mr::RemoteKey;

/// Scatter/gather entries a work request can carry. Every known device takes as many.
pub const MAX_SGE: usize = 4;

/// Up to [`MAX_SGE`] scatter/gather entries, in place.
#[derive(Clone, Copy, Debug, Default)]
pub struct SgeList {
    items: [Sge; MAX_SGE],
    len: u8,
}

impl SgeList {
    /// A list of one entry.
    #[must_use]
    #[inline]
    pub fn one(sge: Sge) -> Self {
        let mut list = Self { items: [Sge::default(); MAX_SGE], len: 1 };
        list.items[0] = sge;
        list
    }

    /// Adds an entry; gives it back when the list is full.
    pub fn push(&mut self, sge: Sge) -> Result<(), Sge> {
        let slot = self.items.get_mut(usize::from(self.len)).ok_or(sge)?;
        *slot = sge;
        self.len += 1;
        Ok(())
    }

    /// The entries.
    #[must_use]
    #[inline]
    pub fn as_slice(&self) -> &[Sge] {
        &self.items[..usize::from(self.len)]
    }

    /// Bytes of all entries together.
    #[must_use]
    #[inline]
    pub fn total_len(&self) -> usize {
        self.as_slice().iter().map(|sge| sge.len()).sum()
    }

    /// Shows `each` the parts of the entries that hold `len` bytes from `offset` on.
    #[inline]
    pub(crate) fn visit(&self, mut offset: usize, mut len: usize, mut each: impl FnMut(Sge)) {
        for sge in self.as_slice() {
            if len == 0 {
                return;
            }
            if offset >= sge.len() {
                offset -= sge.len();
                continue;
            }
            let part = sge.part(offset, len);
            offset = 0;
            len -= part.len();
            each(part);
        }
    }
}

bitflags! {
    /// Flags of a send work request (`ibv_post_send`(3)).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct SendFlags: u8 {
        /// Produce a completion on success too. Failures always complete.
        const SIGNALED = 1;
        /// Wake a peer that armed for solicited completions only.
        const SOLICITED = 2;
        /// Copy the payload at post time; the memory is free again when the call returns.
        const INLINE = 4;
        /// Wait for earlier RDMA Reads before starting.
        const FENCE = 8;
    }
}

/// Memory of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteAddress {
    /// Virtual address (tagged offset on iWARP).
    pub address: u64,
    /// Its key.
    pub key: RemoteKey,
}

/// What a send work request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SendOp {
    /// Send to the peer's next posted receive.
    Send,
    /// Send, with 32 bits of data beside the payload.
    SendWithImmediate(u32),
    /// Send, and invalidate a key of the peer.
    SendInvalidate(RemoteKey),
    /// Send a datagram. Only datagram queue pairs do this and the next kind, and they do nothing else.
    Datagram(Destination),
    /// Send a datagram, with 32 bits of data beside the payload.
    DatagramWithImmediate(Destination, u32),
    /// Write to the peer's memory.
    Write(RemoteAddress),
    /// Write, then complete one receive of the peer with 32 bits of data.
    WriteWithImmediate(RemoteAddress, u32),
    /// Read the peer's memory.
    Read(RemoteAddress),
    /// Swap 8 bytes of the peer when they equal `expected`; the old value lands in the entry.
    CompareSwap {
        /// The 8 bytes.
        remote: RemoteAddress,
        /// What must be there.
        expected: u64,
        /// What is put there.
        swap: u64,
    },
    /// Add to 8 bytes of the peer; the old value lands in the entry.
    FetchAdd {
        /// The 8 bytes.
        remote: RemoteAddress,
        /// What is added.
        add: u64,
    },
}

/// The class of an operation: what the queue pairs of both sides do for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendClass {
    /// Consumes a receive of the peer.
    Send,
    /// Places data in the peer's memory.
    Write,
    /// Fetches data from the peer's memory.
    Read,
    /// Changes 8 bytes of the peer's memory, and fetches their old value.
    Atomic,
}

impl SendOp {
    /// Returns the class of the operation.
    #[must_use]
    #[inline]
    pub const fn class(&self) -> SendClass {
        match self {
            Self::Send
            | Self::SendWithImmediate(_)
            | Self::SendInvalidate(_)
            | Self::Datagram(_)
            | Self::DatagramWithImmediate(..) => SendClass::Send,
            Self::Write(_) | Self::WriteWithImmediate(..) => SendClass::Write,
            Self::Read(_) => SendClass::Read,
            Self::CompareSwap { .. } | Self::FetchAdd { .. } => SendClass::Atomic,
        }
    }

    /// Returns `true` if the operation completes with an answer of the peer: a Read or an atomic.
    #[must_use]
    #[inline]
    pub const fn answered(&self) -> bool {
        match self.class() {
            SendClass::Send | SendClass::Write => false,
            SendClass::Read | SendClass::Atomic => true,
        }
    }

    /// Returns `true` if the operation consumes a receive of the peer.
    #[must_use]
    #[inline]
    pub const fn takes_receive(&self) -> bool {
        match (self, self.class()) {
            (Self::WriteWithImmediate(..), _) | (_, SendClass::Send) => true,
            (_, SendClass::Write | SendClass::Read | SendClass::Atomic) => false,
        }
    }

    /// Returns the feature that a device needs for the operation; none for [`SendOp::Send`], which each device has.
    #[must_use]
    #[inline]
    pub const fn feature(&self) -> Features {
        match self {
            Self::Send => Features::empty(),
            Self::SendWithImmediate(_) => Features::SEND_WITH_IMMEDIATE,
            Self::SendInvalidate(_) => Features::SEND_WITH_INVALIDATE,
            Self::Datagram(_) | Self::DatagramWithImmediate(..) => Features::DATAGRAMS,
            Self::Write(_) => Features::WRITE,
            Self::WriteWithImmediate(..) => Features::WRITE_WITH_IMMEDIATE,
            Self::Read(_) => Features::READ,
            Self::CompareSwap { .. } | Self::FetchAdd { .. } => Features::ATOMICS,
        }
    }

    /// Returns the name of the operation, for [`Error::Unsupported`].
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Send => "Send",
            Self::SendWithImmediate(_) => "Send with immediate data",
            Self::SendInvalidate(_) => "Send with Invalidate",
            Self::Datagram(_) | Self::DatagramWithImmediate(..) => "datagrams",
            Self::Write(_) => "RDMA Write",
            Self::WriteWithImmediate(..) => "RDMA Write with immediate data",
            Self::Read(_) => "RDMA Read",
            Self::CompareSwap { .. } | Self::FetchAdd { .. } => "atomic operations",
        }
    }
}

/// A send work request.
#[derive(Clone, Copy, Debug)]
pub struct SendWr {
    /// The number that comes back in the completion. It is below 2^63: the highest bit is the provider's.
    pub wr_id: u64,
    /// The operation.
    pub op: SendOp,
    /// Local memory.
    pub sges: SgeList,
    /// Flags.
    pub flags: SendFlags,
}

/// A receive work request.
#[derive(Clone, Copy, Debug)]
pub struct RecvWr {
    /// The number that comes back in the completion. It is below 2^63: the highest bit is the provider's.
    pub wr_id: u64,
    /// Where the message goes.
    pub sges: SgeList,
}

/// The result of a chain of sends that was taken whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// The call has completed nothing. What completes later is found as ever.
    Pending,
    /// Completions may be in the completion queue of the sends already: it is worth a poll.
    Completed,
}

impl Posted {
    /// [`Posted::Completed`] if `completed` is set.
    #[must_use]
    #[inline]
    pub const fn of(completed: bool) -> Self {
        if completed { Self::Completed } else { Self::Pending }
    }
}

/// A chain that was not taken whole.
#[derive(Debug)]
pub struct PostError {
    /// Number of work requests before the one that failed. These are posted, and complete; the others are not posted, and their memory
    /// is the caller's.
    pub posted: usize,
    /// Why that one failed.
    pub error: Error,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_says_its_class_and_what_a_device_needs_for_it() {
        let remote = RemoteAddress { address: 0, key: RemoteKey(1) };
        for (op, class, feature) in [
            (SendOp::Send, SendClass::Send, Features::empty()),
            (SendOp::SendInvalidate(RemoteKey(1)), SendClass::Send, Features::SEND_WITH_INVALIDATE),
            (SendOp::WriteWithImmediate(remote, 7), SendClass::Write, Features::WRITE_WITH_IMMEDIATE),
            (SendOp::Read(remote), SendClass::Read, Features::READ),
            (SendOp::FetchAdd { remote, add: 1 }, SendClass::Atomic, Features::ATOMICS),
        ] {
            assert_eq!((op.class(), op.feature()), (class, feature));
            assert_eq!(op.answered(), matches!(class, SendClass::Read | SendClass::Atomic));
            assert_eq!(op.takes_receive(), class == SendClass::Send || feature == Features::WRITE_WITH_IMMEDIATE);
        }
    }
}
