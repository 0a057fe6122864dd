//! The incoming direction of a queue pair: records become messages, writes, answers and requests.

use super::fault::{Fault, Refusal};
use super::outgoing::{MAX_PIECE, Outgoing, Request};
use super::record::{Header, Kind, WORD};
use super::ring::Consumer;
use super::segment::Segment;
use super::windows::{Lendings, Windows};
use crate::mem::Span;
use crate::mr::Access;
use crate::slab::Key;
use crate::soft::keys::KeyTable;
use crate::soft::receive_queue::{Message, ReceiveQueue};
use crate::soft::srq::SharedReceiveQueue;

/// What a record costs besides its bytes, in bytes.
const RECORD: usize = 512;

/// What a record may use besides the receives of its queue pair.
#[derive(Debug)]
pub(super) struct Context<'a> {
    pub(super) scope: Key,
    pub(super) keys: &'a mut KeyTable,
    pub(super) srq: Option<&'a mut SharedReceiveQueue>,
    pub(super) outgoing: &'a mut Outgoing,
    pub(super) lendings: &'a mut Lendings,
    pub(super) windows: &'a Windows,
    pub(super) extensions: bool,
    /// A region that the peer has used and may map.
    pub(super) direct: Option<u32>,
}

/// How consuming has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Consumed {
    /// The ring is empty.
    All,
    /// The budget is used up.
    Budget,
    /// A record is about a window that is not known, so its packet has to be read first.
    UnknownWindow,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) ring: Consumer,
    pub(super) queue: ReceiveQueue,
    /// A part of a write has come, and not its last one.
    writing: bool,
    /// Records were consumed whose payload the peer may not touch before it knows that.
    pub(super) holds: bool,
}

impl Incoming {
    pub(super) const fn new(half: usize, queue: ReceiveQueue) -> Self {
        Self { ring: Consumer::new(half), queue, writing: false, holds: false }
    }

    /// Whether the peer may end here without cutting a message off.
    pub(super) const fn is_at_boundary(&self) -> bool {
        self.queue.is_between_messages() && !self.writing
    }

    /// Consumes records until the ring is empty or `budget` is used up. `out` gets each message.
    #[inline]
    pub(super) fn consume<S: Segment>(
        &mut self,
        segment: &S,
        cx: &mut Context<'_>,
        mut budget: usize,
        out: &mut impl FnMut(Message),
    ) -> Result<Consumed, Fault> {
        loop {
            let available = self.ring.available(segment)?;
            if available == 0 {
                return Ok(Consumed::All);
            }
            if budget == 0 {
                return Ok(Consumed::Budget);
            }
            let at = self.ring.place();
            let header = Header::parse(segment.peek(at)).ok_or(Refusal::Malformed)?;
            let size = header.size();
            if size > available || size < WORD || size % WORD != 0 {
                return Err(Refusal::Malformed.into());
            }
            if header.kind == Kind::Send {
                let Some(payload) = self.payload(segment, cx.windows, header, at)? else {
                    return Ok(Consumed::UnknownWindow);
                };
                self.place_message(payload, cx)?;
                if header.is_last() {
                    self.queue.end_message(None, None, None, out);
                }
            } else if !self.other(segment, header, at, cx, out)? {
                return Ok(Consumed::UnknownWindow);
            }
            self.ring.advance(size);
            budget = budget.saturating_sub(RECORD + header.len as usize);
        }
    }

