//! Tests of a program that judges its peer's identity some time after `on_identity`, while the peer waits: with
//! `ConnectionContext::postpone_judgement` on virtual time, and with `PendingPeers` of `aio`.
#![allow(clippy::disallowed_methods, reason = "clients in a thread of their own")]

use std::cell::RefCell;
use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context as Task, Poll, Waker};
use std::time::Duration;

use futures_util::future::{join, join3};
use rdma_reactor::aio::{AsyncCalls, AsyncConnection, AsyncListener, AsyncReactor, PendingPeers};
use rdma_reactor::threaded::{ThreadedConnection, ThreadedListener, ThreadedReactor};
use rdma_reactor::{
    Access, Config, ConnectError, ConnectOptions, ConnectionId, Context, Handler, ListenOptions, Message, PeerIdentity,
    PeerName, ProviderChoice, Reactor, Region, RegionOptions, Security, SecurityError, SecurityMode, TimerId, Tls,
};
use rdma_reactor_tests::conformance::harness::with_watchdog;
use rdma_reactor_tests::identities::{Authority, psk, security};
use rdma_reactor_tests::patience::{PATIENCE, patient};
use rdma_reactor_tests::sim::fabric::lock;
use rdma_reactor_tests::sim::quiet::{Node, network, reactor, settle, step_futures, until};
use rdma_reactor_tests::sim::swarm::MS;
use rdma_reactor_tests::sim::tcp::address;

const MODES: [SecurityMode; 2] = [SecurityMode::Psk, SecurityMode::Tls];
const SERVER: usize = 0;
const CLIENT: usize = 1;

/// The time after which a side judges its peer, in the tests on virtual time.
const WAIT: Duration = Duration::from_millis(300);

#[derive(Debug, Default)]
struct Seen {
    /// The connections for which `on_identity` was called.
    asked: Vec<ConnectionId>,
    /// The results of `ConnectionContext::judge`: true if the connection was still waiting for the
    /// judgement.
    answered: Vec<bool>,
    up: Vec<ConnectionId>,
    messages: usize,
    error: Option<ConnectError>,
}

/// The program of one side of a connection. With an `answer`, the program postpones the judgement of its peer, and gives this answer after
/// `WAIT`. With `None`, it accepts the peer immediately.
#[derive(Clone)]
struct Side {
    answer: Option<Result<(), String>>,
    seen: Rc<RefCell<Seen>>,
}

impl Side {
    fn new(answer: Option<Result<(), String>>) -> Self {
        Self { answer, seen: Rc::default() }
    }
}

impl Handler for Side {
    fn on_identity(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: &PeerIdentity) -> Result<(), String> {
        self.seen.borrow_mut().asked.push(conn);
        if self.answer.is_some() {
            cx.connection(conn).postpone_judgement();
            cx.timers().set(WAIT, 0);
        }
        Ok(())
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        let mut seen = self.seen.borrow_mut();
        let conn = *seen.asked.last().expect("a peer");
        let answer = self.answer.clone().expect("an answer");
        // Only the first call of `judge` has an effect. The second call must return false.
        let first = cx.connection(conn).judge(answer);
        seen.answered.extend([first, cx.connection(conn).judge(Ok(()))]);
    }

    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.seen.borrow_mut().up.push(conn);
        cx.send(conn, b"hello").expect("room");
    }

    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, _: Message<'_>) {
        self.seen.borrow_mut().messages += 1;
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.seen.borrow_mut().error = Some(error);
    }
}

