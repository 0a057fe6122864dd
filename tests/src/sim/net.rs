//! The simulated sockets of one node, for the embedded provider.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use rdma_transport::mem::{Memory, RecvSlice, SendSlice};
use rdma_transport::slab::Key;
use rdma_transport::sockets::Interface;
use rdma_transport_embedded::iwarp::net::{LocalSockets, NetChannel, PacketSockets, Ready, SocketId, StreamSockets};
use rdma_transport_embedded::packets::Packets;

use super::fabric::{Shared, index, lock};
use super::local::{SimSegment, bind};
use super::tcp::address;

/// The sockets of one node. Dropping it closes its sockets.
pub struct SimNet {
    node: usize,
    fabric: Shared,
    /// The socket on which a shared-memory hello was sent or received. `None` after the segment for this hello was created, or after the
    /// hello was refused. Other sockets may also carry descriptors of memory, but these have no segment.
    greeted: Option<Key>,
    /// A segment whose socket is not known yet.
    unbound: Option<Key>,
}

impl SimNet {
    /// Returns the sockets of `node`.
    #[must_use]
    pub const fn new(node: usize, fabric: Shared) -> Self {
        Self { node, fabric, greeted: None, unbound: None }
    }
}

impl Drop for SimNet {
    fn drop(&mut self) {
        lock(&self.fabric).close_all(self.node);
    }
}

impl std::fmt::Debug for SimNet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimNet of node{}", self.node)
    }
}

/// Returns the invented number of a channel's descriptor.
pub(super) const fn descriptor(node: usize, channel: usize) -> RawFd {
    (1000 + 10 * node + channel) as RawFd
}

impl StreamSockets for SimNet {
    fn channel(&self, channel: NetChannel) -> RawFd {
        descriptor(self.node, index(channel))
    }

    fn wake(&mut self, channel: NetChannel) {
        let mut fabric = lock(&self.fabric);
        fabric.ports[self.node].channels[index(channel)].wake = true;
        fabric.raise(self.node, index(channel));
    }

    fn poll(&mut self, channel: NetChannel, edges: &mut Vec<(SocketId, Ready)>) -> io::Result<bool> {
        let mut out = Vec::new();
        let more = lock(&self.fabric).poll_channel(self.node, channel, &mut out);
        edges.extend(out.into_iter().map(|(key, ready)| (SocketId(key), ready)));
        Ok(more)
    }

    fn listen(&mut self, address: SocketAddr, backlog: u32) -> io::Result<SocketId> {
        lock(&self.fabric).listen(self.node, address, backlog).map(SocketId)
    }

    fn accept(&mut self, listener: SocketId) -> io::Result<(SocketId, SocketAddr)> {
        lock(&self.fabric).accept(listener.0).map(|(key, peer)| (SocketId(key), peer))
    }

    fn connect(&mut self, peer: SocketAddr) -> io::Result<SocketId> {
        lock(&self.fabric).connect(self.node, peer).map(SocketId)
    }

    fn connected(&mut self, socket: SocketId) -> io::Result<()> {
        lock(&self.fabric).connected(socket.0)
    }

    fn promote(&mut self, socket: SocketId) -> io::Result<()> {
        lock(&self.fabric).promote(socket.0)
    }

    fn local_address(&self, socket: SocketId) -> io::Result<SocketAddr> {
        let fabric = lock(&self.fabric);
        fabric.sockets.get(socket.0).map(|s| s.local).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn max_segment(&self, _socket: SocketId) -> io::Result<usize> {
        Ok(lock(&self.fabric).net.segment)
    }

    fn all_acknowledged(&self, socket: SocketId) -> bool {
        lock(&self.fabric).all_acknowledged(socket.0)
    }

    fn recv(&mut self, socket: SocketId, bufs: &mut [RecvSlice<'_>]) -> io::Result<usize> {
        lock(&self.fabric).recv(socket.0, bufs)
    }

    fn send(&mut self, socket: SocketId, bufs: &[SendSlice<'_>]) -> io::Result<usize> {
        lock(&self.fabric).send(socket.0, bufs)
    }

    fn shutdown(&mut self, socket: SocketId) {
        lock(&self.fabric).shutdown(socket.0);
    }

    fn close(&mut self, socket: SocketId, reset: bool) {
        lock(&self.fabric).close(socket.0, reset);
    }

    fn release(&mut self, _: SocketId) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn adopt(&mut self, _: OwnedFd) -> io::Result<SocketId> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl LocalSockets for SimNet {
    type Segment = SimSegment;

    fn segment(&mut self, memory: Memory) -> SimSegment {
        // On the active side, the hello with the segment's file was just sent. On the passive side,
        // the hello was received, and the confirmation that the file is mapped is sent next. On
        // both sides, `greeted` is the socket of this segment.
        let segment = SimSegment::new(self.node, &self.fabric, memory, self.greeted.take());
        self.unbound = Some(segment.key());
        segment
    }

    fn local_path(&self, _socket: SocketId) -> Option<u32> {
        lock(&self.fabric).one_host.then_some(0)
    }

    fn listen_local(&mut self, name: &[u8]) -> io::Result<SocketId> {
        lock(&self.fabric).listen_local(self.node, name).map(SocketId)
    }

    fn accept_local(&mut self, listener: SocketId) -> io::Result<SocketId> {
        lock(&self.fabric).accept_local(listener.0).map(SocketId)
    }

    fn connect_local(&mut self, name: &[u8]) -> io::Result<SocketId> {
        let socket = lock(&self.fabric).connect_local(self.node, name)?;
        self.greeted = Some(socket);
        Ok(SocketId(socket))
    }

    fn pass(&mut self, socket: SocketId, packet: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        if let Some(segment) = self.unbound.take() {
            bind(&self.fabric, segment, socket.0);
        }
        lock(&self.fabric).pass(socket.0, packet, file).inspect_err(|_| self.greeted = None)
    }

    fn take(&mut self, socket: SocketId, room: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
        lock(&self.fabric).take(socket.0, room)
    }

    fn renew_local(&mut self) {}
}

impl PacketSockets for SimNet {
    fn has_packets(&self) -> bool {
        lock(&self.fabric).udp.is_some()
    }

    fn interface(&self, at: SocketAddr) -> io::Result<Interface> {
        lock(&self.fabric).interface(self.node, at.ip())
    }

    fn source(&self, _: SocketAddr) -> io::Result<IpAddr> {
        Ok(address(self.node, 0).ip())
    }

    fn open_packets(&mut self, at: SocketAddr) -> io::Result<SocketId> {
        lock(&self.fabric).open_udp(self.node, at, false).map(SocketId)
    }

    fn open_group(&mut self, group: SocketAddr, _: IpAddr, _: Interface) -> io::Result<SocketId> {
        lock(&self.fabric).open_udp(self.node, group, true).map(SocketId)
    }

    fn send_packets(&mut self, socket: SocketId, packets: &Packets, first: usize) -> io::Result<usize> {
        lock(&self.fabric).send_packets(socket.0, packets, first)
    }

    fn receive_packets(&mut self, socket: SocketId, packets: &mut Packets) -> io::Result<(usize, bool)> {
        lock(&self.fabric).receive_packets(socket.0, packets)
    }

    fn take_refusal(&mut self, socket: SocketId) -> io::Result<(Option<SocketAddr>, io::Error)> {
        lock(&self.fabric).take_refusal(socket.0)
    }
}
