//! The messages of the protocol: the header of every message, and the payloads of control messages. `docs/wire.md` describes the layouts.

use crate::limits::{HEADER_LEN, MAX_CONTROL};
use crate::memory::region::RemoteRegion;

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum MessageKind {
    /// A message of the program.
    Data = 0,
    /// The first message of the active side. On the passive side, the connection is not up before this message has arrived.
    Hello = 1,
    /// A message with a grant of credits in its header, sent if no other message can carry the grant.
    Credit = 2,
    /// A request for an answer. The answer shows that the peer is alive.
    Ping = 3,
    /// The answer to a ping.
    Pong = 4,
    /// A notification that the Writes before this message are in the receiver's memory. The payload is an [`Immediate`].
    Immediate = 5,
    /// A message longer than one buffer, which the receiver will read from the sender's memory. The payload is an [`Offer`].
    Offer = 6,
    /// A notification that an offered message was fetched, so that the sender of the message can
    /// reuse its memory. The payload is the number that identifies the transfer
    /// ([`Offer::number`]), four bytes.
    Fetched = 7,
    /// The last message that a side sends after its program has closed the connection.
    Goodbye = 8,
    /// Handshake bytes of a connection that will be secured. The first byte is a [`HandshakePart`].
    Handshake = 9,
    /// A part of a message that needs several buffers. The header has the number of parts that follow.
    Fragment = 10,
    /// A notification that a part of an offered message was fetched. The payload is a [`TransferProgress`].
    Progress = 11,
    /// A notification that the receiving program does not want an offered message, so that the
    /// sender of the message can reuse its memory. The payload is the number that identifies the
    /// transfer ([`Offer::number`]), four bytes.
    Refused = 12,
}

impl MessageKind {
    pub(super) const ALL: [Self; 13] = [
        Self::Data,
        Self::Hello,
        Self::Credit,
        Self::Ping,
        Self::Pong,
        Self::Immediate,
        Self::Offer,
        Self::Fetched,
        Self::Goodbye,
        Self::Handshake,
        Self::Fragment,
        Self::Progress,
        Self::Refused,
    ];

    /// Returns true if messages of this kind have no payload.
    const fn is_bare(self) -> bool {
        matches!(self, Self::Hello | Self::Credit | Self::Ping | Self::Pong | Self::Goodbye)
    }

    /// Returns true if messages of this kind carry data of the program.
    pub(crate) const fn is_of_program(self) -> bool {
        matches!(self, Self::Data | Self::Offer | Self::Immediate | Self::Fragment)
    }
}

/// The kind of a handshake message, encoded in the first byte of its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum HandshakePart {
    /// Handshake bytes, but not the last ones. The sender's next message is also unencrypted.
    More = 0,
    /// The last handshake bytes, possibly none. The sender has accepted its peer, and encrypts all later messages.
    Last = 1,
    /// The sender refuses its peer. The remaining bytes are text with the reason.
    Refusal = 2,
}

impl HandshakePart {
    pub(crate) fn parse(payload: &[u8]) -> Option<(Self, &[u8])> {
        let (first, rest) = payload.split_first()?;
        let part = match first {
            0 => Self::More,
            1 => Self::Last,
            2 => Self::Refusal,
            _ => return None,
        };
        Some((part, rest))
    }
}

/// The largest number of parts that can follow a part of a message.
pub(crate) const MAX_FOLLOWING: u32 = (1 << 24) - 1;

/// The header of a message: `kind:8 | following:24 | grant:32`, little-endian. `following` is 0 except in fragments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FrameHeader {
    pub(crate) kind: MessageKind,
    /// The number of messages that the receiver of this header may have sent in total since the start of the connection, modulo 2^32.
    pub(crate) grant: u32,
}

impl FrameHeader {
    #[inline]
    pub(crate) const fn emit(self) -> [u8; HEADER_LEN] {
        self.emit_before(0)
    }

    /// Encodes the header of a fragment. `following` is the number of fragments after this one, at most [`MAX_FOLLOWING`].
    #[inline]
    pub(crate) const fn emit_before(self, following: u32) -> [u8; HEADER_LEN] {
        let word = self.kind as u64 | (following as u64) << 8 | (self.grant as u64) << 32;
        word.to_le_bytes()
    }

