//! The greeting that two reactors exchange in the private data of the connection manager's request, reply and reject. `docs/wire.md`
//! describes the layout.

use crate::error::RejectReason;
use crate::limits::{MAX_WINDOW, MIN_WINDOW, VERSION};
use crate::security::SecurityMode;

/// The length of private data that every connection manager can carry, in bytes (`rdma_connect`(3)).
const PORTABLE_PRIVATE_DATA: usize = 56;
const MAGIC: [u8; 4] = *b"RDXR";
/// The feature bit of immediate data and atomics on the embedded provider.
const EXTENSIONS: u8 = 1;
/// The position of the two feature bits that contain the number of the [`SecurityMode`] of a side.
const MODE_SHIFT: u8 = 4;
const MODE_MASK: u8 = 3;
/// The reject reason for a different security mode is encoded as this number plus the number of the mode that the rejecting side uses.
const SECURITY: u8 = 5;
/// The encoded reject reason of a draining reactor. The numbers from `SECURITY` to `DRAINING - 1` encode that the security modes differ.
const DRAINING: u8 = 8;
/// The encoded reject reason of a reactor whose connections must be in shared memory.
const SHARED_MEMORY_ONLY: u8 = 9;
const GREETING_LEN: usize = 20;

/// The maximum length of the program's private data, in bytes.
pub const MAX_USER_PRIVATE_DATA: usize = PORTABLE_PRIVATE_DATA - GREETING_LEN;

/// A greeting on the wire, little-endian: `magic:4 | version:1 | user_len:1 | reason:1 | features:1 | window:4 | buffer_size:4 |
/// max_message:4 | user…`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Greeting<'a> {
    /// The number of receives that the sender of the greeting has posted for the peer.
    pub(crate) window: u32,
    /// The largest payload that the sender accepts in one buffer, in bytes.
    pub(crate) buffer_size: u32,
    /// The largest message that the sender fetches, in KiB; 0 if it fetches none.
    pub(crate) max_message: u32,
    /// True if the sender supports immediate data and atomics on the embedded provider. The connection uses them if both sides support
    /// them.
    pub(crate) extensions: bool,
    /// The sender's security mode. `None` if this version of the protocol does not define its number.
    pub(crate) security: Option<SecurityMode>,
    /// The reason of a refusal. Only a reject uses this field.
    pub(crate) reason: RejectReason,
    /// The program's private data.
    pub(crate) user: &'a [u8],
}

impl<'a> Greeting<'a> {
    /// Creates a greeting that refuses the connection.
    pub(crate) const fn reject(reason: RejectReason, user: &'a [u8]) -> Self {
        Self {
            window: 0,
            buffer_size: 0,
            max_message: 0,
            extensions: false,
            security: Some(SecurityMode::Plain),
            reason,
            user,
        }
    }

    /// Encodes the greeting. The caller guarantees that `user` has at most [`MAX_USER_PRIVATE_DATA`] bytes.
    pub(crate) fn emit(&self) -> Vec<u8> {
        debug_assert!(self.user.len() <= MAX_USER_PRIVATE_DATA);
        let mut out = Vec::with_capacity(PORTABLE_PRIVATE_DATA);
        out.extend_from_slice(&MAGIC);
        let mode = self.security.map_or(MODE_MASK, |mode| mode as u8) << MODE_SHIFT;
        let features = mode | if self.extensions { EXTENSIONS } else { 0 };
        out.extend_from_slice(&[VERSION, self.user.len() as u8, raw(self.reason), features]);
        out.extend_from_slice(&self.window.to_le_bytes());
        out.extend_from_slice(&self.buffer_size.to_le_bytes());
        out.extend_from_slice(&self.max_message.to_le_bytes());
        out.extend_from_slice(self.user);
        out
    }

    /// Returns the greeting if its window and its buffer size are in the ranges that the protocol permits.
    ///
    /// # Errors
    /// [`RejectReason::Limits`] if one of the two is out of range.
    pub(crate) fn checked(self) -> Result<Self, RejectReason> {
        let sound = (MIN_WINDOW..=MAX_WINDOW).contains(&self.window) && self.buffer_size > 0;
        if sound { Ok(self) } else { Err(RejectReason::Limits) }
    }

