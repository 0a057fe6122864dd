//! Byte streams behind a gate.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{OwnedFd, RawFd};

use rdma_transport::iwarp::net::{Channel, Net, Ready, SocketId};
use rdma_transport::mem::{RecvSlice, SendSlice};

use super::{Call, Gate};

/// [`Net`] that asks a [`Gate`] before each call that can fail.
#[derive(Debug)]
pub struct GatedNet<N> {
    inner: N,
    gate: Gate,
}

impl<N: Net> GatedNet<N> {
    /// Puts a gate in front of `inner`.
    pub const fn new(inner: N, gate: Gate) -> Self {
        Self { inner, gate }
    }
}

impl<N: Net> Net for GatedNet<N> {
    fn channel(&self, channel: Channel) -> RawFd {
        self.inner.channel(channel)
    }
    fn wake(&mut self, channel: Channel) {
        self.inner.wake(channel);
    }
    fn poll(&mut self, channel: Channel, edges: &mut Vec<(SocketId, Ready)>) -> io::Result<bool> {
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
        self.inner.close(socket, reset);
    }
}
