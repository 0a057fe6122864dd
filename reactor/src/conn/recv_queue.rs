//! The receives of a connection, and the messages that arrive in them. A connection either has its own receive queue, or claims receives of
//! the device's shared receive queue.

use std::collections::VecDeque;
use std::mem;
use std::time::{Duration, Instant};

use rdma_transport::mr::RemoteKey;
use rdma_transport::wc::{Failure, WcStatus};
use rdma_transport::wr::{RecvWr, SgeList};

use super::admit::{Admission, admit};
use super::credit::ReceiveWindow;
use super::effects::{Action, Arrived, Event};
use super::frame::{FrameHeader, Immediate, MessageKind, Offer, TransferProgress};
use super::setup::Early;
use super::state::State;
use super::{Connection, Env};
use crate::config::Framing;
use crate::device::Buffers;
use crate::device::pool::{Buffer, Pool, Posted};
use crate::device::srq::claims::Claim;
use crate::error::{Outcome, PeerViolation};
use crate::id::{ConnectionId, recv_wr_id};
use crate::limits::{CONTROL_CREDITS, HEADER_LEN, message_len};
use crate::security::Opener;

/// The receive queue of one connection.
#[derive(Debug)]
pub(crate) struct RecvQueue {
    source: ReceiveSource,
    /// The number of messages that the program keeps after their callback has returned. The receives of these messages cannot be posted
    /// again yet.
    kept: u32,
    /// The number of arrived messages that are not delivered yet, because an earlier large message must be delivered first.
    held: u32,
    /// The number of messages that the program kept in a callback and released before that callback returned.
    early: u32,
    occupation: Occupation,
}

/// The result of the checks for a peer that can send no data, because messages that the program
/// keeps occupy all receives for data.
#[derive(Clone, Copy, Debug)]
enum Occupation {
    /// At the last check, a receive was free, or the program has released a message since.
    No,
    /// All receives for data were occupied at each check since this time, and the program has
    /// released no message since.
    Since(Instant),
    /// Like `Since`, and the occupation was reported.
    Reported,
}

#[derive(Debug)]
enum ReceiveSource {
    Own {
        /// The buffers of the posted receives, in the order of posting.
        posted: VecDeque<Posted>, // bound: receives
        depth: u32,
        /// The length of one receive, in bytes.
        size: usize,
    },
    Shared(Claim),
}

impl RecvQueue {
    /// Creates the queue of a connection that does not use the shared queue, with `depth` receives of `size` bytes each. No receive is
    /// posted yet.
    pub(crate) fn own(depth: u32, size: usize) -> Self {
        let posted = VecDeque::with_capacity(depth as usize);
        Self::of(ReceiveSource::Own { posted, depth, size })
    }

    /// Creates the queue of a connection that uses the device's shared receive queue. `claim` is the connection's share of that queue.
    pub(crate) const fn shared(claim: Claim) -> Self {
        Self::of(ReceiveSource::Shared(claim))
    }

    const fn of(source: ReceiveSource) -> Self {
        Self { source, kept: 0, held: 0, early: 0, occupation: Occupation::No }
    }

    /// Creates a queue without receives, for a connection that has no device yet.
    pub(crate) fn none() -> Self {
        Self::own(0, 0)
    }

    #[inline]
    pub(crate) const fn is_shared(&self) -> bool {
        matches!(self.source, ReceiveSource::Shared(_))
    }

    /// Returns the claim on the shared queue. `None` if the connection has its own receive queue.
    pub(crate) const fn claim(&mut self) -> Option<&mut Claim> {
        match &mut self.source {
            ReceiveSource::Own { .. } => None,
            ReceiveSource::Shared(claim) => Some(claim),
        }
    }

    /// Returns the number of messages that the program keeps after their callback has returned.
    pub(crate) const fn kept(&self) -> u32 {
        self.kept
    }

    /// Returns the number of receives that are posted to the queue pair's own receive queue. 0 if the connection uses the shared queue.
    #[inline]
    pub(crate) fn posted(&self) -> usize {
        match &self.source {
            ReceiveSource::Own { posted, .. } => posted.len(),
            ReceiveSource::Shared(_) => 0,
        }
    }

