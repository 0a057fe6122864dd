//! Four reactors on two cores serve 1,000 connections. Connections and messages must be distributed evenly, within ten
//! percent, also after many connections were replaced.
#![allow(clippy::disallowed_methods, reason = "a thread for each reactor")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use rdma_reactor::{
    Config, ConnectError, ConnectRequest, ConnectionId, Context, Decision, DisconnectReason, Handler, Message,
    ProviderChoice, Reactor, Reactors,
};
use rdma_reactor_tests::conformance::harness::{now, with_watchdog_of};
use rdma_reactor_tests::patience::{PATIENCE, TEST, patient};

const REACTORS: usize = 4;
const CONNECTIONS: usize = 1000;
const ECHOES: usize = 100;

/// A reactor that is draining when the group is created accepts no connections of the group.
#[test]
fn a_draining_reactor_has_no_place_in_a_new_group() {
    with_watchdog_of(TEST, "a_draining_reactor_has_no_place_in_a_new_group", || {
        let config = patient(Config::default().provider(ProviderChoice::Iwarp));
        let mut reactors = [0; 2].map(|_| Reactor::new(config.clone()).expect("a reactor"));
        reactors[0].context().drain(PATIENCE);
        while !reactors[0].is_drained() {
            reactors[0].turn(&mut Echo(0, Arc::default()), Duration::ZERO).expect("a turn");
        }
        let group = Reactors::of(&mut reactors);
        assert_eq!((group.load(0), group.load(1)), (None, Some(0)));
    });
}

/// If other threads drain a reactor twice, the first deadline must hold, also if the reactor
/// handles both requests in one turn.
#[test]
fn the_first_deadline_of_a_drain_holds() {
    struct Deadlines(Vec<Duration>);
    impl Handler for Deadlines {
        fn on_drain(&mut self, _: &mut Context<'_>, deadline: Duration) {
            self.0.push(deadline);
        }
    }
    with_watchdog_of(TEST, "the_first_deadline_of_a_drain_holds", || {
        let mut reactor: Reactor =
            Reactor::new(patient(Config::default().provider(ProviderChoice::Iwarp))).expect("a reactor");
        let (handle, first) = (reactor.handle(), Duration::from_secs(7));
        handle.drain(first);
        handle.drain(PATIENCE);
        let mut handler = Deadlines(Vec::new());
        while handler.0.is_empty() {
            reactor.turn(&mut handler, Duration::ZERO).expect("a turn");
        }
        assert_eq!(handler.0, [first]);
    });
}

struct Echo(u8, Arc<AtomicUsize>);

impl Handler for Echo {
    fn on_connect_request(&mut self, _: &mut Context<'_>, _: ConnectRequest<'_>) -> Decision {
        Decision::AcceptWith(vec![self.0])
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.1.fetch_add(1, Ordering::Relaxed);
        cx.send(conn, &message).expect("an echo has room");
    }
}

/// A client that has one message in flight on each connection. The first byte of a message is the number of echoes that
/// are still to come.
#[derive(Default)]
struct Client {
    live: Vec<ConnectionId>,
    echoes: usize,
    wanted: usize,
}

impl Handler for Client {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.live.push(conn);
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        panic!("{conn}, {} are live: {error}", self.live.len());
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.echoes += 1;
        let left = message[0];
        if left > 1 {
            cx.send(conn, &[left - 1; 64]).expect("one at a time");
        }
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, _: DisconnectReason) {
        self.live.retain(|&live| live != conn);
    }
}

fn config() -> Config {
    patient(Config::default()).provider(ProviderChoice::Iwarp).receive_depth(8).send_depth(4).buffer_size(256)
}

fn until(reactor: &mut Reactor, client: &mut Client, what: &str, mut holds: impl FnMut(&Client) -> bool) {
    let end = now() + PATIENCE;
    while !holds(client) {
        assert!(now() < end, "{what}: {} live, {} echoes", client.live.len(), client.echoes);
        reactor.turn(client, Duration::from_millis(5)).expect("a turn");
    }
}

