//! Cases: the limits of a device, and handles.

use std::collections::BTreeSet;
use std::time::Duration;

use super::world::*;
use crate::caps::{Capabilities, Features};
use crate::cm::ConnectParam;
use crate::cq::{CqAttr, Notify};
use crate::error::Error;
use crate::mr::Access;
use crate::qp::QpAttr;
use crate::slab::Key;
use crate::wr::{SendFlags, SendOp};

pub(super) fn attributes_out_of_range_are_refused(world: &mut World) {
    let (_, to) = world.listener();
    let id = world.resolved(to, Duration::from_secs(300));
    let device = world.side(ACTIVE).device;
    let Capabilities { completion_vectors: vectors, features, .. } = world.side(ACTIVE).capabilities;
    let provider = world.provider(ACTIVE);
    for wrong in [CqAttr::new(0), CqAttr::new(u32::MAX), CqAttr { vector: vectors, ..CqAttr::new(8) }] {
        let refused = provider.create_cq(device, &wrong);
        assert!(matches!(refused, Err(Error::OutOfRange { .. })), "{wrong:?}: {refused:?}");
    }
    let cq = provider.create_cq(device, &CqAttr::new(16)).expect("a queue");
    let solicited = provider.req_notify(cq, Notify::Solicited);
    assert_eq!(
        solicited.is_ok(),
        features.contains(Features::SOLICITED_EVENTS),
        "for solicited completions: {solicited:?}"
    );
    // No room on the completion queue, and depths that no queue has.
    for (sends, receives) in [(16, 1), (1, 16), (0, 1), (1, 0), (1, u32::MAX), (u32::MAX, 1)] {
        let refused = provider.create_qp(id, &QpAttr::new(cq, cq, sends, receives));
        assert!(matches!(refused, Err(Error::OutOfRange { .. })), "{sends} and {receives}: {refused:?}");
    }
    provider.create_qp(id, &QpAttr::new(cq, cq, 8, 8)).expect("a refused queue pair keeps no room");
    world.destroy_id(ACTIVE, id);
    world.provider(ACTIVE).destroy_cq(cq).expect("a queue that nothing uses");
}

/// A full queue takes what has room, and says how much that was. The device may have more room than was asked for.
pub(super) fn a_full_queue_is_backpressure(world: &mut World) {
    let [active, _passive] = world.pair_of(&Spec { receives: 4, ..Spec::default() }, &Spec::default());
    let place = world.side(ACTIVE).room(SLOT);
    let chain = vec![place; 64 * DEPTH];
    let error = world.post_recvs(&active, &chain).expect_err("more receives than the queue has room for");
    assert!(matches!(error.error, Error::QueueFull { depth, .. } if depth as usize == DEPTH), "{:?}", error.error);
    // As many as were taken complete: the ledger knows each of them.
    world.disconnect(&active);
    world.flushed(&active);
    world.settle();
}

/// The work requests before the one at fault are taken, and no other.
pub(super) fn a_chain_is_taken_up_to_the_fault(world: &mut World) {
    let [active, passive] = world.pair();
    let long = world.side(ACTIVE).capabilities.max_inline as usize + 1;
    let sends =
        [(1, SendFlags::SIGNALED), (2, SendFlags::SIGNALED), (long, SendFlags::INLINE), (3, SendFlags::SIGNALED)];
    let chain: Vec<_> =
        sends.into_iter().map(|(len, flags)| (SendOp::Send, world.side(ACTIVE).place(&vec![7; len]), flags)).collect();
    let (numbers, result) = world.post_sends(&active, &chain);
    let error = result.expect_err("an inline send that is too long");
    assert_eq!(error.posted, 2, "{:?}", error.error);
    for (at, number) in numbers[..2].iter().enumerate() {
        world.expect(&passive, &vec![7; at + 1]);
        world.success(&active, *number);
    }
    world.message(&active, &passive, b"and the queue goes on");
}

/// Objects come and go; their handles never come back.
pub(super) fn a_handle_is_never_used_twice(world: &mut World) {
    const ROUNDS: usize = 50;
    let (_, to) = world.listener();
    let (device, part) = (world.side(ACTIVE).device, world.side(ACTIVE).room(64));
    let mut seen: [BTreeSet<Key>; 4] = Default::default();
    for _ in 0..ROUNDS {
        let id = world.resolved(to, Duration::from_secs(300));
        let cq = world.provider(ACTIVE).create_cq(device, &CqAttr::new(4)).expect("a queue");
        let qp = world.provider(ACTIVE).create_qp(id, &QpAttr::new(cq, cq, 2, 2)).expect("a queue pair");
        let (region, _) = world.side(ACTIVE).expose(&part, Access::REMOTE_READ);
        for (seen, key) in seen.iter_mut().zip([id.0, cq.0, qp.0, region.id.0]) {
            assert!(seen.insert(key), "the handle {key:?} was used before");
        }
        world.destroy_id(ACTIVE, id);
        world.provider(ACTIVE).destroy_cq(cq).expect("a queue that nothing uses");
        world.provider(ACTIVE).deregister(region.id).expect("a deregister");
    }
}

/// A handle of an object that is gone is an error, and no other object.
pub(super) fn a_stale_handle_is_an_error(world: &mut World) {
    let stale = |what: &str, result: Result<(), Error>| match result {
        Err(Error::Stale { .. }) => {}
        other => panic!("{what}: {other:?}"),
    };
    let [active, passive] = world.pair();
    let part = world.side(ACTIVE).place(b"stale");
    let (region, _) = world.side(ACTIVE).expose(&part, Access::REMOTE_READ);
    world.provider(ACTIVE).deregister(region.id).expect("a deregister");
    world.destroy(&active);
    let now = world.now();
    let provider = world.provider(ACTIVE);
    provider.destroy_cq(active.cq).expect("a queue that nothing uses");
    stale("deregister", provider.deregister(region.id));
    stale("destroy_cq", provider.destroy_cq(active.cq));
    stale("req_notify", provider.req_notify(active.cq, Notify::Any));
    stale("poll_cq", provider.poll_cq(active.cq, 1, &mut Vec::new()).map(drop));
    stale("connect", provider.connect(active.id, &ConnectParam::default()));
    stale("accept", provider.accept(active.id, &ConnectParam::default(), now));
    assert_eq!(provider.local_address(active.id), None);
    world.forget_cq(ACTIVE, active.cq);
    let station = &mut world.side(ACTIVE).station;
    let send = station.post_sends(active.qp, [(1, SendOp::Send, part.clone(), SendFlags::SIGNALED)]).map(drop);
    let receive = station.post_recvs(active.qp, [(2, part)]);
    for error in [send, receive].map(|posted| posted.expect_err("a queue pair that is gone")) {
        assert_eq!(error.posted, 0);
        stale("post", Err(error.error));
    }
    world.disconnected(&passive);
}
