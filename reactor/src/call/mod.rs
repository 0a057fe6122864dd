//! Calls: requests with a deadline, each of which has exactly one answer or one error.
//!
//! [`Calls`] is a part of a program's [`Handler`](crate::Handler), on both sides. A connection carries the calls of both sides, any number
//! at a time, answered in any order. Payloads are bytes. All messages of a connection that carries calls are frames of this module
//! ([the wire](crate::guide::wire)). [The guide](crate::guide::calls) has the forms for async/await and for other threads.
//!
//! # Deadlines
//!
//! Each call has one. It travels as the time that is left, so clocks need not agree. A request that arrives when its time is over is
//! dropped, and an answer that comes too late is not sent. The time counts from [`Context::now`], and is cut to 71 minutes.
//!
//! # Memory
//!
//! A call or an answer that finds no room is copied, and sent when there is room. What a peer can make this side keep is bounded by
//! [`Limits`], and besides that by the length of the answers that the program gives to the requests of one connection. A request past a limit
//! is answered with [`CallError::Overloaded`] before its payload is copied. Calls that find room copy their payloads once more than
//! [`Context::send`] does, and allocate nothing.

mod deadlines;
mod error;
mod frame;
mod limits;
mod line;
mod payload;

use std::collections::VecDeque;
use std::ops::Deref;
use std::time::Duration;

use self::deadlines::{Deadlines, Due};
pub use self::error::{AnswerError, CallError, Refusal, RefusedCall};
pub use self::frame::Violation;
use self::frame::{HEADER, Header, Kind, LONGEST, Status};
pub use self::limits::{CallStats, Limits};
use self::line::{Line, Shared};
pub use self::payload::{CallId, Failed, Incoming, Payload, RequestId};
use crate::transport::slab::Key;
use crate::{ConnectionId, Context, DisconnectReason, PeerViolation, SendErrorKind, TimerId};

/// The calls and requests of a reactor; see the [module](self). `T` is the tag of a call: something of the program's that is kept with the
/// call, and comes back with its end. The program passes four callbacks on:
///
/// ```
/// use std::time::Duration;
///
/// use rdma_reactor::call::{Calls, Incoming};
/// use rdma_reactor::{
///     Config, ConnectionId, Context, DisconnectReason, Handler, Message, ProviderChoice, Reactor, TimerId,
/// };
///
/// /// One side asks, the other one answers in capitals.
/// #[derive(Default)]
/// struct Program {
///     calls: Calls<&'static str>,
/// }
///
/// impl Program {
///     /// Looks which calls have ended without an answer.
///     fn look(&mut self) {
///         while let Some(failed) = self.calls.next_failed() {
///             eprintln!("{}: {}", failed.tag, failed.error);
///         }
///     }
/// }
///
/// impl Handler for Program {
///     fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
///         if cx.listener(conn).is_none() {
///             self.calls.call(cx, conn, b"hello", Duration::from_secs(10), "greeting").expect("an open connection");
///         }
///     }
///
///     fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
///         match self.calls.on_recv(cx, conn, message) {
///             Some(Incoming::Request { id, payload }) => {
///                 // An error says that the caller has gone.
///                 let _ = self.calls.answer(cx, id, &payload.to_ascii_uppercase());
///             }
///             Some(Incoming::Answer { tag, payload, .. }) => {
///                 assert_eq!((tag, &payload[..]), ("greeting", &b"HELLO"[..]));
///                 cx.stop();
///             }
///             Some(Incoming::Failed(failed)) => eprintln!("{}: {}", failed.tag, failed.error),
///             _ => {}
///         }
///     }
///
///     fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
///         self.calls.on_writable(cx, conn);
///     }
///
///     fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, _: u64) {
///         self.calls.on_timer(cx, timer);
///         self.look();
///     }
///
///     fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
///         self.calls.on_disconnect(conn, &reason);
///         self.look();
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
/// let mut context = reactor.context();
/// let listener = context.listen("127.0.0.1:0".parse()?)?;
/// let server = context.local_address(listener).expect("it listens");
/// context.connect(server)?;
/// reactor.run(&mut Program::default())?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Calls<T = ()> {
    /// The connections that have carried a frame, by slot.
    lines: Vec<Option<Box<Line<T>>>>,
    shared: Shared,
    deadlines: Deadlines,
    failed: VecDeque<Failed<T>>,
}

