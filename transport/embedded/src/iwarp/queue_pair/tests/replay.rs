//! Replays recorded connections between kernel peers, octet by octet. Each connection is replayed twice: this provider replaces the server,
//! then the client.

#[allow(dead_code, unreachable_pub, missing_docs)]
mod pcap;

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::super::startup::{FrameReader, Judgement, StartupTerms, Verdict, judge_reply, judge_request};
use super::super::super::wire::ddp::{TAGGED_FPDU_HEADER_LEN, UNTAGGED_FPDU_HEADER_LEN};
use super::super::super::wire::mpa::fpdu_len;
use super::super::super::wire::{Enhanced, ReadRequest, SegmentHeader, StartupHeader, StartupKind};
use super::*;
use crate::soft::outstanding::OutstandingRequest;
use crate::test_memory::TestMemory;
use pcap::Capture;
use rdma_transport::mem::Sge;
use rdma_transport::mr::Access;

/// The end of a stream, as seen by this provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamOutcome {
    /// The stream ends without a Terminate.
    Good,
    /// This provider sends this Terminate.
    Refused(TerminateCause),
    /// The recorded peer has sent this Terminate.
    Told(TerminateCause),
    /// The handshake fails, so no connection is established.
    NoStartup,
}
use StreamOutcome::{Good, NoStartup, Refused, Told};
use TerminateCause as Cause;

/// For each capture: its name, the outcome if this provider is the server, and the outcome if it is the client.
///
/// In some captures, this provider behaves differently from the kernel. The numbers in parentheses are the numbers of these captures. This
/// provider refuses a Send that is too long with the code of RFC 5041 (24). It accepts 0x3fff in a reply as RFC 6581 defines it (30). It
/// accepts FPDUs that arrive in one read with a startup frame (31, 32). It refuses a Read of a region that may not be read (34).
const OUTCOMES: &[(&str, StreamOutcome, StreamOutcome)] = &[
    ("01-rping-nocrc", Good, Good),
    ("02-rping-crc-p2p-rtrwrite", Good, Good),
    ("03-siw-siw-all-ops-mss1448", Good, Good),
    ("04-siw-to-userspace-all-ops-crc", Good, Good),
    ("06-userspace-to-siw-crc-send-write-read", Good, Good),
    ("07-userspace-to-siw-p2p-rtr-write", Good, Good),
    ("09-userspace-to-siw-mpa-v1", Good, Good),
    ("10-siw-to-userspace-all-ops-nocrc", Good, Good),
    ("11-reject-with-private-data", Good, NoStartup),
    ("12-markers-requested-rejected", NoStartup, NoStartup),
    ("20-term-write-bad-stag", Refused(Cause::DDP_TAGGED_INVALID_STAG), Told(Cause::DDP_TAGGED_INVALID_STAG)),
    ("21-term-write-out-of-bounds", Refused(Cause::DDP_TAGGED_BOUNDS), Told(Cause::DDP_TAGGED_BOUNDS)),
    ("22-term-read-bad-stag", Refused(Cause::RDMAP_INVALID_STAG), Told(Cause::RDMAP_INVALID_STAG)),
    ("24-term-send-too-long", Refused(Cause::DDP_UNTAGGED_TOO_LONG), Told(Cause::DDP_UNTAGGED_NO_BUFFER)),
    ("25-send-invalidate-then-write", Refused(Cause::DDP_TAGGED_INVALID_STAG), Told(Cause::DDP_TAGGED_INVALID_STAG)),
    ("26-term-bad-crc", Refused(Cause::LLP_CRC), Told(Cause::LLP_CRC)),
    ("27-term-unknown-opcode", Refused(Cause::RDMAP_OPCODE), Told(Cause::LLP_IRD)),
    ("29-term-ird-exceeded", Refused(Cause::RDMAP_STREAM_CATASTROPHIC), Told(Cause::RDMAP_STREAM_CATASTROPHIC)),
    ("30-term-insufficient-ird-3fff", Told(Cause::RDMAP_OPCODE), Good),
    ("31-reply-plus-fpdu-coalesced-fails", Good, Good),
    ("32-request-plus-fpdu-coalesced-fails", Good, NoStartup),
    // siw responds to a Read of length 0 with the STag of an earlier Read. This STag does not match the request.
    ("33-siw-bug-zero-length-read-stale-length", Good, Refused(Cause::DDP_TAGGED_INVALID_STAG)),
    ("34-siw-bug-read-without-remote-read", Refused(Cause::RDMAP_ACCESS), Good),
    ("35-siw-bug-ord-rounded-up", Good, Good),
    ("36-siw-bug-private-data-252", NoStartup, NoStartup),
    ("38-abrupt-exit", Good, Good),
    ("39-reply-markers-refused", Good, NoStartup),
    ("40-userspace-sends-terminate", Told(Cause { layer: Layer::Rdmap, etype: 2, code: 0 }), Good),
    ("41-siw-bug-small-read-page-cross-corrupt", Good, Good),
];

