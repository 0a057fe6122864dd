//! Calls on sockets that the standard library does not have, for providers: options whose value is
//! a number, and the interface that has an address.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::ptr;

mod interfaces;
mod options;

pub use interfaces::{Interface, interface_of};
pub use options::{limit_retransmission_timeout, longest_retransmission_timeout, set_option};

/// Returns an IP address as an IPv6 address: an IPv4-mapped one for IPv4.
#[must_use]
#[inline]
pub const fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

/// Converts a socket address from the system's format. Returns `None` for families other than IPv4
/// and IPv6.
#[must_use]
pub fn address(name: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let pointer = ptr::from_ref(name);
    match libc::c_int::from(name.ss_family) {
        libc::AF_INET => {
            // SAFETY: the storage is larger than `sockaddr_in`, aligned and initialised. Any bytes
            // are a valid value.
            let of = unsafe { &*pointer.cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(of.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddrV4::new(ip, u16::from_be(of.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the storage is larger than `sockaddr_in6`, aligned and initialised. Any bytes
            // are a valid value.
            let of = unsafe { &*pointer.cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(of.sin6_addr.s6_addr);
            Some(SocketAddrV6::new(ip, u16::from_be(of.sin6_port), 0, of.sin6_scope_id).into())
        }
        _ => None,
    }
}
