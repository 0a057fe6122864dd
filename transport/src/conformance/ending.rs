//! Cases: how connections end, and what that does to their queues.

use super::world::*;
use crate::cm::DisconnectCause;
use crate::error::Error;
use crate::wc::WcStatus;
use crate::wr::{SendFlags, SendOp};

/// Every work request completes, once, whichever side ends the connection and whatever it has just posted.
pub(super) fn a_disconnect_flushes_everything_once(world: &mut World) {
    for (first, posted) in [(ACTIVE, 0), (PASSIVE, 0), (ACTIVE, 8), (PASSIVE, 8)] {
        let pair = world.pair();
        // The passive side may send once it has heard the active side.
        world.message(&pair[ACTIVE], &pair[PASSIVE], b"first");
        let (end, other) = (pair[first], pair[1 - first]);
        let part = world.side(first).place(&[1; 100]);
        for _ in 0..posted {
            world.post(&end, SendOp::Send, &part);
        }
        // Again does no harm.
        world.disconnect(&end);
        world.disconnect(&end);
        world.flushed(&end);
        world.disconnected(&other);
        world.disconnect(&other);
        world.flushed(&other);
        for _ in 0..DEPTH {
            let (wc, ..) = world.received(&end);
            assert_eq!(wc.status, WcStatus::Flushed, "a receive that nothing has filled");
        }
        world.settle();
    }
}

pub(super) fn both_sides_learn_of_a_disconnect(world: &mut World) {
    for first in [ACTIVE, PASSIVE] {
        let pair = world.pair();
        world.disconnect(&pair[first]);
        assert_eq!(world.disconnected(&pair[1 - first]), DisconnectCause::Peer);
        // Where the device waits for the peer, the first side hears when that has answered.
        world.disconnect(&pair[1 - first]);
        assert_eq!(world.disconnected(&pair[first]), DisconnectCause::Local);
    }
}

pub(super) fn destroying_tells_the_peer(world: &mut World) {
    for first in [ACTIVE, PASSIVE] {
        let pair = world.pair();
        world.destroy(&pair[first]);
        world.destroy_id(first, pair[first].id);
        assert_eq!(world.disconnected(&pair[1 - first]), DisconnectCause::Peer);
    }
}

/// What has completed before the disconnect arrives.
pub(super) fn what_was_sent_arrives_before_the_end(world: &mut World) {
    let [active, passive] = world.pair();
    let part = world.side(ACTIVE).place(b"not lost");
    let sends: Vec<u64> = (0..DEPTH - 1).map(|_| world.post(&active, SendOp::Send, &part)).collect();
    for wr_id in sends {
        world.success(&active, wr_id);
    }
    world.disconnect(&active);
    for _ in 0..DEPTH - 1 {
        let (wc, bytes, _) = world.received(&passive);
        assert_eq!((wc.status, &bytes[..]), (WcStatus::Success, &b"not lost"[..]));
    }
}

/// `destroy_id` drops what is left: no completion comes afterwards, and nothing uses the memory.
pub(super) fn nothing_happens_after_a_destroy(world: &mut World) {
    for in_flight in [0, 2] {
        let [active, passive] = world.pair();
        let all = 0..world.side(PASSIVE).room(SLOT).start;
        let quiet = world.side(PASSIVE).bytes(&all);
        world.post_sends_unchecked(&active, in_flight);
        world.destroy(&passive);
        // What was in flight may have arrived before.
        let before = if in_flight == 0 { quiet } else { world.side(PASSIVE).bytes(&all) };
        world.post_sends_unchecked(&active, 4);
        world.settle();
        assert_eq!(world.poll(PASSIVE, passive.cq), 0, "completions of a queue pair that is destroyed");
        assert!(world.side(PASSIVE).bytes(&all) == before, "memory of a queue pair that is destroyed");
    }
}

/// Completions that a destroyed queue pair has left may be polled. Their places on the queue are free then.
pub(super) fn a_destroyed_queue_pair_gives_its_places_back(world: &mut World) {
    let cq = world.create_cq(ACTIVE, 2 * DEPTH);
    let spec = Spec { cq: Some(cq), ..Spec::default() };
    for _ in 0..3 {
        let [active, passive] = world.pair_of(&spec, &Spec::default());
        world.leave(&active);
        let part = world.side(ACTIVE).place(b"unpolled");
        for _ in 0..4 {
            world.post(&active, SendOp::Send, &part);
            world.expect(&passive, b"unpolled");
        }
        world.disconnect(&active);
        world.settle();
        world.destroy(&active);
    }
}

/// A receive that comes too late need not complete, but is not filled.
pub(super) fn a_receive_after_the_flush_is_not_filled(world: &mut World) {
    let [active, passive] = world.pair();
    world.disconnect(&active);
    world.flushed(&active);
    let place = world.side(ACTIVE).room(SLOT);
    // A device may refuse it as well.
    if world.post_recvs(&active, std::slice::from_ref(&place)).is_ok() {
        world.post_sends_unchecked(&passive, 2);
        world.settle();
        assert_eq!(world.side(ACTIVE).bytes(&place), [0; SLOT], "a receive that was posted after the flush");
        if world.outstanding(&active) == 0 {
            let (wc, ..) = world.received(&active);
            assert!(!wc.status.is_success(), "{wc:?}");
        }
    }
}

pub(super) fn a_send_after_the_flush_is_flushed(world: &mut World) {
    let [active, passive] = world.pair();
    world.disconnect(&active);
    world.flushed(&active);
    // A device may flush what it gets before it has ended, and some end when the peer has answered or given no answer for long.
    world.disconnected(&passive);
    world.disconnect(&passive);
    world.disconnected(&active);
    world.settle();
    let part = world.side(ACTIVE).place(b"late");
    let (numbers, result) = world.post_sends(&active, &[(SendOp::Send, part, SendFlags::SIGNALED)]);
    if result.is_ok() {
        let wc = world.completion(&active, numbers[0]);
        assert!(!wc.status.is_success(), "a send after the end was carried out: {wc:?}");
    }
}

pub(super) fn a_queue_in_use_is_not_destroyed(world: &mut World) {
    let [active, _passive] = world.pair();
    let used = world.provider(ACTIVE).destroy_cq(active.cq);
    assert!(matches!(used, Err(Error::InvalidState { .. })), "{used:?}");
    world.destroy(&active);
    world.provider(ACTIVE).destroy_cq(active.cq).expect("a queue that nothing uses");
    world.forget_cq(ACTIVE, active.cq);
    let gone = world.provider(ACTIVE).destroy_cq(active.cq);
    assert!(matches!(gone, Err(Error::Stale { .. })), "{gone:?}");
}

/// A connection ends alone.
pub(super) fn an_end_leaves_the_others_alone(world: &mut World) {
    let [first, second] = [world.pair(), world.pair()];
    for round in 0..4 {
        world.message(&second[round % 2], &second[1 - round % 2], b"before and after");
        if round == 1 {
            world.destroy(&first[0]);
            world.destroy(&first[1]);
        }
    }
}
