//! Cases: what only some providers do.

use std::sync::Arc;
use std::time::Duration;

use super::world::*;
use crate::cm::{CmEventKind, ConnectParam};
use crate::error::Error;
use crate::handle::SrqId;
use crate::mem::Memory;
use crate::mr::Access;
use crate::qp::QpAttr;
use crate::srq::SrqAttr;
use crate::wc::WcStatus;
use crate::wr::{RemoteAddress, SendFlags, SendOp};

// Shared receives.

/// Receives of a shared queue.
const SHARED: usize = 8;

fn shared(world: &mut World) -> (SrqId, Spec) {
    let device = world.side(PASSIVE).device;
    let role = world.provider(PASSIVE).shared_receives().expect("the role");
    let srq = role.create_srq(device, &SrqAttr::new(SHARED as u32)).expect("a shared queue");
    let cq = world.create_cq(PASSIVE, 8 * DEPTH);
    (srq, Spec { srq: Some(srq), cq: Some(cq), ..Spec::default() })
}

fn fill(world: &mut World, end: &End) {
    let places: Vec<_> = (0..SHARED).map(|_| world.side(PASSIVE).room(SLOT)).collect();
    world.post_recvs(end, &places).expect("room for all of them");
}

/// Destroys what is left, in the only order that there is.
fn end_sharing(world: &mut World, pairs: &[[End; 2]], srq: SrqId) {
    let destroy = |world: &mut World| world.provider(PASSIVE).shared_receives().expect("the role").destroy_srq(srq);
    let used = destroy(world);
    assert!(matches!(used, Err(Error::InvalidState { .. })), "{used:?}");
    for [active, passive] in pairs {
        world.destroy(active);
        world.destroy(passive);
    }
    destroy(world).expect("a shared queue that nothing uses");
    assert!(matches!(destroy(world), Err(Error::Stale { .. })));
}

/// A message takes a receive for its connection, whose queue pair is in the completion. The place is free when that is polled.
pub(super) fn connections_share_receives(world: &mut World) {
    let (srq, spec) = shared(world);
    let pairs: Vec<_> = (0..3).map(|_| world.pair_of(&Spec::default(), &spec)).collect();
    let passive = pairs[0][1];
    fill(world, &passive);
    let place = world.side(PASSIVE).room(SLOT);
    let full = world.post_recvs(&passive, std::slice::from_ref(&place)).expect_err("a full queue");
    assert!(full.posted == 0 && matches!(full.error, Error::QueueFull { .. }), "{:?}", full.error);
    for turn in 0..30 {
        let [active, passive] = &pairs[turn % 3];
        world.message(active, passive, format!("message {turn}").as_bytes());
    }
    // The queue pair has no receives of its own.
    let own = world.side(PASSIVE).station.post_recvs(passive.qp, [(1 << 60, place)]);
    assert!(own.is_err_and(|error| matches!(error.error, Error::InvalidState { .. })));
    end_sharing(world, &pairs, srq);
}

/// A receive counts until its completion is polled, not until it is filled.
pub(super) fn a_shared_receive_counts_until_it_is_polled(world: &mut World) {
    let (srq, spec) = shared(world);
    let pair = world.pair_of(&Spec::default(), &spec);
    let [active, passive] = pair;
    world.leave(&passive);
    fill(world, &passive);
    let part = world.side(ACTIVE).place(b"one place");
    world.good(&active, SendOp::Send, &part);
    world.settle();
    let place = world.side(PASSIVE).room(SLOT);
    assert!(
        world.post_recvs(&passive, std::slice::from_ref(&place)).is_err(),
        "no place is free before the completion is polled"
    );
    world.until("completion", |world| (world.poll(PASSIVE, passive.cq) == 1).then_some(()));
    world.post_recvs(&passive, &[place]).expect("the place of the receive that was polled");
    end_sharing(world, &[pair], srq);
}

