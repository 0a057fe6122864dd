//! A queue pair on a TCP stream: both directions of the stream, and the work queues.

use std::io;

use super::NAME;
use super::fault::Fault;
use super::intake::Intake;
use super::placement::PlacementContext;
use super::receive::Receiver;
use super::startup::Agreement;
use super::transmit::{Sent, Transmitter};
use super::wire::{Layer, Quote, Terminate, TerminateCause};
use crate::shm::link::QueuePairParts;
use crate::soft::checks;
use crate::soft::completions::{Completions, Done};
use crate::soft::cq::CompletionQueues;
use crate::soft::keys::KeyTable;
use crate::soft::resources::Resources;
use rdma_transport::cm::ReadDepth;
use rdma_transport::mem::{RecvSlice, SendSlice};
use rdma_transport::provider::PostError;
use rdma_transport::qp::{QpAttr, QpId, SrqId};
use rdma_transport::wc::{WcOpcode, WcStatus};
use rdma_transport::wr::{RecvWr, SendWr};

/// The largest depth of a work queue.
pub(crate) const MAX_QUEUE_DEPTH: u32 = 32768;

/// The role of the local side in the handshake. The initiator may send immediately. The responder may send only after a message from the
/// initiator has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Initiator,
    Responder,
}

#[derive(Debug)]
pub(crate) struct QueuePair {
    pub(super) completions: Completions,
    pub(super) rx: Receiver,
    pub(super) tx: Transmitter,
    /// True if the extensions of RFC 7306 are allowed. The caller that sets it has checked that the
    /// peer supports them.
    pub(super) extensions: bool,
    /// The numbers of outstanding Reads that both peers agreed on.
    pub(crate) read_depth: ReadDepth,
    /// True once the stream has started, after the handshake.
    live: bool,
    /// True once the stream has ended. Work requests that are posted afterwards are flushed.
    dead: bool,
}

impl QueuePair {
    /// Creates a queue pair. The caller has checked the attributes.
    pub(crate) fn new(id: QpId, attr: &QpAttr) -> Self {
        Self {
            completions: Completions::new(id, *attr),
            rx: Receiver::new(if attr.srq.is_some() { 1 } else { attr.max_recv_wr as usize }),
            tx: Transmitter::new(attr.max_send_wr as usize, attr.max_inline as usize),
            extensions: false,
            read_depth: ReadDepth::default(),
            live: false,
            dead: false,
        }
    }

    /// Records that a completion was polled. If it is the completion of a receive from a shared receive queue, returns this queue.
    /// Otherwise returns `None`.
    #[inline]
    pub(crate) fn polled(&mut self, opcode: WcOpcode) -> Option<SrqId> {
        self.completions.polled(opcode)
    }

    /// Starts the stream on the agreed terms. An initiator may send immediately, and its ready-to-receive message is framed first. The
    /// sends of a responder are held until [`Transmitter::release`].
    pub(crate) fn establish(&mut self, role: Role, agreement: &Agreement, max_segment: usize) {
        self.rx.establish(agreement.crc);
        self.tx.establish(agreement, max_segment);
        self.read_depth = agreement.read_depth();
        self.live = true;
        if role == Role::Initiator {
            if let Some(rtr) = agreement.rtr {
                self.tx.ready_to_receive(rtr);
            }
            self.tx.release();
        }
    }

    pub(crate) fn post_recv(
        &mut self,
        chain: &[RecvWr],
        cqs: &mut CompletionQueues,
    ) -> std::result::Result<(), PostError> {
        self.completions.post_recv(chain, &mut self.rx.queue, self.dead, cqs)
    }

