//! Pre-shared keys, which all members of a small cluster have. The handshake is that of Noise with the pattern NNpsk0 (revision 34 of its
//! specification), Curve25519, AES-256-GCM and SHA-256. Its three messages are:
//!
//! ```text
//! active:  name of the key | psk, e        passive:  e, ee        active:  an empty sealed message
//! ```
//!
//! The last message proves that the active side takes part now. So an attacker who only replays a recorded first message gets no
//! connection.

use std::fmt;
use std::sync::Arc;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use snow::{Builder, HandshakeState};
use zeroize::Zeroizing;

use super::channel::{Channel, CipherKey, Opener, Sealer, TAG};
use super::records::{Records, emit};
use super::{Handshake, HandshakeRole, PeerIdentity, SecurityError};

const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";

/// The longest name of a key, in bytes.
const LONGEST_NAME: usize = 64;

/// The length of a key, in bytes.
const KEY: usize = 32;

/// The nonce that Noise reserves for the renewal of keys.
const REKEY_NONCE: u64 = u64::MAX;

/// The bytes of a key, which are overwritten when they are dropped. They are boxed, so that a move copies only a pointer and leaves no copy
/// of the key behind.
type Secret = Box<Zeroizing<[u8; KEY]>>;

/// The pre-shared keys of the local side. One is used to connect, and all are accepted from peers.
#[derive(Clone)]
pub struct Psk {
    /// The names and keys. The first one is used to connect.
    keys: Arc<[(String, Secret)]>, // local: a setting
}

impl fmt::Debug for Psk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The keys must not be displayed.
        f.debug_list().entries(self.keys.iter().map(|(name, _)| name)).finish()
    }
}

fn settings(why: impl Into<String>) -> SecurityError {
    SecurityError::Settings(why.into())
}

impl Psk {
    /// Creates a set with one key, which is used both to connect and to accept peers. `name` has 1 to 64 bytes, and is sent in plaintext.
    ///
    /// ```
    /// use rdma_reactor::{Config, Psk, Security};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // 32 random bytes that both sides have, such as from a file that only this program may read.
    /// let key = std::array::from_fn(|n| 7 * n as u8);
    /// let config = Config::default().security(Security::Psk(Psk::new("storage-1", key)?));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`SecurityError::Settings`] if the name is empty or too long, or all bytes of the key are equal.
    pub fn new(name: &str, key: [u8; 32]) -> Result<Self, SecurityError> {
        let (key, mut secret) = (Zeroizing::new(key), Secret::default());
        secret.copy_from_slice(&key[..]);
        Self::of(vec![(name.to_owned(), secret)])
    }

    /// Parses a set of keys. Each line has a name, a colon, and 64 hexadecimal digits. Different keys must have different names. Empty
    /// lines and lines that begin with `#` are ignored.
    ///
    /// The first key is used to connect, and all keys are accepted from peers. To replace a key, first add the new key on all members. Then
    /// make the new key the first one on all members. Finally, remove the old key.
    ///
    /// # Errors
    /// [`SecurityError::Settings`], with the number of the line if a line cannot be parsed. The error never contains digits of a key.
    pub fn parse(text: &str) -> Result<Self, SecurityError> {
        let mut keys = Vec::new();
        for (nth, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = || settings(format!("line {} of the keys: write NAME:64-HEX-DIGITS", nth + 1));
            let (name, digits) = line.split_once(':').ok_or_else(wrong)?;
            keys.push((name.trim().to_owned(), hex(digits.trim()).ok_or_else(wrong)?));
        }
        Self::of(keys)
    }

    fn of(keys: Vec<(String, Secret)>) -> Result<Self, SecurityError> {
        if keys.is_empty() {
            return Err(settings("there is no pre-shared key: write a line NAME:64-HEX-DIGITS"));
        }
        if let Some((name, _)) = keys.iter().find(|(name, _)| !(1..=LONGEST_NAME).contains(&name.len())) {
            return Err(settings(format!("a key with a name of {} bytes: it must be 1 to {LONGEST_NAME}", name.len())));
        }
        // A peer sends the name of its key, and only one key of this name can be tried.
        let differ = |(name, key): &(String, Secret), (other, of_other): &(String, Secret)| {
            name == other && key[..] != of_other[..]
        };
        if keys.iter().enumerate().any(|(nth, key)| keys[..nth].iter().any(|other| differ(key, other))) {
            return Err(settings("two different pre-shared keys have the same name: give each key its own name"));
        }
        if keys.iter().any(|(_, key)| key.iter().all(|&octet| octet == key[0])) {
            return Err(settings(
                "a pre-shared key of equal bytes: use 32 random ones, as `openssl rand -hex 32` prints them",
            ));
        }
        Ok(Self { keys: keys.into() })
    }

