//! Faults on the kernel's siw and rxe: a peer that dies or falls silent, a link that goes down, and a device that is removed. Each
//! connection must end once, in time, and with the true reason. All resources must be released, and the reactor must continue.
//!
//! `make test-rdma` runs these tests.
#![cfg(feature = "verbs")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use rdma_reactor::transport::wc::WcStatus;
use rdma_reactor::{
    Config, ConnectError, ConnectionId, DeviceEventKind, DisconnectReason, EndpointId, EndpointOptions, PeerId,
    Reactor, SendErrorKind,
};
use rdma_reactor_tests::conformance::harness::{Event, PATIENCE, Probe, now, with_watchdog};
use rdma_reactor_tests::device::{Device, Peer, RXE, SIW, config};
use rdma_reactor_tests::witness::{Baseline, Witness};

const PEER: &str = env!("CARGO_BIN_EXE_rdma-peer");
/// The number of established connections that a fault hits.
const HIT: usize = 8;
/// The number of connections that are being established when a fault hits.
const RISING: usize = 4;
/// The number of messages that each side has in flight on each connection. All of them may be in flight in one direction at the same time,
/// so the credits must suffice for the messages of both sides. Of 16 credits, 3 are for control messages. Of the remaining 13, the peer may
/// hold back up to half before it grants them again.
const MESSAGES: usize = 2;
/// The length of each message, in bytes.
const SIZE: usize = 1000;

/// The load on the connections when the fault occurs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    Idle,
    Traffic,
}

impl Load {
    fn messages(self) -> usize {
        if self == Self::Traffic { MESSAGES } else { 0 }
    }

    /// Returns true if a connection may end with this reason instead of the expected one. If a message was in flight, siw first reports the
    /// failed message, and only then the end of the connection.
    fn may_cut(self, device: Device, reason: &DisconnectReason) -> bool {
        self == Self::Traffic
            && matches!(reason, DisconnectReason::WorkRequest { device: name, failure }
                if device == SIW && *name == SIW.name() && failure.status == WcStatus::LocalQpOperationError)
    }

    /// Returns true if a connection may end with this reason when its device is removed. The kernel decides whether the removal or the
    /// disconnect by the peer is reported first.
    fn fits_removal(self, device: Device, reason: &DisconnectReason) -> bool {
        matches!(reason, DisconnectReason::DeviceRemoved | DisconnectReason::Lost) || self.may_cut(device, reason)
    }
}

/// The side of the connections that is in this process: a reactor, and the record of its events.
struct Side {
    reactor: Reactor,
    probe: Probe,
    /// The number of received messages, by connection.
    heard: Rc<RefCell<BTreeMap<ConnectionId, u64>>>,
    /// An honest connection on the same device, which the fault must not affect.
    witness: Option<Witness>,
}

impl Side {
    /// Returns a side that sends `messages` messages on each new connection, and sends each received message back. Its keepalive is so long
    /// that a busy machine ends no connection.
    fn new(messages: usize) -> Self {
        Self::with(config().timeouts(|t| t.keepalive = PATIENCE), messages)
    }

    fn with(config: Config, messages: usize) -> Self {
        let heard: Rc<RefCell<BTreeMap<ConnectionId, u64>>> = Rc::default();
        let count = Rc::clone(&heard);
        let mut probe = Probe::new(move |cx, event| match event {
            Event::Connect(conn, _) => {
                for _ in 0..messages {
                    cx.send(*conn, &[7; SIZE]).expect("a new connection has room");
                }
            }
            Event::Recv(conn, bytes) => {
                *count.borrow_mut().entry(*conn).or_default() += 1;
                let sent = cx.send(*conn, bytes);
                assert!(matches!(sent, Ok(_) | Err(SendErrorKind::Closed)), "{sent:?}");
            }
            _ => {}
        });
        probe.record_messages = false;
        Self { reactor: Reactor::new(config).expect("a reactor"), probe, heard, witness: None }
    }

