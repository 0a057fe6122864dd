//! The tests of faults of programs and peers that a device does not detect. On devices, a neighbour (an additional connection of each
//! reactor) must work during the fault ([`Setup::witnessed`]). Open objects are counted before and after. A row number in a comment is that
//! of a row in the tables of `docs/reliability.md`.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Duration;

use rdma_reactor::{
    Access, Blocked, ConnectError, ConnectionId, DisconnectReason, ProviderChoice, RegionOptions, RejectReason,
    RemoteRegion, SendErrorKind, Wait,
};

use super::connect::Deserted;
use super::flow::fill_window;
use super::harness::{CLIENT, Event, HOUR, PATIENCE, Pair, Probe, SERVER, Setup, now};
use super::violations::{DATA, WINDOW, message, reason, rude};
use crate::witness::Witness;

/// The kind of a frame that carries a part of a message, see `docs/wire.md`.
const FRAGMENT: u8 = 10;

/// Returns the reason with which the client's connection has ended, or `None` if it has not ended.
fn end(p: &Pair, conn: ConnectionId) -> Option<DisconnectReason> {
    p.c.events.iter().find_map(|event| match event {
        Event::Disconnect(of, reason) if *of == conn => Some(reason.clone()),
        _ => None,
    })
}

/// Connects. Returns the client's id of the connection and the server's id.
fn connect(p: &mut Pair) -> (ConnectionId, ConnectionId) {
    let here = p.connect();
    let up = |event: &Event| if let Event::Connect(conn, _) = event { Some(*conn) } else { None };
    (here, p.s.events.iter().rev().find_map(up).expect("the server was told"))
}

/// Opens a new connection, and checks that a message on it is echoed.
fn serves_a_new_one(p: &mut Pair) {
    let conn = p.connect();
    let before = (p.c.received, p.s.received);
    while p.client.context().send(conn, b"a new one").is_err() {
        p.turn();
    }
    p.until("the message arrives", |p| p.s.received > before.1);
    p.client.context().close(conn);
    p.until("it ends", |p| end(p, conn).is_some());
    assert_eq!(end(p, conn), Some(DisconnectReason::Local { complete: true }));
}

/// Row 36 of `docs/reliability.md`: a batch has completions of several connections, and the callback of the first completion aborts another
/// connection. All other completions of the batch must be delivered in order.
pub fn the_rest_of_a_batch_is_delivered(setup: &Setup) {
    const EACH: u8 = 8;
    let up: Rc<RefCell<Vec<ConnectionId>>> = Rc::default();
    let cut: Rc<Cell<Option<ConnectionId>>> = Rc::default();
    let (known, victim) = (Rc::clone(&up), Rc::clone(&cut));
    let s = Probe::new(move |cx, event| match event {
        Event::Connect(conn, _) => known.borrow_mut().push(*conn),
        Event::Recv(conn, _) if victim.get().is_none() => {
            let other = known.borrow().iter().copied().find(|other| other != conn).expect("another one");
            victim.set(Some(other));
            cx.abort(other);
        }
        _ => {}
    });
    let mut p = Pair::new(setup, setup.config(), s, Probe::default());
    let conns: Vec<_> = (0..6).map(|_| p.connect()).collect();
    for nth in 0..EACH {
        for conn in &conns {
            p.client.context().send(*conn, &[nth]).expect("room");
        }
    }
    // The server takes no turns during the next loop, so its completions accumulate.
    let deadline = now() + PATIENCE;
    while p.c.sent < 6 * u64::from(EACH) {
        assert!(now() < deadline, "{} are sent", p.c.sent);
        p.client.turn(&mut p.c, Duration::from_millis(1)).expect("a turn");
    }
    p.client.turn(&mut p.c, Duration::from_millis(50)).expect("a turn");
    p.until("five are served and one has ended", |p| {
        p.s.received >= 5 * u64::from(EACH) && p.s.live() == 5 && p.c.live() == 5
    });
    let cut = cut.get().expect("one was cut off");
    assert_eq!(reason(&p, cut), Some(DisconnectReason::Local { complete: false }));
    for conn in up.borrow().iter().filter(|conn| **conn != cut) {
        let of_it = |event: &Event| match event {
            Event::Recv(of, bytes) if of == conn => Some(bytes[0]),
            _ => None,
        };
        assert!(p.s.events.iter().filter_map(of_it).eq(0..EACH), "{conn}");
    }
    let told: Vec<_> = conns.iter().filter_map(|conn| end(&p, *conn)).collect();
    assert_eq!(told, [DisconnectReason::Lost]);
    p.finish();
}

