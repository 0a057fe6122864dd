//! The headers of DDP segments. Each header includes the RDMAP control octet (RFC 5041 §4, RFC 5040 §4.1).

use super::cause::TerminateCause;
use super::opcode::{Opcode, SEND_QUEUE, TAGGED_HEADER_LEN, TERMINATE_QUEUE, UNTAGGED_HEADER_LEN};
use super::read::READ_REQUEST_LEN;
use super::{be32, be64};

/// The length of an FPDU's header for a tagged segment: the ULPDU_Length field and the tagged header.
pub const TAGGED_FPDU_HEADER_LEN: usize = 2 + TAGGED_HEADER_LEN;
/// The length of an FPDU's header for an untagged segment: the ULPDU_Length field and the untagged header.
pub const UNTAGGED_FPDU_HEADER_LEN: usize = 2 + UNTAGGED_HEADER_LEN;
/// The length of an FPDU's header for a Read Request: the ULPDU_Length field, the untagged header and the Read Request header.
pub const READ_REQUEST_FPDU_HEADER_LEN: usize = UNTAGGED_FPDU_HEADER_LEN + READ_REQUEST_LEN;
/// The largest value of the ULPDU_Length field.
pub const MAX_ULPDU_LEN: usize = u16::MAX as usize;

const TAGGED: u8 = 0x80;
const LAST: u8 = 0x40;
const DDP_VERSION_MASK: u8 = 0x03;
const DDP_VERSION: u8 = 0x01;
const RDMAP_VERSION_MASK: u8 = 0xc0;
const RDMAP_VERSION: u8 = 0x40;

/// The header of a tagged segment. An STag and an offset in the header name the destination of the payload (RFC 5041 §4.1). Writes and Read
/// Responses are tagged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tagged {
    /// The L bit: true in the last segment of a message.
    pub last: bool,
    /// The RDMAP operation.
    pub opcode: Opcode,
    /// The STag of the destination region.
    pub stag: u32,
    /// The Tagged Offset (TO) to which the payload of this segment goes.
    pub offset: u64,
}

impl Tagged {
    /// Writes the ULPDU_Length field and this header to `out`.
    #[inline]
    pub fn emit_into(&self, ulpdu_len: u16, out: &mut [u8; TAGGED_FPDU_HEADER_LEN]) {
        out[..4].copy_from_slice(&emit_prefix(ulpdu_len, TAGGED, self.last, self.opcode));
        out[4..8].copy_from_slice(&self.stag.to_be_bytes());
        out[8..].copy_from_slice(&self.offset.to_be_bytes());
    }
}

/// The header of an untagged segment. The payload of such a segment goes to the next buffer of a queue (RFC 5041 §4.2). All operations
/// except Writes and Read Responses are untagged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Untagged {
    /// The L bit: true in the last segment of a message.
    pub last: bool,
    /// The RDMAP operation.
    pub opcode: Opcode,
    /// In a Send with Invalidate, the STag to invalidate. In any other segment, a reserved field, which is kept as received.
    pub reserved_or_stag: u32,
    /// The Queue Number (QN).
    pub queue: u32,
    /// The Message Sequence Number (MSN). Messages are counted from 1, separately per queue and direction. All segments of a message have
    /// the same MSN.
    pub msn: u32,
    /// The Message Offset (MO): the position of this segment's payload in its message.
    pub offset: u32,
}

impl Untagged {
    /// The header of a Terminate. All its fields are constant, because a stream sends at most one Terminate (RFC 5040 §4.8).
    pub const TERMINATE: Self =
        Self { last: true, opcode: Opcode::Terminate, reserved_or_stag: 0, queue: TERMINATE_QUEUE, msn: 1, offset: 0 };