    /// Returns the buffer of a completed receive. `slot` is the position of the receive in the
    /// shared queue, if the connection uses that queue. Returns `None` if no such receive is
    /// posted.
    #[inline]
    pub(crate) fn complete(&mut self, buffers: &mut Buffers, slot: u16) -> Option<Buffer> {
        match &mut self.source {
            ReceiveSource::Own { posted, .. } => posted.pop_front().map(Posted::done),
            ReceiveSource::Shared(_) => buffers.shared.as_mut()?.take(slot),
        }
    }

    /// Counts an arrived message that carries data of the peer's program. The claim on the shared queue grows with the number of such
    /// messages.
    #[inline]
    pub(crate) const fn count(&mut self) {
        if let ReceiveSource::Shared(claim) = &mut self.source {
            claim.count();
        }
    }

    /// Notes that a message cannot be delivered before an earlier large message, so that it occupies its receive until then.
    pub(crate) const fn hold(&mut self) {
        self.held += 1;
        if let ReceiveSource::Shared(claim) = &mut self.source {
            claim.keep();
        }
    }

    /// Notes that a message no longer waits for an earlier large message, and releases the receive of the message.
    pub(crate) const fn release(&mut self) {
        self.held = self.held.saturating_sub(1);
        if let ReceiveSource::Shared(claim) = &mut self.source {
            claim.release(1);
        }
    }

    /// Notes that the program keeps a delivered message, so that its receive cannot be posted
    /// again. Returns by how much [`Self::kept`] has grown.
    const fn keep(&mut self) -> usize {
        if self.early > 0 {
            self.early -= 1;
            return 0;
        }
        self.kept += 1;
        if let ReceiveSource::Shared(claim) = &mut self.source {
            claim.keep();
        }
        1
    }

    /// Notes that the program has released a message that it kept. If the program does this inside
    /// the callback of the message, this function is called before [`RecvQueue::keep`]. Returns by
    /// how much [`Self::kept`] has fallen.
    fn unkeep(&mut self) -> usize {
        self.occupation = Occupation::No;
        if self.kept == 0 {
            self.early += 1;
            0
        } else if crate::planted("detached-buffer-not-posted") {
            0
        } else {
            self.kept -= 1;
            if let ReceiveSource::Shared(claim) = &mut self.source {
                claim.release(1);
            }
            1
        }
    }

    /// Checks if messages that the program keeps have occupied all receives for data for the time
    /// `limit`, so that the peer can send no data. If so, returns the number of these messages as
    /// `Err`, once for each such period. Otherwise returns the time of the next check, or `None` if
    /// none is needed.
    pub(crate) fn check_occupation(&mut self, limit: Duration, now: Instant) -> Result<Option<Instant>, u32> {
        let receives = match &self.source {
            ReceiveSource::Own { depth, .. } => *depth,
            ReceiveSource::Shared(claim) => claim.receives(),
        };
        if self.kept + CONTROL_CREDITS < receives {
            self.occupation = Occupation::No;
            return Ok(None);
        }
        let since = match self.occupation {
            Occupation::No => now,
            Occupation::Since(since) => since,
            Occupation::Reported => return Ok(None),
        };
        let is_over = since + limit <= now;
        self.occupation = if is_over { Occupation::Reported } else { Occupation::Since(since) };
        if is_over { Err(self.kept) } else { Ok(Some(since + limit)) }
    }

    /// Returns the number of receives that can be posted to the connection's own receive queue: those that are not posted, and whose last
    /// message is neither kept by the program nor waiting for delivery.
    pub(crate) fn to_post(&self) -> u32 {
        match &self.source {
            ReceiveSource::Own { posted, depth, .. } => {
                depth.saturating_sub(posted.len() as u32 + self.kept + self.held)
            }
            ReceiveSource::Shared(_) => 0,
        }
    }

    /// Returns true if enough receives of the connection's own receive queue are free, so that they should be posted now.
    #[inline]
    pub(crate) fn worth_posting(&self, window: &ReceiveWindow) -> bool {
        match &self.source {
            ReceiveSource::Own { depth, .. } => window.worth_posting(self.to_post(), *depth),
            ReceiveSource::Shared(_) => false,
        }
    }

