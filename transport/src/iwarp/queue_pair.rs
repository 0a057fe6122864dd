//! A queue pair: both directions of one stream, and the rules of its work queues.

use std::io;

use super::NAME;
use super::fault::Fault;
use super::intake::Intake;
use super::placement::Context;
use super::receive::Receiver;
use super::requester::Requester;
use super::responder::Responder;
use super::startup::Agreement;
use super::transmit::{Sent, Transmitter};
use super::wire::{Layer, Quote, Terminate, TerminateCause};
use crate::cm::ReadDepth;
use crate::mem::{RecvSlice, SendSlice, Sge};
use crate::provider::PostError;
use crate::qp::{QpAttr, QpId, SrqId};
use crate::shm::link::QueuePairParts;
use crate::soft::checks;
use crate::soft::completions::{Completions, Done};
use crate::soft::cq::CompletionQueues;
use crate::soft::keys::KeyTable;
use crate::soft::resources::Resources;
use crate::wc::{WcOpcode, WcStatus};
use crate::wr::{RecvWr, RemoteAddress, SendWr};

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
    completions: Completions,
    rx: Receiver,
    tx: Transmitter,
    requester: Requester,
    responder: Responder,
    extensions: bool,
    /// What both sides agreed on.
    pub(crate) read_depth: ReadDepth,
    /// Whether the stream has begun.
    live: bool,
    /// The status of the work request that ended the stream, and its number in the send queue if that is known.
    failed: Option<(Option<u64>, WcStatus)>,
    /// Whether the stream has ended: then work requests are flushed at once.
    dead: bool,
}

impl QueuePair {
    /// The queue pair of attributes that were checked.
    pub(crate) fn new(id: QpId, attr: &QpAttr) -> Self {
        Self {
            completions: Completions::new(id, *attr),
            rx: Receiver::new(if attr.srq.is_some() { 1 } else { attr.max_recv_wr as usize }),
            tx: Transmitter::new(attr.max_send_wr as usize, attr.max_inline as usize),
            requester: Requester::new(),
            responder: Responder::new(),
            extensions: false,
            read_depth: ReadDepth::default(),
            live: false,
            failed: None,
            dead: false,
        }
    }

    /// Takes note of a polled completion. Returns the shared queue that its receive came from, if it did.
    #[inline]
    pub(crate) fn polled(&mut self, opcode: WcOpcode) -> Option<SrqId> {
        self.completions.polled(opcode)
    }

