//! The tests of messages larger than one buffer.

use std::time::Duration;

use rdma_reactor::transport::caps::Features;
use rdma_reactor::{Access, Blocked, ConnectionId, Outcome, RegionOptions, SendErrorKind};

use super::harness::{Event, HOUR, Pair, Probe, Setup, pattern};

/// The length of the largest payload that fits in one buffer in these tests, in bytes.
const BUFFER: usize = 4096;

fn connected(setup: &Setup) -> (Pair, ConnectionId) {
    let config = setup.config().buffer_size(BUFFER as u32);
    let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
    p.s.large = true;
    p.c.large = true;
    let conn = p.connect();
    (p, conn)
}

/// Ends a pair. Checks that no region of any transfer remains.
fn finish(mut p: Pair) {
    p.until("all regions are gone", |p| p.client.stats().memory.regions + p.server.stats().memory.regions == 0);
    p.finish();
}

/// A message of any length must arrive as one message, in order with messages that fit in one buffer.
pub fn any_length_arrives_in_order(setup: &Setup) {
    let (mut p, conn) = connected(setup);
    assert_eq!(p.client.context().connection(conn).max_message(), Some(64 << 20));
    let sizes = [10, BUFFER, BUFFER + 1, 0, 100_000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5, 7_654_321, 1];
    let mut sent = 0;
    for (i, &size) in sizes.iter().enumerate() {
        while matches!(p.client.context().send(conn, &pattern(i, size)), Err(SendErrorKind::WouldBlock(_))) {
            p.turn();
        }
        sent += 1;
    }
    p.until("all have arrived and ended", |p| p.s.received == sent && p.c.sent == sent);
    for (i, (&size, message)) in sizes.iter().zip(p.s.messages()).enumerate() {
        assert!(message == pattern(i, size), "message {i}, {size} bytes");
    }
    assert_eq!(p.c.count(|e| matches!(e, Event::Sent(_, _, Outcome::Sent))), sizes.len());
    finish(p);
}

/// If the program closes the connection in `on_recv`, the peer's send of the received message must
/// still be reported as sent.
pub fn a_message_before_a_close_was_sent(setup: &Setup) {
    let s = Probe::new(|cx, event| {
        if let Event::Recv(conn, _) = event {
            cx.close(*conn);
        }
    });
    let mut p = Pair::new(setup, setup.config().buffer_size(BUFFER as u32), s, Probe::default());
    (p.s.large, p.c.large) = (true, true);
    let conn = p.connect();
    p.client.context().send(conn, &pattern(1, 1 << 20)).expect("room");
    p.until("the end", |p| p.s.live() + p.c.live() == 0);
    assert_eq!(p.c.count(|e| matches!(e, Event::Sent(_, _, Outcome::Sent))), 1, "{:?}", p.c);
    finish(p);
}

/// A region must be sent without a copy, even if the region is small. During the send, the program must not be able to change the region.
pub fn regions_are_sent_without_a_copy(setup: &Setup) {
    let (mut p, conn) = connected(setup);
    let len = 3_000_000;
    let mut cx = p.client.context();
    let readable = RegionOptions::new().allow(Access::REMOTE_READ);
    let region = cx.regions().register_vec(conn, pattern(9, len), &readable).expect("a region");
    let private = cx.regions().register_vec(conn, pattern(8, len), &RegionOptions::new()).expect("a region");
    assert_eq!(cx.send_region(conn, &private, 0..len), Err(SendErrorKind::NotReadable { max: BUFFER }));
    cx.send_region(conn, &private, 7..BUFFER + 7).expect("it fits a buffer");
    cx.send_region(conn, &region, 0..0).expect("nothing, either");
    cx.send_region(conn, &region, 100..len).expect("room");
    cx.send_region(conn, &region, 5..2_000_000).expect("two sends of one region");
    // The program drops the regions while the peer is fetching them. The transfers must continue.
    drop((region, private));
    p.until("all four", |p| p.s.received == 4 && p.c.sent == 4);
    let got = p.s.messages();
    assert!(got[0] == &pattern(8, len)[7..BUFFER + 7] && got[1].is_empty());
    assert!(got[2] == &pattern(9, len)[100..] && got[3] == &pattern(9, len)[5..2_000_000]);
    finish(p);
}