    /// Parses a greeting from private data. Some transports pad private data at its end.
    ///
    /// # Errors
    /// The reason with which the connection must be rejected.
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, RejectReason> {
        let (fixed, rest) = bytes.split_first_chunk::<GREETING_LEN>().ok_or(RejectReason::NotOurs)?;
        let word = |at: usize| u32::from_le_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]);
        if fixed[..4] != MAGIC {
            return Err(RejectReason::NotOurs);
        }
        if fixed[4] != VERSION {
            return Err(RejectReason::Version);
        }
        let user = rest.get(..usize::from(fixed[5])).ok_or(RejectReason::NotOurs)?;
        // Feature bits that this version does not know are ignored.
        let extensions = fixed[7] & EXTENSIONS != 0;
        let security = SecurityMode::of((fixed[7] >> MODE_SHIFT) & MODE_MASK);
        let (window, buffer_size, max_message) = (word(8), word(12), word(16));
        let reason = reason(fixed[6]);
        Ok(Self { window, buffer_size, max_message, extensions, security, reason, user })
    }

    /// Returns the bytes of a greeting, without the padding that a transport may have added to the private data.
    pub(crate) fn octets(bytes: &[u8]) -> &[u8] {
        let len = Greeting::parse(bytes).map_or(bytes.len(), |greeting| GREETING_LEN + greeting.user.len());
        &bytes[..len]
    }
}

const fn raw(reason: RejectReason) -> u8 {
    match reason {
        RejectReason::Refused => 0,
        RejectReason::NotOurs => 1,
        RejectReason::Version => 2,
        RejectReason::Limits => 3,
        RejectReason::Busy => 4,
        RejectReason::Security(mode) => SECURITY + mode as u8,
        RejectReason::Draining => DRAINING,
        RejectReason::SharedMemoryOnly => SHARED_MEMORY_ONLY,
        RejectReason::Other(raw) => raw,
    }
}

const fn reason(raw: u8) -> RejectReason {
    match raw {
        0 => RejectReason::Refused,
        1 => RejectReason::NotOurs,
        2 => RejectReason::Version,
        3 => RejectReason::Limits,
        4 => RejectReason::Busy,
        DRAINING => RejectReason::Draining,
        SHARED_MEMORY_ONLY => RejectReason::SharedMemoryOnly,
        other => match SecurityMode::of(other.wrapping_sub(SECURITY)) {
            Some(mode) => RejectReason::Security(mode),
            None => RejectReason::Other(other),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_greeting_survives_padding() {
        let (reason, security) = (RejectReason::Refused, Some(SecurityMode::Psk));
        let greeting = Greeting {
            window: 64,
            buffer_size: 8192,
            max_message: 9,
            extensions: true,
            security,
            reason,
            user: b"hello",
        };
        let mut bytes = greeting.emit();
        assert_eq!(Greeting::parse(&bytes), Ok(greeting));
        bytes.resize(196, 0);
        assert_eq!(Greeting::parse(&bytes), Ok(greeting));
        assert_eq!(Greeting::octets(&bytes), greeting.emit(), "without the padding");
        bytes[7] ^= EXTENSIONS;
        assert!(!Greeting::parse(&bytes).unwrap().extensions);
        bytes[7] |= 0x30;
        assert_eq!(Greeting::parse(&bytes).unwrap().security, None, "an unknown mode");
        for mode in [SecurityMode::Plain, SecurityMode::Tls, SecurityMode::Psk] {
            let reject = RejectReason::Security(mode);
            assert_eq!(Greeting::parse(&Greeting::reject(reject, b"").emit()).unwrap().reason, reject);
        }
    }

    #[test]
    fn a_strangers_greeting_has_a_typed_reason() {
        assert_eq!(Greeting::parse(b""), Err(RejectReason::NotOurs));
        assert_eq!(Greeting::parse(&[0; 56]), Err(RejectReason::NotOurs));
        let mut bytes = Greeting::reject(RejectReason::Busy, b"").emit();
        assert_eq!(Greeting::parse(&bytes).unwrap().reason, RejectReason::Busy);
        bytes[4] = 9;
        assert_eq!(Greeting::parse(&bytes), Err(RejectReason::Version));
        bytes[4] = VERSION;
        bytes[5] = 40;
        assert_eq!(Greeting::parse(&bytes), Err(RejectReason::NotOurs), "a user length past the end");
    }

    #[test]
    fn a_window_that_cannot_work_is_refused() {
        let greeting = |window| Greeting { window, buffer_size: 1, ..Greeting::reject(RejectReason::Refused, b"") };
        assert!(greeting(MIN_WINDOW).checked().is_ok());
        assert_eq!(greeting(MIN_WINDOW - 1).checked(), Err(RejectReason::Limits));
        assert_eq!(greeting(MAX_WINDOW + 1).checked(), Err(RejectReason::Limits));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = Greeting::parse(&bytes);
        }
    }
}