/// Connects a client to a server. Returns the virtual time until `done` returns true, and the number of connections that the server has at
/// that time.
fn connect(config: Config, sides: [&Side; 2], done: impl Fn(&Seen, &Seen) -> bool) -> (Duration, usize) {
    let fabric = network(2);
    let mut nodes = [SERVER, CLIENT]
        .map(|node| Node::new(reactor(node, &fabric, config.clone()), Box::new(sides[node].clone())))
        .into_iter()
        .collect::<Vec<_>>();
    nodes[SERVER].reactor.context().listen(address(SERVER, 7471)).expect("a free port");
    nodes[CLIENT].reactor.context().connect(address(SERVER, 7471)).expect("connecting");
    let begin = lock(&fabric).now();
    until(&fabric, &mut nodes, "the end of the attempt", |_| {
        done(&sides[SERVER].seen.borrow(), &sides[CLIENT].seen.borrow())
    });
    let took = Duration::from_nanos(lock(&fabric).now() - begin);
    (took, nodes[SERVER].reactor.stats().connections.current)
}

#[test]
fn a_connection_comes_up_when_the_late_answer_lets_it() {
    for mode in MODES {
        for late in [SERVER, CLIENT] {
            let mut sides = [Side::new(None), Side::new(None)];
            sides[late].answer = Some(Ok(()));
            let config = Config::default().security(security(mode));
            let both = |server: &Seen, client: &Seen| server.messages == 1 && client.messages == 1;
            let (took, _) = connect(config, [&sides[SERVER], &sides[CLIENT]], both);
            assert!(took >= WAIT, "{mode:?}: {took:?}");
            let seen = sides[late].seen.borrow();
            assert_eq!((&seen.up, &seen.answered[..]), (&seen.asked, &[true, false][..]), "{mode:?}, late: {late}");
        }
    }
}

#[test]
fn a_late_refusal_has_its_reason() {
    for mode in MODES {
        let [server, client] = [Side::new(Some(Err("not on the list".into()))), Side::new(None)];
        let config = Config::default().security(security(mode));
        connect(config, [&server, &client], |_, client| client.error.is_some());
        let (server, client) = (server.seen.borrow(), client.seen.borrow());
        let refused = ConnectError::Security(SecurityError::Refused("not on the list".into()));
        assert_eq!((&client.error, client.up.len(), server.up.len()), (&Some(refused), 0, 0), "{mode:?}");
        assert_eq!(server.answered, [true, false], "{mode:?}");
    }
}

#[test]
fn an_answer_that_does_not_come_ends_the_attempt() {
    for mode in MODES {
        let [server, client] = [Side::new(Some(Ok(()))), Side::new(None)];
        let limit = Duration::from_millis(100);
        let config = Config::default().security(security(mode)).timeouts(|timeouts| timeouts.handshake = limit);
        let (took, left) = connect(config, [&server, &client], |server, _| !server.answered.is_empty());
        assert!(took >= WAIT && client.seen.borrow().error.is_some(), "{mode:?}: {took:?}");
        let server = server.seen.borrow();
        assert_eq!((&server.answered[..], server.up.len(), left), (&[false, false][..], 0, 0), "{mode:?}");
    }
}

/// A program that judges all its peers at the same time, when `on_identity` was called for `wanted`
/// of them.
#[derive(Clone)]
struct Together {
    wanted: usize,
    seen: Rc<RefCell<Seen>>,
}

impl Handler for Together {
    fn on_identity(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: &PeerIdentity) -> Result<(), String> {
        let mut seen = self.seen.borrow_mut();
        seen.asked.push(conn);
        cx.connection(conn).postpone_judgement();
        if seen.asked.len() == self.wanted {
            cx.timers().set(WAIT, 0);
        }
        Ok(())
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        let mut seen = self.seen.borrow_mut();
        let answered = seen.asked.iter().map(|conn| cx.connection(*conn).judge(Ok(()))).collect();
        seen.answered = answered;
    }

    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let mut seen = self.seen.borrow_mut();
        seen.up.push(conn);
        let early = cx.connection_ids().find(|conn| !seen.up.contains(conn));
        assert_eq!(early, None, "it has not had its on_connect");
        for other in seen.asked.iter().filter(|other| !seen.up.contains(other)) {
            cx.flush(*other);
            assert_eq!((cx.connection(*other).buffer_size(), cx.writable(*other)), (None, 0), "{other}");
            assert!(cx.send(*other, b"early").is_err(), "{other}");
        }
        cx.send(conn, b"hello").expect("room");
    }

    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, _: Message<'_>) {
        self.seen.borrow_mut().messages += 1;
    }
}

