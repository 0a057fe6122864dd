//! The operations on listeners.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use crate::driver::Driver;
use crate::error::Error;
use crate::id::ListenerId;

/// The operations on the listeners of a reactor, from
/// [`Context::listeners`](crate::Context::listeners).
#[derive(Debug)]
pub struct ListenerContext<'a> {
    pub(super) driver: &'a mut Driver,
}

impl ListenerContext<'_> {
    /// Returns the address that a listener is bound to; `None` if the listener is closed.
    #[must_use]
    pub fn local_address(&self, listener: ListenerId) -> Option<SocketAddr> {
        self.driver.local_address(listener)
    }

    /// Accepts a connection over `stream`: a stream socket, for example of TCP, that the program
    /// has already accepted. Both sides exchange the parameters of their queue pairs over the
    /// stream, as with a listener that has
    /// [`ListenOptions::exchange`](crate::ListenOptions::exchange). The connection owns the
    /// descriptor from now on, and makes it non-blocking. When the connect request of the peer
    /// arrives, the reactor calls `on_connect_request`. If the request does not arrive within 10 s,
    /// the reactor closes the stream.
    ///
    /// ```
    /// use std::os::unix::net::UnixStream;
    ///
    /// use rdma_reactor::{Context, Error, ListenerId};
    ///
    /// /// Some other program listens on the Unix socket, and hands out what comes in.
    /// fn take(cx: &mut Context<'_>, listener: ListenerId, stream: UnixStream) -> Result<(), Error> {
    ///     cx.listeners().accept_over(listener, stream.into())
    /// }
    /// ```
    ///
    /// # Errors
    /// The descriptor is no stream socket, the listener is closed, or the listener does not have
    /// [`ListenOptions::exchange`](crate::ListenOptions::exchange).
    pub fn accept_over(&mut self, listener: ListenerId, stream: OwnedFd) -> Result<(), Error> {
        self.driver.look_at_clock();
        self.driver.take_stream(listener, stream)
    }

    /// Stops listening. Connections that the listener has accepted stay open.
    pub fn close(&mut self, listener: ListenerId) {
        self.driver.close_listener(listener);
    }
}
