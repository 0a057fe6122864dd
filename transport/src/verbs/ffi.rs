//! Conventions that all calls into the libraries share: how a call reports failure, how an object carries a key of the provider,
//! and the form of addresses.

use std::ffi::{c_int, c_void};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use socket2::SockAddr;

use crate::error::{Error, Result};
use crate::slab::Key;

/// Returns the error of a return code that is not 0. Most calls return -1 and set `errno`, some return the error itself,
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

/// A key as the `context` of a connection-manager id, which the library hands back with its events.
pub(super) fn context_of(key: Key) -> *mut c_void {
    ptr::without_provenance_mut((key.generation() as usize) << 32 | key.slot() as usize)
}

/// The key in a `context`.
pub(super) fn key_of(context: *mut c_void) -> Key {
    let bits = context.addr();
    Key::new(bits as u32, (bits >> 32) as u32)
}

/// The name of a queue pair, completion queue or shared receive queue, as the `context` that the libraries hand back with its
/// events: the slot of its entry, and a number that no other queue of this process has or had. A copy of an event may be looked
/// at when its object is gone, by another provider, too; no later object has the name, whatever its slot and address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueueName(usize);

/// Bits of the slot in the name of a queue. Devices have fewer queues, since a queue pair's number has as many bits.
const NAME_SLOT_BITS: u32 = 24;

impl QueueName {
    /// A new name, for the queue of an entry.
    pub(super) fn new(entry: Key) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed) << NAME_SLOT_BITS;
        Self(number | entry.slot() as usize & ((1 << NAME_SLOT_BITS) - 1))
    }

    /// The slot of the entry, if this is the name of a queue there.
    pub(super) const fn slot(self) -> u32 {
        self.0 as u32 & ((1 << NAME_SLOT_BITS) - 1)
    }

    pub(super) fn context(self) -> *mut c_void {
        ptr::without_provenance_mut(self.0)
    }

    /// The name in a `context`.
    pub(super) fn of(context: *mut c_void) -> Self {
        Self(context.addr())
    }
}

/// An address in the form of the libraries.
pub(super) struct RawAddress(SockAddr);

impl RawAddress {
    pub(super) fn new(address: SocketAddr) -> Self {
        Self(address.into())
    }

    /// A pointer for calls that read the address. None of them keeps or changes it.
    pub(super) fn as_ptr(&self) -> *mut libc::sockaddr {
        self.0.as_ptr().cast::<libc::sockaddr>().cast_mut()
    }
}

/// Reads an IP address; `None` for one of another family.
///
/// # Safety
/// `address` points to an address that is as long as its family says.
pub(super) unsafe fn address(address: *const libc::sockaddr) -> Option<SocketAddr> {
    // SAFETY: the caller's promise.
    match c_int::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: the family says that this is in it.
            let v4 = unsafe { &*address.cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
            Some(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that this is in it.
            let v6 = unsafe { &*address.cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            let port = u16::from_be(v6.sin6_port);
            Some(SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id).into())
        }
        _ => None,
    }
}

/// Returns the addresses of this host, with port 0.
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
    // SAFETY: freed once; what was in it is copied.
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
    fn names_of_queues_are_new_and_lead_to_their_slots() {
        let entry = Key::new(7, 1);
        let (first, second) = (QueueName::new(entry), QueueName::new(entry));
        assert_ne!(first, second, "of equal entries of two providers");
        assert_eq!((first.slot(), second.slot(), QueueName::of(first.context())), (7, 7, first));
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
    fn this_host_has_addresses() {
        let found = local_addresses();
        assert!(found.iter().any(|address| address.ip().is_loopback()), "{found:?}");
        assert!(found.iter().all(|address| address.port() == 0));
    }
}
