//! The shared receive queue of a device. All connections with credits use its receives.
//!
//! A receive is identified by its slot in the queue. It belongs to no connection until a message has used it and the
//! completion names the queue pair. [`super::claims`] decides how many receives each connection may promise.

use rdma_transport::provider::{PostError, Provider};
use rdma_transport::qp::{QpId, SrqId};
use rdma_transport::wr::{RecvWr, SgeList};

use super::claims::{Claim, Claims};
use crate::device::cq::CqPosition;
use crate::device::pool::{Buffer, Pool, Posted};
use crate::error::Error;
use crate::id::{ConnectionId, WorkRequestId, shared_recv_wr_id};
use crate::providers::role;

/// One in so many receives is posted but never promised. A peer that sends without credits uses these first, until the
/// reactor detects it.
const SPARE: u32 = 8;

#[derive(Debug)]
pub(crate) struct SharedReceives {
    srq: SrqId,
    pub(crate) claims: Claims,
    /// Length of one receive, bytes.
    size: usize,
    /// The posted receives, by slot.
    receives: Vec<Option<Posted>>,
    vacant: Vec<u16>,
    /// Buffers that are to be posted again.
    reposts: Vec<Buffer>,
    /// The connection of each queue pair, by the queue pair's slot.
    owners: Vec<Option<(QpId, ConnectionId)>>,
    /// Claims of connections that have ended, until all their completions are handled.
    lingering: Vec<Lingering>,
    /// Number of messages that the program holds from connections that have ended.
    orphans: u32,
}

#[derive(Debug)]
struct Lingering {
    /// Index of the completion queue.
    cq: usize,
    /// The position of the completion queue when the connection ended.
    mark: CqPosition,
    claim: u32,
}

impl SharedReceives {
    /// Creates a queue of `count` receives of `size` bytes, from buffers that are reserved in the pool. No receive is
    /// posted yet.
    pub(crate) fn new(pool: &mut Pool, srq: SrqId, count: u32, size: usize) -> Self {
        Self {
            srq,
            claims: Claims::new(count - count / SPARE),
            size,
            receives: (0..count).map(|_| None).collect(),
            vacant: (0..count).rev().map(|place| place as u16).collect(),
            reposts: (0..count).map_while(|_| pool.take()).collect(),
            owners: Vec::new(),
            lingering: Vec::new(),
            orphans: 0,
        }
    }

    pub(crate) const fn srq(&self) -> SrqId {
        self.srq
    }

    /// Returns the number of posted receives.
    pub(crate) fn posted(&self) -> usize {
        self.receives.len() - self.vacant.len()
    }

    /// Notes the connection of a queue pair that uses this queue.
    pub(crate) fn own(&mut self, qp: QpId, connection: ConnectionId) {
        let slot = qp.0.slot() as usize;
        if self.owners.len() <= slot {
            self.owners.resize(slot + 1, None);
        }
        self.owners[slot] = Some((qp, connection));
    }

    /// Notes that no connection handles the receives of a queue pair any more.
    pub(crate) fn disown(&mut self, qp: QpId) {
        if self.owner(qp).is_some() {
            self.owners[qp.0.slot() as usize] = None;
        }
    }

    /// Returns the connection of a queue pair.
    #[inline]
    pub(crate) fn owner(&self, qp: QpId) -> Option<ConnectionId> {
        let (of, connection) = (*self.owners.get(qp.0.slot() as usize)?)?;
        (of == qp).then_some(connection)
    }

    /// Returns the buffer of a receive that has completed; `None` if no receive is posted in that slot.
    #[inline]
    pub(crate) fn take(&mut self, place: u16) -> Option<Buffer> {
        let posted = self.receives.get_mut(usize::from(place))?.take()?;
        self.vacant.push(place);
        Some(posted.done())
    }

    /// Frees a buffer. It is posted again at the end of the turn.
    #[inline]
    pub(crate) fn give(&mut self, buffer: Buffer) {
        self.reposts.push(buffer);
    }

    /// Frees a buffer that the program has returned after its connection ended. Returns the buffer if no such buffer is
    /// expected.
    pub(crate) fn return_orphan(&mut self, buffer: Buffer) -> Option<Buffer> {
        let Some(left) = self.orphans.checked_sub(1) else { return Some(buffer) };
        self.orphans = left;
        self.claims.take_back(1);
        self.give(buffer);
        None
    }

    /// Fills `chain` with work requests for the buffers that are to be posted again.
    pub(crate) fn prepare(&mut self, pool: &Pool, chain: &mut Vec<RecvWr>) {
        chain.clear();
        while let Some(place) = self.vacant.pop() {
            let Some(buffer) = self.reposts.pop() else {
                self.vacant.push(place);
                break;
            };
            let (posted, sge) = pool.post(buffer, self.size);
            self.receives[usize::from(place)] = Some(posted);
            chain.push(RecvWr { wr_id: shared_recv_wr_id(place), sges: SgeList::one(sge) });
        }
    }

    /// Posts the free buffers, in one chain.
    pub(crate) fn post(
        &mut self,
        provider: &mut dyn Provider,
        pool: &Pool,
        chain: &mut Vec<RecvWr>,
    ) -> Result<(), Error> {
        if self.reposts.is_empty() {
            return Ok(());
        }
        self.prepare(pool, chain);
        let posted = match role(provider, Provider::shared_receives, "shared receive queues") {
            Ok(role) => role.post_srq_recv(self.srq, chain),
            Err(error) => Err(PostError { posted: 0, error }),
        };
        posted.map_err(|failed| {
            for wr in &chain[failed.posted..] {
                if let WorkRequestId::SharedRecv { place } = WorkRequestId::of(wr.wr_id) {
                    let buffer = self.take(place);
                    self.reposts.extend(buffer);
                }
            }
            failed.error.into()
        })
    }

    /// Notes that a connection has ended and that the program holds `kept` of its messages. `left` is the completion
    /// queue of its queue pair, with its current position. It is `None` if the device failed to destroy the queue pair,
    /// which may go on using the receives that its peer was promised.
    pub(crate) fn leave(&mut self, claim: &Claim, kept: u32, left: Option<(usize, CqPosition)>) {
        self.orphans += kept;
        if let Some((cq, mark)) = left {
            self.lingering.push(Lingering { cq, mark, claim: claim.receives().saturating_sub(kept) });
        }
    }

    /// Returns the number of receives that the next connection would find unclaimed. Claims that can be taken back
    /// count as free.
    pub(crate) fn unclaimed(&self, has_passed: impl Fn(usize, CqPosition) -> bool) -> u32 {
        let settled = self.lingering.iter().filter(|gone| has_passed(gone.cq, gone.mark));
        self.claims.free() + settled.map(|gone| gone.claim).sum::<u32>()
    }

    /// Takes back the claims of ended connections whose completions are all handled.
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

    /// Returns all buffers to the pool, after the queue was destroyed or if it was never used.
    pub(crate) fn empty(&mut self, pool: &mut Pool) {
        self.reposts.drain(..).for_each(|buffer| pool.give(buffer));
        self.receives.iter_mut().filter_map(Option::take).for_each(|posted| pool.give(posted.done()));
    }
}
