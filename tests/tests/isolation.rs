//! Faults of one connection, one peer or one device must not affect other connections, peers or devices.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use rdma_reactor::transport::caps::Features;
use rdma_reactor::transport::wc::{Failure, WcStatus};
use rdma_reactor::{
    Access, Blocked, Config, ConnectionId, Context, DisconnectReason, EndpointOptions, Error, Handler, Message,
    Outcome, Reactor, RegionOptions, SendErrorKind, Wait,
};
use rdma_reactor_tests::conformance::harness::{Event, Pair, Probe, Setup, pattern, with_watchdog};
use rdma_reactor_tests::forward::Forward;
use rdma_reactor_tests::gate::{Call, Gate};
use rdma_reactor_tests::patience::{PATIENCE, patient};
use rdma_reactor_tests::sim::fabric::Shared;
use rdma_reactor_tests::sim::quiet::{Node, network, reactor, until};
use rdma_reactor_tests::sim::tcp::address;

/// The failure with which a work request completes in these tests.
const FAILURE: Failure = Failure { status: WcStatus::LocalProtectionError, vendor_error: 0x51 };

fn disconnect(probe: &Probe) -> Option<DisconnectReason> {
    probe.events.iter().find_map(|e| if let Event::Disconnect(_, reason) = e { Some(reason.clone()) } else { None })
}

/// If a completion queue cannot be polled or armed, the connections of its device end. The reactor continues: its timers fire, it uses the
/// device again once the device works, and it can be shut down.
#[test]
fn a_device_that_fails_is_not_the_end_of_the_reactor() {
    let breaks = [Call::PollCq, Call::ReqNotify];
    // In each run, `more` further calls of the kind `call` succeed, and all later ones fail. `more` is varied, so that the first call to
    // fail is sometimes a poll that only looks for work before a sleep, and sometimes a poll that processes completions.
    for (call, more) in breaks.into_iter().flat_map(|call| (0..8).map(move |more| (call, more))) {
        with_watchdog("a_device_that_fails_is_not_the_end_of_the_reactor", || {
            let config = Setup::iwarp().config().wait(Wait::Event).timeouts(|t| t.flush = Duration::from_millis(20));
            let mut p = Pair::new(&Setup::iwarp(), config.clone(), Probe::default(), Probe::default());
            let gate = Gate::default();
            p.client = Forward::reactor(config, Features::empty(), &gate);
            let conn = p.connect();
            gate.break_after(call, more);
            p.client.context().timers().set(Duration::from_millis(5), 7);
            // The messages ensure that the reactor polls the completion queue and arms it.
            while disconnect(&p.c).is_none() {
                if let Err(error) = p.client.context().send(conn, b"into the void") {
                    assert!(matches!(error, SendErrorKind::WouldBlock(_) | SendErrorKind::Closed), "{error}");
                }
                p.turn();
            }
            assert_eq!(disconnect(&p.c), Some(DisconnectReason::DeviceRemoved));
            p.until("the timer", |p| p.c.count(|event| *event == Event::Timer(7)) == 1);
            p.until("the peer knows", |p| p.s.live() == 0);
            gate.heal();
            p.until("its last connection is gone", |p| p.client.stats().connections.current == 0);
            p.s.events.clear();
            p.c = Probe::default();
            let conn = p.connect();
            p.client.context().send(conn, b"well again").expect("room");
            p.until("the message", |p| p.s.received > 0);
            p.client.shutdown(&mut p.c, PATIENCE).expect("nothing is left to wait for");
        });
    }
}

/// If a completion queue cannot be polled, the endpoints of its device end, as the connections do.
#[test]
fn a_device_that_fails_ends_its_endpoints() {
    with_watchdog("a_device_that_fails_ends_its_endpoints", || {
        let (setup, gate, mut probe) = (Setup::iwarp(), Gate::default(), Probe::default());
        let mut reactor = Forward::reactor(setup.config(), Features::empty(), &gate);
        let open = |reactor: &mut Reactor| reactor.context().datagrams().open(setup.address, EndpointOptions::new());
        let lost = open(&mut reactor).expect("an endpoint");
        gate.break_after(Call::PollCq, 0);
        let end = Event::EndpointClosed(lost, DisconnectReason::DeviceRemoved);
        while probe.count(|event| *event == end) == 0 {
            reactor.turn(&mut probe, Duration::from_millis(5)).expect("a turn");
        }
        gate.heal();
        open(&mut reactor).expect("the device works again");
        reactor.shutdown(&mut probe, PATIENCE).expect("nothing is left to wait for");
    });
}