/// Connections whose last handshake messages are sent at the same time come up sequentially: none can be used before its own
/// `on_connect`.
#[test]
fn connections_that_come_up_together_come_up_in_turn() {
    const WANTED: usize = 5;
    for mode in MODES {
        for late in [SERVER, CLIENT] {
            let (fabric, config) = (network(2), Config::default().security(security(mode)));
            let (together, side) = (Together { wanted: WANTED, seen: Rc::default() }, Side::new(None));
            let mut nodes = [SERVER, CLIENT].map(|node| {
                let program: Box<dyn Handler> =
                    if node == late { Box::new(together.clone()) } else { Box::new(side.clone()) };
                Node::new(reactor(node, &fabric, config.clone()), program)
            });
            nodes[SERVER].reactor.context().listen(address(SERVER, 7471)).expect("a free port");
            for _ in 0..WANTED {
                nodes[CLIENT].reactor.context().connect(address(SERVER, 7471)).expect("connecting");
            }
            until(&fabric, &mut nodes, "a message on each", |_| {
                [&together.seen, &side.seen].iter().all(|seen| seen.borrow().messages == WANTED)
            });
            assert_eq!(together.seen.borrow().answered, [true; WANTED], "{mode:?}, late: {late}");
        }
    }
}

/// A server that corks each connection before it is up.
struct Corks;

impl Handler for Corks {
    fn on_identity(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: &PeerIdentity) -> Result<(), String> {
        cx.cork(conn);
        Ok(())
    }
}

/// The last message of a handshake is sent although the program has corked the connection.
#[test]
fn a_cork_does_not_hold_back_the_end_of_a_handshake() {
    for mode in MODES {
        let (fabric, config, client) = (network(2), Config::default().security(security(mode)), Side::new(None));
        let mut nodes = [
            Node::new(reactor(SERVER, &fabric, config.clone()), Box::new(Corks)),
            Node::new(reactor(CLIENT, &fabric, config), Box::new(client.clone())),
        ];
        nodes[SERVER].reactor.context().listen(address(SERVER, 7471)).expect("a free port");
        nodes[CLIENT].reactor.context().connect(address(SERVER, 7471)).expect("connecting");
        let end = lock(&fabric).now() + 1000 * MS;
        until(&fabric, &mut nodes, "a connection", |_| {
            !client.seen.borrow().up.is_empty() || lock(&fabric).now() > end
        });
        assert_eq!(client.seen.borrow().up.len(), 1, "{mode:?}");
    }
}

/// A postponed judgement is about the peer for which `on_identity` was called. So after
/// `on_identity`, a connect tries no further address.
#[test]
fn a_postponed_judgement_is_not_about_another_address() {
    for mode in MODES {
        let fabric = network(3);
        let config = Config::default().security(security(mode)).timeouts(|timeouts| timeouts.connect = WAIT / 3);
        let [first, client, second] = [Side::new(None), Side::new(Some(Ok(()))), Side::new(None)];
        let mut nodes = [&first, &client, &second]
            .into_iter()
            .enumerate()
            .map(|(node, side)| Node::new(reactor(node, &fabric, config.clone()), Box::new(side.clone())))
            .collect::<Vec<_>>();
        let servers = [0, 2].map(|node| address(node, 7471));
        for (node, address) in [(0, servers[0]), (2, servers[1])] {
            nodes[node].reactor.context().listen(address).expect("a free port");
        }
        nodes[CLIENT].reactor.context().connect_any(&servers, ConnectOptions::new()).expect("connecting");
        until(&fabric, &mut nodes, "the answer, which is too late", |_| !client.seen.borrow().answered.is_empty());
        let client = client.seen.borrow();
        assert_eq!((&client.error, client.asked.len()), (&Some(ConnectError::Timeout), 1), "{mode:?}");
        assert_eq!((&client.answered[..], client.up.len()), (&[false, false][..], 0), "{mode:?}");
        assert!(second.seen.borrow().asked.is_empty(), "{mode:?}");
    }
}

