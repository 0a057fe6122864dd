//! The shared receive queue of a device: receives from which all connections with credits take theirs.
//!
//! A receive is named by its place here, and belongs to nobody until a message has used it: the completion says whose it
//! was. Who may promise how many is the business of [`crate::share`].

use rdma_transport::provider::Provider;
use rdma_transport::qp::{QpId, SrqId};
use rdma_transport::slab::Key;
use rdma_transport::wc::WorkCompletion;
use rdma_transport::wr::{RecvWr, SgeList};

use crate::connection::{Connection, Ending, Phase};
use crate::core::Core;
use crate::device::Mark;
use crate::error::{DisconnectReason, Error};
use crate::id::{ConnectionId, SHARED_RECV, WorkId, WorkKind, pack_work, unpack_work};
use crate::pool::{Buffer, Pool, Posted};
use crate::share::{Pot, Share};

/// Receives that are posted and never promised, as a part of all: what a peer takes that sends without credits, until
/// that is noticed, comes out of them first.
const SPARE: u32 = 8;

#[derive(Debug)]
pub(crate) struct SharedReceives {
    srq: SrqId,
    pub(crate) pot: Pot,
    /// What is posted, by place.
    receives: Vec<Option<Posted>>,
    vacant: Vec<u16>,
    /// To be posted again.
    reposts: Vec<Buffer>,
    /// Whose queue pair it is, by slot.
    owners: Vec<Option<(QpId, ConnectionId)>>,
    /// Claims of connections that are gone, until none of their completions is left: the queue's index, when they went, and
    /// the claim.
    lingering: Vec<(usize, Mark, u32)>,
    /// Messages of connections that are gone, in the user's hands.
    astray: u32,
}

impl SharedReceives {
    /// A queue of `count` receives, all posted, from buffers that the pool has promised.
    pub(crate) fn new(provider: &mut dyn Provider, pool: &mut Pool, srq: SrqId, count: u32) -> Result<Self, Error> {
        let mut shared = Self {
            srq,
            pot: Pot::new(count - count / SPARE),
            receives: (0..count).map(|_| None).collect(),
            vacant: (0..count).rev().map(|place| place as u16).collect(),
            reposts: (0..count).map_while(|_| pool.take()).collect(),
            owners: Vec::new(),
            lingering: Vec::new(),
            astray: 0,
        };
        let posted = shared.post(provider, pool, &mut Vec::with_capacity(count as usize));
        if posted.is_err() {
            shared.empty(pool);
        }
        posted.map(|()| shared)
    }

    pub(crate) const fn srq(&self) -> SrqId {
        self.srq
    }

    /// Receives that are posted.
    pub(crate) fn posted(&self) -> usize {
        self.receives.len() - self.vacant.len()
    }

    pub(crate) fn own(&mut self, qp: QpId, connection: ConnectionId) {
        let slot = qp.0.slot() as usize;
        if self.owners.len() <= slot {
            self.owners.resize(slot + 1, None);
        }
        self.owners[slot] = Some((qp, connection));
    }

    #[inline]
    fn owner(&self, qp: QpId) -> Option<ConnectionId> {
        let (of, connection) = (*self.owners.get(qp.0.slot() as usize)?)?;
        (of == qp).then_some(connection)
    }

    /// The buffer of a receive that has completed.
    #[inline]
    pub(crate) fn take(&mut self, place: u16) -> Option<Buffer> {
        let posted = self.receives.get_mut(usize::from(place))?.take()?;
        self.vacant.push(place);
        Some(posted.done())
    }

    /// A buffer to be posted at the end of the turn.
    #[inline]
    pub(crate) fn give(&mut self, buffer: Buffer) {
        self.reposts.push(buffer);
    }

    /// Takes a buffer from the user's hands that a connection that is gone has left there; gives it back if there is none.
    pub(crate) fn give_astray(&mut self, buffer: Buffer) -> Option<Buffer> {
        let Some(left) = self.astray.checked_sub(1) else { return Some(buffer) };
        self.astray = left;
        self.pot.take_back(1);
        self.give(buffer);
        None
    }

    /// Posts what came back, in one chain.
    pub(crate) fn post(
        &mut self,
        provider: &mut dyn Provider,
        pool: &Pool,
        chain: &mut Vec<RecvWr>,
    ) -> Result<(), Error> {
        if self.reposts.is_empty() {
            return Ok(());
        }
        chain.clear();
        while let Some(place) = self.vacant.pop() {
            let Some(buffer) = self.reposts.pop() else {
                self.vacant.push(place);
                break;
            };
            let (posted, sge) = pool.post(buffer, pool.stride());
            self.receives[usize::from(place)] = Some(posted);
            chain.push(RecvWr { wr_id: pack_work(SHARED_RECV, Key::new(0, 0), place), sges: SgeList::one(sge) });
        }
        provider.post_srq_recv(self.srq, chain).map_err(|failed| {
            for wr in &chain[failed.posted..] {
                let buffer = self.take(unpack_work(wr.wr_id).2);
                self.reposts.extend(buffer);
            }
            failed.error.into()
        })
    }