impl<T> Default for Calls<T> {
    fn default() -> Self {
        Self { lines: Vec::new(), shared: Shared::default(), deadlines: Deadlines::default(), failed: VecDeque::new() }
    }
}

/// The meaning of a message, without its payload.
enum Meaning<T> {
    Request(Key),
    Cancelled(Key),
    Answer(Key, T),
    Failed(Key, T, CallError),
    Violation(Violation),
}

fn line_of<T>(lines: &mut [Option<Box<Line<T>>>], conn: ConnectionId) -> Option<&mut Line<T>> {
    lines.get_mut(conn.slot())?.as_deref_mut().filter(|line| line.id == conn)
}

fn is_in_flight<T>(lines: &[Option<Box<Line<T>>>], &(_, conn, key): &Due) -> bool {
    let line = lines.get(conn.slot()).and_then(Option::as_deref).filter(|line| line.id == conn);
    line.is_some_and(|line| line.is_in_flight(key))
}

impl<T> Calls<T> {
    /// Makes a part for a handler, with the default limits.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The limits, to be changed. What is held or in flight already stays.
    ///
    /// ```
    /// let mut calls = rdma_reactor::call::Calls::<()>::new();
    /// // As many requests as the server answers in about half the time of a call.
    /// calls.limits().requests = 500;
    /// ```
    pub fn limits(&mut self) -> &mut Limits {
        &mut self.shared.limits
    }

    /// What has become of calls and requests so far.
    #[must_use]
    pub const fn stats(&self) -> CallStats {
        self.shared.stats
    }

    /// Makes a call, which ends within `within`: with [`Incoming::Answer`] or [`Incoming::Failed`], or in [`Calls::next_failed`]. The tag comes
    /// back with the end. If there is no room, the request waits, and its time passes meanwhile.
    ///
    /// Example: [`Calls`].
    ///
    /// # Errors
    /// [`Refusal`], with the tag: the call was not made.
    #[inline]
    pub fn call(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnectionId,
        payload: &[u8],
        within: Duration,
        tag: T,
    ) -> Result<CallId, RefusedCall<T>> {
        let now = cx.now();
        let until = now + within.min(LONGEST);
        if line_of(&mut self.lines, conn).is_none() && !self.open(cx, conn) {
            return Err(RefusedCall { why: Refusal::Send(SendErrorKind::Closed), tag });
        }
        let Self { lines, shared, deadlines, .. } = self;
        let Some(line) = line_of(lines, conn) else {
            return Err(RefusedCall { why: Refusal::Send(SendErrorKind::Closed), tag });
        };
        let key = line.call(cx, shared, payload, (now, until), tag)?;
        deadlines.insert(cx, (until, conn, key));
        deadlines.tidy(shared.in_flight, |due| is_in_flight(lines, due));
        Ok(CallId { conn, key })
    }

    /// Ends a call that is not wanted any more, and notifies the peer. Returns its tag; `None` if it has ended.
    ///
    /// ```
    /// use rdma_reactor::Context;
    /// use rdma_reactor::call::{CallId, Calls};
    ///
    /// /// Cancels all but the first of several calls that ask the same.
    /// fn keep_first(cx: &mut Context<'_>, calls: &mut Calls, same: &[CallId]) {
    ///     for &call in same.iter().skip(1) {
    ///         calls.cancel(cx, call);
    ///     }
    /// }
    /// ```
    pub fn cancel(&mut self, cx: &mut Context<'_>, call: CallId) -> Option<T> {
        line_of(&mut self.lines, call.conn)?.cancel(cx, &mut self.shared, call.key)
    }

    /// Answers a request, now or later. An answer that finds no room waits, and is sent when there is room.
    ///
    /// Example: [`Calls`].
    ///
    /// # Errors
    /// [`AnswerError`]: the answer is not sent. The request is over then, too.
    #[inline]
    pub fn answer(&mut self, cx: &mut Context<'_>, request: RequestId, payload: &[u8]) -> Result<(), AnswerError> {
        let line = line_of(&mut self.lines, request.conn).ok_or(AnswerError::Gone)?;
        line.answer(cx, &mut self.shared, request.key, Some(payload))
    }