/// A connection that ends in the middle loses no receive: it is flushed, or belongs to the others again.
pub(super) fn an_end_returns_its_shared_receives(world: &mut World) {
    let (srq, spec) = shared(world);
    let mut pairs = Vec::new();
    let [_, first] = world.pair_of(&Spec::default(), &spec);
    fill(world, &first);
    for round in 0..6 {
        let [active, passive] = world.pair_of(&Spec::default(), &spec);
        let part = world.side(ACTIVE).place(&[8; SLOT]);
        for _ in 0..4 {
            world.post(&active, SendOp::Send, &part);
        }
        if round % 2 == 0 {
            world.expect(&passive, &[8; SLOT]);
        }
        world.destroy(&[active, passive][round % 2]);
        world.destroy(&[passive, active][round % 2]);
        while let Some(places) = world.left_by(&passive) {
            world.post_recv(&first, &places);
        }
    }
    // As many messages arrive as there are receives.
    let pair = world.pair_of(&Spec::default(), &spec);
    for _ in 0..SHARED {
        let part = world.side(ACTIVE).place(b"whole");
        world.good(&pair[0], SendOp::Send, &part);
        let (wc, bytes, _) = world.received(&pair[1]);
        assert_eq!((wc.status, &bytes[..]), (WcStatus::Success, &b"whole"[..]));
    }
    pairs.push(pair);
    world.destroy(&first);
    end_sharing(world, &pairs, srq);
}

/// The completion queue needs room for the whole shared queue.
pub(super) fn a_shared_queue_needs_room_for_its_completions(world: &mut World) {
    let (srq, _) = shared(world);
    let (_, to) = world.listen(PASSIVE);
    let id = world.resolved(to, Duration::from_secs(300));
    let cq = world.create_cq(ACTIVE, SHARED + 3);
    let device = world.side(ACTIVE).device;
    let role = world.provider(ACTIVE).shared_receives().expect("the role");
    for wrong in [0, u32::MAX] {
        let refused = role.create_srq(device, &SrqAttr::new(wrong));
        assert!(matches!(refused, Err(Error::OutOfRange { .. })), "{refused:?}");
    }
    let own = role.create_srq(device, &SrqAttr::new(SHARED as u32)).expect("a shared queue");
    let attr = |sends| QpAttr { srq: Some(own), ..QpAttr::new(cq, cq, sends, 0) };
    let refused = world.provider(ACTIVE).create_qp(id, &attr(4));
    assert!(matches!(refused, Err(Error::OutOfRange { .. })), "{refused:?}");
    world.provider(ACTIVE).create_qp(id, &attr(3)).expect("a queue pair with room for all");
    world.destroy_id(ACTIVE, id);
    // Receives that are still posted go with the queue.
    world.provider(ACTIVE).shared_receives().expect("the role").destroy_srq(own).expect("nothing uses it");
    world.provider(PASSIVE).shared_receives().expect("the role").destroy_srq(srq).expect("nothing uses it");
}

// Others.

/// The time at which something came is that of the call that has read it.
pub(super) fn a_sign_of_life_has_its_time(world: &mut World) {
    let (_, to) = world.listener();
    let id = world.resolved(to, Duration::from_secs(300));
    let early = world.equip(ACTIVE, id, &Spec::default());
    let heard =
        |world: &mut World, end: &End| world.provider(end.side).liveness().expect("the role").last_heard(end.qp);
    assert_eq!(heard(world, &early), None, "before the connection");
    let start = world.now();
    let [active, passive] = world.pair();
    let first = heard(world, &passive).expect("the time at which the connection came up");
    assert!(start <= first && first <= world.now());
    world.settle();
    let sent = world.now();
    world.message(&active, &passive, b"alive");
    let second = heard(world, &passive).expect("a time");
    assert!(sent <= second && second <= world.now(), "the time of the message");
    world.settle();
    let unread = world.provider(PASSIVE).liveness().expect("the role").has_unread(passive.qp);
    assert!(!unread, "all has been read");
}

/// A connect request that one provider has taken is accepted by another one.
pub(super) fn a_request_is_handed_over(world: &mut World) {
    let (active, request) = world.request(&Spec::default(), &ConnectParam::default());
    let detached = world.provider(PASSIVE).handover().expect("the role").detach(request.id).expect("a detach");
    world.forget(PASSIVE, request.id);
    let now = world.now();
    assert!(world.provider(PASSIVE).accept(request.id, &ConnectParam::default(), now).is_err(), "the id is gone");
    let taken = world.provider(THIRD).handover().expect("the role").attach(detached, now);
    let (id, device) = taken.expect("an attach");
    assert_eq!(device, world.side(THIRD).device);
    let third = world.equip(THIRD, id, &Spec::default());
    world.provider(THIRD).accept(id, &ConnectParam::default(), now).expect("an accept");
    world.established(&active);
    world.established(&third);
    world.message(&active, &third, b"over there");
    world.message(&third, &active, b"and back");
}