    /// Posts work requests. The caller must call [`QueuePair::transmit`] afterwards.
    pub(crate) fn post_send(
        &mut self,
        chain: &[SendWr],
        resources: &mut Resources,
    ) -> std::result::Result<(), PostError> {
        let Self { completions, tx, extensions, live, dead, .. } = self;
        let Resources { cqs, keys, .. } = resources;
        let depth = live.then(|| tx.sends.outstanding.depth());
        for (posted, wr) in chain.iter().enumerate() {
            let len = wr.sges.total_len();
            completions
                .check_send_room(tx.sends.len())
                .and_then(|()| {
                    let (attr, extensions) = (&completions.attr, *extensions);
                    checks::send(wr, len, &checks::SendLimits { provider: NAME, attr, extensions, depth, keys })
                })
                .map_err(|error| PostError { posted, error })?;
            if *dead {
                completions.sent(cqs, &Done::flushed(wr.wr_id));
            } else {
                tx.post(wr, len);
            }
        }
        Ok(())
    }

    /// Frames a Send that has no work request, so no completion follows. Returns false, and frames nothing, if the Send is longer than one
    /// small segment ([`Transmitter::frames_at_once`]) or other messages are queued before it. The caller must call [`QueuePair::transmit`]
    /// afterwards, but may frame more messages first.
    #[inline]
    pub(crate) fn send_now(&mut self, header: &[u8], payload: &[u8]) -> bool {
        self.tx.frames_at_once(header.len() + payload.len()) && {
            self.tx.frame_bytes(header, payload);
            true
        }
    }

