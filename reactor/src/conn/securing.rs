//! The handshake of a secured connection, between the establishment of the transport and the hello of the active side.
//!
//! The handshake bytes are sent in separate messages, which fit into buffers and use credits like all messages. A side is *done* when the
//! peer has proven its identity and the local program has accepted it. Before a side is done, it sends only handshake messages and grants,
//! unencrypted. When it is done, it sends [`HandshakePart::Last`], and encrypts all later messages.
//!
//! So in each direction, all messages after [`HandshakePart::Last`] are encrypted, and the receiver
//! always knows if a message is encrypted. The connection is reported to the program when both
//! directions are encrypted.

use std::mem;

use log::Level;

use super::effects::{Action, Event};
use super::frame::{HandshakePart, MessageKind};
use super::greeting::Greeting;
use super::handshake::SecuringProgress;
use super::state::{Ending, State};
use super::{Connection, Env};
use crate::error::{ConnectError, PeerViolation};
use crate::limits::{MAX_CONTROL, MAX_HANDSHAKE};
use crate::security::{HandshakeRole, Opener, PeerIdentity, SecurityError, is_hidden};

/// The maximum length of the reason of a refusal, in bytes. A longer reason is truncated when it is sent, and when it is received.
const LONGEST_REASON: usize = 200;

impl Connection {
    /// Starts the handshake, on either side.
    pub(super) fn begin_securing(&mut self, env: &mut Env<'_>) {
        let Some(setup) = self.state.setup() else { return };
        let role = match self.is_active() {
            true => HandshakeRole::Active { host: setup.host.as_deref(), address: self.peer.address.ip() },
            false => HandshakeRole::Passive,
        };
        let mut outbox = Vec::new();
        let started = self.peer.security.start(role, &setup.greetings).and_then(|mut handshake| {
            handshake.begin(&mut outbox)?;
            Ok(handshake)
        });
        match started {
            Ok(handshake) => {
                if self.state.secure(handshake, outbox) {
                    self.mark(env);
                    self.nudge_later(env);
                }
            }
            Err(error) => self.refuse_peer(error, "the settings of the peer cannot be used", env),
        }
    }

    /// If the connection will be secured, keeps a copy of a greeting as it was sent or received. The handshake verifies that the greetings
    /// were not changed in transit.
    pub(crate) fn note_greeting(&mut self, private_data: &[u8]) {
        if !self.is_secured() {
            return;
        }
        if let Some(setup) = self.state.setup_mut() {
            setup.greetings.extend_from_slice(Greeting::octets(private_data));
        }
    }

    /// Removes the keys that decrypt the peer's messages from the handshake, and returns them. `None` if the peer has not proven its
    /// identity, or if the connection already uses these keys.
    pub(super) fn take_late_opener(&mut self) -> Option<Box<Opener>> {
        match &mut self.state {
            State::Securing(securing) => securing.opener.take(),
            _ => None,
        }
    }

    /// Handles a message of the peer's handshake.
    pub(super) fn received_handshake(&mut self, payload: &[u8], env: &mut Env<'_>) -> Result<(), PeerViolation> {
        if matches!(self.state, State::Accepting(_)) {
            // The first handshake bytes from the peer may arrive before the event that the
            // transport is up.
            self.begin_securing(env);
        }
        let (part, bytes) = HandshakePart::parse(payload).ok_or(PeerViolation::MalformedMessage)?;
        let State::Securing(securing) = &mut self.state else {
            self.received_late(part, bytes, env);
            return Ok(());
        };
        if part == HandshakePart::Refusal {
            let error = ConnectError::Security(self.refused(bytes, env));
            let ending = if self.is_active() { Ending::ConnectError(error) } else { Ending::Silent };
            self.end(ending, env);
            return Ok(());
        }
        if self.opener.is_some() || (bytes.is_empty() && part == HandshakePart::More) {
            return Err(PeerViolation::MalformedMessage);
        }
        securing.taken += bytes.len();
        let (proving, long) = (matches!(securing.progress, SecuringProgress::Proving), securing.taken > MAX_HANDSHAKE);
        let read = match (long, bytes.is_empty(), proving) {
            (true, ..) => Err(SecurityError::Peer(format!("its handshake is longer than {MAX_HANDSHAKE} bytes"))),
            (_, true, _) => Ok(()),
            (_, _, false) => Err(SecurityError::Peer("its handshake continues behind its end".into())),
            _ => securing.handshake.read(bytes, &mut securing.outbox),
        };
        if let Err(error) = read {
            let reason = securing.handshake.alert(&error);
            self.refuse_peer(error, &reason, env);
            return Ok(());
        }
        let proven = if proving { securing.handshake.finish() } else { None };
        let identified = proven.is_some();
        if let Some((channel, identity)) = proven {
            securing.progress = SecuringProgress::Asking(channel.sealer);
            securing.opener = Some(Box::new(channel.opener));
            self.peer.identity = Some(identity);
        }
        if part == HandshakePart::Last {
            // If the keys that decrypt the peer's messages are missing, the peer has not proven its identity, and `HandshakePart::Last` is
            // a violation.
            self.opener = Some(securing.opener.take().ok_or(PeerViolation::MalformedMessage)?);
        }
        if identified {
            self.tell(env, Event::Identified);
        }
        self.mark(env);
        self.secured(env);
        Ok(())
    }