/// The program of a server that registers memory for each peer before it judges the peer, and never judges.
#[derive(Clone, Default)]
struct Generous {
    regions: Rc<RefCell<Vec<Region>>>,
    waited: Rc<RefCell<usize>>,
}

impl Handler for Generous {
    fn on_identity(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: &PeerIdentity) -> Result<(), String> {
        let options = RegionOptions::new().allow(Access::REMOTE_WRITE);
        self.regions.borrow_mut().push(cx.regions().register(conn, 64, &options).expect("a region"));
        cx.connection(conn).postpone_judgement();
        cx.timers().set(WAIT, 0);
        Ok(())
    }

    fn on_timer(&mut self, _: &mut Context<'_>, _: TimerId, _: u64) {
        *self.waited.borrow_mut() += 1;
    }
}

/// The rights of a peer end with its connection, also if the connection was not established yet and
/// is dropped in favour of another one.
#[test]
fn an_evicted_peer_loses_its_rights() {
    for mode in MODES {
        let (fabric, server) = (network(3), Generous::default());
        let secured = Config::default().security(security(mode)).allow_plain_remote_memory(true);
        let limited = secured.clone().max_pending(1);
        let mut nodes = vec![Node::new(reactor(SERVER, &fabric, limited), Box::new(server.clone()))];
        nodes.extend([1, 2].map(|node| Node::new(reactor(node, &fabric, secured.clone()), Box::new(Side::new(None)))));
        nodes[SERVER].reactor.context().listen(address(SERVER, 7471)).expect("a free port");
        nodes[1].reactor.context().connect(address(SERVER, 7471)).expect("connecting");
        until(&fabric, &mut nodes, "the first has waited", |_| *server.waited.borrow() == 1);
        assert!(server.regions.borrow_mut()[0].bytes_mut().is_none(), "{mode:?}: the peer may write");
        nodes[2].reactor.context().connect(address(SERVER, 7471)).expect("connecting");
        until(&fabric, &mut nodes, "the second is asked about", |_| server.regions.borrow().len() == 2);
        assert_eq!(nodes[SERVER].reactor.stats().connections.evicted, 1, "{mode:?}");
        let mut regions = server.regions.borrow_mut();
        assert!(regions[0].bytes_mut().is_some(), "{mode:?}: the rights of the first have ended");
        assert!(regions[1].bytes_mut().is_none(), "{mode:?}: the second may write");
    }
}

// The tests below use `PendingPeers` of `aio`.

fn config(security: Security) -> Config {
    patient(Config::default().provider(ProviderChoice::Iwarp).security(security))
}

const HERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Runs a test with a watchdog, on a reactor that connects to its own listener. The listener passes each peer to `PendingPeers`.
fn with_approval<F: Future<Output = ()>>(
    name: &'static str,
    config: Config,
    test: impl FnOnce(AsyncReactor, AsyncListener, PendingPeers) -> F,
) {
    with_watchdog(name, || {
        let net = AsyncReactor::new(config).expect("a reactor");
        let (listener, peers) = net.listen_with_approval(HERE, ListenOptions::new()).expect("a port");
        net.run(test(net.clone(), listener, peers)).expect("turns");
        net.shutdown(PATIENCE).expect("the end");
    });
}

fn refused(result: Result<AsyncConnection, ConnectError>) -> String {
    match result.expect_err("the peer is refused") {
        ConnectError::Security(SecurityError::Refused(why)) => why,
        other => panic!("{other}"),
    }
}

