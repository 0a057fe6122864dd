//! RDMAP: operations, the Read Request header and the Terminate message (RFC 5040), opcodes of RFC 7306.

use std::fmt;

use super::ddp::{TAGGED_HEADER_LEN, UNTAGGED_HEADER_LEN};
use super::{be32, be64};

/// The queue of Sends and Immediate Data (RFC 5040 §4.1).
pub const SEND_QUEUE: u32 = 0;
/// The queue of Read and Atomic Requests (RFC 5040 §4.1, RFC 7306 §5).
pub const READ_REQUEST_QUEUE: u32 = 1;
/// The queue of the Terminate (RFC 5040 §4.1).
pub const TERMINATE_QUEUE: u32 = 2;
/// The queue of Atomic Responses (RFC 7306 §5).
pub const ATOMIC_RESPONSE_QUEUE: u32 = 3;
/// The Read Request header behind the untagged header (RFC 5040 §4.4).
pub const READ_REQUEST_LEN: usize = 28;
/// The Terminate Control word (RFC 5040 §4.8).
pub const TERMINATE_CONTROL_LEN: usize = 4;
/// A Terminate's payload with all that it can quote (RFC 5040 §4.8).
pub const MAX_TERMINATE_LEN: usize = TERMINATE_CONTROL_LEN + 2 + UNTAGGED_HEADER_LEN + READ_REQUEST_LEN;

/// What a segment does (RFC 5040 §4.1, RFC 7306 §8.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Opcode {
    /// RDMA Write, 0.
    Write,
    /// RDMA Read Request, 1.
    ReadRequest,
    /// RDMA Read Response, 2.
    ReadResponse,
    /// Send, 3.
    Send,
    /// Send with Invalidate, 4.
    SendInvalidate,
    /// Send with Solicited Event, 5.
    SendSolicited,
    /// Send with Solicited Event and Invalidate, 6.
    SendSolicitedInvalidate,
    /// Terminate, 7.
    Terminate,
    /// Immediate Data (RFC 7306 §6), 8.
    Immediate,
    /// Immediate Data with Solicited Event (RFC 7306 §6), 9.
    ImmediateSolicited,
    /// Atomic Request (RFC 7306 §5), 10.
    AtomicRequest,
    /// Atomic Response (RFC 7306 §5), 11.
    AtomicResponse,
    /// No meaning known: 12 to 15.
    Other(u8),
}

impl Opcode {
    /// From the low four bits of the RDMAP control octet.
    pub const fn from_raw(raw: u8) -> Self {
        match raw & 0x0f {
            0 => Self::Write,
            1 => Self::ReadRequest,
            2 => Self::ReadResponse,
            3 => Self::Send,
            4 => Self::SendInvalidate,
            5 => Self::SendSolicited,
            6 => Self::SendSolicitedInvalidate,
            7 => Self::Terminate,
            8 => Self::Immediate,
            9 => Self::ImmediateSolicited,
            10 => Self::AtomicRequest,
            11 => Self::AtomicResponse,
            other => Self::Other(other),
        }
    }

    /// The four bits on the wire.
    pub const fn raw(self) -> u8 {
        match self {
            Self::Write => 0,
            Self::ReadRequest => 1,
            Self::ReadResponse => 2,
            Self::Send => 3,
            Self::SendInvalidate => 4,
            Self::SendSolicited => 5,
            Self::SendSolicitedInvalidate => 6,
            Self::Terminate => 7,
            Self::Immediate => 8,
            Self::ImmediateSolicited => 9,
            Self::AtomicRequest => 10,
            Self::AtomicResponse => 11,
            Self::Other(other) => other & 0x0f,
        }
    }

    /// The operation goes by STag and offset; the opcode alone decides (RFC 5040 §4.2).
    pub const fn is_tagged(self) -> bool {
        matches!(self, Self::Write | Self::ReadResponse)
    }

    /// One of the four Sends, which share a queue and its MSNs.
    pub const fn is_send(self) -> bool {
        matches!(self, Self::Send | Self::SendInvalidate | Self::SendSolicited | Self::SendSolicitedInvalidate)
    }

    /// A Send whose header names an STag to invalidate.
    pub const fn invalidates(self) -> bool {
        matches!(self, Self::SendInvalidate | Self::SendSolicitedInvalidate)
    }

