//! The callbacks of calls, for programs whose connections carry nothing else.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use super::{AnswerError, CallError, CallEvent, CallId, CallLimits, CallPayload, CallStats, Calls};
use super::{FailedCall, RefusedCall, RequestId, Violation};
use crate::{
    ConnectError, ConnectRequest, ConnectionId, Context, Decision, DeviceEvent, DisconnectReason, Handler, IoId,
    Message, PeerIdentity, Place, Readiness, TimerId,
};

/// The payload of a request or of an answer in a callback.
pub type ReceivedPayload<'a> = CallPayload<Message<'a>>;

/// The end of a call: its answer, or the reason why it has none.
pub type CallResult<'a> = Result<ReceivedPayload<'a>, CallError>;

/// The callbacks of a program that makes calls, or answers them, on all connections of its reactor.
/// [`WithCalls`] calls them. All callbacks run on the reactor's thread.
///
/// - Each call for which [`CallContext::call`] has returned an id ends with one `on_end`, before
///   the `on_disconnect` of its connection at the latest, unless the program cancels it, or drops
///   the reactor. If an `on_end` panics ([`crate::Config::contain_panics`]), the `on_end` of other
///   ended calls and the `on_disconnect` can follow in a later turn.
/// - Each request is answered or dismissed by the program, in `on_request` or later.
///
/// ```
/// use std::time::Duration;
///
/// use rdma_reactor::call::{CallContext, CallHandler, CallId, CallResult};
/// use rdma_reactor::call::{ReceivedPayload, RequestId, WithCalls};
/// use rdma_reactor::{Config, ConnectionId, ProviderChoice, Reactor};
///
/// /// The client sends a request, and the server answers it in capitals.
/// struct Program;
///
/// type Cx<'a> = CallContext<'a, &'static str>;
///
/// impl CallHandler for Program {
///     type Tag = &'static str;
///
///     fn on_connect(&mut self, cx: &mut Cx<'_>, conn: ConnectionId) {
///         if cx.context().connection(conn).listener().is_none() {
///             let made = cx.call(conn, b"hello", Duration::from_secs(10), "greeting");
///             made.expect("an open connection");
///         }
///     }
///
///     fn on_request(&mut self, cx: &mut Cx<'_>, id: RequestId, payload: ReceivedPayload<'_>) {
///         // Fails if the caller does not wait any more.
///         let _ = cx.answer(id, &payload.to_ascii_uppercase());
///     }
///
///     fn on_end(&mut self, cx: &mut Cx<'_>, _: CallId, tag: Self::Tag, result: CallResult<'_>) {
///         match result {
///             Ok(answer) => assert_eq!((tag, &answer[..]), ("greeting", &b"HELLO"[..])),
///             Err(error) => eprintln!("{tag}: {error}"),
///         }
///         cx.context().stop();
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
/// let mut context = reactor.context();
/// let listener = context.listen("127.0.0.1:0".parse()?)?;
/// let server = context.listeners().local_address(listener).expect("it listens");
/// context.connect(server)?;
/// reactor.run(&mut WithCalls::new(Program))?;
/// # Ok(())
/// # }
/// ```
#[allow(unused_variables)]
pub trait CallHandler<M = ()> {
    /// The type of the tag of a call: a value of the program that is stored with the call, and
    /// returned when the call ends.
    type Tag;

    /// A call has ended: with its answer, or with the reason why it has none.
    fn on_end(&mut self, cx: &mut CallContext<'_, Self::Tag>, call: CallId, tag: Self::Tag, result: CallResult<'_>);

    /// The peer has sent a request. Answer or dismiss it, in this callback or later. Default:
    /// dismisses it, so the caller gets [`CallError::Unanswered`].
    fn on_request(&mut self, cx: &mut CallContext<'_, Self::Tag>, id: RequestId, payload: ReceivedPayload<'_>) {
        cx.dismiss(id);
    }

