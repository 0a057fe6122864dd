//! [`Link`]: the queue pair of a connection in shared memory.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::account::WindowAccount;
use super::doorbell::{self, NEWS, ROOM};
use super::fault::{LinkFault, Refusal};
use super::incoming::{Consumed, Incoming, RecordContext};
pub(crate) use super::outgoing::TransmitProgress;
use super::outgoing::{INLINE, Outgoing, TransmitContext};
use super::packet::Packet;
use super::record::{RecordHeader, RecordKind};
use super::ring::Consumer;
use super::segment::{self, CAPACITY, EntryPayload, HEAD, Segment, SegmentPayload, SegmentSide};
use super::windows::{Lendings, Windows};
use crate::soft::checks;
use crate::soft::completions::{Completions, Done};
use crate::soft::cq::CompletionQueues;
use crate::soft::receive_queue::ReceiveQueue;
use crate::soft::resources::Resources;
use crate::soft::send_queue::SendQueue;
use rdma_transport::cm::ReadDepth;
use rdma_transport::error::Result;
use rdma_transport::mem::Memory;
use rdma_transport::mr::Access;
use rdma_transport::provider::PostError;
use rdma_transport::qp::SrqId;
use rdma_transport::wc::WcOpcode;
use rdma_transport::wr::{RecvWr, SendFlags, SendOp, SendWr};

/// The local side releases the consumed records once they have at least this number of bytes in total, even if the peer
/// does not wait for room in the ring.
const RELEASE: usize = CAPACITY / 4;

/// The result of [`Link::receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReceiveProgress {
    /// True if records were consumed.
    pub(crate) news: bool,
    /// True if the budget is used up. More records may be available in that case.
    pub(crate) more: bool,
    /// True if the payload of the next record is in no valid window ([`Consumed::UnknownWindow`]). The caller must read
    /// the packets of the Unix socket, and then try again.
    pub(crate) unknown_window: bool,
}

/// The parts of a queue pair that the connection continues to use when it moves from a TCP stream to shared memory.
#[derive(Debug)]
pub(crate) struct QueuePairParts {
    pub(crate) completions: Completions,
    pub(crate) receives: ReceiveQueue,
    pub(crate) extensions: bool,
    /// The work requests that were posted before the move to shared memory.
    pub(crate) sends: SendQueue,
}

/// The queue pair of a connection in shared memory.
#[derive(Debug)]
pub(crate) struct Link<S: Segment> {
    segment: S,
    incoming: Incoming,
    outgoing: Outgoing,
    pub(crate) lendings: Lendings,
    windows: Windows,
    completions: Completions,
    pub(crate) extensions: bool,
    /// True if the connection has ended. Work requests that are posted afterwards are flushed.
    dead: bool,
    /// The events that the local side has announced in its call word; 0 while the local side is awake.
    armed: u64,
    /// True if the drop of the link removes the pages that both sides use: the peer needs none of
    /// them any more, or had enough time to read them.
    removes: bool,
}

/// A link that is not used any more, while its peer may still read the last records.
pub(crate) trait PartedLink: fmt::Debug + Send {
    /// Returns the number of bytes that the peer may still read.
    fn len(&self) -> usize;

    /// Frees the memory of these bytes, even if the peer still has it mapped.
    fn free(self: Box<Self>);
}

impl<S: Segment> PartedLink for Link<S> {
    fn len(&self) -> usize {
        segment::LEN + self.outgoing.staging_len()
    }

    fn free(mut self: Box<Self>) {
        self.removes = true;
    }
}

impl<S: Segment> Link<S> {
    /// Creates a queue pair on a segment. `parts` contains the parts of the queue pair on the TCP stream that continue
    /// on the segment. The windows of the connection count in `account`.
    pub(crate) fn new(
        segment: S,
        side: SegmentSide,
        depths: ReadDepth,
        parts: QueuePairParts,
        account: &Arc<WindowAccount>,
    ) -> Self {
        let QueuePairParts { completions, receives, extensions, sends } = parts;
        let (out, into) = (side.outgoing(), side.incoming());
        Self {
            segment,
            incoming: Incoming::new(into, receives),
            outgoing: Outgoing::new(out, sends, depths),
            lendings: Lendings::new(out),
            windows: Windows::new(into, Arc::clone(account)),
            completions,
            extensions,
            dead: false,
            armed: 0,
            removes: false,
        }
    }

