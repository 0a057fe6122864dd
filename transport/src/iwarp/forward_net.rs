//! Forwarding for the implementations of `Net` in tests, which change a few methods of the system's sockets.

/// Implements each of the named methods of [`Net`](super::net::Net) by a call of the same method of the field `inner`, a `TcpNet`.
macro_rules! forward_net {
    ($($method:ident)*) => { $($crate::iwarp::forward_net::forward_net!(@ $method);)* };
    (@ segment) => {
        type Segment = <$crate::iwarp::TcpNet as $crate::iwarp::net::Net>::Segment;
        fn segment(&mut self, memory: $crate::mem::Memory) -> Self::Segment {
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
            bufs: &mut [$crate::mem::RecvSlice<'_>],
        ) -> std::io::Result<usize> {
            self.inner.recv(socket, bufs)
        }
    };
    (@ send) => {
        fn send(
            &mut self,
            socket: $crate::iwarp::net::SocketId,
            bufs: &[$crate::mem::SendSlice<'_>],
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
}

pub(super) use forward_net;
