//! [`ExchangeStream`]: the stream over which a connection by out-of-band exchange is set up. [`ExchangeListener`]: the socket that accepts
//! such streams.

use std::io::{self, Read};
use std::net::{Ipv6Addr, Shutdown, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use socket2::{Domain, Protocol, SockAddr, Socket, TcpKeepalive, Type};

use super::gid::PortGid;
use crate::exchange::conversation::{Conversation, ConversationEvent};
use crate::exchange::message::{Endpoint, MAX_MESSAGE};
use rdma_transport::cm::{ExchangeOptions, ListenParam, ReadDepth};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::newcomers::Ticket;
use rdma_transport::slab::Key;
use rdma_transport::sockets;

/// The time without data after which TCP probes the peer, and the interval of its three probes.
const KEEPALIVE: [Duration; 2] = [Duration::from_secs(15), Duration::from_secs(5)];
/// The time after which TCP ends a stream whose data the peer has not acknowledged (`TCP_USER_TIMEOUT`).
const USER_TIMEOUT: Duration = Duration::from_secs(20);

/// A listening socket for connections by out-of-band exchange.
#[derive(Debug)]
pub(super) struct ExchangeListener {
    pub(super) socket: Socket,
    pub(super) options: ListenParam,
    pub(super) exchange: ExchangeOptions,
    /// The number of connect requests that the program has not answered yet.
    pub(super) waiting: u32,
    /// The end of the current pause; `None` if the listener accepts streams. The listener pauses when the system has no
    /// descriptor left.
    pub(super) deadline: Option<Instant>,
}

/// The stream of a connection by out-of-band exchange, and the state of the connection's setup.
#[derive(Debug)]
pub(super) struct ExchangeStream {
    /// The socket. `None` on the active side before it connects, and after the stream has ended.
    pub(super) socket: Option<Socket>,
    pub(super) conversation: Conversation,
    /// The address to which the active side connects. `None` if the program has supplied the stream.
    pub(super) to: Option<SocketAddr>,
    /// The local address that the program has chosen for the stream, with TCP port 0; `None` if the
    /// program has chosen none.
    pub(super) from: Option<SocketAddr>,
    pub(super) port_gid: Option<PortGid>,
    pub(super) type_of_service: Option<u8>,
    pub(super) ack_timeout: Option<u8>,
    /// The attributes of the local queue pair. `None` before they are sent to the peer.
    pub(super) own: Option<Endpoint>,
    pub(super) peer: Option<Endpoint>,
    /// The deadline for the peer's next message.
    pub(super) deadline: Option<Instant>,
    /// The handle in the table of peers that have not sent a request; `None` after the request.
    pub(super) ticket: Option<Ticket>,
    /// The listener that has accepted the stream. `None` after the program has answered the request, and on the active
    /// side.
    pub(super) listener: Option<Key>,
}

/// The result of reading a stream.
#[derive(Debug)]
pub(super) enum StreamRead {
    Event(ConversationEvent),
    /// The stream has ended, for this reason.
    End(io::Error),
    /// No complete message is available.
    WouldBlock,
}

/// Returns the token of an id in the provider's epoll set. The token contains the key's generation, which is at least 1. So it differs from
/// the fixed tokens `CM`, `WAKE` and `ASYNC` and from the tokens of devices, which contain 0 in place of the generation.
pub(super) const fn token(key: Key) -> Token {
    Token((key.generation() as usize) << 32 | key.slot() as usize)
}

/// Returns the key of the id that has this token. Returns `None` for the fixed tokens and for the tokens of devices.
pub(super) const fn key_of(token: Token) -> Option<Key> {
    let key = Key::new(token.0 as u32, (token.0 >> 32) as u32);
    if key.generation() == 0 { None } else { Some(key) }
}

fn tune(socket: &Socket) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    let [silence, between] = KEEPALIVE;
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(silence).with_interval(between).with_retries(3))?;
    #[cfg(target_os = "linux")]
    {
        socket.set_tcp_user_timeout(Some(USER_TIMEOUT))?;
        sockets::limit_retransmission_timeout(socket.as_fd(), USER_TIMEOUT / 8)?;
    }
    Ok(())
}

fn address(of: io::Result<SockAddr>) -> Option<SocketAddr> {
    of.ok()?.as_socket()
}

impl ExchangeListener {
    /// Opens a listening socket, which is non-blocking.
    pub(super) fn open(address: SocketAddr, options: &ListenParam, exchange: &ExchangeOptions) -> io::Result<Self> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        if let SocketAddr::V6(v6) = address {
            // A listener on the unspecified IPv6 address also accepts IPv4, regardless of the system's default.
            let own_kind = *v6.ip() != Ipv6Addr::UNSPECIFIED;
            socket.set_only_v6(options.ipv6_only.unwrap_or(own_kind))?;
        }
        socket.bind(&SockAddr::from(address))?;
        socket.listen(i32::try_from(options.backlog.max(1)).unwrap_or(i32::MAX))?;
        Ok(Self { socket, options: options.clone(), exchange: exchange.clone(), waiting: 0, deadline: None })
    }

    pub(super) fn address(&self) -> Option<SocketAddr> {
        address(self.socket.local_addr())
    }

    /// Accepts the next stream, and makes it non-blocking.
    pub(super) fn accept(&self) -> io::Result<Socket> {
        let (socket, _) = self.socket.accept()?;
        socket.set_nonblocking(true)?;
        tune(&socket)?;
        Ok(socket)
    }

    pub(super) fn watch(&self, registry: &Registry, key: Key) -> io::Result<()> {
        registry.register(&mut SourceFd(&self.socket.as_raw_fd()), token(key), Interest::READABLE)
    }
}

