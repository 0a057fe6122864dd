//! A datagram queue pair: sends datagrams, and puts received datagrams into posted receives.

use std::collections::VecDeque;
use std::net::SocketAddr;

use super::frame::{self, HEADROOM};
use super::packet::DatagramHeader;
use super::port::UdpPort;
use crate::entries::ENTRIES;
use crate::packets::Packets;
use crate::soft::completions::{Completions, Done};
use crate::soft::cq::CompletionQueues;
use crate::soft::receive_queue::ReceiveQueue;
use crate::soft::resources::Resources;
use rdma_transport::datagram::{DatagramSource, GRH_LEN};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::provider::PostError;
use rdma_transport::qp::{QpAttr, QpId, SrqId};
use rdma_transport::slab::Slab;
use rdma_transport::wc::WcOpcode;
use rdma_transport::wr::{RecvWr, SendFlags, SendOp, SendWr};

/// The metadata of a received datagram: its route header, its immediate data and its source.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) route: [u8; GRH_LEN],
    pub(crate) immediate: Option<u32>,
    pub(crate) source: DatagramSource,
}

/// A posted datagram that is not sent yet.
#[derive(Debug)]
struct Sending {
    wr: SendWr,
    to: SocketAddr,
    header: DatagramHeader,
    /// The copied payload of an inline send. `None` until the send has to wait for a writable socket.
    copy: Option<Box<[u8]>>,
}

/// A datagram queue pair.
#[derive(Debug)]
pub(crate) struct DatagramQueuePair {
    pub(crate) number: u32,
    /// The largest payload of a datagram in octets.
    max: usize,
    /// The index of the network interface, for the scope of link-local and multicast addresses.
    interface: u32,
    /// True if the local address is an IPv4 address.
    is_v4: bool,
    completions: Completions,
    receives: ReceiveQueue,
    sends: VecDeque<Sending>, // bound: sends
    /// The sequence number of the packet that was put into a batch last. A packet that is put into a batch again has a new number.
    sequence: u32,
    phase: SendState,
}

/// The states of the send queue. A closed queue pair has the state `Over`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SendState {
    Sending,
    /// The socket's buffer was full. The queue waits until the socket is writable.
    Waiting,
    /// The queue pair is closed. Its work requests are flushed.
    Over,
}

impl DatagramQueuePair {
    /// Creates a queue pair. The caller has reserved entries on the completion queues for its work requests.
    pub(crate) fn new(id: QpId, attr: &QpAttr, number: u32, port: &UdpPort) -> Self {
        let depth = if attr.srq.is_some() { 1 } else { attr.max_recv_wr };
        Self {
            number,
            max: port.max_payload() as usize,
            interface: port.interface.index,
            is_v4: port.address.is_ipv4(),
            completions: Completions::new(id, *attr),
            receives: ReceiveQueue::new(depth as usize),
            sends: VecDeque::with_capacity(attr.max_send_wr as usize),
            sequence: 0,
            phase: SendState::Sending,
        }
    }

    pub(crate) fn post_recv(
        &mut self,
        chain: &[RecvWr],
        cqs: &mut CompletionQueues,
    ) -> std::result::Result<(), PostError> {
        self.completions.post_recv(chain, &mut self.receives, self.phase == SendState::Over, cqs)
    }

    /// Posts datagrams to the send queue. The error contains the number of work requests that were posted before the rejected work request.
    pub(crate) fn post_send(
        &mut self,
        chain: &[SendWr],
        addresses: &Slab<SocketAddr>,
        cqs: &mut CompletionQueues,
    ) -> std::result::Result<(), PostError> {
        for (posted, wr) in chain.iter().enumerate() {
            let checked = self.check(wr, addresses);
            let (to, header) = checked.map_err(|error| PostError { posted, error })?;
            if self.phase == SendState::Over {
                self.completions.sent(cqs, &Done::flushed(wr.wr_id));
            } else {
                self.sends.push_back(Sending { wr: *wr, to, header, copy: None });
            }
        }
        Ok(())
    }

    fn check(&self, wr: &SendWr, addresses: &Slab<SocketAddr>) -> Result<(SocketAddr, DatagramHeader)> {
        self.completions.check_send_room(self.sends.len())?;
        let (destination, immediate) = match wr.op {
            SendOp::Datagram(destination) => (destination, None),
            SendOp::DatagramWithImmediate(destination, value) => (destination, Some(value)),
            other => {
                return Err(TransportError::Unsupported { provider: "a datagram queue pair", feature: other.name() });
            }
        };
        let len = wr.sges.total_len();
        if len > self.max {
            let (what, range) = ("datagram length", "at most the max_datagram of the id");
            return Err(TransportError::OutOfRange { what, value: len as u64, range });
        }
        if wr.flags.contains(SendFlags::INLINE) && len > self.completions.attr.max_inline as usize {
            let (what, range) = ("inline length", "at most the max_inline of the queue pair");
            return Err(TransportError::OutOfRange { what, value: len as u64, range });
        }
        let mut to = *addresses.get(destination.address.0).ok_or(TransportError::Stale { object: "address" })?;
        if to.is_ipv4() != self.is_v4 {
            return Err(TransportError::InvalidState {
                call: "post_send",
                state: "at an address of another version of IP",
            });
        }
        if let SocketAddr::V6(v6) = &mut to {
            if v6.ip().is_unicast_link_local() || v6.ip().is_multicast() {
                v6.set_scope_id(self.interface);
            }
        }
        let header = DatagramHeader {
            destination: destination.qp_number,
            source: self.number,
            queue_key: destination.queue_key,
            immediate,
            solicited: wr.flags.contains(SendFlags::SOLICITED),
        };
        Ok((to, header))
    }

