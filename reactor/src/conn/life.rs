//! How a connection begins and ends.

use std::time::Instant;

use rdma_transport::cm::{ConnectFailure, DisconnectCause};
use rdma_transport::wc::WcStatus;

use super::credit::{ReceiveWindow, SendWindow};
use super::effects::{Action, Effects, Event};
use super::frame::Kind;
use super::greeting::Greeting;
use super::keepalive::{Patience, Verdict};
use super::recv_queue::RecvQueue;
use super::state::{Certainty, Closing, Ending, State};
use super::{Connection, Env, Terms};
use crate::config::{Config, Framing};
use crate::device::Buffers;
use crate::error::{ConnectError, DisconnectReason, Outcome, PeerViolation, RejectReason};

/// How a timeout of a connection came about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Silence {
    /// When the transport got the last octets of the peer, if it says so.
    pub(crate) heard: Option<Instant>,
    /// Nothing of this peer can be left that nobody has looked at.
    pub(crate) caught_up: bool,
}

impl Config {
    const fn patience(&self) -> Patience {
        Patience { interval: self.keepalive_interval, timeout: self.keepalive_timeout }
    }
}

impl Connection {
    // Beginning.

    /// The connection is on a device, with so many places for sends, these receives and a window of so many.
    pub(crate) fn equip(&mut self, sends: u32, receives: RecvQueue, window: u32) {
        self.sends.reserve(sends);
        self.receives = receives;
        self.rx = ReceiveWindow::new(window);
    }

    /// The first receives are posted: the greeting grants them.
    pub(crate) const fn grant_initial(&mut self, depth: u32) {
        self.rx = ReceiveWindow::new(depth);
    }

    /// The peer's address is resolved; `false` if that does not matter any more.
    pub(crate) fn resolved(&mut self) -> bool {
        let was = matches!(self.state, State::Resolving);
        if was {
            self.state = State::Connecting;
        }
        was
    }

    /// What this side says to the peer: its private data, behind a greeting unless the framing is raw.
    pub(crate) fn greeting(&self, private_data: &[u8], buffer_size: u32, extensions: bool, config: &Config) -> Vec<u8> {
        match self.framing {
            Framing::Raw => private_data.to_vec(),
            Framing::Credits => Greeting {
                window: self.rx.told(),
                buffer_size,
                max_message: config.max_message_in_kib(),
                extensions,
                reason: RejectReason::Refused,
                user: private_data,
            }
            .emit(),
        }
    }

    /// Notes what the peer's greeting says, and what a buffer of this side holds.
    pub(crate) fn agree(&mut self, greeting: &Greeting<'_>, own: u32, extensions: bool) {
        self.tx = SendWindow::new(greeting.window);
        self.terms = match self.framing {
            Framing::Credits => Terms {
                buffer_size: greeting.buffer_size.min(own) as usize,
                max_message: u64::from(greeting.max_message) << 10,
                extensions,
            },
            Framing::Raw => Terms { buffer_size: own as usize, max_message: 0, extensions: false },
        };
        self.about.private_data = greeting.user.to_vec();
    }

    /// The transport is up. `own`: what a buffer of this side holds. Returns whether the peer offers extensions that are to be
    /// agreed on.
    pub(crate) fn established(&mut self, private_data: &[u8], own: u32, env: &mut Env<'_>) -> bool {
        match (&self.state, self.framing) {
            (State::Accepting, Framing::Credits) => self.state = State::Greeting,
            (State::Accepting, Framing::Raw) => self.announce(env),
            (State::Connecting, Framing::Raw) => {
                self.agree(&Greeting::reject(RejectReason::Refused, private_data), own, false);
                self.announce(env);
            }
            (State::Connecting, Framing::Credits) => match Greeting::parse(private_data).and_then(Greeting::checked) {
                Ok(greeting) => {
                    self.agree(&greeting, own, false);
                    // The hello opens the peer's side, and goes before anything that the program sends.
                    self.push_control(Kind::Hello, &[], None, env);
                    self.announce(env);
                    return greeting.extensions;
                }
                Err(reason) => {
                    let error = ConnectError::Rejected { reason, private_data: Vec::new() };
                    self.end(Ending::ConnectError(error), Certainty::Known, env);
                }
            },
            // The event came twice, or data that came before it has implied it.
            _ => {}
        }
        false
    }