/// Returns the startup frame of a stream, and the offset in the stream at which the FPDUs begin. Returns `None` if the frame is invalid.
fn startup(stream: &[u8], kind: StartupKind) -> Option<(StartupHeader, Option<Enhanced>, usize)> {
    let mut reader = FrameReader::new(kind);
    let mut at = 0;
    while at < stream.len() {
        reader.space()[0] = stream[at];
        at += 1;
        if let Some(header) = reader.filled(1).ok()? {
            return Some((header, reader.body().0, at));
        }
    }
    None
}

/// Returns the FPDUs of a stream. For each FPDU: its offset, its header, its Read Request (`None` if the FPDU is not a Read Request), and
/// its payload.
fn fpdus(stream: &[u8]) -> Vec<(usize, SegmentHeader, Option<ReadRequest>, &[u8])> {
    let mut out = Vec::new();
    let mut at = 0;
    while at + 4 <= stream.len() {
        let ulpdu = usize::from(u16::from_be_bytes([stream[at], stream[at + 1]]));
        let fpdu = &stream[at..at + fpdu_len(ulpdu)];
        if let Ok(header) = SegmentHeader::parse(fpdu) {
            let len = match header {
                SegmentHeader::Tagged(_) => TAGGED_FPDU_HEADER_LEN,
                SegmentHeader::Untagged(_) => UNTAGGED_FPDU_HEADER_LEN,
            };
            let payload = &fpdu[len..2 + ulpdu];
            let read = payload.first_chunk().filter(|_| header.opcode() == Opcode::ReadRequest);
            out.push((at, header, read.map(ReadRequest::parse), payload));
        }
        at += fpdu.len();
    }
    out
}

/// Returns the regions of one side that the two streams access. For each STag: the lowest accessed offset, and the end of the highest
/// access. `incoming` is the stream to the owner of the regions, and `own` is the stream from the owner.
fn regions(incoming: &[u8], own: &[u8]) -> BTreeMap<u32, (u64, u64)> {
    let mut spans = BTreeMap::new();
    let mut add = |stag, from: u64, len: usize| {
        if len > 0 {
            let span = spans.entry(stag).or_insert((from, from));
            *span = (span.0.min(from), span.1.max(from + len as u64));
        }
    };
    for (_, header, read, payload) in fpdus(incoming) {
        match (header, read) {
            (SegmentHeader::Tagged(tagged), _) if tagged.opcode == Opcode::Write => {
                add(tagged.stag, tagged.offset, payload.len());
            }
            (_, Some(read)) => add(read.source_stag, read.source_offset, read.size as usize),
            _ => {}
        }
    }
    for (_, _, read, _) in fpdus(own) {
        if let Some(read) = read {
            add(read.sink_stag, read.sink_offset, read.size as usize);
        }
    }
    spans
}

/// Returns the payloads of the Read Responses in a stream. The segments of each response are joined.
fn answers(stream: &[u8]) -> Vec<Vec<u8>> {
    let mut out = vec![Vec::new()];
    for (_, header, _, payload) in fpdus(stream) {
        if header.opcode() == Opcode::ReadResponse {
            out.last_mut().unwrap().extend_from_slice(payload);
            if header.last() {
                out.push(Vec::new());
            }
        }
    }
    out.pop();
    out
}

