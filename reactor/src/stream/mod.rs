//! Byte streams over connections, for programs that are written for sockets. They have readiness, half close, and the traits
//! of [`std::io`].
//!
//! [`Streams`] is a [`Handler`] that turns the connections of a reactor into streams, and calls a [`StreamHandler`] of the
//! program. In its callbacks, and between turns, [`StreamContext::stream`] returns a [`Stream`] to read and write:
//!
//! ```
//! use std::io::{BufRead, Write};
//!
//! use rdma_reactor::ConnectionId;
//! use rdma_reactor::stream::{StreamContext, StreamHandler};
//!
//! struct Upper;
//!
//! impl StreamHandler for Upper {
//!     fn on_readable(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
//!         loop {
//!             let bytes = match cx.stream(id).fill_buf() {
//!                 Ok([]) => return cx.stream(id).close(),
//!                 Ok(bytes) => bytes.to_ascii_uppercase(),
//!                 Err(_) => return,
//!             };
//!             // Bytes that `write` does not accept stay unread: on_writable follows. Unread bytes stop the peer.
//!             let Ok(taken) = cx.stream(id).write(&bytes) else { return };
//!             cx.stream(id).consume(taken);
//!         }
//!     }
//!
//!     fn on_writable(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {
//!         self.on_readable(cx, id);
//!     }
//! }
//! ```
//!
//! # Readiness is edge-triggered
//!
//! - `on_readable` is called when bytes arrive at a stream that has no unread bytes, or when the peer finishes writing and the stream has
//!   no unread bytes. The call is not repeated before the program has read all bytes. If a program leaves bytes unread, no callback reports
//!   these bytes again, and the program must read them later.
//! - `on_writable` is called after a write has accepted fewer bytes than it was given, as soon as the connection has room for more bytes. A
//!   new stream is writable.
//! - `on_hangup` is called once, when the peer has finished writing. Bytes of the peer may still be unread. Reads return
//!   `Ok(0)` after the last byte.
//! - `on_close` or `on_error` is the last callback of each stream that was open. Exactly one of the two is called. In that callback, the
//!   program can still read the bytes that have arrived, or remove them with [`Stream::take_unread`]. When the callback returns, the stream
//!   is dropped, and its id cannot be used any more.
//!
//! # Memory
//!
//! Received bytes stay in the registered buffers in which they arrived, until the program reads them. When the bytes of a buffer are read,
//! the peer gets a new credit. So if the program does not read, the bytes occupy all receive buffers of the connection, and the peer must
//! stop. When the stream is dropped, its unread bytes are dropped, unless the program has removed them before. Writes fill send buffers,
//! which the reactor posts at the end of the turn. Several small writes share a buffer.

mod handle;
mod table;
mod unread;

use std::fmt;
use std::time::Duration;

pub use self::handle::Stream;
use self::table::StreamTable;
pub use self::unread::Unread;
use crate::{
    ConnectError, ConnectRequest, ConnectionId, Context, Decision, DeviceEvent, DisconnectReason, Handler, IoId,
    Message, Place, Readiness, TimerId,
};

/// The callbacks of streams. The [module](self) describes when they are called. All callbacks run on the reactor's thread. In every
/// callback, the program may use every stream, and may call every method of [`Stream`].
#[allow(unused_variables)]
pub trait StreamHandler<M = ()> {
    /// A peer requests a connection. Default: accepts it.
    fn on_connect_request(&mut self, cx: &mut StreamContext<'_>, request: ConnectRequest<'_>) -> Decision {
        Decision::Accept
    }

    /// A connection to a group of reactors was requested. The callback selects the reactor that gets the connection, as with
    /// [`Handler::on_place`]. Default: the reactor with the lowest load.
    fn on_place(&mut self, cx: &mut StreamContext<'_>, request: ConnectRequest<'_>) -> Place {
        Place::LeastLoaded
    }

    /// A drain of the reactor has begun, see [`Handler::on_drain`]. Default: closes every stream, and every connection that is not
    /// established yet ([`Context::close_unestablished`]).
    fn on_drain(&mut self, cx: &mut StreamContext<'_>, deadline: Duration) {
        cx.close_all();
        cx.context().close_unestablished();
    }

