//! A queue pair: both directions of one stream, and the rules of its work queues.

use std::io;

use super::NAME;
use super::cq::Completions;
use super::fault::Fault;
use super::placement::{Context, Direct, Message};
use super::receive::Receiver;
use super::requester::Requester;
use super::resources::Resources;
use super::responder::Responder;
use super::stag::StagTable;
use super::startup::Agreement;
use super::transmit::{Done, MAX_INLINE, Sent, Transmitter, address};
use super::wire::{Layer, Quote, Terminate, TerminateCause};
use crate::cm::ReadDepth;
use crate::datagram::DatagramSource;
use crate::error::{Error, Result};
use crate::mem::SendSlice;
use crate::provider::{CqId, PostError};
use crate::qp::{QpAttr, QpId, SrqId};
use crate::wc::{WcOpcode, WcStatus, WorkCompletion};
use crate::wr::{RecvWr, SendFlags, SendOp, SendWr};

/// Longest message, bytes. A Message Offset has 32 bits.
pub(crate) const MAX_MESSAGE: u64 = (1 << 30) + 64;
/// Most work requests of a work queue.
pub(crate) const MAX_QUEUE_DEPTH: u32 = 32768;

/// Which end of the connection this is: the initiator may send at once, the responder not before it has heard the
/// initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Initiator,
    Responder,
}

#[derive(Debug)]
pub(crate) struct QueuePair {
    id: QpId,
    attr: QpAttr,
    /// The shared queue that receives come from, if they do not come from the queue pair's own.
    srq: Option<SrqId>,
    rx: Receiver,
    tx: Transmitter,
    requester: Requester,
    responder: Responder,
    extensions: bool,
    /// What both sides agreed on.
    pub(crate) read_depth: ReadDepth,
    /// Whether the stream has begun.
    live: bool,
    /// Completions that were not polled. Their work requests count towards the depth of the work queues until then.
    send_unpolled: u32,
    recv_unpolled: u32,
    /// The status of the work request that ended the stream, and its number in the send queue if that is known.
    failed: Option<(Option<u64>, WcStatus)>,
    /// Whether the stream has ended: then work requests are flushed at once.
    dead: bool,
}

impl QueuePair {
    pub(crate) fn new(id: QpId, attr: &QpAttr, srq: Option<SrqId>) -> Result<Self> {
        for (what, depth) in [("max_send_wr", attr.max_send_wr), ("max_recv_wr", attr.max_recv_wr)] {
            if (depth == 0 || depth > MAX_QUEUE_DEPTH) && (srq.is_none() || what == "max_send_wr") {
                return Err(Error::OutOfRange { what, value: depth.into(), range: "1 to 32768" });
            }
        }
        if attr.max_inline as usize > MAX_INLINE {
            return Err(Error::OutOfRange { what: "max_inline", value: attr.max_inline.into(), range: "at most 256" });
        }
        Ok(Self {
            id,
            attr: *attr,
            srq,
            rx: Receiver::new(if srq.is_some() { 1 } else { attr.max_recv_wr as usize }),
            tx: Transmitter::new(attr.max_send_wr as usize, attr.max_inline as usize),
            requester: Requester::new(),
            responder: Responder::new(),
            extensions: false,
            read_depth: ReadDepth::default(),
            live: false,
            send_unpolled: 0,
            recv_unpolled: 0,
            failed: None,
            dead: false,
        })
    }

    /// Takes note of a polled completion. Returns the shared queue that its receive came from, if it did.
    #[inline]
    pub(crate) fn polled(&mut self, opcode: WcOpcode) -> Option<SrqId> {
        if is_receive(opcode) {
            self.recv_unpolled = self.recv_unpolled.saturating_sub(1);
            self.srq
        } else {
            self.send_unpolled = self.send_unpolled.saturating_sub(1);
            None
        }
    }

    /// Gives up the queue pair's room on its completion queues, except for completions that were not polled. A receive
    /// of a shared queue that was being filled goes back to that queue.
    pub(crate) fn release_queues(&mut self, resources: &mut Resources) {
        resources.cqs.release(self.attr.send_cq, self.attr.max_send_wr, self.send_unpolled);
        match self.srq {
            Some(srq) => {
                let begun = self.rx.queue.take_all();
                resources.detach(srq, self.attr.recv_cq, self.id, begun, self.recv_unpolled);
            }
            None => resources.cqs.release(self.attr.recv_cq, self.attr.max_recv_wr, self.recv_unpolled),
        }
    }

