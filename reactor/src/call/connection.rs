//! The calls of one connection: the calls of the local side, and the requests of the peer.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use super::error::{AnswerError, Refusal, RefusedCall};
use super::frame::{CallHeader, CallKind, HEADER, Status, Violation};
use super::limits::{CallLimits, CallStats, HeldRequests, Load};
use crate::transport::slab::{Key, Slab};
use crate::{Blocked, ConnectionId, Context, SendErrorKind};

/// The largest number of queued refusals on a connection. A refusal is a frame of 16 bytes. Further refusals are dropped: if so many are
/// queued, the peer is not receiving messages.
const MAX_REFUSALS: usize = 1024;

/// If the capacity of `Shared::frame` is at most this number of bytes, the buffer is kept for the next frame. A larger buffer is freed
/// after its use.
const MAX_KEPT_FRAME: usize = 1 << 20;

/// The state that the calls of all connections share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    pub(super) limits: CallLimits,
    /// The unanswered requests and queued answers of all connections.
    pub(super) held: HeldRequests,
    /// The number of calls in flight, for all connections.
    pub(super) in_flight: usize,
    pub(super) stats: CallStats,
    /// The frame that is being sent. The header and the payload are in one buffer, because `Context::send` sends one slice.
    frame: Vec<u8>, // local: one message of the program
}

impl Shared {
    #[inline]
    fn send(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnectionId,
        header: CallHeader,
        payload: &[u8],
    ) -> Result<(), SendErrorKind> {
        self.frame.clear();
        self.frame.extend_from_slice(&header.write());
        self.frame.extend_from_slice(payload);
        let sent = cx.send(conn, &self.frame).map(drop);
        if self.frame.capacity() > MAX_KEPT_FRAME {
            self.frame = Vec::new();
        }
        sent
    }
}

/// A call of the local side that has not ended.
#[derive(Debug)]
struct Call<T> {
    tag: T,
    /// True while the request of this call is queued, because the connection has no room for it.
    waits: bool,
}

/// A request of the peer that the program has not answered yet.
#[derive(Debug)]
struct HeldRequest {
    /// The id of the call. The peer has chosen this id.
    id: u64,
    /// The deadline of the call. After it, the caller at the peer does not wait for the answer any more.
    until: Instant,
    /// The length of the request's payload, in bytes.
    bytes: usize,
    cancelled: bool,
}

/// A frame that waits for room on the connection.
#[derive(Debug)]
struct QueuedFrame {
    frame: Frame,
    payload: Vec<u8>, // bound: requests, calls
}

#[derive(Clone, Copy, Debug)]
enum Frame {
    Request(Key, Instant),
    /// An answer: the id of its request, and the deadline of the call. [`ConnectionCalls::held`]
    /// includes each queued answer, with the length of the answer's payload.
    Answer(u64, Instant),
    Refusal(u64, Status),
    Cancel(u64),
}

impl Frame {
    /// Returns true if the frame need not be sent: it is a request whose call has ended, or an answer after the deadline of its call.
    fn is_dead<T>(self, calls: &Slab<Call<T>>, now: Instant) -> bool {
        match self {
            Self::Request(key, _) => calls.get(key).is_none(),
            Self::Answer(_, until) => until <= now,
            Self::Refusal(..) | Self::Cancel(_) => false,
        }
    }
}

/// The calls of one connection, see the [module](self).
#[derive(Debug)]
pub(super) struct ConnectionCalls<T> {
    pub(super) id: ConnectionId,
    /// The key of the peer's host in `Shared::held`.
    host: Key,
    calls: Slab<Call<T>>,        // bound: calls
    requests: Slab<HeldRequest>, // bound: requests
    /// The ids and keys of the unanswered requests that are not cancelled. `None` until the peer
    /// cancels its first call: requests of a peer that never cancels need no entry here.
    by_id: Option<BTreeSet<(u64, Key)>>, // bound: requests
    /// The number of unanswered requests and queued answers of this connection, and the sum of the bytes of their payloads.
    held: Load,
    /// The frames that wait for room on the connection, in the order in which they are sent.
    queue: VecDeque<QueuedFrame>, // bound: requests, refusals, calls
    /// A lower bound of the deadlines of the answers in `queue`. `None` means that `queue` contains
    /// no answer.
    first_deadline: Option<Instant>,
    /// The number of requests of the local side in `queue`, and the sum of the bytes of their payloads.
    queued: Load,
    /// The number of refusals in `queue`.
    refusals: usize,
    /// True once the program has called [`ConnectionCalls::finish`]. The connection is closed when
    /// all calls and requests have ended and the queue is empty. After the last call and request,
    /// `Timeouts::close` limits the wait for the queue.
    finishing: bool,
    pub(super) violation: Option<Violation>,
}

