//! Cases: the roles, which not every provider has.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::harness::*;
use crate::cm::{CmEventKind, ConnectParam, DisconnectCause};
use crate::error::TransportError;
use crate::handle::{MrId, SrqId};
use crate::mem::Memory;
use crate::mr::Access;
use crate::qp::QpAttr;
use crate::srq::SrqAttr;
use crate::wc::WcStatus;
use crate::wr::{RemoteAddress, SendFlags, SendOp};

// Cases about shared receive queues.

/// The number of receives of a shared receive queue.
const SHARED: usize = 8;

/// A message consumes a shared receive. The completion names the queue pair that received the message. The entry of the
/// shared queue is free after the completion was polled.
pub(super) fn connections_share_receives(harness: &mut Harness) {
    let (srq, spec) = shared(harness);
    let pairs: Vec<_> = (0..3).map(|_| harness.pair_of(&Spec::default(), &spec)).collect();
    let passive = pairs[0][1];
    fill(harness, &passive);
    let range = harness.side(PASSIVE).allocate(SLOT);
    let full = harness.post_recvs(&passive, std::slice::from_ref(&range)).expect_err("a full queue");
    assert!(full.posted == 0 && matches!(full.error, TransportError::QueueFull { .. }), "{:?}", full.error);
    for turn in 0..30 {
        let [active, passive] = &pairs[turn % 3];
        harness.message(active, passive, format!("message {turn}").as_bytes());
    }
    // A queue pair that uses a shared receive queue refuses a receive that is posted to the queue pair.
    let own = harness.side(PASSIVE).station.post_recvs(passive.qp, [(1 << 60, range)]);
    assert!(own.is_err_and(|error| matches!(error.error, TransportError::InvalidState { .. })));
    end_sharing(harness, &pairs, srq);
}

/// A shared receive occupies its entry until its completion is polled. Filling the receive does not free the entry.
pub(super) fn a_shared_receive_counts_until_it_is_polled(harness: &mut Harness) {
    let (srq, spec) = shared(harness);
    let pair = harness.pair_of(&Spec::default(), &spec);
    let [active, passive] = pair;
    harness.poll_manually(&passive);
    fill(harness, &passive);
    let part = harness.side(ACTIVE).allocate_with(b"one place");
    harness.post_and_wait(&active, SendOp::Send, &part);
    harness.settle();
    let range = harness.side(PASSIVE).allocate(SLOT);
    assert!(
        harness.post_recvs(&passive, std::slice::from_ref(&range)).is_err(),
        "no place is free before the completion is polled"
    );
    harness.wait_for("completion", |harness| (harness.poll(PASSIVE, passive.cq) == 1).then_some(()));
    harness.post_recvs(&passive, &[range]).expect("the place of the receive that was polled");
    end_sharing(harness, &[pair], srq);
}

/// When a connection ends in the middle of messages, no shared receive is lost. Each shared receive is flushed, or
/// stays in the shared queue.
pub(super) fn an_end_returns_its_shared_receives(harness: &mut Harness) {
    let (srq, spec) = shared(harness);
    let mut pairs = Vec::new();
    let [_, first] = harness.pair_of(&Spec::default(), &spec);
    fill(harness, &first);
    for round in 0..6 {
        let [active, passive] = harness.pair_of(&Spec::default(), &spec);
        let part = harness.side(ACTIVE).allocate_with(&[8; SLOT]);
        for _ in 0..4 {
            harness.post(&active, SendOp::Send, &part);
        }
        if round % 2 == 0 {
            harness.expect_message(&passive, &[8; SLOT]);
        }
        harness.destroy(&[active, passive][round % 2]);
        harness.destroy(&[passive, active][round % 2]);
        while let Some(ranges) = harness.take_left_receive(&passive) {
            harness.post_recv(&first, &ranges);
        }
    }
    // Check with a new connection that the shared queue can still receive as many messages as it has entries.
    let pair = harness.pair_of(&Spec::default(), &spec);
    for _ in 0..SHARED {
        let part = harness.side(ACTIVE).allocate_with(b"whole");
        harness.post_and_wait(&pair[0], SendOp::Send, &part);
        let (wc, bytes, _) = harness.received(&pair[1]);
        assert_eq!((wc.status, &bytes[..]), (WcStatus::Success, &b"whole"[..]));
    }
    pairs.push(pair);
    harness.destroy(&first);
    end_sharing(harness, &pairs, srq);
}

