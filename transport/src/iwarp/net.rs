//! The interface between the embedded provider and its sockets. [`crate::iwarp::tcp`] implements it on the system's sockets; the simulation
//! has its own implementation.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use crate::mem::{Interface, Memory, Packets, RecvSlice, SendSlice};
use crate::shm::Segment;
use crate::slab::Key;

/// The handle of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SocketId(pub Key);

/// The channel of the provider that a socket reports to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetChannel {
    /// Listeners and handshakes.
    Cm,
    /// Established connections.
    Completion,
}

/// An edge on a socket: the operations that may have become possible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// There may be bytes, a connection to accept, the end of the stream or an error.
    pub readable: bool,
    /// There may be room for sending, or connecting has ended.
    pub writable: bool,
    /// No bytes follow those that are readable. Read until 0 or an error then, even after a short read.
    pub closed: bool,
}

/// Non-blocking sockets with edge-triggered readiness (`epoll`(7), EPOLLET). A new condition raises an edge; several may be merged into
/// one, and spurious ones may occur. After an edge the caller reads until `WouldBlock` or a short read, or remembers that it has not.
///
/// Connections within the host leave their byte streams for memory that both processes map. An implementation without them returns false
/// from [`Net::is_local`] for every socket, and does not need the methods that the provider calls only for such connections.
pub trait Net: Send + fmt::Debug {
    /// The memory of a connection within the host. [`MappedSegment`](crate::shm::MappedSegment) is the system's implementation.
    type Segment: Segment;

    /// Returns the descriptor that becomes readable when [`Net::poll`] has edges of this channel.
    fn channel(&self, channel: NetChannel) -> RawFd;

    /// Makes a channel's descriptor readable once, for a cause other than a socket.
    fn wake(&mut self, channel: NetChannel);

    /// Appends the edges of a channel. Never blocks. Returns true if it stopped before the last edge.
    fn poll(&mut self, channel: NetChannel, edges: &mut Vec<(SocketId, Ready)>) -> io::Result<bool>;

    /// Opens a listener, on the CM channel.
    fn listen(&mut self, address: SocketAddr, backlog: u32) -> io::Result<SocketId>;

    /// Accepts one connection and puts it on the CM channel. Returns it with the peer's address, or `WouldBlock` if there is none.
    fn accept(&mut self, listener: SocketId) -> io::Result<(SocketId, SocketAddr)>;

    /// Starts to connect, on the CM channel. A writable edge reports that the attempt has ended, and [`Net::connected`] returns its result.
    fn connect(&mut self, peer: SocketAddr) -> io::Result<SocketId>;

    /// Returns the result of connecting, or `WouldBlock` if it has not ended.
    fn connected(&mut self, socket: SocketId) -> io::Result<()>;

    /// Moves a socket to the completion channel. If the socket is ready now, it raises an edge there.
    fn promote(&mut self, socket: SocketId) -> io::Result<()>;

