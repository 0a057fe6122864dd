//! The IP and UDP headers of a datagram. A socket neither accepts nor returns these headers, but they are needed: the ICRC covers them, and
//! a receiver gets the IP header as its route header (GRH).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;

use super::icrc;
use super::packet::{MAX_LEN, VARIANT};
use rdma_transport::datagram::GRH_LEN;
use rdma_transport::sockets::mapped;

/// The number of octets that are kept free in front of a packet in its buffer. These octets are needed to compute the ICRC, which also
/// covers octets that are not in the packet: 8 octets of ones in place of an InfiniBand header, an IPv6 header and a UDP header.
pub(crate) const HEADROOM: usize = 8 + 40 + 8;
/// The length in octets of a packet's buffer. It exceeds the length of any valid packet. So a packet that fills the buffer was cut off, and
/// is dropped.
pub(crate) const ROOM: usize = HEADROOM + MAX_LEN + 4;

const UDP: u8 = 17;
/// The first octet of an IPv4 header without options: version 4, five words.
const VERSION_4: u8 = 0x45;
const DONT_FRAGMENT: [u8; 2] = [0x40, 0];
/// The number of octets in an IPv4 header that follow its identification.
const BEHIND_IDENTIFICATION: usize = 14;

/// The hop limit in a route header. The value is made up, because a socket does not expose the hop
/// limit of the received packet.
const HOPS: u8 = 64;

/// Appends the ICRC to the packet that begins at [`HEADROOM`] of `buffer`. `len` is the length of
/// the packet without its ICRC. Returns the range of the packet and its ICRC in `buffer`.
pub(crate) fn seal(buffer: &mut [u8], len: usize, from: SocketAddr, to: SocketAddr) -> Range<usize> {
    let crc = crc(buffer, len, from, to);
    let end = HEADROOM + len;
    buffer[end..end + icrc::LEN].copy_from_slice(&crc.to_le_bytes());
    HEADROOM..end + icrc::LEN
}

/// Returns true if the packet that begins at [`HEADROOM`] of `buffer` has a valid ICRC. `len` is
/// the length of the packet with its ICRC. Over IPv4, the ICRC is valid if it is correct for one of
/// the possible identifications, because sockets do not expose the identification.
pub(crate) fn fits(buffer: &mut [u8], len: usize, from: SocketAddr, to: SocketAddr) -> bool {
    let Some(covered) = len.checked_sub(icrc::LEN).filter(|_| HEADROOM + len <= buffer.len()) else { return false };
    let own = crc(buffer, covered, from, to);
    let theirs = buffer[HEADROOM + covered..].first_chunk().map_or(!own, |octets| u32::from_le_bytes(*octets));
    let behind = BEHIND_IDENTIFICATION + 8 + covered;
    rdma_transport::planted("a-damaged-datagram-fits")
        || own == theirs
        || from.is_ipv4() && icrc::identification(own ^ theirs, behind).is_some()
}

/// Returns the route header (GRH) that is placed in front of a datagram in its receive: the IPv6
/// header, or 20 zeros and the IPv4 header (annex A17.4.5.2). A socket does not expose the type of
/// service, the identification and the time to live, so these have made-up values.
pub(crate) fn route_header(from: IpAddr, to: IpAddr, len: usize) -> [u8; GRH_LEN] {
    let udp_len = (len + 8) as u16;
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let mut header = [0; GRH_LEN];
            header[20..].copy_from_slice(&ipv4(from, to, udp_len));
            header
        }
        (from, to) => ipv6(mapped(from), mapped(to), udp_len),
    }
}

/// Returns the addresses of the sender and the receiver in a route header. Returns `None` if the
/// header is neither IPv4 nor IPv6.
pub(crate) fn parties(header: &[u8; GRH_LEN]) -> Option<(IpAddr, IpAddr)> {
    let v6 = |at: usize| Some(IpAddr::from(*header[at..].first_chunk::<16>()?));
    let v4 = |at: usize| Some(IpAddr::from(*header[at..].first_chunk::<4>()?));
    match (header[0] >> 4, header[20] >> 4) {
        (6, _) => Some((v6(8)?, v6(24)?)),
        (_, 4) => Some((v4(32)?, v4(36)?)),
        _ => None,
    }
}