    /// Adds an honest connection on the same reactor and device. The neighbour's keepalive is so long that it waits while this side takes
    /// no turns.
    fn witnessed(mut self, device: Device) -> Self {
        let witness = Witness::start(device, config().timeouts(|t| t.keepalive = PATIENCE), 1);
        witness.watch(&mut self.reactor, 0);
        self.witness = Some(witness);
        self.goes_on();
        self
    }

    /// Waits until the honest connection has received some more echoes.
    fn goes_on(&mut self) {
        let further = self.witness.as_ref().map(Witness::further).unwrap_or_default();
        self.until("the neighbour's echoes go on", |side| {
            side.witness.as_ref().is_none_or(|witness| witness.has(&further))
        });
    }

    fn listen(&mut self, address: SocketAddr) -> SocketAddr {
        let mut cx = self.reactor.context();
        let listener = cx.listen(address).expect("listening");
        cx.listeners().local_address(listener).expect("it listens")
    }

    fn turn(&mut self) {
        self.reactor.turn(&mut self.probe, Some(Duration::from_millis(10))).expect("the loop goes on");
        self.witness.iter_mut().for_each(Witness::check);
    }

    fn until(&mut self, what: &str, mut condition: impl FnMut(&Self) -> bool) {
        let deadline = now() + PATIENCE;
        while !condition(self) {
            assert!(now() < deadline, "not within {PATIENCE:?}: {what}\n{:?}", self.probe);
            self.turn();
        }
    }

    fn connect(&mut self, to: SocketAddr) -> ConnectionId {
        self.reactor.context().connect(to).expect("connecting")
    }

    /// Opens connections and waits until all are established. If the load is traffic, also waits until messages have made some round trips.
    fn connected(&mut self, to: SocketAddr, count: usize, load: Load) -> Vec<ConnectionId> {
        let conns: Vec<_> = (0..count).map(|_| self.connect(to)).collect();
        self.until("all are up", |side| conns.iter().all(|conn| side.is_up(*conn)));
        if load == Load::Traffic {
            self.hears(&conns);
        }
        conns
    }

    /// Waits until messages have made some more round trips on each of these connections.
    fn hears(&mut self, conns: &[ConnectionId]) {
        let before = self.heard.borrow().clone();
        let enough = |side: &Self| {
            let heard = side.heard.borrow();
            let count = |of: &BTreeMap<_, _>, conn| of.get(conn).copied().unwrap_or(0);
            conns.iter().all(|conn| count(&heard, conn) >= count(&before, conn) + 5 * MESSAGES as u64)
        };
        self.until("messages go round on all connections", enough);
    }

    /// Waits until the peer has printed that `count` connections are established. The peer's side
    /// is established later than this side, and the peer prints the end only of an established
    /// connection.
    fn are_up_at(&mut self, peer: &mut Peer, count: usize) {
        self.until("they are up at the peer", |_| peer.count("up ") >= count);
    }

    fn is_up(&self, conn: ConnectionId) -> bool {
        self.probe.count(|event| matches!(event, Event::Connect(id, _) if *id == conn)) == 1 && !self.has_ended(conn)
    }

    fn has_ended(&self, conn: ConnectionId) -> bool {
        self.ends(conn).len() == 1
    }

    /// Returns the events that report the end of a connection. There are none or one; more than one fails the test.
    fn ends(&self, conn: ConnectionId) -> Vec<&Event> {
        let of_it = |event: &&Event| match event {
            Event::Disconnect(id, _) | Event::ConnectError(id, _) => *id == conn,
            _ => false,
        };
        let ends: Vec<_> = self.probe.events.iter().filter(of_it).collect();
        assert!(ends.len() <= 1, "{conn} ended more than once: {ends:?}");
        ends
    }

    /// Waits until each of these connections has ended, and checks that the reason is the expected one or an allowed one.
    fn all_end(&mut self, on: Device, load: Load, conns: &[ConnectionId], expected: &DisconnectReason) {
        self.until("every connection ends", |side| conns.iter().all(|conn| side.has_ended(*conn)));
        for conn in conns {
            let ends = self.ends(*conn);
            let [Event::Disconnect(_, reason)] = ends[..] else { panic!("{ends:?}") };
            assert!(reason == expected || load.may_cut(on, reason), "{conn}: {reason}");
        }
    }

