//! Checks the wire format of iWARP with recorded connections and with the test vectors of the RFCs.

use proptest::prelude::*;
use rdma_reactor_tests::pcap::{self, Capture, End, Hole};
use rdma_transport_embedded::iwarp::wire::ddp::{
    READ_REQUEST_FPDU_HEADER_LEN, TAGGED_FPDU_HEADER_LEN, UNTAGGED_FPDU_HEADER_LEN,
};
use rdma_transport_embedded::iwarp::wire::mpa::{CRC_LEN, ENHANCED_LEN, STARTUP_HEADER_LEN, fpdu_len, pad_len};
use rdma_transport_embedded::iwarp::wire::terminate::MAX_TERMINATE_LEN;
use rdma_transport_embedded::iwarp::wire::{
    Crc32c, Enhanced, HeaderError, Layer, Opcode, ReadRequest, SegmentHeader, StartupError, StartupHeader, StartupKind,
    Tagged, Terminate, TerminateCause, Untagged, crc32c, header_len,
};

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    assert_eq!(digits.len() % 2, 0);
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// A parsed FPDU: the fields of its headers, and the other octets as they are.
#[derive(Debug)]
struct Fpdu<'a> {
    header: SegmentHeader,
    read_request: Option<ReadRequest>,
    terminate: Option<Terminate>,
    payload: &'a [u8],
    pad: &'a [u8],
    crc: [u8; CRC_LEN],
    crc_good: bool,
}

impl<'a> Fpdu<'a> {
    /// Parses `bytes`, which are exactly one FPDU.
    fn parse(bytes: &'a [u8]) -> Result<Self, HeaderError> {
        let prefix = bytes.first_chunk().expect("an FPDU has at least eight octets");
        let header = SegmentHeader::parse(bytes)?;
        let (headers, rest) = bytes.split_at(header_len(prefix)?);
        let end = 2 + usize::from(u16::from_be_bytes([bytes[0], bytes[1]])) - headers.len();
        let (payload, rest) = rest.split_at(end);
        let (pad, crc) = rest.split_at(rest.len() - CRC_LEN);
        let crc = crc.try_into().expect("four octets");
        let opcode = header.opcode();
        Ok(Self {
            header,
            read_request: (opcode == Opcode::ReadRequest)
                .then(|| ReadRequest::parse(headers.last_chunk().expect("the header was awaited"))),
            terminate: (opcode == Opcode::Terminate)
                .then(|| Terminate::parse(payload).expect("the length was checked")),
            payload,
            pad,
            crc,
            crc_good: crc32c(&bytes[..bytes.len() - CRC_LEN]).to_le_bytes() == crc,
        })
    }

    /// Emits the FPDU again. The CRC is computed if `crc` is true, and otherwise it is the recorded one.
    fn emit(&self, crc: bool) -> Vec<u8> {
        let read_request = self.read_request.map(|request| request.emit());
        let mut terminate = [0; MAX_TERMINATE_LEN];
        let payload = match &self.terminate {
            Some(parsed) => {
                let len = parsed.emit_into(&mut terminate);
                &terminate[..len]
            }
            None => self.payload,
        };
        let header = match self.header {
            SegmentHeader::Tagged(_) => TAGGED_FPDU_HEADER_LEN,
            SegmentHeader::Untagged(_) => UNTAGGED_FPDU_HEADER_LEN,
        };
        let ulpdu_len = header - 2 + read_request.map_or(0, |bytes| bytes.len()) + payload.len();
        assert_eq!(self.pad.len(), pad_len(ulpdu_len));
        let mut out = vec![0; header];
        match &self.header {
            SegmentHeader::Tagged(tagged) => tagged.emit_into(ulpdu_len as u16, out.first_chunk_mut().unwrap()),
            SegmentHeader::Untagged(untagged) => untagged.emit_into(ulpdu_len as u16, out.first_chunk_mut().unwrap()),
        }
        out.extend(read_request.iter().flatten());
        out.extend(payload);
        out.extend(self.pad);
        let crc = if crc { crc32c(&out).to_le_bytes() } else { self.crc };
        out.extend(crc);
        assert_eq!(out.len(), fpdu_len(ulpdu_len));
        out
    }
}

