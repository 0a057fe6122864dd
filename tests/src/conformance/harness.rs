//! A pair of reactors in one thread, and a handler that records its callbacks.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rdma_reactor::{
    Config, ConnectError, ConnectRequest, ConnectionId, Context, Datagram, DatagramHandler, Decision, DetachedMessage,
    DeviceEvent, DisconnectReason, EndpointId, Error, Failure, Handler, Immediate, MemoryStats, Message, Offered,
    Origin, Outcome, PeerId, ProviderChoice, Reactor, SecurityMode, SendErrorKind, SendId, SendKind, TimerId,
    TransferEnd, TransferId, Wait,
};

use super::clock;
pub use super::clock::now;
use crate::device::Device;
use crate::forward::Forward;
use crate::identities;
pub use crate::patience::{HOUR, PATIENCE};
use crate::patience::{TEST, limited_to};
use crate::usage::descriptors;
use crate::witness::{Watched, Witness};

/// The provider under test, the properties of its device, and the settings of the tests.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The provider.
    pub provider: ProviderChoice,
    /// The address to listen on, with port 0.
    pub address: SocketAddr,
    /// The amount of work in the tests with many connections.
    pub scale: Scale,
    /// True if the device has this defect: it serves RDMA Reads of regions that peers may only write to.
    pub reads_anything: bool,
    /// True if the device may still write a peer's data after the peer's right to write has ended. On such a device, the program must not
    /// get a reference to the memory.
    pub places_late: bool,
    /// True if the device flushes every work request when a connection ends.
    pub flushes: bool,
    /// True if the device supports datagrams and multicast groups.
    pub datagrams: bool,
    /// The number of receives that all connections share; `None` if each connection has its own receives.
    pub shared: Option<u32>,
    /// The completion vector; `None` to distribute the reactors over all vectors of the device.
    pub vector: Option<u32>,
    /// The number of entries in each completion queue, as a setting of the reactor; `None` for the default. Several connections share a
    /// queue if it has enough entries for them.
    pub completions: Option<u32>,
    /// The security mode of connections; `None` for plain ones.
    pub secured: Option<SecurityMode>,
    /// The device whose objects are counted. The reactors on it have a neighbour, see [`Witness`]. `None` if the tests have no neighbour.
    pub witnessed: Option<Device>,
    /// The function that creates the reactors.
    pub reactor: fn(Config) -> Result<Reactor, Error>,
}

/// The amount of work in the tests with many connections, messages or bytes. On an emulated machine it is smaller.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// The number of connections that are open at the same time.
    pub connections: usize,
    /// The number of echoes on each connection.
    pub echoes: u32,
    /// The number of connections that are opened sequentially.
    pub cycles: u64,
    /// The number of messages that each side sends in the test of full windows.
    pub messages: u32,
    /// The length of the largest messages in the tests of kept memory and of aborts, in bytes.
    pub largest: usize,
}

impl Setup {
    /// Returns the setup of the embedded provider on 127.0.0.1.
    #[must_use]
    pub fn iwarp() -> Self {
        let scale = Scale { connections: 1000, echoes: 100, cycles: 500, messages: 5000, largest: 64 << 20 };
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        Self {
            provider: ProviderChoice::Iwarp,
            address,
            scale,
            reads_anything: false,
            places_late: false,
            flushes: true,
            datagrams: true,
            shared: None,
            vector: None,
            completions: None,
            secured: None,
            witnessed: None,
            reactor: Reactor::new,
        }
    }

    /// Returns the setup of the embedded provider on virtual time: the reactors are nodes of a new
    /// simulated network. If `one_host` is true, they are within one host, and connections use
    /// shared memory.
    #[must_use]
    pub fn simulated(one_host: bool) -> Self {
        clock::simulate(one_host);
        Self { address: crate::sim::tcp::address(0, 0), datagrams: false, reactor: clock::reactor, ..Self::iwarp() }
    }

    /// Returns the setup of the embedded provider with connections in shared memory.
    #[must_use]
    pub fn shm() -> Self {
        Self { provider: ProviderChoice::Shm, datagrams: false, ..Self::iwarp() }
    }

    /// Returns the setup of the embedded provider, restricted like an iWARP adapter: it can read only into regions that peers may write
    /// to.
    #[must_use]
    pub fn open_sinks() -> Self {
        Self { reactor: |config| Ok(Forward::with_open_sinks(config)), ..Self::iwarp() }
    }

