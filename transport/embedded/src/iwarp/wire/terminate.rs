//! The Terminate message, with which a side ends its stream after a failure (RFC 5040 §4.8).

use std::fmt;

use super::cause::{Layer, TerminateCause};
use super::opcode::{Opcode, TAGGED_HEADER_LEN, TERMINATE_CONTROL_LEN, UNTAGGED_HEADER_LEN};
use super::read::{READ_REQUEST_LEN, ReadRequest};

/// The length of the longest Terminate payload, which quotes all headers (RFC 5040 §4.8).
pub const MAX_TERMINATE_LEN: usize = TERMINATE_CONTROL_LEN + 2 + UNTAGGED_HEADER_LEN + READ_REQUEST_LEN;

/// The headers of a refused segment, as a Terminate quotes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quote {
    segment_len: u16,
    ddp: [u8; UNTAGGED_HEADER_LEN],
    ddp_len: u8,
    rdmap: Option<[u8; READ_REQUEST_LEN]>,
}

impl Quote {
    /// Copies the headers from the first octets of an FPDU, as far as the headers have arrived.
    ///
    /// The headers are not parsed, since any of their bits may be wrong. Returns `None` if the DDP header is not complete.
    pub fn new(fpdu: &[u8]) -> Option<Self> {
        let (&[high, low, ddp, rdmap], _) = fpdu.split_first_chunk::<4>()?;
        let mut quote = Self {
            segment_len: u16::from_be_bytes([high, low]),
            ddp: [0; UNTAGGED_HEADER_LEN],
            ddp_len: 0,
            rdmap: None,
        };
        let rest = quote.take_ddp(ddp, &fpdu[2..])?;
        if Opcode::from_raw(rdmap) == Opcode::ReadRequest {
            quote.rdmap = rest.first_chunk().copied();
        }
        Some(quote)
    }

    /// Copies the DDP header, whose length depends on the T bit in `control`. Returns the octets behind the header, or `None` if the DDP
    /// header is not complete.
    fn take_ddp<'a>(&mut self, control: u8, bytes: &'a [u8]) -> Option<&'a [u8]> {
        let len = if control & 0x80 != 0 { TAGGED_HEADER_LEN } else { UNTAGGED_HEADER_LEN };
        let (header, rest) = bytes.split_at_checked(len)?;
        self.ddp[..len].copy_from_slice(header);
        self.ddp_len = len as u8;
        Some(rest)
    }

    /// Returns the DDP Segment Length field: the ULPDU_Length of the refused segment. siw fills this field with the length of the payload
    /// alone.
    pub fn segment_len(&self) -> u16 {
        self.segment_len
    }

    /// Returns the quoted DDP header, from the control octets on, without the ULPDU_Length field. Returns an empty slice if no DDP header
    /// is quoted.
    pub fn ddp_header(&self) -> &[u8] {
        self.ddp.get(..usize::from(self.ddp_len)).unwrap_or_default()
    }

    /// Returns the quoted Read Request header, or `None` if no Read Request header is quoted.
    pub fn read_request(&self) -> Option<ReadRequest> {
        self.rdmap.as_ref().map(ReadRequest::parse)
    }
}

/// The payload of a Terminate message (RFC 5040 §4.8).
///
/// siw writes the bits of the control word in the wrong order: `layer` and `etype` are exchanged, and the three HdrCt bits are the low bits
/// of their octet. [`Terminate::parse`] understands both orders. [`Terminate::new`] creates a control word in the order of the RFC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Terminate {
    /// The cause. If a control word has no HdrCt bits, the bit order of the word is not known, and the word can have two readings. In that
    /// case, `cause` is the reading that the registry of RFC 6580 lists. If the registry lists both or neither, `cause` is the reading in
    /// the RFC's bit order.
    pub cause: TerminateCause,
    /// The second reading of a control word without HdrCt bits, if the two bit orders give different readings. A program should report both
    /// readings.
    pub other_reading: Option<TerminateCause>,
    /// The Terminate Control word, as on the wire.
    pub raw: u32,
    /// The quoted headers, if there are any.
    pub quote: Option<Quote>,
}

/// The three HdrCt bits in the order of the RFC: M (segment length valid), D (DDP header), R (RDMAP header).
const RFC_BITS: [u8; 3] = [0x80, 0x40, 0x20];
/// The three HdrCt bits in siw's order.
const SIW_BITS: [u8; 3] = [0x01, 0x02, 0x04];