/// One direction of a recorded connection, parsed.
#[derive(Debug)]
struct Side<'a> {
    startup: Result<StartupHeader, StartupError>,
    enhanced: Option<Enhanced>,
    private_data: &'a [u8],
    fpdus: Vec<Result<Fpdu<'a>, HeaderError>>,
}

/// Parses a whole stream, and checks that each frame is emitted as it was recorded. Returns `None` if the stream is too
/// short for a startup frame.
fn split(stream: &[u8]) -> Option<Side<'_>> {
    let (head, mut rest) = stream.split_first_chunk::<STARTUP_HEADER_LEN>()?;
    let startup = StartupHeader::parse(head);
    let Ok(header) = startup else {
        return Some(Side { startup, enhanced: None, private_data: rest, fpdus: Vec::new() });
    };
    assert_eq!(header.emit(), *head);
    let (mut private_data, behind) = rest.split_at(usize::from(header.private_data_len));
    rest = behind;
    let mut enhanced = None;
    if header.enhanced {
        let (block, data) = private_data.split_first_chunk::<ENHANCED_LEN>().unwrap();
        enhanced = Some(Enhanced::parse(*block));
        assert_eq!(enhanced.unwrap().emit(), *block);
        private_data = data;
    }
    let mut fpdus = Vec::new();
    while !rest.is_empty() {
        let len = fpdu_len(usize::from(u16::from_be_bytes([rest[0], rest[1]])));
        let (fpdu, behind) = rest.split_at(len);
        let parsed = Fpdu::parse(fpdu);
        if let Ok(parsed) = &parsed {
            assert_eq!(parsed.emit(false), fpdu, "{parsed:?}");
            assert_eq!(parsed.emit(true) == fpdu, parsed.crc_good, "{parsed:?}");
        }
        fpdus.push(parsed);
        rest = behind;
    }
    Some(Side { startup, enhanced, private_data, fpdus })
}

fn sides(capture: &Capture) -> [Option<Side<'_>>; 2] {
    let sides = [split(&capture.client_to_server), split(&capture.server_to_client)];
    for (side, kind) in sides.iter().zip([StartupKind::Request, StartupKind::Reply]) {
        if let Some(Side { startup: Ok(header), .. }) = side {
            assert_eq!(header.kind, kind);
        }
    }
    sides
}

