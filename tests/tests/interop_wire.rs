//! The embedded provider against peers that violate the protocol, byte by byte over TCP. The provider must answer with
//! the Terminate of the RFCs, change nothing outside of the peer's regions, and serve the next peer as usual.

use std::time::Duration;

use rdma_reactor_tests::peer::{
    MARGIN, Peer, Region, SEND, Target, fpdu_read, fpdu_tagged, fpdu_untagged, plain, request, seal,
};
use rdma_transport::{Access, CmEventKind, DisconnectCause, Provider, WcStatus};
use rdma_transport_embedded::iwarp::wire::{Opcode, ReadRequest, Tagged, Terminate, TerminateCause as Cause, Untagged};
use rdma_transport_embedded::iwarp::{TcpConfig, TcpNet};

const REMOTE: Access = Access::REMOTE;

fn write(region: &Region, offset: u64, payload: &[u8], crc: bool) -> Vec<u8> {
    let header = Tagged { last: true, opcode: Opcode::Write, stag: region.stag, offset };
    fpdu_tagged(&header, payload, crc)
}

fn read(region: &Region, offset: u64, size: u32) -> ReadRequest {
    ReadRequest { sink_stag: 7, sink_offset: 0x1000, size, source_stag: region.stag, source_offset: offset }
}

/// Sends `octets` to a new connection, once as a whole and once byte by byte. Checks that the peer gets a Terminate with the cause `want`,
/// that the program's event names the same cause, and that the memory of `region` is unchanged.
#[track_caller]
fn expect(target: &mut Target, region: &Region, receives: usize, crc: bool, octets: &[u8], want: Cause) {
    let before = target.inspect(region);
    for step in [octets.len(), 1] {
        let mut peer = target.connect(receives, crc);
        for chunk in octets.chunks(step) {
            peer.send(chunk);
            target.turn();
        }
        assert_eq!(peer.terminated(target), want);
        let id = peer.id;
        let cause = target.until("disconnect", |target| {
            let at = target.events.iter().position(|event| Some(event.id) == id)?;
            match target.events.remove(at).kind {
                CmEventKind::Disconnected(cause) => Some(cause),
                other => panic!("{other:?}"),
            }
        });
        assert_eq!(cause, DisconnectCause::PeerViolation(want.to_string()));
        assert!(target.completions().iter().all(|wc| wc.status == WcStatus::Flushed));
        target.iwarp.destroy_id(id.unwrap(), target.now).unwrap();
        assert_eq!(target.inspect(region), before, "memory was touched");
    }
}

fn target() -> (Target, Region) {
    let mut target = Target::new(plain());
    let region = target.region(1000, REMOTE);
    (target, region)
}

#[test]
fn what_it_takes_when_all_is_well() {
    for crc in [true, false] {
        let mut target = Target::new(plain());
        let region = target.region(1000, REMOTE);
        let mut peer = target.connect(2, crc);
        peer.send(&write(&region, region.base + 10, &[7; 990], crc));
        peer.send(&fpdu_untagged(&SEND, b"", crc));
        target.until("receive", |target| target.completions().iter().any(|wc| wc.status.is_success()).then_some(()));
        peer.send(&fpdu_read(1, &read(&region, region.base, 1000), crc));
        let answer = peer.fpdu(&mut target);
        assert_eq!((&answer[16..26], &answer[26..1016]), (&[0; 10][..], &[7; 990][..]));
        peer.finish(&mut target);
        let memory = target.inspect(&region);
        assert!(memory[..MARGIN].iter().chain(&memory[MARGIN + 1000..]).all(|&byte| byte == 0));
    }
}

/// Row 47 of `docs/reliability.md`. A peer sends more messages than receives are posted.
#[test]
fn more_sends_than_receives() {
    let (mut target, region) = target();
    expect(&mut target, &region, 0, false, &fpdu_untagged(&SEND, b"", false), Cause::DDP_UNTAGGED_NO_BUFFER);
}