/// Writes the octets that the ICRC covers in addition to the packet: 8 octets of ones, the IP header and the UDP header. Writes them to the
/// end of `head`, and returns their number. `len` is the length of the packet with its ICRC.
fn cover(head: &mut [u8; HEADROOM], from: SocketAddr, to: SocketAddr, len: usize) -> usize {
    let udp_len = (len + 8) as u16;
    *head = [0xff; HEADROOM];
    let udp = [from.port(), to.port(), udp_len, 0xffff];
    for (to, field) in head[HEADROOM - 8..].chunks_exact_mut(2).zip(udp) {
        to.copy_from_slice(&field.to_be_bytes());
    }
    match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let ip = &mut head[HEADROOM - 28..HEADROOM - 8];
            ip.copy_from_slice(&ipv4(from, to, udp_len));
            // Routers change the type of service, the time to live and the checksum. The ICRC is computed with all bits of these fields
            // set.
            (ip[1], ip[8]) = (0xff, 0xff);
            ip[10..12].fill(0xff);
            8 + 20 + 8
        }
        (from, to) => {
            let ip = &mut head[HEADROOM - 48..HEADROOM - 8];
            ip.copy_from_slice(&ipv6(mapped(from), mapped(to), udp_len));
            // Routers change the traffic class, the flow label and the hop limit. The ICRC is computed with all bits of these fields set.
            ip[..4].copy_from_slice(&[0x6f, 0xff, 0xff, 0xff]);
            ip[7] = 0xff;
            8 + 40 + 8
        }
    }
}

fn ipv4(from: Ipv4Addr, to: Ipv4Addr, udp_len: u16) -> [u8; 20] {
    let mut header = [0; 20];
    header[0] = VERSION_4;
    header[2..4].copy_from_slice(&(udp_len + 20).to_be_bytes());
    header[6..8].copy_from_slice(&DONT_FRAGMENT);
    (header[8], header[9]) = (HOPS, UDP);
    header[12..16].copy_from_slice(&from.octets());
    header[16..].copy_from_slice(&to.octets());
    let sum: u32 = header.chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = !(((sum & 0xffff) + (sum >> 16)) as u16);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    header
}

fn ipv6(from: Ipv6Addr, to: Ipv6Addr, udp_len: u16) -> [u8; 40] {
    let mut header = [0; 40];
    header[0] = 0x60;
    header[4..6].copy_from_slice(&udp_len.to_be_bytes());
    (header[6], header[7]) = (UDP, HOPS);
    header[8..24].copy_from_slice(&from.octets());
    header[24..].copy_from_slice(&to.octets());
    header
}

