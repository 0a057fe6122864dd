//! The outgoing direction of a queue pair: work requests, and the answers to the peer's requests, become records.
//!
//! The send queue goes out in order and completes in order. A small payload is in its record; so its work request is done with that. A large
//! one that lies in memory which the peer has mapped stays where it is until the peer has consumed the record; every other one is copied,
//! part by part, to the *area*, which is such memory.

use std::collections::VecDeque;
use std::sync::Arc;

use super::fault::{Fault, Refusal};
use super::record::{ELSEWHERE, Header, Kind, LAST, WORD};
use super::ring::{Nonsense, Producer};
use super::segment::{Payload, Segment};
use super::windows::{Lendings, State, Windows};
use crate::mem::{Memory, Sge, Sharing};
use crate::mr::Access;
use crate::slab::Key;
use crate::soft::completions::{ATOMIC_LEN, Done};
use crate::soft::keys::{KeyTable, Miss};
use crate::wc::WcStatus;
use crate::wr::{RemoteAddress, SendClass, SendFlags, SendOp, SendWr, SgeList};

/// A payload of at most so many bytes is in its record.
pub(super) const INLINE: usize = 1 << 10;
/// The most bytes that a record says of a window.
pub(super) const MAX_PIECE: usize = 1 << 20;
/// Length of the area, bytes, and of the largest part that is copied there.
const AREA: usize = 256 << 10;
const AREA_PIECE: usize = AREA / 4;
/// Where a part in the area begins is a multiple of this.
const ALIGN: usize = 64;
/// The most bytes that are copied before other connections have their turn.
const BUDGET: usize = 4 << 20;
const ATOMIC: usize = ATOMIC_LEN as usize;

/// A work request of which not everything is in records.
#[derive(Debug)]
struct Entry {
    wr: SendWr,
    len: usize,
    /// A copy of the payload, if it was posted inline.
    inline: Option<Box<[u8]>>,
}

impl Entry {
    /// Whether the peer answers it.
    fn is_answered(&self) -> bool {
        self.wr.op.answered() && (self.len > 0 || self.wr.op.class() != SendClass::Read)
    }

    /// Itself, when nothing has gone wrong.
    fn done(&self) -> Done {
        Done::of(self.wr.wr_id, self.wr.op.class(), self.wr.flags, self.len)
    }
}

/// What a work request that is wholly in records waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Until {
    /// Those before it.
    Now,
    /// The peer has consumed the records up to a position.
    Consumed(u64),
    /// The peer's answer.
    Answered,
}

/// A read or an atomic operation whose answer has not come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Awaited {
    pub(super) sink: Sge,
    pub(super) len: usize,
    pub(super) done: usize,
    pub(super) atomic: bool,
    number: u64,
}

/// A request of the peer.
#[derive(Clone, Copy, Debug)]
pub(super) enum Request {
    Read { key: u32, address: u64, len: usize, done: usize },
    CompareSwap { key: u32, address: u64, expected: u64, swap: u64 },
    FetchAdd { key: u32, address: u64, add: u64 },
}

/// How a transmission ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// Nothing is left that could go out now.
    All,
    /// More could go out, but other connections have their turn first.
    More,
}

/// The result of a step.
enum Step {
    /// So many bytes went out.
    Took(usize),
    /// The peer has to consume first, or to answer.
    Waits,
}

/// What a payload is, and where.
struct Source<'a> {
    sges: &'a SgeList,
    inline: Option<&'a [u8]>,
    offset: usize,
    left: usize,
}

/// Memory that payloads are copied to, used as a ring.
#[derive(Debug)]
struct Area {
    memory: Option<Arc<Memory>>,
    slot: u8,
    pos: u64,
    tail: u64,
    /// Positions in the ring, and up to where the area is free when the peer has consumed up to there.
    parts: VecDeque<(u64, u64)>,
}

impl Area {
    /// Finds room for as much as possible of `len` bytes in one piece; returns its offset and its length.
    fn reserve(&mut self, len: usize) -> Option<(usize, usize)> {
        let len = len.min(AREA_PIECE);
        if self.parts.is_empty() {
            // The same pages again: they are in a cache.
            (self.pos, self.tail) = (0, 0);
        }
        let at = (self.pos % AREA as u64) as usize;
        let skip = if len > AREA - at { AREA - at } else { 0 };
        let used = (self.pos - self.tail) as usize;
        if used + skip + len > AREA {
            return None;
        }
        self.pos += skip as u64;
        Some(((self.pos % AREA as u64) as usize, len))
    }

