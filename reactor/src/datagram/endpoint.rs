//! One endpoint: the work requests that are posted, and those that are to be posted.

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
use crate::id::{ENDPOINT_WORK_BITS, SendId, SendKind, endpoint_wr_id};
use crate::providers::Handle;

/// An accepted datagram that has not completed.
#[derive(Debug)]
pub(super) struct DatagramSend {
    pub(super) buffer: Posted,
    pub(super) id: SendId,
}

/// A multicast group that the endpoint is a member of or is joining. `peer` is `None` until the endpoint has joined.
#[derive(Debug)]
pub(super) struct MulticastMembership {
    pub(super) group: IpAddr,
    pub(super) peer: Option<PeerId>,
}

/// The connection-manager ids, the address and the queue pair of an endpoint, and its share of the device.
#[derive(Debug)]
pub(super) struct EndpointResources {
    /// The connection-manager id that owns the queue pair.
    pub(super) cm: Handle<CmId>,
    /// The connection-manager id that receives the requests of peers that resolve the endpoint.
    pub(super) listener: Handle<CmId>,
    pub(super) address: SocketAddr,
    pub(super) qp: QpId,
    pub(super) qp_number: u32,
    pub(super) device: usize,
    pub(super) cq: usize,
    /// Number of entries of the completion queue that the endpoint has claimed.
    pub(super) room: u32,
    pub(super) max_datagram: usize,
}

/// The state of an endpoint.
#[derive(Debug)]
pub(super) enum EndpointState {
    Open,
    /// The endpoint is closed. Accepted datagrams are still sent until the timer expires.
    Draining {
        reason: DisconnectReason,
        timer: Key,
    },
    /// The endpoint is closed, and nothing is sent any more.
    Over {
        reason: DisconnectReason,
    },
}

/// The send and receive queues of an endpoint, with the work requests that are to be posted.
#[derive(Debug)]
pub(super) struct EndpointQueues {
    pub(super) pool: Pool,
    pub(super) slabs: Vec<(LocalKey, MrId)>,
    pub(super) receives: VecDeque<Posted>,
    pub(super) reposts: Vec<Buffer>,
    pub(super) sends: VecDeque<DatagramSend>,
    pub(super) chain: Vec<SendWr>,
    pub(super) send_depth: usize,
    /// Number of datagrams accepted so far.
    pub(super) accepted: u64,
}

#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) id: EndpointId,
    pub(super) resources: EndpointResources,
    pub(super) state: EndpointState,
    pub(super) queues: EndpointQueues,
    /// Address handles of forgotten peers, each with the number of the first send that was accepted after the peer was
    /// forgotten. Only earlier sends may use the handle.
    pub(super) forgotten: VecDeque<(u64, AddressId)>,
    pub(super) groups: Vec<MulticastMembership>,
    /// A send was refused, and `on_datagram_writable` has not been called since.
    pub(super) blocked: bool,
    /// The endpoint is on the list of endpoints with pending work requests.
    pub(super) marked: bool,
}

/// Bits of the position of a send in the number of a work request.
const SEQUENCE_BITS: u32 = 16;
/// Bits of a slot in the number of a work request. The remaining bits are for the generation.
const SLOT_BITS: u32 = 20;
/// Bits of a generation in the number of a work request.
pub(super) const GENERATION_BITS: u32 = ENDPOINT_WORK_BITS - SEQUENCE_BITS - SLOT_BITS - 1;

/// The meaning of the number in an endpoint's work request id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EndpointWorkRequest {
    pub(super) endpoint: Key,
    /// The low bits of the position of a send; `None` for a receive.
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

    /// Decodes the number of a work request.
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

    /// Appends a datagram to the chain. The caller has checked that the send queue is not full and that the datagram is
    /// not too long.
    pub(super) fn push_send(&mut self, endpoint: Key, buffer: Buffer, len: usize, op: SendOp) -> SendId {
        let id = SendId::new(self.accepted, SendKind::Datagram);
        let (posted, sge) = self.pool.post(buffer, len);
        let wr_id = EndpointWorkRequest { endpoint, send: Some(self.accepted as u16) }.pack();
        self.chain.push(SendWr { wr_id, op, sges: SgeList::one(sge), flags: SendFlags::empty() });
        self.sends.push_back(DatagramSend { buffer: posted, id });
        self.accepted += 1;
        id
    }

    /// Returns the number of sends that the completion of `sequence` ends: that send and all before it. `None` if no
    /// such send is posted.
    pub(super) fn sends_ended_by(&self, sequence: u16) -> Option<usize> {
        let oldest = self.sends.front()?.id.sequence() as u16;
        let count = usize::from(sequence.wrapping_sub(oldest)) + 1;
        (count <= self.sends.len() - self.chain.len()).then_some(count)
    }

    /// Returns the number of the oldest send that has not ended, or of the next send if all have ended.
    pub(super) fn oldest(&self) -> u64 {
        self.sends.front().map_or(self.accepted, |send| send.id.sequence())
    }

    /// Posts the receives whose buffers are free again.
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

    /// Posts the chain of sends.
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

    /// Removes and returns an address handle that no posted send uses any more.
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
