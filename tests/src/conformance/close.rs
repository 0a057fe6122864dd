//! The tests of how connections end.

use std::cell::RefCell;
use std::rc::Rc;

use rdma_reactor::{DisconnectReason, Outcome, SendErrorKind};

use super::connect::Deserted;
use super::harness::{Event, Pair, Probe, Setup};

/// Sends that were accepted before `close` must arrive. `on_disconnect` must be the last callback on both sides.
pub fn accepted_sends_arrive_before_the_end(setup: &Setup) {
    for count in [0, 1, 30] {
        let mut p = Pair::new(setup, setup.config(), Probe::default(), Probe::default());
        let conn = p.connect();
        let mut cx = p.client.context();
        for i in 0..count {
            cx.send(conn, &[i; 1000]).expect("room");
        }
        cx.close(conn);
        cx.close(conn);
        p.until("the end", |p| p.c.live() == 0 && p.s.live() == 0);
        assert_eq!(p.s.received, u64::from(count));
        assert_eq!(p.c.events.last(), Some(&Event::Disconnect(conn, DisconnectReason::Local { complete: true })));
        let last = p.s.events.last();
        assert!(matches!(last, Some(Event::Disconnect(_, DisconnectReason::Closed))), "{last:?}");
        p.finish();
    }
}

/// After an abort, the peer must report a lost connection, because an abort sends no goodbye. If both sides close, neither side needs to
/// wait for a goodbye.
pub fn an_abort_is_no_goodbye(setup: &Setup) {
    let mut p = Pair::new(setup, setup.config(), Probe::default(), Probe::default());
    let conn = p.connect();
    p.client.context().abort(conn);
    p.until("the end", |p| p.c.live() == 0 && p.s.live() == 0);
    assert_eq!(p.c.events.last(), Some(&Event::Disconnect(conn, DisconnectReason::Local { complete: false })));
    assert_eq!(p.client.stats().connections.cut_off, 1);
    let last = p.s.events.last();
    assert!(matches!(last, Some(Event::Disconnect(_, DisconnectReason::Lost))), "{last:?}");
    p.finish();
}

/// The goodbye must arrive even if data messages have used all credits that data may use.
pub fn a_full_window_has_room_for_a_goodbye(setup: &Setup) {
    let mut server = Probe::default();
    server.keep = Some(Vec::new());
    let mut p = Pair::new(setup, setup.config().receive_depth(8), server, Probe::default());
    let conn = p.connect();
    while p.client.context().send(conn, b"data").is_ok() {}
    p.client.context().close(conn);
    p.until("the end", |p| p.c.live() == 0 && p.s.live() == 0);
    let last = p.s.events.last();
    assert!(matches!(last, Some(Event::Disconnect(_, DisconnectReason::Closed))), "{last:?}");
    p.s.keep = None;
    p.finish();
}

/// A handler may call `close` in every callback. After the close, only completions and one disconnect may follow.
pub fn close_in_every_callback(setup: &Setup) {
    type Condition = fn(&Event) -> bool;
    let conditions: [Condition; 5] = [
        |e| matches!(e, Event::Connect(..)),
        |e| matches!(e, Event::Recv(..)),
        |e| matches!(e, Event::Sent(..)),
        |e| matches!(e, Event::Writable(..)),
        |e| matches!(e, Event::Disconnect(..)),
    ];
    for server_closes in [false, true] {
        for condition in conditions {
            let closer = move |closes: bool| {
                Probe::new(move |cx, event| {
                    if let Event::Connect(conn, _) = event {
                        while cx.send(*conn, &[0; 100]).is_ok() {}
                    }
                    if closes && condition(event) {
                        let (Event::Connect(conn, _)
                        | Event::Recv(conn, _)
                        | Event::Sent(conn, ..)
                        | Event::Writable(conn)
                        | Event::Disconnect(conn, _)) = event
                        else {
                            return;
                        };
                        cx.close(*conn);
                        assert_eq!(cx.send(*conn, b"no"), Err(SendErrorKind::Closed));
                        assert_eq!(cx.writable(*conn), 0);
                    }
                })
            };
            let mut p = Pair::new(setup, setup.config(), closer(server_closes), closer(!server_closes));
            let conn = p.client.context().connect(p.address).expect("connecting");
            p.until("the client is up", |p| p.c.connection().is_some());
            if condition(&Event::Disconnect(conn, DisconnectReason::Local { complete: true })) {
                p.until("the server is up", |p| p.s.connection().is_some());
                p.client.context().close(conn);
            }
            p.until("the end", |p| p.s.live() + p.c.live() == 0 && p.client.stats().connections.disconnected == 1);
            p.finish();
        }
    }
}