/// A queue pair on a shared queue is refused if its completion queue has no room for all receives of the shared queue.
pub(super) fn a_shared_queue_needs_room_for_its_completions(harness: &mut Harness) {
    let (srq, _) = shared(harness);
    let (_, to) = harness.listen(PASSIVE);
    let id = harness.resolved(to, Duration::from_secs(300));
    let cq = harness.create_cq(ACTIVE, SHARED + 3);
    let device = harness.side(ACTIVE).device;
    let role = harness.provider(ACTIVE).shared_receives().expect("the role");
    for wrong in [0, u32::MAX] {
        let refused = role.create_srq(device, &SrqAttr::new(wrong));
        assert!(matches!(refused, Err(TransportError::OutOfRange { .. })), "{refused:?}");
    }
    let own = role.create_srq(device, &SrqAttr::new(SHARED as u32)).expect("a shared queue");
    let attr = |sends| QpAttr { srq: Some(own), ..QpAttr::new(cq, cq, sends, 0) };
    let refused = harness.provider(ACTIVE).create_qp(id, &attr(4));
    assert!(matches!(refused, Err(TransportError::OutOfRange { .. })), "{refused:?}");
    harness.provider(ACTIVE).create_qp(id, &attr(3)).expect("a queue pair with room for all");
    harness.destroy_id(ACTIVE, id);
    harness.provider(ACTIVE).shared_receives().expect("the role").destroy_srq(own).expect("nothing uses it");
    harness.provider(PASSIVE).shared_receives().expect("the role").destroy_srq(srq).expect("nothing uses it");
}

// Cases about several smaller roles.

/// `last_heard` returns the `now` of the provider call that last read data from the peer.
pub(super) fn a_sign_of_life_has_its_time(harness: &mut Harness) {
    let (_, to) = harness.listener();
    let id = harness.resolved(to, Duration::from_secs(300));
    let early = harness.create_queue_pair(ACTIVE, id, &Spec::default());
    let heard = |harness: &mut Harness, end: &ConnectionEnd| {
        harness.provider(end.side).liveness().expect("the role").last_heard(end.qp)
    };
    assert_eq!(heard(harness, &early), None, "before the connection");
    let start = harness.now();
    let [active, passive] = harness.pair();
    let first = heard(harness, &passive).expect("the time at which the connection came up");
    assert!(start <= first && first <= harness.now());
    harness.settle();
    let sent = harness.now();
    harness.message(&active, &passive, b"alive");
    let second = heard(harness, &passive).expect("a time");
    assert!(sent <= second && second <= harness.now(), "the time of the message");
    harness.settle();
    let unread = harness.provider(PASSIVE).liveness().expect("the role").has_unread(passive.qp);
    assert!(!unread, "all has been read");
}

/// A connect request is detached from the provider that received it, and another provider accepts it.
pub(super) fn a_request_is_handed_over(harness: &mut Harness) {
    let (active, request) = harness.request(&Spec::default(), &ConnectParam::default());
    let detached = harness.provider(PASSIVE).handover().expect("the role").detach(request.id).expect("a detach");
    harness.forget(PASSIVE, request.id);
    let now = harness.now();
    assert!(harness.provider(PASSIVE).accept(request.id, &ConnectParam::default(), now).is_err(), "the id is gone");
    let taken = harness.provider(THIRD).handover().expect("the role").attach(detached, now);
    let (id, device) = taken.expect("an attach");
    assert_eq!(device, harness.side(THIRD).device);
    let third = harness.create_queue_pair(THIRD, id, &Spec::default());
    harness.provider(THIRD).accept(id, &ConnectParam::default(), now).expect("an accept");
    harness.established(&active);
    harness.established(&third);
    harness.message(&active, &third, b"over there");
    harness.message(&third, &active, b"and back");
}

/// If a detached connect request is dropped, the peer's connection attempt ends.
pub(super) fn a_request_that_is_dropped_ends(harness: &mut Harness) {
    let (active, request) = harness.request(&Spec::default(), &ConnectParam::default());
    drop(harness.provider(PASSIVE).handover().expect("the role").detach(request.id).expect("a detach"));
    harness.forget(PASSIVE, request.id);
    harness.wait_for_event("end of the attempt", ACTIVE, |event| {
        let over = matches!(event.kind, CmEventKind::Rejected { .. } | CmEventKind::ConnectFailed(_));
        (over && event.id == active.id).then_some(())
    });
}

