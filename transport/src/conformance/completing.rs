//! Cases: messages, completions and events.

use super::harness::*;
use crate::cq::Notify;
use crate::wc::{WcOpcode, WcStatus};
use crate::wr::{SendFlags, SendOp};

const QUIET: SendFlags = SendFlags::empty();

/// Every message wakes a provider that sleeps. The providers sleep before each message, so the case hangs if an edge or
/// an event is lost.
pub(super) fn each_message_wakes_a_sleeper(harness: &mut Harness) {
    let pair = harness.pair();
    for turn in 0..100_usize {
        let (from, to) = (&pair[turn % 2], &pair[1 - turn % 2]);
        harness.message(from, to, format!("message {turn}").as_bytes());
    }
}

pub(super) fn messages_have_any_length(harness: &mut Harness) {
    let [active, passive] = harness.pair();
    for len in [0, 1, 7, 64, SLOT - 1, SLOT] {
        let bytes: Vec<u8> = (0..len).map(|at| (at * 7 + len) as u8).collect();
        harness.message(&active, &passive, &bytes);
        harness.message(&passive, &active, &bytes);
    }
}

pub(super) fn a_message_is_gathered_and_scattered(harness: &mut Harness) {
    let [active, passive] = harness.pair_of(&Spec::default(), &Spec { receives: 0, ..Spec::default() });
    let bytes: Vec<u8> = (0..100).collect();
    let (source, sink) = (harness.side(ACTIVE).allocate_with(&bytes), harness.side(PASSIVE).allocate(120));
    let cut = |from: usize, at: [usize; 4]| at.windows(2).map(|w| from + w[0]..from + w[1]).collect::<Vec<_>>();
    harness.post_recv(&passive, &cut(sink.start, [0, 50, 57, 120]));
    let wr_id = harness.next_wr_id();
    let parts = cut(source.start, [0, 1, 60, 100]);
    // The harness records in its ledger only the sends that it posts itself. The case posts this
    // send, so it records the send here.
    harness.record_send(&active, wr_id, bytes.len());
    let station = &mut harness.side(ACTIVE).station;
    station.post_send(active.qp, wr_id, SendOp::Send, &parts, SendFlags::SIGNALED).expect("room");
    let (wc, got, _) = harness.received(&passive);
    assert_eq!((wc.status, wc.byte_len, wc.opcode), (WcStatus::Success, 100, WcOpcode::Recv));
    assert!(got == bytes);
    assert_eq!(harness.side(PASSIVE).bytes(&(sink.start + 100..sink.end)), [0; 20]);
    harness.success(&active, wr_id);
}

/// The sends of a chain arrive in the order of the chain, and only the signaled sends have a completion.
pub(super) fn a_chain_is_taken_from_front_to_back(harness: &mut Harness) {
    let [active, passive] = harness.pair();
    for round in 0..4_u8 {
        let mut chain: Vec<_> = (0..DEPTH)
            .map(|at| (SendOp::Send, harness.side(ACTIVE).allocate_with(&vec![round; 1 + at]), QUIET))
            .collect();
        chain[DEPTH - 1].2 = SendFlags::SIGNALED;
        let (numbers, result) = harness.post_sends(&active, &chain);
        result.expect("a chain");
        for at in 0..DEPTH {
            harness.expect_message(&passive, &vec![round; 1 + at]);
        }
        harness.success(&active, numbers[DEPTH - 1]);
        assert_eq!(harness.outstanding(&active), DEPTH, "the receives of the active side");
    }
}

/// The entries of unsignaled sends in the send queue become free when the completion of a later signaled send is
/// polled.
pub(super) fn a_later_completion_ends_unsignaled_sends(harness: &mut Harness) {
    let [active, passive] = harness.pair();
    let part = harness.side(ACTIVE).allocate_with(b"quiet");
    for _ in 0..8 {
        for nth in 1..DEPTH {
            let flags = if nth + 1 == DEPTH { SendFlags::SIGNALED } else { QUIET };
            let (numbers, result) = harness.post_sends(&active, &[(SendOp::Send, part.clone(), flags)]);
            result.expect("the sends before the last signaled one are done");
            if flags == SendFlags::SIGNALED {
                harness.success(&active, numbers[0]);
            }
        }
        for _ in 1..DEPTH {
            harness.expect_message(&passive, b"quiet");
        }
    }
}

/// An armed completion queue raises only one event, even if several completions follow.
pub(super) fn an_armed_queue_raises_one_event(harness: &mut Harness) {
    raises_one_event(harness, Notify::Any);
}

/// The same as [`an_armed_queue_raises_one_event`], but the queue is armed for solicited completions only.
pub(super) fn a_queue_that_waits_for_solicited_completions_raises_one_event(harness: &mut Harness) {
    raises_one_event(harness, Notify::Solicited);
}

