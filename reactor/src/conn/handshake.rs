//! What is known of a connection while the two sides prove who they are.

use crate::security::{Handshake, Sealer};

/// A handshake that goes on.
#[derive(Debug)]
pub(crate) struct Securing {
    pub(super) handshake: Box<dyn Handshake>,
    /// Octets for the peer that have no message yet.
    pub(super) outbox: Vec<u8>,
    /// Number of octets that the peer has sent.
    pub(super) taken: usize,
    pub(super) progress: Progress,
    /// The peer's hello has come, before this side was done.
    pub(super) greeted: bool,
}

/// How far this side is.
#[derive(Debug)]
pub(super) enum Progress {
    /// The peer has not proven who it is.
    Proving,
    /// It has, and the program is to say whether it accepts the peer.
    Asking(Sealer),
    /// The program has; the peer is to hear of it behind the last octets.
    Accepted(Sealer),
    /// The peer was told.
    Done,
}