    pub(super) fn start(&self, role: HandshakeRole<'_>, context: &[u8]) -> Result<PskHandshake, SecurityError> {
        let state = match role {
            HandshakeRole::Active { .. } => {
                let (name, key) = &self.keys[0];
                PskState::Initiating(name.clone(), Noise::new(true, name, key, context)?)
            }
            HandshakeRole::Passive => PskState::AwaitingKeyName { keys: self.clone(), context: context.to_vec() },
        };
        Ok(PskHandshake { state, records: Records::default() })
    }
}

fn hex(digits: &str) -> Option<Secret> {
    let mut key = Secret::default();
    if digits.len() != 2 * KEY || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    for (nth, octet) in key.iter_mut().enumerate() {
        *octet = u8::from_str_radix(&digits[2 * nth..2 * nth + 2], 16).ok()?;
    }
    Some(key)
}

/// The Noise state of a handshake. When it is dropped, its copy of the pre-shared key is overwritten. The keys that were derived from the
/// pre-shared key are not overwritten.
struct Noise(Box<HandshakeState>);

impl Noise {
    fn new(active: bool, name: &str, key: &[u8; KEY], context: &[u8]) -> Result<Self, SecurityError> {
        let failed = |error: snow::Error| settings(format!("noise: {error}"));
        // The prologue contains the name without its length, so the boundary between name and context is not authenticated. An attacker
        // could exploit this only if there were a second key with the same bytes, and with a name that is a prefix of this name. In
        // addition, the remainder of this name, followed by `context`, would have to consist of valid greetings. Only those who choose the
        // names and the keys can make both conditions true.
        let prologue = [name.as_bytes(), context].concat();
        let builder = Builder::new(PATTERN.parse().map_err(failed)?);
        let builder = builder.psk(0, key).map_err(failed)?.prologue(&prologue).map_err(failed)?;
        let state = if active { builder.build_initiator() } else { builder.build_responder() };
        Ok(Self(Box::new(state.map_err(failed)?)))
    }
}

impl Drop for Noise {
    fn drop(&mut self) {
        let overwritten = self.0.set_psk(0, &[0; KEY]);
        debug_assert!(overwritten.is_ok(), "the pattern has one key");
        // Nothing reads the bytes after they were overwritten, so the compiler could remove the write. `black_box` prevents this.
        std::hint::black_box(&*self.0);
    }
}

/// The progress of a handshake.
enum PskState {
    /// The local side connects with the key of this name, and waits for the peer's answer.
    Initiating(String, Noise), // local: a setting
    /// The local side is the passive side, and waits for the name of the key that the peer uses.
    AwaitingKeyName {
        keys: Psk,
        context: Vec<u8>, // bound: private-data
    },
    /// The peer has sent the name of this key. The local side waits for the proof that the peer has the key.
    AwaitingProof(String, Channel), // local: a setting
    Complete(String, Channel), // local: a setting
    /// The channel and the identity were returned, or the handshake has failed.
    Finished,
}

/// A handshake with a pre-shared key.
pub(crate) struct PskHandshake {
    state: PskState,
    records: Records,
}

impl fmt::Debug for PskHandshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a handshake with a pre-shared key")
    }
}

fn differs() -> SecurityError {
    SecurityError::Peer("the pre-shared keys differ, or the handshake was changed on the way".into())
}

/// Derives the keys of the channel from a completed handshake.
fn channel(noise: &mut HandshakeState) -> Channel {
    let active = noise.is_initiator();
    let (to_passive, to_active) = noise.dangerously_get_raw_split();
    let (to_passive, to_active) = (Zeroizing::new(to_passive), Zeroizing::new(to_active));
    let (own, peers) = if active { (to_passive, to_active) } else { (to_active, to_passive) };
    let pair = |key: Zeroizing<[u8; KEY]>| {
        let first = Cipher::new(&key);
        let mut second = Cipher::new(&key);
        second.renew();
        (Box::new(first), Box::new(second))
    };
    let ((first, second), (third, fourth)) = (pair(own), pair(peers));
    Channel { sealer: Sealer::new(first, second), opener: Opener::new(third, fourth) }
}

