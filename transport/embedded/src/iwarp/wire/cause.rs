//! The causes of a Terminate: the layer that has found an error, the type of the error and its code (RFC 5040 §4.8, RFC 6580).

use std::fmt;

/// The layer that has found an error (RFC 5040 §4.8). The number of each layer is its code on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Layer {
    /// RDMAP: code 0.
    Rdmap,
    /// DDP: code 1.
    Ddp,
    /// The LLP, the layer below DDP: code 2. In iWARP on TCP, this layer is MPA.
    Llp,
    /// An undefined code, 3 to 15.
    Other(u8),
}

impl Layer {
    /// Returns the layer with this code of four bits.
    pub const fn from_raw(raw: u8) -> Self {
        match raw & 0x0f {
            0 => Self::Rdmap,
            1 => Self::Ddp,
            2 => Self::Llp,
            other => Self::Other(other),
        }
    }

    /// Returns the code on the wire, four bits.
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
    /// The layer that has found the error.
    pub layer: Layer,
    /// The error type within the layer, four bits.
    pub etype: u8,
    /// The error code within the error type.
    pub code: u8,
}

/// Generates the constants and their phrases from one table, so that each constant has the right phrase.
macro_rules! causes {
    ($($(#[$doc:meta])* $name:ident = $layer:ident / $etype:literal / $code:literal, $phrase:literal;)*) => {
        impl TerminateCause {
            $($(#[$doc])* pub const $name: Self = Self { layer: Layer::$layer, etype: $etype, code: $code };)*

            /// Returns the phrase for this cause in the registry of RFC 6580. Returns `None` if the registry does not list the cause.
            pub const fn phrase(self) -> Option<&'static str> {
                match (self.layer, self.etype, self.code) {
                    $((Layer::$layer, $etype, $code) => Some($phrase),)*
                    // For a local catastrophic error, the error code has no meaning (RFC 5040 §4.8).
                    (Layer::Rdmap, 0, _) => Some("Local Catastrophic Error"),
                    (Layer::Ddp, 0, _) => Some("DDP Local Catastrophic Error"),
                    _ => None,
                }
            }

            /// The names and values of all constants.
            #[cfg(test)]
            pub(super) const NAMED: &[(&str, Self)] = &[$((stringify!($name), Self::$name),)*];
        }
    };
}

causes! {
    /// The sender of the Terminate has failed without a fault of its peer.
    LOCAL_CATASTROPHIC = Rdmap / 0 / 0, "Local Catastrophic Error";
    /// A Read Request names an STag that is not valid.
    RDMAP_INVALID_STAG = Rdmap / 1 / 0, "Remote Protection Error: Invalid STag";
    /// A Read Request accesses bytes outside of the region.
    RDMAP_BOUNDS = Rdmap / 1 / 1, "Remote Protection Error: Base or bounds violation";
    /// A Read Request accesses a region that may not be read.
    RDMAP_ACCESS = Rdmap / 1 / 2, "Remote Protection Error: Access rights violation";
    /// A Read Request accesses a region of another protection domain.
    RDMAP_STAG_NOT_ASSOCIATED = Rdmap / 1 / 3, "Remote Protection Error: STag not associated with RDMAP Stream";
    /// The end of a Read Request's range is past the largest Tagged Offset.
    RDMAP_TO_WRAP = Rdmap / 1 / 4, "Remote Protection Error: TO wrap";
    /// A Send with Invalidate names an STag that the sender of the message may not invalidate.
    RDMAP_CANNOT_INVALIDATE = Rdmap / 1 / 9, "Remote Protection Error: STag cannot be Invalidated";
    /// A protection error of another kind.
    RDMAP_PROTECTION_UNSPECIFIED = Rdmap / 1 / 0xff, "Remote Protection Error: Unspecified Error";
    /// The RDMAP version is not 1.
    RDMAP_VERSION = Rdmap / 2 / 5, "Remote Operation Error: Invalid RDMAP version";
    /// The opcode is undefined, or the receiver does not accept this opcode.
    RDMAP_OPCODE = Rdmap / 2 / 6, "Remote Operation Error: Unexpected OpCode";
    /// The stream cannot continue. A peer that has more Read Requests outstanding than the IRD allows is also refused with this cause.
    RDMAP_STREAM_CATASTROPHIC =
        Rdmap / 2 / 7, "Remote Operation Error: Catastrophic error, localized to RDMAP Stream";
    /// The failure affects more than this stream.
    RDMAP_GLOBAL_CATASTROPHIC = Rdmap / 2 / 8, "Remote Operation Error: Catastrophic error, global";
    /// The code with which siw refuses a Send with Invalidate of an unknown STag.
    RDMAP_OPERATION_CANNOT_INVALIDATE = Rdmap / 2 / 9, "Remote Operation Error: STag cannot be Invalidated";
    /// An operation error of another kind.
    RDMAP_OPERATION_UNSPECIFIED = Rdmap / 2 / 0xff, "Remote Operation Error: Unspecified Error";
    /// DDP has failed at the sender of the Terminate, without a fault of its peer. siw also refuses an unexpected Read Response with this
    /// code.
    DDP_LOCAL_CATASTROPHIC = Ddp / 0 / 0, "DDP Local Catastrophic Error";
    /// A tagged segment names an STag that is not valid, or the STag of a region that the sender of the segment may not write.
    DDP_TAGGED_INVALID_STAG = Ddp / 1 / 0, "Tagged Buffer Error: Invalid STag";
    /// A tagged segment accesses bytes outside of the region.
    DDP_TAGGED_BOUNDS = Ddp / 1 / 1, "Tagged Buffer Error: Base or bounds violation";
    /// A tagged segment accesses a region of another protection domain.
    DDP_TAGGED_NOT_ASSOCIATED = Ddp / 1 / 2, "Tagged Buffer Error: STag not associated with DDP Stream";
    /// The end of a tagged segment's range is past the largest Tagged Offset.
    DDP_TAGGED_TO_WRAP = Ddp / 1 / 3, "Tagged Buffer Error: TO wrap";
    /// The DDP version of a tagged segment is not 1.
    DDP_TAGGED_VERSION = Ddp / 1 / 4, "Tagged Buffer Error: Invalid DDP version";
    /// The queue does not exist, or is not the queue of this operation.
    INVALID_QN = Ddp / 2 / 1, "Untagged Buffer Error: Invalid QN";
    /// No receive is posted for the message. siw also uses this code if the receive is too small.
    DDP_UNTAGGED_NO_BUFFER = Ddp / 2 / 2, "Untagged Buffer Error: Invalid MSN - no buffer available";
    /// The MSN differs from the expected MSN.
    INVALID_MSN = Ddp / 2 / 3, "Untagged Buffer Error: Invalid MSN - MSN range is not valid";
    /// The Message Offset differs from the expected offset.
    INVALID_MO = Ddp / 2 / 4, "Untagged Buffer Error: Invalid MO";
    /// The message does not fit into the receive.
    DDP_UNTAGGED_TOO_LONG = Ddp / 2 / 5, "Untagged Buffer Error: DDP Message too long for available buffer";
    /// The DDP version of an untagged segment is not 1.
    DDP_UNTAGGED_VERSION = Ddp / 2 / 6, "Untagged Buffer Error: Invalid DDP version";
    /// The TCP connection was lost (RFC 5044 §8).
    LLP_CONNECTION_LOST = Llp / 0 / 1, "MPA Error: TCP connection closed, terminated or lost";
    /// The CRC of an FPDU does not match (RFC 5044 §8).
    LLP_CRC = Llp / 0 / 2, "MPA Error: CRC mismatch";
    /// An FPDU does not begin at the expected octet, or its length is impossible (RFC 5044 §8).
    LLP_FPDU_LENGTH = Llp / 0 / 3, "MPA Error: Marker and ULPDU Length field mismatch";
    /// A startup frame is invalid (RFC 5044 §8).
    LLP_STARTUP = Llp / 0 / 4, "MPA Error: Invalid MPA Request or Reply Frame";
    /// MPA has failed at the sender of the Terminate, without a fault of its peer (RFC 6581 §8).
    LLP_LOCAL_CATASTROPHIC = Llp / 0 / 5, "MPA Error: Local Catastrophic Error";
    /// The responder requests more outstanding RDMA Reads than the initiator serves (RFC 6581 §8).
    LLP_IRD = Llp / 0 / 6, "MPA Error: Insufficient IRD Resources";
    /// The responder has chosen a ready-to-receive message (RTR) that the initiator did not offer (RFC 6581 §8).
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
