//! Cases: the end of a connection, and its effects on the queues.

use super::harness::*;
use crate::cm::DisconnectCause;
use crate::error::TransportError;
use crate::wc::WcStatus;
use crate::wr::{SendFlags, SendOp};

/// Each work request completes exactly once, regardless of which side disconnects and of what it has posted before.
pub(super) fn a_disconnect_flushes_everything_once(harness: &mut Harness) {
    for (first, posted) in [(ACTIVE, 0), (PASSIVE, 0), (ACTIVE, 8), (PASSIVE, 8)] {
        let pair = harness.pair();
        // On some devices the passive side may send only after it has received a message of the active side.
        harness.message(&pair[ACTIVE], &pair[PASSIVE], b"first");
        let (end, other) = (pair[first], pair[1 - first]);
        let part = harness.side(first).allocate_with(&[1; 100]);
        for _ in 0..posted {
            harness.post(&end, SendOp::Send, &part);
        }
        // A second disconnect has no effect.
        harness.disconnect(&end);
        harness.disconnect(&end);
        harness.flushed(&end);
        harness.disconnected(&other);
        harness.disconnect(&other);
        harness.flushed(&other);
        for _ in 0..DEPTH {
            let (wc, ..) = harness.received(&end);
            assert_eq!(wc.status, WcStatus::Flushed, "a receive that nothing has filled");
        }
        harness.settle();
    }
}

pub(super) fn both_sides_learn_of_a_disconnect(harness: &mut Harness) {
    for first in [ACTIVE, PASSIVE] {
        let pair = harness.pair();
        harness.disconnect(&pair[first]);
        assert_eq!(harness.disconnected(&pair[1 - first]), DisconnectCause::Peer);
        // On some devices, the first side to disconnect receives its event only after the second
        // side has disconnected, too.
        harness.disconnect(&pair[1 - first]);
        assert_eq!(harness.disconnected(&pair[first]), DisconnectCause::Local);
    }
}

pub(super) fn destroying_tells_the_peer(harness: &mut Harness) {
    for first in [ACTIVE, PASSIVE] {
        let pair = harness.pair();
        harness.destroy(&pair[first]);
        harness.destroy_id(first, pair[first].id);
        assert_eq!(harness.disconnected(&pair[1 - first]), DisconnectCause::Peer);
    }
}

/// If a send has completed before its side disconnects, the message arrives at the peer.
pub(super) fn what_was_sent_arrives_before_the_end(harness: &mut Harness) {
    let [active, passive] = harness.pair();
    let part = harness.side(ACTIVE).allocate_with(b"not lost");
    let sends: Vec<u64> = (0..DEPTH - 1).map(|_| harness.post(&active, SendOp::Send, &part)).collect();
    for wr_id in sends {
        harness.success(&active, wr_id);
    }
    harness.disconnect(&active);
    for _ in 0..DEPTH - 1 {
        let (wc, bytes, _) = harness.received(&passive);
        assert_eq!((wc.status, &bytes[..]), (WcStatus::Success, &b"not lost"[..]));
    }
}

/// `destroy_id` drops the remaining work requests: no completion follows, and nothing uses their memory.
pub(super) fn nothing_happens_after_a_destroy(harness: &mut Harness) {
    for in_flight in [0, 2] {
        let [active, passive] = harness.pair();
        let all = 0..harness.side(PASSIVE).allocate(SLOT).start;
        let quiet = harness.side(PASSIVE).bytes(&all);
        harness.post_sends_unchecked(&active, in_flight);
        harness.destroy(&passive);
        // If messages were in flight, they may have arrived before the id was destroyed. So record the current bytes of
        // the memory.
        let before = if in_flight == 0 { quiet } else { harness.side(PASSIVE).bytes(&all) };
        harness.post_sends_unchecked(&active, 4);
        harness.settle();
        assert_eq!(harness.poll(PASSIVE, passive.cq), 0, "completions of a queue pair that is destroyed");
        assert!(harness.side(PASSIVE).bytes(&all) == before, "memory of a queue pair that is destroyed");
    }
}

/// The completions of a destroyed queue pair can still be polled. Once a poll has found the completion queue empty, the
/// entries that the queue pair had reserved in it are free.
pub(super) fn a_destroyed_queue_pair_gives_its_places_back(harness: &mut Harness) {
    let cq = harness.create_cq(ACTIVE, 2 * DEPTH);
    let spec = Spec { cq: Some(cq), ..Spec::default() };
    for _ in 0..3 {
        let [active, passive] = harness.pair_of(&spec, &Spec::default());
        harness.poll_manually(&active);
        let part = harness.side(ACTIVE).allocate_with(b"unpolled");
        for _ in 0..4 {
            harness.post(&active, SendOp::Send, &part);
            harness.expect_message(&passive, b"unpolled");
        }
        harness.disconnect(&active);
        harness.settle();
        harness.destroy(&active);
    }
}

/// A receive that is posted after the flush need not complete, but is never filled.
pub(super) fn a_receive_after_the_flush_is_not_filled(harness: &mut Harness) {
    let [active, passive] = harness.pair();
    harness.disconnect(&active);
    harness.flushed(&active);
    let range = harness.side(ACTIVE).allocate(SLOT);
    // A device may also refuse a receive that is posted after the flush.
    if harness.post_recvs(&active, std::slice::from_ref(&range)).is_ok() {
        harness.post_sends_unchecked(&passive, 2);
        harness.settle();
        assert_eq!(harness.side(ACTIVE).bytes(&range), [0; SLOT], "a receive that was posted after the flush");
        if harness.outstanding(&active) == 0 {
            let (wc, ..) = harness.received(&active);
            assert!(!wc.status.is_success(), "{wc:?}");
        }
    }
}

pub(super) fn a_send_after_the_flush_is_flushed(harness: &mut Harness) {
    let [active, passive] = harness.pair();
    harness.disconnect(&active);
    harness.flushed(&active);
    // A device need not flush a new work request before the device has ended the connection. Some devices end the
    // connection only when the peer has disconnected, too, or after a long time limit. So let the peer disconnect
    // first.
    harness.disconnected(&passive);
    harness.disconnect(&passive);
    harness.disconnected(&active);
    harness.settle();
    let part = harness.side(ACTIVE).allocate_with(b"late");
    let (numbers, result) = harness.post_sends(&active, &[(SendOp::Send, part, SendFlags::SIGNALED)]);
    if result.is_ok() {
        let wc = harness.completion(&active, numbers[0]);
        assert!(!wc.status.is_success(), "a send after the end was carried out: {wc:?}");
    }
}

pub(super) fn a_queue_in_use_is_not_destroyed(harness: &mut Harness) {
    let [active, _passive] = harness.pair();
    let used = harness.provider(ACTIVE).destroy_cq(active.cq);
    assert!(matches!(used, Err(TransportError::InvalidState { .. })), "{used:?}");
    harness.destroy(&active);
    harness.provider(ACTIVE).destroy_cq(active.cq).expect("a queue that nothing uses");
    harness.forget_cq(ACTIVE, active.cq);
    let gone = harness.provider(ACTIVE).destroy_cq(active.cq);
    assert!(matches!(gone, Err(TransportError::Stale { .. })), "{gone:?}");
}

/// The end of one connection does not affect other connections.
pub(super) fn an_end_leaves_the_others_alone(harness: &mut Harness) {
    let [first, second] = [harness.pair(), harness.pair()];
    for round in 0..4 {
        harness.message(&second[round % 2], &second[1 - round % 2], b"before and after");
        if round == 1 {
            harness.destroy(&first[0]);
            harness.destroy(&first[1]);
        }
    }
}
