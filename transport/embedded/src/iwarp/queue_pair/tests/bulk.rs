//! Tests of large payloads, which are received directly into their destination without a copy.

use super::operations::Pair;
use super::*;
use crate::test_memory::TestMemory;
use rdma_transport::mr::Access;

const SEGMENT: usize = 65_483;
/// The largest number of octets that the first receive call copies. This call has no plan, because no segment has arrived from which the
/// next ones could be predicted.
const FIRST: usize = 256 * 1024;

/// Delivers `bytes` to `end`, as [`received`] does. Returns the number of octets that the provider has copied.
fn copied(end: &mut TestQueuePair, bytes: &[u8], room: usize, most: usize) -> usize {
    received(end, bytes, room, most).0
}

/// Delivers `bytes` to `end`. Each receive call may receive up to `room` octets, but the socket returns at most `most` octets per call.
/// Returns the number of octets that the provider has copied, and the number of receive calls.
fn received(end: &mut TestQueuePair, mut bytes: &[u8], room: usize, most: usize) -> (usize, usize) {
    let (mut copied, mut calls) = (0, 0);
    let TestQueuePair { qp, resources, intake, .. } = end;
    while !bytes.is_empty() {
        let received = qp.receive(intake, room, &resources.keys, &mut |slices| {
            let offered: usize = slices.iter().map(RecvSlice::len).sum();
            assert!(offered <= room + SEGMENT, "a call may receive {offered} octets");
            let mut now = &bytes[..bytes.len().min(most)];
            let before = now.len();
            for slice in slices {
                now = &now[slice.fill(now)..];
            }
            Ok(before - now.len())
        });
        let n = received.unwrap().0;
        assert!(n > 0, "there is room in each call");
        calls += 1;
        copied += intake.staged(n);
        bytes = &bytes[n..];
        qp.input(intake, n, resources).unwrap();
        copied += intake.spilled();
    }
    (copied, calls)
}

/// Sends messages of these sizes to receives of `room` bytes each, and checks the received bytes. Returns the number of octets that the
/// provider has copied.
fn sends(sizes: &[usize], crc: bool, room: usize, most: usize) -> usize {
    let wire = stream(sizes, crc, SEGMENT, 1, usize::MAX);
    let mut receiver = TestQueuePair::new(Role::Responder, agreement(crc, Some(ReadyToReceive::Write)), 1448);
    // Between the receives in memory there are 8 bytes that must not change.
    let stride = room + 8;
    let memory = Memory::new(stride * sizes.len()).unwrap();
    memory.write(0, &vec![0xc5; stride * sizes.len()]);
    for index in 0..sizes.len() {
        receiver.recv(index as u64, SgeList::one(memory.sge(index * stride, room)));
    }
    let copied = copied(&mut receiver, &wire, 504 * 1024, most);
    let done = receiver.done();
    assert_eq!(done.len(), sizes.len());
    for (index, wc) in done.iter().enumerate() {
        assert_eq!((wc.wr_id, wc.status, wc.byte_len as usize), (index as u64, WcStatus::Success, sizes[index]));
        assert!(memory.read(index * stride, sizes[index]) == pattern(sizes[index], index), "message {index}");
        assert!(memory.read(index * stride + room, 8).iter().all(|&byte| byte == 0xc5), "behind receive {index}");
    }
    copied
}

#[test]
fn equal_messages_are_copied_by_the_system_only() {
    for crc in [true, false] {
        for most in [usize::MAX, 1 << 20, 300_001, 65_536] {
            for (len, count) in [((1 << 20) + 8, 8), (65_544, 60), (8_200, 60)] {
                let copied = sends(&vec![len; count], crc, len, most);
                let frames = count * len.div_ceil(SEGMENT - 24);
                assert!(copied <= FIRST + frames * 28, "{copied} octets of {count} x {len}, {most} at a time");
            }
        }
    }
}

/// The next segment differs from the forecast: it has another length or another kind, or a message is shorter than its receive. The
/// messages still arrive correctly.
#[test]
fn a_wrong_forecast_changes_nothing() {
    let sizes =
        [200_000, 65_536, 200_000, 3, 150_000, 0, 65_459, 65_460, 131_000, 300, 70_000, 20, 199_999, 9_000, 8_999];
    for crc in [true, false] {
        for most in [usize::MAX, 100_000, 65_500, 9_001, 1_000] {
            sends(&sizes, crc, 200_000, most);
        }
    }
}

