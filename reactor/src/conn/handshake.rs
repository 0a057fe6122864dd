//! The state of a connection while the two sides prove their identities.

use super::setup::Setup;
use crate::security::{Handshake, Opener, Sealer};

/// A handshake in progress.
#[derive(Debug)]
pub(crate) struct Securing {
    pub(super) setup: Box<Setup>,
    pub(super) handshake: Box<dyn Handshake>,
    /// Bytes for the peer that are not in a message yet.
    pub(super) outbox: Vec<u8>,
    /// The number of bytes that the peer has sent.
    pub(super) taken: usize,
    pub(super) progress: SecuringProgress,
    /// The keys for the messages of the peer, from the end of its handshake until its last message without a seal.
    pub(super) opener: Option<Box<Opener>>,
    /// True if the peer's hello has arrived before the local side was done.
    pub(super) greeted: bool,
}

impl Securing {
    pub(super) fn new(setup: Box<Setup>, handshake: Box<dyn Handshake>, outbox: Vec<u8>) -> Self {
        Self { setup, handshake, outbox, taken: 0, progress: SecuringProgress::Proving, opener: None, greeted: false }
    }
}

/// The progress of the local side.
#[derive(Debug)]
pub(super) enum SecuringProgress {
    /// The peer has not proven its identity.
    Proving,
    /// The peer has proven its identity, and the program must decide if it accepts the peer.
    Asking(Sealer),
    /// The program will decide later.
    Postponed(Sealer),
    /// The program has accepted the peer; the peer must be notified behind the last bytes.
    Accepted(Sealer),
    /// The peer was notified.
    Done,
}