/// Row 41 of `docs/reliability.md`: the pools must never exceed `max_memory`. A connection that would need more memory must be refused, and
/// the side whose limit is reached must report the reason. Existing connections must continue. When one of them ends, a new connection must
/// be accepted.
pub fn connections_past_the_pool_are_refused(setup: &Setup) {
    const MEMORY: usize = 2 << 20;
    let small = setup.config().buffer_size(4 << 10).receive_depth(32).send_depth(32);
    for limited in [SERVER, CLIENT] {
        let config = |side: u8| if side == limited { small.clone().max_memory(MEMORY) } else { small.clone() };
        let mut p = Pair::with_configs(setup, config(SERVER), config(CLIENT), Probe::echo(), Probe::default());
        let errors = |p: &Pair| p.c.count(|event| matches!(event, Event::ConnectError(..)));
        for opened in 1..=10 {
            p.client.context().connect(p.address).expect("connecting");
            p.until("an answer", |p| {
                let side = if limited == SERVER { &p.server } else { &p.client };
                let buffers = side.stats().memory.pool_buffers;
                assert!(buffers * (4 << 10) <= MEMORY, "{buffers} buffers");
                // Waits for the server's side too. The server may evict a connection that is not
                // established yet, to make room for one that its memory does not suffice for.
                p.c.live() + errors(p) == opened && p.s.live() == p.c.live()
            });
        }
        let fit = p.c.live();
        assert!((3..=7).contains(&fit), "{fit} connections of 66 buffers each");
        for event in &p.c.events {
            let Event::ConnectError(_, error) = event else { continue };
            let told = match error {
                ConnectError::Rejected { reason, .. } => limited == SERVER && *reason == RejectReason::Busy,
                ConnectError::Limit { limit, value } => {
                    limited == CLIENT && *limit == "max_memory" && *value == MEMORY as u64
                }
                _ => false,
            };
            assert!(told, "{error:?}");
        }
        p.until("the server knows", |p| p.s.live() == fit);
        let first = p.c.connection().expect("one is up");
        p.client.context().close(first);
        p.until("an end", |p| (p.s.live(), p.c.live()) == (fit - 1, fit - 1));
        serves_a_new_one(&mut p);
        p.finish();
    }
}

/// Rows 23 and 24 of `docs/reliability.md`: many connections are requested at the same time. The connections within the limit must be
/// established. The server must refuse all others, with the limit as the reason.
pub fn a_flood_of_connects_is_refused(setup: &Setup) {
    const FLOOD: usize = 60;
    const MOST: usize = 10;
    let server = setup.config().max_connections(MOST as u32 + setup.neighbours()).max_pending(4);
    let client = setup.config();
    let mut p = Pair::with_configs(setup, server, client, Probe::echo(), Probe::default());
    for _ in 0..FLOOD {
        p.client.context().connect(p.address).expect("connecting");
    }
    let ended = |p: &Pair| p.c.count(|event| matches!(event, Event::ConnectError(..) | Event::Disconnect(..)));
    p.until("each has an answer", |p| p.c.live() + ended(p) == FLOOD);
    p.until("the server knows", |p| p.s.live() == p.c.live());
    assert!((1..=MOST).contains(&p.c.live()), "{} are up", p.c.live());
    let busy = p.c.count(|event| match event {
        Event::ConnectError(_, ConnectError::Rejected { reason, .. }) => *reason == RejectReason::Busy,
        _ => false,
    });
    // On a slow machine, the server may evict an accepted connection that is not up yet, in favour
    // of a later one. The client then gets an error other than `Busy`, or a disconnect.
    let evicted = p.server.stats().connections.evicted;
    assert!((ended(&p) - busy) as u64 <= evicted, "{evicted} were evicted: {:?}", p.c);
    // The test closes only the connections that were established.
    let up = |event: &Event| if let Event::Connect(conn, _) = event { Some(*conn) } else { None };
    for conn in p.c.events.iter().filter_map(up).collect::<Vec<_>>() {
        p.client.context().close(conn);
    }
    p.until("all have ended", |p| p.s.live() + p.c.live() == 0);
    serves_a_new_one(&mut p);
    p.finish();
}

