//! The tests of flow control, timers, other threads, and silent peers.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use rdma_reactor::{Blocked, ConnectionId, DisconnectReason, Reactor, SendErrorKind};

use super::clock::pause;
use super::harness::{Event, HOUR, PATIENCE, Pair, Probe, Setup, now};

/// A closed window must refuse sends. When the window opens again, `on_writable` must be called exactly once. No message may be lost.
pub fn window_closes_and_opens_once(setup: &Setup) {
    let config = setup.config().receive_depth(8).send_depth(64);
    let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
    let conn = p.connect();
    let mut sent = 0_u32;
    for _ in 0..20 {
        let writable = p.client.context().writable(conn);
        let mut accepted = 0;
        let refusal = loop {
            match p.client.context().send(conn, &sent.to_le_bytes()) {
                Ok(_) => accepted += 1,
                Err(kind) => break kind,
            }
            sent += 1;
        };
        assert_eq!((refusal, accepted), (SendErrorKind::WouldBlock(Blocked::Window), writable));
        // A second refused send must not cause a second call of `on_writable`.
        assert!(p.client.context().send(conn, b"").is_err());
        let before = p.c.count(|e| matches!(e, Event::Writable(_)));
        p.until("on_writable", |p| p.c.count(|e| matches!(e, Event::Writable(_))) > before);
        p.turn_for(Duration::from_millis(5));
        assert_eq!(p.c.count(|e| matches!(e, Event::Writable(_))), before + 1, "once per refusal");
    }
    p.until("all are delivered", |p| p.s.received == u64::from(sent));
    for (i, message) in p.s.messages().iter().enumerate() {
        assert_eq!(*message, (i as u32).to_le_bytes());
    }
    p.finish();
}

/// A program that answers each message must have a credit for each answer, as long as the peer's messages in flight use at most two thirds
/// of the program's receives. With the default settings, these are 40 messages.
pub fn an_echo_has_room(setup: &Setup) {
    const MESSAGES: u64 = 4000;
    for len in [10, 8000] {
        let mut left = MESSAGES - 40;
        let mut c = Probe::new(move |cx, event| match event {
            Event::Connect(conn, _) => {
                (0..40).for_each(|_| assert!(cx.send(*conn, &vec![7; len]).is_ok(), "no room"));
            }
            Event::Recv(conn, _) if left > 0 => {
                cx.send(*conn, &vec![7; len]).expect("an answer has made room");
                left -= 1;
            }
            _ => {}
        });
        c.record_messages = false;
        // The send queue is long, because a device may report the completion of a send long after the answer to it has arrived. The echo
        // handler panics if a send is refused.
        let mut p = Pair::new(setup, setup.config().send_depth(1024), Probe::echo(), c);
        p.connect();
        p.until("all answers", |p| p.c.received == MESSAGES);
        p.finish();
    }
}

/// When `on_writable` is called, the message that was refused must be accepted. This must be true for messages of any length.
pub fn no_call_of_on_writable_is_for_nothing(setup: &Setup) {
    const MESSAGES: u64 = 2000;
    // A message of 8192 bytes just fits in one buffer. A message of 8193 bytes needs two buffers.
    for len in [8192, 8193] {
        let (calls, useless) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        let (called, in_vain, mut left) = (Rc::clone(&calls), Rc::clone(&useless), MESSAGES);
        let mut c = Probe::new(move |cx, event| {
            let (Event::Connect(conn, _) | Event::Writable(conn)) = event else { return };
            let before = left;
            while left > 0 && cx.send(*conn, &vec![7; len]).is_ok() {
                left -= 1;
            }
            if matches!(event, Event::Writable(_)) {
                called.set(called.get() + 1);
                in_vain.set(in_vain.get() + u32::from(left == before));
            }
        });
        (c.record_messages, c.large) = (false, true);
        let mut s = Probe::default();
        s.record_messages = false;
        let mut p = Pair::new(setup, setup.config(), s, c);
        p.connect();
        p.until("all have arrived", |p| p.s.received == MESSAGES);
        println!("{MESSAGES} x {len} B: {} calls, {} for nothing", calls.get(), useless.get());
        assert!(calls.get() > 0, "nothing was refused");
        assert_eq!(useless.get(), 0, "{len} B: of {} calls", calls.get());
        p.finish();
    }
}