/// Returns the options of a client that presents a certificate of `authority` with this name.
fn known_as(authority: &Authority, name: &str) -> ConnectOptions {
    let tls = Tls::mutual(&authority.identity(name), authority.pem().as_bytes()).expect("settings");
    ConnectOptions::new().security(Security::Tls(tls.server_name("server").expect("a name")))
}

#[test]
fn a_task_decides_by_name_who_is_let_in_while_others_wait() {
    let authority = Authority::new();
    with_approval("a task decides", config(authority.tls("server")), |net, listener, peers| async move {
        let address = listener.local_address().expect("it listens");
        let clients = join(
            net.connect_with(address, known_as(&authority, "mallory.example")),
            net.connect_with(address, known_as(&authority, "alice.example")),
        );
        let decide = async {
            let mut both = [peers.next().await.expect("a peer"), peers.next().await.expect("another peer")];
            both.sort_by_key(|newcomer| newcomer.identity().names());
            let [alice, mallory] = both;
            assert!(alice.peer_address().is_some_and(|peer| peer.ip() == HERE.ip()));
            assert_eq!(mallory.identity().names()[0], PeerName::Dns("mallory.example".into()));
            // The test runs turns for 20 ms while both peers wait for the decision. During this time neither connection is established.
            net.sleep(Duration::from_millis(20)).await;
            assert_eq!(net.with(|cx| cx.stats().connections.connected), 0);
            alice.accept();
            mallory.refuse("not alice");
        };
        let accept = async {
            let there = listener.accept().await.expect("a peer");
            there.send(b"hello").await.expect("it is up");
            there
        };
        let ((mallory, alice), (), there) = join3(clients, decide, accept).await;
        assert_eq!(refused(mallory), "not alice");
        assert_eq!(&alice.expect("a connection").recv().await.expect("a message")[..], b"hello");
        assert_eq!(there.identity().expect("it is secured").names()[0], PeerName::Dns("alice.example".into()));
    });
}

#[test]
fn who_gets_no_answer_is_refused() {
    with_approval("no answer", config(psk(1)), |net, listener, peers| async move {
        let address = listener.local_address().expect("it listens");
        // The task drops the pending peer without a decision.
        let (result, ()) = join(net.connect(address), async { drop(peers.next().await.expect("a peer")) }).await;
        assert_eq!(refused(result), "no task of the program accepts or refuses peers");
        // `peers` is dropped while a peer waits in its queue.
        let gone = async {
            while net.with(|cx| cx.connections()) < 2 {
                net.sleep(Duration::from_millis(1)).await;
            }
            drop(peers);
        };
        let (result, ()) = join(net.connect(address), gone).await;
        assert_eq!(refused(result), "no task of the program accepts or refuses peers");
        // `peers` no longer exists when this peer arrives.
        assert_eq!(refused(net.connect(address).await), "no task of the program accepts or refuses peers");
    });
}

#[test]
fn a_listener_that_is_dropped_ends_its_gate() {
    with_approval("a dropped listener", config(psk(1)), |net, listener, peers| async move {
        let ((), next) = join(async { drop(listener) }, peers.next()).await;
        assert!(next.is_none());
        net.with(|cx| cx.drain(Duration::from_secs(1)));
        assert!(peers.next().await.is_none());
    });
}

/// A peer whose handshake ends after the program has dropped the listener is refused, because nobody has approved it.
#[test]
fn a_peer_of_a_dropped_listener_is_refused() {
    for turns in 1..20 {
        with_approval("a peer of a dropped listener", config(psk(1)), |net, listener, _peers| async move {
            let address = listener.local_address().expect("it listens");
            let dropped = async {
                for _ in 0..turns {
                    net.sleep(Duration::ZERO).await;
                }
                drop(listener);
            };
            let (connected, ()) = join(net.connect(address), dropped).await;
            assert!(connected.is_err(), "after {turns} turns: {connected:?}");
        });
    }
}

