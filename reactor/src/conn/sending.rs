//! The sends of a connection: the functions that queue them, post them, and handle their
//! completions.

use std::ops::Range;

use rdma_transport::wc::Failure;
use rdma_transport::wr::{RemoteAddress, SendOp, SendWr, Sge, SgeList};

use super::credit::may_control;
use super::effects::{Action, Event};
use super::frame::{FrameHeader, Immediate, MessageKind};
use super::list::ListPart;
use super::send_queue::{SendQueueEntry, SendRole};
use super::state::State;
use super::{Connection, Env, Need};
use crate::config::Framing;
use crate::device::pool::{Buffer, Posted};
use crate::error::{Blocked, Outcome, SendErrorKind};
use crate::id::{SendId, SendKind};
use crate::limits::{HEADER_LEN, TAG_ROOM};
use crate::memory::operations::{Holds, Locals};
use crate::memory::region::Region;

impl Connection {
    /// Checks that a message of `len` bytes fits into one buffer of the peer and can be queued now.
    #[inline(always)]
    fn check_message(&mut self, len: usize, env: &mut Env<'_>) -> Result<(), SendErrorKind> {
        if !self.state.is_open() {
            return Err(SendErrorKind::Closed);
        }
        if len > self.terms.buffer_size {
            let max = usize::try_from(self.terms.max_message).unwrap_or(usize::MAX).max(self.terms.buffer_size);
            return Err(SendErrorKind::TooLong { len, max });
        }
        self.room_for_message().map_err(|blocked| {
            self.refuse(Need::Message, env);
            SendErrorKind::WouldBlock(blocked)
        })
    }

    /// Queues a message with a copy of `payload`.
    #[inline(always)]
    pub(crate) fn send(&mut self, payload: &[u8], env: &mut Env<'_>) -> Result<SendId, SendErrorKind> {
        self.check_message(payload.len(), env)?;
        let Some(buffer) = env.buffers.pool.take() else { return Err(no_buffer()) };
        let message = match self.framing {
            Framing::Credits => env.buffers.pool.post_copy(buffer, &self.header(MessageKind::Data).emit(), payload),
            Framing::Raw => env.buffers.pool.post_copy(buffer, &[], payload),
        };
        Ok(self.push_data(message, payload.len(), env))
    }

    /// Returns true if a message of `len` bytes may be completed when it is posted. This requires
    /// that the message overtakes no earlier send, and that no control message, such as a grant, is
    /// due before it.
    #[inline]
    fn may_send_now(&self, len: usize) -> bool {
        self.sends.takes_immediate(self.sends.reports_copies())
            && self.state.is_open()
            && !self.corked
            && self.sealer.is_none()
            && !self.receives.is_shared()
            && !self.transfers.is_active()
            && !(self.keepalive.owes_ping || self.keepalive.owes_pong)
            && !self.receives.owes_grant(&self.rx)
            && len <= self.terms.buffer_size
            && self.room_for_message().is_ok()
    }

    /// Sends a message that is completed when it is posted. `send` receives the header, and returns
    /// false if the provider cannot send the message now. Returns `None` if the message was not
    /// sent and must be queued.
    #[inline]
    pub(crate) fn send_now(
        &mut self,
        len: usize,
        env: &mut Env<'_>,
        send: impl FnOnce(&[u8]) -> bool,
    ) -> Option<SendId> {
        if !self.may_send_now(len) {
            return None;
        }
        let credits = self.rx;
        let header = FrameHeader { kind: MessageKind::Data, grant: self.rx.grant() };
        if !send(&header.emit()) {
            self.rx = credits;
            return None;
        }
        self.tx.take();
        self.sends.unrung += 1;
        self.count_sent(len, env);
        let send = self.sends.name(SendKind::Message);
        if self.sends.reports_copies() {
            self.tell(env, Event::Sent { send, count: 1, outcome: Outcome::Sent });
        }
        Some(send)
    }