/// Both sides send as much as their windows permit for some time. Neither side may stall.
pub fn full_windows_both_ways_do_not_deadlock(setup: &Setup) {
    fn pusher(budget: &Rc<Cell<u32>>) -> Probe {
        let budget = Rc::clone(budget);
        let mut probe = Probe::new(move |cx, event| {
            if let Event::Connect(conn, _) | Event::Writable(conn) | Event::Sent(conn, ..) = event {
                while budget.get() > 0 && cx.send(*conn, &[1; 500]).is_ok() {
                    budget.set(budget.get() - 1);
                }
            }
        });
        probe.record_messages = false;
        probe
    }
    for (depth, sends) in [(5, 1), (5, 64), (6, 3), (64, 64), (64, 2)] {
        let count = setup.scale.messages;
        let budgets = [Rc::new(Cell::new(count)), Rc::new(Cell::new(count))];
        let config = setup.config().receive_depth(depth).send_depth(sends);
        let mut p = Pair::new(setup, config, pusher(&budgets[0]), pusher(&budgets[1]));
        p.connect();
        p.until("all are delivered", |p| [p.s.received, p.c.received] == [u64::from(count); 2]);
        p.finish();
    }
}

/// Sends one message from the server to the client. A client that has received nothing sends early
/// pings, before the first keepalive interval. After this message it sends none, so only data
/// messages change its window until the first keepalive ping.
pub(super) fn welcome(p: &mut Pair) {
    let there = p.s.connection().expect("connected");
    p.server.context().send(there, b"welcome").expect("room");
    p.until("the client has received a message", |p| p.c.received == 1);
}

/// Sends messages from the client until the window is closed and all messages have arrived. The server's program keeps the messages. The
/// answer to an early ping may bring further credits during this call. Those credits are used too. Returns the number of messages that were
/// sent.
pub(super) fn fill_window(p: &mut Pair, conn: ConnectionId) -> u64 {
    let mut sent = 0;
    loop {
        let before = sent;
        while p.client.context().send(conn, b"keep me").is_ok() {
            sent += 1;
        }
        if sent == before {
            return sent;
        }
        p.until("all of them are kept", |p| p.s.received == sent);
    }
}

/// While the program keeps messages, the reactor must withhold their credits from the peer. When the program drops the messages, on any
/// thread, the peer must get the credits.
#[allow(clippy::disallowed_methods, reason = "the release is to come from another thread")]
pub fn detached_messages_withhold_credit(setup: &Setup) {
    const DEPTH: usize = 8;
    let mut s = Probe::default();
    s.keep = Some(Vec::new());
    let config =
        setup.config().receive_depth(DEPTH as u32).timeouts(|t| (t.keepalive_interval, t.keepalive) = (HOUR, 2 * HOUR));
    let mut p = Pair::new(setup, config, s, Probe::default());
    let conn = p.connect();
    let held = fill_window(&mut p, conn);
    // The hello has used one of the credits for control. On a slow machine, so has an early ping
    // whose answer has not arrived yet.
    assert!((DEPTH as u64 - 5..=DEPTH as u64 - 2).contains(&held), "{held} kept: all but the credits for control");
    assert_eq!(p.client.context().send(conn, b"no room"), Err(SendErrorKind::WouldBlock(Blocked::Window)));
    let before = p.c.count(|e| matches!(e, Event::Writable(_)));
    let kept = p.s.keep.take().expect("kept messages");
    assert_eq!(kept.len() as u64, held);
    let releaser = std::thread::spawn(move || {
        for message in kept {
            assert_eq!(&*message, b"keep me");
        }
    });
    p.until("on_writable", |p| p.c.count(|e| matches!(e, Event::Writable(_))) == before + 1);
    releaser.join().expect("the releasing thread");
    p.client.context().send(conn, b"room again").expect("room");
    p.until("the message", |p| p.s.received == held + 1);
    // The test keeps one message, which must stay valid after its connection and its reactor have ended.
    p.s.keep = Some(Vec::new());
    // If an early ping has caused `on_writable`, the credits of the released messages may not have arrived yet.
    while p.client.context().send(conn, b"the last").is_err() {
        p.turn();
    }
    p.until("the last message", |p| p.s.received == held + 2);
    let kept = p.s.keep.take().expect("kept messages");
    p.client.context().close(conn);
    p.until("the end", |p| p.s.live() == 0 && p.c.live() == 0);
    assert_eq!(&*kept[0], b"the last");
    drop(kept);
    p.finish();
}