    /// Gives up the queue pair's room on its completion queues, except for completions that were not polled. A receive
    /// of a shared queue that was being filled goes back to that queue.
    pub(crate) fn release_queues(&mut self, resources: &mut Resources) {
        self.completions.release(&mut self.rx.queue, resources);
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

    pub(crate) fn post_recv(
        &mut self,
        chain: &[RecvWr],
        cqs: &mut CompletionQueues,
    ) -> std::result::Result<(), PostError> {
        self.completions.post_recv(chain, &mut self.rx.queue, self.dead, cqs)
    }

    /// Queues work requests. The caller calls [`QueuePair::transmit`] afterwards.
    pub(crate) fn post_send(
        &mut self,
        chain: &[SendWr],
        resources: &mut Resources,
    ) -> std::result::Result<(), PostError> {
        let Self { completions, tx, requester, responder, extensions, live, dead, .. } = self;
        let Resources { cqs, keys, .. } = resources;
        let depth = live.then(|| requester.depth());
        for (posted, wr) in chain.iter().enumerate() {
            let len = wr.sges.total_len();
            completions
                .check_send_room(tx.queued())
                .and_then(|()| {
                    let (attr, extensions) = (&completions.attr, *extensions);
                    checks::send(wr, len, &checks::Terms { provider: NAME, attr, extensions, depth, keys })
                })
                .map_err(|error| PostError { posted, error })?;
            if *dead {
                completions.sent(cqs, &Done::flushed(wr.wr_id));
            } else {
                tx.post(wr, len, requester, responder);
            }
        }
        Ok(())
    }

    /// Frames a message that ends with this call, if it is small and nothing is in front of it. The caller calls
    /// [`QueuePair::transmit`] afterwards, at once or later.
    #[inline]
    pub(crate) fn send_now(&mut self, header: &[u8], payload: &[u8]) -> bool {
        self.tx.frames_at_once(header.len() + payload.len(), &self.responder) && {
            self.tx.frame_bytes(header, payload);
            true
        }
    }

    /// Frames a Write that ends with this call, as [`QueuePair::send_now`] does a message.
    #[inline]
    pub(crate) fn write_now(&mut self, local: &Sge, remote: &RemoteAddress) -> bool {
        self.tx.frame_write_now(local, remote, &self.responder)
    }

    /// Makes a receive call, which brings at most `room` octets besides the rest of a payload that has begun. Returns the number of
    /// octets, and whether the socket had no more. They are taken by [`QueuePair::input`].
    #[inline]
    pub(crate) fn receive(
        &mut self,
        intake: &mut Intake,
        room: usize,
        keys: &KeyTable,
        recv: &mut impl FnMut(&mut [RecvSlice<'_>]) -> io::Result<usize>,
    ) -> io::Result<(usize, bool)> {
        intake.begin(room);
        self.rx.plan(intake, self.completions.attr.srq.is_some(), &self.requester);
        intake.receive(self.rx.held(), self.completions.id.0, keys, recv)
    }

    /// Takes the octets of a receive call.
    #[inline]
    pub(crate) fn input(
        &mut self,
        intake: &mut Intake,
        octets: usize,
        resources: &mut Resources,
    ) -> std::result::Result<(), Fault> {
        // The shared queue is taken out of its table while this queue pair uses it.
        let srq = self.completions.attr.srq;
        let mut shared = resources.take_out(srq);
        let Self { completions, rx, tx, requester, responder, extensions, .. } = self;
        let Resources { cqs, keys, .. } = &mut *resources;
        let answered = requester.answered();
        let mut cx = Context {
            scope: completions.id.0,
            keys,
            srq: shared.as_mut(),
            requester: &mut *requester,
            responder,
            extensions: *extensions,
        };
        let result = rx.take(intake, octets, &mut cx, &mut |message| completions.received(cqs, &message));
        if requester.answered() != answered {
            tx.reap(requester, &mut |done| completions.sent(cqs, &done));
        }
        resources.put_back(srq, shared);
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
        let Self { completions, tx, requester, responder, .. } = self;
        let Resources { cqs, keys, .. } = resources;
        let scope = completions.id.0;
        tx.transmit(requester, responder, keys, scope, send, &mut |done| completions.sent(cqs, &done))
    }

    /// Ends the stream. What is left of both queues is flushed, and no memory of the user is used any more. Returns the
    /// bytes that are still to be sent: the FPDUs that were begun, and a Terminate.
    pub(crate) fn end(
        &mut self,
        terminate: Option<(TerminateCause, Option<Quote>)>,
        cqs: &mut CompletionQueues,
    ) -> Vec<u8> {
        let rest = self.tx.end(terminate);
        self.responder.clear();
        let Self { completions, rx, tx, failed, .. } = self;
        tx.flush(failed.take(), &mut |done| completions.sent(cqs, &done));
        completions.flush_receives(&mut rx.queue, cqs);
        self.dead = true;
        rest
    }

    /// What the queue pair takes along when its connection leaves the stream, of which nothing was used.
    pub(crate) fn leave(mut self) -> QueuePairParts {
        QueuePairParts {
            sends: self.tx.leave(),
            completions: self.completions,
            receives: self.rx.queue,
            extensions: self.extensions,
        }
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
        &self.completions.attr
    }

    #[cfg(test)]
    pub(crate) fn has_outstanding(&self) -> bool {
        !self.requester.is_idle()
    }
}

#[cfg(test)]
mod tests;
