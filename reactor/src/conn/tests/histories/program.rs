//! The program of one side of a history. It sends messages, and checks the callbacks that it receives.

use std::time::Instant;

use rdma_transport::mr::RemoteKey;
use rdma_transport::wr::{RemoteAddress, SendOp};

use super::side::{BUFFER, Manner, Said, Side, region};
use crate::config::Framing;
use crate::conn::effects::{Arrived, Event, Fragments};
use crate::conn::frame::Immediate;
use crate::conn::list::{ListDirection, Order};
use crate::conn::transfer::{OfferKind, OfferSource};
use crate::conn::{Connection, Env};
use crate::device::pool::Exhausted;
use crate::error::{Outcome, SendErrorKind};
use crate::id::{SendId, SendKind, TransferId};
use crate::limits::HEADER_LEN;
use crate::memory::landing::{Landing, Offered};
use crate::memory::list::{Piece, Transfer, TransferNotification};
use crate::memory::operations::Locals;
use crate::memory::region::{Region, RemoteRegion};

/// Returns byte `at` of a message in several buffers. The first four bytes are the message's tag.
const fn cut_byte(tag: u32, at: usize) -> u8 {
    if at < 4 { tag.to_le_bytes()[at] } else { (tag as usize).wrapping_mul(7).wrapping_add(at * 11) as u8 }
}

/// A remote address in memory of the peer.
const FAR: RemoteAddress = RemoteAddress { address: 0, key: RemoteKey(7) };

impl Side {
    pub(super) fn is_open(&self) -> bool {
        self.conn.as_ref().is_some_and(|conn| conn.state().is_open()) && self.device.up
    }

    /// Returns true if the ends of copied messages that this side sends now are not reported to its program.
    fn is_quiet(&self) -> bool {
        self.config.quiet_sends
            && !self.telling
            && self.conn.as_ref().is_some_and(|conn| conn.framing() == Framing::Credits)
    }

    fn taken(&mut self, sent: Option<Result<SendId, SendErrorKind>>, said: Option<Said>) -> bool {
        match sent {
            Some(Ok(id)) => {
                self.sends.push_back(Some(id));
                self.said.extend(said);
                true
            }
            Some(Err(SendErrorKind::WouldBlock(_))) => {
                self.refused = true;
                false
            }
            Some(Err(SendErrorKind::Closed)) | None => {
                assert!(!self.conn.as_ref().is_some_and(|conn| conn.state().is_open()));
                false
            }
            Some(Err(error)) => panic!("{error}"),
        }
    }

    /// Handles the result of sending a copied message, like [`Side::taken`]. If the ends of copied messages are not reported now, removes
    /// the send from those whose end the program expects.
    fn copied(&mut self, sent: Option<Result<SendId, SendErrorKind>>, said: Said) -> bool {
        let taken = self.taken(sent, Some(said));
        if taken && self.is_quiet() {
            self.sends.pop_back();
        }
        taken
    }

    fn payload(&mut self, len: usize) -> ([u8; BUFFER], Said) {
        self.tag += 1;
        let mut bytes = [0xaa; BUFFER];
        bytes[..4].copy_from_slice(&self.tag.to_le_bytes());
        (bytes, Said::Message { tag: if len < 4 { 0 } else { self.tag }, len })
    }

    pub(super) fn send(&mut self, len: usize) {
        let (bytes, said) = self.payload(len);
        let bytes = &bytes[..len];
        let mut now = None;
        let free = self.device.sends_now();
        let sent = self.input(|conn, env| {
            let send = |header: &[u8]| {
                now = free.then(|| [header, bytes].concat());
                free
            };
            match conn.send_now(len, env, send) {
                Some(id) => Ok(id),
                None => conn.send(bytes, env),
            }
        });
        if let Some(message) = now {
            self.device.send_now(&message);
        }
        self.copied(sent, said);
        // The message may have completed already. This empty input makes the side call the pending callbacks.
        self.tell(|_, _| ());
    }

    /// Does what `Context::buffer` and `Context::send_buffer` do.
    pub(super) fn send_filled(&mut self, len: usize) {
        let (bytes, said) = self.payload(len);
        let pool = &mut self.buffers.pool;
        pool.reserve(1, |_| Err(Exhausted)).expect("a slab has many buffers");
        pool.unreserve(1);
        pool.lend(1);
        let mut buffer = pool.take();
        if let Some(buffer) = &mut buffer {
            pool.slabs().bytes_mut(buffer)[HEADER_LEN..HEADER_LEN + len].copy_from_slice(&bytes[..len]);
        }
        let sent = self.tell(|conn, env| conn.send_filled(len, env, None, &mut buffer));
        if let Some(buffer) = buffer {
            self.buffers.pool.unlend(&buffer);
            self.buffers.pool.give(buffer);
        }
        self.copied(sent, said);
    }

