//! The start and the end of a connection.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use log::Level;
use rdma_transport::cm::{ConnectFailure, DisconnectCause};
use rdma_transport::wc::{Failure, WcStatus};

use super::credit::{ReceiveWindow, SendWindow};
use super::deadlines::{ConnectionDeadlines, Due};
use super::effects::{Action, Event};
use super::evidence::Evidence;
use super::frame::MessageKind;
use super::greeting::Greeting;
use super::keepalive::{LOOK_AGAIN, Patience, Verdict};
use super::recv_queue::RecvQueue;
use super::state::{Ending, Late, State};
use super::transfer::look_interval;
use super::{Connection, Env, Terms};
use crate::config::{Config, Framing};
use crate::device::Buffers;
use crate::error::{ConnectError, DisconnectReason, Outcome, PeerViolation, RejectReason};
use crate::security::SecurityMode;

/// The facts about a silent peer at the time of a connection's timeout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Silence {
    /// The time at which the transport last received bytes from the peer. `None` if the provider does not report it.
    pub(crate) heard: Option<Instant>,
    /// True if the reactor has processed everything that the peer has sent so far.
    pub(crate) caught_up: bool,
    /// The time at which the peer was first found to have exceeded its timeout, plus the delays of
    /// all later checks. `None` if the peer has not exceeded it before.
    pub(crate) since: Option<Instant>,
    /// The delay from the deadline to the handling of this timeout. It is long if the local side
    /// took no turns.
    pub(crate) late: Duration,
}

impl Silence {
    /// If the peer has exceeded `limit`, but may not be blamed yet, returns the time until the next
    /// check. The local side may not blame the peer in two cases:
    /// - The local side has not processed all input that had arrived when the limit expired.
    /// - The local side took no turn for at least `limit`, so the peer may wait for an answer. The
    ///   peer gets as much additional time as the local side took no turn, at most `limit`.
    ///
    /// When twice the limit has passed after `since`, the peer is blamed even if its input keeps
    /// the local side busy.
    fn forbearance(&self, limit: Duration, now: Instant) -> Option<Duration> {
        let is_early = !self.caught_up || self.late >= limit;
        let may_wait = self.since.is_none_or(|since| now < since + 2 * limit);
        (is_early && may_wait).then(|| self.late.clamp(LOOK_AGAIN, limit.max(LOOK_AGAIN)))
    }
}

impl Config {
    const fn patience(&self) -> Patience {
        Patience { interval: self.timeouts.keepalive_interval, timeout: self.timeouts.keepalive }
    }
}

impl Connection {
    // Start.

    /// Sets the sizes of the queues once the connection has a device. `sends` is the number of slots in the send queue. `window` is the
    /// number of receives that are granted to the peer. `immediate` is true if the provider can complete sends when they are posted.
    pub(crate) fn set_queues(&mut self, (sends, immediate): (u32, bool), receives: RecvQueue, window: u32) {
        self.sends.reserve(sends, immediate && self.framing == Framing::Credits);
        self.receives = receives;
        self.rx = ReceiveWindow::new(window);
    }

    /// Sets the window to `depth`, the number of receives that were posted when the queue pair was created. The greeting grants these
    /// receives to the peer.
    pub(crate) const fn grant_initial(&mut self, depth: u32) {
        self.rx = ReceiveWindow::new(depth);
    }

    /// Notes that the peer's address is resolved. Returns false if the connection does not wait for the address any more.
    pub(crate) fn resolved(&mut self) -> bool {
        matches!(self.state, State::Resolving(_)) && self.state.connect()
    }

    /// Returns the private data for the peer: a greeting, followed by the program's own data. With
    /// `Framing::Raw`, returns only the program's data.
    pub(crate) fn greeting(&self, private_data: &[u8], buffer_size: u32, extensions: bool, config: &Config) -> Vec<u8> {
        match self.framing {
            Framing::Raw => private_data.to_vec(),
            Framing::Credits => Greeting {
                window: self.rx.last_grant(),
                buffer_size,
                max_message: config.max_message_in_kib(),
                extensions,
                security: Some(self.peer.security.mode()),
                reason: RejectReason::Refused,
                user: private_data,
            }
            .emit(),
        }
    }

