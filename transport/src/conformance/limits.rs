//! Cases: the limits of a device, and the handles of objects.

use std::collections::BTreeSet;
use std::time::Duration;

use super::harness::*;
use crate::caps::{Capabilities, Features};
use crate::cm::ConnectParam;
use crate::cq::{CqAttr, Notify};
use crate::error::TransportError;
use crate::mr::Access;
use crate::qp::QpAttr;
use crate::slab::Key;
use crate::wr::{SendFlags, SendOp};

pub(super) fn attributes_out_of_range_are_refused(harness: &mut Harness) {
    let (_, to) = harness.listener();
    let id = harness.resolved(to, Duration::from_secs(300));
    let device = harness.side(ACTIVE).device;
    let Capabilities { completion_vectors: vectors, features, .. } = harness.side(ACTIVE).capabilities;
    let provider = harness.provider(ACTIVE);
    for wrong in [CqAttr::new(0), CqAttr::new(u32::MAX), CqAttr { vector: vectors, ..CqAttr::new(8) }] {
        let refused = provider.create_cq(device, &wrong);
        assert!(matches!(refused, Err(TransportError::OutOfRange { .. })), "{wrong:?}: {refused:?}");
    }
    let cq = provider.create_cq(device, &CqAttr::new(16)).expect("a queue");
    let solicited = provider.req_notify(cq, Notify::Solicited);
    assert_eq!(
        solicited.is_ok(),
        features.contains(Features::SOLICITED_EVENTS),
        "for solicited completions: {solicited:?}"
    );
    // The first two queue pairs need more entries than the completion queue has. The others have depths that no device
    // supports.
    for (sends, receives) in [(16, 1), (1, 16), (0, 1), (1, 0), (1, u32::MAX), (u32::MAX, 1)] {
        let refused = provider.create_qp(id, &QpAttr::new(cq, cq, sends, receives));
        assert!(matches!(refused, Err(TransportError::OutOfRange { .. })), "{sends} and {receives}: {refused:?}");
    }
    provider.create_qp(id, &QpAttr::new(cq, cq, 8, 8)).expect("a refused queue pair keeps no room");
    harness.destroy_id(ACTIVE, id);
    harness.provider(ACTIVE).destroy_cq(cq).expect("a queue that nothing uses");
}

/// If a chain exceeds the free entries of a queue, the provider posts as many work requests as fit, and returns their
/// number. The device may have more entries than were requested.
pub(super) fn a_full_queue_is_backpressure(harness: &mut Harness) {
    let [active, _passive] = harness.pair_of(&Spec { receives: 4, ..Spec::default() }, &Spec::default());
    let range = harness.side(ACTIVE).allocate(SLOT);
    let chain = vec![range; 64 * DEPTH];
    let error = harness.post_recvs(&active, &chain).expect_err("more receives than the queue has room for");
    assert!(
        matches!(error.error, TransportError::QueueFull { depth, .. } if depth as usize == DEPTH),
        "{:?}",
        error.error
    );
    // After the disconnect, each posted work request completes. The ledger checks this, because it contains exactly the
    // posted work requests.
    harness.disconnect(&active);
    harness.flushed(&active);
    harness.settle();
}

/// If one work request of a chain is invalid, the work requests before it are posted, and no others.
pub(super) fn a_chain_is_taken_up_to_the_fault(harness: &mut Harness) {
    let [active, passive] = harness.pair();
    let long = harness.side(ACTIVE).capabilities.max_inline as usize + 1;
    let sends =
        [(1, SendFlags::SIGNALED), (2, SendFlags::SIGNALED), (long, SendFlags::INLINE), (3, SendFlags::SIGNALED)];
    let chain: Vec<_> = sends
        .into_iter()
        .map(|(len, flags)| (SendOp::Send, harness.side(ACTIVE).allocate_with(&vec![7; len]), flags))
        .collect();
    let (numbers, result) = harness.post_sends(&active, &chain);
    let error = result.expect_err("an inline send that is too long");
    assert_eq!(error.posted, 2, "{:?}", error.error);
    for (at, number) in numbers[..2].iter().enumerate() {
        harness.expect_message(&passive, &vec![7; at + 1]);
        harness.success(&active, *number);
    }
    harness.message(&active, &passive, b"and the queue goes on");
}

/// When objects are created and destroyed repeatedly, no handle is used twice.
pub(super) fn a_handle_is_never_used_twice(harness: &mut Harness) {
    const ROUNDS: usize = 50;
    let (_, to) = harness.listener();
    let (device, part) = (harness.side(ACTIVE).device, harness.side(ACTIVE).allocate(64));
    let mut seen: [BTreeSet<Key>; 4] = Default::default();
    for _ in 0..ROUNDS {
        let id = harness.resolved(to, Duration::from_secs(300));
        let cq = harness.provider(ACTIVE).create_cq(device, &CqAttr::new(4)).expect("a queue");
        let qp = harness.provider(ACTIVE).create_qp(id, &QpAttr::new(cq, cq, 2, 2)).expect("a queue pair");
        let (region, _) = harness.side(ACTIVE).expose(&part, Access::REMOTE_READ);
        for (seen, key) in seen.iter_mut().zip([id.0, cq.0, qp.0, region.id.0]) {
            assert!(seen.insert(key), "the handle {key:?} was used before");
        }
        harness.destroy_id(ACTIVE, id);
        harness.provider(ACTIVE).destroy_cq(cq).expect("a queue that nothing uses");
        harness.provider(ACTIVE).deregister(region.id).expect("a deregister");
    }
}

/// A call with the handle of a destroyed object returns an error, and never affects another object.
pub(super) fn a_stale_handle_is_an_error(harness: &mut Harness) {
    let stale = |what: &str, result: Result<(), TransportError>| match result {
        Err(TransportError::Stale { .. }) => {}
        other => panic!("{what}: {other:?}"),
    };
    let [active, passive] = harness.pair();
    let part = harness.side(ACTIVE).allocate_with(b"stale");
    let (region, _) = harness.side(ACTIVE).expose(&part, Access::REMOTE_READ);
    harness.provider(ACTIVE).deregister(region.id).expect("a deregister");
    harness.destroy(&active);
    let now = harness.now();
    let provider = harness.provider(ACTIVE);
    provider.destroy_cq(active.cq).expect("a queue that nothing uses");
    stale("deregister", provider.deregister(region.id));
    stale("destroy_cq", provider.destroy_cq(active.cq));
    stale("req_notify", provider.req_notify(active.cq, Notify::Any));
    stale("poll_cq", provider.poll_cq(active.cq, 1, &mut Vec::new()).map(drop));
    stale("connect", provider.connect(active.id, &ConnectParam::default()));
    stale("accept", provider.accept(active.id, &ConnectParam::default(), now));
    assert_eq!(provider.local_address(active.id), None);
    harness.forget_cq(ACTIVE, active.cq);
    let station = &mut harness.side(ACTIVE).station;
    let send = station.post_sends(active.qp, [(1, SendOp::Send, part.clone(), SendFlags::SIGNALED)]).map(drop);
    let receive = station.post_recvs(active.qp, [(2, part)]);
    for error in [send, receive].map(|posted| posted.expect_err("a queue pair that is gone")) {
        assert_eq!(error.posted, 0);
        stale("post", Err(error.error));
    }
    harness.disconnected(&passive);
}
