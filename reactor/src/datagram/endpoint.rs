//! One endpoint: what it has posted, and what waits to be posted.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use rdma_transport::cm::CmId;
use rdma_transport::datagram::AddressId;
use rdma_transport::mr::{LocalKey, MrId};
use rdma_transport::provider::Provider;
use rdma_transport::qp::QpId;
use rdma_transport::slab::Key;
use rdma_transport::wr::{RecvWr, SendFlags, SendOp, SendWr, SgeList};

use super::{EndpointId, PeerId};
use crate::device::pool::{Buffer, Pool, Posted, Slabs};
use crate::error::{DisconnectReason, Error};
use crate::id::{GUEST_BITS, SendId, SendKind, guest_work};

/// A datagram on its way.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) buffer: Posted,
    pub(super) id: SendId,
}

/// A group that the endpoint is in, once there is a way to send to the group.
#[derive(Debug)]
pub(super) struct Membership {
    pub(super) group: IpAddr,
    pub(super) peer: Option<PeerId>,
}

/// Where an endpoint is in the world.
#[derive(Debug)]
pub(super) struct Site {
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
    pub(super) max_datagram: usize,
}

/// How far an endpoint is with ending.
#[derive(Debug)]
pub(super) enum Phase {
    Open,
    /// What was taken is still sent, until the timer.
    Draining {
        reason: DisconnectReason,
        timer: Key,
    },
    /// What is still to be sent will not be.
    Over {
        reason: DisconnectReason,
    },
}

/// What an endpoint has posted, and what is to be posted.
#[derive(Debug)]
pub(super) struct Traffic {
    pub(super) pool: Pool,
    pub(super) slabs: Vec<(LocalKey, MrId)>,
    pub(super) receives: VecDeque<Posted>,
    pub(super) reposts: Vec<Buffer>,
    pub(super) sends: VecDeque<Sending>,
    pub(super) chain: Vec<SendWr>,
    pub(super) send_depth: usize,
    /// Datagrams taken so far.
    pub(super) taken: u64,
}

#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) id: EndpointId,
    pub(super) site: Site,
    pub(super) phase: Phase,
    pub(super) traffic: Traffic,
    /// Addresses that nobody sends to any more, each with the number of the first send that is not to it.
    pub(super) forgotten: VecDeque<(u64, AddressId)>,
    pub(super) groups: Vec<Membership>,
    /// A send was refused.
    pub(super) blocked: bool,
    /// It is on the list of those that have something to post.
    pub(super) marked: bool,
}

/// Bits of a position in the number of a work request.
const SEQUENCE_BITS: u32 = 16;
/// Bits of a slot there; what is left is for the generation.
const SLOT_BITS: u32 = 20;
/// Bits of a generation there.
pub(super) const GENERATION_BITS: u32 = GUEST_BITS - SEQUENCE_BITS - SLOT_BITS - 1;

/// A work request of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Work {
    pub(super) endpoint: Key,
    /// Low bits of the position of a send; `None`: a receive.
    pub(super) send: Option<u16>,
}

impl Work {
    fn pack(self) -> u64 {
        let (sends, sequence) = (u64::from(self.send.is_some()), u64::from(self.send.unwrap_or(0)));
        let (slot, generation) = (u64::from(self.endpoint.slot()), u64::from(self.endpoint.generation()));
        let number =
            sends | sequence << 1 | slot << (1 + SEQUENCE_BITS) | generation << (1 + SEQUENCE_BITS + SLOT_BITS);
        guest_work(number)
    }

    /// The parts of a guest's number.
    pub(super) fn unpack(number: u64) -> Self {
        let slot = (number >> (1 + SEQUENCE_BITS)) as u32 & ((1 << SLOT_BITS) - 1);
        let generation = (number >> (1 + SEQUENCE_BITS + SLOT_BITS)) as u32 & ((1 << GENERATION_BITS) - 1);
        let send = (number & 1 != 0).then_some((number >> 1) as u16);
        Self { endpoint: Key::new(slot, generation), send }
    }
}

impl Traffic {
    pub(super) fn slabs(&self) -> Arc<Slabs> {
        Arc::clone(self.pool.slabs())
    }

    pub(super) fn has_room(&self) -> bool {
        self.sends.len() < self.send_depth
    }

    /// Adds a datagram to the chain. There is room, and it is not too long.
    pub(super) fn push_send(&mut self, endpoint: Key, buffer: Buffer, len: usize, op: SendOp) -> SendId {
        let id = SendId::new(self.taken, SendKind::Datagram);
        let (posted, sge) = self.pool.post(buffer, len);
        let wr_id = Work { endpoint, send: Some(self.taken as u16) }.pack();
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

    /// The number of the oldest send that has not ended, or of the next one.
    pub(super) fn oldest(&self) -> u64 {
        self.sends.front().map_or(self.taken, |send| send.id.sequence())
    }

    /// Posts the receives that came back.
    pub(super) fn post_receives(
        &mut self,
        endpoint: Key,
        qp: QpId,
        provider: &mut dyn Provider,
        chain: &mut Vec<RecvWr>,
    ) -> Result<(), Error> {
        if self.reposts.is_empty() {
            return Ok(());
        }
        chain.clear();
        let (size, count) = (self.pool.stride(), self.reposts.len());
        for buffer in self.reposts.drain(..) {
            let (posted, sge) = self.pool.post(buffer, size);
            let wr_id = Work { endpoint, send: None }.pack();
            chain.push(RecvWr { wr_id, sges: SgeList::one(sge) });
            self.receives.push_back(posted);
        }
        provider.post_recv(qp, chain).map_err(|failed| {
            for _ in failed.posted..count {
                self.reposts.extend(self.receives.pop_back().map(Posted::done));
            }
            failed.error.into()
        })
    }

    /// Posts the chain.
    pub(super) fn post_sends(&mut self, qp: QpId, provider: &mut dyn Provider) -> Result<(), Error> {
        let Some(last) = self.chain.last_mut() else { return Ok(()) };
        last.flags |= SendFlags::SIGNALED;
        match provider.post_send(qp, &self.chain) {
            Ok(()) => self.chain.clear(),
            Err(failed) => {
                self.chain.drain(..failed.posted);
                return Err(failed.error.into());
            }
        }
        Ok(())
    }
}

impl Endpoint {
    pub(super) const fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open)
    }

    pub(super) const fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over { .. })
    }

    /// An address that nothing is being sent to any more.
    pub(super) fn next_unused(&mut self) -> Option<AddressId> {
        let &(until, address) = self.forgotten.front()?;
        if until > self.traffic.oldest() {
            return None;
        }
        self.forgotten.pop_front();
        Some(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Work as Any;

    #[test]
    fn a_number_survives_the_trip() {
        for endpoint in [Key::new(0, 1), Key::new((1 << SLOT_BITS) - 1, (1 << GENERATION_BITS) - 1)] {
            for send in [None, Some(0), Some(u16::MAX)] {
                let work = Work { endpoint, send };
                let Any::Guest(number) = Any::of(work.pack()) else { panic!("not a guest's") };
                assert_eq!(Work::unpack(number), work);
            }
        }
    }
}