    /// Parses the header of a message. Returns `None` if the message is too short, its kind is unknown, reserved bits are set, or it has a
    /// payload although its kind has none. Also returns `None` for a fragment that is not the last one of its message.
    #[inline]
    pub(crate) fn parse(message: &[u8]) -> Option<Self> {
        let (header, payload) = message.split_first_chunk::<HEADER_LEN>()?;
        let word = u64::from_le_bytes(*header);
        if word & 0xffff_ffff == MessageKind::Data as u64 {
            return Some(Self { kind: MessageKind::Data, grant: (word >> 32) as u32 });
        }
        let kind = *MessageKind::ALL.get((word & 0xffff_ffff) as usize)?;
        let sound = !kind.is_bare() || payload.is_empty();
        sound.then_some(Self { kind, grant: (word >> 32) as u32 })
    }

    /// Parses the header of a fragment, whether or not it is the last one of its message. Returns `None` if the message is not a fragment.
    pub(crate) fn parse_fragment(message: &[u8]) -> Option<Self> {
        let word = u64::from_le_bytes(*message.first_chunk()?);
        (word & 0xff == MessageKind::Fragment as u64)
            .then_some(Self { kind: MessageKind::Fragment, grant: (word >> 32) as u32 })
    }

    /// Returns the number of fragments that follow a fragment, from the header of that fragment.
    pub(crate) fn following(message: &[u8]) -> u32 {
        message.first_chunk().map_or(0, |word| u32::from_le_bytes(*word) >> 8)
    }
}

/// The notification of a peer's write with immediate data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// The 32 bits that the peer has chosen.
    pub value: u32,
    /// The number of bytes that the peer has written. If this notification ends a list of Reads,
    /// the number of bytes that the peer has read. A list of more than `u32::MAX` bytes counts as
    /// `u32::MAX`. Except on devices with this operation, the peer itself reports the number, and a
    /// hostile peer may report any: check it before it is used as a length.
    pub len: u32,
}

impl Immediate {
    /// Parses `value:4 | len:4`, little-endian. Returns `None` if the length is not 8 bytes.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let (value, rest) = bytes.split_first_chunk()?;
        let len = <[u8; 4]>::try_from(rest).ok()?;
        Some(Self { value: u32::from_le_bytes(*value), len: u32::from_le_bytes(len) })
    }

    pub(crate) fn emit(self) -> [u8; 8] {
        (u64::from(self.value) | u64::from(self.len) << 32).to_le_bytes()
    }
}

/// The payload of an offer, little-endian: `number:4 | zero:4 | region:20`, and then `tag:8` if the message has a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    /// The number that identifies the transfer. All transfers that a connection has in flight have
    /// different numbers.
    pub(crate) number: u32,
    pub(crate) region: RemoteRegion,
    /// The tag that the sender's program has set.
    pub(crate) tag: Option<u64>,
}

const _: () = assert!(Offer::LEN + Offer::TAG == MAX_CONTROL);

impl Offer {
    const LEN: usize = 8 + RemoteRegion::LEN;
    const TAG: usize = 8;

    pub(crate) fn emit(self, out: &mut [u8; MAX_CONTROL]) -> &[u8] {
        out[..4].copy_from_slice(&self.number.to_le_bytes());
        out[4..8].fill(0);
        out[8..Self::LEN].copy_from_slice(&self.region.to_bytes());
        let Some(tag) = self.tag else { return &out[..Self::LEN] };
        out[Self::LEN..].copy_from_slice(&tag.to_le_bytes());
        out
    }

    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let (fixed, tag) = bytes.split_first_chunk::<{ Self::LEN }>()?;
        let tag = if tag.is_empty() { None } else { Some(u64::from_le_bytes(tag.try_into().ok()?)) };
        let (number, rest) = fixed.split_first_chunk()?;
        let (zero, region) = rest.split_first_chunk::<4>()?;
        (*zero == [0; 4]).then_some(())?;
        Some(Self { number: u32::from_le_bytes(*number), region: RemoteRegion::from_bytes(region)?, tag })
    }
}

