//! The shared receive queue of a device. All connections that use credits receive through it.
//!
//! Each posted receive has a slot in this queue. The work request id of the receive contains the slot's number. No
//! connection owns a posted receive. When a message has used the receive, the completion names the queue pair, and so
//! the connection. [`super::claims`] decides how many receives each connection may promise to its peer.

use rdma_transport::provider::{PostError, Provider};
use rdma_transport::qp::{QpId, SrqId};
use rdma_transport::wr::{RecvWr, SgeList};

use super::claims::{Claim, Claims};
use crate::device::cq::CqPosition;
use crate::device::pool::{Buffer, Pool, Posted};
use crate::error::Error;
use crate::id::{ConnectionId, WorkRequestId, shared_recv_wr_id};
use crate::providers::role;

/// One in `SPARE` receives is posted but never promised to a peer. If a peer sends without credits, this reserve gives
/// the reactor time to detect the violation before other peers lack promised receives.
const SPARE: u32 = 8;

/// Returns the number of receives that connections may claim, if the queue has `count` receives.
pub(crate) const fn claimable(count: u32) -> u32 {
    count - count / SPARE
}

#[derive(Debug)]
pub(crate) struct SharedReceives {
    srq: SrqId,
    pub(crate) claims: Claims,
    /// Length of the buffer that each receive offers, in bytes.
    size: usize,
    /// The buffers of the posted receives, by slot; `None` for a slot without a posted receive.
    receives: Vec<Option<Posted>>, // bound: shared-receives
    vacant: Vec<u16>, // bound: shared-receives
    /// Free buffers, which the reactor will post as receives again.
    reposts: Vec<Buffer>, // bound: shared-receives
    /// The connection of each queue pair, by the slot number of the queue pair's id.
    owners: Vec<Option<(QpId, ConnectionId)>>, // bound: connections
    /// The claims of ended connections. Each claim stays until the reactor has handled all completions of its
    /// connection.
    lingering: Vec<Lingering>, // bound: shared-receives
    /// Number of messages of ended connections that the program still holds.
    orphans: u32,
    /// True if the device has reported that the queue has failed. A failed queue delivers no messages, and nothing is
    /// posted to it any more.
    failed: bool,
}

#[derive(Debug)]
struct Lingering {
    /// Index of the connection's completion queue.
    cq: usize,
    /// The position in the completion queue `cq` when the connection ended.
    mark: CqPosition,
    claim: u32,
}

impl SharedReceives {
    /// Creates the state of a queue of `count` receives of `size` bytes each. Takes the buffers of the receives from
    /// the pool; the caller has reserved them. No receive is posted yet.
    pub(crate) fn new(pool: &mut Pool, srq: SrqId, count: u32, size: usize) -> Self {
        Self {
            srq,
            claims: Claims::new(claimable(count)),
            size,
            receives: (0..count).map(|_| None).collect(),
            vacant: (0..count).rev().map(|slot| slot as u16).collect(),
            reposts: (0..count).map_while(|_| pool.take()).collect(),
            owners: Vec::new(),
            lingering: Vec::new(),
            orphans: 0,
            failed: false,
        }
    }

    pub(crate) const fn srq(&self) -> SrqId {
        self.srq
    }

    /// Notes that the device has reported the failure of the queue `srq`. Returns false if `srq` is
    /// another queue.
    pub(crate) fn fail(&mut self, srq: SrqId) -> bool {
        self.failed |= self.srq == srq;
        self.srq == srq
    }

    pub(crate) const fn has_failed(&self) -> bool {
        self.failed
    }

    /// Returns true if no connection has a claim on the queue, and the reactor has handled all completions of the
    /// connections that had one. The program may still hold messages of such connections.
    pub(crate) fn is_unused(&self) -> bool {
        self.lingering.is_empty() && self.claims.free() + self.orphans == claimable(self.receives.len() as u32)
    }

    /// Returns the number of receives of the queue, and the number of their buffers that the program still holds.
    pub(crate) fn buffers(&self) -> (usize, usize) {
        (self.receives.len(), self.orphans as usize)
    }

    /// Returns the number of receives that are posted now.
    pub(crate) fn posted(&self) -> usize {
        self.receives.len() - self.vacant.len()
    }

    /// Records that the completions of a queue pair belong to this connection.
    pub(crate) fn own(&mut self, qp: QpId, connection: ConnectionId) {
        let slot = qp.0.slot() as usize;
        if self.owners.len() <= slot {
            self.owners.resize(slot + 1, None);
        }
        self.owners[slot] = Some((qp, connection));
    }

    /// Records that a queue pair has no connection any more. When its remaining completions arrive, the reactor only
    /// frees their buffers.
    pub(crate) fn disown(&mut self, qp: QpId) {
        if self.owner(qp).is_some() {
            self.owners[qp.0.slot() as usize] = None;
        }
    }

    /// Returns the connection of a queue pair; `None` if the queue pair has no connection any more.
    #[inline]
    pub(crate) fn owner(&self, qp: QpId) -> Option<ConnectionId> {
        let (of, connection) = (*self.owners.get(qp.0.slot() as usize)?)?;
        (of == qp).then_some(connection)
    }