    /// Ends a request without an answer: its caller gets [`CallError::Unanswered`].
    ///
    /// Example: [`Calls::time_left`].
    pub fn dismiss(&mut self, cx: &mut Context<'_>, request: RequestId) {
        if let Some(line) = line_of(&mut self.lines, request.conn) {
            // Nobody waits for it, or there is no such request.
            let _ = line.answer(cx, &mut self.shared, request.key, None);
        }
    }

    /// Returns the time that the caller of a request still waits. `None`: it does not, because the time is over, the call was cancelled or
    /// the connection has ended. A server that lets requests wait asks this before it begins one, and dismisses it if nobody waits.
    ///
    /// ```
    /// use rdma_reactor::Context;
    /// use rdma_reactor::call::{Calls, RequestId};
    ///
    /// /// Answers a request that has waited in a queue of the program.
    /// fn serve(cx: &mut Context<'_>, calls: &mut Calls, request: RequestId, work: impl FnOnce() -> Vec<u8>) {
    ///     if calls.time_left(cx, request).is_none() {
    ///         return calls.dismiss(cx, request);
    ///     }
    ///     let _ = calls.answer(cx, request, &work());
    /// }
    /// ```
    #[must_use]
    pub fn time_left(&self, cx: &Context<'_>, request: RequestId) -> Option<Duration> {
        let line = self.lines.get(request.conn.slot())?.as_deref().filter(|line| line.id == request.conn)?;
        line.awaited_until(request.key, cx.now()).map(|until| until.saturating_duration_since(cx.now()))
    }

    /// Closes a connection when its calls and requests are done: at once, or behind the last one. New requests are refused with
    /// [`CallError::Draining`] meanwhile, and new calls of this side, too. In [`crate::Handler::on_drain`]:
    ///
    /// ```
    /// use rdma_reactor::Context;
    /// use rdma_reactor::call::Calls;
    ///
    /// fn on_drain(cx: &mut Context<'_>, calls: &mut Calls) {
    ///     for conn in cx.connection_ids().collect::<Vec<_>>() {
    ///         calls.finish(cx, conn);
    ///     }
    /// }
    /// ```
    pub fn finish(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        match line_of(&mut self.lines, conn) {
            Some(line) => line.finish(cx),
            None => cx.close(conn),
        }
    }

    /// The next call that has ended without an answer, at its deadline or with its connection: to be called after [`Calls::on_timer`] and
    /// [`Calls::on_disconnect`], until it returns `None`.
    ///
    /// Example: [`Calls`].
    pub fn next_failed(&mut self) -> Option<Failed<T>> {
        self.failed.pop_front()
    }

    /// To be called in [`crate::Handler::on_recv`], with the message or its bytes. Returns its meaning; `None` if there is nothing to do for
    /// the program.
    ///
    /// Example: [`Calls`].
    #[inline]
    pub fn on_recv<B: Deref<Target = [u8]>>(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnectionId,
        message: B,
    ) -> Option<Incoming<B, T>> {
        let name = |key| RequestId { conn, key };
        Some(match self.received(cx, conn, &message)? {
            Meaning::Request(key) => Incoming::Request { id: name(key), payload: Payload(message) },
            Meaning::Cancelled(key) => Incoming::Cancelled(name(key)),
            Meaning::Answer(key, tag) => {
                Incoming::Answer { call: CallId { conn, key }, tag, payload: Payload(message) }
            }
            Meaning::Failed(key, tag, error) => Incoming::Failed(Failed { call: CallId { conn, key }, tag, error }),
            Meaning::Violation(violation) => Incoming::Violation(violation),
        })
    }

