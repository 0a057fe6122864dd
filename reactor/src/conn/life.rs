//! The beginning and the end of a connection.

use std::time::Instant;

use rdma_transport::cm::{ConnectFailure, DisconnectCause};
use rdma_transport::wc::{Failure, WcStatus};

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
use crate::security::SecurityMode;

/// The peer's silence as it was when a timeout of a connection ran.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Silence {
    /// Time at which the transport got the last octets of the peer, if the provider reports that.
    pub(crate) heard: Option<Instant>,
    /// This side has looked at everything that the peer has sent.
    pub(crate) caught_up: bool,
}

impl Config {
    const fn patience(&self) -> Patience {
        Patience { interval: self.keepalive_interval, timeout: self.keepalive_timeout }
    }
}

impl Connection {
    // Beginning.

    /// Gives the connection its places for sends and its receives once its device is known. `window`: how many of the
    /// receives the peer is granted.
    pub(crate) fn equip(&mut self, sends: u32, receives: RecvQueue, window: u32) {
        self.sends.reserve(sends);
        self.receives = receives;
        self.rx = ReceiveWindow::new(window);
    }

    /// Sets the window to the first `depth` receives that were posted; the greeting grants them.
    pub(crate) const fn grant_initial(&mut self, depth: u32) {
        self.rx = ReceiveWindow::new(depth);
    }

    /// Notes that the peer's address is resolved; `false` if that does not matter any more.
    pub(crate) fn resolved(&mut self) -> bool {
        let was = matches!(self.state, State::Resolving);
        if was {
            self.state = State::Connecting;
        }
        was
    }

    /// Returns the private data for the peer: the program's own, behind a greeting unless the framing is raw.
    pub(crate) fn greeting(&self, private_data: &[u8], buffer_size: u32, extensions: bool, config: &Config) -> Vec<u8> {
        match self.framing {
            Framing::Raw => private_data.to_vec(),
            Framing::Credits => Greeting {
                window: self.rx.told(),
                buffer_size,
                max_message: config.max_message_in_kib(),
                extensions,
                fragments: true,
                progress: true,
                parting: true,
                security: Some(self.about.security.mode()),
                reason: RejectReason::Refused,
                user: private_data,
            }
            .emit(),
        }
    }

    /// Takes over the terms of the peer's greeting. `own`: largest payload in one buffer of this side, bytes.
    pub(crate) fn agree(&mut self, greeting: &Greeting<'_>, own: u32, extensions: bool, config: &Config) {
        self.tx = SendWindow::new(greeting.window);
        self.terms = match self.framing {
            Framing::Credits => {
                let max_message = u64::from(greeting.max_message) << 10;
                let most = usize::try_from(max_message).unwrap_or(usize::MAX);
                let eager = if greeting.fragments { config.eager_limit.min(most) } else { 0 };
                let Greeting { progress, parting, .. } = *greeting;
                let buffer_size = greeting.buffer_size.min(own) as usize;
                Terms { buffer_size, max_message, eager, progress, parting, extensions }
            }
            Framing::Raw => Terms { buffer_size: own as usize, ..Terms::default() },
        };
        self.about.private_data = greeting.user.to_vec();
    }