    /// Waits until each of these connections has ended, whether or not it had been established.
    fn all_over(&mut self, conns: &[ConnectionId]) {
        self.until("connections that were coming up end", |side| conns.iter().all(|conn| side.has_ended(*conn)));
    }

    /// Returns the number of events of this kind that were reported for the device.
    fn said(&self, device: Device, kind: DeviceEventKind) -> usize {
        let name = device.name();
        self.probe.count(|event| matches!(event, Event::Device(told) if told.kind == kind && told.device == name))
    }

    /// Opens a datagram endpoint, joins a multicast group with it, and looks up the address of the endpoint itself. Returns the endpoint,
    /// and itself as a peer. Returns `None` if the device has no datagrams.
    fn endpoint(&mut self, device: Device) -> Option<(EndpointId, PeerId)> {
        if device == SIW {
            return None;
        }
        let mut cx = self.reactor.context();
        let endpoint = cx.datagrams().open(device.address(), EndpointOptions::new()).expect("an endpoint");
        cx.datagrams().join(endpoint, "239.77.2.50".parse().expect("an address")).expect("joining");
        let address = cx.datagrams().address(endpoint).expect("it is open");
        cx.datagrams().find_peer(endpoint, address).expect("asking");
        let joined = |event: &Event| matches!(event, Event::Join(id, _, Ok(_)) if *id == endpoint);
        let peer = |event: &Event| match event {
            Event::Peer(id, _, Ok(peer)) if *id == endpoint => Some(*peer),
            _ => None,
        };
        self.until("the endpoint is ready", |side| {
            side.probe.count(joined) == 1 && side.probe.events.iter().any(|event| peer(event).is_some())
        });
        let peer = self.probe.events.iter().find_map(peer).expect("it was found");
        self.reactor.context().datagrams().send(endpoint, peer, b"before").expect("there is room");
        self.until("it hears itself", |side| side.hears_datagram(endpoint, b"before"));
        Some((endpoint, peer))
    }

    fn hears_datagram(&self, endpoint: EndpointId, text: &[u8]) -> bool {
        self.probe.count(|event| matches!(event, Event::Datagram(id, _, bytes, _) if *id == endpoint && bytes == text))
            > 0
    }

    /// Shuts down. Checks that all buffers are in their pools, and that each accepted message has completed.
    fn finish(mut self) {
        self.goes_on();
        self.witness.iter().for_each(Witness::leave);
        self.until("the neighbour has gone", |side| side.witness.as_ref().is_none_or(Witness::is_over));
        self.reactor.shutdown(&mut self.probe, PATIENCE).expect("the end");
        assert_eq!((self.probe.live(), self.reactor.context().connections()), (0, 0));
        let (all, free) = self.reactor.pool_levels();
        assert_eq!(all, free, "buffers are missing");
        self.probe.assert_completed(&self.reactor);
    }
}

/// The server's process is killed by SIGKILL.
fn killed_server(device: Device, load: Load) {
    let before = Baseline::new(&[SIW, RXE]);
    let (mut peer, to) = Peer::serve(PEER, &[device.address()]);
    let mut side = Side::new(load.messages()).witnessed(device);
    let conns = side.connected(to[0], HIT, load);
    let rising: Vec<_> = (0..RISING).map(|_| side.connect(to[0])).collect();
    side.turn();
    let killed = now();
    peer.kill();
    side.all_end(device, load, &conns, &DisconnectReason::Lost);
    println!("all know after {:?}", killed.elapsed());
    side.all_over(&rising);
    // The reactor still works: it connects to a new server.
    let (peer, to) = Peer::serve(PEER, &[device.address()]);
    let conns = side.connected(to[0], 1, load);
    assert!(side.is_up(conns[0]));
    side.finish();
    assert!(peer.finish());
    before.check();
}