    /// Announces to the peer, with a first record, that the connection uses the segment from now on.
    pub(crate) fn begin(&mut self) {
        self.outgoing.put_record(&self.segment, RecordHeader::new(RecordKind::Ready, 0), &[]);
    }

    /// Returns true if the peer has published its first record. In that case, the caller creates the link for the
    /// segment.
    pub(crate) fn has_begun(segment: &S, side: SegmentSide) -> bool {
        Consumer::new(side.incoming()).has_news(segment)
    }

    /// Records that a completion was polled. If it is the completion of a receive from a shared receive queue, returns
    /// this queue. Otherwise returns `None`.
    #[inline]
    pub(crate) fn polled(&mut self, opcode: WcOpcode) -> Option<SrqId> {
        self.completions.polled(opcode)
    }

    #[inline]
    pub(crate) fn post_recv(
        &mut self,
        chain: &[RecvWr],
        cqs: &mut CompletionQueues,
    ) -> std::result::Result<(), PostError> {
        self.completions.post_recv(chain, &mut self.incoming.queue, self.dead, cqs)
    }

    /// Posts work requests. The caller must call [`Link::transmit`] afterwards. That call writes the work requests that
    /// could not be written immediately.
    #[inline]
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
        self.completions.check_send_room(self.outgoing.sends.len())?;
        let len = wr.sges.total_len();
        let terms = checks::SendLimits {
            provider: "shm",
            attr: &self.completions.attr,
            extensions: self.extensions,
            depth: Some(self.outgoing.sends.outstanding.depth()),
            keys: &resources.keys,
        };
        checks::send(wr, len, &terms)?;
        if self.dead {
            self.completions.sent(&mut resources.cqs, &Done::flushed(wr.wr_id));
            return Ok(());
        }
        let small = len <= INLINE && matches!(wr.op, SendOp::Send) && !wr.flags.contains(SendFlags::FENCE);
        if small && self.outgoing.is_clear() {
            let put = |segment: &S, mut at: usize| {
                for entry in wr.sges.as_slice() {
                    segment.put(at, &SegmentPayload::Entry(EntryPayload(entry)));
                    at += entry.len();
                }
            };
            if self.outgoing.message(&self.segment, len, put) {
                if let Some(done) = self.outgoing.message_posted(wr) {
                    self.completions.sent(&mut resources.cqs, &done);
                }
                return Ok(());
            }
        }
        self.outgoing.sends.post(wr, len);
        Ok(())
    }

    /// Sends a message that has no work request, so no completion follows. The caller must call
    /// [`Link::transmit`] and [`Link::publish`] afterwards, in the same turn or in a later one.
    /// Returns false, and sends nothing, in these cases:
    ///
    /// - The ring or the staging buffer is full.
    /// - The message is too long for one record.
    /// - The message needs the staging buffer, which the peer has not mapped.
    /// - Posted work requests wait to be sent.
    /// - The connection has ended, or a fault was found.
    #[inline]
    pub(crate) fn send_now(&mut self, header: &[u8], payload: &[u8]) -> bool {
        let len = header.len() + payload.len();
        if self.dead || !self.outgoing.is_clear() {
            return false;
        }
        if len > INLINE {
            return self.outgoing.message_in_window(&self.segment, &mut self.lendings, [header, payload]);
        }
        self.outgoing.message(&self.segment, len, |segment, at| {
            segment.put(at, &SegmentPayload::Bytes(header));
            segment.put(at + header.len(), &SegmentPayload::Bytes(payload));
        })
    }

    /// Writes as many records to the ring as fit, and completes the work requests that are done. Returns the reason why
    /// no more records were written.
    #[inline]
    pub(crate) fn transmit(&mut self, resources: &mut Resources) -> TransmitProgress {
        if self.outgoing.wants_room() {
            return self.transmit_rest(resources);
        }
        TransmitProgress::All
    }

    #[inline(never)]
    fn transmit_rest(&mut self, resources: &mut Resources) -> TransmitProgress {
        let Resources { cqs, keys, .. } = resources;
        let Self { segment, outgoing, lendings, windows, completions, .. } = self;
        let mut peer = TransmitContext { scope: completions.id.0, keys, lendings, windows, direct: None };
        let sent = outgoing.transmit(segment, &mut peer, &mut |done| completions.sent(cqs, &done));
        let direct = peer.direct;
        self.lend_direct(direct, resources);
        sent
    }

    /// Publishes the records that were written to the ring. Returns true if the caller must call the peer.
    #[inline]
    pub(crate) fn publish(&mut self) -> bool {
        doorbell::publish(&self.segment, &mut self.outgoing.ring)
    }

    /// Returns true if the peer has published records, or has stored an invalid position.
    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        self.incoming.ring.has_news(&self.segment)
    }

    /// Returns true if there are records to consume, or the peer has released records while the local side waits for
    /// room.
    #[inline]
    pub(crate) fn has_work(&self) -> bool {
        doorbell::has_work(&self.segment, &self.incoming.ring, &self.outgoing.ring, self.causes())
    }

    /// Consumes records until none is left or `budget`, in bytes, is used up. If the connection must end, returns the
    /// fault as the error.
    #[inline]
    pub(crate) fn receive(
        &mut self,
        budget: usize,
        resources: &mut Resources,
    ) -> std::result::Result<ReceiveProgress, LinkFault> {
        // The shared receive queue is moved out of `resources`, so that the queue and the other resources can be
        // borrowed at the same time.
        let srq = self.completions.attr.srq;
        let mut shared = resources.take_out(srq);
        let Self { segment, incoming, outgoing, lendings, windows, completions, extensions, .. } = self;
        let Resources { cqs, keys, .. } = &mut *resources;
        let before = incoming.ring.pos;
        let mut cx = RecordContext {
            scope: completions.id.0,
            keys,
            srq: shared.as_mut(),
            outgoing,
            lendings,
            windows,
            extensions: *extensions,
            direct: None,
        };
        let result = incoming.consume(segment, &mut cx, budget, &mut |message| completions.received(cqs, &message));
        let direct = cx.direct;
        let news = incoming.ring.pos != before;
        resources.put_back(srq, shared);
        self.lend_direct(direct, resources);
        if let Err(fault) = &result {
            self.note(*fault);
        }
        let consumed = result?;
        if let Some(fault) = self.outgoing.fault.take() {
            self.note(fault);
            return Err(fault);
        }
        Ok(ReceiveProgress {
            news,
            more: consumed == Consumed::Budget,
            unknown_window: consumed == Consumed::UnknownWindow,
        })
    }

    /// Releases the consumed records if these records have at least [`RELEASE`] bytes in total, or if one of these
    /// records had its payload in a window: the peer may be waiting to reuse the memory of that payload. Returns true
    /// if the caller must call the peer.
    #[inline]
    pub(crate) fn release(&mut self) -> bool {
        let ring = &mut self.incoming.ring;
        let due = ring.owed() >= RELEASE || (self.incoming.release_due && ring.owed() > 0);
        if !due {
            return false;
        }
        self.incoming.release_due = false;
        doorbell::release(&self.segment, ring, &self.outgoing.ring)
    }

    /// Records the status of the work request that has caused a fault. Does nothing if no work
    /// request has caused it. [`Link::end`] adds the completion with this status.
    fn note(&mut self, fault: LinkFault) {
        let sends = &mut self.outgoing.sends;
        match fault {
            LinkFault::Violation(_) => {}
            LinkFault::WorkRequest(status) => sends.fail(None, status),
            LinkFault::Refused(refusal) => {
                if let Some((status, oldest)) = refusal.status().zip(sends.outstanding.oldest()) {
                    sends.fail(Some(oldest), status);
                }
            }
        }
    }

    /// Returns true if a fault was found while transmitting. The next call of [`Link::receive`] returns this fault.
    #[inline]
    pub(crate) const fn has_fault(&self) -> bool {
        self.outgoing.fault.is_some()
    }

    /// Returns the events for which the peer must wake the local side.
    #[inline]
    fn causes(&self) -> u64 {
        if self.outgoing.wants_room() { NEWS | ROOM } else { NEWS }
    }

    /// Returns true if the local call word contains all events for which the peer must wake the
    /// local side.
    #[inline]
    pub(crate) fn is_armed(&self) -> bool {
        self.armed & self.causes() == self.causes()
    }

    /// Returns true if the local call word contains at least one event.
    #[inline]
    pub(crate) const fn is_armed_at_all(&self) -> bool {
        self.armed != 0
    }

    /// Prepares for sleep: announces the events for which the peer must wake the local side, and releases the consumed
    /// records. The first returned value is true if an event has already happened. In that case, the caller must not
    /// sleep. The second value is true if the caller must call the peer.
    pub(crate) fn arm(&mut self) -> (bool, bool) {
        self.incoming.release_due = false;
        self.armed = self.causes();
        doorbell::arm(&self.segment, &mut self.incoming.ring, &self.outgoing.ring, self.armed)
    }

    /// Marks the local side as awake. Clears the local call word, unless `called` is true: then a
    /// packet from the peer may have arrived. It is usually a wake-up, and before a wake-up, the
    /// peer clears the word. If the word stays set, the peer only sends a wake-up too many.
    #[inline]
    pub(crate) fn wake(&mut self, called: bool) {
        if self.armed != 0 && !called {
            doorbell::disarm(&self.segment, &self.incoming.ring);
        }
        self.armed = 0;
    }

    /// Lends `memory` to the peer. Only this connection may use the memory. `file` is the
    /// descriptor of the memory, or `None` if `memory` has it. The peer may map the memory as the
    /// region `key`, and access it with the rights `rights`. Returns false if the memory cannot be
    /// lent, for example because no slot is free.
    pub(crate) fn lend(&mut self, (memory, file): (&Arc<Memory>, Option<OwnedFd>), key: u32, rights: Access) -> bool {
        self.lendings.lend(&self.segment, (memory, memory.len(), file), key, rights).is_some()
    }

    /// Ends the lending of the region `key`.
    pub(crate) fn take_back(&mut self, key: u32) {
        self.lendings.take_back(&self.segment, key);
    }

    /// Lends the region `key` to the peer. The peer may map the region, and has just accessed it with a record. After
    /// the peer has mapped the region, the peer can access it without records. Does nothing if `key` is `None`, or if
    /// the region is already lent.
    fn lend_direct(&mut self, key: Option<u32>, resources: &Resources) {
        let Some((memory, len, rights)) =
            key.filter(|&key| !self.lendings.has(key)).and_then(|key| resources.keys.direct(key))
        else {
            return;
        };
        self.lendings.lend(&self.segment, (memory, len, None), key.unwrap_or(0), rights);
    }

    /// Processes a packet from the peer, with the descriptor that was attached to it.
    pub(crate) fn packet(&mut self, packet: Packet, file: Option<&OwnedFd>) {
        let (Packet::Window(announced), Some(file)) = (packet, file) else { return };
        self.windows.unmap_ended(&self.segment);
        let mapped = self.windows.open(announced, file).inspect_err(|error| {
            log::debug!("cannot map memory of a peer on this host: {error}");
        });
        self.outgoing.reply(announced.slot, announced.word, mapped.is_ok());
    }

    /// Writes a last record that reports a protocol violation to the peer. After this call, the caller must end the
    /// connection.
    pub(crate) fn refuse(&mut self, refusal: Refusal) {
        self.outgoing.put_record(&self.segment, RecordHeader::new(RecordKind::Refusal, 0), &[refusal.code()]);
    }

    /// Returns true if the payload of the next record is in a window whose lending the peer has ended. Called after
    /// [`ReceiveProgress::unknown_window`]. If the result is true, the caller must end the connection.
    pub(crate) fn has_lost_payload(&self) -> bool {
        let header = RecordHeader::parse(self.segment.peek(self.incoming.ring.next_record()));
        header.is_some_and(|header| self.windows.has_ended(&self.segment, header.slot))
    }

    /// Returns true if the pages of the segment were removed: a position that one of the two sides
    /// has published is 0 again. The peer has ended the connection, and has removed the pages when
    /// its lingering time or its limit of lingering bytes was reached. Records that the local side
    /// has not read are lost.
    pub(crate) fn is_removed(&self) -> bool {
        let ours = (self.outgoing.ring.published, self.outgoing.ring.half);
        let theirs = (self.incoming.ring.pos, self.incoming.ring.half);
        [ours, theirs].into_iter().any(|(pos, half)| pos > 0 && self.segment.load(half + HEAD) == 0)
    }

    /// Searches the unread records for a refusal by the peer, and returns it as a fault. Drops the
    /// records in front of the refusal. Called after the payload of an unread record was lost
    /// ([`Link::has_lost_payload`]). Returns `None` if the peer has published no refusal.
    pub(crate) fn find_refusal(&mut self) -> Option<LinkFault> {
        let fault = LinkFault::Refused(self.incoming.find_refusal(&self.segment, &mut self.outgoing)?);
        self.note(fault);
        Some(fault)
    }

    /// Ends the connection: publishes the last records, ends the lendings of regions, and flushes
    /// both work queues. Afterwards, the program may reuse the memory of sends that the peer has
    /// not read. The peer can still consume the records in the ring, up to the first record whose
    /// payload is in a region. Behind this record, it can still find a refusal. Returns true if the
    /// caller must wake the peer.
    pub(crate) fn end(&mut self, cqs: &mut CompletionQueues) -> bool {
        let calls = self.publish();
        self.wake(false);
        self.lendings.end(&self.segment);
        let Self { incoming, outgoing, completions, .. } = self;
        outgoing.responses.clear();
        outgoing.sends.flush(&mut |done| completions.sent(cqs, &done));
        completions.flush_receives(&mut incoming.queue, cqs);
        self.dead = true;
        calls
    }

    /// Returns true if no message, write or response is partly received. If the peer ends the connection at any other
    /// point, a message is truncated.
    pub(crate) fn is_at_boundary(&self) -> bool {
        let outstanding = &self.outgoing.sends.outstanding;
        self.incoming.is_at_boundary() && outstanding.front().is_none_or(|request| request.done == 0)
    }

    /// Ends the use of the queue pair. Releases its entries on its completion queues, except the
    /// entries of unpolled completions. Returns receives to the shared receive queue if the queue
    /// pair has taken them from there and not completed them. Unmaps the memory of the peer. The
    /// peer can still read the last records.
    pub(crate) fn part(&mut self, resources: &mut Resources) {
        self.wake(false);
        self.lendings.end(&self.segment);
        self.lendings.close();
        self.outgoing.drop_read(&self.segment);
        self.completions.release(&mut self.incoming.queue, resources);
        self.windows.close();
    }
}

/// Ends the lendings of regions that have not ended yet: after the drop of a queue pair, the
/// program may reuse the memory of its sends. Keeps the pages of the segment and of the staging
/// buffer, unless [`PartedLink::free`] drops the link.
impl<S: Segment> Drop for Link<S> {
    fn drop(&mut self) {
        self.lendings.end(&self.segment);
        if !self.removes {
            self.segment.keep_pages();
            self.outgoing.keep_pages();
        }
    }
}
