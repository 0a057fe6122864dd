//! Conventions that all calls into the libraries share: how a call reports failure, how an object carries a key for us, and the
//! form of addresses.

use std::ffi::{c_int, c_void};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::ptr;

use socket2::SockAddr;

use crate::error::{Error, Result};
use crate::place::{IbAddress, Place};
use crate::slab::Key;

/// The error behind a return code that is not 0. Most calls return -1 and set `errno`, some return the error itself,
/// and some drivers negate it.
pub(super) fn failure(rc: c_int) -> io::Error {
    if rc == -1 { io::Error::last_os_error() } else { io::Error::from_raw_os_error(rc.saturating_abs()) }
}

/// Turns a return code into a result: 0 is success.
pub(super) fn check(call: &'static str, rc: c_int) -> Result<()> {
    if rc == 0 { Ok(()) } else { Err(Error::io(call, failure(rc))) }
}

/// Turns a returned pointer into a result: null is failure.
pub(super) fn non_null<T>(call: &'static str, pointer: *mut T) -> Result<*mut T> {
    if pointer.is_null() { Err(Error::io(call, io::Error::last_os_error())) } else { Ok(pointer) }
}

/// A key as the `context` that the libraries hand back with their events.
pub(super) fn context_of(key: Key) -> *mut c_void {
    ptr::without_provenance_mut((key.generation() as usize) << 32 | key.slot() as usize)
}

/// The key in a `context`.
pub(super) fn key_of(context: *mut c_void) -> Key {
    let bits = context.addr();
    Key::new(bits as u32, (bits >> 32) as u32)
}

/// An address in the form that the libraries take.
pub(super) enum RawAddress {
    Ip(SockAddr),
    Ib(sockaddr_ib),
}

/// The address family of InfiniBand.
pub(super) const AF_IB: c_int = 27;

/// An address of InfiniBand (`<infiniband/ib.h>`). All numbers are in network byte order.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types, reason = "the name in C")]
pub(super) struct sockaddr_ib {
    family: u16,
    pkey: u16,
    flowinfo: u32,
    gid: [u8; 16],
    service: u64,
    service_mask: u64,
    scope: u64,
}

/// The services of reliable connections: the lowest 16 bits are the port (`RDMA_IB_IP_PS_TCP`).
const TCP_SERVICES: u64 = 0x0106_0000;

const _: () = assert!(size_of::<sockaddr_ib>() == 48 && std::mem::offset_of!(sockaddr_ib, service) == 24);

impl RawAddress {
    pub(super) fn new(address: SocketAddr) -> Self {
        Self::Ip(address.into())
    }

    pub(super) fn of(place: Place) -> Self {
        match place {
            Place::Ip(address) => Self::new(address),
            Place::Ib(IbAddress { gid, partition_key, port }) => Self::Ib(sockaddr_ib {
                family: AF_IB as u16,
                pkey: if partition_key == 0 { 0xffff } else { partition_key.to_be() },
                flowinfo: 0,
                gid: gid.octets(),
                service: (TCP_SERVICES | u64::from(port)).to_be(),
                // Port 0 is chosen by the system.
                service_mask: if port == 0 { (!0xffff_u64).to_be() } else { u64::MAX },
                scope: 0,
            }),
        }
    }

    /// A pointer for calls that read the address. None of them keeps or changes it.
    pub(super) fn as_ptr(&self) -> *mut libc::sockaddr {
        match self {
            Self::Ip(address) => address.as_ptr().cast::<libc::sockaddr>().cast_mut(),
            Self::Ib(address) => (&raw const *address).cast::<libc::sockaddr>().cast_mut(),
        }
    }
}

/// Reads an address as an IP address. One of InfiniBand becomes an IPv6 address: a GID has that form.
///
/// # Safety
/// As for [`place`].
pub(super) unsafe fn address(address: *const libc::sockaddr) -> Option<SocketAddr> {
    // SAFETY: the caller's promise.
    Some(match unsafe { place(address) }? {
        Place::Ip(address) => address,
        Place::Ib(IbAddress { gid, port, .. }) => SocketAddr::new(gid.into(), port),
    })
}

