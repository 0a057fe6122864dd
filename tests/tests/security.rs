//! An attacker on the path between two secured reactors ([`rdma_reactor_tests::sim::middleman`]). No changed message
//! may be delivered, and the changes must be noticed.
//!
//! `FLIP_STEP=N` changes only every `N`th byte (default: 3 with a pre-shared key, 7 with TLS).
//!
//! Further tests check that the last message of a peer arrives on devices that report the end of a connection before
//! earlier completions.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rdma_reactor::{
    Config, ConnectError, ConnectOptions, ConnectionId, Context, DisconnectReason, Handler, Message, Offered, Outcome,
    PeerIdentity, Reactor, RegionOptions, SecurityError, SecurityMode, SendErrorKind, SendId, Wait,
};
use rdma_reactor_tests::conformance::harness::now;
use rdma_reactor_tests::forward::Forward;
use rdma_reactor_tests::gate::{Call, Failure, Gate};
use rdma_reactor_tests::identities::security;
use rdma_reactor_tests::patience::{PATIENCE, patient};
use rdma_reactor_tests::sim::hardware::HardwareProvider;
use rdma_reactor_tests::sim::middleman::{Attack, CLIENT, History, Hit, How, SERVER, live};
use rdma_reactor_tests::sim::net::SimNet;
use rdma_reactor_tests::sim::quiet::{Node, entropy, network, parts, until};
use rdma_reactor_tests::sim::rng::Rng;
use rdma_reactor_tests::sim::swarm::{HardwareOptions, MS};
use rdma_reactor_tests::sim::tcp::address;
use rdma_transport::caps::Features;
use rdma_transport_embedded::iwarp::{Iwarp, IwarpConfig};

const MODES: [SecurityMode; 2] = [SecurityMode::Psk, SecurityMode::Tls];

/// The number of bytes in each direction that the test changes. Each run changes one byte.
const OCTETS: usize = 10_000;

fn undisturbed(mode: SecurityMode, segment: usize) -> History {
    let outcome = live(mode, Attack::None, segment);
    assert!(outcome.is_whole(), "{outcome:?}");
    outcome
}

/// An attacker that only forwards bytes is not noticed, wherever the bytes are cut.
#[test]
fn octets_may_be_cut_anywhere() {
    for mode in MODES {
        for segment in [1, 7, 100, 1448] {
            let outcome = undisturbed(mode, segment);
            assert!(outcome.passed.iter().all(|&(octets, messages)| octets > OCTETS && messages > 9), "{outcome:?}");
        }
    }
}

/// Checks the outcome of a run in which the attacker has changed something.
fn check(attack: Attack, outcome: &History) {
    if let Some(wrong) = outcome.wrong() {
        panic!("{attack:?}: {wrong}: {outcome:?}");
    }
    match outcome.hit {
        // The handshake authenticates the greetings, so the handshake fails if a greeting was changed.
        Some(Hit::Greeting) => {
            assert!(!outcome.seen[SERVER].connected && !outcome.is_whole(), "{attack:?}: {outcome:?}");
        }
        Some(Hit::Sealed) => assert!(!outcome.is_whole(), "{attack:?} is not noticed: {outcome:?}"),
        // Changes of a grant in a handshake message, or of the padding behind the tags of a large message, are
        // harmless.
        Some(Hit::Fetched | Hit::Handshake | Hit::Transport) | None => {}
    }
}

fn flips(mode: SecurityMode, step: usize) {
    let step = std::env::var("FLIP_STEP").map_or(step, |text| text.parse().expect("FLIP_STEP=N"));
    let whole = undisturbed(mode, 1448).passed;
    let (mut hits, mut filling) = ([0; 4], 0);
    for from in [SERVER, CLIENT] {
        for at in (0..whole[from].0.min(OCTETS)).step_by(step) {
            let attack = Attack::Octet { from, at };
            let outcome = live(mode, attack, 1448);
            check(attack, &outcome);
            let noticed = outcome.seen.iter().any(|seen| seen.noticed || !seen.connected);
            match outcome.hit {
                Some(Hit::Sealed) => {
                    assert!(noticed, "{attack:?}: {outcome:?}");
                    hits[0] += 1;
                }
                Some(Hit::Fetched) => {
                    assert_eq!(noticed, !outcome.is_whole(), "{attack:?}: {outcome:?}");
                    hits[1] += usize::from(noticed);
                    filling += usize::from(!noticed);
                }
                Some(Hit::Greeting) => hits[2] += 1,
                _ => hits[3] += 1,
            }
        }
    }
    println!("{mode:?}: {hits:?} bytes of sealed messages, of fetched ones, of greetings, and others");
    assert!(hits.iter().all(|&count| count > 0), "{hits:?}");
    assert!(filling <= 2 * 48, "{filling} bytes of large messages may be changed, more than fill up their tags");
}