/// After a Write, no destination is planned. The octets behind the Write must not be received into the region of the Write.
#[test]
fn what_follows_a_write_stays_out_of_its_region() {
    for crc in [true, false] {
        let mut pair = Pair::new(agreement(crc, None), SEGMENT);
        let target = pair.b.area(1 << 20, Access::REMOTE, 7);
        let (source, inbox) = (Memory::new(1 << 20).unwrap(), Memory::new(1 << 20).unwrap());
        source.write(0, &pattern(1 << 20, 1));
        pair.b.recv(0, SgeList::one(inbox.sge(0, 1 << 20)));
        for (wr_id, len) in [(1, 100_000), (2, 300_000)] {
            let sges = SgeList::one(source.sge(0, len));
            pair.a.post(wr_id, SendOp::Write(target.remote(500)), sges, SendFlags::SIGNALED).unwrap();
        }
        let sges = SgeList::one(source.sge(0, 200_000));
        pair.a.post(3, SendOp::Send, sges, SendFlags::SIGNALED).unwrap();
        let wire = pair.a.take_wire();
        let copied = copied(&mut pair.b, &wire, 504 * 1024, usize::MAX);
        // The payload of the Send is copied, because another Write was expected. With a CRC, the payloads of Writes are copied, too.
        assert!(crc || copied <= FIRST + 200_000 + 20 * 28, "{copied} octets");
        let bytes = target.bytes();
        assert!(bytes[500..300_500] == pattern(1 << 20, 1)[..300_000]);
        assert!(bytes[..500].iter().chain(&bytes[300_500..]).all(|&byte| byte == 0) && target.canaries());
        assert!(inbox.read(0, 200_000) == pattern(1 << 20, 1)[..200_000]);
    }
}

/// A Write of 64 KiB has a long segment and a short one. One receive call receives the rest of the long one, the short one, and the header
/// of the next Write.
#[test]
fn a_write_with_a_short_rest_is_received_in_one_call() {
    const WRITES: usize = 40;
    let mut pair = Pair::new(agreement(false, None), SEGMENT);
    let target = pair.b.area(1 << 16, Access::REMOTE, 7);
    let source = Memory::new(1 << 16).unwrap();
    source.write(0, &pattern(1 << 16, 1));
    let mut wire = Vec::new();
    for wr_id in 0..WRITES as u64 {
        let sges = SgeList::one(source.sge(0, 1 << 16));
        pair.a.post(wr_id, SendOp::Write(target.remote(0)), sges, SendFlags::SIGNALED).unwrap();
        wire.extend(pair.a.take_wire());
    }
    let (copied, calls) = received(&mut pair.b, &wire, 504 * 1024, usize::MAX);
    assert!(calls <= WRITES, "{calls} calls");
    assert!(copied <= FIRST + WRITES * 128, "{copied} octets");
    assert!(target.bytes() == pattern(1 << 16, 1) && target.canaries());
}

#[test]
fn answers_to_reads_are_copied_by_the_system_only() {
    for crc in [true, false] {
        let mut pair = Pair::new(Agreement { ird: 16, ord: 16, ..agreement(crc, None) }, SEGMENT);
        let source = pair.b.area(1 << 20, Access::REMOTE, 8);
        source.write(0, &pattern(1 << 20, 2));
        // The Reads do not use the sinks in the order of their addresses.
        let sinks: Vec<_> = (0..5).map(|n| pair.a.area(1 << 20, Access::LOCAL_WRITE, 20 + n)).collect();
        for (wr_id, sink) in [0, 2, 1, 4, 3].into_iter().enumerate() {
            let (wr_id, len) = (wr_id as u64, (1 << 20) - sink * 1000);
            let op = SendOp::Read(source.remote(0));
            pair.a.post(wr_id, op, sinks[sink].sge(0, len), SendFlags::SIGNALED).unwrap();
        }
        let requests = pair.a.take_wire();
        pair.b.deliver(&requests).unwrap();
        let answers = pair.b.take_wire();
        let copied = copied(&mut pair.a, &answers, 504 * 1024, usize::MAX);
        assert!(copied <= FIRST + 85 * 24, "{copied} octets");
        assert_eq!(pair.a.done().len(), 5);
        for (nth, sink) in sinks.iter().enumerate() {
            let (bytes, len) = (sink.bytes(), (1 << 20) - nth * 1000);
            assert!(bytes[..len] == pattern(1 << 20, 2)[..len] && bytes[len..].iter().all(|&byte| byte == 0));
            assert!(sink.canaries());
        }
    }
}

/// Without a CRC, the response to a Read is sent from its region without a copy. TCP accepts only a
/// part of the response before the region is overwritten and revoked. The peer still receives the
/// original bytes.
#[test]
fn what_tcp_has_not_taken_of_a_region_is_sent_when_that_is_gone() {
    for part in [1, 500, 66_000, 150_000] {
        let mut pair = Pair::new(agreement(false, None), SEGMENT);
        let (source, sink) = (pair.b.area(200_000, Access::REMOTE, 8), pair.a.area(200_000, Access::LOCAL_WRITE, 20));
        source.write(0, &pattern(200_000, 3));
        pair.a.post(0, SendOp::Read(source.remote(0)), sink.sge(0, 200_000), SendFlags::SIGNALED).unwrap();
        let request = pair.a.take_wire();
        pair.b.deliver(&request).unwrap();
        let TestQueuePair { qp, resources, wire, .. } = &mut pair.b;
        let mut calls = 0;
        let sent = qp.transmit(
            &mut |bufs| {
                calls += 1;
                assert!(bufs.len() > 4, "headers and payloads lie apart");
                let mut room = part;
                for buf in bufs {
                    room -= buf.append_to(wire, room);
                }
                Ok(wire.len())
            },
            resources,
        );
        assert_eq!((sent.unwrap(), calls), (Sent::Blocked, 1));
        source.write(0, &[0xee; 200_000]);
        resources.keys.deregister(source.id).unwrap();
        let mut answer = std::mem::take(&mut pair.b.wire);
        answer.extend(pair.b.take_wire());
        pair.a.deliver(&answer).unwrap();
        assert!(pair.a.done().iter().all(|wc| wc.status == WcStatus::Success) && !pair.a.qp.has_outstanding());
        assert!(sink.bytes() == pattern(200_000, 3), "{part} at first");
    }
}