    /// A connection is gone, with its queue pair, and has left `kept` messages with the user.
    pub(crate) fn leave(&mut self, share: &Share, kept: u32, cq: usize, mark: Mark) {
        self.astray += kept;
        self.lingering.push((cq, mark, share.claim().saturating_sub(kept)));
    }

    /// Receives that nobody claims, or will when the next one asks.
    pub(crate) fn unclaimed(&self, has_passed: impl Fn(usize, Mark) -> bool) -> u32 {
        let settled = self.lingering.iter().filter(|&&(cq, mark, _)| has_passed(cq, mark));
        self.pot.free() + settled.map(|&(.., claim)| claim).sum::<u32>()
    }

    /// Claims of connections that are gone come back once none of their completions is left.
    pub(crate) fn settle(&mut self, has_passed: impl Fn(usize, Mark) -> bool) {
        let pot = &mut self.pot;
        self.lingering.retain(|&(cq, mark, claim)| {
            let left = !has_passed(cq, mark);
            if !left {
                pot.take_back(claim);
            }
            left
        });
    }

    /// Gives all buffers back: the queue is gone, or was never used.
    fn empty(&mut self, pool: &mut Pool) {
        self.reposts.drain(..).for_each(|buffer| pool.give(buffer));
        self.receives.iter_mut().filter_map(Option::take).for_each(|posted| pool.give(posted.done()));
    }
}

impl Core {
    /// Whose a completion is that is no connection's by its number: `None` if it is of no shared receive, `Some(None)` if it
    /// is of nobody's any more. The completion is numbered as a connection's own receive would be.
    #[inline]
    pub(crate) fn shared_completion(
        &mut self,
        device: usize,
        wc: &WorkCompletion,
    ) -> Option<Option<(WorkId, WorkCompletion)>> {
        let (kind, _, place) = unpack_work(wc.wr_id);
        if kind != SHARED_RECV {
            return None;
        }
        let shared = self.devices.get_mut(device)?.as_mut()?.shared.as_mut()?;
        if let Some(connection) = shared.owner(wc.qp).filter(|of| self.connections.get(of.0).is_some()) {
            let work = WorkId { kind: WorkKind::Recv, connection, sequence: place };
            return Some(Some((work, WorkCompletion { wr_id: work.pack(), ..*wc })));
        }
        // Its connection ended before it was polled.
        self.stats.stale_completions += 1;
        let buffer = shared.take(place);
        shared.reposts.extend(buffer);
        Some(None)
    }

    /// Posts what came back to the shared queues, and then takes the claims of those back that are gone. Not while
    /// completions are being handled: some of these may be among them.
    pub(crate) fn settle_shared(&mut self) {
        for device in self.devices.iter_mut().flatten() {
            let Some(shared) = &mut device.shared else { continue };
            if let Err(error) = shared.post(&mut *self.provider, &device.pool, &mut self.receive_chain) {
                // Connections hear of it when they have something to post.
                log::warn!("{}: posting shared receives: {error}", device.name);
                continue;
            }
            if !shared.lingering.is_empty() {
                shared.settle(|cq, mark| device.cqs[cq].has_passed(mark));
            }
        }
    }

    /// Adjusts what a connection promises its peer; all that came back is posted before.
    pub(crate) fn renew_share(&mut self, id: ConnectionId) -> Result<(), Error> {
        let Some(c) = self.connections.get_mut(id.0) else { return Ok(()) };
        let Some(device) = self.devices[c.device].as_mut() else { return Ok(()) };
        let renews = c.phase < Phase::Draining || c.exchanges();
        let (Some(share), Some(shared)) = (&mut c.share, &mut device.shared) else { return Ok(()) };
        shared.post(&mut *self.provider, &device.pool, &mut self.receive_chain)?;
        if renews {
            let more = shared.pot.renew(share, c.rx.outstanding(), self.config.receive_depth, self.now);
            c.rx.posted(more);
        }
        Ok(())
    }

    /// Whether none of the messages of a connection that ends can be left on its completion queue. If not, has it looked at in
    /// the next turn.
    pub(crate) fn is_flushed_from_shared(&mut self, id: ConnectionId) -> bool {
        let Some(c) = self.connections.get(id.0).filter(|c| c.share.is_some() && c.qp.is_some()) else { return true };
        if matches!(c.ending, Some(Ending::ConnectError(_))) {
            // None of them would be delivered.
            return true;
        }
        let Some(cq) = self.devices[c.device].as_mut().and_then(|device| device.cqs.get_mut(c.cq)) else { return true };
        if cq.has_passed(c.flush) && c.fair.backlog.is_empty() {
            return true;
        }
        cq.armed = false;
        self.endings_moved = true;
        false
    }

    /// A shared queue takes nothing any more: those who live on it cannot go on.
    pub(crate) fn shared_queue_failed(&mut self, device: usize) {
        let on_it = |c: &Connection| c.share.is_some() && c.device == device;
        for key in self.connections.keys() {
            if self.connections.get(key).is_some_and(on_it) {
                let reason = DisconnectReason::Internal("the shared receive queue failed".into());
                self.end(ConnectionId(key), Ending::Disconnect(reason));
            }
        }
    }
}