    /// The peer has cancelled a request. The program must still answer or dismiss the request,
    /// which sends nothing to the peer. Default: does nothing.
    fn on_cancelled(&mut self, cx: &mut CallContext<'_, Self::Tag>, id: RequestId) {}

    /// The peer has sent an invalid frame. Its connection is aborted, and `on_disconnect` follows.
    fn on_violation(&mut self, cx: &mut CallContext<'_, Self::Tag>, conn: ConnectionId, violation: Violation) {}

    /// A connection is established. From now on, both sides may make calls.
    fn on_connect(&mut self, cx: &mut CallContext<'_, Self::Tag>, conn: ConnectionId) {}

    /// A connection has ended. All of its calls have ended before, and all of its requests are
    /// gone.
    fn on_disconnect(&mut self, cx: &mut CallContext<'_, Self::Tag>, conn: ConnectionId, reason: DisconnectReason) {}

    /// A connection attempt has failed, see [`Handler::on_connect_error`].
    fn on_connect_error(&mut self, cx: &mut CallContext<'_, Self::Tag>, conn: ConnectionId, error: ConnectError) {}

    /// A peer requests a connection. Default: accepts it.
    fn on_connect_request(&mut self, cx: &mut CallContext<'_, Self::Tag>, request: ConnectRequest<'_>) -> Decision {
        Decision::Accept
    }

    /// The peer has proven its identity, see [`Handler::on_identity`]. Default: accepts it.
    ///
    /// # Errors
    /// The reason why the program does not accept the peer.
    fn on_identity(
        &mut self,
        cx: &mut CallContext<'_, Self::Tag>,
        conn: ConnectionId,
        peer: &PeerIdentity,
    ) -> Result<(), String> {
        Ok(())
    }

    /// Selects the reactor of a group for a connection, see [`Handler::on_place`]. Default: the one
    /// with the lowest load.
    fn on_place(&mut self, cx: &mut CallContext<'_, Self::Tag>, request: ConnectRequest<'_>) -> Place {
        Place::LeastLoaded
    }

    /// A drain of the reactor has begun, see [`Handler::on_drain`]. Default: finishes every
    /// connection ([`CallContext::finish`]), and closes those that are not established yet.
    fn on_drain(&mut self, cx: &mut CallContext<'_, Self::Tag>, deadline: Duration) {
        cx.finish_all();
        cx.context().close_unestablished();
    }

    /// A timer that the program has set with [`crate::TimerContext::set`] has expired.
    fn on_timer(&mut self, cx: &mut CallContext<'_, Self::Tag>, timer: TimerId, token: u64) {}

    /// The readiness of a descriptor that the program has registered has changed, see
    /// [`Handler::on_io_ready`].
    fn on_io_ready(&mut self, cx: &mut CallContext<'_, Self::Tag>, io: IoId, readiness: Readiness) {}

    /// Another thread has sent a message to the reactor with [`crate::ReactorHandle::post`].
    fn on_wake(&mut self, cx: &mut CallContext<'_, Self::Tag>, message: M) {}

    /// The state of a device that the reactor uses, or of a port of it, has changed.
    fn on_device_event(&mut self, cx: &mut CallContext<'_, Self::Tag>, event: &DeviceEvent) {}
}

/// The calls of a reactor, as seen by a program: the argument of each callback, or the result of
/// [`WithCalls::context`]. No method blocks.
pub struct CallContext<'a, T> {
    calls: &'a mut Calls<T>,
    cx: Context<'a>,
}

impl<T> fmt::Debug for CallContext<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallContext").finish_non_exhaustive()
    }
}

impl<T> CallContext<'_, T> {
    /// Makes a call, which ends after `within` at the latest, with one [`CallHandler::on_end`]. See
    /// [`Calls::call`].
    ///
    /// Example: [`CallHandler`].
    ///
    /// # Errors
    /// [`RefusedCall`] if the call was not made. It contains the reason and the tag.
    #[inline]
    pub fn call(
        &mut self,
        conn: ConnectionId,
        payload: &[u8],
        within: Duration,
        tag: T,
    ) -> Result<CallId, RefusedCall<T>> {
        self.calls.call(&mut self.cx, conn, payload, within, tag)
    }

    /// Cancels a call. Returns its tag; `None` if the call has ended already. See
    /// [`Calls::cancel`].
    pub fn cancel(&mut self, call: CallId) -> Option<T> {
        self.calls.cancel(&mut self.cx, call)
    }

    /// Answers a request. See [`Calls::answer`].
    ///
    /// Example: [`CallHandler`].
    ///
    /// # Errors
    /// [`AnswerError`] if the answer is not sent. The request ends nevertheless.
    #[inline]
    pub fn answer(&mut self, request: RequestId, payload: &[u8]) -> Result<(), AnswerError> {
        self.calls.answer(&mut self.cx, request, payload)
    }

    /// Ends a request without an answer. The caller gets [`CallError::Unanswered`].
    pub fn dismiss(&mut self, request: RequestId) {
        self.calls.dismiss(&mut self.cx, request);
    }

    /// Returns the time that is left until the deadline of a request; `None` if the caller does not
    /// wait any more. See [`Calls::time_left`].
    #[must_use]
    pub fn time_left(&self, request: RequestId) -> Option<Duration> {
        self.calls.time_left(&self.cx, request)
    }

    /// Closes a connection once all of its calls and requests have ended. See [`Calls::finish`].
    pub fn finish(&mut self, conn: ConnectionId) {
        self.calls.finish(&mut self.cx, conn);
    }

    /// Finishes every established connection.
    pub fn finish_all(&mut self) {
        for conn in self.cx.connection_ids().collect::<Vec<_>>() {
            self.finish(conn);
        }
    }

    /// Returns the limits, which the program may change. See [`Calls::limits`].
    pub fn limits(&mut self) -> &mut CallLimits {
        self.calls.limits()
    }

    /// Returns the counters of calls and requests.
    #[must_use]
    pub const fn stats(&self) -> CallStats {
        self.calls.stats()
    }

    /// Returns the context of the reactor, to connect, listen, set timers and stop. Do not send
    /// messages with it: the peer would take them for frames of calls.
    pub fn context(&mut self) -> Context<'_> {
        self.cx.reborrow()
    }
}

/// A [`Handler`] that makes and answers calls for a [`CallHandler`]. Pass it to
/// [`crate::Reactor::run`] or [`crate::Reactor::turn`]. If only some connections carry calls, the
/// program uses its own handler with a [`Calls`] in it.
///
/// Example: [`CallHandler`].
pub struct WithCalls<H: CallHandler<M>, M = ()> {
    /// The handler of the program.
    pub handler: H,
    calls: Calls<H::Tag>,
    /// The connections that have ended, and whose `on_disconnect` was not called yet. The program
    /// first receives the `on_end` of each of their calls.
    ended: VecDeque<(ConnectionId, DisconnectReason)>, // local: empty unless a callback panics
}

impl<M, H: CallHandler<M> + fmt::Debug> fmt::Debug for WithCalls<H, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WithCalls").field("handler", &self.handler).finish_non_exhaustive()
    }
}

impl<M, H: CallHandler<M>> WithCalls<H, M> {
    /// Creates a `WithCalls` with the default limits. It will call the callbacks of `handler`.
    pub fn new(handler: H) -> Self {
        Self { handler, calls: Calls::new(), ended: VecDeque::new() }
    }

    /// Returns a context for calls outside of callbacks. `cx` must be the
    /// [`crate::Reactor::context`] of the reactor that has these calls.
    pub fn context<'a>(&'a mut self, cx: Context<'a>) -> CallContext<'a, H::Tag> {
        CallContext { calls: &mut self.calls, cx }
    }

    fn split<'a>(&'a mut self, cx: &'a mut Context<'_>) -> (&'a mut H, CallContext<'a, H::Tag>) {
        (&mut self.handler, CallContext { calls: &mut self.calls, cx: cx.reborrow() })
    }

    /// Reports the calls that have ended without an answer, and then the connections that have
    /// ended.
    fn report_ends(&mut self, cx: &mut Context<'_>) {
        while let Some(FailedCall { call, tag, error }) = self.calls.next_failed() {
            let (handler, cx) = self.split(cx);
            let mut one = OneOfSeveral(cx);
            handler.on_end(&mut one.0, call, tag, Err(error));
        }
        while let Some((conn, reason)) = self.ended.pop_front() {
            let (handler, cx) = self.split(cx);
            let mut one = OneOfSeveral(cx);
            handler.on_disconnect(&mut one.0, conn, reason);
        }
    }
}

/// The context for the callback of one of several ended calls and connections. If this callback
/// panics, the others are reported in the next turn.
struct OneOfSeveral<'a, T>(CallContext<'a, T>);

