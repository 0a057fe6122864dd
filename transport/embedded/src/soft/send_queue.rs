//! The send queue of a reliable queue pair: the order in which work requests are sent and complete.
//! The carrier of the connection, a TCP stream or a ring in shared memory, only frames work
//! requests and transmits their bytes.
//!
//! Work requests are sent and complete in the order of their posting (RFC 5040 §6). A fenced work
//! request waits until no Read and no atomic operation is outstanding. A Read or an atomic
//! operation waits until fewer of them are outstanding than the peer allows. All work requests
//! behind a waiting one wait, too. A Read or an atomic operation completes when its whole response
//! has arrived.

use std::collections::VecDeque;

use super::completions::Done;
use super::outstanding::{OutstandingRequest, OutstandingRequests};
use crate::entries::ENTRIES;
use rdma_transport::mem::Sge;
use rdma_transport::wc::WcStatus;
use rdma_transport::wr::{SendClass, SendFlags, SendOp, SendWr};

/// The condition for the completion of a sent work request. All earlier work requests must be
/// complete. The first value is a number of bytes since the start of the connection: the socket
/// must have accepted so much of the TCP stream, or the peer must have released so much of the
/// ring. If the second value is true, the response from the peer must also have arrived.
pub(crate) type CompletionPosition = (u64, bool);

/// A posted work request that is not completely sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueuedSend {
    pub(crate) wr: SendWr,
    /// The length of the payload, in bytes.
    pub(crate) len: usize,
}

impl QueuedSend {
    /// Returns true if the work request completes only after a response from the peer has arrived.
    /// A Read of length 0 has no response, because it is never sent.
    #[inline]
    fn is_answered(&self) -> bool {
        self.wr.op.answered() && (self.len > 0 || self.wr.op.class() != SendClass::Read)
    }

    /// Returns the completion that is added if the work request succeeds.
    #[inline]
    fn done(&self) -> Done {
        Done::of(self.wr.wr_id, self.wr.op.class(), self.wr.flags, self.len)
    }
}

#[derive(Debug)]
pub(crate) struct SendQueue {
    /// The work requests that are completely sent but not done, with their completions.
    sent: VecDeque<(Done, CompletionPosition)>, // bound: sends
    /// The work requests that are not completely sent. They were posted after those in `sent`.
    queue: VecDeque<QueuedSend>, // bound: sends
    /// The sequence number of the oldest work request that is not done. The first work request of
    /// the connection has number 0.
    first: u64,
    /// The number of sent payload bytes of the first work request in `queue`.
    part: usize,
    /// True if the first work request in `queue` is a Write with Immediate whose payload is
    /// completely sent, but whose immediate data is not.
    immediate_next: bool,
    /// The copied payloads of inline sends: `inline_max` bytes for each of `depth` work requests.
    /// Allocated when the first inline send is queued, because most connections queue none.
    inline: Vec<u8>, // bound: sends
    inline_max: usize,
    depth: usize,
    pub(crate) outstanding: OutstandingRequests,
    /// The sequence number of the work request that has ended the connection, and its status.
    failed: Option<(u64, WcStatus)>,
}

impl SendQueue {
    /// Creates an empty queue for at most `depth` work requests. An inline payload has at most
    /// `inline_max` bytes.
    pub(crate) fn new(depth: usize, inline_max: usize) -> Self {
        Self {
            sent: VecDeque::with_capacity(depth),
            queue: VecDeque::new(),
            first: 0,
            part: 0,
            immediate_next: false,
            inline: Vec::new(),
            inline_max,
            depth: depth.max(1),
            outstanding: OutstandingRequests::new(0),
            failed: None,
        }
    }

    /// Sets the number of Reads and atomic operations that may be outstanding. The caller must not
    /// have sent a work request before.
    pub(crate) fn establish(&mut self, ord: u16) {
        self.outstanding = OutstandingRequests::new(ord);
    }

