//! The checks of a send work request before it is posted to a queue pair of the embedded provider.

use super::keys::KeyTable;
use rdma_transport::caps::Features;
use rdma_transport::error::{Result, TransportError};
use rdma_transport::qp::QpAttr;
use rdma_transport::wr::{SendClass, SendFlags, SendWr};

/// The longest message in bytes: 1 GiB for the payload, and 64 bytes for a header. The 32-bit Message Offset on the wire would allow longer
/// messages.
pub(crate) const MAX_MESSAGE: u64 = (1 << 30) + 64;

/// The optional operations that every peer supports. For these, [`send`] makes only the checks that
/// apply to all operations.
const UNCONDITIONAL: Features = Features::SEND_WITH_INVALIDATE.union(Features::WRITE);
/// The operations that only peers with the extensions of RFC 7306 support.
pub(crate) const EXTENSIONS: Features = Features::WRITE_WITH_IMMEDIATE.union(Features::ATOMICS);

/// The limits that a work request is checked against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendLimits<'a> {
    pub(crate) provider: &'static str,
    pub(crate) attr: &'a QpAttr,
    /// True if both peers agreed to use the extensions of RFC 7306.
    pub(crate) extensions: bool,
    /// The number of Reads and atomic operations that the local side may have outstanding. `None`
    /// until this number is negotiated.
    pub(crate) depth: Option<usize>,
    pub(crate) keys: &'a KeyTable,
}

/// Checks that a work request may be posted. `len` is the length of its payload in bytes.
#[inline]
pub(crate) fn send(wr: &SendWr, len: usize, terms: &SendLimits<'_>) -> Result<()> {
    if !UNCONDITIONAL.contains(wr.op.feature()) {
        request(wr, len, terms)?;
    }
    if len as u64 > MAX_MESSAGE {
        return Err(TransportError::OutOfRange { what: "message length", value: len as u64, range: "at most 1 GiB" });
    }
    if wr.flags.contains(SendFlags::INLINE) && len > terms.attr.max_inline as usize {
        let range = "at most the max_inline of the queue pair";
        return Err(TransportError::OutOfRange { what: "inline length", value: len as u64, range });
    }
    Ok(())
}

/// Checks an operation that is not in [`UNCONDITIONAL`]. Returns an error if the connection does not support the operation. For a Read or
/// an atomic operation, also returns an error if the response cannot be written to the local memory.
fn request(wr: &SendWr, total: usize, terms: &SendLimits<'_>) -> Result<()> {
    let feature = wr.op.feature();
    if !(Features::READ.contains(feature) || terms.extensions && EXTENSIONS.contains(feature)) {
        return Err(TransportError::Unsupported { provider: terms.provider, feature: wr.op.name() });
    }
    let len = match wr.op.class() {
        SendClass::Send | SendClass::Write => return Ok(()),
        SendClass::Read => total,
        SendClass::Atomic => 8,
    };
    let entries = wr.sges.as_slice();
    if entries.len() > 1 || (entries.is_empty() && len > 0) {
        let (value, range) = (entries.len() as u64, "1: the wire carries one");
        return Err(TransportError::OutOfRange { what: "entries of an RDMA Read or atomic", value, range });
    }
    if wr.flags.contains(SendFlags::INLINE) {
        return Err(TransportError::Unsupported { provider: terms.provider, feature: "inline RDMA Reads or atomics" });
    }
    if len > 0 && terms.depth == Some(0) {
        let range = "at least 1: the peer serves no RDMA Reads";
        return Err(TransportError::OutOfRange { what: "read depth of the connection", value: 0, range });
    }
    if len > 0
        && entries.first().is_some_and(|entry| {
            terms.keys.sink(entry.local_key().0, entry.address() as u64, len).is_none()
                || (wr.op.class() == SendClass::Atomic && entry.len() != len)
        })
    {
        let state = "without a registered entry of the right length and the right to write it here";
        return Err(TransportError::InvalidState { call: "post_send of an RDMA Read or atomic", state });
    }
    Ok(())
}
