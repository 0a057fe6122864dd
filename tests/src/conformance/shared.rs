//! The tests of receives that several connections share.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use rdma_reactor::transport::caps::Moderation;
use rdma_reactor::{Blocked, ConnectError, ConnectionId, DisconnectReason, PeerViolation, RejectReason, SendErrorKind};

use super::harness::{Event, HOUR, PATIENCE, Pair, Probe, Setup, at_home, now, pattern};
use super::one_sided::once_there_is_room;
use super::violations::{DATA, WINDOW, message, reason, rude};

/// The number of shared receives in these tests. At most seven eighths of these receives can be claimed. Each connection claims at least
/// [`MIN_CLAIM`].
const SHARED: u32 = 64;
const CONNECTIONS: usize = 11;
/// The number of messages that a peer may send at first. A new connection claims five receives. The hello uses one of them, and three are
/// kept for control messages.
const LEAST: usize = 1;
/// The number of receives that a new connection claims.
const MIN_CLAIM: usize = 5;

fn connect_error(p: &Pair, conn: ConnectionId) -> Option<ConnectError> {
    p.c.events.iter().find_map(|event| match event {
        Event::ConnectError(of, error) if *of == conn => Some(error.clone()),
        _ => None,
    })
}

/// The received messages of each connection.
type Messages = BTreeMap<ConnectionId, Vec<Vec<u8>>>;

/// Creates a handler that stores the received messages of each connection separately. Returns the handler, and a reference to the stored
/// messages.
fn collector() -> (Probe, Rc<RefCell<Messages>>) {
    let got: Rc<RefCell<Messages>> = Rc::default();
    let of = Rc::clone(&got);
    let probe = Probe::new(move |_, event| {
        if let Event::Recv(conn, bytes) = event {
            of.borrow_mut().entry(*conn).or_default().push(bytes.clone());
        }
    });
    (probe, got)
}

/// There are as many connections as shared receives. All connections send as much as their credits permit, at the same time. All messages
/// must arrive, and those of one connection must arrive in order.
pub fn many_share_few(setup: &Setup) {
    const MESSAGES: usize = 60;
    let config = setup.config().shared_receives(Some(SHARED)).receive_depth(16).buffer_size(512);
    let (mut s, got) = collector();
    s.record_messages = false;
    let mut p = Pair::new(setup, config, s, Probe::default());
    p.c.record_messages = false;
    let conns: Vec<_> = (0..CONNECTIONS).map(|_| p.connect()).collect();
    assert_eq!(p.server.stats().memory.shared_posted, SHARED as usize);
    assert!(p.server.stats().memory.shared_unclaimed < MIN_CLAIM);
    let text =
        |i: usize, nth: usize| [&[i as u8][..], &pattern(i * 1000 + nth, 1 + (i * 37 + nth * 11) % 500)].concat();
    let mut next = [0; CONNECTIONS];
    while next.iter().any(|&next| next < MESSAGES) {
        for (i, &conn) in conns.iter().enumerate() {
            // The load is uneven: one connection of three sends as much as its credits permit, the others send one message at a time.
            let most = if i % 3 == 0 { MESSAGES } else { 1 };
            for _ in 0..most.min(MESSAGES - next[i]) {
                match p.client.context().send(conn, &text(i, next[i])) {
                    Ok(_) => next[i] += 1,
                    Err(SendErrorKind::WouldBlock(_)) => break,
                    Err(other) => panic!("{other}"),
                }
            }
        }
        p.turn();
    }
    p.until("all have arrived", |p| p.s.received == (CONNECTIONS * MESSAGES) as u64);
    let mut seen = [false; CONNECTIONS];
    for messages in got.borrow().values() {
        let i = usize::from(messages[0][0]);
        assert!(!std::mem::replace(&mut seen[i], true));
        assert_eq!(messages.len(), MESSAGES);
        assert!(messages.iter().enumerate().all(|(nth, bytes)| *bytes == text(i, nth)), "of connection {i}");
    }
    assert!(p.server.stats().messages.credit_updates > 0, "nothing but grants went back");
    p.finish();
}

