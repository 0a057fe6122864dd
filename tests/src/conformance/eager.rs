//! The tests of messages that are longer than one buffer, but not longer than the eager limit. They are sent immediately, in several
//! buffers. Messages above the eager limit are offered: the peer fetches them by RDMA Read.

use std::time::Duration;

use rdma_reactor::{Access, Config, ConnectionId, DisconnectReason, Outcome, RegionOptions, SendErrorKind};

use super::harness::{Event, PATIENCE, Pair, Probe, Setup, now, pattern};

/// The length of the largest payload that fits in one buffer in these tests, in bytes.
const BUFFER: usize = 1024;
/// The eager limit: the length of the longest message that is sent immediately. Such a message needs ten full buffers and a few bytes of
/// another one.
const LIMIT: usize = 10 * BUFFER + 7;
/// The receive depth of a connection. Three of these receives are reserved for control messages.
const DEPTH: usize = 32;

fn config(setup: &Setup) -> Config {
    // Shared receives are disabled, because the tests must know how many receives a new connection has.
    setup
        .config()
        .shared_receives(None)
        .buffer_size(BUFFER as u32)
        .large_messages(|l| l.eager_limit = LIMIT)
        .receive_depth(DEPTH as u32)
}

fn pair(setup: &Setup, config: Config) -> (Pair, ConnectionId) {
    let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
    (p.s.large, p.c.large) = (true, true);
    let conn = p.connect();
    (p, conn)
}

/// Ends a pair. Checks that no state of any message remains.
fn finish(mut p: Pair) {
    p.until("nothing is left", |p| {
        [&p.client, &p.server].iter().all(|reactor| {
            let memory = reactor.stats().memory;
            (memory.regions, memory.fetched_bytes, memory.copied_bytes) == (0, 0, 0)
        })
    });
    p.finish();
}

/// Returns how often both sides have registered memory for messages larger than one buffer.
fn registrations(p: &Pair) -> u64 {
    [&p.client, &p.server].iter().map(|reactor| reactor.stats().messages.large_registrations).sum()
}

/// Messages of lengths near each limit must arrive complete and in order. Only messages above the eager limit may register memory.
pub fn every_border_arrives_in_order(setup: &Setup) {
    let (mut p, conn) = pair(setup, config(setup));
    let there = p.s.connection().expect("the server was told");
    let sizes =
        [BUFFER, BUFFER + 1, 0, 2 * BUFFER - 1, 2 * BUFFER, 2 * BUFFER + 1, 1, 10 * BUFFER, LIMIT - 1, LIMIT, 5];
    for (nth, &size) in sizes.iter().enumerate() {
        // Each message is sent while the whole window is open, so no message is offered for lack of credits.
        p.client.context().send(conn, &pattern(nth, size)).expect("room");
        p.server.context().send(there, &pattern(nth + 100, size)).expect("room");
        p.until("it has arrived and ended", |p| {
            [p.s.received, p.c.received, p.s.sent, p.c.sent] == [nth as u64 + 1; 4]
        });
        while p.client.context().writable(conn).min(p.server.context().writable(there)) < 11 {
            p.turn();
        }
    }
    assert_eq!(registrations(&p), 0, "none of these was offered");
    for (nth, &size) in sizes.iter().enumerate() {
        assert!(p.s.messages()[nth] == pattern(nth, size), "message {nth} of {size} bytes to the server");
        assert!(p.c.messages()[nth] == pattern(nth + 100, size), "message {nth} of {size} bytes to the client");
    }
    p.client.context().send(conn, &pattern(1, LIMIT + 1)).expect("room");
    let before = sizes.len() as u64;
    p.until("one past the limit", |p| p.s.received == before + 1 && p.c.sent == before + 1);
    assert!(p.s.messages()[sizes.len()] == pattern(1, LIMIT + 1));
    assert_eq!(registrations(&p), 2, "one copy to be fetched, and the memory that it was fetched into");
    finish(p);
}

/// A message that needs more buffers than the window has credits must be offered, so that the message does not wait for credits. All
/// messages must stay in order.
pub fn what_has_no_room_is_offered(setup: &Setup) {
    for depth in [5, 6, 9, 14] {
        let (mut p, conn) = pair(setup, config(setup).receive_depth(depth));
        let sizes = [LIMIT, 3, 2 * BUFFER, LIMIT + 1, BUFFER + 1, 0, LIMIT, LIMIT, 2, 2 * BUFFER + 5];
        for (nth, &size) in sizes.iter().enumerate() {
            while let Err(error) = p.client.context().send(conn, &pattern(nth, size)) {
                assert!(matches!(error, SendErrorKind::WouldBlock(_)), "{error}");
                assert!(!p.client.context().connection(conn).writable_for(size));
                p.turn();
            }
        }
        let all = sizes.len() as u64;
        p.until("all of them", |p| (p.s.received, p.c.sent) == (all, all));
        for (nth, (&size, message)) in sizes.iter().zip(p.s.messages()).enumerate() {
            assert!(message == pattern(nth, size), "message {nth} of {size} bytes, depth {depth}");
        }
        assert!(p.c.count(|e| matches!(e, Event::Sent(_, _, Outcome::Failed(_)))) == 0);
        finish(p);
    }
}

