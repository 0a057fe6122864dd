//! Forwarding for the implementations of `Net` in tests, which change a few methods of the system's
//! sockets.

/// Implements each of the named methods of the traits of
/// [`Net`](super::net::Net) by a call of the same method of the field `inner`, a `TcpNet`.
macro_rules! forward_net {
    ($($method:ident)*) => { $($crate::iwarp::forward_net::forward_net!(@ $method);)* };
    (@ segment) => {
        type Segment = <$crate::iwarp::TcpNet as $crate::iwarp::net::LocalSockets>::Segment;
        fn segment(&mut self, memory: $crate::rdma_transport::mem::Memory) -> Self::Segment {
            self.inner.segment(memory)
        }
    };
    (@ channel) => {
        fn channel(&self, channel: $crate::iwarp::net::NetChannel) -> std::os::fd::RawFd {
            self.inner.channel(channel)
        }
    };
    (@ wake) => {
        fn wake(&mut self, channel: $crate::iwarp::net::NetChannel) {
            self.inner.wake(channel);
        }
    };
    (@ poll) => {
        fn poll(
            &mut self,
            channel: $crate::iwarp::net::NetChannel,
            edges: &mut Vec<($crate::iwarp::net::SocketId, $crate::iwarp::net::Ready)>,
        ) -> std::io::Result<bool> {
            self.inner.poll(channel, edges)
        }
    };
    (@ listen) => {
        fn listen(
            &mut self,
            address: std::net::SocketAddr,
            backlog: u32,
        ) -> std::io::Result<$crate::iwarp::net::SocketId> {
            self.inner.listen(address, backlog)
        }
    };
    (@ accept) => {
        fn accept(
            &mut self,
            listener: $crate::iwarp::net::SocketId,
        ) -> std::io::Result<($crate::iwarp::net::SocketId, std::net::SocketAddr)> {
            self.inner.accept(listener)
        }
    };
    (@ connect) => {
        fn connect(&mut self, peer: std::net::SocketAddr) -> std::io::Result<$crate::iwarp::net::SocketId> {
            self.inner.connect(peer)
        }
    };
    (@ connected) => {
        fn connected(&mut self, socket: $crate::iwarp::net::SocketId) -> std::io::Result<()> {
            self.inner.connected(socket)
        }
    };
    (@ promote) => {
        fn promote(&mut self, socket: $crate::iwarp::net::SocketId) -> std::io::Result<()> {
            self.inner.promote(socket)
        }
    };
    (@ local_address) => {
        fn local_address(&self, socket: $crate::iwarp::net::SocketId) -> std::io::Result<std::net::SocketAddr> {
            self.inner.local_address(socket)
        }
    };
    (@ max_segment) => {
        fn max_segment(&self, socket: $crate::iwarp::net::SocketId) -> std::io::Result<usize> {
            self.inner.max_segment(socket)
        }
    };
    (@ all_acknowledged) => {
        fn all_acknowledged(&self, socket: $crate::iwarp::net::SocketId) -> bool {
            self.inner.all_acknowledged(socket)
        }
    };
    (@ recv) => {
        fn recv(
            &mut self,
            socket: $crate::iwarp::net::SocketId,
            bufs: &mut [$crate::rdma_transport::mem::RecvSlice<'_>],
        ) -> std::io::Result<usize> {
            self.inner.recv(socket, bufs)
        }
    };
    (@ send) => {
        fn send(
            &mut self,
            socket: $crate::iwarp::net::SocketId,
            bufs: &[$crate::rdma_transport::mem::SendSlice<'_>],
        ) -> std::io::Result<usize> {
            self.inner.send(socket, bufs)
        }
    };
    (@ shutdown) => {
        fn shutdown(&mut self, socket: $crate::iwarp::net::SocketId) {
            self.inner.shutdown(socket);
        }
    };
    (@ close) => {
        fn close(&mut self, socket: $crate::iwarp::net::SocketId, reset: bool) {
            self.inner.close(socket, reset);
        }
    };
    (@ release) => {
        fn release(&mut self, socket: $crate::iwarp::net::SocketId) -> std::io::Result<std::os::fd::OwnedFd> {
            self.inner.release(socket)
        }
    };
    (@ adopt) => {
        fn adopt(&mut self, socket: std::os::fd::OwnedFd) -> std::io::Result<$crate::iwarp::net::SocketId> {
            self.inner.adopt(socket)
        }
    };
    (@ local_path) => {
        fn local_path(&self, socket: $crate::iwarp::net::SocketId) -> Option<u32> {
            self.inner.local_path(socket)
        }
    };
    (@ listen_local) => {
        fn listen_local(&mut self, name: &[u8]) -> std::io::Result<$crate::iwarp::net::SocketId> {
            self.inner.listen_local(name)
        }
    };
    (@ accept_local) => {
        fn accept_local(&mut self, listener: $crate::iwarp::net::SocketId) -> std::io::Result<$crate::iwarp::net::SocketId> {
            self.inner.accept_local(listener)
        }
    };
    (@ connect_local) => {
        fn connect_local(&mut self, name: &[u8]) -> std::io::Result<$crate::iwarp::net::SocketId> {
            self.inner.connect_local(name)
        }
    };
    (@ renew_local) => {
        fn renew_local(&mut self) {
            self.inner.renew_local()
        }
    };
    (@ pass) => {
        fn pass(&mut self, socket: $crate::iwarp::net::SocketId, packet: &[u8], file: Option<std::os::fd::BorrowedFd<'_>>) -> std::io::Result<()> {
            self.inner.pass(socket, packet, file)
        }
    };
    (@ take) => {
        fn take(&mut self, socket: $crate::iwarp::net::SocketId, room: &mut [u8]) -> std::io::Result<(usize, Option<std::os::fd::OwnedFd>)> {
            self.inner.take(socket, room)
        }
    };
    (@ has_packets) => {
        fn has_packets(&self) -> bool {
            self.inner.has_packets()
        }
    };
    (@ interface) => {
        fn interface(&self, address: std::net::SocketAddr) -> std::io::Result<$crate::rdma_transport::sockets::Interface> {
            self.inner.interface(address)
        }
    };
    (@ source) => {
        fn source(&self, peer: std::net::SocketAddr) -> std::io::Result<std::net::IpAddr> {
            self.inner.source(peer)
        }
    };
    (@ open_packets) => {
        fn open_packets(&mut self, address: std::net::SocketAddr) -> std::io::Result<$crate::iwarp::net::SocketId> {
            self.inner.open_packets(address)
        }
    };
    (@ open_group) => {
        fn open_group(&mut self, group: std::net::SocketAddr, at: std::net::IpAddr, interface: $crate::rdma_transport::sockets::Interface) -> std::io::Result<$crate::iwarp::net::SocketId> {
            self.inner.open_group(group, at, interface)
        }
    };
    (@ send_packets) => {
        fn send_packets(&mut self, socket: $crate::iwarp::net::SocketId, packets: &$crate::packets::Packets, first: usize) -> std::io::Result<usize> {
            self.inner.send_packets(socket, packets, first)
        }
    };
    (@ receive_packets) => {
        fn receive_packets(&mut self, socket: $crate::iwarp::net::SocketId, packets: &mut $crate::packets::Packets) -> std::io::Result<(usize, bool)> {
            self.inner.receive_packets(socket, packets)
        }
    };
    (@ take_refusal) => {
        fn take_refusal(&mut self, socket: $crate::iwarp::net::SocketId) -> std::io::Result<(Option<std::net::SocketAddr>, std::io::Error)> {
            self.inner.take_refusal(socket)
        }
    };
}

pub(super) use forward_net;
