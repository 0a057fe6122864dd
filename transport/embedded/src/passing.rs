//! Packets that carry file descriptors between two processes of a host (`unix`(7)), and the user id of the peer
//! process.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use rdma_transport::sockets::set_option;

/// Sends one packet, and with it the descriptor `file` if that is `Some`. Never blocks, even if the peer does not
/// receive.
///
/// # Errors
/// The errors of `sendmsg`(2), including `WouldBlock`.
pub fn send_with_descriptor(socket: BorrowedFd<'_>, packet: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut vector = libc::iovec { iov_base: packet.as_ptr().cast_mut().cast(), iov_len: packet.len() };
    let mut message = message(&mut vector);
    let mut control = DescriptorControl([0; 64]);
    if let Some(file) = file {
        message.msg_control = (&raw mut control).cast();
        // SAFETY: the call only computes a number.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(4) } as _;
        // SAFETY: the control data of the header is aligned and has room for one descriptor.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4) as _;
            libc::CMSG_DATA(header).cast::<libc::c_int>().write_unaligned(file.as_raw_fd());
        }
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the kernel reads the packet and the control data, and writes no memory.
    moved(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) }).map(drop)
}

/// The buffer for the control data of a packet. It has room for more descriptors than a correct
/// peer sends. So the surplus descriptors of an incorrect peer are received, and can be closed.
#[repr(C, align(8))]
struct DescriptorControl([u8; 64]);

/// Receives one packet into `room`. Returns its length and the descriptor that was sent with it, if any. Closes all
/// further descriptors. A length of 0 means the end of the stream. Does not wait for a packet.
///
/// A hostile peer can make this call block: it can send descriptors of which each `close`(2)
/// blocks. A close of the returned descriptor may block, too. `docs/guide/same-host.md` has the
/// limits.
///
/// # Errors
/// The errors of `recvmsg`(2), including `WouldBlock`.
pub fn receive_with_descriptor(socket: BorrowedFd<'_>, room: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut vector = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    let mut message = message(&mut vector);
    let mut control = DescriptorControl([0; 64]);
    (message.msg_control, message.msg_controllen) = ((&raw mut control).cast(), size_of::<DescriptorControl>() as _);
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the header names buffers for a packet and for control data. The kernel writes to them only during the
    // call.
    let len = moved(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) })?;
    let mut first = None;
    // SAFETY: the kernel has filled in the header and the control data. The loop reads only complete descriptors. Each
    // of them is open in this process and has no other owner.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let data = libc::CMSG_DATA(header).cast::<libc::c_int>();
                let bytes = ((*header).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
                for index in 0..bytes / size_of::<libc::c_int>() {
                    let file = OwnedFd::from_raw_fd(data.add(index).read_unaligned());
                    match &first {
                        Some(_) if rdma_transport::planted("a-second-descriptor-stays-open") => std::mem::forget(file),
                        _ => _ = first.get_or_insert(file),
                    }
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    Ok((len, first))
}

/// Stops the reception of packets, so that the peer can send no more. Returns true if no packet is left in the socket.
/// Otherwise `close`(2) of the socket may block: the kernel then closes the descriptors that are attached to the packets
/// that are left.
///
/// # Errors
/// The errors of `shutdown`(2), `setsockopt`(2) and `recvmsg`(2).
pub(crate) fn stop_receiving(socket: BorrowedFd<'_>) -> io::Result<bool> {
    let fd = socket.as_raw_fd();
    // SAFETY: the call changes the state of a socket, and accesses no memory.
    if unsafe { libc::shutdown(fd, libc::SHUT_RD) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // An empty packet cannot be told from the end of the stream by its length. With `SO_PASSCRED`, each packet has
    // control data, for which there is no room below. So the flag `MSG_CTRUNC` shows that there is a packet.
    set_option(socket, libc::SOL_SOCKET, libc::SO_PASSCRED, 1)?;
    let mut byte = 0_u8;
    let mut vector = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let mut message = message(&mut vector);
    // SAFETY: the header names a buffer of one byte. The kernel writes to it only during the call.
    let len = moved(unsafe { libc::recvmsg(fd, &raw mut message, libc::MSG_DONTWAIT | libc::MSG_PEEK) })?;
    Ok(len == 0 && message.msg_flags & libc::MSG_CTRUNC == 0)
}

/// Returns two user ids. The first is that of the process at the other end of the socket, at the time when that process
/// connected or listened (`SO_PEERCRED`). The second is the effective user id of this process.
///
/// # Errors
/// The errors of `getsockopt`(2).
pub fn peer_user(socket: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    let mut credentials = MaybeUninit::<libc::ucred>::zeroed();
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let (fd, at) = (socket.as_raw_fd(), credentials.as_mut_ptr());
    // SAFETY: the pointer is to a buffer for the credentials, and `len` is its length.
    let rc = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, at.cast(), ptr::from_mut(&mut len)) };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all fields are numbers, which the kernel has written. `geteuid` only returns a number.
    unsafe { Ok((credentials.assume_init().uid, libc::geteuid())) }
}