/// A side whose eager limit is 0 sends no message in several buffers. It must offer messages that are longer than one buffer, and must
/// still receive messages in several buffers from the peer.
pub fn each_side_decides_what_it_sends(setup: &Setup) {
    let offers = config(setup).large_messages(|l| l.eager_limit = 0);
    let mut p = Pair::with_configs(setup, offers, config(setup), Probe::default(), Probe::default());
    (p.s.large, p.c.large) = (true, true);
    let conn = p.connect();
    p.client.context().send(conn, &pattern(1, LIMIT)).expect("room");
    p.until("one sent immediately", |p| p.s.received == 1 && p.c.sent == 1);
    assert_eq!(registrations(&p), 0);
    let there = p.s.connection().expect("the server was told");
    p.server.context().send(there, &pattern(2, LIMIT)).expect("room");
    p.until("one that is fetched", |p| p.c.received == 1 && p.s.sent == 1);
    assert_eq!(registrations(&p), 2);
    assert!(p.s.messages()[0] == pattern(1, LIMIT) && p.c.messages()[0] == pattern(2, LIMIT));
    finish(p);
}

/// A region that is sent in several buffers must not be copied. Until the last buffer was sent, the program must not be able to change the
/// region.
pub fn regions_are_sent_in_several_buffers(setup: &Setup) {
    let (mut p, conn) = pair(setup, config(setup));
    let mut cx = p.client.context();
    let readable = RegionOptions::new().allow(Access::REMOTE_READ);
    let mut region = cx.regions().register_vec(conn, pattern(3, 2 * LIMIT), &readable).expect("a region");
    cx.send_region(conn, &region, 5..5 + LIMIT).expect("room");
    if setup.secured.is_none() {
        assert!(region.copy_from(4 + LIMIT, &[0]).is_err(), "it is lent");
    }
    p.until("it has arrived and ended", |p| p.s.received == 1 && p.c.sent == 1);
    assert!(p.s.messages()[0] == &pattern(3, 2 * LIMIT)[5..5 + LIMIT]);
    region.copy_from(4 + LIMIT, &[0]).expect("it is lent no more");
    assert_eq!(registrations(&p), 0);
    drop(region);
    finish(p);
}

/// The program keeps messages that arrived in several buffers. These messages must use the memory for large messages, and must not reduce
/// the window. When the memory for large messages is used up, further messages must use receives, as messages in one buffer do. Nothing may
/// stall.
pub fn kept_messages_are_accounted_for(setup: &Setup) {
    let len = 4 * BUFFER;
    for (memory, accounted) in [(1 << 20, 5), (3 * len, 1)] {
        let config =
            config(setup).large_messages(|l| l.max_message = 2 * len as u64).large_messages(|l| l.memory = memory);
        let (mut p, conn) = pair(setup, config);
        p.s.keep = Some(Vec::new());
        for nth in 0..5 {
            p.client.context().send(conn, &pattern(nth, len)).expect("room");
            p.until("it has arrived", |p| p.s.received == nth as u64 + 1 && p.c.sent == p.s.received);
        }
        assert!(p.server.stats().memory.fetched_bytes >= accounted * len);
        assert!(p.server.stats().memory.fetched_bytes <= memory);
        if accounted == 5 {
            assert_eq!(p.server.stats().memory.fetched_bytes, 5 * len);
            while p.client.context().writable(conn) < DEPTH / 2 {
                p.turn();
            }
        } else {
            p.turn_for(Duration::from_millis(20));
            let room = p.client.context().writable(conn);
            assert!(room < DEPTH - 3 - 2 * 4, "some of them keep their receives: {room}");
        }
        assert_eq!(registrations(&p), 0);
        let kept = p.s.keep.take().expect("it keeps");
        for (nth, message) in kept.into_iter().enumerate() {
            assert!(*message == *pattern(nth, len), "message {nth}");
            let message = message.into_region().expect_err("it was not fetched");
            assert!(*message == *pattern(nth, len), "message {nth}, unchanged");
        }
        p.until("they are released", |p| p.server.stats().memory.fetched_bytes == 0);
        for nth in 0..20 {
            while p.client.context().send(conn, &pattern(nth, len)).is_err() {
                p.turn();
            }
        }
        p.until("the window goes on", |p| p.s.received == 25 && p.c.sent == 25);
        finish(p);
    }
}