    /// Returns the private data of the connect request. If the connection will be secured, keeps a copy of this data: the handshake
    /// verifies that the greeting in it was not changed in transit.
    pub(crate) fn request(&mut self, buffer_size: u32, extensions: bool, config: &Config) -> Vec<u8> {
        let private_data = self.state.setup().map_or(&[][..], |setup| &setup.private_data);
        let request = self.greeting(private_data, buffer_size, extensions, config);
        self.note_greeting(&request);
        request
    }

    /// Applies the peer's greeting. `own` is the largest payload in one local buffer, in bytes.
    pub(crate) fn agree(&mut self, greeting: &Greeting<'_>, own: u32, extensions: bool, config: &Config) {
        self.tx = SendWindow::new(greeting.window);
        self.terms = match self.framing {
            Framing::Credits => {
                let max_message = u64::from(greeting.max_message) << 10;
                let most = usize::try_from(max_message).unwrap_or(usize::MAX);
                let eager = config.large.eager_limit.min(most);
                let buffer_size = greeting.buffer_size.min(own) as usize;
                Terms { buffer_size, max_message, eager, extensions }
            }
            Framing::Raw => Terms { buffer_size: own as usize, extensions, ..Terms::default() },
        };
        self.peer.private_data = greeting.user.to_vec();
    }

    /// Notes that the transport is up. `own` is the largest payload in one local buffer, in bytes. Returns true if the peer supports the
    /// extensions of the embedded provider. In this case, the caller must check if the local side supports them too.
    pub(crate) fn established(&mut self, private_data: &[u8], own: u32, env: &mut Env<'_>) -> bool {
        match (&self.state, self.framing) {
            // The connection will be secured. The first handshake message from the peer changes the
            // state.
            (State::Accepting(_), Framing::Credits) if self.is_secured() => {}
            (State::Accepting(_), Framing::Credits) => {
                self.state.greet();
                self.renew_handshake(env);
            }
            (State::Accepting(_), Framing::Raw) => self.announce(env),
            (State::Connecting(_), Framing::Raw) => {
                self.agree(&Greeting::reject(RejectReason::Refused, private_data), own, false, env.config);
                self.announce(env);
            }
            (State::Connecting(_), Framing::Credits) => match Greeting::parse(private_data).and_then(Greeting::checked)
            {
                Ok(greeting) if greeting.security != Some(self.peer.security.mode()) => {
                    // The peer accepted although its greeting has a different security mode. Either its version has no security, or the
                    // greeting was changed in transit.
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
                    // The hello opens the connection on the peer's side, so the hello precedes all messages of the program.
                    let probes = self.state.setup().is_some_and(|setup| setup.probes);
                    self.push_hello(env);
                    if !(probes && self.state.probe()) {
                        self.announce(env);
                    }
                    return greeting.extensions;
                }
                Err(reason) => {
                    let error = ConnectError::Rejected { reason, private_data: Vec::new() };
                    self.end(Ending::ConnectError(error), env);
                }
            },
            // The event that the transport is up is a duplicate, or the connection was already reported as up, because data arrived before
            // the event.
            _ => {}
        }
        false
    }

    /// Notes that both sides use the extensions of the embedded provider.
    pub(crate) const fn use_extensions(&mut self) {
        self.terms.extensions = true;
    }

    /// Notes that the peer has received the hello: its device has acknowledged the hello, or a
    /// message from the peer has arrived. If the connection waits for this, it comes up.
    pub(super) fn hello_arrived(&mut self, env: &mut Env<'_>) {
        let may_wait = match self.state {
            State::Probing(_) => true,
            State::Closing(_) => self.is_active() && !self.is_secured(),
            _ => false,
        };
        if may_wait {
            self.announce(env);
        }
    }