    /// Asks for an event at the receiver.
    pub const fn solicited(self) -> bool {
        matches!(self, Self::SendSolicited | Self::SendSolicitedInvalidate | Self::ImmediateSolicited)
    }

    /// Of RFC 7306: unexpected unless both sides agreed. siw terminates the stream on these.
    pub const fn is_extension(self) -> bool {
        matches!(self, Self::Immediate | Self::ImmediateSolicited | Self::AtomicRequest | Self::AtomicResponse)
    }

    /// The least ULPDU_Length that holds the headers.
    pub const fn min_ulpdu_len(self) -> u16 {
        (match self {
            Self::Write | Self::ReadResponse => TAGGED_HEADER_LEN,
            Self::ReadRequest => UNTAGGED_HEADER_LEN + READ_REQUEST_LEN,
            Self::Terminate => UNTAGGED_HEADER_LEN + TERMINATE_CONTROL_LEN,
            Self::Immediate | Self::ImmediateSolicited => UNTAGGED_HEADER_LEN + 8,
            Self::AtomicRequest => UNTAGGED_HEADER_LEN + 52,
            Self::AtomicResponse => UNTAGGED_HEADER_LEN + 12,
            _ => UNTAGGED_HEADER_LEN,
        }) as u16
    }

    /// The ULPDU_Length of operations whose message has one size.
    pub const fn max_ulpdu_len(self) -> Option<u16> {
        match self {
            Self::ReadRequest
            | Self::Immediate
            | Self::ImmediateSolicited
            | Self::AtomicRequest
            | Self::AtomicResponse => Some(self.min_ulpdu_len()),
            _ => None,
        }
    }
}

/// The header of an RDMA Read Request (RFC 5040 §4.4), behind the untagged header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// Data Sink STag: where the requester wants the data.
    pub sink_stag: u32,
    /// Data Sink Tagged Offset.
    pub sink_offset: u64,
    /// RDMA Read Message Size; for 0 no STag may be checked (RFC 5040 §5.2.1).
    pub size: u32,
    /// Data Source STag: what the responder reads.
    pub source_stag: u32,
    /// Data Source Tagged Offset.
    pub source_offset: u64,
}

impl ReadRequest {
    /// Reads the header; any octets are one.
    pub fn parse(bytes: &[u8; READ_REQUEST_LEN]) -> Self {
        Self {
            sink_stag: be32(bytes, 0),
            sink_offset: be64(bytes, 4),
            size: be32(bytes, 12),
            source_stag: be32(bytes, 16),
            source_offset: be64(bytes, 20),
        }
    }

    /// The octets of the header.
    pub fn emit(&self) -> [u8; READ_REQUEST_LEN] {
        let mut out = [0; READ_REQUEST_LEN];
        out[..4].copy_from_slice(&self.sink_stag.to_be_bytes());
        out[4..12].copy_from_slice(&self.sink_offset.to_be_bytes());
        out[12..16].copy_from_slice(&self.size.to_be_bytes());
        out[16..20].copy_from_slice(&self.source_stag.to_be_bytes());
        out[20..].copy_from_slice(&self.source_offset.to_be_bytes());
        out
    }
}

/// The layer that found an error (RFC 5040 §4.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Layer {
    /// RDMAP, 0.
    Rdmap,
    /// DDP, 1.
    Ddp,
    /// The layer below DDP, here MPA, 2.
    Llp,
    /// No meaning known: 3 to 15.
    Other(u8),
}

impl Layer {
    /// From four bits.
    pub const fn from_raw(raw: u8) -> Self {
        match raw & 0x0f {
            0 => Self::Rdmap,
            1 => Self::Ddp,
            2 => Self::Llp,
            other => Self::Other(other),
        }
    }

    /// The four bits on the wire.
    pub const fn raw(self) -> u8 {
        match self {
            Self::Rdmap => 0,
            Self::Ddp => 1,
            Self::Llp => 2,
            Self::Other(other) => other & 0x0f,
        }
    }
}

/// Why a stream was terminated: layer, error type and error code (RFC 5040 §4.8; registry of RFC 6580).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TerminateCause {
    /// The layer that found the error.
    pub layer: Layer,
    /// Error type within the layer, four bits.
    pub etype: u8,
    /// Error code within the type.
    pub code: u8,
}

