//! Limits on time, memory and number that peers reach, on virtual time. Most peers here speak the protocol by hand
//! (`docs/wire.md`), and are honest in all but one respect.

mod limits {
    mod connections;
    mod memory;
    mod time;
}

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::rc::Rc;
use std::sync::{Mutex, Once};
use std::time::Duration;

use rdma_reactor::stream::{StreamContext, StreamHandler, Streams};
use rdma_reactor::{
    Access, Blocked, Config, ConnectError, ConnectOptions, ConnectRequest, ConnectionId, Context, Decision,
    DetachedMessage, DisconnectReason, Framing, Handler, ListenOptions, Message, Parts, Reactor, Region, RegionOptions,
    RejectReason, RemoteRegion, SecurityMode, SendErrorKind, TimerId,
};
use rdma_reactor_tests::conformance::violations::{HELLO, WINDOW, greeting, message};
use rdma_reactor_tests::forward::Forward;
use rdma_reactor_tests::gate::Gate;
use rdma_reactor_tests::identities::{security, stranger};
use rdma_reactor_tests::peer::{SEND, fpdu_untagged};
use rdma_reactor_tests::sim::fabric::{Script, Shared, lock};
use rdma_reactor_tests::sim::hostile::{Hostile, startup_frame};
use rdma_reactor_tests::sim::quiet::{Attempts, Node, network, parts, reactor, step, until};
use rdma_reactor_tests::sim::swarm::MS;
use rdma_reactor_tests::sim::tcp::address;
use rdma_transport::iwarp::wire::Untagged;

/// The largest number of bytes in front of the payload of a frame.
const HEADER: u64 = 24;
/// The kinds of messages.
const DATA: u8 = 0;
const PING: u8 = 3;
const PONG: u8 = 4;
const FRAGMENT: u8 = 10;
/// The silence after which a peer is pinged, and after which its connection ends, ms.
const INTERVAL: u64 = 50;
const TIMEOUT: u64 = 150;
const SLACK: u64 = 15;

fn config() -> Config {
    let ms = Duration::from_millis;
    Config::default()
        .timeouts(|t| (t.keepalive_interval, t.keepalive) = (ms(INTERVAL), ms(TIMEOUT)))
        .timeouts(|t| t.flush = ms(10))
        .timeouts(|t| t.close = ms(20))
}

/// The reasons and the times of the ends of a program's connections, ns.
#[derive(Clone, Default)]
struct Ends(Rc<RefCell<Vec<(u64, DisconnectReason)>>>);

/// A program that runs one action when a connection is established, and notes how connections end.
struct Honest<F> {
    fabric: Shared,
    ends: Ends,
    up: F,
}

impl<F: FnMut(&mut Context<'_>, ConnectionId)> Handler for Honest<F> {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        (self.up)(cx, conn);
    }
    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        let now = lock(&self.fabric).now();
        self.ends.0.borrow_mut().push((now, reason));
    }
}

/// A hand-made peer. It answers pings, and never grants credits; or it sends the beginning of a message, and then only Writes of zero
/// bytes, which are signs of life.
struct Rude {
    /// The signs of life: answers, and Writes of zero bytes.
    signs: Rc<Cell<u32>>,
    first: Vec<u8>,
    region: Option<Region>,
}

impl Handler for Rude {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        cx.send(conn, &message(HELLO, WINDOW, &[])).expect("room");
        if !self.first.is_empty() {
            cx.send(conn, &self.first).expect("room");
            self.region = Some(cx.register(conn, 8, &RegionOptions::new()).expect("a region"));
            cx.set_timer(Duration::from_millis(INTERVAL / 2), 0);
        }
    }
    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        let nowhere = RemoteRegion { address: 0, len: 0, key: 0 };
        let conn = cx.connection_ids().next();
        if let (Some(region), Some(conn)) = (&self.region, conn) {
            self.signs.set(self.signs.get() + u32::from(cx.write(conn, nowhere, region, 0..0).is_ok()));
            cx.set_timer(Duration::from_millis(INTERVAL / 2), 0);
        }
    }
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message_in: Message<'_>) {
        if message_in.first() == Some(&PING) && self.region.is_none() {
            self.signs.set(self.signs.get() + 1);
            cx.send(conn, &message(PONG, WINDOW, &[])).expect("room");
        }
    }
}

/// Returns a server with this program, and a hand-made peer, which has begun to connect.
fn beside_rude(fabric: &Shared, server: Config, program: Box<dyn Handler>, rude: Rude) -> [Node; 2] {
    let mut nodes =
        [Node::new(reactor(0, fabric, server), program), Node::new(reactor(1, fabric, config()), Box::new(rude))];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    let options = ConnectOptions::new().framing(Framing::Raw).private_data(greeting(WINDOW));
    nodes[1].reactor.context().connect_with(address(0, 7471), options).expect("connecting");
    nodes
}

/// A program that opens a stream and reads nothing of it.
struct Deaf;

impl StreamHandler for Deaf {
    fn on_readable(&mut self, _: &mut StreamContext<'_>, _: ConnectionId) {}
}