/// The client's process is killed by SIGKILL. Then a second client connects, and is killed in the same way.
fn killed_client(device: Device, load: Load) {
    let before = Baseline::new(&[SIW, RXE]);
    let mut side = Side::new(0).witnessed(device);
    let to = side.listen(device.address());
    for _ in 0..2 {
        let words = format!("connect {to} {HIT} {}", load.messages());
        let mut peer = Peer::start(PEER, &words);
        side.until("all are up", |side| side.probe.live() == HIT);
        let up = |event: &Event| if let Event::Connect(conn, _) = event { Some(*conn) } else { None };
        let conns: Vec<_> = side.probe.events.iter().filter_map(up).collect();
        if load == Load::Traffic {
            side.hears(&conns);
        }
        peer.kill();
        side.all_end(device, load, &conns, &DisconnectReason::Lost);
        side.probe.events.clear();
    }
    side.finish();
    before.check();
}

/// The peer's process is stopped by SIGSTOP. The kernel still acknowledges messages, but the peer's program does not run.
fn stopped_peer(device: Device, load: Load) {
    let before = Baseline::new(&[SIW, RXE]);
    let (mut peer, to) = Peer::serve(PEER, &[device.address()]);
    let config = config().timeouts(|t| t.keepalive = Duration::from_secs(15));
    let mut side = Side::with(config, load.messages()).witnessed(device);
    let conns = side.connected(to[0], HIT, load);
    side.are_up_at(&mut peer, HIT);
    peer.signal("STOP");
    side.all_end(device, load, &conns, &DisconnectReason::KeepaliveTimeout);
    peer.signal("CONT");
    let conns = side.connected(to[0], 1, load);
    side.until("the peer has noticed, too", |_| peer.count("down: ") == HIT);
    assert!(side.is_up(conns[0]));
    side.finish();
    assert!(peer.finish());
    before.check();
}

/// A network device that is down. Dropping this value sets it up again, also in a test that has
/// failed, because the next tests need the device.
struct LinkDown(Device);

impl Drop for LinkDown {
    fn drop(&mut self) {
        self.0.link_up();
    }
}