/// If an address moves to another device, as the address of a bond can, the reactor creates the listener of this address again. Other
/// listeners and existing connections stay.
#[test]
fn a_listener_follows_its_address() {
    with_watchdog("a_listener_follows_its_address", || {
        let mut p = Pair::new(&Setup::iwarp(), Setup::iwarp().config(), Probe::default(), Probe::default());
        let gate = Gate::default();
        p.server = Forward::reactor(Setup::iwarp().config(), Features::empty(), &gate);
        let mut listen = || {
            let listener = p.server.context().listen(Setup::iwarp().address).expect("listening");
            (listener, p.server.context().listeners().local_address(listener).expect("its address"))
        };
        let ((moving, moved), (_, other)) = (listen(), listen());
        p.address = moved;
        p.connect();
        gate.move_address();
        p.address = other;
        p.connect();
        assert_eq!(p.server.context().listeners().local_address(moving), Some(moved), "under the same id");
        p.address = moved;
        p.connect();
        assert_eq!(p.s.live(), 3, "connections stay");
        p.server.context().listeners().close(moving);
        p.client.context().connect(moved).expect("connecting");
        p.until("the refusal", |p| p.c.count(|event| matches!(event, Event::ConnectError(..))) == 1);
        p.finish();
    });
}

/// A program that is notified of a failed operation cannot begin another one on the connection, because the connection is already ending.
#[test]
fn nothing_is_accepted_behind_a_failed_operation() {
    with_watchdog("nothing_is_accepted_behind_a_failed_operation", || {
        let client = Probe::new(|cx, event| {
            if let Event::Sent(conn, _, Outcome::Failed(_)) = event {
                assert_eq!(cx.send(*conn, b"one more"), Err(SendErrorKind::Closed));
            }
        });
        let mut p = Pair::new(&Setup::iwarp(), Setup::iwarp().config(), Probe::default(), client);
        let gate = Gate::default();
        p.client = Forward::reactor(Setup::iwarp().config(), Features::empty(), &gate);
        let conn = p.connect();
        gate.fail_completion(FAILURE);
        for _ in 0..5 {
            // The message is too long to be sent inline. An inline send would complete when it is posted, and could not fail later.
            p.client.context().send(conn, &[7; 4096]).expect("room");
        }
        p.until("the end", |p| disconnect(&p.c).is_some());
        assert!(p.c.count(|event| matches!(event, Event::Sent(_, _, Outcome::Failed(_)))) > 0, "{:?}", p.c);
    });
}

/// If a work request fails, the reason of the disconnect names the device, the status, and the device's own error code, which its vendor
/// can explain.
#[test]
fn a_failed_work_request_says_what_the_device_calls_it() {
    with_watchdog("a_failed_work_request_says_what_the_device_calls_it", || {
        let mut p = Pair::new(&Setup::iwarp(), Setup::iwarp().config(), Probe::default(), Probe::default());
        let gate = Gate::default();
        p.client = Forward::reactor(Setup::iwarp().config(), Features::empty(), &gate);
        let conn = p.connect();
        let device = p.client.context().connection(conn).device().expect("it is on a device").to_owned();
        gate.fail_completion(FAILURE);
        // The message is too long to be sent inline. An inline send would complete when it is posted, and could not fail later.
        p.client.context().send(conn, &[7; 4096]).expect("room");
        p.until("the end", |p| disconnect(&p.c).is_some());
        let reason = disconnect(&p.c).expect("just seen");
        assert_eq!(reason, DisconnectReason::WorkRequest { device: device.clone(), failure: FAILURE });
        let said = format!("{device}: a work request failed: local protection error (vendor error 0x51)");
        assert_eq!(reason.to_string(), said);
        assert!(p.c.count(|event| *event == Event::Sent(conn, 0, Outcome::Failed(FAILURE))) <= 1, "{:?}", p.c);
        p.until("the peer knows", |p| p.s.live() == 0);
        p.finish();
    });
}

