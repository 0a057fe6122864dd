//! The fuzz targets of security handshakes: two sides exchange bytes, and the tape (the fuzzer's input) says how an attacker on the path
//! changes these bytes.

use rdma_transport_fuzz::iwarp::fuzz::Tape;

use crate::limits::HEADER_LEN;
use crate::secured::{psk, tls};
use crate::security::channel::TAG;
use crate::security::{Channel, Handshake, HandshakeRole, PeerIdentity, Security};

/// The largest number of bytes in flight in one direction. A real connection has such a limit, too.
const LIMIT: usize = 64 << 10;

/// One side of the handshake: its state, the bytes in flight to this side, and a flag that is true once the handshake has failed on this
/// side.
struct End {
    handshake: Box<dyn Handshake>,
    inbox: Vec<u8>,
    failed: bool,
}

impl End {
    fn new(security: &Security, side: HandshakeRole<'_>) -> Self {
        let handshake = security.start(side, b"context").expect("the settings are good");
        Self { handshake, inbox: Vec::new(), failed: false }
    }

    fn take(&mut self, len: usize) -> Vec<u8> {
        self.inbox.drain(..len.min(self.inbox.len())).collect()
    }

    /// Passes received bytes to this side. Appends the replies of this side to the bytes in flight to `peer`.
    fn read(&mut self, octets: &[u8], peer: &mut Self) {
        if self.failed || peer.inbox.len() > LIMIT {
            return;
        }
        if let Err(error) = self.handshake.read(octets, &mut peer.inbox) {
            assert!(!self.handshake.alert(&error).is_empty() && !error.to_string().is_empty());
            self.failed = true;
        }
    }
}

/// Runs a handshake with a pre-shared key.
///
/// # Panics
/// Panics as [`handshake_tls`] does.
pub fn handshake_psk(tape: &[u8]) {
    handshake(&psk(), tape);
}

/// Runs a TLS handshake.
///
/// # Panics
/// Panics if a handshake that the attacker has not changed fails, or if a changed handshake completes with different keys on the two sides.
pub fn handshake_tls(tape: &[u8]) {
    handshake(tls(), tape);
}

/// Runs a handshake between an active and a passive side. The tape chooses when bytes arrive, and how an attacker changes them. Both sides
/// use the settings `security`, with which each side must accept the other one.
fn handshake(security: &Security, tape: &[u8]) {
    let mut tape = Tape::new(tape);
    let address = [192, 0, 2, 1].into();
    let mut active = End::new(security, HandshakeRole::Active { host: Some("node"), address });
    let mut passive = End::new(security, HandshakeRole::Passive);
    active.handshake.begin(&mut passive.inbox).expect("it can begin");
    passive.handshake.begin(&mut active.inbox).expect("it can begin");
    let mut touched = false;
    while !tape.is_over() {
        let (to, from) = if tape.below(128) { (&mut active, &mut passive) } else { (&mut passive, &mut active) };
        let choice = tape.byte() % 16;
        touched |= choice >= 8;
        match choice {
            // For the choices 0 to 3, all bytes in flight arrive. For the choices 4 to 7, the first part of these bytes arrives.
            0..=3 => {
                let octets = to.take(usize::MAX);
                to.read(&octets, from);
            }
            4..=7 => {
                let octets = to.take(tape.number() as usize);
                to.read(&octets, from);
            }
            // For the choices 8 to 15, an attacker flips a bit (8, 9), drops bytes (10), duplicates bytes (11), swaps the bytes of the two
            // directions (12), or injects bytes (13 to 15).
            8 | 9 => {
                let at = tape.number() as usize;
                if let Some(octet) = to.inbox.get_mut(at) {
                    *octet ^= 1 << (tape.byte() & 7);
                }
            }
            10 => drop(to.take(tape.number() as usize)),
            11 => {
                let len = to.inbox.len().min(tape.number() as usize).min(LIMIT.saturating_sub(to.inbox.len()));
                to.inbox.extend_from_within(..len);
            }
            12 => std::mem::swap(&mut to.inbox, &mut from.inbox),
            _ => {
                let octets = tape.octets(1000);
                to.read(octets, from);
            }
        }
    }
    while !(active.inbox.is_empty() && passive.inbox.is_empty()) {
        let octets = active.take(usize::MAX);
        active.read(&octets, &mut passive);
        let octets = passive.take(usize::MAX);
        passive.read(&octets, &mut active);
        if active.failed || passive.failed {
            break;
        }
    }
    let end = |end: &mut End| if end.failed { None } else { end.handshake.finish() };
    match (end(&mut active), end(&mut passive)) {
        (Some(active), Some(passive)) => joined(active, passive),
        (active, passive) => {
            assert!(touched, "active: {:?}, passive: {:?}", active.is_some(), passive.is_some());
        }
    }
}

/// Checks that each side can open a message that the other side has sealed. This proves that both have the same keys.
fn joined(active: (Channel, PeerIdentity), passive: (Channel, PeerIdentity)) {
    assert!(!matches!(active.1, PeerIdentity::Anonymous) && !matches!(passive.1, PeerIdentity::Anonymous));
    let (mut active, mut passive) = (active.0, passive.0);
    for (sealer, opener) in [(&mut active.sealer, &mut passive.opener), (&mut passive.sealer, &mut active.opener)] {
        let mut message = [&[1; HEADER_LEN][..], b"a message", &[0; TAG]].concat();
        assert!(sealer.seal(&mut message, HEADER_LEN));
        assert_eq!(opener.open(&mut message, HEADER_LEN), Some(HEADER_LEN + 9));
        assert_eq!(&message[HEADER_LEN..HEADER_LEN + 9], b"a message");
    }
}