    /// Returns true if receives should be posted now, or a grant of credits is due to the peer.
    #[inline]
    pub(crate) fn owes_grant(&self, window: &ReceiveWindow) -> bool {
        match &self.source {
            ReceiveSource::Own { depth, .. } => window.grant_due(self.to_post(), *depth),
            ReceiveSource::Shared(_) => window.update_due(),
        }
    }

    /// Takes buffers for all receives that can be posted, and writes the work requests of these receives to `chain`. Returns the number of
    /// these receives. If the pool runs out of buffers, the remaining receives are posted in a later call.
    pub(crate) fn prepare(&mut self, id: ConnectionId, pool: &mut Pool, chain: &mut Vec<RecvWr>) -> u32 {
        chain.clear();
        let free = self.to_post();
        let ReceiveSource::Own { posted, size, .. } = &mut self.source else { return 0 };
        let wr_id = recv_wr_id(id);
        let mut count = 0;
        while count < free {
            let Some(buffer) = pool.take() else { break };
            let (buffer, sge) = pool.post(buffer, *size);
            posted.push_back(buffer);
            chain.push(RecvWr { wr_id, sges: SgeList::one(sge) });
            count += 1;
        }
        count
    }

    /// Returns the buffers of the last `count` prepared receives to the pool, because these receives could not be posted.
    pub(crate) fn unprepare(&mut self, pool: &mut Pool, count: usize) {
        let ReceiveSource::Own { posted, .. } = &mut self.source else { return };
        for _ in 0..count {
            if let Some(buffer) = posted.pop_back() {
                pool.give(buffer.done());
            }
        }
    }

    /// Adjusts the claim of the connection `id` on the shared queue. Returns the number of receives
    /// that were added to the claim, and that may be granted to the peer.
    pub(crate) fn renew(
        &mut self,
        id: ConnectionId,
        buffers: &mut Buffers,
        window: &ReceiveWindow,
        most: u32,
        now: Instant,
    ) -> u32 {
        let (ReceiveSource::Shared(claim), Some(shared)) = (&mut self.source, &mut buffers.shared) else { return 0 };
        let more = shared.claims.renew(claim, window.outstanding(), most, now);
        shared.claims.note_shortage(id, claim, window.lacking(more), most);
        more
    }

    /// Makes sure that the buffers of the posted receives are never reused: the queue pair could not be destroyed, so the device may still
    /// write to these buffers. Returns the number of these buffers.
    pub(super) fn forsake(&mut self) -> usize {
        match &mut self.source {
            ReceiveSource::Own { posted, .. } => posted.drain(..).count(),
            ReceiveSource::Shared(_) => 0,
        }
    }

    /// Returns the buffers of the posted receives to the pool. The caller has destroyed the queue pair.
    pub(crate) fn empty(&mut self, pool: &mut Pool) {
        if let ReceiveSource::Own { posted, .. } = &mut self.source {
            posted.drain(..).for_each(|buffer| pool.give(buffer.done()));
        }
    }
}

/// A receive that has completed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completed {
    pub(crate) result: Result<(), Failure>,
    /// The number of bytes that arrived.
    pub(crate) len: u32,
    /// The immediate data, if the peer has sent a Write with Immediate.
    pub(crate) immediate: Option<u32>,
    /// The remote key that a Send with Invalidate from the peer has invalidated.
    pub(crate) invalidated: Option<RemoteKey>,
}

