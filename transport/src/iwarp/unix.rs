//! The Unix sockets with which two processes of one user on one host set up shared memory.

use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;

use socket2::{Domain, SockAddr, Socket, Type};

use crate::mem;

/// The backlog of the listener, as large as the system allows. A peer that finds the backlog full stays on TCP.
const BACKLOG: i32 = i32::MAX;
/// The user id that stands for all unknown users in a user namespace. Used if `/proc/sys/kernel/overflowuid` cannot be read.
const OVERFLOW: u32 = 65534;

/// Returns true if both ends of a connected TCP socket are on this host: their IP addresses are equal, or both are loopback addresses.
pub(super) fn is_within_host(socket: &Socket) -> bool {
    let address = |address: io::Result<SockAddr>| Some(address.ok()?.as_socket()?.ip().to_canonical());
    let ends = address(socket.local_addr()).zip(address(socket.peer_addr()));
    ends.is_some_and(|(ours, theirs)| ours == theirs || (ours.is_loopback() && theirs.is_loopback()))
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

pub(super) fn accept(listener: &Socket) -> io::Result<Socket> {
    let (socket, _) = listener.accept()?;
    socket.set_nonblocking(true)?;
    check_user(&socket)?;
    Ok(socket)
}

pub(super) fn connect(name: &[u8]) -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::SEQPACKET.nonblocking(), None)?;
    socket.connect(&address(name)?)?;
    check_user(&socket)?;
    Ok(socket)
}

/// Returns an error if the peer belongs to another user, or if its user is unknown. In a user namespace, all unknown users have the same
/// id. So two processes with this id may belong to different users.
fn check_user(socket: &Socket) -> io::Result<()> {
    let (peer, own) = mem::peer_user(socket.as_fd())?;
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
    use super::*;

    #[test]
    fn only_the_same_user_that_is_known_is_met() {
        assert!(judge_user(0, 0, 65534).is_ok() && judge_user(1000, 1000, 65534).is_ok());
        for (peer, own) in [(0, 1000), (1000, 0), (65534, 65534), (65534, 0), (0, 65534)] {
            assert!(judge_user(peer, own, 65534).is_err(), "{peer} {own}");
        }
        assert!(judge_user(65534, 65534, 7).is_ok() && judge_user(7, 7, 7).is_err());
    }

    #[test]
    fn a_name_is_taken_once_and_leads_to_its_listener() {
        let name = format!("rdma-test-{}", std::process::id());
        let listener = listen(name.as_bytes()).unwrap();
        assert!(listen(name.as_bytes()).is_err());
        assert_eq!(accept(&listener).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let (near, far) = (connect(name.as_bytes()).unwrap(), accept(&listener).unwrap());
        mem::send_with_descriptor(near.as_fd(), b"hello", Some(listener.as_fd())).unwrap();
        let mut room = [0; 8];
        let (len, file) = mem::receive_with_descriptor(far.as_fd(), &mut room).unwrap();
        assert!(&room[..len] == b"hello" && file.is_some());
        drop((listener, file, near));
        assert_eq!(mem::receive_with_descriptor(far.as_fd(), &mut room).unwrap().0, 0);
        assert!(connect(name.as_bytes()).is_err());
    }

    #[test]
    fn a_stream_within_the_host_is_told_by_its_addresses() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(is_within_host(&Socket::from(stream)));
    }
}
