//! The beginning and the end of a connection.

use std::collections::VecDeque;
use std::time::Instant;

use log::Level;
use rdma_transport::cm::{ConnectFailure, DisconnectCause};
use rdma_transport::wc::{Failure, WcStatus};

use super::credit::{ReceiveWindow, SendWindow};
use super::effects::{Action, Effects, Event};
use super::evidence::Evidence;
use super::frame::MessageKind;
use super::greeting::Greeting;
use super::keepalive::{Patience, Verdict};
use super::recv_queue::RecvQueue;
use super::state::{Ending, Late, State};
use super::{Connection, Env, Terms};
use crate::config::{Config, Framing};
use crate::device::Buffers;
use crate::error::{ConnectError, DisconnectReason, Outcome, PeerViolation, RejectReason};
use crate::log_limit::{Complaint, complain};
use crate::security::SecurityMode;

/// The silence of the peer at the time of a connection's timeout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Silence {
    /// The time at which the transport received the last bytes of the peer, if the provider reports that.
    pub(crate) heard: Option<Instant>,
    /// True if the reactor has processed everything that the peer has sent.
    pub(crate) caught_up: bool,
}

impl Config {
    const fn patience(&self) -> Patience {
        Patience { interval: self.timeouts.keepalive_interval, timeout: self.timeouts.keepalive }
    }
}

impl Connection {
    // Beginning.

    /// Sets the queues of the connection once its device is known. `sends`: the slots of the send queue. `window`: the
    /// number of receives that the peer is granted. `immediate`: the provider has sends that end with their post.
    pub(crate) fn set_queues(&mut self, (sends, immediate): (u32, bool), receives: RecvQueue, window: u32) {
        self.sends.reserve(sends, immediate && self.framing == Framing::Credits);
        self.receives = receives;
        self.rx = ReceiveWindow::new(window);
    }

    /// Sets the window to the first `depth` receives that were posted; the greeting grants them.
    pub(crate) const fn grant_initial(&mut self, depth: u32) {
        self.rx = ReceiveWindow::new(depth);
    }