    /// Makes one receive call. The call receives the rest of the current payload, and at most `room` octets behind that payload. Returns
    /// the number of octets, and true if the socket was drained. The caller passes the octets to [`QueuePair::input`].
    #[inline]
    pub(crate) fn receive(
        &mut self,
        intake: &mut Intake,
        room: usize,
        keys: &KeyTable,
        recv: &mut impl FnMut(&mut [RecvSlice<'_>]) -> io::Result<usize>,
    ) -> io::Result<(usize, bool)> {
        intake.begin(room);
        self.rx.plan(intake, self.completions.attr.srq.is_some(), &self.tx.sends.outstanding);
        intake.receive(self.rx.held(), self.completions.id.0, keys, recv)
    }

    /// Processes the octets of the last receive call. If the stream cannot continue, returns the fault as the error.
    #[inline]
    pub(crate) fn input(
        &mut self,
        intake: &mut Intake,
        bytes: usize,
        resources: &mut Resources,
    ) -> std::result::Result<(), Fault> {
        // The shared receive queue is moved out of `resources`, so that the queue and the other resources can be borrowed at the same time.
        let srq = self.completions.attr.srq;
        let mut shared = resources.take_out(srq);
        let Self { completions, rx, tx, extensions, .. } = self;
        let Resources { cqs, keys, .. } = &mut *resources;
        let answered = tx.sends.outstanding.answered();
        let mut cx = PlacementContext {
            scope: completions.id.0,
            keys,
            srq: shared.as_mut(),
            outstanding: &mut tx.sends.outstanding,
            responses: &mut tx.responses,
            extensions: *extensions,
        };
        let result = rx.take(intake, bytes, &mut cx, &mut |message| completions.received(cqs, &message));
        if tx.sends.outstanding.answered() != answered {
            tx.reap(&mut |done| completions.sent(cqs, &done));
        }
        resources.put_back(srq, shared);
        if let Err(fault) = &result {
            self.record_failure(fault);
        }
        result
    }

    /// Records the work request that has caused the fault, if any, and its status.
    /// [`QueuePair::end`] completes the work request with this status.
    fn record_failure(&mut self, fault: &Fault) {
        let failed = match fault {
            Fault::Violation(..) => None,
            // In received data, only the placement of a response can fail a local work request. So
            // the oldest work request with an incomplete response has failed.
            Fault::WorkRequest(status) => Some((self.tx.sends.outstanding.oldest(), *status)),
            Fault::Terminated(terminate) => terminate.as_ref().and_then(|terminate| self.refused(terminate)),
        };
        if let Some((sequence, status)) = failed {
            self.tx.sends.fail(sequence, status);
        }
    }

    /// Returns the sequence number and the status of the work request that the peer has refused with this Terminate. Returns `None` if the
    /// Terminate refers to no Read or atomic operation.
    fn refused(&self, terminate: &Terminate) -> Option<(Option<u64>, WcStatus)> {
        let status = match terminate.cause {
            TerminateCause { layer: Layer::Rdmap, etype: 1, .. } => WcStatus::RemoteAccessError,
            TerminateCause { layer: Layer::Rdmap, etype: 2, .. } => WcStatus::RemoteOperationError,
            _ => return None,
        };
        // The quoted header has 2 control octets, 4 reserved octets, 4 octets with the queue number and 4 octets with the MSN. siw puts a
        // length in place of the MSN.
        let header = terminate.quote.as_ref()?.ddp_header();
        if header.get(6..10)? != super::wire::opcode::READ_REQUEST_QUEUE.to_be_bytes() {
            return None;
        }
        let msn = u32::from_be_bytes(*header.get(10..)?.first_chunk()?);
        let outstanding = &self.tx.sends.outstanding;
        let sequence = outstanding.find(msn).or_else(|| outstanding.oldest())?;
        Some((Some(sequence), status))
    }

    /// Removes and returns the fault that was found while framing. Returns `None` if no fault was found.
    pub(crate) fn take_fault(&mut self) -> Option<Fault> {
        let fault = self.tx.take_fault()?;
        if let Fault::WorkRequest(status) = fault {
            self.tx.sends.fail(None, status);
        }
        Some(fault)
    }

    /// Frames messages, hands the output to TCP, and completes work requests.
    #[inline]
    pub(crate) fn transmit(
        &mut self,
        send: &mut impl FnMut(&[SendSlice<'_>]) -> io::Result<usize>,
        resources: &mut Resources,
    ) -> io::Result<Sent> {
        let Self { completions, tx, .. } = self;
        let Resources { cqs, keys, .. } = resources;
        let scope = completions.id.0;
        tx.transmit(keys, scope, send, &mut |done| completions.sent(cqs, &done))
    }

    /// Ends the stream. Flushes the work requests of both work queues. After this call, the queue pair no longer uses memory of the
    /// program. Returns the bytes that are still to be sent: framed FPDUs, and the Terminate if one is given.
    pub(crate) fn end(
        &mut self,
        terminate: Option<(TerminateCause, Option<Quote>)>,
        cqs: &mut CompletionQueues,
    ) -> Vec<u8> {
        let rest = self.tx.end(terminate);
        let Self { completions, rx, tx, .. } = self;
        tx.sends.flush(&mut |done| completions.sent(cqs, &done));
        completions.flush_receives(&mut rx.queue, cqs);
        self.dead = true;
        rest
    }

    /// Takes the queue pair apart when the connection moves to shared memory. Returns the parts that the connection continues to use. No
    /// message may have been sent or received on the stream before.
    pub(crate) fn leave(self) -> QueuePairParts {
        QueuePairParts {
            sends: self.tx.sends,
            completions: self.completions,
            receives: self.rx.queue,
            extensions: self.extensions,
        }
    }

    /// Ends the stream of a queue pair that is destroyed. Adds no completions and sends no Terminate. Returns the framed bytes that are
    /// still to be sent.
    pub(crate) fn abandon(&mut self) -> Vec<u8> {
        self.tx.end(None)
    }

    /// Returns true if no message of the peer is partly received. If the stream ends in the middle of a message, the stream is truncated.
    pub(crate) fn is_at_boundary(&self) -> bool {
        self.rx.is_at_boundary() && self.tx.sends.outstanding.front().is_none_or(|request| request.done == 0)
    }

    #[cfg(test)]
    pub(crate) fn attr(&self) -> &QpAttr {
        &self.completions.attr
    }

    #[cfg(test)]
    pub(crate) fn has_outstanding(&self) -> bool {
        !self.tx.sends.outstanding.is_idle()
    }
}

#[cfg(test)]
mod tests;
