//! The Unix sockets with which two processes of one user on one host set up shared memory.

use std::ffi::OsStr;
use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

use socket2::{Domain, SockAddr, Socket, Type};

use super::wire::Crc32c;
use crate::passing;
use rdma_transport::sockets;

/// The backlog of the listener, as large as the system allows. A peer that finds the backlog full stays on TCP.
const BACKLOG: i32 = i32::MAX;
/// The user id that stands for all unknown users in a user namespace. Used if `/proc/sys/kernel/overflowuid` cannot be read.
const OVERFLOW: u32 = 65534;
/// The largest number of sockets that are kept open because closing them may block. At this limit,
/// no Unix connections are made or accepted until
/// [`LocalSockets::renew_local`](super::net::LocalSockets::renew_local) is called. The same limit
/// applies separately to the backlog of a listener that is closed.
const MAX_KEPT: usize = 8; // bound: foreign-sockets

/// The peers that are refused, because they belong to other users. Such a peer may send packets with descriptors before it is refused. When
/// the peer's socket is closed, the kernel also closes these descriptors, on the same thread. This blocks for some descriptors, such as a
/// TCP socket with unsent bytes and `SO_LINGER` (`socket`(7)). So a socket with unread packets stays open until the process ends.
#[derive(Debug, Default)]
pub(super) struct Strangers {
    kept: usize,
}

impl Strangers {
    /// Returns `ResourceBusy` if no further socket may be kept open. In that case, the caller must
    /// neither accept nor connect.
    fn check(&self) -> io::Result<()> {
        if self.kept < MAX_KEPT {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::ResourceBusy, format!("{MAX_KEPT} sockets of other users cannot be closed")))
    }

    /// Returns the socket if `check` accepts the peer. Otherwise refuses the peer: closes the
    /// socket, or keeps it open if closing it may block.
    fn admit(&mut self, socket: Socket, check: impl FnOnce(&Socket) -> io::Result<()>) -> io::Result<Socket> {
        let Err(error) = check(&socket) else { return Ok(socket) };
        if !passing::stop_receiving(socket.as_fd()).unwrap_or(false) {
            self.kept += 1;
            std::mem::forget(socket);
        }
        Err(error)
    }
}

/// Returns the identity of this host and of the network namespace of this thread. A part that the
/// system does not provide is omitted: the addresses and ports of a path still reveal most proxies.
pub(super) fn host() -> Vec<u8> {
    let mut host = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    if let Ok(space) = std::fs::metadata("/proc/thread-self/ns/net") {
        host.extend_from_slice(&space.dev().to_be_bytes());
        host.extend_from_slice(&space.ino().to_be_bytes());
    }
    host
}

/// Returns a hash of a connected TCP socket if both of its ends are on this host: their IP
/// addresses are equal, or both are loopback addresses. The hash is of `host` and of the addresses
/// and ports of both ends, in the same order on both sides. `docs/wire.md` describes it.
pub(super) fn path_within_host(socket: &Socket, host: &[u8]) -> Option<u32> {
    let end = |address: io::Result<SockAddr>| {
        let address = address.ok()?.as_socket()?;
        Some((address.ip().to_canonical(), address.port()))
    };
    let (ours, theirs) = (end(socket.local_addr())?, end(socket.peer_addr())?);
    if ours.0 != theirs.0 && !(ours.0.is_loopback() && theirs.0.is_loopback()) {
        return None;
    }
    let mut sum = Crc32c::new();
    sum.update(host);
    for (address, port) in [ours.min(theirs), ours.max(theirs)] {
        sum.update(&sockets::mapped(address).octets());
        sum.update(&port.to_be_bytes());
    }
    Some(sum.finish())
}

/// Returns the abstract address with this name. An abstract address begins with a zero byte and exists in one network namespace.
fn address(name: &[u8]) -> io::Result<SockAddr> {
    let mut path = vec![0];
    path.extend_from_slice(name);
    SockAddr::unix(OsStr::from_bytes(&path))
}

