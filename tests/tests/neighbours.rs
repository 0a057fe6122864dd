//! Echoes of an honest client next to a hostile peer, on virtual time. Whatever the hostile peer does, the 99th percentile of the time of
//! an echo is at most twice the percentile without a hostile peer.

use std::sync::Arc;

use rdma_reactor::{
    Access, Config, ConnectionId, Context, DetachedMessage, DisconnectReason, Handler, Message, Region, RegionOptions,
    RemoteRegion, SendErrorKind, Stats,
};
use rdma_reactor_tests::conformance::violations::{greeting, message};
use rdma_reactor_tests::floods::{Floods, Kind};
use rdma_reactor_tests::peer::{SEND, fpdu_untagged};
use rdma_reactor_tests::sim::fabric::{Shared, lock};
use rdma_reactor_tests::sim::hostile::{Hostile, startup_frame};
use rdma_reactor_tests::sim::neighbour::{EmptyWrites, Server, Street};
use rdma_reactor_tests::sim::quiet::{Node, reactor};
use rdma_reactor_tests::sim::swarm::MS;
use rdma_reactor_tests::sim::tcp::address;

/// Nanoseconds per microsecond.
const US: u64 = 1_000;
/// The processor time per received byte, in ps. At this rate, one of the smallest frames costs about 60 ns.
const TOLL: u64 = 2_000;

fn config() -> Config {
    Config::default()
        .large_messages(|l| l.max_message = 1 << 20)
        .large_messages(|l| l.memory = 8 << 20)
        .max_memory(512 << 20)
}

/// Checks that the 99th percentile of the time of an echo is at most twice the percentile in a network without hostile peers. `join` adds
/// the hostile peers, and `act` is called every `pause` ns. Returns the counters of the server.
fn beside(what: &str, pause: u64, join: impl FnOnce(&mut Street), mut act: impl FnMut(&Shared, &mut [Node])) -> Stats {
    let toll = |street: &Street| lock(&street.fabric).toll = TOLL;
    let mut quiet = Street::echoing(&config());
    toll(&quiet);
    let alone = quiet.p99(u64::MAX, |_| {});
    let mut street = Street::echoing(&config());
    toll(&street);
    join(&mut street);
    let fabric = Arc::clone(&street.fabric);
    let beside = street.p99(pause, |nodes| act(&fabric, nodes));
    let stats = street.stats();
    println!("{what}: p99 alone {alone} ns, beside it {beside} ns; {:?}", stats.connections);
    assert!(beside <= 2 * alone, "{what}: p99 is {beside} ns, and {alone} ns alone");
    stats
}

/// Does the same as [`beside`], with `count` hostile sockets. Every `pause` ns, the next socket acts, in a cycle. `act` is called with this
/// socket and the number of its earlier acts.
fn beside_sockets(what: &str, count: usize, pause: u64, act: impl Fn(&mut Hostile, u64)) -> Stats {
    let (mut sockets, mut acts) = (Vec::new(), 0_u64);
    beside(
        what,
        pause,
        |_| {},
        |fabric, _| {
            if sockets.is_empty() {
                sockets.extend((0..count).map(|_| Hostile::new(fabric)));
            }
            let nth = acts % count as u64;
            let socket = &mut sockets[nth as usize];
            socket.read();
            act(socket, acts / count as u64);
            acts += 1;
        },
    )
}

fn server() -> std::net::SocketAddr {
    address(0, 7471)
}

/// The startup frames of a hundred connections arrive byte by byte.
#[test]
fn slow_handshakes_delay_nobody() {
    let frame = startup_frame(&greeting(16));
    let stats = beside_sockets("slow handshakes", 100, 5 * US, |socket, nth| match nth {
        0 => socket.open(server()),
        _ => socket.send(vec![frame[(nth as usize - 1) % frame.len()]]),
    });
    assert_eq!(stats.connections.connected, 1, "none of them is up yet");
}

/// Hostile sockets send junk instead of a startup frame. After some junk, each opens a new connection.
#[test]
fn junk_delays_nobody() {
    let stats = beside_sockets("junk", 20, 10 * US, |socket, nth| match nth % 8 {
        0 => socket.open(server()),
        1..4 => {}
        _ => socket.send(vec![nth as u8; 100]),
    });
    assert_eq!(stats.connections.connected, 1);
}

/// A new connection is opened every 10 us, and none sends anything.
#[test]
fn silent_connections_delay_nobody() {
    let stats = beside_sockets("silent connections", 2_000, 10 * US, |socket, nth| {
        if nth == 0 {
            socket.open(server());
        }
    });
    assert_eq!(stats.connections.connected, 1);
}