/// One table for the constants and the phrases, so that neither is without the other.
macro_rules! causes {
    ($($(#[$doc:meta])* $name:ident = $layer:ident / $etype:literal / $code:literal, $phrase:literal;)*) => {
        impl TerminateCause {
            $($(#[$doc])* pub const $name: Self = Self { layer: Layer::$layer, etype: $etype, code: $code };)*

            /// The words of the registry (RFC 6580), if it has this cause.
            pub const fn phrase(self) -> Option<&'static str> {
                match (self.layer, self.etype, self.code) {
                    $((Layer::$layer, $etype, $code) => Some($phrase),)*
                    // The code of these two means nothing (RFC 5040 §4.8).
                    (Layer::Rdmap, 0, _) => Some("Local Catastrophic Error"),
                    (Layer::Ddp, 0, _) => Some("DDP Local Catastrophic Error"),
                    _ => None,
                }
            }

            /// Every named cause.
            #[cfg(test)]
            const NAMED: &[(&str, Self)] = &[$((stringify!($name), Self::$name),)*];
        }
    };
}

causes! {
    /// The sender of the Terminate failed on its own.
    LOCAL_CATASTROPHIC = Rdmap / 0 / 0, "Local Catastrophic Error";
    /// A Read Request names an STag that is not valid.
    RDMAP_INVALID_STAG = Rdmap / 1 / 0, "Remote Protection Error: Invalid STag";
    /// A Read Request leaves the region.
    RDMAP_BOUNDS = Rdmap / 1 / 1, "Remote Protection Error: Base or bounds violation";
    /// A Read Request without the right to read.
    RDMAP_ACCESS = Rdmap / 1 / 2, "Remote Protection Error: Access rights violation";
    /// A Read Request to a region of another protection domain.
    RDMAP_STAG_NOT_ASSOCIATED = Rdmap / 1 / 3, "Remote Protection Error: STag not associated with RDMAP Stream";
    /// A Read Request whose Tagged Offset wraps.
    RDMAP_TO_WRAP = Rdmap / 1 / 4, "Remote Protection Error: TO wrap";
    /// A Send with Invalidate of an STag that it may not invalidate.
    RDMAP_CANNOT_INVALIDATE = Rdmap / 1 / 9, "Remote Protection Error: STag cannot be Invalidated";
    /// A protection error of another kind.
    RDMAP_PROTECTION_UNSPECIFIED = Rdmap / 1 / 0xff, "Remote Protection Error: Unspecified Error";
    /// The RDMAP version is not 1.
    RDMAP_VERSION = Rdmap / 2 / 5, "Remote Operation Error: Invalid RDMAP version";
    /// The opcode is unknown, or has no place here.
    RDMAP_OPCODE = Rdmap / 2 / 6, "Remote Operation Error: Unexpected OpCode";
    /// The stream cannot go on; also for more Read Requests than the IRD allows.
    RDMAP_STREAM_CATASTROPHIC =
        Rdmap / 2 / 7, "Remote Operation Error: Catastrophic error, localized to RDMAP Stream";
    /// More than the stream cannot go on.
    RDMAP_GLOBAL_CATASTROPHIC = Rdmap / 2 / 8, "Remote Operation Error: Catastrophic error, global";
    /// siw's code for a Send with Invalidate of an unknown STag.
    RDMAP_OPERATION_CANNOT_INVALIDATE = Rdmap / 2 / 9, "Remote Operation Error: STag cannot be Invalidated";
    /// An operation error of another kind.
    RDMAP_OPERATION_UNSPECIFIED = Rdmap / 2 / 0xff, "Remote Operation Error: Unspecified Error";
    /// DDP at the sender of the Terminate failed on its own; siw's answer to a stray Read Response.
    DDP_LOCAL_CATASTROPHIC = Ddp / 0 / 0, "DDP Local Catastrophic Error";
    /// A tagged segment names an STag that is not valid, or that it may not write.
    DDP_TAGGED_INVALID_STAG = Ddp / 1 / 0, "Tagged Buffer Error: Invalid STag";
    /// A tagged segment leaves the region.
    DDP_TAGGED_BOUNDS = Ddp / 1 / 1, "Tagged Buffer Error: Base or bounds violation";
    /// A tagged segment to a region of another protection domain.
    DDP_TAGGED_NOT_ASSOCIATED = Ddp / 1 / 2, "Tagged Buffer Error: STag not associated with DDP Stream";
    /// A tagged segment whose Tagged Offset wraps.
    DDP_TAGGED_TO_WRAP = Ddp / 1 / 3, "Tagged Buffer Error: TO wrap";
    /// A tagged segment whose DDP version is not 1.
    DDP_TAGGED_VERSION = Ddp / 1 / 4, "Tagged Buffer Error: Invalid DDP version";
    /// No such queue, or not for this operation.
    INVALID_QN = Ddp / 2 / 1, "Untagged Buffer Error: Invalid QN";
    /// No receive is posted. siw says so for a receive that is too small, too.
    DDP_UNTAGGED_NO_BUFFER = Ddp / 2 / 2, "Untagged Buffer Error: Invalid MSN - no buffer available";
    /// Not the MSN that is next.
    INVALID_MSN = Ddp / 2 / 3, "Untagged Buffer Error: Invalid MSN - MSN range is not valid";
    /// Not the Message Offset that is next.
    INVALID_MO = Ddp / 2 / 4, "Untagged Buffer Error: Invalid MO";
    /// The receive is too small.
    DDP_UNTAGGED_TOO_LONG = Ddp / 2 / 5, "Untagged Buffer Error: DDP Message too long for available buffer";
    /// An untagged segment whose DDP version is not 1.
    DDP_UNTAGGED_VERSION = Ddp / 2 / 6, "Untagged Buffer Error: Invalid DDP version";
    /// The TCP connection went away (RFC 5044 §8).
    LLP_CONNECTION_LOST = Llp / 0 / 1, "MPA Error: TCP connection closed, terminated or lost";
    /// The CRC of an FPDU does not match (RFC 5044 §8).
    LLP_CRC = Llp / 0 / 2, "MPA Error: CRC mismatch";
    /// An FPDU does not begin where it should, or its length cannot be (RFC 5044 §8).
    LLP_FPDU_LENGTH = Llp / 0 / 3, "MPA Error: Marker and ULPDU Length field mismatch";
    /// A startup frame cannot be understood (RFC 5044 §8).
    LLP_STARTUP = Llp / 0 / 4, "MPA Error: Invalid MPA Request or Reply Frame";
    /// MPA at the sender of the Terminate failed on its own (RFC 6581 §8).
    LLP_LOCAL_CATASTROPHIC = Llp / 0 / 5, "MPA Error: Local Catastrophic Error";
    /// The responder wants more READs outstanding than the initiator serves (RFC 6581 §8).
    LLP_IRD = Llp / 0 / 6, "MPA Error: Insufficient IRD Resources";
    /// The responder chose no RTR that the initiator offered (RFC 6581 §8).
    LLP_RTR = Llp / 0 / 7, "MPA Error: No Matching RTR Option";
}

impl fmt::Display for TerminateCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phrase = self.phrase().unwrap_or("unknown error");
        write!(f, "{phrase} ({:x}/{:x}/{:x})", self.layer.raw(), self.etype, self.code)
    }
}

/// The headers of the segment that a Terminate is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quote {
    segment_len: u16,
    ddp: [u8; UNTAGGED_HEADER_LEN],
    ddp_len: u8,
    rdmap: Option<[u8; READ_REQUEST_LEN]>,
}

