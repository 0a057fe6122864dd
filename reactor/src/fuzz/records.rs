//! Sealed messages, with a tape on the path between the sealer and the opener.

use std::collections::VecDeque;

use rdma_transport::iwarp::fuzz::Tape;

use crate::limits::HEADER_LEN;
use crate::security::channel::{SEGMENT, TAG, segment, segments};
use crate::security::{Channel, Handshake, Opener, Sealer, Security, Side};

/// The two ends of a channel, after a handshake that nobody has touched.
fn channel(security: &Security) -> (Channel, Channel) {
    let address = [192, 0, 2, 1].into();
    let mut active = security.start(Side::Active { host: Some("node"), address }, b"").expect("good settings");
    let mut passive = security.start(Side::Passive, b"").expect("good settings");
    let (mut there, mut back) = (Vec::new(), Vec::new());
    active.begin(&mut there).expect("it can begin");
    while !(there.is_empty() && back.is_empty()) {
        passive.read(&std::mem::take(&mut there), &mut back).expect("an honest peer");
        active.read(&std::mem::take(&mut back), &mut there).expect("an honest peer");
    }
    let end = |side: &mut Box<dyn Handshake>| side.finish().expect("both are done").0;
    (end(&mut active), end(&mut passive))
}

/// A sealed message, and what was sealed.
#[derive(Clone)]
struct Sealed {
    octets: Vec<u8>,
    plain: Vec<u8>,
}

fn seal(sealer: &mut Sealer, body: &[u8]) -> Sealed {
    let plain = [&[5; HEADER_LEN], body].concat();
    let mut octets = [&plain[..], &[0; TAG]].concat();
    assert!(sealer.seal(&mut octets, HEADER_LEN), "{} octets can be sealed", body.len());
    Sealed { octets, plain }
}

/// Seals messages, changes what the tape says, and opens them. A connection ends with the first one that does not open.
///
/// # Panics
/// When a message opens that is not the next one as it was sealed, or does not although it is.
pub fn records(security: &Security, tape: &[u8]) {
    let (mut active, mut passive) = channel(security);
    let mut tape = Tape::new(tape);
    let mut sent = VecDeque::new();
    let mut last = None;
    while !tape.is_over() {
        match tape.byte() % 12 {
            0..=4 => sent.push_back(seal(&mut active.sealer, tape.octets(2000))),
            // The next one arrives as it is.
            5..=7 => {
                let Some(Sealed { mut octets, plain }) = sent.pop_front() else { continue };
                last = Some(octets.clone());
                assert_eq!(passive.opener.open(&mut octets, HEADER_LEN), Some(plain.len()));
                assert_eq!(&octets[..plain.len()], plain);
            }
            8 => {
                let Some(Sealed { mut octets, .. }) = sent.pop_front() else { continue };
                let at = tape.number() as usize % (octets.len() * 8);
                octets[at / 8] ^= 1 << (at % 8);
                return assert_eq!(passive.opener.open(&mut octets, HEADER_LEN), None, "bit {at} was changed");
            }
            9 => {
                let other = tape.octets(300);
                return assert_eq!(passive.opener.open(&mut other.to_vec(), HEADER_LEN), None, "it was never sealed");
            }
            10 => {
                // One that has come before, one of later, or a shorter one.
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
                    return assert_eq!(passive.opener.open(octets, HEADER_LEN), None, "it is not the next one");
                }
            }
            _ => {
                if !large(&mut active.sealer, &mut passive.opener, &mut tape) {
                    return;
                }
            }
        }
    }
}

/// A large message, with a change in one segment or none; `false` if there was one.
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
        assert_eq!(octets[range.len()..], [9; TAG], "the octets behind a segment are put back");
        if changed {
            return false;
        }
        assert_eq!(&octets[..range.len()], plain);
    }
    true
}