    /// Returns the payload of a Send that is one segment and has this MSN. `body` is a complete FPDU without its CRC. Returns `None` for
    /// any other FPDU.
    #[inline]
    pub(in crate::iwarp) fn whole_send(body: &[u8], msn: u32) -> Option<&[u8]> {
        let (header, rest) = body.split_first_chunk::<UNTAGGED_FPDU_HEADER_LEN>()?;
        let control = u32::from_be_bytes([0, 0, LAST | DDP_VERSION, RDMAP_VERSION | Opcode::Send.raw()]);
        let (prefix, position) = (be32(header, 0), (be32(header, 8), be32(header, 12), be32(header, 16)));
        let plain = prefix & 0xffff == control && position == (SEND_QUEUE, msn, 0);
        rest.get(..((prefix >> 16) as usize).checked_sub(UNTAGGED_HEADER_LEN)?).filter(|_| plain)
    }

    /// Writes the ULPDU_Length field and this header to `out`.
    // Each small Send writes such a header. If this function were not inlined, its call would take
    // a sixteenth of the time of the whole Send.
    #[inline(always)]
    pub fn emit_into(&self, ulpdu_len: u16, out: &mut [u8; UNTAGGED_FPDU_HEADER_LEN]) {
        out[..4].copy_from_slice(&emit_prefix(ulpdu_len, 0, self.last, self.opcode));
        out[4..8].copy_from_slice(&self.reserved_or_stag.to_be_bytes());
        out[8..12].copy_from_slice(&self.queue.to_be_bytes());
        out[12..16].copy_from_slice(&self.msn.to_be_bytes());
        out[16..].copy_from_slice(&self.offset.to_be_bytes());
    }
}

fn emit_prefix(ulpdu_len: u16, tagged: u8, last: bool, opcode: Opcode) -> [u8; 4] {
    let [high, low] = ulpdu_len.to_be_bytes();
    [high, low, tagged | if last { LAST } else { 0 } | DDP_VERSION, RDMAP_VERSION | opcode.raw()]
}

/// The reason why a header is invalid. [`cause`](Self::cause) returns the error code for the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The caller has passed fewer octets than [`header_len`] requires. This is no fault of the peer.
    #[error("{have} octets of a header that needs {need}")]
    Truncated {
        /// The number of octets that the caller has passed.
        have: usize,
        /// The number of octets that are needed to parse further.
        need: usize,
    },
    /// The ULPDU_Length is below the minimum of the operation. The opcode is `None` if the ULPDU is too short to contain one.
    #[error("ULPDU_Length {ulpdu_len} is below the {min} of {opcode:?}")]
    TooShort {
        /// The operation, if the ULPDU contains the opcode.
        opcode: Option<Opcode>,
        /// The received ULPDU_Length.
        ulpdu_len: u16,
        /// The smallest valid ULPDU_Length.
        min: u16,
    },
    /// The ULPDU_Length is above the maximum of an operation whose messages have a fixed size.
    #[error("ULPDU_Length {ulpdu_len} is above the {max} of {opcode:?}")]
    TooLong {
        /// The operation.
        opcode: Opcode,
        /// The received ULPDU_Length.
        ulpdu_len: u16,
        /// The largest valid ULPDU_Length.
        max: u16,
    },
    /// The DDP version is not 1 (RFC 5041 §4.1).
    #[error("DDP version {version}, not 1")]
    DdpVersion {
        /// The received version.
        version: u8,
        /// The T bit, on which the error code depends.
        tagged: bool,
    },
    /// The RDMAP version is not 1 (RFC 5040 §4.1).
    #[error("RDMAP version {version}, not 1")]
    RdmapVersion {
        /// The received version.
        version: u8,
    },
    /// The opcode is undefined.
    #[error("unknown RDMAP opcode {0:#x}")]
    UnknownOpcode(u8),
    /// The T bit does not match the opcode (RFC 5040 §4.2). siw ignores the bit and relies on the opcode.
    #[error("T bit {tagged} contradicts {opcode:?}")]
    TaggedMismatch {
        /// The operation.
        opcode: Opcode,
        /// The received T bit.
        tagged: bool,
    },
}