/// If a device refuses to invalidate a remote key, the program cannot get the memory of the region, the call returns an error, and `Stats`
/// counts the key. This holds for a revoke, for the end of a lease, and for the end of the connection. Once the device invalidates the key,
/// the program gets the memory.
#[test]
fn a_remote_key_that_the_device_keeps_is_reported() {
    with_watchdog("a_remote_key_that_the_device_keeps_is_reported", || {
        let mut p = Pair::new(&Setup::iwarp(), Setup::iwarp().config(), Probe::default(), Probe::default());
        let gate = Gate::default();
        p.client = Forward::reactor(Setup::iwarp().config(), Features::empty(), &gate);
        let conn = p.connect();
        let device = p.client.context().connection(conn).device().expect("it is on a device").to_owned();
        gate.break_after(Call::Invalidate, 0);
        let writable = || RegionOptions::new().allow(Access::REMOTE_WRITE);
        let mut cx = p.client.context();
        let mut asked = cx.regions().register(conn, 64, &writable()).expect("a region");
        let mut of_peer = cx.regions().register(conn, 64, &writable()).expect("a region");
        let lease = writable().any_peer().lifetime(Duration::from_millis(1));
        let mut leased = cx.regions().register(conn, 64, &lease).expect("a region");
        for nth in 1..=2 {
            let error = p.client.context().regions().revoke(&asked).expect_err("the device keeps it").to_string();
            assert!(error.starts_with(&format!("{device}: ")), "{error}");
            assert_eq!(p.client.stats().memory.unrevoked, nth);
        }
        p.until("the lease is over", |p| p.client.stats().memory.unrevoked == 3);
        p.client.context().close(conn);
        // When the connection ends, the reactor also tries to invalidate the keys of the two regions that only the peer of this connection
        // may access. Both attempts fail and are counted.
        p.until("the connection has ended", |p| p.client.stats().memory.unrevoked == 5);
        for region in [&mut asked, &mut of_peer, &mut leased] {
            assert!(region.bytes().is_none() && region.bytes_mut().is_none(), "peers may write it");
        }
        gate.heal();
        for region in [&mut asked, &mut of_peer, &mut leased] {
            p.client.context().regions().revoke(region).expect("the device takes it back");
            p.client.context().regions().revoke(region).expect("there is nothing to take back");
            assert!(region.bytes_mut().is_some());
        }
        let foreign = p
            .client
            .context()
            .regions()
            .register_at([127, 0, 0, 1].into(), 64, &writable().any_peer())
            .expect("a region");
        assert!(matches!(p.server.context().regions().revoke(&foreign), Err(Error::Gone(_))), "of another reactor");
        assert_eq!((p.client.stats().memory.unrevoked, p.client.stats().memory.unreleased), (5, 0));
    });
}

/// A shutdown with a time that exceeds the range of the clock has no time limit.
#[test]
fn a_shutdown_may_take_for_ever() {
    with_watchdog("a_shutdown_may_take_for_ever", || {
        let mut p = Pair::new(&Setup::iwarp(), Setup::iwarp().config(), Probe::default(), Probe::default());
        p.connect();
        p.client.shutdown(&mut p.c, Duration::MAX).expect("it ends");
        assert_eq!(disconnect(&p.c), Some(DisconnectReason::Local { complete: true }));
    });
}

/// A shutdown that waits for a peer which does nothing must sleep, and not spin.
#[test]
fn a_shutdown_sleeps_while_a_peer_does_nothing() {
    with_watchdog("a_shutdown_sleeps_while_a_peer_does_nothing", || {
        let config = Setup::iwarp().config().wait(Wait::Event).timeouts(|t| t.close = Duration::from_millis(300));
        let config = config.large_messages(|l| l.max_message = 8 << 20);
        let mut p = Pair::new(&Setup::iwarp(), config, Probe::default(), Probe::default());
        p.c.large = true;
        let conn = p.connect();
        p.client.context().send(conn, &vec![1; 4 << 20]).expect("room");
        let before = p.client.stats().turns.taken;
        // The shutdown waits until the server has fetched the message, but the server runs no turn.
        p.client.shutdown(&mut p.c, Duration::MAX).expect("it ends");
        let turns = p.client.stats().turns.taken - before;
        assert!(turns < 50, "{turns} turns in 300 ms");
    });
}

/// A program that registers memory for its peer in `on_disconnect`, the last callback of the connection.
#[derive(Default)]
struct Late {
    refusal: Option<Result<(), Error>>,
}

