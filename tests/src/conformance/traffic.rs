//! The tests of messages.

use std::time::Duration;

use rdma_reactor::{DisconnectReason, Outcome, RegionOptions, SendErrorKind, Wait};

use super::harness::{Event, PATIENCE, Pair, Probe, Setup, now, pattern};
use super::one_sided::once_there_is_room;

/// Messages of every size, from empty to the limit, must be echoed unchanged.
pub fn every_size_arrives_intact(setup: &Setup) {
    let max = 300_000;
    let config = setup.config().buffer_size(max).receive_depth(8).send_depth(8);
    let mut p = Pair::new(setup, config, Probe::echo(), Probe::default());
    let conn = p.connect();
    assert_eq!(p.client.context().connection(conn).buffer_size(), Some(max as usize));
    let sizes = [
        0, 1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 247, 248, 249, 255, 256, 257, 1000, 1415, 1416, 1417, 1423, 1424, 1425,
        1448, 4095, 4096, 4097, 65_400, 65_475, 65_500, 65_527, 65_528, 65_535, 65_536, 65_537, 131_072, 299_999,
        300_000,
    ];
    for (i, &size) in sizes.iter().enumerate() {
        let message = pattern(i, size);
        once_there_is_room(&mut p, |cx| cx.send(conn, &message)).expect("it is open");
        p.until("the echo", |p| p.c.received == i as u64 + 1);
        assert_eq!(p.c.messages()[i], message, "{size} bytes");
    }
    p.finish();
}

/// Every accepted send must complete exactly once, in order, with the outcome `Sent`. The probe checks this. The test covers single sends
/// and batches.
pub fn sends_complete_once_and_in_order(setup: &Setup) {
    let mut p = Pair::new(setup, setup.config(), Probe::default(), Probe::default());
    let conn = p.connect();
    let mut accepted = 0_u64;
    for round in 0..200 {
        for i in 0..=round % 17 {
            if p.client.context().send(conn, &pattern(i, 10 * i)).is_ok() {
                accepted += 1;
            }
        }
        p.turn();
    }
    p.until("all completed and delivered", |p| p.c.sent == accepted && p.s.received == accepted);
    assert_eq!(p.c.count(|e| matches!(e, Event::Sent(_, _, Outcome::Sent))) as u64, accepted);
    p.finish();
}

/// With quiet sends, `on_send_complete` must not be called for copied messages, whatever their length. For all other sends, it must be
/// called. All messages must arrive, even those sent immediately before a close. The send slots and buffers of all messages must be
/// released.
pub fn quiet_sends_are_not_told_of(setup: &Setup) {
    const MESSAGES: u64 = 600;
    for (lengths, by_a_timer) in [(&[10][..], false), (&[10, 8193, 300_000], true)] {
        let (mut left, lengths, mut up) = (MESSAGES, lengths.to_vec(), None);
        let mut c = Probe::new(move |cx, event| match event {
            Event::Connect(conn, _) | Event::Writable(conn) => {
                up = Some(*conn);
                while left > 0 && cx.send(*conn, &vec![7; lengths[left as usize % lengths.len()]]).is_ok() {
                    left -= 1;
                }
            }
            Event::Timer(_) => {
                let conn = up.expect("it is up");
                match cx.send(conn, b"the last") {
                    Ok(_) => cx.close(conn),
                    // The grant for the earlier messages has not arrived yet.
                    Err(SendErrorKind::WouldBlock(_)) => _ = cx.timers().set(Duration::from_millis(1), 0),
                    Err(other) => panic!("{other}"),
                }
            }
            _ => {}
        });
        (c.record_messages, c.large) = (false, true);
        let mut s = Probe::default();
        s.record_messages = false;
        let mut p = Pair::new(setup, setup.config().quiet_sends(true), s, c);
        let conn = p.connect();
        p.until("all have arrived", |p| p.s.received == MESSAGES);
        assert_eq!(p.c.sent, 0, "copied messages are not reported");
        // The completion of a send from a region must be reported, because the program must not reuse the memory of the region before the
        // send has completed.
        p.c.record_messages = true;
        let sent = once_there_is_room(&mut p, |cx| cx.send(conn, b"one more")).expect("it is open");
        let mut region = p.client.context().regions().register(conn, 100, &RegionOptions::default()).expect("memory");
        region.bytes_mut().expect("nobody uses it").fill(7);
        let from_region = once_there_is_room(&mut p, |cx| cx.send_region(conn, &region, 0..100)).expect("it is open");
        assert!(from_region.sequence() > sent.sequence());
        p.until("it is reported", |p| p.c.sent == 1);
        let told = p.c.events.iter().rev().find(|event| matches!(event, Event::Sent(..)));
        assert_eq!(told, Some(&Event::Sent(conn, from_region.sequence(), Outcome::Sent)));
        // A call of `reporting` inside another one does not end the effect of the outer one.
        let nested = once_there_is_room(&mut p, |cx| {
            cx.reporting(conn, |cx| {
                cx.reporting(conn, |_| ());
                cx.send(conn, b"reported")
            })
        });
        nested.expect("it is open");
        p.until("it is reported as well", |p| p.c.sent == 2);
        // There are two cases. With the timer, the timer's callback sends the last message. Without it, the last message is sent just
        // before the close, so its send completes together with the goodbye.
        if by_a_timer {
            p.client.context().timers().set(Duration::ZERO, 0);
        } else {
            once_there_is_room(&mut p, |cx| cx.send(conn, b"the last")).expect("it is open");
            p.client.context().close(conn);
        }
        p.until("the end", |p| p.c.live() == 0 && p.s.live() == 0);
        assert_eq!(p.s.received, MESSAGES + 4);
        let last = p.s.events.last();
        assert!(matches!(last, Some(Event::Disconnect(_, DisconnectReason::Closed))), "{last:?}");
        p.finish();
    }
}

