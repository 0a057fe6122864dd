//! [`Qp`]: a queue pair in the provider's table. It has the limits of the queue pair, and the functions that post to
//! it.

use std::ptr;

use super::NAME;
use super::address::Address;
use super::chains::{Chains, InlineLimits, check_request, posted, split};
use super::device::Driver;
use super::ffi::QueueName;
use super::id::{Queues, Service};
use super::sys::{ibv_post_recv, ibv_post_send, ibv_qp, ibv_qp_cap, ibv_qp_init_attr, ibv_qp_type};
use rdma_transport::caps::{Capabilities, Features};
use rdma_transport::error::TransportError;
use rdma_transport::provider::{CqId, PostError, Posted};
use rdma_transport::qp::{QpAttr, SrqId};
use rdma_transport::slab::Slab;
use rdma_transport::wr::{RecvWr, SendClass, SendFlags, SendOp, SendWr};

/// A queue pair in the provider's table. The queue pair itself is owned by its id.
#[derive(Debug)]
pub(super) struct Qp {
    raw: *mut ibv_qp,
    pub(super) name: QueueName,
    pub(super) number: u32,
    pub(super) attr: QpAttr,
    /// The shared receive queue that the queue pair uses; `None` if it has a separate receive queue.
    pub(super) srq: Option<SrqId>,
    /// True after an event has reported that the queue pair's last shared receive has completed.
    pub(super) last_receive: bool,
    inline: InlineLimits,
    features: Features,
    max_sge: u32,
    max_read_sge: u32,
    /// The length of the largest datagram, in bytes; `None` for a connected queue pair.
    max_datagram: Option<u32>,
}

// SAFETY: only the thread that drives the provider posts work requests. The id that owns the queue pair exists as long as this entry.
unsafe impl Send for Qp {}

/// Returns the maximum number of scatter/gather entries of a receive.
fn recv_sge(attr: &QpAttr, capabilities: &Capabilities) -> u32 {
    if attr.max_recv_sge == 0 { capabilities.max_sge } else { attr.max_recv_sge.min(capabilities.max_sge) }
}

/// Returns the attributes in the library's format, for the creation of a queue pair.
pub(super) fn init_attr(
    service: Service,
    attr: &QpAttr,
    capabilities: &Capabilities,
    queues: &Queues,
    name: QueueName,
) -> ibv_qp_init_attr {
    ibv_qp_init_attr {
        qp_context: name.context(),
        send_cq: queues.send.as_ptr(),
        recv_cq: queues.recv.as_ptr(),
        srq: queues.shared.as_ref().map_or(ptr::null_mut(), |srq| srq.as_ptr()),
        cap: ibv_qp_cap {
            max_send_wr: attr.max_send_wr,
            max_recv_wr: if queues.shared.is_some() { 0 } else { attr.max_recv_wr },
            max_send_sge: capabilities.max_sge,
            max_recv_sge: recv_sge(attr, capabilities),
            max_inline_data: attr.max_inline.min(capabilities.max_inline),
        },
        qp_type: match service {
            Service::Connected => ibv_qp_type::IBV_QPT_RC,
            Service::Datagram => ibv_qp_type::IBV_QPT_UD,
        },
        sq_sig_all: 0,
    }
}

impl Qp {
    /// Makes the entry of the queue pair `raw`, which was created with the attributes `made` and `attr`, and with
    /// `name` as its context. The caller stores the result in the entry of the id that owns `raw`, so that it is
    /// dropped together with `raw`.
    pub(super) fn new(
        (raw, name): (*mut ibv_qp, QueueName),
        made: &ibv_qp_init_attr,
        attr: &QpAttr,
        srq: Option<SrqId>,
        capabilities: &Capabilities,
        driver: Driver,
    ) -> Self {
        let mut attr = *attr;
        attr.max_recv_sge = recv_sge(&attr, capabilities);
        attr.max_inline = attr.max_inline.min(capabilities.max_inline).min(made.cap.max_inline_data);
        let invalidate = if driver == Driver::Siw { 0 } else { attr.max_inline };
        let inline = InlineLimits { send: attr.max_inline, invalidate };
        // SAFETY: the queue pair exists, and its number never changes.
        let number = unsafe { (*raw).qp_num };
        let Capabilities { features, max_sge, max_read_sge, .. } = *capabilities;
        let max_datagram = (made.qp_type == ibv_qp_type::IBV_QPT_UD).then_some(capabilities.max_datagram);
        Self {
            raw,
            name,
            number,
            attr,
            srq,
            last_receive: false,
            inline,
            features,
            max_sge,
            max_read_sge,
            max_datagram,
        }
    }

