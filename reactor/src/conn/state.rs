//! The states of a connection, the permitted transitions, and the end of a connection.
//!
//! | state | may change to | by |
//! |---|---|---|
//! | `Resolving` | `Connecting` | [`State::connect`] |
//! | `Connecting` | `Probing`, `Securing`, `Open` | [`State::probe`], [`State::secure`], [`State::open`] |
//! | `Probing` | `Open` | [`State::open`] |
//! | `Accepting` | `Securing`, `Greeting`, `Open` | [`State::secure`], [`State::greet`], [`State::open`] |
//! | `Securing` | `Greeting`, `Open` | [`State::greet`], [`State::open`] |
//! | `Greeting` | `Open` | [`State::open`] |
//! | `Open` | `Draining` | [`State::drain`] |
//! | `Draining` | `Leaving` | [`State::leave`] |
//! | `Connecting`, `Accepting`, `Securing` | `Refusing` | [`State::refuse`] |
//! | all but `Closing` | `Closing` | [`State::close`] |
//!
//! So a connection never returns to an earlier state. An attempt at any other transition leaves the state unchanged and logs an error.

use std::collections::VecDeque;
use std::mem;

use super::evidence::{Evidence, better};
use super::handshake::Securing;
use super::setup::{Early, Setup};
use crate::error::{ConnectError, DisconnectReason};
use crate::security::{Handshake, Opener, SecurityError};

/// The state of a connection. The table of the [module](self) has all permitted changes.
#[derive(Debug)]
pub(crate) enum State {
    /// The local side opens the connection: the peer's address is being resolved, and there is no queue pair yet.
    Resolving(Box<Setup>),
    /// The local side opens the connection: the connect request is in flight.
    Connecting(Box<Setup>),
    /// The local side opens the connection by exchange of queue pair numbers: both queue pairs are ready, and the hello is in flight. The
    /// peer's device has not acknowledged the hello, so it is not known yet if the queue pair that the peer has named can be reached.
    Probing(Box<Setup>),
    /// The peer opens the connection, and the local side has accepted. The transport is not up yet, or it is up and the peer has not sent
    /// the first handshake message.
    Accepting(Box<Setup>),
    /// The transport is up, and the two sides prove their identities. The program was not notified of the connection yet, but may have been
    /// asked to accept the peer's identity.
    Securing(Box<Securing>),
    /// The peer opens the connection: the transport is up, and the peer's hello has not arrived.
    Greeting,
    /// The connection is up and was reported to the program.
    Open,
    /// The program has closed the connection. The sends that were accepted before the close are still being sent.
    Draining,
    /// The program has closed the connection, all sends have ended or were posted, and the goodbye is in flight to the peer.
    Leaving,
    /// The local side has refused the peer's identity, and the refusal is in flight to the peer. When the refusal has been sent, the
    /// connection ends with this `Ending`.
    Refusing(Box<Ending>),
    /// The queues are being flushed. After that the connection ends.
    Closing(Box<Closing>),
}

/// The end of a connection.
#[derive(Debug)]
pub(crate) struct Closing {
    pub(crate) ending: Ending,
    /// Set if the connection may have been up on the peer's side, though the local side did not report it.
    pub(super) late: Option<Late>,
    /// The data for another attempt to connect, if the connection did not come up.
    setup: Option<Box<Setup>>,
}

/// The end of a connection that was up on the peer's side, but was not reported to the local
/// program. The peer's opening message may have arrived without being processed yet. If that
/// message is processed now, the program is still notified of the connection, and receives the
/// messages from the peer.
#[derive(Debug)]
pub(super) struct Late {
    /// The evidence to report if the opening message is processed.
    pub(super) evidence: Evidence,
    /// The keys that decrypt the peer's messages, if the peer's last unencrypted message was not processed yet.
    pub(super) opener: Option<Box<Opener>>,
}

/// The way in which the program is notified of the end.
#[derive(Clone, Debug)]
pub(crate) enum Ending {
    /// The program receives an `on_disconnect`. If `delivers` is set, the messages that the peer has sent are delivered before the
    /// `on_disconnect`.
    Disconnect { evidence: Evidence, delivers: bool },
    /// The program receives an `on_connect_error`.
    ConnectError(ConnectError),
    /// The program receives no callback, because a connection that the peer opened did not come up.
    Silent,
}

impl Ending {
    /// Creates the end of a connection that was reported to the program. After a protocol violation, no more messages are delivered.
    pub(crate) const fn disconnect(evidence: Evidence) -> Self {
        let delivers = !matches!(evidence, Evidence::Decided(DisconnectReason::PeerViolation(_)));
        Self::Disconnect { evidence, delivers }
    }