/// Returns true if the connection uses CRCs. It uses them in both directions if either side has requested them (RFC
/// 5044 §7.1.1).
fn crc_in_use(sides: &[Option<Side<'_>>; 2]) -> bool {
    sides.iter().flatten().any(|side| side.startup.is_ok_and(|header| header.crc))
}

/// The recorded connections: the name, the number of FPDUs of client and server, true if CRCs are in use, and how each
/// stream ended.
const CAPTURES: &[(&str, [usize; 2], bool, [End; 2])] = {
    use End::{Fin, Open, Reset};
    &[
        ("01-rping-nocrc", [6, 8], false, [Fin, Fin]),
        ("02-rping-crc-p2p-rtrwrite", [7, 8], true, [Fin, Fin]),
        ("03-siw-siw-all-ops-mss1448", [16, 6], false, [Open, Open]),
        ("04-siw-to-userspace-all-ops-crc", [16, 6], true, [Fin, Fin]),
        ("06-userspace-to-siw-crc-send-write-read", [3, 1], true, [Fin, Fin]),
        ("07-userspace-to-siw-p2p-rtr-write", [4, 1], false, [Fin, Fin]),
        ("09-userspace-to-siw-mpa-v1", [3, 1], false, [Fin, Fin]),
        ("10-siw-to-userspace-all-ops-nocrc", [16, 6], false, [Fin, Fin]),
        ("11-reject-with-private-data", [0, 0], false, [Fin, Fin]),
        ("12-markers-requested-rejected", [0, 0], false, [Fin, Fin]),
        ("20-term-write-bad-stag", [1, 1], false, [Fin, Fin]),
        ("21-term-write-out-of-bounds", [1, 1], false, [Fin, Fin]),
        ("22-term-read-bad-stag", [1, 1], false, [Fin, Fin]),
        ("24-term-send-too-long", [1, 1], false, [Fin, Fin]),
        ("25-send-invalidate-then-write", [2, 1], false, [Fin, Fin]),
        ("26-term-bad-crc", [1, 1], true, [Fin, Fin]),
        ("27-term-unknown-opcode", [1, 1], false, [Fin, Fin]),
        ("29-term-ird-exceeded", [40, 1], false, [Fin, Fin]),
        ("30-term-insufficient-ird-3fff", [1, 0], false, [Fin, Fin]),
        ("31-reply-plus-fpdu-coalesced-fails", [0, 1], false, [Reset, Open]),
        ("32-request-plus-fpdu-coalesced-fails", [1, 0], false, [Open, Reset]),
        ("33-siw-bug-zero-length-read-stale-length", [8, 5], false, [Fin, Fin]),
        ("34-siw-bug-read-without-remote-read", [1, 1], false, [Fin, Fin]),
        ("35-siw-bug-ord-rounded-up", [4, 0], false, [Fin, Fin]),
        ("36-siw-bug-private-data-252", [0, 0], false, [Open, Reset]),
        ("38-abrupt-exit", [1, 0], false, [Fin, Fin]),
        ("39-reply-markers-refused", [0, 0], false, [Fin, Fin]),
        ("40-userspace-sends-terminate", [1, 0], false, [Fin, Fin]),
        ("41-siw-bug-small-read-page-cross-corrupt", [7, 7], false, [Fin, Fin]),
    ]
};

#[test]
fn every_frame_of_every_capture_survives() {
    let all = pcap::all();
    let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, CAPTURES.iter().map(|row| row.0).collect::<Vec<_>>());
    let mut seen = 0;
    for ((name, capture), &(_, counts, crc, ends)) in all.iter().zip(CAPTURES) {
        let sides = sides(capture);
        assert_eq!([capture.client_end, capture.server_end], ends, "{name}");
        assert_eq!(crc_in_use(&sides), crc, "{name}");
        let lengths = |side: &Option<Side<'_>>| side.as_ref().map_or(0, |side| side.fpdus.len());
        assert_eq!([lengths(&sides[0]), lengths(&sides[1])], counts, "{name}");
        for (side, fpdu) in sides
            .iter()
            .enumerate()
            .flat_map(|(side, s)| s.iter().flat_map(move |s| s.fpdus.iter().map(move |f| (side, f))))
        {
            seen += 1;
            match fpdu {
                // The only frame that cannot be parsed is in the recording of an unknown opcode.
                Err(error) => {
                    assert_eq!((name.as_str(), side), ("27-term-unknown-opcode", 0), "{error}");
                    let want = HeaderError::TooShort { opcode: Some(Opcode::Immediate), ulpdu_len: 21, min: 26 };
                    assert_eq!(*error, want);
                }
                Ok(fpdu) if crc => {
                    let broken = (name.as_str(), side) == ("26-term-bad-crc", 0);
                    assert_eq!(fpdu.crc_good, !broken, "{name}: {fpdu:?}");
                }
                Ok(fpdu) => assert_eq!(fpdu.crc, [0; CRC_LEN], "{name}: {fpdu:?}"),
            }
        }
    }
    assert_eq!(seen, 202);
}