pub(super) fn listen(name: &[u8]) -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::SEQPACKET.nonblocking(), None)?;
    socket.bind(&address(name)?)?;
    socket.listen(BACKLOG)?;
    Ok(socket)
}

pub(super) fn accept(listener: &Socket, strangers: &mut Strangers) -> io::Result<Socket> {
    strangers.check()?;
    let (socket, _) = listener.accept()?;
    strangers.admit(socket, |socket| socket.set_nonblocking(true).and_then(|()| check_user(socket)))
}

pub(super) fn connect(name: &[u8], strangers: &mut Strangers) -> io::Result<Socket> {
    strangers.check()?;
    let socket = Socket::new(Domain::UNIX, Type::SEQPACKET.nonblocking(), None)?;
    socket.connect(&address(name)?)?;
    strangers.admit(socket, check_user)
}

/// Closes a listener and refuses the peers that wait in its backlog. If too many of them belong to
/// other users and have sent packets, the listener stays open until the process ends.
pub(super) fn close_listener(listener: Socket) {
    let mut strangers = Strangers::default();
    let ended = listener.shutdown(Shutdown::Both).is_ok();
    loop {
        match accept(&listener, &mut strangers).map_err(|error| error.kind()) {
            Ok(_) | Err(io::ErrorKind::PermissionDenied) => {}
            Err(io::ErrorKind::WouldBlock) if ended => return,
            Err(_) => return std::mem::forget(listener),
        }
    }
}

/// Returns an error if the peer belongs to another user, or if its user is unknown. In a user namespace, all unknown users have the same
/// id. So two processes with this id may belong to different users.
fn check_user(socket: &Socket) -> io::Result<()> {
    let (peer, own) = passing::peer_user(socket.as_fd())?;
    let overflow = std::fs::read_to_string("/proc/sys/kernel/overflowuid");
    let overflow = overflow.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(OVERFLOW);
    judge_user(peer, own, overflow).map_err(|why| io::Error::new(io::ErrorKind::PermissionDenied, why))
}