/// Memory that another thread has registered can be used like any other region.
#[allow(clippy::disallowed_methods, reason = "the case is about another thread")]
pub(super) fn another_thread_registers(harness: &mut Harness) {
    let [active, _passive] = harness.pair();
    let device = harness.side(PASSIVE).device;
    let role = harness.provider(PASSIVE).off_loop_registration().expect("the role");
    let registrar = role.registrar(device).expect("a registrar");
    let memory = Arc::new(Memory::new(4096).expect("memory"));
    let shared = Arc::clone(&memory);
    let thread = std::thread::spawn(move || registrar.register(&shared, 0..4096, Access::REMOTE_WRITE));
    let registration = thread.join().expect("a thread").expect("a registration");
    let role = harness.provider(PASSIVE).off_loop_registration().expect("the role");
    let region = role.adopt(registration).expect("a region");
    let remote = RemoteAddress { address: memory.as_ptr() as u64, key: region.remote_key };
    let part = harness.side(ACTIVE).allocate_with(b"elsewhere");
    harness.post_and_wait(&active, SendOp::Write(remote), &part);
    // The Write may complete before its bytes are placed, so wait for the bytes.
    let mut there = [0; 9];
    harness.wait_for("bytes of the write", |harness| {
        harness.settle();
        (memory.copy_out(0, &mut there) && there == *b"elsewhere").then_some(())
    });
    harness.provider(PASSIVE).deregister(region.id).expect("a deregister");
}

pub(super) fn a_sound_queue_has_not_failed(harness: &mut Harness) {
    let [active, passive] = harness.pair();
    harness.message(&active, &passive, b"sound");
    assert!(!harness.provider(PASSIVE).adapter().expect("the role").has_failed(passive.cq));
}

/// `next_device_event` returns `None` after the last event.
pub(super) fn events_of_devices_have_an_end(harness: &mut Harness) {
    let [active, passive] = harness.pair();
    harness.message(&active, &passive, b"an event or none");
    let role = harness.provider(PASSIVE).device_events().expect("the role");
    let events = std::iter::from_fn(|| role.next_device_event()).take(100_000).count();
    assert!(events < 100_000, "events without end");
}

// Cases about sends without a work request (`ImmediateSends`).

fn send_now(harness: &mut Harness, end: &ConnectionEnd, header: &[u8], payload: &[u8]) -> bool {
    harness.provider(end.side).immediate_sends().expect("the role").send_now(end.qp, header, payload)
}

fn ring(harness: &mut Harness, end: &ConnectionEnd) {
    harness.provider(end.side).immediate_sends().expect("the role").ring(end.qp);
}

/// A message of `send_now` arrives after all sends that were posted before it, and before all sends that are posted
/// later. The provider passes the message to the network in `ring` or in the next post. The order is the same in both
/// cases.
pub(super) fn an_immediate_send_keeps_its_place(harness: &mut Harness) {
    let [active, passive] = harness.pair();
    let mut sent = 0;
    for round in 0..20_u8 {
        let flags = if round % 2 == 0 { SendFlags::SIGNALED } else { SendFlags::empty() };
        let first = harness.side(ACTIVE).allocate_with(&[round; 9]);
        let last = harness.side(ACTIVE).allocate_with(&vec![round; SLOT]);
        let (mut expected, mut posted) = (Vec::new(), Vec::new());
        for (part, payload) in [(first, vec![round + 1; 40]), (last, Vec::new())] {
            let (numbers, result) = harness.post_sends(&active, &[(SendOp::Send, part.clone(), flags)]);
            result.expect("room for a send");
            posted.extend(numbers);
            expected.push(harness.side(ACTIVE).bytes(&part));
            if send_now(harness, &active, b"header", &payload) {
                expected.push([b"header", &payload[..]].concat());
                sent += 1;
            }
        }
        // In half of the rounds, `ring` passes the messages to the network. In the other rounds, the post of a signaled
        // send passes them to the network. The completion of this send also frees the queue entries of the unsignaled
        // sends before it.
        if round % 4 < 2 {
            ring(harness, &active);
        } else {
            let part = harness.side(ACTIVE).allocate_with(b"behind");
            posted.push(harness.post(&active, SendOp::Send, &part));
            expected.push(b"behind".to_vec());
        }
        for bytes in expected {
            harness.expect_message(&passive, &bytes);
        }
        for wr_id in posted {
            if flags == SendFlags::SIGNALED {
                harness.success(&active, wr_id);
            }
        }
    }
    assert!(sent > 10, "{sent} of 40 immediate sends were possible");
}