/// One recording lacks some FPDUs in the middle, because it was shortened; the others are complete.
#[test]
fn holes_in_the_captures() {
    for (name, capture) in pcap::all() {
        let hole = Hole { from_client: false, at: 5832, len: 116_180 };
        let thinned = name == "33-siw-bug-zero-length-read-stale-length";
        assert_eq!(capture.holes, if thinned { vec![hole] } else { vec![] }, "{name}");
    }
}

/// The segments of a recording cover every octet of its streams, so that a test can replay them.
#[test]
fn segments_add_up() {
    for (name, capture) in pcap::all() {
        for (from_client, stream) in [(true, &capture.client_to_server), (false, &capture.server_to_client)] {
            let mut end = 0;
            for segment in capture.segments.iter().filter(|segment| segment.from_client == from_client) {
                assert_eq!(segment.start, end, "{name}");
                end += segment.len;
            }
            assert_eq!(end, stream.len(), "{name}");
        }
    }
}

#[test]
fn startup_frames_of_the_captures() {
    let capture = pcap::load("02-rping-crc-p2p-rtrwrite");
    let [Some(client), Some(server)] = sides(&capture) else { panic!("two frames") };
    let offer = Enhanced { peer_to_peer: true, rtr_send: false, ird: 1, rtr_write: true, rtr_read: true, ord: 1 };
    assert_eq!(client.enhanced, Some(offer));
    assert_eq!(server.enhanced, Some(Enhanced { rtr_read: false, ..offer }));

    let capture = pcap::load("09-userspace-to-siw-mpa-v1");
    let [Some(client), Some(server)] = sides(&capture) else { panic!("two frames") };
    assert_eq!([client, server].map(|side| (side.startup.unwrap().revision, side.enhanced)), [(1, None); 2]);

    let capture = pcap::load("11-reject-with-private-data");
    let [Some(client), Some(server)] = sides(&capture) else { panic!("two frames") };
    assert_eq!(client.private_data, b"hello-from-client\0");
    assert_eq!((server.startup.unwrap().reject, server.private_data), (true, &b"no thanks\0"[..]));

    let capture = pcap::load("12-markers-requested-rejected");
    let [Some(client), Some(server)] = sides(&capture) else { panic!("two frames") };
    assert!(client.startup.unwrap().markers && server.startup.unwrap().reject);

    let capture = pcap::load("39-reply-markers-refused");
    assert!(sides(&capture)[1].as_ref().unwrap().startup.unwrap().markers);

    // The frame has a PD_Length of 0, although 4 + 252 octets follow.
    let capture = pcap::load("36-siw-bug-private-data-252");
    assert_eq!(capture.client_to_server.len(), STARTUP_HEADER_LEN + 256);
    let [Some(client), None] = sides(&capture) else { panic!("one frame") };
    assert_eq!(client.startup, Err(StartupError::EnhancedTooShort(0)));
}

#[test]
fn terminates_of_the_captures() {
    use TerminateCause as Cause;
    let expected = [
        ("20-term-write-bad-stag", Cause::DDP_TAGGED_INVALID_STAG, None, Some(64)),
        ("21-term-write-out-of-bounds", Cause::DDP_TAGGED_BOUNDS, None, Some(64)),
        ("22-term-read-bad-stag", Cause::RDMAP_INVALID_STAG, None, Some(0)),
        ("24-term-send-too-long", Cause::DDP_UNTAGGED_NO_BUFFER, None, Some(200)),
        ("25-send-invalidate-then-write", Cause::DDP_TAGGED_INVALID_STAG, None, Some(64)),
        ("26-term-bad-crc", Cause::LLP_CRC, Some(Cause { layer: Layer::Rdmap, etype: 2, code: 2 }), None),
        // The control word is in siw's bit order and quotes no header, and it has a meaning in both bit orders. The
        // meaning in the RFC's order comes first.
        ("27-term-unknown-opcode", Cause::LLP_IRD, Some(Cause::RDMAP_OPCODE), None),
        ("29-term-ird-exceeded", Cause::RDMAP_STREAM_CATASTROPHIC, None, Some(0)),
        ("30-term-insufficient-ird-3fff", Cause::RDMAP_OPCODE, Some(Cause::LLP_IRD), None),
        (
            "40-userspace-sends-terminate",
            Cause { layer: Layer::Rdmap, etype: 2, code: 0 },
            Some(Cause { layer: Layer::Llp, etype: 0, code: 0 }),
            None,
        ),
    ];
    let all = pcap::all();
    let mut seen = Vec::new();
    for (name, capture) in &all {
        for side in sides(capture).into_iter().flatten() {
            for fpdu in side.fpdus.into_iter().flatten() {
                if let Some(terminate) = fpdu.terminate {
                    assert_eq!(fpdu.header, SegmentHeader::Untagged(Untagged::TERMINATE), "{name}");
                    let length = terminate.quote.map(|quote| quote.segment_len());
                    seen.push((name.as_str(), terminate.cause, terminate.other_reading, length));
                }
            }
        }
    }
    assert_eq!(seen, expected);
}