    /// Returns the number of work requests that are not done.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.sent.len() + self.queue.len()
    }

    /// Returns true if no posted work request waits to be sent.
    #[inline]
    pub(crate) fn is_sent(&self) -> bool {
        self.queue.is_empty()
    }

    /// Returns the sequence number of the first work request that is not completely sent.
    #[inline]
    fn unsent(&self) -> u64 {
        self.first + self.sent.len() as u64
    }

    /// Appends a work request that is to be sent later. Copies the payload of an inline send. The
    /// caller has checked that there is room, and that an inline payload fits.
    #[inline(never)]
    pub(crate) fn post(&mut self, wr: &SendWr, len: usize) {
        if wr.flags.contains(SendFlags::INLINE) {
            self.inline.resize(self.depth * self.inline_max, 0);
            let start = self.inline_start(self.first + self.len() as u64);
            let mut room = self.inline.get_mut(start..start + len).unwrap_or_default();
            for sge in wr.sges.as_slice() {
                let (now, rest) = room.split_at_mut(sge.len().min(room.len()));
                ENTRIES.copy_to(sge, now);
                room = rest;
            }
        }
        self.queue.push_back(QueuedSend { wr: *wr, len });
    }

    /// Appends a work request that the caller has sent completely. The caller has checked that no
    /// other work request waits to be sent.
    #[inline]
    pub(crate) fn post_sent(&mut self, done: Done, position: CompletionPosition) {
        self.sent.push_back((done, position));
    }

    /// Counts a work request that the caller has sent completely, if all earlier work requests are
    /// done. In that case, returns true, and the caller completes the work request immediately.
    /// Otherwise returns false, and changes nothing.
    #[inline]
    pub(crate) fn post_done(&mut self) -> bool {
        let is_done = self.sent.is_empty();
        self.first += u64::from(is_done);
        is_done
    }

    /// Returns the first work request that is not completely sent.
    #[inline]
    pub(crate) fn front(&self) -> Option<&QueuedSend> {
        self.queue.front()
    }

    /// Returns the number of bytes of the payload of [`SendQueue::front`] that are sent.
    #[inline]
    pub(crate) const fn part(&self) -> usize {
        self.part
    }

    /// Returns true if only the immediate data of [`SendQueue::front`] is not sent.
    #[inline]
    pub(crate) const fn is_immediate_next(&self) -> bool {
        self.immediate_next
    }

    /// Returns true if no work request is partly sent.
    #[inline]
    pub(crate) const fn is_between_messages(&self) -> bool {
        self.part == 0 && !self.immediate_next
    }

    /// Returns the copied payload of [`SendQueue::front`] if that is an inline send.
    #[inline]
    pub(crate) fn inline(&self) -> Option<&[u8]> {
        let entry = self.queue.front().filter(|entry| entry.wr.flags.contains(SendFlags::INLINE))?;
        let start = self.inline_start(self.unsent());
        Some(self.inline.get(start..start + entry.len).unwrap_or_default())
    }

    /// Returns the offset in `inline` of the payload of the work request `sequence`. At most
    /// `depth` work requests are not done, so no two of them share an offset.
    fn inline_start(&self, sequence: u64) -> usize {
        (sequence % self.depth as u64) as usize * self.inline_max
    }

    /// Returns true if a work request waits to be sent, and neither a fence nor the limit of
    /// outstanding Reads delays it. A limit of 0 delays nothing: a Read or an atomic operation
    /// would wait forever, so the caller must end the connection instead of sending it.
    #[inline]
    pub(crate) fn may_go(&self) -> bool {
        let Some(entry) = self.queue.front() else { return false };
        if self.outstanding.is_idle() && !entry.is_answered() {
            return true;
        }
        let fenced = entry.wr.flags.contains(SendFlags::FENCE) && !rdma_transport::planted("fence-ignored");
        (!fenced || self.part > 0 || self.outstanding.is_idle())
            && (!entry.is_answered() || self.outstanding.has_room() || self.outstanding.depth() == 0)
    }

    /// Adds a Read or an atomic operation to the outstanding requests. Its work request is
    /// [`SendQueue::front`]. If the queue is empty, the caller posts the work request next, with
    /// [`SendQueue::post_sent`]. Returns the number of the request.
    #[inline]
    pub(crate) fn request(&mut self, sink: Sge, len: u32, atomic: bool) -> u32 {
        self.outstanding.push(OutstandingRequest::new(sink, len, atomic, Some(self.unsent())))
    }

    /// Records that `n` more bytes of the payload of [`SendQueue::front`] are sent, or that its
    /// immediate data is sent. Returns true if the work request is now completely sent. `position`
    /// is then the condition for its completion. A Write with Immediate is completely sent when its
    /// immediate data is sent (RFC 7306 §6).
    #[inline]
    pub(crate) fn advance(&mut self, n: usize, position: CompletionPosition) -> bool {
        let Some(entry) = self.queue.front() else { return false };
        self.part += n;
        if self.part < entry.len {
            return false;
        }
        if matches!(entry.wr.op, SendOp::WriteWithImmediate(..)) && !self.immediate_next {
            self.immediate_next = true;
            return false;
        }
        self.sent.push_back((entry.done(), position));
        self.queue.pop_front();
        (self.part, self.immediate_next) = (0, false);
        true
    }

    /// Completes work requests, oldest first. `position` is the number of bytes of the TCP stream
    /// that the socket has accepted, or of the ring that the peer has released. Stops at the first
    /// work request that has a larger position, or whose response has not arrived.
    #[inline]
    pub(crate) fn reap(&mut self, position: u64, done: &mut impl FnMut(Done)) {
        while let Some(&(front, (end, answered))) = self.sent.front() {
            if end > position || (answered && self.first >= self.outstanding.answered()) {
                break;
            }
            done(front);
            self.sent.pop_front();
            self.first += 1;
        }
    }

    /// Records which work request has ended the connection, and its status. `sequence` is `None`
    /// for the first work request that is not completely sent.
    pub(crate) fn fail(&mut self, sequence: Option<u64>, status: WcStatus) {
        self.failed = Some((sequence.unwrap_or_else(|| self.unsent()), status));
    }

    /// Completes all work requests after the end of the connection. The work request that
    /// [`SendQueue::fail`] has recorded completes with the recorded status, and the others complete
    /// as flushed.
    pub(crate) fn flush(&mut self, done: &mut impl FnMut(Done)) {
        let failed = self.failed.take();
        let sent = self.sent.drain(..).map(|(done, _)| done);
        for flushed in sent.chain(self.queue.drain(..).map(|entry| entry.done())) {
            let status = match failed {
                Some((sequence, status)) if sequence == self.first => status,
                _ => WcStatus::Flushed,
            };
            done(Done { status, signaled: true, ..flushed });
            self.first += 1;
        }
        self.outstanding.clear();
        (self.part, self.immediate_next) = (0, false);
    }
}

