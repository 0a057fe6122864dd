//! Compares the answers of the embedded provider and of the kernel's `siw` to bytes that violate a rule.
//!
//! The embedded provider must answer as the RFCs say. The expected answers of `siw` are listed as well, because peers
//! in the field get them, and the list shows how they differ from the RFCs. None of these bytes harms `siw`. Two MPA
//! replies would harm it as an initiator: one with a length above 256, and an enhanced one without the four bytes of
//! its enhanced block. They are not sent.
//!
//! These tests need a `siw` device; `make test-rdma-full` creates one.
#![cfg(feature = "verbs")]
#![allow(clippy::disallowed_methods, reason = "the kernel keeps its own time")]

mod target;

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::time::Instant;

use rdma_reactor_tests::peer::{SEND, fpdu_read, fpdu_tagged, fpdu_untagged, request, seal};
use rdma_transport::wr::RemoteAddress;
use rdma_transport::{RemoteKey, SendFlags, SendOp};
use rdma_transport_embedded::iwarp::wire::ddp::UNTAGGED_FPDU_HEADER_LEN;
use rdma_transport_embedded::iwarp::wire::{
    Opcode, ReadRequest, SegmentHeader, Tagged, TerminateCause as Cause, Untagged,
};
use target::{MEMORY, Outcome, PATIENCE, Target};

/// The expected answer of `siw` to a script of bytes.
#[derive(Clone, Copy, Debug)]
enum Siw {
    Does(Outcome),
    /// `siw` gives this answer, and has already placed the bytes that precede the fault.
    Parts(Outcome),
}

const fn told(control: u32) -> Siw {
    Siw::Does(Outcome::Terminate(control))
}

const fn told_late(control: u32) -> Siw {
    Siw::Parts(Outcome::Terminate(control))
}

const WAITS: Siw = Siw::Does(Outcome::Waits);
const CLOSES: Siw = Siw::Does(Outcome::Close);

struct Script {
    /// The number of the row in `docs/reliability.md` or of the CVE, and the fault.
    name: &'static str,
    receives: usize,
    crc: bool,
    octets: Vec<u8>,
    ours: Cause,
    siw: Siw,
}

fn write(at: RemoteAddress, payload: &[u8], crc: bool) -> Vec<u8> {
    fpdu_tagged(&Tagged { last: true, opcode: Opcode::Write, stag: at.key.0, offset: at.address }, payload, crc)
}

fn read_of(at: RemoteAddress, size: u32) -> ReadRequest {
    ReadRequest { sink_stag: 7, sink_offset: 0x1000, size, source_stag: at.key.0, source_offset: at.address }
}

/// Returns a frame with a correct trailer: the first 20 bytes of a Send, of which the byte at `at` is replaced by
/// `value`.
fn changed(at: usize, value: u8) -> Vec<u8> {
    let mut fpdu = fpdu_untagged(&SEND, b"", false);
    fpdu[at] = value;
    fpdu.truncate(20);
    seal(fpdu, false)
}

/// Returns a frame whose length field is smaller than its header.
fn short(ddp: u8, rdmap: u8, len: usize) -> Vec<u8> {
    let mut fpdu = vec![0; 2 + len];
    fpdu[1] = len as u8;
    if len >= 2 {
        fpdu[2..4].copy_from_slice(&[ddp, rdmap]);
    }
    seal(fpdu, false)
}