/// The memory for large messages is limited on both sides. A message that would exceed this memory must wait, and all messages must arrive
/// in the end.
pub fn memory_is_bounded(setup: &Setup) {
    let size = 1_500_000;
    let config = setup
        .config()
        .buffer_size(BUFFER as u32)
        .large_messages(|l| l.max_message = 2 << 20)
        .large_messages(|l| l.memory = 5_000_000);
    let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
    (p.s.large, p.c.large) = (true, true);
    p.s.keep = Some(Vec::new());
    p.s.record_messages = false;
    let conn = p.connect();
    let too_long = p.client.context().send(conn, &vec![0; (2 << 20) + 1]);
    assert_eq!(too_long, Err(SendErrorKind::TooLong { len: (2 << 20) + 1, max: 2 << 20 }));
    p.client.context().send(conn, &pattern(0, size)).expect("room");
    for i in 1..3 {
        // A connection may use at most half of the memory. A copy of a second message would exceed that half.
        let refused = p.client.context().send(conn, &pattern(i, size));
        assert_eq!(refused, Err(SendErrorKind::WouldBlock(Blocked::Memory)));
        p.until("there is room again", |p| p.c.count(|e| matches!(e, Event::Writable(_))) == i);
        assert_eq!(p.s.received, i as u64);
        p.client.context().send(conn, &pattern(i, size)).expect("room");
        p.turn_for(Duration::from_millis(100));
        assert_eq!(p.s.received, i as u64, "the receiver keeps one: two would be more than half of its memory");
        let mut kept = p.s.keep.replace(Vec::new()).expect("it keeps");
        let message = kept.pop().filter(|_| kept.is_empty()).expect("one");
        assert!(*message == *pattern(i - 1, size));
        let region = message.into_region().expect("memory of its own");
        assert_eq!(region.bytes().map(<[u8]>::len), Some(size));
    }
    p.until("the third", |p| p.s.received == 3);
    p.s.keep = None;
    finish(p);
}

/// Many large messages are in flight in both directions, mixed with small ones. All must arrive in order.
pub fn many_at_once_both_ways(setup: &Setup) {
    let (mut p, conn) = connected(setup);
    let there = p.s.connection().expect("the server was told");
    p.s.record_messages = false;
    p.c.record_messages = false;
    let (mut up, mut down) = (0, 0);
    let total = 120;
    while (up, down) != (total, total) {
        let size = |i: u64| if i % 3 == 0 { 20_000 + 1000 * i as usize } else { i as usize };
        while up < total && p.client.context().send(conn, &pattern(up as usize, size(up))).is_ok() {
            up += 1;
        }
        while down < total && p.server.context().send(there, &pattern(down as usize, size(down))).is_ok() {
            down += 1;
        }
        p.turn();
    }
    p.until("all have arrived and ended", |p| {
        [p.s.received, p.s.sent, p.c.received, p.c.sent].iter().all(|&count| count == total)
    });
    finish(p);
}

/// If a connection is aborted during a transfer, all memory must be released, and every send must complete.
pub fn an_abort_releases_everything(setup: &Setup) {
    for server_goes in [false, true] {
        let (mut p, conn) = connected(setup);
        for i in 0..3 {
            p.client.context().send(conn, &pattern(i, setup.scale.largest.min(20 << 20))).expect("room");
        }
        p.turn();
        p.turn();
        let there = p.s.connection().expect("the server was told");
        if server_goes {
            p.server.context().close(there);
            p.until("both know", |p| p.s.live() + p.c.live() == 0);
            assert_eq!(p.c.sent, 3, "ended, if not well");
            assert_eq!(p.c.count(|e| matches!(e, Event::Sent(_, _, Outcome::Failed(_)))), 3);
        } else {
            // A close must wait until the accepted messages have been fetched.
            p.client.context().close(conn);
            p.until("both know", |p| p.s.live() + p.c.live() == 0);
            assert_eq!((p.c.sent, p.s.received), (3, 3));
        }
        assert_eq!(p.s.messages().len(), p.s.received as usize);
        finish(p);
    }
}