/// Row 51 of `docs/reliability.md`: a message is one byte, or many bytes, longer than the peer's buffers. The peer must end the connection.
pub fn a_message_too_long_for_a_receive_ends_its_connection(setup: &Setup) {
    const BUFFER: usize = 1024;
    let server = setup.config().buffer_size(BUFFER as u32);
    let mut p = Pair::with_configs(setup, server, setup.config(), Probe::echo(), Probe::default());
    let (here, _) = rude(&mut p);
    p.client.context().send(here, &message(DATA, WINDOW, &[1; BUFFER])).expect("room");
    p.until("one that fits has come", |p| p.s.received == 1);
    for len in [BUFFER + 1, 3000, 8000] {
        let (here, there) = rude(&mut p);
        p.client.context().send(here, &message(DATA, WINDOW, &vec![1; len])).expect("the sender's own limit is higher");
        p.until("both know", |p| reason(p, there).is_some() && end(p, here).is_some());
        let told = reason(&p, there).expect("just seen");
        assert!(
            matches!(
                told,
                DisconnectReason::PeerViolation(_)
                    | DisconnectReason::WorkRequest { .. }
                    | DisconnectReason::Transport(_)
                    | DisconnectReason::Lost
            ),
            "{len}: {told:?}"
        );
    }
    assert_eq!(p.s.received, 1);
    serves_a_new_one(&mut p);
    p.finish();
}

/// Row 52 of `docs/reliability.md`: the last part of a message never arrives, although its sender is alive. The connection must end
/// after `Timeouts::transfer`.
pub fn a_message_without_its_last_part_has_an_end(setup: &Setup) {
    let limit = Duration::from_millis(500);
    let server = setup.config().timeouts(|t| t.transfer = limit);
    let mut p = Pair::with_configs(setup, server, setup.config(), Probe::echo(), Probe::default());
    let (here, there) = rude(&mut p);
    let mut part = message(FRAGMENT, WINDOW, b"the first of three");
    part[1] = 2;
    let begun = now();
    p.client.context().send(here, &part).expect("room");
    p.until("the end", |p| reason(p, there).is_some());
    assert_eq!(reason(&p, there), Some(DisconnectReason::TransferTimeout));
    assert!(now() - begun >= limit);
    p.until("the peer knows", |p| end(p, here).is_some());
    assert_eq!(p.s.received, 0, "nothing of it was delivered");
    p.finish();
}

/// Row 54 of `docs/reliability.md`: the peer's program keeps all messages. The peer must receive as many messages as it has receives for
/// data. No message may be lost while the connection is open. A close must end the connection.
pub fn a_peer_that_never_reads_has_limits(setup: &Setup) {
    const DEPTH: u32 = 16;
    let config = setup
        .config()
        .receive_depth(DEPTH)
        .timeouts(|t| t.close = Duration::from_millis(300))
        .timeouts(|t| (t.keepalive_interval, t.keepalive) = (HOUR, 2 * HOUR));
    let mut s = Probe::default();
    s.keep = Some(Vec::new());
    let mut p = Pair::new(setup, config, s, Probe::default());
    let (here, there) = connect(&mut p);
    let most = fill_window(&mut p, here);
    assert!((1..u64::from(DEPTH)).contains(&most), "{most} were taken");
    assert_eq!(p.client.context().send(here, b"more"), Err(SendErrorKind::WouldBlock(Blocked::Window)));
    assert_eq!((end(&p, here), reason(&p, there)), (None, None), "it is alive");
    p.client.context().close(here);
    p.until("both know", |p| end(p, here).is_some() && reason(p, there).is_some());
    assert!(matches!(end(&p, here), Some(DisconnectReason::Local { .. })), "{:?}", end(&p, here));
    p.s.keep = None;
    p.finish();
}