/// Returns a script for each rule that a peer can violate by the bytes that it sends. `base` is the beginning of the
/// target's memory.
fn scripts(base: RemoteAddress) -> Vec<Script> {
    let script = |name, octets, ours, siw| Script { name, receives: 1, crc: false, octets, ours, siw };
    let at = |offset: i64| RemoteAddress { address: base.address.wrapping_add_signed(offset), ..base };
    let end = MEMORY as i64;
    let stranger = RemoteAddress { key: RemoteKey(base.key.0 ^ 0x5a5a_5a00), ..base };
    let wrong_key = RemoteAddress { key: RemoteKey(base.key.0 ^ 0x5a), ..base };
    let wrap = RemoteAddress { address: u64::MAX - 7, ..base };
    let send = |header: Untagged, payload: &[u8]| fpdu_untagged(&header, payload, false);
    let begun = Untagged { last: false, ..SEND };
    let response = |payload: &[u8]| {
        let header = Tagged { last: true, opcode: Opcode::ReadResponse, stag: base.key.0, offset: base.address };
        fpdu_tagged(&header, payload, false)
    };
    let request_part = Untagged { opcode: Opcode::ReadRequest, queue: 1, ..SEND };
    let one_octet = read_of(base, 1).emit();
    let mut endless = send(begun, b"").repeat(1000);
    endless.extend(send(Untagged { offset: 1, ..begun }, b""));
    let mut damaged = write(base, &[0xee; 100], true);
    damaged[50] ^= 0x10;
    let reads: Vec<u8> = (1..=40).flat_map(|msn| fpdu_read(msn, &read_of(base, MEMORY as u32), false)).collect();
    let extension = |opcode, queue, len| send(Untagged { opcode, queue, ..SEND }, &vec![0; len]);
    let none = |mut script: Script| {
        script.receives = 0;
        script
    };
    let checked = |mut script: Script| {
        script.crc = true;
        script
    };
    let invalidate = |stag| send(Untagged { opcode: Opcode::SendInvalidate, reserved_or_stag: stag, ..SEND }, b"");
    vec![
        none(script(
            "47 a message without a receive",
            send(SEND, b""),
            Cause::DDP_UNTAGGED_NO_BUFFER,
            told(0x2102_0300),
        )),
        // siw answers with the code for a missing receive, although there is a receive that is too short.
        script(
            "51 a message longer than its receive",
            send(SEND, b"x"),
            Cause::DDP_UNTAGGED_TOO_LONG,
            told(0x2102_0300),
        ),
        script("52 a message that never ends", endless, Cause::INVALID_MO, told(0x2104_0300)),
        script("53 an opcode of nobody's", changed(3, 0x4c), Cause::RDMAP_OPCODE, told(0x2006_0000)),
        script("53 an RDMAP version of nobody's", changed(3, 0x83), Cause::RDMAP_VERSION, told(0x2005_0000)),
        script("53 a DDP version of nobody's", changed(2, 0x42), Cause::DDP_UNTAGGED_VERSION, told(0x2106_0000)),
        script("54 more Reads than agreed, and none taken", reads, Cause::RDMAP_STREAM_CATASTROPHIC, told(0x2007_0300)),
        script(
            "56 a Write to a guess",
            write(stranger, b"x", false),
            Cause::DDP_TAGGED_INVALID_STAG,
            told(0x1100_0300),
        ),
        script(
            "56 a Write with a wrong key",
            write(wrong_key, b"x", false),
            Cause::DDP_TAGGED_INVALID_STAG,
            told(0x1100_0300),
        ),
        script(
            "56 a Read of a guess",
            fpdu_read(1, &read_of(stranger, 1), false),
            Cause::RDMAP_INVALID_STAG,
            told(0x1000_0700),
        ),
        script("57 a Write in front", write(at(-1), b"xx", false), Cause::DDP_TAGGED_BOUNDS, told(0x1101_0300)),
        script(
            "57 a Write across the end",
            write(at(end - 1), b"xx", false),
            Cause::DDP_TAGGED_BOUNDS,
            told_late(0x1101_0300),
        ),
        script("57 a Write behind", write(at(end), b"x", false), Cause::DDP_TAGGED_BOUNDS, told(0x1101_0300)),
        script(
            "57 a Read across the end",
            fpdu_read(1, &read_of(at(end - 1), 2), false),
            Cause::RDMAP_BOUNDS,
            told(0x1001_0700),
        ),
        script(
            "57 a Read of 4 GiB",
            fpdu_read(1, &read_of(base, u32::MAX), false),
            Cause::RDMAP_BOUNDS,
            told(0x1000_0700),
        ),
        script(
            "CVE-2026-98365 a Write that wraps",
            write(wrap, &[1; 15], false),
            Cause::DDP_TAGGED_TO_WRAP,
            told(0x0100_0300),
        ),
        script(
            "CVE-2026-98365 a Read that wraps",
            fpdu_read(1, &read_of(wrap, 15), false),
            Cause::RDMAP_TO_WRAP,
            CLOSES,
        ),
        script("CVE-2026-64102 a length of 0", short(0x41, 0x43, 0), Cause::LLP_FPDU_LENGTH, WAITS),
        script(
            "CVE-2026-64102 a Send below its header",
            short(0x41, 0x43, 17),
            Cause::LLP_FPDU_LENGTH,
            told(0x0203_0000),
        ),
        script(
            "CVE-2026-64102 a Write below its header",
            short(0xc1, 0x40, 13),
            Cause::LLP_FPDU_LENGTH,
            told(0x0203_0000),
        ),
        script(
            "CVE-2026-64102 a Read below its header",
            short(0x41, 0x41, 45),
            Cause::LLP_FPDU_LENGTH,
            told(0x0203_0000),
        ),
        script(
            "CVE-2026-23242 the rest of no message",
            send(Untagged { offset: 1424, ..SEND }, b""),
            Cause::INVALID_MO,
            told(0x2104_0300),
        ),
        script(
            "CVE-2026-23242 an answer to nothing",
            response(b"answer"),
            Cause::DDP_LOCAL_CATASTROPHIC,
            told(0x0100_0300),
        ),
        script(
            "CVE-2026-64268 a large answer to nothing",
            response(&[0xee; 60_000]),
            Cause::DDP_LOCAL_CATASTROPHIC,
            told(0x0100_0300),
        ),
        checked(script("65 a damaged Write", damaged, Cause::LLP_CRC, told_late(0x0202_0000))),
        script("66 a number skipped", send(Untagged { msn: 2, ..SEND }, b""), Cause::INVALID_MSN, told(0x2103_0300)),
        script("66 the number 0", send(Untagged { msn: 0, ..SEND }, b""), Cause::INVALID_MSN, told(0x2103_0300)),
        script(
            "66 a queue of another kind",
            send(Untagged { queue: 1, ..SEND }, b""),
            Cause::INVALID_QN,
            told(0x2101_0300),
        ),
        script(
            "66 a Read Request without its end",
            fpdu_untagged(&Untagged { last: false, ..request_part }, &one_octet, false),
            Cause::DDP_UNTAGGED_TOO_LONG,
            WAITS,
        ),
        script(
            "66 a Read Request elsewhere",
            fpdu_untagged(&Untagged { queue: 0, ..request_part }, &one_octet, false),
            Cause::INVALID_QN,
            WAITS,
        ),
        script(
            "66 a Read Request out of order",
            fpdu_read(2, &read_of(base, 1), false),
            Cause::INVALID_MSN,
            told(0x2103_0300),
        ),
        script(
            "immediate data without agreement",
            extension(Opcode::Immediate, 0, 8),
            Cause::RDMAP_OPCODE,
            told(0x2006_0000),
        ),
        script(
            "an atomic without agreement",
            extension(Opcode::AtomicRequest, 1, 52),
            Cause::RDMAP_OPCODE,
            told(0x2006_0000),
        ),
        script("a key to invalidate that is none", invalidate(stranger.key.0), Cause::RDMAP_CANNOT_INVALIDATE, WAITS),
    ]
}

