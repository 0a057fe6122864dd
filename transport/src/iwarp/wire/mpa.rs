//! MPA: the startup frames and the framing of the stream (RFC 5044, RFC 6581).

use super::ddp::MAX_ULPDU_LEN;

/// The key of a Request Frame (RFC 5044 §7.1.1).
pub const REQUEST_KEY: [u8; 16] = *b"MPA ID Req Frame";
/// The key of a Reply Frame (RFC 5044 §7.1.1).
pub const REPLY_KEY: [u8; 16] = *b"MPA ID Rep Frame";
/// Length of the fixed part of a startup frame; private data follows.
pub const STARTUP_HEADER_LEN: usize = 20;
/// The largest PD_Length that is accepted (RFC 5044 §7.1.1).
pub const MAX_PRIVATE_DATA: usize = 512;
/// The largest PD_Length that siw and cxgb4 accept, including the enhanced block: the limit for sent frames.
pub const MAX_PRIVATE_DATA_TO_SIW: usize = 256;
/// Length of the IRD and ORD block at the start of the private data of an enhanced frame (RFC 6581 §6).
pub const ENHANCED_LEN: usize = 4;
/// Length of the CRC field of an FPDU, which is present even when it is unused (RFC 5044 §4.1).
pub const CRC_LEN: usize = 4;
/// Length of the ULPDU_Length field of an FPDU.
pub const LENGTH_LEN: usize = 2;
/// The value of an IRD or ORD that means "do not negotiate" (RFC 6581 §9.1).
pub const NO_NEGOTIATION: u16 = 0x3fff;
/// The length of the longest FPDU.
pub const MAX_FPDU_LEN: usize = fpdu_len(MAX_ULPDU_LEN);

const MARKERS: u8 = 0x80;
const CRC: u8 = 0x40;
const REJECT: u8 = 0x20;
const ENHANCED: u8 = 0x10;
const RESERVED: u8 = 0x0f;

/// Returns the length of the pad that extends an FPDU to a multiple of four octets (RFC 5044 §4.1).
pub const fn pad_len(ulpdu_len: usize) -> usize {
    (LENGTH_LEN + (ulpdu_len & 3)).wrapping_neg() & 3
}

/// Returns the length of the whole FPDU: length field, ULPDU, pad and CRC (RFC 5044 §4.1), without markers.
pub const fn fpdu_len(ulpdu_len: usize) -> usize {
    LENGTH_LEN + ulpdu_len + pad_len(ulpdu_len) + CRC_LEN
}

/// The two kinds of startup frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartupKind {
    /// Sent by the initiator as the first octets of its stream.
    Request,
    /// Sent by the responder as the first octets of its stream.
    Reply,
}

/// The reasons to refuse the fixed part of a startup frame. For the peer, all of these are [`TerminateCause::LLP_STARTUP`].
///
/// [`TerminateCause::LLP_STARTUP`]: super::TerminateCause::LLP_STARTUP
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StartupError {
    /// The frame has neither key, so the peer does not speak MPA.
    #[error("not an MPA startup frame: unknown key")]
    BadKey,
    /// PD_Length is above [`MAX_PRIVATE_DATA`].
    #[error("PD_Length {0} is above the {MAX_PRIVATE_DATA} of RFC 5044 §7.1.1")]
    PrivateDataTooLong(u16),
    /// The frame is enhanced, but PD_Length leaves no room for IRD and ORD. siw sends this for 252 octets of private
    /// data.
    #[error("PD_Length {0} of an enhanced frame is below the {ENHANCED_LEN} of RFC 6581 §6")]
    EnhancedTooShort(u16),
}

/// The fixed part of a Request or Reply Frame (RFC 5044 §7.1.1, RFC 6581 §6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartupHeader {
    /// Request or Reply.
    pub kind: StartupKind,
    /// M: the sender requires markers in what it receives.
    pub markers: bool,
    /// C: the sender requests CRC, which is used in both directions if either peer requests it.
    pub crc: bool,
    /// R: the responder rejects.
    pub reject: bool,
    /// S: the private data begins with an [`Enhanced`] block. Reserved in revision 1.
    pub enhanced: bool,
    /// The low four flag bits as received. siw uses 0x08 and echoes any in a reply; send 0.
    pub reserved: u8,
    /// The MPA revision, not checked here: 1 is RFC 5044, 2 is RFC 6581.
    pub revision: u8,
    /// PD_Length: the length of everything that follows, including the enhanced block.
    pub private_data_len: u16,
}

