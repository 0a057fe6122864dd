//! The states of a connection, and the reasons for its end.

use super::handshake::Securing;
use crate::error::{ConnectError, DisconnectReason, PeerViolation};

/// The state of a connection. A connection only moves forward through the states.
#[derive(Debug)]
pub(crate) enum State {
    /// This side connects: the peer's address is being resolved, and there is no queue pair yet.
    Resolving,
    /// This side connects: the connect request is on its way.
    Connecting,
    /// The peer connects: this side has accepted, and the transport is not up yet.
    Accepting,
    /// The transport is up, and the two sides prove who they are. The program knows nothing of the connection, except who
    /// the peer is.
    Securing(Box<Securing>),
    /// The peer connects: the transport is up, and the peer's hello has not come yet.
    Greeting,
    /// The connection is up: the program knows of it, and data flows.
    Open,
    /// The program has closed the connection, and the sends that were accepted before still go out.
    Draining,
    /// The program has closed the connection, all sends have ended, and the goodbye is on its way to the peer.
    Leaving,
    /// The two sides do not accept each other, and the news of that is on its way to the peer. Then the connection comes to
    /// this end.
    Refusing(Box<Ending>),
    /// The queues are being flushed. After that the connection is over.
    Closing(Box<Closing>),
}

/// The end that a connection is coming to.
#[derive(Debug)]
pub(crate) struct Closing {
    pub(crate) ending: Ending,
    pub(crate) certainty: Certainty,
    /// The reason to report if the peer had closed a connection that the program does not know, and the message that opens
    /// the connection turns up after all.
    pub(crate) late: Option<DisconnectReason>,
}

/// The way in which the program hears of the end.
#[derive(Clone, Debug)]
pub(crate) enum Ending {
    /// The program gets an `on_disconnect`. `delivers`: until then, messages that the peer has sent are still
    /// delivered.
    Disconnect { reason: DisconnectReason, delivers: bool },
    /// The program gets an `on_connect_error`.
    ConnectError(ConnectError),
    /// The program hears nothing, because a connection that the peer opened did not come up.
    Silent,
}

/// The certainty of the reason of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Certainty {
    Known,
    /// The reason is guessed from a flushed work request or one that could not be posted. The connection manager may
    /// know better, so the end waits for its event.
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
    /// Whether the connection is not up yet: this side does not know that the transport is up, or the peer's hello has
    /// not come.
    pub(crate) const fn is_handshake(&self) -> bool {
        matches!(
            self,
            Self::Resolving
                | Self::Connecting
                | Self::Accepting
                | Self::Securing(_)
                | Self::Greeting
                | Self::Refusing(_)
        )
    }

    /// Whether the two sides prove who they are.
    pub(crate) const fn is_securing(&self) -> bool {
        matches!(self, Self::Securing(_))
    }

    pub(crate) const fn is_open(&self) -> bool {
        matches!(self, Self::Open)
    }

    /// Whether the connection is ending.
    pub(crate) const fn is_ending(&self) -> bool {
        matches!(self, Self::Draining | Self::Leaving | Self::Refusing(_) | Self::Closing(_))
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
            Self::Open | Self::Draining | Self::Leaving => true,
            Self::Closing(closing) => matches!(closing.ending, Ending::Disconnect { .. }),
            _ => false,
        }
    }

    /// Whether messages are delivered. Messages that a peer sent before it closed are delivered too.
    #[inline]
    pub(crate) const fn delivers(&self) -> bool {
        match self {
            Self::Open => true,
            Self::Closing(closing) => matches!(closing.ending, Ending::Disconnect { delivers: true, .. }),
            _ => false,
        }
    }
}