    /// Starts the stream. An initiator may send at once, behind the ready-to-receive message; the sends of a responder
    /// are held back until [`QueuePair::release`].
    pub(crate) fn establish(&mut self, role: Role, agreement: &Agreement, max_segment: usize) {
        self.rx.establish(agreement.crc);
        self.tx.establish(agreement, max_segment);
        self.read_depth = agreement.read_depth();
        self.requester.establish(agreement.ord);
        self.responder.establish(agreement.ird);
        self.live = true;
        if role == Role::Initiator {
            if let Some(rtr) = agreement.rtr {
                self.tx.ready_to_receive(rtr, &mut self.requester);
            }
            self.tx.release();
        }
    }

    /// Allows the extensions of RFC 7306, which the peer is known to speak.
    pub(crate) fn enable_extensions(&mut self) {
        self.extensions = true;
    }

    /// Adapts the size of segments to the path.
    pub(crate) fn set_max_segment(&mut self, max_segment: usize) {
        self.tx.set_max_segment(max_segment);
    }

    /// Lets a responder's sends go.
    pub(crate) fn release(&mut self) {
        self.tx.release();
    }

    pub(crate) fn is_held(&self) -> bool {
        self.tx.is_held()
    }

    /// Whether a valid FPDU has come.
    pub(crate) fn has_received(&self) -> bool {
        self.rx.has_seen()
    }

    /// FPDUs that have begun to come, modulo 2^32.
    #[inline]
    pub(crate) fn fpdus(&self) -> u32 {
        self.rx.fpdus()
    }

    /// Whether there is something to hand to TCP.
    #[inline]
    pub(crate) fn has_output(&self) -> bool {
        self.tx.has_work(&self.requester, &self.responder)
    }

    pub(crate) fn post_recv(&mut self, chain: &[RecvWr], cqs: &mut Completions) -> std::result::Result<(), PostError> {
        for (posted, wr) in chain.iter().enumerate() {
            if self.srq.is_some() {
                let error = Error::InvalidState { call: "post_recv", state: "using a shared receive queue" };
                return Err(PostError { posted, error });
            }
            let used = self.rx.queue.len() + self.recv_unpolled as usize;
            if used >= self.attr.max_recv_wr as usize {
                let error = Error::QueueFull { queue: "receive", depth: self.attr.max_recv_wr };
                return Err(PostError { posted, error });
            }
            if self.dead {
                self.flush_recv(cqs, wr.wr_id);
            } else {
                self.rx.queue.post(*wr);
            }
        }
        Ok(())
    }

    /// Queues work requests. The caller calls [`QueuePair::transmit`] afterwards.
    pub(crate) fn post_send(
        &mut self,
        chain: &[SendWr],
        resources: &mut Resources,
    ) -> std::result::Result<(), PostError> {
        for (posted, wr) in chain.iter().enumerate() {
            self.post_one(wr, resources).map_err(|error| PostError { posted, error })?;
        }
        Ok(())
    }

    #[inline]
    fn post_one(&mut self, wr: &SendWr, resources: &mut Resources) -> Result<()> {
        if self.tx.queued() + self.send_unpolled as usize >= self.attr.max_send_wr as usize {
            return Err(Error::QueueFull { queue: "send", depth: self.attr.max_send_wr });
        }
        if !matches!(wr.op, SendOp::Send | SendOp::SendInvalidate(_) | SendOp::Write(_)) {
            self.check_request(wr, &resources.stags)?;
        }
        let len = wr.sges.total_len();
        if len as u64 > MAX_MESSAGE {
            return Err(Error::OutOfRange { what: "message length", value: len as u64, range: "at most 1 GiB" });
        }
        if wr.flags.contains(SendFlags::INLINE) && len > self.attr.max_inline as usize {
            let range = "at most the max_inline of the queue pair";
            return Err(Error::OutOfRange { what: "inline length", value: len as u64, range });
        }
        if self.dead {
            let (wr_id, status, opcode) = (wr.wr_id, WcStatus::Flushed, WcOpcode::Send);
            self.complete_send(&mut resources.cqs, Done { wr_id, status, opcode, len: 0, signaled: true });
        } else {
            self.tx.post(wr, &self.responder);
        }
        Ok(())
    }