/// The first messages register memory on both sides. Later messages must reuse this memory. Memory that was not needed for some time must
/// be released.
pub fn what_follows_registers_nothing(setup: &Setup) {
    for (len, at_once, messages) in [(1 << 20, 3, 8), (setup.scale.largest, 1, 4)] {
        let config = setup.config().buffer_size(BUFFER as u32);
        let config = config.timeouts(|t| t.pool_idle = Duration::from_secs(3600));
        let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
        (p.s.large, p.c.large) = (true, true);
        (p.s.record_messages, p.c.record_messages) = (false, false);
        let conn = p.connect();
        let message = pattern(1, len);
        let send = |p: &mut Pair, count: u64| {
            for _ in 0..count {
                let before = p.c.sent;
                for _ in 0..at_once {
                    p.client.context().send(conn, &message).expect("room");
                }
                p.until("they have arrived and ended", |p| p.c.sent == before + at_once && p.s.received == p.c.sent);
            }
        };
        let registered = |p: &Pair| [&p.client, &p.server].map(|reactor| reactor.stats().messages.large_registrations);
        send(&mut p, 1);
        let first = registered(&p);
        assert!(first.iter().all(|&count| (1..=at_once).contains(&count)), "{first:?} for the first {at_once}");
        // More messages may be in flight at the same time than in the first round, so these rounds may register further memory.
        send(&mut p, 2);
        let before = registered(&p);
        assert!(before.iter().all(|&count| count <= at_once + 1), "{before:?} for {at_once} at a time");
        send(&mut p, messages);
        println!("{len} bytes: {before:?} registrations, then {:?} for {messages} times {at_once}", registered(&p));
        assert_eq!(registered(&p), before, "the memory of earlier ones serves");
        p.until("the last ones are kept", |p| kept(p).iter().all(|&bytes| bytes >= len));
        finish(p);
    }
    let config = setup.config().buffer_size(BUFFER as u32).timeouts(|t| t.pool_idle = Duration::from_millis(50));
    let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
    (p.s.large, p.c.large) = (true, true);
    let conn = p.connect();
    p.client.context().send(conn, &pattern(1, 1 << 20)).expect("room");
    p.until("it has arrived and ended", |p| p.c.sent == 1 && p.s.received == 1);
    p.until("nobody needs it", |p| kept(p) == [0, 0]);
    finish(p);
}

/// Returns the number of bytes that each side keeps registered for later large messages: first those of the client, then those of the
/// server.
fn kept(p: &Pair) -> [usize; 2] {
    [&p.client, &p.server].map(|reactor| reactor.stats().memory.kept_bytes)
}

/// A side may keep at most `cache` bytes registered for later messages. If the peer had a key to this memory, the memory must be released
/// when the connection ends.
pub fn what_is_kept_is_bounded(setup: &Setup) {
    let len = 1 << 20;
    for limit in [0, len, 256 << 20] {
        let config = setup.config().buffer_size(BUFFER as u32).large_messages(|l| l.cache = limit);
        let config = config.timeouts(|t| t.pool_idle = HOUR);
        let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
        (p.s.large, p.c.large) = (true, true);
        p.s.keep = Some(Vec::new());
        let conn = p.connect();
        for nth in 0..3 {
            p.client.context().send(conn, &pattern(nth, len)).expect("room");
        }
        p.until("they have arrived and ended", |p| p.c.sent == 3 && p.s.received == 3);
        p.s.keep = None;
        p.until("they are done with", |p| p.client.stats().memory.regions + p.server.stats().memory.regions == 0);
        let expected = (3 * len).min(limit / len * len);
        for reactor in [&p.client, &p.server] {
            assert_eq!(reactor.stats().memory.kept_bytes, expected, "of at most {limit}");
        }
        for (nth, message) in p.s.messages().into_iter().enumerate() {
            assert!(message == pattern(nth, len), "message {nth}");
        }
        let features = p.client.context().connection(conn).capabilities().expect("it is up").features;
        let known = features.contains(Features::OPEN_READ_SINKS);
        p.client.context().close(conn);
        p.until("the end", |p| p.c.live() + p.s.live() == 0);
        p.until("its peer had a key of it", |p| p.client.stats().memory.kept_bytes == 0);
        let expected = if known { 0 } else { expected };
        assert_eq!(p.server.stats().memory.kept_bytes, expected, "who had a key of what was fetched");
        finish(p);
    }
}
