//! Options of sockets whose value is a number.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::time::Duration;

/// The socket option for the longest time between two retransmissions, in milliseconds
/// (`TCP_RTO_MAX_MS` of `linux/tcp.h`, since Linux 6.15).
const TCP_RTO_MAX_MS: libc::c_int = 44;

/// Sets an option of a socket.
///
/// # Errors
/// The errors of `setsockopt`(2).
pub fn set_option(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the pointer is to a number, and `len` is its length. The kernel only reads the
    // number.
    let rc = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, ptr::from_ref(&value).cast(), len) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Limits the time between two retransmissions of a TCP socket. Does nothing if the kernel does not
/// have this option.
///
/// # Errors
/// The errors of `setsockopt`(2).
pub fn limit_retransmission_timeout(socket: BorrowedFd<'_>, most: Duration) -> io::Result<()> {
    let most = most.as_millis().try_into().unwrap_or(libc::c_int::MAX);
    match set_option(socket, libc::IPPROTO_TCP, TCP_RTO_MAX_MS, most) {
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(()),
        result => result,
    }
}

/// Returns the longest time between two retransmissions of a TCP socket.
///
/// # Errors
/// The errors of `getsockopt`(2): the kernel does not have the option.
pub fn longest_retransmission_timeout(socket: BorrowedFd<'_>) -> io::Result<Duration> {
    let (mut value, mut len): (libc::c_int, _) = (0, size_of::<libc::c_int>() as libc::socklen_t);
    let (at, len) = (ptr::from_mut(&mut value).cast(), ptr::from_mut(&mut len));
    // SAFETY: the pointer is to a number, and `len` is its length.
    let rc = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, TCP_RTO_MAX_MS, at, len) };
    let milliseconds = u64::try_from(value).unwrap_or(0);
    if rc == 0 { Ok(Duration::from_millis(milliseconds)) } else { Err(io::Error::last_os_error()) }
}
