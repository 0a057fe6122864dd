//! The destinations of incoming payload.

use super::requester::Requester;
use super::responder::Responder;
use crate::mem::{RecvSlice, Sge};
use crate::mr::Access;
use crate::slab::Key;
use crate::soft::keys::KeyTable;
use crate::soft::srq::SharedReceiveQueue;

/// The objects that an incoming segment may use, in addition to the queue pair's own receives.
#[derive(Debug)]
pub(crate) struct PlacementContext<'a> {
    /// The connection, for STags that are restricted to one.
    pub(crate) scope: Key,
    pub(crate) keys: &'a mut KeyTable,
    pub(crate) srq: Option<&'a mut SharedReceiveQueue>,
    pub(crate) requester: &'a mut Requester,
    pub(crate) responder: &'a mut Responder,
    /// True if both peers agreed on RFC 7306.
    pub(crate) extensions: bool,
}

/// The destination of payload. A region is looked up for each use.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PayloadBuffer {
    /// A posted receive.
    Receive(Sge),
    /// A region that the response to a local Read is written to.
    Sink { stag: u32, offset: u64, len: usize },
    /// A region that the peer writes.
    Target { stag: u32, offset: u64, len: usize },
    /// The buffer of a Write that waits for its CRC.
    Held { start: usize, len: usize },
}

impl PayloadBuffer {
    /// Length in bytes.
    pub(crate) const fn len(&self) -> usize {
        match self {
            Self::Receive(sge) => sge.len(),
            Self::Sink { len, .. } | Self::Target { len, .. } | Self::Held { len, .. } => *len,
        }
    }

    /// Returns true if both begin with the same byte, for the same purpose.
    pub(crate) fn begins_as(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Receive(a), Self::Receive(b)) => a.address() == b.address(),
            (Self::Sink { stag, offset, .. }, Self::Sink { stag: other, offset: at, .. })
            | (Self::Target { stag, offset, .. }, Self::Target { stag: other, offset: at, .. }) => {
                (stag, offset) == (other, at)
            }
            (Self::Held { start, .. }, Self::Held { start: other, .. }) => start == other,
            _ => false,
        }
    }

    /// Returns the memory for a receive call, or `None` if its region was revoked.
    pub(crate) fn receive_slice<'a>(
        &'a self,
        held: &mut Option<&'a mut [u8]>,
        scope: Key,
        keys: &'a KeyTable,
    ) -> Option<RecvSlice<'a>> {
        match *self {
            Self::Receive(ref sge) => Some(sge.receive_slice()),
            Self::Sink { stag, offset, len } => Some(keys.sink(stag, offset, len)?.receive_slice()),
            Self::Target { stag, offset, len } => {
                Some(keys.remote(scope, stag, offset, len, Access::REMOTE_WRITE).ok()?.receive_slice())
            }
            Self::Held { start, len } => held.take()?.get_mut(start..start + len).map(RecvSlice::new),
        }
    }

    /// Appends a copy of `len` bytes from `from` on, of a destination that was expected. Returns `None` if its region was revoked.
    pub(crate) fn append_to(&self, from: usize, len: usize, keys: &KeyTable, out: &mut Vec<u8>) -> Option<()> {
        match *self {
            Self::Receive(sge) => sge.part(from, len).append_to(out),
            Self::Sink { stag, offset, .. } => keys.sink(stag, offset.wrapping_add(from as u64), len)?.append_to(out),
            // These are never expected, because others can read them.
            Self::Target { .. } | Self::Held { .. } => return None,
        }
        Some(())
    }
}
