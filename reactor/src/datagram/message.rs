//! Received datagrams, and their senders.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Deref;

use rdma_transport::datagram::GRH_LEN;
use rdma_transport::wc::WorkCompletion;

/// The sender of a datagram, as far as the network reports it. The origins of all datagrams of one sender are equal. An
/// origin is a small value without a reference to the datagram, so a program may keep it, for instance as the key of a
/// map.
#[derive(Clone, Copy)]
pub struct Origin {
    pub(super) completion: WorkCompletion,
    pub(super) header: [u8; GRH_LEN],
}

impl Origin {
    /// Returns the number of the queue pair that sent the datagram.
    #[must_use]
    pub const fn qp_number(&self) -> u32 {
        self.completion.source.qp_number
    }

    /// Returns the address of the sender. On RoCE the address is an IP address. On InfiniBand the address is the GID,
    /// if the datagram has a route header. Returns `None` if the network does not report an address.
    #[must_use]
    pub fn address(&self) -> Option<IpAddr> {
        if !self.completion.source.has_route_header() {
            return None;
        }
        ip_of(&self.header)
    }

    fn key(&self) -> (Option<IpAddr>, u16, u32) {
        (self.address(), self.completion.source.lid, self.qp_number())
    }
}

impl PartialEq for Origin {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Origin {}

impl PartialOrd for Origin {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Origin {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key().cmp(&other.key())
    }
}

impl Hash for Origin {
    fn hash<S: Hasher>(&self, state: &mut S) {
        self.key().hash(state);
    }
}

impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address() {
            Some(address) => write!(f, "queue pair {:#x} at {address}", self.qp_number()),
            None => write!(f, "queue pair {:#x} at LID {}", self.qp_number(), self.completion.source.lid),
        }
    }
}

/// Returns true if the last 20 bytes of a route header are the IPv4 header of a UDP packet, with a correct checksum. RoCE
/// version 2 has no IP options.
fn is_ipv4(header: &[u8; GRH_LEN]) -> bool {
    const UDP: u8 = 17;
    let words = header[20..].chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    header[20] == 0x45 && header[29] == UDP && words.sum::<u32>() % 0xffff == 0
}

/// Reads the sender's address from a route header, which contains an IPv6 header, or an IPv4 header in its last 20
/// bytes (InfiniBand annex A17). Returns `None` if the route header contains neither of the two.
///
/// The 20 bytes in front of an IPv4 header are undefined, and may look like the beginning of an
/// IPv6 header. So a route header that begins like an IPv6 header contains an IPv6 header only if
/// its last 20 bytes are no IPv4 header (rdma-core, `get_grh_header_version`).
fn ip_of(header: &[u8; GRH_LEN]) -> Option<IpAddr> {
    if header[0] >> 4 == 6 && !is_ipv4(header) {
        let source: [u8; 16] = header[8..24].try_into().ok()?;
        return Some(IpAddr::V6(Ipv6Addr::from(source)));
    }
    let source: [u8; 4] = header[32..36].try_into().ok()?;
    (header[20] >> 4 == 4).then(|| IpAddr::V4(Ipv4Addr::from(source)))
}

/// A received datagram, in the registered buffer in which it arrived. A `Datagram` dereferences to the payload. The
/// buffer is posted as a receive again after the callback has returned.
pub struct Datagram<'a> {
    origin: Origin,
    payload: &'a [u8],
}

impl<'a> Datagram<'a> {
    /// Returns the datagram that a completed receive contains; `None` if `bytes` is too short for a route header.
    pub(crate) fn of(completion: &WorkCompletion, bytes: &'a [u8]) -> Option<Self> {
        let (header, payload) = bytes.split_first_chunk()?;
        Some(Self { origin: Origin { completion: *completion, header: *header }, payload })
    }

    /// Returns the origin of the datagram.
    #[must_use]
    pub const fn origin(&self) -> Origin {
        self.origin
    }

    /// Returns the immediate data: 32 bits that were sent together with the payload. Returns `None` if the datagram has
    /// no immediate data.
    #[must_use]
    pub const fn immediate(&self) -> Option<u32> {
        self.origin.completion.immediate
    }
}

impl Deref for Datagram<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.payload
    }
}

impl fmt::Debug for Datagram<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Datagram({} bytes from {})", self.payload.len(), self.origin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_ip_header_name_their_sender() {
        assert_eq!(ip_of(&[0; GRH_LEN]), None, "neither");
        let mut header = [0; GRH_LEN];
        header[20] = 0x45;
        header[32..36].copy_from_slice(&[10, 77, 2, 1]);
        assert_eq!(ip_of(&header), Some("10.77.2.1".parse().unwrap()));
        header = [0; GRH_LEN];
        header[0] = 0x60;
        header[8..24].copy_from_slice(&"fd77:2::1".parse::<Ipv6Addr>().unwrap().octets());
        assert_eq!(ip_of(&header), Some("fd77:2::1".parse().unwrap()));
    }

    /// A device may leave any bytes in front of an IPv4 header. They must not change the address of the sender, because
    /// the address is a part of the key by which a program knows the sender.
    #[test]
    fn bytes_in_front_of_an_ipv4_header_are_not_read() {
        // An IPv4 header of a UDP packet from 10.77.2.1 to 10.77.2.2, with its checksum in bytes 10 and 11.
        let ipv4 = [0x45, 0, 0, 0x54, 0x12, 0x34, 0x40, 0, 64, 17, 0x0f, 0xc9, 10, 77, 2, 1, 10, 77, 2, 2];
        let mut header = [0; GRH_LEN];
        header[20..].copy_from_slice(&ipv4);
        let sender = Some("10.77.2.1".parse().unwrap());
        assert!(is_ipv4(&header));
        assert_eq!(ip_of(&header), sender);
        header[..20].fill(0xa5);
        header[0] = 0x6f;
        assert_eq!(ip_of(&header), sender);
        // The same bytes with a wrong checksum are a part of the addresses of an IPv6 header.
        header[31] ^= 1;
        assert!(ip_of(&header).is_some_and(|address| address.is_ipv6()));
    }
}
