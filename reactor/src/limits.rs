//! The limits that the protocol between two reactors fixes. Settings and connections are checked against them.

use crate::security::channel::TAG;

/// Length of the header in front of every message, bytes.
pub(crate) const HEADER_LEN: usize = 8;

/// Longest payload of a message of the reactor's own, bytes.
pub(crate) const MAX_CONTROL: usize = 36;

/// Alignment of buffers in memory, bytes: a line of the cache.
pub(crate) const BUFFER_ALIGN: usize = 64;

/// Octets behind every message that are for the authentication tag of a secured connection. Buffers have room for it
/// whether or not there is such a connection yet, because connections of both kinds share them.
pub(crate) const TAG_ROOM: usize = if cfg!(any(feature = "tls", feature = "psk")) { TAG } else { 0 };

/// Length of the longest message with its header, bytes. The payloads of the program have at most `buffer_size` bytes.
pub(crate) const fn message_len(buffer_size: u32) -> usize {
    let payload = buffer_size as usize;
    HEADER_LEN + if payload > MAX_CONTROL { payload } else { MAX_CONTROL }
}

/// Length of a buffer that takes every message, bytes.
pub(crate) const fn buffer_len(buffer_size: u32) -> usize {
    message_len(buffer_size) + TAG_ROOM
}

/// Most octets of a handshake that a peer may send.
pub(crate) const MAX_HANDSHAKE: usize = 64 << 10;

/// Widest window. A much wider one could not be told apart from a counter that ran backwards.
pub(crate) const MAX_WINDOW: u32 = 1 << 15;

/// Number of credits that data never takes.
pub(crate) const CONTROL_CREDITS: u32 = 3;

/// Smallest window that makes progress. Once all its credits for data are used, a grant is due.
pub(crate) const MIN_WINDOW: u32 = CONTROL_CREDITS + 2;

/// Number of places in the send queue that data never takes.
pub(crate) const CONTROL_SENDS: u32 = 2;

/// Largest number of messages past one buffer that may be under way on a connection, in each direction.
pub(crate) const MAX_TRANSFERS: usize = 16;
