//! One endpoint: what it has posted, and what waits to be. No I/O but posting.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};

use rdma_transport::AddressId;
use rdma_transport::cm::CmId;
use rdma_transport::mr::{LocalKey, MrId};
use rdma_transport::provider::Provider;
use rdma_transport::qp::QpId;
use rdma_transport::slab::Key;
use rdma_transport::wr::{RecvWr, SendFlags, SendOp, SendWr, SgeList};

use super::{EndpointId, PeerId};
use crate::error::{DisconnectReason, Error};
use crate::id::{DATAGRAM_RECV, DATAGRAM_SEND, SendId, SendKind, pack_work};
use crate::pool::{Buffer, Pool, Posted};

/// A datagram on its way.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) buffer: Posted,
    pub(super) id: SendId,
}

/// A group that it is in, once there is a way to send to it.
#[derive(Debug)]
pub(super) struct Membership {
    pub(super) group: IpAddr,
    pub(super) peer: Option<PeerId>,
}

#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) id: EndpointId,
    /// Has the queue pair.
    pub(super) cm: CmId,
    /// Where peers ask for it.
    pub(super) listener: CmId,
    pub(super) address: SocketAddr,
    pub(super) qp: QpId,
    pub(super) device: usize,
    pub(super) cq: usize,
    /// Completion entries it has claimed.
    pub(super) room: u32,
    pub(super) pool: Pool,
    pub(super) regions: Vec<(LocalKey, MrId)>,
    pub(super) max_datagram: usize,
    pub(super) receives: VecDeque<Posted>,
    pub(super) reposts: Vec<Buffer>,
    pub(super) sends: VecDeque<Sending>,
    pub(super) chain: Vec<SendWr>,
    pub(super) send_depth: usize,
    /// Datagrams taken so far.
    pub(super) taken: u64,
    /// Addresses nobody sends to any more, each with the number of the first send that is not to it.
    pub(super) forgotten: VecDeque<(u64, AddressId)>,
    pub(super) groups: Vec<Membership>,
    pub(super) blocked: bool,
    pub(super) dirty: bool,
    /// It is on its way out, and why.
    pub(super) closing: Option<DisconnectReason>,
    /// What is still to be sent will not be.
    pub(super) over: bool,
    pub(super) timer: Option<Key>,
}

impl Endpoint {
    pub(super) fn has_room(&self) -> bool {
        self.sends.len() < self.send_depth
    }

    /// Adds a datagram to the chain. There is room, and it is not too long.
    pub(super) fn push_send(&mut self, buffer: Buffer, len: usize, op: SendOp) -> SendId {
        let id = SendId::new(self.taken, SendKind::Datagram);
        let (posted, sge) = self.pool.post(buffer, len);
        let wr_id = pack_work(DATAGRAM_SEND, self.id.0, self.taken as u16);
        self.chain.push(SendWr { wr_id, op, sges: SgeList::one(sge), flags: SendFlags::empty() });
        self.sends.push_back(Sending { buffer: posted, id });
        self.taken += 1;
        id
    }

    /// How many sends a completion of `sequence` ends: itself and those before it. `None` if it is not posted.
    pub(super) fn sends_ended_by(&self, sequence: u16) -> Option<usize> {
        let oldest = self.sends.front()?.id.sequence() as u16;
        let count = usize::from(sequence.wrapping_sub(oldest)) + 1;
        (count <= self.sends.len() - self.chain.len()).then_some(count)
    }

    /// An address that nothing is being sent to any more.
    pub(super) fn next_unused(&mut self) -> Option<AddressId> {
        let oldest = self.sends.front().map_or(self.taken, |send| send.id.sequence());
        let &(until, address) = self.forgotten.front()?;
        if until > oldest {
            return None;
        }
        self.forgotten.pop_front();
        Some(address)
    }

    /// Posts what was gathered: receives, then sends.
    pub(super) fn post(&mut self, provider: &mut dyn Provider, receives: &mut Vec<RecvWr>) -> Result<(), Error> {
        if !self.reposts.is_empty() && self.closing.is_none() {
            receives.clear();
            let (size, count) = (self.pool.stride(), self.reposts.len());
            for buffer in self.reposts.drain(..) {
                let (posted, sge) = self.pool.post(buffer, size);
                let wr_id = pack_work(DATAGRAM_RECV, self.id.0, 0);
                receives.push(RecvWr { wr_id, sges: SgeList::one(sge) });
                self.receives.push_back(posted);
            }
            if let Err(failed) = provider.post_recv(self.qp, receives) {
                for _ in failed.posted..count {
                    self.reposts.extend(self.receives.pop_back().map(Posted::done));
                }
                return Err(failed.error.into());
            }
        }
        let Some(last) = self.chain.last_mut() else { return Ok(()) };
        last.flags |= SendFlags::SIGNALED;
        match provider.post_send(self.qp, &self.chain) {
            Ok(()) => self.chain.clear(),
            Err(failed) => {
                self.chain.drain(..failed.posted);
                return Err(failed.error.into());
            }
        }
        Ok(())
    }
}