/// The programs of both sides keep so many messages forever that most receives stay in use. Each side must still be able to use the
/// remaining receives.
pub fn messages_kept_for_good_stall_nobody(setup: &Setup) {
    const DEPTH: u32 = 16;
    // The keepalive interval is so long that no ping can return credits and hide a stall.
    let config = setup
        .config()
        .receive_depth(DEPTH)
        .timeouts(|t| (t.keepalive_interval, t.keepalive) = (Duration::from_secs(300), Duration::from_secs(900)));
    let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
    let conn = p.connect();
    let other = p.s.connection().expect("connected");
    (p.s.keep, p.c.keep) = (Some(Vec::new()), Some(Vec::new()));
    let keep = u64::from(DEPTH) - 5;
    for _ in 0..keep {
        let (s, c) = (p.s.received, p.c.received);
        while p.client.context().send(conn, b"keep me").is_err() {
            p.turn();
        }
        while p.server.context().send(other, b"keep me").is_err() {
            p.turn();
        }
        p.until("they arrive", |p| p.s.received == s + 1 && p.c.received == c + 1);
    }
    let kept = (p.s.keep.take(), p.c.keep.take());
    let mut left = [500; 2];
    while left != [0; 2] {
        while left[0] > 0 && p.client.context().send(conn, b"and on").is_ok() {
            left[0] -= 1;
        }
        while left[1] > 0 && p.server.context().send(other, b"and on").is_ok() {
            left[1] -= 1;
        }
        p.turn();
    }
    p.until("all the others", |p| p.s.received == keep + 500 && p.c.received == keep + 500);
    drop(kept);
    p.finish();
}

/// The program releases messages, and then keeps all later ones. The peer must get the credits of the released messages, even if the
/// program never releases another message.
pub fn messages_kept_after_others_stall_nobody(setup: &Setup) {
    const DEPTH: u32 = 16;
    const GONE: u64 = 6;
    const KEPT: u64 = 7;
    // The keepalive interval is so long that no ping can return credits and hide a stall.
    let config = setup
        .config()
        .receive_depth(DEPTH)
        .timeouts(|t| (t.keepalive_interval, t.keepalive) = (Duration::from_secs(300), Duration::from_secs(900)));
    let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
    let conn = p.connect();
    welcome(&mut p);
    for nth in 1..=GONE + KEPT + 1 {
        if nth == GONE + 1 {
            p.s.keep = Some(Vec::new());
        }
        // Sends the next message only when the credit of the previous one has returned, so the receiver handles each message in a separate
        // turn.
        let deadline = now() + PATIENCE;
        while p.client.context().send(conn, b"message").is_err() {
            assert!(now() < deadline, "no credit for message {nth}");
            p.turn();
        }
        p.until("it arrives", |p| p.s.received == nth);
    }
    p.s.keep = None;
    p.finish();
}