    /// Takes the buffer of a completed receive out of its slot `slot`; `None` if no receive is
    /// posted in this slot.
    #[inline]
    pub(crate) fn take(&mut self, slot: u16) -> Option<Buffer> {
        let posted = self.receives.get_mut(usize::from(slot))?.take()?;
        self.vacant.push(slot);
        Some(posted.done())
    }

    /// Accepts a free buffer. The reactor posts it again at the end of the turn.
    #[inline]
    pub(crate) fn give(&mut self, buffer: Buffer) {
        self.reposts.push(buffer);
    }

    /// Accepts the buffer of a message that the program has kept longer than the message's connection existed. The
    /// reactor posts the buffer again. Returns `None` if the buffer was accepted. Returns the buffer itself if the
    /// program keeps no message of an ended connection.
    pub(crate) fn return_orphan(&mut self, buffer: Buffer) -> Option<Buffer> {
        let Some(left) = self.orphans.checked_sub(1) else { return Some(buffer) };
        self.orphans = left;
        self.claims.take_back(1);
        self.give(buffer);
        None
    }

    /// Moves the free buffers into `chain`, as receive work requests that are to be posted.
    pub(crate) fn prepare(&mut self, pool: &Pool, chain: &mut Vec<RecvWr>) {
        chain.clear();
        while let Some(slot) = self.vacant.pop() {
            let Some(buffer) = self.reposts.pop() else {
                self.vacant.push(slot);
                break;
            };
            let (posted, sge) = pool.post(buffer, self.size);
            self.receives[usize::from(slot)] = Some(posted);
            chain.push(RecvWr { wr_id: shared_recv_wr_id(slot), sges: SgeList::one(sge) });
        }
    }

    /// Posts all free buffers as receives, in one chain. If the device accepts only a part of the chain, the other
    /// buffers stay free.
    ///
    /// # Errors
    /// The device did not accept the whole chain.
    pub(crate) fn post(
        &mut self,
        provider: &mut dyn Provider,
        pool: &Pool,
        chain: &mut Vec<RecvWr>,
    ) -> Result<(), Error> {
        if self.reposts.is_empty() || self.failed {
            return Ok(());
        }
        self.prepare(pool, chain);
        let posted = match role(provider, Provider::shared_receives, "shared receive queues") {
            Ok(role) => role.post_srq_recv(self.srq, chain),
            Err(error) => Err(PostError { posted: 0, error }),
        };
        posted.map_err(|failed| {
            for wr in &chain[failed.posted..] {
                if let WorkRequestId::SharedRecv { slot } = WorkRequestId::of(wr.wr_id) {
                    let buffer = self.take(slot);
                    self.reposts.extend(buffer);
                }
            }
            failed.error.into()
        })
    }

    /// Records the end of a connection.
    ///
    /// - `kept` is the number of the connection's messages that the program still holds.
    /// - `left` is the index of the connection's completion queue, and the current position in this queue. The claim is
    ///   taken back when the queue has passed this position. `left` is `None` if the device failed to destroy the queue
    ///   pair. In this case, the queue pair may still use the receives that were promised to the peer, so only the
    ///   receives of the kept messages are taken back.
    pub(crate) fn leave(&mut self, claim: &mut Claim, kept: u32, left: Option<(usize, CqPosition)>) {
        self.orphans += kept;
        self.claims.forget(claim);
        if let Some((cq, mark)) = left {
            self.lingering.push(Lingering { cq, mark, claim: claim.receives().saturating_sub(kept) });
        }
    }

    /// Returns the number of receives that a new connection could claim now: the unclaimed receives, and the claims of
    /// ended connections that [`SharedReceives::settle`] would take back. `has_passed` receives the index of a
    /// completion queue and a position, and returns true if the queue has passed the position.
    pub(crate) fn unclaimed(&self, has_passed: impl Fn(usize, CqPosition) -> bool) -> u32 {
        let settled = self.lingering.iter().filter(|gone| has_passed(gone.cq, gone.mark));
        self.claims.free() + settled.map(|gone| gone.claim).sum::<u32>()
    }

    /// Takes back the claim of each ended connection if the reactor has handled all completions of that connection.
    /// `has_passed` receives the index of a completion queue and a position, and returns true if the queue has passed
    /// the position.
    pub(crate) fn settle(&mut self, has_passed: impl Fn(usize, CqPosition) -> bool) {
        let claims = &mut self.claims;
        self.lingering.retain(|gone| {
            let left = !has_passed(gone.cq, gone.mark);
            if !left {
                claims.take_back(gone.claim);
            }
            left
        });
    }

    /// Returns true if a connection waits for unclaimed receives, and [`SharedReceives::settle`]
    /// would take back the claim of an ended connection.
    pub(crate) fn has_due(&self, has_passed: impl Fn(usize, CqPosition) -> bool) -> bool {
        self.claims.has_waiting()
            && self.reposts.is_empty()
            && self.lingering.iter().any(|gone| has_passed(gone.cq, gone.mark))
    }

    /// Returns all buffers to the pool. The caller has destroyed the queue.
    pub(crate) fn empty(&mut self, pool: &mut Pool) {
        self.reposts.drain(..).for_each(|buffer| pool.give(buffer));
        self.receives.iter_mut().filter_map(Option::take).for_each(|posted| pool.give(posted.done()));
    }
}
