//! The handshake of a connection that is secured, between the news that the transport is up and the hello of the active
//! side.
//!
//! The octets of the handshake travel in messages of their own, cut to the buffers and under the ordinary credits. Until a
//! side is done, nothing but these and grants goes from it, and none of it is sealed. A side is done when it knows who its
//! peer is and its program has nothing against that: it then says so ([`Part::Last`]), and everything that it sends
//! behind that is sealed. So each direction changes over at one place in its order of messages, and no message can be
//! taken for one of the other kind. A connection is announced when both directions are sealed.

use std::mem;

use super::effects::{Action, Event};
use super::frame::{Kind, Part};
use super::greeting::Greeting;
use super::handshake::{Progress, Securing};
use super::state::{Certainty, Ending, State};
use super::{Connection, Env};
use crate::error::{ConnectError, PeerViolation};
use crate::limits::{MAX_CONTROL, MAX_HANDSHAKE};
use crate::security::{PeerIdentity, SecurityError, Side};

/// Longest text about a refusal that is taken from a peer, bytes.
const LONGEST_REASON: usize = 200;

impl Connection {
    /// Starts the handshake, on either side.
    pub(super) fn begin_securing(&mut self, env: &mut Env<'_>) {
        let about = &self.about;
        let side = match self.is_active() {
            true => Side::Active { host: about.host.as_deref(), address: about.peer.ip() },
            false => Side::Passive,
        };
        let mut outbox = Vec::new();
        let started = about.security.start(side, &about.greetings).and_then(|mut handshake| {
            handshake.begin(&mut outbox)?;
            Ok(handshake)
        });
        match started {
            Ok(handshake) => {
                let progress = Progress::Proving;
                self.state =
                    State::Securing(Box::new(Securing { handshake, outbox, taken: 0, progress, greeted: false }));
                self.mark(env);
            }
            Err(error) => self.refuse_peer(error, "the settings of the peer cannot be used", env),
        }
    }

    /// Notes the greeting of one side as it was sent. The handshake makes sure that nobody has changed it.
    pub(crate) fn note_greeting(&mut self, private_data: &[u8]) {
        self.about.greetings.extend_from_slice(Greeting::octets(private_data));
    }

    /// Handles a message of the peer's handshake.
    pub(super) fn received_handshake(&mut self, payload: &[u8], env: &mut Env<'_>) -> Result<(), PeerViolation> {
        if matches!(self.state, State::Accepting | State::Greeting)
            && !self.about.security.is_plain()
            && self.opener.is_none()
        {
            // The octets of the peer may come before the news that the transport is up.
            self.begin_securing(env);
        }
        let (part, octets) = Part::parse(payload).ok_or(PeerViolation::MalformedMessage)?;
        let State::Securing(securing) = &mut self.state else {
            return if self.state.is_ending() {
                self.received_late(part, octets, env);
                Ok(())
            } else {
                Err(PeerViolation::MalformedMessage)
            };
        };
        if part == Part::Refusal {
            let error = self.refused(octets);
            let ending = if self.is_active() { Ending::ConnectError(error) } else { Ending::Silent };
            self.end(ending, Certainty::Known, env);
            return Ok(());
        }
        if self.opener.is_some() || (octets.is_empty() && part == Part::More) {
            return Err(PeerViolation::MalformedMessage);
        }
        securing.taken += octets.len();
        let (proving, long) = (matches!(securing.progress, Progress::Proving), securing.taken > MAX_HANDSHAKE);
        let read = match (long, octets.is_empty(), proving) {
            (true, ..) => Err(SecurityError::Peer(format!("its handshake is longer than {MAX_HANDSHAKE} bytes"))),
            (_, true, _) => Ok(()),
            (_, _, false) => Err(SecurityError::Peer("its handshake goes on behind its end".into())),
            _ => securing.handshake.read(octets, &mut securing.outbox),
        };
        if let Err(error) = read {
            let told = securing.handshake.alert(&error);
            self.refuse_peer(error, &told, env);
            return Ok(());
        }
        if proving && let Some((channel, identity)) = securing.handshake.finish() {
            securing.progress = Progress::Asking(channel.sealer);
            self.about.opener = Some(Box::new(channel.opener));
            self.about.identity = Some(identity);
            self.tell(env, Event::Identified);
        }
        if part == Part::Last {
            // The keys of a peer that has not proven who it is are not used.
            self.opener = Some(self.about.opener.take().ok_or(PeerViolation::MalformedMessage)?);
        }
        self.mark(env);
        self.secured(env);
        Ok(())
    }

    /// Handles a message of the handshake that is seen only after the transport is gone: devices report the two in any order.
    fn received_late(&mut self, part: Part, octets: &[u8], env: &mut Env<'_>) {
        let (active, told) = (self.is_active(), self.sealer.is_some());
        let State::Closing(closing) = &mut self.state else { return };
        match (part, &closing.ending) {
            // The peer had let this side in before it closed, and this is the last that this side waited for.
            (Part::Last, _) if octets.is_empty() && told && closing.late.is_some() => {
                self.opener = self.about.opener.take();
                if active {
                    self.announce(env);
                }
            }
            // The peer had said why it would close.
            (Part::Refusal, Ending::ConnectError(ConnectError::Transport(_))) => {
                let error = self.refused(octets);
                if let State::Closing(closing) = &mut self.state {
                    (closing.ending, closing.late) = (Ending::ConnectError(error), None);
                }
            }
            _ => {}
        }
    }