/// Rows 56 and 57 of `docs/reliability.md`: a peer reads or writes with a guessed key, or outside of a region, or with the key of another
/// peer's region. Such an operation must end its connection and change no memory. The last case is not tested on devices that cannot
/// distinguish peers. The connection of the peer for which the region was registered must continue.
pub fn a_guess_costs_its_connection(setup: &Setup) {
    const LEN: u64 = 64;
    let mut p = Pair::new(setup, setup.config(), Probe::echo(), Probe::default());
    let (owner, there) = connect(&mut p);
    let options = RegionOptions::new().allow(Access::REMOTE_READ | Access::REMOTE_WRITE);
    let mut region = p.server.context().regions().register(there, LEN as usize, &options).expect("a region");
    region.copy_from(0, &[0x55; LEN as usize]).expect("nothing is lent");
    let real = region.remote();
    let part = |address: u64, key: u32| RemoteRegion { address, len: 8, key };
    let targets = [
        ("a guessed key", part(real.address, real.key ^ 0x0100)),
        ("no key", part(real.address, 0)),
        ("past the end", part(real.address + LEN - 4, real.key)),
        ("before the start", part(real.address - 4, real.key)),
        ("around the end of all addresses", part(u64::MAX - 3, real.key)),
    ];
    // RDMA devices do not distinguish between connections that use the same key, see `RegionOptions::any_peer`.
    let foreign = (setup.provider == ProviderChoice::Iwarp).then(|| ("another peer's", part(real.address, real.key)));
    for (what, target) in targets.into_iter().chain(foreign) {
        for reads in [false, true] {
            let (here, there) = connect(&mut p);
            let sink = RegionOptions::new().allow(Access::READ_SINK);
            let mut local = p.client.context().regions().register(here, 8, &sink).expect("a region");
            local.copy_from(0, &[0x11; 8]).expect("nothing is lent");
            let sent = match reads {
                true => p.client.context().remote(here).read(target, &mut local, 0..8),
                false => p.client.context().remote(here).write(target, &local, 0..8),
            };
            assert!(sent.is_ok(), "{what}: {sent:?}");
            p.until(what, |p| end(p, here).is_some() && reason(p, there).is_some());
            for told in [end(&p, here), reason(&p, there)].into_iter().flatten() {
                let blamed = !matches!(told, DisconnectReason::Local { .. } | DisconnectReason::KeepaliveTimeout);
                assert!(blamed, "{what}: {told:?}");
            }
            let mut read = [0; 8];
            local.copy_to(0, &mut read);
            assert_eq!(read, [0x11; 8], "{what}");
            let mut now = [0; LEN as usize];
            region.copy_to(0, &mut now);
            assert_eq!(now, [0x55; LEN as usize], "{what}");
        }
    }
    // The peer for which the region was registered can still use the region. When this peer writes beyond the end of the region, its
    // connection ends too.
    let source = p.client.context().regions().register_vec(owner, vec![7; 8], &RegionOptions::new()).expect("a region");
    p.client.context().remote(owner).write(part(real.address, real.key), &source, 0..8).expect("room");
    p.until("it is written", |_| {
        let mut now = [0; LEN as usize];
        region.copy_to(0, &mut now);
        now[..8] == [7; 8] && now[8..] == [0x55; LEN as usize - 8]
    });
    p.client.context().remote(owner).write(part(real.address + LEN - 4, real.key), &source, 0..8).expect("room");
    p.until("the end", |p| end(p, owner).is_some() && reason(p, there).is_some());
    let mut now = [0; LEN as usize];
    region.copy_to(0, &mut now);
    assert_eq!(now[8..], [0x55; LEN as usize - 8]);
    drop((region, source));
    p.finish();
}

