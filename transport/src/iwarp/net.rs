//! The seam between the embedded provider and its byte streams. [`crate::iwarp::tcp`] implements it on the system's
//! sockets; the simulation has its own.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use crate::mem::{Interface, Memory, Packets, RecvSlice, SendSlice};
use crate::shm::Segment;
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

/// An edge on a socket: what may have become possible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// There may be bytes, a connection to accept, the end of the stream or an error.
    pub readable: bool,
    /// There may be room for sending, or connecting has ended.
    pub writable: bool,
    /// No bytes follow those that are there. Read until 0 or an error then, even after a short read.
    pub closed: bool,
}

/// Non-blocking byte streams with edge-triggered readiness (`epoll`(7), EPOLLET). An edge comes when something new is
/// there; several may come as one, and spurious ones may come. The caller then reads until `WouldBlock` or a short
/// read, or remembers that it has not.
///
/// Connections within the host leave their byte streams for memory that both processes map. Networks that have no such connections say of
/// no socket that it [is local](Net::is_local), and do without the calls behind that.
pub trait Net: Send + fmt::Debug {
    /// The memory of a connection within the host. [`MappedSegment`](crate::shm::MappedSegment) is that of the system.
    type Segment: Segment;

    /// Descriptor that becomes readable when [`Net::poll`] has something for this channel.
    fn channel(&self, channel: Channel) -> RawFd;

    /// Makes a channel's descriptor readable once, for something that did not come from a socket.
    fn wake(&mut self, channel: Channel);

    /// Appends the edges of a channel; never blocks. Returns whether it stopped with edges left.
    fn poll(&mut self, channel: Channel, edges: &mut Vec<(SocketId, Ready)>) -> io::Result<bool>;

    /// Opens a listener, on the CM channel.
    fn listen(&mut self, address: SocketAddr, backlog: u32) -> io::Result<SocketId>;

    /// Accepts one connection and puts it on the CM channel; returns it with the peer's address. `WouldBlock` when
    /// there is none.
    fn accept(&mut self, listener: SocketId) -> io::Result<(SocketId, SocketAddr)>;

    /// Starts connecting, on the CM channel. A writable edge says that connecting has ended, and [`Net::connected`]
    /// with which result.
    fn connect(&mut self, peer: SocketAddr) -> io::Result<SocketId>;

    /// The result of connecting; `WouldBlock` when it has not ended.
    fn connected(&mut self, socket: SocketId) -> io::Result<()>;

    /// Moves a socket to the completion channel. What is ready on it now raises an edge there.
    fn promote(&mut self, socket: SocketId) -> io::Result<()>;

    /// Gives a socket up, for [`Net::adopt`] of another network. On failure it stays. Networks without descriptors do
    /// not support it.
    fn release(&mut self, socket: SocketId) -> io::Result<OwnedFd> {
        let _ = socket;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Takes a released socket in, on the CM channel. What is ready on it raises an edge.
    fn adopt(&mut self, socket: OwnedFd) -> io::Result<SocketId> {
        let _ = socket;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Address the socket is bound to.
    fn local_address(&self, socket: SocketId) -> io::Result<SocketAddr>;

    /// Effective maximum segment size, bytes (`TCP_MAXSEG`, `tcp`(7)).
    fn max_segment(&self, socket: SocketId) -> io::Result<usize>;

    /// Whether the peer's TCP has acknowledged all that was sent (`TCP_INFO`); `true` where that cannot be told.
    fn all_acknowledged(&self, socket: SocketId) -> bool;

    /// Receives into `bufs` in order, at most [`crate::mem::MAX_SLICES`] of them; 0 is the end of the stream.
    fn recv(&mut self, socket: SocketId, bufs: &mut [RecvSlice<'_>]) -> io::Result<usize>;

    /// Sends from `bufs` in order, at most [`crate::mem::MAX_SLICES`] of them; returns how many bytes were taken, which
    /// may be less than all.
    fn send(&mut self, socket: SocketId, bufs: &[SendSlice<'_>]) -> io::Result<usize>;

    /// Says that nothing more will be sent (FIN).
    fn shutdown(&mut self, socket: SocketId);

    /// Closes a socket; `reset` discards what is in flight (RST).
    fn close(&mut self, socket: SocketId, reset: bool);

    // Within the host.

    /// Whether both ends of a stream are on this host, as far as their addresses tell.
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

    /// Accepts one connection for packets, and puts it on the CM channel. `WouldBlock` when there is none; `PermissionDenied` if it is of
    /// another user, and is closed.
    fn accept_local(&mut self, listener: SocketId) -> io::Result<SocketId> {
        let _ = listener;
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Connects to a listener for packets, at once, on the CM channel. `PermissionDenied` if it is of another user.
    fn connect_local(&mut self, name: &[u8]) -> io::Result<SocketId> {
        let _ = name;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Sends a packet, and a descriptor with it.
    fn pass(&mut self, socket: SocketId, packet: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let _ = (socket, packet, file);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Receives a packet, and the descriptor that came with it; 0 is the end. `WouldBlock` when there is none.
    fn take(&mut self, socket: SocketId, room: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
        let _ = (socket, room);
        Err(io::ErrorKind::Unsupported.into())
    }

    // Packets, which datagrams are made of. Networks that have none say so, and do without the calls behind that.

    /// Whether there are sockets for packets.
    fn has_packets(&self) -> bool {
        false
    }

    /// The interface that has an address of this host.
    fn interface(&self, address: IpAddr) -> io::Result<Interface> {
        let _ = address;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The address of this host from which the routes lead to a peer.
    fn source(&self, peer: SocketAddr) -> io::Result<IpAddr> {
        let _ = peer;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Opens a socket for packets (UDP) at an address of this host, on the completion channel; port 0 takes a free one. Packets leave it
    /// whole or not at all, over IPv4 with the identification 0.
    fn open_packets(&mut self, address: SocketAddr) -> io::Result<SocketId> {
        let _ = address;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Opens a socket that hears the packets to a group which come to the interface of an address, on the completion channel. Others may
    /// have the same port.
    fn open_group(&mut self, group: SocketAddr, at: IpAddr, interface: Interface) -> io::Result<SocketId> {
        let _ = (group, at, interface);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Sends packets from the `first` on; returns how many have left. An error is that of the first of them, or what the network has said
    /// about earlier ones.
    fn send_packets(&mut self, socket: SocketId, packets: &Packets, first: usize) -> io::Result<usize> {
        let _ = (socket, packets, first);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Receives packets in place of those in `packets`; returns how many came, and whether the socket had no more.
    fn receive_packets(&mut self, socket: SocketId, packets: &mut Packets) -> io::Result<(usize, bool)> {
        let _ = (socket, packets);
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Takes the next thing that the network has said about a packet that was sent: where it was sent to, and why it did not get there.
    /// `WouldBlock` when there is none.
    fn take_refusal(&mut self, socket: SocketId) -> io::Result<(Option<SocketAddr>, io::Error)> {
        let _ = socket;
        Err(io::ErrorKind::WouldBlock.into())
    }
}