impl<T> Drop for OneOfSeveral<'_, T> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.calls.deadlines.expire(&mut self.0.cx);
        }
    }
}

impl<M, H: CallHandler<M>> Handler<M> for WithCalls<H, M> {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let (handler, mut cx) = self.split(cx);
        handler.on_connect(&mut cx, conn);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let Some(event) = self.calls.on_recv(cx, conn, message) else { return };
        let (handler, mut cx) = self.split(cx);
        match event {
            CallEvent::Request { id, payload } => handler.on_request(&mut cx, id, payload),
            CallEvent::Cancelled(id) => handler.on_cancelled(&mut cx, id),
            CallEvent::Answer { call, tag, payload } => handler.on_end(&mut cx, call, tag, Ok(payload)),
            CallEvent::Failed(FailedCall { call, tag, error }) => handler.on_end(&mut cx, call, tag, Err(error)),
            CallEvent::Violation(violation) => handler.on_violation(&mut cx, conn, violation),
        }
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.calls.on_writable(cx, conn);
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, token: u64) {
        if self.calls.on_timer(cx, timer) {
            return self.report_ends(cx);
        }
        let (handler, mut cx) = self.split(cx);
        handler.on_timer(&mut cx, timer, token);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        self.calls.on_disconnect(conn, &reason);
        if crate::planted("lost-calls-are-not-reported") {
            while self.calls.next_failed().is_some() {}
        }
        self.ended.push_back((conn, reason));
        self.report_ends(cx);
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        let (handler, mut cx) = self.split(cx);
        handler.on_connect_error(&mut cx, conn, error);
    }

    fn on_connect_request(&mut self, cx: &mut Context<'_>, request: ConnectRequest<'_>) -> Decision {
        let (handler, mut cx) = self.split(cx);
        handler.on_connect_request(&mut cx, request)
    }

    fn on_identity(&mut self, cx: &mut Context<'_>, conn: ConnectionId, peer: &PeerIdentity) -> Result<(), String> {
        let (handler, mut cx) = self.split(cx);
        handler.on_identity(&mut cx, conn, peer)
    }

    fn on_place(&mut self, cx: &mut Context<'_>, request: ConnectRequest<'_>) -> Place {
        let (handler, mut cx) = self.split(cx);
        handler.on_place(&mut cx, request)
    }

    fn on_drain(&mut self, cx: &mut Context<'_>, deadline: Duration) {
        let (handler, mut cx) = self.split(cx);
        handler.on_drain(&mut cx, deadline);
    }

    fn on_io_ready(&mut self, cx: &mut Context<'_>, io: IoId, readiness: Readiness) {
        let (handler, mut cx) = self.split(cx);
        handler.on_io_ready(&mut cx, io, readiness);
    }

    fn on_wake(&mut self, cx: &mut Context<'_>, message: M) {
        let (handler, mut cx) = self.split(cx);
        handler.on_wake(&mut cx, message);
    }

    fn on_device_event(&mut self, cx: &mut Context<'_>, event: &DeviceEvent) {
        let (handler, mut cx) = self.split(cx);
        handler.on_device_event(&mut cx, event);
    }
}
