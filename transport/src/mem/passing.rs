//! Packets between two processes of a host that carry descriptors (`unix`(7)), and the user of the peer.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

/// Room for the control data of a packet. It holds more descriptors than a correct peer sends, so that the surplus is
/// seen and closed.
#[repr(C, align(8))]
struct DescriptorControl([u8; 64]);

fn message(vector: &mut libc::iovec) -> libc::msghdr {
    // SAFETY: zeros are a message header without address, vector and control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (vector, 1);
    message
}

fn moved(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Sends one packet, with a descriptor if `file` is set. Never blocks, whatever the peer does.
///
/// # Errors
/// Those of the system, including `WouldBlock`.
pub fn send_with_descriptor(socket: BorrowedFd<'_>, packet: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut vector = libc::iovec { iov_base: packet.as_ptr().cast_mut().cast(), iov_len: packet.len() };
    let mut message = message(&mut vector);
    let mut control = DescriptorControl([0; 64]);
    if let Some(file) = file {
        message.msg_control = (&raw mut control).cast();
        // SAFETY: the call computes a number.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(4) } as _;
        // SAFETY: the header has control data that is aligned and has room for one descriptor.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4) as _;
            libc::CMSG_DATA(header).cast::<libc::c_int>().write_unaligned(file.as_raw_fd());
        }
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the kernel only reads the packet and the control data.
    moved(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) }).map(drop)
}

/// Receives one packet into `room`, and the descriptor that was sent with it; closes all further descriptors. A length
/// of 0 is the end of the stream. Never blocks, whatever the peer does.
///
/// # Errors
/// Those of the system, including `WouldBlock`.
pub fn receive_with_descriptor(socket: BorrowedFd<'_>, room: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut vector = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    let mut message = message(&mut vector);
    let mut control = DescriptorControl([0; 64]);
    (message.msg_control, message.msg_controllen) = ((&raw mut control).cast(), size_of::<DescriptorControl>() as _);
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the header names room for a packet and control data, which the kernel writes only during the call.
    let len = moved(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) })?;
    let mut first = None;
    // SAFETY: the kernel has filled the header and the control data. Only whole descriptors are taken from there; each
    // is of this process and has no other owner.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let data = libc::CMSG_DATA(header).cast::<libc::c_int>();
                let bytes = ((*header).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
                for index in 0..bytes / size_of::<libc::c_int>() {
                    let file = OwnedFd::from_raw_fd(data.add(index).read_unaligned());
                    first.get_or_insert(file);
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    Ok((len, first))
}

/// Returns the user that the process at the other end of a socket had when it connected or listened (`SO_PEERCRED`),
/// and the effective user of this process.
///
/// # Errors
/// Those of the system.
pub fn peer_user(socket: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    let mut credentials = MaybeUninit::<libc::ucred>::zeroed();
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let (fd, at) = (socket.as_raw_fd(), credentials.as_mut_ptr());
    // SAFETY: the pointer is to room for the credentials, of the stated length.
    let rc = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, at.cast(), ptr::from_mut(&mut len)) };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all fields are numbers, which the kernel has written; `geteuid` returns a number.
    unsafe { Ok((credentials.assume_init().uid, libc::geteuid())) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixDatagram, UnixStream};

    #[test]
    fn a_packet_brings_one_descriptor_and_the_others_are_closed() {
        let (a, b) = UnixDatagram::pair().unwrap();
        let mut room = [0; 16];
        assert_eq!(receive_with_descriptor(b.as_fd(), &mut room).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        // The end of the stream is read when the last descriptor of its other end is closed.
        let (mut end, other) = UnixStream::pair().unwrap();
        send_with_descriptor(a.as_fd(), b"with one", Some(other.as_fd())).unwrap();
        send_with_descriptor(a.as_fd(), b"without", None).unwrap();
        let (len, got) = receive_with_descriptor(b.as_fd(), &mut room).unwrap();
        assert_eq!((&room[..len], got.is_some()), (&b"with one"[..], true));
        let (len, none) = receive_with_descriptor(b.as_fd(), &mut room).unwrap();
        assert_eq!((&room[..len], none.is_none()), (&b"without"[..], true));
        // Several descriptors, and more than fit in the control data.
        for count in [2, 10, 200] {
            send_all(&a, &vec![other.as_raw_fd(); count]);
            assert!(receive_with_descriptor(b.as_fd(), &mut room).unwrap().1.is_some());
        }
        drop((other, got));
        assert_eq!(end.read(&mut room).unwrap(), 0);
        let (peer, own) = peer_user(a.as_fd()).unwrap();
        assert_eq!(peer, own);
    }

    /// Sends a packet with several descriptors, as no correct peer does.
    fn send_all(socket: &UnixDatagram, files: &[libc::c_int]) {
        let mut control = vec![0_u64; 2 + files.len().div_ceil(2)];
        let mut byte = 0_u8;
        let mut vector = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let mut message = message(&mut vector);
        message.msg_control = control.as_mut_ptr().cast();
        // SAFETY: the control data has room for the header and the numbers.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(4 * files.len() as u32) as _;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4 * files.len() as u32) as _;
            libc::CMSG_DATA(header).copy_from_nonoverlapping(files.as_ptr().cast(), 4 * files.len());
            assert_eq!(libc::sendmsg(socket.as_raw_fd(), &raw const message, 0), 1);
        }
    }
}
