//! The fuzz targets' ways into the parts of the reactor that have no public name. The crate in `tests/fuzz` calls them, with
//! octets of a fuzzer or of a corpus. They panic when something breaks a promise.

mod handshake;
mod messages;
mod records;

pub use self::handshake::handshake;
pub use self::messages::{greeting, message};
pub use self::records::records;
