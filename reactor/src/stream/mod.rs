//! Ordered bytes over one connection, for programs that know sockets: readiness, half close, and [`std::io`].
//!
//! [`Streams`] is a [`Handler`] that turns the connections of a reactor into streams and calls a [`StreamHandler`]. In
//! its callbacks, and between turns, [`StreamContext::stream`] gives a [`Stream`] to read and write:
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
//!             // Bytes that are not taken stay unread, and in the end the peer waits. on_writable follows.
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
//! - `on_readable` comes when there is something to read where there was nothing: bytes, or the peer's end. It comes
//!   again only after everything was read. A program that leaves bytes unread must come back for them by itself.
//! - `on_writable` comes once after a write took less than it was given, when there is room again. A new stream is
//!   writable.
//! - `on_hangup` comes once, when the peer has finished writing. Bytes of the peer may still be unread; reads return
//!   `Ok(0)` after the last byte.
//! - Exactly one of `on_close` and `on_error` comes last, for each stream that was open. Bytes that came before can
//!   still be read in that callback, or taken with [`Stream::take_unread`]. When the callback returns, nothing of the
//!   stream is left, and the id is stale.
//!
//! # Memory
//!
//! Received bytes stay in the registered buffers that they arrived in until they are read; then the peer gets its
//! credits back. So unread bytes take at most the receives of the connection, and stop the peer. They are dropped with
//! the stream unless the program takes them. Writes fill the buffers that go out at the end of the turn, and several
//! small writes share a buffer.

mod handle;
mod table;
mod unread;

use std::fmt;
use std::time::Duration;

pub use self::handle::Stream;
use self::table::Table;
pub use self::unread::Unread;
use crate::{
    ConnectError, ConnectRequest, ConnectionId, Context, Decision, DeviceEvent, DisconnectReason, Handler, IoId,
    Message, Place, Readiness, TimerId,
};

/// Callbacks of streams; the [module](self) tells when they come. All run on the reactor's thread. Any call is allowed
/// in any callback, for any stream.
#[allow(unused_variables)]
pub trait StreamHandler<M = ()> {
    /// A peer wants a connection. Default: accept.
    fn on_connect_request(&mut self, cx: &mut StreamContext<'_>, request: ConnectRequest<'_>) -> Decision {
        Decision::Accept
    }

    /// The program says which reactor takes a connection, as with [`Handler::on_place`].
    fn on_place(&mut self, cx: &mut StreamContext<'_>, request: ConnectRequest<'_>) -> Place {
        Place::LeastLoaded
    }

    /// The reactor is being drained, as with [`Handler::on_drain`]. Default: closes every stream.
    fn on_drain(&mut self, cx: &mut StreamContext<'_>, deadline: Duration) {
        cx.close_all();
    }

    /// A stream is open, opened by this side or by the peer. It is writable.
    fn on_open(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {}

    /// There is something to read where there was nothing. Read until nothing is left.
    fn on_readable(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId);

    /// There is room again after a write took less than it was given.
    fn on_writable(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {}

    /// The peer has finished writing.
    fn on_hangup(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {}

    /// The stream is over: both sides have finished, the peer has closed it after it had finished, or it was closed here.
    fn on_close(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId) {}

    /// The stream has ended before its time. Reads fail with this reason after the bytes that came before.
    fn on_error(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId, reason: DisconnectReason) {}

    /// A connection of [`Context::connect`] did not come up.
    fn on_connect_error(&mut self, cx: &mut StreamContext<'_>, id: ConnectionId, error: ConnectError) {}

    /// A device in use, or one of its ports, has changed.
    fn on_device_event(&mut self, cx: &mut StreamContext<'_>, event: &DeviceEvent) {}

    /// A timer of [`Context::set_timer`] is due.
    fn on_timer(&mut self, cx: &mut StreamContext<'_>, timer: TimerId, token: u64) {}

    /// Something is new on a descriptor of [`Context::register_io`].
    fn on_io_ready(&mut self, cx: &mut StreamContext<'_>, io: IoId, readiness: Readiness) {}

    /// Another thread has sent a message, see [`crate::ReactorHandle::post`].
    fn on_wake(&mut self, cx: &mut StreamContext<'_>, message: M) {}
}

/// A handler that makes streams of all connections of a reactor, for [`crate::Reactor::run`] or
/// [`crate::Reactor::turn`]. A handler that wants streams on some connections only has a `Streams` inside, and passes
/// the callbacks of those connections on to it, and all timers.
///
/// The connections must have [`crate::Framing::Credits`]; without credits nothing would stop a writer.
pub struct Streams<H> {
    /// The program.
    pub handler: H,
    table: Table,
}

impl<H: fmt::Debug> fmt::Debug for Streams<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streams").field("handler", &self.handler).finish_non_exhaustive()
    }
}

impl<H> Streams<H> {
    /// Makes a handler with no streams yet.
    pub fn new(handler: H) -> Self {
        Self { handler, table: Table::default() }
    }

    /// Sets the time that a closed stream waits for room to tell the peer that it has finished. Default: 2 s.
    #[must_use]
    pub fn linger(mut self, time: Duration) -> Self {
        self.table.linger = time;
        self
    }

    /// Gives access to the streams outside of callbacks. `cx` must be the [`crate::Reactor::context`] of the reactor
    /// that has these streams. Bytes that are written go out in the next turn.
    pub fn context<'a>(&'a mut self, cx: Context<'a>) -> StreamContext<'a> {
        StreamContext { table: &mut self.table, cx }
    }

    fn split<'a>(&'a mut self, cx: &'a mut Context<'_>) -> (&'a mut H, StreamContext<'a>) {
        (&mut self.handler, StreamContext { table: &mut self.table, cx: cx.reborrow() })
    }
}

/// The streams and their reactor, inside a callback or from [`Streams::context`]. Nothing here blocks.
pub struct StreamContext<'a> {
    table: &'a mut Table,
    cx: Context<'a>,
}

impl StreamContext<'_> {
    /// Returns a stream, to read and write. With an id that is stale or closed, all calls of the stream fail.
    pub fn stream(&mut self, id: ConnectionId) -> Stream<'_> {
        Stream { table: self.table, cx: self.cx.reborrow(), id }
    }

    /// Closes every stream, as [`Stream::close`] does.
    pub fn close_all(&mut self) {
        for id in self.table.ids() {
            self.stream(id).close();
        }
    }

    /// Gives access to the reactor, to connect, listen, set timers and stop. A message that is sent through this
    /// context becomes bytes of the stream.
    pub fn context(&mut self) -> Context<'_> {
        self.cx.reborrow()
    }
}

impl fmt::Debug for StreamContext<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamContext").finish_non_exhaustive()
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
        // If the stream is closed or shut down for reading, the buffer is posted again when this callback returns.
        let listens = record.listens();
        let edge = listens && record.unread.is_empty();
        if finished {
            record.peer_finished = true;
        } else if listens {
            record.unread.push(message.detach());
        }
        let (handler, mut cx) = self.split(cx);
        if edge {
            handler.on_readable(&mut cx, id);
        }
        if finished {
            // That callback may have closed the stream.
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
        let (handler, mut cx) = self.split(cx);
        match orderly {
            true => handler.on_close(&mut cx, id),
            false => handler.on_error(&mut cx, id, reason),
        }
        cx.table.forget_last(&mut cx.cx);
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
        if !self.table.lingered(cx, timer) {
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