    /// Executes a Write that is completed when it is posted. `write` returns false if the provider
    /// cannot execute it now. Returns `None` if the Write was not executed and must be queued.
    #[inline]
    pub(crate) fn write_now(&mut self, env: &mut Env<'_>, write: impl FnOnce() -> bool) -> Option<SendId> {
        let may = self.sends.takes_immediate(true) && self.state.is_open() && !self.corked && !self.feeds_itself();
        if !(may && write()) {
            return None;
        }
        self.sends.unrung += 1;
        self.mark(env);
        let send = self.sends.name(SendKind::Write);
        self.tell(env, Event::Sent { send, count: 1, outcome: Outcome::Sent });
        Some(send)
    }

    /// Queues a message from a buffer that contains space for the header, followed by the payload.
    /// `apart` is the slab of buffers that the peer of this connection has mapped. Takes the buffer
    /// only if the message was accepted.
    pub(crate) fn send_filled(
        &mut self,
        len: usize,
        env: &mut Env<'_>,
        apart: Option<u16>,
        filled: &mut Option<Buffer>,
    ) -> Result<SendId, SendErrorKind> {
        self.check_message(len, env)?;
        let pool = &mut env.buffers.pool;
        let is_foreign = filled.as_ref().is_some_and(|buffer| pool.is_mapped_by_another(buffer, apart));
        let private = if is_foreign { Some(pool.take().ok_or_else(no_buffer)?) } else { None };
        let mut buffer = filled.take().ok_or(SendErrorKind::Closed)?;
        // The buffer was lent to the program, which has filled it and passed it back.
        pool.unlend(&buffer);
        if let Some(private) = private {
            buffer = pool.relocate(buffer, private);
        }
        if self.framing == Framing::Raw {
            // A raw message has no header, so the payload moves to the beginning of the buffer.
            env.buffers.pool.slabs().bytes_mut(&mut buffer).copy_within(HEADER_LEN..HEADER_LEN + len, 0);
        }
        Ok(self.push_filled(buffer, len, env))
    }

    /// Queues a message whose payload the device reads from `region`.
    pub(crate) fn send_from(
        &mut self,
        region: &Region,
        range: Range<usize>,
        env: &mut Env<'_>,
    ) -> Result<SendId, SendErrorKind> {
        let len = range.len();
        self.check_message(len, env)?;
        if self.is_secured() {
            // Encryption in place would change the bytes of the region, and the program can still
            // read these. So a copy of the payload is encrypted and sent.
            let Some(mut buffer) = env.buffers.pool.take() else { return Err(no_buffer()) };
            let room = &mut env.buffers.pool.slabs().bytes_mut(&mut buffer)[HEADER_LEN..HEADER_LEN + len];
            if !region.try_copy_to(range.start, room) {
                env.buffers.pool.give(buffer);
                return Err(SendErrorKind::Sealed);
            }
            let id = self.push_filled(buffer, len, env);
            self.sends.report_last();
            return Ok(id);
        }
        let locals = Locals::to_read(&[(region, range)])?;
        let id = self.sends.name(SendKind::Message);
        match self.framing {
            Framing::Raw => self.sends.push_operation(SendQueueEntry::named(id), SendOp::Send, locals),
            Framing::Credits => {
                let Some(buffer) = env.buffers.pool.take() else { return Err(no_buffer()) };
                let header = self.header(MessageKind::Data);
                self.sends.push_gathered(&env.buffers.pool, buffer, header.emit(), Some(id), locals);
            }
        }
        self.count_sent(len, env);
        Ok(id)
    }