/// Returns the upper half of the control word of a Terminate with this cause, in the layout of the RFC.
fn control(cause: Cause) -> u32 {
    u32::from(cause.layer.raw()) << 28 | u32::from(cause.etype) << 24 | u32::from(cause.code) << 16
}

#[test]
fn rules_broken() {
    let filter = std::env::var("MISBEHAVIOUR").unwrap_or_default();
    let (mut ours, mut siw) = (Target::ours(), Target::siw());
    for target in [&mut ours, &mut siw] {
        target.still_serves();
    }
    let (at_ours, at_siw) = (scripts(ours.end.remote(0)), scripts(siw.end.remote(0)));
    let mut wrong = Vec::new();
    println!("{:<44} {:<24} siw", "", "ours");
    for (script, same) in at_ours.into_iter().zip(at_siw) {
        if !script.name.contains(&filter) {
            continue;
        }
        let outcome = run(&mut ours, &script, false);
        let right = matches!(outcome, Outcome::Terminate(word) if word & 0xffff_0000 == control(script.ours));
        if !right {
            wrong.push(format!("{}: ours {outcome:x?}, not {:x?}", script.name, control(script.ours)));
        }
        print!("{:<44} {:<24} ", script.name, format!("{outcome:08x?}"));
        let (Siw::Does(want) | Siw::Parts(want)) = same.siw;
        let outcome = run(&mut siw, &same, true);
        println!("{outcome:08x?}");
        if outcome != want {
            wrong.push(format!("{}: siw {outcome:x?}, not {want:x?}", script.name));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Sends the bytes of a script to a target as a whole, and then byte by byte if the script is short. Returns the
/// outcome.
fn run(target: &mut Target, script: &Script, kernel: bool) -> Outcome {
    let mut outcomes = Vec::new();
    for step in [script.octets.len(), 1] {
        if step == 1 && (script.octets.len() > 200 || outcomes == [Outcome::Waits]) {
            continue;
        }
        let mut stream = target.connect(script.receives, script.crc);
        for chunk in script.octets.chunks(step) {
            // The write fails if the target has closed the connection already. This is expected.
            let _ = stream.write_all(chunk);
            target.end.turn();
        }
        outcomes.push(target.outcome(&mut stream));
        target.drop_connection();
        match script.siw {
            // siw checks a Write piecewise as it arrives, so the bytes before the fault are already
            // placed.
            Siw::Parts(_) if kernel => target.end.clear(0..MEMORY),
            _ => target.end.check_clear(0..MEMORY, script.name),
        }
    }
    target.still_serves();
    outcomes.dedup();
    // The answer of siw may depend on how the bytes are cut. The answer of the embedded provider must not.
    assert!(kernel || outcomes.len() == 1, "{}: cut into bytes it ends otherwise: {outcomes:x?}", script.name);
    outcomes[0]
}

/// Row 64 of `docs/reliability.md`. The peer answers a Read of 16 bytes with wrong responses.
#[test]
fn wrong_answers() {
    type Answer = fn(&ReadRequest) -> Vec<u8>;
    fn response(stag: u32, offset: u64, last: bool, len: usize) -> Vec<u8> {
        fpdu_tagged(&Tagged { last, opcode: Opcode::ReadResponse, stag, offset }, &vec![0xee; len], false)
    }
    let cases: [(&str, Answer, Cause, Siw); 5] = [
        (
            "64 an answer that is too long",
            |r| response(r.sink_stag, r.sink_offset, true, 17),
            Cause::DDP_TAGGED_BOUNDS,
            told(0x1101_0300),
        ),
        (
            "64 a far too long answer",
            |r| response(r.sink_stag, r.sink_offset, true, 60_000),
            Cause::DDP_TAGGED_BOUNDS,
            told(0x1101_0300),
        ),
        (
            "64 an answer to elsewhere",
            |r| response(r.sink_stag, r.sink_offset + 4096, true, 16),
            Cause::DDP_TAGGED_BOUNDS,
            told(0x1101_0300),
        ),
        (
            "64 an answer to another region",
            |r| response(r.sink_stag ^ 0x5a5a_5a00, r.sink_offset, true, 16),
            Cause::DDP_TAGGED_INVALID_STAG,
            told(0x1100_0300),
        ),
        (
            "64 an answer that is too short",
            |r| response(r.sink_stag, r.sink_offset, true, 8),
            Cause::RDMAP_STREAM_CATASTROPHIC,
            told(0x1101_0300),
        ),
    ];
    let (mut ours, mut siw) = (Target::ours(), Target::siw());
    let mut wrong = Vec::new();
    for (name, make, cause, at_siw) in cases {
        for (who, target) in [("ours", &mut ours), ("siw", &mut siw)] {
            let mut stream = target.connect(1, false);
            // The side that connects must send first.
            stream.write_all(&fpdu_untagged(&SEND, b"", false)).unwrap();
            target.until("message", |end| end.done.pop());
            let remote = RemoteAddress { address: 0x1000, key: RemoteKey(9) };
            target.end.post(5, SendOp::Read(remote), &[4096..4112], SendFlags::empty());
            let mut asked = [0; 52];
            target.read(&mut stream, &mut asked);
            let request = ReadRequest::parse(asked[20..48].try_into().unwrap());
            assert_eq!((request.size, request.source_stag, request.source_offset), (16, 9, 0x1000));
            let _ = stream.write_all(&make(&request));
            let outcome = target.outcome(&mut stream);
            target.drop_connection();
            // The response may have changed the memory of the Read, but nothing around it.
            target.end.check_clear(0..4096, name);
            target.end.check_clear(4112..MEMORY, name);
            target.end.clear(4096..4112);
            println!("{name:<44} {who} {outcome:08x?}");
            let right = match (who, at_siw) {
                ("ours", _) => matches!(outcome, Outcome::Terminate(word) if word & 0xffff_0000 == control(cause)),
                (_, Siw::Does(want) | Siw::Parts(want)) => outcome == want,
            };
            if !right {
                wrong.push(format!("{name}: {who} {outcome:x?}"));
            }
            target.still_serves();
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Rows 55 and 60 of `docs/reliability.md`. The peer sends startup frames that are wrong or cut short. Both providers
/// close the connection, and neither notifies its program.
#[test]
fn startup_frames() {
    let frames: Vec<(&str, Vec<u8>, bool)> = vec![
        ("60 a wrong key", b"MPA ID Req Frbme\x10\x02\0\x04\0\0\0\0".to_vec(), true),
        ("60 a reply", b"MPA ID Rep Frame\x10\x02\0\x04\0\0\0\0".to_vec(), true),
        ("60 revision 3", request(&[0x10, 3, 0, 4, 0, 0, 0, 0]), true),
        ("60 private data of 513", [request(&[0x10, 2, 2, 1]), vec![0; 513]].concat(), true),
        ("60 enhanced, without the room for it", request(&[0x10, 2, 0, 3, 1, 2, 3]), true),
        ("55 half a request", request(&[0x10, 2, 0, 4])[..12].to_vec(), true),
    ];
    for (who, mut target) in [("ours", Target::ours()), ("siw", Target::siw())] {
        for (name, frame, hangs_up) in &frames {
            let mut stream = TcpStream::connect(target.address).unwrap();
            stream.set_nonblocking(true).unwrap();
            let _ = stream.write_all(frame);
            let started = Instant::now();
            let outcome = target.outcome(&mut stream);
            println!("{name:<44} {who} {outcome:?} after {:?}", started.elapsed());
            assert_eq!((outcome, *hangs_up), (Outcome::Close, true), "{name}");
            assert!(started.elapsed() < PATIENCE, "{name}");
            assert!(target.end.events.is_empty(), "{name}: {:?}", target.end.events);
        }
        target.still_serves();
    }
}

/// The opcode of each message says if the message solicits an event. This matters to a peer that arms its completion
/// queue for solicited events only.
#[test]
fn solicited_events() {
    for (who, mut target) in [("ours", Target::ours()), ("siw", Target::siw())] {
        let mut stream = target.connect(1, false);
        // The accepting side may send only after the first message of its peer.
        stream.write_all(&fpdu_untagged(&SEND, b"", false)).unwrap();
        target.until("message", |end| end.done.pop());
        let wanted = [Opcode::Send, Opcode::SendSolicited, Opcode::Send];
        for (wr_id, opcode) in (1..).zip(wanted) {
            let flags = if opcode.solicited() { SendFlags::SOLICITED } else { SendFlags::empty() };
            target.end.post(wr_id, SendOp::Send, &[0..8], flags);
        }
        let mut got = wanted;
        for opcode in &mut got {
            let mut frame = [0; UNTAGGED_FPDU_HEADER_LEN + 8 + 4];
            target.read(&mut stream, &mut frame);
            *opcode = SegmentHeader::parse(&frame).unwrap().opcode();
        }
        assert_eq!(got, wanted, "{who}");
        drop(stream);
        target.drop_connection();
        target.still_serves();
    }
}

/// Row 67 of `docs/reliability.md`. The peer ends the connection in several ways, and the target closes without a
/// Terminate of its own.
#[test]
fn peers_that_give_up() {
    let terminate = fpdu_untagged(&Untagged::TERMINATE, &[0x11, 0, 0, 0], false);
    let part = fpdu_untagged(&SEND, b"", false)[..10].to_vec();
    let mut bad = Vec::new();
    for (who, mut target) in [("ours", Target::ours()), ("siw", Target::siw())] {
        for (name, octets) in [
            ("67 a Terminate", terminate.clone()),
            ("67 two Terminates", terminate.repeat(2)),
            ("67 a Terminate, and bytes without meaning", [&terminate[..], &[0xff; 3000]].concat()),
            ("67 the end in the middle of a frame", part.clone()),
            ("67 the end", Vec::new()),
        ] {
            let mut stream = target.connect(1, false);
            let _ = stream.write_all(&octets);
            let _ = stream.shutdown(Shutdown::Write);
            let outcome = target.outcome(&mut stream);
            println!("{name:<44} {who} {outcome:?}");
            if outcome != Outcome::Close {
                bad.push(format!("{name} {who} {outcome:x?}"));
            }
            target.drop_connection();
            target.still_serves();
        }
    }
    assert!(bad.is_empty(), "{bad:#?}");
}