/// The network device is set down and up again. siw drops its connections immediately. rxe can no longer send, and notices this at the next
/// message or ping. But a ping that was sent just before may find a peer that can no longer answer, and rxe may stop processing a queue
/// pair (tests/vm/README.md). Then the keepalive ends the connection, on either side. On rxe, many addresses make the change slow: it takes
/// tens of milliseconds from the time when rxe can no longer send to the time when its port is down. The connections must not use the port
/// in this time. On siw, no connection ends in this process while the link changes, because siw may crash the kernel if a queue pair is
/// destroyed in this time (tests/vm/README.md).
fn link_down(device: Device, load: Load) {
    let before = Baseline::new(&[SIW, RXE]);
    let keepalive = if device == RXE { Duration::from_secs(60) } else { PATIENCE };
    let words = format!("keepalive {}", keepalive.as_secs());
    let (mut peer, to) = Peer::serve_by(PEER, &words, &[device.address(), device.other().address()]);
    let mut side = Side::with(config().timeouts(|t| t.keepalive = keepalive), load.messages());
    let endpoint = side.endpoint(device);
    if device == RXE {
        device.many_addresses("replace");
    }
    for round in 1..=2 {
        let ups = peer.count("up ");
        let conns = side.connected(to[0], HIT, load);
        let others = side.connected(to[1], 2, load);
        side.are_up_at(&mut peer, ups + HIT + 2);
        let already = peer.count("down: ");
        let (down, up) = (DeviceEventKind::PortDown { port: 1 }, DeviceEventKind::PortActive { port: 1 });
        let before = side.said(device, down);
        let mut change = device.link_down();
        let link = LinkDown(device);
        if device == RXE {
            side.until("the link is down", |_| change.try_wait().expect("ip").is_some());
        }
        assert!(change.wait().expect("ip").success());
        side.until("the port is said to be down", |side| side.said(device, down) == before + 1);
        let before = side.said(device, up);
        side.until("every connection ends", |side| conns.iter().all(|conn| side.has_ended(*conn)));
        for conn in &conns {
            let ends = side.ends(*conn);
            let [Event::Disconnect(_, reason)] = ends[..] else { panic!("{ends:?}") };
            match reason {
                DisconnectReason::Lost => assert_eq!(device, SIW),
                DisconnectReason::KeepaliveTimeout => assert_eq!(device, RXE),
                reason if load.may_cut(device, reason) => {}
                DisconnectReason::WorkRequest { device: name, failure } => {
                    assert_eq!((device, name.as_str()), (RXE, device.name().as_str()), "{failure}");
                }
                other => panic!("{conn}: {other:?}"),
            }
        }
        side.until("the peer knows", |_| peer.count("down: ") == already + HIT);
        // These connections are opened while the link is down. On siw they use the loopback, which is up. On rxe they cannot reach the
        // peer.
        let rising: Vec<_> = (0..RISING).map(|_| side.connect(to[0])).collect();
        side.until("connects have an answer", |s| rising.iter().all(|conn| s.is_up(*conn) || s.has_ended(*conn)));
        let risen = if device == SIW { RISING } else { 0 };
        side.are_up_at(&mut peer, ups + HIT + 2 + risen);
        for conn in &rising {
            match side.ends(*conn)[..] {
                [] => assert_eq!(device, SIW),
                [Event::ConnectError(_, error)] => {
                    assert!(error.to_string().contains("port 1 of rxe0 is down"), "{error}")
                }
                ref other => panic!("{other:?}"),
            }
            side.reactor.context().close(*conn);
        }
        // Connections on the other device are not affected.
        assert!(others.iter().all(|conn| side.is_up(*conn)));
        if load == Load::Traffic {
            side.hears(&others);
        }
        drop(link);
        side.until("the port is up", |_| device.is_active());
        // There may be more than one event, because rxe reports that the port is up twice.
        side.until("the port is said to be up", |side| side.said(device, up) > before);
        // The endpoint had no datagram in flight when the link went down, so it works again.
        if let Some((endpoint, peer)) = endpoint {
            let text = [round as u8; 10];
            side.reactor.context().datagrams().send(endpoint, peer, &text).expect("there is room");
            side.until("datagrams go on", |side| side.hears_datagram(endpoint, &text));
        }
        // The listener was not affected, and accepts connections again.
        let again = side.connected(to[0], 1, load);
        side.are_up_at(&mut peer, ups + HIT + 2 + risen + 1);
        for conn in [again[0], others[0], others[1]] {
            side.reactor.context().close(conn);
        }
        side.until("all are closed", |side| side.probe.live() == 0);
        side.until("the peer knows that, too", |_| peer.count("down: ") == already + HIT + 3 + risen);
    }
    if device == RXE {
        device.many_addresses("del");
    }
    side.finish();
    assert!(peer.finish());
    before.check();
}