/// A message of `send_now` occupies no entry of the send queue, and has no completion.
pub(super) fn an_immediate_send_is_no_work_request(harness: &mut Harness) {
    let [active, passive] = harness.pair();
    for round in 0..8_u8 {
        let sent = (0..DEPTH / 2).filter(|_| send_now(harness, &active, &[], &[round; 5])).count();
        ring(harness, &active);
        assert!(sent > 0, "an immediate send is possible");
        let part = harness.side(ACTIVE).allocate_with(&[round]);
        let chain = vec![(SendOp::Send, part, SendFlags::SIGNALED); DEPTH - sent];
        let (numbers, result) = harness.post_sends(&active, &chain);
        result.expect("each place of the queue is free");
        for _ in 0..sent {
            harness.expect_message(&passive, &[round; 5]);
        }
        for wr_id in numbers {
            harness.expect_message(&passive, &[round]);
            harness.success(&active, wr_id);
        }
        assert_eq!(harness.outstanding(&active), DEPTH, "the receives of the active side");
    }
}

/// The bytes of a `write_now` are placed before the peer receives a message that was sent later. The program may
/// overwrite the source after `write_now` has returned.
pub(super) fn an_immediate_write_keeps_its_place(harness: &mut Harness) {
    let [active, passive] = harness.pair();
    let target = harness.side(PASSIVE).allocate_with(&[0; 9]);
    let (_, remote) = harness.side(PASSIVE).expose(&target, Access::REMOTE_WRITE);
    for round in 1..20_u8 {
        let source = harness.side(ACTIVE).allocate_with(&[round; 9]);
        if harness.side(ACTIVE).write_now(&active, &source, remote) {
            if round % 2 == 0 {
                ring(harness, &active);
            }
            harness.message(&active, &passive, b"behind it");
            assert_eq!(harness.side(PASSIVE).bytes(&target), [round; 9]);
        }
    }
    harness.disconnect(&active);
    harness.disconnected(&passive);
    let late = harness.side(ACTIVE).allocate_with(b"late");
    assert!(!harness.side(ACTIVE).write_now(&active, &late, remote), "after the end");
}

/// `send_now` returns false if the connection is not established. A message that `send_now` has sent before the
/// connection ends arrives at the peer.
pub(super) fn an_immediate_send_needs_a_connection(harness: &mut Harness) {
    let (active, request) = harness.request(&Spec::default(), &ConnectParam::default());
    assert!(!send_now(harness, &active, &[], b"early"), "before the connection is up");
    let passive = harness.create_queue_pair(PASSIVE, request.id, &Spec::default());
    let now = harness.now();
    harness.provider(PASSIVE).accept(passive.id, &ConnectParam::default(), now).expect("an accept");
    harness.established(&active);
    harness.established(&passive);
    assert!(!send_now(harness, &active, &[0; 8], &vec![0; 1 << 20]), "no receive is for as much, and no buffer");
    assert!(send_now(harness, &active, &[], b"last words"), "an immediate send is possible");
    harness.disconnect(&active);
    assert!(!send_now(harness, &active, &[], b"late"), "after the end");
    ring(harness, &active);
    harness.expect_message(&passive, b"last words");
    harness.disconnected(&passive);
}

/// The length, in bytes, of messages that the peer reads in place if they are sent from memory that
/// `SharedMemory::lend` has lent to the peer.
const LONG: usize = 100_000;

/// Returns a message of [`LONG`] bytes, which depend on `seed`.
fn long(seed: u8) -> Vec<u8> {
    (0..LONG).map(|at| (at / 7) as u8 ^ seed).collect()
}