    /// The payload of a record. `None` if it is in a window that is not known.
    #[inline]
    fn payload<'a, S: Segment>(
        &mut self,
        segment: &'a S,
        windows: &'a Windows,
        header: Header,
        at: usize,
    ) -> Result<Option<Span<'a>>, Fault> {
        let len = header.len as usize;
        if !header.is_elsewhere() {
            return Ok(Some(segment.part(at + header.body(), len).ok_or(Refusal::Malformed)?));
        }
        if len > MAX_PIECE {
            return Err(Refusal::Malformed.into());
        }
        self.holds = true;
        Ok(windows.payload(segment, header.slot, segment.peek(at + header.body()), len))
    }

    /// Copies a part of a message to the first receive.
    #[inline]
    fn place_message(&mut self, payload: Span<'_>, cx: &mut Context<'_>) -> Result<(), Fault> {
        let room = self.queue.room(&mut cx.srq).ok_or(Refusal::NoBuffer)?;
        if payload.len() > room.saturating_sub(self.queue.placed()) {
            return Err(Refusal::TooLong.into());
        }
        self.queue.fill_from(payload);
        Ok(())
    }

    /// Carries out a record that is no plain Send; `false` if its window is not known.
    #[inline(never)]
    fn other<S: Segment>(
        &mut self,
        segment: &S,
        header: Header,
        at: usize,
        cx: &mut Context<'_>,
        out: &mut impl FnMut(Message),
    ) -> Result<bool, Fault> {
        // Each word is loaded once.
        let word = |nth: usize| segment.peek(at + WORD * (1 + nth));
        let len = header.len as usize;
        match header.kind {
            // The size was checked: it is what is skipped.
            Kind::Pad | Kind::Ready | Kind::Send => {}
            Kind::SendInvalidate => {
                let key = word(0) as u32;
                if !cx.keys.may_invalidate(cx.scope, key) {
                    return Err(Refusal::CannotInvalidate.into());
                }
                let Some(payload) = self.payload(segment, cx.windows, header, at)? else { return Ok(false) };
                self.place_message(payload, cx)?;
                if header.is_last() {
                    if !cx.keys.invalidate_remotely(cx.scope, key) {
                        return Err(Refusal::CannotInvalidate.into());
                    }
                    self.queue.end_message(None, Some(key), None, out);
                }
            }
            Kind::Write => {
                let (key, address) = (word(0) as u32, word(1));
                let Some(payload) = self.payload(segment, cx.windows, header, at)? else { return Ok(false) };
                // Nothing is checked of a write of nothing, as on iWARP.
                if len > 0 {
                    if cfg!(planted = "key-checked-after-the-copy") {
                        cx.keys.sink(key, address, len).into_iter().for_each(|span| span.fill_from(payload));
                    }
                    let span = cx.keys.remote(cx.scope, key, address, len, Access::REMOTE_WRITE);
                    span.map_err(Refusal::Write)?.fill_from(payload);
                    cx.direct = cx.keys.is_direct(key).then_some(key).or(cx.direct);
                }
                self.writing = !header.is_last();
            }
            Kind::Immediate => {
                if !cx.extensions {
                    return Err(Refusal::Opcode.into());
                }
                if !self.queue.is_between_messages() {
                    return Err(Refusal::Malformed.into());
                }
                if !self.queue.has_next(&mut cx.srq) {
                    return Err(Refusal::NoBuffer.into());
                }
                // What was written directly has no record, so the length comes with the immediate data.
                self.queue.end_message(Some(header.len), None, Some(word(0) as u32), out);
            }
            Kind::Read => {
                let (key, address) = (word(0) as u32, word(1));
                cx.keys.remote(cx.scope, key, address, len, Access::REMOTE_READ).map_err(Refusal::Request)?;
                if len == 0 || !cx.outgoing.request(Request::Read { key, address, len, done: 0 }) {
                    return Err(Refusal::TooManyRequests.into());
                }
            }
            Kind::CompareSwap | Kind::FetchAdd => {
                if !cx.extensions {
                    return Err(Refusal::Opcode.into());
                }
                let (key, address) = (word(0) as u32, word(1));
                let request = if header.kind == Kind::FetchAdd {
                    Request::FetchAdd { key, address, add: word(2) }
                } else {
                    Request::CompareSwap { key, address, expected: word(2), swap: word(3) }
                };
                if !cx.outgoing.request(request) {
                    return Err(Refusal::TooManyRequests.into());
                }
            }
            Kind::Data => {
                let Some(payload) = self.payload(segment, cx.windows, header, at)? else { return Ok(false) };
                let front = cx.outgoing.front().filter(|front| !front.atomic).ok_or(Refusal::UnexpectedAnswer)?;
                if len == 0 || len > front.len - front.done || header.is_last() != (len == front.len - front.done) {
                    return Err(Refusal::UnexpectedAnswer.into());
                }
                front.sink.part(front.done, len).fill_from(payload);
                front.done += len;
                if header.is_last() {
                    cx.outgoing.answer_came();
                }
            }
            Kind::Value => {
                let front = cx.outgoing.front().filter(|front| front.atomic).ok_or(Refusal::UnexpectedAnswer)?;
                front.sink.fill(&word(0).to_ne_bytes());
                cx.outgoing.answer_came();
            }
            Kind::Refusal => return Err(Fault::Refused(Refusal::of(word(0)))),
            Kind::Mapped => cx.lendings.answered(header.slot, word(0), len == 1),
        }
        Ok(true)
    }
}
