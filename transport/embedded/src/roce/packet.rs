//! The headers of an unreliable datagram: base transport header (BTH), datagram extended transport header (DETH) and immediate data. The
//! payload and its pad follow (InfiniBand Architecture Specification, volume 1, §9.2, 9.3.3, 9.3.7).

use std::ops::Range;

use super::icrc;

/// Opcodes of unreliable datagrams. A datagram with the opcode `UD_SEND_IMMEDIATE` has immediate data. A datagram with the opcode `UD_SEND`
/// has none.
const UD_SEND: u8 = 0x64;
const UD_SEND_IMMEDIATE: u8 = 0x65;
/// The length of BTH and DETH together in octets.
const HEADERS: usize = 20;
/// The partition key of all packets. RoCE has only the default partition.
const PARTITION: u16 = 0xffff;

/// The largest payload in octets.
pub(crate) const MAX_PAYLOAD: usize = 4096;
/// The length in octets of the longest packet, from the BTH to the ICRC.
pub(crate) const MAX_LEN: usize = HEADERS + 4 + MAX_PAYLOAD + icrc::LEN;
/// The queue pair number in datagrams to a multicast group. This value is also the mask of the 24 bits of a queue pair number.
pub(crate) const GROUP: u32 = 0x00ff_ffff;
/// The index of the octet of the BTH that routers may change. The ICRC does not cover this octet.
pub(crate) const VARIANT: usize = 4;

/// The headers of a datagram, parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DatagramHeader {
    /// The destination queue pair, 24 bits.
    pub(crate) destination: u32,
    /// The source queue pair, 24 bits.
    pub(crate) source: u32,
    /// The Q_Key of the destination queue pair.
    pub(crate) queue_key: u32,
    /// The immediate data, if the datagram carries any.
    pub(crate) immediate: Option<u32>,
    /// True if the sender requests a solicited event at the receiver.
    pub(crate) solicited: bool,
}

fn be32(octets: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*octets.get(at..)?.first_chunk()?))
}

impl DatagramHeader {
    /// Parses a packet that ends with its ICRC. Does not check the ICRC. Returns the headers, and the range of the payload in the packet.
    /// Returns `None` if the packet is no valid unreliable datagram of the default partition.
    pub(crate) fn parse(packet: &[u8]) -> Option<(Self, Range<usize>)> {
        let &[opcode, flags, high, low, ..] = packet else { return None };
        let immediate = match opcode {
            UD_SEND => None,
            UD_SEND_IMMEDIATE => Some(be32(packet, HEADERS)?),
            _ => return None,
        };
        let (version, pad) = (flags & 0x0f, usize::from(flags >> 4 & 3));
        // The highest bit of a partition key distinguishes full members from limited members, and is ignored here.
        if version != 0 || u16::from_be_bytes([high, low]) & 0x7fff != PARTITION & 0x7fff {
            return None;
        }
        let header = Self {
            destination: be32(packet, 4)? & GROUP,
            source: be32(packet, 16)? & GROUP,
            queue_key: be32(packet, 12)?,
            immediate,
            solicited: flags & 0x80 != 0,
        };
        let start = HEADERS + immediate.map_or(0, |_| 4);
        let end = packet.len().checked_sub(pad + icrc::LEN)?;
        let whole = packet.len() % 4 == 0 && start <= end && end - start <= MAX_PAYLOAD;
        whole.then_some((header, start..end))
    }

    /// Returns the length of the headers in octets. The payload follows the headers.
    pub(crate) const fn len(&self) -> usize {
        HEADERS + if self.immediate.is_some() { 4 } else { 0 }
    }

    /// Writes the headers to the front of `packet`, and zeros to the pad behind the payload. The caller writes the payload itself, which
    /// has `payload` octets. `number` is the packet sequence number. Returns the length of the packet without its ICRC. `packet` has room
    /// for [`MAX_LEN`] octets.
    pub(crate) fn emit(&self, number: u32, payload: usize, packet: &mut [u8]) -> usize {
        let pad = payload.wrapping_neg() & 3;
        let opcode = if self.immediate.is_some() { UD_SEND_IMMEDIATE } else { UD_SEND };
        let flags = u8::from(self.solicited) << 7 | (pad as u8) << 4;
        let [high, low] = PARTITION.to_be_bytes();
        let (start, mut headers) = (self.len(), [0; HEADERS + 4]);
        headers[..4].copy_from_slice(&[opcode, flags, high, low]);
        let words = [self.destination & GROUP, number & GROUP, self.queue_key, self.source & GROUP];
        for (to, word) in headers[4..].chunks_exact_mut(4).zip(words.into_iter().chain(self.immediate)) {
            to.copy_from_slice(&word.to_be_bytes());
        }
        packet[..start].copy_from_slice(&headers[..start]);
        packet[start + payload..start + payload + pad].fill(0);
        start + payload + pad
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_field_has_its_place() {
        let header = DatagramHeader {
            destination: 0x12_3456,
            source: 0x9a_bcde,
            queue_key: 0x0123_4567,
            immediate: None,
            solicited: true,
        };
        let mut packet = [0xee; 32];
        packet[20..25].copy_from_slice(b"hello");
        assert_eq!(header.emit(7, 5, &mut packet), 28);
        let expected = b"\x64\xb0\xff\xff\x00\x12\x34\x56\x00\x00\x00\x07\x01\x23\x45\x67\x00\x9a\xbc\xdehello\0\0\0";
        assert_eq!(packet[..28], expected[..]);
        assert_eq!(DatagramHeader::parse(&packet), Some((header, 20..25)));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            destination in 0..=GROUP, source in 0..=GROUP, queue_key: u32, immediate: Option<u32>, solicited: bool,
            payload in 0..=MAX_PAYLOAD,
        ) {
            let header = DatagramHeader { destination, source, queue_key, immediate, solicited };
            let mut packet = vec![7; MAX_LEN];
            let len = header.emit(9, payload, &mut packet) + icrc::LEN;
            let range = header.len()..header.len() + payload;
            prop_assert_eq!(DatagramHeader::parse(&packet[..len]), Some((header, range)));
        }

        #[test]
        fn any_octets_are_read_without_harm(octets in prop::collection::vec(any::<u8>(), 0..64), opcode in 0x60..0x68_u8) {
            let mut octets = octets;
            if let Some(first) = octets.first_mut() {
                *first = opcode;
            }
            if let Some((_, range)) = DatagramHeader::parse(&octets) {
                prop_assert!(range.start <= range.end && range.end + 4 <= octets.len());
            }
        }
    }
}