/// The quote in a Terminate begins like the quoted segment. siw corrupts some of the later bytes.
#[test]
fn quotes_of_the_captures() {
    for (name, ddp, read) in [
        ("20-term-write-bad-stag", 14, false),
        ("22-term-read-bad-stag", 18, true),
        ("24-term-send-too-long", 18, false),
    ] {
        let capture = pcap::load(name);
        let [Some(client), Some(server)] = sides(&capture) else { panic!("two sides") };
        let quote = server.fpdus[0].as_ref().unwrap().terminate.unwrap().quote.unwrap();
        let sent = client.fpdus.last().unwrap().as_ref().unwrap();
        assert_eq!((quote.ddp_header().len(), quote.read_request().is_some()), (ddp, read), "{name}");
        assert_eq!(quote.read_request(), sent.read_request, "{name}");
        let start = sent.emit(false);
        assert_eq!(quote.ddp_header()[..10], start[2..12], "{name}");
    }
}

#[test]
fn crc_vectors() {
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    let zeros = "00".repeat(24);
    for (covered, crc) in [
        // Figure 5 of RFC 5044, which has a marker at its beginning.
        (format!("00000000 002a4143 00000000 00000000 00000001 00000000 {zeros}"), "52239983"),
        (format!("002a4143 00000000 00000000 00000001 00000000 {zeros}"), "b7243ec3"),
        // Figure 6 of RFC 5044, which has a marker in the middle.
        (format!("002a4143 00000000 00000000 00000002 00000000 00000014 {zeros}"), "84925898"),
    ] {
        let covered = hex(&covered);
        assert_eq!(crc32c(&covered).to_le_bytes()[..], hex(crc)[..]);
        for split in 0..=covered.len() {
            let mut running = Crc32c::new();
            running.update(&covered[..split]);
            running.update(&covered[split..]);
            assert_eq!(running.finish().to_le_bytes()[..], hex(crc)[..]);
        }
    }
}