    /// Checks what holds for Reads, atomics, immediate data and datagrams only.
    fn check_request(&self, wr: &SendWr, stags: &StagTable) -> Result<()> {
        let (feature, sink) = match wr.op {
            SendOp::Read(_) => (None, Some(wr.sges.total_len())),
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => (Some("atomic operations"), Some(8)),
            SendOp::SendWithImmediate(_) => {
                return Err(Error::Unsupported { provider: NAME, feature: "Send with immediate data" });
            }
            SendOp::Datagram(_) | SendOp::DatagramWithImmediate(..) => {
                return Err(Error::Unsupported { provider: NAME, feature: "datagrams" });
            }
            _ => (Some("RDMA Write with immediate data"), None),
        };
        if let Some(feature) = feature.filter(|_| !self.extensions) {
            return Err(Error::Unsupported { provider: NAME, feature });
        }
        let Some(len) = sink else { return Ok(()) };
        let entries = wr.sges.as_slice();
        if entries.len() > 1 || (entries.is_empty() && len > 0) {
            let (value, range) = (entries.len() as u64, "1: the wire carries one");
            return Err(Error::OutOfRange { what: "entries of an RDMA Read or atomic", value, range });
        }
        if wr.flags.contains(SendFlags::INLINE) {
            return Err(Error::Unsupported { provider: NAME, feature: "inline RDMA Reads or atomics" });
        }
        if self.live && len > 0 && self.requester.depth() == 0 {
            let range = "at least 1: the peer serves no RDMA Reads";
            return Err(Error::OutOfRange { what: "read depth of the connection", value: 0, range });
        }
        if let Some(entry) = entries.first()
            && len > 0
            && (stags.sink(entry.local_key().0, address(entry), len).is_none()
                || (feature.is_some() && entry.len() != len))
        {
            let state = "without a registered entry of the right length and the right to write it here";
            return Err(Error::InvalidState { call: "post_send of an RDMA Read or atomic", state });
        }
        Ok(())
    }

    fn flush_recv(&mut self, cqs: &mut Completions, wr_id: u64) {
        self.recv_unpolled += 1;
        cqs.push(self.attr.recv_cq, completion(self.id, wr_id, WcStatus::Flushed, WcOpcode::Recv, 0));
    }

    fn complete_send(&mut self, cqs: &mut Completions, done: Done) {
        complete(self.id, self.attr.send_cq, &mut self.send_unpolled, cqs, done);
    }

    /// The memory that the next bytes of the stream belong to, if it is worth an entry of its own in a receive call.
    #[inline]
    pub(crate) fn direct<'a>(&'a mut self, stags: &'a StagTable) -> Option<Direct<'a>> {
        self.rx.direct(self.id.0, stags)
    }

    /// Takes the next bytes of the stream. The first `direct` of them are in the memory of [`QueuePair::direct`]
    /// already; `bytes` are the others.
    #[inline]
    pub(crate) fn input(
        &mut self,
        direct: usize,
        bytes: &[u8],
        resources: &mut Resources,
    ) -> std::result::Result<(), Fault> {
        // The shared queue is taken out of its table while this queue pair uses it.
        let mut shared = match self.srq {
            Some(srq) => resources.srq(srq).ok().map(std::mem::take),
            None => None,
        };
        let Self { id, attr, rx, tx, requester, responder, extensions, recv_unpolled, send_unpolled, .. } = self;
        let Resources { cqs, stags, .. } = &mut *resources;
        let answered = requester.answered();
        let mut cx = Context {
            scope: id.0,
            stags,
            srq: shared.as_mut(),
            requester: &mut *requester,
            responder,
            extensions: *extensions,
        };
        if direct > 0 {
            rx.filled(direct, &mut cx);
        }
        let result = rx.input(bytes, &mut cx, &mut |message| {
            *recv_unpolled += 1;
            cqs.push(attr.recv_cq, received(*id, &message));
        });
        if requester.answered() != answered {
            tx.reap(requester, &mut |done| complete(*id, attr.send_cq, send_unpolled, cqs, done));
        }
        if let (Some(srq), Some(shared)) = (self.srq, shared)
            && let Ok(place) = resources.srq(srq)
        {
            *place = shared;
        }
        if let Err(fault) = &result {
            self.note(fault);
        }
        result
    }

    /// Remembers the work request that a fault is about.
    fn note(&mut self, fault: &Fault) {
        self.failed = match fault {
            Fault::Violation(..) => None,
            // It is the one whose answer was awaited.
            Fault::WorkRequest(status) => Some((self.requester.front().and_then(|front| front.sequence), *status)),
            Fault::Terminated(terminate) => terminate.as_ref().and_then(|terminate| self.refused(terminate)),
        };
    }