    /// A stream has opened, because a connection was established. Either side may have requested
    /// the connection. The stream is writable.
    fn on_open(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {}

    /// The stream had no unread bytes, and now bytes have arrived or the peer has finished writing. Read until a read fails with
    /// `WouldBlock` or returns `Ok(0)`.
    fn on_readable(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId);

    /// The stream accepts bytes again, after a write has accepted fewer bytes than it was given.
    fn on_writable(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {}

    /// The peer has finished writing. Bytes that it wrote before may still be unread.
    fn on_hangup(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {}

    /// The stream has ended without an error, for one of these reasons: both sides have finished writing, the peer has finished writing and
    /// closed the connection, or the program has closed the stream.
    fn on_close(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {}

    /// The stream has ended with an error, for instance because the connection was lost. Reads return the bytes that have arrived, and then
    /// fail with `reason`. If the peer has finished writing, reads return `Ok(0)` after the last byte instead of failing.
    fn on_error(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId, reason: DisconnectReason) {}

    /// A connection attempt of the program ([`Context::connect`]) has failed.
    fn on_connect_error(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId, error: ConnectError) {}

    /// The state of a device that the reactor uses, or the state of a port of such a device, has changed.
    fn on_device_event(&mut self, cx: &mut StreamContext<'_>, event: &DeviceEvent) {}

    /// A timer that the program has set with [`crate::TimerContext::set`] has expired.
    fn on_timer(&mut self, cx: &mut StreamContext<'_>, timer: TimerId, token: u64) {}

    /// The readiness of a descriptor that the program has registered with
    /// [`crate::IoContext::register`] has changed.
    fn on_io_ready(&mut self, cx: &mut StreamContext<'_>, io: IoId, readiness: Readiness) {}

    /// Another thread has sent a message to the reactor with [`crate::ReactorHandle::post`].
    fn on_wake(&mut self, cx: &mut StreamContext<'_>, message: M) {}
}

/// A handler that turns all connections of a reactor into streams. Pass it to [`crate::Reactor::run`] or [`crate::Reactor::turn`]. If only
/// some connections carry streams, the program uses its own handler. That handler contains a `Streams`, and forwards to it the callbacks of
/// these connections and of all timers.
///
/// The connections must have [`crate::Framing::Credits`], because only credits make a writer wait for a slow reader.
pub struct Streams<H> {
    /// The handler of the program.
    pub handler: H,
    table: StreamTable,
}

impl<H: fmt::Debug> fmt::Debug for Streams<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streams").field("handler", &self.handler).finish_non_exhaustive()
    }
}

impl<H> Streams<H> {
    /// Creates a `Streams` without streams. It will call the callbacks of `handler`.
    pub fn new(handler: H) -> Self {
        Self { handler, table: StreamTable::default() }
    }

    /// Sets how long a closed stream may wait for room on the connection to send the empty message that ends the stream. Default: 2 s.
    #[must_use]
    pub fn linger(mut self, time: Duration) -> Self {
        self.table.linger = time;
        self
    }

    /// Returns a context for the use of the streams outside of callbacks. `cx` must be the [`crate::Reactor::context`] of the reactor that
    /// has these streams. Bytes that the program writes to streams of this context are sent in the next turn.
    pub fn context<'a>(&'a mut self, cx: Context<'a>) -> StreamContext<'a> {
        StreamContext { table: &mut self.table, cx }
    }

    fn split<'a>(&'a mut self, cx: &'a mut Context<'_>) -> (&'a mut H, StreamContext<'a>) {
        (&mut self.handler, StreamContext { table: &mut self.table, cx: cx.reborrow() })
    }
}

/// Access to the streams and to their reactor: the argument of a callback, or the result of [`Streams::context`]. No method
/// blocks.
pub struct StreamContext<'a> {
    table: &'a mut StreamTable,
    cx: Context<'a>,
}

impl StreamContext<'_> {
    /// Returns a stream, to read and write. If the stream has ended, or the program has closed it, all reads and writes of the returned
    /// [`Stream`] fail.
    pub fn stream(&mut self, id: ConnectionId) -> Stream<'_> {
        Stream { table: self.table, cx: self.cx.reborrow(), id }
    }

    /// Closes all streams, as [`Stream::close`] does. Connections that are not established yet have no stream, so they are not closed.
    pub fn close_all(&mut self) {
        for id in self.table.ids() {
            self.stream(id).close();
        }
    }

    /// Returns the context of the reactor, to connect, listen, set timers and stop. Do not send messages with this context on a connection
    /// that carries a stream: the peer would read these messages as bytes of the stream.
    pub fn context(&mut self) -> Context<'_> {
        self.cx.reborrow()
    }
}

impl fmt::Debug for StreamContext<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamContext").finish_non_exhaustive()
    }
}

