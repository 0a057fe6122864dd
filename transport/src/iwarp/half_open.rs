//! The unfinished handshakes that peers have started, and the half-open ones among them, which lack a complete request.
//!
//! A peer that connects and sends nothing costs a socket, an endpoint and the room for one startup frame, and must not exclude other peers.
//! The number of these handshakes is therefore limited, in total and per host. At a limit the oldest one is evicted, once it has had a
//! short time to send its request.

use std::collections::VecDeque;

use crate::newcomers::{Host, Newcomers};
use crate::slab::Key;

/// The handshakes that peers have started with a provider.
#[derive(Debug, Default)]
pub(super) struct Handshakes {
    /// The number of unfinished handshakes.
    pub(super) unfinished: usize,
    /// The endpoints whose request has not arrived.
    pub(super) half_open: Newcomers<Key>,
    /// The host with more half-open connections than its limit.
    pub(super) crowd: Option<Host>,
    /// Listeners that wait for room.
    pub(super) paused: Vec<Key>,
    /// Listeners that may have more connections to accept. [`Key::NONE`] is the listener for peers within the host (`setup.rs`).
    pub(super) backlog: VecDeque<Key>,
}