/// Returns the id that the headers of a call's frames contain.
const fn wire_id(key: Key) -> u64 {
    (key.generation() as u64) << 32 | key.slot() as u64
}

impl<T> ConnectionCalls<T> {
    pub(super) fn new(id: ConnectionId, host: Key) -> Self {
        Self {
            id,
            host,
            calls: Slab::default(),
            requests: Slab::default(),
            by_id: None,
            held: Load::default(),
            queue: VecDeque::new(),
            first_deadline: None,
            queued: Load::default(),
            refusals: 0,
            finishing: false,
            violation: None,
        }
    }

    // Calls of the local side.

    /// Makes a call: sends the request, or queues it if the connection has no room. `within` is the time that is left until the deadline
    /// `until`. Returns the key of the call.
    pub(super) fn call(
        &mut self,
        cx: &mut Context<'_>,
        shared: &mut Shared,
        payload: &[u8],
        (within, until): (Duration, Instant),
        tag: T,
    ) -> Result<Key, RefusedCall<T>> {
        if self.finishing {
            return Err(RefusedCall { why: Refusal::Send(SendErrorKind::Closed), tag });
        }
        if self.calls.len() >= shared.limits.calls_per_connection {
            return Err(RefusedCall { why: Refusal::Full, tag });
        }
        let waits = !self.queue.is_empty();
        let key = self.calls.insert(Call { tag, waits });
        let header = CallHeader::request(wire_id(key), within);
        let refused = match waits {
            true => self.queue_request(cx, shared, key, until, payload),
            false => match shared.send(cx, self.id, header, payload) {
                Err(SendErrorKind::WouldBlock(_)) => self.queue_request(cx, shared, key, until, payload),
                sent => sent.map_err(Refusal::Send),
            },
        };
        if let Err(why) = refused {
            if let Some(Call { tag, .. }) = self.calls.remove(key) {
                return Err(RefusedCall { why, tag });
            }
        }
        shared.in_flight += 1;
        Ok(key)
    }

    #[cold]
    fn queue_request(
        &mut self,
        cx: &mut Context<'_>,
        shared: &mut Shared,
        key: Key,
        until: Instant,
        payload: &[u8],
    ) -> Result<(), Refusal> {
        self.check_length(cx, payload).map_err(Refusal::Send)?;
        let CallLimits { calls_per_connection: most, bytes_per_connection: most_bytes, .. } = shared.limits;
        if !self.queued.has_room(payload.len(), most, most_bytes) {
            // The requests of calls that have ended may still be in the queue.
            self.drop_dead_frames(shared, cx.now());
            if !self.queued.has_room(payload.len(), most, most_bytes) {
                return Err(Refusal::Full);
            }
        }
        if let Some(call) = self.calls.get_mut(key) {
            call.waits = true;
        }
        self.queued.add(payload.len());
        self.queue.push_back(QueuedFrame { frame: Frame::Request(key, until), payload: payload.to_vec() });
        Ok(())
    }

    fn check_length(&self, cx: &mut Context<'_>, payload: &[u8]) -> Result<(), SendErrorKind> {
        let max = cx.connection(self.id).max_copied().ok_or(SendErrorKind::Closed)?;
        let (len, max) = (payload.len().saturating_add(HEADER), usize::try_from(max).unwrap_or(usize::MAX));
        if len > max { Err(SendErrorKind::TooLong { len, max }) } else { Ok(()) }
    }

