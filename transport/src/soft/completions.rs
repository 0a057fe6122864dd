//! The completions of a queue pair: of work requests, and of receives that messages have filled. Unpolled completions count towards the
//! depth of the work queues.

use super::cq::CompletionQueues;
use super::receive_queue::{ReceiveQueue, ReceivedMessage};
use super::resources::Resources;
use crate::datagram::DatagramSource;
use crate::error::{Error, Result};
use crate::mr::RemoteKey;
use crate::provider::PostError;
use crate::qp::{QpAttr, QpId, SrqId};
use crate::wc::{WcOpcode, WcStatus, WorkCompletion};
use crate::wr::{RecvWr, SendClass, SendFlags};

/// Length of the operand of an atomic operation, bytes.
pub(crate) const ATOMIC_LEN: u32 = 8;

/// A completed work request of the send queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) wr_id: u64,
    pub(crate) status: WcStatus,
    pub(crate) opcode: WcOpcode,
    pub(crate) len: u32,
    pub(crate) signaled: bool,
}

impl Done {
    /// Creates the successful completion of a work request with this number, class, flags and length, bytes.
    #[inline]
    pub(crate) fn of(wr_id: u64, class: SendClass, flags: SendFlags, len: usize) -> Self {
        let (opcode, len) = match class {
            SendClass::Send => (WcOpcode::Send, 0),
            SendClass::Write => (WcOpcode::Write, 0),
            SendClass::Read => (WcOpcode::Read, len as u32),
            SendClass::Atomic => (WcOpcode::Atomic, ATOMIC_LEN),
        };
        Self { wr_id, status: WcStatus::Success, opcode, len, signaled: flags.contains(SendFlags::SIGNALED) }
    }

    /// Creates the completion of a work request that was posted after the end of its connection.
    pub(crate) const fn flushed(wr_id: u64) -> Self {
        Self { wr_id, status: WcStatus::Flushed, opcode: WcOpcode::Send, len: 0, signaled: true }
    }
}

/// The completions of one queue pair.
#[derive(Debug)]
pub(crate) struct Completions {
    pub(crate) id: QpId,
    pub(crate) attr: QpAttr,
    /// The number of unpolled completions.
    send_unpolled: u32,
    recv_unpolled: u32,
}

impl Completions {
    pub(crate) const fn new(id: QpId, attr: QpAttr) -> Self {
        Self { id, attr, send_unpolled: 0, recv_unpolled: 0 }
    }

    /// Checks that a send queue with `queued` work requests has room for another one.
    #[inline]
    pub(crate) fn check_send_room(&self, queued: usize) -> Result<()> {
        let depth = self.attr.max_send_wr;
        if queued + self.send_unpolled as usize >= depth as usize {
            return Err(Error::QueueFull { queue: "send", depth });
        }
        Ok(())
    }

    /// Checks that a receive queue with `queued` work requests has room for another one.
    #[inline]
    pub(crate) fn check_recv_room(&self, queued: usize) -> Result<()> {
        let depth = self.attr.max_recv_wr;
        if queued + self.recv_unpolled as usize >= depth as usize {
            return Err(Error::QueueFull { queue: "receive", depth });
        }
        Ok(())
    }

    /// Posts receives to the queue pair's own queue, or flushes them if its connection has ended.
    #[inline]
    pub(crate) fn post_recv(
        &mut self,
        chain: &[RecvWr],
        queue: &mut ReceiveQueue,
        dead: bool,
        cqs: &mut CompletionQueues,
    ) -> std::result::Result<(), PostError> {
        for (posted, wr) in chain.iter().enumerate() {
            if self.attr.srq.is_some() {
                let error = Error::InvalidState { call: "post_recv", state: "using a shared receive queue" };
                return Err(PostError { posted, error });
            }
            self.check_recv_room(queue.len()).map_err(|error| PostError { posted, error })?;
            if dead {
                self.receive_done(cqs, wr.wr_id, WcStatus::Flushed, 0);
            } else {
                queue.post(*wr);
            }
        }
        Ok(())
    }

    /// Completes a work request, unless it is unsignaled.
    #[inline]
    pub(crate) fn sent(&mut self, cqs: &mut CompletionQueues, done: &Done) {
        if done.signaled {
            self.send_unpolled += 1;
            let completion = WorkCompletion::new(self.id, done.wr_id, done.opcode, done.status, done.len);
            cqs.push(self.attr.send_cq, completion);
        }
    }

    /// Completes the receive that a message has filled.
    #[inline]
    pub(crate) fn received(&mut self, cqs: &mut CompletionQueues, message: &ReceivedMessage) {
        self.recv_unpolled += 1;
        let opcode = if message.immediate.is_some() { WcOpcode::RecvWriteWithImmediate } else { WcOpcode::Recv };
        let completion = WorkCompletion::new(self.id, message.wr_id, opcode, WcStatus::Success, message.len);
        let (immediate, invalidated) = (message.immediate, message.invalidated.map(RemoteKey));
        cqs.push(self.attr.recv_cq, WorkCompletion { immediate, invalidated, ..completion });
    }

    /// Completes the receive that a datagram has filled.
    #[inline]
    pub(crate) fn received_datagram(
        &mut self,
        cqs: &mut CompletionQueues,
        wr_id: u64,
        len: u32,
        immediate: Option<u32>,
        source: DatagramSource,
    ) {
        self.recv_unpolled += 1;
        let completion = WorkCompletion::new(self.id, wr_id, WcOpcode::Recv, WcStatus::Success, len);
        cqs.push(self.attr.recv_cq, WorkCompletion { immediate, source, ..completion });
    }

    /// Flushes the remaining receives.
    pub(crate) fn flush_receives(&mut self, queue: &mut ReceiveQueue, cqs: &mut CompletionQueues) {
        while let Some(wr_id) = queue.pop() {
            self.receive_done(cqs, wr_id, WcStatus::Flushed, 0);
        }
    }

    /// Completes a receive with a status and a length.
    pub(crate) fn receive_done(&mut self, cqs: &mut CompletionQueues, wr_id: u64, status: WcStatus, len: u32) {
        self.recv_unpolled += 1;
        cqs.push(self.attr.recv_cq, WorkCompletion::new(self.id, wr_id, WcOpcode::Recv, status, len));
    }

    /// Records a polled completion. Returns the shared queue that its receive was taken from, if any.
    #[inline]
    pub(crate) fn polled(&mut self, opcode: WcOpcode) -> Option<SrqId> {
        if opcode.is_receive() {
            self.recv_unpolled = self.recv_unpolled.saturating_sub(1);
            self.attr.srq
        } else {
            self.send_unpolled = self.send_unpolled.saturating_sub(1);
            None
        }
    }

    /// Releases the queue pair's room on its completion queues, except for unpolled completions. A partly filled receive of a shared queue
    /// returns to that queue.
    pub(crate) fn release(&self, queue: &mut ReceiveQueue, resources: &mut Resources) {
        self.release_room(&mut resources.cqs);
        if let Some(srq) = self.attr.srq {
            resources.detach(srq, self.attr.recv_cq, self.id, queue.take_all(), self.recv_unpolled);
        }
    }

    /// As [`Completions::release`], without the objects that are shared with other queue pairs.
    pub(crate) fn release_room(&self, cqs: &mut CompletionQueues) {
        let Self { attr, send_unpolled, recv_unpolled, .. } = self;
        cqs.release(attr.send_cq, attr.max_send_wr, *send_unpolled);
        if attr.srq.is_none() {
            cqs.release(attr.recv_cq, attr.max_recv_wr, *recv_unpolled);
        }
    }
}
