//! Limits that the protocol between two reactors fixes. Settings and connections are checked against them.

use crate::security::channel::TAG;

/// Length of the header in front of every message, bytes.
pub(crate) const HEADER_LEN: usize = 8;

/// Longest payload of a control message, bytes.
pub(crate) const MAX_CONTROL: usize = 36;

/// Alignment of buffers in memory, bytes: a cache line.
pub(crate) const BUFFER_ALIGN: usize = 64;

/// Length of the space behind every message for the authentication tag of a secured connection, bytes. Every buffer has
/// it, because plain and secured connections share buffers.
pub(crate) const TAG_ROOM: usize = if cfg!(any(feature = "tls", feature = "psk")) { TAG } else { 0 };

/// Returns the length of the longest message with its header, bytes. A payload of the program has at most `buffer_size`
/// bytes.
pub(crate) const fn message_len(buffer_size: u32) -> usize {
    let payload = buffer_size as usize;
    HEADER_LEN + if payload > MAX_CONTROL { payload } else { MAX_CONTROL }
}

/// Returns the length of a buffer for any message, bytes.
pub(crate) const fn buffer_len(buffer_size: u32) -> usize {
    message_len(buffer_size) + TAG_ROOM
}

/// Largest number of bytes that a peer may send in a security handshake.
pub(crate) const MAX_HANDSHAKE: usize = 64 << 10;

/// Largest window, messages. With a much larger one, a new grant could not be distinguished from a counter that ran
/// backwards.
pub(crate) const MAX_WINDOW: u32 = 1 << 15;

/// Number of credits that data never uses.
pub(crate) const CONTROL_CREDITS: u32 = 3;

/// Smallest window that makes progress, messages. Once data has used all the credits that it may use, a grant is due.
pub(crate) const MIN_WINDOW: u32 = CONTROL_CREDITS + 2;

/// Number of slots of the send queue that data never uses.
pub(crate) const CONTROL_SENDS: u32 = 2;

/// Largest number of messages past one buffer that may be in flight on a connection, in each direction.
pub(crate) const MAX_TRANSFERS: usize = 16;