impl Quote {
    /// From received octets that begin at the ULPDU_Length field: as many headers as are there.
    ///
    /// Taken raw, since the fault may be in any bit; `None` without a whole DDP header.
    pub fn new(fpdu: &[u8]) -> Option<Self> {
        let (&[high, low, ddp, rdmap], _) = fpdu.split_first_chunk::<4>()?;
        let mut quote = Self { segment_len: u16::from_be_bytes([high, low]), ddp: [0; _], ddp_len: 0, rdmap: None };
        let rest = quote.take_ddp(ddp, &fpdu[2..])?;
        if Opcode::from_raw(rdmap) == Opcode::ReadRequest {
            quote.rdmap = rest.first_chunk().copied();
        }
        Some(quote)
    }

    /// Takes the DDP header, whose size the T bit tells, and returns what is behind it.
    fn take_ddp<'a>(&mut self, control: u8, bytes: &'a [u8]) -> Option<&'a [u8]> {
        let len = if control & 0x80 != 0 { TAGGED_HEADER_LEN } else { UNTAGGED_HEADER_LEN };
        let (header, rest) = bytes.split_at_checked(len)?;
        self.ddp[..len].copy_from_slice(header);
        self.ddp_len = len as u8;
        Some(rest)
    }

    /// DDP Segment Length: the ULPDU_Length of the segment. siw gives the length of the payload alone.
    pub fn segment_len(&self) -> u16 {
        self.segment_len
    }

    /// The DDP header from the control octets on, without the ULPDU_Length field; may be empty.
    pub fn ddp_header(&self) -> &[u8] {
        self.ddp.get(..usize::from(self.ddp_len)).unwrap_or_default()
    }

    /// The Read Request header.
    pub fn read_request(&self) -> Option<ReadRequest> {
        self.rdmap.as_ref().map(ReadRequest::parse)
    }
}