    /// Both sides use the extensions of the embedded provider.
    pub(crate) const fn use_extensions(&mut self) {
        self.terms.extensions = true;
    }

    /// Tells the program that the connection is up.
    pub(super) fn announce(&mut self, env: &mut Env<'_>) {
        match &mut self.state {
            State::Closing(closing) => {
                // The peer has closed before its hello was seen: what it sent is delivered all the same.
                let Ending::Silent(Some(reason)) = &closing.ending else { return };
                closing.ending = Ending::disconnect(reason.clone());
            }
            _ => {
                self.state = State::Open;
                self.heard = env.now;
                if !self.is_active() {
                    self.want(env, Action::Settled);
                }
                let first = match self.framing {
                    Framing::Credits => Some(self.keepalive.start(env.now, self.is_active(), &env.config.patience())),
                    Framing::Raw => None,
                };
                self.want(env, Action::Deadline(first));
                self.mark(env);
            }
        }
        env.stats.connections.connected += 1;
        self.tell(env, Event::Connected);
        self.deliver_early(env);
    }

    // Time.

    /// The deadline has passed that [`Action::Deadline`] has set. Whether the peer seems to be gone, and only what may be unseen
    /// speaks for it.
    pub(crate) fn timeout(&mut self, silence: &Silence, env: &mut Env<'_>) -> bool {
        match self.state {
            State::Resolving | State::Connecting => {
                self.end(Ending::ConnectError(ConnectError::Timeout), Certainty::Known, env);
            }
            State::Accepting | State::Greeting => {
                log::info!("{} was not up within the handshake timeout", self.about.peer);
                self.end(Ending::Silent(None), Certainty::Known, env);
            }
            State::Open => return self.check_silence(silence, env),
            State::Draining => self.flush(env),
            State::Closing(_) => {}
        }
        false
    }

    fn check_silence(&mut self, silence: &Silence, env: &mut Env<'_>) -> bool {
        let stands = self.transfers.stands_since().map(|since| since + env.config.transfer_timeout);
        if stands.is_some_and(|end| end <= env.now) {
            self.end(Ending::disconnect(DisconnectReason::TransferTimeout), Certainty::Known, env);
            return false;
        }
        let (mut next, mut suspects) = (stands, false);
        if self.framing == Framing::Credits {
            self.heard = silence.heard.map_or(self.heard, |heard| heard.max(self.heard));
            let patience = env.config.patience();
            let until = match self.keepalive.check(env.now, self.heard, silence.caught_up, &patience) {
                Verdict::Wait(until) => until,
                Verdict::Suspect(until) => {
                    suspects = true;
                    until
                }
                Verdict::Lost => {
                    env.stats.connections.keepalive_timeouts += 1;
                    self.end(Ending::disconnect(DisconnectReason::KeepaliveTimeout), Certainty::Known, env);
                    return false;
                }
            };
            next = Some(next.map_or(until, |next| next.min(until)));
            if self.keepalive.owes_ping {
                self.mark(env);
            }
        }
        self.want(env, Action::Deadline(next));
        suspects
    }

    // Ending.

    /// The program closes the connection.
    pub(crate) fn close(&mut self, env: &mut Env<'_>) {
        self.mute(env);
        let ending = match (self.state.is_handshake(), self.is_active()) {
            (false, _) => Ending::disconnect(DisconnectReason::Local),
            (true, true) => Ending::ConnectError(ConnectError::Cancelled),
            (true, false) => Ending::Silent(None),
        };
        self.end(ending, Certainty::Known, env);
    }

    /// The program closes the connection, and what it has sent need not arrive.
    pub(crate) fn abort(&mut self, env: &mut Env<'_>) {
        self.close(env);
        self.flush(env);
    }

    /// The program wants to hear no more of the connection than its sends and its end.
    fn mute(&mut self, env: &mut Env<'_>) {
        self.refused = None;
        self.discard_held(env);
        self.want(env, Action::NoMemory);
        if let State::Closing(closing) = &mut self.state
            && let Ending::Disconnect { delivers, .. } = &mut closing.ending
        {
            *delivers = false;
        }
        let Env { effects: Effects { events, .. }, buffers, .. } = env;
        let (id, shared) = (self.id, self.receives.is_shared());
        events.retain_mut(|(of, event)| *of != id || !is_muted(event, buffers, shared));
    }