    fn commit(&mut self, len: usize, end: u64) {
        self.pos += len.next_multiple_of(ALIGN) as u64;
        self.parts.push_back((end, self.pos));
    }

    fn consumed(&mut self, tail: u64) {
        while let Some(&(_, free)) = self.parts.front().filter(|(end, _)| *end <= tail) {
            self.tail = free;
            self.parts.pop_front();
        }
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) ring: Producer,
    /// Work requests that are wholly in records and not done, and behind them the others.
    inflight: VecDeque<(Done, Until)>,
    queue: VecDeque<Entry>,
    /// Number of the oldest work request that is not done.
    first: u64,
    /// Bytes of the first one in the queue that are in records.
    part: usize,
    /// Its payload is, and its immediate data is next.
    immediate_next: bool,
    area: Area,
    awaited: VecDeque<Awaited>,
    /// How many answers may be awaited.
    depth: usize,
    /// Work requests with lower numbers have their answers.
    answered: u64,
    requests: VecDeque<Request>,
    /// How many requests the peer may have outstanding.
    limit: usize,
    /// The next record is a part of an answer, if one is owed.
    answer_next: bool,
    /// Behind the last part of a write.
    changes: u64,
    /// What this side has to say of windows: slot, word and whether it is mapped.
    replies: VecDeque<(u8, u64, bool)>,
    pub(super) fault: Option<Fault>,
}

impl Outgoing {
    pub(super) fn new(half: usize, depths: (u16, u16)) -> Self {
        let (ird, ord) = depths;
        Self {
            ring: Producer::new(half),
            inflight: VecDeque::new(),
            queue: VecDeque::new(),
            first: 0,
            part: 0,
            immediate_next: false,
            area: Area { memory: None, slot: 0, pos: 0, tail: 0, parts: VecDeque::new() },
            awaited: VecDeque::new(),
            depth: usize::from(ord),
            answered: 0,
            requests: VecDeque::new(),
            limit: usize::from(ird.max(1)).next_power_of_two() + 1,
            answer_next: false,
            changes: 0,
            replies: VecDeque::new(),
            fault: None,
        }
    }