/// Row 51 of `docs/reliability.md`. A peer sends a message that is longer than the receive into which it is placed.
#[test]
fn a_send_that_is_too_long() {
    let (mut target, region) = target();
    expect(&mut target, &region, 1, true, &fpdu_untagged(&SEND, b"x", true), Cause::DDP_UNTAGGED_TOO_LONG);
    let begun = Untagged { last: false, ..SEND };
    expect(&mut target, &region, 1, false, &fpdu_untagged(&begun, &[1; 9000], false), Cause::DDP_UNTAGGED_TOO_LONG);
}

/// Row 52 of `docs/reliability.md`. A peer sends part after part of a message, and none of them is the last one. The parts together may not
/// exceed the receive, and each part must begin at the offset at which the previous one ended.
#[test]
fn a_message_that_never_ends() {
    let (mut target, region) = target();
    let begun = Untagged { last: false, ..SEND };
    let mut octets = fpdu_untagged(&begun, b"", false).repeat(1000);
    octets.extend(fpdu_untagged(&Untagged { offset: 1, ..begun }, b"", false));
    expect(&mut target, &region, 1, false, &octets, Cause::INVALID_MO);
}

/// Row 53 of `docs/reliability.md`. Unknown opcodes and versions are faults. Reserved bits are ignored.
#[test]
fn headers_that_are_unknown() {
    let (mut target, region) = target();
    let cases: [(usize, u8, Cause); 6] = [
        (3, 0x4c, Cause::RDMAP_OPCODE),
        (3, 0x4f, Cause::RDMAP_OPCODE),
        (3, 0x83, Cause::RDMAP_VERSION),
        (3, 0x03, Cause::RDMAP_VERSION),
        (2, 0x42, Cause::DDP_UNTAGGED_VERSION),
        (2, 0xc2, Cause::DDP_TAGGED_VERSION),
    ];
    for (at, value, want) in cases {
        for crc in [true, false] {
            let mut fpdu = fpdu_untagged(&SEND, b"", crc);
            fpdu[at] = value;
            fpdu.truncate(20);
            expect(&mut target, &region, 1, crc, &seal(fpdu, crc), want);
        }
    }
    let mut peer = target.connect(1, false);
    let mut fpdu = fpdu_untagged(&SEND, b"", false);
    fpdu[2] |= 0x3c;
    fpdu[3] |= 0x30;
    fpdu[4..8].fill(0xff);
    peer.send(&fpdu);
    target.until("receive", |target| target.completions().first().map(|wc| assert!(wc.status.is_success())));
    peer.finish(&mut target);
}

/// Row 54 of `docs/reliability.md`. A peer that requests Reads and never reads the answers from its socket costs a bounded amount of
/// memory, and affects no other peer.
#[test]
fn a_peer_that_asks_and_never_reads() {
    let mut target = Target::new(plain());
    let region = target.region(8 << 20, REMOTE);
    let mut peer = target.connect(0, false);
    for msn in 1..=4 {
        peer.send(&fpdu_read(msn, &read(&region, region.base, 8 << 20), false));
    }
    for _ in 0..1000 {
        target.turn();
    }
    // The answers wait in the provider, and another peer is served meanwhile.
    let other = target.region(16, REMOTE);
    let memory = target.inspect(&other);
    assert_eq!(memory.len(), target.inspect(&other).len());
    // The agreed depth is 64 outstanding Reads. The provider accepts one more, and then ends the connection.
    for msn in 5..=68 {
        peer.send(&fpdu_read(msn, &read(&region, region.base, 1), false));
    }
    let id = peer.id;
    let cause = target.until("disconnect", |target| {
        let at = target.events.iter().position(|event| Some(event.id) == id)?;
        Some(format!("{:?}", target.events.remove(at).kind))
    });
    assert!(cause.contains(&Cause::RDMAP_STREAM_CATASTROPHIC.to_string()), "{cause}");
}

/// Row 55 of `docs/reliability.md`. A startup frame arrives byte by byte. The connection is closed at the time limit of the handshake.
#[test]
fn slow_handshakes_have_an_end() {
    let (mut target, region) = target();
    let mut peer = Peer::open(target.address, false);
    // The time limit begins when the provider accepts the connection.
    target.until("a deadline of the handshake", |target| target.iwarp.next_deadline());
    for octet in request(&[0x10, 2, 0, 4]) {
        peer.send(&[octet]);
        target.now += Duration::from_millis(300);
        target.turn();
    }
    peer.ended(&mut target);
    assert!(target.events.is_empty());
    target.inspect(&region);
}