/// Reads an address.
///
/// # Safety
/// `address` points to an address that is as long as its family says.
pub(super) unsafe fn place(address: *const libc::sockaddr) -> Option<Place> {
    // SAFETY: the caller's promise.
    match c_int::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: the family says that this is in it.
            let v4 = unsafe { &*address.cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
            Some(Place::Ip(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into()))
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that this is in it.
            let v6 = unsafe { &*address.cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            let port = u16::from_be(v6.sin6_port);
            Some(Place::Ip(SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id).into()))
        }
        AF_IB => {
            // SAFETY: the family says that this is in it.
            let ib = unsafe { address.cast::<sockaddr_ib>().read_unaligned() };
            let (gid, partition_key) = (Ipv6Addr::from(ib.gid), u16::from_be(ib.pkey));
            Some(Place::Ib(IbAddress { gid, partition_key, port: u64::from_be(ib.service) as u16 }))
        }
        _ => None,
    }
}

/// The addresses of this host, with port 0.
pub(super) fn local_addresses() -> Vec<SocketAddr> {
    let mut list = ptr::null_mut();
    // SAFETY: a place for the result.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut at: *const libc::ifaddrs = list;
    while !at.is_null() {
        // SAFETY: an element of the list, which is whole until it is freed below.
        let (this, next) = unsafe { ((*at).ifa_addr, (*at).ifa_next) };
        if !this.is_null() {
            // SAFETY: the list holds whole addresses.
            found.extend(unsafe { address(this) });
        }
        at = next;
    }
    // SAFETY: given back once; what was in it is copied.
    unsafe { libc::freeifaddrs(list) }
    found
}

/// Makes a descriptor non-blocking.
pub(super) fn set_nonblocking(fd: c_int) -> Result<()> {
    // SAFETY: reads the flags of a descriptor, no memory.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: sets the flags of a descriptor, no memory.
    if flags < 0 || unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(Error::io("fcntl", io::Error::last_os_error()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sign_of_an_error_is_the_same_error() {
        for rc in [libc::ENOMEM, -libc::ENOMEM] {
            assert_eq!(failure(rc).raw_os_error(), Some(libc::ENOMEM));
        }
        assert!(check("x", 0).is_ok());
        assert!(matches!(check("x", libc::EINVAL), Err(Error::Io { call: "x", .. })));
    }

    #[test]
    fn a_key_survives_as_a_context() {
        for key in [Key::new(0, 1), Key::new(u32::MAX, u32::MAX), Key::new(7, 1 << 31)] {
            assert_eq!(key_of(context_of(key)), key);
        }
    }

    #[test]
    fn addresses_survive_the_crossing() {
        for text in ["192.0.2.1:4791", "[2001:db8::1]:7471", "[fe80::1%3]:1", "0.0.0.0:0"] {
            let wanted: SocketAddr = text.parse().unwrap();
            let raw = RawAddress::new(wanted);
            // SAFETY: a `SockAddr` holds a whole address.
            assert_eq!(unsafe { address(raw.as_ptr()) }, Some(wanted));
        }
    }

    #[test]
    fn an_address_of_infiniband_crosses_as_its_gid() {
        for (text, pkey) in [("ib:[fe80::2:c903:0:1]:7471", 0xffff), ("ib:[fe80::1]:9/8001", 0x8001)] {
            let place: Place = text.parse().unwrap();
            let raw = RawAddress::of(place);
            let RawAddress::Ib(ib) = &raw else { panic!() };
            assert_eq!((c_int::from(ib.family), u16::from_be(ib.pkey)), (AF_IB, pkey));
            let Place::Ib(wanted) = place else { panic!() };
            assert_eq!(u64::from_be(ib.service), 0x0106_0000 | u64::from(wanted.port));
            // SAFETY: a whole address.
            let read = unsafe { address(raw.as_ptr()) };
            assert_eq!(read, Some(SocketAddr::new(wanted.gid.into(), wanted.port)));
        }
    }

    #[test]
    fn this_host_has_addresses() {
        let found = local_addresses();
        assert!(found.iter().any(|address| address.ip().is_loopback()), "{found:?}");
        assert!(found.iter().all(|address| address.port() == 0));
    }
}