/// Replays a capture with this provider as one of the peers. The recorded bytes arrive in pieces of at most `cut` bytes.
fn play(name: &str, capture: &Capture, as_server: bool, cut: usize) -> StreamOutcome {
    let (incoming, own) = match as_server {
        true => (&capture.client_to_server, &capture.server_to_client),
        false => (&capture.server_to_client, &capture.client_to_server),
    };
    let terms = StartupTerms::new(false, 8, 8, false);
    let (kind, other) = match as_server {
        true => (StartupKind::Request, StartupKind::Reply),
        false => (StartupKind::Reply, StartupKind::Request),
    };
    let Some((header, enhanced, begin)) = startup(incoming, kind) else { return NoStartup };
    let mine = startup(own, other);
    let acceptable = match as_server {
        true => matches!(judge_request(&header, enhanced, false), Judgement::Acceptable(_)),
        false => matches!(judge_reply(&terms, &header, enhanced), Verdict::Accepted(_)),
    };
    if !acceptable {
        return NoStartup;
    }
    let crc = header.crc || mine.is_some_and(|(header, _, _)| header.crc);
    let ird = mine.and_then(|(_, enhanced, _)| enhanced).map_or(8, |enhanced| enhanced.ird.min(128));
    let role = if as_server { Role::Responder } else { Role::Initiator };
    let mut end = TestQueuePair::new(role, Agreement { crc, ird, ord: 64, rtr: None, markers: false }, 1448);
    end.qp.tx.release();
    let own_fpdus = &own[mine.map_or(own.len(), |(_, _, begin)| begin)..];
    let quoted = |number: &str| name.starts_with(number);
    let mut areas = BTreeMap::new();
    for (stag, (from, to)) in regions(&incoming[begin..], own_fpdus) {
        // In captures 20 and 22, the server did not have the region that the peer accessed. In capture 21, its region was one byte too
        // short.
        if as_server && (quoted("20") || quoted("22")) {
            continue;
        }
        let len = (to - from) as usize - usize::from(as_server && quoted("21"));
        let memory = Arc::new(Memory::new(len).unwrap());
        let mut access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        access.set(Access::REMOTE_READ, !(as_server && quoted("34")));
        end.resources.keys.register_at(&memory, from, len, access, stag);
        areas.insert(stag, (from, memory));
    }
    let inbox = Memory::new(32 * 4096).unwrap();
    for wr_id in 0..32 {
        let len = if quoted("24") { 100 } else { 4096 };
        end.recv(wr_id, SgeList::one(inbox.sge(wr_id as usize * 4096, len)));
    }
    let recorded = answers(own_fpdus);
    let (mut reads, mut given, mut requested, mut wire) = (fpdus(&incoming[begin..]), 0, 0, Vec::new());
    reads.retain(|fpdu| fpdu.2.is_some());
    for segment in &capture.segments {
        let (start, stop) = (segment.start, segment.start + segment.len);
        if segment.from_client != as_server {
            // Add the Read Requests that the recorded local peer sent in this segment as
            // outstanding, so that this provider accepts their responses.
            for (at, _, read, _) in fpdus(own_fpdus) {
                let at = at + own.len() - own_fpdus.len();
                if let Some(read) = read.filter(|_| (start..stop).contains(&at)) {
                    let (stag, offset, len) = (read.sink_stag, read.sink_offset, read.size);
                    let request = OutstandingRequest::new(Sge::default(), len, false, None);
                    end.qp.tx.sends.outstanding.push(OutstandingRequest { stag, offset, ..request });
                    requested += 1;
                }
            }
            continue;
        }
        for piece in incoming[start.max(begin).min(stop)..stop].chunks(cut) {
            match end.deliver(piece) {
                Ok(()) => {}
                Err(Fault::Violation(cause, _)) => return Refused(cause),
                Err(Fault::Terminated(terminate)) => return Told(terminate.unwrap().cause),
                Err(other) => panic!("{name}: {other:?}"),
            }
        }
        // Write the recorded response into the region, so that this provider responds with the same bytes as the kernel.
        while let Some(read) = reads.get(given).and_then(|fpdu| fpdu.2).filter(|_| reads[given].0 + begin < stop) {
            if let (Some(answer), Some((from, memory))) = (recorded.get(given), areas.get(&read.source_stag)) {
                if answer.len() == read.size as usize {
                    memory.write((read.source_offset - from) as usize, answer);
                }
            }
            given += 1;
            // In capture 29, the peer exceeds the IRD and gets no response.
            if !quoted("29") {
                wire.extend(end.take_wire());
            }
        }
    }
    assert!(end.qp.is_at_boundary() || quoted("33"), "{name}");
    let sizes: Vec<_> = reads.iter().take(given).map(|fpdu| fpdu.2.unwrap().size as usize).collect();
    let ours = answers(&wire);
    assert_eq!(ours.iter().map(Vec::len).collect::<Vec<_>>(), sizes, "{name}");
    if !["33", "35", "41"].iter().any(|bug| quoted(bug)) {
        assert_eq!(ours, recorded, "{name}");
    }
    let sends = fpdus(&incoming[begin..]).iter().filter(|fpdu| fpdu.1.opcode().is_send() && fpdu.1.last()).count();
    let done = end.done();
    assert_eq!(done.len(), sends, "{name}");
    assert!(done.iter().all(|wc| wc.status == WcStatus::Success), "{name}");
    assert!(requested == 0 || !end.qp.has_outstanding() || quoted("35"), "{name}");
    Good
}

#[test]
fn every_capture_as_either_side() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/src/iwarp/queue_pair/tests/replay/captures");
    let mut names: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().to_str()?.strip_suffix(".pcap").map(str::to_owned))
        .collect();
    names.sort();
    assert_eq!(names, OUTCOMES.iter().map(|row| row.0).collect::<Vec<_>>());
    for (name, as_server, as_client) in OUTCOMES {
        let bytes = std::fs::read(format!("{directory}/{name}.pcap")).unwrap();
        let capture = pcap::parse(&bytes).unwrap();
        for cut in [usize::MAX, 1, 7, 1000] {
            assert_eq!(play(name, &capture, true, cut), *as_server, "{name} as server, cut at {cut}");
            assert_eq!(play(name, &capture, false, cut), *as_client, "{name} as client, cut at {cut}");
        }
    }
}