/// Row 56 of `docs/reliability.md`. A guessed STag ends the connection.
#[test]
fn guesses() {
    let (mut target, region) = target();
    for guess in [0, 1, 2, region.stag ^ 1, region.stag.wrapping_add(256), u32::MAX] {
        let wrong = Region { stag: guess, ..region };
        expect(&mut target, &region, 0, true, &write(&wrong, region.base, b"x", true), Cause::DDP_TAGGED_INVALID_STAG);
        let octets = fpdu_read(1, &read(&wrong, region.base, 1), false);
        expect(&mut target, &region, 0, false, &octets, Cause::RDMAP_INVALID_STAG);
    }
}

/// Row 57 of `docs/reliability.md`. A peer's Writes and Reads exceed a region, by one byte up to the largest possible distance.
#[test]
fn out_of_bounds() {
    let (mut target, region) = target();
    for (offset, len) in [
        (region.base - 1, 1),
        (region.base - 1, 2),
        (region.base + 1000, 1),
        (region.base + 999, 2),
        (region.base, 1001),
        (0, 1),
        (u64::MAX >> 1, 1000),
    ] {
        for crc in [true, false] {
            let octets = write(&region, offset, &vec![0xee; len], crc);
            expect(&mut target, &region, 0, crc, &octets, Cause::DDP_TAGGED_BOUNDS);
        }
        let octets = fpdu_read(1, &read(&region, offset, len as u32), false);
        expect(&mut target, &region, 0, false, &octets, Cause::RDMAP_BOUNDS);
    }
    let octets = fpdu_read(1, &read(&region, region.base, u32::MAX), false);
    expect(&mut target, &region, 0, false, &octets, Cause::RDMAP_BOUNDS);
}

/// The sum of a Write's offset and its length wraps around (a CVE of rxe).
#[test]
fn cve_2026_98365_address_wrap() {
    let (mut target, region) = target();
    for offset in [u64::MAX, u64::MAX - 7, u64::MAX - 14] {
        expect(&mut target, &region, 0, true, &write(&region, offset, &[1; 15], true), Cause::DDP_TAGGED_TO_WRAP);
        expect(&mut target, &region, 0, false, &fpdu_read(1, &read(&region, offset, 15), false), Cause::RDMAP_TO_WRAP);
    }
}

/// Row 57 of `docs/reliability.md`. A peer uses the STag of a region that it may not access, because the region does not allow this kind of
/// access, is restricted to another peer, is invalidated, or is deregistered.
#[test]
fn regions_that_are_not_the_peers() {
    let mut target = Target::new(plain());
    let region = target.region(1000, REMOTE);
    let local = target.region(1000, Access::LOCAL_WRITE);
    let readable = target.region(1000, Access::REMOTE_READ);
    let writable = target.region(1000, Access::REMOTE_WRITE);
    let other = target.region(1000, REMOTE);
    let friend = target.connect(0, false);
    target.iwarp.remote_keys().unwrap().restrict(other.inner.id, rdma_transport::QpId(friend.id.unwrap().0)).unwrap();
    let revoked = target.region(1000, REMOTE);
    target.iwarp.remote_keys().unwrap().invalidate(revoked.inner.id).unwrap();
    let gone = target.region(1000, REMOTE);
    target.iwarp.deregister(gone.inner.id).unwrap();
    for (at, read_cause) in [
        (&local, Cause::RDMAP_INVALID_STAG),
        (&other, Cause::RDMAP_INVALID_STAG),
        (&revoked, Cause::RDMAP_INVALID_STAG),
        (&gone, Cause::RDMAP_INVALID_STAG),
        (&writable, Cause::RDMAP_ACCESS),
    ] {
        expect(&mut target, at, 0, false, &fpdu_read(1, &read(at, at.base, 8), false), read_cause);
        if read_cause == Cause::RDMAP_INVALID_STAG {
            expect(&mut target, at, 0, true, &write(at, at.base, b"x", true), Cause::DDP_TAGGED_INVALID_STAG);
        }
    }
    expect(
        &mut target,
        &readable,
        0,
        true,
        &write(&readable, readable.base, b"x", true),
        Cause::DDP_TAGGED_INVALID_STAG,
    );
    let take = Untagged { opcode: Opcode::SendInvalidate, reserved_or_stag: other.stag, ..SEND };
    expect(&mut target, &region, 1, true, &fpdu_untagged(&take, b"", true), Cause::RDMAP_CANNOT_INVALIDATE);
}

