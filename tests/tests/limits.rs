//! Limits on the time, the memory and the number of connections that peers can cause, on virtual time. Most peers here encode the
//! protocol's messages themselves (`docs/wire.md`), and violate one rule each.

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

use rdma_reactor::call::Calls;
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
use rdma_reactor_tests::patience::{HOUR, patient};
use rdma_reactor_tests::peer::{SEND, fpdu_untagged};
use rdma_reactor_tests::sim::fabric::{Script, Shared, lock};
use rdma_reactor_tests::sim::hostile::{Hostile, startup_frame};
use rdma_reactor_tests::sim::net::SimNet;
use rdma_reactor_tests::sim::quiet::{Attempts, Node, entropy, network, parts, reactor, step, until};
use rdma_reactor_tests::sim::swarm::MS;
use rdma_reactor_tests::sim::tcp::address;
use rdma_transport_embedded::iwarp::wire::Untagged;
use rdma_transport_embedded::iwarp::{Iwarp, IwarpConfig};

/// The largest number of bytes that precede the payload in a frame.
const HEADER: u64 = 24;
/// The kinds of messages, as in the header of a message (`docs/wire.md`).
const DATA: u8 = 0;
const PING: u8 = 3;
const PONG: u8 = 4;
const FRAGMENT: u8 = 10;
/// The silence after which the reactor pings a peer, in ms.
const INTERVAL: u64 = 50;
/// The silence after which the connection of a peer ends, in ms.
const TIMEOUT: u64 = 150;
const SLACK: u64 = 15;

fn config() -> Config {
    let ms = Duration::from_millis;
    Config::default()
        .timeouts(|t| (t.keepalive_interval, t.keepalive) = (ms(INTERVAL), ms(TIMEOUT)))
        .timeouts(|t| t.flush = ms(10))
        .timeouts(|t| t.close = ms(20))
}

/// The ends of a program's connections: the time of each end in ns, and the reason.
#[derive(Clone, Default)]
struct Ends(Rc<RefCell<Vec<(u64, DisconnectReason)>>>);

/// A program that calls `up` when a connection is established, and records the ends of connections.
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

/// A peer that encodes the protocol's messages itself. If `first` is empty, the peer answers pings, but never grants credits. Otherwise it
/// sends the message `first`, and then only RDMA Writes of zero bytes, which prove that it is alive.
struct Rude {
    /// The number of signs of life that the peer has sent: answers to pings, or RDMA Writes of zero bytes.
    signs: Rc<Cell<u32>>,
    first: Vec<u8>,
    region: Option<Region>,
}

impl Handler for Rude {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        cx.send(conn, &message(HELLO, WINDOW, &[])).expect("room");
        if !self.first.is_empty() {
            cx.send(conn, &self.first).expect("room");
            self.region = Some(cx.regions().register(conn, 8, &RegionOptions::new()).expect("a region"));
            cx.timers().set(Duration::from_millis(INTERVAL / 2), 0);
        }
    }
    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        let nowhere = RemoteRegion { address: 0, len: 0, key: 0 };
        let conn = cx.connection_ids().next();
        if let (Some(region), Some(conn)) = (&self.region, conn) {
            self.signs.set(self.signs.get() + u32::from(cx.remote(conn).write(nowhere, region, 0..0).is_ok()));
            cx.timers().set(Duration::from_millis(INTERVAL / 2), 0);
        }
    }
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message_in: Message<'_>) {
        if message_in.first() == Some(&PING) && self.region.is_none() {
            self.signs.set(self.signs.get() + 1);
            cx.send(conn, &message(PONG, WINDOW, &[])).expect("room");
        }
    }
}

/// Returns two nodes: a server that runs `program`, and a peer that runs `rude` and has begun to connect to the server.
fn beside_rude(fabric: &Shared, server: Config, program: Box<dyn Handler>, rude: Rude) -> [Node; 2] {
    let mut nodes =
        [Node::new(reactor(0, fabric, server), program), Node::new(reactor(1, fabric, config()), Box::new(rude))];
    nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
    let options = ConnectOptions::new().framing(Framing::Raw).private_data(greeting(WINDOW));
    nodes[1].reactor.context().connect_with(address(0, 7471), options).expect("connecting");
    nodes
}

/// A program that opens streams and reads nothing from them.
struct Deaf;

impl StreamHandler for Deaf {
    fn on_readable(&mut self, _: &mut StreamContext<'_>, _: ConnectionId) {}
}