/// The program keeps the messages of one connection. These messages may use at most half of the memory for large messages, so that other
/// connections can continue. While this connection waits for memory, other connections must not wait.
pub fn a_connection_keeps_no_more_than_half(setup: &Setup) {
    let (eager, offered) = (4 * BUFFER, 3 * LIMIT);
    let memory = 32 * offered;
    let config =
        config(setup).large_messages(|l| l.max_message = 2 * offered as u64).large_messages(|l| l.memory = memory);
    let (mut p, greedy) = pair(setup, config);
    p.s.keep = Some(Vec::new());
    p.s.record_messages = false;
    let (mut sent, deadline) = (0_usize, now() + PATIENCE);
    for nth in 0.. {
        if nth >= 2_000 && sent > memory / 2 {
            break;
        }
        assert!(now() < deadline, "{sent} bytes were sent");
        let len = if nth % 2 == 0 { eager } else { offered };
        if p.client.context().send(greedy, &pattern(nth, len)).is_ok() {
            sent += len;
        } else {
            p.turn();
        }
    }
    p.turn_for(Duration::from_millis(20));
    let kept = p.server.stats().memory.fetched_bytes;
    assert!(kept <= memory / 2, "{kept} of {memory} bytes");
    let honest = p.connect();
    let kept = p.s.keep.take();
    for nth in 0..30 {
        while p.client.context().send(honest, &pattern(nth, if nth % 2 == 0 { eager } else { offered })).is_err() {
            p.turn();
        }
    }
    let ended = |event: &Event| matches!(event, Event::Sent(of, ..) if *of == honest);
    p.until("the other one's messages have arrived", |p| p.c.count(ended) == 30);
    p.client.context().abort(greedy);
    drop(kept);
    finish(p);
}

/// Either side ends the connection in the middle of a message. Each send must complete once, and no
/// state may remain. Messages that were accepted before a close must arrive.
pub fn an_end_in_the_middle_leaves_nothing(setup: &Setup) {
    for way in ["close", "abort", "the reader closes", "the reader is dropped"] {
        let (mut p, conn) = pair(setup, config(setup));
        for nth in 0..3 {
            p.client.context().send(conn, &pattern(nth, LIMIT)).expect("in several buffers, or offered");
        }
        // After this turn, the first parts of a message may be in flight.
        p.client.turn(&mut p.c, Some(Duration::ZERO)).expect("a turn");
        let there = p.s.connection().expect("the server was told");
        match way {
            "close" => p.client.context().close(conn),
            "abort" => p.client.context().abort(conn),
            "the reader closes" => p.server.context().close(there),
            _ => {
                let spare = (setup.reactor)(config(setup)).expect("another reactor");
                drop(std::mem::replace(&mut p.server, spare));
                p.until("the end", |p| p.c.live() == 0);
                assert_eq!(p.c.sent, 3, "{way}: each send has ended");
                continue;
            }
        }
        p.until("both know", |p| p.s.live() + p.c.live() == 0);
        assert_eq!(p.c.sent, 3, "{way}: each send has ended");
        if way == "close" {
            assert_eq!(p.s.received, 3, "what was accepted arrives");
        }
        for (nth, message) in p.s.messages().into_iter().enumerate() {
            assert!(message == pattern(nth, LIMIT), "{way}: message {nth} is whole");
        }
        finish(p);
    }
}

/// If a callback panics on a message in several buffers, the connection must end, and the memory of the message must be released.
pub fn a_panic_over_one_is_contained(setup: &Setup) {
    let config = config(setup).contain_panics(true);
    let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
    p.s = Probe::new(|_, event| {
        if let Event::Recv(_, bytes) = event {
            assert!(bytes.len() != LIMIT, "this program cannot bear it");
        }
    });
    (p.s.large, p.c.large) = (true, true);
    let conn = p.connect();
    p.client.context().send(conn, &pattern(0, LIMIT - 1)).expect("room");
    p.client.context().send(conn, &pattern(1, LIMIT)).expect("room");
    p.until("both know", |p| p.s.live() + p.c.live() == 0);
    let why = p.s.events.iter().find_map(|event| match event {
        Event::Disconnect(_, DisconnectReason::Internal(why)) => Some(why.clone()),
        _ => None,
    });
    assert!(why.expect("the panic").contains("cannot bear it"));
    assert_eq!(p.server.stats().memory.fetched_bytes, 0);
    finish(p);
}
