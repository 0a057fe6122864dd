//! The tests of corks and flushes, which determine when sends are posted, and of the release of memory.

use std::time::Duration;

use bytes::Bytes;
use rdma_reactor::SendErrorKind;

use super::flow::welcome;
use super::harness::{HOUR, Pair, Probe, Setup, at_home, pattern};

fn doorbells(p: &Pair) -> u64 {
    p.client.stats().messages.doorbells
}

/// A cork must delay sends for several turns. A flush must post them immediately, as one chain.
pub fn a_cork_holds_back_and_a_flush_posts(setup: &Setup) {
    // The pings are far apart, because a ping, or its answer, would be posted in spite of the cork.
    let config = setup.config().timeouts(|t| (t.keepalive_interval, t.keepalive) = (HOUR, 2 * HOUR));
    let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
    let conn = p.connect();
    welcome(&mut p);
    let before = doorbells(&p);
    p.client.context().cork(conn);
    for i in 0..3 {
        p.client.context().send(conn, &pattern(i, 100)).expect("room");
        p.turn();
    }
    assert_eq!((doorbells(&p), p.s.received), (before, 0));
    p.client.context().flush(conn);
    assert_eq!(doorbells(&p), before + 1, "posted before the end of a turn");
    p.until("all three", |p| p.s.received == 3 && p.c.sent == 3);
    // The flush has also removed the cork, so this message is sent without another flush.
    p.client.context().send(conn, &pattern(3, 100)).expect("room");
    p.until("the next one", |p| p.s.received == 4);
    for (i, message) in p.s.messages().iter().enumerate() {
        assert_eq!(*message, pattern(i, 100));
    }
    // When a corked connection is closed, the messages that were accepted must still be sent.
    p.client.context().cork(conn);
    p.client.context().send(conn, b"the last").expect("room");
    p.turn();
    assert_eq!(p.s.received, 4);
    p.client.context().close(conn);
    p.until("the end", |p| p.s.live() == 0 && p.c.live() == 0);
    assert_eq!(p.s.received, 5);
    p.client.context().cork(conn);
    p.client.context().flush(conn);
    p.finish();
}

/// If a program corks a connection and forgets the cork, nothing may stall. The reactor must post the sends when half of the send queue is
/// filled, and before it refuses a send.
pub fn a_forgotten_cork_stops_nothing(setup: &Setup) {
    for (sends, receives) in [(16, 64), (64, 8), (1, 8)] {
        let config = setup.config().send_depth(sends).receive_depth(receives);
        let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
        let conn = p.connect();
        let total = 300;
        let mut sent = 0;
        p.client.context().cork(conn);
        while sent < total {
            match p.client.context().send(conn, &pattern(sent, 50)) {
                Ok(_) => sent += 1,
                Err(SendErrorKind::WouldBlock(_)) => p.turn(),
                Err(error) => panic!("{error}"),
            }
        }
        p.client.context().flush(conn);
        p.until("all have arrived", |p| p.s.received == total as u64 && p.c.sent == total as u64);
        p.finish();
    }
}

/// A pool must release memory that was not needed for some time, and must grow again when needed.
pub fn a_pool_shrinks_and_grows_again(setup: &Setup) {
    let config = setup.config().timeouts(|t| t.pool_idle = Duration::from_millis(20)).buffer_size(16 << 10);
    let mut p = Pair::new(setup, config, Probe::echo(), Probe::default());
    let address = p.address;
    let buffers = |p: &Pair| [&p.client, &p.server].map(|reactor| reactor.stats().memory.pool_buffers);
    let mut first = None;
    for round in 1..=2 {
        let mut opened = Vec::new();
        for count in 1..=5 {
            opened.push(p.client.context().connect(address).expect("room"));
            let up = 5 * (round - 1) + count;
            p.until("it is up", |p| {
                p.s.live() as u64 == count && p.c.live() as u64 == count && p.client.stats().connections.connected == up
            });
            first.get_or_insert_with(|| buffers(&p));
        }
        let (peak, first) = (buffers(&p), first.unwrap_or_default());
        assert!((0..2).all(|side| 2 * first[side] < peak[side]), "{round}: {first:?}, {peak:?}");
        p.client.context().send(opened[0], &pattern(7, 9000)).expect("room");
        p.until("the echo", |p| p.c.received == round);
        for conn in opened {
            p.client.context().close(conn);
        }
        p.until("all have ended", |p| p.s.live() + p.c.live() == 0);
        // The pool keeps its first slab, which is large enough for one connection. It releases each other slab when no buffer of the slab
        // is in use any more.
        p.until("memory is released", |p| (0..2).all(|side| buffers(p)[side] <= first[side]));
        p.until("the buffers are free", |p| at_home(&p.client) && at_home(&p.server));
    }
    p.finish();
}

/// A message must become `Bytes` without a copy. Its buffer must return to its pool when the last `Bytes` is dropped.
pub fn bytes_without_a_copy(setup: &Setup) {
    let config = setup.config().receive_depth(16);
    let mut s = Probe::default();
    s.keep = Some(Vec::new());
    let mut p = Pair::new(setup, config, s, Probe::default());
    p.s.large = true;
    let conn = p.connect();
    for size in [100, 100_000] {
        p.client.context().send(conn, &pattern(size, size)).expect("room");
        p.until("it is kept", |p| p.s.keep.as_ref().is_some_and(|kept| kept.len() == 1));
        let message = p.s.keep.as_mut().and_then(Vec::pop).expect("it is kept");
        let address = message.as_ptr();
        let bytes = Bytes::from(message);
        assert_eq!((bytes.as_ptr(), &bytes[..]), (address, &pattern(size, size)[..]));
        let part = bytes.slice(50..60);
        drop(bytes);
        p.turn();
        assert_eq!(part[..], pattern(size, size)[50..60]);
        drop(part);
    }
    p.until("its memory is released", |p| p.server.stats().memory.regions == 0);
    p.client.context().close(conn);
    p.until("the end", |p| p.s.live() + p.c.live() == 0);
    p.until("all buffers are home", |p| at_home(&p.server));
    p.finish();
}
