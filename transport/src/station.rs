//! [`Station`]: a provider together with the memory of its work requests, for programs that post work requests without
//! a reactor.
//!
//! A work request names memory, and the provider uses that memory until the work request has completed. So making an
//! entry for a work request is unsafe ([`Memory::shared_entry`]). A station makes posting safe: the program only copies
//! bytes into and out of the memory, and the memory exists as long as the provider.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Result, TransportError};
use crate::mem::Memory;
use crate::mr::{Access, LocalKey, MemoryRegion};
use crate::provider::{DeviceId, PostError, Posted, Provider};
use crate::qp::{QpId, SrqId};
use crate::roles::SharedReceives;
use crate::wr::{RecvWr, RemoteAddress, SendFlags, SendOp, SendWr, SgeList};

/// A provider and the memory of its work requests. Offsets from the start of the memory name its parts.
#[derive(Debug)]
pub struct Station {
    // Fields are dropped in order: the provider is dropped before the memory, and then nothing uses the memory.
    provider: Box<dyn Provider>,
    memory: Arc<Memory>,
    key: LocalKey,
}

impl Station {
    /// Makes a station with `len` zeroed bytes of memory. If the provider has shared memory
    /// ([`Provider::shared_memory`]), a peer on this host can map the memory.
    ///
    /// # Errors
    /// `ENOMEM` if the system has no memory left; `InvalidInput` if `len` is 0.
    pub fn new(mut provider: Box<dyn Provider>, len: usize) -> io::Result<Self> {
        let memory = match provider.shared_memory() {
            #[cfg(target_os = "linux")]
            Some(_) => Memory::new_shared(len, crate::mem::Sharing::Write)?,
            _ => Memory::new(len)?,
        };
        Ok(Self { provider, memory: Arc::new(memory), key: LocalKey(0) })
    }

    /// Returns the provider.
    pub fn provider(&mut self) -> &mut dyn Provider {
        &mut *self.provider
    }

    /// Registers the whole memory with the rights `access`. Earlier registrations stay valid.
    ///
    /// # Errors
    /// The errors of [`Provider::register`].
    pub fn expose(&mut self, device: DeviceId, access: Access) -> Result<MemoryRegion> {
        self.expose_range(device, 0..self.memory.len(), access)
    }

    /// Registers a part of the memory with the rights `access`. Earlier registrations stay valid.
    ///
    /// # Errors
    /// The errors of [`Provider::register`].
    pub fn expose_range(&mut self, device: DeviceId, range: Range<usize>, access: Access) -> Result<MemoryRegion> {
        self.provider.register(device, &self.memory, range, access)
    }

    /// Sets the key that names the memory in all later work requests of the station. Call it after [`Station::expose`],
    /// with the region's local key.
    pub fn use_key(&mut self, key: LocalKey) {
        self.key = key;
    }

    /// Returns the address by which a peer names the byte at `offset`.
    #[must_use]
    pub fn address(&self, offset: usize) -> u64 {
        self.memory.as_ptr() as u64 + offset as u64
    }

