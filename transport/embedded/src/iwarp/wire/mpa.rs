//! MPA: the startup frames and the framing of the stream (RFC 5044, RFC 6581).

/// The first octets of a Request Frame. They distinguish a Request Frame from other data (RFC 5044 §7.1.1).
pub const REQUEST_KEY: [u8; 16] = *b"MPA ID Req Frame";
/// The first octets of a Reply Frame. They distinguish a Reply Frame from other data (RFC 5044 §7.1.1).
pub const REPLY_KEY: [u8; 16] = *b"MPA ID Rep Frame";
/// The length of the fixed part of a startup frame. The private data follows this part.
pub const STARTUP_HEADER_LEN: usize = 20;
/// The largest PD_Length (length of the private data) that is accepted (RFC 5044 §7.1.1).
pub const MAX_PRIVATE_DATA: usize = 512;
/// The length of the enhanced block, with IRD and ORD, at the start of an enhanced frame's private data (RFC 6581 §6).
pub const ENHANCED_LEN: usize = 4;
/// The length of the CRC field of an FPDU. The field exists even if no CRC is used (RFC 5044 §4.1).
pub const CRC_LEN: usize = 4;
/// The length of the ULPDU_Length field at the start of an FPDU.
pub const LENGTH_LEN: usize = 2;
/// The value of IRD or ORD with which a peer declines to negotiate that number (RFC 6581 §9.1).
pub const NO_NEGOTIATION: u16 = 0x3fff;

const MARKERS: u8 = 0x80;
const CRC: u8 = 0x40;
const REJECT: u8 = 0x20;
const ENHANCED: u8 = 0x10;
const RESERVED: u8 = 0x0f;

/// Returns the length of the pad, which extends an FPDU to a multiple of four octets (RFC 5044 §4.1).
pub const fn pad_len(ulpdu_len: usize) -> usize {
    (LENGTH_LEN + (ulpdu_len & 3)).wrapping_neg() & 3
}

/// Returns the length of a whole FPDU without markers: length field, ULPDU, pad and CRC (RFC 5044 §4.1).
pub const fn fpdu_len(ulpdu_len: usize) -> usize {
    LENGTH_LEN + ulpdu_len + pad_len(ulpdu_len) + CRC_LEN
}

/// The two kinds of MPA startup frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartupKind {
    /// Sent by the initiator as the first octets of its stream.
    Request,
    /// Sent by the responder as the first octets of its stream.
    Reply,
}

/// A reason why the fixed part of a startup frame is invalid. A Terminate that reports any of these reasons has the cause
/// [`TerminateCause::LLP_STARTUP`].
///
/// [`TerminateCause::LLP_STARTUP`]: super::TerminateCause::LLP_STARTUP
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StartupError {
    /// The frame begins with neither of the two keys, so the peer does not speak MPA.
    #[error("not an MPA startup frame: unknown key")]
    BadKey,
    /// PD_Length is above [`MAX_PRIVATE_DATA`].
    #[error("PD_Length {0} is above the {MAX_PRIVATE_DATA} of RFC 5044 §7.1.1")]
    PrivateDataTooLong(u16),
    /// The frame is enhanced, but PD_Length is too small for the enhanced block. siw sends such a frame if its program gives 252 octets of
    /// private data.
    #[error("PD_Length {0} of an enhanced frame is below the {ENHANCED_LEN} of RFC 6581 §6")]
    EnhancedTooShort(u16),
}

/// The fixed part of a Request or Reply Frame (RFC 5044 §7.1.1, RFC 6581 §6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartupHeader {
    /// The kind of the frame: Request or Reply.
    pub kind: StartupKind,
    /// The M bit: the sender of the frame requires markers in the stream that it receives.
    pub markers: bool,
    /// The C bit: the sender requests a CRC. If either peer requests a CRC, both directions of the stream have a CRC.
    pub crc: bool,
    /// The R bit: the responder rejects the connection.
    pub reject: bool,
    /// The S bit: the private data begins with an [`Enhanced`] block. The bit is reserved in revision 1.
    pub enhanced: bool,
    /// The low four bits of the flags, which are reserved and should be 0. siw sends 0x08, and its replies repeat the bits of the request.
    pub reserved: u8,
    /// The MPA revision: 1 is RFC 5044, 2 is RFC 6581. [`StartupHeader::parse`] accepts any value.
    pub revision: u8,
    /// PD_Length: the number of octets that follow the fixed part, including the enhanced block.
    pub private_data_len: u16,
}

impl StartupHeader {
    /// Parses the fixed part of a startup frame. Exactly `private_data_len` octets follow this part in the stream.
    ///
    /// From revision 2 on, also checks that an enhanced frame is long enough for its enhanced block.
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

    /// Returns the octets of the fixed part. The values are not checked.
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

/// The enhanced block of a startup frame: IRD, ORD and the ready-to-receive options (RFC 6581 §6, §9).
///
/// The IRD and the ORD are the limits of the side that sends the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Enhanced {
    /// The A bit: the peer-to-peer model, in which the initiator first sends a ready-to-receive message (RTR).
    pub peer_to_peer: bool,
    /// The B bit: the RTR may be a Send without payload.
    pub rtr_send: bool,
    /// IRD: the number of outstanding Reads that the sender of the frame can serve, in 14 bits. [`NO_NEGOTIATION`] declines to negotiate
    /// the number.
    pub ird: u16,
    /// The C bit: the RTR may be a Write without payload.
    pub rtr_write: bool,
    /// The D bit: the RTR may be a Read without payload.
    pub rtr_read: bool,
    /// ORD: the number of outstanding Reads that the sender of the frame wants to issue, in 14 bits. [`NO_NEGOTIATION`] declines to
    /// negotiate the number.
    pub ord: u16,
}

impl Enhanced {
    /// Parses the block. Parsing cannot fail, because every value of every field can be represented.
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

    /// Returns the octets of the block. IRD and ORD must have at most 14 bits: higher bits are not written.
    pub fn emit(&self) -> [u8; ENHANCED_LEN] {
        let word = |high, low, value: u16| u16::from(high) << 15 | u16::from(low) << 14 | value & 0x3fff;
        let [i0, i1] = word(self.peer_to_peer, self.rtr_send, self.ird).to_be_bytes();
        let [o0, o1] = word(self.rtr_write, self.rtr_read, self.ord).to_be_bytes();
        [i0, i1, o0, o1]
    }
}

#[cfg(test)]
mod tests {
    use super::super::ddp::MAX_ULPDU_LEN;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn pads_and_lengths() {
        for (ulpdu, pad, fpdu) in
            [(14, 0, 20), (17, 1, 24), (18, 0, 24), (23, 3, 32), (24, 2, 32), (46, 0, 52), (1442, 0, 1448)]
        {
            assert_eq!((pad_len(ulpdu), fpdu_len(ulpdu)), (pad, fpdu), "{ulpdu}");
        }
        assert_eq!(fpdu_len(MAX_ULPDU_LEN), 65_544);
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
            // The S bit is reserved in revision 1, and is ignored.
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