    /// Cancels a call, and notifies the peer. Returns the tag of the call; `None` if there is no such call.
    pub(super) fn cancel(&mut self, cx: &mut Context<'_>, shared: &mut Shared, key: Key) -> Option<T> {
        let call = self.calls.remove(key)?;
        shared.in_flight -= 1;
        // If the request is still queued, the peer does not know the call, so no cancel is needed: the request is not sent.
        // Otherwise a cancel is sent or queued. A call that is made while the queue is not empty is itself queued, so its cancellation adds
        // no cancel to the queue. So the queue never has more cancels than the largest number of calls in flight.
        if !call.waits {
            let header = CallHeader { kind: CallKind::Cancel, id: wire_id(key) };
            let waits = !self.queue.is_empty()
                || matches!(shared.send(cx, self.id, header, &[]), Err(SendErrorKind::WouldBlock(_)));
            if waits {
                self.queue.push_back(QueuedFrame { frame: Frame::Cancel(wire_id(key)), payload: Vec::new() });
            }
        }
        self.close_if_done(cx, shared);
        Some(call.tag)
    }

    /// Removes a call, because it ends. Returns the tag of the call; `None` if there is no such call.
    #[inline]
    pub(super) fn end(&mut self, cx: &mut Context<'_>, shared: &mut Shared, key: Key) -> Option<T> {
        let call = self.calls.remove(key)?;
        shared.in_flight -= 1;
        self.close_if_done(cx, shared);
        Some(call.tag)
    }

    /// Removes the call to which an answer of the peer belongs. `id` is the id in the header of the answer. Returns the key and the tag of
    /// the call; `None` if there is no such call.
    #[inline]
    pub(super) fn answered(&mut self, cx: &mut Context<'_>, shared: &mut Shared, id: u64) -> Option<(Key, T)> {
        let key = Key::new(id as u32, (id >> 32) as u32);
        let other = if crate::planted("an-answer-by-its-slot") { self.calls.at(key.slot()) } else { None };
        let key = other.map_or(key, |(key, _)| key);
        self.end(cx, shared, key).map(|tag| (key, tag))
    }

    #[inline]
    pub(super) fn is_in_flight(&self, key: Key) -> bool {
        self.calls.get(key).is_some()
    }

    // Requests of the peer.

    /// Adds a request of the peer, and returns the key of the request. If the request must be refused, returns `Err` with the status that
    /// the refusal carries.
    #[inline]
    pub(super) fn admit(
        &mut self,
        shared: &mut Shared,
        (id, bytes): (u64, usize),
        (now, until): (Instant, Instant),
    ) -> Result<Key, Status> {
        if self.finishing {
            return Err(Status::DRAINING);
        }
        let fits = |this: &Self, shared: &Shared| shared.held.has_room(this.host, &this.held, bytes, &shared.limits);
        let fit = fits(self, shared) || (self.drop_late_answers(shared, now) && fits(self, shared));
        if !fit && !crate::planted("every-request-is-admitted") {
            return Err(Status::OVERLOADED);
        }
        self.held.add(bytes);
        shared.held.add(self.host, bytes);
        let key = self.requests.insert(HeldRequest { id, until, bytes, cancelled: false });
        if let Some(by_id) = &mut self.by_id {
            by_id.insert((id, key));
        }
        Ok(key)
    }

    /// Sends a refusal of a request to the peer. If the connection has no room, queues the refusal; drops it if [`MAX_REFUSALS`] refusals
    /// are queued.
    pub(super) fn refuse(&mut self, cx: &mut Context<'_>, shared: &mut Shared, id: u64, status: Status) {
        let header = CallHeader::answer(id, status);
        if self.queue.is_empty() && !matches!(shared.send(cx, self.id, header, &[]), Err(SendErrorKind::WouldBlock(_)))
        {
            return;
        }
        if self.refusals == MAX_REFUSALS {
            shared.stats.refusals_dropped += 1;
            return;
        }
        self.refusals += 1;
        self.queue.push_back(QueuedFrame { frame: Frame::Refusal(id, status), payload: Vec::new() });
    }

    /// Marks a request as cancelled by the peer. Returns the key of the request; `None` if there is
    /// no such request.
    pub(super) fn cancelled(&mut self, id: u64) -> Option<Key> {
        let requests = &self.requests;
        let by_id = self.by_id.get_or_insert_with(|| {
            requests.iter().filter(|(_, request)| !request.cancelled).map(|(key, request)| (request.id, key)).collect()
        });
        let &(found, key) = by_id.range((id, Key::new(0, 0))..).next().filter(|(found, _)| *found == id)?;
        by_id.remove(&(found, key));
        self.requests.get_mut(key)?.cancelled = true;
        Some(key)
    }