/// Row 23 of `docs/reliability.md`. Connections are established and closed again, one every 100 us.
#[test]
fn churn_delays_nobody() {
    let stats = beside_sockets("churn", 10, 10 * US, |socket, nth| match nth % 10 {
        0 => socket.open(server()),
        3 => socket.greet(),
        9 => socket.close(nth % 20 == 9),
        _ => {}
    });
    assert!(stats.connections.connected > 50, "{stats:?}");
}

/// Row 23 of `docs/reliability.md`. Two hundred connections are requested and established, and all of them stay.
#[test]
fn a_flood_of_connects_delays_nobody() {
    let stats = beside_sockets("connects", 200, 10 * US, |socket, nth| match nth {
        0 => socket.open(server()),
        1 => socket.greet(),
        _ => {}
    });
    assert!(stats.connections.connected > 100, "{stats:?}");
}

/// A peer sends RDMA Writes of zero bytes as fast as TCP accepts them. They need neither credits nor access rights.
#[test]
fn writes_of_nothing_delay_nobody() {
    let stats =
        beside("Writes of nothing", u64::MAX, |street| street.add(&config(), Box::<EmptyWrites>::default()), |_, _| {});
    assert_eq!(stats.connections.connected, 2);
}

/// Messages arrive byte by byte, on fifty connections.
#[test]
fn frames_octet_by_octet_delay_nobody() {
    let frame = fpdu_untagged(&SEND, &message(0, 16, &[1; 100]), true);
    let stats = beside_sockets("frames byte by byte", 50, 5 * US, |socket, nth| match nth {
        0 => socket.open(server()),
        2 => socket.greet(),
        3.. => socket.send(vec![frame[(nth as usize - 3) % (frame.len() - 1)]]),
        _ => {}
    });
    assert!(stats.connections.connected > 40, "{stats:?}");
}

/// Peers request echoes, and never grant credits for them.
#[test]
fn grants_that_never_come_delay_nobody() {
    let stats = beside_sockets("no grants", 20, 5 * US, |socket, nth| match nth {
        0 => socket.open(server()),
        4 => socket.greet(),
        5.. => socket.message(&message(0, 16, &[0; 8])),
        _ => {}
    });
    assert!(stats.connections.connected > 15, "{stats:?}");
}

/// A program that offers as many large messages as it can. The test stops the reactor of this program, so that the reactor answers no
/// Reads.
struct Offers;

impl Handler for Offers {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        while cx.send(conn, &[5; 500_000]).is_ok() {}
    }
}

/// Large messages are offered, and cannot be fetched, because the peer answers no Reads.
#[test]
fn offers_that_are_never_fetched_delay_nobody() {
    let stats = beside(
        "offers",
        300 * US,
        |street| street.add(&config(), Box::new(Offers)),
        |fabric, nodes| {
            nodes[2].dead = lock(fabric).now() >= 300 * US;
        },
    );
    assert_eq!(stats.connections.connected, 2);
    assert!(stats.memory.fetched_bytes > 0 && stats.memory.fetched_bytes <= 4 << 20, "{stats:?}");
}

/// A program that always has as many Reads of the peer's memory in flight as it can.
#[derive(Default)]
struct Reads(Option<(Region, RemoteRegion)>);

impl Reads {
    fn read(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let Some((sink, from)) = &mut self.0 else { return };
        while cx.remote(conn).read(*from, sink, 0..65_536).is_ok() {}
    }
}

impl Handler for Reads {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let from = RemoteRegion::from_bytes(&message).expect("a region's name");
        let sink = cx.regions().register(conn, 65_536, &RegionOptions::new()).expect("a region");
        self.0 = Some((sink, from));
        self.read(cx, conn);
    }
    fn on_send_complete(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnectionId,
        _: rdma_reactor::SendId,
        _: rdma_reactor::Outcome,
    ) {
        self.read(cx, conn);
    }
}

/// A server that echoes, and registers memory that its peers may read.
struct Library(Server, Vec<Region>);

impl Handler for Library {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let options = RegionOptions::new().allow(Access::REMOTE_READ);
        let region = cx.regions().register(conn, 65_536, &options).expect("a region");
        // The key is not sent to the first client, the honest one, which would take it for an echo.
        if !self.1.is_empty() {
            cx.send(conn, &region.remote().to_bytes()).expect("room");
        }
        self.1.push(region);
    }
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.0.on_recv(cx, conn, message);
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, _: DisconnectReason) {}
}