/// Row 58 of `docs/reliability.md`. A region is deregistered after the first part of a Write to this region has arrived, and before the
/// rest.
#[test]
fn a_region_gone_under_a_write() {
    for crc in [true, false] {
        for cut in [1, 10, 16, 500, 900] {
            let (mut target, _) = target();
            let region = target.region(1000, REMOTE);
            let octets = write(&region, region.base, &[0xee; 1000], crc);
            let mut peer = target.connect(0, crc);
            peer.send(&octets[..cut]);
            for _ in 0..20 {
                target.turn();
            }
            target.iwarp.deregister(region.inner.id).unwrap();
            let before = target.inspect(&region);
            // Without CRCs, the part of the Write that arrived before the deregistration may be placed. With CRCs, a Write of one frame is
            // placed as a whole or not at all.
            assert!(!crc || before.iter().all(|&byte| byte == 0));
            peer.send(&octets[cut..]);
            assert_eq!(peer.terminated(&mut target), Cause::DDP_TAGGED_INVALID_STAG, "{cut}");
            target.events.clear();
            assert_eq!(target.inspect(&region), before, "{cut}: touched after it was taken back");
        }
    }
}

/// Row 59 of `docs/reliability.md`. A peer writes memory while it reads the same memory. The read data are a mixture of old and new bytes,
/// but all frames and CRCs are correct.
#[test]
fn a_region_written_while_it_is_read() {
    let mut target = Target::new(plain());
    let region = target.region(400_000, REMOTE);
    let mut peer = target.connect(0, true);
    for round in 1..=4 {
        peer.send(&fpdu_read(round, &read(&region, region.base, 400_000), true));
        for part in 0..10 {
            peer.send(&write(&region, region.base + part * 40_000, &[round as u8; 40_000], true));
        }
        let mut left = 400_000;
        while left > 0 {
            // `Peer::fpdu` checks the CRC of the frame.
            let fpdu = peer.fpdu(&mut target);
            let len = usize::from(u16::from_be_bytes([fpdu[0], fpdu[1]])) - 14;
            assert!(fpdu[16..16 + len].iter().all(|&byte| u32::from(byte) == round || u32::from(byte) == round - 1));
            left -= len;
        }
    }
    peer.finish(&mut target);
}

/// Row 68 of `docs/reliability.md`. The provider's socket accepts few bytes at a time. The frames that the provider sends must still arrive
/// whole, and must not be mixed.
#[test]
fn short_writes() {
    let mut settings = TcpConfig::default();
    settings.send_buffer = Some(4096);
    let mut target = Target::on(plain(), TcpNet::with_config(settings).unwrap());
    let region = target.region(200_000, REMOTE);
    let mut peer = target.connect(0, true);
    let content: Vec<u8> = (0..200_000_u32).map(|at| ((at * 7) >> 3) as u8).collect();
    for (part, octets) in content.chunks(40_000).enumerate() {
        peer.send(&write(&region, region.base + part as u64 * 40_000, octets, true));
        for _ in 0..10 {
            target.turn();
        }
    }
    for msn in 1..=8 {
        peer.send(&fpdu_read(msn, &read(&region, region.base, 200_000), true));
    }
    for _ in 0..8 {
        let mut got = Vec::new();
        while got.len() < content.len() {
            let fpdu = peer.fpdu(&mut target);
            let len = usize::from(u16::from_be_bytes([fpdu[0], fpdu[1]])) - 14;
            got.extend_from_slice(&fpdu[16..16 + len]);
        }
        assert!(got == content);
    }
    peer.finish(&mut target);
}