fn raises_one_event(harness: &mut Harness, notify: Notify) {
    let [active, passive] = harness.pair();
    harness.poll_manually(&passive);
    let part = harness.side(ACTIVE).allocate_with(b"event");
    for _ in 0..3 {
        harness.poll(PASSIVE, passive.cq);
        harness.side(PASSIVE).notified.clear();
        harness.provider(PASSIVE).req_notify(passive.cq, notify).expect("a queue to arm");
        for _ in 0..2 {
            let flags = SendFlags::SIGNALED | SendFlags::SOLICITED;
            let (numbers, result) = harness.post_sends(&active, &[(SendOp::Send, part.clone(), flags)]);
            result.expect("a send");
            harness.success(&active, numbers[0]);
        }
        harness.wait_for("event of the armed queue", |harness| {
            harness.side(PASSIVE).notified.contains(&passive.cq).then_some(())
        });
        harness.settle();
        assert_eq!(harness.side(PASSIVE).notified, [passive.cq], "one event of an armed queue");
    }
    harness.poll(PASSIVE, passive.cq);
}

/// A completion that is already in the queue when the queue is armed raises no event. The program finds this completion
/// by polling once more. The next completion to arrive raises an event.
pub(super) fn a_completion_that_is_there_raises_no_event(harness: &mut Harness) {
    let [active, passive] = harness.pair();
    harness.poll_manually(&passive);
    let mut silent = 0;
    for _ in 0..10 {
        harness.provider(PASSIVE).req_notify(passive.cq, Notify::Any).expect("a queue to arm");
        let part = harness.side(ACTIVE).allocate_with(b"early");
        harness.post_and_wait(&active, SendOp::Send, &part);
        harness.wait_for("event", |harness| harness.side(PASSIVE).notified.pop());
        // The event of the completion was read, but the completion was not polled. Wait in this state.
        harness.settle();
        harness.side(PASSIVE).notified.clear();
        harness.provider(PASSIVE).req_notify(passive.cq, Notify::Any).expect("a queue to arm");
        harness.settle();
        silent += usize::from(harness.side(PASSIVE).notified.is_empty());
        harness.side(PASSIVE).notified.clear();
        assert_eq!(harness.poll(PASSIVE, passive.cq), 1);
    }
    assert!(silent > 0, "each completion that was there has raised an event");
}

/// The events of all completion queues of a device arrive through one channel. An event of one queue does not suppress
/// the event of another queue.
pub(super) fn queues_share_a_channel(harness: &mut Harness) {
    let pairs: Vec<_> = (0..3).map(|_| harness.pair()).collect();
    for round in 0..5 {
        let bytes = format!("round {round}");
        let mut posted = Vec::new();
        for [active, _] in &pairs {
            let part = harness.side(ACTIVE).allocate_with(bytes.as_bytes());
            posted.push(harness.post(active, SendOp::Send, &part));
        }
        for ([active, passive], wr_id) in pairs.iter().zip(posted) {
            harness.expect_message(passive, bytes.as_bytes());
            harness.success(active, wr_id);
        }
    }
}

/// If a message is longer than the receive that it consumes, the receive does not complete successfully, and no byte
/// past the end of the receive's memory is written.
pub(super) fn a_message_that_is_too_long_is_not_delivered(harness: &mut Harness) {
    let [active, passive] = harness.pair_of(&Spec::default(), &Spec { receives: 0, ..Spec::default() });
    let range = harness.side(PASSIVE).allocate(SLOT);
    harness.post_recv(&passive, &[range.start..range.start + 16]);
    let part = harness.side(ACTIVE).allocate_with(&[9; 64]);
    harness.post(&active, SendOp::Send, &part);
    harness.settle();
    harness.disconnect(&passive);
    let (wc, ..) = harness.received(&passive);
    assert!(!wc.status.is_success(), "{wc:?}");
    assert_eq!(harness.side(PASSIVE).bytes(&(range.start + 16..range.end)), [0; SLOT - 16]);
}

/// The program may overwrite the bytes of an inline send after the post has returned.
pub(super) fn an_inline_send_is_copied_at_once(harness: &mut Harness) {
    let len = harness.side(ACTIVE).capabilities.max_inline.min(32);
    let [active, passive] = harness.pair_of(&Spec { max_inline: len, ..Spec::default() }, &Spec::default());
    let flags = SendFlags::SIGNALED | SendFlags::INLINE;
    for round in 1..4 {
        let part = harness.side(ACTIVE).allocate_with(&vec![round; len as usize]);
        let (numbers, result) = harness.post_sends(&active, &[(SendOp::Send, part.clone(), flags)]);
        result.expect("an inline send");
        harness.side(ACTIVE).station.write(part.start, &vec![0xff; len as usize]).expect("memory");
        harness.expect_message(&passive, &vec![round; len as usize]);
        harness.success(&active, numbers[0]);
    }
}

pub(super) fn immediate_data_comes_with_its_message(harness: &mut Harness) {
    let pair = harness.pair();
    harness.enable_extensions(&pair);
    let [active, passive] = pair;
    let part = harness.side(ACTIVE).allocate_with(b"beside");
    let wr_id = harness.post(&active, SendOp::SendWithImmediate(0x0102_0304), &part);
    let wc = harness.expect_message(&passive, b"beside");
    assert_eq!(wc.immediate, Some(0x0102_0304));
    harness.success(&active, wr_id);
}