/// The payload of a notification that a part of an offered message was fetched: `number:4 | done:8`, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TransferProgress {
    /// The number that identifies the transfer.
    pub(crate) number: u32,
    /// The number of bytes that were fetched so far.
    pub(crate) done: u64,
}

impl TransferProgress {
    const LEN: usize = 12;

    pub(crate) fn emit(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..4].copy_from_slice(&self.number.to_le_bytes());
        out[4..].copy_from_slice(&self.done.to_le_bytes());
        out
    }

    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let (number, done) = bytes.split_first_chunk()?;
        Some(Self { number: u32::from_le_bytes(*number), done: u64::from_le_bytes(done.try_into().ok()?) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_kind_is_where_its_number_says() {
        for (number, kind) in MessageKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, number);
        }
    }

    #[test]
    fn reserved_bits_and_unknown_kinds_are_refused() {
        let good = FrameHeader { kind: MessageKind::Data, grant: 7 }.emit();
        assert!(FrameHeader::parse(&good).is_some());
        for at in 1..4 {
            let mut bad = good;
            bad[at] = 1;
            assert_eq!(FrameHeader::parse(&bad), None, "reserved octet {at}");
        }
        let mut bad = good;
        bad[0] = MessageKind::ALL.len() as u8;
        assert_eq!(FrameHeader::parse(&bad), None);
        bad[2] = 1;
        assert_eq!(FrameHeader::parse(&bad), None);
        assert_eq!(FrameHeader::parse(&good[..7]), None);
    }

    #[test]
    fn an_offer_is_exact() {
        let region = RemoteRegion { address: 0x1234_5678, len: 99, key: 5 };
        let tagged = Offer { number: 7, region, tag: Some(0x1020_3040_5060_7080) };
        let mut out = [0xff; MAX_CONTROL];
        assert_eq!(Offer::parse(tagged.emit(&mut out)), Some(tagged));
        assert_eq!(Offer::parse(&out[..35]), None);
        let offer = Offer { tag: None, ..tagged };
        let bytes = offer.emit(&mut out).to_vec();
        assert_eq!(Offer::parse(&bytes), Some(offer));
        assert_eq!(Offer::parse(&bytes[1..]), None);
        let mut reserved = bytes;
        reserved[5] = 1;
        assert_eq!(Offer::parse(&reserved), None);
    }

    proptest! {
        #[test]
        fn a_header_survives_the_trip(kind in 0..MessageKind::ALL.len(), grant: u32) {
            let header = FrameHeader { kind: MessageKind::ALL[kind], grant };
            prop_assert_eq!(FrameHeader::parse(&header.emit()), Some(header));
        }

        #[test]
        fn a_fragment_says_how_many_follow(following in 0..=MAX_FOLLOWING, grant: u32) {
            let header = FrameHeader { kind: MessageKind::Fragment, grant };
            let bytes = header.emit_before(following);
            prop_assert_eq!(FrameHeader::parse_fragment(&bytes), Some(header));
            prop_assert_eq!(FrameHeader::parse(&bytes), (following == 0).then_some(header));
            prop_assert_eq!(FrameHeader::following(&bytes), following);
        }

        #[test]
        fn an_immediate_survives_the_trip(value: u32, len: u32) {
            let immediate = Immediate { value, len };
            prop_assert_eq!(Immediate::parse(&immediate.emit()), Some(immediate));
        }

        #[test]
        fn news_of_a_part_survives_the_trip(number: u32, done: u64) {
            let progress = TransferProgress { number, done };
            prop_assert_eq!(TransferProgress::parse(&progress.emit()), Some(progress));
            prop_assert_eq!(TransferProgress::parse(&progress.emit()[1..]), None);
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = (FrameHeader::parse(&bytes), FrameHeader::parse_fragment(&bytes), FrameHeader::following(&bytes));
            let _ = Offer::parse(&bytes);
            let _ = Immediate::parse(&bytes);
            let _ = TransferProgress::parse(&bytes);
        }
    }
}
