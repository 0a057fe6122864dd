//! The calls of one connection, in both directions.

use std::collections::VecDeque;
use std::time::Instant;

use super::error::{AnswerError, Refusal, RefusedCall};
use super::frame::{HEADER, Header, Kind, Status, Violation};
use super::limits::{CallStats, Limits, Load};
use crate::transport::slab::{Key, Slab};
use crate::{ConnectionId, Context, SendErrorKind};

/// Largest number of refusals that wait for room on a connection, 16 octets each. A peer that takes none of its answers gets no more.
const MOST_REFUSALS: usize = 1024;

/// Largest memory that is kept for the next frame, bytes.
const KEPT: usize = 1 << 20;

/// What the calls of all connections share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    pub(super) limits: Limits,
    /// The requests that are held, on all connections.
    pub(super) held: Load,
    /// Number of calls in flight, on all connections.
    pub(super) in_flight: usize,
    pub(super) stats: CallStats,
    /// The frame that is being sent.
    frame: Vec<u8>,
}

impl Shared {
    #[inline]
    fn send(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnectionId,
        header: Header,
        payload: &[u8],
    ) -> Result<(), SendErrorKind> {
        self.frame.clear();
        self.frame.extend_from_slice(&header.write());
        self.frame.extend_from_slice(payload);
        let sent = cx.send(conn, &self.frame).map(drop);
        if self.frame.capacity() > KEPT {
            self.frame = Vec::new();
        }
        sent
    }
}

/// A call of this side.
#[derive(Debug)]
struct Call<T> {
    tag: T,
    /// Its request waits for room.
    waits: bool,
}

/// A request of the peer that is not answered.
#[derive(Debug)]
struct Request {
    /// The peer's name for it.
    id: u64,
    /// The caller waits until then.
    until: Instant,
    /// Length of its payload.
    bytes: usize,
    cancelled: bool,
}

/// A frame that waits for room.
#[derive(Debug)]
struct Waiting {
    frame: Frame,
    payload: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
enum Frame {
    Request(Key, Instant),
    /// It is held as the request was, with its own length.
    Answer(u64, Instant),
    Refusal(u64, Status),
    Cancel(u64),
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Line<T> {
    pub(super) id: ConnectionId,
    calls: Slab<Call<T>>,
    requests: Slab<Request>,
    /// The requests and the answers that are held.
    held: Load,
    /// Frames that wait for room, in order.
    queue: VecDeque<Waiting>,
    /// The requests of this side among them.
    queued: Load,
    refusals: usize,
    /// The connection is closed when nothing is left.
    finishes: bool,
    pub(super) violation: Option<Violation>,
}

/// The name of a call on the wire.
const fn wire(key: Key) -> u64 {
    (key.generation() as u64) << 32 | key.slot() as u64
}

impl<T> Line<T> {
    pub(super) fn new(id: ConnectionId) -> Self {
        Self {
            id,
            calls: Slab::default(),
            requests: Slab::default(),
            held: Load::default(),
            queue: VecDeque::new(),
            queued: Load::default(),
            refusals: 0,
            finishes: false,
            violation: None,
        }
    }

    // The caller's side.

    /// Makes a call, now or when there is room.
    pub(super) fn call(
        &mut self,
        cx: &mut Context<'_>,
        shared: &mut Shared,
        payload: &[u8],
        (now, until): (Instant, Instant),
        tag: T,
    ) -> Result<Key, RefusedCall<T>> {
        if self.finishes {
            return Err(RefusedCall { why: Refusal::Send(SendErrorKind::Closed), tag });
        }
        if self.calls.len() >= shared.limits.calls_per_connection {
            return Err(RefusedCall { why: Refusal::Full, tag });
        }
        let waits = !self.queue.is_empty();
        let key = self.calls.insert(Call { tag, waits });
        let header = Header::request(wire(key), until.saturating_duration_since(now));
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
        cx: &Context<'_>,
        shared: &Shared,
        key: Key,
        until: Instant,
        payload: &[u8],
    ) -> Result<(), Refusal> {
        self.check_length(cx, payload).map_err(Refusal::Send)?;
        let limits = &shared.limits;
        if !self.queued.has_room(payload.len(), limits.calls_per_connection, limits.bytes_per_connection) {
            return Err(Refusal::Full);
        }
        if let Some(call) = self.calls.get_mut(key) {
            call.waits = true;
        }
        self.queued.add(payload.len());
        self.queue.push_back(Waiting { frame: Frame::Request(key, until), payload: payload.to_vec() });
        Ok(())
    }