/// A peer always has as many Reads of 64 KiB in flight as it can.
#[test]
fn reads_at_full_depth_delay_nobody() {
    let library = |fabric: &Shared| Box::new(Library(Server(Arc::clone(fabric)), Vec::new())) as Box<dyn Handler>;
    let alone = Street::new(&config(), library).p99(u64::MAX, |_| {});
    let mut street = Street::new(&config(), library);
    // The server needs 100 ps for each byte that it receives or sends. This is the time to copy the byte and compute its CRC at about 10
    // GB/s.
    lock(&street.fabric).toll = 100;
    street.until(10, u64::MAX, |_| {});
    street.add(&config(), Box::<Reads>::default());
    let beside = street.p99(u64::MAX, |_| {});
    println!("reads: p99 alone {alone} ns, beside them {beside} ns");
    assert_eq!(street.stats().connections.connected, 2);
    assert!(beside <= 2 * alone, "p99 is {beside} ns, and {alone} ns alone");
}

/// A server that echoes messages of eight bytes, and keeps all other messages forever.
struct Keeps(Server, Vec<DetachedMessage>);

impl Handler for Keeps {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if message.len() == 8 {
            self.0.on_recv(cx, conn, message);
        } else {
            self.1.push(message.detach());
        }
    }
}

/// A program that sends as many messages as the window allows, alternately one that fits into one buffer and a larger one.
struct Hoard;

impl Handler for Hoard {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.on_writable(cx, conn);
    }
    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        while !matches!(cx.send(conn, &[3; 1000]), Err(SendErrorKind::WouldBlock(_))) {
            let _ = cx.send(conn, &[4; 20_000]);
        }
    }
}

/// A peer sends as many messages as it can, and the server's program keeps all of them.
#[test]
fn kept_messages_delay_nobody() {
    let keeps = |fabric: &Shared| Box::new(Keeps(Server(Arc::clone(fabric)), Vec::new())) as Box<dyn Handler>;
    let alone = Street::new(&config(), keeps).p99(u64::MAX, |_| {});
    let mut street = Street::new(&config(), keeps);
    street.add(&config(), Box::new(Hoard));
    let beside = street.p99(u64::MAX, |_| {});
    let stats = street.stats();
    println!("kept messages: p99 alone {alone} ns, beside them {beside} ns; {:?}", stats.memory);
    assert!(stats.memory.pool_buffers - stats.memory.pool_free > 100, "they are kept: {stats:?}");
    assert!(beside <= 2 * alone, "p99 is {beside} ns, and {alone} ns alone");
}

/// Checks the measurement itself: a run in which the time jumps ahead every 0.1 ms must have a percentile more than twice as high as a run
/// without jumps.
#[test]
fn the_measurement_sees_a_delay() {
    let slow = |pause: u64| {
        let mut street = Street::echoing(&config());
        let fabric = Arc::clone(&street.fabric);
        street.p99(pause, |_| {
            let now = lock(&fabric).now();
            lock(&fabric).advance(now + MS / 10);
        })
    };
    let (alone, beside) = (slow(u64::MAX), slow(MS / 10));
    assert!(beside > 2 * alone, "p99 is {beside} ns, and {alone} ns alone");
}

/// Four peers send messages without payload, immediate data, pings or grants, as fast as their credits allow. A turn handles at most a
/// fixed number of messages of each connection, its share. If the program gets a callback for each of these messages, an echo waits for at
/// most two shares of each peer. If the program gets no callback, these messages cost nearly nothing.
#[test]
fn floods_within_credits_delay_nobody_beyond_their_shares() {
    const PEERS: u64 = 4;
    /// The limit of `Config::fairness` on the messages of one connection in a turn, and the time in ns that the program takes for one.
    const SHARE: (u64, u64) = (24, US);
    let measure = |kind: Option<Kind>| {
        let mut street = Street::echoing(&config());
        lock(&street.fabric).toll = TOLL;
        for kind in std::iter::repeat_n(kind, PEERS as usize).flatten() {
            let number = street.nodes.len();
            let mut node =
                Node::new(reactor(number, &street.fabric, Floods::config(config())), Box::new(Floods::new(kind)));
            Floods::connect(&mut node.reactor.context(), server()).expect("a peer");
            street.nodes.push(node);
        }
        (street.p99(u64::MAX, |_| {}), street.stats())
    };
    let (alone, _) = measure(None);
    for kind in Kind::ALL {
        let (beside, stats) = measure(Some(kind));
        println!("{kind:?}: p99 alone {alone} ns, beside them {beside} ns; {:?}", stats.completions);
        let connections = stats.connections;
        assert_eq!((connections.connected, connections.disconnected), (1 + PEERS, 0), "{kind:?}");
        let shares = if kind == Kind::Data { 2 * PEERS * SHARE.0 * SHARE.1 } else { 0 };
        assert!(beside <= 2 * alone + shares, "{kind:?}: p99 is {beside} ns, and {alone} ns alone");
    }
}
