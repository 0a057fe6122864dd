//! The fuzz targets of the reactor's messages: greetings, headers, and the payloads of the messages that the reactor
//! itself sends.

use crate::frame::{FrameHeader, HandshakePart, Immediate, MessageKind, Offer, TransferProgress};
use crate::greeting::{Greeting, MAX_USER_PRIVATE_DATA};
use crate::limits::{HEADER_LEN, MAX_CONTROL};

/// Parses the private data of a connect request as a greeting, and emits it again.
///
/// # Panics
/// Panics if the emitted greeting differs from the parsed one.
pub fn greeting(octets: &[u8]) {
    let own = Greeting::octets(octets);
    assert_eq!(own, &octets[..own.len()]);
    let Ok(greeting) = Greeting::parse(octets) else {
        assert_eq!(own, octets, "what is no greeting is left as it is");
        return;
    };
    let sound = greeting.checked();
    assert!(sound.is_err() || greeting.buffer_size > 0 && greeting.window > 0);
    if greeting.user.len() <= MAX_USER_PRIVATE_DATA {
        let again = greeting.emit();
        assert_eq!(Greeting::parse(&again), Ok(greeting));
        assert_eq!(again.len(), own.len());
    }
}

/// Parses a message: its header, and the payload that belongs to its kind. Emits both again.
///
/// # Panics
/// Panics if the emitted message differs from the parsed one.
pub fn message(octets: &[u8]) {
    let header = FrameHeader::parse(octets).or_else(|| FrameHeader::parse_fragment(octets));
    let Some(header) = header else { return };
    let following = FrameHeader::following(octets);
    let (octets, payload) = octets.split_at(HEADER_LEN);
    assert_eq!(header.emit_before(following), octets);
    match header.kind {
        MessageKind::Immediate => {
            if let Some(immediate) = Immediate::parse(payload) {
                assert_eq!(immediate.emit(), payload);
            }
        }
        MessageKind::Offer => {
            if let Some(offer) = Offer::parse(payload) {
                assert_eq!(offer.emit(&mut [0; MAX_CONTROL]), payload);
                let region = offer.region;
                assert!(region.address.checked_add(region.len).is_some(), "{region:?} wraps around");
                assert_eq!(region.part(0, region.len), Some(region));
                assert_eq!(region.part(region.len, 1), None);
            }
        }
        MessageKind::Handshake => {
            if let Some((part, rest)) = HandshakePart::parse(payload) {
                assert_eq!((part as u8, rest), (payload[0], &payload[1..]));
            }
        }
        MessageKind::Progress => {
            if let Some(progress) = TransferProgress::parse(payload) {
                assert_eq!(progress.emit(), payload);
            }
        }
        MessageKind::Hello | MessageKind::Credit | MessageKind::Ping | MessageKind::Pong | MessageKind::Goodbye => {
            assert!(payload.is_empty())
        }
        MessageKind::Data | MessageKind::Fetched | MessageKind::Refused | MessageKind::Fragment => {}
    }
}