/// Computes the ICRC of the packet that begins at [`HEADROOM`] of `buffer`. `len` is the length of the packet without its ICRC. Overwrites
/// the octets in front of the packet, but does not change the packet.
fn crc(buffer: &mut [u8], len: usize, from: SocketAddr, to: SocketAddr) -> u32 {
    let Some((head, packet)) = buffer.split_first_chunk_mut() else { return 0 };
    let covered = cover(head, from, to, len + icrc::LEN);
    let Some(variant) = packet.get_mut(VARIANT) else { return 0 };
    let kept = std::mem::replace(variant, 0xff);
    let crc = icrc::of(&buffer[HEADROOM - covered..HEADROOM + len]);
    buffer[HEADROOM + VARIANT] = kept;
    crc
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roce::packet::{DatagramHeader, GROUP};
    use proptest::prelude::*;

    fn buffer(packet: &[u8]) -> Vec<u8> {
        let mut buffer = vec![0; ROOM];
        buffer[HEADROOM..HEADROOM + packet.len()].copy_from_slice(packet);
        buffer
    }

    /// The packet is a congestion notification of a ConnectX-4 Lx with identification 0x718c, from the tests of scapy
    /// (`test/contrib/roce.uts`). In the octet that routers may change, the bit for backward congestion is set.
    #[test]
    fn the_crc_of_an_adapter_fits_with_the_identification_that_it_had() {
        let packet = b"\x81\0\xff\xff\x40\0\x01\x18\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x82\xfd\0\x2a";
        let (from, to) = ("10.0.17.1:0".parse().unwrap(), "10.0.18.1:4791".parse().unwrap());
        let mut octets = buffer(packet);
        assert!(fits(&mut octets, packet.len(), from, to));
        let own = crc(&mut octets, packet.len() - 4, from, to);
        let found = icrc::identification(own ^ 0x2a00_fd82, BEHIND_IDENTIFICATION + 8 + 28);
        assert_eq!(found, Some(0x718c));
        assert_eq!(octets[HEADROOM..HEADROOM + packet.len()], packet[..], "the packet is as it was");
        // The CRC does not depend on the octet that routers may change. It depends on all other octets.
        octets[HEADROOM + VARIANT] = 0;
        assert!(fits(&mut octets, packet.len(), from, to));
        octets[HEADROOM + 7] ^= 1;
        assert!(!fits(&mut octets, packet.len(), from, to));
    }

    /// The packet is a Send Only of an unreliable connection with identification 1144, from the tests of scapy (`test/contrib/roce.uts`).
    #[test]
    fn the_crc_of_another_capture() {
        let head = b"\x24\x60\xff\xff\0\0\0\xd3\0\xcf\x17\x10";
        let body = b"F0\x81\x8b\xe2\x895\xd9\x0e\x9a\x95PT\x01\xbe\x88^P\0\0\x78\xf3\x53\xf3";
        let (packet, address) = ([&head[..], body].concat(), IpAddr::from([192, 168, 0, 7]));
        let (from, to) = (SocketAddr::new(address, 49152), SocketAddr::new(address, 4791));
        let mut octets = buffer(&packet);
        assert!(fits(&mut octets, packet.len(), from, to));
        let own = crc(&mut octets, packet.len() - 4, from, to);
        assert_eq!(icrc::identification(own ^ 0xf353_f378, BEHIND_IDENTIFICATION + 8 + 32), Some(1144));
    }

    /// The expected CRC is computed over the IPv6 packet on the wire, with all bits set in the fields that routers change.
    #[test]
    fn over_ipv6_the_crc_is_exact() {
        let header =
            DatagramHeader { destination: 17, source: 18, queue_key: 19, immediate: Some(20), solicited: false };
        let (from, to) = ("[fd00::1]:7".parse().unwrap(), "[fd00::2]:4791".parse().unwrap());
        let mut octets = buffer(&[]);
        let len = header.emit(0, 0, &mut octets[HEADROOM..]);
        let range = seal(&mut octets, len, from, to);
        assert!(fits(&mut octets, range.len(), from, to));
        let mut all = vec![0xff; 8];
        all.extend(
            b"\x6f\xff\xff\xff\0\x24\x11\xff\xfd\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x01\xfd\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x02",
        );
        all.extend(b"\0\x07\x12\xb7\0\x24\xff\xff");
        all.extend(b"\x65\0\xff\xff\xff\0\0\x11\0\0\0\0\0\0\0\x13\0\0\0\x12\0\0\0\x14");
        assert_eq!(octets[range][len..], icrc::of(&all).to_le_bytes());
    }

    proptest! {
        #[test]
        fn what_is_sealed_fits_and_what_is_damaged_does_not(
            payload in prop::collection::vec(any::<u8>(), 0..300), ports: (u16, u16), bit: usize, v6: bool,
        ) {
            let ip = |last: u8| if v6 { IpAddr::from([last; 16]) } else { IpAddr::from([10, 0, 0, last]) };
            let (from, to) = (SocketAddr::new(ip(1), ports.0), SocketAddr::new(ip(2), ports.1));
            let header = DatagramHeader { destination: GROUP, source: 5, queue_key: 6, immediate: None, solicited: false };
            let mut octets = buffer(&[]);
            octets[HEADROOM + header.len()..HEADROOM + header.len() + payload.len()].copy_from_slice(&payload);
            let len = header.emit(1, payload.len(), &mut octets[HEADROOM..]);
            let range = seal(&mut octets, len, from, to);
            prop_assert!(fits(&mut octets, range.len(), from, to));
            let bit = bit % (8 * range.len());
            octets[HEADROOM + bit / 8] ^= 1 << (bit % 8);
            // One changed bit invalidates the CRC, and no identification makes the CRC valid again. Only the bits of the octet that routers
            // may change are not covered.
            prop_assert_eq!(fits(&mut octets, range.len(), from, to), bit / 8 == VARIANT);
            prop_assert!(!fits(&mut octets, 3, from, to));
        }

        #[test]
        fn a_route_header_names_its_parties(v6: bool, one: [u8; 16], two: [u8; 16], len in 0..4200_usize) {
            let ip = |octets: [u8; 16]| match octets.first_chunk::<4>() {
                Some(four) if !v6 => IpAddr::from(*four),
                _ => IpAddr::from(octets),
            };
            let header = route_header(ip(one), ip(two), len);
            prop_assert_eq!(parties(&header), Some((ip(one), ip(two))));
        }
    }
}