    /// Releases a socket, for [`Net::adopt`] of another instance. On failure the socket stays. Implementations without descriptors do not
    /// support it.
    fn release(&mut self, socket: SocketId) -> io::Result<OwnedFd> {
        let _ = socket;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Adopts a released socket, on the CM channel. If the socket is ready, it raises an edge.
    fn adopt(&mut self, socket: OwnedFd) -> io::Result<SocketId> {
        let _ = socket;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Returns the address that the socket is bound to.
    fn local_address(&self, socket: SocketId) -> io::Result<SocketAddr>;

    /// Returns the effective maximum segment size, bytes (`TCP_MAXSEG`, `tcp`(7)).
    fn max_segment(&self, socket: SocketId) -> io::Result<usize>;

    /// Returns true if the peer's TCP has acknowledged all sent bytes (`TCP_INFO`), or if that is unknown.
    fn all_acknowledged(&self, socket: SocketId) -> bool;

    /// Receives into `bufs` in order, at most [`crate::mem::MAX_SLICES`] of them. Returns the number of bytes; 0 is the end of the stream.
    fn recv(&mut self, socket: SocketId, bufs: &mut [RecvSlice<'_>]) -> io::Result<usize>;

    /// Sends from `bufs` in order, at most [`crate::mem::MAX_SLICES`] of them. Returns the number of bytes sent, which may be less than
    /// all.
    fn send(&mut self, socket: SocketId, bufs: &[SendSlice<'_>]) -> io::Result<usize>;

    /// Ends the local stream (FIN): nothing more will be sent.
    fn shutdown(&mut self, socket: SocketId);

    /// Closes a socket. `reset` discards the data in flight (RST).
    fn close(&mut self, socket: SocketId, reset: bool);

    // Within the host.

    /// Returns true if both ends of a stream are on this host, judging by their addresses.
    fn is_local(&self, socket: SocketId) -> bool {
        let _ = socket;
        false
    }

    /// Makes a segment of the memory that a connection shares with its peer.
    fn segment(&mut self, memory: Memory) -> Self::Segment;

    /// Opens a listener for packets under an abstract name (`unix`(7)), on the CM channel.
    fn listen_local(&mut self, name: &[u8]) -> io::Result<SocketId> {
        let _ = name;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Accepts one connection for packets, and puts it on the CM channel. Returns `WouldBlock` if there is none, and `PermissionDenied` if
    /// the peer belongs to another user; that connection is closed.
    fn accept_local(&mut self, listener: SocketId) -> io::Result<SocketId> {
        let _ = listener;
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Connects to a listener for packets immediately, on the CM channel. Returns `PermissionDenied` if it belongs to another user.
    fn connect_local(&mut self, name: &[u8]) -> io::Result<SocketId> {
        let _ = name;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Sends a packet, optionally with a descriptor.
    fn pass(&mut self, socket: SocketId, packet: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let _ = (socket, packet, file);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Receives a packet and the descriptor that it carries. A length of 0 is the end. Returns `WouldBlock` if there is none.
    fn take(&mut self, socket: SocketId, room: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
        let _ = (socket, room);
        Err(io::ErrorKind::Unsupported.into())
    }

    // Packets, for datagrams. An implementation without them returns false from `has_packets`, and does not need the other methods.

    /// Returns true if packets are supported.
    fn has_packets(&self) -> bool {
        false
    }

    /// Returns the interface that has an address of this host.
    fn interface(&self, address: IpAddr) -> io::Result<Interface> {
        let _ = address;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Returns the address of this host from which the system's routes lead to a peer.
    fn source(&self, peer: SocketAddr) -> io::Result<IpAddr> {
        let _ = peer;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Opens a socket for packets (UDP) at an address of this host, on the completion channel. Port 0 chooses a free one. Packets are sent
    /// whole or not at all, over IPv4 with the identification 0.
    fn open_packets(&mut self, address: SocketAddr) -> io::Result<SocketId> {
        let _ = address;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Opens a socket on the completion channel that receives the packets to a group on the interface of an address. Other sockets may have
    /// the same port.
    fn open_group(&mut self, group: SocketAddr, at: IpAddr, interface: Interface) -> io::Result<SocketId> {
        let _ = (group, at, interface);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Sends packets from index `first` on. Returns the number of packets sent. An error concerns the first of them, or reports a network
    /// error of an earlier packet.
    fn send_packets(&mut self, socket: SocketId, packets: &Packets, first: usize) -> io::Result<usize> {
        let _ = (socket, packets, first);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Receives packets in place of those in `packets`. Returns their number, and true if the socket was drained.
    fn receive_packets(&mut self, socket: SocketId, packets: &mut Packets) -> io::Result<(usize, bool)> {
        let _ = (socket, packets);
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Returns the next network error about a sent packet: its destination and the reason why it was not delivered. Returns `WouldBlock` if
    /// there is none.
    fn take_refusal(&mut self, socket: SocketId) -> io::Result<(Option<SocketAddr>, io::Error)> {
        let _ = socket;
        Err(io::ErrorKind::WouldBlock.into())
    }
}
