//! A model of the queue pair of a device, and of the wire to the peer.

use std::collections::VecDeque;
use std::sync::Arc;

use rdma_transport::cm::DisconnectCause;
use rdma_transport::mem::{Memory, Sge};
use rdma_transport::wc::WcStatus;
use rdma_transport::wr::{RecvWr, SendFlags, SendOp, SendWr};

use crate::conn::recv_queue::Completed;
use crate::id::WorkRequestId;
use crate::memory::region::RemoteRegion;

/// The longest message in one buffer, in bytes.
const LONGEST: usize = 64;

/// The bytes of one message in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct WireBytes {
    bytes: [u8; LONGEST],
    len: usize,
}

impl WireBytes {
    pub(super) fn of(bytes: &[u8]) -> Self {
        let mut copy = [0; LONGEST];
        let len = bytes.len().min(LONGEST);
        copy[..len].copy_from_slice(&bytes[..len]);
        Self { bytes: copy, len }
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// An item in flight from one device to the other. Items arrive in the order of sending.
#[derive(Clone, Copy, Debug)]
pub(super) enum Item {
    Message(WireBytes),
    Write,
    WriteWithImmediate {
        value: u32,
        len: u32,
    },
    /// A Read or an atomic operation, which the peer answers with a `Response`.
    Request,
    Response,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SendProgress {
    Posted,
    OnTheWire,
    /// The peer has answered, or the send needs no answer.
    Done,
}

#[derive(Debug)]
struct Send {
    sequence: u16,
    op: SendOp,
    signaled: bool,
    fenced: bool,
    progress: SendProgress,
    sges: rdma_transport::wr::SgeList,
}

impl Send {
    /// Returns true if the send ends only when an answer of the peer arrives.
    const fn is_answered(&self) -> bool {
        matches!(self.op, SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. })
    }
}

/// An entry of the completion queue.
#[derive(Clone, Copy, Debug)]
pub(super) enum Completion {
    Send { sequence: u16, status: WcStatus },
    Receive { slot: u16, completed: Completed },
}

/// A model of one side's queue pair, and of the items in flight to the peer.
#[derive(Debug)]
pub(super) struct DeviceModel {
    /// The memory of the side's buffer pool.
    memory: Arc<Memory>,
    /// True if all sends complete in order, Reads included, as on InfiniBand. On siw, a send may complete before a Read that was posted
    /// earlier.
    in_order: bool,
    /// True if the queue pair uses a shared receive queue.
    shared: bool,
    /// True if a disconnect of the local side discards everything that is in flight to the peer.
    pub(super) abrupt: bool,
    /// True if the queue pair can send and receive.
    pub(super) up: bool,
    sends: VecDeque<Send>,
    /// The posted receives, each with its slot in the shared queue and its memory.
    receives: VecDeque<(u16, Sge)>,
    pub(super) completions: VecDeque<Completion>,
    /// The items in flight to the peer.
    pub(super) wire: VecDeque<Item>,
    /// The connection manager's event that the connection has ended. It is delivered after the items that the peer sent before the end.
    pub(super) end_event: Option<DisconnectCause>,
    /// The number of Writes of the peer that were placed in memory.
    pub(super) placed: u32,
    /// True if this device answers the peer's Reads.
    pub(super) answers: bool,
}

impl DeviceModel {
    pub(super) const fn new(memory: Arc<Memory>, in_order: bool, shared: bool) -> Self {
        Self {
            memory,
            in_order,
            shared,
            abrupt: false,
            up: true,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            completions: VecDeque::new(),
            wire: VecDeque::new(),
            end_event: None,
            placed: 0,
            answers: true,
        }
    }

    pub(super) fn post_sends(&mut self, chain: &[SendWr]) {
        for wr in chain {
            let WorkRequestId::Send { sequence, .. } = WorkRequestId::of(wr.wr_id) else {
                panic!("{wr:?} is not a send")
            };
            let (signaled, fenced) = (wr.flags.contains(SendFlags::SIGNALED), wr.flags.contains(SendFlags::FENCE));
            let progress = SendProgress::Posted;
            self.sends.push_back(Send { sequence, op: wr.op, signaled, fenced, progress, sges: wr.sges });
        }
    }

    pub(super) fn post_receives(&mut self, chain: &[RecvWr]) {
        for wr in chain {
            let slot = if let WorkRequestId::SharedRecv { slot } = WorkRequestId::of(wr.wr_id) { slot } else { 0 };
            self.receives.push_back((slot, wr.sges.as_slice()[0]));
        }
    }

    pub(super) fn posted_receives(&self) -> usize {
        self.receives.len()
    }

    /// Returns true if an unfinished send uses memory inside the region.
    pub(super) fn uses(&self, region: RemoteRegion) -> bool {
        let inside = |sge: &Sge| (region.address..region.address + region.len).contains(&(sge.address().addr() as u64));
        let busy = |send: &Send| send.progress != SendProgress::Done && send.sges.as_slice().iter().any(inside);
        self.up && self.sends.iter().any(busy)
    }

    /// Returns true if a message can be completed when it is posted, because no send that was posted before it still waits to be
    /// transmitted.
    pub(super) fn sends_now(&self) -> bool {
        self.up && self.sends.iter().all(|send| send.progress != SendProgress::Posted)
    }

    /// Transmits a message that was completed when it was posted. Such a message has no work request.
    pub(super) fn send_now(&mut self, message: &[u8]) {
        self.wire.push_back(Item::Message(WireBytes::of(message)));
    }

    /// Transmits the next posted send. Returns false if no send is waiting, or a fence delays the next one.
    pub(super) fn transmit(&mut self) -> bool {
        let Some(at) = self.sends.iter().position(|send| send.progress == SendProgress::Posted) else { return false };
        if !self.up || (self.sends[at].fenced && self.sends.iter().take(at).any(Send::is_answered)) {
            return false;
        }
        let send = &self.sends[at];
        let item = match send.op {
            SendOp::Write(_) => Item::Write,
            SendOp::WriteWithImmediate(_, value) => {
                Item::WriteWithImmediate { value, len: send.sges.total_len() as u32 }
            }
            SendOp::Send => Item::Message(self.gather(send)),
            _ => Item::Request,
        };
        self.wire.push_back(item);
        self.sends[at].progress =
            if self.sends[at].is_answered() { SendProgress::OnTheWire } else { SendProgress::Done };
        true
    }

    fn gather(&self, send: &Send) -> WireBytes {
        let mut message = WireBytes { bytes: [0; LONGEST], len: 0 };
        for sge in send.sges.as_slice() {
            let len = sge.len();
            let out = &mut message.bytes[message.len..message.len + len];
            // Only memory of the buffer pool is copied, because that memory contains headers. The tests do not check the bytes of regions,
            // so these bytes can have any value.
            if let Some(at) = self.offset(sge) {
                assert!(self.memory.copy_out(at, out));
            } else {
                out.fill(0xaa);
            }
            message.len += len;
        }
        message
    }

    fn offset(&self, sge: &Sge) -> Option<usize> {
        sge.address().addr().checked_sub(self.memory.as_ptr().addr()).filter(|&at| at + sge.len() <= self.memory.len())
    }

    /// Completes the next send whose completion is permitted. If the queue pair is down, flushes the next send or receive. Returns false if
    /// there was nothing to complete or flush.
    pub(super) fn complete(&mut self) -> bool {
        if !self.up {
            let Some(send) = self.sends.pop_front() else { return self.flush_receive() };
            self.completions.push_back(Completion::Send { sequence: send.sequence, status: WcStatus::Flushed });
            return true;
        }
        // Reads complete in the order in which they were posted, and so do all other sends. But a Write or a message may complete before an
        // earlier Read whose answer has not arrived.
        let done = |send: &Send| send.progress == SendProgress::Done;
        let at = if self.in_order {
            self.sends.front().is_some_and(done).then_some(0)
        } else {
            let first = |answered| self.sends.iter().position(|send| send.is_answered() == answered);
            [first(false), first(true)].into_iter().flatten().find(|&at| done(&self.sends[at]))
        };
        let Some(send) = at.and_then(|at| self.sends.remove(at)) else { return false };
        if send.signaled {
            self.completions.push_back(Completion::Send { sequence: send.sequence, status: WcStatus::Success });
        }
        true
    }

    fn flush_receive(&mut self) -> bool {
        // Receives of a shared queue are not flushed.
        if self.shared {
            return false;
        }
        let Some((slot, _)) = self.receives.pop_front() else { return false };
        self.receive(slot, WcStatus::Flushed, 0, None);
        true
    }

    fn receive(&mut self, slot: u16, status: WcStatus, len: u32, immediate: Option<u32>) {
        let result = if status.is_success() { Ok(()) } else { Err(status.into()) };
        let completed = Completed { result, len, immediate, invalidated: None };
        self.completions.push_back(Completion::Receive { slot, completed });
    }

    /// Makes the first unfinished send fail, and brings the queue pair down.
    pub(super) fn fail(&mut self, status: WcStatus) {
        if !self.up {
            return;
        }
        if let Some(send) = self.sends.pop_front() {
            self.completions.push_back(Completion::Send { sequence: send.sequence, status });
        }
        self.go_down(DisconnectCause::Path("lost".to_owned()));
    }

    pub(super) fn go_down(&mut self, cause: DisconnectCause) {
        if std::mem::take(&mut self.up) {
            self.end_event = Some(cause);
        }
    }

    /// Handles the next item in flight from the peer. Returns false if there is no item, or if the item must wait for a receive or an
    /// answer. If `honest` is true, the test fails if a message arrives for which no receive is posted.
    pub(super) fn arrive(&mut self, peer: &mut Self, honest: bool) -> bool {
        let Some(&item) = peer.wire.front() else { return false };
        if self.up && matches!(item, Item::Message(_) | Item::WriteWithImmediate { .. }) && self.receives.is_empty() {
            assert!(!honest, "a message came for which no receive is posted");
            return false;
        }
        if self.up && !self.answers && matches!(item, Item::Request) {
            return false;
        }
        peer.wire.pop_front();
        if !self.up {
            return true;
        }
        match item {
            Item::Message(bytes) => {
                if let Some((slot, sge)) = self.receives.pop_front() {
                    let at = self.offset(&sge).expect("receives are of the pool");
                    let fits = bytes.len <= sge.len();
                    let status = if fits { WcStatus::Success } else { WcStatus::LocalLengthError };
                    assert!(!fits || self.memory.copy_in(at, bytes.as_slice()));
                    self.receive(slot, status, bytes.len as u32, None);
                    if !fits {
                        self.go_down(DisconnectCause::WorkRequest(status.into()));
                    }
                }
            }
            Item::Write => self.placed += 1,
            Item::WriteWithImmediate { value, len } => {
                self.placed += 1;
                if let Some((slot, _)) = self.receives.pop_front() {
                    self.receive(slot, WcStatus::Success, len, Some(value));
                }
            }
            Item::Request => self.wire.push_back(Item::Response),
            Item::Response => {
                let waits = |send: &&mut Send| send.is_answered() && send.progress == SendProgress::OnTheWire;
                if let Some(send) = self.sends.iter_mut().find(waits) {
                    send.progress = SendProgress::Done;
                }
            }
        }
        true
    }
}