    /// Notes that the peer's address is resolved. Returns false if that is irrelevant by now.
    pub(crate) fn resolved(&mut self) -> bool {
        matches!(self.state, State::Resolving(_)) && self.state.connect()
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
                waiting: true,
                landings: true,
                security: Some(self.peer.security.mode()),
                reason: RejectReason::Refused,
                user: private_data,
            }
            .emit(),
        }
    }

    /// Returns the private data of the connect request, and notes it for the handshake.
    pub(crate) fn request(&mut self, buffer_size: u32, extensions: bool, config: &Config) -> Vec<u8> {
        let private_data = self.state.setup().map_or(&[][..], |setup| &setup.private_data);
        let request = self.greeting(private_data, buffer_size, extensions, config);
        self.note_greeting(&request);
        request
    }

    /// Applies the terms of the peer's greeting. `own`: the largest payload in one local buffer, in bytes.
    pub(crate) fn agree(&mut self, greeting: &Greeting<'_>, own: u32, extensions: bool, config: &Config) {
        self.tx = SendWindow::new(greeting.window);
        self.terms = match self.framing {
            Framing::Credits => {
                let max_message = u64::from(greeting.max_message) << 10;
                let most = usize::try_from(max_message).unwrap_or(usize::MAX);
                let eager = if greeting.fragments { config.large.eager_limit.min(most) } else { 0 };
                let Greeting { progress, parting, waiting, landings, .. } = *greeting;
                let buffer_size = greeting.buffer_size.min(own) as usize;
                Terms { buffer_size, max_message, eager, progress, parting, waiting, landings, extensions }
            }
            Framing::Raw => Terms { buffer_size: own as usize, extensions, ..Terms::default() },
        };
        self.peer.private_data = greeting.user.to_vec();
    }

    /// Notes that the transport is up. `own`: the largest payload in one local buffer, in bytes. Returns true if the
    /// peer offers extensions that must be agreed on.
    pub(crate) fn established(&mut self, private_data: &[u8], own: u32, env: &mut Env<'_>) -> bool {
        match (&self.state, self.framing) {
            // The bytes of the peer begin the handshake.
            (State::Accepting(_), Framing::Credits) if self.is_secured() => {}
            (State::Accepting(_), Framing::Credits) => _ = self.state.greet(),
            (State::Accepting(_), Framing::Raw) => self.announce(env),
            (State::Connecting(_), Framing::Raw) => {
                self.agree(&Greeting::reject(RejectReason::Refused, private_data), own, false, env.config);
                self.announce(env);
            }
            (State::Connecting(_), Framing::Credits) => match Greeting::parse(private_data).and_then(Greeting::checked)
            {
                Ok(greeting) if greeting.security != Some(self.peer.security.mode()) => {
                    // The peer has accepted nevertheless, so it does not know of security, or its greeting was changed in transit.
                    let reason = RejectReason::Security(greeting.security.unwrap_or(SecurityMode::Plain));
                    let error = ConnectError::Rejected { reason, private_data: Vec::new() };
                    self.end(Ending::ConnectError(error), env);
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
                    self.push_control(MessageKind::Hello, &[], None, env);
                    self.announce(env);
                    return greeting.extensions;
                }
                Err(reason) => {
                    let error = ConnectError::Rejected { reason, private_data: Vec::new() };
                    self.end(Ending::ConnectError(error), env);
                }
            },
            // The event arrived twice, or data that arrived before the event has announced the connection already.
            _ => {}
        }
        false
    }

    /// Notes that both sides use the extensions of the embedded provider.
    pub(crate) const fn use_extensions(&mut self) {
        self.terms.extensions = true;
    }

    /// Reports to the program that the connection is up.
    pub(super) fn announce(&mut self, env: &mut Env<'_>) {
        let mut early = VecDeque::new();
        match &mut self.state {
            State::Closing(closing) => {
                // The peer has closed before its hello was seen. Its messages are delivered nevertheless.
                if !closing.opened() {
                    return;
                }
            }
            State::Refusing(_) => return,
            _ => {
                early = match self.state.open() {
                    Some(early) => early,
                    None => return,
                };
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
        for message in early {
            self.deliver_bare(message, env);
        }
    }

    // Time.

    /// Handles the deadline that [`Action::Deadline`] or [`Action::LookBy`] has set. Returns true if the peer seems to
    /// be gone, and gets more time only because something that it sent may not have been processed.
    pub(crate) fn timeout(&mut self, silence: &Silence, env: &mut Env<'_>) -> bool {
        match self.state {
            State::Resolving(_) | State::Connecting(_) => {
                self.end(Ending::ConnectError(ConnectError::Timeout), env);
            }
            State::Securing(_) if self.is_active() => {
                self.end(Ending::ConnectError(ConnectError::Timeout), env);
            }
            State::Accepting(_) | State::Securing(_) | State::Greeting => {
                let (peer, limit) = (self.peer.address, &mut env.effects.log_limit);
                let level = if self.state.is_securing() { Level::Warn } else { Level::Info };
                complain!(
                    limit,
                    env.now,
                    Complaint::NotUp,
                    level,
                    peer,
                    "{peer} was not up within the handshake timeout"
                );
                self.end(Ending::Silent, env);
            }
            State::Open => return self.check_silence(silence, env),
            State::Draining => {
                // A peer that continues to fetch gets the whole time again for each message.
                let until = self.transfers.fetched_at().map(|at| at + env.config.timeouts.close);
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
        let limit = env.config.timeouts.transfer;
        let stands = self.transfers.stands_since(limit).map(|since| since + limit);
        if stands.is_some_and(|end| end <= env.now) {
            if self.transfers.peer_waits() {
                log::info!("{}: {} had no memory of its own to fetch a large message", self.id, self.peer.address);
            }
            self.end(Ending::decided(DisconnectReason::TransferTimeout), env);
            return false;
        }
        let (mut next, mut suspects) = (stands, false);
        if let Some(again) = self.renew_wait(env) {
            next = Some(next.map_or(again, |next| next.min(again)));
        }
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
                    self.end(Ending::decided(DisconnectReason::KeepaliveTimeout), env);
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

    /// Closes the connection for the program.
    pub(crate) fn close(&mut self, env: &mut Env<'_>) {
        self.mute(env);
        let ending = match (self.state.is_handshake(), self.is_active()) {
            (false, _) => Ending::local(false),
            (true, true) => Ending::ConnectError(ConnectError::Cancelled),
            (true, false) => Ending::Silent,
        };
        self.end(ending, env);
    }

    /// Closes the connection for the program without delivering its sends.
    pub(crate) fn abort(&mut self, env: &mut Env<'_>) {
        self.close(env);
        self.flush(env);
    }

    /// Drops all pending callbacks except those for the ends of sends and for the end of the connection.
    fn mute(&mut self, env: &mut Env<'_>) {
        self.refused = None;
        self.discard_held(env);
        self.want(env, Action::NoMemory);
        if let State::Closing(closing) = &mut self.state {
            closing.mute();
        }
        let Env { effects: Effects { events, .. }, buffers, .. } = env;
        let (id, shared) = (self.id, self.receives.is_shared());
        events.retain_mut(|(of, event)| *of != id || !is_muted(event, buffers, shared));
    }

    /// Begins to end the connection, or adds evidence to an end that has begun. The connection is over when the queues are flushed.
    pub(crate) fn end(&mut self, ending: Ending, env: &mut Env<'_>) {
        match &mut self.state {
            State::Closing(closing) => return closing.learn(ending),
            // The program has closed the connection already. The remaining sends cannot go out any more, unless both sides have closed the
            // connection. None follows the goodbye, and a peer that ends the connection flushes the receives.
            State::Draining if !ending.is_local() => return self.flush_after(ending.is_parting(), env),
            State::Leaving if !ending.is_local() => return self.flush_after(true, env),
            State::Refusing(_) if !ending.is_local() => return self.flush_after(false, env),
            State::Draining | State::Leaving | State::Refusing(_) => return,
            State::Resolving(_)
            | State::Connecting(_)
            | State::Accepting(_)
            | State::Securing(_)
            | State::Greeting
            | State::Open => {}
        }
        log::debug!("{}: ending: {ending:?}", self.id);
        if ending.is_local() && self.state.is_open() && self.state.drain() {
            self.want(env, Action::Ending);
            self.want(env, Action::Deadline(Some(env.now + env.config.timeouts.close)));
            self.mark(env);
            return;
        }
        // A connection that was not reported to the program has no disconnect to report.
        let ending = match ending {
            _ if self.state.is_handshake() && !self.is_active() => Ending::Silent,
            Ending::Disconnect { evidence, .. } if self.state.is_handshake() => {
                Ending::ConnectError(ConnectError::Local(evidence.reason().to_string()))
            }
            other => other,
        };
        self.begin_flush(ending, env);
    }

    /// Returns true if the connection may be up for the peer, though it was not reported to the program yet: the message that opens it may
    /// have arrived and not been processed.
    const fn may_be_up(&self) -> bool {
        match self.state {
            State::Accepting(_) | State::Greeting => !self.is_active(),
            // The peer's program has the connection when the end of the local handshake has arrived.
            State::Securing(_) => self.sealer.is_some(),
            _ => false,
        }
    }

    /// Returns true if the program has closed the connection, or a side was not accepted, and all sends have ended. Sends that need no
    /// signal end with the goodbye.
    pub(crate) fn is_drained(&self) -> bool {
        let ended = match self.state {
            State::Draining => self.sends.is_settled(),
            State::Leaving | State::Refusing(_) => self.sends.is_empty(),
            _ => false,
        };
        ended && !self.delays_its_close()
    }

    /// Ends a connection that [is drained](Self::is_drained). The goodbye is sent first, as soon as there is a credit for it: without a
    /// goodbye the peer considers the local side lost. It may use the last credit, because nothing follows.
    ///
    /// A disconnect may be `abrupt`, that is, overtake the goodbye and earlier messages. Then the peer ends the connection when it has
    /// received all of them.
    pub(crate) fn leave(&mut self, abrupt: bool, env: &mut Env<'_>) {
        match (&self.state, self.framing) {
            (State::Draining, Framing::Credits) if self.tx.available() == 0 => {}
            (State::Draining, Framing::Credits) if !cfg!(planted = "close-without-a-goodbye") => {
                if self.state.leave() {
                    self.push_control(MessageKind::Goodbye, &[], None, env);
                }
            }
            (State::Leaving, _) if abrupt && self.terms.parting => {}
            _ => self.flush_after(true, env),
        }
    }

    /// Handles the peer's goodbye; the transport may have ended already. Nothing follows the goodbye, and the local side ends the
    /// connection for both.
    pub(super) fn peer_left(&mut self, env: &mut Env<'_>) {
        self.end(Ending::disconnect(Evidence::Goodbye), env);
    }

    /// Stops sending on a connection that the program has closed or whose peer was not accepted, and flushes its queues.
    pub(crate) fn flush(&mut self, env: &mut Env<'_>) {
        self.flush_after(false, env);
    }

    /// Flushes like [`Connection::flush`]. `complete`: everything that was accepted is posted, and was sent unless it
    /// fails.
    fn flush_after(&mut self, complete: bool, env: &mut Env<'_>) {
        if let State::Refusing(ending) = &self.state {
            let ending = (**ending).clone();
            return self.begin_flush(ending, env);
        }
        if matches!(self.state, State::Draining | State::Leaving) {
            let evidence = Evidence::Decided(DisconnectReason::Local { complete });
            self.begin_flush(Ending::Disconnect { evidence, delivers: false }, env);
        }
    }

    fn begin_flush(&mut self, ending: Ending, env: &mut Env<'_>) {
        if self.state.close(ending) {
            self.want(env, Action::Flush);
        }
    }

    /// Ends the connection because a work request has failed. If the work request was flushed, the connection manager
    /// is about to report the cause.
    pub(super) fn work_request_failed(&mut self, failure: Failure, env: &mut Env<'_>) {
        let flushed = failure.status == WcStatus::Flushed;
        if flushed && self.state.is_securing() {
            // Everything that has arrived is processed before the first flushed work request. A receive that is posted again is flushed,
            // too, so the local side does not wait for the connection manager to report the same.
            return self.disconnected(DisconnectCause::Peer, env);
        }
        let evidence = if flushed { Evidence::Flushed(failure) } else { Evidence::Failed(failure) };
        self.end(Ending::disconnect(evidence), env);
    }

    /// Ends the connection because work requests could not be posted. The cause may be a device that is going away.
    pub(crate) fn posting_failed(&mut self, why: String, env: &mut Env<'_>) {
        self.end(Ending::disconnect(Evidence::Unposted(why)), env);
    }

    /// Ends the connection because a callback of the program has panicked. Nothing is delivered to it any more.
    pub(crate) fn panicked(&mut self, why: String, env: &mut Env<'_>) {
        let evidence = Evidence::Decided(DisconnectReason::Internal(why));
        let ending = Ending::Disconnect { evidence, delivers: false };
        self.end(ending, env);
    }

    /// Ends the connection because the peer has violated the protocol.
    pub(crate) fn violated(&mut self, what: PeerViolation, env: &mut Env<'_>) {
        if matches!(self.state, State::Refusing(_)) {
            // A peer that was not accepted may continue as if it was, until the refusal arrives.
            return;
        }
        let (id, peer, limit) = (self.id, self.peer.address, &mut env.effects.log_limit);
        complain!(
            limit,
            env.now,
            Complaint::Violation,
            Level::Warn,
            peer,
            "{id}: {peer} violated the protocol: {what}"
        );
        self.end(Ending::decided(DisconnectReason::PeerViolation(what)), env);
    }

    /// Ends the connection because the peer has refused it.
    pub(crate) fn rejected(&mut self, private_data: Vec<u8>, env: &mut Env<'_>) {
        let error = match Greeting::parse(&private_data) {
            Ok(no) => ConnectError::Rejected { reason: no.reason, private_data: no.user.to_vec() },
            Err(_) => ConnectError::Rejected { reason: RejectReason::Refused, private_data },
        };
        self.end(Ending::ConnectError(error), env);
    }

    /// Ends the connection because connecting has failed.
    pub(crate) fn connect_failed(&mut self, failure: ConnectFailure, env: &mut Env<'_>) {
        let error = match failure {
            ConnectFailure::Timeout => ConnectError::Timeout,
            other => ConnectError::Transport(other),
        };
        self.end(Ending::ConnectError(error), env);
    }

    /// Ends the connection because its device is being removed.
    pub(crate) fn device_removed(&mut self, env: &mut Env<'_>) {
        self.end(Ending::disconnect(Evidence::Removed), env);
    }

    /// Handles the connection manager's report that the connection is gone.
    pub(crate) fn disconnected(&mut self, cause: DisconnectCause, env: &mut Env<'_>) {
        let fails = self.is_active() && matches!(self.state, State::Connecting(_) | State::Securing(_));
        let failure = fails.then(|| ConnectFailure::Protocol(cause.to_string()));
        let evidence = match cause {
            // This is only the local side's answer to queues that were flushed before. The peer has flushed them.
            DisconnectCause::Local if !matches!(self.state, State::Closing(_)) => {
                Evidence::Decided(DisconnectReason::Local { complete: false })
            }
            DisconnectCause::Local | DisconnectCause::Peer => Evidence::Disconnected(self.framing),
            DisconnectCause::Truncated => Evidence::Truncated,
            DisconnectCause::TerminatedByPeer(what) => Evidence::Terminated(what),
            cause => Evidence::Transport(cause),
        };
        let late = (self.may_be_up() && evidence.is_loss())
            .then(|| Late { evidence: evidence.clone(), opener: self.take_late_opener() });
        let ending = match failure {
            Some(failure) => Ending::ConnectError(ConnectError::Transport(failure)),
            None => Ending::disconnect(evidence),
        };
        self.end(ending, env);
        if let (State::Closing(closing), true) = (&mut self.state, late.is_some()) {
            closing.late = late;
        }
    }

    /// Returns true if an ending connection has no outstanding completions, and the reason of the end is known.
    pub(crate) fn is_flushed(&self) -> bool {
        self.state.closing().is_some_and(|closing| !closing.is_guess()) && !self.is_outstanding()
    }

    /// Returns the error of an attempt to connect, if another address may reach the peer: not if the peer has refused, or the program has
    /// closed the connection.
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

    /// Leaves the posted work requests to a queue pair that the device keeps. Returns the number of buffers, which are
    /// lost.
    pub(crate) fn forsake(&mut self) -> usize {
        self.forsake_lists();
        self.sends.forsake() + self.receives.forsake()
    }

    /// Notes that something was not sent on a connection that the program has closed.
    pub(super) fn cut_off(&mut self) {
        if let State::Closing(closing) = &mut self.state {
            closing.cut_off();
        }
    }

    /// Cleans up after the queue pair is destroyed: the remaining sends have failed. Returns the last callback, if
    /// there is one.
    pub(crate) fn finish(&mut self, env: &mut Env<'_>) -> Option<Event> {
        if !self.sends.is_empty() || self.delays_its_close() {
            self.cut_off();
        }
        self.sends.abandon_chain();
        while !self.sends.is_empty() {
            self.end_send(Outcome::Failed(WcStatus::Flushed.into()), env);
        }
        self.fail_transfers(env);
        self.fail_lists(env);
        self.drop_early(env);
        self.receives.empty(&mut env.buffers.pool);
        let State::Closing(closing) = &self.state else { return None };
        match closing.ending.clone() {
            Ending::Disconnect { evidence, .. } => {
                let reason = evidence.reason();
                env.stats.connections.disconnected += 1;
                let cut_off = matches!(reason, DisconnectReason::Local { complete: false });
                env.stats.connections.cut_off += u64::from(cut_off);
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

/// Returns true if an event is dropped after the program has closed the connection; frees the buffer of such an event.
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
        Event::Fetched(_) | Event::Offered(_) | Event::Immediate(_) | Event::Writable => true,
        _ => false,
    }
}