    /// Creates the end of a connection that the local side has ended for this reason.
    pub(crate) const fn decided(reason: DisconnectReason) -> Self {
        Self::disconnect(Evidence::Decided(reason))
    }

    /// Creates the end of a connection that the program has closed. `complete` is true if all sends that were accepted before the close
    /// were sent.
    pub(super) const fn local(complete: bool) -> Self {
        Self::decided(DisconnectReason::Local { complete })
    }

    /// Returns true if the program has closed the connection.
    pub(super) const fn is_local(&self) -> bool {
        matches!(self, Self::Disconnect { evidence: Evidence::Decided(DisconnectReason::Local { .. }), .. })
    }

    /// Returns true if the peer has closed the connection.
    pub(super) const fn is_parting(&self) -> bool {
        match self {
            Self::Disconnect { evidence, .. } => evidence.is_parting(),
            Self::ConnectError(_) | Self::Silent => false,
        }
    }
}

impl Closing {
    /// Processes a further report of the end, and keeps the better evidence of the two. After a
    /// report of a protocol violation or of a panic, no more messages are delivered, also if the
    /// transport had ended before. If the connection was not reported as up before such a report,
    /// it is not reported as up any more.
    pub(super) fn learn(&mut self, other: Ending) {
        let Ending::Disconnect { evidence: found, delivers: still_delivers } = other else { return };
        match &mut self.ending {
            Ending::Disconnect { evidence, delivers } => {
                *evidence = better(evidence.clone(), found);
                *delivers &= still_delivers;
            }
            Ending::ConnectError(_) | Ending::Silent if !still_delivers => self.late = None,
            Ending::ConnectError(_) | Ending::Silent => {}
        }
    }

    /// Returns true if better evidence may still arrive. In this case, the end of the connection is not reported yet.
    pub(super) const fn is_guess(&self) -> bool {
        match &self.ending {
            Ending::Disconnect { evidence, .. } => evidence.is_guess(),
            Ending::ConnectError(_) | Ending::Silent => false,
        }
    }

    /// Returns true if the connection was not reported as up, but may have been up on the peer's side. In this case, the peer's opening
    /// message may still be in the completion queue.
    pub(crate) const fn may_have_been_up(&self) -> bool {
        self.late.is_some()
    }

    /// Notes that the peer's opening message has arrived, which shows that the connection was up on the peer's side. Returns false if the
    /// connection does not wait for that message.
    pub(super) fn opened(&mut self) -> bool {
        let Some(late) = self.late.take() else { return false };
        self.ending = Ending::disconnect(late.evidence);
        true
    }

    /// Notes that the program has closed the connection. From now on, no messages are delivered, and the connection is not reported as up.
    /// The ends of sends and of the connection are still reported.
    pub(super) fn mute(&mut self) {
        // The program has closed the connection, so the connection is not reported as up, even if the peer's opening message arrives now.
        let late = self.late.take().is_some();
        match &mut self.ending {
            Ending::Disconnect { delivers, .. } => *delivers = false,
            Ending::ConnectError(error) if late => *error = ConnectError::Cancelled,
            Ending::ConnectError(_) | Ending::Silent => {}
        }
    }

    /// Notes that a send was not delivered before the end. If the program has closed the connection, `on_disconnect` reports
    /// [`DisconnectReason::Local`] with `complete: false`. Otherwise, nothing changes.
    pub(super) const fn cut_off(&mut self) {
        if let Ending::Disconnect { evidence: Evidence::Decided(DisconnectReason::Local { complete }), .. } =
            &mut self.ending
        {
            *complete = false;
        }
    }

    /// Returns true if the only known reason of the end is an error of the transport while connecting. If the peer has refused the
    /// connection before that error, the refusal must replace this reason.
    pub(super) const fn may_be_refused(&self) -> bool {
        matches!(self.ending, Ending::ConnectError(ConnectError::Transport(_)))
    }

    /// Replaces the reason of the end: the peer had refused the connection before the transport ended.
    pub(super) fn refused(&mut self, error: SecurityError) {
        (self.ending, self.late) = (Ending::ConnectError(ConnectError::Security(error)), None);
    }
}

/// The states without their data. A connection never changes to a state that is before its current state in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum StateKind {
    Resolving,
    Connecting,
    Probing,
    Accepting,
    Securing,
    Greeting,
    Open,
    Draining,
    Leaving,
    Refusing,
    Closing,
}

