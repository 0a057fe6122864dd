//! Work requests, which are posted to a queue pair.

use bitflags::bitflags;

use crate::caps::Features;
use crate::datagram::Destination;
use crate::error::TransportError;
pub use crate::mem::Sge;
use crate::mr::RemoteKey;

/// The maximum number of scatter/gather entries per work request. Every known device supports this number.
pub const MAX_SGE: usize = 4;

/// A list of up to [`MAX_SGE`] scatter/gather entries, without a heap allocation.
#[derive(Clone, Copy, Debug, Default)]
pub struct SgeList {
    items: [Sge; MAX_SGE],
    len: u8,
}

impl SgeList {
    /// Makes a list of one entry.
    #[must_use]
    #[inline]
    pub fn one(sge: Sge) -> Self {
        let mut list = Self { items: [Sge::default(); MAX_SGE], len: 1 };
        list.items[0] = sge;
        list
    }

    /// Appends an entry.
    ///
    /// # Errors
    /// Returns `sge` if the list is full.
    #[inline]
    pub fn push(&mut self, sge: Sge) -> Result<(), Sge> {
        let slot = self.items.get_mut(usize::from(self.len)).ok_or(sge)?;
        *slot = sge;
        self.len += 1;
        Ok(())
    }

    /// Returns the entries.
    #[must_use]
    #[inline]
    pub fn as_slice(&self) -> &[Sge] {
        &self.items[..usize::from(self.len)]
    }

    /// Returns the sum of the lengths of all entries, in bytes.
    #[must_use]
    #[inline]
    pub fn total_len(&self) -> usize {
        self.as_slice().iter().map(|sge| sge.len()).sum()
    }

    /// Calls `each` with entries for the bytes `offset..offset + len` of the list, where the offset counts over all
    /// entries. If these bytes are in several entries, `each` is called once for each of these entries.
    #[inline]
    pub fn visit(&self, mut offset: usize, mut len: usize, mut each: impl FnMut(Sge)) {
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
        /// The work request reports a completion even if it succeeds. A work request that fails always reports a
        /// completion, with or without this flag.
        const SIGNALED = 1;
        /// The message raises an event at the peer even if the peer has armed its completion queue for solicited
        /// completions only.
        const SOLICITED = 2;
        /// The provider copies the payload when the work request is posted. The program may reuse the memory after the
        /// call has returned.
        const INLINE = 4;
        /// The work request starts after all earlier RDMA Reads are done.
        const FENCE = 8;
    }
}

/// An address in the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteAddress {
    /// The virtual address. On iWARP, this is the tagged offset.
    pub address: u64,
    /// The remote key of the region.
    pub key: RemoteKey,
}

/// The operation of a send work request. A provider must execute or refuse each operation, so a new
/// variant would be a breaking change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOp {
    /// Sends a message, which consumes the peer's next posted receive.
    Send,
    /// Sends a message with 32 bits of immediate data, which the peer's completion reports.
    SendWithImmediate(u32),
    /// Sends a message, and invalidates a remote key of the peer.
    SendInvalidate(RemoteKey),
    /// Sends a datagram. A datagram queue pair supports only `Datagram` and `DatagramWithImmediate`. Other queue pairs
    /// support neither of them.
    Datagram(Destination),
    /// Sends a datagram with 32 bits of immediate data.
    DatagramWithImmediate(Destination, u32),
    /// Writes to the peer's memory.
    Write(RemoteAddress),
    /// Writes to the peer's memory, and then completes one of the peer's receives with 32 bits of immediate data.
    WriteWithImmediate(RemoteAddress, u32),
    /// Reads the peer's memory.
    Read(RemoteAddress),
    /// Replaces 8 bytes of the peer's memory by `swap` if they equal `expected`. Their old value is placed in the local
    /// entry.
    CompareSwap {
        /// The address of the 8 bytes.
        remote: RemoteAddress,
        /// The value with which the 8 bytes are compared.
        expected: u64,
        /// The value that replaces the 8 bytes.
        swap: u64,
    },
    /// Adds a number to 8 bytes of the peer's memory. Their old value is placed in the local entry.
    FetchAdd {
        /// The address of the 8 bytes.
        remote: RemoteAddress,
        /// The number that is added.
        add: u64,
    },
}

/// The class of an operation, by its effect on the two queue pairs.
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

    /// Returns true if the operation completes with a response of the peer, as Reads and atomics do.
    #[must_use]
    #[inline]
    pub const fn answered(&self) -> bool {
        match self.class() {
            SendClass::Send | SendClass::Write => false,
            SendClass::Read | SendClass::Atomic => true,
        }
    }

    /// Returns true if the operation consumes a receive of the peer.
    #[must_use]
    #[inline]
    pub const fn takes_receive(&self) -> bool {
        match (self, self.class()) {
            (Self::WriteWithImmediate(..), _) | (_, SendClass::Send) => true,
            (_, SendClass::Write | SendClass::Read | SendClass::Atomic) => false,
        }
    }

    /// Returns the feature that a device needs for the operation. Returns an empty set for [`SendOp::Send`], which
    /// every device supports.
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

    /// Returns the name of the operation, for [`TransportError::Unsupported`].
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
    /// The number that the completion reports. It must be below 2^63, because the provider uses the highest bit.
    pub wr_id: u64,
    /// The operation.
    pub op: SendOp,
    /// The local memory that the operation reads or writes.
    pub sges: SgeList,
    /// The flags.
    pub flags: SendFlags,
}

/// A receive work request.
#[derive(Clone, Copy, Debug)]
pub struct RecvWr {
    /// The number that the completion reports. It must be below 2^63, because the provider uses the highest bit.
    pub wr_id: u64,
    /// The memory in which the message is placed.
    pub sges: SgeList,
}

/// The result of a successful post of sends: the whole chain is posted. The value is a hint whether the program should
/// poll the completion queue now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// The call has probably completed no work request.
    Pending,
    /// The completion queue of the sends may already have completions, so poll it.
    Completed,
}

impl Posted {
    /// Returns [`Posted::Completed`] if `completed` is true, and [`Posted::Pending`] if not.
    #[must_use]
    #[inline]
    pub const fn of(completed: bool) -> Self {
        if completed { Self::Completed } else { Self::Pending }
    }
}

/// The error of a chain that was posted only in part.
#[derive(Debug)]
pub struct PostError {
    /// The number of work requests that were posted before the one that failed. The posted work requests complete as
    /// usual. The other work requests of the chain are not posted, and the caller may reuse their memory.
    pub posted: usize,
    /// The reason why the next work request of the chain was not posted.
    pub error: TransportError,
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