/// Row 60 of `docs/reliability.md`. The startup frame of a peer has each possible fault. The provider closes the connection, and no other
/// peer is affected.
#[test]
fn cve_2026_74345_malformed_mpa() {
    let (mut target, region) = target();
    let frames: Vec<Vec<u8>> = vec![
        b"MPA ID Rep Frame\x10\x02\0\x04\0\0\0\0".to_vec(),
        b"MPA ID Req Frbme\x10\x02\0\x04\0\0\0\0".to_vec(),
        request(&[0x10, 2, 0, 0]),
        request(&[0x10, 2, 0, 3, 1, 2, 3]),
        request(&[0x10, 2, 2, 1]),
        request(&[0x10, 2, 0xff, 0xff]),
        request(&[0x10, 3, 0, 4, 0, 0, 0, 0]),
        request(&[0x10, 255, 0, 4, 0, 0, 0, 0]),
        request(&[0x30, 2, 0, 4, 0, 0, 0, 0]),
    ];
    for frame in &frames {
        for step in [frame.len(), 1] {
            let mut peer = Peer::open(target.address, false);
            for chunk in frame.chunks(step) {
                peer.send(chunk);
                target.turn();
            }
            peer.ended(&mut target);
            assert!(target.events.is_empty(), "{frame:?}");
        }
    }
    // The peer closes its socket after any part of a valid request.
    let whole = request(&[0x10, 2, 0, 6, 0, 1, 0, 1, 1, 2]);
    for len in 0..whole.len() {
        let mut peer = Peer::open(target.address, false);
        peer.send(&whole[..len]);
        target.turn();
        drop(peer);
        target.turn();
    }
    target.now += Duration::from_secs(6);
    target.inspect(&region);
    // The first frame of the stream arrives in the same TCP segment as the request.
    let mut peer = Peer::open(target.address, false);
    peer.send(&[request(&[0x10, 2, 0, 4, 0, 1, 0, 1]), fpdu_untagged(&SEND, b"", false)].concat());
    let id = target.offered();
    target.accept(id, 1);
    target.until("receive", |target| target.completions().first().map(|wc| assert!(wc.status.is_success())));
}

/// Row 61 of `docs/reliability.md`. A peer sends frames whose length field is smaller than the header that their opcode requires.
#[test]
fn cve_2026_64102_length_underflow() {
    let (mut target, region) = target();
    for (ddp, rdmap, least) in
        [(0xc1, 0x40, 14), (0xc1, 0x42, 14), (0x41, 0x41, 46), (0x41, 0x43, 18), (0x41, 0x47, 22)]
    {
        for len in [0, 1, 2, 3, least - 1] {
            for crc in [true, false] {
                let mut fpdu = vec![0; 2 + len];
                fpdu[1] = len as u8;
                if len >= 2 {
                    fpdu[2..4].copy_from_slice(&[ddp, rdmap]);
                }
                expect(&mut target, &region, 1, crc, &seal(fpdu, crc), Cause::LLP_FPDU_LENGTH);
            }
        }
    }
    let mut fpdu = fpdu_read(1, &read(&region, region.base, 1), false);
    fpdu[1] += 1;
    fpdu.truncate(48);
    fpdu.push(0);
    expect(&mut target, &region, 1, false, &seal(fpdu, false), Cause::DDP_UNTAGGED_TOO_LONG);
}

/// A frame has up to three bytes of padding, with any content. The provider ignores the padding, and never takes it for payload.
#[test]
fn cve_2026_46043_pad_underflow() {
    let (mut target, region) = target();
    let mut peer = target.connect(0, false);
    let mut octets = Vec::new();
    for len in 1..=9 {
        let mut fpdu = write(&region, region.base + 100, &vec![len as u8; len], false);
        let pad = 16 + len..fpdu.len() - 4;
        fpdu[pad].fill(0xff);
        octets.extend(fpdu);
    }
    peer.send(&octets);
    peer.send(&fpdu_read(1, &read(&region, region.base + 99, 12), false));
    let answer = peer.fpdu(&mut target);
    assert_eq!(answer[16..28], [0, 9, 9, 9, 9, 9, 9, 9, 9, 9, 0, 0]);
}

