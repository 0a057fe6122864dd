//! Calls: requests with a deadline, each of which ends with exactly one answer or one error.
//!
//! On both sides of a connection, the program implements [`CallHandler`], and passes it to its
//! reactor in a [`WithCalls`]. If only some connections carry calls, the program implements
//! [`Handler`](crate::Handler) instead, with a [`Calls`] in it. Both sides may make calls on the
//! connection, any number at a time, and answer them in any order. Payloads are bytes. A connection
//! that carries calls carries no other messages: each message is a frame of this module ([the
//! wire](crate::guide::wire)). [The guide](crate::guide::calls) describes calls with async/await,
//! and calls from other threads.
//!
//! # Deadlines
//!
//! Each call has a deadline. The request carries the time that remains until the deadline, so the clocks of the two sides need not agree.
//! If no time remains, the receiver drops the request. An answer is not sent after the deadline. The time of a call begins at
//! [`Context::now`]. The time of a call is at most 71 minutes: a longer time is reduced to 71 minutes.
//!
//! # Memory
//!
//! If the connection has no room for a request or an answer, the payload is copied, and is sent when the connection has room.
//! [`CallLimits`] limits the memory that the requests of a peer use, and gives each connection and
//! each host a share of it. An answer that waits for room counts against the same limits. If a
//! request would exceed a limit, the caller gets [`CallError::Overloaded`], and the payload is not
//! copied. If an answer that must wait would exceed a limit, and is longer than its request,
//! [`Calls::answer`] returns [`AnswerError::Overloaded`], and the caller gets
//! [`CallError::Unanswered`]. If the connection has room, a payload is copied once more than by
//! [`Context::send`], and nothing is allocated.

mod connection;
mod deadlines;
mod error;
mod event;
mod frame;
mod handler;
mod limits;

use std::collections::VecDeque;
use std::ops::Deref;
use std::time::Duration;

use self::connection::{ConnectionCalls, Shared};
use self::deadlines::{CallDeadline, Deadlines};
pub use self::error::{AnswerError, CallError, Refusal, RefusedCall};
pub use self::event::{CallEvent, CallId, CallPayload, FailedCall, RequestId};
pub use self::frame::Violation;
use self::frame::{CallHeader, CallKind, HEADER, MAX_TIME, Status};
pub use self::handler::{CallContext, CallHandler, CallResult, ReceivedPayload, WithCalls};
pub use self::limits::{CallLimits, CallStats};
use crate::transport::newcomers::Host;
use crate::transport::slab::Key;
use crate::{ConnectionId, Context, DisconnectReason, PeerViolation, SendErrorKind, TimerId};

/// The calls and requests of a reactor; see the [module](self). `T` is the type of the tag of a
/// call: a value of the program that is stored with the call, and returned when the call ends. Use
/// `Calls` in a handler that also has connections without calls. The handler forwards four
/// callbacks to `Calls`, and calls `next_failed` after two of them. [`WithCalls`] does both for
/// programs whose connections all carry calls.
///
/// ```
/// use std::time::Duration;
///
/// use rdma_reactor::call::{CallEvent, Calls};
/// use rdma_reactor::{
///     Config, ConnectionId, Context, DisconnectReason, Handler, Message, ProviderChoice, Reactor, TimerId,
/// };
///
/// /// The client sends a request, and the server answers it in capitals.
/// #[derive(Default)]
/// struct Program {
///     calls: Calls<&'static str>,
/// }
///
/// impl Program {
///     /// Reports the calls that have ended without an answer.
///     fn report_failed(&mut self) {
///         while let Some(failed) = self.calls.next_failed() {
///             eprintln!("{}: {}", failed.tag, failed.error);
///         }
///     }
/// }
///
/// impl Handler for Program {
///     fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
///         if cx.connection(conn).listener().is_none() {
///             self.calls.call(cx, conn, b"hello", Duration::from_secs(10), "greeting").expect("an open connection");
///         }
///     }
///
///     fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
///         match self.calls.on_recv(cx, conn, message) {
///             Some(CallEvent::Request { id, payload }) => {
///                 // Fails if the caller does not wait any more.
///                 let _ = self.calls.answer(cx, id, &payload.to_ascii_uppercase());
///             }
///             Some(CallEvent::Answer { tag, payload, .. }) => {
///                 assert_eq!((tag, &payload[..]), ("greeting", &b"HELLO"[..]));
///                 cx.stop();
///             }
///             Some(CallEvent::Failed(failed)) => eprintln!("{}: {}", failed.tag, failed.error),
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
///         self.report_failed();
///     }
///
///     fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
///         self.calls.on_disconnect(conn, &reason);
///         self.report_failed();
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
/// let mut context = reactor.context();
/// let listener = context.listen("127.0.0.1:0".parse()?)?;
/// let server = context.listeners().local_address(listener).expect("it listens");
/// context.connect(server)?;
/// reactor.run(&mut Program::default())?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Calls<T = ()> {
    /// The connections that have sent or received a frame. The index is the slot of the [`ConnectionId`].
    connections: Vec<Option<Box<ConnectionCalls<T>>>>, // bound: connections
    shared: Shared,
    deadlines: Deadlines,
    failed: VecDeque<FailedCall<T>>, // bound: calls
}

