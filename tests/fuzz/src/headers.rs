//! The fuzz target of the headers of DDP and RDMAP, and of the payloads that follow these headers.

use rdma_transport_embedded::iwarp::wire::atomic::{emit_response, parse_response};
use rdma_transport_embedded::iwarp::wire::ddp::{TAGGED_FPDU_HEADER_LEN, UNTAGGED_FPDU_HEADER_LEN};
use rdma_transport_embedded::iwarp::wire::terminate::MAX_TERMINATE_LEN;
use rdma_transport_embedded::iwarp::wire::{
    AtomicRequest, HeaderError, Quote, ReadRequest, SegmentHeader, Terminate, header_len,
};

/// Parses an FPDU, emits its header again, and parses the emitted header.
///
/// # Panics
/// Panics if the emitted header differs from the parsed one, or if `header_len` and the parser disagree about the
/// length of the header.
pub fn headers(octets: &[u8]) {
    let parsed = SegmentHeader::parse(octets);
    let Some(prefix) = octets.first_chunk() else {
        assert!(matches!(parsed, Err(HeaderError::Truncated { .. })));
        return;
    };
    let ulpdu_len = u16::from_be_bytes([octets[0], octets[1]]);
    match (header_len(prefix), &parsed) {
        (Ok(len), Ok(_)) => assert!(octets.len() >= len),
        (Ok(len), Err(HeaderError::Truncated { have, need })) => {
            assert_eq!((*have, *need), (octets.len(), len));
            assert!(octets.len() < len);
        }
        (Err(one), Err(other)) => assert_eq!(one, *other),
        both => panic!("the length says one thing, and the header another: {both:?}"),
    }
    if let Err(error) = &parsed {
        assert!(!error.to_string().is_empty() && !error.cause().to_string().is_empty());
    }
    quoted(octets);
    match parsed {
        Ok(SegmentHeader::Tagged(header)) => {
            let mut again = [0; TAGGED_FPDU_HEADER_LEN];
            header.emit_into(ulpdu_len, &mut again);
            assert_eq!(SegmentHeader::parse(&again), Ok(SegmentHeader::Tagged(header)));
            assert_eq!(again[4..], octets[4..TAGGED_FPDU_HEADER_LEN]);
        }
        Ok(SegmentHeader::Untagged(header)) => {
            let (octets, payload) = octets.split_at(UNTAGGED_FPDU_HEADER_LEN);
            let mut again = [0; UNTAGGED_FPDU_HEADER_LEN];
            header.emit_into(ulpdu_len, &mut again);
            assert_eq!(again[4..], octets[4..]);
            if let Some(request) = payload.first_chunk() {
                assert_eq!(ReadRequest::parse(request).emit(), *request);
            }
            if let Some(request) = payload.first_chunk() {
                let request = AtomicRequest::parse(request);
                assert_eq!(AtomicRequest::parse(&request.emit()), request);
                let _ = (request.is_known(), request.apply(u64::from(ulpdu_len)));
            }
            if let Some(response) = payload.first_chunk() {
                let (id, old) = parse_response(response);
                assert_eq!(emit_response(id, old), *response);
            }
            terminate(payload);
        }
        Err(_) => {}
    }
}

/// Builds the quote with which a Terminate would report this FPDU, and reads the fields of the quote. Neither may
/// panic.
fn quoted(fpdu: &[u8]) {
    let Some(quote) = Quote::new(fpdu) else { return };
    let _ = (quote.ddp_header(), quote.read_request(), quote.segment_len());
}

/// Parses the payload of a Terminate, emits it again, and checks that the emitted payload has the same cause.
fn terminate(payload: &[u8]) {
    let Some(terminate) = Terminate::parse(payload) else { return };
    assert!(!terminate.to_string().is_empty());
    let mut again = [0; MAX_TERMINATE_LEN];
    let own = Terminate::new(terminate.cause, terminate.quote);
    let len = own.emit_into(&mut again);
    let read = Terminate::parse(&again[..len]).expect("what is written can be read");
    // If the Terminate quotes no header, its control word can be read in two bit orders: that of the RFC and that of
    // siw. So the parser returns two causes.
    assert!(read.cause == own.cause || read.other_reading == Some(own.cause), "{read:?} of {own:?}");
}