/// Row 62 of `docs/reliability.md`. A stream is cut into two TCP segments at any position, also within a header.
#[test]
fn cve_2026_98323_split_header() {
    for crc in [true, false] {
        let mut target = Target::new(plain());
        let region = target.region(1000, REMOTE);
        let octets = [
            write(&region, region.base, b"first", crc),
            fpdu_read(1, &read(&region, region.base, 5), crc),
            fpdu_untagged(&SEND, b"", crc),
        ]
        .concat();
        for cut in 1..octets.len() {
            let mut peer = target.connect(1, crc);
            peer.send(&octets[..cut]);
            for _ in 0..3 {
                target.turn();
            }
            peer.send(&octets[cut..]);
            assert_eq!(peer.fpdu(&mut target)[16..21], *b"first", "{cut}");
            target.until("receive", |target| target.completions().first().map(|wc| assert!(wc.status.is_success())));
            peer.finish(&mut target);
        }
    }
}

/// Row 63 of `docs/reliability.md`. A peer sends responses without a request, messages that begin in the middle, and messages to a wrong
/// queue.
#[test]
fn cve_2026_23242_opcode_before_context() {
    let (mut target, region) = target();
    let response = Tagged { last: true, opcode: Opcode::ReadResponse, stag: region.stag, offset: region.base };
    let cases = [
        (fpdu_tagged(&response, b"answer", true), Cause::DDP_LOCAL_CATASTROPHIC),
        (fpdu_tagged(&response, b"", true), Cause::DDP_LOCAL_CATASTROPHIC),
        (fpdu_untagged(&Untagged { offset: 1424, ..SEND }, b"", true), Cause::INVALID_MO),
        (fpdu_untagged(&Untagged { msn: 0, ..SEND }, b"", true), Cause::INVALID_MSN),
        (fpdu_untagged(&Untagged { msn: 2, ..SEND }, b"", true), Cause::INVALID_MSN),
        (fpdu_untagged(&Untagged { queue: 1, ..SEND }, b"", true), Cause::INVALID_QN),
        (fpdu_untagged(&Untagged { opcode: Opcode::Immediate, ..SEND }, &[0; 8], true), Cause::RDMAP_OPCODE),
        (
            fpdu_untagged(&Untagged { opcode: Opcode::AtomicRequest, queue: 1, ..SEND }, &[0; 52], true),
            Cause::RDMAP_OPCODE,
        ),
        (
            fpdu_untagged(&Untagged { opcode: Opcode::AtomicResponse, queue: 3, ..SEND }, &[0; 12], true),
            Cause::RDMAP_OPCODE,
        ),
    ];
    for (octets, want) in cases {
        expect(&mut target, &region, 1, true, &octets, want);
    }
}

/// Row 64 of `docs/reliability.md`. A Read response without a request is a fault, even if the response names memory that the peer may
/// write.
#[test]
fn cve_2026_64268_read_response_unasked() {
    let (mut target, region) = target();
    for len in [1, 1000, 1001, 60_000] {
        let header = Tagged { last: true, opcode: Opcode::ReadResponse, stag: region.stag, offset: region.base };
        let octets = fpdu_tagged(&header, &vec![0xee; len], true);
        expect(&mut target, &region, 0, true, &octets, Cause::DDP_LOCAL_CATASTROPHIC);
    }
}

/// Row 65 of `docs/reliability.md`. If any byte of a Write with a CRC is damaged, the Write changes no memory.
#[test]
fn damaged_octets() {
    let (mut target, region) = target();
    let whole = write(&region, region.base, &[0xee; 100], true);
    // The length is not damaged, because a larger length only makes an incomplete frame.
    for at in (2..whole.len()).step_by(7) {
        let mut octets = whole.clone();
        octets[at] ^= 0x10;
        expect(&mut target, &region, 0, true, &octets, Cause::LLP_CRC);
    }
}