    /// Adds bytes to the last message of the chain, or to a new message. `fill` receives space for
    /// at least one byte, writes to it, and returns the number of bytes written. If `fill` returns
    /// 0, nothing is sent. Returns the number of bytes that `fill` has written.
    pub(crate) fn append(
        &mut self,
        fill: impl FnOnce(&mut [u8]) -> usize,
        env: &mut Env<'_>,
    ) -> Result<usize, SendErrorKind> {
        if !self.state.is_open() {
            return Err(SendErrorKind::Closed);
        }
        let start = if self.framing == Framing::Credits { HEADER_LEN } else { 0 };
        let end = start + self.terms.buffer_size.min(env.buffers.pool.stride() - HEADER_LEN - TAG_ROOM);
        if let Some((message, sges)) = self.sends.open_message() {
            let written = sges.total_len();
            let bytes = message.unposted(env.buffers.pool.slabs());
            // If the last message in the chain is a fragment, no bytes can be added to it, because
            // the message of the fragment has a fixed length.
            let whole = start == 0 || bytes[0] == MessageKind::Data as u8;
            if whole && (start + 1..end).contains(&written) {
                let len = fill(&mut bytes[written..end]).min(end - written);
                *sges = SgeList::one(env.buffers.pool.sge(message, written + len));
                env.stats.messages.bytes_sent += len as u64;
                return Ok(len);
            }
        }
        self.check_message(1, env)?;
        let Some(mut filling) = env.buffers.pool.take_to_fill() else { return Err(no_buffer()) };
        let len = fill(&mut filling.room()[start..end]).min(end - start);
        if len == 0 {
            return Ok(0);
        }
        if let Some(buffer) = filling.keep() {
            self.push_filled(buffer, len, env);
        }
        Ok(len)
    }

    /// Queues a message of the program. Its payload is already in the buffer, at its final
    /// position.
    #[inline]
    fn push_filled(&mut self, buffer: Buffer, len: usize, env: &mut Env<'_>) -> SendId {
        let message = match self.framing {
            Framing::Credits => env.buffers.pool.post_behind(buffer, self.header(MessageKind::Data).emit(), len),
            Framing::Raw => env.buffers.pool.post(buffer, len),
        };
        self.push_data(message, len, env)
    }

    /// Queues a message of the program. `len` is the length of the payload, in bytes.
    #[inline(always)]
    fn push_data(&mut self, (posted, sge): (Posted, Sge), len: usize, env: &mut Env<'_>) -> SendId {
        let id = self.sends.name(SendKind::Message);
        self.sends.push_now(SendQueueEntry::message(posted, Some(id)), SendOp::Send, SgeList::one(sge));
        self.count_sent(len, env);
        id
    }

    #[inline]
    pub(super) fn count_sent(&mut self, len: usize, env: &mut Env<'_>) {
        env.stats.messages.sent += 1;
        env.stats.messages.bytes_sent += len as u64;
        self.mark(env);
    }

    /// Uses a credit for a message of this kind, and returns the header of the message.
    #[inline]
    pub(super) fn header(&mut self, kind: MessageKind) -> FrameHeader {
        self.tx.take();
        FrameHeader { kind, grant: self.rx.last_grant() }
    }

    /// Queues a message of the reactor. The caller has checked that a credit and a send queue slot
    /// are available.
    pub(super) fn push_control(&mut self, kind: MessageKind, payload: &[u8], name: Option<SendId>, env: &mut Env<'_>) {
        let Some(buffer) = env.buffers.pool.take() else {
            debug_assert!(false, "a buffer is promised for every slot of the send queue");
            return;
        };
        let (posted, sge) = env.buffers.pool.post_copy(buffer, &self.header(kind).emit(), payload);
        self.sends.push(SendQueueEntry::message(posted, name), SendOp::Send, SgeList::one(sge));
        self.mark(env);
    }

    // One-sided operations.

    /// Checks that an operation of `slots` work requests can be queued now. `credit` is true if
    /// the operation uses a receive of the peer.
    pub(crate) fn check_operation(
        &mut self,
        slots: usize,
        credit: bool,
        env: &mut Env<'_>,
    ) -> Result<(), SendErrorKind> {
        if !self.state.is_open() {
            return Err(SendErrorKind::Closed);
        }
        let most = self.sends.most_room();
        if slots > most {
            return Err(SendErrorKind::TooManyRegions { count: slots, max: most });
        }
        let room = if credit { self.room_for_message() } else { Ok(()) };
        let enough = self.sends.room(self.transfers.slots()) >= slots;
        room.and(if enough { Ok(()) } else { Err(Blocked::Queue) }).map_err(|blocked| {
            self.refuse(if credit { Need::Message } else { Need::Slot }, env);
            SendErrorKind::WouldBlock(blocked)
        })
    }