/// While a drain waits for the answer of a call, no task can let a peer in. So a peer that waits for approval when the drain begins is
/// refused immediately, and so is a peer that proves its identity later (`late`).
#[test]
fn a_drain_that_answers_calls_refuses_peers() {
    for late in [false, true] {
        let (fabric, to) = (network(2), address(1, 7471));
        let nets = [0, 1].map(|node| AsyncReactor::from(reactor(node, &fabric, Config::default().security(psk(1)))));
        let [client, server] = &nets;
        let task = &mut Task::from_waker(Waker::noop());
        let (listener, peers) = server.listen_with_approval(to, ListenOptions::new()).expect("a port");
        let mut first = pin!(client.connect(to));
        assert!(first.as_mut().poll(task).is_pending());
        settle(&fabric, &nets);
        let Poll::Ready(Some(peer)) = pin!(peers.next()).poll(task) else { panic!("no peer waits") };
        peer.accept();
        settle(&fabric, &nets);
        let Poll::Ready(Ok(here)) = first.as_mut().poll(task) else { panic!("no connection") };
        let Poll::Ready(Some(there)) = pin!(listener.accept()).poll(task) else { panic!("no connection is accepted") };
        let (here, there) = (AsyncCalls::from(here), AsyncCalls::from(there));
        let mut call = pin!(here.call(b"a question", PATIENCE));
        assert!(call.as_mut().poll(task).is_pending());
        settle(&fabric, &nets);
        let Poll::Ready(Ok(request)) = pin!(there.next()).poll(task) else { panic!("no request") };
        let mut second = pin!(client.connect(to));
        assert!(second.as_mut().poll(task).is_pending());
        if late {
            while server.with(|cx| cx.connections()) < 2 {
                assert!(step_futures(&fabric, &nets), "no second connection");
            }
        } else {
            settle(&fabric, &nets);
        }
        server.with(|cx| cx.drain(PATIENCE));
        settle(&fabric, &nets);
        let Poll::Ready(result) = second.as_mut().poll(task) else { panic!("the peer still waits, late: {late}") };
        assert_eq!(refused(result), "no task of the program accepts or refuses peers", "late: {late}");
        request.answer(b"an answer").expect("its caller waits");
        settle(&fabric, &nets);
        assert_eq!(call.as_mut().poll(task), Poll::Ready(Ok(b"an answer".to_vec())), "late: {late}");
    }
}

/// A program that stops its reactor when each of its connection attempts has either received the peer's identity or failed.
struct Flood {
    left: usize,
}

impl Flood {
    fn one_is_done(&mut self, cx: &mut Context<'_>) {
        // A connection attempt that is refused after its identity was checked is counted twice. So the reactor may stop before all attempts
        // have ended.
        self.left = self.left.saturating_sub(1);
        if self.left == 0 {
            cx.stop();
        }
    }
}

impl Handler for Flood {
    fn on_identity(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: &PeerIdentity) -> Result<(), String> {
        self.one_is_done(cx);
        Ok(())
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: ConnectError) {
        self.one_is_done(cx);
    }
}

/// A pending peer that gives up leaves only an entry in the queue of `PendingPeers`, and the number of entries is bounded. A task that
/// reads the queue later still gets a peer that is waiting.
#[test]
fn peers_that_nobody_looks_at_are_bounded() {
    const AT_ONCE: usize = 200;
    let small = || config(psk(1)).receive_depth(8).send_depth(8);
    with_approval("a flood", small(), |net, listener, peers| async move {
        let to = listener.local_address().expect("it listens");
        let mut attempts = 0;
        // Peers connect and give up until the queue is full and the server refuses a peer.
        while net.with(|cx| cx.stats().connections.insecure) == 0 {
            let flood = std::thread::spawn(move || {
                let mut reactor = Reactor::new(small()).expect("a reactor");
                (0..AT_ONCE).for_each(|_| _ = reactor.context().connect(to).expect("an attempt"));
                reactor.run(&mut Flood { left: AT_ONCE }).expect("turns");
            });
            while !flood.is_finished() || net.with(|cx| cx.connections()) > 0 {
                net.sleep(Duration::from_millis(1)).await;
            }
            flood.join().expect("a thread");
            attempts += AT_ONCE;
        }
        assert!(attempts >= 1024, "{attempts}");
        let (conn, there) = join(net.connect(to), async {
            peers.next().await.expect("a peer").accept();
            listener.accept().await.expect("a connection")
        })
        .await;
        assert!(conn.is_ok() && there.identity().is_some(), "{conn:?}");
    });
}