impl StateKind {
    /// Returns true if a connection may change from this state to `next`.
    const fn leads_to(self, next: Self) -> bool {
        match self {
            Self::Resolving => matches!(next, Self::Connecting | Self::Closing),
            Self::Connecting => {
                matches!(next, Self::Probing | Self::Securing | Self::Open | Self::Refusing | Self::Closing)
            }
            Self::Accepting => {
                matches!(next, Self::Securing | Self::Greeting | Self::Open | Self::Refusing | Self::Closing)
            }
            Self::Securing => matches!(next, Self::Greeting | Self::Open | Self::Refusing | Self::Closing),
            Self::Probing | Self::Greeting => matches!(next, Self::Open | Self::Closing),
            Self::Open => matches!(next, Self::Draining | Self::Closing),
            Self::Draining => matches!(next, Self::Leaving | Self::Closing),
            Self::Leaving | Self::Refusing => matches!(next, Self::Closing),
            Self::Closing => false,
        }
    }
}

/// The transitions. Each function performs one transition. If the current state does not permit that transition, the function returns false
/// or `None`.
impl State {
    /// Changes to `Connecting`: the peer's address is resolved.
    pub(super) fn connect(&mut self) -> bool {
        self.advance(StateKind::Connecting, |setup| Self::Connecting(setup.unwrap_or_default()))
    }

    /// Changes to `Probing`: the hello is queued, and the connection now waits for the
    /// acknowledgement from the peer's device.
    pub(super) fn probe(&mut self) -> bool {
        self.advance(StateKind::Probing, |setup| Self::Probing(setup.unwrap_or_default()))
    }

    /// Changes to `Securing`: the two sides begin to prove their identities. `outbox` has the first handshake bytes for the peer.
    pub(super) fn secure(&mut self, handshake: Box<dyn Handshake>, outbox: Vec<u8>) -> bool {
        self.advance(StateKind::Securing, |setup| {
            Self::Securing(Box::new(Securing::new(setup.unwrap_or_default(), handshake, outbox)))
        })
    }

    /// Changes to `Greeting`: only the peer's hello is missing.
    pub(super) fn greet(&mut self) -> bool {
        self.advance(StateKind::Greeting, |_| Self::Greeting)
    }

    /// Changes to `Open`: the connection is up. Returns the messages that arrived before this change. Returns `None` if the state does not
    /// permit this change.
    pub(super) fn open(&mut self) -> Option<VecDeque<Early>> {
        let mut early = VecDeque::new();
        let opened = self.advance(StateKind::Open, |setup| {
            early = setup.map_or_else(VecDeque::new, |setup| setup.early);
            Self::Open
        });
        opened.then_some(early)
    }

    /// Changes to `Draining`: the program has closed the connection.
    pub(super) fn drain(&mut self) -> bool {
        self.advance(StateKind::Draining, |_| Self::Draining)
    }

    /// Changes to `Leaving`: all sends have ended or were posted, and the goodbye is being sent.
    pub(super) fn leave(&mut self) -> bool {
        self.advance(StateKind::Leaving, |_| Self::Leaving)
    }

    /// Changes to `Refusing`: the local side has refused the peer's identity.
    pub(super) fn refuse(&mut self, ending: Ending) -> bool {
        self.advance(StateKind::Refusing, |_| Self::Refusing(Box::new(ending)))
    }

    /// Changes to `Closing`: the queues are being flushed.
    pub(super) fn close(&mut self, ending: Ending) -> bool {
        self.advance(StateKind::Closing, |setup| Self::Closing(Box::new(Closing { ending, late: None, setup })))
    }

    /// Changes to the state `to`. `next` builds that state from the setup data of the current one. Returns false and logs an error if the
    /// change is not permitted.
    fn advance(&mut self, to: StateKind, next: impl FnOnce(Option<Box<Setup>>) -> Self) -> bool {
        let from = self.step();
        let leads = from.leads_to(to);
        debug_assert!(leads, "{from:?} does not lead to {to:?}");
        if leads {
            *self = next(mem::replace(self, Self::Open).into_setup());
        } else {
            local_log!(Error, "a connection cannot change from {from:?} to {to:?}");
        }
        leads
    }

    fn into_setup(self) -> Option<Box<Setup>> {
        match self {
            Self::Resolving(setup) | Self::Connecting(setup) | Self::Probing(setup) | Self::Accepting(setup) => {
                Some(setup)
            }
            Self::Securing(securing) => Some(securing.setup),
            Self::Closing(closing) => closing.setup,
            Self::Greeting | Self::Open | Self::Draining | Self::Leaving | Self::Refusing(_) => None,
        }
    }

    /// Returns the setup data. `None` in the states that have none.
    pub(super) fn setup(&self) -> Option<&Setup> {
        match self {
            Self::Resolving(setup) | Self::Connecting(setup) | Self::Probing(setup) | Self::Accepting(setup) => {
                Some(setup)
            }
            Self::Securing(securing) => Some(&securing.setup),
            Self::Closing(closing) => closing.setup.as_deref(),
            Self::Greeting | Self::Open | Self::Draining | Self::Leaving | Self::Refusing(_) => None,
        }
    }

