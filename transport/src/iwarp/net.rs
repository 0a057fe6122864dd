//! The edge of the embedded provider: byte streams and their readiness. [`Net`] is the seam; [`crate::iwarp::tcp`]
//! is the real one, the simulation brings its own.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{OwnedFd, RawFd};

use crate::mem::{RecvSlice, SendSlice};
use crate::slab::Key;

/// Handle of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SocketId(pub Key);

/// Which of the provider's two channels a socket reports to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// Listeners and handshakes.
    Cm,
    /// Established connections.
    Completion,
}

/// An edge on a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// Bytes, a connection to accept, an end or an error may be there.
    pub readable: bool,
    /// There may be room, or a connect has ended.
    pub writable: bool,
    /// No more bytes follow those that are there: read until 0 or an error even after a short read.
    pub closed: bool,
}

/// Non-blocking byte streams with edge-triggered readiness (`epoll`(7), EPOLLET): an edge comes when something
/// new is there, coalesced with others; spurious ones may come. Whoever gets an edge reads until `WouldBlock` or a
/// short read, or remembers that it has not.
pub trait Net: Send + fmt::Debug {
    /// Descriptor that becomes readable when [`Net::poll`] has something for this channel.
    fn channel(&self, channel: Channel) -> RawFd;

    /// Makes a channel's descriptor readable once, for something that did not come from a socket.
    fn wake(&mut self, channel: Channel);

    /// Appends the edges of a channel; never blocks. Returns whether it stopped with edges left.
    fn poll(&mut self, channel: Channel, edges: &mut Vec<(SocketId, Ready)>) -> io::Result<bool>;

    /// Opens a listener, on the CM channel.
    fn listen(&mut self, address: SocketAddr, backlog: u32) -> io::Result<SocketId>;

    /// Takes one connection, now on the CM channel, with the peer's address. `WouldBlock` when there is none.
    fn accept(&mut self, listener: SocketId) -> io::Result<(SocketId, SocketAddr)>;

    /// Starts connecting, on the CM channel; a writable edge says that it ended, [`Net::connected`] how.
    fn connect(&mut self, peer: SocketAddr) -> io::Result<SocketId>;

    /// How a connect ended: `WouldBlock` when it has not.
    fn connected(&mut self, socket: SocketId) -> io::Result<()>;

    /// Moves a socket to the completion channel; what is ready on it now counts as a new edge there.
    fn promote(&mut self, socket: SocketId) -> io::Result<()>;

    /// Lets go of a socket, for another [`Net::adopt`]. On failure it stays. Not every network has descriptors.
    fn release(&mut self, socket: SocketId) -> io::Result<OwnedFd> {
        let _ = socket;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Takes a released socket in, on the CM channel; what is ready on it counts as a new edge.
    fn adopt(&mut self, socket: OwnedFd) -> io::Result<SocketId> {
        let _ = socket;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Address the socket is bound to.
    fn local_address(&self, socket: SocketId) -> io::Result<SocketAddr>;

    /// Effective maximum segment size, bytes (`TCP_MAXSEG`, `tcp`(7)).
    fn max_segment(&self, socket: SocketId) -> io::Result<usize>;

    /// Whether the peer's TCP has acknowledged all that was sent (`TCP_INFO`), as far as can be told.
    fn all_acknowledged(&self, socket: SocketId) -> bool;

    /// Receives into `bufs` in order, at most [`crate::mem::MAX_SLICES`] of them; 0 is the end of the stream.
    fn recv(&mut self, socket: SocketId, bufs: &mut [RecvSlice<'_>]) -> io::Result<usize>;

    /// Sends from `bufs` in order, at most [`crate::mem::MAX_SLICES`] of them; may take less.
    fn send(&mut self, socket: SocketId, bufs: &[SendSlice<'_>]) -> io::Result<usize>;

    /// Says that nothing more will be sent (FIN).
    fn shutdown(&mut self, socket: SocketId);

    /// Closes a socket; `reset` discards what is in flight (RST).
    fn close(&mut self, socket: SocketId, reset: bool);
}