/// The payload of a Terminate message (RFC 5040 §4.8).
///
/// siw lays the bits of the control word out in little-endian order: `layer` and `etype` swap places, and the
/// three header bits are the low ones of their octet. Both orders are read; only the RFC's is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Terminate {
    /// Why; if the bit order cannot be told, the reading that the registry knows, and the RFC's if it knows both.
    pub cause: TerminateCause,
    /// The other reading, if the bit order cannot be told: report both.
    pub other_reading: Option<TerminateCause>,
    /// The Terminate Control word as on the wire.
    pub raw: u32,
    /// The headers that came along.
    pub quote: Option<Quote>,
}

/// HdrCt of the RFC: M (segment length valid), D (DDP header), R (RDMAP header).
const RFC_BITS: [u8; 3] = [0x80, 0x40, 0x20];
/// The same in siw's order.
const SIW_BITS: [u8; 3] = [0x01, 0x02, 0x04];

impl Terminate {
    /// To be sent. An RDMAP header goes along only with an RDMAP error, none with an LLP error (RFC 5040 §4.8).
    pub fn new(cause: TerminateCause, quote: Option<Quote>) -> Self {
        let quote = match cause.layer {
            Layer::Rdmap => quote,
            Layer::Ddp => quote.map(|quote| Quote { rdmap: None, ..quote }),
            _ => None,
        };
        let [m, d, r] = RFC_BITS;
        let bits = quote.map_or(0, |quote| m | d | if quote.rdmap.is_some() { r } else { 0 });
        let raw = u32::from_be_bytes([cause.layer.raw() << 4 | cause.etype & 0x0f, cause.code, bits, 0]);
        Self { cause, other_reading: None, raw, quote }
    }

    /// Reads the payload behind the untagged header; `None` below the control word's four octets.
    ///
    /// A quote that is cut short is kept as far as it goes: this is the last that the peer will say.
    pub fn parse(payload: &[u8]) -> Option<Self> {
        let (&control, rest) = payload.split_first_chunk::<TERMINATE_CONTROL_LEN>()?;
        let [types, code, bits, _] = control;
        let rfc = TerminateCause { layer: Layer::from_raw(types >> 4), etype: types & 0x0f, code };
        let siw = TerminateCause { layer: Layer::from_raw(types), etype: types >> 4, code };
        let (cause, other_reading, [m, d, r]) = if bits & 0xe0 != 0 {
            (rfc, None, RFC_BITS)
        } else if bits & 0x07 != 0 {
            (siw, None, SIW_BITS)
        } else if rfc == siw {
            (rfc, None, RFC_BITS)
        } else if rfc.phrase().is_none() && siw.phrase().is_some() {
            (siw, Some(rfc), RFC_BITS)
        } else {
            (rfc, Some(siw), RFC_BITS)
        };
        let quote = if bits & m != 0 { Self::parse_quote(rest, bits & d != 0, bits & r != 0) } else { None };
        Some(Self { cause, other_reading, raw: u32::from_be_bytes(control), quote })
    }

    fn parse_quote(bytes: &[u8], ddp: bool, rdmap: bool) -> Option<Quote> {
        let (&len, rest) = bytes.split_first_chunk::<2>()?;
        let mut quote = Quote { segment_len: u16::from_be_bytes(len), ddp: [0; _], ddp_len: 0, rdmap: None };
        if let (true, Some(&control)) = (ddp, rest.first())
            && let Some(rest) = quote.take_ddp(control, rest)
            && rdmap
        {
            quote.rdmap = rest.first_chunk().copied();
        }
        Some(quote)
    }

    /// Writes the payload behind the untagged header, `raw` as it is, and returns its length.
    pub fn emit_into(&self, out: &mut [u8; MAX_TERMINATE_LEN]) -> usize {
        let mut len = 0;
        let mut push = |bytes: &[u8]| {
            if let Some(place) = out.get_mut(len..len + bytes.len()) {
                place.copy_from_slice(bytes);
                len += bytes.len();
            }
        };
        push(&self.raw.to_be_bytes());
        if let Some(quote) = &self.quote {
            push(&quote.segment_len.to_be_bytes());
            push(quote.ddp_header());
            if let Some(rdmap) = &quote.rdmap {
                push(rdmap);
            }
        }
        len
    }
}