#[cfg(all(test, not(loom_model)))]
mod tests {
    use super::*;
    use crate::test_memory::TestMemory;
    use proptest::prelude::*;
    use rdma_transport::mem::Memory;
    use rdma_transport::mr::RemoteKey;
    use rdma_transport::wr::{RemoteAddress, SgeList};

    const REMOTE: RemoteAddress = RemoteAddress { address: 0, key: RemoteKey(1) };
    const READ: SendOp = SendOp::Read(REMOTE);
    const DEPTH: usize = 8;

    fn queue(ord: u16) -> SendQueue {
        let mut queue = SendQueue::new(DEPTH, 16);
        queue.establish(ord);
        queue
    }

    fn post(queue: &mut SendQueue, wr_id: u64, op: SendOp, flags: SendFlags, len: usize) {
        queue.post(&SendWr { wr_id, op, sges: SgeList::default(), flags }, len);
    }

    /// Sends the payload of the first unsent work request, which is done at `position`.
    fn send(queue: &mut SendQueue, position: u64) {
        let QueuedSend { wr, len } = *queue.front().expect("a work request");
        let answered = queue.front().is_some_and(QueuedSend::is_answered);
        if answered {
            queue.request(Sge::default(), len as u32, wr.op.class() == SendClass::Atomic);
        }
        assert!(queue.advance(len, (position, answered)) || wr.op == SendOp::WriteWithImmediate(REMOTE, 7));
    }

    fn reap(queue: &mut SendQueue, position: u64) -> Vec<u64> {
        let mut ids = Vec::new();
        queue.reap(position, &mut |done| ids.push(done.wr_id));
        ids
    }

    fn flush(queue: &mut SendQueue) -> Vec<(u64, WcStatus)> {
        let mut flushed = Vec::new();
        queue.flush(&mut |done| {
            assert!(done.signaled, "{done:?}");
            flushed.push((done.wr_id, done.status));
        });
        flushed
    }

