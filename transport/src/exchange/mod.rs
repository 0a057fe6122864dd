//! Connecting by exchange: the messages by which two programs tell each other of their queue pairs over a byte stream, without a
//! connection manager.
//!
//! | module | holds |
//! |---|---|
//! | `message` | the octets of the messages |
//! | `conversation` | which message may come when: octets in, octets and steps out |
//!
//! Nothing here knows a socket, a clock or a device. `docs/wire.md` has the layout.
#![deny(unsafe_code)]

pub(crate) mod conversation;
#[cfg(fuzz_targets)]
#[path = "../../../tests/fuzz/transport/exchange/mod.rs"]
pub mod fuzz;
pub(crate) mod message;
