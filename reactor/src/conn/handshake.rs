//! What is known of a connection while the two sides prove who they are.

use super::setup::Setup;
use crate::security::{Handshake, Opener, Sealer};

/// A handshake that goes on.
#[derive(Debug)]
pub(crate) struct Securing {
    pub(super) setup: Box<Setup>,
    pub(super) handshake: Box<dyn Handshake>,
    /// Octets for the peer that have no message yet.
    pub(super) outbox: Vec<u8>,
    /// Number of octets that the peer has sent.
    pub(super) taken: usize,
    pub(super) progress: Progress,
    /// The keys for what the peer sends, from the end of its handshake until its last message without a seal.
    pub(super) opener: Option<Box<Opener>>,
    /// The peer's hello has come, before this side was done.
    pub(super) greeted: bool,
}

impl Securing {
    pub(super) fn new(setup: Box<Setup>, handshake: Box<dyn Handshake>, outbox: Vec<u8>) -> Self {
        Self { setup, handshake, outbox, taken: 0, progress: Progress::Proving, opener: None, greeted: false }
    }
}

/// How far this side is.
#[derive(Debug)]
pub(super) enum Progress {
    /// The peer has not proven who it is.
    Proving,
    /// It has, and the program is to say whether it accepts the peer.
    Asking(Sealer),
    /// The program answers later.
    Postponed(Sealer),
    /// The program has; the peer is to hear of it behind the last octets.
    Accepted(Sealer),
    /// The peer was told.
    Done,
}