/// The callbacks that a test of panics covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Callback {
    Request,
    Connect,
    Recv,
    Sent,
    Writable,
    Disconnect,
    ConnectError,
    Timer,
}

impl Callback {
    fn of(event: &Event) -> Option<Self> {
        Some(match event {
            Event::Request(_) => Self::Request,
            Event::Connect(..) => Self::Connect,
            Event::Recv(..) => Self::Recv,
            Event::Sent(..) => Self::Sent,
            Event::Writable(_) => Self::Writable,
            Event::Disconnect(..) => Self::Disconnect,
            Event::ConnectError(..) => Self::ConnectError,
            Event::Timer(_) => Self::Timer,
            _ => return None,
        })
    }
}

/// Returns a handler that fills the window of each new connection with messages.
fn filler() -> Probe {
    let mut probe = Probe::new(|cx, event| {
        if let Event::Connect(conn, _) = event {
            while cx.send(*conn, &[0; 100]).is_ok() {}
        }
    });
    probe.record_messages = false;
    probe
}

/// Row 70 of `docs/reliability.md`: a callback panics. The connection of the callback must end, with the panic as the reason. No other
/// connection may end. The test covers each callback.
pub fn a_panic_costs_its_connection(setup: &Setup) {
    use Callback::{Connect, Disconnect, Recv, Request, Sent, Timer, Writable};
    for callback in [Request, Connect, Recv, Sent, Writable, Disconnect, Timer] {
        let panicked = Rc::new(Cell::new(false));
        let once = Rc::clone(&panicked);
        let mut server = filler();
        let mut fill = server.react;
        server.react = Box::new(move |cx, event| {
            fill(cx, event);
            if Callback::of(event) == Some(callback) && !once.replace(true) {
                panic!("the program has a defect in {callback:?}");
            }
        });
        let mut p = Pair::new(setup, setup.config().contain_panics(true), server, filler());
        let here = p.client.context().connect(p.address).expect("connecting");
        if callback == Timer {
            p.server.context().timers().set(Duration::from_millis(5), 0);
        }
        if matches!(callback, Timer | Disconnect) {
            p.until("both are up", |p| (p.s.live(), p.c.live()) == (1, 1));
        }
        if callback == Disconnect {
            p.client.context().close(here);
        }
        p.until("the panic", |_| panicked.get());
        let text = format!("the program has a defect in {callback:?}");
        match callback {
            Request => {
                p.until("the refusal", |p| p.c.count(|event| matches!(event, Event::ConnectError(..))) == 1);
                assert_eq!(p.s.live(), 0);
            }
            Timer => {
                p.turn_for(Duration::from_millis(20));
                assert_eq!((p.s.live(), p.c.live()), (1, 1));
            }
            Disconnect => p.until("the end", |p| p.s.live() + p.c.live() == 0),
            _ => {
                let over = |event: &Event| match event {
                    Event::Disconnect(conn, _) | Event::ConnectError(conn, _) => *conn == here,
                    _ => false,
                };
                p.until("the end", |p| p.s.live() == 0 && p.c.count(over) == 1);
                let told = p.s.events.iter().find_map(|event| match event {
                    Event::Disconnect(_, DisconnectReason::Internal(why)) => Some(why.clone()),
                    _ => None,
                });
                assert!(told.expect("its reason").contains(&text));
            }
        }
        assert_eq!(p.server.stats().turns.panics, 1, "{callback:?}");
        serves_a_new_one(&mut p);
        p.finish();
    }
}

