//! The handshakes that peers have begun, and those of them whose peers have not sent a complete request yet.
//!
//! A peer that connects and says nothing costs a socket, an endpoint and the room for one startup frame, and may not
//! keep others from connecting. So their number is limited, altogether and per host; at a limit the oldest gives way
//! once it has had a short time to send its request.

use std::collections::VecDeque;

use crate::newcomers::{Host, Newcomers};
use crate::slab::Key;

/// The handshakes that peers have begun with a provider.
#[derive(Debug, Default)]
pub(super) struct Handshakes {
    /// How many are not finished.
    pub(super) unfinished: usize,
    /// The endpoints of those whose request has not come.
    pub(super) half_open: Newcomers<Key>,
    /// The host that has more of the latter than it may.
    pub(super) crowd: Option<Host>,
    /// Listeners that wait for room.
    pub(super) paused: Vec<Key>,
    /// Listeners that may have more connections to accept; no key is the door (`meeting.rs`).
    pub(super) backlog: VecDeque<Key>,
}