#[test]
fn no_changed_octet_is_delivered_with_a_pre_shared_key() {
    flips(SecurityMode::Psk, 3);
}

#[test]
fn no_changed_octet_is_delivered_with_tls() {
    flips(SecurityMode::Tls, 7);
}

/// The attacker drops, repeats, moves, truncates, changes, or inserts a message, at every position in both directions.
#[test]
fn no_message_is_dropped_repeated_moved_or_made() {
    for mode in MODES {
        let whole = undisturbed(mode, 1448).passed;
        let mut noticed = 0;
        for from in [SERVER, CLIENT] {
            for nth in 0..whole[from].1 {
                for how in [
                    How::Drop,
                    How::Repeat,
                    How::Swap,
                    How::Truncate(1),
                    How::Truncate(16),
                    How::Truncate(usize::MAX),
                    How::Flip(0),
                    How::Flip(33),
                    How::Flip(8 * 8 + 1),
                    How::Replay,
                    How::Plain,
                    How::Stall,
                    How::Flood,
                ] {
                    let attack = Attack::Message { from, nth, how };
                    let outcome = live(mode, attack, 1448);
                    if let Some(wrong) = outcome.wrong() {
                        panic!("{mode:?}, {attack:?}: {wrong}: {outcome:?}");
                    }
                    // If the attack hits the last message, no later message reveals that the last message is missing or
                    // duplicated.
                    let last = nth + 1 >= whole[from].1;
                    let soft = how == How::Stall || last && matches!(how, How::Drop | How::Swap | How::Repeat);
                    let cut = last && matches!(how, How::Drop | How::Swap) && from == CLIENT;
                    assert!(!cut || !outcome.is_whole(), "{mode:?}, {attack:?}: a cut is not told from a goodbye");
                    if outcome.hit == Some(Hit::Sealed) && !soft {
                        assert!(!outcome.is_whole(), "{mode:?}, {attack:?} is not noticed: {outcome:?}");
                        // A side that was never notified of the connection is not notified of its end either.
                        let seen = outcome.seen.iter().any(|seen| seen.noticed || !seen.connected);
                        assert!(seen, "{mode:?}, {attack:?} is not noticed as what it is: {outcome:?}");
                        noticed += 1;
                    }
                    if outcome.hit == Some(Hit::Handshake) && matches!(how, How::Plain | How::Flood | How::Truncate(_))
                    {
                        assert!(!outcome.is_whole(), "{mode:?}, {attack:?} is not noticed: {outcome:?}");
                    }
                }
            }
        }
        println!("{mode:?}: {noticed} times noticed");
        assert!(noticed > 50);
    }
}

/// A device that reports completions up to two milliseconds late, and events of the connection manager immediately.
const HASTY: HardwareOptions = HardwareOptions {
    late: 500,
    late_by: 2 * MS,
    cm_late: 0,
    short_poll: 0,
    before_arming: 0,
    lazy_flush: 0,
    twice: 0,
    never: 0,
    purge: 0,
    extensions: true,
    overtaking: false,
    keeps: 0,
};

/// The events of the connecting side.
#[derive(Debug, Default, PartialEq)]
struct Heard {
    messages: Vec<Vec<u8>>,
    end: Option<DisconnectReason>,
    error: Option<ConnectError>,
}

/// The program of both sides. The listening side refuses the peer, or sends two messages and closes. The connecting
/// side records its events.
#[derive(Clone, Default)]
struct Brief {
    refuses: bool,
    heard: Rc<RefCell<Heard>>,
}

impl Handler for Brief {
    fn on_identity(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: &PeerIdentity) -> Result<(), String> {
        if self.refuses && cx.connection(conn).listener().is_some() { Err("not on the list".into()) } else { Ok(()) }
    }

    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if cx.connection(conn).listener().is_some() {
            cx.send(conn, b"hello").expect("room");
            cx.send(conn, b"and goodbye").expect("room");
            cx.close(conn);
        }
    }

    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        self.heard.borrow_mut().messages.push(message.to_vec());
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        if cx.connection(conn).listener().is_none() {
            self.heard.borrow_mut().end = Some(reason);
        }
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.heard.borrow_mut().error = Some(error);
    }
}

