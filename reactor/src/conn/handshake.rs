//! The state of a connection while the two sides prove their identities.

use super::setup::Setup;
use crate::security::{Handshake, Opener, Sealer};

/// A handshake in progress.
#[derive(Debug)]
pub(crate) struct Securing {
    pub(super) setup: Box<Setup>,
    pub(super) handshake: Box<dyn Handshake>,
    /// Handshake bytes for the peer that are not in a message yet.
    pub(super) outbox: Vec<u8>, // bound: handshake-bytes
    /// The number of handshake bytes that the peer has sent.
    pub(super) taken: usize,
    pub(super) progress: SecuringProgress,
    /// The keys that decrypt the peer's messages. Set once the peer has proven its identity. The keys are moved to the connection when the
    /// peer's last unencrypted message arrives.
    pub(super) opener: Option<Box<Opener>>,
    /// True if the peer's hello arrived before the local handshake ended.
    pub(super) greeted: bool,
}

impl Securing {
    pub(super) fn new(setup: Box<Setup>, handshake: Box<dyn Handshake>, outbox: Vec<u8>) -> Self {
        Self { setup, handshake, outbox, taken: 0, progress: SecuringProgress::Proving, opener: None, greeted: false }
    }
}

/// The progress of the handshake on the local side.
#[derive(Debug)]
pub(super) enum SecuringProgress {
    /// The peer has not proven its identity.
    Proving,
    /// The peer has proven its identity. The program must decide whether to accept the peer.
    Asking(Sealer),
    /// The program has postponed its decision about the peer.
    Postponed(Sealer),
    /// The program has accepted the peer. The message with the last handshake bytes notifies the peer of the acceptance.
    Accepted(Sealer),
    /// The peer was notified that it is accepted.
    Done,
}