    /// A work request is done when the carrier reaches its position, but not before earlier ones:
    /// the Write behind the Read waits for the response to the Read.
    #[test]
    fn work_requests_are_done_in_order_at_their_positions() {
        let mut queue = queue(1);
        for (wr_id, op) in [(1, SendOp::Send), (2, READ), (3, SendOp::Write(REMOTE)), (4, SendOp::Send)] {
            post(&mut queue, wr_id, op, SendFlags::empty(), 10);
            send(&mut queue, 10 * wr_id);
        }
        assert_eq!((reap(&mut queue, 9), reap(&mut queue, 10)), (vec![], vec![1]));
        assert_eq!((reap(&mut queue, 35), queue.len(), queue.post_done()), (vec![], 3, false));
        queue.outstanding.complete();
        assert_eq!((reap(&mut queue, 19), reap(&mut queue, 30)), (vec![], vec![2, 3]));
        assert_eq!((reap(&mut queue, u64::MAX), queue.post_done(), queue.len()), (vec![4], true, 0));
        // `post_done` above has used sequence number 4.
        post(&mut queue, 5, READ, SendFlags::empty(), 1);
        send(&mut queue, 50);
        assert_eq!(queue.outstanding.oldest(), Some(5));
    }

    /// A payload that is sent in parts is complete with its last part, and a Write with Immediate
    /// with its immediate data, even if its payload is empty.
    #[test]
    fn a_work_request_is_sent_with_its_last_part() {
        let mut queue = queue(0);
        post(&mut queue, 1, SendOp::Send, SendFlags::FENCE, 10);
        assert!(queue.is_between_messages() && !queue.advance(4, (1, false)) && !queue.is_between_messages());
        assert!(!queue.advance(5, (2, false)) && queue.part() == 9 && reap(&mut queue, 9).is_empty());
        assert!(queue.advance(1, (3, false)) && queue.is_between_messages() && queue.is_sent());
        for len in [0, 5] {
            post(&mut queue, 2, SendOp::WriteWithImmediate(REMOTE, 7), SendFlags::empty(), len);
            send(&mut queue, 4);
            assert!(queue.is_immediate_next() && !queue.is_between_messages() && !queue.is_sent());
            assert!(queue.advance(0, (5, false)) && !queue.is_immediate_next() && queue.is_sent());
        }
        assert_eq!((reap(&mut queue, 4), reap(&mut queue, 5)), (vec![1], vec![2, 2]));
        assert!(!queue.advance(1, (6, false)) && !queue.may_go(), "the queue is empty");
    }

    /// A fenced work request waits for all outstanding Reads and atomic operations, unless a part
    /// of it is sent. Without a fence, only Reads and atomic operations wait, for the read depth. A
    /// depth of 0 delays nothing, so that the carrier can fail the Read.
    #[test]
    fn a_fence_and_the_read_depth_hold_work_requests_back() {
        let mut queue = queue(2);
        post(&mut queue, 1, READ, SendFlags::FENCE, 8);
        assert!(queue.may_go());
        send(&mut queue, 0);
        post(&mut queue, 1, SendOp::FetchAdd { remote: REMOTE, add: 1 }, SendFlags::FENCE, 8);
        assert!(!queue.may_go());
        queue.outstanding.complete();
        assert!(queue.may_go());
        send(&mut queue, 0);
        post(&mut queue, 2, READ, SendFlags::empty(), 8);
        assert!(queue.may_go() && queue.outstanding.has_atomic());
        send(&mut queue, 0);
        post(&mut queue, 3, READ, SendFlags::empty(), 8);
        assert!(!queue.may_go(), "two are outstanding");
        queue.outstanding.complete();
        assert!(queue.may_go() && !queue.outstanding.has_atomic());
        send(&mut queue, 0);
        // A Read of length 0 is never sent, so it waits for nothing.
        post(&mut queue, 4, READ, SendFlags::empty(), 0);
        assert!(queue.may_go());
        send(&mut queue, 0);
        post(&mut queue, 5, SendOp::Send, SendFlags::FENCE, 8);
        assert!(!queue.may_go());
        while !queue.outstanding.is_idle() {
            queue.outstanding.complete();
        }
        assert!(queue.may_go() && reap(&mut queue, 0).len() == 5);
        queue.advance(4, (0, false));
        queue.outstanding.push(OutstandingRequest::new(Sge::default(), 1, false, None));
        assert!(queue.may_go(), "it has begun");

        let mut none = self::queue(0);
        post(&mut none, 1, READ, SendFlags::empty(), 8);
        assert!(none.may_go() && !none.outstanding.has_room());
    }