fn judge_user(peer: u32, own: u32, overflow: u32) -> Result<(), String> {
    if peer == overflow || own == overflow {
        return Err(format!("user {overflow} stands for all who are not known in a user namespace"));
    }
    if peer == own { Ok(()) } else { Err(format!("the peer is user {peer}, and this process user {own}")) }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::patience::until;

    #[test]
    fn only_the_same_user_that_is_known_is_met() {
        assert!(judge_user(0, 0, 65534).is_ok() && judge_user(1000, 1000, 65534).is_ok());
        for (peer, own) in [(0, 1000), (1000, 0), (65534, 65534), (65534, 0), (0, 65534)] {
            assert!(judge_user(peer, own, 65534).is_err(), "{peer} {own}");
        }
        assert!(judge_user(65534, 65534, 7).is_ok() && judge_user(7, 7, 7).is_err());
    }

    #[test]
    fn both_ends_of_a_path_have_its_hash_and_nobody_else() {
        let mut hashes = Vec::new();
        for (address, to) in [("127.0.0.1:0", "127.0.0.1"), ("[::]:0", "127.0.0.1"), ("[::1]:0", "::1")] {
            let listener = TcpListener::bind(address).unwrap();
            let port = listener.local_addr().unwrap().port();
            for _ in 0..2 {
                let near = Socket::from(TcpStream::connect((to, port)).unwrap());
                let far = Socket::from(listener.accept().unwrap().0);
                let hash = path_within_host(&near, &host()).unwrap();
                assert_eq!(path_within_host(&far, &host()), Some(hash), "{address}");
                assert_ne!(path_within_host(&far, b"another host"), Some(hash));
                hashes.push(hash);
            }
        }
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), 6);
        assert!(host().len() > 16 + 36, "{:?}", host());
    }

    #[test]
    fn a_name_is_taken_once_and_leads_to_its_listener() {
        let name = format!("rdma-test-{}", std::process::id());
        let (listener, mut strangers) = (listen(name.as_bytes()).unwrap(), Strangers::default());
        assert!(listen(name.as_bytes()).is_err());
        assert_eq!(accept(&listener, &mut strangers).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let near = connect(name.as_bytes(), &mut strangers).unwrap();
        let far = accept(&listener, &mut strangers).unwrap();
        passing::send_with_descriptor(near.as_fd(), b"hello", Some(listener.as_fd())).unwrap();
        let mut room = [0; 8];
        let (len, file) = passing::receive_with_descriptor(far.as_fd(), &mut room).unwrap();
        assert!(&room[..len] == b"hello" && file.is_some());
        drop((listener, file, near));
        assert_eq!(passing::receive_with_descriptor(far.as_fd(), &mut room).unwrap().0, 0);
        assert!(connect(name.as_bytes(), &mut strangers).is_err());
    }

    fn refuse(_: &Socket) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    /// Returns a TCP socket whose last `close`(2) blocks for an hour, and its peer, which receives nothing.
    fn lingering() -> (Socket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = Socket::from(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let (peer, _) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        while socket.send(&[0; 65536]).is_ok() {}
        socket.set_linger(Some(Duration::from_secs(3600))).unwrap();
        (socket, peer)
    }

    /// A refused peer has sent a descriptor whose `close`(2) blocks, so the peer's socket stays
    /// open. The socket of a refused peer that has sent nothing is closed.
    #[test]
    fn a_refused_peer_does_not_block() {
        let name = format!("rdma-refused-{}", std::process::id());
        let (listener, mut strangers) = (listen(name.as_bytes()).unwrap(), Strangers::default());
        let pair = || {
            let mut none = Strangers::default();
            let near = connect(name.as_bytes(), &mut none).unwrap();
            (near, accept(&listener, &mut none).unwrap())
        };
        let (near, far) = pair();
        assert_eq!(strangers.admit(far, refuse).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!((passing::receive_with_descriptor(near.as_fd(), &mut [0]).unwrap().0, strangers.kept), (0, 0));
        let ((near, far), (stream, peer)) = (pair(), lingering());
        passing::send_with_descriptor(near.as_fd(), &[], None).unwrap();
        passing::send_with_descriptor(near.as_fd(), &[], Some(stream.as_fd())).unwrap();
        drop(stream);
        let (sender, receiver) = mpsc::channel();
        let thread = thread::Builder::new().spawn(move || {
            let refused = strangers.admit(far, refuse).is_err();
            sender.send((refused, strangers.kept)).unwrap();
        });
        let thread = thread.unwrap();
        assert_eq!(until("the peer is refused", || receiver.try_recv().ok()), (true, 1));
        thread.join().unwrap();
        drop(peer);
    }

    #[test]
    fn no_peer_is_met_while_too_many_sockets_are_kept() {
        let name = format!("rdma-kept-{}", std::process::id());
        let (listener, mut none) = (listen(name.as_bytes()).unwrap(), Strangers::default());
        let near = connect(name.as_bytes(), &mut none).unwrap();
        let mut strangers = Strangers { kept: MAX_KEPT };
        let results = [accept(&listener, &mut strangers), connect(name.as_bytes(), &mut strangers)];
        assert!(results.iter().all(|result| result.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::ResourceBusy)));
        // A peer in the backlog finds that its connection has ended.
        close_listener(listener);
        assert_eq!(passing::receive_with_descriptor(near.as_fd(), &mut [0]).unwrap().0, 0);
        assert!(connect(name.as_bytes(), &mut none).is_err());
    }

    #[test]
    fn a_stream_within_the_host_is_told_by_its_addresses() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(path_within_host(&Socket::from(stream), &[]).is_some());
    }
}