    fn check_length(&self, cx: &Context<'_>, payload: &[u8]) -> Result<(), SendErrorKind> {
        let max = cx.max_message(self.id).ok_or(SendErrorKind::Closed)?;
        let (len, max) = (payload.len().saturating_add(HEADER), usize::try_from(max).unwrap_or(usize::MAX));
        if len > max { Err(SendErrorKind::TooLong { len, max }) } else { Ok(()) }
    }

    /// Ends a call that the program does not wait for any more, and notifies the peer.
    pub(super) fn cancel(&mut self, cx: &mut Context<'_>, shared: &mut Shared, key: Key) -> Option<T> {
        let call = self.calls.remove(key)?;
        shared.in_flight -= 1;
        // What waits is dropped when it is its turn. There are no more cancels in the queue than calls in flight, because a call that is
        // made later waits behind them.
        if !call.waits {
            let header = Header { kind: Kind::Cancel, id: wire(key) };
            let waits = !self.queue.is_empty()
                || matches!(shared.send(cx, self.id, header, &[]), Err(SendErrorKind::WouldBlock(_)));
            if waits {
                self.queue.push_back(Waiting { frame: Frame::Cancel(wire(key)), payload: Vec::new() });
            }
        }
        self.close_if_done(cx);
        Some(call.tag)
    }

    /// Takes a call that ends; `None` if there is none of that name.
    #[inline]
    pub(super) fn end(&mut self, cx: &mut Context<'_>, shared: &mut Shared, key: Key) -> Option<T> {
        let call = self.calls.remove(key)?;
        shared.in_flight -= 1;
        self.close_if_done(cx);
        Some(call.tag)
    }

    /// Takes the call that the peer names.
    #[inline]
    pub(super) fn answered(&mut self, cx: &mut Context<'_>, shared: &mut Shared, id: u64) -> Option<(Key, T)> {
        let key = Key::new(id as u32, (id >> 32) as u32);
        #[cfg(planted = "an-answer-by-its-slot")]
        let key = self.calls.at(key.slot()).map_or(key, |(key, _)| key);
        self.end(cx, shared, key).map(|tag| (key, tag))
    }

    #[inline]
    pub(super) fn is_in_flight(&self, key: Key) -> bool {
        self.calls.get(key).is_some()
    }

    // The server's side.

    /// Holds a request of the peer, or returns the reason why it is refused. Its payload has not been touched.
    #[inline]
    pub(super) fn admit(&mut self, shared: &mut Shared, id: u64, bytes: usize, until: Instant) -> Result<Key, Status> {
        let Limits { requests_per_connection, bytes_per_connection, requests, bytes: all, .. } = shared.limits;
        if self.finishes {
            return Err(Status::DRAINING);
        }
        let fits = self.held.has_room(bytes, requests_per_connection, bytes_per_connection)
            && shared.held.has_room(bytes, requests, all);
        if !fits && !cfg!(planted = "every-request-is-admitted") {
            return Err(Status::OVERLOADED);
        }
        self.held.add(bytes);
        shared.held.add(bytes);
        Ok(self.requests.insert(Request { id, until, bytes, cancelled: false }))
    }

    /// Sends the reason why a request has no answer, now or when there is room.
    pub(super) fn refuse(&mut self, cx: &mut Context<'_>, shared: &mut Shared, id: u64, status: Status) {
        let header = Header::answer(id, status);
        if self.queue.is_empty() && !matches!(shared.send(cx, self.id, header, &[]), Err(SendErrorKind::WouldBlock(_)))
        {
            return;
        }
        if self.refusals == MOST_REFUSALS {
            shared.stats.refusals_dropped += 1;
            return;
        }
        self.refusals += 1;
        self.queue.push_back(Waiting { frame: Frame::Refusal(id, status), payload: Vec::new() });
    }

    /// The caller does not wait for a request any more. It is looked for among those that are held, which the limits bound: a cancel is rare.
    pub(super) fn cancelled(&mut self, id: u64) -> Option<Key> {
        let (key, _) = self.requests.iter().find(|(_, request)| request.id == id && !request.cancelled)?;
        self.requests.get_mut(key)?.cancelled = true;
        Some(key)
    }