/// Row 72 of `docs/reliability.md`: in each callback, the program sends, connects, listens, sets timers, closes connections, and connects
/// to an address without a listener. Every call must have a result.
pub fn every_call_in_every_callback(setup: &Setup) {
    const KINDS: usize = 8;
    let calls: Rc<RefCell<BTreeMap<Callback, u32>>> = Rc::default();
    let begun: Rc<Cell<usize>> = Rc::default();
    let to: Rc<Cell<Option<SocketAddr>>> = Rc::default();
    let (counts, connects, address, local) = (Rc::clone(&calls), Rc::clone(&begun), Rc::clone(&to), setup.address);
    let gone = Deserted::new(setup);
    let nobody = gone.address;
    let (mut s, mut up) = (filler(), Vec::new());
    let mut fill = s.react;
    s.react = Box::new(move |cx, event| {
        fill(cx, event);
        match event {
            Event::Connect(conn, _) => up.push(*conn),
            Event::Disconnect(conn, _) => up.retain(|other| other != conn),
            _ => {}
        }
        let (Some(callback), Some(address)) = (Callback::of(event), address.get()) else { return };
        let mut counts = counts.borrow_mut();
        let count = counts.entry(callback).or_default();
        *count += 1;
        if *count > 2 {
            return;
        }
        let listener = cx.listen(local).expect("listening");
        cx.listeners().close(listener);
        for to in [nobody, address] {
            cx.connect(to).expect("connecting");
            connects.set(connects.get() + 1);
        }
        cx.timers().set(Duration::ZERO, 1);
        let timer = cx.timers().set(HOUR, 2);
        assert!(cx.timers().cancel(timer));
        for conn in &up {
            let sent = cx.send(*conn, b"from any callback");
            assert!(matches!(sent, Ok(_) | Err(SendErrorKind::WouldBlock(_) | SendErrorKind::Closed)), "{sent:?}");
        }
        if up.len() > 3 {
            cx.close(up[0]);
        }
    });
    let mut p = Pair::new(setup, setup.config(), s, filler());
    to.set(Some(p.address));
    p.client.context().connect(p.address).expect("connecting");
    p.server.context().timers().set(Duration::ZERO, 0);
    // The server connects to itself and to an address without a listener, equally often. Each connection of the server to itself calls
    // `on_connect` twice on the server. The client's connection calls it once.
    p.until("it was in each callback, and everything has an outcome", |p| {
        let up = p.s.count(|event| matches!(event, Event::Connect(..)));
        let errors = p.s.count(|event| matches!(event, Event::ConnectError(..)));
        (calls.borrow().len(), up, 2 * errors) == (KINDS, begun.get() + 1, begun.get())
    });
    to.set(None);
    let up = |event: &Event| if let Event::Connect(conn, _) = event { Some(*conn) } else { None };
    for conn in p.s.events.iter().filter_map(up).collect::<Vec<_>>() {
        p.server.context().close(conn);
    }
    p.until("all have ended", |p| p.s.live() + p.c.live() == 0);
    p.finish();
}

/// Row 73 of `docs/reliability.md`: one connection sends as much as possible. At the same time, the neighbour's connection must still be
/// served.
pub fn a_flood_leaves_the_others_alone(setup: &Setup) {
    let floods = Rc::new(Cell::new(true));
    let on = Rc::clone(&floods);
    let mut c = Probe::new(move |cx, event| {
        if let Event::Connect(conn, _) | Event::Writable(conn) | Event::Sent(conn, ..) = event {
            while on.get() && cx.send(*conn, &[1; 1000]).is_ok() {}
        }
    });
    c.record_messages = false;
    let mut s = Probe::default();
    s.record_messages = false;
    let mut p = Pair::new(setup, setup.config(), s, c);
    let (flooding, _) = connect(&mut p);
    let quiet = connect(&mut p).0;
    p.client.context().close(quiet);
    for _ in 0..10 {
        let before = p.s.received;
        p.goes_on();
        p.until("the flood goes on, too", |p| p.s.received >= before + 200);
    }
    assert!(p.s.received > 2000);
    floods.set(false);
    p.client.context().close(flooding);
    p.until("the end", |p| end(p, flooding).is_some());
    p.until("what was accepted arrives", |p| p.s.received == p.c.sent);
    p.finish();
}