    /// Ends the connection, for the first reason given. The rest happens when the queues were flushed.
    pub(crate) fn end(&mut self, ending: Ending, certainty: Certainty, env: &mut Env<'_>) {
        let graceful = matches!(ending, Ending::Disconnect { reason: DisconnectReason::Local, .. });
        match self.state {
            State::Closing(_) => return,
            State::Draining => {
                if !graceful {
                    // It was ending anyway; what was still to be sent cannot be.
                    self.flush(env);
                }
                return;
            }
            _ => {}
        }
        log::debug!("{}: ending: {ending:?}", self.id);
        // A connection that the program was not told of has no disconnect to report.
        let ending = match ending {
            Ending::Disconnect { reason: reason @ DisconnectReason::Peer, .. }
                if self.state.is_handshake() && !self.is_active() =>
            {
                Ending::Silent(Some(reason))
            }
            _ if self.state.is_handshake() && !self.is_active() => Ending::Silent(None),
            Ending::Disconnect { reason, .. } if self.state.is_handshake() => {
                Ending::ConnectError(ConnectError::Local(reason.to_string()))
            }
            other => other,
        };
        let certainty = if matches!(ending, Ending::Disconnect { .. }) { certainty } else { Certainty::Known };
        if graceful && self.state.is_open() {
            self.state = State::Draining;
            self.want(env, Action::Ending);
            self.want(env, Action::Deadline(Some(env.now + env.config.close_timeout)));
            self.mark(env);
            return;
        }
        self.begin_flush(ending, certainty, env);
    }

    /// Whether the program has closed the connection and nothing is left to be sent.
    pub(crate) fn is_drained(&self) -> bool {
        matches!(self.state, State::Draining) && self.sends.is_empty() && !self.transfers.offers()
    }

    /// A connection that the program has closed had its time to send.
    pub(crate) fn flush(&mut self, env: &mut Env<'_>) {
        if matches!(self.state, State::Draining) {
            let ending = Ending::Disconnect { reason: DisconnectReason::Local, delivers: false };
            self.begin_flush(ending, Certainty::Known, env);
        }
    }

    fn begin_flush(&mut self, ending: Ending, certainty: Certainty, env: &mut Env<'_>) {
        if self.state.is_handshake() && !self.is_active() {
            self.want(env, Action::Settled);
        }
        self.state = State::Closing(Box::new(Closing { ending, certainty }));
        self.want(env, Action::Flush);
    }

    /// A work request has failed, and nobody has ended the connection: what ended it is about to be known.
    pub(super) fn work_request_failed(&mut self, status: WcStatus, env: &mut Env<'_>) {
        let reason = DisconnectReason::Transport(DisconnectCause::WorkRequest(status));
        let certainty = if status == WcStatus::Flushed { Certainty::Guessed } else { Certainty::Known };
        self.end(Ending::disconnect(reason), certainty, env);
    }

    /// Work requests could not be posted. It may be the device that is going away.
    pub(crate) fn posting_failed(&mut self, why: String, env: &mut Env<'_>) {
        self.end(Ending::disconnect(DisconnectReason::Internal(why)), Certainty::Guessed, env);
    }

    /// The peer has broken the protocol.
    pub(crate) fn violated(&mut self, what: PeerViolation, env: &mut Env<'_>) {
        log::warn!("{}: {} broke the protocol: {what}", self.id, self.about.peer);
        self.end(Ending::violation(what), Certainty::Known, env);
    }

    /// The peer's side has refused.
    pub(crate) fn rejected(&mut self, private_data: Vec<u8>, env: &mut Env<'_>) {
        let error = match Greeting::parse(&private_data) {
            Ok(no) => ConnectError::Rejected { reason: no.reason, private_data: no.user.to_vec() },
            Err(_) => ConnectError::Rejected { reason: RejectReason::Refused, private_data },
        };
        self.end(Ending::ConnectError(error), Certainty::Known, env);
    }

