//! [`Link`]: the queue pair of a connection in shared memory.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::doorbell::{self, NEWS, ROOM};
use super::fault::{LinkFault, Refusal};
use super::incoming::{Consumed, Incoming, RecordContext};
pub(crate) use super::outgoing::TransmitProgress;
use super::outgoing::{INLINE, Outgoing, TransmitContext};
use super::packet::{Announcement, Packet};
use super::record::{RecordHeader, RecordKind};
use super::ring::Consumer;
use super::segment::{CAPACITY, Segment, SegmentPayload, SegmentSide};
use super::windows::{Lendings, Windows};
use crate::cm::ReadDepth;
use crate::error::Result;
use crate::mem::Memory;
use crate::mr::Access;
use crate::provider::PostError;
use crate::qp::SrqId;
use crate::soft::checks;
use crate::soft::completions::{Completions, Done};
use crate::soft::cq::CompletionQueues;
use crate::soft::receive_queue::ReceiveQueue;
use crate::soft::resources::Resources;
use crate::wc::{WcOpcode, WcStatus};
use crate::wr::{RecvWr, SendFlags, SendOp, SendWr};

/// The number of consumed bytes that are released without another reason.
const RELEASE: usize = CAPACITY / 4;

/// The result of [`Link::receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReceiveProgress {
    /// Records were consumed.
    pub(crate) news: bool,
    /// The budget was used up, so records may be left.
    pub(crate) more: bool,
    /// A record refers to an unknown window: the caller must read the packets of the Unix socket first.
    pub(crate) unknown_window: bool,
}

/// The parts of a queue pair that moves from its TCP stream to shared memory.
#[derive(Debug)]
pub(crate) struct QueuePairParts {
    pub(crate) completions: Completions,
    pub(crate) receives: ReceiveQueue,
    pub(crate) extensions: bool,
    /// Work requests that were posted before the move, with the payload of those that are inline.
    pub(crate) sends: Vec<(SendWr, Option<Box<[u8]>>)>,
}

/// The queue pair of a connection in shared memory.
#[derive(Debug)]
pub(crate) struct Link<S> {
    segment: S,
    incoming: Incoming,
    outgoing: Outgoing,
    lendings: Lendings,
    windows: Windows,
    completions: Completions,
    extensions: bool,
    /// True if the connection has ended: work requests complete immediately, as flushed.
    dead: bool,
    /// The events that this side has announced; 0 while it is awake.
    armed: u64,
    /// The status of the work request that has ended the connection, with its number if that is known.
    failed: Option<(Option<u64>, WcStatus)>,
    pub(crate) read_depth: ReadDepth,
}

impl<S: Segment> Link<S> {
    /// Makes a queue pair on a segment, from the parts of the one on the TCP stream.
    pub(crate) fn new(segment: S, side: SegmentSide, depths: ReadDepth, parts: QueuePairParts) -> Self {
        let QueuePairParts { completions, receives, extensions, sends } = parts;
        let (out, into) = (side.outgoing(), side.incoming());
        let mut outgoing = Outgoing::new(out, (depths.responder_resources, depths.initiator_depth));
        sends.into_iter().for_each(|(wr, inline)| outgoing.adopt(wr, inline));
        Self {
            segment,
            incoming: Incoming::new(into, receives),
            outgoing,
            lendings: Lendings::new(out),
            windows: Windows::new(into),
            completions,
            extensions,
            dead: false,
            armed: 0,
            failed: None,
            read_depth: depths,
        }
    }

    /// Announces to the peer that the connection uses its segment from here on.
    pub(crate) fn begin(&mut self) {
        self.outgoing.put_record(&self.segment, RecordHeader::new(RecordKind::Ready, 0), &[]);
    }

    /// Returns true if the peer has written a record to the segment, for which no link was made yet.
    pub(crate) fn has_begun(segment: &S, side: SegmentSide) -> bool {
        Consumer::new(side.incoming()).has_news(segment)
    }

    pub(crate) fn enable_extensions(&mut self) {
        self.extensions = true;
    }

    // Work requests.

    /// Counts a polled completion. Returns the shared receive queue that its receive was taken from; `None` for other
    /// completions.
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

    /// Posts work requests. The caller must call [`Link::transmit`] afterwards.
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
        self.completions.check_send_room(self.outgoing.len())?;
        let len = wr.sges.total_len();
        let terms = checks::SendLimits {
            provider: "shm",
            attr: &self.completions.attr,
            extensions: self.extensions,
            depth: Some(self.outgoing.depth()),
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
                    segment.put(at, &SegmentPayload::Entry(entry));
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
        self.outgoing.post(wr, len);
        Ok(())
    }

    /// Sends a message without a work request. Returns false, and sends nothing, if a work request is waiting in front
    /// of it or the ring is full. The caller must call [`Link::transmit`] afterwards, in this turn or a later one.
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

    // Transmitting and receiving.

    /// Writes as many records to the ring as fit, and completes what is done.
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

    /// Publishes the records that were written to the ring. Returns true if the peer must be called.
    #[inline]
    pub(crate) fn publish(&mut self) -> bool {
        doorbell::publish(&self.segment, &mut self.outgoing.ring)
    }