fn refused_by_tasks(result: Result<ThreadedConnection, ConnectError>) -> String {
    match result.expect_err("the peer is refused") {
        ConnectError::Security(SecurityError::Refused(why)) => why,
        other => panic!("{other}"),
    }
}

/// With [`ThreadedReactor`], a task of any thread accepts or refuses a pending peer, and gets the
/// peer's identity.
#[test]
fn a_task_of_any_thread_decides_who_is_let_in() {
    const NOBODY: &str = "no task of the program accepts or refuses peers";
    let test = async {
        let authority = Authority::new();
        let reactor = ThreadedReactor::start(config(authority.tls("server"))).expect("a reactor");
        let (mut listener, mut peers) = reactor.listen_with_approval(HERE, ListenOptions::new()).await.expect("a port");
        let connect = |to: &ThreadedListener, name: &str| {
            let (reactor, to, options) = (reactor.clone(), to.local_address(), known_as(&authority, name));
            tokio::spawn(async move { reactor.connect_with(to, options).await })
        };
        let [alice, mallory, dropped] = ["alice", "mallory", "dropped"].map(|name| connect(&listener, name));
        for _ in 0..3 {
            let peer = peers.next().await.expect("a peer");
            assert!(peer.peer_address().is_some_and(|peer| peer.ip() == HERE.ip()));
            match &peer.identity().names()[0] {
                PeerName::Dns(name) if name == "alice" => peer.accept(),
                PeerName::Dns(name) if name == "mallory" => peer.refuse("not alice"),
                _ => drop(peer),
            }
        }
        assert_eq!(refused_by_tasks(mallory.await.expect("a task")), "not alice");
        assert_eq!(refused_by_tasks(dropped.await.expect("a task")), NOBODY);
        let here = alice.await.expect("a task").expect("a connection");
        let there = listener.accept().await.expect("a connection");
        let first = |peer: Option<&PeerIdentity>| peer.expect("it is secured").names().swap_remove(0);
        assert_eq!(first(here.identity()), PeerName::Dns("server".into()));
        assert_eq!(first(there.identity()), PeerName::Dns("alice".into()));
        let (_caller, requests) = there.calls();
        assert_eq!(first(requests.identity()), PeerName::Dns("alice".into()));
        // Nobody gets the connection of a peer that is accepted after its listener is dropped.
        let (other, mut others) = reactor.listen_with_approval(HERE, ListenOptions::new()).await.expect("a port");
        let orphan = connect(&other, "alice");
        let peer = others.next().await.expect("a peer");
        drop(other);
        peer.accept();
        assert_eq!(refused_by_tasks(orphan.await.expect("a task")), NOBODY);
        assert!(others.next().await.is_none());
        // A peer that waits in the queue is refused with the queue, and so is a later one.
        let waits = connect(&listener, "waits");
        while reactor.with(|cx| cx.connections()).await.expect("it runs") < 4 {
            tokio::task::yield_now().await;
        }
        drop(peers);
        assert_eq!(refused_by_tasks(waits.await.expect("a task")), NOBODY);
        assert_eq!(refused_by_tasks(connect(&listener, "late").await.expect("a task")), NOBODY);
        reactor.drain(PATIENCE);
        drop((here, listener));
        assert_eq!(reactor.ended().await, Ok(()));
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("threads");
    runtime.block_on(async { tokio::time::timeout(PATIENCE, test).await.expect("the test hangs") });
}