/// Sends `count` messages as fast as the window permits. Returns the largest size that the window had.
fn pour(p: &mut Pair, conn: ConnectionId, count: usize) -> usize {
    let (mut sent, mut most) = (0, 0);
    let before = p.s.received;
    while sent < count {
        most = most.max(p.client.context().writable(conn));
        while sent < count && p.client.context().send(conn, b"pour").is_ok() {
            sent += 1;
        }
        p.turn();
    }
    p.until("all have arrived", |p| p.s.received == before + count as u64);
    most
}

/// Sends a message. If a ping or a pong uses the last credit, waits until that credit has returned.
fn send_soon(p: &mut Pair, conn: ConnectionId, payload: &[u8]) {
    once_there_is_room(p, |cx| cx.send(conn, payload)).expect("it is open");
}

/// Returns how often `on_writable` was called for a connection.
fn opened(p: &Pair, conn: ConnectionId) -> usize {
    p.c.count(|e| matches!(e, Event::Writable(of) if *of == conn))
}

/// Sends messages until the window stays closed. It stays closed because the peer keeps all messages.
fn fill(p: &mut Pair, conn: ConnectionId) {
    let mut arrived = p.s.received;
    loop {
        while p.client.context().send(conn, b"keep me").is_ok() {
            arrived += 1;
        }
        let before = opened(p, conn);
        p.until("all of them are kept", |p| p.s.received == arrived);
        // The answer to a keepalive ping may bring a credit. The credit is used here, before the
        // next ping uses it.
        let end = now() + Duration::from_millis(300);
        while opened(p, conn) == before && now() < end {
            p.turn();
        }
        if opened(p, conn) == before {
            return;
        }
    }
}

/// A window must be small at first, grow while the connection sends, and close when all its credits are used. It must leave receives for
/// other connections.
pub fn windows_follow_use(setup: &Setup) {
    let config = setup.config().shared_receives(Some(SHARED)).receive_depth(32).buffer_size(64);
    let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
    p.s.record_messages = false;
    p.c.record_messages = false;
    let busy = p.connect();
    let idle: Vec<_> = (0..2).map(|_| p.connect()).collect();
    // On a slow machine, the window may be one credit smaller while a ping is in flight. The answer to a ping returns the credit of the
    // hello, so afterwards the window may be one credit larger.
    let at_first = p.client.context().writable(busy);
    assert!(at_first <= LEAST + 1, "{at_first} at first");
    let alone = pour(&mut p, busy, 400);
    // The window can grow by about half of the 41 receives that no connection claims. Three of the receives that a connection claims are
    // kept for control messages.
    assert!((10..=22 + MIN_CLAIM - 3).contains(&alone), "{alone} without a pause");
    for &conn in &idle {
        let has = p.client.context().writable(conn);
        assert!(has <= LEAST + 1, "idle ones have what they had, not {has}");
    }
    let left = p.server.stats().memory.shared_unclaimed;
    assert!((20..=30).contains(&left), "{left} are left");
    // A second connection must get a window of similar size. Its receives are those that no connection claims, and those that the first
    // connection releases.
    let second = pour(&mut p, idle[0], 400);
    assert!(second > LEAST + 4, "{second} without a pause");
    // If a send is refused because the window is closed, `on_writable` must be called once.
    while p.client.context().send(busy, b"full").is_ok() {}
    assert_eq!(p.client.context().send(busy, b"more"), Err(SendErrorKind::WouldBlock(Blocked::Window)));
    let before = opened(&p, busy);
    p.until("on_writable", |p| opened(p, busy) > before);
    p.client.context().send(busy, b"room again").expect("room");
    p.finish();
}