impl Connection {
    /// Handles a completed receive. `slot` is the position of the receive in the shared queue, if
    /// the connection uses that queue. Returns false if no such receive is posted.
    #[inline]
    pub(crate) fn received(&mut self, slot: u16, wc: &Completed, env: &mut Env<'_>) -> bool {
        let Some(mut buffer) = self.receives.complete(env.buffers, slot) else { return false };
        if let Err(failure) = wc.result {
            self.receive_failed(buffer, failure, env);
            return true;
        }
        if !crate::planted("keepalive-is-deaf") {
            self.keepalive.heard = env.now;
        }
        if let Some(key) = wc.invalidated {
            self.want(env, Action::Invalidated { device: env.device, key });
        }
        if wc.immediate.is_some() || self.framing == Framing::Raw {
            self.received_bare(buffer, (wc.len, wc.immediate), env);
            return true;
        }
        // A message that cannot be decrypted may have been sent by an attacker, so its contents are ignored.
        let opened = match &mut self.opener {
            Some(opener) => open(opener, &mut buffer, wc.len, &env.buffers.pool),
            None => Some(wc.len),
        };
        let len = opened.unwrap_or(0);
        let message = env.buffers.pool.slabs().bytes(&buffer, len as usize);
        let header = match FrameHeader::parse(message) {
            _ if opened.is_none() => Err(PeerViolation::NotAuthentic),
            // A buffer is slightly longer than the longest permitted message, so the length must be checked.
            _ if len as usize > message_len(env.config.buffer_size) => Err(PeerViolation::MalformedMessage),
            None => {
                self.received_unlike(buffer, len, env);
                return true;
            }
            Some(_) if !self.rx.received() => Err(PeerViolation::CreditOverrun),
            Some(header) if self.tx.grant(header.grant).is_err() => Err(PeerViolation::InvalidGrant),
            Some(header) => Ok(header),
        };
        if crate::planted("credit-at-completion") {
            self.rx.posted(1);
        }
        match header {
            Ok(FrameHeader { kind: MessageKind::Data, .. }) if self.state.delivers() && !self.transfers.holds() => {
                debug_assert_eq!(admit(self.stage(), MessageKind::Data), Admission::Take);
                self.receives.count();
                let (device, shared) = (env.device as u16, self.receives.is_shared());
                let arrived = Arrived { buffer: Some(buffer), start: HEADER_LEN as u32, end: len, device, shared };
                self.deliver(arrived, env);
            }
            Ok(header) => self.received_other(header.kind, buffer, len, env),
            Err(violation) => {
                self.discard(buffer, env);
                self.violated(violation, env);
            }
        }
        self.after_message(env);
        true
    }

    /// Requests the steps that follow an arrived message: a check if a refused send would be accepted now, and a flush if the connection
    /// has something to post.
    #[inline]
    fn after_message(&mut self, env: &mut Env<'_>) {
        if self.refused.is_some() && !crate::planted("on-writable-lost") {
            env.effects.to_ask.push_back(self.id);
        }
        if !self.is_marked() && self.has_to_post() {
            self.mark(env);
        }
    }

    /// Handles a message whose header [`FrameHeader::parse`] does not accept. Such a message is either a fragment that is not the last one,
    /// or a protocol violation.
    #[cold]
    fn received_unlike(&mut self, buffer: Buffer, len: u32, env: &mut Env<'_>) {
        let message = env.buffers.pool.slabs().bytes(&buffer, len as usize);
        let header = match FrameHeader::parse_fragment(message) {
            None => Err(PeerViolation::MalformedMessage),
            Some(_) if !self.rx.received() => Err(PeerViolation::CreditOverrun),
            Some(header) if self.tx.grant(header.grant).is_err() => Err(PeerViolation::InvalidGrant),
            Some(header) => Ok(header),
        };
        match header {
            Ok(header) => self.received_other(header.kind, buffer, len, env),
            Err(violation) => {
                self.discard(buffer, env);
                self.violated(violation, env);
            }
        }
        self.after_message(env);
    }

    /// Returns true if the next flush may have something to post because a message arrived, or because the program released a message.
    #[inline]
    fn has_to_post(&self) -> bool {
        self.receives.is_shared()
            || self.receives.worth_posting(&self.rx)
            || self.owes_control() && !crate::planted("a-credit-posts-no-ping")
            || self.sends.is_chained()
            || self.feeds_itself()
            || self.state.is_securing()
    }

    /// Passes a message to the program.
    #[inline(always)]
    pub(super) fn deliver(&mut self, arrived: Arrived, env: &mut Env<'_>) {
        env.stats.messages.received += 1;
        env.stats.messages.bytes_received += u64::from(arrived.end - arrived.start);
        let is_next = !env.effects.has_events() || crate::planted("a-message-overtakes");
        if env.effects.arrived.is_none() && is_next {
            env.effects.arrived = Some((self.id, arrived));
        } else {
            self.tell(env, Event::Message(arrived));
        }
    }