    /// Reports to the program that the connection is up.
    pub(super) fn announce(&mut self, env: &mut Env<'_>) {
        let mut early = VecDeque::new();
        match &mut self.state {
            State::Closing(closing) => {
                // The transport has ended, and the message with which the peer opens the connection is processed only after that. The
                // program is still notified of the connection, and receives the peer's messages.
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
                self.keepalive.heard = env.now;
                if !self.is_active() {
                    self.want(env, Action::Settled);
                }
                let first = match self.framing {
                    Framing::Credits => Some(env.now + env.config.patience().interval),
                    Framing::Raw => None,
                };
                self.wait_until(first, env);
                self.nudge_later(env);
                self.mark(env);
            }
        }
        env.stats.connections.connected += 1;
        self.tell(env, Event::Connected);
        for message in early {
            self.deliver_bare(message, env);
        }
    }

    // Timeouts.

    /// Returns the earliest deadline of the connection. `None` if there is none.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        if matches!(self.state, State::Closing(_)) {
            return self.deadlines.step;
        }
        [self.deadlines.next(), self.sends.lists.next_deadline()].into_iter().flatten().min()
    }

    /// Handles the deadlines of early messages and of lists that have passed. Returns a passed
    /// deadline that the driver must handle. The driver calls this function again, until it returns
    /// `None`.
    pub(crate) fn due(&mut self, env: &mut Env<'_>) -> Option<Due> {
        if let Some((_, earlier)) = self.deadlines.nudge.take_if(|(at, _)| *at <= env.now) {
            self.nudge(earlier, env);
        }
        if self.sends.lists.next_deadline().is_some_and(|at| at <= env.now) {
            self.lists_due(env);
        }
        self.deadlines.take_due(env.now)
    }

    /// Restarts the handshake timeout of the passive side after a step of the local side, because
    /// the peer could not continue before that step. So delays of the local side do not count
    /// against the peer. The local side takes few steps, so a slow peer gains little time.
    pub(super) fn renew_handshake(&mut self, env: &mut Env<'_>) {
        if !self.is_active() {
            self.wait_until(Some(env.now + env.config.timeouts.handshake), env);
        }
    }

    /// Handles the timeout of the current step, or checks the peer of an open connection. Returns
    /// true if the peer has exceeded its timeout for the handshake, a transfer or the keepalive,
    /// but may not be blamed yet, as `Silence::forbearance` defines.
    pub(crate) fn timeout(&mut self, silence: &Silence, env: &mut Env<'_>) -> bool {
        let wait = silence.forbearance(env.config.timeouts.handshake, env.now);
        let blames = crate::planted("an-absence-is-held-against-the-peer");
        if let Some(wait) = wait.filter(|_| self.state.is_handshake() && !blames) {
            // The program expects the result of its attempt to connect within the timeout. So if
            // the local side took no turns for a while, the attempt gets only a little more time.
            let wait = if self.is_active() { LOOK_AGAIN } else { wait };
            self.wait_until(Some(env.now + wait), env);
            return true;
        }
        match self.state {
            State::Resolving(_) | State::Connecting(_) | State::Probing(_) => {
                self.end(Ending::ConnectError(ConnectError::Timeout), env);
            }
            State::Securing(_) if self.is_active() => {
                self.end(Ending::ConnectError(ConnectError::Timeout), env);
            }
            // The transport has received bytes from the peer within the timeout: the peer's setup
            // of shared memory, which was read late. The peer could not continue without an answer.
            State::Accepting(_)
                if silence.heard.is_some_and(|heard| heard + env.config.timeouts.handshake > env.now) =>
            {
                let until = silence.heard.map(|heard| heard + env.config.timeouts.handshake);
                self.wait_until(until, env);
            }
            State::Accepting(_) | State::Securing(_) | State::Greeting => {
                let (peer, limit) = (self.peer.address, &mut env.effects.log_limit);
                let level = if self.state.is_securing() { Level::Warn } else { Level::Info };
                peer_log!(limit, env.now, NotUp, level, peer, "{peer} was not up within the handshake timeout");
                self.end(Ending::Silent, env);
            }
            State::Open => return self.check_silence(silence, env),
            State::Draining => match self.fetches_until(env.config.timeouts.close).filter(|&until| until > env.now) {
                Some(until) => self.wait_until(Some(until), env),
                None => self.flush(env),
            },
            State::Leaving | State::Refusing(_) => self.flush(env),
            State::Closing(_) => {}
        }
        false
    }

    /// Returns the time until which a close waits for a peer that still fetches large messages: after each message, the peer gets the full
    /// close timeout again. `None` if no large message is in flight to the peer.
    pub(crate) fn fetches_until(&self, close: Duration) -> Option<Instant> {
        self.transfers.fetched_at().map(|at| at + close)
    }

    fn check_silence(&mut self, silence: &Silence, env: &mut Env<'_>) -> bool {
        let limit = env.config.timeouts.transfer;
        let mut stands = self.transfers.ends_at(limit, silence.late, env.now);
        let has_expired = stands.is_some_and(|end| end <= env.now);
        let mut suspects = has_expired && silence.forbearance(limit, env.now).is_some();
        if suspects {
            stands = Some(env.now + LOOK_AGAIN);
        } else if has_expired {
            if self.transfers.peer_waits() {
                let (id, peer, limit) = (self.id, self.peer.address, &mut env.effects.log_limit);
                peer_log!(
                    limit,
                    env.now,
                    Stalled,
                    Info,
                    peer,
                    "{id}: {peer} had no memory of its own to fetch a large message"
                );
            }
            self.end(Ending::decided(DisconnectReason::TransferTimeout), env);
            return false;
        }
        // Only late checks show that the local side took no turns for a while. So several checks
        // are spread over the limit.
        let mut next = stands.map(|end| end.min(env.now + look_interval(limit)));
        if let Some(again) = self.renew_wait(env) {
            next = Some(next.map_or(again, |next| next.min(again)));
        }
        if self.framing == Framing::Credits {
            let heard = &mut self.keepalive.heard;
            *heard = silence.heard.map_or(*heard, |at| at.max(*heard));
            let patience = env.config.patience();
            let until = match self.keepalive.check(env.now, silence.caught_up, &patience) {
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
            let occupied = self.receives.check_occupation(limit, env.now).unwrap_or_else(|kept| {
                let (id, peer, lines) = (self.id, self.peer.address, &mut env.effects.log_limit);
                peer_log!(
                    lines,
                    env.now,
                    Stalled,
                    Warn,
                    peer,
                    "{id}: {peer} can send nothing: the program has kept {kept} messages, which are all, for {limit:?}"
                );
                None
            });
            next = [next, Some(until), occupied].into_iter().flatten().min();
            if self.keepalive.owes_ping {
                self.mark(env);
            }
        }
        self.wait_until(next, env);
        suspects
    }

    // End.

    /// Closes the connection, as requested by the program. Sends that were accepted before are still sent.
    pub(crate) fn close(&mut self, env: &mut Env<'_>) {
        self.push_last_reports(env);
        self.mute(env);
        let ending = match (self.state.is_handshake(), self.is_active()) {
            (false, _) => Ending::local(false),
            (true, true) => Ending::ConnectError(ConnectError::Cancelled),
            (true, false) => Ending::Silent,
        };
        self.end(ending, env);
    }

    /// Closes the connection, as requested by the program, without sending the messages that are still queued.
    pub(crate) fn abort(&mut self, env: &mut Env<'_>) {
        self.close(env);
        self.flush(env);
    }

    /// Drops the pending callbacks for messages, offers and immediate data, and `on_writable`. The callbacks for the ends of sends, lists
    /// and landings, and for the start and the end of the connection, stay pending.
    fn mute(&mut self, env: &mut Env<'_>) {
        self.refused = None;
        self.discard_held(env);
        self.want(env, Action::NoMemory);
        if let State::Closing(closing) = &mut self.state {
            closing.mute();
        }
        let Env { effects, buffers, .. } = env;
        let (id, shared) = (self.id, self.receives.is_shared());
        effects.retain_events(|of, event| of != id || !is_muted(event, buffers, shared));
    }

    /// Begins to end the connection, or adds evidence to an end that has begun. The connection has ended when its queues are flushed.
    pub(crate) fn end(&mut self, ending: Ending, env: &mut Env<'_>) {
        match &mut self.state {
            State::Closing(closing) => return closing.learn(ending),
            // The program has already closed the connection, so `ending` only decides if the close is reported as complete. In `Draining`,
            // some sends have not ended. These sends count as sent only if the peer's program has closed the connection too. In `Leaving`,
            // all sends before the goodbye have ended or were posted. If one of them fails now, `cut_off` makes the close incomplete.
            State::Draining if !ending.is_local() => return self.flush_after(ending.is_parting(), env),
            State::Leaving if !ending.is_local() => return self.flush_after(true, env),
            State::Refusing(_) if !ending.is_local() => return self.flush_after(false, env),
            State::Draining | State::Leaving | State::Refusing(_) => return,
            State::Resolving(_)
            | State::Connecting(_)
            | State::Probing(_)
            | State::Accepting(_)
            | State::Securing(_)
            | State::Greeting
            | State::Open => {}
        }
        log::debug!("{}: ending: {ending:?}", self.id);
        if ending.is_local() && self.state.is_open() && self.state.drain() {
            self.want(env, Action::Ending);
            self.wait_until(Some(env.now + env.config.timeouts.close), env);
            self.mark(env);
            return;
        }
        // A connection ends with `on_disconnect` if and only if it was reported to the program,
        // whatever the provider reports.
        let ending = match ending {
            Ending::ConnectError(error) if self.state.is_open() => {
                Ending::disconnect(Evidence::Transport(DisconnectCause::Path(error.to_string())))
            }
            _ if self.state.is_handshake() && !self.is_active() => Ending::Silent,
            Ending::Disconnect { evidence, .. } if self.state.is_handshake() => {
                Ending::ConnectError(ConnectError::Local(evidence.reason().to_string()))
            }
            other => other,
        };
        self.begin_flush(ending, env);
    }

    /// Returns true if the connection is not up on the local side, but may be up on the peer's side. In this case, the message with which
    /// the peer opens the connection may have arrived without being processed yet.
    const fn may_be_up(&self) -> bool {
        match self.state {
            State::Accepting(_) | State::Greeting => !self.is_active(),
            // The connection comes up on the peer's side when the hello arrives there.
            State::Probing(_) => true,
            // The connection comes up on the peer's side when the local side's last handshake message arrives at the peer.
            State::Securing(_) => self.sealer.is_some(),
            _ => false,
        }
    }

    /// Returns true if the sends of an ending connection have ended, so that [`Connection::leave`] can perform the next step. In
    /// `Draining`, posted unsignaled sends count as ended, because the completion of the goodbye will end them.
    pub(crate) fn is_drained(&self) -> bool {
        let ended = match self.state {
            State::Draining => self.sends.is_settled(),
            State::Leaving | State::Refusing(_) => self.sends.is_empty(),
            _ => false,
        };
        ended && !self.delays_its_close()
    }

    /// Performs the next step of a connection that [is drained](Self::is_drained). The first step sends the goodbye, as soon as a credit is
    /// available. Without a goodbye, the peer would report the local side as lost. The goodbye may use the last credit, because no message
    /// follows it. The second step disconnects.
    ///
    /// `abrupt` is true if, on this transport, a disconnect may overtake messages that were sent earlier. In this case, the local side
    /// waits for the peer to disconnect, which the peer does on receipt of the goodbye.
    pub(crate) fn leave(&mut self, abrupt: bool, env: &mut Env<'_>) {
        match (&self.state, self.framing) {
            (State::Draining, Framing::Credits) if self.tx.available() == 0 => {}
            (State::Draining, Framing::Credits) if !crate::planted("close-without-a-goodbye") => {
                if self.state.leave() {
                    self.push_control(MessageKind::Goodbye, &[], None, env);
                }
            }
            (State::Leaving, Framing::Credits) if abrupt => {}
            _ => self.flush_after(true, env),
        }
    }

    /// Handles the peer's goodbye, which may be processed after the transport has ended. The peer sends nothing after the goodbye, so the
    /// local side can disconnect.
    pub(super) fn peer_left(&mut self, env: &mut Env<'_>) {
        self.end(Ending::disconnect(Evidence::Goodbye), env);
    }

    /// Flushes the queues of a connection that the program has closed, or whose peer the local side has refused. Sends that have not ended
    /// fail.
    pub(crate) fn flush(&mut self, env: &mut Env<'_>) {
        self.flush_after(false, env);
    }

    /// Flushes the queues, like [`Connection::flush`]. If the program has closed the connection,
    /// `on_disconnect` reports `complete`, unless [`Connection::cut_off`] or [`Connection::finish`]
    /// finds a send that was not delivered.
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
            // The deadlines of the connection do not apply any more. The driver sets the flush
            // timeout.
            self.deadlines = ConnectionDeadlines::default();
            self.want(env, Action::Flush);
        }
    }

    /// Ends the connection because a work request has failed. If the work request was flushed, the reason is not known yet: the connection
    /// manager will report it.
    pub(super) fn work_request_failed(&mut self, failure: Failure, env: &mut Env<'_>) {
        let flushed = failure.status == WcStatus::Flushed;
        if flushed && self.state.is_securing() {
            // A work request was flushed during the handshake. All messages from the peer were
            // processed before it, because their completions precede the first flushed work
            // request. No more messages can arrive. So the connection ends now, without waiting for
            // the connection manager.
            return self.disconnected(DisconnectCause::Peer, env);
        }
        if !flushed && matches!(self.state, State::Probing(_)) {
            let why = format!("the device of the peer does not acknowledge the hello: {}", failure.status);
            return self.end(Ending::ConnectError(ConnectError::Transport(ConnectFailure::Unreachable(why))), env);
        }
        let evidence = if flushed { Evidence::Flushed(failure) } else { Evidence::Failed(failure) };
        self.end(Ending::disconnect(evidence), env);
    }

    /// Ends the connection because its work requests could not be posted. The device may be about to be removed.
    pub(crate) fn posting_failed(&mut self, why: String, env: &mut Env<'_>) {
        self.end(Ending::disconnect(Evidence::Unposted(why)), env);
    }

    /// Ends the connection because a callback of the program has panicked. The program receives no more messages of this connection, not
    /// even those whose callbacks are pending.
    pub(crate) fn panicked(&mut self, why: String, env: &mut Env<'_>) {
        self.mute(env);
        let evidence = Evidence::Decided(DisconnectReason::Internal(why));
        let ending = Ending::Disconnect { evidence, delivers: false };
        self.end(ending, env);
    }

    /// Ends the connection because the peer has violated the protocol.
    pub(crate) fn violated(&mut self, what: PeerViolation, env: &mut Env<'_>) {
        if matches!(self.state, State::Refusing(_)) {
            // The local side has refused the peer's identity, and the refusal may not have reached
            // the peer yet. All messages from the peer are ignored, including illegal ones.
            return;
        }
        let (id, peer, limit) = (self.id, self.peer.address, &mut env.effects.log_limit);
        peer_log!(limit, env.now, Violation, Warn, peer, "{id}: {peer} violated the protocol: {what}");
        self.end(Ending::decided(DisconnectReason::PeerViolation(what)), env);
    }

    /// Ends the connection because the peer has rejected the connect request.
    pub(crate) fn rejected(&mut self, private_data: Vec<u8>, env: &mut Env<'_>) {
        let error = match Greeting::parse(&private_data) {
            Ok(no) => ConnectError::Rejected { reason: no.reason, private_data: no.user.to_vec() },
            Err(_) => ConnectError::Rejected { reason: RejectReason::Refused, private_data },
        };
        self.end(Ending::ConnectError(error), env);
    }

    /// Ends the connection because the connection manager could not connect.
    pub(crate) fn connect_failed(&mut self, failure: ConnectFailure, env: &mut Env<'_>) {
        let error = match failure {
            ConnectFailure::Timeout => ConnectError::Timeout,
            ConnectFailure::SharedMemoryOnly(why) => {
                let (id, peer, limit) = (self.id, self.peer.address, &mut env.effects.log_limit);
                peer_log!(limit, env.now, NotUp, Info, peer, "{id}: {peer}: no shared memory: {why}");
                let reason = RejectReason::SharedMemoryOnly;
                ConnectError::Rejected { reason, private_data: Vec::new() }
            }
            other => ConnectError::Transport(other),
        };
        self.end(Ending::ConnectError(error), env);
    }

    /// Ends the connection because its device is being removed.
    pub(crate) fn device_removed(&mut self, env: &mut Env<'_>) {
        self.end(Ending::disconnect(Evidence::Removed), env);
    }

    /// Handles the connection manager's event that the connection is disconnected.
    pub(crate) fn disconnected(&mut self, cause: DisconnectCause, env: &mut Env<'_>) {
        let fails =
            self.is_active() && matches!(self.state, State::Connecting(_) | State::Probing(_) | State::Securing(_));
        let failure = fails.then(|| ConnectFailure::Protocol(cause.to_string()));
        let evidence = match cause {
            DisconnectCause::Local if !matches!(self.state, State::Closing(_)) => {
                Evidence::Decided(DisconnectReason::Local { complete: false })
            }
            // `Local` in `Closing`: the local side has disconnected only to flush its queues, after the peer had ended the connection.
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

    /// Returns true if an ending connection waits neither for completions nor for better evidence of why it ends.
    pub(crate) fn is_flushed(&self) -> bool {
        self.state.closing().is_some_and(|closing| !closing.is_guess()) && !self.is_outstanding()
    }

    /// Returns the error of a failed attempt to connect, if another address of the peer may work.
    /// `None` if no other address can work, for example because the peer has refused the
    /// connection, or the program has closed it.
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

    /// Makes sure that the buffers and the memory of posted work requests are never reused: the queue pair could not be destroyed, so the
    /// device may still access them. Returns the number of buffers that are lost in this way.
    pub(crate) fn forsake(&mut self) -> usize {
        self.forsake_lists();
        self.forsake_landings();
        self.sends.forsake() + self.receives.forsake()
    }

    /// If the program has closed the connection: notes that a send of the program was not delivered. In this case, the reason that
    /// `on_disconnect` reports has `complete: false`.
    pub(super) fn cut_off(&mut self) {
        if let State::Closing(closing) = &mut self.state {
            closing.cut_off();
        }
    }

    /// Frees the buffers of a failed attempt to connect, after its queue pair was destroyed and before the next attempt replaces it. No
    /// callback follows.
    pub(crate) fn drop_attempt(&mut self, env: &mut Env<'_>) {
        self.fail_sends(env);
        self.drop_early(env);
    }

    /// Ends all sends that remain after the queue pair is destroyed. They fail, except those that have completed before an earlier Read.
    fn fail_sends(&mut self, env: &mut Env<'_>) {
        self.sends.abandon_chain();
        while !self.sends.is_empty() {
            let outcome = self.sends.front_ended_at_last().unwrap_or(Outcome::Failed(WcStatus::Flushed.into()));
            self.end_oldest(outcome, env);
        }
    }

    /// Cleans up after the queue pair is destroyed. The remaining sends fail. Returns the callback that reports the end of the connection,
    /// or `None` if the program was never notified of the connection.
    pub(crate) fn finish(&mut self, env: &mut Env<'_>) -> Option<Event> {
        if self.delays_its_close() {
            self.cut_off();
        }
        self.fail_sends(env);
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

/// Returns true if this pending callback must be dropped, because the program has closed the connection. In this case, frees the buffers of
/// the message in the callback.
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
