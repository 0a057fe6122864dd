//! Connecting by exchange: two programs exchange the attributes of their queue pairs in messages over a byte stream, without a connection
//! manager.
//!
//! | module | holds |
//! |---|---|
//! | `message` | the encoding of the messages |
//! | `conversation` | the state machine that checks the order of the messages: bytes in, bytes and events out |
//!
//! This module uses no socket, no clock and no device. `docs/wire.md` has the layout of the messages.
#![deny(unsafe_code)]

pub(crate) mod conversation;
pub(crate) mod message;
