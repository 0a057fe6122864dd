//! The system's sockets for the embedded provider: TCP for streams, UDP for datagrams, Unix sockets for connections in shared memory. Each
//! of the two channels is a separate epoll set.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, Shutdown, SocketAddr};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use socket2::{Domain, Protocol, SockAddr, Socket, TcpKeepalive, Type};

use super::config::WithinHost;
use super::net::{LocalSockets, NetChannel, PacketSockets, Ready, SocketId, StreamSockets};
use super::unix::Strangers;
use super::{udp, unix};
use crate::packets;
use crate::packets::Packets;
use crate::passing;
use crate::shm::MappedSegment;
use rdma_transport::mem::{self, Memory, RecvSlice, SendSlice};
use rdma_transport::slab::{Key, Slab};
use rdma_transport::sockets;
use rdma_transport::sockets::Interface;

/// The largest number of epoll events that one call of [`StreamSockets::poll`] returns.
const EVENTS: usize = 256;
const WAKE: Token = Token(usize::MAX);
/// The largest value of `TCP_KEEPIDLE` that Linux accepts, in seconds.
const MAX_KEEPIDLE: u64 = 32_767;
/// The largest value of `TCP_USER_TIMEOUT` that Linux accepts, in milliseconds.
const MAX_USER_TIMEOUT: u64 = 2_147_483_647;
/// The values of `TCP_RTO_MAX_MS` that Linux accepts.
const RTO_MAX: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(120);

/// The settings of [`TcpNet`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TcpConfig {
    /// The time without data after which TCP probes the peer (`SO_KEEPALIVE`), 1 s to 32,767 s. `None` disables the probes.
    pub keepalive: Option<Duration>,
    /// The longest time for which sent bytes may stay unacknowledged before the connection fails (`TCP_USER_TIMEOUT`), 1 ms to
    /// 2,147,483,647 ms (24 days). `None` leaves the limit to the system.
    pub user_timeout: Option<Duration>,
    /// The longest time between two retransmissions of bytes that the peer has not acknowledged
    /// (`TCP_RTO_MAX_MS`), 1 s to 120 s. When a path returns after an outage, TCP notices that only
    /// with its next retransmission. `None` leaves the limit to the system: 120 s, unless
    /// `net.ipv4.tcp_rto_max_ms` says otherwise. The setting has no effect if `user_timeout` is
    /// `None`: the system would then give up a connection earlier, after a number of
    /// retransmissions. It also has no effect on kernels before Linux 6.15, which do not have this
    /// option. Default: 1,875 ms.
    pub rto_max: Option<Duration>,
    /// The size in bytes of the socket's send buffer, at most 2,147,483,647. `None` lets the system adapt it.
    pub send_buffer: Option<usize>,
    /// The size in bytes of the socket's receive buffer, at most 2,147,483,647. `None` lets the system adapt it.
    pub recv_buffer: Option<usize>,
    /// The congestion control of connections whose ends are both on this host (`TCP_CONGESTION`). `None` leaves the choice to the system.
    /// The system also chooses if it lacks the named algorithm or does not allow it.
    pub host_congestion: Option<String>, // local: a setting
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            keepalive: Some(Duration::from_secs(15)),
            user_timeout: Some(Duration::from_secs(20)),
            rto_max: Some(Duration::from_millis(1_875)),
            send_buffer: None,
            recv_buffer: None,
            host_congestion: WithinHost::default().congestion,
        }
    }
}

#[derive(Debug)]
struct SocketEntry {
    socket: Socket,
    channel: NetChannel,
    /// For a UDP socket: true from a send that failed with `WouldBlock` until the next writable
    /// edge. Only during this time, the socket is registered for writable edges.
    awaits_room: bool,
}

#[derive(Debug)]
struct EventSet {
    poll: Poll,
    waker: Waker,
    events: Events,
}

impl EventSet {
    fn new() -> io::Result<Self> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKE)?;
        Ok(Self { poll, waker, events: Events::with_capacity(EVENTS) })
    }
}

/// The system's TCP and UDP sockets, non-blocking and edge-triggered.
pub struct TcpNet {
    config: TcpConfig,
    cm: EventSet,
    completion: EventSet,
    sockets: Slab<SocketEntry>, // bound: connections, half-open, lingering, local-newcomers
    /// The number of sockets with `awaits_room`.
    awaiting_room: usize,
    /// The open Unix listener, if there is one.
    local_listener: Option<SocketId>,
    strangers: Strangers,
    /// The identity of this host and of its network namespace.
    host: Vec<u8>, // local: the identity of the host
}

impl Drop for TcpNet {
    fn drop(&mut self) {
        if let Some(listener) = self.local_listener {
            self.close(listener, false);
        }
    }
}

impl fmt::Debug for TcpNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpNet").field("config", &self.config).field("sockets", &self.sockets.len()).finish()
    }
}

fn token(key: Key) -> Token {
    Token((u64::from(key.generation()) << 32 | u64::from(key.slot())) as usize)
}