/// When a connection ends in any way, the receives that it had claimed must become available to the next connection. No receive may be
/// lost.
pub fn an_end_returns_what_was_promised(setup: &Setup) {
    let config = setup.config().shared_receives(Some(SHARED)).receive_depth(32).buffer_size(64);
    let mut p = Pair::new(setup, config.clone(), Probe::default(), Probe::default());
    p.s.record_messages = false;
    for cycle in 0..12 {
        let conns: Vec<_> = (0..CONNECTIONS).map(|_| p.connect()).collect();
        assert!(p.server.stats().memory.shared_unclaimed < MIN_CLAIM);
        // When a connection of this test ends, some of its messages are in flight, and some have arrived but are not processed.
        for &conn in &conns {
            while p.client.context().send(conn, &[cycle; 64]).is_ok() {}
        }
        match cycle % 3 {
            0 => conns.iter().for_each(|&conn| p.client.context().close(conn)),
            1 => {
                for event in &p.s.events {
                    if let Event::Connect(conn, _) = event {
                        p.server.context().close(*conn);
                    }
                }
            }
            // In this case the client's reactor is dropped while messages are in flight, so no connection sends a goodbye.
            _ => {
                let client = (setup.reactor)(config.clone()).expect("a reactor");
                drop(std::mem::replace(&mut p.client, client));
                p.c = Probe::default();
            }
        }
        p.until("all have ended", |p| p.s.live() + p.c.live() == 0);
        p.until("all promises are back", |p| at_home(&p.server) && at_home(&p.client));
        p.s.events.clear();
        p.c.events.clear();
    }
    // Checks that every counted receive really exists. The program keeps all messages, so each message uses another receive.
    p.s.keep = Some(Vec::new());
    let kept = |p: &Pair| p.s.keep.as_ref().map_or(0, Vec::len);
    loop {
        let (before, refused) = (kept(&p), p.server.stats().memory.shared_unclaimed < MIN_CLAIM);
        if refused {
            break;
        }
        let conn = p.connect();
        fill(&mut p, conn);
        assert!(kept(&p) >= before + LEAST, "{} messages kept, {before} before", kept(&p));
        assert_eq!((p.s.live(), p.c.live()), (1, 1), "every message met a receive");
        p.client.context().close(conn);
        p.until("it has ended", |p| p.s.live() + p.c.live() == 0);
        p.until("what it did not use is back", |p| {
            p.server.stats().memory.shared_unclaimed == SHARED as usize * 7 / 8 - kept(p)
        });
    }
    let messages = p.s.keep.take().expect("kept messages");
    assert!(messages.len() > SHARED as usize * 7 / 8 - MIN_CLAIM, "{} messages kept", messages.len());
    assert!(messages.iter().all(|message| **message == *b"keep me"));
    drop(messages);
    p.until("all receives are back", |p| {
        at_home(&p.server) && p.server.stats().memory.shared_posted == SHARED as usize
    });
    p.finish();
}

/// The program keeps the messages of one connection until only the three credits for control messages are left. Only this connection must
/// receive no further messages. Its keepalive pings must still have credits.
pub fn messages_kept_are_not_promised(setup: &Setup) {
    const DEPTH: usize = 16;
    let config = setup.config().shared_receives(Some(SHARED)).receive_depth(DEPTH as u32).buffer_size(64);
    let config = config.timeouts(|t| (t.keepalive_interval, t.keepalive) = (Duration::from_millis(50), PATIENCE));
    let mut s = Probe::default();
    s.keep = Some(Vec::new());
    let mut p = Pair::new(setup, config, s, Probe::default());
    let (conn, other) = (p.connect(), p.connect());
    // The last messages may have to wait for a credit that the next ping brings.
    fill(&mut p, conn);
    while (p.s.received as usize) < DEPTH - 3 {
        let before = opened(&p, conn);
        p.until("a credit", |p| opened(p, conn) > before);
        fill(&mut p, conn);
    }
    assert_eq!(p.s.received as usize, DEPTH - 3, "all but the three credits for control");
    // The connections send no messages, so their pings can use only the credits that are kept for control messages.
    let pings = |p: &Pair| p.server.stats().connections.pings + p.client.stats().connections.pings;
    let before = pings(&p);
    p.until("more questions", |p| pings(p) >= before + 10);
    fill(&mut p, other);
    assert!(p.s.received as usize >= DEPTH - 3 + LEAST);
    let opened = [conn, other].map(|conn| opened(&p, conn));
    drop(p.s.keep.take());
    p.until("there is room again", |p| [conn, other].map(|conn| self::opened(p, conn)) == opened.map(|n| n + 1));
    let before = p.s.received;
    for conn in [conn, other] {
        send_soon(&mut p, conn, b"room again");
    }
    p.until("both arrive", |p| p.s.received == before + 2);
    p.finish();
}