    /// Queues an operation that [`Connection::check_operation`] has allowed.
    pub(crate) fn operate(&mut self, kind: SendKind, op: SendOp, locals: Locals, env: &mut Env<'_>) -> SendId {
        let id = self.sends.name(kind);
        if self.framing == Framing::Credits && op.takes_receive() {
            self.tx.take();
        }
        self.sends.push_operation(SendQueueEntry::named(id), op, locals);
        self.mark(env);
        id
    }

    /// Queues one Read for each local range, in order, as one operation with one id.
    pub(crate) fn read(&mut self, mut from: RemoteAddress, locals: Locals, env: &mut Env<'_>) -> SendId {
        let id = self.sends.name(SendKind::Read);
        // Each local range gets a separate Read, because on iWARP and on many adapters a Read has
        // only one local range.
        let count = locals.sges.as_slice().len();
        for (nth, (&sge, hold)) in locals.sges.as_slice().iter().zip(locals.holds).enumerate() {
            let entry = if nth + 1 == count { SendQueueEntry::named(id) } else { SendQueueEntry::EMPTY };
            let mut holds = Holds::default();
            holds[0] = hold;
            self.sends.push_operation(entry, SendOp::Read(from), Locals { sges: SgeList::one(sge), holds });
            // The address may overflow if the peer has described a region at the end of the address
            // space. The device refuses a Read from such a region.
            from.address = from.address.wrapping_add(sge.len() as u64);
        }
        self.mark(env);
        id
    }

    /// Queues a Write, followed by a message with the immediate data. Used on devices that have no
    /// Write with Immediate.
    pub(crate) fn write_and_tell(
        &mut self,
        to: RemoteAddress,
        locals: Locals,
        immediate: Immediate,
        env: &mut Env<'_>,
    ) -> SendId {
        let id = self.sends.name(SendKind::Write);
        let late = crate::planted("immediate-before-its-write");
        if late {
            self.push_control(MessageKind::Immediate, &immediate.emit(), Some(id), env);
        }
        self.sends.push_operation(SendQueueEntry::EMPTY, SendOp::Write(to), locals);
        if !late {
            self.push_control(MessageKind::Immediate, &immediate.emit(), Some(id), env);
        }
        id
    }

    // Posting.

    /// Returns true if the connection still sends control messages and posts receives: while it is
    /// open or in its handshake, and after a close while the peer fetches large messages or a list
    /// is in progress.
    pub(crate) fn exchanges(&self) -> bool {
        match self.state {
            State::Open | State::Securing(_) => true,
            State::Draining => self.delays_its_close(),
            _ => false,
        }
    }

    /// Returns true if the chain must not be posted yet, because the program has corked the
    /// connection. Returns false in spite of the cork if the chain fills half of the queue, a send
    /// was refused, the peer waits for a message in the chain, a control message is due, or a large
    /// message or a list is in progress.
    fn is_holding_back(&self) -> bool {
        self.corked
            && self.state.is_open()
            && self.refused.is_none()
            && !self.sends.is_half_chained()
            && !self.sends.is_awaited
            && (self.framing == Framing::Raw
                || !(self.keepalive.owes_ping || self.keepalive.owes_pong || self.rx.update_due()))
            && !self.feeds_itself()
    }

    /// Returns true if the flush must post the sends before the receives, so that a message leaves
    /// earlier. This is the case if the flush posts a single message, and no grant becomes due when
    /// the receives are posted.
    ///
    /// If there are several messages, the receives are posted first, and the messages carry the
    /// grant for them. Otherwise a peer that answers each message would use up its credits, and
    /// wait for a grant that is queued behind the messages.
    #[inline]
    pub(crate) fn sends_first(&self) -> bool {
        self.framing == Framing::Credits
            && self.sends.is_single()
            && !self.receives.is_shared()
            && !self.feeds_itself()
            && !self.rx.update_due_after(self.receives.to_post())
    }

    /// Returns true if the next flush must post receives.
    #[inline]
    pub(crate) fn receives_due(&self) -> bool {
        let control = self.keepalive.owes_ping || self.keepalive.owes_pong;
        self.receives.to_post() > 0
            && self.exchanges()
            && (control || self.framing == Framing::Raw || self.receives.worth_posting(&self.rx))
    }