    /// Returns the deadline of a request. Returns `None` if the deadline has passed, if the caller has cancelled the call, or if there is
    /// no such request.
    pub(super) fn awaited_until(&self, key: Key, now: Instant) -> Option<Instant> {
        let request = self.requests.get(key).filter(|request| !request.cancelled)?;
        Some(request.until).filter(|until| *until > now)
    }

    /// Ends a request. If `payload` is `Some`, sends or queues it as the answer. If `payload` is `None`, sends or queues a refusal with the
    /// status `UNANSWERED`.
    pub(super) fn answer(
        &mut self,
        cx: &mut Context<'_>,
        shared: &mut Shared,
        key: Key,
        payload: Option<&[u8]>,
    ) -> Result<(), AnswerError> {
        let HeldRequest { id, until, bytes, cancelled } = self.requests.remove(key).ok_or(AnswerError::Gone)?;
        match &mut self.by_id {
            None => {}
            Some(_) if self.requests.is_empty() => self.by_id = None,
            Some(by_id) => _ = by_id.remove(&(id, key)),
        }
        self.release(shared, bytes);
        let result = match payload {
            _ if cancelled || until <= cx.now() => Err(AnswerError::Late),
            Some(payload) => self.send_answer(cx, shared, (id, until), payload, bytes),
            None => {
                self.refuse(cx, shared, id, Status::UNANSWERED);
                Ok(())
            }
        };
        self.close_if_done(cx, shared);
        result
    }

    #[inline]
    fn send_answer(
        &mut self,
        cx: &mut Context<'_>,
        shared: &mut Shared,
        answer: (u64, Instant),
        payload: &[u8],
        request: usize,
    ) -> Result<(), AnswerError> {
        let sent = if self.queue.is_empty() {
            shared.send(cx, self.id, CallHeader::answer(answer.0, Status::DONE), payload)
        } else {
            self.check_length(cx, payload).and(Err(SendErrorKind::WouldBlock(Blocked::Queue)))
        };
        match sent {
            Ok(()) => Ok(()),
            Err(SendErrorKind::WouldBlock(_)) => self.queue_answer(cx, shared, answer, payload, request),
            Err(error) => Err(self.cannot_answer(cx, shared, answer.0, error)),
        }
    }

    /// Queues an answer, because the connection has no room for it. `request` is the length of the
    /// request's payload: an answer of at most this length always fits into the limits. If a longer
    /// answer would exceed a limit, refuses the request instead.
    #[cold]
    fn queue_answer(
        &mut self,
        cx: &mut Context<'_>,
        shared: &mut Shared,
        (id, until): (u64, Instant),
        payload: &[u8],
        request: usize,
    ) -> Result<(), AnswerError> {
        if crate::planted("an-answer-without-room-is-lost") {
            return Ok(());
        }
        let len = payload.len();
        let fits = |this: &Self, shared: &Shared| {
            len <= request || shared.held.has_room_for_bytes(this.host, &this.held, len, &shared.limits)
        };
        let fit = fits(self, shared) || (self.drop_late_answers(shared, cx.now()) && fits(self, shared));
        if !fit {
            shared.stats.answers_dropped += 1;
            // The program has served the request, so the refusal must not have the status
            // `OVERLOADED`, by which the caller recognizes an unserved request.
            self.refuse(cx, shared, id, Status::UNANSWERED);
            return Err(AnswerError::Overloaded);
        }
        self.held.add(len);
        shared.held.add(self.host, len);
        self.first_deadline = Some(self.first_deadline.map_or(until, |first| first.min(until)));
        self.queue.push_back(QueuedFrame { frame: Frame::Answer(id, until), payload: payload.to_vec() });
        Ok(())
    }

    /// Drops the queued answers whose deadlines have passed. Returns true if there may have been
    /// any.
    fn drop_late_answers(&mut self, shared: &mut Shared, now: Instant) -> bool {
        let late = self.first_deadline.is_some_and(|first| first <= now);
        if late {
            self.drop_dead_frames(shared, now);
        }
        late
    }

    /// Refuses a request, because the connection did not accept the answer to it. Returns the error for the program.
    #[cold]
    fn cannot_answer(
        &mut self,
        cx: &mut Context<'_>,
        shared: &mut Shared,
        id: u64,
        error: SendErrorKind,
    ) -> AnswerError {
        let status = match error {
            SendErrorKind::Closed => return AnswerError::Gone,
            SendErrorKind::TooLong { .. } => Status::TOO_LONG,
            _ => Status::UNANSWERED,
        };
        self.refuse(cx, shared, id, status);
        AnswerError::Send(error)
    }