    /// Frees the buffer of a receive, so that the receive can be posted again.
    pub(super) fn discard(&mut self, buffer: Buffer, env: &mut Env<'_>) {
        if !(crate::planted("buffer-leaked-while-closing") && self.state.is_ending()) {
            env.buffers.free_receive(buffer, self.receives.is_shared());
        }
        if self.receives.worth_posting(&self.rx) && self.exchanges() {
            self.mark(env);
        }
    }

    /// Notes that the program keeps a message after its callback.
    pub(crate) fn keep_message(&mut self, env: &mut Env<'_>) {
        env.stats.memory.held_receives += self.receives.keep();
    }

    /// Handles the program's release of a message that it kept.
    pub(crate) fn message_returned(&mut self, buffer: Buffer, env: &mut Env<'_>) {
        env.stats.memory.held_receives -= self.receives.unkeep();
        env.buffers.free_receive(buffer, self.receives.is_shared());
        if !self.is_marked() && self.has_to_post() {
            self.mark(env);
        }
    }

    fn receive_failed(&mut self, buffer: Buffer, failure: Failure, env: &mut Env<'_>) {
        self.discard(buffer, env);
        // A failed receive is expected in two states. In `Closing`, the queues are being flushed. In `Connecting`, a flushed receive means
        // that connecting has failed, and the connection manager is about to report the cause.
        let expected = match self.state {
            State::Closing(_) => true,
            State::Connecting(_) => failure.status == WcStatus::Flushed,
            _ => false,
        };
        if !expected {
            self.work_request_failed(failure, env);
        }
    }

    /// Handles a message with a header, except data that can be delivered immediately.
    fn received_other(&mut self, kind: MessageKind, buffer: Buffer, len: u32, env: &mut Env<'_>) {
        self.hello_arrived(env);
        let admission = admit(self.stage(), kind);
        let opens = kind == MessageKind::Hello && !self.is_active() && self.state.is_handshake();
        if crate::planted("plain-byte-in-the-handshake") && admission == Admission::Violation && opens {
            self.discard(buffer, env);
            return self.announce(env);
        }
        let done = match admission {
            Admission::Take => self.take(kind, buffer, len, env),
            Admission::Ignore => {
                self.discard(buffer, env);
                Ok(())
            }
            Admission::Violation => {
                self.discard(buffer, env);
                Err(PeerViolation::MalformedMessage)
            }
        };
        if let Err(violation) = done {
            self.violated(violation, env);
        }
    }

    /// Handles a message that the table in [`admit`](super::admit) permits in this stage.
    fn take(&mut self, kind: MessageKind, buffer: Buffer, len: u32, env: &mut Env<'_>) -> Result<(), PeerViolation> {
        if kind.is_of_program() {
            self.receives.count();
        }
        match kind {
            MessageKind::Data => self.received_data(buffer, len, env),
            MessageKind::Fragment => return self.received_fragment(buffer, len, env),
            MessageKind::Handshake => {
                let bytes = self.parse(buffer, len, env, |payload| Some(payload.to_vec()))?;
                return self.received_handshake(&bytes, env);
            }
            MessageKind::Offer => {
                return self.parse(buffer, len, env, Offer::parse).and_then(|offer| self.offered(offer, env));
            }
            MessageKind::Fetched | MessageKind::Refused => {
                let outcome = if kind == MessageKind::Fetched { Outcome::Sent } else { Outcome::Refused };
                let number = self.parse(buffer, len, env, |payload| payload.try_into().ok().map(u32::from_le_bytes))?;
                return self.fetched(number, outcome, env);
            }
            MessageKind::Progress => {
                return self
                    .parse(buffer, len, env, TransferProgress::parse)
                    .and_then(|progress| self.progressed(progress, env));
            }
            MessageKind::Immediate => {
                let immediate = self.parse(buffer, len, env, Immediate::parse)?;
                self.deliver_immediate(immediate, env);
            }
            MessageKind::Hello => {
                self.discard(buffer, env);
                self.greeted(env);
            }
            MessageKind::Ping => {
                self.discard(buffer, env);
                self.keepalive.owes_pong = true;
            }
            MessageKind::Goodbye => {
                self.discard(buffer, env);
                self.peer_left(env);
            }
            MessageKind::Credit | MessageKind::Pong => self.discard(buffer, env),
        }
        Ok(())
    }