impl<T> Default for Calls<T> {
    fn default() -> Self {
        Self {
            connections: Vec::new(),
            shared: Shared::default(),
            deadlines: Deadlines::default(),
            failed: VecDeque::new(),
        }
    }
}

/// A [`CallEvent`] without its payload, and with the keys of calls and requests instead of their
/// ids.
enum ReceivedFrame<T> {
    Request(Key),
    Cancelled(Key),
    Answer(Key, T),
    Failed(Key, T, CallError),
    Violation(Violation),
}

fn connection_of<T>(
    connections: &mut [Option<Box<ConnectionCalls<T>>>],
    conn: ConnectionId,
) -> Option<&mut ConnectionCalls<T>> {
    connections.get_mut(conn.slot())?.as_deref_mut().filter(|connection| connection.id == conn)
}

fn is_in_flight<T>(connections: &[Option<Box<ConnectionCalls<T>>>], &(_, conn, key): &CallDeadline) -> bool {
    let connection = connections.get(conn.slot()).and_then(Option::as_deref).filter(|connection| connection.id == conn);
    connection.is_some_and(|connection| connection.is_in_flight(key))
}

impl<T> Calls<T> {
    /// Creates a `Calls` with the default limits.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the limits. The program may change them. A change does not affect calls in flight or requests that have already arrived.
    ///
    /// ```
    /// let mut calls = rdma_reactor::call::Calls::<()>::new();
    /// // About as many requests as the server answers within half the time of a call.
    /// calls.limits().requests = 500;
    /// ```
    pub fn limits(&mut self) -> &mut CallLimits {
        &mut self.shared.limits
    }

    /// Returns the counters of calls and requests.
    #[must_use]
    pub const fn stats(&self) -> CallStats {
        self.shared.stats
    }

    /// Makes a call, which ends after `within` at the latest. [`CallEvent::Answer`], [`CallEvent::Failed`] or [`Calls::next_failed`]
    /// reports the end of the call, with the tag. If the connection has no room for the request, the request is queued. The time in the
    /// queue is a part of `within`.
    ///
    /// Example: [`Calls`].
    ///
    /// # Errors
    /// [`RefusedCall`] if the call was not made. It contains the reason and the tag.
    #[inline]
    pub fn call(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnectionId,
        payload: &[u8],
        within: Duration,
        tag: T,
    ) -> Result<CallId, RefusedCall<T>> {
        let within = within.min(MAX_TIME);
        let until = cx.now() + within;
        if connection_of(&mut self.connections, conn).is_none() && !self.open(cx, conn) {
            return Err(RefusedCall { why: Refusal::Send(SendErrorKind::Closed), tag });
        }
        let Self { connections, shared, deadlines, .. } = self;
        let Some(connection) = connection_of(connections, conn) else {
            return Err(RefusedCall { why: Refusal::Send(SendErrorKind::Closed), tag });
        };
        let key = connection.call(cx, shared, payload, (within, until), tag)?;
        deadlines.insert(cx, (until, conn, key));
        deadlines.prune(shared.in_flight, |due| is_in_flight(connections, due));
        Ok(CallId { conn, key })
    }

    /// Cancels a call, and notifies the peer. Returns the tag of the call; `None` if the call has ended already.
    ///
    /// ```
    /// use rdma_reactor::Context;
    /// use rdma_reactor::call::{CallId, Calls};
    ///
    /// /// Cancels all but the first of several equal calls.
    /// fn keep_first(cx: &mut Context<'_>, calls: &mut Calls, same: &[CallId]) {
    ///     for &call in same.iter().skip(1) {
    ///         calls.cancel(cx, call);
    ///     }
    /// }
    /// ```
    pub fn cancel(&mut self, cx: &mut Context<'_>, call: CallId) -> Option<T> {
        connection_of(&mut self.connections, call.conn)?.cancel(cx, &mut self.shared, call.key)
    }