    /// Returns the setup of a kernel device. `tests/vm/run.sh` sets the device's address in the environment.
    ///
    /// # Panics
    /// Panics if the device is missing, because then a test that needs it must fail.
    #[must_use]
    pub fn device(kind: &str) -> Self {
        Self::at(&format!("RDMA_{kind}_ADDR"), kind)
    }

    /// Returns the setup of a kernel device.
    #[must_use]
    pub fn on(device: Device) -> Self {
        Self::device(&device.kind().to_uppercase())
    }

    /// Returns the setup of the device that `tests/hardware-report.sh` names.
    ///
    /// # Panics
    /// Panics if the device is missing.
    #[must_use]
    pub fn adapter() -> Self {
        let kind = std::env::var("RDMA_ADAPTER_KIND").unwrap_or_default();
        Self::at("RDMA_ADAPTER_ADDR", &kind)
    }

    fn at(name: &str, kind: &str) -> Self {
        let address = std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run `make test-rdma`"));
        let ip: std::net::IpAddr = address.parse().unwrap_or_else(|_| panic!("{name} is no address: {address}"));
        let scale = Scale { connections: 500, echoes: 10, cycles: 200, messages: 2000, largest: 8 << 20 };
        // The kernel's siw does not check the right to read.
        let reads_anything = kind == "SIW";
        Self {
            provider: ProviderChoice::Verbs,
            address: SocketAddr::new(ip, 0),
            scale,
            reads_anything,
            places_late: reads_anything,
            // The kernel's siw loses a send that is posted after the queue pair was flushed.
            flushes: kind != "SIW",
            datagrams: matches!(kind, "RXE" | "IB"),
            shared: None,
            vector: None,
            completions: None,
            secured: None,
            witnessed: None,
            reactor: Reactor::new,
        }
    }

    /// Returns this setup, with connections secured in this mode.
    #[must_use]
    pub fn secured(self, mode: SecurityMode) -> Self {
        Self { secured: Some(mode), ..self }
    }

    /// Returns the setup of a kernel device, with a [`Witness`] for each pair. The test must run in its own process, because it counts
    /// open objects.
    #[must_use]
    pub fn witnessed(device: Device) -> Self {
        Self { witnessed: Some(device), ..Self::on(device) }
    }

    /// Returns the number of the neighbour's connections to each reactor.
    #[must_use]
    pub fn neighbours(&self) -> u32 {
        u32::from(self.witnessed.is_some())
    }

    /// Returns this setup, with `receives` receives that all connections share.
    #[must_use]
    pub fn shared(self, receives: u32) -> Self {
        Self { shared: Some(receives), ..self }
    }

    /// Returns this setup, with all completions on this completion vector.
    #[must_use]
    pub fn on_vector(self, vector: u32) -> Self {
        Self { vector: Some(vector), ..self }
    }

    /// Returns this setup, with a separate completion queue for each connection.
    #[must_use]
    pub fn own_queues(self) -> Self {
        // These entries suffice for one connection with the default depths, so each connection gets its own queue.
        Self { completions: Some(130), ..self }
    }

    /// Returns the default settings for this setup, with time limits that even a busy machine does not reach. A test of a time limit
    /// sets that limit itself.
    #[must_use]
    pub fn config(&self) -> Config {
        let config = limited_to(PATIENCE, Config::default())
            .provider(self.provider)
            .max_memory(2 << 30)
            .shared_receives(self.shared)
            // On an iWARP device, a close may take up to this timeout.
            .timeouts(|t| t.close = Duration::from_secs(10))
            .timeouts(|t| (t.keepalive_interval, t.keepalive) = (Duration::from_secs(5), PATIENCE));
        // On a device that may lose a send, a flush may end only when this timeout is over, so the timeout keeps its short default. On all
        // other devices, the timeout is long.
        let config = if self.flushes { config.timeouts(|t| t.flush = PATIENCE) } else { config };
        let config = config.completions(|c| c.vector = self.vector);
        let config = match self.completions {
            Some(entries) => config.completions(|c| c.queue = Some(entries)),
            None => config,
        };
        match self.secured {
            // The suite also tests one-sided operations, which a secured connection permits only with this setting.
            Some(mode) => config.security(identities::security(mode)).allow_plain_remote_memory(true),
            None => config,
        }
    }
}

