//! Cases: messages, completions, events.

use super::world::*;
use crate::cq::Notify;
use crate::wc::{WcOpcode, WcStatus};
use crate::wr::{SendFlags, SendOp};

const QUIET: SendFlags = SendFlags::empty();

/// Each of the messages is slept for, so that no edge and no event may be lost.
pub(super) fn each_message_wakes_a_sleeper(world: &mut World) {
    let pair = world.pair();
    for turn in 0..100_usize {
        let (from, to) = (&pair[turn % 2], &pair[1 - turn % 2]);
        world.message(from, to, format!("message {turn}").as_bytes());
    }
}

pub(super) fn messages_have_any_length(world: &mut World) {
    let [active, passive] = world.pair();
    for len in [0, 1, 7, 64, SLOT - 1, SLOT] {
        let bytes: Vec<u8> = (0..len).map(|at| (at * 7 + len) as u8).collect();
        world.message(&active, &passive, &bytes);
        world.message(&passive, &active, &bytes);
    }
}

pub(super) fn a_message_is_gathered_and_scattered(world: &mut World) {
    let [active, passive] = world.pair_of(&Spec::default(), &Spec { receives: 0, ..Spec::default() });
    let bytes: Vec<u8> = (0..100).collect();
    let (source, sink) = (world.side(ACTIVE).place(&bytes), world.side(PASSIVE).room(120));
    let cut = |from: usize, at: [usize; 4]| at.windows(2).map(|w| from + w[0]..from + w[1]).collect::<Vec<_>>();
    world.post_recv(&passive, &cut(sink.start, [0, 50, 57, 120]));
    let wr_id = world.number();
    let parts = cut(source.start, [0, 1, 60, 100]);
    // One message is not a chain: the ledger learns of its completion by hand.
    world.adopt(&active, wr_id, bytes.len());
    let station = &mut world.side(ACTIVE).station;
    station.post_send(active.qp, wr_id, SendOp::Send, &parts, SendFlags::SIGNALED).expect("room");
    let (wc, got, _) = world.received(&passive);
    assert_eq!((wc.status, wc.byte_len, wc.opcode), (WcStatus::Success, 100, WcOpcode::Recv));
    assert!(got == bytes);
    assert_eq!(world.side(PASSIVE).bytes(&(sink.start + 100..sink.end)), [0; 20]);
    world.success(&active, wr_id);
}

/// A chain is one post: it arrives from front to back, and only what is signaled completes.
pub(super) fn a_chain_is_taken_from_front_to_back(world: &mut World) {
    let [active, passive] = world.pair();
    for round in 0..4_u8 {
        let mut chain: Vec<_> =
            (0..DEPTH).map(|at| (SendOp::Send, world.side(ACTIVE).place(&vec![round; 1 + at]), QUIET)).collect();
        chain[DEPTH - 1].2 = SendFlags::SIGNALED;
        let (numbers, result) = world.post_sends(&active, &chain);
        result.expect("a chain");
        for at in 0..DEPTH {
            world.expect(&passive, &vec![round; 1 + at]);
        }
        world.success(&active, numbers[DEPTH - 1]);
        assert_eq!(world.outstanding(&active), DEPTH, "the receives of the active side");
    }
}

/// Unsignaled sends give their places back when a later send completes.
pub(super) fn a_later_completion_ends_unsignaled_sends(world: &mut World) {
    let [active, passive] = world.pair();
    let part = world.side(ACTIVE).place(b"quiet");
    for _ in 0..8 {
        for nth in 1..DEPTH {
            let flags = if nth + 1 == DEPTH { SendFlags::SIGNALED } else { QUIET };
            let (numbers, result) = world.post_sends(&active, &[(SendOp::Send, part.clone(), flags)]);
            result.expect("the sends before the last signaled one are done");
            if flags == SendFlags::SIGNALED {
                world.success(&active, numbers[0]);
            }
        }
        for _ in 1..DEPTH {
            world.expect(&passive, b"quiet");
        }
    }
}

/// Arming asks for one event, whatever completes afterwards.
pub(super) fn an_armed_queue_raises_one_event(world: &mut World) {
    raises_one_event(world, Notify::Any);
}

/// As before, for a queue that waits for solicited completions.
pub(super) fn a_queue_that_waits_for_solicited_completions_raises_one_event(world: &mut World) {
    raises_one_event(world, Notify::Solicited);
}