    /// Notes that the transport is up. `own`: largest payload in one buffer of this side, bytes. Returns whether the
    /// peer offers extensions that are to be agreed on.
    pub(crate) fn established(&mut self, private_data: &[u8], own: u32, env: &mut Env<'_>) -> bool {
        match (&self.state, self.framing) {
            (State::Accepting, Framing::Credits) => self.state = State::Greeting,
            (State::Accepting, Framing::Raw) => self.announce(env),
            (State::Connecting, Framing::Raw) => {
                self.agree(&Greeting::reject(RejectReason::Refused, private_data), own, false, env.config);
                self.announce(env);
            }
            (State::Connecting, Framing::Credits) => match Greeting::parse(private_data).and_then(Greeting::checked) {
                Ok(greeting) if greeting.security != Some(self.about.security.mode()) => {
                    // The peer has accepted all the same, so it does not know of security, or somebody has changed its greeting.
                    let reason = RejectReason::Security(greeting.security.unwrap_or(SecurityMode::Plain));
                    let error = ConnectError::Rejected { reason, private_data: Vec::new() };
                    self.end(Ending::ConnectError(error), Certainty::Known, env);
                }
                Ok(greeting) if self.is_secured() => {
                    self.agree(&greeting, own, false, env.config);
                    self.note_greeting(private_data);
                    self.begin_securing(env);
                    return greeting.extensions;
                }
                Ok(greeting) => {
                    self.agree(&greeting, own, false, env.config);
                    // The hello opens the connection on the peer's side, so it goes before anything that the program
                    // sends.
                    self.push_control(Kind::Hello, &[], None, env);
                    self.announce(env);
                    return greeting.extensions;
                }
                Err(reason) => {
                    let error = ConnectError::Rejected { reason, private_data: Vec::new() };
                    self.end(Ending::ConnectError(error), Certainty::Known, env);
                }
            },
            // The event came twice, or data that arrived before the event has announced the connection already.
            _ => {}
        }
        false
    }

    /// Notes that both sides use the extensions of the embedded provider.
    pub(crate) const fn use_extensions(&mut self) {
        self.terms.extensions = true;
    }

