//! The interface between the embedded provider and its sockets. [`crate::iwarp::tcp`] implements it
//! with the system's sockets. The simulation of the tests has another implementation.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use crate::packets::Packets;
use crate::shm::Segment;
use rdma_transport::mem::{Memory, RecvSlice, SendSlice};
use rdma_transport::slab::Key;
use rdma_transport::sockets::Interface;

/// The handle of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SocketId(pub Key);

/// The channel on which the edges of a socket are reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetChannel {
    /// The connection-manager channel: listeners, and connections during the handshake.
    Cm,
    /// The completion channel: established connections, and sockets for datagrams.
    Completion,
}

/// An edge on a socket: the operations that may have become possible since the last edge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// There may be bytes to read, a connection to accept, the end of the stream, or an error.
    pub readable: bool,
    /// There may be room to send, or an attempt to connect has ended.
    pub writable: bool,
    /// The stream has ended behind the readable bytes. Even after a short read, the caller must
    /// read until a receive call returns 0 or an error.
    pub closed: bool,
}

/// Non-blocking sockets with edge-triggered readiness (`epoll`(7), EPOLLET). A new condition raises
/// an edge. Several edges may be merged into one, and spurious edges may occur. After an edge, the
/// caller must read until `WouldBlock` or a short read. If the caller stops earlier, no new edge
/// reports the remaining bytes, so the caller must continue later without an edge.
///
/// Each kind of sockets has a trait: TCP streams, the sockets of connections within the host, and
/// UDP sockets for datagrams. None of them has a default method. An implementation without sockets
/// of the last two kinds returns `None` from [`LocalSockets::local_path`], or false from
/// [`PacketSockets::has_packets`]. Then the other methods of that trait are not called.
pub trait Net: StreamSockets + LocalSockets + PacketSockets {}

impl<N: StreamSockets + LocalSockets + PacketSockets> Net for N {}

/// The channels of a [`Net`], and its TCP sockets.
pub trait StreamSockets: Send + fmt::Debug {
    /// Returns a descriptor that becomes readable when [`StreamSockets::poll`] has edges of this
    /// channel.
    fn channel(&self, channel: NetChannel) -> RawFd;

    /// Makes the descriptor of a channel readable once, even if no socket has an edge.
    fn wake(&mut self, channel: NetChannel);

    /// Appends the edges of a channel to `edges`. Never blocks. Returns true if more edges remain.
    fn poll(&mut self, channel: NetChannel, edges: &mut Vec<(SocketId, Ready)>) -> io::Result<bool>;

    /// Opens a TCP listener on the CM channel.
    fn listen(&mut self, address: SocketAddr, backlog: u32) -> io::Result<SocketId>;

    /// Accepts one TCP connection and puts it on the CM channel. Returns the socket and the peer's
    /// address, or `WouldBlock` if no connection waits.
    fn accept(&mut self, listener: SocketId) -> io::Result<(SocketId, SocketAddr)>;

    /// Starts to connect a TCP socket, on the CM channel. A writable edge reports that the attempt
    /// has ended. After this edge, [`StreamSockets::connected`] returns the result.
    fn connect(&mut self, peer: SocketAddr) -> io::Result<SocketId>;

    /// Returns the result of an attempt to connect, or `WouldBlock` if the attempt has not ended.
    fn connected(&mut self, socket: SocketId) -> io::Result<()>;

    /// Moves a socket from the CM channel to the completion channel. If the socket is ready, an
    /// edge is raised on the completion channel.
    fn promote(&mut self, socket: SocketId) -> io::Result<()>;

    /// Removes a socket without closing it. Another instance can take the returned descriptor with
    /// [`StreamSockets::adopt`]. After an error, the socket is unchanged. Implementations without
    /// descriptors return `Unsupported`.
    fn release(&mut self, socket: SocketId) -> io::Result<OwnedFd>;

    /// Adds a released socket to the CM channel. If the socket is ready, an edge is raised on the
    /// CM channel.
    fn adopt(&mut self, socket: OwnedFd) -> io::Result<SocketId>;

    /// Returns the local address of a socket.
    fn local_address(&self, socket: SocketId) -> io::Result<SocketAddr>;

    /// Returns TCP's current maximum segment size in bytes (`TCP_MAXSEG`, `tcp`(7)).
    fn max_segment(&self, socket: SocketId) -> io::Result<usize>;

    /// Returns true if the peer's TCP has acknowledged all bytes that were sent (`TCP_INFO`), or if
    /// the implementation does not know.
    fn all_acknowledged(&self, socket: SocketId) -> bool;