#[test]
fn whole_frames_from_fields() {
    let send = |opcode, msn| {
        SegmentHeader::Untagged(Untagged { last: true, opcode, reserved_or_stag: 0, queue: 0, msn, offset: 0 })
    };
    let tagged = |opcode, stag, offset| SegmentHeader::Tagged(Tagged { last: true, opcode, stag, offset });
    for (header, payload, want) in [
        (
            send(Opcode::Send, 1),
            &[0; 24][..],
            format!("002a4143 00000000 00000000 00000001 00000000 {} b7243ec3", "00".repeat(24)),
        ),
        (tagged(Opcode::Write, 1, 0), &[][..], "000ec140 00000001 0000000000000000 ebd34c5f".into()),
        (
            send(Opcode::Send, 1),
            &[0, 1, 2, 3, 4][..],
            "00174143 00000000 00000000 00000001 00000000 0001020304 000000 8cc20490".into(),
        ),
        (send(Opcode::Send, 3), &[][..], "00124143 00000000 00000000 00000003 00000000 00a4cab4".into()),
        (
            tagged(Opcode::ReadResponse, 0x00ab_cd00, 0x1000),
            &b"WRITTEN!"[..],
            "0016c142 00abcd00 0000000000001000 5752495454454e21 5dac6bef".into(),
        ),
    ] {
        let len = payload.len() + if matches!(header, SegmentHeader::Tagged(_)) { 14 } else { 18 };
        let fpdu = Fpdu {
            header,
            read_request: None,
            terminate: None,
            payload,
            pad: &[0; 3][..pad_len(len)],
            crc: [0; CRC_LEN],
            crc_good: false,
        };
        let want = hex(&want);
        assert_eq!(fpdu.emit(true), want);
        let parsed = Fpdu::parse(&want).unwrap();
        assert!(parsed.crc_good);
        assert_eq!((parsed.header, parsed.payload), (header, payload));
    }
}

/// The CRC detects each flipped bit of each short frame in the recordings with CRCs.
#[test]
fn every_flipped_bit_of_a_capture_is_caught() {
    let mut frames = 0;
    for (_, capture) in pcap::all() {
        let sides = sides(&capture);
        if !crc_in_use(&sides) {
            continue;
        }
        for fpdu in sides.iter().flatten().flat_map(|side| &side.fpdus).flatten().filter(|fpdu| fpdu.crc_good) {
            let mut bytes = fpdu.emit(true);
            if bytes.len() > 200 {
                continue;
            }
            frames += 1;
            for bit in 0..bytes.len() * 8 {
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert!(!crc_holds(&bytes), "bit {bit} of {fpdu:?}");
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            assert!(crc_holds(&bytes));
        }
    }
    assert!(frames > 20, "{frames}");
}

/// Returns true if the CRC of a complete frame is correct.
fn crc_holds(fpdu: &[u8]) -> bool {
    let (covered, crc) = fpdu.split_at(fpdu.len() - CRC_LEN);
    crc32c(covered).to_le_bytes() == crc
}

proptest! {
    #[test]
    fn any_frame_survives_and_any_flipped_bit_is_caught(
        op in 0u8..7, last: bool, words: [u32; 4], source: u64, payload in prop::collection::vec(any::<u8>(), 0..1500),
        flip in any::<prop::sample::Index>(),
    ) {
        let opcode = Opcode::from_raw(op);
        let [word, queue, msn, offset] = words;
        let header = if opcode.is_tagged() {
            SegmentHeader::Tagged(Tagged { last, opcode, stag: word, offset: source })
        } else {
            SegmentHeader::Untagged(Untagged { last, opcode, reserved_or_stag: word, queue, msn, offset })
        };
        let read_request = (opcode == Opcode::ReadRequest).then_some(ReadRequest {
            sink_stag: queue, sink_offset: !source, size: msn, source_stag: offset, source_offset: source,
        });
        let payload = if read_request.is_some() { &[][..] } else { &payload };
        let overhead = match header {
            _ if read_request.is_some() => READ_REQUEST_FPDU_HEADER_LEN,
            SegmentHeader::Tagged(_) => TAGGED_FPDU_HEADER_LEN,
            SegmentHeader::Untagged(_) => UNTAGGED_FPDU_HEADER_LEN,
        } - 2;
        let pad = &[0; 3][..pad_len(overhead + payload.len())];
        let sent = Fpdu { header, read_request, terminate: None, payload, pad, crc: [0; 4], crc_good: true };
        let mut bytes = sent.emit(true);
        let got = Fpdu::parse(&bytes).unwrap();
        prop_assert!(got.crc_good);
        prop_assert_eq!((got.header, got.read_request, got.payload, got.pad), (header, read_request, payload, pad));
        let bit = flip.index(bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(!crc_holds(&bytes));
    }
}