impl Terminate {
    /// Creates a Terminate to be sent. The Terminate quotes an RDMAP header only for an RDMAP error. For an error of the layer below DDP,
    /// the Terminate quotes no header (RFC 5040 §4.8).
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

    /// Parses the payload of a Terminate: the octets behind the untagged header. Returns `None` if the payload is shorter than the control
    /// word, which has four octets.
    ///
    /// If the quote is incomplete, the headers that have arrived are kept, since nothing follows a Terminate.
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
        let mut quote =
            Quote { segment_len: u16::from_be_bytes(len), ddp: [0; UNTAGGED_HEADER_LEN], ddp_len: 0, rdmap: None };
        if let (true, Some(&control)) = (ddp, rest.first()) {
            let rest = quote.take_ddp(control, rest).filter(|_| rdmap);
            quote.rdmap = rest.and_then(|rest| rest.first_chunk().copied());
        }
        Some(quote)
    }

    /// Writes the payload of the Terminate to `out`. The control word is the field `raw`; the field
    /// `cause` is not used. Returns the length of the payload.
    pub fn emit_into(&self, out: &mut [u8; MAX_TERMINATE_LEN]) -> usize {
        let mut len = 0;
        let mut push = |bytes: &[u8]| {
            if let Some(target) = out.get_mut(len..len + bytes.len()) {
                target.copy_from_slice(bytes);
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
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn both_bit_orders() {
        use TerminateCause as C;
        for (control, cause, other) in [
            // The HdrCt bits show that this control word is in the RFC's order.
            ([0x12, 0x02, 0xc0, 0], C::DDP_UNTAGGED_NO_BUFFER, None),
            ([0x01, 0x00, 0xe0, 0], C::RDMAP_INVALID_STAG, None),
            // The HdrCt bits show that this control word is in siw's order.
            ([0x21, 0x02, 0x03, 0], C::DDP_UNTAGGED_NO_BUFFER, None),
            ([0x11, 0x00, 0x03, 0], C::DDP_TAGGED_INVALID_STAG, None),
            ([0x10, 0x00, 0x07, 0], C::RDMAP_INVALID_STAG, None),
            ([0x20, 0x07, 0x03, 0], C::RDMAP_STREAM_CATASTROPHIC, None),
            ([0x01, 0x00, 0x03, 0], C::DDP_LOCAL_CATASTROPHIC, None),
            // A control word without HdrCt bits. The registry lists only one of its two readings, and this reading is taken as the cause.
            ([0x02, 0x02, 0x00, 0], C::LLP_CRC, Some((0, 2, 2))),
            ([0x20, 0x02, 0x00, 0], C::LLP_CRC, Some((0, 2, 2))),
            ([0x21, 0x06, 0x00, 0], C::DDP_UNTAGGED_VERSION, Some((2, 1, 6))),
            ([0x12, 0x06, 0x00, 0], C::DDP_UNTAGGED_VERSION, Some((2, 1, 6))),
            // A control word without HdrCt bits. The registry lists both readings, so the reading in the RFC's order is taken as the cause.
            ([0x02, 0x06, 0x00, 0], C::RDMAP_OPCODE, Some((2, 0, 6))),
            ([0x20, 0x06, 0x00, 0], C::LLP_IRD, Some((0, 2, 6))),
            // Both bit orders give the same cause.
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
        // A tagged header is shorter than an untagged one, so a tagged header is complete after fewer octets. An incomplete header is not
        // quoted.
        fpdu[2..4].copy_from_slice(&[0xc1, 0x40]);
        assert_eq!(Quote::new(&fpdu).unwrap().ddp_header(), &fpdu[2..16]);
        assert_eq!(Quote::new(&fpdu[..15]), None);
        assert_eq!(Quote::new(&[]), None);
    }

    proptest! {
        #[test]
        fn terminate_round_trip(which in 0..TerminateCause::NAMED.len(), fpdu in prop::collection::vec(any::<u8>(), 0..80)) {
            let sent = Terminate::new(TerminateCause::NAMED[which].1, Quote::new(&fpdu));
            let mut out = [0; MAX_TERMINATE_LEN];
            let len = sent.emit_into(&mut out);
            let got = Terminate::parse(&out[..len]).unwrap();
            prop_assert_eq!((got.raw, got.quote), (sent.raw, sent.quote));
            // Without a quote the bit order is ambiguous, but the true cause is one of the two readings.
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
