//! The completions of a queue pair: of its sends and its receives. A work request occupies its entry of the work queue until its completion
//! is polled.

use super::cq::CompletionQueues;
use super::receive_queue::{ReceiveQueue, ReceivedMessage};
use super::resources::Resources;
use rdma_transport::datagram::DatagramSource;
use rdma_transport::error::{Result, TransportError};
use rdma_transport::mr::RemoteKey;
use rdma_transport::provider::PostError;
use rdma_transport::qp::{QpAttr, QpId, SrqId};
use rdma_transport::wc::{WcOpcode, WcStatus, WorkCompletion};
use rdma_transport::wr::{RecvWr, SendClass, SendFlags};

/// The length in bytes of the value that an atomic operation returns.
pub(crate) const ATOMIC_LEN: u32 = 8;

/// The completion of a work request of the send queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) wr_id: u64,
    pub(crate) status: WcStatus,
    pub(crate) opcode: WcOpcode,
    pub(crate) len: u32,
    pub(crate) signaled: bool,
}

impl Done {
    /// Creates the completion of a successful work request. `len` is the length of its data in bytes.
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

    /// Creates the completion of a work request that is flushed at or after the end of its connection.
    pub(crate) const fn flushed(wr_id: u64) -> Self {
        Self { wr_id, status: WcStatus::Flushed, opcode: WcOpcode::Send, len: 0, signaled: true }
    }
}

/// Adds the completions of one queue pair to its completion queues, and counts the unpolled ones.
#[derive(Debug)]
pub(crate) struct Completions {
    pub(crate) id: QpId,
    pub(crate) attr: QpAttr,
    /// `send_unpolled` is the number of send completions that are not polled yet. `recv_unpolled` is the number of receive completions that
    /// are not polled yet.
    send_unpolled: u32,
    recv_unpolled: u32,
}

impl Completions {
    pub(crate) const fn new(id: QpId, attr: QpAttr) -> Self {
        Self { id, attr, send_unpolled: 0, recv_unpolled: 0 }
    }

    /// Checks that another work request can be posted to the send queue. `queued` is the number of posted sends that are not completed.
    #[inline]
    pub(crate) fn check_send_room(&self, queued: usize) -> Result<()> {
        let depth = self.attr.max_send_wr;
        if queued + self.send_unpolled as usize >= depth as usize {
            return Err(TransportError::QueueFull { queue: "send", depth });
        }
        Ok(())
    }

    /// Checks that another receive can be posted to the receive queue. `queued` is the number of posted receives that are not completed.
    #[inline]
    pub(crate) fn check_recv_room(&self, queued: usize) -> Result<()> {
        let depth = self.attr.max_recv_wr;
        if queued + self.recv_unpolled as usize >= depth as usize {
            return Err(TransportError::QueueFull { queue: "receive", depth });
        }
        Ok(())
    }

    /// Posts receives to the queue pair's own receive queue. If the connection has ended (`dead`), flushes them instead.
    ///
    /// # Errors
    /// Returns an error if the queue pair uses a shared receive queue, or if its own receive queue is full. The error contains the
    /// number of receives that were posted before the refused one.
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
                let error = TransportError::InvalidState { call: "post_recv", state: "using a shared receive queue" };
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

    /// Adds the completion of a send, unless the send is unsignaled.
    #[inline]
    pub(crate) fn sent(&mut self, cqs: &mut CompletionQueues, done: &Done) {
        if done.signaled {
            self.send_unpolled += 1;
            let completion = WorkCompletion::new(self.id, done.wr_id, done.opcode, done.status, done.len);
            cqs.push(self.attr.send_cq, completion);
        }
    }

    /// Adds the completion of the receive that a message has filled.
    #[inline]
    pub(crate) fn received(&mut self, cqs: &mut CompletionQueues, message: &ReceivedMessage) {
        self.recv_unpolled += 1;
        let opcode = if message.immediate.is_some() { WcOpcode::RecvWriteWithImmediate } else { WcOpcode::Recv };
        let completion = WorkCompletion::new(self.id, message.wr_id, opcode, WcStatus::Success, message.len);
        let (immediate, invalidated) = (message.immediate, message.invalidated.map(RemoteKey));
        cqs.push(self.attr.recv_cq, WorkCompletion { immediate, invalidated, ..completion });
    }

    /// Adds the completion of the receive that a datagram has filled.
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

    /// Flushes the receives that no message has filled.
    pub(crate) fn flush_receives(&mut self, queue: &mut ReceiveQueue, cqs: &mut CompletionQueues) {
        while let Some(wr_id) = queue.pop() {
            self.receive_done(cqs, wr_id, WcStatus::Flushed, 0);
        }
    }

    /// Adds the completion of a receive, with this status and length.
    pub(crate) fn receive_done(&mut self, cqs: &mut CompletionQueues, wr_id: u64, status: WcStatus, len: u32) {
        self.recv_unpolled += 1;
        cqs.push(self.attr.recv_cq, WorkCompletion::new(self.id, wr_id, WcOpcode::Recv, status, len));
    }

    /// Records that a completion was polled. If it is the completion of a receive from a shared receive queue, returns this queue.
    /// Otherwise returns `None`.
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

    /// Releases the queue pair's entries on its completion queues, except the entries of unpolled completions. Returns receives to the
    /// shared receive queue if the queue pair has taken them from there and not completed them.
    pub(crate) fn release(&self, queue: &mut ReceiveQueue, resources: &mut Resources) {
        self.release_room(&mut resources.cqs);
        if let Some(srq) = self.attr.srq {
            resources.detach(srq, self.attr.recv_cq, self.id, queue.take_all(), self.recv_unpolled);
        }
    }

    /// Releases the queue pair's entries on its completion queues, except the entries of unpolled completions. The entries for receives
    /// from a shared receive queue stay reserved.
    pub(crate) fn release_room(&self, cqs: &mut CompletionQueues) {
        let Self { attr, send_unpolled, recv_unpolled, .. } = self;
        cqs.release(attr.send_cq, attr.max_send_wr, *send_unpolled);
        if attr.srq.is_none() {
            cqs.release(attr.recv_cq, attr.max_recv_wr, *recv_unpolled);
        }
    }
}