    /// Counts receives that were posted, or claimed from the shared queue, and can now be granted
    /// to the peer.
    #[inline]
    pub(crate) fn receives_posted(&mut self, count: u32) {
        if !crate::planted("credit-at-completion") {
            self.rx.posted(count);
        }
    }

    /// Adjusts the number of receives of the shared queue that the connection grants to its peer.
    pub(crate) fn renew_claim(&mut self, env: &mut Env<'_>) {
        let ending = self.state.is_ending() && !self.exchanges();
        if self.receives.is_shared() && !ending {
            let more = self.receives.renew(self.id, env.buffers, &self.rx, env.config.receive_depth, env.now);
            self.rx.posted(more);
        }
    }

    /// Prepares the chain for posting: adds a control message if one is due, and writes the newest
    /// grant into the first message. Returns an empty slice if nothing must be posted now.
    #[inline]
    pub(crate) fn ready_chain(&mut self, env: &mut Env<'_>) -> &[SendWr] {
        let sends = match self.state {
            State::Open | State::Leaving => true,
            State::Draining => {
                if self.sends.is_chained() {
                    // The end of the connection waits for the sends in the queue. Unsignaled sends
                    // cause no completion, so the driver must check after this flush if the
                    // connection can end.
                    self.want(env, Action::Ending);
                }
                true
            }
            State::Securing(_) | State::Greeting | State::Refusing(_) => {
                self.pump_handshake(env);
                true
            }
            State::Probing(_) => true,
            _ => false,
        };
        if !sends || self.is_holding_back() {
            return &[];
        }
        if self.framing == Framing::Credits {
            if let Some(kind) = self.due_control() {
                env.stats.connections.pings += u64::from(kind == MessageKind::Ping);
                env.stats.messages.credit_updates += u64::from(kind == MessageKind::Credit);
                self.keepalive.owes_ping &= kind != MessageKind::Ping;
                self.push_control(kind, &[], None, env);
            }
            if self.sends.has_carrier() {
                // Any message shows that the local side is alive, so the message that is sent now
                // also answers a ping.
                self.keepalive.owes_pong = false;
                self.sends.carry(&env.buffers.pool, self.rx.grant());
            }
        }
        if self.sealer.as_mut().is_some_and(|sealer| !self.sends.seal(&env.buffers.pool, sealer)) {
            self.posting_failed("a message cannot be sealed".into(), env);
            return &[];
        }
        self.sends.chain()
    }

    /// Returns the kind of the control message that must be sent now, or `None` if none is due. A
    /// message in the chain makes a pong or a separate grant unnecessary.
    #[inline]
    fn due_control(&self) -> Option<MessageKind> {
        let carried = self.sends.has_carrier();
        let kind = if self.keepalive.owes_ping {
            MessageKind::Ping
        } else if carried {
            return None;
        } else if self.keepalive.owes_pong {
            MessageKind::Pong
        } else if self.rx.update_due() {
            MessageKind::Credit
        } else {
            return None;
        };
        (self.exchanges() && may_control(&self.tx, &self.rx) && self.sends.has_control_room()).then_some(kind)
    }

    // Completing.

    /// Handles the completion of the send with this sequence number. The completion also ends
    /// earlier sends. Returns false if no such send is posted.
    #[inline]
    pub(crate) fn sent(&mut self, sequence: u16, result: Result<(), Failure>, env: &mut Env<'_>) -> bool {
        let Some(count) = self.sends.ended_by(sequence) else { return false };
        let last = result.map_or_else(Outcome::Failed, |()| Outcome::Sent);
        let batch = self.sends.batch_ended(count, last);
        if batch > 0 || self.sends.has_answers() {
            if batch > 0 {
                self.sends.pop_batch(batch);
                self.pieces_ended(batch, last, env);
            } else {
                self.sends.note_ends(count, last);
            }
            // Later sends may have completed earlier. They end now.
            while let Some(outcome) = self.sends.front_ended() {
                self.end_oldest(outcome, env);
            }
        } else {
            // The completion belongs to the last of `count` sends. The earlier ones were
            // unsignaled, and have succeeded, even if the last send has failed.
            let succeeded = if last.is_sent() { count } else { count - 1 };
            self.end_sends(succeeded, env);
            if succeeded < count {
                self.end_oldest(last, env);
            }
        }
        self.ask_writable(env);
        if !self.is_marked()
            && (self.sends.is_chained() && !crate::planted("a-refused-chain-is-forgotten")
                || self.feeds_itself()
                || self.owes_control()
                || self.state.is_securing())
        {
            // Slots of the send queue are free now. A control message, or a Read of a large message
            // or of a list, may wait for one.
            self.mark(env);
        }
        if let Err(failure) = result {
            self.work_request_failed(failure, env);
        }
        true
    }