#[track_caller]
fn assert_even(what: &str, parts: &[usize], all: usize) {
    println!("{what}: {parts:?}");
    assert_eq!(parts.iter().sum::<usize>(), all, "{what}");
    let even = all as f64 / parts.len() as f64;
    assert!(parts.iter().all(|&part| (part as f64 - even).abs() <= 0.1 * even), "{what}: {parts:?}, {even} is even");
}

fn open(reactor: &mut Reactor, client: &mut Client, address: SocketAddr, loads: impl Fn() -> Vec<usize>, count: usize) {
    for _ in 0..count {
        reactor.context().connect(address).expect("connecting");
    }
    until(reactor, client, "connecting", |client| {
        client.live.len() == CONNECTIONS && loads().iter().sum::<usize>() == CONNECTIONS
    });
}

#[test]
fn a_thousand_connections_are_shared_evenly() {
    with_watchdog_of(TEST, "a_thousand_connections_are_shared_evenly", || {
        rlimit::increase_nofile_limit(1 << 16).expect("the limit of open files");
        let mut reactors: Vec<_> = (0..REACTORS).map(|_| Reactor::new(config()).expect("a reactor")).collect();
        let group = Reactors::of(&mut reactors);
        let listener = reactors[0].context().listen(([127, 0, 0, 1], 0).into()).expect("a port");
        let address = reactors[0].context().listeners().local_address(listener).expect("it listens");
        let counts: Vec<Arc<AtomicUsize>> = (0..REACTORS).map(|_| Arc::default()).collect();
        let spawn = |(index, mut reactor): (usize, Reactor)| {
            let mut echo = Echo(index as u8, Arc::clone(&counts[index]));
            thread::spawn(move || {
                // Two reactors share each core. On a machine with one core, all of them share it.
                Reactors::pin(index % 2).expect("a core");
                reactor.run(&mut echo).map(|()| reactor.stats())
            })
        };
        let threads: Vec<_> = reactors.into_iter().enumerate().map(spawn).collect();
        let loads = || (0..REACTORS).map(|index| group.load(index).expect("it takes connections")).collect::<Vec<_>>();
        let (mut reactor, mut client) = (Reactor::new(config()).expect("a reactor"), Client::default());

        open(&mut reactor, &mut client, address, loads, CONNECTIONS);
        assert_even("connections", &loads(), CONNECTIONS);
        for round in 0..2 {
            let start = now();
            client.wanted += CONNECTIONS * ECHOES;
            for conn in client.live.clone() {
                reactor.context().send(conn, &[ECHOES as u8; 64]).expect("room");
            }
            until(&mut reactor, &mut client, "echoes", |client| client.echoes == client.wanted);
            println!("{} echoes in {:?}", CONNECTIONS * ECHOES, now() - start);
            let messages: Vec<_> = counts.iter().map(|count| count.swap(0, Ordering::Relaxed)).collect();
            assert_even("messages", &messages, CONNECTIONS * ECHOES);
            if round == 0 {
                // The client closes all connections of one reactor, and a tenth of all others.
                let mut gone = client.live.clone();
                gone.retain(|&conn| {
                    reactor.context().connection(conn).private_data() == [1] || conn.to_string().ends_with("0.1")
                });
                gone.iter().for_each(|&conn| reactor.context().close(conn));
                let left = CONNECTIONS - gone.len();
                until(&mut reactor, &mut client, "closing", |client| {
                    client.live.len() == left && loads().iter().sum::<usize>() == left
                });
                println!("{} connections have gone: {:?}", gone.len(), loads());
                open(&mut reactor, &mut client, address, loads, gone.len());
                assert_even("connections", &loads(), CONNECTIONS);
            }
        }

        group.drain_all(PATIENCE);
        until(&mut reactor, &mut client, "draining", |client| client.live.is_empty());
        for (index, thread) in threads.into_iter().enumerate() {
            let stats = thread.join().expect("a thread").expect("its run");
            println!("reactor {index}: {stats:?}");
            assert_eq!((stats.connections.current, stats.connections.connected), (0, stats.connections.disconnected));
        }
    });
}