/// Rows 76 and 77 of `docs/reliability.md`: a reactor sleeps until completions arrive. Each burst of completions must wake the reactor. The
/// reactor must process the whole burst, although it processes only a few completions in each turn.
pub fn a_burst_wakes_and_leaves_no_tail(setup: &Setup) {
    const CONNECTIONS: u64 = 3;
    let server = setup
        .config()
        .completions(|c| c.per_turn = 3)
        .wait(Wait::Event)
        .timeouts(|t| (t.keepalive_interval, t.keepalive) = (HOUR, 2 * HOUR));
    let client = setup.config().timeouts(|t| (t.keepalive_interval, t.keepalive) = (HOUR, 2 * HOUR));
    let mut s = Probe::default();
    s.record_messages = false;
    let mut p = Pair::with_configs(setup, server, client, s, Probe::default());
    let conns: Vec<_> = (0..CONNECTIONS).map(|_| p.connect()).collect();
    // The neighbour pauses, because its messages would wake the server.
    p.witness.iter_mut().for_each(|witness| witness.rest(true));
    p.turn_for(Duration::from_millis(50));
    let mut due = 0;
    for burst in (1..=20).cycle().take(60) {
        due += CONNECTIONS * burst;
        for _ in 0..burst {
            for conn in &conns {
                while p.client.context().send(*conn, &[7; 30]).is_err() {
                    p.turn();
                }
            }
        }
        p.client.turn(&mut p.c, Duration::ZERO).expect("a turn");
        while p.s.received < due {
            let begun = now();
            p.server.turn(&mut p.s, PATIENCE).expect("a turn");
            assert!(now() - begun < PATIENCE / 2, "nobody woke the server: {} of {due} messages", p.s.received);
            p.client.turn(&mut p.c, Duration::ZERO).expect("a turn");
        }
    }
    p.witness.iter_mut().for_each(|witness| witness.rest(false));
    assert_eq!((p.s.received, p.s.live()), (due, CONNECTIONS as usize));
    p.finish();
}

/// Row 81 of `docs/reliability.md`: ten thousand timers expire at the same time. Each must fire once, in the order in which they were set.
/// No single turn may fire all of them: a turn fires at most a limited number of timers.
pub fn many_timers_leave_room_for_others(setup: &Setup) {
    const TIMERS: u64 = 10_000;
    let mut p = Pair::new(setup, setup.config(), Probe::echo(), Probe::default());
    let conn = p.connect();
    let mut cx = p.client.context();
    for number in 0..TIMERS {
        cx.timers().set(Duration::from_millis(100), number);
    }
    cx.send(conn, b"beside them").expect("room");
    let (mut most, mut before) = (0, 0);
    let deadline = now() + PATIENCE;
    let fired = |p: &Pair| p.c.count(|event| matches!(event, Event::Timer(_))) as u64;
    while before < TIMERS {
        assert!(now() < deadline, "{before} have fired");
        p.server.turn(&mut p.s, Duration::ZERO).expect("a turn");
        p.client.turn(&mut p.c, Duration::from_millis(1)).expect("a turn");
        let now = fired(&p);
        most = most.max(now - before);
        before = now;
    }
    assert!(most <= 1024, "{most} in a turn");
    let timers = p.c.events.iter().filter_map(|event| if let Event::Timer(n) = event { Some(*n) } else { None });
    assert!(timers.eq(0..TIMERS));
    p.until("the echo", |p| p.c.received == 1);
    p.turn_for(Duration::from_millis(20));
    assert_eq!(fired(&p), TIMERS);
    p.finish();
}

