//! The fuzz targets of the embedded provider. They are compiled as a part of it, by a package of their own, because they drive parts
//! that have no public name. The crate in `tests/fuzz` calls them, with octets of a fuzzer or of a corpus. They panic when the
//! provider does something wrong.
//!
//! | file | holds |
//! |---|---|
//! | `tape.rs` | octets as a source of choices |
//! | `end.rs` | a queue pair that is alone with a stream |
//! | `startup.rs` | startup frames: any cut, both directions, what is agreed on |
//! | `cuts.rs` | a stream of FPDUs means the same, however it is cut |
//! | `datagrams.rs` | datagrams and questions on a bad network, with a stranger on it |
//! | `script.rs` | a queue pair with work of its own, against a peer that does what the tape says |

mod cuts;
mod datagrams;
mod end;
mod script;
mod startup;
mod tape;

pub use self::cuts::cuts;
pub use self::datagrams::datagrams;
pub use self::script::script;
pub use self::startup::startup;
pub use self::tape::Tape;