impl Handler for Late {
    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: DisconnectReason) {
        let options = RegionOptions::new().allow(Access::REMOTE_WRITE);
        self.refusal = Some(cx.regions().register(conn, 64, &options).map(drop));
    }
}

/// After a connection has ended, memory that only its peer may access cannot be registered. No peer could use the access rights, and
/// nothing would revoke them later.
#[test]
fn no_rights_for_a_peer_that_is_gone() {
    with_watchdog("no_rights_for_a_peer_that_is_gone", || {
        let mut p = Pair::new(&Setup::iwarp(), Setup::iwarp().config(), Probe::default(), Probe::default());
        let conn = p.connect();
        p.client.context().close(conn);
        let mut late = Late::default();
        while late.refusal.is_none() {
            p.server.turn(&mut p.s, Duration::ZERO).expect("a turn");
            p.client.turn(&mut late, Duration::from_millis(1)).expect("a turn");
        }
        assert!(matches!(late.refusal, Some(Err(Error::Gone("connection")))), "{:?}", late.refusal);
        assert_eq!(p.client.stats().memory.regions, 0);
    });
}

/// A program that records the notifications that the tests below check.
#[derive(Clone, Default)]
struct Told {
    up: Rc<RefCell<Vec<ConnectionId>>>,
    received: Rc<Cell<u64>>,
    ended: Rc<RefCell<Vec<(ConnectionId, DisconnectReason)>>>,
}

impl Handler for Told {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.up.borrow_mut().push(conn);
    }
    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, _: Message<'_>) {
        self.received.set(self.received.get() + 1);
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        self.ended.borrow_mut().push((conn, reason));
    }
}

/// Returns a server and two clients on virtual time, and the records of their programs. Both clients are connected, but the first one runs
/// no more turns.
fn beside_a_silent_client(config: &Config) -> (Shared, [Node; 3], [Told; 3]) {
    let (fabric, told) = (network(3), <[Told; 3]>::default());
    let mut nodes = [0, 1, 2].map(|node| {
        let program = Box::new(told[node].clone());
        Node::new(reactor(node, &fabric, config.clone()), program)
    });
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    for node in 1..3 {
        nodes[node].reactor.context().connect(address(0, 7471)).expect("connecting");
        until(&fabric, &mut nodes, "it is up", |_| {
            told.iter().map(|told| told.up.borrow().len()).sum::<usize>() == 2 * node
        });
    }
    nodes[1].dead = true;
    (fabric, nodes, told)
}

/// A peer that does not fetch the messages offered to it gets at most half of the memory for copies. Large messages to another peer are
/// still accepted. The connection of the silent peer ends when its messages have made no progress for too long.
#[test]
fn a_peer_that_fetches_nothing_takes_half_of_the_memory() {
    const SIZE: usize = 1 << 20;
    let hour = Duration::from_secs(3600);
    let config = Config::default()
        .large_messages(|l| l.max_message = SIZE as u64)
        .large_messages(|l| l.memory = 8 * SIZE)
        .timeouts(|t| (t.keepalive_interval, t.keepalive) = (hour, 2 * hour));
    let (fabric, mut nodes, told) = beside_a_silent_client(&config);
    let [silent, busy] = [0, 1].map(|nth| told[0].up.borrow()[nth]);
    let mut cx = nodes[0].reactor.context();
    let taken = (0..16).take_while(|&nth| cx.send(silent, &pattern(nth, SIZE)).is_ok()).count();
    assert_eq!(taken, 4, "half of the memory");
    assert_eq!(cx.send(silent, &[0; SIZE]), Err(SendErrorKind::WouldBlock(Blocked::Memory)));
    cx.send(busy, &pattern(9, SIZE)).expect("the other half");
    until(&fabric, &mut nodes, "the neighbour's message", |_| told[2].received.get() == 1);
    until(&fabric, &mut nodes, "the silent one's end", |_| !told[0].ended.borrow().is_empty());
    assert_eq!(*told[0].ended.borrow(), [(silent, DisconnectReason::TransferTimeout)]);
    until(&fabric, &mut nodes, "its memory is free", |nodes| nodes[0].reactor.stats().memory.copied_bytes == 0);
}