/// A disconnect must not wait for sends whose completions are not reported, whichever side has ended the connection.
pub fn an_end_does_not_wait_for_quiet_sends(setup: &Setup) {
    for abort in [false, true] {
        let mut p = Pair::new(setup, setup.config().quiet_sends(true), Probe::echo(), Probe::default());
        let conn = p.connect();
        for sent in 1..=30 {
            p.client.context().send(conn, b"a question").expect("one message is out");
            p.until("the answer", |p| p.c.received == sent);
        }
        if abort {
            p.client.context().abort(conn);
        } else {
            p.client.context().close(conn);
        }
        p.until("the end", |p| p.c.live() == 0 && p.s.live() == 0);
        p.finish();
    }
}

/// Messages that the program writes directly into send buffers must be sent in order with copied messages. A buffer that is not sent
/// must return to its pool.
pub fn in_place_buffers(setup: &Setup) {
    let mut p = Pair::new(setup, setup.config(), Probe::default(), Probe::default());
    let conn = p.connect();
    for i in 0..20_usize {
        let mut cx = p.client.context();
        if i % 2 == 0 {
            let mut buffer = cx.buffer(conn).expect("a buffer");
            assert!(buffer.is_empty() && buffer.capacity() == 8192);
            buffer.set_len(i * 100);
            buffer.copy_from_slice(&pattern(i, i * 100));
            cx.send_buffer(conn, buffer).expect("room");
        } else {
            cx.send(conn, &pattern(i, i * 100)).expect("room");
        }
    }
    drop(p.client.context().buffer(conn).expect("a buffer"));
    p.until("twenty messages", |p| p.s.received == 20);
    for (i, message) in p.s.messages().iter().enumerate() {
        assert_eq!(*message, pattern(i, i * 100));
    }
    p.finish();
}

/// A message that cannot be sent must be refused with a reason, and its buffer must be returned to the program.
pub fn too_long_and_closed_are_refused(setup: &Setup) {
    let server = setup.config().buffer_size(100).large_messages(|l| l.max_message = 0);
    let mut p = Pair::with_configs(setup, server, setup.config(), Probe::default(), Probe::default());
    let conn = p.connect();
    let mut cx = p.client.context();
    assert_eq!(cx.send(conn, &[0; 101]), Err(SendErrorKind::TooLong { len: 101, max: 100 }));
    assert!(cx.send(conn, &[0; 100]).is_ok());
    let buffer = cx.buffer(conn).expect("a buffer");
    assert_eq!(buffer.capacity(), 100);
    cx.close(conn);
    assert_eq!(cx.send(conn, b"late"), Err(SendErrorKind::Closed));
    let refused = cx.send_buffer(conn, buffer).expect_err("it is closing");
    assert_eq!(refused.kind, SendErrorKind::Closed);
    drop(refused);
    p.until("the end", |p| p.c.live() == 0 && p.s.live() == 0);
    assert_eq!(p.s.received, 1);
    p.finish();
}

/// The same traffic must work in each wait mode.
pub fn both_wait_modes(setup: &Setup) {
    for wait in [Wait::Event, Wait::Spin(Duration::from_micros(50)), Wait::Spin(Duration::from_secs(1))] {
        let config = setup.config().wait(wait);
        let mut p = Pair::new(setup, config, Probe::echo(), Probe::default());
        let conn = p.connect();
        for i in 0..50 {
            once_there_is_room(&mut p, |cx| cx.send(conn, &pattern(i, 64))).expect("it is open");
            p.until("the echo", |p| p.c.received == i as u64 + 1);
        }
        p.finish();
    }
}

/// A turn must handle only as many messages as its budget permits, must report if work remains, and must wait no longer than its
/// timeout.
pub fn turns_are_bounded_and_say_so(setup: &Setup) {
    let config = setup.config().completions(|c| c.per_turn = 4);
    let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
    let conn = p.connect();
    for i in 0..40 {
        p.client.context().send(conn, &[i]).expect("room");
    }
    p.until("all are delivered", |p| p.s.received == 40);
    // From now on the server takes no turns, so all of these messages wait for its next turn.
    for i in 0..40 {
        while p.client.context().send(conn, &[i]).is_err() {
            p.turn();
        }
    }
    for _ in 0..10 {
        p.client.turn(&mut p.c, Some(Duration::from_millis(1))).expect("a turn");
    }
    let mut said_more = 0;
    while p.s.received < 80 {
        let before = p.s.received;
        let turn = p.server.turn(&mut p.s, Some(Duration::from_millis(100))).expect("a turn");
        assert!(p.s.received - before <= 4, "{} messages in a turn of 4", p.s.received - before);
        said_more += usize::from(turn.more);
        p.client.turn(&mut p.c, Some(Duration::ZERO)).expect("a turn");
    }
    assert!(said_more > 0, "40 messages in turns of 4, and `more` was never true");
    let before = now();
    p.server.turn(&mut p.s, Some(Duration::from_millis(20))).expect("a turn");
    assert!(now() - before < PATIENCE);
    p.finish();
}
