//! The network interfaces of the host (`getifaddrs`(3), `netdevice`(7)).

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

/// A network interface of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The index of the interface.
    pub index: u32,
    /// The length of the longest IP packet that the interface can send, in bytes.
    pub mtu: u32,
}

/// Returns the interface that has an address. For any IPv4 loopback address (127.0.0.0/8), returns the loopback
/// interface, even if the system lists that interface only with a different loopback address. For an IPv6 link-local
/// address with a scope, returns the interface with that index: other interfaces may have the same address. `socket` may
/// be any socket: it is used only for an `ioctl`.
///
/// # Errors
/// `AddrNotAvailable` if no interface has the address; otherwise the system's error.
pub fn interface_of(socket: BorrowedFd<'_>, address: SocketAddr) -> io::Result<Interface> {
    let mut list = ptr::null_mut();
    // SAFETY: the call allocates a list and writes its address to `list`. This function frees the list once.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Err(io::ErrorKind::AddrNotAvailable.into());
    let mut at = list;
    // SAFETY: the entries are valid until the list is freed. Each entry has a name. The address of an entry is null, or
    // has the length that its family requires.
    unsafe {
        while let Some(entry) = at.as_ref() {
            let index = || libc::if_nametoindex(entry.ifa_name);
            if of(entry.ifa_addr).is_some_and(|own| is_at(own, index, address)) {
                found = details(socket, CStr::from_ptr(entry.ifa_name));
                break;
            }
            at = entry.ifa_next;
        }
        libc::freeifaddrs(list);
    }
    found
}

/// Returns true if `own`, an address of an interface, is the address `address`. Any two IPv4
/// loopback addresses count as equal. `index` returns the index of the interface: the scope of a
/// link-local `address` must be this index.
fn is_at(own: IpAddr, index: impl FnOnce() -> u32, address: SocketAddr) -> bool {
    match (own, address) {
        (IpAddr::V4(own), SocketAddr::V4(v4)) => own == *v4.ip() || own.is_loopback() && v4.ip().is_loopback(),
        (IpAddr::V6(own), SocketAddr::V6(v6)) => {
            let has_scope = own.is_unicast_link_local() && v6.scope_id() != 0;
            own == *v6.ip() && (!has_scope || index() == v6.scope_id())
        }
        _ => false,
    }
}

/// Returns the IP address in a socket address. Returns `None` for an address of another family and for a null pointer.
///
/// # Safety
/// The pointer is null, or points to a socket address that has the length of its family.
unsafe fn of(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: the caller promises that the pointer is null or valid.
    let len = match i32::from(unsafe { address.as_ref() }?.sa_family) {
        libc::AF_INET => size_of::<libc::sockaddr_in>(),
        libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
        _ => return None,
    };
    // SAFETY: all fields are numbers, for which zeros are valid. The storage has room for an address of either family.
    let storage = unsafe {
        let mut storage: libc::sockaddr_storage = std::mem::zeroed();
        ptr::copy_nonoverlapping(address.cast::<u8>(), (&raw mut storage).cast(), len);
        storage
    };
    super::address(&storage).map(|address| address.ip())
}

fn details(socket: BorrowedFd<'_>, name: &CStr) -> io::Result<Interface> {
    // SAFETY: the name is a NUL-terminated string.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    if index == 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all fields are numbers, for which zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, &from) in request.ifr_name.iter_mut().zip(name.to_bytes_with_nul()) {
        *to = from as libc::c_char;
    }
    // SAFETY: the kernel writes to the request only during the call. After this request, `ifru_mtu` is the valid field
    // of the union.
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
        let of = |address: &str| interface_of(socket.as_fd(), SocketAddr::new(address.parse().unwrap(), 0));
        let loopback = of("127.0.0.1").unwrap();
        assert_eq!((loopback.index, loopback.mtu >= 1280), (1, true));
        assert_eq!(of("127.7.7.7").unwrap(), loopback, "a loopback address that no interface names");
        assert_eq!(of("203.0.113.77").unwrap_err().kind(), io::ErrorKind::AddrNotAvailable);
    }

    /// Several interfaces may have the same link-local address. Other addresses have no scope.
    #[test]
    fn the_scope_of_a_link_local_address_is_the_index_of_its_interface() {
        for (own, address, expected) in [
            ("fe80::1", "[fe80::1%3]:7", [true, false]),
            ("fe80::1", "[fe80::1%4]:7", [false, true]),
            ("fe80::1", "[fe80::1]:7", [true, true]),
            ("fe80::2", "[fe80::1%3]:7", [false, false]),
            ("fd00::1", "[fd00::1%3]:7", [true, true]),
            ("127.0.0.1", "[::1]:7", [false, false]),
        ] {
            let found = [3, 4].map(|index| is_at(own.parse().unwrap(), || index, address.parse().unwrap()));
            assert_eq!(found, expected, "{own} {address}");
        }
    }
}