impl PskHandshake {
    fn record(&mut self, record: &[u8], out: &mut Vec<u8>) -> Result<(), SecurityError> {
        let mut payload = [0; 64];
        self.state = match std::mem::replace(&mut self.state, PskState::Finished) {
            PskState::Initiating(name, mut noise) => {
                noise.0.read_message(record, &mut payload).map_err(|_| differs())?;
                let mut channel = channel(&mut noise.0);
                let mut proof = [0; TAG];
                if !channel.sealer.seal(&mut proof, 0) {
                    return Err(differs());
                }
                emit(&proof, out, |_| {});
                PskState::Complete(name, channel)
            }
            PskState::AwaitingKeyName { keys, context } => {
                let named = record.split_first().and_then(|(&len, rest)| rest.split_at_checked(usize::from(len)));
                let (name, message) = named.ok_or_else(differs)?;
                let known = keys.keys.iter().find(|(of, _)| of.as_bytes() == name);
                let unknown = || SecurityError::Peer("no pre-shared key here has the name that the peer sent".into());
                let (name, key) = known.ok_or_else(unknown)?;
                let mut noise = Noise::new(false, name, key, &context)?;
                noise.0.read_message(message, &mut payload).map_err(|_| differs())?;
                let mut answer = [0; 128];
                let len = noise.0.write_message(&[], &mut answer).map_err(|_| differs())?;
                emit(&answer[..len], out, |_| {});
                PskState::AwaitingProof(name.clone(), channel(&mut noise.0))
            }
            PskState::AwaitingProof(name, mut channel) => {
                let mut proof: [u8; TAG] = record.try_into().map_err(|_| differs())?;
                channel.opener.open(&mut proof, 0).ok_or_else(differs)?;
                PskState::Complete(name, channel)
            }
            PskState::Complete(..) | PskState::Finished => {
                return Err(SecurityError::Peer("the handshake continues after its end".into()));
            }
        };
        Ok(())
    }
}

impl Handshake for PskHandshake {
    fn begin(&mut self, out: &mut Vec<u8>) -> Result<(), SecurityError> {
        if let PskState::Initiating(name, noise) = &mut self.state {
            let mut message = [0; 128];
            let len = noise.0.write_message(&[], &mut message).map_err(|error| settings(format!("noise: {error}")))?;
            let mut record = vec![name.len() as u8];
            record.extend_from_slice(name.as_bytes());
            record.extend_from_slice(&message[..len]);
            emit(&record, out, |_| {});
        }
        Ok(())
    }

    fn read(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), SecurityError> {
        self.records.push(bytes);
        while let Some(record) = self.records.next()? {
            self.record(&record, out)?;
        }
        Ok(())
    }

    fn finish(&mut self) -> Option<(Channel, PeerIdentity)> {
        if !self.records.is_empty() {
            return None;
        }
        match std::mem::replace(&mut self.state, PskState::Finished) {
            PskState::Complete(name, channel) => Some((channel, PeerIdentity::Psk(name))),
            other => {
                self.state = other;
                None
            }
        }
    }

    fn alert(&self, _: &SecurityError) -> String {
        // The text is the same for an unknown name and for a wrong key, so a peer cannot find out
        // which names exist.
        "the pre-shared keys differ, or the peer has none of that name".into()
    }
}

/// The AES-256-GCM cipher as Noise uses it: the nonce is the number of the message.
struct Cipher(LessSafeKey);

impl Cipher {
    fn new(key: &[u8; KEY]) -> Self {
        // `UnboundKey::new` fails only if the key has a wrong length, and this key has the right length.
        Self(LessSafeKey::new(UnboundKey::new(&AES_256_GCM, key).expect("a key of 32 bytes")))
    }
}

/// Returns the nonce for a number: 4 zero bytes, then the number in big-endian order (Noise, section 12.4).
fn nonce(number: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&number.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

impl CipherKey for Cipher {
    fn seal(&self, number: u64, header: &[u8], body: &mut [u8]) -> Option<[u8; TAG]> {
        let tag = self.0.seal_in_place_separate_tag(nonce(number), Aad::from(header), body).ok()?;
        tag.as_ref().try_into().ok()
    }

    fn open(&self, number: u64, header: &[u8], body: &mut [u8]) -> bool {
        self.0.open_in_place(nonce(number), Aad::from(header), body).is_ok()
    }

    /// Renews the key with REKEY of Noise, section 4.2. The new key is the ciphertext, without the tag, of 32 zero bytes. The nonce of this
    /// encryption is one that no message uses.
    fn renew(&mut self) {
        let mut zeros = Zeroizing::new([0; KEY]);
        // If the encryption failed, the new key would consist of zeros, so the failure must not be ignored.
        let sealed = self.0.seal_in_place_separate_tag(nonce(REKEY_NONCE), Aad::empty(), &mut zeros[..]);
        assert!(sealed.is_ok(), "32 bytes are not too long");
        *self = Self::new(&zeros);
    }
}
