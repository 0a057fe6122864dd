//! Conventions of the C libraries: return codes, the `context` fields in which the provider stores keys, and the format of addresses.

use std::ffi::{c_int, c_void};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use socket2::SockAddr;

use rdma_transport::error::{Result, TransportError};
use rdma_transport::slab::Key;

/// Converts a return code that is not 0 into an error. Most calls return -1 and set `errno`. Some calls return the
/// error number itself, and with some drivers the negated error number.
pub(super) fn failure(rc: c_int) -> io::Error {
    if rc == -1 { io::Error::last_os_error() } else { io::Error::from_raw_os_error(rc.saturating_abs()) }
}

/// Converts a return code into a `Result`. The code 0 means success.
pub(super) fn check(call: &'static str, rc: c_int) -> Result<()> {
    if rc == 0 { Ok(()) } else { Err(TransportError::io(call, failure(rc))) }
}

/// Converts a returned pointer into a `Result`. Null means failure.
pub(super) fn non_null<T>(call: &'static str, pointer: *mut T) -> Result<*mut T> {
    if pointer.is_null() { Err(TransportError::io(call, io::Error::last_os_error())) } else { Ok(pointer) }
}

/// Calls `get`, and repeats the call if a signal has interrupted it. Returns true if `get` has
/// returned 0, so it has read an event. Returns false if no event is available.
pub(super) fn has_event(call: &'static str, mut get: impl FnMut() -> c_int) -> Result<bool> {
    while get() != 0 {
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::WouldBlock => return Ok(false),
            io::ErrorKind::Interrupted => {}
            _ => return Err(TransportError::io(call, error)),
        }
    }
    Ok(true)
}

/// Returns the `context` that carries a key. The provider stores it in a connection-manager id, and the library returns
/// it with the id's events.
pub(super) fn context_of(key: Key) -> *mut c_void {
    ptr::without_provenance_mut((key.generation() as usize) << 32 | key.slot() as usize)
}

/// Returns the key that a `context` carries.
pub(super) fn key_of(context: *mut c_void) -> Key {
    let bits = context.addr();
    Key::new(bits as u32, (bits >> 32) as u32)
}

/// The name of a queue pair, completion queue or shared receive queue. It is the queue's `context`, which the libraries return with events.
/// The name consists of the slot of the provider's entry and of a number that is unique in this process.
///
/// This provider, or another one of the process, may process the copy of an event after the queue
/// was destroyed. Because the name is unique, it never matches another queue, even if the other
/// queue has the same slot or address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueueName(usize);

/// The number of bits of the slot in a queue's name. They suffice, because the numbers of queue
/// pairs also have 24 bits, so no device has more than 2^24 queues.
const NAME_SLOT_BITS: u32 = 24;

impl QueueName {
    /// Makes a new name for the queue of an entry.
    pub(super) fn new(entry: Key) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed) << NAME_SLOT_BITS;
        Self(number | entry.slot() as usize & ((1 << NAME_SLOT_BITS) - 1))
    }

    /// Returns the slot in the name. In the provider that created the queue, the entry in this slot
    /// has the queue, unless the queue was destroyed.
    pub(super) const fn slot(self) -> u32 {
        self.0 as u32 & ((1 << NAME_SLOT_BITS) - 1)
    }

    pub(super) fn context(self) -> *mut c_void {
        ptr::without_provenance_mut(self.0)
    }

    /// Returns the name that a `context` carries.
    pub(super) fn of(context: *mut c_void) -> Self {
        Self(context.addr())
    }
}

/// A socket address in the format of the C libraries.
pub(super) struct RawAddress(SockAddr);

impl RawAddress {
    pub(super) fn new(address: SocketAddr) -> Self {
        Self(address.into())
    }

    /// Returns a pointer for calls that read the address. These calls do not keep the pointer or
    /// change the address.
    pub(super) fn as_ptr(&self) -> *mut libc::sockaddr {
        self.0.as_ptr().cast::<libc::sockaddr>().cast_mut()
    }
}

/// Converts a socket address. Returns `None` if it is not an IP address.
///
/// # Safety
/// `address` points to a socket address that has the length of its family.
pub(super) unsafe fn address(address: *const libc::sockaddr) -> Option<SocketAddr> {
    // SAFETY: the caller promises that the address has the length of its family.
    match c_int::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: the address has this family, so it has this format.
            let v4 = unsafe { &*address.cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
            Some(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the address has this family, so it has this format.
            let v6 = unsafe { &*address.cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            let port = u16::from_be(v6.sin6_port);
            Some(SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id).into())
        }
        _ => None,
    }
}

/// Returns all IP addresses of this host, with port 0.
pub(super) fn local_addresses() -> Vec<SocketAddr> {
    let mut list = ptr::null_mut();
    // SAFETY: the pointer is to memory for the result.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut at: *const libc::ifaddrs = list;
    while !at.is_null() {
        // SAFETY: `at` is an element of the list, and the list is not freed yet.
        let (this, next) = unsafe { ((*at).ifa_addr, (*at).ifa_next) };
        if !this.is_null() {
            // SAFETY: each address in the list has the length of its family.
            found.extend(unsafe { address(this) });
        }
        at = next;
    }
    // SAFETY: the list is freed once, after its addresses were copied.
    unsafe { libc::freeifaddrs(list) }
    found
}

/// Returns a local address as a socket address with port 0. A link-local address gets the scope of the network interface that has it: the
/// kernel refuses such an address without its scope.
pub(super) fn scoped(address: IpAddr) -> SocketAddr {
    let plain = SocketAddr::new(address, 0);
    match address {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => {
            local_addresses().into_iter().find(|own| own.ip() == address).unwrap_or(plain)
        }
        _ => plain,
    }
}

/// Returns the local address `address` of a connection to `peer` as a socket address with port 0.
/// Several network interfaces may have the same link-local address. So a link-local address gets
/// the scope of the peer's address, if the peer's address has one. This scope is the index of the
/// interface through which the peer is reached.
pub(super) fn scoped_for(address: IpAddr, peer: Option<SocketAddr>) -> SocketAddr {
    let mut own = scoped(address);
    if let (SocketAddr::V6(own), Some(SocketAddr::V6(peer))) = (&mut own, peer) {
        if own.ip().is_unicast_link_local() && peer.scope_id() != 0 {
            own.set_scope_id(peer.scope_id());
        }
    }
    own
}

/// Makes a descriptor non-blocking.
pub(super) fn set_nonblocking(fd: c_int) -> Result<()> {
    // SAFETY: the call reads the flags of a descriptor, and accesses no memory.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: the call sets the flags of a descriptor, and accesses no memory.
    if flags < 0 || unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(TransportError::io("fcntl", io::Error::last_os_error()));
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
        assert!(matches!(check("x", libc::EINVAL), Err(TransportError::Io { call: "x", .. })));
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
            // SAFETY: a `SockAddr` holds an address with the length of its family.
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