/// Lends the memory of the active side to the passive side, and sends ten messages of [`LONG`]
/// bytes. Checks that the passive side reads the last one in place. Returns the region, the memory
/// of the messages, and the memory of their receives.
fn lend(harness: &mut Harness, active: &ConnectionEnd, passive: &ConnectionEnd) -> (MrId, [Range<usize>; 2]) {
    assert!(harness.provider(ACTIVE).shared_memory().expect("the role").is_shared(active.qp));
    let device = harness.side(ACTIVE).device;
    let region = harness.side(ACTIVE).station.expose(device, Access::LOCAL_WRITE).expect("a region");
    let lent = harness.provider(ACTIVE).shared_memory().expect("the role").lend(active.qp, region.id, None);
    assert!(lent.expect("a region that is there"));
    let (part, sink) = (harness.side(ACTIVE).allocate(LONG), harness.side(PASSIVE).allocate(LONG));
    let mut at_once = true;
    for seed in 0..10 {
        let bytes = long(seed);
        harness.side(ACTIVE).station.write(part.start, &bytes).expect("memory");
        harness.post_recv(passive, std::slice::from_ref(&sink));
        let wr_id = harness.post(active, SendOp::Send, &part);
        // Poll only the active side. The peer's provider is not driven here, so the peer cannot have read the message.
        harness.poll(ACTIVE, active.cq);
        at_once = harness.take_completion(active, wr_id).map(|wc| assert_eq!(wc.status, WcStatus::Success)).is_some();
        let (wc, got, _) = harness.received(passive);
        assert!(wc.status == WcStatus::Success && got == bytes, "message {seed}: {wc:?}");
        if !at_once {
            harness.success(active, wr_id);
        }
    }
    assert!(!at_once, "the last message was copied before its peer had read it");
    (region.id, [part, sink])
}

/// A send from memory that `SharedMemory::lend` has lent completes only after the peer has read the message in place.
/// After the region is deregistered, sends from this memory are copied.
pub(super) fn lent_memory_is_read_where_it_is(harness: &mut Harness) {
    let [active, passive] = harness.pair_of(&Spec::default(), &Spec { receives: 0, ..Spec::default() });
    let (region, [part, sink]) = lend(harness, &active, &passive);
    harness.provider(ACTIVE).deregister(region).expect("a region that is there");
    harness.post_recv(&passive, std::slice::from_ref(&sink));
    let wr_id = harness.post(&active, SendOp::Send, &part);
    let (wc, ..) = harness.received(&passive);
    assert_eq!((wc.status, wc.byte_len as usize), (WcStatus::Success, LONG));
    harness.success(&active, wr_id);
}

/// After a send from lent memory is flushed, or its queue pair is destroyed, the program may
/// overwrite the memory. A peer that has not read the message yet receives the old bytes, or no
/// message.
pub(super) fn lent_memory_is_not_read_after_the_end(harness: &mut Harness) {
    for destroys in [false, true] {
        let [active, passive] = harness.pair_of(&Spec::default(), &Spec { receives: 0, ..Spec::default() });
        let (_, [part, sink]) = lend(harness, &active, &passive);
        let (bytes, others) = (long(100), long(200));
        harness.side(ACTIVE).station.write(part.start, &bytes).expect("memory");
        harness.post_recv(&passive, std::slice::from_ref(&sink));
        let wr_id = harness.post(&active, SendOp::Send, &part);
        if destroys {
            harness.destroy(&active);
        } else {
            harness.disconnect(&active);
            harness.poll(ACTIVE, active.cq);
            harness.completion(&active, wr_id);
        }
        harness.side(ACTIVE).station.write(part.start, &others).expect("memory");
        let (wc, got, _) = harness.received(&passive);
        assert!(!wc.status.is_success() || got == bytes, "bytes that were written after the end: {wc:?}");
        let cause = harness.disconnected(&passive);
        assert!(matches!(cause, DisconnectCause::Peer | DisconnectCause::Truncated), "{cause:?}");
    }
}