    /// The peer does not accept this side, and says why.
    fn refused(&self, why: &[u8]) -> ConnectError {
        let error = SecurityError::Refused(readable(why));
        log::info!("{}: {}: {error}", self.id, self.about.peer);
        ConnectError::Security(error)
    }

    /// Who the peer is, once that is proven.
    pub(crate) fn identity(&self) -> Option<&PeerIdentity> {
        self.about.identity.as_ref()
    }

    /// The program has looked at who the peer is. `refusal`: why it does not accept it.
    pub(crate) fn judged(&mut self, refusal: Option<String>, env: &mut Env<'_>) {
        let State::Securing(securing) = &mut self.state else { return };
        if let Some(why) = refusal {
            return self.refuse_peer(SecurityError::Peer(why.clone()), &why, env);
        }
        securing.progress = match mem::replace(&mut securing.progress, Progress::Proving) {
            Progress::Asking(sealer) => Progress::Accepted(sealer),
            other => other,
        };
        self.mark(env);
    }

    /// Puts the octets of the handshake into messages, as far as there are credits and places, and the end of them.
    pub(super) fn pump_handshake(&mut self, env: &mut Env<'_>) {
        let most = self.terms.buffer_size.max(MAX_CONTROL) - 1;
        while let State::Securing(securing) = &mut self.state
            && self.tx.available_for_data() > 0
            && self.sends.room(0) > 0
        {
            let accepted = matches!(securing.progress, Progress::Accepted(_));
            if securing.outbox.is_empty() && !accepted {
                return;
            }
            let rest = securing.outbox.split_off(securing.outbox.len().min(most));
            let mut octets = mem::replace(&mut securing.outbox, rest);
            let last = accepted && securing.outbox.is_empty();
            octets.insert(0, if last { Part::Last } else { Part::More } as u8);
            let sealer = match (last, &mut securing.progress) {
                (true, progress) => match mem::replace(progress, Progress::Done) {
                    Progress::Accepted(sealer) => Some(sealer),
                    _ => None,
                },
                _ => None,
            };
            self.push_control(Kind::Handshake, &octets, None, env);
            if let Some(sealer) = sealer {
                // What is in the chain stays as it is. What comes behind it is sealed.
                self.sends.seal_from_here();
                self.sealer = Some(Box::new(sealer));
                if self.is_active() {
                    // The hello opens the connection on the peer's side, so it goes before anything that the program sends.
                    self.push_hello(env);
                }
                self.secured(env);
            }
        }
    }

    /// Queues the hello. It needs a credit and a place, of which the last ones are kept for the reactor's own messages.
    fn push_hello(&mut self, env: &mut Env<'_>) {
        debug_assert!(self.tx.available() > 0 && self.sends.has_control_room(), "data leaves some to it");
        self.push_control(Kind::Hello, &[], None, env);
    }

    /// Goes on if both directions are sealed.
    fn secured(&mut self, env: &mut Env<'_>) {
        let State::Securing(securing) = &self.state else { return };
        if self.sealer.is_none() || self.opener.is_none() {
            return;
        }
        let greeted = securing.greeted;
        if self.is_active() {
            self.announce(env);
        } else {
            self.state = State::Greeting;
            if greeted {
                self.announce(env);
            }
        }
    }

    /// Notes a hello that has come before this side was done; `false` if there is no handshake that it could end.
    pub(super) fn greeted_early(&mut self) -> bool {
        let State::Securing(securing) = &mut self.state else { return false };
        self.opener.is_some() && !self.role.is_active() && !mem::replace(&mut securing.greeted, true)
    }

    /// Does not accept the peer, and tells it so. `told`: the words for the peer.
    fn refuse_peer(&mut self, error: SecurityError, told: &str, env: &mut Env<'_>) {
        log::info!("{}: {}: {error}", self.id, self.about.peer);
        env.stats.connections.insecure += 1;
        let ending =
            if self.is_active() { Ending::ConnectError(ConnectError::Security(error)) } else { Ending::Silent };
        if self.tx.available() > 0 && self.sends.has_control_room() && self.terms.buffer_size > 0 {
            let most = self.terms.buffer_size.max(MAX_CONTROL) - 1;
            let mut payload = vec![Part::Refusal as u8];
            payload.extend_from_slice(&told.as_bytes()[..told.len().min(most).min(LONGEST_REASON)]);
            self.push_control(Kind::Handshake, &payload, None, env);
        }
        self.state = State::Refusing(Box::new(ending));
        self.want(env, Action::Ending);
        self.want(env, Action::Deadline(Some(env.now + env.config.close_timeout)));
        self.mark(env);
    }
}

/// Text of a peer, fit for a log.
fn readable(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(&text[..text.len().min(LONGEST_REASON)]);
    text.chars().map(|char| if char.is_control() { '?' } else { char }).collect()
}