    /// Does what `Context::append` does.
    pub(super) fn append(&mut self, len: usize) {
        let before = self.stats.messages.sent;
        let (bytes, _) = self.payload(BUFFER);
        let fill = |room: &mut [u8]| {
            let len = len.min(room.len());
            room[..len].copy_from_slice(&bytes[..len]);
            len
        };
        let appended = self.tell(|conn, env| conn.append(fill, env));
        match appended {
            Some(Ok(0)) => {}
            Some(Ok(len)) if self.stats.messages.sent > before => {
                if !self.is_quiet() {
                    self.sends.push_back(None);
                }
                self.said.push_back(Said::Message { tag: if len < 4 { 0 } else { self.tag }, len });
            }
            Some(Ok(more)) => match self.said.back_mut() {
                Some(Said::Message { tag, len }) => {
                    // Bytes are added to a message. If the message was shorter than a tag, its first four bytes are not the bytes of one
                    // tag, so the test does not check the tag of this message.
                    *tag = if *len < 4 { 0 } else { *tag };
                    *len += more;
                }
                said => panic!("{said:?} was added to"),
            },
            Some(Err(error)) => {
                self.taken(Some(Err(error)), None);
            }
            None => {}
        }
    }

    /// Does what `Context::send_region` does.
    pub(super) fn send_from(&mut self, len: usize) {
        let Self { source, .. } = self;
        let region = std::mem::replace(source, region(&self.drop_channel, 1, 9));
        let sent = self.tell(|conn, env| conn.send_from(&region, 0..len, env));
        self.source = region;
        self.taken(sent, Some(Said::Message { tag: 0, len }));
    }

    /// Sends a message in several buffers, if there is capacity for all its fragments. If `copy` is true, the payload is copied. Otherwise
    /// it is read from the program's region.
    pub(super) fn send_cut(&mut self, len: usize, copy: bool) {
        let len = if copy { len } else { len.min(self.source.len()) };
        if !self.conn.as_ref().is_some_and(|conn| conn.may_cut(len)) {
            return;
        }
        self.tag += 1;
        let tag = if copy { self.tag } else { 0 };
        let sent = if copy {
            let payload: Vec<u8> = (0..len).map(|at| cut_byte(tag, at)).collect();
            self.tell(|conn, env| {
                conn.send_cut(len, false, env, |range, room| {
                    room.copy_from_slice(&payload[range]);
                    true
                })
            })
        } else {
            let region = std::mem::replace(&mut self.source, region(&self.drop_channel, 1, 9));
            let sent = self.tell(|conn, env| conn.send_cut_from(&region, &(0..len), env));
            self.source = region;
            sent
        };
        let said = Said::Cut { tag, len };
        let taken = if copy { self.copied(sent, said) } else { self.taken(sent, Some(said)) };
        assert!(taken, "there was capacity for all of it");
    }

    /// Offers a message longer than one buffer. If `copy` is true, the payload is copied. Otherwise it is read from the program's region.
    pub(super) fn offer(&mut self, len: usize, copy: bool) {
        let kind = if copy { OfferKind::Copied } else { OfferKind::Tagged };
        let Some(Ok(())) = self.checked(|conn, env| conn.check_offer(len, kind, env)) else { return };
        let key = self.source.key();
        let hold = self.source.lend_to_peer(0..1);
        let source = if copy {
            assert!(!hold.done());
            OfferSource::Copy { region: Box::new(region(&self.drop_channel, 1, 4)), reported: false }
        } else {
            OfferSource::Lent(key, hold)
        };
        let remote = RemoteRegion { address: 0, len: len as u64, key: 5 };
        if let Some(id) = self.tell(|conn, env| conn.offer(remote, Some(len as u64), source, env)) {
            if !(copy && self.is_quiet()) {
                self.offers.push(id);
            }
            self.said.push_back(Said::Large { len });
        }
    }