/// The device is removed (`rdma link del`) while both ends of connections and a listener use it.
fn removed(device: Device, load: Load) {
    let before = Baseline::new(&[SIW, RXE]);
    let (mut peer, to) = Peer::serve(PEER, &[device.address(), device.other().address()]);
    let descriptors = peer.descriptors();
    let mut side = Side::new(load.messages());
    for round in 1..=2 {
        let ups = peer.count("up ");
        let conns = side.connected(to[0], HIT, load);
        let others = side.connected(to[1], 2, load);
        side.are_up_at(&mut peer, ups + HIT + 2);
        let endpoint = side.endpoint(device);
        let silent = side.connect(device.silent_address());
        side.turn();
        let rising: Vec<_> = (0..RISING).map(|_| side.connect(to[0])).collect();
        side.turn();
        let already = peer.count("down: ");
        let start = now();
        let mut removal = device.remove();
        side.all_over(&conns);
        for conn in &conns {
            let ends = side.ends(*conn);
            assert!(
                matches!(ends[..], [Event::Disconnect(_, reason)] if load.fits_removal(device, reason)),
                "{ends:?}"
            );
        }
        println!("all know after {:?}", start.elapsed());
        // Connections that were being established end as well, before their time limit.
        for conn in rising.iter().chain([&silent]) {
            side.all_over(&[*conn]);
            match side.ends(*conn)[..] {
                [Event::ConnectError(_, ConnectError::Transport(_) | ConnectError::Local(_))] => {}
                [Event::Disconnect(_, reason)] if load.fits_removal(device, reason) => {}
                ref other => panic!("{other:?}"),
            }
        }
        side.until("the removal is said", |side| side.said(device, DeviceEventKind::Removed) == round);
        if let Some((endpoint, peer)) = endpoint {
            let end = Event::EndpointClosed(endpoint, DisconnectReason::DeviceRemoved);
            side.until("the endpoint ends", |side| side.probe.count(|event| *event == end) == 1);
            assert_eq!(side.reactor.context().datagrams().send(endpoint, peer, b"late"), Err(SendErrorKind::Closed));
        }
        while removal.try_wait().expect("rdma").is_none() {
            assert!(start.elapsed() < PATIENCE, "the device is not released");
            side.turn();
        }
        println!("gone after {:?}", start.elapsed());
        // The server's process reports the end of these connections, and perhaps of those that were being established.
        side.until("the peer knows", |_| peer.count("down: ") >= already + HIT);
        // For each connection, at least one end must give the removal as the reason of its disconnect, unless a message was cut short. The
        // lines of the peer so far may be those of connections that were being established, so the test waits for the others.
        let why = |event: &Event| match event {
            Event::Disconnect(_, reason) => *reason != DisconnectReason::Lost && load.fits_removal(device, reason),
            _ => false,
        };
        side.until("an end of each connection gives the removal as the reason", |side| {
            let removed = peer.count("down: the device was removed");
            let is_cut = |line: &&String| line.contains("local queue pair operation error");
            let cut = if load == Load::Traffic { peer.said().iter().filter(is_cut).count() } else { 0 };
            side.probe.count(why) + cut + removed >= round * HIT
        });
        // Connections on the other device are not affected, and more of them can be opened.
        assert!(others.iter().all(|conn| side.is_up(*conn)));
        if load == Load::Traffic {
            side.hears(&others);
        }
        let more = side.connected(to[1], 1, load);
        // A new connect to the removed device's address fails, because no other device reaches it.
        let lost = side.connect(to[0]);
        side.all_over(&[lost]);
        assert!(matches!(side.ends(lost)[..], [Event::ConnectError(..)]));
        // The device is added again, and the server must listen on it again.
        device.add();
        let mut conn = side.connect(to[0]);
        let deadline = now() + PATIENCE;
        let mut tried = now();
        while !side.is_up(conn) {
            assert!(now() < deadline, "the server does not listen again: {:?}", side.probe);
            side.turn();
            // The test waits at least 200 ms between two attempts, because siw stops answering for a while if it gets a connect request
            // while it begins to listen.
            if side.has_ended(conn) && tried.elapsed() > Duration::from_millis(200) {
                tried = now();
                conn = side.connect(to[0]);
            }
        }
        for conn in [conn, more[0], others[0], others[1]] {
            side.reactor.context().close(conn);
        }
        side.until("all are closed", |side| side.probe.live() == 0);
    }
    side.until("the peer is as it was", |_| peer.descriptors() <= descriptors);
    side.finish();
    assert!(peer.finish());
    before.check();
}

macro_rules! on_each_device {
    ($($test:ident)*) => {
        on_each_device!(@ siw SIW $($test)*);
        on_each_device!(@ rxe RXE $($test)*);
    };
    (@ $name:ident $device:ident $($test:ident)*) => {
        mod $name {
            $(mod $test {
                use super::super::{$device, Load, with_watchdog};
                #[test]
                fn idle() {
                    with_watchdog(concat!(stringify!($test), ", idle"), || super::super::$test($device, Load::Idle));
                }
                #[test]
                fn in_traffic() {
                    let name = concat!(stringify!($test), ", in traffic");
                    with_watchdog(name, || super::super::$test($device, Load::Traffic));
                }
            })*
        }
    };
}

on_each_device! { killed_server killed_client stopped_peer link_down removed }
