//! Where a connection is in its life, and why it ends.

use crate::error::{ConnectError, DisconnectReason, PeerViolation};

/// Where a connection is in its life. It only moves forward.
#[derive(Debug)]
pub(crate) enum State {
    /// This side connects: the peer's address is being resolved, and there is no queue pair yet.
    Resolving,
    /// This side connects: the peer was asked.
    Connecting,
    /// The peer connects: it was accepted, and the transport is not up yet.
    Accepting,
    /// The peer connects: the transport is up, and the peer's hello is to come.
    Greeting,
    /// The program knows of the connection, and data flows.
    Open,
    /// The program has closed the connection, and what was accepted before is still sent.
    Draining,
    /// The queues are being flushed. Then the connection is over.
    Closing(Box<Closing>),
}

/// A connection that ends.
#[derive(Debug)]
pub(crate) struct Closing {
    pub(crate) ending: Ending,
    pub(crate) certainty: Certainty,
}

/// How the program hears of the end.
#[derive(Clone, Debug)]
pub(crate) enum Ending {
    /// By `on_disconnect`. `delivers`: until then, what the peer has sent is still delivered.
    Disconnect { reason: DisconnectReason, delivers: bool },
    /// By `on_connect_error`.
    ConnectError(ConnectError),
    /// Not at all: the peer's connection did not come up. If the peer has closed it and its hello turns up after all, this
    /// is why it ended.
    Silent(Option<DisconnectReason>),
}

/// How sure the reason of an end is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Certainty {
    Known,
    /// The reason is guessed from a flushed work request or one that could not be posted. The connection manager may know
    /// better, and is waited for.
    Guessed,
}

impl Ending {
    /// The end of a connection that the program knows.
    pub(crate) fn disconnect(reason: DisconnectReason) -> Self {
        let delivers = !matches!(reason, DisconnectReason::PeerViolation(_));
        Self::Disconnect { reason, delivers }
    }

    pub(crate) fn violation(what: PeerViolation) -> Self {
        Self::disconnect(DisconnectReason::PeerViolation(what))
    }
}

impl State {
    /// Whether the transport is not up yet, as far as this side knows, or the peer's hello is to come.
    pub(crate) const fn is_handshake(&self) -> bool {
        matches!(self, Self::Resolving | Self::Connecting | Self::Accepting | Self::Greeting)
    }

    pub(crate) const fn is_open(&self) -> bool {
        matches!(self, Self::Open)
    }

    /// Whether the connection is on its way out.
    pub(crate) const fn is_ending(&self) -> bool {
        matches!(self, Self::Draining | Self::Closing(_))
    }

    pub(crate) const fn closing(&self) -> Option<&Closing> {
        match self {
            Self::Closing(closing) => Some(closing),
            _ => None,
        }
    }

    /// Whether the program was told of the connection.
    pub(crate) const fn is_announced(&self) -> bool {
        match self {
            Self::Open | Self::Draining => true,
            Self::Closing(closing) => matches!(closing.ending, Ending::Disconnect { .. }),
            _ => false,
        }
    }

    /// Whether messages are delivered. When the peer has closed, what it sent before still is.
    #[inline]
    pub(crate) const fn delivers(&self) -> bool {
        match self {
            Self::Open => true,
            Self::Closing(closing) => matches!(closing.ending, Ending::Disconnect { delivers: true, .. }),
            _ => false,
        }
    }
}