    /// The failed work request, sent or not, completes with its status, and all others as flushed.
    /// A failure of a work request that is already done changes nothing.
    #[test]
    fn one_work_request_fails_and_the_others_are_flushed() {
        let fault = WcStatus::RemoteAccessError;
        for (failed, expected) in [(None, 3), (Some(1), 1), (Some(2), 2), (Some(4), 4), (Some(0), 9), (Some(99), 9)] {
            let mut queue = queue(4);
            for wr_id in 0..5 {
                post(&mut queue, wr_id, READ, SendFlags::empty(), 8);
            }
            (0..3).for_each(|_| send(&mut queue, 0));
            queue.outstanding.complete();
            assert_eq!(reap(&mut queue, 0), [0]);
            queue.advance(3, (0, false));
            queue.fail(failed, fault);
            let all = (1..5).map(|id| (id, if id == expected { fault } else { WcStatus::Flushed }));
            assert_eq!(flush(&mut queue), all.collect::<Vec<_>>(), "{failed:?}");
            assert!(queue.len() == 0 && queue.outstanding.is_idle() && queue.is_between_messages());
            // The recorded failure does not apply to later work requests.
            post(&mut queue, 6, SendOp::Send, SendFlags::empty(), 0);
            assert_eq!(flush(&mut queue), [(6, WcStatus::Flushed)]);
        }
    }

    /// A response without a request completes no work request, a response that is too long adds no
    /// bytes, and unknown request numbers name no work request.
    #[test]
    fn a_peer_completes_only_what_is_outstanding() {
        let mut queue = queue(2);
        post(&mut queue, 1, READ, SendFlags::empty(), 8);
        queue.outstanding.complete();
        queue.outstanding.advance(8);
        send(&mut queue, 0);
        assert_eq!((queue.outstanding.answered(), reap(&mut queue, 0)), (0, vec![]));
        queue.outstanding.advance(usize::MAX);
        assert!(queue.outstanding.front().is_some_and(|front| front.done == front.len));
        assert_eq!([0, 1, 2, u32::MAX].map(|number| queue.outstanding.find(number)), [None, Some(0), None, None]);
        queue.outstanding.complete();
        queue.outstanding.complete();
        assert_eq!((reap(&mut queue, 0), queue.outstanding.find(1), queue.outstanding.oldest()), (vec![1], None, None));
        // A ready-to-receive message is no work request.
        let ready = OutstandingRequest::new(Sge::default(), 0, false, None);
        assert_eq!((queue.outstanding.push(ready), queue.outstanding.find(2)), (2, None));
        queue.outstanding.complete();
        assert_eq!(queue.outstanding.answered(), 1);
    }

    proptest! {
        /// In any sequence of calls, each work request completes once and in order, an inline
        /// payload has the bytes that it had when it was posted, and no more Reads are outstanding
        /// than the depth permits.
        #[test]
        fn each_work_request_completes_once_in_order(steps in prop::collection::vec(any::<u16>(), 1..200)) {
            let memory = Memory::new(16).unwrap();
            let (mut queue, mut next, mut done, mut position) = (queue(2), 0_u64, Vec::new(), 0);
            for step in steps {
                match step % 4 {
                    0 if queue.len() < DEPTH => {
                        let (len, fence) = (usize::from(step >> 8) % 16, SendFlags::from_bits_truncate(step as u8 & 8));
                        memory.write(0, &[next as u8; 16]);
                        let (op, flags) = match step >> 4 & 3 {
                            0 => (READ, fence),
                            1 => (SendOp::WriteWithImmediate(REMOTE, 7), fence | SendFlags::INLINE),
                            _ => (SendOp::Send, fence | SendFlags::INLINE),
                        };
                        let sges = SgeList::one(memory.sge(0, len));
                        queue.post(&SendWr { wr_id: next, op, sges, flags }, len);
                        next += 1;
                    }
                    1 if queue.may_go() => {
                        let entry = *queue.front().unwrap();
                        if let Some(inline) = queue.inline() {
                            prop_assert_eq!(inline, vec![entry.wr.wr_id as u8; entry.len]);
                        }
                        position += 1;
                        if entry.is_answered() {
                            send(&mut queue, position);
                        } else {
                            let left = entry.len - queue.part();
                            queue.advance(left.min(1 + usize::from(step >> 12)), (position, false));
                        }
                        prop_assert!(queue.outstanding.reads().count() <= 2);
                    }
                    2 => queue.outstanding.complete(),
                    _ => queue.reap(position.saturating_sub(u64::from(step >> 14)), &mut |one| done.push(one.wr_id)),
                }
            }
            queue.flush(&mut |one| done.push(one.wr_id));
            prop_assert_eq!(done, (0..next).collect::<Vec<_>>());
        }
    }
}