impl HeaderError {
    /// Returns the cause of the Terminate for this error.
    ///
    /// If the peers did not agree on the extensions of RFC 7306, an opcode of the extensions is unexpected, even if the length is wrong,
    /// too. This method does not know the agreement. So before the caller uses the cause of a [`TooShort`](Self::TooShort) or a
    /// [`TooLong`](Self::TooLong), the caller must check [`Opcode::is_extension`].
    pub fn cause(&self) -> TerminateCause {
        match *self {
            Self::Truncated { .. } | Self::TooShort { .. } => TerminateCause::LLP_FPDU_LENGTH,
            // Only messages of a fixed size can be too long. Each buffer of their queue has exactly that size, so a longer message does not
            // fit into a buffer (RFC 5041 §7.1).
            Self::TooLong { .. } => TerminateCause::DDP_UNTAGGED_TOO_LONG,
            Self::DdpVersion { tagged: true, .. } => TerminateCause::DDP_TAGGED_VERSION,
            Self::DdpVersion { tagged: false, .. } => TerminateCause::DDP_UNTAGGED_VERSION,
            Self::RdmapVersion { .. } => TerminateCause::RDMAP_VERSION,
            Self::UnknownOpcode(_) | Self::TaggedMismatch { .. } => TerminateCause::RDMAP_OPCODE,
        }
    }
}

/// The header of a DDP segment, parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentHeader {
    /// A tagged segment. An STag and an offset in its header name the destination of the payload.
    Tagged(Tagged),
    /// An untagged segment. Its payload goes to the next buffer of a queue.
    Untagged(Untagged),
}

/// Returns the number of header octets that must arrive before [`SegmentHeader::parse`] is called. `prefix` is the ULPDU_Length field and
/// the two control octets.
///
/// The number is 16 for a tagged segment, 20 for an untagged one and 48 for a Read Request. All octets behind the header count as payload,
/// including the quoted headers in a Terminate.
pub fn header_len(prefix: &[u8; 4]) -> Result<usize, HeaderError> {
    Ok(len_of(parse_prefix(prefix)?.1))
}

/// Returns the length in octets of the header of an operation, including the ULPDU_Length field.
#[inline]
const fn len_of(opcode: Opcode) -> usize {
    match opcode {
        Opcode::ReadRequest => READ_REQUEST_FPDU_HEADER_LEN,
        opcode if opcode.is_tagged() => TAGGED_FPDU_HEADER_LEN,
        _ => UNTAGGED_FPDU_HEADER_LEN,
    }
}

/// Parses and checks the first four octets of an FPDU. Returns the L bit and the opcode. Checks the versions first, because the meaning of
/// the other bits depends on them.
#[inline]
fn parse_prefix(prefix: &[u8; 4]) -> Result<(bool, Opcode), HeaderError> {
    let [high, low, ddp, rdmap] = *prefix;
    let ulpdu_len = u16::from_be_bytes([high, low]);
    // A shortcut for the most frequent segments, plain Sends. Its result is the same as that of `parse_other_prefix`.
    let is_send = ddp & (TAGGED | DDP_VERSION_MASK) == DDP_VERSION
        && rdmap & (RDMAP_VERSION_MASK | 0x0f) == RDMAP_VERSION | Opcode::Send.raw();
    if is_send && ulpdu_len >= UNTAGGED_HEADER_LEN as u16 {
        return Ok((ddp & LAST != 0, Opcode::Send));
    }
    parse_other_prefix(prefix)
}