/// Nobody takes the request: the attempt ends.
pub(super) fn a_request_that_is_dropped_ends(world: &mut World) {
    let (active, request) = world.request(&Spec::default(), &ConnectParam::default());
    drop(world.provider(PASSIVE).handover().expect("the role").detach(request.id).expect("a detach"));
    world.forget(PASSIVE, request.id);
    world.event("end of the attempt", ACTIVE, |event| {
        let over = matches!(event.kind, CmEventKind::Rejected { .. } | CmEventKind::ConnectFailed(_));
        (over && event.id == active.id).then_some(())
    });
}

/// Memory that another thread has registered is a region like any other.
#[allow(clippy::disallowed_methods, reason = "another thread is what it is about")]
pub(super) fn another_thread_registers(world: &mut World) {
    let [active, _passive] = world.pair();
    let device = world.side(PASSIVE).device;
    let role = world.provider(PASSIVE).off_loop_registration().expect("the role");
    let registrar = role.registrar(device).expect("a registrar");
    let memory = Arc::new(Memory::new(4096).expect("memory"));
    let shared = Arc::clone(&memory);
    let thread = std::thread::spawn(move || registrar.register(&shared, 0..4096, Access::REMOTE_WRITE));
    let registration = thread.join().expect("a thread").expect("a registration");
    let role = world.provider(PASSIVE).off_loop_registration().expect("the role");
    let region = role.adopt(registration).expect("a region");
    let remote = RemoteAddress { address: memory.as_ptr() as u64, key: region.remote_key };
    let part = world.side(ACTIVE).place(b"elsewhere");
    world.good(&active, SendOp::Write(remote), &part);
    // A Write may be done before it is there.
    let mut there = [0; 9];
    world.until("bytes of the write", |world| {
        world.settle();
        (memory.copy_out(0, &mut there) && there == *b"elsewhere").then_some(())
    });
    world.provider(PASSIVE).deregister(region.id).expect("a deregister");
}

/// A connection has a path. A queue pair that is gone has none.
pub(super) fn a_path_is_that_of_a_queue_pair(world: &mut World) {
    let [active, passive] = world.pair();
    world.message(&active, &passive, b"on its way");
    let path = world.provider(ACTIVE).paths().expect("the role").path_of(active.qp).expect("a path");
    assert_ne!(path.port, 0, "ports count from 1: {path:?}");
    world.destroy(&active);
    let gone = world.provider(ACTIVE).paths().expect("the role").path_of(active.qp);
    assert!(matches!(gone, Err(Error::Stale { .. })), "{gone:?}");
}

pub(super) fn a_sound_queue_has_not_failed(world: &mut World) {
    let [active, passive] = world.pair();
    world.message(&active, &passive, b"sound");
    assert!(!world.provider(PASSIVE).adapter().expect("the role").has_failed(passive.cq));
}

/// The getter has an end, as all others.
pub(super) fn events_of_devices_have_an_end(world: &mut World) {
    let [active, passive] = world.pair();
    world.message(&active, &passive, b"an event or none");
    let role = world.provider(PASSIVE).device_events().expect("the role");
    let events = std::iter::from_fn(|| role.next_device_event()).take(100_000).count();
    assert!(events < 100_000, "events without end");
}

// Immediate sends.

fn send_now(world: &mut World, end: &End, header: &[u8], payload: &[u8]) -> bool {
    world.provider(end.side).immediate_sends().expect("the role").send_now(end.qp, header, payload)
}

fn ring(world: &mut World, end: &End) {
    world.provider(end.side).immediate_sends().expect("the role").ring(end.qp);
}