    /// Returns the setup data, to change it. `None` in the states that have none.
    pub(super) fn setup_mut(&mut self) -> Option<&mut Setup> {
        match self {
            Self::Resolving(setup) | Self::Connecting(setup) | Self::Probing(setup) | Self::Accepting(setup) => {
                Some(setup)
            }
            Self::Securing(securing) => Some(&mut securing.setup),
            Self::Closing(closing) => closing.setup.as_deref_mut(),
            Self::Greeting | Self::Open | Self::Draining | Self::Leaving | Self::Refusing(_) => None,
        }
    }

    const fn step(&self) -> StateKind {
        match self {
            Self::Resolving(_) => StateKind::Resolving,
            Self::Connecting(_) => StateKind::Connecting,
            Self::Probing(_) => StateKind::Probing,
            Self::Accepting(_) => StateKind::Accepting,
            Self::Securing(_) => StateKind::Securing,
            Self::Greeting => StateKind::Greeting,
            Self::Open => StateKind::Open,
            Self::Draining => StateKind::Draining,
            Self::Leaving => StateKind::Leaving,
            Self::Refusing(_) => StateKind::Refusing,
            Self::Closing(_) => StateKind::Closing,
        }
    }
}

impl State {
    /// Returns true if the connection is not up yet: the transport is not up, the identities are not proven, the peer's hello has not
    /// arrived, or the local hello is not acknowledged.
    pub(crate) const fn is_handshake(&self) -> bool {
        matches!(
            self,
            Self::Resolving(_)
                | Self::Connecting(_)
                | Self::Probing(_)
                | Self::Accepting(_)
                | Self::Securing(_)
                | Self::Greeting
                | Self::Refusing(_)
        )
    }

    /// Returns true if the two sides are proving their identities.
    pub(crate) const fn is_securing(&self) -> bool {
        matches!(self, Self::Securing(_))
    }

    pub(crate) const fn is_open(&self) -> bool {
        matches!(self, Self::Open)
    }

    /// Returns true if the connection is ending.
    pub(crate) const fn is_ending(&self) -> bool {
        matches!(self, Self::Draining | Self::Leaving | Self::Refusing(_) | Self::Closing(_))
    }

    pub(crate) const fn closing(&self) -> Option<&Closing> {
        match self {
            Self::Closing(closing) => Some(closing),
            _ => None,
        }
    }

    /// Returns true if the program was notified that the connection is up.
    pub(crate) const fn is_announced(&self) -> bool {
        match self {
            Self::Open | Self::Draining | Self::Leaving => true,
            Self::Closing(closing) => matches!(closing.ending, Ending::Disconnect { .. }),
            _ => false,
        }
    }

    /// Returns true if messages are delivered to the program: while the connection is open, and while it ends, unless the program has
    /// closed it, a callback has panicked, or the peer has violated the protocol.
    #[inline]
    pub(crate) const fn delivers(&self) -> bool {
        match self {
            Self::Open => true,
            Self::Closing(closing) => matches!(closing.ending, Ending::Disconnect { delivers: true, .. }),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEPS: [StateKind; 11] = [
        StateKind::Resolving,
        StateKind::Connecting,
        StateKind::Probing,
        StateKind::Accepting,
        StateKind::Securing,
        StateKind::Greeting,
        StateKind::Open,
        StateKind::Draining,
        StateKind::Leaving,
        StateKind::Refusing,
        StateKind::Closing,
    ];

    /// A row for each state, in the order of `STEPS`. Column `n` of a row has the letter of state `n` if a change to state `n` is
    /// permitted, and `-` if it is not.
    const TABLE: [&str; 11] = [
        "-C--------X",
        "--P-S-O--RX",
        "------O---X",
        "----SGO--RX",
        "-----GO--RX",
        "------O---X",
        "-------D--X",
        "--------L-X",
        "----------X",
        "----------X",
        "-----------",
    ];

    #[test]
    fn a_connection_changes_in_the_written_ways_only() {
        for (from, row) in STEPS.into_iter().zip(TABLE) {
            for (to, letter) in STEPS.into_iter().zip(row.chars()) {
                assert_eq!(from.leads_to(to), letter != '-', "{from:?} to {to:?}");
            }
        }
    }

    #[test]
    fn a_connection_only_moves_forward() {
        for from in STEPS {
            for to in STEPS {
                assert!(!from.leads_to(to) || from < to, "{from:?} to {to:?}");
            }
        }
    }
}
