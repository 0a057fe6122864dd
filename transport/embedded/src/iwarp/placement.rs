//! The destinations of incoming payload.

use super::responder::ServedRequest;
use super::wire::{Tagged, TerminateCause};
use crate::entries::ENTRIES;
use crate::soft::keys::KeyTable;
use crate::soft::outstanding::{OutstandingRequest, OutstandingRequests};
use crate::soft::responses::PendingResponses;
use crate::soft::srq::SharedReceiveQueue;
use rdma_transport::mem::{RecvSlice, Sge};
use rdma_transport::mr::Access;
use rdma_transport::slab::Key;

/// The objects outside the receive direction that an incoming segment may access.
#[derive(Debug)]
pub(crate) struct PlacementContext<'a> {
    /// The key of the connection. An STag that is restricted to one connection is only valid in that connection.
    pub(crate) scope: Key,
    pub(crate) keys: &'a mut KeyTable,
    pub(crate) srq: Option<&'a mut SharedReceiveQueue>,
    pub(crate) outstanding: &'a mut OutstandingRequests,
    pub(crate) responses: &'a mut PendingResponses<ServedRequest>,
    /// True if both peers agreed to use the extensions of RFC 7306.
    pub(crate) extensions: bool,
}

/// The destination of a payload. The region of an STag is looked up at each use, because the region may be revoked between two uses.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PayloadBuffer {
    /// A posted receive.
    Receive(Sge),
    /// The memory to which the response of a local Read is written.
    Sink { stag: u32, offset: u64, len: usize },
    /// The memory to which the peer's Write is written.
    Target { stag: u32, offset: u64, len: usize },
    /// The buffer in which a segment of a Write is held until its CRC is checked.
    Held { start: usize, len: usize },
}

impl PayloadBuffer {
    pub(crate) const fn len(&self) -> usize {
        match self {
            Self::Receive(sge) => sge.len(),
            Self::Sink { len, .. } | Self::Target { len, .. } | Self::Held { len, .. } => *len,
        }
    }

    /// Returns true if both destinations are of the same kind and begin at the same byte.
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

    /// Returns the destination as a slice for a receive call. Returns `None` if the region of the destination was revoked. `held` is the
    /// buffer of [`PayloadBuffer::Held`].
    pub(crate) fn receive_slice<'a>(
        &'a self,
        held: &mut Option<&'a mut [u8]>,
        scope: Key,
        keys: &'a KeyTable,
    ) -> Option<RecvSlice<'a>> {
        match *self {
            Self::Receive(ref sge) => Some(ENTRIES.receive_slice(sge)),
            Self::Sink { stag, offset, len } => Some(keys.sink(stag, offset, len)?.receive_slice()),
            Self::Target { stag, offset, len } => {
                Some(keys.remote(scope, stag, offset, len, Access::REMOTE_WRITE).ok()?.receive_slice())
            }
            Self::Held { start, len } => held.take()?.get_mut(start..start + len).map(RecvSlice::new),
        }
    }

    /// Appends `len` bytes of the destination, from the offset `from` on, to `out`. Returns `None` if the region of the destination was
    /// revoked. Used for the destinations of a wrong forecast.
    pub(crate) fn append_to(&self, from: usize, len: usize, keys: &KeyTable, out: &mut Vec<u8>) -> Option<()> {
        match *self {
            Self::Receive(sge) => ENTRIES.append_to(&sge.part(from, len), out),
            Self::Sink { stag, offset, .. } => keys.sink(stag, offset.wrapping_add(from as u64), len)?.append_to(out),
            // Only the payload of a Write has one of these destinations. A forecast plans no Writes, because the program can read the
            // target of a Write at any time.
            Self::Target { .. } | Self::Held { .. } => return None,
        }
        Some(())
    }
}

/// Checks that a Read Response segment with `len` octets of payload is the segment that is expected
/// next. `front` is the oldest outstanding request.
pub(super) fn judge_response(
    front: Option<&OutstandingRequest>,
    header: &Tagged,
    len: usize,
) -> Result<(), TerminateCause> {
    let read = front.filter(|front| !front.atomic);
    let Some(read) = read else { return Err(TerminateCause::DDP_LOCAL_CATASTROPHIC) };
    let left = (read.len - read.done) as usize;
    if len > 0 {
        if header.stag != read.stag {
            return Err(TerminateCause::DDP_TAGGED_INVALID_STAG);
        }
        if len > left || header.offset != read.offset.wrapping_add(read.done.into()) {
            return Err(TerminateCause::DDP_TAGGED_BOUNDS);
        }
    }
    // The L bit must be set on exactly the segment that completes the response. An empty segment is
    // only valid for an empty response.
    if header.last != (len == left) || (len == 0 && read.len > 0) {
        return Err(TerminateCause::RDMAP_STREAM_CATASTROPHIC);
    }
    Ok(())
}
