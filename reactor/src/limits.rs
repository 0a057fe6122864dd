//! Lengths and limits that the protocol between two reactors fixes. The reactor checks the settings of the program and
//! the greetings of peers against these limits.

use crate::security::channel::TAG;

/// The version of the protocol, in the greeting.
pub(crate) const VERSION: u8 = 2;

/// The length of the header before the payload of every message, in bytes.
pub(crate) const HEADER_LEN: usize = 8;

/// The length of the longest payload of a control message, in bytes.
pub(crate) const MAX_CONTROL: usize = 36;

/// The alignment of buffers in memory, in bytes: the size of a cache line.
pub(crate) const BUFFER_ALIGN: usize = 64;

/// The length in bytes of the space for an authentication tag after every message. Only secured connections need this
/// space. But every buffer has it, because secured and plain connections use the same buffers.
pub(crate) const TAG_ROOM: usize = if cfg!(any(feature = "tls", feature = "psk")) { TAG } else { 0 };

/// Returns the length in bytes of the longest message that fits in one buffer, with its header. The longest payload is
/// either a message of the program with `buffer_size` bytes, or a control message with [`MAX_CONTROL`] bytes.
pub(crate) const fn message_len(buffer_size: u32) -> usize {
    let payload = buffer_size as usize;
    HEADER_LEN + if payload > MAX_CONTROL { payload } else { MAX_CONTROL }
}

/// Returns the length in bytes of a buffer into which every message fits, with the space for an authentication tag.
pub(crate) const fn buffer_len(buffer_size: u32) -> usize {
    message_len(buffer_size) + TAG_ROOM
}

/// The largest number of bytes that a peer may send in a security handshake.
pub(crate) const MAX_HANDSHAKE: usize = 64 << 10;

/// The largest window, in messages. A grant contains a count of messages modulo 2^32. If a window could have about 2^31
/// messages, the receiver of a grant could not tell if the grant is newer or older than the previous one.
pub(crate) const MAX_WINDOW: u32 = 1 << 15;

/// The number of credits that are reserved for control messages. Messages of the program do not use them, so control
/// messages can always be sent.
pub(crate) const CONTROL_CREDITS: u32 = 3;

/// The smallest window, in messages. The receiver sends a grant message only if it can grant at least two credits. In
/// this window, messages of the program may use two credits: when both are used, the receiver can grant two new ones.
/// In a smaller window, they may use at most one credit, so the receiver could never send a grant message.
pub(crate) const MIN_WINDOW: u32 = CONTROL_CREDITS + 2;

/// The number of slots in the send queue that are reserved for control messages. Messages of the program do not use
/// them, so control messages can always be posted.
pub(crate) const CONTROL_SENDS: u32 = 2;

/// The largest number of messages longer than one buffer that may be in flight on a connection, in each direction.
pub(crate) const MAX_TRANSFERS: usize = 16;