/// Runs a connection between two devices with the options `HASTY`, until it has ended. Returns the program with the
/// recorded events.
fn hear(mode: SecurityMode, refuses: bool, seed: u64) -> Brief {
    let (fabric, brief) = (network(2), Brief { refuses, ..Brief::default() });
    let config = Config::default().wait(Wait::Event).max_memory(8 << 20).security(security(mode));
    let node = |node: usize| {
        let iwarp = Iwarp::new(IwarpConfig::default(), SimNet::new(node, Arc::clone(&fabric)), entropy(node));
        let (iwarp, rng) = (iwarp.expect("default settings"), Rng::new(seed ^ node as u64, "hasty"));
        let mut parts = parts(node, &fabric);
        parts.providers = vec![Box::new(HardwareProvider::new(iwarp, node, Arc::clone(&fabric), HASTY, rng))];
        let reactor = Reactor::with_parts(config.clone(), parts).expect("settings in range");
        Node::new(reactor, Box::new(brief.clone()))
    };
    let mut nodes = vec![node(SERVER), node(CLIENT)];
    nodes[SERVER].reactor.context().listen(address(SERVER, 7471)).expect("a free port");
    nodes[CLIENT].reactor.context().connect(address(SERVER, 7471)).expect("connecting");
    until(&fabric, &mut nodes, "the connection is over", |nodes| {
        let heard = brief.heard.borrow();
        (heard.end.is_some() || heard.error.is_some())
            && nodes.iter().all(|node| node.reactor.stats().connections.current == 0)
    });
    drop(nodes);
    brief
}

/// The connecting side gets the reason of a refusal, or the peer's last messages, although its device reports the
/// disconnect first.
#[test]
fn the_last_word_is_heard_behind_the_end() {
    for mode in MODES {
        for seed in 0..200 {
            let brief = hear(mode, true, seed);
            let refused = ConnectError::Security(SecurityError::Refused("not on the list".into()));
            assert_eq!(brief.heard.borrow().error, Some(refused), "{mode:?}, seed {seed}");
            let brief = hear(mode, false, seed);
            let messages = vec![b"hello".to_vec(), b"and goodbye".to_vec()];
            let heard = Heard { messages, end: Some(DisconnectReason::Closed), error: None };
            assert_eq!(*brief.heard.borrow(), heard, "{mode:?}, seed {seed}");
        }
    }
}

/// A program that tries to send memory of a device (a dma-buf), which cannot be sealed. It sends a large message after
/// each attempt.
#[derive(Default)]
struct SendsDeviceMemory {
    got: Vec<usize>,
    ended: Option<DisconnectReason>,
}

impl Handler for SendsDeviceMemory {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        const LEN: usize = 1 << 20;
        if cx.connection(conn).listener().is_some() {
            return;
        }
        let file = std::fs::File::open("/dev/null").expect("a descriptor");
        let region =
            cx.regions().register_dmabuf(conn, file.as_fd(), 0, 2 * LEN, &RegionOptions::new()).expect("a region");
        for len in [LEN, LEN - 1] {
            let sent = cx.send_region(conn, &region, 0..LEN);
            assert!(matches!(sent, Err(SendErrorKind::Sealed)), "{sent:?}");
            cx.send(conn, &vec![7; len]).expect("room");
        }
    }
    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        self.got.push(message.len());
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        self.ended = Some(reason);
    }
}

/// Returns a reactor on a forwarding provider that listens in this security mode, and its address.
fn listening(mode: SecurityMode, gate: &Gate) -> (Reactor, SocketAddr) {
    let config = patient(Config::default().security(security(mode)));
    let mut reactor = Forward::reactor(config, Features::empty(), gate);
    let listener = reactor.context().listen(([127, 0, 0, 1], 0).into()).expect("a port");
    let address = reactor.context().listeners().local_address(listener).expect("it listens");
    (reactor, address)
}