fn parse_other_prefix(prefix: &[u8; 4]) -> Result<(bool, Opcode), HeaderError> {
    let [high, low, ddp, rdmap] = *prefix;
    let ulpdu_len = u16::from_be_bytes([high, low]);
    // A shortcut for tagged segments, the most frequent segments after plain Sends. Its result is the same as that of the code below.
    if ddp & (TAGGED | DDP_VERSION_MASK) == TAGGED | DDP_VERSION && ulpdu_len >= TAGGED_HEADER_LEN as u16 {
        for opcode in [Opcode::Write, Opcode::ReadResponse] {
            if rdmap & (RDMAP_VERSION_MASK | 0x0f) == RDMAP_VERSION | opcode.raw() {
                return Ok((ddp & LAST != 0, opcode));
            }
        }
    }
    if ulpdu_len < 2 {
        return Err(HeaderError::TooShort { opcode: None, ulpdu_len, min: TAGGED_HEADER_LEN as u16 });
    }
    let tagged = ddp & TAGGED != 0;
    if ddp & DDP_VERSION_MASK != DDP_VERSION {
        return Err(HeaderError::DdpVersion { version: ddp & DDP_VERSION_MASK, tagged });
    }
    if rdmap & RDMAP_VERSION_MASK != RDMAP_VERSION {
        return Err(HeaderError::RdmapVersion { version: (rdmap & RDMAP_VERSION_MASK) >> 6 });
    }
    let opcode = Opcode::from_raw(rdmap);
    if let Opcode::Other(raw) = opcode {
        return Err(HeaderError::UnknownOpcode(raw));
    }
    if tagged != opcode.is_tagged() {
        return Err(HeaderError::TaggedMismatch { opcode, tagged });
    }
    let min = opcode.min_ulpdu_len();
    if ulpdu_len < min {
        return Err(HeaderError::TooShort { opcode: Some(opcode), ulpdu_len, min });
    }
    if let Some(max) = opcode.max_ulpdu_len().filter(|&max| ulpdu_len > max) {
        return Err(HeaderError::TooLong { opcode, ulpdu_len, max });
    }
    Ok((ddp & LAST != 0, opcode))
}

impl SegmentHeader {
    /// Parses a header. `bytes` begins with the ULPDU_Length field and has at least [`header_len`] octets.
    ///
    /// The second header of a Read Request, behind its untagged header, is parsed by [`ReadRequest`](super::ReadRequest).
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Self, HeaderError> {
        let truncated = |need| HeaderError::Truncated { have: bytes.len(), need };
        let prefix = bytes.first_chunk::<4>().ok_or(truncated(4))?;
        let (last, opcode) = parse_prefix(prefix)?;
        let need = len_of(opcode);
        if bytes.len() < need {
            return Err(truncated(need));
        }
        if opcode.is_tagged() {
            let bytes = bytes.first_chunk::<TAGGED_FPDU_HEADER_LEN>().ok_or(truncated(need))?;
            Ok(Self::Tagged(Tagged { last, opcode, stag: be32(bytes, 4), offset: be64(bytes, 8) }))
        } else {
            let bytes = bytes.first_chunk::<UNTAGGED_FPDU_HEADER_LEN>().ok_or(truncated(need))?;
            Ok(Self::Untagged(Untagged {
                last,
                opcode,
                reserved_or_stag: be32(bytes, 4),
                queue: be32(bytes, 8),
                msn: be32(bytes, 12),
                offset: be32(bytes, 16),
            }))
        }
    }

    /// Returns the length of the header in octets, including the ULPDU_Length field. [`header_len`] returns the same number.
    #[inline]
    pub fn octets(&self) -> usize {
        len_of(self.opcode())
    }

    /// Returns the RDMAP operation.
    #[inline]
    pub fn opcode(&self) -> Opcode {
        match self {
            Self::Tagged(tagged) => tagged.opcode,
            Self::Untagged(untagged) => untagged.opcode,
        }
    }