/// Runs a test with the time limit [`TEST`]. If the test takes longer, prints the test's name and aborts the process.
pub fn with_watchdog(name: &'static str, test: impl FnOnce()) {
    with_watchdog_of(TEST, name, test);
}

/// Runs a test with the time limit `limit`. If the test takes longer, prints the test's name and aborts the process.
pub fn with_watchdog_of(limit: Duration, name: &'static str, test: impl FnOnce()) {
    let done = start_watchdog(limit, name);
    test();
    drop(done);
}

/// Starts a watchdog for the test `name`. It ends when the returned sender is dropped.
// Not a part of `with_watchdog_of`: the compiler would generate the code of a thread for each test.
#[allow(clippy::disallowed_methods, reason = "a watchdog is a thread")]
fn start_watchdog(limit: Duration, name: &'static str) -> std::sync::mpsc::Sender<()> {
    let _ = env_logger::builder().is_test(true).try_init();
    let (done, watch) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        if watch.recv_timeout(limit) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            eprintln!("{name} hangs: {} s", limit.as_secs());
            std::process::abort();
        }
    });
    done
}

/// A recorded callback, with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// `on_connect_request`, with its private data.
    Request(Vec<u8>),
    /// `on_connect`, with the peer's private data.
    Connect(ConnectionId, Vec<u8>),
    /// `on_recv`.
    Recv(ConnectionId, Vec<u8>),
    /// `on_immediate`, with the value and the length.
    Immediate(ConnectionId, u32, u32),
    /// `on_send_complete`.
    Sent(ConnectionId, u64, Outcome),
    /// `on_transfer`.
    Transferred(ConnectionId, TransferId, TransferEnd),
    /// `on_offer`.
    Offered(ConnectionId, Offered),
    /// `on_landed`. The flag is true if the message has landed.
    Landed(ConnectionId, Offered, bool),
    /// `on_writable`.
    Writable(ConnectionId),
    /// `on_disconnect`.
    Disconnect(ConnectionId, DisconnectReason),
    /// `on_connect_error`.
    ConnectError(ConnectionId, ConnectError),
    /// `on_timer`, with its token.
    Timer(u64),
    /// `on_datagram`, with its immediate data.
    Datagram(EndpointId, Origin, Vec<u8>, Option<u32>),
    /// `on_datagram_sent`.
    DatagramSent(EndpointId, u64, Outcome),
    /// `on_datagram_writable`.
    DatagramWritable(EndpointId),
    /// `on_peer`.
    Peer(EndpointId, SocketAddr, Result<PeerId, ConnectError>),
    /// `on_join`.
    Join(EndpointId, IpAddr, Result<PeerId, ConnectError>),
    /// `on_endpoint_closed`.
    EndpointClosed(EndpointId, DisconnectReason),
    /// `on_device_event`.
    Device(DeviceEvent),
}

/// The reaction of a [`Probe`]: a function that is called with each event after it was recorded.
pub type React = Box<dyn FnMut(&mut Context<'_>, &Event)>;

/// A handler that records its callbacks, and checks their order.
pub struct Probe {
    /// All recorded events, the oldest first.
    pub events: Vec<Event>,
    /// The decision about each connect request.
    pub decision: Decision,
    /// The function that is called with each event.
    pub react: React,
    /// The received messages, if the probe keeps them. `None` if it releases them.
    pub keep: Option<Vec<DetachedMessage>>,
    /// True if messages are recorded as events. False for tests with very many messages.
    pub record_messages: bool,
    /// True if the test sends large messages. The sends of large messages may complete out of order, so the probe does not check the order
    /// of completions.
    pub large: bool,
    /// The number of received messages, even if they are not recorded.
    pub received: u64,
    /// The number of completed sends, even if they are not recorded.
    pub sent: u64,
    live: BTreeMap<ConnectionId, u64>,
    /// The connection to the neighbour. Its events are not recorded.
    watched: Watched,
    /// The number of messages whose sends have completed. One-sided operations are not counted.
    completed: u64,
}

impl std::fmt::Debug for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Probe").field("events", &self.events).finish_non_exhaustive()
    }
}

impl Default for Probe {
    fn default() -> Self {
        Self::new(|_, _| {})
    }
}