fn raises_one_event(world: &mut World, notify: Notify) {
    let [active, passive] = world.pair();
    world.leave(&passive);
    let part = world.side(ACTIVE).place(b"event");
    for _ in 0..3 {
        world.poll(PASSIVE, passive.cq);
        world.side(PASSIVE).notified.clear();
        world.provider(PASSIVE).req_notify(passive.cq, notify).expect("a queue to arm");
        for _ in 0..2 {
            let flags = SendFlags::SIGNALED | SendFlags::SOLICITED;
            let (numbers, result) = world.post_sends(&active, &[(SendOp::Send, part.clone(), flags)]);
            result.expect("a send");
            world.success(&active, numbers[0]);
        }
        world.until("event of the armed queue", |world| {
            world.side(PASSIVE).notified.contains(&passive.cq).then_some(())
        });
        world.settle();
        assert_eq!(world.side(PASSIVE).notified, [passive.cq], "one event of an armed queue");
    }
    world.poll(PASSIVE, passive.cq);
}

/// A completion that is there when its queue is armed is found by polling once more. It raises an event only if it comes later.
pub(super) fn a_completion_that_is_there_raises_no_event(world: &mut World) {
    let [active, passive] = world.pair();
    world.leave(&passive);
    let mut silent = 0;
    for _ in 0..10 {
        world.provider(PASSIVE).req_notify(passive.cq, Notify::Any).expect("a queue to arm");
        let part = world.side(ACTIVE).place(b"early");
        world.good(&active, SendOp::Send, &part);
        world.until("event", |world| world.side(PASSIVE).notified.pop());
        // The event is taken, and the completion stays.
        world.settle();
        world.side(PASSIVE).notified.clear();
        world.provider(PASSIVE).req_notify(passive.cq, Notify::Any).expect("a queue to arm");
        world.settle();
        silent += usize::from(world.side(PASSIVE).notified.is_empty());
        world.side(PASSIVE).notified.clear();
        assert_eq!(world.poll(PASSIVE, passive.cq), 1);
    }
    assert!(silent > 0, "each completion that was there has raised an event");
}

/// The events of all queues of a device come over one channel; none of them hides another.
pub(super) fn queues_share_a_channel(world: &mut World) {
    let pairs: Vec<_> = (0..3).map(|_| world.pair()).collect();
    for round in 0..5 {
        let bytes = format!("round {round}");
        let mut posted = Vec::new();
        for [active, _] in &pairs {
            let part = world.side(ACTIVE).place(bytes.as_bytes());
            posted.push(world.post(active, SendOp::Send, &part));
        }
        for ([active, passive], wr_id) in pairs.iter().zip(posted) {
            world.expect(passive, bytes.as_bytes());
            world.success(active, wr_id);
        }
    }
}

/// A receive that is too short is not overrun, and does not count as filled.
pub(super) fn a_message_that_is_too_long_is_not_delivered(world: &mut World) {
    let [active, passive] = world.pair_of(&Spec::default(), &Spec { receives: 0, ..Spec::default() });
    let place = world.side(PASSIVE).room(SLOT);
    world.post_recv(&passive, &[place.start..place.start + 16]);
    let part = world.side(ACTIVE).place(&[9; 64]);
    world.post(&active, SendOp::Send, &part);
    world.settle();
    world.disconnect(&passive);
    let (wc, ..) = world.received(&passive);
    assert!(!wc.status.is_success(), "{wc:?}");
    assert_eq!(world.side(PASSIVE).bytes(&(place.start + 16..place.end)), [0; SLOT - 16]);
}

/// The bytes of an inline send are the program's again when the post returns.
pub(super) fn an_inline_send_is_copied_at_once(world: &mut World) {
    let len = world.side(ACTIVE).capabilities.max_inline.min(32);
    let [active, passive] = world.pair_of(&Spec { max_inline: len, ..Spec::default() }, &Spec::default());
    let flags = SendFlags::SIGNALED | SendFlags::INLINE;
    for round in 1..4 {
        let part = world.side(ACTIVE).place(&vec![round; len as usize]);
        let (numbers, result) = world.post_sends(&active, &[(SendOp::Send, part.clone(), flags)]);
        result.expect("an inline send");
        world.side(ACTIVE).station.write(part.start, &vec![0xff; len as usize]).expect("memory");
        world.expect(&passive, &vec![round; len as usize]);
        world.success(&active, numbers[0]);
    }
}

pub(super) fn immediate_data_comes_with_its_message(world: &mut World) {
    let pair = world.pair();
    world.extend(&pair);
    let [active, passive] = pair;
    let part = world.side(ACTIVE).place(b"beside");
    let wr_id = world.post(&active, SendOp::SendWithImmediate(0x0102_0304), &part);
    let wc = world.expect(&passive, b"beside");
    assert_eq!(wc.immediate, Some(0x0102_0304));
    world.success(&active, wr_id);
}