/// A peer that offers many messages and answers no Reads gets only a quarter of the memory for fetched messages, the part that a peer gets
/// before it has made progress. The messages of another peer still arrive.
#[test]
fn a_peer_that_answers_no_read_takes_a_quarter_of_the_memory() {
    with_watchdog("a_peer_that_answers_no_read_takes_a_quarter_of_the_memory", || {
        const SIZE: usize = 1 << 20;
        let config = patient(Setup::iwarp().config()).large_messages(|l| l.max_message = SIZE as u64);
        let server = config.clone().large_messages(|l| l.memory = 8 * SIZE);
        let mut p = Pair::with_configs(&Setup::iwarp(), server, config.clone(), Probe::default(), Probe::default());
        (p.s.large, p.c.large) = (true, true);
        let first = p.connect();
        for nth in 0..16 {
            p.client.context().send(first, &pattern(nth, SIZE)).expect("room for the offers");
        }
        // This turn posts the offers. It is the last turn of the first client.
        p.client.turn(&mut p.c, Duration::ZERO).expect("a turn");
        let _silent = other_client(&mut p, config);
        p.c.large = true;
        let second = p.connect();
        p.until("the offers have come", |p| p.server.stats().memory.fetched_bytes > 0);
        p.client.context().send(second, &pattern(5, SIZE)).expect("room");
        p.until("the message of the second peer", |p| p.s.received == 1);
        assert_eq!(p.server.stats().memory.fetched_bytes, 2 * SIZE, "what is given on trust waits for the first peer");
    });
}

/// A message of one byte that is offered occupies a page, and counts as one. So the number of such
/// messages that a program keeps is limited, and further ones arrive once it has released some.
#[test]
fn short_messages_that_are_offered_and_kept_are_limited() {
    with_watchdog("short_messages_that_are_offered_and_kept_are_limited", || {
        const MEMORY: usize = 1 << 20;
        const PAGE: usize = 4096;
        let config = patient(Setup::iwarp().config()).large_messages(|l| l.max_message = MEMORY as u64);
        let server = config.clone().large_messages(|l| l.memory = MEMORY);
        let mut p = Pair::with_configs(&Setup::iwarp(), server, config, Probe::default(), Probe::default());
        (p.s.large, p.c.large, p.s.keep) = (true, true, Some(Vec::new()));
        let conn = p.connect();
        let readable = RegionOptions::new().allow(Access::REMOTE_READ);
        let source = p.client.context().regions().register_vec(conn, vec![5; 1], &readable).expect("a region");
        let (mut offered, mut received, mut most) = (0, 0, 0);
        while received < 400 {
            while offered < 400 && p.client.context().offer(conn, &source, 0..1, 1).is_ok() {
                offered += 1;
            }
            p.turn();
            let kept = p.s.keep.as_mut().expect("it keeps messages");
            assert!(p.server.stats().memory.fetched_bytes >= kept.len() * PAGE, "{} are kept", kept.len());
            most = most.max(kept.len());
            if kept.len() >= MEMORY / 2 / PAGE || offered == 400 {
                received += kept.drain(..).count();
            }
        }
        assert_eq!(most, MEMORY / 2 / PAGE, "a connection gets half of the memory");
        p.s.keep = None;
    });
}

/// A copy of a short message occupies a page, and counts as one. The peer chooses the size of its
/// buffers, and so the length from which messages are copied.
#[test]
fn copies_of_short_messages_count_as_pages() {
    let client = Setup::iwarp().config().large_messages(|l| l.eager_limit = 0);
    let server = client.clone().buffer_size(64);
    let mut p = Pair::with_configs(&Setup::iwarp(), server, client, Probe::default(), Probe::default());
    (p.s.large, p.c.large) = (true, true);
    let conn = p.connect();
    for nth in 1..=10 {
        p.client.context().send(conn, &pattern(nth, 100)).expect("room");
        assert_eq!(p.client.stats().memory.copied_bytes, nth * 4096);
    }
    p.until("all of them", |p| p.s.received == 10 && p.client.stats().memory.copied_bytes == 0);
}

/// Replaces the client of the pair by a new one. Returns the old one, which therefore runs no more turns.
fn other_client(p: &mut Pair, config: Config) -> (Reactor, Probe) {
    let client = Reactor::new(config).expect("a reactor");
    (std::mem::replace(&mut p.client, client), std::mem::take(&mut p.c))
}
