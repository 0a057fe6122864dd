//! Numbers that the protocol between two reactors fixes. Settings and connections are checked against them.

/// Bytes of the header in front of every message.
pub(crate) const HEADER_LEN: usize = 8;

/// Payload of the longest message of the reactors' own, bytes.
pub(crate) const MAX_CONTROL: usize = 28;

/// The widest window: a wider one could not be told apart from a counter that ran backwards.
pub(crate) const MAX_WINDOW: u32 = 1 << 15;

/// Credits that data never takes.
pub(crate) const CONTROL_CREDITS: u32 = 3;

/// The smallest window that makes progress: once all credits for data are used, a grant is due.
pub(crate) const MIN_WINDOW: u32 = CONTROL_CREDITS + 2;

/// Places in the send queue that data never takes.
pub(crate) const CONTROL_SENDS: u32 = 2;

/// Messages past one buffer that may be under way on a connection, in each direction.
pub(crate) const MAX_TRANSFERS: usize = 16;
