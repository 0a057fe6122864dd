//! Messages in several buffers. The sender cuts such a message into fragments, each of which uses a credit. The receiver joins the
//! fragments.
//!
//! A message in fragments arrives sooner than an offered message, which the receiver must first read from the sender's memory. All
//! fragments of a message are queued together, without other messages between them, so a fragment needs no sequence number. Fragments stay
//! in their receive buffers until the last one has arrived. So a peer that never sends the last fragment occupies only the receives that
//! were granted to that peer. The sender needs the credits for all fragments before it sends the first one. Without these credits, the
//! message is offered ([`super::transfer`]).

use std::ops::Range;

use rdma_transport::wr::{SendOp, SgeList};

use super::effects::{Event, Fragments};
use super::frame::{FrameHeader, MAX_FOLLOWING, MessageKind};
use super::send_queue::SendQueueEntry;
use super::sending::no_buffer;
use super::{Connection, Env};
use crate::config::Framing;
use crate::device::pool::Buffer;
use crate::error::{PeerViolation, SendErrorKind};
use crate::id::{SendId, SendKind};
use crate::limits::HEADER_LEN;
use crate::memory::operations::Locals;
use crate::memory::region::Region;

impl Connection {
    // Sending.

    /// Returns the number of fragments of a message of `len` bytes. `None` if the message must not be sent in fragments.
    pub(crate) fn parts(&self, len: usize) -> Option<usize> {
        let size = self.terms.buffer_size;
        let parts =
            (self.framing == Framing::Credits && len > size && len <= self.terms.eager).then(|| len.div_ceil(size));
        parts.filter(|&parts| parts <= MAX_FOLLOWING as usize)
    }

    /// Returns true if a message of `len` bytes can be queued in fragments now.
    pub(crate) fn may_cut(&self, len: usize) -> bool {
        self.parts(len).is_some_and(|parts| parts <= self.writable())
    }

    /// Returns the range of each fragment of a message of `len` bytes, with the number of fragments after it.
    fn cut(&self, len: usize) -> impl Iterator<Item = (Range<usize>, u32)> + use<> {
        let size = self.terms.buffer_size;
        let count = len.div_ceil(size);
        (0..count).map(move |nth| (nth * size..len.min((nth + 1) * size), (count - 1 - nth) as u32))
    }

    /// Queues a message that [`Connection::may_cut`] allows. `fill` copies a range of the payload
    /// into a buffer, or returns false if it cannot read the payload. If `reported` is true, the
    /// end of the message is always reported to the program.
    pub(crate) fn send_cut(
        &mut self,
        len: usize,
        reported: bool,
        env: &mut Env<'_>,
        fill: impl Fn(Range<usize>, &mut [u8]) -> bool,
    ) -> Result<SendId, SendErrorKind> {
        let mut last = Err(SendErrorKind::Closed);
        for (range, following) in self.cut(len) {
            let Some(mut buffer) = env.buffers.pool.take() else { return Err(no_buffer()) };
            let end = HEADER_LEN + range.len();
            if !fill(range.clone(), &mut env.buffers.pool.slabs().bytes_mut(&mut buffer)[HEADER_LEN..end]) {
                env.buffers.pool.give(buffer);
                return Err(SendErrorKind::Sealed);
            }
            let header = self.header(MessageKind::Fragment).emit_before(following);
            let (posted, sge) = env.buffers.pool.post_behind(buffer, header, range.len());
            let id = (following == 0).then(|| self.sends.name(SendKind::Message));
            self.sends.push(SendQueueEntry::message(posted, id), SendOp::Send, SgeList::one(sge));
            last = id.ok_or(SendErrorKind::Closed);
        }
        if reported {
            self.sends.report_last();
        }
        self.count_sent(len, env);
        last
    }

    /// Queues a message that [`Connection::may_cut`] allows. The device reads its payload from the range `from` of a region.
    pub(crate) fn send_cut_from(
        &mut self,
        region: &Region,
        from: &Range<usize>,
        env: &mut Env<'_>,
    ) -> Result<SendId, SendErrorKind> {
        let mut last = Err(SendErrorKind::Closed);
        for (range, following) in self.cut(from.len()) {
            let locals = Locals::to_read(&[(region, from.start + range.start..from.start + range.end)])?;
            let Some(buffer) = env.buffers.pool.take() else { return Err(no_buffer()) };
            let header = self.header(MessageKind::Fragment).emit_before(following);
            let id = (following == 0).then(|| self.sends.name(SendKind::Message));
            self.sends.push_gathered(&env.buffers.pool, buffer, header, id, locals);
            last = id.ok_or(SendErrorKind::Closed);
        }
        self.count_sent(from.len(), env);
        last
    }

    // Receiving.

    /// Handles a fragment of a message.
    pub(super) fn received_fragment(
        &mut self,
        buffer: Buffer,
        end: u32,
        env: &mut Env<'_>,
    ) -> Result<(), PeerViolation> {
        if !self.state.delivers() {
            self.discard(buffer, env);
            return Ok(());
        }
        let message = env.buffers.pool.slabs().bytes(&buffer, end as usize);
        let (len, following) = (message.len() - HEADER_LEN, FrameHeader::following(message));
        let before = self.transfers.joining().map(|joined| (joined.len, joined.following));
        let (so_far, begins) = (before.map_or(0, |(len, _)| len), before.is_none());
        let expected = match before {
            Some((_, left)) => following + 1 == left,
            None => following > 0,
        };
        let violation = if len == 0 || !expected {
            Some(PeerViolation::MalformedMessage)
        } else if following > self.rx.left() {
            // The header announces more fragments than the peer has credits for. An honest peer has the credits for all fragments before it
            // sends the first one.
            Some(PeerViolation::CreditOverrun)
        } else {
            ((so_far + len) as u64 > env.config.large.max_message).then_some(PeerViolation::InvalidOffer)
        };
        if let Some(violation) = violation {
            self.discard(buffer, env);
            return Err(violation);
        }
        let joined = self.transfers.join(env.device, env.now);
        if crate::planted("fragments-in-the-wrong-order") && joined.parts.len() == 2 {
            joined.parts.insert(1, (buffer, end));
        } else {
            joined.parts.push((buffer, end));
        }
        (joined.len, joined.following) = (so_far + len, following);
        if begins || crate::planted("each-part-begins-anew") {
            joined.since = env.now;
        }
        self.receives.hold();
        // While the connection ends, its timer is the flush timeout, which ends an incomplete
        // message too.
        if begins && self.state.is_open() {
            self.watch_transfers(env);
        }
        if following == 0 {
            if let Some(joined) = self.transfers.take_joined() {
                self.deliver_fragments(joined, env);
            }
        }
        Ok(())
    }

    /// Passes a complete message in several buffers to the program.
    pub(super) fn deliver_fragments(&mut self, joined: Box<Fragments>, env: &mut Env<'_>) {
        for _ in &joined.parts {
            self.receives.release();
        }
        env.stats.messages.received += 1;
        env.stats.messages.bytes_received += joined.len as u64;
        self.tell(env, Event::Fragments(joined));
    }

    /// Frees the receives of a message in several buffers that is not delivered.
    pub(super) fn discard_fragments(&mut self, fragments: Fragments, env: &mut Env<'_>) {
        let shared = self.receives.is_shared();
        for (buffer, _) in fragments.parts {
            self.receives.release();
            env.buffers.free_receive(buffer, shared);
        }
    }

    /// Keeps the allocation of `joined`, to reuse it for the next message in several buffers.
    pub(crate) fn recycle(&mut self, joined: Box<Fragments>) {
        self.transfers.recycle(joined);
    }
}