impl fmt::Display for Terminate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.cause)?;
        match self.other_reading {
            Some(other) => write!(f, ", or in the other bit order {other}; control word {:#010x}", self.raw),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(in super::super) fn any_known_opcode() -> impl Strategy<Value = Opcode> {
        (0u8..12).prop_map(Opcode::from_raw)
    }

    #[test]
    fn opcodes() {
        for raw in 0..=u8::MAX {
            assert_eq!(Opcode::from_raw(raw).raw(), raw & 0x0f);
            assert_eq!(matches!(Opcode::from_raw(raw), Opcode::Other(_)), raw & 0x0f > 11);
            assert_eq!(Layer::from_raw(raw).raw(), raw & 0x0f);
        }
        let which = |test: fn(Opcode) -> bool| (0..16).filter(|&raw| test(Opcode::from_raw(raw))).collect::<Vec<u8>>();
        assert_eq!(which(Opcode::is_tagged), [0, 2]);
        assert_eq!(which(Opcode::is_send), [3, 4, 5, 6]);
        assert_eq!(which(Opcode::invalidates), [4, 6]);
        assert_eq!(which(Opcode::solicited), [5, 6, 9]);
        assert_eq!(which(Opcode::is_extension), [8, 9, 10, 11]);
    }

    #[test]
    fn least_lengths() {
        let lengths: Vec<u16> = (0..12).map(|raw| Opcode::from_raw(raw).min_ulpdu_len()).collect();
        assert_eq!(lengths, [14, 46, 14, 18, 18, 18, 18, 22, 26, 26, 70, 30]);
    }

    #[test]
    fn causes_are_distinct_and_print() {
        for (index, (name, cause)) in TerminateCause::NAMED.iter().enumerate() {
            assert!(cause.phrase().is_some(), "{name}");
            assert!(TerminateCause::NAMED[..index].iter().all(|(_, other)| other != cause), "{name}");
        }
        assert_eq!(TerminateCause::RDMAP_PROTECTION_UNSPECIFIED.to_string().split(" (").last(), Some("0/1/ff)"));
        assert_eq!(
            TerminateCause::DDP_UNTAGGED_NO_BUFFER.to_string(),
            "Untagged Buffer Error: Invalid MSN - no buffer available (1/2/2)"
        );
        let unknown = TerminateCause { layer: Layer::from_raw(9), etype: 10, code: 11 };
        assert_eq!(unknown.to_string(), "unknown error (9/a/b)");
    }

    #[test]
    fn both_bit_orders() {
        use TerminateCause as C;
        for (control, cause, other) in [
            // RFC order with headers.
            ([0x12, 0x02, 0xc0, 0], C::DDP_UNTAGGED_NO_BUFFER, None),
            ([0x01, 0x00, 0xe0, 0], C::RDMAP_INVALID_STAG, None),
            // siw's, with headers.
            ([0x21, 0x02, 0x03, 0], C::DDP_UNTAGGED_NO_BUFFER, None),
            ([0x11, 0x00, 0x03, 0], C::DDP_TAGGED_INVALID_STAG, None),
            ([0x10, 0x00, 0x07, 0], C::RDMAP_INVALID_STAG, None),
            ([0x20, 0x07, 0x03, 0], C::RDMAP_STREAM_CATASTROPHIC, None),
            ([0x01, 0x00, 0x03, 0], C::DDP_LOCAL_CATASTROPHIC, None),
            // No headers: the registry decides if it knows only one reading.
            ([0x02, 0x02, 0x00, 0], C::LLP_CRC, Some((0, 2, 2))),
            ([0x20, 0x02, 0x00, 0], C::LLP_CRC, Some((0, 2, 2))),
            ([0x21, 0x06, 0x00, 0], C::DDP_UNTAGGED_VERSION, Some((2, 1, 6))),
            ([0x12, 0x06, 0x00, 0], C::DDP_UNTAGGED_VERSION, Some((2, 1, 6))),
            // It knows both: the RFC's order.
            ([0x02, 0x06, 0x00, 0], C::RDMAP_OPCODE, Some((2, 0, 6))),
            ([0x20, 0x06, 0x00, 0], C::LLP_IRD, Some((0, 2, 6))),
            // The same either way.
            ([0x11, 0x04, 0x00, 0], C::DDP_TAGGED_VERSION, None),
            ([0x00, 0xff, 0x00, 0], C { layer: Layer::Rdmap, etype: 0, code: 0xff }, None),
        ] {
            let parsed = Terminate::parse(&control).unwrap();
            assert_eq!(parsed.cause, cause, "{control:02x?}");
            let seen = parsed.other_reading.map(|other| (other.layer.raw(), other.etype, other.code));
            assert_eq!(seen, other, "{control:02x?}");
            assert_eq!(parsed.raw, u32::from_be_bytes(control));
            assert_eq!(parsed.to_string().contains("other bit order"), other.is_some());
        }
        assert_eq!(Terminate::parse(&[0x12, 0x02, 0xc0]), None);
    }

    #[test]
    fn quotes_what_the_layer_calls_for() {
        let mut fpdu = vec![0, 46, 0x41, 0x41];
        fpdu.extend(0..44u8);
        let quote = Quote::new(&fpdu).unwrap();
        assert_eq!((quote.segment_len(), quote.ddp_header()), (46, &fpdu[2..20]));
        assert_eq!(quote.read_request().unwrap().emit(), fpdu[20..]);
        for (cause, want, len) in [
            (TerminateCause::RDMAP_BOUNDS, 0x0101_e000, 52),
            (TerminateCause::INVALID_MSN, 0x1203_c000, 24),
            (TerminateCause::LLP_CRC, 0x2002_0000, 4),
        ] {
            let mut out = [0; MAX_TERMINATE_LEN];
            let terminate = Terminate::new(cause, Some(quote));
            assert_eq!((terminate.raw, terminate.emit_into(&mut out)), (want, len), "{cause}");
        }
        // A tagged header is shorter; one that is cut off is none.
        fpdu[2..4].copy_from_slice(&[0xc1, 0x40]);
        assert_eq!(Quote::new(&fpdu).unwrap().ddp_header(), &fpdu[2..16]);
        assert_eq!(Quote::new(&fpdu[..15]), None);
        assert_eq!(Quote::new(&[]), None);
    }

    proptest! {
        #[test]
        fn read_request_round_trip(bytes: [u8; READ_REQUEST_LEN]) {
            prop_assert_eq!(ReadRequest::parse(&bytes).emit(), bytes);
        }

        #[test]
        fn read_request_fields(sink_stag: u32, sink_offset: u64, size: u32, source_stag: u32, source_offset: u64) {
            let request = ReadRequest { sink_stag, sink_offset, size, source_stag, source_offset };
            prop_assert_eq!(ReadRequest::parse(&request.emit()), request);
        }

        #[test]
        fn terminate_round_trip(which in 0..TerminateCause::NAMED.len(), fpdu in prop::collection::vec(any::<u8>(), 0..80)) {
            let sent = Terminate::new(TerminateCause::NAMED[which].1, Quote::new(&fpdu));
            let mut out = [0; MAX_TERMINATE_LEN];
            let len = sent.emit_into(&mut out);
            let got = Terminate::parse(&out[..len]).unwrap();
            prop_assert_eq!((got.raw, got.quote), (sent.raw, sent.quote));
            // Without headers the order of bits is a guess, but the truth is among the readings.
            prop_assert!(got.cause == sent.cause || got.other_reading == Some(sent.cause));
            prop_assert!(got.cause == sent.cause || sent.quote.is_none());
            prop_assert_eq!(got.cause, sent.cause);
        }

        #[test]
        fn terminate_takes_anything(mut payload in prop::collection::vec(any::<u8>(), 0..80), bits in 0usize..5) {
            if let Some(octet) = payload.get_mut(2) {
                *octet = [*octet, 0xc0, 0xe0, 0x03, 0x07][bits];
            }
            if let Some(parsed) = Terminate::parse(&payload) {
                let mut out = [0; MAX_TERMINATE_LEN];
                let len = parsed.emit_into(&mut out);
                prop_assert_eq!(&out[..len], &payload[..len]);
                prop_assert_eq!(Terminate::parse(&out[..len]), Some(parsed));
                let _ = parsed.to_string();
            } else {
                prop_assert!(payload.len() < 4);
            }
            let _ = Quote::new(&payload);
        }
    }
}