    /// Returns the L bit: true in the last segment of a message.
    pub fn last(&self) -> bool {
        match self {
            Self::Tagged(tagged) => tagged.last,
            Self::Untagged(untagged) => untagged.last,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::opcode::tests::any_known_opcode;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn awaited_lengths() {
        for (prefix, want) in [
            ([0, 14, 0xc1, 0x40], Ok(16)),
            ([0, 14, 0x81, 0x42], Ok(16)),
            ([0, 46, 0x41, 0x41], Ok(48)),
            ([0, 18, 0x41, 0x43], Ok(20)),
            ([0xff, 0xff, 0x01, 0x46], Ok(20)),
            ([0, 22, 0x41, 0x47], Ok(20)),
            ([0, 26, 0x41, 0x48], Ok(20)),
            ([0, 70, 0x41, 0x4a], Ok(20)),
            ([0, 30, 0x41, 0x4b], Ok(20)),
            // Reserved bits are set, and are ignored.
            ([0, 14, 0xfd, 0x70], Ok(16)),
            ([0, 1, 0xc1, 0x40], Err(HeaderError::TooShort { opcode: None, ulpdu_len: 1, min: 14 })),
            ([0, 13, 0xc1, 0x40], Err(HeaderError::TooShort { opcode: Some(Opcode::Write), ulpdu_len: 13, min: 14 })),
            ([0, 17, 0x41, 0x43], Err(HeaderError::TooShort { opcode: Some(Opcode::Send), ulpdu_len: 17, min: 18 })),
            (
                [0, 45, 0x41, 0x41],
                Err(HeaderError::TooShort { opcode: Some(Opcode::ReadRequest), ulpdu_len: 45, min: 46 }),
            ),
            ([0, 47, 0x41, 0x41], Err(HeaderError::TooLong { opcode: Opcode::ReadRequest, ulpdu_len: 47, max: 46 })),
            ([0, 18, 0x40, 0x43], Err(HeaderError::DdpVersion { version: 0, tagged: false })),
            ([0, 18, 0xc2, 0x40], Err(HeaderError::DdpVersion { version: 2, tagged: true })),
            ([0, 18, 0x41, 0x83], Err(HeaderError::RdmapVersion { version: 2 })),
            ([0, 18, 0x41, 0x4c], Err(HeaderError::UnknownOpcode(12))),
            ([0, 18, 0xc1, 0x43], Err(HeaderError::TaggedMismatch { opcode: Opcode::Send, tagged: true })),
            ([0, 18, 0x41, 0x40], Err(HeaderError::TaggedMismatch { opcode: Opcode::Write, tagged: false })),
        ] {
            assert_eq!(header_len(&prefix), want, "{prefix:02x?}");
        }
    }

    #[test]
    fn causes() {
        for (prefix, cause) in [
            ([0, 13, 0xc1, 0x40], (2, 0, 3)),
            ([0, 18, 0xc2, 0x40], (1, 1, 4)),
            ([0, 18, 0x42, 0x43], (1, 2, 6)),
            ([0, 47, 0x41, 0x41], (1, 2, 5)),
            ([0, 18, 0x41, 0x03], (0, 2, 5)),
            ([0, 18, 0x41, 0x4f], (0, 2, 6)),
            ([0, 18, 0xc1, 0x43], (0, 2, 6)),
        ] {
            let got = header_len(&prefix).unwrap_err().cause();
            assert_eq!((got.layer.raw(), got.etype, got.code), cause, "{prefix:02x?}");
        }
    }

    #[test]
    fn too_few_octets() {
        let mut bytes = [0; UNTAGGED_FPDU_HEADER_LEN];
        Untagged::TERMINATE.emit_into(22, &mut bytes);
        assert_eq!(SegmentHeader::parse(&bytes), Ok(SegmentHeader::Untagged(Untagged::TERMINATE)));
        for have in 0..bytes.len() {
            let need = if have < 4 { 4 } else { 20 };
            assert_eq!(SegmentHeader::parse(&bytes[..have]), Err(HeaderError::Truncated { have, need }));
        }
        // For a Read Request, the octets to parse include the Read Request header, which is missing here.
        Untagged { opcode: Opcode::ReadRequest, ..Untagged::TERMINATE }.emit_into(46, &mut bytes);
        assert_eq!(SegmentHeader::parse(&bytes), Err(HeaderError::Truncated { have: 20, need: 48 }));
    }

    proptest! {
        #[test]
        fn round_trip(
            opcode in any_known_opcode(), last: bool, word: u32, queue: u32, msn: u32, offset: u64, ulpdu_len: u16,
        ) {
            let ulpdu_len = ulpdu_len.clamp(opcode.min_ulpdu_len(), opcode.max_ulpdu_len().unwrap_or(u16::MAX));
            let mut bytes = [0; READ_REQUEST_FPDU_HEADER_LEN];
            let header = if opcode.is_tagged() {
                let tagged = Tagged { last, opcode, stag: word, offset };
                tagged.emit_into(ulpdu_len, bytes.first_chunk_mut().unwrap());
                SegmentHeader::Tagged(tagged)
            } else {
                let offset = offset as u32;
                let untagged = Untagged { last, opcode, reserved_or_stag: word, queue, msn, offset };
                untagged.emit_into(ulpdu_len, bytes.first_chunk_mut().unwrap());
                SegmentHeader::Untagged(untagged)
            };
            prop_assert_eq!(SegmentHeader::parse(&bytes), Ok(header));
            prop_assert_eq!((header.opcode(), header.last()), (opcode, last));
            prop_assert_eq!(u16::from_be_bytes([bytes[0], bytes[1]]), ulpdu_len);
        }

        /// Random octets cause no panic. If they are a valid header, writing the parsed header gives the same octets, except for reserved
        /// bits.
        #[test]
        fn takes_anything(mut bytes in prop::collection::vec(any::<u8>(), 0..80), sane: bool, op in 0u8..12) {
            if let (true, Some(control)) = (sane, bytes.get_mut(2..4)) {
                control.copy_from_slice(&[control[0] & 0xfc | 1, 0x40 | op]);
            }
            match SegmentHeader::parse(&bytes) {
                Err(error) => drop((error.cause(), error.to_string())),
                Ok(header) => {
                    let ulpdu_len = u16::from_be_bytes([bytes[0], bytes[1]]);
                    bytes[2] &= !0x3c;
                    bytes[3] &= !0x30;
                    let mut out = [0; UNTAGGED_FPDU_HEADER_LEN];
                    let len = match header {
                        SegmentHeader::Tagged(tagged) => {
                            tagged.emit_into(ulpdu_len, out.first_chunk_mut().unwrap());
                            TAGGED_FPDU_HEADER_LEN
                        }
                        SegmentHeader::Untagged(untagged) => {
                            untagged.emit_into(ulpdu_len, &mut out);
                            UNTAGGED_FPDU_HEADER_LEN
                        }
                    };
                    prop_assert_eq!(&out[..len], &bytes[..len]);
                }
            }
        }
    }

    /// A test of all 2^32 prefixes would take too long. This test covers all control octets, with the lengths near a limit.
    #[test]
    fn every_control_octet() {
        for ulpdu_len in [0u16, 1, 2, 13, 14, 17, 18, 26, 30, 45, 46, 47, 70, 71, u16::MAX] {
            let [high, low] = ulpdu_len.to_be_bytes();
            for control in 0..=u16::MAX {
                let [ddp, rdmap] = control.to_be_bytes();
                let mut bytes = [0; READ_REQUEST_FPDU_HEADER_LEN];
                bytes[..4].copy_from_slice(&[high, low, ddp, rdmap]);
                let awaited = header_len(&[high, low, ddp, rdmap]);
                assert_eq!(SegmentHeader::parse(&bytes).err(), awaited.err());
                // The header length never exceeds the FPDU. Otherwise a receiver would wait for octets of the next FPDU.
                assert!(awaited.is_ok_and(|len| len <= 2 + usize::from(ulpdu_len)) || awaited.is_err());
            }
        }
    }
}