/// A send of memory that cannot be sealed is refused. The connection continues, and the next large messages arrive.
#[test]
fn a_refused_region_leaves_the_next_message_whole() {
    for mode in MODES {
        let ((mut reactor, server), mut program) = (listening(mode, &Gate::default()), SendsDeviceMemory::default());
        reactor.context().connect(server).expect("connecting");
        let end = now() + PATIENCE;
        while (program.got.len() < 2 || reactor.stats().memory.copied_bytes > 0) && program.ended.is_none() {
            assert!(now() < end, "{:?}, {:?}", program.got, reactor.stats().memory);
            reactor.turn(&mut program, Duration::from_millis(10)).expect("a turn");
        }
        assert_eq!((program.got, program.ended), (vec![1 << 20, (1 << 20) - 1], None), "{mode:?}");
    }
}

/// The length of the messages that [`RefusesSome`] refuses, in bytes.
const REFUSED: usize = (1 << 20) + 1;

/// A program that sends large messages to itself, and refuses those of the length [`REFUSED`].
#[derive(Default)]
struct RefusesSome {
    got: Vec<Vec<u8>>,
    outcomes: Vec<Outcome>,
    ended: Option<DisconnectReason>,
}

impl Handler for RefusesSome {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if cx.connection(conn).listener().is_none() {
            for len in [REFUSED, 1 << 20, REFUSED, REFUSED, 1 << 19] {
                cx.send(conn, &vec![len as u8 ^ 5; len]).expect("room");
            }
        }
    }
    fn on_offer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, offer: Offered) {
        if offer.len == REFUSED as u64 {
            cx.refuse_offer(conn, offer.id).expect("it is not answered yet");
        }
    }
    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        self.got.push(message.to_vec());
    }
    fn on_send_complete(&mut self, _: &mut Context<'_>, _: ConnectionId, _: SendId, outcome: Outcome) {
        self.outcomes.push(outcome);
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        self.ended = Some(reason);
    }
}

/// The program refuses large messages on a secured connection. The connection continues, and the other large messages arrive.
#[test]
fn a_refused_offer_leaves_the_next_message_whole() {
    for mode in MODES {
        let ((mut reactor, server), mut program) = (listening(mode, &Gate::default()), RefusesSome::default());
        reactor.context().connect(server).expect("connecting");
        let end = now() + PATIENCE;
        while (program.got.len() < 2 || program.outcomes.len() < 5) && program.ended.is_none() {
            assert!(now() < end, "{} messages, {:?}", program.got.len(), program.outcomes);
            reactor.turn(&mut program, Duration::from_millis(10)).expect("a turn");
        }
        assert_eq!(program.ended, None, "{mode:?}");
        assert!(program.got == [vec![5; 1 << 20], vec![5; 1 << 19]], "{mode:?}");
        assert_eq!(program.outcomes.iter().filter(|&&outcome| outcome == Outcome::Refused).count(), 3, "{mode:?}");
    }
}

/// A program that counts the sides of its connections that are up.
#[derive(Default)]
struct Counts {
    up: Vec<ConnectionId>,
    error: Option<ConnectError>,
}

impl Handler for Counts {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.up.push(conn);
    }
    fn on_connect_error(&mut self, _: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.error = Some(error);
    }
}

/// The first handshake message of an attempt to connect cannot be posted, so the next address is tried. The buffer of that message returns
/// to the pool.
#[test]
fn a_failed_attempt_gives_its_buffers_back() {
    for mode in MODES {
        let gate = Gate::default();
        let ((mut reactor, server), mut program) = (listening(mode, &gate), Counts::default());
        // The side that connects sends the first message.
        gate.fail_nth(Call::PostSend, 0, Failure::Errno(libc::EIO));
        reactor.context().connect_any(&[server, server], ConnectOptions::new()).expect("connecting");
        let end = now() + PATIENCE;
        while program.up.len() < 2 || reactor.stats().connections.current > 2 {
            assert!(now() < end && program.error.is_none(), "{:?}, {:?}", program.up, program.error);
            reactor.turn(&mut program, Duration::from_millis(10)).expect("a turn");
        }
        assert_eq!(gate.failed(), 1, "{mode:?}");
        for &conn in &program.up {
            reactor.context().close(conn);
        }
        while reactor.stats().connections.current > 0 {
            assert!(now() < end, "{:?}", reactor.stats().connections);
            reactor.turn(&mut program, Duration::from_millis(10)).expect("a turn");
        }
        let memory = reactor.stats().memory;
        assert_eq!(memory.pool_free, memory.pool_buffers, "{mode:?}");
    }
}
