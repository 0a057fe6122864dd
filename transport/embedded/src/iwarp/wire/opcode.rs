//! The operations of RDMAP: their codes on the wire, the queues of their messages, and the lengths of their segments.

use super::atomic::{ATOMIC_REQUEST_LEN, ATOMIC_RESPONSE_LEN};
use super::read::READ_REQUEST_LEN;

/// The length of a tagged DDP header within the ULPDU: control octets, STag, Tagged Offset.
pub const TAGGED_HEADER_LEN: usize = 14;
/// The length of an untagged DDP header within the ULPDU: control octets, a reserved field or the STag to invalidate, queue number, MSN,
/// MO.
pub const UNTAGGED_HEADER_LEN: usize = 18;
/// The length of the data in an Immediate Data message. The data follows the untagged header (RFC 7306 §6).
pub const IMMEDIATE_LEN: usize = 8;
/// The length in octets of the Terminate Control word, which follows the untagged header (RFC 5040 §4.8).
pub const TERMINATE_CONTROL_LEN: usize = 4;
/// The queue number of Sends and Immediate Data messages (RFC 5040 §4.1).
pub const SEND_QUEUE: u32 = 0;
/// The queue number of Read Requests and Atomic Requests (RFC 5040 §4.1, RFC 7306 §5).
pub const READ_REQUEST_QUEUE: u32 = 1;
/// The queue number of the Terminate (RFC 5040 §4.1).
pub const TERMINATE_QUEUE: u32 = 2;
/// The queue number of Atomic Responses (RFC 7306 §5).
pub const ATOMIC_RESPONSE_QUEUE: u32 = 3;

/// The operation of a segment (RFC 5040 §4.1, RFC 7306 §8.1). The number of each operation is its code on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Opcode {
    /// RDMA Write: code 0.
    Write,
    /// RDMA Read Request: code 1.
    ReadRequest,
    /// RDMA Read Response: code 2.
    ReadResponse,
    /// Send: code 3.
    Send,
    /// Send with Invalidate: code 4.
    SendInvalidate,
    /// Send with Solicited Event: code 5.
    SendSolicited,
    /// Send with Solicited Event and Invalidate: code 6.
    SendSolicitedInvalidate,
    /// Terminate: code 7.
    Terminate,
    /// Immediate Data (RFC 7306 §6): code 8.
    Immediate,
    /// Immediate Data with Solicited Event (RFC 7306 §6): code 9.
    ImmediateSolicited,
    /// Atomic Request (RFC 7306 §5): code 10.
    AtomicRequest,
    /// Atomic Response (RFC 7306 §5): code 11.
    AtomicResponse,
    /// An undefined code, 12 to 15.
    Other(u8),
}

impl Opcode {
    /// Returns the operation whose code is the low four bits of `raw`, the RDMAP control octet.
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

    /// Returns the code on the wire, four bits.
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

    /// Returns true if segments of this operation are tagged: the header names the destination by an STag and an offset. Only the opcode
    /// decides this, not the T bit (RFC 5040 §4.2).
    pub const fn is_tagged(self) -> bool {
        matches!(self, Self::Write | Self::ReadResponse)
    }

    /// Returns true if this is one of the four kinds of Send, which share a queue and its MSNs.
    pub const fn is_send(self) -> bool {
        matches!(self, Self::Send | Self::SendInvalidate | Self::SendSolicited | Self::SendSolicitedInvalidate)
    }

    /// Returns true if this is a kind of Send whose header names an STag to invalidate.
    pub const fn invalidates(self) -> bool {
        matches!(self, Self::SendInvalidate | Self::SendSolicitedInvalidate)
    }

    /// Returns true if the operation requests a solicited event at the receiver.
    pub const fn solicited(self) -> bool {
        matches!(self, Self::SendSolicited | Self::SendSolicitedInvalidate | Self::ImmediateSolicited)
    }

    /// Returns true if this operation is an extension of RFC 7306. Such an operation is only valid if both peers agreed to use the
    /// extensions. siw ends the stream on such an operation.
    pub const fn is_extension(self) -> bool {
        matches!(self, Self::Immediate | Self::ImmediateSolicited | Self::AtomicRequest | Self::AtomicResponse)
    }

    /// Returns the smallest valid ULPDU_Length of a segment of this operation.
    pub const fn min_ulpdu_len(self) -> u16 {
        (match self {
            Self::Write | Self::ReadResponse => TAGGED_HEADER_LEN,
            Self::ReadRequest => UNTAGGED_HEADER_LEN + READ_REQUEST_LEN,
            Self::Terminate => UNTAGGED_HEADER_LEN + TERMINATE_CONTROL_LEN,
            Self::Immediate | Self::ImmediateSolicited => UNTAGGED_HEADER_LEN + IMMEDIATE_LEN,
            Self::AtomicRequest => UNTAGGED_HEADER_LEN + ATOMIC_REQUEST_LEN,
            Self::AtomicResponse => UNTAGGED_HEADER_LEN + ATOMIC_RESPONSE_LEN,
            _ => UNTAGGED_HEADER_LEN,
        }) as u16
    }

    /// Returns the largest valid ULPDU_Length of an operation whose messages have a fixed size. Returns `None` for any other operation.
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
}
