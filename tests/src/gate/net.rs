//! The sockets of the embedded provider, with calls that a test can make fail or can observe.

use std::fmt::Debug;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use rdma_transport::mem::{Memory, RecvSlice, SendSlice};
use rdma_transport::sockets::Interface;
use rdma_transport_embedded::iwarp::net::{
    LocalSockets, Net, NetChannel, PacketSockets, Ready, SocketId, StreamSockets,
};
use rdma_transport_embedded::packets::Packets;

use super::{Call, Gate};

/// An observer of the packets that processes of one host exchange to set up shared memory.
pub trait Onlooker: Debug + Send + Sync {
    /// A socket was connected to the listener with the name `name`.
    fn met(&self, socket: SocketId, name: &[u8]);

    /// A packet with a descriptor is being sent. If this function returns a descriptor, that one is sent instead of `file`.
    fn passing(&self, socket: SocketId, packet: &[u8], file: BorrowedFd<'_>) -> Option<OwnedFd>;

    /// A packet with a descriptor was received.
    fn took(&self, socket: SocketId, packet: &[u8], file: BorrowedFd<'_>);

    /// A socket is being closed.
    fn closing(&self, socket: SocketId);
}

/// A [`Net`] that queries a [`Gate`] before each fallible call.
#[derive(Debug)]
pub struct GatedNet<N> {
    inner: N,
    gate: Gate,
    onlooker: Option<Arc<dyn Onlooker>>,
}

impl<N: Net> GatedNet<N> {
    /// Makes sockets that query `gate` before each fallible call of `inner`.
    pub const fn new(inner: N, gate: Gate) -> Self {
        Self { inner, gate, onlooker: None }
    }

    /// Makes sockets that report packets to `onlooker`.
    pub fn seen_by(inner: N, onlooker: Arc<dyn Onlooker>) -> Self {
        Self { inner, gate: Gate::default(), onlooker: Some(onlooker) }
    }
}

impl<N: Net> StreamSockets for GatedNet<N> {
    fn channel(&self, channel: NetChannel) -> RawFd {
        self.inner.channel(channel)
    }

    fn wake(&mut self, channel: NetChannel) {
        self.inner.wake(channel);
    }

    fn poll(&mut self, channel: NetChannel, edges: &mut Vec<(SocketId, Ready)>) -> io::Result<bool> {
        self.gate.system(Call::NetPoll)?;
        self.inner.poll(channel, edges)
    }

    fn listen(&mut self, address: SocketAddr, backlog: u32) -> io::Result<SocketId> {
        self.gate.system(Call::NetListen)?;
        self.inner.listen(address, backlog)
    }

    fn accept(&mut self, listener: SocketId) -> io::Result<(SocketId, SocketAddr)> {
        self.gate.system(Call::NetAccept)?;
        self.inner.accept(listener)
    }

    fn connect(&mut self, peer: SocketAddr) -> io::Result<SocketId> {
        self.gate.system(Call::NetConnect)?;
        self.inner.connect(peer)
    }

    fn connected(&mut self, socket: SocketId) -> io::Result<()> {
        self.gate.system(Call::NetConnected)?;
        self.inner.connected(socket)
    }

    fn promote(&mut self, socket: SocketId) -> io::Result<()> {
        self.gate.system(Call::NetPromote)?;
        self.inner.promote(socket)
    }

    fn release(&mut self, socket: SocketId) -> io::Result<OwnedFd> {
        self.inner.release(socket)
    }

    fn adopt(&mut self, socket: OwnedFd) -> io::Result<SocketId> {
        self.inner.adopt(socket)
    }

    fn local_address(&self, socket: SocketId) -> io::Result<SocketAddr> {
        self.gate.system(Call::NetLocalAddress)?;
        self.inner.local_address(socket)
    }

    fn max_segment(&self, socket: SocketId) -> io::Result<usize> {
        self.gate.system(Call::NetMaxSegment)?;
        self.inner.max_segment(socket)
    }

    fn all_acknowledged(&self, socket: SocketId) -> bool {
        self.inner.all_acknowledged(socket)
    }

    fn recv(&mut self, socket: SocketId, bufs: &mut [RecvSlice<'_>]) -> io::Result<usize> {
        self.gate.system(Call::NetRecv)?;
        self.inner.recv(socket, bufs)
    }

    fn send(&mut self, socket: SocketId, bufs: &[SendSlice<'_>]) -> io::Result<usize> {
        self.gate.system(Call::NetSend)?;
        self.inner.send(socket, bufs)
    }

    fn shutdown(&mut self, socket: SocketId) {
        self.inner.shutdown(socket);
    }

    fn close(&mut self, socket: SocketId, reset: bool) {
        if let Some(onlooker) = &self.onlooker {
            onlooker.closing(socket);
        }
        self.inner.close(socket, reset);
    }
}

impl<N: Net> LocalSockets for GatedNet<N> {
    type Segment = N::Segment;

    fn segment(&mut self, memory: Memory) -> N::Segment {
        self.inner.segment(memory)
    }

    fn local_path(&self, socket: SocketId) -> Option<u32> {
        self.inner.local_path(socket)
    }

    fn listen_local(&mut self, name: &[u8]) -> io::Result<SocketId> {
        self.gate.system(Call::NetListenLocal)?;
        self.inner.listen_local(name)
    }

    fn accept_local(&mut self, listener: SocketId) -> io::Result<SocketId> {
        self.gate.system(Call::NetAcceptLocal)?;
        self.inner.accept_local(listener)
    }

    fn connect_local(&mut self, name: &[u8]) -> io::Result<SocketId> {
        self.gate.system(Call::NetConnectLocal)?;
        let socket = self.inner.connect_local(name)?;
        if let Some(onlooker) = &self.onlooker {
            onlooker.met(socket, name);
        }
        Ok(socket)
    }

    fn renew_local(&mut self) {
        self.inner.renew_local();
    }

    fn pass(&mut self, socket: SocketId, packet: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        self.gate.system(Call::NetPass)?;
        let other =
            self.onlooker.as_ref().zip(file).and_then(|(onlooker, file)| onlooker.passing(socket, packet, file));
        self.inner.pass(socket, packet, other.as_ref().map(AsFd::as_fd).or(file))
    }

    fn take(&mut self, socket: SocketId, room: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
        self.gate.system(Call::NetTake)?;
        let (len, file) = self.inner.take(socket, room)?;
        if let Some((onlooker, file)) = self.onlooker.as_ref().zip(file.as_ref()) {
            onlooker.took(socket, &room[..len], file.as_fd());
        }
        Ok((len, file))
    }
}

impl<N: Net> PacketSockets for GatedNet<N> {
    fn has_packets(&self) -> bool {
        false
    }

    fn interface(&self, _: SocketAddr) -> io::Result<Interface> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn source(&self, _: SocketAddr) -> io::Result<IpAddr> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn open_packets(&mut self, _: SocketAddr) -> io::Result<SocketId> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn open_group(&mut self, _: SocketAddr, _: IpAddr, _: Interface) -> io::Result<SocketId> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn send_packets(&mut self, _: SocketId, _: &Packets, _: usize) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn receive_packets(&mut self, _: SocketId, _: &mut Packets) -> io::Result<(usize, bool)> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn take_refusal(&mut self, _: SocketId) -> io::Result<(Option<SocketAddr>, io::Error)> {
        Err(io::ErrorKind::Unsupported.into())
    }
}