/// Row 66 of `docs/reliability.md`. A peer sends wrong sequence numbers, a Read request without the Last flag or at a wrong offset, and a
/// Read request to a wrong queue.
#[test]
fn sequences_and_depths() {
    let (mut target, region) = target();
    let request = |msn| fpdu_read(msn, &read(&region, region.base, 1000), true);
    expect(&mut target, &region, 0, true, &request(2), Cause::INVALID_MSN);
    let part = Untagged { opcode: Opcode::ReadRequest, queue: 1, last: false, ..SEND };
    let octets = fpdu_untagged(&part, &read(&region, region.base, 1).emit(), true);
    expect(&mut target, &region, 0, true, &octets, Cause::DDP_UNTAGGED_TOO_LONG);
    let moved = Untagged { opcode: Opcode::ReadRequest, queue: 1, offset: 4, ..SEND };
    let octets = fpdu_untagged(&moved, &read(&region, region.base, 1).emit(), true);
    expect(&mut target, &region, 0, true, &octets, Cause::INVALID_MO);
    let elsewhere = Untagged { opcode: Opcode::ReadRequest, queue: 0, ..SEND };
    let octets = fpdu_untagged(&elsewhere, &read(&region, region.base, 1).emit(), true);
    expect(&mut target, &region, 0, true, &octets, Cause::INVALID_QN);
    // The STag and the offset of a Read or Write of zero bytes must not be checked.
    let nowhere = Region { stag: 5, base: 3, ..region };
    let mut peer = target.connect(3, true);
    for _ in 0..3 {
        peer.send(&write(&nowhere, 1, b"", true));
    }
    peer.send(&fpdu_read(1, &read(&nowhere, 1, 0), true));
    assert_eq!(peer.fpdu(&mut target).len(), 20);
    for msn in 1..=3 {
        peer.send(&fpdu_untagged(&Untagged { msn, ..SEND }, b"", true));
    }
    let mut done = 0;
    target.until("receives", |target| {
        done += target.completions().len();
        (done == 3).then_some(())
    });
    peer.finish(&mut target);
}

/// Row 67 of `docs/reliability.md`. Both sides end the connection at the same time, in every order. The program gets exactly one event.
#[test]
fn terminates_and_ends_in_any_order() {
    let (mut target, region) = target();
    let terminate = |raw: [u8; 4]| fpdu_untagged(&Untagged::TERMINATE, &raw, false);
    let wrong = fpdu_untagged(&Untagged { msn: 9, ..SEND }, b"", false);
    for (octets, words) in [
        ([terminate([0x11, 0, 0, 0]), terminate([0x11, 0, 0, 0])].concat(), "terminated by the peer"),
        ([terminate([0x10, 5, 7, 0]), wrong.clone()].concat(), "terminated by the peer"),
        ([wrong.clone(), terminate([0x11, 0, 0, 0])].concat(), "broke the protocol"),
        ([wrong.clone(), wrong.clone(), vec![0xff; 5000]].concat(), "broke the protocol"),
        (wrong[..10].to_vec(), "closed by the peer"),
        (Vec::new(), "closed by the peer"),
    ] {
        let mut peer = target.connect(1, false);
        let id = peer.id.unwrap();
        peer.send(&octets);
        drop(peer);
        let cause = target.until("disconnect", |target| {
            let at = target.events.iter().position(|event| event.id == id)?;
            match target.events.remove(at).kind {
                CmEventKind::Disconnected(cause) => Some(cause.to_string()),
                other => panic!("{other:?}"),
            }
        });
        assert!(cause.contains(words), "{cause}");
        for _ in 0..100 {
            target.turn();
        }
        assert!(target.events.is_empty(), "once");
        target.completions();
        target.iwarp.destroy_id(id, target.now).unwrap();
    }
    target.inspect(&region);
}

/// The layer and the flags of a Terminate are read in the bit order of siw and in that of the RFC.
#[test]
fn terminates_of_siw_and_of_the_rfc() {
    for raw in [[0x11, 1, 0xc0, 0], [0x11, 1, 3, 0]] {
        let quoted = [&raw[..], &[0, 14], &[0xc1, 0x40], &[0; 12]].concat();
        let parsed = Terminate::parse(&quoted).unwrap();
        assert_eq!((parsed.cause, parsed.other_reading), (Cause::DDP_TAGGED_BOUNDS, None));
        let (mut target, _) = target();
        let mut peer = target.connect(0, false);
        peer.send(&fpdu_untagged(&Untagged::TERMINATE, &quoted, false));
        let event = target.event();
        let CmEventKind::Disconnected(DisconnectCause::TerminatedByPeer(what)) = event.kind else {
            panic!("{event:?}")
        };
        assert!(what.contains("Base or bounds"), "{what}");
    }
}
