//! The fuzz target of MPA startup frames. Each frame is parsed as a whole and in pieces, accepted or refused by both
//! sides, answered, and emitted again.

use super::super::config::MAX_READ_DEPTH;
use super::super::startup::{
    FrameReader, Judgement, MAX_PRIVATE_DATA_OUT, StartupTerms, Verdict, accept, judge_reply, judge_request, reject,
};
use super::super::wire::mpa::STARTUP_HEADER_LEN;
use super::super::wire::{Enhanced, StartupError, StartupHeader, StartupKind};

/// A parsed startup frame: its header, its enhanced block, its private data, and the length of the frame in bytes.
type Frame = (StartupHeader, Option<Enhanced>, Vec<u8>, usize);

/// Parses one frame that arrives in pieces of at most `step` bytes. Returns `None` if `bytes` ends before the frame
/// does.
fn read(kind: StartupKind, bytes: &[u8], step: usize) -> Result<Option<Frame>, StartupError> {
    let mut reader = FrameReader::new(kind);
    let mut at = 0;
    loop {
        let space = reader.space();
        let len = space.len().min(step).min(bytes.len() - at);
        assert!(!space.is_empty(), "a frame that is not complete has room");
        space[..len].copy_from_slice(&bytes[at..at + len]);
        at += len;
        if let Some(header) = reader.filled(len)? {
            let (enhanced, private_data) = reader.body();
            return Ok(Some((header, enhanced, private_data.to_vec(), at)));
        }
        if at == bytes.len() {
            return Ok(None);
        }
    }
}

/// Parses the input as a request, and again as a reply. The first byte of the input chooses the options and the length
/// of the pieces. The frame begins at the second byte.
///
/// # Panics
/// Panics if the result depends on the pieces, the emitted frame differs from the parsed one, or the two sides disagree
/// about the connection.
pub fn startup(tape: &[u8]) {
    let Some((&choice, bytes)) = tape.split_first() else { return };
    for kind in [StartupKind::Request, StartupKind::Reply] {
        let frame = read(kind, bytes, usize::MAX);
        assert_eq!(frame, read(kind, bytes, 1 + usize::from(choice & 63)));
        let Ok(Some((header, enhanced, private_data, taken))) = frame else { continue };
        assert_eq!((header.kind, taken), (kind, STARTUP_HEADER_LEN + usize::from(header.private_data_len)));
        let block = enhanced.map_or(Vec::new(), |block| block.emit().to_vec());
        let again = [&header.emit()[..], &block, &private_data].concat();
        assert_eq!(again, &bytes[..taken]);
        let crc = choice & 64 == 0;
        let markers = choice & 128 == 0;
        for (ird, ord) in [(0, 0), (1, 7), (u16::MAX, u16::MAX)] {
            let terms = StartupTerms::new(crc, ird, ord, markers);
            match kind {
                StartupKind::Request => request(&terms, &header, enhanced, markers),
                StartupKind::Reply => reply(&terms, &header, enhanced),
            }
        }
    }
}

/// Decides as the passive side would if a request is acceptable. Answers an unacceptable request with a rejection, and
/// an acceptable one with a rejection and with an acceptance. Checks each reply.
fn request(terms: &StartupTerms, header: &StartupHeader, enhanced: Option<Enhanced>, markers: bool) {
    let asked = match judge_request(header, enhanced, markers) {
        Judgement::Acceptable(asked) => asked,
        Judgement::Refused(_, asked) => return refused(&reject(&asked, b"why"), header),
        Judgement::Unknown(_) => return,
    };
    refused(&reject(&asked, b"why"), header);
    let data = [7; MAX_PRIVATE_DATA_OUT];
    let (bytes, agreement) = accept(terms, &asked, &data);
    let Ok(Some((answer, block, private_data, taken))) = read(StartupKind::Reply, &bytes, usize::MAX) else {
        panic!("the reply cannot be read: {bytes:02x?}");
    };
    assert_eq!((taken, private_data), (bytes.len(), data.to_vec()));
    assert_eq!((answer.reject, answer.revision, answer.crc), (false, header.revision, agreement.crc));
    assert_eq!(agreement.markers, header.markers);
    assert!(agreement.ord <= terms.ord && agreement.ird <= MAX_READ_DEPTH.next_power_of_two(), "{agreement:?}");
    // If the request was valid, the active side must derive the same agreement from the reply.
    let Some(Enhanced { ird, ord, .. }) = enhanced.filter(|_| header.revision == 2) else { return };
    let own = StartupTerms::new(false, ird, ord, markers);
    if (own.ird, own.ord) == (ird, ord) {
        if let Verdict::Accepted(of_active) = judge_reply(&own, &answer, block) {
            assert_eq!((of_active.crc, of_active.rtr.is_some()), (agreement.crc, agreement.rtr.is_some()));
            assert!(of_active.ord <= agreement.ird.max(own.ord) && agreement.ord <= of_active.ird, "{of_active:?}");
        }
    }
}

/// Parses a reply and checks that it rejects the request, with the expected private data.
fn refused(bytes: &[u8], request: &StartupHeader) {
    let Ok(Some((header, _, private_data, _))) = read(StartupKind::Reply, bytes, usize::MAX) else {
        panic!("the reply cannot be read: {bytes:02x?}");
    };
    assert_eq!((header.reject, header.revision, private_data.as_slice()), (true, request.revision, &b"why"[..]));
}

/// Decides as the active side would if a reply is acceptable, and checks that the decision fits the header of the
/// reply.
fn reply(terms: &StartupTerms, header: &StartupHeader, enhanced: Option<Enhanced>) {
    match judge_reply(terms, header, enhanced) {
        Verdict::Accepted(agreement) => {
            assert!(!header.reject && agreement.ord <= terms.ord && agreement.ird <= terms.ird, "{agreement:?}");
            assert!(terms.markers || !agreement.markers);
        }
        Verdict::Rejected => assert!(header.reject),
        Verdict::Failed(why, _) => assert!(!header.reject && !why.is_empty()),
    }
}