    /// Answers a request. The program may call this in the callback that has reported the request, or later. If the connection has no room
    /// for the answer, the answer is queued.
    ///
    /// Example: [`Calls`].
    ///
    /// # Errors
    /// [`AnswerError`] if the answer is not sent. The request ends nevertheless.
    #[inline]
    pub fn answer(&mut self, cx: &mut Context<'_>, request: RequestId, payload: &[u8]) -> Result<(), AnswerError> {
        let connection = connection_of(&mut self.connections, request.conn).ok_or(AnswerError::Gone)?;
        connection.answer(cx, &mut self.shared, request.key, Some(payload))
    }

    /// Ends a request without an answer. The caller gets [`CallError::Unanswered`].
    ///
    /// Example: [`Calls::time_left`].
    pub fn dismiss(&mut self, cx: &mut Context<'_>, request: RequestId) {
        if let Some(connection) = connection_of(&mut self.connections, request.conn) {
            // An error is ignored: the caller does not wait any more, or there is no such request.
            let _ = connection.answer(cx, &mut self.shared, request.key, None);
        }
    }

    /// Returns the time that is left until the deadline of a request. Returns `None` if the caller does not wait any more: the deadline has
    /// passed, the caller has cancelled the call, or the connection has ended. A server that queues requests should call this before it
    /// serves a request, and should dismiss the request if the result is `None`.
    ///
    /// ```
    /// use rdma_reactor::Context;
    /// use rdma_reactor::call::{Calls, RequestId};
    ///
    /// /// Serves a request from a queue of the program.
    /// fn serve(cx: &mut Context<'_>, calls: &mut Calls, request: RequestId, work: impl FnOnce() -> Vec<u8>) {
    ///     if calls.time_left(cx, request).is_none() {
    ///         return calls.dismiss(cx, request);
    ///     }
    ///     let _ = calls.answer(cx, request, &work());
    /// }
    /// ```
    #[must_use]
    pub fn time_left(&self, cx: &Context<'_>, request: RequestId) -> Option<Duration> {
        let connection =
            self.connections.get(request.conn.slot())?.as_deref().filter(|connection| connection.id == request.conn)?;
        connection.awaited_until(request.key, cx.now()).map(|until| until.saturating_duration_since(cx.now()))
    }

