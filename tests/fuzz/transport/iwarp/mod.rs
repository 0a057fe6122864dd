//! The fuzz targets of the embedded provider. A separate package compiles them as a part of the provider, because they call functions that
//! are not public. The crate in `tests/fuzz` calls the targets with the bytes of a fuzzer or of a corpus. A target panics if the provider
//! misbehaves.
//!
//! | file | holds |
//! |---|---|
//! | `tape.rs` | bytes as a source of choices |
//! | `end.rs` | one queue pair without a socket |
//! | `startup.rs` | startup frames in pieces of any length, as requests and as replies, and the agreement of both sides |
//! | `cuts.rs` | a check that a stream of FPDUs has the same result, however TCP cuts it |
//! | `datagrams.rs` | datagrams and queries on a bad network, with a stranger on it |
//! | `script.rs` | a queue pair with its own work requests, against a peer that a tape controls |
//! | `within_host.rs` | shared memory with a hostile peer within the host |

mod cuts;
mod datagrams;
mod end;
mod script;
mod startup;
mod tape;
mod within_host;

pub use self::cuts::cuts;
pub use self::datagrams::datagrams;
pub use self::script::script;
pub use self::startup::startup;
pub use self::tape::Tape;
pub use self::within_host::within_host;