    /// Returns true if datagrams are queued and the queue pair does not wait until the socket is writable.
    #[inline]
    pub(crate) fn is_ready(&self) -> bool {
        !self.sends.is_empty() && self.phase == SendState::Sending
    }

    /// Fills an empty batch with the packets of the first queued datagrams. The datagrams stay in the queue until
    /// [`DatagramQueuePair::sent`].
    pub(crate) fn fill(&mut self, from: SocketAddr, batch: &mut Packets) {
        for sending in &self.sends {
            if batch.is_full() {
                return;
            }
            self.sequence = self.sequence.wrapping_add(1);
            let Sending { wr, to, header, copy } = sending;
            batch.push(*to, |buffer| {
                let (start, mut len) = (HEADROOM + header.len(), 0);
                if let Some(copy) = copy {
                    len = copy.len();
                    buffer[start..start + len].copy_from_slice(copy);
                } else {
                    for sge in wr.sges.as_slice() {
                        ENTRIES.copy_to(sge, &mut buffer[start + len..start + len + sge.len()]);
                        len += sge.len();
                    }
                }
                let len = header.emit(self.sequence, len, &mut buffer[HEADROOM..]);
                frame::seal(buffer, len, from, *to)
            });
        }
    }

    /// Removes the first `count` datagrams from the queue and completes them successfully. The system has accepted or dropped them.
    pub(crate) fn sent(&mut self, count: usize, cqs: &mut CompletionQueues) {
        for Sending { wr, .. } in self.sends.drain(..count.min(self.sends.len())) {
            self.completions.sent(cqs, &Done::of(wr.wr_id, wr.op.class(), wr.flags, 0));
        }
    }

    /// Stops sending until the socket is writable. Copies the payloads of the queued inline sends, because the program may reuse their
    /// memory after the post. The caller calls this again after each later post, until [`DatagramQueuePair::resume`]: so inline sends that
    /// are posted while the queue pair waits are copied, too.
    pub(crate) fn wait(&mut self) {
        self.phase = SendState::Waiting;
        for sending in &mut self.sends {
            if sending.wr.flags.contains(SendFlags::INLINE) && sending.copy.is_none() {
                let mut copy = Vec::new();
                sending.wr.sges.as_slice().iter().for_each(|sge| ENTRIES.append_to(sge, &mut copy));
                sending.copy = Some(copy.into());
            }
        }
    }

    /// Continues sending after the socket became writable.
    pub(crate) fn resume(&mut self) {
        if self.phase == SendState::Waiting {
            self.phase = SendState::Sending;
        }
    }

    /// Returns true if the queue pair waits until the socket is writable.
    pub(crate) fn is_waiting(&self) -> bool {
        self.phase == SendState::Waiting
    }

    /// Copies a received datagram into the next receive and completes the receive. A datagram that
    /// is too long is no error, because otherwise any peer could end the queue pair. The datagram
    /// is dropped in these cases:
    ///
    /// - No receive is posted.
    /// - The next receive is too short for the route header and the payload.
    /// - The payload is longer than `max`.
    /// - The queue pair is closed.
    pub(crate) fn deliver(&mut self, arrival: &Arrival, payload: &[u8], resources: &mut Resources) {
        if payload.len() > self.max || self.phase == SendState::Over {
            return;
        }
        let srq = self.completions.attr.srq;
        let mut shared = resources.take_out(srq);
        let room = self.receives.room(&mut shared.as_mut());
        resources.put_back(srq, shared);
        if room.is_none_or(|room| room < GRH_LEN + payload.len()) {
            return;
        }
        self.receives.fill(&arrival.route);
        self.receives.fill(payload);
        if let Some((wr_id, len)) = self.receives.complete() {
            self.completions.received_datagram(&mut resources.cqs, wr_id, len, arrival.immediate, arrival.source);
        }
    }

    /// Records that a completion was polled. If it is the completion of a receive from a shared receive queue, returns this queue.
    /// Otherwise returns `None`.
    pub(crate) fn polled(&mut self, opcode: WcOpcode) -> Option<SrqId> {
        self.completions.polled(opcode)
    }

    /// Closes the queue pair: flushes all posted work requests. Work requests that are posted afterwards are flushed, too.
    pub(crate) fn flush(&mut self, cqs: &mut CompletionQueues) {
        self.phase = SendState::Over;
        for Sending { wr, .. } in self.sends.drain(..) {
            self.completions.sent(cqs, &Done::flushed(wr.wr_id));
        }
        self.completions.flush_receives(&mut self.receives, cqs);
    }

    /// Drops the work requests without completions. Releases the entries that the queue pair has
    /// reserved on its completion queues, except the entries of unpolled completions. Returns to
    /// the shared receive queue those receives that were taken from it and have not completed.
    pub(crate) fn release(&mut self, resources: &mut Resources) {
        self.sends.clear();
        self.completions.release(&mut self.receives, resources);
    }
}