/// Row 82 of `docs/reliability.md`: some connections cannot be closed gracefully. A shutdown must end within `Timeouts::close`. A drain
/// must end at its deadline, even if `Timeouts::close` is longer. The peers must be notified.
pub fn a_shutdown_ends_what_is_stuck(setup: &Setup) {
    let limit = Duration::from_millis(500);
    for drains in [false, true] {
        let config = setup
            .config()
            .large_messages(|l| l.eager_limit = 0)
            .timeouts(|t| t.close = if drains { PATIENCE } else { limit });
        let mut p = Pair::new(setup, config, Probe::default(), Probe::default());
        p.c.large = true;
        let full = p.connect();
        let offers = p.connect();
        p.connect();
        let (raw, _) = rude(&mut p);
        // The completion of the first send may be reported after its message has arrived. It must
        // not be counted below.
        p.until("the hello has ended", |p| p.c.sent == 1);
        // From here on, the server takes no turns.
        let mut accepted = 2;
        while p.client.context().send(full, &[1; 1000]).is_ok() {
            accepted += 1;
        }
        p.client.context().send(offers, &vec![2; 1 << 20]).expect("room");
        p.client.context().send(raw, b"no framing").expect("room");
        p.client.context().connect(p.address).expect("connecting");
        p.witness.iter_mut().for_each(|witness| witness.excuse(CLIENT));
        let (begun, sent) = (now(), p.c.sent);
        if drains {
            p.client.context().drain(limit);
            while !p.client.is_drained() {
                assert!(now() - begun < PATIENCE / 2, "{:?}", now() - begun);
                p.client.turn(&mut p.c, Duration::from_millis(10)).expect("a turn");
            }
        } else {
            p.client.shutdown(&mut p.c, PATIENCE).expect("it ends");
        }
        assert!(now() - begun < PATIENCE / 2, "{:?}", now() - begun);
        assert_eq!((p.c.live(), p.client.context().connections()), (0, 0));
        assert_eq!(p.c.sent - sent, accepted, "each send has ended");
        let local = |event: &Event| match event {
            Event::Disconnect(_, reason) => matches!(reason, DisconnectReason::Local { .. }),
            Event::ConnectError(_, error) => *error == ConnectError::Cancelled,
            _ => true,
        };
        assert!(p.c.events.iter().all(local), "{:?}", p.c);
        p.until("the peers know", |p| p.s.live() == 0);
        p.finish();
    }
}

/// Row 83 of `docs/reliability.md`: a reactor is dropped, normally or while a panic of its own turn unwinds. Its peers must report lost
/// connections.
pub fn a_dropped_reactor_leaves_nothing(setup: &Setup) {
    for unwinds in [false, true] {
        let mut server = Probe::default();
        server.react = Box::new(move |_, event| {
            assert!(!(unwinds && matches!(event, Event::Recv(..))), "the program gives up");
        });
        let mut p = Pair::new(setup, setup.config(), server, Probe::default());
        let conns: Vec<_> = (0..3).map(|_| p.connect()).collect();
        p.witness.iter_mut().for_each(|witness| witness.excuse(SERVER));
        let mut accepted = 0;
        for conn in &conns {
            while p.client.context().send(*conn, &[0; 500]).is_ok() {
                accepted += 1;
            }
        }
        let Pair { mut server, mut s, mut client, mut c, mut witness, .. } = p;
        if unwinds {
            let client = (&mut client, &mut c);
            let unwound = catch_unwind(AssertUnwindSafe(move || {
                let deadline = now() + PATIENCE;
                while now() < deadline {
                    client.0.turn(client.1, Duration::ZERO).expect("a turn");
                    server.turn(&mut s, Duration::from_millis(1)).expect("a turn");
                }
            }));
            assert!(unwound.is_err(), "no message came");
        } else {
            drop((server, s));
        }
        let (deadline, mut further) = (now() + PATIENCE, None::<Vec<u64>>);
        // The loop ends when all connections have ended and the neighbour has received echoes after their disconnects.
        while c.live() > 0
            || witness.as_ref().zip(further.as_ref()).is_some_and(|(witness, further)| !witness.has(further))
        {
            assert!(now() < deadline, "not in time: {c:?} {witness:?}");
            client.turn(&mut c, Duration::from_millis(1)).expect("a turn");
            witness.iter_mut().for_each(Witness::check);
            if c.live() == 0 && further.is_none() {
                further = witness.as_ref().map(Witness::further);
            }
        }
        assert_eq!(c.sent, accepted, "each send has ended");
        let lost = c.count(|event| matches!(event, Event::Disconnect(_, DisconnectReason::Lost)));
        assert_eq!(lost, conns.len());
        witness.iter().for_each(Witness::leave);
        client.shutdown(&mut c, PATIENCE).expect("the end");
        drop((client, c));
        drop(witness);
    }
}