fn message(vector: &mut libc::iovec) -> libc::msghdr {
    // SAFETY: a message header of zeros is valid: it has no address, no vector and no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (vector, 1);
    message
}

fn moved(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixDatagram, UnixStream};
    use std::time::Duration;

    /// The time limit for the end of a stream. A descriptor that leaks would otherwise make a test hang.
    const PATIENCE: Duration = Duration::from_secs(20);

    /// Returns true if the stream ends, because every descriptor of its other end is closed.
    fn ends(stream: &mut UnixStream) -> bool {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.read(&mut [0]).is_ok_and(|len| len == 0)
    }

    /// Returns true if the system closes the descriptors that do not fit the control data of the receiver. Linux does.
    /// The emulator qemu-user 7.2 keeps them open: it receives with more control data than the program gave it.
    fn surplus_is_closed() -> bool {
        let (a, b) = UnixDatagram::pair().unwrap();
        let (mut end, other) = UnixStream::pair().unwrap();
        send_all(&a, &[other.as_raw_fd(); 2]);
        let mut byte = 0_u8;
        let mut vector = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let mut message = message(&mut vector);
        let mut control = DescriptorControl([0; 64]);
        message.msg_control = (&raw mut control).cast();
        // SAFETY: the header names buffers for a packet and for one descriptor, to which the system writes only during
        // the call. A descriptor that it returns is open in this process, and has no other owner.
        unsafe {
            message.msg_controllen = libc::CMSG_LEN(4) as _;
            assert_eq!(libc::recvmsg(b.as_raw_fd(), &raw mut message, 0), 1);
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            if !header.is_null() && (*header).cmsg_len as usize >= libc::CMSG_LEN(4) as usize {
                drop(OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<libc::c_int>().read_unaligned()));
            }
        }
        drop(other);
        ends(&mut end)
    }

    #[test]
    fn a_packet_brings_one_descriptor_and_the_others_are_closed() {
        let (a, b) = UnixDatagram::pair().unwrap();
        let mut room = [0; 16];
        assert_eq!(receive_with_descriptor(b.as_fd(), &mut room).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        // `end` ends when every descriptor of `other` is closed. So the test can check that no descriptor leaks.
        let (mut end, other) = UnixStream::pair().unwrap();
        send_with_descriptor(a.as_fd(), b"with one", Some(other.as_fd())).unwrap();
        send_with_descriptor(a.as_fd(), b"without", None).unwrap();
        let (len, got) = receive_with_descriptor(b.as_fd(), &mut room).unwrap();
        assert_eq!((&room[..len], got.is_some()), (&b"with one"[..], true));
        let (len, none) = receive_with_descriptor(b.as_fd(), &mut room).unwrap();
        assert_eq!((&room[..len], none.is_none()), (&b"without"[..], true));
        // Send several descriptors with one packet, and also more than fit in the receiver's control data.
        let mut counts = vec![2, 10, 200];
        if !surplus_is_closed() {
            // `tests/cross.sh` sets the variable. Without an emulator, a leak of the system is a failure.
            assert!(std::env::var_os("EMULATED").is_some(), "the system keeps descriptors that do not fit");
            counts.pop();
            // Not `eprintln!`, whose text the test harness hides.
            let why = b"the emulator keeps descriptors that do not fit the control data: not tested with them\n";
            std::io::stderr().write_all(why).unwrap();
        }
        for count in counts {
            send_all(&a, &vec![other.as_raw_fd(); count]);
            assert!(receive_with_descriptor(b.as_fd(), &mut room).unwrap().1.is_some());
        }
        drop((other, got));
        assert!(ends(&mut end), "a descriptor leaked");
        let (peer, own) = peer_user(a.as_fd()).unwrap();
        assert_eq!(peer, own);
    }

    /// Sends a packet with several descriptors. A correct peer sends at most one.
    fn send_all(socket: &UnixDatagram, files: &[libc::c_int]) {
        let mut control = vec![0_u64; 2 + files.len().div_ceil(2)];
        let mut byte = 0_u8;
        let mut vector = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let mut message = message(&mut vector);
        message.msg_control = control.as_mut_ptr().cast();
        // SAFETY: the control data has room for the header and the descriptors.
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