    #[inline]
    fn received(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: &[u8]) -> Option<Meaning<T>> {
        let header = match Header::read(message) {
            Ok(header) => header,
            Err(violation) => return Some(self.violated(cx, conn, violation)),
        };
        if line_of(&mut self.lines, conn).is_none() && !self.open(cx, conn) {
            return None;
        }
        let Self { lines, shared, .. } = self;
        let line = line_of(lines, conn)?;
        match header.kind {
            Kind::Answer(status) => {
                let Some((key, tag)) = line.answered(cx, shared, header.id) else {
                    shared.stats.unmatched += 1;
                    return None;
                };
                Some(match status {
                    Status::DONE => Meaning::Answer(key, tag),
                    status => Meaning::Failed(key, tag, CallError::of(status)),
                })
            }
            Kind::Request(0) if !cfg!(planted = "an-expired-request-is-served") => {
                shared.stats.expired += 1;
                None
            }
            Kind::Request(left) => {
                let until = cx.now() + Duration::from_micros(left.into());
                match line.admit(shared, header.id, message.len() - HEADER, until) {
                    Ok(key) => {
                        shared.stats.admitted += 1;
                        Some(Meaning::Request(key))
                    }
                    Err(status) => {
                        shared.stats.overloaded += u64::from(status == Status::OVERLOADED);
                        line.refuse(cx, shared, header.id, status);
                        None
                    }
                }
            }
            Kind::Cancel => line.cancelled(header.id).map(Meaning::Cancelled),
        }
    }

    /// To be called in [`crate::Handler::on_writable`]: sends what waits for room.
    ///
    /// Example: [`Calls`].
    pub fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if let Some(line) = line_of(&mut self.lines, conn) {
            line.pump(cx, &mut self.shared);
        }
    }

    /// To be called in [`crate::Handler::on_timer`]. Returns true if the timer is one of this part. [`Calls::next_failed`] has the calls that
    /// have ended.
    ///
    /// Example: [`Calls`].
    pub fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId) -> bool {
        let Self { lines, shared, deadlines, failed } = self;
        if !deadlines.has_fired(timer) {
            return false;
        }
        while let Some((_, conn, key)) = deadlines.next(cx.now()) {
            let tag = line_of(lines, conn).and_then(|line| line.end(cx, shared, key));
            let Some(tag) = tag else { continue };
            shared.stats.deadlines += 1;
            failed.push_back(Failed { call: CallId { conn, key }, tag, error: CallError::Deadline });
        }
        deadlines.rearm(cx, |due| is_in_flight(lines, due));
        true
    }

    /// To be called in [`crate::Handler::on_disconnect`]. [`Calls::next_failed`] has the calls that have ended. The requests of the connection
    /// are gone.
    ///
    /// Example: [`Calls`].
    pub fn on_disconnect(&mut self, conn: ConnectionId, reason: &DisconnectReason) {
        let Some(line) = self.lines.get_mut(conn.slot()).and_then(|line| line.take_if(|line| line.id == conn)) else {
            return;
        };
        let reason = match line.violation {
            Some(_) => DisconnectReason::PeerViolation(PeerViolation::MalformedMessage),
            None => reason.clone(),
        };
        let ended = line.close(&mut self.shared).into_iter().map(|(key, tag)| {
            let error = CallError::Disconnected(reason.clone());
            Failed { call: CallId { conn, key }, tag, error }
        });
        self.failed.extend(ended);
    }

    /// Adds a connection that carries its first frame. Returns false if it is not open.
    #[cold]
    fn open(&mut self, cx: &Context<'_>, conn: ConnectionId) -> bool {
        if cx.max_message(conn).is_none() {
            return false;
        }
        let slot = conn.slot();
        if self.lines.len() <= slot {
            self.lines.resize_with(slot + 1, || None);
        }
        // If the program has not passed on the end of the last connection in this slot, its calls end now.
        if let Some(old) = self.lines[slot].as_ref().map(|line| line.id) {
            self.on_disconnect(old, &DisconnectReason::Lost);
        }
        self.lines[slot] = Some(Box::new(Line::new(conn)));
        true
    }

    /// The peer has sent something that is no frame.
    #[cold]
    fn violated(&mut self, cx: &mut Context<'_>, conn: ConnectionId, violation: Violation) -> Meaning<T> {
        log::warn!("{conn}: {violation}");
        if let Some(line) = line_of(&mut self.lines, conn) {
            line.violation = Some(violation);
        }
        cx.abort(conn);
        Meaning::Violation(violation)
    }
}
