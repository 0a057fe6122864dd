//! The send queue and the receive queue of a queue pair whose sends complete while they are posted.

use super::completions::{Completions, Done};
use super::cq::CompletionQueues;
use super::receive_queue::ReceiveQueue;
use rdma_transport::caps::Capabilities;
use rdma_transport::error::{Result, TransportError};
use rdma_transport::mem::EntryAccess;
use rdma_transport::qp::{QpAttr, QpId};
use rdma_transport::wc::{WcOpcode, WcStatus};
use rdma_transport::wr::{RecvWr, SendFlags, SendWr};

/// The send queue and the receive queue of a queue pair whose sends complete while they are posted. The send queue therefore stores no work
/// requests, and only counts unpolled completions.
#[derive(Debug)]
pub struct WorkQueues {
    completions: Completions,
    receives: ReceiveQueue,
}

impl WorkQueues {
    /// Checks the attributes, and reserves entries on the completion queues for both work queues.
    /// Shared receive queues are not supported. The [`EntryAccess`] shows that the provider may use
    /// the entries of posted work requests.
    ///
    /// # Errors
    /// Returns an error, and reserves no entries, if a depth or a size is out of range, or if a completion queue does not exist or
    /// is too small.
    pub fn new(
        qp: QpId,
        attr: &QpAttr,
        limits: &Capabilities,
        cqs: &mut CompletionQueues,
        _: EntryAccess,
    ) -> Result<Self> {
        attr.check(limits)?;
        let QpAttr { send_cq, recv_cq, max_send_wr, max_recv_wr, .. } = *attr;
        cqs.reserve(send_cq, max_send_wr)?;
        cqs.reserve(recv_cq, max_recv_wr).inspect_err(|_| cqs.release(send_cq, max_send_wr, 0))?;
        Ok(Self { completions: Completions::new(qp, *attr), receives: ReceiveQueue::new(max_recv_wr as usize) })
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// Returns an error if the queue is full.
    pub fn post_recv(&mut self, wr: &RecvWr) -> Result<()> {
        self.completions.check_recv_room(self.receives.len())?;
        self.receives.post(*wr);
        Ok(())
    }

    /// Checks that a send may be posted. After the check, the provider carries out the send and calls [`WorkQueues::send_done`].
    ///
    /// # Errors
    /// Returns an error if the queue is full, or if the message of an inline send is too long.
    pub fn check_send(&self, wr: &SendWr) -> Result<()> {
        self.completions.check_send_room(0)?;
        let max_inline = self.completions.attr.max_inline;
        if wr.flags.contains(SendFlags::INLINE) && wr.sges.total_len() > max_inline as usize {
            let (what, value) = ("inline length", wr.sges.total_len() as u64);
            return Err(TransportError::OutOfRange { what, value, range: "at most the max_inline of the queue pair" });
        }
        Ok(())
    }

    /// Completes a send with `status`. A send that is unsignaled and successful adds no completion.
    pub fn send_done(&mut self, wr: &SendWr, status: WcStatus, byte_len: u32, cqs: &mut CompletionQueues) {
        let done = Done::of(wr.wr_id, wr.op.class(), wr.flags, 0);
        let signaled = done.signaled || !status.is_success();
        self.completions.sent(cqs, &Done { status, len: byte_len, signaled, ..done });
    }

    /// Copies a message to the first posted receive, and completes the receive.
    ///
    /// # Errors
    /// Returns the status with which the caller completes the send. It is `ReceiverNotReady` if no receive is posted. It is
    /// `RemoteOperationError` if the receive is too short. In that case, the receive completes with an error, too.
    pub fn deliver(&mut self, message: &[u8], cqs: &mut CompletionQueues) -> std::result::Result<(), WcStatus> {
        let fits = message.len() <= self.receives.room(&mut None).ok_or(WcStatus::ReceiverNotReady)?;
        if fits {
            self.receives.fill(message);
        }
        let Some((wr_id, byte_len)) = self.receives.complete() else { return Err(WcStatus::ReceiverNotReady) };
        let status = if fits { WcStatus::Success } else { WcStatus::LocalLengthError };
        self.completions.receive_done(cqs, wr_id, status, byte_len);
        if fits { Ok(()) } else { Err(WcStatus::RemoteOperationError) }
    }

    /// Flushes the receives. The provider calls this at the end of the connection, and again after each receive that is posted later.
    pub fn flush(&mut self, cqs: &mut CompletionQueues) {
        self.completions.flush_receives(&mut self.receives, cqs);
    }

    /// Records that a completion of this queue pair was polled, which releases an entry of its work queue.
    pub fn polled(&mut self, opcode: WcOpcode) {
        self.completions.polled(opcode);
    }

    /// Drops the work queues with the posted receives, and releases their entries on the completion queues. An unpolled completion keeps
    /// its entry. When the completion is polled, the provider calls [`CompletionQueues::release_orphan`].
    pub fn release(self, cqs: &mut CompletionQueues) {
        self.completions.release_room(cqs);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entries::ENTRIES;
    use rdma_transport::caps::Features;
    use rdma_transport::slab::Key;
    use rdma_transport::wr::{SendOp, SgeList};

    fn send(wr_id: u64, flags: SendFlags) -> SendWr {
        SendWr { wr_id, op: SendOp::Send, sges: SgeList::default(), flags }
    }

    #[test]
    fn room_counts_until_a_completion_is_polled_and_comes_back_once() {
        let (limits, mut cqs) = (Capabilities::portable(Features::empty()), CompletionQueues::default());
        let cq = cqs.create(3);
        let attr = QpAttr::new(cq, cq, 1, 2);
        assert!(
            WorkQueues::new(QpId(Key::NONE), &QpAttr { max_recv_wr: 3, ..attr }, &limits, &mut cqs, ENTRIES).is_err()
        );
        let mut queues = WorkQueues::new(QpId(Key::NONE), &attr, &limits, &mut cqs, ENTRIES).unwrap();
        let receive = |wr_id| RecvWr { wr_id, sges: SgeList::default() };
        assert_eq!(queues.deliver(&[], &mut cqs), Err(WcStatus::ReceiverNotReady));
        (0..2).for_each(|wr_id| queues.post_recv(&receive(wr_id)).unwrap());
        assert_eq!(queues.deliver(&[1], &mut cqs), Err(WcStatus::RemoteOperationError));
        queues.send_done(&send(7, SendFlags::empty()), WcStatus::Success, 0, &mut cqs);
        queues.check_send(&send(8, SendFlags::SIGNALED)).unwrap();
        queues.send_done(&send(8, SendFlags::SIGNALED), WcStatus::Success, 0, &mut cqs);
        assert!(matches!(queues.check_send(&send(9, SendFlags::SIGNALED)), Err(TransportError::QueueFull { .. })));
        assert!(matches!(queues.post_recv(&receive(2)), Err(TransportError::QueueFull { .. })));
        queues.flush(&mut cqs);
        let mut polled = Vec::new();
        cqs.poll(cq, 2, &mut polled).unwrap();
        assert_eq!(
            polled.iter().map(|wc| (wc.wr_id, wc.status)).collect::<Vec<_>>(),
            [(0, WcStatus::LocalLengthError), (8, WcStatus::Success)]
        );
        polled.iter().for_each(|wc| queues.polled(wc.opcode));
        queues.check_send(&send(9, SendFlags::SIGNALED)).unwrap();
        queues.release(&mut cqs);
        assert!(cqs.reserve(cq, 3).is_err());
        cqs.poll(cq, 1, &mut polled).unwrap();
        cqs.release_orphan(cq);
        cqs.reserve(cq, 3).unwrap();
    }
}