    /// The work request that the peer refused with a Terminate.
    fn refused(&self, terminate: &Terminate) -> Option<(Option<u64>, WcStatus)> {
        let status = match terminate.cause {
            TerminateCause { layer: Layer::Rdmap, etype: 1, .. } => WcStatus::RemoteAccessError,
            TerminateCause { layer: Layer::Rdmap, etype: 2, .. } => WcStatus::RemoteOperationError,
            _ => return None,
        };
        // The header has 2 control octets, 4 reserved ones, 4 of the queue number and 4 of the MSN, where siw puts the
        // length.
        let header = terminate.quote.as_ref()?.ddp_header();
        if header.get(6..10)? != super::wire::opcode::READ_REQUEST_QUEUE.to_be_bytes() {
            return None;
        }
        let msn = u32::from_be_bytes(*header.get(10..)?.first_chunk()?);
        let sequence = self.requester.find(msn).or_else(|| self.requester.front()?.sequence)?;
        Some((Some(sequence), status))
    }

    #[inline]
    pub(crate) fn has_fault(&self) -> bool {
        self.tx.has_fault()
    }

    /// The fault that was found while sending, if there is one.
    pub(crate) fn take_fault(&mut self) -> Option<Fault> {
        let fault = self.tx.take_fault()?;
        self.failed = match &fault {
            Fault::WorkRequest(status) => Some((None, *status)),
            _ => None,
        };
        Some(fault)
    }

    /// Hands to TCP what there is, and completes work requests.
    #[inline]
    pub(crate) fn transmit(
        &mut self,
        send: &mut impl FnMut(&[SendSlice<'_>]) -> io::Result<usize>,
        resources: &mut Resources,
    ) -> io::Result<Sent> {
        let Self { id, attr, tx, requester, responder, send_unpolled, .. } = self;
        let Resources { cqs, stags, .. } = resources;
        tx.transmit(requester, responder, stags, id.0, send, &mut |done| {
            complete(*id, attr.send_cq, send_unpolled, cqs, done);
        })
    }

    /// Ends the stream. What is left of both queues is flushed, and no memory of the user is used any more. Returns the
    /// bytes that are still to be sent: the FPDUs that were begun, and a Terminate.
    pub(crate) fn end(&mut self, terminate: Option<(TerminateCause, Option<Quote>)>, cqs: &mut Completions) -> Vec<u8> {
        let rest = self.tx.end(terminate);
        self.responder.clear();
        let Self { id, attr, tx, send_unpolled, failed, .. } = self;
        tx.flush(failed.take(), &mut |done| complete(*id, attr.send_cq, send_unpolled, cqs, done));
        while let Some(wr_id) = self.rx.queue.pop() {
            self.flush_recv(cqs, wr_id);
        }
        self.dead = true;
        rest
    }

    /// As [`QueuePair::end`], for a queue pair that is dropped: nothing completes, and there is no Terminate.
    pub(crate) fn abandon(&mut self) -> Vec<u8> {
        self.tx.end(None)
    }

    /// Whether the peer's stream could end here without cutting a message off.
    pub(crate) fn is_at_boundary(&self) -> bool {
        self.rx.is_at_boundary() && self.requester.front().is_none_or(|answered| answered.done == 0)
    }

    #[cfg(test)]
    pub(crate) fn attr(&self) -> &QpAttr {
        &self.attr
    }

    #[cfg(test)]
    pub(crate) fn has_outstanding(&self) -> bool {
        !self.requester.is_idle()
    }
}

/// Whether a completion is of a receive queue.
pub(crate) const fn is_receive(opcode: WcOpcode) -> bool {
    matches!(opcode, WcOpcode::Recv | WcOpcode::RecvWriteWithImmediate)
}

#[inline]
fn complete(qp: QpId, cq: CqId, unpolled: &mut u32, cqs: &mut Completions, done: Done) {
    if done.signaled {
        *unpolled += 1;
        cqs.push(cq, completion(qp, done.wr_id, done.status, done.opcode, done.len));
    }
}

#[inline]
fn received(qp: QpId, message: &Message) -> WorkCompletion {
    let opcode = if message.immediate.is_some() { WcOpcode::RecvWriteWithImmediate } else { WcOpcode::Recv };
    WorkCompletion {
        immediate: message.immediate,
        invalidated: message.invalidated.map(crate::mr::RemoteKey),
        ..completion(qp, message.wr_id, WcStatus::Success, opcode, message.len)
    }
}

#[inline]
fn completion(qp: QpId, wr_id: u64, status: WcStatus, opcode: WcOpcode, byte_len: u32) -> WorkCompletion {
    WorkCompletion {
        wr_id,
        qp,
        status,
        opcode,
        byte_len,
        vendor_error: 0,
        immediate: None,
        invalidated: None,
        source: DatagramSource::default(),
    }
}

#[cfg(test)]
mod tests;
