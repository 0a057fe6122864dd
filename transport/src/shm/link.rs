//! The queue pair of a connection within the host.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::doorbell::{self, NEWS, ROOM};
use super::fault::{Fault, Refusal};
use super::incoming::{Consumed, Context, Incoming};
pub(crate) use super::outgoing::Sent;
use super::outgoing::{INLINE, Outgoing, Peer};
use super::packet::{Announcement, Packet};
use super::record::{Header, Kind};
use super::ring::Consumer;
use super::segment::{CAPACITY, Payload, Segment, Side};
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

/// Tells the producer of what was consumed when it is so much of a ring.
const RELEASE: usize = CAPACITY / 4;

/// The result of consuming.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Received {
    /// Something has come.
    pub(crate) news: bool,
    /// Something may be left.
    pub(crate) more: bool,
    /// Packets have to be read before it can go on.
    pub(crate) unknown_window: bool,
}

/// What a queue pair brings along when it leaves its TCP stream.
#[derive(Debug)]
pub(crate) struct Luggage {
    pub(crate) completions: Completions,
    pub(crate) receives: ReceiveQueue,
    pub(crate) extensions: bool,
    /// Work requests that were posted before, with the payload of those that are inline.
    pub(crate) sends: Vec<(SendWr, Option<Box<[u8]>>)>,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Link<S> {
    segment: S,
    incoming: Incoming,
    outgoing: Outgoing,
    lendings: Lendings,
    windows: Windows,
    completions: Completions,
    extensions: bool,
    /// The connection has ended: work requests are flushed at once.
    dead: bool,
    /// What this side has said that it is to be called for.
    armed: u64,
    /// The status of the work request that has ended the connection, and its number if that is known.
    failed: Option<(Option<u64>, WcStatus)>,
    pub(crate) read_depth: ReadDepth,
}

impl<S: Segment> Link<S> {
    /// The queue pair `luggage` is of, on a segment.
    pub(crate) fn new(segment: S, side: Side, depths: ReadDepth, luggage: Luggage) -> Self {
        let Luggage { completions, receives, extensions, sends } = luggage;
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

    /// Says that the connection is in its segment from here on.
    pub(crate) fn begin(&mut self) {
        self.outgoing.say(&self.segment, Header::new(Kind::Ready, 0), &[]);
    }

    /// Whether the peer has begun, in a segment that no link is made of yet.
    pub(crate) fn has_begun(segment: &S, side: Side) -> bool {
        Consumer::new(side.incoming()).has_news(segment)
    }

    pub(crate) fn enable_extensions(&mut self) {
        self.extensions = true;
    }

    // Work requests.

    /// Takes note of a polled completion. Returns the shared queue that its receive came from, if it did.
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

    /// Takes work requests. The caller calls [`Link::transmit`] afterwards.
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
        let terms = checks::Terms {
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
                    segment.put(at, &Payload::Entry(entry));
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

    /// Sends a message that ends with this call, if nothing is in front of it and there is room. The caller calls [`Link::transmit`]
    /// afterwards, at once or later.
    #[inline]
    pub(crate) fn send_now(&mut self, header: &[u8], payload: &[u8]) -> bool {
        let len = header.len() + payload.len();
        if self.dead || !self.outgoing.is_clear() {
            return false;
        }
        if len > INLINE {
            return self.outgoing.message_elsewhere(&self.segment, &mut self.lendings, [header, payload]);
        }
        self.outgoing.message(&self.segment, len, |segment, at| {
            segment.put(at, &Payload::Bytes(header));
            segment.put(at + header.len(), &Payload::Bytes(payload));
        })
    }

    // Moving.

    /// Puts as much into the ring as there is and fits, and lets the peer see it.
    #[inline]
    pub(crate) fn transmit(&mut self, resources: &mut Resources) -> Sent {
        if self.outgoing.wants_room() {
            return self.transmit_rest(resources);
        }
        Sent::All
    }

    #[inline(never)]
    fn transmit_rest(&mut self, resources: &mut Resources) -> Sent {
        let Resources { cqs, keys, .. } = resources;
        let Self { segment, outgoing, lendings, windows, completions, .. } = self;
        let mut peer = Peer { scope: completions.id.0, keys, lendings, windows, direct: None };
        let sent = outgoing.transmit(segment, &mut peer, &mut |done| completions.sent(cqs, &done));
        let direct = peer.direct;
        self.lend_direct(direct, resources);
        sent
    }

    /// Lets the peer see what was put into the ring. Returns whether it is to be called.
    #[inline]
    pub(crate) fn publish(&mut self) -> bool {
        doorbell::publish(&self.segment, &mut self.outgoing.ring)
    }

    /// Whether there may be something to consume.
    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        self.incoming.ring.has_news(&self.segment)
    }

    /// Whether there is something to consume, or the peer has consumed something that this side waits for.
    #[inline]
    pub(crate) fn is_stirring(&self) -> bool {
        doorbell::is_stirring(&self.segment, &self.incoming.ring, &self.outgoing.ring, self.causes())
    }

    /// Consumes what has come, within a budget in bytes.
    #[inline]
    pub(crate) fn receive(&mut self, budget: usize, resources: &mut Resources) -> std::result::Result<Received, Fault> {
        // The shared queue is taken out of its table while this queue pair uses it.
        let srq = self.completions.attr.srq;
        let mut shared = resources.take_out(srq);
        let Self { segment, incoming, outgoing, lendings, windows, completions, extensions, .. } = self;
        let Resources { cqs, keys, .. } = &mut *resources;
        let before = incoming.ring.pos();
        let mut cx = Context {
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
        Ok(Received { news, more: consumed == Consumed::Budget, unknown_window: consumed == Consumed::UnknownWindow })
    }

    /// Tells the peer what was consumed, if that is worth it or it may wait for it. Returns whether it is to be called.
    #[inline]
    pub(crate) fn release(&mut self) -> bool {
        let ring = &mut self.incoming.ring;
        let due = ring.owed() >= RELEASE || (self.incoming.holds && ring.owed() > 0);
        if !due {
            return false;
        }
        self.incoming.holds = false;
        doorbell::release(&self.segment, ring, &self.outgoing.ring)
    }

    /// Remembers the work request that a fault is about.
    fn note(&mut self, fault: Fault) {
        self.failed = match fault {
            Fault::Violation(_) => None,
            Fault::WorkRequest(status) => Some((None, status)),
            Fault::Refused(refusal) => {
                refusal.status().and_then(|status| Some((Some(self.outgoing.oldest_awaited()?), status)))
            }
        };
    }

    /// Whether something was found that ends the connection, when it is served next.
    #[inline]
    pub(crate) const fn has_fault(&self) -> bool {
        self.outgoing.fault.is_some()
    }

    // Sleeping.

    /// What this side waits for.
    #[inline]
    fn causes(&self) -> u64 {
        if self.outgoing.wants_room() { NEWS | ROOM } else { NEWS }
    }

    /// Whether this side is called for all that it waits for.
    #[inline]
    pub(crate) fn is_armed(&self) -> bool {
        self.armed & self.causes() == self.causes()
    }

    /// Whether this side is called for anything.
    #[inline]
    pub(crate) const fn is_armed_at_all(&self) -> bool {
        self.armed != 0
    }

    /// Says that this side may sleep: it is called for news, and for room if it waits for some. Returns whether there is something
    /// already, and whether the peer is to be called, because it was not told before what was consumed.
    pub(crate) fn arm(&mut self) -> (bool, bool) {
        self.incoming.holds = false;
        self.armed = self.causes();
        doorbell::arm(&self.segment, &mut self.incoming.ring, &self.outgoing.ring, self.armed)
    }

    /// Notes that the peer has called, or says that it need not.
    #[inline]
    pub(crate) fn wake(&mut self, called: bool) {
        if self.armed != 0 && !called {
            doorbell::disarm(&self.segment, &self.incoming.ring);
        }
        self.armed = 0;
    }

    // Memory that is lent.

    /// Lets the peer map a memory of this connection alone. `key` is that of its region here, which the peer may use with these rights.
    /// Returns whether there is a slot for it.
    pub(crate) fn lend(&mut self, memory: &Arc<Memory>, key: u32, rights: Access) -> bool {
        self.lendings.lend(&self.segment, (memory, memory.len(), None), key, rights).is_some()
    }

    /// Takes a region back that was lent.
    pub(crate) fn take_back(&mut self, key: u32) {
        self.lendings.take_back(&self.segment, key);
    }

    /// Lets the peer map a region that it has used, and that both sides may use.
    fn lend_direct(&mut self, key: Option<u32>, resources: &Resources) {
        let Some((memory, len, rights)) =
            key.filter(|&key| !self.lendings.has(key)).and_then(|key| resources.keys.direct(key))
        else {
            return;
        };
        self.lendings.lend(&self.segment, (memory, len, None), key.unwrap_or(0), rights);
    }

    /// The next packet that the peer is to get, with a descriptor.
    pub(crate) fn next_announcement(&mut self) -> Option<Announcement> {
        self.lendings.next_announcement()
    }

    #[inline]
    pub(crate) fn has_announcements(&self) -> bool {
        self.lendings.has_announcements()
    }

    /// Takes a packet of the peer, and the descriptor that came with it.
    pub(crate) fn packet(&mut self, packet: Packet, file: Option<&OwnedFd>) {
        let (Packet::Window(announced), Some(file)) = (packet, file) else { return };
        let mapped = self.windows.open(announced, file).inspect_err(|error| {
            log::debug!("memory of a peer on this host is not mapped: {error}");
        });
        self.outgoing.reply(announced.slot, announced.word, mapped.is_ok());
    }

    // The end.

    /// Tells the peer that it has done what it may not. The end follows.
    pub(crate) fn refuse(&mut self, refusal: Refusal) {
        self.outgoing.say(&self.segment, Header::new(Kind::Refusal, 0), &[refusal.code()]);
    }

    /// Ends the connection: what is left of both queues is flushed. The peer gets what is in the ring. Returns whether it is to be called.
    pub(crate) fn end(&mut self, cqs: &mut CompletionQueues) -> bool {
        let calls = self.publish();
        let Self { incoming, outgoing, completions, failed, .. } = self;
        outgoing.flush(failed.take(), &mut |done| completions.sent(cqs, &done));
        completions.flush_receives(&mut incoming.queue, cqs);
        self.dead = true;
        calls
    }

    /// Whether the peer could end here without cutting a message off.
    pub(crate) fn is_at_boundary(&mut self) -> bool {
        self.incoming.is_at_boundary() && self.outgoing.front().is_none_or(|awaited| awaited.done == 0)
    }

    /// Gives up the room of the queue pair on its completion queues, but for completions that were not polled. A receive of a shared queue
    /// that was being filled goes back there.
    pub(crate) fn release_queues(&mut self, resources: &mut Resources) {
        self.completions.release(&mut self.incoming.queue, resources);
    }
}
