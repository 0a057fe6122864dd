//! The tests of a reactor inside another event loop. That loop sees one descriptor and one deadline of the reactor. Each turn of the
//! reactor handles a limited number of events.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::time::Duration;

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use rdma_reactor::{ConnectionId, Context, DisconnectReason};

use super::harness::{Event, PATIENCE, Pair, Probe, Setup, now};

/// Waits for events. If the process is stopped and continued, the wait is interrupted and this function returns. The caller checks the
/// deadlines again.
fn wait_for(outer: &mut Poll, events: &mut Events, time: Duration) {
    match outer.poll(events, Some(time)) {
        Err(error) if error.kind() == ErrorKind::Interrupted => {}
        waited => waited.expect("the outer poll"),
    }
}

/// Each request that is made between two turns must make the descriptor readable, so that the outer loop takes a turn. That turn must
/// handle the request.
pub fn what_is_asked_from_outside_is_seen_to(setup: &Setup) {
    type Ask = fn(&mut Context<'_>, ConnectionId, SocketAddr);
    let asks: [(&str, Ask); 6] = [
        ("send", |cx, conn, _| _ = cx.send(conn, b"x").expect("room")),
        ("set_timer", |cx, _, _| _ = cx.timers().set(Duration::from_secs(60), 1)),
        ("listen", |cx, _, address| _ = cx.listen(SocketAddr::new(address.ip(), 0)).expect("listening")),
        ("connect", |cx, _, address| _ = cx.connect(address).expect("connecting")),
        ("close", |cx, conn, _| cx.close(conn)),
        ("drain", |cx, _, _| cx.drain(Duration::from_secs(60))),
    ];
    for (what, ask) in asks {
        let mut p = Pair::new(setup, setup.config(), Probe::default(), Probe::default());
        let conn = p.connect();
        let address = p.address;
        let mut outer = Poll::new().expect("an outer poll");
        let fd = p.client.as_raw_fd();
        outer.registry().register(&mut SourceFd(&fd), Token(0), Interest::READABLE).expect("nesting");
        let mut events = Events::with_capacity(8);
        let mut readable = |wait| {
            wait_for(&mut outer, &mut events, wait);
            !events.is_empty()
        };
        // Takes turns until the descriptor is no longer readable, because the reactor is idle.
        while readable(Duration::from_millis(20)) {
            p.turn();
        }
        ask(&mut p.client.context(), conn, address);
        assert!(readable(Duration::ZERO), "{what}");
        p.finish();
    }
}

/// An outer loop takes a turn only when the descriptor is readable or the deadline has passed. The loop must process many messages in small
/// turns, fire all timers, and detect a peer that has become silent.
pub fn an_outer_loop_misses_nothing(setup: &Setup) {
    const ROUNDS: u64 = 2000;
    let config = setup
        .config()
        .completions(|c| c.per_turn = 2)
        .timeouts(|t| (t.keepalive_interval, t.keepalive) = (Duration::from_millis(100), Duration::from_millis(2500)));
    let mut c = Probe::new(|cx, event| match event {
        Event::Connect(conn, _) => {
            for _ in 0..8 {
                cx.send(*conn, b"ping").expect("room");
            }
        }
        Event::Recv(conn, _) => {
            cx.send(*conn, b"ping").expect("room");
        }
        _ => {}
    });
    c.record_messages = false;
    let mut p = Pair::new(setup, config, Probe::echo(), c);
    p.client.context().connect(p.address).expect("connecting");
    p.client.context().timers().set(Duration::from_millis(50), 7);

    let mut outer = Poll::new().expect("an outer poll");
    for (fd, token) in [(p.server.as_raw_fd(), 0), (p.client.as_raw_fd(), 1)] {
        outer.registry().register(&mut SourceFd(&fd), Token(token), Interest::READABLE).expect("nesting");
    }
    let mut events = Events::with_capacity(8);
    let limit = now() + PATIENCE;
    let mut serve_server = true;
    while p.c.live() == 1 || p.c.received < ROUNDS {
        assert!(now() < limit, "the outer loop sleeps on work: {:?}", p.c);
        let deadlines = [p.server.next_deadline().filter(|_| serve_server), p.client.next_deadline()];
        let next = deadlines.into_iter().flatten().min().map(|at| at.saturating_duration_since(now()));
        // If an event were lost, the loop would sleep forever. This time limit makes the test fail instead.
        wait_for(&mut outer, &mut events, next.unwrap_or(Duration::from_secs(20)));
        let readable = |token| events.iter().any(|event| event.token() == Token(token));
        let due = |at: Option<std::time::Instant>| at.is_some_and(|at| at <= now());
        if serve_server && (readable(0) || due(deadlines[0])) {
            p.server.turn(&mut p.s, Some(Duration::ZERO)).expect("the server's turn");
        }
        if readable(1) || due(deadlines[1]) {
            p.client.turn(&mut p.c, Some(Duration::ZERO)).expect("the client's turn");
        }
        // After the last round, the server takes no more turns, so it appears dead to the client.
        serve_server &= p.c.received < ROUNDS;
    }
    assert!(p.c.events.contains(&Event::Timer(7)));
    assert!(matches!(p.c.events.last(), Some(Event::Disconnect(_, DisconnectReason::KeepaliveTimeout))), "{:?}", p.c);
    p.finish();
}