    #[inline]
    fn release(&mut self, shared: &mut Shared, bytes: usize) {
        self.held.remove(bytes);
        shared.held.remove(self.host, bytes);
    }

    // The queue of frames, and the end of the connection.

    /// Sends queued frames in order, until the queue is empty or the connection has no room.
    pub(super) fn send_queued(&mut self, cx: &mut Context<'_>, shared: &mut Shared) {
        while let Some(QueuedFrame { frame, payload }) = self.queue.pop_front() {
            let now = cx.now();
            let header = match frame {
                Frame::Request(key, until) => CallHeader::request(wire_id(key), until.saturating_duration_since(now)),
                Frame::Answer(id, _) => CallHeader::answer(id, Status::DONE),
                Frame::Refusal(id, status) => CallHeader::answer(id, status),
                Frame::Cancel(id) => CallHeader { kind: CallKind::Cancel, id },
            };
            let dead = frame.is_dead(&self.calls, now);
            let sent = if dead { Ok(()) } else { shared.send(cx, self.id, header, &payload) };
            if let Err(SendErrorKind::WouldBlock(_)) = sent {
                self.queue.push_front(QueuedFrame { frame, payload });
                return;
            }
            match frame {
                Frame::Request(key, _) => {
                    self.queued.remove(payload.len());
                    if let Some(call) = self.calls.get_mut(key) {
                        call.waits = false;
                    }
                }
                Frame::Answer(..) => self.release(shared, payload.len()),
                Frame::Refusal(..) => self.refusals -= 1,
                Frame::Cancel(_) => {}
            }
            // If an answer cannot be sent, a refusal is sent instead. If a request cannot be sent, nothing is done here: the call ends at
            // its deadline.
            if let (Err(error), Frame::Answer(id, _)) = (sent, frame) {
                self.cannot_answer(cx, shared, id, error);
            }
        }
        self.close_if_done(cx, shared);
    }

    /// Drops the queued frames that need not be sent.
    #[cold]
    fn drop_dead_frames(&mut self, shared: &mut Shared, now: Instant) {
        let Self { host, calls, held, queue, first_deadline, queued, .. } = self;
        *first_deadline = None;
        queue.retain(|QueuedFrame { frame, payload }| {
            let dead = frame.is_dead(calls, now);
            match frame {
                Frame::Request(..) if dead => queued.remove(payload.len()),
                Frame::Answer(..) if dead => {
                    held.remove(payload.len());
                    shared.held.remove(*host, payload.len());
                }
                Frame::Answer(_, until) => {
                    *first_deadline = Some(first_deadline.map_or(*until, |first| first.min(*until)))
                }
                _ => {}
            }
            !dead
        });
    }

    /// Refuses new calls and requests from now on. Closes the connection once the existing calls and requests have ended.
    pub(super) fn finish(&mut self, cx: &mut Context<'_>, shared: &mut Shared) {
        // A second `finish` must not restart the time that limits the wait for the queue.
        if !std::mem::replace(&mut self.finishing, true) {
            self.close_if_done(cx, shared);
        }
    }

    #[inline]
    fn close_if_done(&mut self, cx: &mut Context<'_>, shared: &mut Shared) {
        if self.finishing && self.calls.is_empty() && self.requests.is_empty() {
            self.close_when_sent(cx, shared);
        }
    }

    /// Closes the connection if the queue is empty. Otherwise limits the time for which the queued frames may wait: `send_queued` closes
    /// the connection when it has sent them.
    #[cold]
    fn close_when_sent(&mut self, cx: &mut Context<'_>, shared: &mut Shared) {
        self.drop_dead_frames(shared, cx.now());
        if self.queue.is_empty() {
            cx.close(self.id);
        } else {
            cx.limit_close(self.id);
        }
    }

    /// Ends all calls and requests, because the connection has ended. Returns the keys and tags of the calls that were in flight.
    pub(super) fn close(mut self, shared: &mut Shared) -> Vec<(Key, T)> {
        shared.held.close(self.host, &self.held);
        let calls: Vec<_> = self.calls.keys();
        shared.in_flight -= calls.len();
        calls.into_iter().filter_map(|key| self.calls.remove(key).map(|call| (key, call.tag))).collect()
    }
}