/// The program keeps all messages of two connections. So the first one claims many receives, and
/// the peer of the second one has no credits. When the program releases the messages of the first,
/// the second must get credits in the next turn of the server: without a ping, and without a timer.
/// When the first is aborted, the second must get credits after the end.
pub fn released_receives_reach_who_waits(setup: &Setup) {
    for how in ["release", "drop", "abort"] {
        let config = setup.config().shared_receives(Some(SHARED)).receive_depth(SHARED).buffer_size(64);
        let config = config.timeouts(|t| (t.keepalive_interval, t.keepalive) = (HOUR, 2 * HOUR));
        let mut s = Probe::default();
        s.keep = Some(Vec::new());
        let mut p = Pair::new(setup, config, s, Probe::default());
        let (busy, waiting) = (p.connect(), p.connect());
        let busy_there = p.s.connection().expect("the server's end of the first connection");
        fill(&mut p, busy);
        let of_busy = p.s.keep.as_ref().map_or(0, Vec::len);
        fill(&mut p, waiting);
        let messages = p.s.keep.as_mut().expect("it keeps all");
        assert!(messages.len() - of_busy < of_busy, "{how}: {of_busy} of {}", messages.len());
        let of_waiting = messages.split_off(of_busy);
        let messages = std::mem::replace(messages, of_waiting);
        let pings = |p: &Pair| p.server.stats().connections.pings + p.client.stats().connections.pings;
        let before = (opened(&p, waiting), pings(&p));
        match how {
            "release" => messages.into_iter().for_each(|message| p.server.context().release(message)),
            "drop" => drop(messages),
            _ => {
                p.server.context().abort(busy_there);
                p.until("the end", |p| p.s.live() == 1);
                drop(messages);
            }
        }
        if how == "abort" {
            p.until("credits after the end", |p| opened(p, waiting) > before.0);
        } else {
            p.server.turn(&mut p.s, Duration::ZERO).expect("the server's turn");
            let deadline = now() + PATIENCE;
            while opened(&p, waiting) == before.0 {
                assert!(now() < deadline, "{how}: no credits after one turn of the server");
                p.client.turn(&mut p.c, Duration::from_millis(1)).expect("the client's turn");
            }
        }
        assert_eq!(pings(&p), before.1, "{how}");
        let arrived = p.s.received;
        send_soon(&mut p, waiting, b"room again");
        p.until("it arrives", |p| p.s.received == arrived + 1);
        drop(p.s.keep.take());
        p.finish();
    }
}