/// Timers must fire in the order of their deadlines, once each, and not early. A cancelled timer must never fire.
pub fn timers_fire_in_order(setup: &Setup) {
    let mut p = Pair::new(setup, setup.config(), Probe::default(), Probe::default());
    let ms = Duration::from_millis;
    let start = loop {
        let (start, mut cx) = (now(), p.client.context());
        let set = [cx.timers().set(ms(30), 3), cx.timers().set(ms(10), 1)];
        if now() - start < ms(20) {
            break start;
        }
        // If the thread paused between the two calls of `set`, the deadlines may have the opposite
        // order.
        assert!(set.into_iter().all(|timer| cx.timers().cancel(timer)));
    };
    let cancelled = {
        let mut cx = p.client.context();
        cx.timers().set(Duration::MAX, 99);
        let cancelled = cx.timers().set(ms(20), 2);
        assert!(cx.timers().cancel(cancelled));
        cancelled
    };
    assert!(p.client.next_deadline().is_some_and(|at| at <= now() + ms(10)));
    p.until("the last timer", |p| p.c.events.contains(&Event::Timer(3)));
    assert!(now() - start >= ms(30));
    assert_eq!(p.c.events, [Event::Timer(1), Event::Timer(3)]);
    assert!(!p.client.context().timers().cancel(cancelled));
    p.finish();
}

/// Another thread must be able to stop the loop. A handle to a dropped reactor must have no effect.
#[allow(clippy::disallowed_methods, reason = "the stop is to come from another thread")]
pub fn remote_stops_the_loop(setup: &Setup) {
    let mut p = Pair::new(setup, setup.config(), Probe::default(), Probe::default());
    let remote = p.client.handle();
    let from_thread = remote.clone();
    let stopper = std::thread::spawn(move || from_thread.stop());
    p.client.run(&mut p.c).expect("running");
    stopper.join().expect("the stopping thread");
    p.finish();
    remote.stop();
    remote.wake();
}

/// If a peer is silent, the connection must end within the keepalive timeout.
pub fn silent_peer_is_given_up(setup: &Setup) {
    let (interval, timeout) = (Duration::from_millis(100), Duration::from_millis(2500));
    let mut p = Pair::new(
        setup,
        setup.config().timeouts(|t| (t.keepalive_interval, t.keepalive) = (interval, timeout)),
        Probe::echo(),
        Probe::default(),
    );
    let conn = p.connect();
    // Both sides are alive but idle. Pings are exchanged, and the connection must not end.
    let start = now();
    p.until("both are asked again and again", |p| {
        let asked = |reactor: &Reactor| reactor.stats().connections.pings;
        asked(&p.client) + asked(&p.server) > 3 && now() - start > timeout
    });
    assert_eq!((p.s.live(), p.c.live()), (1, 1), "idle is not silent");
    let start = now();
    // A ping and a pong may use the only credits of a small window for a moment.
    while p.client.context().send(conn, b"alive").is_err() {
        p.turn();
    }
    p.until("the echo", |p| p.c.received == 1);
    // The server takes no turns, so it appears dead to the client.
    while p.c.live() == 1 {
        assert!(now() - start < PATIENCE, "it is not given up");
        p.client.turn(&mut p.c, Some(Duration::from_millis(10))).expect("a turn");
    }
    assert_eq!(p.c.events.last(), Some(&Event::Disconnect(conn, DisconnectReason::KeepaliveTimeout)));
    assert!(now() - start >= timeout);
    p.until("the server notices too", |p| p.s.live() == 0);
    p.finish();
}

/// A callback blocks its own reactor for longer than the keepalive timeout. The connection must not end: the reactor must not treat its own
/// pause as silence of the peer.
pub fn own_stall_is_not_the_peers(setup: &Setup) {
    let timeout = Duration::from_millis(1500);
    let hasty =
        setup.config().timeouts(|t| (t.keepalive_interval, t.keepalive) = (Duration::from_millis(200), timeout));
    let c = Probe::new(move |_, event| {
        if let Event::Timer(_) = event {
            pause(timeout + Duration::from_millis(500));
        }
    });
    let mut p = Pair::with_configs(setup, setup.config(), hasty, Probe::echo(), c);
    let conn = p.connect();
    p.client.context().timers().set(Duration::from_millis(1), 0);
    p.until("the stall", |p| p.c.events.contains(&Event::Timer(0)));
    let pings = p.client.stats().connections.pings;
    p.until("the peer is asked after it", |p| p.client.stats().connections.pings > pings || p.c.live() == 0);
    assert_eq!(p.c.live(), 1);
    p.client.context().send(conn, b"alive").expect("open");
    p.until("the echo", |p| p.c.received == 1);
    p.finish();
}
