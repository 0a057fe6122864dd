//! The codes of a Terminate: the layer that found an error, and the error (RFC 5040 §4.8, RFC 6580).

use std::fmt;

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
    /// Undefined values: 3 to 15.
    Other(u8),
}

impl Layer {
    /// Returns the layer with this value of four bits.
    pub const fn from_raw(raw: u8) -> Self {
        match raw & 0x0f {
            0 => Self::Rdmap,
            1 => Self::Ddp,
            2 => Self::Llp,
            other => Self::Other(other),
        }
    }

    /// Returns the four bits on the wire.
    pub const fn raw(self) -> u8 {
        match self {
            Self::Rdmap => 0,
            Self::Ddp => 1,
            Self::Llp => 2,
            Self::Other(other) => other & 0x0f,
        }
    }
}

/// The cause of a Terminate: layer, error type and error code (RFC 5040 §4.8; registry of RFC 6580).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TerminateCause {
    /// The layer that found the error.
    pub layer: Layer,
    /// Error type within the layer, four bits.
    pub etype: u8,
    /// Error code within the type.
    pub code: u8,
}

/// Generates the constants and their phrases from one table, so that they always match.
macro_rules! causes {
    ($($(#[$doc:meta])* $name:ident = $layer:ident / $etype:literal / $code:literal, $phrase:literal;)*) => {
        impl TerminateCause {
            $($(#[$doc])* pub const $name: Self = Self { layer: Layer::$layer, etype: $etype, code: $code };)*

            /// Returns the phrase of the registry (RFC 6580), if it lists this cause.
            pub const fn phrase(self) -> Option<&'static str> {
                match (self.layer, self.etype, self.code) {
                    $((Layer::$layer, $etype, $code) => Some($phrase),)*
                    // The code of these two has no meaning (RFC 5040 §4.8).
                    (Layer::Rdmap, 0, _) => Some("Local Catastrophic Error"),
                    (Layer::Ddp, 0, _) => Some("DDP Local Catastrophic Error"),
                    _ => None,
                }
            }

            /// Every named cause.
            #[cfg(test)]
            pub(super) const NAMED: &[(&str, Self)] = &[$((stringify!($name), Self::$name),)*];
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
    /// The opcode is unknown, or unexpected here.
    RDMAP_OPCODE = Rdmap / 2 / 6, "Remote Operation Error: Unexpected OpCode";
    /// The stream cannot continue. Also used for more Read Requests than the IRD allows.
    RDMAP_STREAM_CATASTROPHIC =
        Rdmap / 2 / 7, "Remote Operation Error: Catastrophic error, localized to RDMAP Stream";
    /// The failure is not limited to this stream.
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
    /// The queue does not exist, or is not for this operation.
    INVALID_QN = Ddp / 2 / 1, "Untagged Buffer Error: Invalid QN";
    /// No receive is posted. siw also says this of a receive that is too small.
    DDP_UNTAGGED_NO_BUFFER = Ddp / 2 / 2, "Untagged Buffer Error: Invalid MSN - no buffer available";
    /// The MSN is not the next one.
    INVALID_MSN = Ddp / 2 / 3, "Untagged Buffer Error: Invalid MSN - MSN range is not valid";
    /// The Message Offset is not the next one.
    INVALID_MO = Ddp / 2 / 4, "Untagged Buffer Error: Invalid MO";
    /// The receive is too small.
    DDP_UNTAGGED_TOO_LONG = Ddp / 2 / 5, "Untagged Buffer Error: DDP Message too long for available buffer";
    /// An untagged segment whose DDP version is not 1.
    DDP_UNTAGGED_VERSION = Ddp / 2 / 6, "Untagged Buffer Error: Invalid DDP version";
    /// The TCP connection was lost (RFC 5044 §8).
    LLP_CONNECTION_LOST = Llp / 0 / 1, "MPA Error: TCP connection closed, terminated or lost";
    /// The CRC of an FPDU does not match (RFC 5044 §8).
    LLP_CRC = Llp / 0 / 2, "MPA Error: CRC mismatch";
    /// An FPDU does not begin at the expected octet, or its length is impossible (RFC 5044 §8).
    LLP_FPDU_LENGTH = Llp / 0 / 3, "MPA Error: Marker and ULPDU Length field mismatch";
    /// A startup frame is invalid (RFC 5044 §8).
    LLP_STARTUP = Llp / 0 / 4, "MPA Error: Invalid MPA Request or Reply Frame";
    /// MPA at the sender of the Terminate failed on its own (RFC 6581 §8).
    LLP_LOCAL_CATASTROPHIC = Llp / 0 / 5, "MPA Error: Local Catastrophic Error";
    /// The responder wants more RDMA Reads outstanding than the initiator serves (RFC 6581 §8).
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers() {
        for raw in 0..=u8::MAX {
            assert_eq!(Layer::from_raw(raw).raw(), raw & 0x0f);
        }
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
}