/// Makes a non-blocking stream of a descriptor that the program has supplied. Returns an error if the descriptor is not
/// a stream socket.
pub(super) fn adopt(stream: OwnedFd) -> Result<Socket> {
    let socket = Socket::from(stream);
    let no_stream = |source| TransportError::io("adopting a stream for an exchange", source);
    match socket.r#type() {
        Ok(Type::STREAM) => {}
        Ok(_) => return Err(no_stream(io::ErrorKind::InvalidInput.into())),
        Err(error) => return Err(no_stream(error)),
    }
    socket.set_nonblocking(true).map_err(no_stream)?;
    if let Err(error) = tune(&socket) {
        // The stream is no TCP connection, so it needs no keepalive: its peer is on this host, or the program monitors
        // it.
        log::debug!("a stream for an exchange has no keepalive: {error}");
    }
    Ok(socket)
}

impl ExchangeStream {
    pub(super) fn active(to: Option<SocketAddr>, socket: Option<Socket>) -> Self {
        Self {
            socket,
            conversation: Conversation::active(),
            to,
            from: None,
            port_gid: None,
            type_of_service: None,
            ack_timeout: None,
            own: None,
            peer: None,
            deadline: None,
            ticket: None,
            listener: None,
        }
    }

    pub(super) fn passive(socket: Socket, listener: Key) -> Self {
        let mut stream = Self::active(None, Some(socket));
        (stream.conversation, stream.listener) = (Conversation::passive(), Some(listener));
        stream
    }

    pub(super) fn local_address(&self) -> Option<SocketAddr> {
        address(self.socket.as_ref()?.local_addr())
    }

    pub(super) fn peer_address(&self) -> Option<SocketAddr> {
        address(self.socket.as_ref()?.peer_addr())
    }

    /// Connects the stream, if the program has not supplied one, and registers it in the epoll set.
    pub(super) fn open(&mut self, registry: &Registry, key: Key) -> io::Result<()> {
        if let Some(to) = self.to.filter(|_| self.socket.is_none()) {
            let socket = Socket::new(Domain::for_address(to), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
            tune(&socket)?;
            if let Some(from) = self.from {
                socket.bind(&SockAddr::from(from))?;
            }
            match socket.connect(&SockAddr::from(to)) {
                Ok(()) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
                Err(error) => return Err(error),
            }
            self.socket = Some(socket);
        }
        self.watch(registry, key)
    }

    pub(super) fn watch(&self, registry: &Registry, key: Key) -> io::Result<()> {
        let Some(socket) = &self.socket else { return Ok(()) };
        registry.register(&mut SourceFd(&socket.as_raw_fd()), token(key), Interest::READABLE | Interest::WRITABLE)
    }

    /// Deregisters the stream from the epoll set. Closing the socket does not suffice, because the program may have
    /// another descriptor of the socket.
    pub(super) fn forget(&self, registry: &Registry) {
        let Some(socket) = &self.socket else { return };
        if let Err(error) = registry.deregister(&mut SourceFd(&socket.as_raw_fd())) {
            log::trace!("a stream that was not watched: {error}");
        }
    }

    /// Sends pending output, until the stream accepts no more.
    ///
    /// # Errors
    /// The stream has failed, or could not be connected.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        let Some(socket) = &self.socket else { return Ok(()) };
        while !self.conversation.unsent().is_empty() {
            match socket.send_with_flags(self.conversation.unsent(), libc::MSG_NOSIGNAL) {
                Ok(octets) => self.conversation.sent(octets),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads the peer's next message, and no bytes after this message.
    pub(super) fn read_message(&mut self) -> StreamRead {
        let Some(socket) = &self.socket else { return StreamRead::WouldBlock };
        let mut room = [0; MAX_MESSAGE];
        loop {
            let wanted = self.conversation.wanted().min(MAX_MESSAGE);
            if wanted == 0 {
                return StreamRead::WouldBlock;
            }
            match (&*socket).read(&mut room[..wanted]) {
                Ok(0) => return StreamRead::End(io::Error::from_raw_os_error(libc::ECONNRESET)),
                Ok(octets) => {
                    if let Some(event) = self.conversation.received(&room[..octets]) {
                        return StreamRead::Event(event);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return StreamRead::WouldBlock,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return StreamRead::End(error),
            }
        }
    }

    /// Sends the message Goodbye, and closes the stream.
    pub(super) fn close(&mut self, registry: &Registry) {
        self.conversation.disconnect();
        if let Err(error) = self.flush() {
            log::trace!("Goodbye cannot be sent: {error}");
        }
        self.forget(registry);
        self.shut_down();
    }

    /// Closes the socket. Ends the stream even if the program still has another descriptor of the socket.
    pub(super) fn shut_down(&mut self) {
        if let Some(socket) = self.socket.take() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// A connect request by out-of-band exchange that is detached from its provider. Dropping it closes the stream to the
/// peer.
#[derive(Debug)]
pub(super) struct DetachedStream {
    pub(super) stream: Option<Box<ExchangeStream>>,
    pub(super) peer: SocketAddr,
    pub(super) read_depth: ReadDepth,
}

impl Drop for DetachedStream {
    fn drop(&mut self) {
        if let Some(stream) = &mut self.stream {
            stream.conversation.disconnect();
            let _ = stream.flush();
            stream.shut_down();
        }
    }
}