/// The context of the last callback of a stream. Drops the stream at the end of the callback, also if the callback panics.
struct LastCallback<'a>(StreamContext<'a>);

impl Drop for LastCallback<'_> {
    fn drop(&mut self) {
        self.0.table.forget_last(&mut self.0.cx);
    }
}

impl<M, H: StreamHandler<M>> Handler<M> for Streams<H> {
    fn on_connect_request(&mut self, cx: &mut Context<'_>, request: ConnectRequest<'_>) -> Decision {
        let (handler, mut cx) = self.split(cx);
        handler.on_connect_request(&mut cx, request)
    }

    fn on_place(&mut self, cx: &mut Context<'_>, request: ConnectRequest<'_>) -> Place {
        let (handler, mut cx) = self.split(cx);
        handler.on_place(&mut cx, request)
    }

    fn on_drain(&mut self, cx: &mut Context<'_>, deadline: Duration) {
        let (handler, mut cx) = self.split(cx);
        handler.on_drain(&mut cx, deadline);
    }

    fn on_connect(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        self.table.open(id);
        let (handler, mut cx) = self.split(cx);
        handler.on_open(&mut cx, id);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, id: ConnectionId, message: Message<'_>) {
        let Some(record) = self.table.live(id) else { return };
        if record.peer_finished {
            return self.table.violated(cx, id);
        }
        let finished = message.is_empty();
        // If the program has closed the stream or shut it down for reading, the received bytes are dropped. Their buffer is posted again
        // when this callback returns.
        let keeps_bytes = record.keeps_bytes();
        let edge = keeps_bytes && record.unread.is_empty();
        if finished {
            record.peer_finished = true;
        } else if keeps_bytes {
            record.unread.push(message.detach());
        }
        let (handler, mut cx) = self.split(cx);
        if edge {
            handler.on_readable(&mut cx, id);
        }
        if finished {
            // Do not call `on_hangup` if the program has closed the stream in `on_readable`.
            if cx.table.get(id).is_some() {
                handler.on_hangup(&mut cx, id);
            }
            cx.table.close_if_finished(&mut cx.cx, id);
        }
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        if !self.table.finish(cx, id) {
            let (handler, mut cx) = self.split(cx);
            handler.on_writable(&mut cx, id);
        }
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, id: ConnectionId, reason: DisconnectReason) {
        let Some((reason, orderly)) = self.table.ended(cx, id, reason) else { return };
        let (handler, cx) = self.split(cx);
        let mut last = LastCallback(cx);
        match orderly {
            true => handler.on_close(&mut last.0, id),
            false => handler.on_error(&mut last.0, id, reason),
        }
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, id: ConnectionId, error: ConnectError) {
        let (handler, mut cx) = self.split(cx);
        handler.on_connect_error(&mut cx, id, error);
    }

    fn on_device_event(&mut self, cx: &mut Context<'_>, event: &DeviceEvent) {
        let (handler, mut cx) = self.split(cx);
        handler.on_device_event(&mut cx, event);
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, token: u64) {
        if !self.table.on_linger_timer(cx, timer) {
            let (handler, mut cx) = self.split(cx);
            handler.on_timer(&mut cx, timer, token);
        }
    }

    fn on_io_ready(&mut self, cx: &mut Context<'_>, io: IoId, readiness: Readiness) {
        let (handler, mut cx) = self.split(cx);
        handler.on_io_ready(&mut cx, io, readiness);
    }

    fn on_wake(&mut self, cx: &mut Context<'_>, message: M) {
        let (handler, mut cx) = self.split(cx);
        handler.on_wake(&mut cx, message);
    }
}
