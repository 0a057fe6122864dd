//! One datagram endpoint: its queue pair, the work requests that are posted to it, and the work requests that will be
//! posted.

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

use super::{EndpointId, EndpointOptions, PeerId};
use crate::device::pool::{Buffer, Pool, Posted, Slabs};
use crate::error::{DisconnectReason, Error};
use crate::id::{ENDPOINT_WORK_BITS, SendId, SendKind, endpoint_wr_id};
use crate::providers::Handle;

/// A datagram that the endpoint has accepted from the program, and whose send has not completed.
#[derive(Debug)]
pub(super) struct DatagramSend {
    pub(super) buffer: Posted,
    pub(super) id: SendId,
}

/// A multicast group that the endpoint is a member of or is joining. `peer` is `None` until the endpoint is a member.
#[derive(Debug)]
pub(super) struct MulticastMembership {
    pub(super) group: IpAddr,
    pub(super) peer: Option<PeerId>,
}

/// The connection-manager ids, the address and the queue pair of an endpoint, and the device resources that it uses.
#[derive(Debug)]
pub(super) struct EndpointResources {
    /// The connection-manager id that owns the queue pair.
    pub(super) cm: Handle<CmId>,
    /// The connection-manager id that listens at the endpoint's address. Peers that look up the endpoint send their
    /// requests to this id; the answer contains the number of the queue pair.
    pub(super) listener: Handle<CmId>,
    pub(super) address: SocketAddr,
    pub(super) qp: QpId,
    pub(super) qp_number: u32,
    pub(super) device: usize,
    pub(super) cq: usize,
    /// The number of entries that the endpoint has reserved in the completion queue `cq`.
    pub(super) room: u32,
    pub(super) max_datagram: usize,
}

/// The state of an endpoint.
#[derive(Debug)]
pub(super) enum EndpointState {
    Open,
    /// The endpoint is closed. Datagrams that it accepted before the close are still sent, until `timer` expires.
    Draining {
        reason: DisconnectReason,
        timer: Key,
    },
    /// The endpoint is closed, and nothing is sent any more.
    Over {
        reason: DisconnectReason,
    },
}

/// The send and receive queues of an endpoint. They include work requests that are not posted yet: `reposts` contains
/// receives, and `chain` contains sends.
#[derive(Debug)]
pub(super) struct EndpointQueues {
    pub(super) pool: Pool,
    pub(super) slabs: Vec<(LocalKey, MrId)>,  // bound: pool
    pub(super) receives: VecDeque<Posted>,    // bound: receives
    pub(super) reposts: Vec<Buffer>,          // bound: receives
    pub(super) sends: VecDeque<DatagramSend>, // bound: sends
    pub(super) chain: Vec<SendWr>,            // bound: sends
    pub(super) send_depth: usize,
    /// The number of datagrams that the endpoint has accepted so far. It is also the sequence number of the next
    /// datagram.
    pub(super) accepted: u64,
}

impl EndpointQueues {
    /// Creates the queues of an endpoint. No receive is posted yet: `reposts` contains the buffers
    /// of all receives. `pool` has a buffer for each receive and each send, and `slabs` is the
    /// registered memory of `pool`.
    pub(super) fn new(mut pool: Pool, slabs: Vec<(LocalKey, MrId)>, depths: EndpointOptions) -> Self {
        let (receives, sends) = (depths.receive_depth as usize, depths.send_depth as usize);
        Self {
            receives: VecDeque::with_capacity(receives),
            reposts: (0..receives).map_while(|_| pool.take()).collect(),
            sends: VecDeque::with_capacity(sends),
            chain: Vec::with_capacity(sends),
            send_depth: sends,
            accepted: 0,
            pool,
            slabs,
        }
    }
}

#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) id: EndpointId,
    pub(super) resources: EndpointResources,
    pub(super) state: EndpointState,
    pub(super) queues: EndpointQueues,
    /// The address handles of peers that the program has forgotten. Each entry consists of a sequence number and a
    /// handle. The number is the sequence number of the first send after the peer was forgotten. Only earlier sends use
    /// the handle, so the handle is destroyed when all earlier sends have completed.
    pub(super) forgotten: VecDeque<(u64, AddressId)>, // local: peers that the program has forgotten
    pub(super) groups: Vec<MulticastMembership>, // local: groups of the program
    /// True from the refusal of a send until `on_datagram_writable` is called.
    pub(super) blocked: bool,
    /// True while the endpoint is on the list `Endpoints::to_post`, because it has work requests to post.
    pub(super) marked: bool,
}

/// The number of bits for the sequence number of a send in a work request id of an endpoint. The id also contains the
/// slot and the generation of the endpoint's key.
const SEQUENCE_BITS: u32 = 16;
/// The number of bits for the slot of the endpoint's key in a work request id.
const SLOT_BITS: u32 = 20;
/// The number of bits for the generation of the endpoint's key in a work request id. One further bit distinguishes
/// sends from receives.
pub(super) const GENERATION_BITS: u32 = ENDPOINT_WORK_BITS - SEQUENCE_BITS - SLOT_BITS - 1;