    /// Returns the time until which the caller of a request waits; `None` if it does not, or there is no such request.
    pub(super) fn awaited_until(&self, key: Key, now: Instant) -> Option<Instant> {
        let request = self.requests.get(key).filter(|request| !request.cancelled)?;
        Some(request.until).filter(|until| *until > now)
    }

    /// Ends a request with an answer, which is sent now or when there is room; without one the peer is notified of that.
    pub(super) fn answer(
        &mut self,
        cx: &mut Context<'_>,
        shared: &mut Shared,
        key: Key,
        payload: Option<&[u8]>,
    ) -> Result<(), AnswerError> {
        let Request { id, until, bytes, cancelled } = self.requests.remove(key).ok_or(AnswerError::Gone)?;
        self.release(shared, bytes);
        let result = match payload {
            _ if cancelled || until <= cx.now() => Err(AnswerError::Late),
            Some(payload) => self.send_answer(cx, shared, (id, until), payload),
            None => {
                self.refuse(cx, shared, id, Status::UNANSWERED);
                Ok(())
            }
        };
        self.close_if_done(cx);
        result
    }

    #[inline]
    fn send_answer(
        &mut self,
        cx: &mut Context<'_>,
        shared: &mut Shared,
        (id, until): (u64, Instant),
        payload: &[u8],
    ) -> Result<(), AnswerError> {
        let sent = if self.queue.is_empty() {
            shared.send(cx, self.id, Header::answer(id, Status::DONE), payload)
        } else {
            self.check_length(cx, payload).map(|()| self.queue_answer(shared, (id, until), payload))
        };
        match sent {
            Ok(()) => Ok(()),
            Err(SendErrorKind::WouldBlock(_)) => {
                if !cfg!(planted = "an-answer-without-room-is-lost") {
                    self.queue_answer(shared, (id, until), payload);
                }
                Ok(())
            }
            Err(error) => Err(self.cannot_answer(cx, shared, id, error)),
        }
    }

    #[cold]
    fn queue_answer(&mut self, shared: &mut Shared, (id, until): (u64, Instant), payload: &[u8]) {
        self.held.add(payload.len());
        shared.held.add(payload.len());
        self.queue.push_back(Waiting { frame: Frame::Answer(id, until), payload: payload.to_vec() });
    }

    /// Notifies the peer that it gets no answer, because the connection does not accept it.
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
        shared.held.remove(bytes);
    }

    // Both sides.

    /// Sends what waits, while there is room.
    pub(super) fn pump(&mut self, cx: &mut Context<'_>, shared: &mut Shared) {
        while let Some(Waiting { frame, payload }) = self.queue.pop_front() {
            let now = cx.now();
            // Whatever nobody waits for any more is dropped.
            let header = match frame {
                Frame::Request(key, until) => {
                    self.is_in_flight(key).then(|| Header::request(wire(key), until.saturating_duration_since(now)))
                }
                Frame::Answer(id, until) => (until > now).then(|| Header::answer(id, Status::DONE)),
                Frame::Refusal(id, status) => Some(Header::answer(id, status)),
                Frame::Cancel(id) => Some(Header { kind: Kind::Cancel, id }),
            };
            let sent = header.map_or(Ok(()), |header| shared.send(cx, self.id, header, &payload));
            if let Err(SendErrorKind::WouldBlock(_)) = sent {
                self.queue.push_front(Waiting { frame, payload });
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
            // A request that is refused here, for want of memory, ends at its deadline.
            if let (Err(error), Frame::Answer(id, _)) = (sent, frame) {
                self.cannot_answer(cx, shared, id, error);
            }
        }
        self.close_if_done(cx);
    }

    /// Accepts no more calls and requests, and closes the connection when nothing is left of those that there are.
    pub(super) fn finish(&mut self, cx: &mut Context<'_>) {
        self.finishes = true;
        self.close_if_done(cx);
    }

    #[inline]
    fn close_if_done(&self, cx: &mut Context<'_>) {
        if self.finishes && self.calls.is_empty() && self.requests.is_empty() && self.queue.is_empty() {
            cx.close(self.id);
        }
    }

    /// Ends everything with the connection; returns the calls that were in flight.
    pub(super) fn close(mut self, shared: &mut Shared) -> Vec<(Key, T)> {
        shared.held.remove_all(&self.held);
        let calls: Vec<_> = self.calls.keys();
        shared.in_flight -= calls.len();
        calls.into_iter().filter_map(|key| self.calls.remove(key).map(|call| (key, call.tag))).collect()
    }
}