fn key(token: Token) -> Key {
    let token = token.0 as u64;
    Key::new(token as u32, (token >> 32) as u32)
}

fn gone() -> io::Error {
    io::ErrorKind::NotConnected.into()
}

impl TcpNet {
    /// Creates an instance without sockets.
    ///
    /// # Errors
    /// Returns an error if the system has no descriptors left.
    pub fn new() -> io::Result<Self> {
        Self::with_config(TcpConfig::default())
    }

    /// Creates an instance with the given settings.
    ///
    /// # Errors
    /// Returns an error if a setting is out of its range, or if the system has no descriptors left.
    pub fn with_config(config: TcpConfig) -> io::Result<Self> {
        if config.keepalive.is_some_and(|time| !(1..=MAX_KEEPIDLE).contains(&time.as_secs())) {
            let why = "TcpConfig::keepalive must be 1 s to 32,767 s";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        // The system would refuse a longer time at each new socket. With 0, it sets no limit.
        if config.user_timeout.is_some_and(|time| !(1..=u128::from(MAX_USER_TIMEOUT)).contains(&time.as_millis())) {
            let why = "TcpConfig::user_timeout must be 1 ms to 2,147,483,647 ms";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        if config.rto_max.is_some_and(|time| !RTO_MAX.contains(&time)) {
            let why = "TcpConfig::rto_max must be 1 s to 120 s";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        // The system takes the sizes of buffers as `c_int`.
        let buffers = [config.send_buffer, config.recv_buffer];
        if buffers.into_iter().flatten().any(|size| libc::c_int::try_from(size).is_err()) {
            let why = "TcpConfig::send_buffer and TcpConfig::recv_buffer must be at most 2,147,483,647 bytes";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        Ok(Self {
            config,
            cm: EventSet::new()?,
            completion: EventSet::new()?,
            sockets: Slab::with_generation_bits(31),
            awaiting_room: 0,
            local_listener: None,
            strangers: Strangers::default(),
            host: unix::host(),
        })
    }

    fn set(&self, channel: NetChannel) -> &EventSet {
        match channel {
            NetChannel::Cm => &self.cm,
            NetChannel::Completion => &self.completion,
        }
    }

    #[inline]
    fn socket(&self, id: SocketId) -> io::Result<&Socket> {
        Ok(&self.sockets.get(id.0).ok_or_else(gone)?.socket)
    }

    /// Returns the number of unread bytes of a socket. Counts at most `most` bytes.
    #[cfg(test)]
    pub(super) fn unread(&self, id: SocketId, most: usize) -> usize {
        let mut room = vec![std::mem::MaybeUninit::uninit(); most];
        self.socket(id).and_then(|socket| socket.peek(&mut room)).unwrap_or(0)
    }

    fn tune(&self, socket: &Socket) -> io::Result<()> {
        socket.set_tcp_nodelay(true)?;
        if let Some(time) = self.config.keepalive {
            let probe = Duration::from_secs(5);
            socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(time).with_interval(probe).with_retries(3))?;
        }
        #[cfg(target_os = "linux")]
        {
            socket.set_tcp_user_timeout(self.config.user_timeout)?;
            if let Some(most) = self.config.rto_max.filter(|_| self.config.user_timeout.is_some()) {
                sockets::limit_retransmission_timeout(socket.as_fd(), most)?;
            }
        }
        if let Some(size) = self.config.send_buffer {
            socket.set_send_buffer_size(size)?;
        }
        if let Some(size) = self.config.recv_buffer {
            socket.set_recv_buffer_size(size)?;
        }
        Ok(())
    }

    /// Registers a UDP socket for one writable edge, after a send that failed with `WouldBlock`. A
    /// permanent registration would raise an edge after each sent packet.
    fn await_room(&mut self, socket: SocketId) -> io::Result<()> {
        let entry = self.sockets.get_mut(socket.0).ok_or_else(gone)?;
        if !entry.awaits_room {
            let (fd, interest) = (entry.socket.as_raw_fd(), Interest::READABLE | Interest::WRITABLE);
            self.completion.poll.registry().reregister(&mut SourceFd(&fd), token(socket.0), interest)?;
            entry.awaits_room = true;
            self.awaiting_room += 1;
        }
        Ok(())
    }

    fn add(&mut self, socket: Socket, interest: Interest) -> io::Result<SocketId> {
        self.add_to(NetChannel::Cm, socket, interest)
    }

    fn add_to(&mut self, channel: NetChannel, socket: Socket, interest: Interest) -> io::Result<SocketId> {
        let fd = socket.as_raw_fd();
        let key = self.sockets.insert(SocketEntry { socket, channel, awaits_room: false });
        match self.set(channel).poll.registry().register(&mut SourceFd(&fd), token(key), interest) {
            Ok(()) => Ok(SocketId(key)),
            Err(error) => {
                self.sockets.remove(key);
                Err(error)
            }
        }
    }
}

impl StreamSockets for TcpNet {
    fn channel(&self, channel: NetChannel) -> RawFd {
        self.set(channel).poll.as_raw_fd()
    }

    fn wake(&mut self, channel: NetChannel) {
        if let Err(error) = self.set(channel).waker.wake() {
            local_log!(Error, "cannot wake the {channel:?} channel: {error}");
        }
    }

    fn poll(&mut self, channel: NetChannel, edges: &mut Vec<(SocketId, Ready)>) -> io::Result<bool> {
        let set = match channel {
            NetChannel::Cm => &mut self.cm,
            NetChannel::Completion => &mut self.completion,
        };
        match set.poll.poll(&mut set.events, Some(Duration::ZERO)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(true),
            Err(error) => return Err(error),
        }
        let mut count = 0;
        for event in &set.events {
            count += 1;
            if event.token() != WAKE {
                let closed = event.is_read_closed() || event.is_write_closed() || event.is_error();
                let ready =
                    Ready { readable: event.is_readable() || closed, writable: event.is_writable() || closed, closed };
                edges.push((SocketId(key(event.token())), ready));
                if self.awaiting_room > 0 && event.is_writable() {
                    let entry = self.sockets.get_mut(key(event.token())).filter(|entry| entry.awaits_room);
                    if let Some(entry) = entry {
                        let (fd, registry) = (entry.socket.as_raw_fd(), set.poll.registry());
                        let _ = registry.reregister(&mut SourceFd(&fd), event.token(), Interest::READABLE);
                        entry.awaits_room = false;
                        self.awaiting_room -= 1;
                    }
                }
            }
        }
        Ok(count == EVENTS)
    }

    fn listen(&mut self, address: SocketAddr, backlog: u32) -> io::Result<SocketId> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        if let SocketAddr::V6(v6) = address {
            // A listener at the IPv6 wildcard address also accepts IPv4, even if the system's default restricts such a listener to IPv6.
            socket.set_only_v6(*v6.ip() != Ipv6Addr::UNSPECIFIED)?;
        }
        self.tune(&socket)?;
        socket.bind(&SockAddr::from(address))?;
        socket.listen(i32::try_from(backlog.max(1)).unwrap_or(i32::MAX))?;
        self.add(socket, Interest::READABLE)
    }

    fn accept(&mut self, listener: SocketId) -> io::Result<(SocketId, SocketAddr)> {
        let (socket, peer) = self.socket(listener)?.accept()?;
        let peer = peer.as_socket().ok_or(io::ErrorKind::Unsupported)?;
        // The peer may have reset the connection while the connection waited in the listener's
        // queue. The MPA request that the peer has sent before can still be read. So without this
        // check, such a connection would cost as much as one that is established.
        if let Some(error) = socket.take_error()? {
            log::debug!("{peer}: the connection has ended before it was accepted: {error}");
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        socket.set_nonblocking(true)?;
        // On Linux, an accepted socket has the options of its listener.
        #[cfg(not(target_os = "linux"))]
        self.tune(&socket)?;
        Ok((self.add(socket, Interest::READABLE | Interest::WRITABLE)?, peer))
    }

    fn connect(&mut self, peer: SocketAddr) -> io::Result<SocketId> {
        let socket = Socket::new(Domain::for_address(peer), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
        self.tune(&socket)?;
        match socket.connect(&SockAddr::from(peer)) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(error) => return Err(error),
        }
        self.add(socket, Interest::READABLE | Interest::WRITABLE)
    }

    fn connected(&mut self, socket: SocketId) -> io::Result<()> {
        let socket = self.socket(socket)?;
        if let Some(error) = socket.take_error()? {
            return Err(error);
        }
        match socket.peer_addr() {
            Ok(_) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => Err(io::ErrorKind::WouldBlock.into()),
            Err(error) => Err(error),
        }
    }

    fn promote(&mut self, socket: SocketId) -> io::Result<()> {
        let entry = self.sockets.get_mut(socket.0).ok_or_else(gone)?;
        let fd = entry.socket.as_raw_fd();
        let interest = Interest::READABLE | Interest::WRITABLE;
        self.completion.poll.registry().register(&mut SourceFd(&fd), token(socket.0), interest)?;
        entry.channel = NetChannel::Completion;
        #[cfg(target_os = "linux")]
        if let Some(name) =
            self.config.host_congestion.as_ref().filter(|_| unix::path_within_host(&entry.socket, &[]).is_some())
        {
            if let Err(error) = entry.socket.set_tcp_congestion(name.as_bytes()) {
                log::debug!("a connection within the host keeps the system's congestion control, not {name}: {error}");
            }
        }
        self.cm.poll.registry().deregister(&mut SourceFd(&fd))
    }

    fn release(&mut self, socket: SocketId) -> io::Result<OwnedFd> {
        let entry = self.sockets.get(socket.0).ok_or_else(gone)?;
        let fd = entry.socket.as_raw_fd();
        self.set(entry.channel).poll.registry().deregister(&mut SourceFd(&fd))?;
        self.sockets.remove(socket.0).map(|entry| entry.socket.into()).ok_or_else(gone)
    }

    fn adopt(&mut self, socket: OwnedFd) -> io::Result<SocketId> {
        self.add(socket.into(), Interest::READABLE | Interest::WRITABLE)
    }

    fn local_address(&self, socket: SocketId) -> io::Result<SocketAddr> {
        self.socket(socket)?.local_addr()?.as_socket().ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    fn max_segment(&self, socket: SocketId) -> io::Result<usize> {
        Ok(self.socket(socket)?.tcp_mss()? as usize)
    }

    /// Always returns true, because `TCP_INFO` has no safe wrapper. The caller therefore waits for a grace time, too.
    fn all_acknowledged(&self, _socket: SocketId) -> bool {
        true
    }

    #[inline]
    fn recv(&mut self, socket: SocketId, bufs: &mut [RecvSlice<'_>]) -> io::Result<usize> {
        mem::receive(self.socket(socket)?.as_fd(), bufs)
    }

    #[inline]
    fn send(&mut self, socket: SocketId, bufs: &[SendSlice<'_>]) -> io::Result<usize> {
        mem::send(self.socket(socket)?.as_fd(), bufs)
    }

    fn shutdown(&mut self, socket: SocketId) {
        if let Ok(socket) = self.socket(socket) {
            if let Err(error) = socket.shutdown(Shutdown::Write) {
                log::debug!("cannot end a stream: {error}");
            }
        }
    }

    fn close(&mut self, socket: SocketId, reset: bool) {
        let Some(entry) = self.sockets.remove(socket.0) else { return };
        self.awaiting_room -= usize::from(entry.awaits_room);
        if self.local_listener == Some(socket) {
            self.local_listener = None;
            return unix::close_listener(entry.socket);
        }
        if reset {
            // With a linger time of 0, closing the socket resets the connection.
            let _ = entry.socket.set_linger(Some(Duration::ZERO));
        }
    }
}

impl LocalSockets for TcpNet {
    type Segment = MappedSegment;

    fn local_path(&self, socket: SocketId) -> Option<u32> {
        unix::path_within_host(self.socket(socket).ok()?, &self.host)
    }

    fn segment(&mut self, memory: Memory) -> MappedSegment {
        MappedSegment::new(memory)
    }

    fn listen_local(&mut self, name: &[u8]) -> io::Result<SocketId> {
        let listener = self.add(unix::listen(name)?, Interest::READABLE)?;
        self.local_listener = Some(listener);
        Ok(listener)
    }

    fn accept_local(&mut self, listener: SocketId) -> io::Result<SocketId> {
        let listener = &self.sockets.get(listener.0).ok_or_else(gone)?.socket;
        let socket = unix::accept(listener, &mut self.strangers)?;
        self.add(socket, Interest::READABLE)
    }

    fn connect_local(&mut self, name: &[u8]) -> io::Result<SocketId> {
        let socket = unix::connect(name, &mut self.strangers)?;
        self.add(socket, Interest::READABLE)
    }

    fn renew_local(&mut self) {
        self.strangers = Strangers::default();
    }

    #[inline]
    fn pass(&mut self, socket: SocketId, packet: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        passing::send_with_descriptor(self.socket(socket)?.as_fd(), packet, file)
    }

    #[inline]
    fn take(&mut self, socket: SocketId, room: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
        passing::receive_with_descriptor(self.socket(socket)?.as_fd(), room)
    }
}

impl PacketSockets for TcpNet {
    fn has_packets(&self) -> bool {
        true
    }

    fn interface(&self, address: SocketAddr) -> io::Result<Interface> {
        udp::interface(address)
    }

    fn source(&self, peer: SocketAddr) -> io::Result<IpAddr> {
        udp::source(peer)
    }

    fn open_packets(&mut self, address: SocketAddr) -> io::Result<SocketId> {
        self.add_to(NetChannel::Completion, udp::bind(address)?, Interest::READABLE)
    }

    fn open_group(&mut self, group: SocketAddr, at: IpAddr, interface: Interface) -> io::Result<SocketId> {
        self.add_to(NetChannel::Completion, udp::join(group, at, interface)?, Interest::READABLE)
    }

    #[inline]
    fn send_packets(&mut self, socket: SocketId, packets: &Packets, first: usize) -> io::Result<usize> {
        let sent = packets::send_packets(self.socket(socket)?.as_fd(), packets, first);
        if matches!(&sent, Err(error) if error.kind() == io::ErrorKind::WouldBlock) {
            self.await_room(socket)?;
        }
        sent
    }

    #[inline]
    fn receive_packets(&mut self, socket: SocketId, packets: &mut Packets) -> io::Result<(usize, bool)> {
        packets::receive_packets(self.socket(socket)?.as_fd(), packets)
    }

    fn take_refusal(&mut self, socket: SocketId) -> io::Result<(Option<SocketAddr>, io::Error)> {
        packets::take_network_error(self.socket(socket)?.as_fd())
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;
    use crate::iwarp::{Iwarp, IwarpConfig};
    use crate::patience;
    use crate::test_memory::TestMemory;
    use rdma_transport::cm::{CmEvent, CmEventKind, CmId, ConnectParam, Detached, DisconnectCause};
    use rdma_transport::cm::{ListenParam, PathOptions};
    use rdma_transport::cq::CqAttr;
    use rdma_transport::error::TransportError;
    use rdma_transport::provider::{CqId, DeviceId, Drive, Provider};
    use rdma_transport::qp::{QpAttr, QpId};
    use rdma_transport::wc::{WcOpcode, WcStatus, WorkCompletion};
    use rdma_transport::wr::{RecvWr, SendFlags, SendOp, SendWr, SgeList};
    use std::time::Instant;

    const SIZE: usize = 4096;
    const DEPTH: u32 = 8;

    struct TcpNode {
        iwarp: Iwarp<TcpNet>,
        cq: CqId,
        memory: Memory,
        done: Vec<WorkCompletion>,
        events: Vec<CmEvent>,
    }

    impl TcpNode {
        fn new(config: IwarpConfig) -> Self {
            Self::on(TcpNet::new().unwrap(), config)
        }

        fn on(net: TcpNet, config: IwarpConfig) -> Self {
            let mut iwarp = Iwarp::new(config, net, Box::new(|bytes| bytes.fill(9))).unwrap();
            let cq = iwarp.create_cq(DeviceId(0), &CqAttr::new(4 * DEPTH)).unwrap();
            Self { iwarp, cq, memory: Memory::new(64 * SIZE).unwrap(), done: Vec::new(), events: Vec::new() }
        }

        fn turn(&mut self) {
            let now = Instant::now();
            self.iwarp.progress(now, Drive::Full);
            while let Some(event) = self.iwarp.next_cm_event(now).unwrap() {
                self.events.push(event);
            }
            self.iwarp.poll_cq(self.cq, 64, &mut self.done).unwrap();
        }

        fn qp(&mut self, id: CmId) -> QpId {
            let attr = QpAttr {
                send_cq: self.cq,
                recv_cq: self.cq,
                max_send_wr: DEPTH,
                max_recv_wr: DEPTH,
                max_inline: 64,
                max_recv_sge: 0,
                srq: None,
            };
            let qp = self.iwarp.create_qp(id, &attr).unwrap();
            for slot in 0..DEPTH as usize {
                self.recv(qp, slot);
            }
            qp
        }

        fn recv(&mut self, qp: QpId, slot: usize) {
            let sges = SgeList::one(self.memory.sge(slot * SIZE, SIZE));
            self.iwarp.post_recv(qp, &[RecvWr { wr_id: slot as u64, sges }]).unwrap();
        }

        fn send(&mut self, qp: QpId, bytes: &[u8]) {
            self.memory.write(32 * SIZE, bytes);
            let sges = SgeList::one(self.memory.sge(32 * SIZE, bytes.len()));
            let wr = SendWr { wr_id: 99, op: SendOp::Send, sges, flags: SendFlags::SIGNALED };
            self.iwarp.post_send(qp, &[wr]).unwrap();
        }
    }

    fn until(a: &mut TcpNode, b: &mut TcpNode, mut holds: impl FnMut(&mut TcpNode, &mut TcpNode) -> bool) {
        patience::until("what the test waits for", || {
            if holds(a, b) {
                return Some(());
            }
            a.turn();
            b.turn();
            None
        });
    }

    fn connect(server: &mut TcpNode, client: &mut TcpNode) -> (CmId, CmId) {
        let listener = server.iwarp.listen("127.0.0.1:0".parse().unwrap(), &ListenParam::default()).unwrap();
        let address = server.iwarp.local_address(listener).unwrap();
        let out =
            client.iwarp.resolve(address, &PathOptions::default(), Instant::now() + Duration::from_secs(120)).unwrap();
        until(server, client, |_, client| !client.events.is_empty());
        let qp = client.qp(out);
        assert_eq!(qp.0, out.0);
        client.iwarp.connect(out, &ConnectParam { private_data: b"hello", ..Default::default() }).unwrap();
        until(server, client, |server, _| !server.events.is_empty());
        let CmEvent { id, kind: CmEventKind::ConnectRequest { private_data, .. } } = server.events.remove(0) else {
            panic!("{:?}", server.events)
        };
        assert_eq!(&*private_data, b"hello");
        server.qp(id);
        let param = ConnectParam { private_data: b"welcome", ..Default::default() };
        server.iwarp.accept(id, &param, Instant::now()).unwrap();
        until(server, client, |server, client| !server.events.is_empty() && client.events.len() > 1);
        assert!(matches!(server.events.remove(0).kind, CmEventKind::Established { .. }));
        assert!(matches!(client.events.remove(0).kind, CmEventKind::Resolved { .. }));
        let CmEventKind::Established { private_data, .. } = client.events.remove(0).kind else { panic!() };
        assert_eq!(&*private_data, b"welcome");
        server.iwarp.destroy_id(listener, Instant::now()).unwrap();
        (id, out)
    }

    /// A connection within the host has the congestion control of the settings, or that of the system if the system does not have the named
    /// one.
    #[cfg(target_os = "linux")]
    #[test]
    fn connections_within_the_host_have_their_own_congestion_control() {
        let of_system = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap().tcp_congestion().unwrap();
        for (setting, expected) in
            [(Some("reno"), &b"reno"[..]), (Some("nonsense"), &of_system[..]), (None, &of_system[..])]
        {
            let config = TcpConfig { host_congestion: setting.map(Into::into), ..TcpConfig::default() };
            let mut client = TcpNode::on(TcpNet::with_config(config).unwrap(), IwarpConfig::default());
            let (_, out) = connect(&mut TcpNode::new(IwarpConfig::default()), &mut client);
            let socket =
                client.iwarp.endpoints.get(out.0).and_then(crate::iwarp::endpoint::CmEndpoint::socket).unwrap();
            let got = client.iwarp.hub.net.sockets.get(socket.0).unwrap().socket.tcp_congestion().unwrap();
            let got = got.split(|&byte| byte == 0).next().unwrap();
            assert_eq!(got, expected.split(|&byte| byte == 0).next().unwrap(), "{setting:?}");
        }
    }

    #[test]
    fn accepted_sockets_have_the_options_of_the_settings() {
        let (keepalive, user_timeout, size) = (Duration::from_secs(33), Duration::from_millis(4321), 50_000);
        let config = TcpConfig {
            keepalive: Some(keepalive),
            user_timeout: Some(user_timeout),
            send_buffer: Some(size),
            recv_buffer: Some(size),
            ..TcpConfig::default()
        };
        let mut server = TcpNode::on(TcpNet::with_config(config).unwrap(), IwarpConfig::default());
        let (id, _) = connect(&mut server, &mut TcpNode::new(IwarpConfig::default()));
        let socket = server.iwarp.endpoints.get(id.0).and_then(crate::iwarp::endpoint::CmEndpoint::socket).unwrap();
        let socket = &server.iwarp.hub.net.sockets.get(socket.0).unwrap().socket;
        assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), keepalive);
        #[cfg(target_os = "linux")]
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(user_timeout));
        // Linux doubles the size that a program sets.
        let sizes = [socket.send_buffer_size().unwrap(), socket.recv_buffer_size().unwrap()];
        assert!(sizes.iter().all(|&got| got >= size && got <= 2 * size), "{sizes:?}");
    }

    /// After each round, no socket of the connection is left. (The conformance suite also counts the descriptors of a process.)
    #[test]
    fn echoes_over_loopback() {
        for round in 0..20 {
            let mut server = TcpNode::new(IwarpConfig::default());
            let mut client = TcpNode::new(IwarpConfig::default());
            let (in_id, out_id) = connect(&mut server, &mut client);
            let (in_qp, out_qp) = (QpId(in_id.0), QpId(out_id.0));
            for echo in 0..100usize {
                let message: Vec<u8> = (0..(echo * 41) % SIZE).map(|i| (i + echo + round) as u8).collect();
                client.send(out_qp, &message);
                until(&mut server, &mut client, |server, _| server.done.iter().any(|wc| wc.opcode == WcOpcode::Recv));
                let wc = server.done.iter().copied().find(|wc| wc.opcode == WcOpcode::Recv).unwrap();
                assert_eq!((wc.status, wc.byte_len as usize), (WcStatus::Success, message.len()));
                let slot = wc.wr_id as usize;
                let back = server.memory.read(slot * SIZE, message.len());
                server.recv(in_qp, slot);
                server.send(in_qp, &back);
                until(&mut server, &mut client, |server, client| server.done.len() == 2 && client.done.len() == 2);
                let wc = client.done.iter().copied().find(|wc| wc.opcode == WcOpcode::Recv).unwrap();
                assert_eq!(client.memory.read(wc.wr_id as usize * SIZE, wc.byte_len as usize), message);
                client.recv(out_qp, wc.wr_id as usize);
                server.done.clear();
                client.done.clear();
            }
            client.iwarp.disconnect(out_id, Instant::now()).unwrap();
            until(&mut server, &mut client, |server, client| !server.events.is_empty() && !client.events.is_empty());
            assert!(matches!(client.events[0].kind, CmEventKind::Disconnected(DisconnectCause::Local)));
            assert!(matches!(server.events[0].kind, CmEventKind::Disconnected(DisconnectCause::Peer)));
            for side in [&mut server, &mut client] {
                side.turn();
                assert_eq!(side.done.len(), DEPTH as usize);
                assert!(side.done.iter().all(|wc| wc.status == WcStatus::Flushed));
            }
            server.iwarp.destroy_id(in_id, Instant::now()).unwrap();
            client.iwarp.destroy_id(out_id, Instant::now()).unwrap();
            until(&mut server, &mut client, |server, client| {
                server.iwarp.hub.net.sockets.is_empty() && client.iwarp.hub.net.sockets.is_empty()
            });
        }
    }

    /// A region is in a memory file. The bytes that a peer writes to the region are visible in another mapping of the file.
    #[test]
    fn a_peer_writes_into_a_memory_file() {
        use std::os::fd::AsFd;
        let (mut server, mut client) = (TcpNode::new(IwarpConfig::default()), TcpNode::new(IwarpConfig::default()));
        let (_, out_id) = connect(&mut server, &mut client);
        let (region, file) = Memory::new_file(8192).unwrap();
        let region = std::sync::Arc::new(region);
        let other = Memory::map_file(file.as_fd(), 0, 8192).unwrap();
        let access = rdma_transport::Access::REMOTE_WRITE | rdma_transport::Access::REMOTE_READ;
        let registered = server.iwarp.register(DeviceId(0), &region, 0..region.len(), access).unwrap();
        client.memory.write(0, b"into another process");
        let remote =
            rdma_transport::wr::RemoteAddress { address: region.as_ptr() as u64 + 100, key: registered.remote_key };
        let sges = SgeList::one(client.memory.sge(0, 20));
        let wr = SendWr { wr_id: 5, op: SendOp::Write(remote), sges, flags: SendFlags::SIGNALED };
        client.iwarp.post_send(QpId(out_id.0), &[wr]).unwrap();
        let mut seen = [0; 20];
        until(&mut server, &mut client, |_, _| other.copy_out(100, &mut seen) && &seen == b"into another process");
        server.iwarp.deregister(registered.id).unwrap();
    }

    #[test]
    fn a_request_moves_to_another_provider_or_is_refused() {
        for taken in [true, false] {
            let [mut door, mut server, mut client] = [(); 3].map(|()| TcpNode::new(IwarpConfig::default()));
            let listener = door.iwarp.listen("127.0.0.1:0".parse().unwrap(), &ListenParam::default()).unwrap();
            assert!(matches!(
                door.iwarp.handover().unwrap().detach(listener),
                Err(TransportError::InvalidState { call: "detach", .. })
            ));
            let address = door.iwarp.local_address(listener).unwrap();
            let out = client
                .iwarp
                .resolve(address, &PathOptions::default(), Instant::now() + Duration::from_secs(120))
                .unwrap();
            until(&mut door, &mut client, |_, client| !client.events.is_empty());
            let out_qp = client.qp(out);
            client.iwarp.connect(out, &ConnectParam::default()).unwrap();
            until(&mut door, &mut client, |door, _| !door.events.is_empty());
            let request_id = door.events.remove(0).id;
            let request = door.iwarp.handover().unwrap().detach(request_id).unwrap();
            assert!(matches!(door.iwarp.handover().unwrap().detach(request_id), Err(TransportError::Stale { .. })));
            if !taken {
                drop(request);
                until(&mut door, &mut client, |_, client| client.events.len() > 1);
                assert!(matches!(client.events[1].kind, CmEventKind::Rejected { .. }), "{:?}", client.events);
                continue;
            }
            // Another thread adopts the connect request.
            let mut server = std::thread::spawn(move || {
                let (id, device) = server.iwarp.handover().unwrap().attach(request, Instant::now()).unwrap();
                assert_eq!(device, DeviceId(0));
                server.qp(id);
                assert!(matches!(
                    server.iwarp.handover().unwrap().detach(id),
                    Err(TransportError::InvalidState { state: "with a queue pair", .. })
                ));
                server.iwarp.accept(id, &ConnectParam::default(), Instant::now()).unwrap();
                server
            })
            .join()
            .unwrap();
            drop(door);
            until(&mut server, &mut client, |server, client| !server.events.is_empty() && client.events.len() > 1);
            client.send(out_qp, b"hello");
            until(&mut server, &mut client, |server, _| server.done.iter().any(|wc| wc.opcode == WcOpcode::Recv));
        }
        let mut side = TcpNode::new(IwarpConfig::default());
        let foreign = side.iwarp.handover().unwrap().attach(Detached::new("another", ()), Instant::now());
        assert!(matches!(foreign, Err(TransportError::Unsupported { .. })));
    }

    /// The system would refuse these times for each new socket.
    #[test]
    fn a_keepalive_time_that_the_system_refuses_is_out_of_range() {
        let with = |keepalive| TcpNet::with_config(TcpConfig { keepalive: Some(keepalive), ..TcpConfig::default() });
        for wrong in [Duration::ZERO, Duration::from_millis(999), Duration::from_secs(MAX_KEEPIDLE + 1), Duration::MAX]
        {
            let error = with(wrong).expect_err("out of range");
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{wrong:?}");
        }
        for right in [Duration::from_secs(1), Duration::from_secs(MAX_KEEPIDLE)] {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            with(right).unwrap().tune(&socket).unwrap();
        }
    }

    /// `rto_max` has an effect only if `user_timeout` is set. A time outside of its range is an
    /// error, because the system would refuse it for each new socket.
    #[test]
    fn retransmissions_are_at_most_so_far_apart() {
        let probe = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        let usual = match sockets::longest_retransmission_timeout(probe.as_fd()) {
            Ok(usual) => usual,
            Err(error) => return println!("skipped: this kernel has no TCP_RTO_MAX_MS (Linux 6.15): {error}"),
        };
        let second = Duration::from_secs(1);
        let default = TcpConfig::default();
        let (most, limit) = (default.rto_max, default.user_timeout);
        for (rto_max, user_timeout, expected) in [
            (most, limit, Duration::from_millis(1_875)),
            (Some(7 * second), limit, 7 * second),
            (None, limit, usual),
            (Some(7 * second), None, usual),
        ] {
            let config = TcpConfig { rto_max, user_timeout, ..TcpConfig::default() };
            let mut server = TcpNode::on(TcpNet::with_config(config.clone()).unwrap(), IwarpConfig::default());
            let mut client = TcpNode::on(TcpNet::with_config(config).unwrap(), IwarpConfig::default());
            let (id, out) = connect(&mut server, &mut client);
            for (node, id) in [(&server, id.0), (&client, out.0)] {
                let socket = node.iwarp.endpoints.get(id).and_then(crate::iwarp::endpoint::CmEndpoint::socket).unwrap();
                let socket = &node.iwarp.hub.net.sockets.get(socket.0).unwrap().socket;
                let got = sockets::longest_retransmission_timeout(socket.as_fd()).unwrap();
                // The kernel rounds up to its clock, which has at least 100 ticks a second.
                assert!(got >= expected && got - expected < Duration::from_millis(10), "{got:?}: {expected:?}");
            }
        }
        for wrong in [Duration::from_millis(999), Duration::from_millis(120_001)] {
            assert!(TcpNet::with_config(TcpConfig { rto_max: Some(wrong), ..TcpConfig::default() }).is_err());
        }
    }

    #[test]
    fn a_user_timeout_that_the_system_refuses_is_out_of_range() {
        let with = |timeout| TcpNet::with_config(TcpConfig { user_timeout: Some(timeout), ..TcpConfig::default() });
        let longest = Duration::from_millis(MAX_USER_TIMEOUT);
        for wrong in [Duration::ZERO, Duration::from_micros(999), longest + Duration::from_millis(1), Duration::MAX] {
            let error = with(wrong).expect_err("out of range");
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{wrong:?}");
        }
        for right in [Duration::from_millis(1), longest] {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            with(right).unwrap().tune(&socket).unwrap();
        }
    }

    /// The system takes the size of a buffer as a signed number of 32 bits.
    #[test]
    fn a_buffer_size_that_the_system_cannot_take_is_out_of_range() {
        let with = |send_buffer, recv_buffer| {
            TcpNet::with_config(TcpConfig { send_buffer, recv_buffer, ..TcpConfig::default() })
        };
        let longest = i32::MAX as usize;
        for wrong in [longest + 1, usize::MAX] {
            for error in [with(Some(wrong), None), with(None, Some(wrong))] {
                assert_eq!(error.expect_err("out of range").kind(), io::ErrorKind::InvalidInput, "{wrong}");
            }
        }
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        with(Some(longest), Some(longest)).unwrap().tune(&socket).unwrap();
    }

    /// The send of one datagram id fails because the socket is full, and then that of another id
    /// succeeds before the edge is read. The socket must still raise a writable edge, because only
    /// this edge resumes the first id. It raises one edge, and not one after each sent packet.
    #[test]
    fn room_is_reported_after_a_refused_send_even_if_another_one_is_accepted() {
        let mut net = TcpNet::new().unwrap();
        let socket = net.open_packets("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut packets = Packets::new(64, 0);
        packets.push(net.local_address(socket).unwrap(), |_| 0..8);
        let reports_room = |net: &mut TcpNet| {
            let mut edges = Vec::new();
            net.poll(NetChannel::Completion, &mut edges).unwrap();
            edges.iter().any(|(of, ready)| *of == socket && ready.writable)
        };
        for _ in 0..3 {
            assert!(!reports_room(&mut net));
            // On the loopback interface, the system never refuses a send. So the test makes the
            // call that follows a refused send.
            net.await_room(socket).unwrap();
            assert_eq!(net.send_packets(socket, &packets, 0).unwrap(), 1);
            assert!(reports_room(&mut net), "a refused send waits for this edge");
            assert_eq!(net.send_packets(socket, &packets, 0).unwrap(), 1);
        }
        assert!(!reports_room(&mut net));
        net.await_room(socket).unwrap();
        net.close(socket, false);
        assert_eq!(net.awaiting_room, 0);
    }
}