impl Probe {
    /// Returns a probe that calls `react` with each event.
    pub fn new(react: impl FnMut(&mut Context<'_>, &Event) + 'static) -> Self {
        Self {
            events: Vec::new(),
            decision: Decision::Accept,
            react: Box::new(react),
            keep: None,
            record_messages: true,
            large: false,
            received: 0,
            sent: 0,
            live: BTreeMap::new(),
            watched: Watched::default(),
            completed: 0,
        }
    }

    /// Returns a probe that sends every message back.
    #[must_use]
    pub fn echo() -> Self {
        let mut probe = Self::new(|cx, event| {
            if let Event::Recv(conn, bytes) = event {
                // If the peer has only a few messages in flight, the connection has a credit for each echo. The send may still fail if the
                // connection is ending.
                let sent = cx.send(*conn, bytes);
                assert!(matches!(sent, Ok(_) | Err(SendErrorKind::Closed)), "{sent:?}");
            }
        });
        probe.record_messages = false;
        probe
    }

    /// Returns the number of open connections, counted by callbacks.
    #[must_use]
    pub fn live(&self) -> usize {
        self.live.len()
    }

    /// Returns the first connection that was established, if there is one.
    #[must_use]
    pub fn connection(&self) -> Option<ConnectionId> {
        self.events.iter().find_map(|event| if let Event::Connect(conn, _) = event { Some(*conn) } else { None })
    }

    /// Returns the recorded messages.
    #[must_use]
    pub fn messages(&self) -> Vec<&[u8]> {
        self.events.iter().filter_map(|e| if let Event::Recv(_, bytes) = e { Some(&bytes[..]) } else { None }).collect()
    }

    /// Returns the number of recorded events for which `condition` returns true.
    pub fn count(&self, condition: impl Fn(&Event) -> bool) -> usize {
        self.events.iter().filter(|event| condition(event)).count()
    }

    /// Checks that the send of each accepted message has completed. Must be called after all connections have ended.
    ///
    /// # Panics
    /// Panics if a send has not completed.
    pub fn assert_completed(&self, reactor: &Reactor) {
        let sent = reactor.stats().messages.sent;
        assert_eq!(sent, self.completed + self.watched.sent(), "each accepted message completes once");
    }

    fn tell(&mut self, cx: &mut Context<'_>, event: Event) {
        let noisy = matches!(event, Event::Recv(..) | Event::Sent(..));
        (self.react)(cx, &event);
        if self.record_messages || !noisy {
            self.events.push(event);
        }
    }

    fn assert_live(&self, conn: ConnectionId, what: &str) {
        assert!(self.live.contains_key(&conn), "{what} of {conn} outside on_connect..on_disconnect");
    }
}

impl Handler for Probe {
    fn on_connect_request(&mut self, cx: &mut Context<'_>, request: ConnectRequest<'_>) -> Decision {
        self.tell(cx, Event::Request(request.private_data.to_vec()));
        self.decision.clone()
    }

    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if self.watched.comes_up(cx, conn) {
            return;
        }
        assert!(self.live.insert(conn, 0).is_none(), "{conn} connected twice");
        let private_data = cx.connection(conn).private_data().to_vec();
        self.tell(cx, Event::Connect(conn, private_data));
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if self.watched.is(conn) {
            return self.watched.answer(cx, conn, &message);
        }
        self.assert_live(conn, "on_recv");
        self.received += 1;
        let bytes = message.to_vec();
        if let Some(kept) = &mut self.keep {
            kept.push(message.detach());
        }
        self.tell(cx, Event::Recv(conn, bytes));
    }

    fn on_immediate(&mut self, cx: &mut Context<'_>, conn: ConnectionId, immediate: Immediate) {
        self.assert_live(conn, "on_immediate");
        self.tell(cx, Event::Immediate(conn, immediate.value, immediate.len));
    }