/// An atomic operation follows a Read of the same memory. The response to the Read has the old bytes, although both responses are sent in
/// one call.
#[test]
fn an_atomic_operation_waits_for_the_answer_in_front_of_it() {
    let mut pair = Pair::new(agreement(false, None), SEGMENT);
    pair.a.qp.extensions = true;
    pair.b.qp.extensions = true;
    let (word, sink) = (pair.b.area(4096, Access::REMOTE, 8), pair.a.area(8192, Access::LOCAL_WRITE, 20));
    pair.a.post(0, SendOp::Read(word.remote(0)), sink.sge(0, 4096), SendFlags::SIGNALED).unwrap();
    let add = SendOp::FetchAdd { remote: word.remote(0), add: u64::MAX };
    pair.a.post(1, add, sink.sge(4096, 8), SendFlags::SIGNALED).unwrap();
    pair.settle().unwrap();
    assert_eq!(pair.a.done().len(), 2);
    assert_eq!((sink.bytes()[..4096].to_vec(), word.bytes()[..8].to_vec()), (vec![0; 4096], vec![255; 8]));
}

/// The octets of a damaged frame may be placed in the receive, but the receive does not complete.
#[test]
fn a_damaged_frame_among_many_completes_nothing() {
    let sizes = [200_000; 4];
    let wire = stream(&sizes, true, SEGMENT, 1, usize::MAX);
    for at in [250_000, 350_000, 420_000, 599_999, 650_000] {
        let mut damaged = wire.clone();
        damaged[at] ^= 1;
        let mut receiver = TestQueuePair::new(Role::Responder, agreement(true, Some(ReadyToReceive::Write)), 1448);
        let memory = Memory::new(4 * 200_000).unwrap();
        for index in 0..4 {
            receiver.recv(index as u64, SgeList::one(memory.sge(index * 200_000, 200_000)));
        }
        // The first call delivers enough segments for a forecast. The later receive calls are planned.
        let fault = receiver.deliver(&damaged[..100_000]).and_then(|()| receiver.deliver(&damaged[100_000..]));
        assert!(matches!(fault, Err(Fault::Violation(TerminateCause::LLP_CRC, _))), "{fault:?}");
        let done = receiver.done();
        assert!(done.iter().all(|wc| wc.status == WcStatus::Success) && done.len() == at / 200_100);
    }
}

/// If TCP accepts nothing, framing stops when a little more than 512 KiB wait for TCP. With
/// markers, each payload is copied, and framing stops earlier.
#[test]
fn what_tcp_does_not_take_is_limited() {
    for (markers, most) in [(false, (512 + 260) << 10), (true, 260 << 10)] {
        let mut pair = Pair::new(Agreement { markers, ..agreement(false, None) }, SEGMENT);
        let source = Memory::new(1 << 20).unwrap();
        for wr_id in 0..60 {
            pair.a.post(wr_id, SendOp::Send, SgeList::one(source.sge(0, 1 << 20)), SendFlags::SIGNALED).unwrap();
        }
        let TestQueuePair { qp, resources, .. } = &mut pair.a;
        for _ in 0..10 {
            let mut offered = Vec::new();
            let sent = qp.transmit(
                &mut |slices| {
                    slices.iter().for_each(|slice| _ = slice.append_to(&mut offered, usize::MAX));
                    Err(io::ErrorKind::WouldBlock.into())
                },
                resources,
            );
            assert_eq!(sent.unwrap(), Sent::Blocked);
            assert!((1 << 17..=most).contains(&offered.len()), "{} bytes, markers: {markers}", offered.len());
        }
    }
}

/// With a CRC, a Write that arrives in pieces is held segment by segment. So a buffer of 64 KiB
/// suffices for a Write of any length.
#[test]
fn a_write_is_held_in_64_kib() {
    let mut pair = Pair::new(agreement(true, None), SEGMENT);
    let target = pair.b.area(1 << 20, Access::REMOTE, 7);
    let source = Memory::new(1 << 20).unwrap();
    source.write(0, &pattern(1 << 20, 1));
    let op = SendOp::Write(target.remote(0));
    pair.a.post(1, op, SgeList::one(source.sge(0, 1 << 20)), SendFlags::SIGNALED).unwrap();
    let wire = pair.a.take_wire();
    for piece in wire.chunks(1000) {
        pair.b.deliver(piece).unwrap();
        assert!(pair.b.qp.rx.held().len() <= 1 << 16);
    }
    assert!(target.bytes() == pattern(1 << 20, 1) && target.canaries() && !pair.b.qp.rx.held().is_empty());
}
