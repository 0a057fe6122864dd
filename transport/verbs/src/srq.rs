//! Shared receive queues.

use std::sync::Arc;
use std::{mem, ptr};

use super::chains::{Chains, check_request, posted, split};
use super::device::RawDevice;
use super::ffi::{QueueName, non_null};
use super::sys::{ibv_create_srq, ibv_destroy_srq, ibv_post_srq_recv, ibv_srq, ibv_srq_attr, ibv_srq_init_attr};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::provider::{CqId, PostError};
use rdma_transport::slab::Key;
use rdma_transport::wr::RecvWr;

/// A shared receive queue of libibverbs, which is destroyed when this value is dropped.
#[derive(Debug)]
pub(super) struct RawSrq {
    raw: *mut ibv_srq,
    pub(super) name: QueueName,
    device: Arc<RawDevice>,
}

// SAFETY: libibverbs protects the data of a queue by a lock. The last owner destroys the queue once.
unsafe impl Send for RawSrq {}
// SAFETY: libibverbs protects the data of a queue by a lock, so several threads may use the queue at the same time.
unsafe impl Sync for RawSrq {}

impl RawSrq {
    pub(super) fn create(device: &Arc<RawDevice>, max_wr: u32, max_sge: u32, key: Key) -> Result<Self> {
        let attr = ibv_srq_attr { max_wr, max_sge, srq_limit: 0 };
        let name = QueueName::new(key);
        let mut made = ibv_srq_init_attr { srq_context: name.context(), attr };
        // SAFETY: the domain is live. The library reads and updates the attributes during the call. The context is a
        // number, which is never used as a pointer.
        let raw = unsafe { ibv_create_srq(device.queue_domain(), &raw mut made) };
        Ok(Self { raw: non_null("ibv_create_srq", raw)?, name, device: Arc::clone(device) })
    }

    pub(super) const fn as_ptr(&self) -> *mut ibv_srq {
        self.raw
    }

    pub(super) fn is_on(&self, device: &Arc<RawDevice>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }
}

impl RawSrq {
    /// Destroys the queue. After an error the queue is unchanged: the device may still use the memory of posted receives, and the call may
    /// be repeated.
    fn destroy(&mut self) -> Result<()> {
        if self.raw.is_null() {
            return Ok(());
        }
        // SAFETY: no queue pair uses this queue any more, because each queue pair keeps its shared queue alive by an
        // `Arc`. The queue's events are acknowledged when they are read. Nothing uses the queue after the call has
        // succeeded.
        self.device.given_back("ibv_destroy_srq", unsafe { ibv_destroy_srq(self.raw) })?;
        self.raw = ptr::null_mut();
        Ok(())
    }
}

impl Drop for RawSrq {
    fn drop(&mut self) {
        if let Err(error) = self.destroy() {
            local_log!(Error, "{error}: the shared receive queue is left as it is");
            mem::forget(Arc::clone(&self.device));
        }
    }
}

/// A shared receive queue in the provider's table.
#[derive(Debug)]
pub(super) struct Srq {
    /// The queue; `None` after it was destroyed.
    pub(super) raw: Option<Arc<RawSrq>>,
    pub(super) device: u32,
    max_wr: u32,
    max_sge: u32,
    /// The number of receives that were posted and whose completions were not polled yet.
    outstanding: u32,
    /// The completion queues in which this queue's receives may complete. Each of them has reserved entries for all
    /// receives of this queue. The `u32` is the number of queue pairs whose receives come from this queue and complete
    /// in that completion queue.
    targets: Vec<(CqId, u32)>, // bound: completions
}

impl Srq {
    /// Returns an entry that has no queue yet. The queue is created later, with the key of this entry.
    pub(super) const fn new(device: u32, max_wr: u32, max_sge: u32) -> Self {
        Self { raw: None, device, max_wr, max_sge, outstanding: 0, targets: Vec::new() }
    }

    pub(super) const fn depth(&self) -> u32 {
        self.max_wr
    }

    pub(super) fn is_used(&self) -> bool {
        self.targets.iter().any(|target| target.1 > 0)
    }

    /// Returns the completion queues that have reserved entries for this shared queue's receives.
    pub(super) fn targets(&self) -> impl Iterator<Item = CqId> {
        self.targets.iter().map(|target| target.0)
    }

    /// Adds a queue pair whose receives complete in `cq`. Returns true if this is the first such queue pair, so that
    /// entries must be reserved in `cq`.
    pub(super) fn attach(&mut self, cq: CqId) -> bool {
        if let Some(target) = self.targets.iter_mut().find(|target| target.0 == cq) {
            target.1 += 1;
            return false;
        }
        self.targets.push((cq, 1));
        true
    }

    /// Removes a queue pair that was destroyed. The entries of the completion queue stay reserved until the shared
    /// queue is destroyed, because the completion queue may still contain completions of the shared queue's receives.
    pub(super) fn detach(&mut self, cq: CqId) {
        if let Some(target) = self.targets.iter_mut().find(|target| target.0 == cq) {
            target.1 = target.1.saturating_sub(1);
        }
    }

    /// Destroys the queue. No queue pair in the provider's table uses the queue any more. A queue pair that has used the queue may still be
    /// kept for its last shared receive, for its port or for a thread (iWARP). Such a queue pair is in the error state. In this case, the
    /// call succeeds, and the queue is destroyed later, together with the last such queue pair.
    pub(super) fn destroy(&mut self) -> Result<()> {
        self.raw.as_mut().and_then(Arc::get_mut).map_or(Ok(()), RawSrq::destroy)?;
        self.raw = None;
        Ok(())
    }

    /// Cancels an `attach` that has returned true: no entries could be reserved, or the queue pair could not be created.
    pub(super) fn forget(&mut self, cq: CqId) {
        self.targets.retain(|target| target.0 != cq);
    }

    /// Records that the completion of one receive was polled.
    pub(super) fn polled(&mut self) {
        self.outstanding = self.outstanding.saturating_sub(1);
    }

    pub(super) fn post(&mut self, chain: &[RecvWr], chains: &mut Chains) -> std::result::Result<(), PostError> {
        let Some(raw) = &self.raw else {
            return Err(PostError { posted: 0, error: TransportError::Stale { object: "shared receive queue" } });
        };
        let room = (self.max_wr - self.outstanding.min(self.max_wr)) as usize;
        let (taken, mut refused) = split(chain, |wr| check_request(wr.wr_id, &wr.sges, self.max_sge));
        let mut fits = taken;
        if taken.len() > room {
            fits = &taken[..room];
            refused = Some(TransportError::QueueFull { queue: "shared receive", depth: self.max_wr });
        }
        if !fits.is_empty() {
            let first = chains.recvs(fits);
            let mut bad = ptr::null_mut();
            // SAFETY: the queue is live. `chains` keeps the entries of the chain until the call returns. The promise of
            // `Sge::new` covers the memory to which the entries point.
            let rc = unsafe { ibv_post_srq_recv(raw.as_ptr(), first, &raw mut bad) };
            let result = posted(rc, first, bad, fits.len(), "ibv_post_srq_recv", "shared receive", self.max_wr);
            self.outstanding += result.as_ref().map_or_else(|error| error.posted, |()| fits.len()) as u32;
            result?;
        }
        refused.map_or(Ok(()), |error| Err(PostError { posted: fits.len(), error }))
    }
}