    /// Returns true if the queue pair has sends that a completion will report.
    pub(crate) fn awaits_sends(&self) -> bool {
        self.sends.awaited() > 0
    }

    /// Returns true if a control message is due. The message may have to wait for a credit or a
    /// slot of the send queue.
    #[inline]
    pub(super) fn owes_control(&self) -> bool {
        self.keepalive.owes_ping || self.keepalive.owes_pong || self.rx.update_due()
    }

    /// Ends the `count` oldest sends, which have succeeded. None of them waits for an answer from
    /// the peer.
    #[inline]
    fn end_sends(&mut self, mut count: usize, env: &mut Env<'_>) {
        while count > 0 {
            if !self.sends.front_is_plain() {
                self.end_send(Outcome::Sent, env);
                count -= 1;
                continue;
            }
            let (ended, first) = self.sends.pop_messages(count, &mut env.buffers.pool);
            if let Some(send) = first {
                self.tell(env, Event::Sent { send, count: ended as u32, outcome: Outcome::Sent });
            }
            count -= ended;
        }
    }

    /// Ends the oldest send with the given outcome.
    #[inline]
    pub(super) fn end_send(&mut self, outcome: Outcome, env: &mut Env<'_>) {
        let Some(entry) = self.sends.pop(&mut env.buffers.pool) else { return };
        if entry.role != SendRole::Plain {
            self.end_role(entry.role, entry.regions, outcome, env);
        }
        if let Some(send) = entry.id.filter(|_| !entry.quiet) {
            self.tell(env, Event::Sent { send, count: 1, outcome });
        }
    }

    /// Ends the oldest send like [`Connection::end_send`]. If it is a send of the program and has
    /// failed, notes that the close is incomplete.
    #[inline]
    pub(super) fn end_oldest(&mut self, outcome: Outcome, env: &mut Env<'_>) {
        if !outcome.is_sent() {
            self.oldest_failed(env);
        }
        self.end_send(outcome, env);
    }

    #[cold]
    fn oldest_failed(&mut self, env: &mut Env<'_>) {
        if self.sends.front_is_of_program() {
            // In `Leaving`, an unsignaled send before the goodbye has failed. The flush creates the
            // reason of the end, which `cut_off` then changes.
            if matches!(self.state, State::Leaving) {
                self.flush(env);
            }
            self.cut_off();
        }
    }

    /// Completes a send that is more than a message in a buffer: releases the `regions` oldest
    /// holds, and notifies the large message or the list to which the send belongs.
    #[inline(never)]
    fn end_role(&mut self, role: SendRole, regions: u8, outcome: Outcome, env: &mut Env<'_>) {
        for _ in 0..regions {
            let Some((key, hold)) = self.sends.pop_hold() else { break };
            if hold.done() {
                self.want(env, Action::Unused(key));
            }
        }
        match role {
            SendRole::Plain | SendRole::Regions => {}
            SendRole::Hello if outcome.is_sent() => self.hello_arrived(env),
            SendRole::Hello => {}
            SendRole::Large(len) if outcome.is_sent() => self.piece_arrived(len, env),
            SendRole::Large(_) => self.piece_failed(),
            SendRole::List(ListPart::Piece { .. }) => self.pieces_ended(1, outcome, env),
            SendRole::List(part) => self.part_ended(part, outcome, env),
        }
    }
}

pub(super) fn no_buffer() -> SendErrorKind {
    debug_assert!(false, "a buffer is promised for every slot of the send queue");
    SendErrorKind::WouldBlock(Blocked::Queue)
}