    /// Work requests that are not done.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.inflight.len() + self.queue.len()
    }

    /// How many reads may be outstanding at the peer.
    pub(super) const fn depth(&self) -> usize {
        self.depth
    }

    /// Whether something waits for the peer to consume records.
    #[inline]
    pub(super) fn wants_room(&self) -> bool {
        !self.queue.is_empty() || !self.inflight.is_empty() || !self.requests.is_empty() || !self.replies.is_empty()
    }

    /// Whether a message may be written to the ring now: nothing is in front of it.
    #[inline]
    pub(super) fn is_clear(&self) -> bool {
        self.queue.is_empty() && self.fault.is_none()
    }

    /// Adds a work request. Its payload is copied if it is inline.
    pub(super) fn post(&mut self, wr: &SendWr, len: usize) {
        let inline = wr.flags.contains(SendFlags::INLINE).then(|| {
            let mut copy = Vec::with_capacity(len);
            wr.sges.as_slice().iter().for_each(|sge| sge.append_to(&mut copy));
            copy.into_boxed_slice()
        });
        self.queue.push_back(Entry { wr: *wr, len, inline });
    }

    /// As [`Outgoing::post`], of a work request whose payload was copied before.
    pub(super) fn adopt(&mut self, wr: SendWr, inline: Option<Box<[u8]>>) {
        let len = inline.as_ref().map_or_else(|| wr.sges.total_len(), |bytes| bytes.len());
        self.queue.push_back(Entry { wr, len, inline });
    }

    /// Puts a whole Send of at most [`INLINE`] bytes into the ring, which `put` writes there, if there is room. That nothing is in front of
    /// it was asked before.
    #[inline]
    pub(super) fn message<S: Segment>(&mut self, segment: &S, len: usize, put: impl FnOnce(&S, usize)) -> bool {
        let header = Header { flags: LAST, ..Header::new(Kind::Send, len as u32) };
        let size = header.size();
        let Some(at) = self.ring.reserve(segment, size) else { return false };
        segment.poke(at, header.emit());
        put(segment, at + WORD);
        self.ring.commit(size);
        true
    }

    /// Notes that a whole Send of a work request is in the ring. Returns it if it is done with that.
    #[inline]
    pub(super) fn message_posted(&mut self, wr: &SendWr) -> Option<Done> {
        let done = Done::of(wr.wr_id, SendClass::Send, wr.flags, 0);
        if self.inflight.is_empty() {
            self.first += 1;
            return Some(done);
        }
        self.inflight.push_back((done, Until::Now));
        None
    }

    /// Copies a message of the program to the area, and puts its record into the ring, if there is room for both.
    pub(super) fn message_elsewhere<S: Segment>(
        &mut self,
        segment: &S,
        lendings: &mut Lendings,
        parts: [&[u8]; 2],
    ) -> bool {
        let len = parts[0].len() + parts[1].len();
        if !self.has_area(segment, lendings) || len > AREA_PIECE {
            return false;
        }
        let header = Header { flags: LAST | ELSEWHERE, slot: self.area.slot, ..Header::new(Kind::Send, len as u32) };
        let (Some(at), Some((offset, _))) = (self.ring.reserve(segment, header.size()), self.area.reserve(len)) else {
            return false;
        };
        let Some(memory) = &self.area.memory else { return false };
        let mut place = offset;
        for part in parts {
            if !memory.copy_in(place, part) {
                return false;
            }
            place += part.len();
        }
        segment.poke(at, header.emit());
        segment.poke(at + WORD, offset as u64);
        self.ring.commit(header.size());
        self.area.commit(len, self.ring.pos());
        true
    }

    /// Whether the peer has mapped the area, which is made when it is wanted for the first time.
    fn has_area<S: Segment>(&mut self, segment: &S, lendings: &mut Lendings) -> bool {
        if self.area.memory.is_some() {
            return lendings.state(self.area.slot) == State::Mapped;
        }
        let made = Memory::new_shared(AREA, Sharing::Read).inspect_err(|error| {
            log::debug!("no memory for what is sent to a peer of this host: {error}; it goes in small parts");
        });
        if let Ok(mut memory) = made {
            let file = memory.take_file();
            let memory = Arc::new(memory);
            if let Some(slot) = lendings.lend(segment, (&memory, AREA, file), 0, Access::empty()) {
                self.area.slot = slot;
                self.area.memory = Some(memory);
            }
        }
        false
    }

    /// Adds a request of the peer; whether it may have one more.
    pub(super) fn request(&mut self, request: Request) -> bool {
        let room = self.requests.len() < self.limit;
        if room {
            self.requests.push_back(request);
        }
        room
    }

    /// Says whether a window was mapped. A later word on a slot replaces an earlier one, so that there are no more than slots.
    pub(super) fn reply(&mut self, slot: u8, word: u64, mapped: bool) {
        self.replies.retain(|reply| reply.0 != slot);
        self.replies.push_back((slot, word, mapped));
    }

    /// The request whose answer comes next.
    pub(super) fn front(&mut self) -> Option<&mut Awaited> {
        self.awaited.front_mut()
    }

    /// Ends the request whose answer has come.
    pub(super) fn answer_came(&mut self) {
        if let Some(awaited) = self.awaited.pop_front() {
            self.answered = awaited.number + 1;
        }
    }

    /// Number of the oldest request that is not answered.
    pub(super) fn oldest_awaited(&self) -> Option<u64> {
        Some(self.awaited.front()?.number)
    }

    /// Puts one word into the ring, as the only thing that a new record says.
    pub(super) fn say<S: Segment>(&mut self, segment: &S, header: Header, words: &[u64]) -> bool {
        let reserved = if header.kind == Kind::Refusal {
            self.ring.reserve_last(segment, header.size())
        } else {
            self.ring.reserve(segment, header.size())
        };
        let Some(at) = reserved else { return false };
        segment.poke(at, header.emit());
        for (nth, &word) in words.iter().enumerate() {
            segment.poke(at + WORD * (1 + nth), word);
        }
        self.ring.commit(header.size());
        true
    }

    /// Looks how far the peer is, and completes what is done.
    pub(super) fn reap<S: Segment>(&mut self, segment: &S, done: &mut impl FnMut(Done)) -> Result<(), Nonsense> {
        if self.ring.look(segment)? {
            self.area.consumed(self.ring.tail());
        }
        while let Some(&(front, until)) = self.inflight.front() {
            let waits = match until {
                Until::Now => false,
                Until::Consumed(end) => end > self.ring.tail(),
                Until::Answered => self.first >= self.answered,
            };
            if waits {
                break;
            }
            self.inflight.pop_front();
            self.first += 1;
            done(front);
        }
        Ok(())
    }

    /// Puts as much into the ring as there is and fits.
    pub(super) fn transmit<S: Segment>(&mut self, segment: &S, cx: &mut Peer<'_>, done: &mut impl FnMut(Done)) -> Sent {
        let mut left = BUDGET;
        loop {
            while let Some(&(slot, word, mapped)) = self.replies.front() {
                if !self.say(segment, Header { slot, ..Header::new(Kind::Mapped, mapped.into()) }, &[word]) {
                    break;
                }
                self.replies.pop_front();
            }
            let owes = !self.requests.is_empty();
            let may_go = self.may_go();
            let step = match (may_go, owes) {
                _ if self.fault.is_some() => Step::Waits,
                (false, false) => Step::Waits,
                (true, false) => self.step(segment, cx),
                (false, true) => self.answer(segment, cx),
                (true, true) => {
                    match if self.answer_next { self.answer(segment, cx) } else { self.step(segment, cx) } {
                        Step::Waits if self.answer_next => self.step(segment, cx),
                        Step::Waits => self.answer(segment, cx),
                        took => took,
                    }
                }
            };
            let before = self.ring.tail();
            if self.reap(segment, done).is_err() {
                self.fault = Some(Fault::Violation(Refusal::Malformed));
            }
            match step {
                Step::Took(bytes) => left = left.saturating_sub(bytes),
                // The peer may have consumed something meanwhile.
                Step::Waits if self.ring.tail() != before && self.fault.is_none() => {}
                Step::Waits => return Sent::All,
            }
            if left == 0 {
                return Sent::More;
            }
        }
    }

    /// Whether the next work request may go out now.
    #[inline]
    fn may_go(&self) -> bool {
        let Some(entry) = self.queue.front() else { return false };
        let fenced = entry.wr.flags.contains(SendFlags::FENCE) && self.part == 0 && !self.awaited.is_empty();
        !fenced && (!entry.is_answered() || self.awaited.len() < self.depth || self.depth == 0)
    }

    /// Takes a step with the first work request of the queue.
    fn step<S: Segment>(&mut self, segment: &S, cx: &mut Peer<'_>) -> Step {
        let Some(entry) = self.queue.pop_front() else { return Step::Waits };
        let step = self.step_with(segment, cx, &entry);
        match step {
            Some(Some(until)) => {
                self.inflight.push_back((entry.done(), until));
                (self.part, self.immediate_next, self.answer_next) = (0, false, true);
                Step::Took(entry.len.min(MAX_PIECE))
            }
            Some(None) => {
                let taken = entry.len.min(MAX_PIECE);
                self.queue.push_front(entry);
                Step::Took(taken)
            }
            None => {
                self.queue.push_front(entry);
                Step::Waits
            }
        }
    }

    /// Takes a step with a work request: `None` if it has to wait, and what it waits for when all of it is in records.
    fn step_with<S: Segment>(&mut self, segment: &S, cx: &mut Peer<'_>, entry: &Entry) -> Option<Option<Until>> {
        let remote = match entry.wr.op {
            SendOp::Send
            | SendOp::SendInvalidate(_)
            | SendOp::SendWithImmediate(_)
            | SendOp::Datagram(_)
            | SendOp::DatagramWithImmediate(..) => {
                let (kind, key) = match entry.wr.op {
                    SendOp::SendInvalidate(key) => (Kind::SendInvalidate, key.0),
                    _ => (Kind::Send, 0),
                };
                let words = [u64::from(key)];
                return self.carry(segment, cx.lendings, entry, kind, &words[..kind.words()]);
            }
            SendOp::WriteWithImmediate(_, data) if self.immediate_next => {
                let said = self.say(segment, Header::new(Kind::Immediate, entry.len as u32), &[data.into()]);
                return said.then_some(Some(self.until_consumed(cx.lendings, entry)));
            }
            SendOp::Write(remote) | SendOp::WriteWithImmediate(remote, _) => {
                let until = if let Some(taken) = self.write_through(segment, cx.windows, entry, remote) {
                    self.part += taken;
                    (self.part == entry.len).then_some(Until::Now)
                } else {
                    let address = remote.address.wrapping_add(self.part as u64);
                    let until =
                        self.carry(segment, cx.lendings, entry, Kind::Write, &[remote.key.0.into(), address])?;
                    self.changes = self.ring.pos();
                    until
                };
                if until.is_some() && matches!(entry.wr.op, SendOp::WriteWithImmediate(..)) {
                    self.immediate_next = true;
                    return Some(None);
                }
                return Some(until);
            }
            SendOp::Read(_) if entry.len == 0 => return Some(Some(Until::Now)),
            SendOp::Read(remote) | SendOp::CompareSwap { remote, .. } | SendOp::FetchAdd { remote, .. } => remote,
        };
        if self.use_directly(segment, cx.windows, entry, remote) {
            return Some(if self.part == entry.len { Some(Until::Now) } else { None });
        }
        self.ask(segment, entry, remote)
    }

    /// Puts a part of a payload into the ring.
    fn carry<S: Segment>(
        &mut self,
        segment: &S,
        lendings: &mut Lendings,
        entry: &Entry,
        kind: Kind,
        words: &[u64],
    ) -> Option<Option<Until>> {
        let (offset, left) = (self.part, entry.len - self.part);
        let source = Source { sges: &entry.wr.sges, inline: entry.inline.as_deref(), offset, left };
        self.part += self.part_of(segment, lendings, &source, kind, words)?;
        Some((self.part == entry.len).then(|| self.until_consumed(lendings, entry)))
    }

    /// What a work request waits for when its last record is in the ring: if a part of its payload is where the program has it, that the
    /// peer has consumed it.
    fn until_consumed(&self, lendings: &Lendings, entry: &Entry) -> Until {
        let lent = match entry.wr.sges.as_slice() {
            [one] if entry.inline.is_none() && entry.len > INLINE => lendings.place(one).is_some(),
            _ => false,
        };
        if lent { Until::Consumed(self.ring.pos()) } else { Until::Now }
    }

    /// Puts as much of a payload into the ring as one record carries; returns how much.
    fn part_of<S: Segment>(
        &mut self,
        segment: &S,
        lendings: &mut Lendings,
        source: &Source<'_>,
        kind: Kind,
        words: &[u64],
    ) -> Option<usize> {
        let Source { sges, inline, offset, left } = *source;
        let mut header = Header::new(kind, left as u32);
        let small = left <= INLINE;
        let lent = match (sges.as_slice(), inline) {
            ([entry], None) if !small => lendings.place(&entry.part(offset, left)),
            _ => None,
        };
        let mut place = None;
        let copies = lent.is_none() && !small && self.has_area(segment, lendings);
        let taken = if let Some((slot, at)) = lent {
            (header.slot, place) = (slot, Some(at));
            left.min(MAX_PIECE)
        } else if copies {
            // The ring first: what is reserved there costs nothing.
            let (at, taken) = self.area.reserve(left)?;
            (header.slot, place) = (self.area.slot, Some(at as u64));
            taken
        } else {
            left.min(INLINE)
        };
        header.len = taken as u32;
        header.flags = if taken == left { LAST } else { 0 } | if place.is_some() { ELSEWHERE } else { 0 };
        let at = self.ring.reserve(segment, header.size())?;
        segment.poke(at, header.emit());
        for (nth, &word) in words.iter().enumerate() {
            segment.poke(at + WORD * (1 + nth), word);
        }
        let body = at + header.body();
        if let Some(place) = place {
            segment.poke(body, place);
        }
        if lent.is_none() {
            let area = self.area.memory.as_deref().filter(|_| copies);
            let mut done = 0;
            let mut put = |payload: &Payload<'_>| {
                match (area, place) {
                    (Some(memory), Some(place)) => {
                        if let Some(room) = memory.span(place as usize + done, payload.len()) {
                            payload.copy_into(room);
                        }
                    }
                    _ => segment.put(body + done, payload),
                }
                done += payload.len();
            };
            match inline {
                Some(bytes) => put(&Payload::Bytes(bytes.get(offset..offset + taken).unwrap_or_default())),
                None => sges.visit(offset, taken, |part| put(&Payload::Entry(&part))),
            }
        }
        self.ring.commit(header.size());
        if copies {
            self.area.commit(taken, self.ring.pos());
        }
        Some(taken)
    }

    /// Whether all records that change memory of the peer have done so, so that this side may use that memory itself. A write is done when
    /// it is consumed; an atomic operation may be done later, when there is room for its answer.
    fn is_in_order(&self) -> bool {
        self.changes <= self.ring.tail() && !self.awaited.iter().any(|awaited| awaited.atomic)
    }

    /// Writes a part to memory of the peer that this side has mapped; returns how much.
    fn write_through<S: Segment>(
        &self,
        segment: &S,
        windows: &Windows,
        entry: &Entry,
        remote: RemoteAddress,
    ) -> Option<usize> {
        if entry.len == 0 || !self.is_in_order() {
            return None;
        }
        let address = remote.address.checked_add(self.part as u64)?;
        let left = (entry.len - self.part).min(MAX_PIECE);
        let (window, offset) = windows.region(segment, remote.key.0, address, left, Access::REMOTE_WRITE)?;
        let sink = window.sink(offset, left)?;
        let mut done = 0;
        match entry.inline.as_deref() {
            Some(bytes) => sink.fill(bytes.get(self.part..self.part + left)?),
            None => entry.wr.sges.visit(self.part, left, |part| {
                sink.part(done, part.len()).fill_from_entry(&part);
                done += part.len();
            }),
        }
        Some(left)
    }

    /// Reads a part of, or changes, memory of the peer that this side has mapped; whether it has.
    fn use_directly<S: Segment>(
        &mut self,
        segment: &S,
        windows: &Windows,
        entry: &Entry,
        remote: RemoteAddress,
    ) -> bool {
        if !self.is_in_order() {
            return false;
        }
        let sink = entry.wr.sges.as_slice().first().copied().unwrap_or_default();
        let (need, len) = match entry.wr.op {
            SendOp::Read(_) => (Access::REMOTE_READ, (entry.len - self.part).min(MAX_PIECE)),
            _ => (Access::REMOTE_ATOMIC, ATOMIC),
        };
        let Some(address) = remote.address.checked_add(self.part as u64) else { return false };
        let Some((window, offset)) = windows.region(segment, remote.key.0, address, len, need) else { return false };
        let old = match entry.wr.op {
            SendOp::CompareSwap { expected, swap, .. } => {
                window.sink(offset, len).and_then(|word| word.update(|old| if old == expected { swap } else { old }))
            }
            SendOp::FetchAdd { add, .. } => {
                window.sink(offset, len).and_then(|word| word.update(|old| old.wrapping_add(add)))
            }
            _ => {
                let Some(source) = window.source(offset, len) else { return false };
                sink.part(self.part, len).fill_from(source);
                self.part += len;
                return true;
            }
        };
        let Some(old) = old else { return false };
        sink.fill(&old.to_ne_bytes());
        self.part = entry.len;
        true
    }

    /// Puts a request into the ring.
    fn ask<S: Segment>(&mut self, segment: &S, entry: &Entry, remote: RemoteAddress) -> Option<Option<Until>> {
        if self.depth == 0 {
            self.fault = Some(Fault::WorkRequest(WcStatus::LocalQpOperationError));
            return None;
        }
        let key = u64::from(remote.key.0);
        // A part may have been read directly before.
        let address = remote.address.wrapping_add(self.part as u64);
        let (kind, words) = match entry.wr.op {
            SendOp::CompareSwap { expected, swap, .. } => (Kind::CompareSwap, [key, address, expected, swap]),
            SendOp::FetchAdd { add, .. } => (Kind::FetchAdd, [key, address, add, 0]),
            _ => (Kind::Read, [key, address, 0, 0]),
        };
        let (len, atomic) = if kind == Kind::Read { (entry.len - self.part, false) } else { (ATOMIC, true) };
        if !self.say(segment, Header::new(kind, len as u32), &words[..kind.words()]) {
            return None;
        }
        let sink = entry.wr.sges.as_slice().first().copied().unwrap_or_default().part(self.part, len);
        let number = self.first + self.inflight.len() as u64;
        self.awaited.push_back(Awaited { sink, len, done: 0, atomic, number });
        Some(Some(Until::Answered))
    }

    /// Puts a part of the answer to the peer's oldest request into the ring. Its memory is looked up for each part.
    fn answer<S: Segment>(&mut self, segment: &S, cx: &mut Peer<'_>) -> Step {
        let Some(&request) = self.requests.front() else { return Step::Waits };
        let result = match request {
            Request::Read { key, address, len, done } => self.answer_read(segment, cx, (key, address, len, done)),
            Request::CompareSwap { key, address, expected, swap } => {
                self.answer_atomic(segment, cx, (key, address), |old| if old == expected { swap } else { old })
            }
            Request::FetchAdd { key, address, add } => {
                self.answer_atomic(segment, cx, (key, address), |old| old.wrapping_add(add))
            }
        };
        match result {
            Ok(Some(taken)) => Step::Took(taken),
            Ok(None) => Step::Waits,
            Err(miss) => {
                self.fault = Some(Fault::Violation(Refusal::Request(miss)));
                Step::Waits
            }
        }
    }

    fn answer_read<S: Segment>(
        &mut self,
        segment: &S,
        cx: &mut Peer<'_>,
        (key, address, len, done): (u32, u64, usize, usize),
    ) -> Result<Option<usize>, Miss> {
        let left = len - done;
        let most = if left <= INLINE {
            left
        } else if self.has_area(segment, cx.lendings) {
            left.min(AREA_PIECE)
        } else {
            INLINE
        };
        let from = address.checked_add(done as u64).ok_or(Miss::Wrap)?;
        let span = cx.keys.remote(cx.scope, key, from, most, Access::REMOTE_READ)?;
        cx.direct = cx.keys.is_direct(key).then_some(key).or(cx.direct);
        let mut header = Header::new(Kind::Data, most as u32);
        header.flags = if most == left { LAST } else { 0 };
        let place = if most > INLINE {
            let Some((at, _)) = self.area.reserve(most) else { return Ok(None) };
            (header.slot, header.flags) = (self.area.slot, header.flags | ELSEWHERE);
            Some(at)
        } else {
            None
        };
        let Some(at) = self.ring.reserve(segment, header.size()) else { return Ok(None) };
        segment.poke(at, header.emit());
        match (place, &self.area.memory) {
            (Some(place), Some(memory)) => {
                segment.poke(at + WORD, place as u64);
                if let Some(room) = memory.span(place, most) {
                    room.fill_from(span);
                }
            }
            _ => segment.put(at + WORD, &Payload::Span(span)),
        }
        self.ring.commit(header.size());
        if place.is_some() {
            self.area.commit(most, self.ring.pos());
        }
        if most == left {
            self.requests.pop_front();
            self.answer_next = false;
        } else if let Some(Request::Read { done, .. }) = self.requests.front_mut() {
            *done += most;
        }
        Ok(Some(most))
    }

    fn answer_atomic<S: Segment>(
        &mut self,
        segment: &S,
        cx: &mut Peer<'_>,
        (key, address): (u32, u64),
        update: impl FnMut(u64) -> u64,
    ) -> Result<Option<usize>, Miss> {
        let header = Header::new(Kind::Value, ATOMIC as u32);
        let span = cx.keys.remote(cx.scope, key, address, ATOMIC, Access::REMOTE_ATOMIC)?;
        cx.direct = cx.keys.is_direct(key).then_some(key).or(cx.direct);
        let Some(at) = self.ring.reserve(segment, header.size()) else { return Ok(None) };
        let old = span.update(update).ok_or(Miss::Misaligned)?;
        segment.poke(at, header.emit());
        segment.poke(at + WORD, old);
        self.ring.commit(header.size());
        self.requests.pop_front();
        self.answer_next = false;
        Ok(Some(ATOMIC))
    }

    /// Gives up all work requests. They complete as flushed, but for the one with the number in `failed`, or without a number the first
    /// that is not in records.
    pub(super) fn flush(&mut self, failed: Option<(Option<u64>, WcStatus)>, done: &mut impl FnMut(Done)) {
        let unsent = self.first + self.inflight.len() as u64;
        let inflight = self.inflight.drain(..).map(|(done, _)| done);
        let queued = self.queue.drain(..).map(|entry| entry.done());
        for flushed in inflight.chain(queued) {
            let status = match failed {
                Some((at, status)) if at.unwrap_or(unsent) == self.first => status,
                _ => WcStatus::Flushed,
            };
            done(Done { status, signaled: true, ..flushed });
            self.first += 1;
        }
        self.requests.clear();
        self.awaited.clear();
        (self.part, self.immediate_next) = (0, false);
    }
}

/// What the outgoing direction uses besides its own.
#[derive(Debug)]
pub(super) struct Peer<'a> {
    pub(super) scope: Key,
    pub(super) keys: &'a KeyTable,
    pub(super) lendings: &'a mut Lendings,
    pub(super) windows: &'a Windows,
    /// A region that the peer has used and may map.
    pub(super) direct: Option<u32>,
}