    /// Receives into the slices of `bufs` in order. There are at most
    /// [`rdma_transport::mem::MAX_SLICES`] slices. Returns the number of received bytes, or 0 at
    /// the end of the stream.
    fn recv(&mut self, socket: SocketId, bufs: &mut [RecvSlice<'_>]) -> io::Result<usize>;

    /// Sends the slices of `bufs` in order. There are at most [`rdma_transport::mem::MAX_SLICES`]
    /// slices. Returns the number of accepted bytes, which may be smaller than the total length of
    /// the slices.
    fn send(&mut self, socket: SocketId, bufs: &[SendSlice<'_>]) -> io::Result<usize>;

    /// Ends the local stream (FIN): nothing more will be sent.
    fn shutdown(&mut self, socket: SocketId);

    /// Closes a socket. With `reset`, the connection is reset (RST), and data in flight is lost.
    fn close(&mut self, socket: SocketId, reset: bool);
}

/// The sockets of connections within the host, which can move from their TCP streams to memory that
/// both processes map. The sockets are Unix sockets (SOCK_SEQPACKET), because descriptors pass
/// through them.
pub trait LocalSockets {
    /// The memory that a connection shares with its peer. The system's implementation is
    /// [`MappedSegment`](crate::shm::MappedSegment).
    type Segment: Segment;

    /// Returns a hash of this host and of the two addresses and ports of a TCP connection. Returns
    /// `None` if one of the addresses is on another host. The remote address may be that of a
    /// proxy. Without a proxy between the peers, both compute the same hash. A proxy between them
    /// makes their hashes differ.
    fn local_path(&self, socket: SocketId) -> Option<u32>;

    /// Creates the segment of a connection from mapped memory.
    fn segment(&mut self, memory: Memory) -> Self::Segment;

    /// Opens a Unix listener (SOCK_SEQPACKET) on the CM channel, at an abstract name (`unix`(7)).
    fn listen_local(&mut self, name: &[u8]) -> io::Result<SocketId>;

    /// Accepts one Unix connection and puts it on the CM channel. Returns `WouldBlock` if no
    /// connection waits. Returns `PermissionDenied` if the peer belongs to another user. In that
    /// case, the connection is closed. Returns `ResourceBusy` if too many sockets of other users
    /// must stay open. In that case, no connection is accepted until [`LocalSockets::renew_local`]
    /// is called.
    fn accept_local(&mut self, listener: SocketId) -> io::Result<SocketId>;

    /// Connects to a Unix listener without waiting, on the CM channel. Returns `PermissionDenied`
    /// if the listener belongs to another user. Returns `ResourceBusy` in the same case as
    /// [`LocalSockets::accept_local`].
    fn connect_local(&mut self, name: &[u8]) -> io::Result<SocketId>;

    /// Permits Unix connections again after `ResourceBusy`. The sockets of other users that must
    /// stay open no longer count toward the limit.
    fn renew_local(&mut self);

    /// Sends a packet on a Unix socket, with a descriptor if one is given.
    fn pass(&mut self, socket: SocketId, packet: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<()>;

    /// Receives a packet from a Unix socket. Returns the length of the packet, and the descriptor
    /// that was attached to it, or `None` if none was attached. The length is 0 if the peer has
    /// closed the socket. Returns `WouldBlock` if there is no packet.
    fn take(&mut self, socket: SocketId, room: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)>;
}

/// UDP sockets, for datagrams.
pub trait PacketSockets {
    /// Returns true if the implementation supports UDP packets.
    fn has_packets(&self) -> bool;

    /// Returns the network interface that has this local address. Several interfaces may have the
    /// same link-local address. The scope of such an address is the index of the interface. Ignores
    /// the port number.
    fn interface(&self, address: SocketAddr) -> io::Result<Interface>;

    /// Returns the local address with which the system's routing table would send a packet to this
    /// peer.
    fn source(&self, peer: SocketAddr) -> io::Result<IpAddr>;

    /// Opens a UDP socket at a local address, on the completion channel. For port 0, the system
    /// chooses a free port. The socket never fragments packets; over IPv4, the identification of
    /// the packets is 0.
    fn open_packets(&mut self, address: SocketAddr) -> io::Result<SocketId>;

    /// Opens a UDP socket on the completion channel. The socket receives the packets to a multicast
    /// group on one interface. `at` is the address of the interface. Several sockets may have the
    /// same port.
    fn open_group(&mut self, group: SocketAddr, at: IpAddr, interface: Interface) -> io::Result<SocketId>;

    /// Sends the packets in `packets` from the index `first` on. Returns the number of packets that
    /// were sent. If the call fails, the packet at `first` was not sent: sending it has failed, or
    /// the error is a network error that an earlier packet has caused.
    fn send_packets(&mut self, socket: SocketId, packets: &Packets, first: usize) -> io::Result<usize>;

    /// Replaces the packets in `packets` with received packets. Returns the number of received
    /// packets, and true if the socket was drained.
    fn receive_packets(&mut self, socket: SocketId, packets: &mut Packets) -> io::Result<(usize, bool)>;

    /// Returns the next network error that a sent packet has caused. The address is the destination
    /// of that packet, or `None` if it is not known. Returns `WouldBlock` if there is no such
    /// error.
    fn take_refusal(&mut self, socket: SocketId) -> io::Result<(Option<SocketAddr>, io::Error)>;
}