    /// Parses the payload of a message with `parse`, and frees the buffer of the message.
    fn parse<T>(
        &mut self,
        buffer: Buffer,
        len: u32,
        env: &mut Env<'_>,
        parse: impl FnOnce(&[u8]) -> Option<T>,
    ) -> Result<T, PeerViolation> {
        let message = env.buffers.pool.slabs().bytes(&buffer, len as usize);
        let parsed = parse(&message[HEADER_LEN..]);
        self.discard(buffer, env);
        parsed.ok_or(PeerViolation::MalformedMessage)
    }

    /// Handles a data message that cannot be delivered now, because an earlier message must be delivered first, or the connection is
    /// ending.
    fn received_data(&mut self, buffer: Buffer, len: u32, env: &mut Env<'_>) {
        if self.is_holding() {
            self.hold_message(buffer, len, env.now);
        } else if self.state.delivers() {
            let (device, shared) = (env.device as u16, self.receives.is_shared());
            let arrived = Arrived { buffer: Some(buffer), start: HEADER_LEN as u32, end: len, device, shared };
            self.deliver(arrived, env);
        } else {
            self.discard(buffer, env);
        }
    }

    /// Handles a message without a header: a Write with Immediate, or any message with `Framing::Raw`.
    fn received_bare(&mut self, buffer: Buffer, (len, immediate): (u32, Option<u32>), env: &mut Env<'_>) {
        if self.framing == Framing::Credits {
            self.hello_arrived(env);
        }
        let early = !self.state.is_announced();
        if self.is_secured() {
            // On an encrypted connection, a message without a header is not authenticated: an attacker may have sent it.
            self.discard(buffer, env);
            return self.violated(PeerViolation::NotAuthentic, env);
        }
        if self.transfers.joining().is_some() {
            self.discard(buffer, env);
            return self.violated(PeerViolation::MalformedMessage, env);
        }
        if self.framing == Framing::Credits && (early || !self.rx.received()) {
            self.discard(buffer, env);
            return self.violated(PeerViolation::CreditOverrun, env);
        }
        if early && self.is_active() {
            // The peer has accepted the connection and has sent this message. The event that notifies the local side of the established
            // transport has not arrived yet.
            return match self.state.setup_mut() {
                Some(setup) => setup.early.push_back(Early { buffer, len, immediate }),
                None => self.discard(buffer, env),
            };
        }
        if early {
            self.announce(env);
        }
        self.receives.count();
        self.deliver_bare(Early { buffer, len, immediate }, env);
        if !self.is_marked() && self.has_to_post() {
            self.mark(env);
        }
    }

    /// Passes a message without a header to the program.
    pub(super) fn deliver_bare(&mut self, Early { buffer, len, immediate }: Early, env: &mut Env<'_>) {
        if let Some(value) = immediate {
            self.discard(buffer, env);
            self.deliver_immediate(Immediate { value, len }, env);
        } else if self.state.delivers() {
            let device = env.device as u16;
            self.deliver(Arrived { buffer: Some(buffer), start: 0, end: len, device, shared: false }, env);
        } else {
            self.discard(buffer, env);
        }
    }

    /// Frees the buffers of the messages that arrived early, because the connection never came up.
    pub(super) fn drop_early(&mut self, env: &mut Env<'_>) {
        for early in self.state.setup_mut().map(|setup| mem::take(&mut setup.early)).into_iter().flatten() {
            self.discard(early.buffer, env);
        }
    }

    fn deliver_immediate(&mut self, immediate: Immediate, env: &mut Env<'_>) {
        if self.is_holding() {
            self.hold_immediate(immediate, env.now);
        } else if self.state.delivers() {
            self.tell(env, Event::Immediate(immediate));
        }
    }
}

/// Decrypts a message in its buffer. Returns the length without the authentication tag. `None` if the message is not authentic.
#[inline(never)]
fn open(opener: &mut Opener, buffer: &mut Buffer, len: u32, pool: &Pool) -> Option<u32> {
    let message = pool.slabs().bytes_mut(buffer).get_mut(..len as usize)?;
    opener.open(message, HEADER_LEN).map(|len| len as u32)
}