    /// Copies `bytes` into the memory, from `offset` on.
    ///
    /// # Errors
    /// [`TransportError::OutOfRange`] if the bytes are not all inside the memory.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        if self.memory.copy_in(offset, bytes) { Ok(()) } else { Err(outside(offset)) }
    }

    /// Appends a copy of a range of the memory to `out`.
    ///
    /// # Errors
    /// [`TransportError::OutOfRange`] if the range is not inside the memory.
    pub fn read(&mut self, range: Range<usize>, out: &mut Vec<u8>) -> Result<()> {
        self.memory.span(range.start, range.len()).ok_or_else(|| outside(range.end))?.append_to(out);
        Ok(())
    }

    /// Posts one send work request. Its message is the concatenation of `parts` of the memory.
    ///
    /// # Errors
    /// The errors of [`Provider::post_send`]; [`TransportError::OutOfRange`] for parts outside the memory and for more than 4
    /// parts.
    pub fn post_send(
        &mut self,
        qp: QpId,
        wr_id: u64,
        op: SendOp,
        parts: &[Range<usize>],
        flags: SendFlags,
    ) -> Result<Posted> {
        let sges = self.sges(parts)?;
        self.provider.post_send(qp, &[SendWr { wr_id, op, sges, flags }]).map_err(reason)
    }

    /// Posts send work requests in one chain. Each element of `chain` has the `wr_id`, the operation, a part of the
    /// memory, and the flags.
    ///
    /// # Errors
    /// The errors of [`Provider::post_send`]; [`TransportError::OutOfRange`] for a part outside the memory, in which case no
    /// work request is posted.
    pub fn post_sends(
        &mut self,
        qp: QpId,
        chain: impl IntoIterator<Item = (u64, SendOp, Range<usize>, SendFlags)>,
    ) -> std::result::Result<Posted, PostError> {
        let request = |(wr_id, op, part, flags)| Ok(SendWr { wr_id, op, sges: self.sges(&[part])?, flags });
        let chain = chain.into_iter().map(request).collect::<Result<Vec<_>>>().map_err(none_posted)?;
        self.provider.post_send(qp, &chain)
    }

    /// Writes a part of the memory to the peer's memory without a work request, as [`write_now`](crate::roles::ImmediateSends::write_now)
    /// does. Returns `false`, and writes nothing, if the provider does not have the role [`ImmediateSends`](crate::roles::ImmediateSends),
    /// or cannot write without a work request now.
    ///
    /// # Errors
    /// [`TransportError::OutOfRange`] for a part outside the memory.
    pub fn write_now(&mut self, qp: QpId, part: Range<usize>, remote: RemoteAddress) -> Result<bool> {
        let sges = self.sges(&[part])?;
        let (role, entry) = (self.provider.immediate_sends(), sges.as_slice().first());
        Ok(role.zip(entry).is_some_and(|(role, entry)| role.write_now(qp, entry, remote)))
    }

    /// Posts one receive. The message is placed in `parts` of the memory, in their order.
    ///
    /// # Errors
    /// The errors of [`Provider::post_recv`]; [`TransportError::OutOfRange`] for parts outside the memory and for more than 4
    /// parts.
    pub fn post_recv(&mut self, qp: QpId, wr_id: u64, parts: &[Range<usize>]) -> Result<()> {
        let sges = self.sges(parts)?;
        self.provider.post_recv(qp, &[RecvWr { wr_id, sges }]).map_err(reason)
    }

    /// Posts receives in one chain. Each element of `chain` has the `wr_id` and the part of the memory for the message.
    ///
    /// # Errors
    /// The errors of [`Provider::post_recv`]; [`TransportError::OutOfRange`] for a part outside the memory, in which case no
    /// receive is posted.
    pub fn post_recvs(
        &mut self,
        qp: QpId,
        chain: impl IntoIterator<Item = (u64, Range<usize>)>,
    ) -> std::result::Result<(), PostError> {
        let chain = self.receives(chain)?;
        self.provider.post_recv(qp, &chain)
    }

    /// Posts one receive to a shared receive queue. The message is placed in `parts` of the memory, in their order.
    ///
    /// # Errors
    /// The errors of [`SharedReceives::post_srq_recv`]; [`TransportError::OutOfRange`] for parts outside the memory and for more
    /// than 4 parts; [`TransportError::Stale`] if the provider has no shared receive queues.
    pub fn post_srq_recv(&mut self, srq: SrqId, wr_id: u64, parts: &[Range<usize>]) -> Result<()> {
        let sges = self.sges(parts)?;
        self.shared()?.post_srq_recv(srq, &[RecvWr { wr_id, sges }]).map_err(reason)
    }

    /// Posts receives in one chain to a shared receive queue. Each element of `chain` has the `wr_id` and the part of
    /// the memory for the message.
    ///
    /// # Errors
    /// The errors of [`SharedReceives::post_srq_recv`]; [`TransportError::OutOfRange`] for a part outside the memory, in which
    /// case no receive is posted; [`TransportError::Stale`] if the provider has no shared receive queues.
    pub fn post_srq_recvs(
        &mut self,
        srq: SrqId,
        chain: impl IntoIterator<Item = (u64, Range<usize>)>,
    ) -> std::result::Result<(), PostError> {
        let chain = self.receives(chain)?;
        self.shared().map_err(none_posted)?.post_srq_recv(srq, &chain)
    }

    fn receives(
        &self,
        chain: impl IntoIterator<Item = (u64, Range<usize>)>,
    ) -> std::result::Result<Vec<RecvWr>, PostError> {
        let request = |(wr_id, part)| Ok(RecvWr { wr_id, sges: self.sges(&[part])? });
        chain.into_iter().map(request).collect::<Result<_>>().map_err(none_posted)
    }

    fn shared(&mut self) -> Result<&mut dyn SharedReceives> {
        self.provider.shared_receives().ok_or(TransportError::Stale { object: "shared receive queue" })
    }

    fn sges(&self, parts: &[Range<usize>]) -> Result<SgeList> {
        let mut list = SgeList::default();
        for part in parts {
            // SAFETY: the memory exists until the provider is dropped (see the order of the fields). No reference to
            // its bytes exists.
            let sge = unsafe { self.memory.shared_entry(part.clone(), self.key) };
            let sge = sge.ok_or_else(|| outside(part.end))?;
            list.push(sge).map_err(|_| TransportError::OutOfRange {
                what: "scatter/gather entries",
                value: parts.len() as u64,
                range: "at most 4",
            })?;
        }
        Ok(list)
    }
}

fn outside(offset: usize) -> TransportError {
    TransportError::OutOfRange { what: "offset", value: offset as u64, range: "within the station's memory" }
}

fn none_posted(error: TransportError) -> PostError {
    PostError { posted: 0, error }
}

fn reason(error: PostError) -> TransportError {
    error.error
}