impl StartupHeader {
    /// Reads the fixed part. Exactly `private_data_len` octets follow it.
    ///
    /// The length of an enhanced frame is checked from revision 2 on; before that, the bit has no meaning.
    pub fn parse(bytes: &[u8; STARTUP_HEADER_LEN]) -> Result<Self, StartupError> {
        let kind = if bytes.starts_with(&REQUEST_KEY) {
            StartupKind::Request
        } else if bytes.starts_with(&REPLY_KEY) {
            StartupKind::Reply
        } else {
            return Err(StartupError::BadKey);
        };
        let (flags, revision) = (bytes[16], bytes[17]);
        let private_data_len = u16::from_be_bytes([bytes[18], bytes[19]]);
        let enhanced = flags & ENHANCED != 0;
        if usize::from(private_data_len) > MAX_PRIVATE_DATA {
            return Err(StartupError::PrivateDataTooLong(private_data_len));
        }
        if enhanced && revision >= 2 && usize::from(private_data_len) < ENHANCED_LEN {
            return Err(StartupError::EnhancedTooShort(private_data_len));
        }
        Ok(Self {
            kind,
            markers: flags & MARKERS != 0,
            crc: flags & CRC != 0,
            reject: flags & REJECT != 0,
            enhanced,
            reserved: flags & RESERVED,
            revision,
            private_data_len,
        })
    }

    /// Returns the octets of the fixed part, without checking it.
    pub fn emit(&self) -> [u8; STARTUP_HEADER_LEN] {
        let mut out = [0; STARTUP_HEADER_LEN];
        out[..16].copy_from_slice(match self.kind {
            StartupKind::Request => &REQUEST_KEY,
            StartupKind::Reply => &REPLY_KEY,
        });
        let flag = |set, bit| if set { bit } else { 0 };
        out[16] = flag(self.markers, MARKERS)
            | flag(self.crc, CRC)
            | flag(self.reject, REJECT)
            | flag(self.enhanced, ENHANCED)
            | self.reserved & RESERVED;
        out[17] = self.revision;
        out[18..].copy_from_slice(&self.private_data_len.to_be_bytes());
        out
    }
}

/// IRD, ORD and the ready-to-receive options of an enhanced frame (RFC 6581 §6, §9).
///
/// IRD and ORD are from the view of the frame's sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Enhanced {
    /// A: the peer-to-peer model, in which the initiator sends an RTR first.
    pub peer_to_peer: bool,
    /// B: a zero-length Send as RTR.
    pub rtr_send: bool,
    /// The number of Reads that the sender can serve at a time, 14 bits; see [`NO_NEGOTIATION`].
    pub ird: u16,
    /// C: a zero-length Write as RTR.
    pub rtr_write: bool,
    /// D: a zero-length Read as RTR.
    pub rtr_read: bool,
    /// The number of Reads that the sender wants to have outstanding at a time, 14 bits; see [`NO_NEGOTIATION`].
    pub ord: u16,
}

impl Enhanced {
    /// Reads the block. All octets are valid.
    pub fn parse(bytes: [u8; ENHANCED_LEN]) -> Self {
        let [i0, i1, o0, o1] = bytes;
        let (ird, ord) = (u16::from_be_bytes([i0, i1]), u16::from_be_bytes([o0, o1]));
        Self {
            peer_to_peer: ird & 0x8000 != 0,
            rtr_send: ird & 0x4000 != 0,
            ird: ird & 0x3fff,
            rtr_write: ord & 0x8000 != 0,
            rtr_read: ord & 0x4000 != 0,
            ord: ord & 0x3fff,
        }
    }