    /// Returns true if there may be records to consume.
    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        self.incoming.ring.has_news(&self.segment)
    }

    /// Returns true if there are records to consume, or the peer has consumed records that this side waits for.
    #[inline]
    pub(crate) fn has_work(&self) -> bool {
        doorbell::has_work(&self.segment, &self.incoming.ring, &self.outgoing.ring, self.causes())
    }

    /// Consumes records, within a budget in bytes.
    #[inline]
    pub(crate) fn receive(
        &mut self,
        budget: usize,
        resources: &mut Resources,
    ) -> std::result::Result<ReceiveProgress, LinkFault> {
        // The shared receive queue is taken out of its table while this queue pair uses it.
        let srq = self.completions.attr.srq;
        let mut shared = resources.take_out(srq);
        let Self { segment, incoming, outgoing, lendings, windows, completions, extensions, .. } = self;
        let Resources { cqs, keys, .. } = &mut *resources;
        let before = incoming.ring.pos();
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
        let news = incoming.ring.pos() != before;
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

    /// Releases the consumed records if they are many, or if one of them has its payload in a window, whose memory the
    /// peer may be waiting for. Returns true if the peer must be called.
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

    /// Remembers the work request that caused a fault, and its status.
    fn note(&mut self, fault: LinkFault) {
        self.failed = match fault {
            LinkFault::Violation(_) => None,
            LinkFault::WorkRequest(status) => Some((None, status)),
            LinkFault::Refused(refusal) => {
                refusal.status().and_then(|status| Some((Some(self.outgoing.oldest_unanswered()?), status)))
            }
        };
    }

    /// Returns true if a fault was found that ends the connection when the link is served next.
    #[inline]
    pub(crate) const fn has_fault(&self) -> bool {
        self.outgoing.fault.is_some()
    }

    // Announcing events.

    /// Returns the events that this side waits for.
    #[inline]
    fn causes(&self) -> u64 {
        if self.outgoing.wants_room() { NEWS | ROOM } else { NEWS }
    }

    /// Returns true if this side has announced all events that it waits for.
    #[inline]
    pub(crate) fn is_armed(&self) -> bool {
        self.armed & self.causes() == self.causes()
    }

    /// Returns true if this side has announced any event.
    #[inline]
    pub(crate) const fn is_armed_at_all(&self) -> bool {
        self.armed != 0
    }

    /// Announces that this side may sleep: the peer must wake it for records, and for room if it waits for some.
    /// Returns whether there is work already, and whether the peer must be called because consumed records were
    /// released.
    pub(crate) fn arm(&mut self) -> (bool, bool) {
        self.incoming.release_due = false;
        self.armed = self.causes();
        doorbell::arm(&self.segment, &mut self.incoming.ring, &self.outgoing.ring, self.armed)
    }

    /// Marks this side as awake. Unless the peer has called, also withdraws the announced events.
    #[inline]
    pub(crate) fn wake(&mut self, called: bool) {
        if self.armed != 0 && !called {
            doorbell::disarm(&self.segment, &self.incoming.ring);
        }
        self.armed = 0;
    }

    // Lending memory.

    /// Lets the peer map a memory that only this connection uses. The peer may use the region `key` with these rights.
    /// Returns false if no slot is free.
    pub(crate) fn lend(&mut self, memory: &Arc<Memory>, key: u32, rights: Access) -> bool {
        self.lendings.lend(&self.segment, (memory, memory.len(), None), key, rights).is_some()
    }

    /// Ends the lending of a region.
    pub(crate) fn take_back(&mut self, key: u32) {
        self.lendings.take_back(&self.segment, key);
    }

    /// Lets the peer map a direct region that it has used.
    fn lend_direct(&mut self, key: Option<u32>, resources: &Resources) {
        let Some((memory, len, rights)) =
            key.filter(|&key| !self.lendings.has(key)).and_then(|key| resources.keys.direct(key))
        else {
            return;
        };
        self.lendings.lend(&self.segment, (memory, len, None), key.unwrap_or(0), rights);
    }

    /// Returns the next announcement that the caller must send to the peer.
    pub(crate) fn next_announcement(&mut self) -> Option<Announcement> {
        self.lendings.next_announcement()
    }

    #[inline]
    pub(crate) fn has_announcements(&self) -> bool {
        self.lendings.has_announcements()
    }

    /// Processes a packet of the peer, with the descriptor that was attached.
    pub(crate) fn packet(&mut self, packet: Packet, file: Option<&OwnedFd>) {
        let (Packet::Window(announced), Some(file)) = (packet, file) else { return };
        let mapped = self.windows.open(announced, file).inspect_err(|error| {
            log::debug!("cannot map memory of a peer on this host: {error}");
        });
        self.outgoing.reply(announced.slot, announced.word, mapped.is_ok());
    }

    // Teardown.

    /// Reports to the peer that it violated the protocol. The caller then ends the connection.
    pub(crate) fn refuse(&mut self, refusal: Refusal) {
        self.outgoing.put_record(&self.segment, RecordHeader::new(RecordKind::Refusal, 0), &[refusal.code()]);
    }

    /// Ends the connection: flushes both queues. The peer still receives the records in the ring. Returns true if the
    /// peer must be called.
    pub(crate) fn end(&mut self, cqs: &mut CompletionQueues) -> bool {
        let calls = self.publish();
        let Self { incoming, outgoing, completions, failed, .. } = self;
        outgoing.flush(failed.take(), &mut |done| completions.sent(cqs, &done));
        completions.flush_receives(&mut incoming.queue, cqs);
        self.dead = true;
        calls
    }

    /// Returns true if no message, write or response is partly received, so that the peer may end the connection here.
    pub(crate) fn is_at_boundary(&mut self) -> bool {
        self.incoming.is_at_boundary() && self.outgoing.front().is_none_or(|awaited| awaited.done == 0)
    }

    /// Releases the entries of the queue pair on its completion queues, except those of completions that were not
    /// polled. A shared receive that was being filled returns to its queue.
    pub(crate) fn release_queues(&mut self, resources: &mut Resources) {
        self.completions.release(&mut self.incoming.queue, resources);
    }
}