/// It arrives behind the sends before it and in front of those behind it, whether a ring or the next post hands it to the network.
pub(super) fn an_immediate_send_keeps_its_place(world: &mut World) {
    let [active, passive] = world.pair();
    let mut sent = 0;
    for round in 0..20_u8 {
        let flags = if round % 2 == 0 { SendFlags::SIGNALED } else { SendFlags::empty() };
        let first = world.side(ACTIVE).place(&[round; 9]);
        let last = world.side(ACTIVE).place(&vec![round; SLOT]);
        let (mut expected, mut posted) = (Vec::new(), Vec::new());
        for (part, payload) in [(first, vec![round + 1; 40]), (last, Vec::new())] {
            let (numbers, result) = world.post_sends(&active, &[(SendOp::Send, part.clone(), flags)]);
            result.expect("room for a send");
            posted.extend(numbers);
            expected.push(world.side(ACTIVE).bytes(&part));
            if send_now(world, &active, b"header", &payload) {
                expected.push([b"header", &payload[..]].concat());
                sent += 1;
            }
        }
        // Two signaled sends tell of the unsignaled ones before them.
        if round % 4 < 2 {
            ring(world, &active);
        } else {
            let part = world.side(ACTIVE).place(b"behind");
            posted.push(world.post(&active, SendOp::Send, &part));
            expected.push(b"behind".to_vec());
        }
        for bytes in expected {
            world.expect(&passive, &bytes);
        }
        for wr_id in posted {
            if flags == SendFlags::SIGNALED {
                world.success(&active, wr_id);
            }
        }
    }
    assert!(sent > 10, "{sent} of 40 immediate sends were possible");
}

/// It takes no place in the send queue, and nothing completes.
pub(super) fn an_immediate_send_is_no_work_request(world: &mut World) {
    let [active, passive] = world.pair();
    for round in 0..8_u8 {
        let sent = (0..DEPTH / 2).filter(|_| send_now(world, &active, &[], &[round; 5])).count();
        ring(world, &active);
        assert!(sent > 0, "an immediate send is possible");
        let part = world.side(ACTIVE).place(&[round]);
        let chain = vec![(SendOp::Send, part, SendFlags::SIGNALED); DEPTH - sent];
        let (numbers, result) = world.post_sends(&active, &chain);
        result.expect("each place of the queue is free");
        for _ in 0..sent {
            world.expect(&passive, &[round; 5]);
        }
        for wr_id in numbers {
            world.expect(&passive, &[round]);
            world.success(&active, wr_id);
        }
        assert_eq!(world.outstanding(&active), DEPTH, "the receives of the active side");
    }
}

/// Without a connection nothing is sent; what was sent before the end arrives.
pub(super) fn an_immediate_send_needs_a_connection(world: &mut World) {
    let (active, request) = world.request(&Spec::default(), &ConnectParam::default());
    assert!(!send_now(world, &active, &[], b"early"), "before the connection is up");
    let passive = world.equip(PASSIVE, request.id, &Spec::default());
    let now = world.now();
    world.provider(PASSIVE).accept(passive.id, &ConnectParam::default(), now).expect("an accept");
    world.established(&active);
    world.established(&passive);
    assert!(!send_now(world, &active, &[0; 8], &vec![0; 1 << 20]), "no receive is for as much, and no buffer");
    assert!(send_now(world, &active, &[], b"last words"), "an immediate send is possible");
    world.disconnect(&active);
    assert!(!send_now(world, &active, &[], b"late"), "after the end");
    ring(world, &active);
    world.expect(&passive, b"last words");
    world.disconnected(&passive);
}

/// Bytes that are long enough for memory to be worth lending.
const LONG: usize = 100_000;

/// Bytes that tell one message from another.
fn long(seed: u8) -> Vec<u8> {
    (0..LONG).map(|at| (at / 7) as u8 ^ seed).collect()
}

