//! The wire format of iWARP, parsed and written: MPA (RFC 5044, 6581), DDP (RFC 5041), RDMAP (RFC 5040, opcodes of RFC 7306).
//!
//! The code has no I/O, no clock and no allocation, and no input can cause a panic. Reserved bits are ignored in input, and are zero in
//! output unless the documentation of a field says that the field keeps them.
#![forbid(unsafe_code)]

pub mod atomic;
pub mod cause;
pub mod crc;
pub mod ddp;
pub mod mpa;
pub mod opcode;
pub mod read;
pub mod terminate;

pub use atomic::AtomicRequest;
pub use cause::{Layer, TerminateCause};
pub use crc::{Crc32c, crc32c};
pub use ddp::{HeaderError, SegmentHeader, Tagged, Untagged, header_len};
pub use mpa::{Enhanced, StartupError, StartupHeader, StartupKind};
pub use opcode::Opcode;
pub use read::ReadRequest;
pub use terminate::{Quote, Terminate};

/// Returns the big-endian 32-bit word at the offset `at`. Callers pass a constant offset that is inside the array.
fn be32<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Returns the big-endian 64-bit word at the offset `at`. Callers pass a constant offset that is inside the array.
fn be64<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4))
}
