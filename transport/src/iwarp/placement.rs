//! The places that incoming payload may go to.

use super::requester::Requester;
use super::responder::Responder;
use crate::mem::{RecvSlice, Sge};
use crate::mr::Access;
use crate::slab::Key;
use crate::soft::keys::KeyTable;
use crate::soft::srq::SharedReceiveQueue;

/// What an incoming segment may use besides the queue pair's own receives.
#[derive(Debug)]
pub(crate) struct Context<'a> {
    /// The connection, for STags that belong to one.
    pub(crate) scope: Key,
    pub(crate) keys: &'a mut KeyTable,
    pub(crate) srq: Option<&'a mut SharedReceiveQueue>,
    pub(crate) requester: &'a mut Requester,
    pub(crate) responder: &'a mut Responder,
    /// Whether both sides agreed on RFC 7306.
    pub(crate) extensions: bool,
}

/// Memory where payload goes. Whoever uses it looks the region up.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    /// In a posted receive.
    Receive(Sge),
    /// In a region, where the answer to a Read of ours goes.
    Sink { stag: u32, offset: u64, len: usize },
    /// In a region that the peer writes.
    Target { stag: u32, offset: u64, len: usize },
    /// In the buffer of a Write that waits for its CRC.
    Held { start: usize, len: usize },
}

impl Place {
    /// Length in bytes.
    pub(crate) const fn len(&self) -> usize {
        match self {
            Self::Receive(sge) => sge.len(),
            Self::Sink { len, .. } | Self::Target { len, .. } | Self::Held { len, .. } => *len,
        }
    }

    /// Whether both begin with the same byte, for the same purpose.
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

    /// The memory, for a receive call. `None` if its region was taken back.
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

    /// Appends a copy of `len` bytes from `from` on, of a place that was expected. `None` if its
    /// region is gone.
    pub(crate) fn append_to(&self, from: usize, len: usize, keys: &KeyTable, out: &mut Vec<u8>) -> Option<()> {
        match *self {
            Self::Receive(sge) => sge.part(from, len).append_to(out),
            Self::Sink { stag, offset, .. } => keys.sink(stag, offset.wrapping_add(from as u64), len)?.append_to(out),
            // Never expected: others see what is in them.
            Self::Target { .. } | Self::Held { .. } => return None,
        }
        Some(())
    }
}