    /// Tells the program that the connection is up.
    pub(super) fn announce(&mut self, env: &mut Env<'_>) {
        match &mut self.state {
            State::Closing(closing) => {
                // The peer has closed before its hello was seen. Its messages are delivered all the same.
                let Some(reason) = closing.late.take() else { return };
                closing.ending = Ending::disconnect(reason);
            }
            State::Refusing(_) => return,
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

    /// Handles the deadline that [`Action::Deadline`] or [`Action::LookBy`] has set. Returns whether the peer seems to
    /// be gone, and gets a delay only because something that it sent may not have been looked at.
    pub(crate) fn timeout(&mut self, silence: &Silence, env: &mut Env<'_>) -> bool {
        match self.state {
            State::Resolving | State::Connecting => {
                self.end(Ending::ConnectError(ConnectError::Timeout), Certainty::Known, env);
            }
            State::Securing(_) if self.is_active() => {
                self.end(Ending::ConnectError(ConnectError::Timeout), Certainty::Known, env);
            }
            State::Accepting | State::Securing(_) | State::Greeting => {
                log::info!("{} was not up within the handshake timeout", self.about.peer);
                self.end(Ending::Silent, Certainty::Known, env);
            }
            State::Open => return self.check_silence(silence, env),
            State::Draining => {
                // A peer that goes on fetching has the time anew for each message.
                let until = self.transfers.fetched_at().map(|at| at + env.config.close_timeout);
                match until.filter(|&until| until > env.now) {
                    Some(until) => self.want(env, Action::Deadline(Some(until))),
                    None => self.flush(env),
                }
            }
            State::Leaving | State::Refusing(_) => self.flush(env),
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
                    // A device may not report that a peer which has said its goodbye is gone.
                    let left = self.about.left;
                    let reason = if left { DisconnectReason::Closed } else { DisconnectReason::KeepaliveTimeout };
                    self.end(Ending::disconnect(reason), Certainty::Known, env);
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
            (true, false) => Ending::Silent,
        };
        self.end(ending, Certainty::Known, env);
    }

    /// The program closes the connection, and its sends need not arrive.
    pub(crate) fn abort(&mut self, env: &mut Env<'_>) {
        self.close(env);
        self.flush(env);
    }

    /// Drops every callback that is due except those for the ends of sends and for the end of the connection.
    fn mute(&mut self, env: &mut Env<'_>) {
        self.refused = None;
        self.discard_held(env);
        self.want(env, Action::NoMemory);
        if let State::Closing(closing) = &mut self.state {
            // What opens the connection comes too late for a program that has closed it.
            let late = closing.late.take().is_some();
            match &mut closing.ending {
                Ending::Disconnect { delivers, .. } => *delivers = false,
                Ending::ConnectError(error) if late => *error = ConnectError::Cancelled,
                _ => {}
            }
        }
        let Env { effects: Effects { events, .. }, buffers, .. } = env;
        let (id, shared) = (self.id, self.receives.is_shared());
        events.retain_mut(|(of, event)| *of != id || !is_muted(event, buffers, shared));
    }

    /// Begins to end the connection; the first reason given counts. The connection is over when the queues are flushed.
    pub(crate) fn end(&mut self, ending: Ending, certainty: Certainty, env: &mut Env<'_>) {
        let graceful = matches!(ending, Ending::Disconnect { reason: DisconnectReason::Local, .. });
        match self.state {
            State::Closing(_) => return,
            State::Draining | State::Leaving | State::Refusing(_) => {
                if !graceful {
                    // The program has closed the connection already. The sends that are left cannot go out any more.
                    self.flush(env);
                }
                return;
            }
            _ => {}
        }
        log::debug!("{}: ending: {ending:?}", self.id);
        // A connection that the program was not told of has no disconnect to report.
        let ending = match ending {
            _ if self.state.is_handshake() && !self.is_active() => Ending::Silent,
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

    /// Whether the connection may be up for the peer, though the program was not told of it yet: what opens it may have arrived
    /// and wait to be seen.
    const fn may_be_up(&self) -> bool {
        match self.state {
            State::Accepting | State::Greeting => !self.is_active(),
            // The peer's program has it when this side's end of the handshake has arrived.
            State::Securing(_) => self.sealer.is_some(),
            _ => false,
        }
    }

    /// Whether the program has closed the connection, or a side was not accepted, and all sends have ended. Sends that need
    /// no signal end with the goodbye.
    pub(crate) fn is_drained(&self) -> bool {
        let ended = match self.state {
            State::Draining => self.sends.is_settled(),
            State::Leaving | State::Refusing(_) => self.sends.is_empty(),
            _ => false,
        };
        ended && !self.transfers.offers()
    }

    /// Takes a connection that [is drained](Self::is_drained) to its end. The goodbye goes first, as soon as there is a credit
    /// for it: without a goodbye the peer takes this side for lost. It may be the last credit, because nothing follows.
    ///
    /// A disconnect may be `abrupt`, that is, overtake the goodbye and what was sent before. Then the peer ends the connection when it
    /// has got all that.
    pub(crate) fn leave(&mut self, abrupt: bool, env: &mut Env<'_>) {
        match (&self.state, self.framing) {
            (State::Draining, Framing::Credits) if self.tx.available() == 0 => {}
            (State::Draining, Framing::Credits) if !cfg!(planted = "close-without-a-goodbye") => {
                self.state = State::Leaving;
                self.push_control(Kind::Goodbye, &[], None, env);
            }
            (State::Leaving, _) if abrupt && self.terms.parting => {}
            _ => self.flush(env),
        }
    }

    /// The peer's program has closed the connection, which may be known to be gone already. Nothing follows the goodbye, and this side
    /// ends the connection for both.
    pub(super) fn peer_left(&mut self, env: &mut Env<'_>) {
        self.about.left = true;
        self.correct(|_| Some(DisconnectReason::Closed));
        if let State::Closing(closing) = &mut self.state
            && let Ending::Disconnect { reason: reason @ DisconnectReason::Lost, .. } = &mut closing.ending
        {
            *reason = DisconnectReason::Closed;
        }
        self.disconnected(DisconnectCause::Peer, env);
    }

    /// The reason of an end that the peer's side has made in order. Without credits there is no goodbye to tell.
    fn parted(&self) -> DisconnectReason {
        let closed = self.about.left || self.framing == Framing::Raw;
        if closed { DisconnectReason::Closed } else { DisconnectReason::Lost }
    }

    /// Stops sending on a connection that the program has closed or whose peer was not accepted, and flushes its queues.
    pub(crate) fn flush(&mut self, env: &mut Env<'_>) {
        if let State::Refusing(ending) = &self.state {
            let ending = (**ending).clone();
            return self.begin_flush(ending, Certainty::Known, env);
        }
        if matches!(self.state, State::Draining | State::Leaving) {
            let ending = Ending::Disconnect { reason: DisconnectReason::Local, delivers: false };
            self.begin_flush(ending, Certainty::Known, env);
        }
    }

    fn begin_flush(&mut self, ending: Ending, certainty: Certainty, env: &mut Env<'_>) {
        if self.state.is_handshake() && !self.is_active() {
            self.want(env, Action::Settled);
        }
        self.state = State::Closing(Box::new(Closing { ending, certainty, late: None }));
        self.want(env, Action::Flush);
    }

    /// Ends the connection because a work request has failed. If the work request was flushed, the connection manager
    /// is about to report the cause.
    pub(super) fn work_request_failed(&mut self, failure: Failure, env: &mut Env<'_>) {
        let reason = DisconnectReason::Transport(DisconnectCause::WorkRequest(failure));
        let certainty = if failure.status == WcStatus::Flushed { Certainty::Guessed } else { Certainty::Known };
        if certainty == Certainty::Guessed && self.state.is_securing() {
            // Everything that has arrived is seen before the first flushed work request. A receive that is posted again is
            // flushed, too, so this side does not wait for the connection manager to say the same.
            return self.disconnected(DisconnectCause::Peer, env);
        }
        // The peer's Terminate and the work request that it is about are one fault. The work request names it, whichever is
        // seen first.
        if certainty == Certainty::Known
            && let State::Closing(closing) = &mut self.state
            && let Ending::Disconnect { reason: told, .. } = &mut closing.ending
            && matches!(told, DisconnectReason::Transport(DisconnectCause::TerminatedByPeer(_)))
        {
            *told = reason;
            return;
        }
        self.end(Ending::disconnect(reason), certainty, env);
    }

    /// Ends the connection because work requests could not be posted. The cause may be a device that is going away.
    pub(crate) fn posting_failed(&mut self, why: String, env: &mut Env<'_>) {
        self.end(Ending::disconnect(DisconnectReason::Internal(why)), Certainty::Guessed, env);
    }

    /// Ends the connection because a callback of the program has panicked. Nothing is delivered to it any more.
    pub(crate) fn panicked(&mut self, why: String, env: &mut Env<'_>) {
        let ending = Ending::Disconnect { reason: DisconnectReason::Internal(why), delivers: false };
        self.end(ending, Certainty::Known, env);
    }

    /// Ends the connection because the peer has broken the protocol.
    pub(crate) fn violated(&mut self, what: PeerViolation, env: &mut Env<'_>) {
        if matches!(self.state, State::Refusing(_)) {
            // A peer that was not accepted may go on as if it was, until it hears of that.
            return;
        }
        log::warn!("{}: {} broke the protocol: {what}", self.id, self.about.peer);
        self.end(Ending::violation(what), Certainty::Known, env);
    }

    /// Ends the connection because the peer's side has refused it.
    pub(crate) fn rejected(&mut self, private_data: Vec<u8>, env: &mut Env<'_>) {
        let error = match Greeting::parse(&private_data) {
            Ok(no) => ConnectError::Rejected { reason: no.reason, private_data: no.user.to_vec() },
            Err(_) => ConnectError::Rejected { reason: RejectReason::Refused, private_data },
        };
        self.end(Ending::ConnectError(error), Certainty::Known, env);
    }

    /// Ends the connection because connecting has failed.
    pub(crate) fn connect_failed(&mut self, failure: ConnectFailure, env: &mut Env<'_>) {
        let error = match failure {
            ConnectFailure::Timeout => ConnectError::Timeout,
            other => ConnectError::Transport(other),
        };
        self.end(Ending::ConnectError(error), Certainty::Known, env);
    }

    /// Ends the connection because its device is going away.
    pub(crate) fn device_removed(&mut self, env: &mut Env<'_>) {
        if !self.correct(|_| Some(DisconnectReason::DeviceRemoved)) {
            self.end(Ending::disconnect(DisconnectReason::DeviceRemoved), Certainty::Known, env);
        }
    }

    /// Handles the connection manager's news that the connection is gone.
    pub(crate) fn disconnected(&mut self, cause: DisconnectCause, env: &mut Env<'_>) {
        let parted = self.parted();
        let reason = |cause| match cause {
            DisconnectCause::Peer => parted.clone(),
            DisconnectCause::Truncated => DisconnectReason::Lost,
            cause => DisconnectReason::Transport(cause),
        };
        let corrected = self.correct(|guess| match (guess, &cause) {
            // The peer is not to blame for work requests that could not be posted.
            (DisconnectReason::Internal(_), DisconnectCause::Peer | DisconnectCause::Local) => None,
            // A cause of `Local` is only this side's answer to queues that were flushed before. The peer has flushed
            // them.
            (_, DisconnectCause::Local) => Some(parted.clone()),
            (_, cause) => Some(reason(cause.clone())),
        });
        if corrected {
            return;
        }
        let late = match reason(cause.clone()) {
            reason @ (DisconnectReason::Closed | DisconnectReason::Lost) if self.may_be_up() => Some(reason),
            _ => None,
        };
        let ending = match (&self.state, cause) {
            (State::Connecting | State::Securing(_), cause) if self.is_active() => {
                Ending::ConnectError(ConnectError::Transport(ConnectFailure::Protocol(cause.to_string())))
            }
            (_, DisconnectCause::Local) => Ending::disconnect(DisconnectReason::Local),
            (_, cause) => Ending::disconnect(reason(cause)),
        };
        self.end(ending, Certainty::Known, env);
        if late.is_some()
            && let State::Closing(closing) = &mut self.state
        {
            closing.late = late;
        }
    }

    /// Replaces the reason of the end if it was guessed; returns whether it was.
    fn correct(&mut self, better: impl FnOnce(&DisconnectReason) -> Option<DisconnectReason>) -> bool {
        let State::Closing(closing) = &mut self.state else { return false };
        let Closing { ending: Ending::Disconnect { reason, .. }, certainty: certainty @ Certainty::Guessed, .. } =
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

    /// Whether no completion of an ending connection is still to come, and the reason of the end is known.
    pub(crate) fn is_flushed(&self) -> bool {
        let certain = self.state.closing().is_some_and(|closing| closing.certainty == Certainty::Known);
        certain && !self.is_outstanding()
    }

    /// Why an attempt to connect has failed, if another address may lead to the peer: not if the peer has said no, or the program
    /// has given the attempt up.
    pub(crate) fn failed_attempt(&self) -> Option<&ConnectError> {
        let Ending::ConnectError(error) = &self.state.closing()?.ending else { return None };
        match error {
            ConnectError::Timeout
            | ConnectError::Transport(_)
            | ConnectError::Local(_)
            | ConnectError::Unsupported { .. } => Some(error),
            ConnectError::Rejected { .. }
            | ConnectError::Security(_)
            | ConnectError::Lookup { .. }
            | ConnectError::Limit { .. }
            | ConnectError::Cancelled => None,
        }
    }

    /// Cleans up after the queue pair is gone: the sends that are left have failed. Returns the last callback, if there
    /// is one.
    pub(crate) fn finish(&mut self, env: &mut Env<'_>) -> Option<Event> {
        self.sends.abandon_chain();
        while !self.sends.is_empty() {
            self.end_send(Outcome::Failed(WcStatus::Flushed.into()), env);
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
            Ending::Silent => {
                env.stats.connections.refused += 1;
                None
            }
        }
    }
}

/// Whether an event is dropped after the program has closed the connection; frees the buffer of such an event.
fn is_muted(event: &mut Event, buffers: &mut Buffers, shared: bool) -> bool {
    match event {
        Event::Message(arrived) => {
            if let Some(buffer) = arrived.buffer.take() {
                buffers.free_receive(buffer, shared);
            }
            true
        }
        Event::Fragments(fragments) => {
            for (buffer, _) in fragments.parts.drain(..) {
                buffers.free_receive(buffer, shared);
            }
            true
        }
        Event::Fetched(_) | Event::Immediate(_) | Event::Writable => true,
        _ => false,
    }
}