/// A peer that sends more messages than its credits permit must lose its connection. The other peers must still be able to use all receives
/// that were granted to them.
pub fn a_violator_takes_nothing_for_long(setup: &Setup) {
    const BURST: u64 = 30;
    let config = setup.config().shared_receives(Some(SHARED)).receive_depth(16).buffer_size(64);
    let mut p = Pair::with_configs(setup, config, setup.config(), Probe::echo(), Probe::default());
    p.s.record_messages = false;
    p.c.record_messages = false;
    let honest: Vec<_> = (0..6).map(|_| p.connect()).collect();
    let mut noticed = 0;
    for _ in 0..5 {
        let (here, there) = rude(&mut p);
        // The violator sends more messages than were granted to it, but fewer than the number of receives that are not granted to other
        // peers.
        let before = p.s.received;
        for _ in 0..BURST {
            p.client.context().send(here, &message(DATA, WINDOW, b"rude")).expect("room");
        }
        // No violation is detected if the server grants further credits to the violator before the messages arrive.
        p.until("it is noticed, or all arrived", |p| reason(p, there).is_some() || p.s.received == before + BURST);
        if let Some(reason) = reason(&p, there) {
            assert_eq!(reason, DisconnectReason::PeerViolation(PeerViolation::CreditOverrun));
            noticed += 1;
        }
        // All other peers send as many messages as they may, at the same time.
        let before = p.c.received;
        for &conn in &honest {
            for _ in 0..LEAST {
                send_soon(&mut p, conn, b"honest");
            }
        }
        p.until("all are echoed", |p| p.c.received >= before + (honest.len() * LEAST) as u64);
    }
    assert!(noticed > 0);
    // Another violator uses up every receive while the other peers send nothing.
    let (here, there) = rude(&mut p);
    for _ in 0..60 {
        p.client.context().send(here, &message(DATA, WINDOW, b"flood")).expect("room");
    }
    p.until("it is noticed", |p| reason(p, there).is_some());
    let blamed = reason(&p, there).expect("just seen");
    assert!(!matches!(blamed, DisconnectReason::Local { .. } | DisconnectReason::KeepaliveTimeout), "{blamed:?}");
    let before = p.c.received;
    for &conn in &honest {
        send_soon(&mut p, conn, b"still here");
    }
    p.until("all are echoed", |p| p.c.received >= before + honest.len() as u64);
    assert!(honest.iter().all(|&conn| p.client.context().writable(conn) > 0));
    p.finish();
}

/// A device without completion moderation must refuse the setting for it, with an error that names the setting, on the connecting and on
/// the accepting side. On a device with completion moderation, connections must work as usual.
pub fn events_are_held_back_or_a_clear_no(setup: &Setup) {
    let held_back =
        setup.config().completions(|c| c.moderation = Some(Moderation { completions: 16, microseconds: 10 }));
    let mut p = Pair::with_configs(setup, setup.config(), held_back, Probe::echo(), Probe::default());
    let conn = p.client.context().connect(p.address).expect("connecting");
    p.until("it is up, or refused", |p| p.c.live() == 1 || connect_error(p, conn).is_some());
    if let Some(error) = connect_error(&p, conn) {
        println!("skipped: {error}");
        assert!(matches!(error, ConnectError::Unsupported { .. }), "{error:?}");
        assert!(error.to_string().contains("has no completion moderation"), "{error}");
    } else {
        p.client.context().send(conn, b"one").expect("room");
        p.until("the echo", |p| p.c.received == 1);
    }
    p.finish();
}

/// If no receive is left to claim, the accepting side must refuse a connect request, and a connect must fail on the connecting side. Both
/// must report the reason. When a connection ends, the next one must be accepted.
pub fn refused_when_nothing_is_left(setup: &Setup) {
    let few = setup.config().shared_receives(Some(8)).receive_depth(16);
    // The accepting side has too few receives.
    let mut p = Pair::with_configs(setup, few.clone(), setup.config(), Probe::default(), Probe::default());
    let first = p.connect();
    let refused = p.client.context().connect(p.address).expect("connecting");
    p.until("the refusal", |p| connect_error(p, refused).is_some());
    let error = connect_error(&p, refused).expect("just seen");
    assert!(matches!(error, ConnectError::Rejected { reason: RejectReason::Busy, .. }), "{error:?}");
    assert_eq!(p.server.stats().connections.refused, 1);
    p.client.context().close(first);
    p.until("the end", |p| p.s.live() + p.c.live() == 0);
    let next = p.connect();
    send_soon(&mut p, next, b"hello");
    p.until("the message", |p| p.s.received == 1);
    p.finish();
    // The connecting side has too few receives.
    let mut p = Pair::with_configs(setup, setup.config(), few, Probe::default(), Probe::default());
    p.connect();
    let refused = p.client.context().connect(p.address).expect("connecting");
    p.until("the refusal", |p| connect_error(p, refused).is_some());
    assert_eq!(connect_error(&p, refused), Some(ConnectError::Limit { limit: "shared_receives", value: 8 }));
    p.finish();
}