/// The part of a work request id that this module encodes, in decoded form: the endpoint, and the send or receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EndpointWorkRequest {
    pub(super) endpoint: Key,
    /// The low bits of the sequence number of a send; `None` for a receive.
    pub(super) send: Option<u16>,
}

impl EndpointWorkRequest {
    fn pack(self) -> u64 {
        let (sends, sequence) = (u64::from(self.send.is_some()), u64::from(self.send.unwrap_or(0)));
        let (slot, generation) = (u64::from(self.endpoint.slot()), u64::from(self.endpoint.generation()));
        let number =
            sends | sequence << 1 | slot << (1 + SEQUENCE_BITS) | generation << (1 + SEQUENCE_BITS + SLOT_BITS);
        endpoint_wr_id(number)
    }

    /// Decodes a number that [`EndpointWorkRequest::pack`] has encoded in a work request id.
    pub(super) fn unpack(number: u64) -> Self {
        let slot = (number >> (1 + SEQUENCE_BITS)) as u32 & ((1 << SLOT_BITS) - 1);
        let generation = (number >> (1 + SEQUENCE_BITS + SLOT_BITS)) as u32 & ((1 << GENERATION_BITS) - 1);
        let send = (number & 1 != 0).then_some((number >> 1) as u16);
        Self { endpoint: Key::new(slot, generation), send }
    }
}

impl EndpointQueues {
    pub(super) fn slabs(&self) -> Arc<Slabs> {
        Arc::clone(self.pool.slabs())
    }

    pub(super) fn has_room(&self) -> bool {
        self.sends.len() < self.send_depth
    }

    /// Appends a datagram to the chain of sends that will be posted. Returns the id of the send. The caller must have
    /// checked that the send queue has a free slot and that the datagram is not too long.
    pub(super) fn push_send(&mut self, endpoint: Key, buffer: Buffer, len: usize, op: SendOp) -> SendId {
        let id = SendId::new(self.accepted, SendKind::Datagram);
        let (posted, sge) = self.pool.post(buffer, len);
        let wr_id = EndpointWorkRequest { endpoint, send: Some(self.accepted as u16) }.pack();
        self.chain.push(SendWr { wr_id, op, sges: SgeList::one(sge), flags: SendFlags::empty() });
        self.sends.push_back(DatagramSend { buffer: posted, id });
        self.accepted += 1;
        id
    }

    /// Returns the number of sends that have ended when the completion of send `sequence` arrives. Only the last send
    /// of a chain is signaled. So a completion ends the send `sequence` and all unfinished sends before it. Returns
    /// `None` if send `sequence` is not posted.
    pub(super) fn sends_ended_by(&self, sequence: u16) -> Option<usize> {
        let oldest = self.sends.front()?.id.sequence() as u16;
        let count = usize::from(sequence.wrapping_sub(oldest)) + 1;
        (count <= self.sends.len() - self.chain.len()).then_some(count)
    }

    /// Returns the sequence number of the oldest send that has not ended. If all sends have ended, returns the sequence
    /// number of the next send.
    pub(super) fn oldest(&self) -> u64 {
        self.sends.front().map_or(self.accepted, |send| send.id.sequence())
    }

    /// Posts the free buffers of `reposts` as receives.
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
            let wr_id = EndpointWorkRequest { endpoint, send: None }.pack();
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

    /// Posts the chain of sends. Only the last send of the chain is signaled.
    pub(super) fn post_sends(&mut self, qp: QpId, provider: &mut dyn Provider) -> Result<(), Error> {
        let Some(last) = self.chain.last_mut() else { return Ok(()) };
        last.flags |= SendFlags::SIGNALED;
        match provider.post_send(qp, &self.chain) {
            Ok(_) => self.chain.clear(),
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
        matches!(self.state, EndpointState::Open)
    }

    pub(super) const fn is_over(&self) -> bool {
        matches!(self.state, EndpointState::Over { .. })
    }

    /// Removes and returns the address handle of a forgotten peer, if no send uses that handle any more. Returns `None`
    /// if there is no such handle.
    pub(super) fn next_unused(&mut self) -> Option<AddressId> {
        let &(until, address) = self.forgotten.front()?;
        if until > self.queues.oldest() {
            return None;
        }
        self.forgotten.pop_front();
        Some(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::WorkRequestId;

    #[test]
    fn a_number_survives_the_trip() {
        for endpoint in [Key::new(0, 1), Key::new((1 << SLOT_BITS) - 1, (1 << GENERATION_BITS) - 1)] {
            for send in [None, Some(0), Some(u16::MAX)] {
                let work = EndpointWorkRequest { endpoint, send };
                let WorkRequestId::Endpoint(number) = WorkRequestId::of(work.pack()) else {
                    panic!("not of an endpoint")
                };
                assert_eq!(EndpointWorkRequest::unpack(number), work);
            }
        }
    }
}