    /// Handles a handshake message that is processed after the event that the transport has ended. Devices may report the event before the
    /// message.
    fn received_late(&mut self, part: HandshakePart, bytes: &[u8], env: &mut Env<'_>) {
        let active = self.is_active();
        let State::Closing(closing) = &mut self.state else { return };
        match part {
            // The peer has accepted the local side, and has closed the connection after that. The handshake lacked only this message, so
            // the connection was up on the peer's side.
            HandshakePart::Last if bytes.is_empty() => {
                let Some(opener) = closing.late.as_mut().and_then(|late| late.opener.take()) else { return };
                self.opener = Some(opener);
                if active {
                    self.announce(env);
                }
            }
            // The peer had sent the reason of its refusal before it ended the connection.
            HandshakePart::Refusal if closing.may_be_refused() => {
                let error = self.refused(bytes, env);
                if let State::Closing(closing) = &mut self.state {
                    closing.refused(error);
                }
            }
            HandshakePart::More | HandshakePart::Last | HandshakePart::Refusal => {}
        }
    }

    /// Handles a message in which the peer refuses the local side's identity. `why` is the peer's reason, as text. Returns the error that
    /// is reported to the program.
    fn refused(&self, why: &[u8], env: &mut Env<'_>) -> SecurityError {
        let error = SecurityError::Refused(readable(why));
        self.log_failure(&error, env);
        error
    }

    /// Logs that the local side has refused the peer's identity, or was refused by the peer. On the passive side, the program receives no
    /// callback for this, so only the log reports it.
    fn log_failure(&self, error: &SecurityError, env: &mut Env<'_>) {
        let (id, peer) = (self.id, self.peer.address);
        let level = if self.is_active() { Level::Info } else { Level::Warn };
        peer_log!(env.effects.log_limit, env.now, NotUp, level, peer, "{id}: {peer}: {error}");
    }

    /// Returns the peer's identity. `None` until the peer has proven it.
    pub(crate) fn identity(&self) -> Option<&PeerIdentity> {
        self.peer.identity.as_ref()
    }

    /// Handles the program's decision about the peer's identity. `refusal` is the reason if the program refuses the peer, or `None` if it
    /// accepts the peer.
    pub(crate) fn judged(&mut self, refusal: Option<String>, env: &mut Env<'_>) {
        let State::Securing(securing) = &mut self.state else { return };
        if let Some(why) = refusal {
            return self.refuse_peer(SecurityError::Peer(why.clone()), &why, env);
        }
        securing.progress = match mem::replace(&mut securing.progress, SecuringProgress::Proving) {
            SecuringProgress::Asking(sealer) => SecuringProgress::Accepted(sealer),
            other => other,
        };
        self.mark(env);
    }

    /// Notes that the program has postponed its decision about the peer's identity. Returns false if the program is not being asked for
    /// this decision.
    pub(crate) fn postpone_judgement(&mut self) -> bool {
        let State::Securing(securing) = &mut self.state else { return false };
        securing.progress = match mem::replace(&mut securing.progress, SecuringProgress::Proving) {
            SecuringProgress::Asking(sealer) => SecuringProgress::Postponed(sealer),
            other => other,
        };
        matches!(securing.progress, SecuringProgress::Postponed(_))
    }

    /// Handles a decision that the program had postponed. `refusal` is the reason if the program refuses the peer, or `None` if it accepts
    /// the peer. Returns false if the connection does not wait for a decision.
    pub(crate) fn judged_late(&mut self, refusal: Option<String>, env: &mut Env<'_>) -> bool {
        let State::Securing(securing) = &mut self.state else { return false };
        securing.progress = match mem::replace(&mut securing.progress, SecuringProgress::Proving) {
            SecuringProgress::Postponed(sealer) => SecuringProgress::Asking(sealer),
            other => {
                securing.progress = other;
                return false;
            }
        };
        self.judged(refusal, env);
        true
    }