    /// Returns the octets of the block. Only the low 14 bits of IRD and ORD are written, so the caller limits them before.
    pub fn emit(&self) -> [u8; ENHANCED_LEN] {
        let word = |high, low, value: u16| u16::from(high) << 15 | u16::from(low) << 14 | value & 0x3fff;
        let [i0, i1] = word(self.peer_to_peer, self.rtr_send, self.ird).to_be_bytes();
        let [o0, o1] = word(self.rtr_write, self.rtr_read, self.ord).to_be_bytes();
        [i0, i1, o0, o1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn pads_and_lengths() {
        for (ulpdu, pad, fpdu) in
            [(14, 0, 20), (17, 1, 24), (18, 0, 24), (23, 3, 32), (24, 2, 32), (46, 0, 52), (1442, 0, 1448)]
        {
            assert_eq!((pad_len(ulpdu), fpdu_len(ulpdu)), (pad, fpdu), "{ulpdu}");
        }
        assert_eq!(MAX_FPDU_LEN, 65_544);
        for ulpdu in 0..70_000 {
            assert_eq!(fpdu_len(ulpdu) % 4, 0);
            assert!(pad_len(ulpdu) < 4);
        }
    }

    fn frame(key: &[u8; 16], tail: [u8; 4]) -> [u8; 20] {
        let mut out = [0; 20];
        out[..16].copy_from_slice(key);
        out[16..].copy_from_slice(&tail);
        out
    }

    #[test]
    fn startup_refusals() {
        let bad = frame(b"MPA ID Rex Frame", [0x10, 2, 0, 4]);
        assert_eq!(StartupHeader::parse(&bad), Err(StartupError::BadKey));
        for (tail, outcome) in [
            ([0x10, 2, 0, 0], Some(StartupError::EnhancedTooShort(0))),
            ([0x10, 2, 0, 3], Some(StartupError::EnhancedTooShort(3))),
            ([0x10, 2, 0, 4], None),
            // The bit is reserved in revision 1.
            ([0x10, 1, 0, 0], None),
            ([0x00, 1, 0, 0], None),
            ([0x10, 2, 2, 0], None),
            ([0x10, 2, 2, 1], Some(StartupError::PrivateDataTooLong(513))),
            ([0x10, 9, 0, 4], None),
        ] {
            for key in [&REQUEST_KEY, &REPLY_KEY] {
                assert_eq!(StartupHeader::parse(&frame(key, tail)).err(), outcome, "{tail:02x?}");
            }
        }
    }

    #[test]
    fn startup_flags() {
        let parsed = StartupHeader::parse(&frame(&REPLY_KEY, [0xf8, 2, 0, 20])).unwrap();
        let all = StartupHeader {
            kind: StartupKind::Reply,
            markers: true,
            crc: true,
            reject: true,
            enhanced: true,
            reserved: 8,
            revision: 2,
            private_data_len: 20,
        };
        assert_eq!(parsed, all);
    }

    #[test]
    fn enhanced_bits() {
        let parsed = Enhanced::parse([0x80, 0x08, 0xc0, 0x04]);
        let want = Enhanced { peer_to_peer: true, rtr_send: false, ird: 8, rtr_write: true, rtr_read: true, ord: 4 };
        assert_eq!(parsed, want);
        assert_eq!(Enhanced::parse([0x3f, 0xff, 0x3f, 0xff]).ird, NO_NEGOTIATION);
        assert_eq!(Enhanced { ird: 0xffff, ..Enhanced::default() }.emit(), [0x3f, 0xff, 0, 0]);
    }

    proptest! {
        #[test]
        fn startup_round_trip(
            request: bool, flags in 0u8..16, reserved in 0u8..16, revision: u8, pd in 4u16..=512,
        ) {
            let header = StartupHeader {
                kind: if request { StartupKind::Request } else { StartupKind::Reply },
                markers: flags & 8 != 0,
                crc: flags & 4 != 0,
                reject: flags & 2 != 0,
                enhanced: flags & 1 != 0,
                reserved,
                revision,
                private_data_len: pd,
            };
            prop_assert_eq!(StartupHeader::parse(&header.emit()), Ok(header));
        }

        #[test]
        fn startup_bytes_survive(tail: [u8; 4], request: bool) {
            let bytes = frame(if request { &REQUEST_KEY } else { &REPLY_KEY }, tail);
            if let Ok(header) = StartupHeader::parse(&bytes) {
                prop_assert_eq!(header.emit(), bytes);
            }
        }

        #[test]
        fn startup_takes_anything(bytes: [u8; 20]) {
            let _ = StartupHeader::parse(&bytes);
        }

        #[test]
        fn enhanced_round_trip(bytes: [u8; 4]) {
            prop_assert_eq!(Enhanced::parse(bytes).emit(), bytes);
        }
    }
}