    fn on_transfer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, transfer: TransferId, end: TransferEnd) {
        self.assert_live(conn, "on_transfer");
        let ended = |event: &Event| matches!(event, Event::Transferred(of, id, _) if (*of, *id) == (conn, transfer));
        assert_eq!(self.count(ended), 0, "{transfer:?} of {conn} has ended before");
        self.tell(cx, Event::Transferred(conn, transfer, end));
    }

    fn on_offer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, offer: Offered) {
        self.assert_live(conn, "on_offer");
        self.tell(cx, Event::Offered(conn, offer));
    }

    fn on_landed(&mut self, cx: &mut Context<'_>, conn: ConnectionId, offer: Offered, result: Result<(), Failure>) {
        self.assert_live(conn, "on_landed");
        self.tell(cx, Event::Landed(conn, offer, result.is_ok()));
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        if self.watched.is(conn) {
            return self.watched.completes(send);
        }
        let next = self.live.get_mut(&conn).expect("on_send_complete between on_connect and on_disconnect");
        assert!(self.large || send.sequence() == *next, "sends complete once, in order: {send:?}, not {next}");
        *next += 1;
        self.sent += 1;
        self.completed += u64::from(send.kind() == SendKind::Message);
        self.tell(cx, Event::Sent(conn, send.sequence(), outcome));
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.assert_live(conn, "on_writable");
        self.tell(cx, Event::Writable(conn));
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        if self.watched.is(conn) {
            return self.watched.ends();
        }
        assert!(self.live.remove(&conn).is_some(), "{conn} ended, but was never announced or ended before");
        self.tell(cx, Event::Disconnect(conn, reason));
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        assert!(!self.live.contains_key(&conn), "{conn} was connected: it ends in on_disconnect");
        self.tell(cx, Event::ConnectError(conn, error));
    }

    fn on_device_event(&mut self, cx: &mut Context<'_>, event: &DeviceEvent) {
        self.tell(cx, Event::Device(event.clone()));
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _timer: TimerId, token: u64) {
        self.tell(cx, Event::Timer(token));
    }

    fn datagrams(&mut self) -> Option<&mut dyn DatagramHandler> {
        Some(self)
    }
}

impl DatagramHandler for Probe {
    fn on_datagram(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, datagram: Datagram<'_>) {
        self.tell(cx, Event::Datagram(endpoint, datagram.origin(), datagram.to_vec(), datagram.immediate()));
    }

    fn on_datagram_sent(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, send: SendId, outcome: Outcome) {
        self.tell(cx, Event::DatagramSent(endpoint, send.sequence(), outcome));
    }

    fn on_datagram_writable(&mut self, cx: &mut Context<'_>, endpoint: EndpointId) {
        self.tell(cx, Event::DatagramWritable(endpoint));
    }

    fn on_peer(
        &mut self,
        cx: &mut Context<'_>,
        endpoint: EndpointId,
        address: SocketAddr,
        found: Result<PeerId, ConnectError>,
    ) {
        self.tell(cx, Event::Peer(endpoint, address, found));
    }

    fn on_join(
        &mut self,
        cx: &mut Context<'_>,
        endpoint: EndpointId,
        group: IpAddr,
        joined: Result<PeerId, ConnectError>,
    ) {
        self.tell(cx, Event::Join(endpoint, group, joined));
    }

    fn on_endpoint_closed(&mut self, cx: &mut Context<'_>, endpoint: EndpointId, reason: DisconnectReason) {
        self.tell(cx, Event::EndpointClosed(endpoint, reason));
    }
}

/// The number of the server in a pair. The neighbour distinguishes the reactors by these numbers.
pub const SERVER: u8 = 0;
/// The number of the client in a pair, see [`SERVER`].
pub const CLIENT: u8 = 1;

/// A server and a client, each with its handler.
#[derive(Debug)]
pub struct Pair {
    /// The listening reactor.
    pub server: Reactor,
    /// The handler of the server.
    pub s: Probe,
    /// The connecting reactor.
    pub client: Reactor,
    /// The handler of the client.
    pub c: Probe,
    /// The address that the server listens on.
    pub address: SocketAddr,
    /// A copy of [`Setup::flushes`].
    pub flushes: bool,
    /// The neighbour of both reactors, if there is one. This field is dropped last. The drop of the neighbour checks that no object
    /// remains.
    pub witness: Option<Witness>,
}

impl Pair {
    /// Returns a server, which listens, and a client. Both have the same settings.
    #[must_use]
    pub fn new(setup: &Setup, config: Config, s: Probe, c: Probe) -> Self {
        Self::with_configs(setup, config.clone(), config, s, c)
    }