/// After its first use of a direct region ([`Access::DIRECT`](crate::Access::DIRECT)), the peer
/// accesses the memory itself: the provider that owns the region need not be driven. `invalidate`
/// and `restrict` refuse the region. After `deregister`, an operation on the region fails.
pub(super) fn a_direct_region_is_used_by_its_peer(harness: &mut Harness) {
    let pair = harness.pair();
    harness.enable_extensions(&pair);
    let [active, passive] = pair;
    let device = harness.side(PASSIVE).device;
    let access = Access::REMOTE | Access::DIRECT;
    let region = harness.side(PASSIVE).station.expose(device, access).expect("a direct region");
    let part = harness.side(PASSIVE).station.expose_range(device, 64..128, access);
    assert!(matches!(part, Err(TransportError::Unsupported { .. })), "{part:?}");
    let keys = harness.provider(PASSIVE).remote_keys().expect("the role");
    assert!(matches!(keys.invalidate(region.id), Err(TransportError::Unsupported { .. })));
    assert!(matches!(keys.restrict(region.id, passive.qp), Err(TransportError::Unsupported { .. })));
    let target = harness.side(PASSIVE).allocate(LONG);
    let remote = |offset: usize, harness: &mut Harness| RemoteAddress {
        address: harness.side(PASSIVE).station.address(target.start + offset),
        key: region.remote_key,
    };
    let start = remote(0, harness);
    let (source, sink) = (harness.side(ACTIVE).allocate_with(&long(1)), harness.side(ACTIVE).allocate(LONG));
    // The peer maps the region when it uses the region for the first time.
    harness.post_and_wait(&active, SendOp::Write(start), &source);
    harness.post_and_wait(&active, SendOp::Read(start), &sink);
    let direct = |harness: &mut Harness, op, part: &std::ops::Range<usize>| {
        let wr_id = harness.post(&active, op, part);
        harness.poll(ACTIVE, active.cq);
        let wc = harness.take_completion(&active, wr_id).unwrap_or_else(|| panic!("{op:?} waits for the owner"));
        assert_eq!(wc.status, WcStatus::Success, "{op:?}");
    };
    let bytes = long(2);
    harness.side(ACTIVE).station.write(source.start, &bytes).expect("memory");
    direct(harness, SendOp::Write(start), &source);
    assert!(harness.side(PASSIVE).bytes(&target) == bytes);
    harness.side(PASSIVE).station.write(target.start, &7_u64.to_ne_bytes()).expect("memory");
    let word = sink.start..sink.start + 8;
    direct(harness, SendOp::FetchAdd { remote: start, add: 5 }, &word);
    direct(harness, SendOp::CompareSwap { remote: start, expected: 12, swap: 99 }, &word);
    assert_eq!(harness.side(ACTIVE).bytes(&word), 12_u64.to_ne_bytes());
    direct(harness, SendOp::Read(start), &sink);
    assert_eq!(harness.side(ACTIVE).bytes(&word), 99_u64.to_ne_bytes());
    assert!(harness.side(ACTIVE).bytes(&(sink.start + 8..sink.end)) == bytes[8..]);
    harness.provider(PASSIVE).deregister(region.id).expect("a region that is there");
    harness.refused(&active, SendOp::Read(start), &sink);
}

fn shared(harness: &mut Harness) -> (SrqId, Spec) {
    let device = harness.side(PASSIVE).device;
    let role = harness.provider(PASSIVE).shared_receives().expect("the role");
    let srq = role.create_srq(device, &SrqAttr::new(SHARED as u32)).expect("a shared queue");
    let cq = harness.create_cq(PASSIVE, 8 * DEPTH);
    (srq, Spec { srq: Some(srq), cq: Some(cq), ..Spec::default() })
}

fn fill(harness: &mut Harness, end: &ConnectionEnd) {
    let ranges: Vec<_> = (0..SHARED).map(|_| harness.side(PASSIVE).allocate(SLOT)).collect();
    harness.post_recvs(end, &ranges).expect("room for all of them");
}

/// Destroys the connections, and then the shared queue. Checks that the shared queue cannot be
/// destroyed before its connections.
fn end_sharing(harness: &mut Harness, pairs: &[[ConnectionEnd; 2]], srq: SrqId) {
    let destroy =
        |harness: &mut Harness| harness.provider(PASSIVE).shared_receives().expect("the role").destroy_srq(srq);
    let used = destroy(harness);
    assert!(matches!(used, Err(TransportError::InvalidState { .. })), "{used:?}");
    for [active, passive] in pairs {
        harness.destroy(active);
        harness.destroy(passive);
    }
    destroy(harness).expect("a shared queue that nothing uses");
    assert!(matches!(destroy(harness), Err(TransportError::Stale { .. })));
}