    /// Checks if there is capacity for a send, and records a refusal. Returns the result of `check`. `None` if the connection has ended.
    fn checked(
        &mut self,
        check: impl FnOnce(&mut Connection, &mut Env<'_>) -> Result<(), SendErrorKind>,
    ) -> Option<Result<(), SendErrorKind>> {
        let room = self.tell(check);
        match room {
            Some(Ok(())) => {}
            Some(Err(SendErrorKind::WouldBlock(_))) => self.refused = true,
            Some(Err(SendErrorKind::Closed | SendErrorKind::TooManyRegions { .. } | SendErrorKind::TooLong { .. }))
            | None => {}
            Some(Err(error)) => panic!("{error}"),
        }
        room
    }

    /// Does what `crate::RemoteContext::read` does, for `ranges` local ranges.
    pub(super) fn read(&mut self, ranges: usize) {
        if !matches!(self.checked(|conn, env| conn.check_operation(ranges, false, env)), Some(Ok(()))) {
            return;
        }
        let mut all: [Region; 4] = std::array::from_fn(|_| region(&self.drop_channel, 1, 9));
        std::mem::swap(&mut all[0], &mut self.sink);
        let mut parts: Vec<_> = all.iter_mut().take(ranges).map(|region| (region, 0..1)).collect();
        let locals = Locals::to_write(&mut parts).expect("the ranges are inside");
        let sent = self.tell(|conn, env| Ok(conn.read(FAR, locals, env)));
        std::mem::swap(&mut all[0], &mut self.sink);
        self.taken(sent, None);
    }

    /// Does what `crate::RemoteContext::fetch_add` does.
    pub(super) fn fetch_add(&mut self) {
        if !matches!(self.checked(|conn, env| conn.check_operation(1, false, env)), Some(Ok(()))) {
            return;
        }
        let locals = Locals::to_write(&mut [(&mut self.sink, 0..8)]).expect("the range is inside");
        let op = SendOp::FetchAdd { remote: FAR, add: 1 };
        let sent = self.tell(|conn, env| Ok(conn.operate(SendKind::FetchAdd, op, locals, env)));
        self.taken(sent, None);
    }

    /// Does what `crate::RemoteContext::write` does.
    pub(super) fn write(&mut self) {
        if matches!(self.checked(|conn, env| conn.check_operation(1, false, env)), Some(Ok(()))) {
            let locals = self.written();
            let sent = self.tell(|conn, env| Ok(conn.operate(SendKind::Write, SendOp::Write(FAR), locals, env)));
            self.taken(sent, None);
        }
    }

    fn written(&mut self) -> Locals {
        self.writes += 1;
        Locals::to_read(&[(&self.source, 0..1)]).expect("the range is inside")
    }

    /// Does what `crate::RemoteContext::write_with_immediate` does. `native` is true if the device
    /// has a Write with Immediate. The immediate value is the number of Writes that this side has
    /// queued so far.
    pub(super) fn write_and_tell(&mut self, native: bool) {
        let slots = if native { 1 } else { 2 };
        if !matches!(self.checked(|conn, env| conn.check_operation(slots, true, env)), Some(Ok(()))) {
            return;
        }
        let locals = self.written();
        let value = self.writes;
        let immediate = Immediate { value, len: 1 };
        let sent = self.tell(|conn, env| {
            Ok(if native {
                conn.operate(SendKind::Write, SendOp::WriteWithImmediate(FAR, value), locals, env)
            } else {
                conn.write_and_tell(FAR, locals, immediate, env)
            })
        });
        self.taken(sent, Some(Said::Immediate { value }));
    }

    /// Does what `crate::RemoteContext::transfer` does, for a list of `pieces` pieces of one byte
    /// each, without a deadline. If `tells` is true, a message notifies the peer at the end of the
    /// list.
    pub(super) fn begin_list(&mut self, direction: ListDirection, pieces: usize, tells: bool) -> TransferId {
        self.begin_list_within(direction, pieces, tells, None)
    }

    /// Does the same as [`Side::begin_list`], but with a deadline.
    pub(super) fn begin_list_within(
        &mut self,
        direction: ListDirection,
        pieces: usize,
        tells: bool,
        deadline: Option<Instant>,
    ) -> TransferId {
        let pieces = vec![Piece::new(0, RemoteRegion { address: 0, len: 1, key: 7 }); pieces];
        let leases = match direction {
            ListDirection::Read => Transfer::Read(&mut [&mut self.sink]).lease(&pieces, 1),
            ListDirection::Write | ListDirection::PlacedWrite => Transfer::Write(&[&self.source]).lease(&pieces, 1),
        };
        let leases = leases.expect("the pieces are inside");
        let notification = tells.then(|| TransferNotification::Message(Box::new([0; 4])));
        // Lists may send their messages in another order than they begin. All these messages have the tag 0, which matches any tag.
        self.said.extend(tells.then_some(Said::Message { tag: 0, len: 4 }));
        let order = Order { pieces, leases, direction, deadline, notification, confirmation: None };
        self.input(|conn, env| conn.begin_list(order, env)).expect("the connection has not ended")
    }

    /// Does what `crate::RemoteContext::transfer` does, for a Write of one byte that a Read
    /// confirms.
    pub(super) fn begin_confirmed_list(&mut self) {
        let pieces = vec![Piece::new(0, RemoteRegion { address: 0, len: 1, key: 7 })];
        let leases = Transfer::Write(&[&self.source]).lease(&pieces, 1).expect("the piece is inside");
        let confirmation = Some(Box::new(region(&self.drop_channel, 8, 9)));
        let direction = ListDirection::Write;
        let order = Order { pieces, leases, direction, deadline: None, notification: None, confirmation };
        self.input(|conn, env| conn.begin_list(order, env)).expect("the connection has not ended");
    }

    /// Does what `Context::reporting` does before and after its closure. If `telling` is true, the ends of all sends of this side are
    /// reported from now on.
    pub(super) fn tell_of_next(&mut self, telling: bool) {
        self.telling = telling;
        self.input(|conn, _| conn.sends.tell_of_next(telling));
    }

    pub(super) fn fence(&mut self) {
        self.input(|conn, _| conn.sends.fence_next());
    }

    pub(super) fn cork(&mut self) {
        self.input(|conn, _| conn.corked = true);
    }

    pub(super) fn close(&mut self) {
        self.closed |= self.conn.is_some();
        self.tell(Connection::close);
    }

    /// Sends a ping to the peer.
    pub(super) fn ask_peer(&mut self) {
        self.input(|conn, env| {
            conn.keepalive.owes_ping = true;
            conn.mark(env);
        });
    }

    /// Releases up to `count` messages that the program keeps.
    pub(super) fn release(&mut self, count: usize) {
        for buffer in self.kept.drain(..count.min(self.kept.len())).collect::<Vec<_>>() {
            if self.conn.is_some() {
                self.tell(|conn, env| conn.message_returned(buffer, env));
            } else if let Some(shared) = &mut self.buffers.shared {
                shared.give(buffer);
            } else {
                self.buffers.pool.give(buffer);
            }
        }
    }

    /// Handles a callback. Checks that the callback is consistent with what the side and its peer have done before.
    pub(super) fn event(&mut self, event: Event) {
        assert!(self.ended.is_none(), "{event:?} after the last callback");
        assert!(self.announced || matches!(event, Event::Connected), "{event:?} before on_connect");
        match event {
            Event::Connected => assert!(!std::mem::replace(&mut self.announced, true), "connected twice"),
            Event::Identified => panic!("these connections are not secured"),
            Event::Message(arrived) => self.message(arrived),
            Event::Fragments(fragments) => self.fragments(fragments),
            Event::Offered(offered) => self.answer(offered),
            Event::Landed(ended) => self.landed(ended.0, ended.1.is_ok()),
            Event::Fetched(region) => self.hear(Said::Large { len: region.len() }),
            Event::Immediate(Immediate { value, len }) => {
                let placed = self.device.placed >= value && len == 1;
                assert!(placed || !self.trusts, "notified before write {value} was placed");
                self.hear(Said::Immediate { value });
            }
            Event::Sent { send, count, outcome } => (0..count).for_each(|nth| self.sent(send.after(nth), outcome)),
            Event::Writable => assert!(std::mem::take(&mut self.refused) && !self.closed, "nothing was refused"),
            Event::Transferred(ended) => self.transferred.push((ended.0, ended.1.outcome)),
            Event::Disconnected(_) | Event::ConnectError(_) => {
                panic!("{event:?} is for the end of the connection to say")
            }
        }
    }

    /// Decides about an offer. A message of even length is read into the program's memory, a message of odd length into the library's.
    fn answer(&mut self, offered: Offered) {
        assert!(!self.closed, "{offered:?} after close");
        if offered.len % 2 == 0 && self.conn.as_ref().is_some_and(|conn| conn.state().is_open()) {
            assert!(!self.trusts || offered.tag == Some(offered.len));
            let mut memory = region(&self.drop_channel, offered.len as usize, 6);
            let lease = memory.lease_mut(0..memory.len()).expect("all of it");
            let landing = Landing::new(memory.key(), lease, 0);
            self.input(|conn, env| conn.land(offered.id, landing, env));
            self.landings.push((offered, memory));
        }
        self.input(|conn, env| conn.settle_offer(offered.id, env));
    }

    /// Handles the end of a message that was read into the program's memory. The program must be able to access that memory again.
    fn landed(&mut self, offered: Offered, is_there: bool) {
        let at = self.landings.iter().position(|(of, _)| *of == offered).expect("a place that has not ended");
        let (_, mut memory) = self.landings.remove(at);
        assert!(memory.bytes_mut().is_some(), "{offered:?}: the place is still lent");
        assert!(is_there || !self.is_open(), "{offered:?} failed on a connection that is open");
        if is_there && !self.closed {
            self.hear(Said::Large { len: memory.len() });
        }
    }

    fn hear(&mut self, said: Said) {
        assert!(!self.closed, "{said:?} after close");
        if self.trusts {
            self.heard.push_back(said);
        }
    }

    fn message(&mut self, arrived: Arrived) {
        let Arrived { buffer, start, end, shared, .. } = arrived;
        let buffer = buffer.expect("it was not detached yet");
        let payload = &self.buffers.pool.slabs().bytes(&buffer, end as usize)[start as usize..];
        let tag = payload.first_chunk().map_or(0, |tag| u32::from_le_bytes(*tag));
        self.hear(Said::Message { tag, len: payload.len() });
        match self.manner {
            Manner::LetGo => self.buffers.free_receive(buffer, shared),
            Manner::Keep => {
                self.kept.push(buffer);
                self.input(Connection::keep_message);
            }
            Manner::GiveBackInside => {
                self.input(|conn, env| conn.message_returned(buffer, env));
                self.input(Connection::keep_message);
            }
            Manner::Close => {
                self.manner = Manner::LetGo;
                self.closed = true;
                self.input(Connection::close);
                self.buffers.free_receive(buffer, shared);
            }
        }
    }

    fn fragments(&mut self, mut fragments: Box<Fragments>) {
        let slabs = self.buffers.pool.slabs();
        let parts = fragments.parts.iter();
        let message: Vec<u8> =
            parts.flat_map(|(buffer, end)| slabs.bytes(buffer, *end as usize)[HEADER_LEN..].to_vec()).collect();
        assert_eq!(message.len(), fragments.len);
        // A message that was sent from a region has other bytes than `cut_byte` expects. It counts as a message with tag 0, which matches
        // any tag.
        let tag = message.first_chunk().map_or(0, |tag| u32::from_le_bytes(*tag));
        let sound = (0..message.len()).all(|at| message[at] == cut_byte(tag, at));
        self.hear(Said::Cut { tag: if sound { tag } else { 0 }, len: message.len() });
        let shared = self.config.shared_receives.is_some();
        if self.manner == Manner::Close {
            self.manner = Manner::LetGo;
            self.closed = true;
            self.input(Connection::close);
        }
        for (buffer, _) in fragments.parts.drain(..) {
            match self.manner {
                Manner::LetGo | Manner::Close => self.buffers.free_receive(buffer, shared),
                Manner::Keep => {
                    self.kept.push(buffer);
                    self.input(Connection::keep_message);
                }
                Manner::GiveBackInside => {
                    self.input(|conn, env| conn.message_returned(buffer, env));
                    self.input(Connection::keep_message);
                }
            }
        }
        self.input(|conn, _| conn.recycle(fragments));
    }

    fn sent(&mut self, send: SendId, outcome: Outcome) {
        if let Some(at) = self.offers.iter().position(|&id| id == send) {
            self.offers.remove(at);
            return;
        }
        // A refusal is always reported to the program, even for a quiet message, which is neither
        // in `offers` nor in `sends`.
        if outcome == Outcome::Refused && !self.sends.contains(&Some(send)) {
            return;
        }
        let first = self.sends.pop_front().expect("a send that has not ended");
        assert!(first.is_none_or(|id| id == send), "{send:?} ended before {first:?}");
        assert!(outcome.is_sent() || !self.is_open(), "{send:?} failed on a connection that is open");
    }
}