    /// Returns a server, which listens, and a client.
    #[must_use]
    pub fn with_configs(setup: &Setup, server: Config, client: Config, s: Probe, c: Probe) -> Self {
        let witness = setup.witnessed.map(|device| Witness::new(device, setup.config().wait(Wait::Event), 2));
        let mut server = (setup.reactor)(server).expect("the server's reactor");
        let mut client = (setup.reactor)(client).expect("the client's reactor");
        let listener = server.context().listen(setup.address).expect("listening");
        let address = server.context().listeners().local_address(listener).expect("the listener's address");
        for (reactor, number) in [&mut server, &mut client].into_iter().zip([SERVER, CLIENT]) {
            witness.iter().for_each(|witness| witness.watch(reactor, number));
        }
        let mut pair = Self { server, s, client, c, address, flushes: setup.flushes, witness };
        pair.goes_on();
        pair
    }

    /// Waits until the neighbour has received more echoes from each reactor.
    pub fn goes_on(&mut self) {
        let further = self.witness.as_ref().map(Witness::further).unwrap_or_default();
        self.until("the neighbour's echoes go on", |p| p.witness.as_ref().is_none_or(|witness| witness.has(&further)));
    }

    /// Connects, and waits until both sides have called `on_connect`. Returns the client's id of the connection.
    pub fn connect(&mut self) -> ConnectionId {
        let before = (self.s.live(), self.c.live());
        let conn = self.client.context().connect(self.address).expect("connecting");
        self.until("both sides are connected", |p| (p.s.live(), p.c.live()) == (before.0 + 1, before.1 + 1));
        conn
    }

    /// Takes one turn of each reactor. Waits for a moment if neither had work.
    pub fn turn(&mut self) {
        let server = self.server.turn(&mut self.s, Some(Duration::ZERO)).expect("the server's turn");
        let client = self.client.turn(&mut self.c, Some(Duration::ZERO)).expect("the client's turn");
        if !(server.progressed || server.more || client.progressed || client.more) {
            self.client.turn(&mut self.c, Some(Duration::from_millis(1))).expect("the client's turn");
        }
        self.witness.iter_mut().for_each(Witness::check);
    }

    /// Takes turns until `condition` returns true. Panics with the text `what` if that takes longer than [`PATIENCE`].
    pub fn until(&mut self, what: &str, condition: impl Fn(&Self) -> bool) {
        let deadline = now() + PATIENCE;
        while !condition(self) {
            assert!(now() < deadline, "not within {PATIENCE:?}: {what}\nserver {:?}\nclient {:?}", self.s, self.c);
            self.turn();
        }
    }

    /// Takes turns for the duration `time`.
    pub fn turn_for(&mut self, time: Duration) {
        let deadline = now() + time;
        while now() < deadline {
            self.turn();
        }
    }

    /// Closes all connections and ends the pair. Checks that no object remains on either side, and that the send of each accepted
    /// message has completed.
    pub fn finish(mut self) {
        if self.witness.is_some() {
            self.goes_on();
            self.witness.iter().for_each(Witness::leave);
            self.until("the neighbour has ended", |p| p.witness.as_ref().is_none_or(Witness::is_over));
        }
        self.client.context().close_all();
        self.until("both sides are disconnected", |p| p.s.live() + p.c.live() == 0);
        self.client.shutdown(&mut self.c, PATIENCE).expect("the client's end");
        self.until("all buffers are home", |p| [&p.server, &p.client].iter().all(|r| at_home(r)));
        let unflushed = [&self.server, &self.client].map(|reactor| reactor.stats().connections.unflushed);
        assert!(!self.flushes || unflushed == [0, 0], "connections ran into the limit of their flush: {unflushed:?}");
        clock::assert_awake();
        if self.witness.is_some() {
            self.s.assert_completed(&self.server);
            self.c.assert_completed(&self.client);
        }
    }
}

/// Returns true if all buffers of the reactor are in their pools and no connection claims a shared receive.
#[must_use]
pub fn at_home<M>(reactor: &Reactor<M>) -> bool {
    let MemoryStats { shared_posted: shared, shared_unclaimed, .. } = reactor.stats().memory;
    let (all, free) = reactor.pool_levels();
    all == free && shared_unclaimed == shared - shared / 8
}

/// Returns `len` bytes that depend on `seed` and on their position.
#[must_use]
pub fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(31) ^ seed.wrapping_mul(131) ^ (i >> 8)) as u8).collect()
}

/// Returns the number of open descriptors of this process.
///
/// # Panics
/// Panics if `/proc` is not available.
#[must_use]
pub fn open_descriptors() -> usize {
    descriptors().expect("/proc/self/fd")
}
