//! The interfaces of the host (`getifaddrs`(3), `netdevice`(7)).

use std::ffi::CStr;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use super::packets;

/// An interface of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its index.
    pub index: u32,
    /// The longest IP packet that it carries, octets.
    pub mtu: u32,
}

/// The interface that has an address; all addresses that lead nowhere but to this host are the loopback's. Any socket will do to ask with.
///
/// # Errors
/// `AddrNotAvailable` if no interface has the address; those of the system.
pub(crate) fn interface_of(socket: BorrowedFd<'_>, address: IpAddr) -> io::Result<Interface> {
    let mut list = ptr::null_mut();
    // SAFETY: room for the list, which is given back below.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let is = |own: IpAddr| {
        own == address || own.is_ipv4() && own.is_loopback() && address.is_ipv4() && address.is_loopback()
    };
    let mut found = Err(io::ErrorKind::AddrNotAvailable.into());
    let mut at = list;
    // SAFETY: the entries of the list live until it is given back; each has a name, and an address of the length of its family or none.
    unsafe {
        while let Some(entry) = at.as_ref() {
            if of(entry.ifa_addr).is_some_and(is) {
                found = details(socket, CStr::from_ptr(entry.ifa_name));
                break;
            }
            at = entry.ifa_next;
        }
        libc::freeifaddrs(list);
    }
    found
}

/// An address of IP.
///
/// # Safety
/// It is none, or an address of the length of its family.
unsafe fn of(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: by the promise of the caller.
    let len = match i32::from(unsafe { address.as_ref() }?.sa_family) {
        libc::AF_INET => size_of::<libc::sockaddr_in>(),
        libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
        _ => return None,
    };
    // SAFETY: all fields are numbers; as many octets as the family has fit.
    let storage = unsafe {
        let mut storage: libc::sockaddr_storage = std::mem::zeroed();
        ptr::copy_nonoverlapping(address.cast::<u8>(), (&raw mut storage).cast(), len);
        storage
    };
    packets::address(&storage).map(|address| address.ip())
}

fn details(socket: BorrowedFd<'_>, name: &CStr) -> io::Result<Interface> {
    // SAFETY: a string with an end.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    if index == 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all fields are numbers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, &from) in request.ifr_name.iter_mut().zip(name.to_bytes_with_nul()) {
        *to = from as libc::c_char;
    }
    // SAFETY: a request with a name, which the kernel may write in this call; the answer is a number.
    let mtu = unsafe {
        if libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU as _, &raw mut request) != 0 {
            return Err(io::Error::last_os_error());
        }
        request.ifr_ifru.ifru_mtu
    };
    Ok(Interface { index, mtu: u32::try_from(mtu).unwrap_or_default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    #[test]
    fn the_interface_of_an_address_is_found() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let of = |address: &str| interface_of(socket.as_fd(), address.parse().unwrap());
        let loopback = of("127.0.0.1").unwrap();
        assert_eq!((loopback.index, loopback.mtu >= 1280), (1, true));
        assert_eq!(of("127.7.7.7").unwrap(), loopback, "which no interface names");
        assert_eq!(of("203.0.113.77").unwrap_err().kind(), io::ErrorKind::AddrNotAvailable);
    }
}