    /// Closes a connection once all of its calls and requests have ended. Until then, new requests of the peer are refused with
    /// [`CallError::Draining`], and new calls of the local side with [`SendErrorKind::Closed`]. Answers that still wait for room when all
    /// calls and requests have ended are sent first, for at most [`Timeouts::close`](crate::Timeouts::close): after that time, the
    /// connection is aborted. Use `finish` in [`crate::Handler::on_drain`]:
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
        let Self { connections, shared, .. } = self;
        match connection_of(connections, conn) {
            Some(connection) => connection.finish(cx, shared),
            None => cx.close(conn),
        }
    }

    /// Returns the next call that has ended without an answer, because its deadline has passed or its connection has ended. After
    /// [`Calls::on_timer`] and [`Calls::on_disconnect`], call `next_failed` until it returns `None`.
    ///
    /// Example: [`Calls`].
    pub fn next_failed(&mut self) -> Option<FailedCall<T>> {
        self.failed.pop_front()
    }

    /// Handles a received message. Call this in [`crate::Handler::on_recv`]. `message` is the message or a slice of its bytes. Returns the
    /// event for the program; `None` if the program need not do anything.
    ///
    /// Example: [`Calls`].
    #[inline]
    pub fn on_recv<B: Deref<Target = [u8]>>(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnectionId,
        message: B,
    ) -> Option<CallEvent<B, T>> {
        let request = |key| RequestId { conn, key };
        Some(match self.received(cx, conn, &message)? {
            ReceivedFrame::Request(key) => CallEvent::Request { id: request(key), payload: CallPayload(message) },
            ReceivedFrame::Cancelled(key) => CallEvent::Cancelled(request(key)),
            ReceivedFrame::Answer(key, tag) => {
                CallEvent::Answer { call: CallId { conn, key }, tag, payload: CallPayload(message) }
            }
            ReceivedFrame::Failed(key, tag, error) => {
                CallEvent::Failed(FailedCall { call: CallId { conn, key }, tag, error })
            }
            ReceivedFrame::Violation(violation) => CallEvent::Violation(violation),
        })
    }

    #[inline]
    fn received(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: &[u8]) -> Option<ReceivedFrame<T>> {
        let header = match CallHeader::read(message) {
            Ok(header) => header,
            Err(violation) => return Some(self.violated(cx, conn, violation)),
        };
        if connection_of(&mut self.connections, conn).is_none() && !self.open(cx, conn) {
            return None;
        }
        let Self { connections, shared, .. } = self;
        let connection = connection_of(connections, conn)?;
        match header.kind {
            CallKind::Answer(status) => {
                let Some((key, tag)) = connection.answered(cx, shared, header.id) else {
                    shared.stats.unmatched += 1;
                    return None;
                };
                Some(match status {
                    Status::DONE => ReceivedFrame::Answer(key, tag),
                    status => ReceivedFrame::Failed(key, tag, CallError::of(status)),
                })
            }
            CallKind::Request(0) if !crate::planted("an-expired-request-is-served") => {
                shared.stats.expired += 1;
                None
            }
            CallKind::Request(left) => {
                let now = cx.now();
                let until = now + Duration::from_micros(left.into()).min(shared.limits.longest);
                match connection.admit(shared, (header.id, message.len() - HEADER), (now, until)) {
                    Ok(key) => {
                        shared.stats.admitted += 1;
                        Some(ReceivedFrame::Request(key))
                    }
                    Err(status) => {
                        shared.stats.overloaded += u64::from(status == Status::OVERLOADED);
                        connection.refuse(cx, shared, header.id, status);
                        None
                    }
                }
            }
            CallKind::Cancel => connection.cancelled(header.id).map(ReceivedFrame::Cancelled),
        }
    }

    /// Sends queued requests and answers of a connection. Call this in [`crate::Handler::on_writable`].
    ///
    /// Example: [`Calls`].
    pub fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if let Some(connection) = connection_of(&mut self.connections, conn) {
            connection.send_queued(cx, &mut self.shared);
        }
    }

    /// Ends the calls whose deadlines have passed. Call this in [`crate::Handler::on_timer`], and call [`Calls::next_failed`] afterwards.
    /// Returns true if `timer` is the timer of this `Calls`. Returns false, and does nothing, if `timer` is a timer of the program.
    ///
    /// Example: [`Calls`].
    pub fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId) -> bool {
        let Self { connections, shared, deadlines, failed } = self;
        if !deadlines.has_fired(timer) {
            return false;
        }
        while let Some((_, conn, key)) = deadlines.next(cx.now()) {
            let tag = connection_of(connections, conn).and_then(|connection| connection.end(cx, shared, key));
            let Some(tag) = tag else { continue };
            shared.stats.deadlines += 1;
            failed.push_back(FailedCall { call: CallId { conn, key }, tag, error: CallError::Deadline });
        }
        deadlines.rearm(cx, |due| is_in_flight(connections, due));
        true
    }

    /// Ends the calls and requests of a connection that has ended. Call this in [`crate::Handler::on_disconnect`], and call
    /// [`Calls::next_failed`] afterwards.
    ///
    /// Example: [`Calls`].
    pub fn on_disconnect(&mut self, conn: ConnectionId, reason: &DisconnectReason) {
        let Some(connection) = self
            .connections
            .get_mut(conn.slot())
            .and_then(|connection| connection.take_if(|connection| connection.id == conn))
        else {
            return;
        };
        let reason = match connection.violation {
            Some(_) => DisconnectReason::PeerViolation(PeerViolation::MalformedMessage),
            None => reason.clone(),
        };
        let ended = connection.close(&mut self.shared).into_iter().map(|(key, tag)| {
            let error = CallError::Disconnected(reason.clone());
            FailedCall { call: CallId { conn, key }, tag, error }
        });
        self.failed.extend(ended);
    }

    /// Adds a connection to `connections`, because its first frame is sent or has arrived. Returns true if the connection was added.
    /// Returns false if the connection is not open.
    #[cold]
    fn open(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> bool {
        if cx.connection(conn).max_message().is_none() {
            return false;
        }
        let slot = conn.slot();
        if self.connections.len() <= slot {
            self.connections.resize_with(slot + 1, || None);
        }
        // The slot may still contain an earlier connection, if the program has not called `on_disconnect` for that connection. The calls of
        // the earlier connection end now.
        if let Some(old) = self.connections[slot].as_ref().map(|connection| connection.id) {
            self.on_disconnect(old, &DisconnectReason::Lost);
        }
        let host = self.shared.held.open(cx.connection(conn).peer_address().map(|address| Host::of(address.ip())));
        self.connections[slot] = Some(Box::new(ConnectionCalls::new(conn, host)));
        true
    }

    /// Aborts a connection whose peer has sent a malformed frame.
    #[cold]
    fn violated(&mut self, cx: &mut Context<'_>, conn: ConnectionId, violation: Violation) -> ReceivedFrame<T> {
        cx.log_violation(conn, format_args!("{violation}"));
        if let Some(connection) = connection_of(&mut self.connections, conn) {
            connection.violation = Some(violation);
        }
        cx.abort(conn);
        ReceivedFrame::Violation(violation)
    }
}