/// A call with the id of an ended connection must return an error, even if the slot of the id is in use again.
pub fn stale_ids_are_errors(setup: &Setup) {
    let mut p = Pair::new(setup, setup.config(), Probe::echo(), Probe::default());
    let old = p.connect();
    p.client.context().close(old);
    p.until("the end", |p| p.c.live() == 0 && p.s.live() == 0);
    let new = p.connect();
    assert_eq!(old.slot(), new.slot());
    assert_ne!(old, new);
    let mut cx = p.client.context();
    assert_eq!(cx.send(old, b"x"), Err(SendErrorKind::Closed));
    assert!(cx.buffer(old).is_none());
    assert_eq!((cx.writable(old), cx.connection(old).user(), cx.connection(old).peer_address()), (0, None, None));
    cx.connection(old).set_user(5);
    assert_eq!(cx.connection(new).user(), Some(0));
    cx.close(old);
    // The server's id of the same connection must not be valid at the client.
    let there = p.s.connection().expect("the server was told");
    assert_ne!(there, new);
    assert_eq!(cx.send(there, b"x"), Err(SendErrorKind::Closed));
    cx.abort(there);
    cx.send(new, b"x").expect("the new one is open");
    p.until("the echo", |p| p.c.received == 1);
    p.finish();
}

/// If both sides close at the same time, each side must get exactly one `on_disconnect`.
pub fn both_close_at_once(setup: &Setup) {
    let mut p = Pair::new(setup, setup.config(), Probe::default(), Probe::default());
    for _ in 0..20 {
        p.connect();
        let ends = p.client.stats().connections.disconnected + p.server.stats().connections.disconnected;
        let last = |probe: &Probe| {
            probe.events.iter().rev().find_map(|e| if let Event::Connect(id, _) = e { Some(*id) } else { None })
        };
        let (c, s) = (last(&p.c).expect("connected"), last(&p.s).expect("connected"));
        p.client.context().close(c);
        p.server.context().close(s);
        p.until("both ends", |p| {
            p.client.stats().connections.disconnected + p.server.stats().connections.disconnected == ends + 2
        });
    }
    p.finish();
}

/// The lists and counts of connections in `on_disconnect` and `on_connect_error` must be without
/// the connection that ends. So a program sees there that no connection is left.
pub fn the_last_end_finds_no_connection(setup: &Setup) {
    let (left, seen) = (Rc::new(RefCell::new(Vec::new())), setup.neighbours() as usize);
    let noted = Rc::clone(&left);
    let client = Probe::new(move |cx, event| {
        if let Event::Disconnect(conn, _) | Event::ConnectError(conn, _) = event {
            assert!(cx.connection(*conn).peer_address().is_some(), "the id is good until the callback returns");
            let (ids, all, current) = (cx.connection_ids().count(), cx.connections(), cx.stats().connections.current);
            noted.borrow_mut().push([ids, all, current].map(|count| count - seen));
        }
    });
    let mut p = Pair::new(setup, setup.config(), Probe::default(), client);
    for conn in [p.connect(), p.connect(), p.connect()] {
        p.client.context().close(conn);
    }
    p.until("the three ends", |_| left.borrow().len() == 3);
    let gone = Deserted::new(setup);
    p.client.context().connect(gone.address).expect("connecting starts");
    p.until("the refusal", |_| left.borrow().len() == 4);
    assert_eq!(*left.borrow(), [[2; 3], [1; 3], [0; 3], [0; 3]]);
    p.finish();
}

/// If a reactor is dropped, it sends no goodbye. Its peer must report a lost connection and must not hang.
pub fn a_dropped_reactor_is_a_lost_peer(setup: &Setup) {
    // After a send has failed, the connection must accept no more sends.
    let client = Probe::new(|cx, event| {
        if let Event::Sent(conn, _, Outcome::Failed(_)) = event {
            assert_eq!(cx.send(*conn, b"late"), Err(SendErrorKind::Closed));
        }
    });
    let mut p = Pair::new(setup, setup.config(), Probe::echo(), client);
    let conn = p.connect();
    // On a slow machine, an early ping may use the only credit of a small window for a moment.
    while p.client.context().send(conn, b"hello").is_err() {
        p.turn();
    }
    p.until("the echo", |p| p.c.received == 1);
    while p.client.context().send(conn, &[0; 4096]).is_ok() {}
    let Pair { server, s, mut client, mut c, .. } = p;
    drop(server);
    drop(s);
    while c.live() > 0 {
        client.turn(&mut c, Some(std::time::Duration::from_millis(10))).expect("a turn");
    }
    assert!(matches!(c.events.last(), Some(Event::Disconnect(_, DisconnectReason::Lost))), "{:?}", c.events);
}

/// Closing a listener must not affect its established connections. New connections must be refused.
pub fn listener_closes_connections_stay(setup: &Setup) {
    let mut p = Pair::new(setup, setup.config(), Probe::echo(), Probe::default());
    let conn = p.connect();
    // Until the refusal, nobody else may listen on the closed listener's port. If another test has already got that port, the next listener
    // is closed instead.
    let closed = loop {
        let listener = p.server.context().listen(setup.address).expect("a second listener");
        let address = p.server.context().listeners().local_address(listener).expect("an address");
        p.server.context().listeners().close(listener);
        p.server.context().listeners().close(listener);
        assert_eq!(p.server.context().listeners().local_address(listener), None);
        p.turn();
        if let Ok(reserved) = Deserted::at(address) {
            break reserved;
        }
    };
    p.client.context().connect(closed.address).expect("connecting starts");
    p.until("the refusal", |p| p.client.stats().connections.connect_errors == 1);
    p.client.context().send(conn, b"x").expect("open");
    p.until("the echo", |p| p.c.received == 1);
    p.finish();
}