    /// Connecting has failed.
    pub(crate) fn connect_failed(&mut self, failure: ConnectFailure, env: &mut Env<'_>) {
        let error = match failure {
            ConnectFailure::Timeout => ConnectError::Timeout,
            other => ConnectError::Transport(other),
        };
        self.end(Ending::ConnectError(error), Certainty::Known, env);
    }

    /// The device is going away.
    pub(crate) fn device_removed(&mut self, env: &mut Env<'_>) {
        if !self.correct(|_| Some(DisconnectReason::DeviceRemoved)) {
            self.end(Ending::disconnect(DisconnectReason::DeviceRemoved), Certainty::Known, env);
        }
    }

    /// The connection manager says that the connection is gone.
    pub(crate) fn disconnected(&mut self, cause: DisconnectCause, env: &mut Env<'_>) {
        let reason = |cause| match cause {
            // The event that follows this side's own disconnect does not say that the queues were flushed before it.
            DisconnectCause::Peer | DisconnectCause::Local => DisconnectReason::Peer,
            cause => DisconnectReason::Transport(cause),
        };
        let corrected = self.correct(|guess| match (guess, reason(cause.clone())) {
            // What could not be posted was not the peer's doing.
            (DisconnectReason::Internal(_), DisconnectReason::Peer) => None,
            (_, reason) => Some(reason),
        });
        if corrected {
            return;
        }
        let ending = match (&self.state, cause) {
            (State::Connecting, cause) => {
                Ending::ConnectError(ConnectError::Transport(ConnectFailure::Protocol(cause.to_string())))
            }
            (_, DisconnectCause::Peer) => Ending::disconnect(DisconnectReason::Peer),
            (_, DisconnectCause::Local) => Ending::disconnect(DisconnectReason::Local),
            (_, cause) => Ending::disconnect(DisconnectReason::Transport(cause)),
        };
        self.end(ending, Certainty::Known, env);
    }

    /// Replaces a reason that was guessed, if it was.
    fn correct(&mut self, better: impl FnOnce(&DisconnectReason) -> Option<DisconnectReason>) -> bool {
        let State::Closing(closing) = &mut self.state else { return false };
        let Closing { ending: Ending::Disconnect { reason, .. }, certainty: certainty @ Certainty::Guessed } =
            &mut **closing
        else {
            return false;
        };
        *certainty = Certainty::Known;
        if let Some(better) = better(reason) {
            *reason = better;
        }
        true
    }

    /// Whether nothing of a connection that ends is left with the device, and why it ended is known.
    pub(crate) fn is_flushed(&self) -> bool {
        let certain = self.state.closing().is_some_and(|closing| closing.certainty == Certainty::Known);
        certain && self.outstanding() == 0
    }

    /// The queue pair is gone. The sends that are left have failed; returns the last callback, if there is one.
    pub(crate) fn finish(&mut self, env: &mut Env<'_>) -> Option<Event> {
        self.sends.abandon_chain();
        while !self.sends.is_empty() {
            self.end_send(Outcome::Failed(WcStatus::Flushed), env);
        }
        self.fail_transfers(env);
        self.drop_early(env);
        self.receives.empty(&mut env.buffers.pool);
        let State::Closing(closing) = &self.state else { return None };
        match closing.ending.clone() {
            Ending::Disconnect { reason, .. } => {
                env.stats.connections.disconnected += 1;
                Some(Event::Disconnected(Box::new(reason)))
            }
            Ending::ConnectError(error) => {
                env.stats.connections.connect_errors += 1;
                Some(Event::ConnectError(Box::new(error)))
            }
            Ending::Silent(_) => {
                env.stats.connections.refused += 1;
                None
            }
        }
    }
}

/// Whether an event is not told to a program that wants to hear no more than the sends and the end of a connection; frees
/// what such an event holds.
fn is_muted(event: &mut Event, buffers: &mut Buffers, shared: bool) -> bool {
    match event {
        Event::Message(arrived) => {
            if let Some(buffer) = arrived.buffer.take() {
                buffers.free_receive(buffer, shared);
            }
            true
        }
        Event::Fetched(_) | Event::Immediate(_) | Event::Writable => true,
        _ => false,
    }
}