    pub(super) fn completes_to(&self, cq: CqId) -> bool {
        self.attr.send_cq == cq || self.attr.recv_cq == cq
    }

    fn check_send(&self, wr: &SendWr, addresses: &Slab<Address>) -> Result<(), TransportError> {
        let max_sge = if wr.op.class() == SendClass::Read { self.max_read_sge } else { self.max_sge };
        check_request(wr.wr_id, &wr.sges, max_sge)?;
        if wr.flags.contains(SendFlags::INLINE) && wr.sges.total_len() > self.inline.of(&wr.op) {
            let range =
                "at most the queue pair's max_inline, and 0 for a Read, an atomic, and on siw a Send with Invalidate";
            let value = wr.sges.total_len() as u64;
            return Err(TransportError::OutOfRange { what: "bytes of an inline send", value, range });
        }
        if let Some(max) = self.max_datagram {
            return check_datagram(wr, max, addresses);
        }
        let needed = wr.op.feature();
        if needed == Features::DATAGRAMS {
            return Err(TransportError::InvalidState { call: "post_send of a datagram", state: "not for datagrams" });
        }
        if self.features.contains(needed) {
            Ok(())
        } else {
            Err(TransportError::Unsupported { provider: NAME, feature: wr.op.name() })
        }
    }

    pub(super) fn post_send(
        &self,
        chain: &[SendWr],
        chains: &mut Chains,
        addresses: &Slab<Address>,
    ) -> Result<Posted, PostError> {
        let (taken, refused) = split(chain, |wr| self.check_send(wr, addresses));
        if !taken.is_empty() {
            let first = chains.sends(taken, self.inline, addresses);
            let mut bad = ptr::null_mut();
            // SAFETY: the queue pair is live. `chains` keeps the entries of the chain until the call returns. The
            // promise of `Sge::new` covers the memory to which the entries point.
            let rc = unsafe { ibv_post_send(self.raw, first, &raw mut bad) };
            posted(rc, first, bad, taken.len(), "ibv_post_send", "send", self.attr.max_send_wr)?;
        }
        // An adapter completes no work request during the post.
        refused.map_or(Ok(Posted::Pending), |error| Err(PostError { posted: taken.len(), error }))
    }

    pub(super) fn post_recv(&self, chain: &[RecvWr], chains: &mut Chains) -> Result<(), PostError> {
        if self.srq.is_some() {
            let state = "on a shared receive queue";
            return Err(PostError { posted: 0, error: TransportError::InvalidState { call: "post_recv", state } });
        }
        let (taken, refused) = split(chain, |wr| check_request(wr.wr_id, &wr.sges, self.attr.max_recv_sge));
        if !taken.is_empty() {
            let first = chains.recvs(taken);
            let mut bad = ptr::null_mut();
            // SAFETY: the queue pair is live. `chains` keeps the entries of the chain until the call returns. The
            // promise of `Sge::new` covers the memory to which the entries point.
            let rc = unsafe { ibv_post_recv(self.raw, first, &raw mut bad) };
            posted(rc, first, bad, taken.len(), "ibv_post_recv", "receive", self.attr.max_recv_wr)?;
        }
        refused.map_or(Ok(()), |error| Err(PostError { posted: taken.len(), error }))
    }
}

fn check_datagram(wr: &SendWr, max: u32, addresses: &Slab<Address>) -> Result<(), TransportError> {
    let (SendOp::Datagram(to) | SendOp::DatagramWithImmediate(to, _)) = wr.op else {
        return Err(TransportError::Unsupported {
            provider: NAME,
            feature: "operation but datagrams on a datagram queue pair",
        });
    };
    if addresses.get(to.address.0).is_none_or(|address| address.raw.is_none()) {
        return Err(TransportError::Stale { object: "address" });
    }
    if wr.sges.total_len() > max as usize {
        let (value, range) = (wr.sges.total_len() as u64, "at most the device's max_datagram");
        return Err(TransportError::OutOfRange { what: "bytes of a datagram", value, range });
    }
    Ok(())
}