    /// Sends the pending handshake bytes in messages, while credits and send queue slots are
    /// available. If the program has accepted the peer, the last message is
    /// [`HandshakePart::Last`], and all messages after it are encrypted.
    pub(super) fn pump_handshake(&mut self, env: &mut Env<'_>) {
        let most = self.terms.buffer_size.max(MAX_CONTROL) - 1;
        while self.tx.available_for_data() > 0 && self.sends.room(0) > 0 {
            let State::Securing(securing) = &mut self.state else { return };
            let accepted = matches!(securing.progress, SecuringProgress::Accepted(_));
            if securing.outbox.is_empty() && !accepted {
                return;
            }
            let rest = securing.outbox.split_off(securing.outbox.len().min(most));
            let mut bytes = mem::replace(&mut securing.outbox, rest);
            let last = accepted && securing.outbox.is_empty();
            bytes.insert(0, if last { HandshakePart::Last } else { HandshakePart::More } as u8);
            let sealer = match (last, &mut securing.progress) {
                (true, progress) => match mem::replace(progress, SecuringProgress::Done) {
                    SecuringProgress::Accepted(sealer) => Some(sealer),
                    _ => None,
                },
                _ => None,
            };
            self.push_control(MessageKind::Handshake, &bytes, None, env);
            self.renew_handshake(env);
            if let Some(sealer) = sealer {
                // The messages that are in the chain now stay unencrypted. Messages that are added
                // later are encrypted.
                self.sends.seal_from_here();
                self.sealer = Some(Box::new(sealer));
                if self.is_active() {
                    // The hello opens the connection on the peer's side, so the hello precedes all messages of the program.
                    self.push_hello(env);
                }
                self.sends.hurry();
                self.secured(env);
            }
        }
    }

    /// Queues the hello. A credit and a send queue slot are available, because the last of both are
    /// reserved for control messages.
    pub(super) fn push_hello(&mut self, env: &mut Env<'_>) {
        debug_assert!(self.tx.available() > 0 && self.sends.has_control_room(), "data leaves the last ones to it");
        self.push_control(MessageKind::Hello, &[], None, env);
        self.sends.mark_hello();
        // The program may have corked the connection before it is up.
        self.sends.hurry();
    }

    /// If both directions are encrypted, the connection comes up: on the active side now, on the passive side when the hello has arrived.
    fn secured(&mut self, env: &mut Env<'_>) {
        let State::Securing(securing) = &self.state else { return };
        if self.sealer.is_none() || self.opener.is_none() {
            return;
        }
        let greeted = securing.greeted;
        if self.is_active() || (self.state.greet() && greeted) {
            self.announce(env);
        }
    }

    /// Handles the hello of the active side. The connection comes up now, or at the end of the local handshake if that is later.
    pub(super) fn greeted(&mut self, env: &mut Env<'_>) {
        if let State::Securing(securing) = &mut self.state {
            securing.greeted = true;
        } else {
            self.announce(env);
        }
    }

    /// Refuses the peer's identity. `error` is the reason for the log and, on the active side, for
    /// the program. On the passive side, the program receives no callback. `reason` is the text
    /// that the peer receives, if a credit and a send queue slot are available.
    fn refuse_peer(&mut self, error: SecurityError, reason: &str, env: &mut Env<'_>) {
        self.log_failure(&error, env);
        env.stats.connections.insecure += 1;
        let ending =
            if self.is_active() { Ending::ConnectError(ConnectError::Security(error)) } else { Ending::Silent };
        if self.tx.available() > 0 && self.sends.has_control_room() && self.terms.buffer_size > 0 {
            let most = self.terms.buffer_size.max(MAX_CONTROL) - 1;
            let mut payload = vec![HandshakePart::Refusal as u8];
            payload.extend_from_slice(&reason.as_bytes()[..reason.len().min(most).min(LONGEST_REASON)]);
            self.push_control(MessageKind::Handshake, &payload, None, env);
        }
        if self.state.refuse(ending) {
            self.want(env, Action::Ending);
            self.wait_until(Some(env.now + env.config.timeouts.close), env);
            self.mark(env);
        }
    }
}

/// Returns text of a peer in a form that is safe to log: without control characters, characters that change the direction of text, and
/// invisible characters.
fn readable(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(&text[..text.len().min(LONGEST_REASON)]);
    text.chars().map(|c| if is_hidden(c) { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_peer_commands_no_terminal() {
        for (text, shown) in [
            ("not valid for name \"käse.example\": it's 'x' \\", "not valid for name \"käse.example\": it's 'x' \\"),
            ("a\u{1b}[2Jb\r\n\0\u{7f}\u{9b}", "a?[2Jb?????"),
            (
                "\u{202a}\u{202b}\u{202c}\u{202d}\u{202e}\u{2066}\u{2067}\u{2068}\u{2069}\u{61c}\u{200e}\u{200f}",
                "????????????",
            ),
            ("\u{2028}\u{2029}\u{200b}\u{2060}\u{feff}\u{fff9}\u{e0041}", "???????"),
        ] {
            assert_eq!(readable(text.as_bytes()), shown, "{text:?}");
        }
        assert_eq!(readable(b"\xff\xfe").chars().count(), 2);
        assert_eq!(readable(&[b'x'; 1000]).len(), LONGEST_REASON);
    }
}
