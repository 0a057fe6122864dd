//! The limits that the protocol between two reactors fixes. Settings and connections are checked against them.

/// Length of the header in front of every message, bytes.
pub(crate) const HEADER_LEN: usize = 8;

/// Longest payload of a message of the reactor's own, bytes.
pub(crate) const MAX_CONTROL: usize = 28;

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