/// A send from lent memory is not done before the peer has read it. Once the memory is taken back, what is sent from there is copied.
pub(super) fn lent_memory_is_read_where_it_is(world: &mut World) {
    let [active, passive] = world.pair_of(&Spec::default(), &Spec { receives: 0, ..Spec::default() });
    assert!(world.provider(ACTIVE).shared_memory().expect("the role").is_shared(active.qp));
    let device = world.side(ACTIVE).device;
    let region = world.side(ACTIVE).station.expose(device, Access::LOCAL_WRITE).expect("a region");
    let lent = world.provider(ACTIVE).shared_memory().expect("the role").lend(active.qp, region.id);
    assert!(lent.expect("a region that is there"));
    let (part, sink) = (world.side(ACTIVE).room(LONG), world.side(PASSIVE).room(LONG));
    let mut at_once = true;
    for seed in 0..10 {
        let bytes = long(seed);
        world.side(ACTIVE).station.write(part.start, &bytes).expect("memory");
        world.post_recv(&passive, std::slice::from_ref(&sink));
        let wr_id = world.post(&active, SendOp::Send, &part);
        // The peer has had no turn.
        world.poll(ACTIVE, active.cq);
        at_once = world.done(&active, wr_id).map(|wc| assert_eq!(wc.status, WcStatus::Success)).is_some();
        let (wc, got, _) = world.received(&passive);
        assert!(wc.status == WcStatus::Success && got == bytes, "message {seed}: {wc:?}");
        if !at_once {
            world.success(&active, wr_id);
        }
    }
    assert!(!at_once, "the last message was copied before its peer had read it");
    world.provider(ACTIVE).deregister(region.id).expect("a region that is there");
    world.post_recv(&passive, std::slice::from_ref(&sink));
    let wr_id = world.post(&active, SendOp::Send, &part);
    let (wc, ..) = world.received(&passive);
    assert_eq!((wc.status, wc.byte_len as usize), (WcStatus::Success, LONG));
    world.success(&active, wr_id);
}

/// The peer of a direct region uses it without a turn of its owner, once it has used it with one. Its rights cannot be taken back, except
/// by deregistering.
pub(super) fn a_direct_region_is_used_by_its_peer(world: &mut World) {
    let pair = world.pair();
    world.extend(&pair);
    let [active, passive] = pair;
    let device = world.side(PASSIVE).device;
    let access = Access::REMOTE | Access::DIRECT;
    let region = world.side(PASSIVE).station.expose(device, access).expect("a direct region");
    let part = world.side(PASSIVE).station.expose_range(device, 64..128, access);
    assert!(matches!(part, Err(Error::Unsupported { .. })), "{part:?}");
    let keys = world.provider(PASSIVE).remote_keys().expect("the role");
    assert!(matches!(keys.invalidate(region.id), Err(Error::Unsupported { .. })));
    assert!(matches!(keys.restrict(region.id, passive.qp), Err(Error::Unsupported { .. })));
    let target = world.side(PASSIVE).room(LONG);
    let remote = |offset: usize, world: &mut World| RemoteAddress {
        address: world.side(PASSIVE).station.address(target.start + offset),
        key: region.remote_key,
    };
    let start = remote(0, world);
    let (source, sink) = (world.side(ACTIVE).place(&long(1)), world.side(ACTIVE).room(LONG));
    // Its peer learns of it by using it.
    world.good(&active, SendOp::Write(start), &source);
    world.good(&active, SendOp::Read(start), &sink);
    let direct = |world: &mut World, op, part: &std::ops::Range<usize>| {
        let wr_id = world.post(&active, op, part);
        world.poll(ACTIVE, active.cq);
        let wc = world.done(&active, wr_id).unwrap_or_else(|| panic!("{op:?} waits for the owner"));
        assert_eq!(wc.status, WcStatus::Success, "{op:?}");
    };
    let bytes = long(2);
    world.side(ACTIVE).station.write(source.start, &bytes).expect("memory");
    direct(world, SendOp::Write(start), &source);
    assert!(world.side(PASSIVE).bytes(&target) == bytes);
    world.side(PASSIVE).station.write(target.start, &7_u64.to_ne_bytes()).expect("memory");
    let word = sink.start..sink.start + 8;
    direct(world, SendOp::FetchAdd { remote: start, add: 5 }, &word);
    direct(world, SendOp::CompareSwap { remote: start, expected: 12, swap: 99 }, &word);
    assert_eq!(world.side(ACTIVE).bytes(&word), 12_u64.to_ne_bytes());
    direct(world, SendOp::Read(start), &sink);
    assert_eq!(world.side(ACTIVE).bytes(&word), 99_u64.to_ne_bytes());
    assert!(world.side(ACTIVE).bytes(&(sink.start + 8..sink.end)) == bytes[8..]);
    world.provider(PASSIVE).deregister(region.id).expect("a region that is there");
    world.refused(&active, SendOp::Read(start), &sink);
}
