//! The fuzz targets of sealed messages: the tape (the fuzzer's input) says how messages are changed between the side that seals them and
//! the side that opens them.

use std::cell::RefCell;
use std::collections::VecDeque;

use rdma_transport_fuzz::iwarp::fuzz::Tape;

use crate::limits::HEADER_LEN;
use crate::secured::{psk, tls};
use crate::security::channel::{SEGMENT, TAG, segment, segments};
use crate::security::{Channel, Handshake, HandshakeRole, Opener, Sealer, Security};

/// Runs an unchanged handshake in memory. Returns the channel of the active side and that of the passive side.
fn channel(security: &Security) -> (Channel, Channel) {
    let address = [192, 0, 2, 1].into();
    let mut active = security.start(HandshakeRole::Active { host: Some("node"), address }, b"").expect("good settings");
    let mut passive = security.start(HandshakeRole::Passive, b"").expect("good settings");
    let (mut there, mut back) = (Vec::new(), Vec::new());
    active.begin(&mut there).expect("it can begin");
    while !(there.is_empty() && back.is_empty()) {
        passive.read(&std::mem::take(&mut there), &mut back).expect("an honest peer");
        active.read(&std::mem::take(&mut back), &mut there).expect("an honest peer");
    }
    let end = |side: &mut Box<dyn Handshake>| side.finish().expect("both are done").0;
    (end(&mut active), end(&mut passive))
}

/// A sealed message, and its plaintext.
#[derive(Clone)]
struct Sealed {
    octets: Vec<u8>,
    plain: Vec<u8>,
}

/// The sealer of one side, the opener of the peer, the number of messages that the sealer has sealed, and the number that the opener has
/// counted.
struct Ends {
    sealer: Sealer,
    opener: Opener,
    sealed: u64,
    opened: u64,
}

impl Ends {
    fn new(security: &Security) -> Self {
        let (active, passive) = channel(security);
        Self { sealer: active.sealer, opener: passive.opener, sealed: 0, opened: 0 }
    }

    fn seal(&mut self, body: &[u8]) -> Sealed {
        self.sealed += 1;
        let plain = [&[5; HEADER_LEN], body].concat();
        let mut octets = [&plain[..], &[0; TAG]].concat();
        assert!(self.sealer.seal(&mut octets, HEADER_LEN), "{} bytes can be sealed", body.len());
        Sealed { octets, plain }
    }

    fn open(&mut self, octets: &mut [u8]) -> Option<usize> {
        // The opener does not count a message that is too short to have a tag.
        self.opened += u64::from(octets.len() >= HEADER_LEN + TAG);
        self.opener.open(octets, HEADER_LEN)
    }

    /// Advances the sealer and the opener to the same message number, as if the messages in between had arrived.
    fn meet(&mut self) {
        while self.opened < self.sealed {
            assert_eq!(self.open(&mut [0; HEADER_LEN + TAG]), None);
        }
        while self.sealed < self.opened {
            self.seal(b"");
        }
    }
}

/// Fuzzes messages that are sealed with the keys of a handshake with a pre-shared key.
///
/// # Panics
/// Panics if the opener accepts a changed message or a message out of order, or if the opener refuses the next message although this
/// message is unchanged.
pub fn records_psk(tape: &[u8]) {
    thread_local!(static ENDS: RefCell<Ends> = RefCell::new(Ends::new(&psk())));
    ENDS.with_borrow_mut(|ends| records(ends, tape));
}

/// Fuzzes messages that are sealed with the keys of a TLS handshake.
///
/// # Panics
/// Panics as [`records_psk`] does.
pub fn records_tls(tape: &[u8]) {
    thread_local!(static ENDS: RefCell<Ends> = RefCell::new(Ends::new(tls())));
    ENDS.with_borrow_mut(|ends| records(ends, tape));
}

/// Plays one tape. A handshake takes much longer than a tape, so each thread runs one handshake, and all tapes of the thread use its keys.
/// A tape begins with the message numbers at which the previous tape ended. The sealer and the opener derive new keys after they have used
/// the current ones for many messages.
fn records(ends: &mut Ends, tape: &[u8]) {
    play(ends, &mut Tape::new(tape));
    ends.meet();
}

/// Seals messages, changes them as the tape says, and opens them. The tape ends at the first message that the opener refuses, because a
/// real connection would end there.
fn play(ends: &mut Ends, tape: &mut Tape<'_>) {
    let mut sent = VecDeque::new();
    let mut last = None;
    while !tape.is_over() {
        match tape.byte() % 12 {
            0..=4 => sent.push_back(ends.seal(tape.octets(2000))),
            // The next message arrives unchanged.
            5..=7 => {
                let Some(Sealed { mut octets, plain }) = sent.pop_front() else { continue };
                last = Some(octets.clone());
                assert_eq!(ends.open(&mut octets), Some(plain.len()));
                assert_eq!(&octets[..plain.len()], plain);
            }
            8 => {
                let Some(Sealed { mut octets, .. }) = sent.pop_front() else { continue };
                let at = tape.number() as usize % (octets.len() * 8);
                octets[at / 8] ^= 1 << (at % 8);
                return assert_eq!(ends.open(&mut octets), None, "bit {at} was changed");
            }
            9 => {
                let other = tape.octets(300);
                return assert_eq!(ends.open(&mut other.to_vec()), None, "it was never sealed");
            }
            10 => {
                // Delivers a message again, delivers a later one first, or truncates one.
                let mut octets = match tape.byte() % 3 {
                    0 => last.take(),
                    1 => sent.remove(1).map(|sealed| sealed.octets),
                    _ => sent.pop_front().map(|mut sealed| {
                        let len = sealed.octets.len();
                        sealed.octets.truncate(tape.number() as usize % len);
                        sealed.octets
                    }),
                };
                if let Some(octets) = &mut octets {
                    return assert_eq!(ends.open(octets), None, "it is not the next one");
                }
            }
            _ => {
                if !large(&mut ends.sealer, &mut ends.opener, tape) {
                    return;
                }
            }
        }
    }
}

/// Transmits a large message segment by segment, and changes one bit of one segment if the tape says so. Returns true if all segments
/// arrived unchanged. Returns false if a segment was changed: the opener must refuse this segment, and the message ends there.
fn large(sealer: &mut Sealer, opener: &mut Opener, tape: &mut Tape<'_>) -> bool {
    let len = (tape.number() as usize).min(2 * SEGMENT + 5) as u64;
    let (to, from) = (sealer.begin(len), opener.begin(len));
    let (bad, bit) = (u64::from(tape.byte()), tape.word() as usize);
    for index in 0..segments(len) {
        let range = segment(index, len);
        let plain = vec![index as u8; range.len()];
        let mut octets = [&plain[..], &[9; TAG]].concat();
        let mut tag = sealer.seal_segment(to, index, &mut octets[..range.len()]).expect("a segment can be sealed");
        let changed = index == bad;
        if changed {
            let at = bit % ((range.len() + TAG) * 8);
            let octet = match at / 8 {
                at if at < range.len() => &mut octets[at],
                at => &mut tag[at - range.len()],
            };
            *octet ^= 1 << (at % 8);
        }
        assert_eq!(opener.open_segment(from, index, &mut octets, tag), !changed, "segment {index}");
        assert_eq!(octets[range.len()..], [9; TAG], "the bytes behind a segment are restored");
        if changed {
            return false;
        }
        assert_eq!(&octets[..range.len()], plain);
    }
    true
}
