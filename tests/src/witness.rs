//! An honest neighbour, for tests of faults. The neighbour is a thread with its own reactor. Each reactor under test opens an additional
//! connection to the neighbour. On each of these connections, the neighbour sends numbered messages and waits for the echo of each one:
//! before, during and after the fault. In the end, the descriptors of the process and the objects of the kernel are counted, and compared
//! with the numbers at the beginning.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdma_reactor::{
    Config, ConnectOptions, ConnectRequest, ConnectionId, Context, Decision, DisconnectReason, Handler, Message,
    Outcome, Reactor, ReactorHandle, SendErrorKind, SendId, TimerId,
};

use crate::conformance::harness::{PATIENCE, now, open_descriptors};
use crate::device::Device;

/// The private data that marks a connection to the neighbour. One further byte of private data has the number of the reactor under test.
const MARK: &[u8] = b"a witness";
/// The time between an echo and the next request.
const PAUSE: Duration = Duration::from_millis(2);
/// The time limit for the release of all objects.
const GIVEN_BACK: Duration = Duration::from_secs(120);
/// A connection of the neighbour counts as stalled if no echo has arrived for this duration and during this number of turns of the reactors
/// under test. Both limits must be exceeded, because a slow machine runs only a few turns in this duration.
const STILL: (Duration, u32) = (Duration::from_secs(5), 3000);
/// The number of further echoes on a connection that count as progress.
const ECHOES: u64 = 5;

/// The number of open descriptors of this process, and the number of the kernel's objects of each kind on some devices.
#[derive(Debug)]
pub struct Baseline {
    devices: Vec<Device>,
    descriptors: usize,
    resources: Vec<BTreeMap<String, u32>>,
}

impl Baseline {
    /// Counts the open descriptors and objects.
    ///
    /// # Panics
    /// Panics if a device cannot be used.
    #[must_use]
    pub fn new(devices: &[Device]) -> Self {
        // The library opens a device on its first use, and keeps it open. So each device is used once before the objects are counted.
        let mut reactor = Reactor::new(crate::device::config()).expect("a reactor");
        for device in devices {
            reactor.context().listen(device.address()).expect("listening");
        }
        drop(reactor);
        Self { devices: devices.to_vec(), descriptors: open_descriptors(), resources: resources(devices) }
    }

    /// Counts again, and checks that all counts are the same as at the beginning. Waits before it fails, because a thread or the kernel may
    /// need some time to release objects.
    ///
    /// # Panics
    /// Panics if objects remain.
    #[allow(clippy::disallowed_methods, reason = "the kernel has no event for it")]
    pub fn check(&self) {
        let deadline = now() + GIVEN_BACK;
        loop {
            let (descriptors, resources) = (open_descriptors(), resources(&self.devices));
            if descriptors <= self.descriptors && resources == self.resources {
                return;
            }
            assert!(now() < deadline, "{self:?}, and now {descriptors} {resources:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Returns the number of the kernel's objects of each kind, for each of these devices.
fn resources(devices: &[Device]) -> Vec<BTreeMap<String, u32>> {
    devices.iter().map(|device| device.resources()).collect()
}

/// The echoes that the neighbour has received, and the faults that it has observed.
#[derive(Default)]
struct Tally {
    echoes: Vec<AtomicU64>,
    /// True if the neighbour must pause its requests.
    rests: AtomicBool,
    /// The faults that the neighbour has observed, each with the number of the reactor.
    objections: Mutex<Vec<(u8, String)>>,
}

impl Tally {
    fn object(&self, number: u8, what: String) {
        self.objections.lock().unwrap_or_else(PoisonError::into_inner).push((number, what));
    }
}

/// The handler of the neighbour.
struct Asker {
    tally: Arc<Tally>,
    /// For each connection, the number of the reactor under test, and the number of the next message.
    asked: BTreeMap<ConnectionId, (u8, u64)>,
    leaves: bool,
}

impl Asker {
    fn ask(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let Some((number, next)) = self.asked.get(&conn) else { return };
        if let Err(error) = cx.send(conn, &next.to_le_bytes()) {
            if !self.leaves {
                self.tally.object(*number, format!("message {next} was not accepted: {error}"));
            }
        }
    }
}

impl Handler for Asker {
    fn on_connect_request(&mut self, _: &mut Context<'_>, request: ConnectRequest<'_>) -> Decision {
        assert!(request.private_data.starts_with(MARK), "nobody else connects here");
        Decision::AcceptWith(MARK.to_vec())
    }

    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let number = *cx.connection(conn).private_data().last().expect("a number behind the mark");
        self.asked.insert(conn, (number, 0));
        cx.connection(conn).set_user(u64::from(number));
        self.ask(cx, conn);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let (number, next) = self.asked.get_mut(&conn).expect("it is up");
        if *message != next.to_le_bytes() {
            self.tally.object(*number, format!("the echo of message {next} is {:?}", &*message));
        }
        *next += 1;
        self.tally.echoes[usize::from(*number)].fetch_add(1, Ordering::Relaxed);
        cx.timers().set(PAUSE, u64::from(*number));
    }

    fn on_send_complete(&mut self, _: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        if let Some((number, _)) = self.asked.get(&conn).filter(|_| !outcome.is_sent() && !self.leaves) {
            self.tally.object(*number, format!("{send:?}: {outcome:?}"));
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, number: u64) {
        let conn = self.asked.iter().find(|(_, asked)| u64::from(asked.0) == number).map(|(conn, _)| *conn);
        if self.tally.rests.load(Ordering::Relaxed) {
            cx.timers().set(PAUSE, number);
        } else if let Some(conn) = conn {
            self.ask(cx, conn);
        }
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        if let Some((number, next)) = self.asked.remove(&conn).filter(|_| !self.leaves) {
            self.tally.object(number, format!("the connection has ended before message {next}: {reason}"));
        }
    }
}

/// The part of a test's handler that serves the connection to the neighbour. The rest of the handler does not see this connection.
#[derive(Debug, Default)]
pub struct Watched {
    conn: Option<ConnectionId>,
    /// The number of echoes whose sends have completed.
    sent: u64,
}

impl Watched {
    /// Handles a new connection. Returns true if it is the connection to the neighbour.
    pub fn comes_up(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> bool {
        let is_it = cx.connection(conn).private_data() == MARK;
        if is_it {
            assert_eq!(self.conn.replace(conn), None, "one witness for each reactor");
        }
        is_it
    }

    /// Returns true if `conn` is the connection to the neighbour.
    #[must_use]
    pub fn is(&self, conn: ConnectionId) -> bool {
        self.conn == Some(conn)
    }

    /// Returns the number of echoes to the neighbour whose sends have completed.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Sends a message of the neighbour back.
    pub fn answer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, bytes: &[u8]) {
        let sent = cx.send(conn, bytes);
        assert!(matches!(sent, Ok(_) | Err(SendErrorKind::Closed)), "{sent:?}");
    }

    /// Records that the send of an echo has completed.
    pub fn completes(&mut self, send: SendId) {
        assert_eq!(send.sequence(), self.sent, "sends complete once, in order");
        self.sent += 1;
    }

    /// Records that the connection to the neighbour has ended.
    pub fn ends(&mut self) {
        self.conn = None;
    }
}

/// The honest neighbour, see the [module](self).
pub struct Witness {
    thread: Option<JoinHandle<()>>,
    /// The handle that stops the neighbour's reactor. It holds a descriptor, so it is dropped before the descriptors are counted.
    remote: Option<ReactorHandle>,
    tally: Arc<Tally>,
    address: SocketAddr,
    /// The counts at the beginning; `None` if the counts are not compared.
    baseline: Option<Baseline>,
    /// The numbers of the reactors under test whose connections to the neighbour may end.
    excused: Vec<u8>,
    /// For each reactor under test: the number of its echoes so far, the time at which the last echo arrived, and the number of turns since
    /// that time.
    seen: Vec<(u64, Instant, u32)>,
}

impl std::fmt::Debug for Witness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Witness").field("echoes", &self.tally.echoes).finish_non_exhaustive()
    }
}

impl Witness {
    /// Counts the open objects, and then starts a neighbour for `reactors` reactors under test on a device. No other process may use the
    /// device.
    ///
    /// # Panics
    /// Panics if the device cannot be used.
    #[must_use]
    pub fn new(device: Device, config: Config, reactors: u8) -> Self {
        let baseline = Baseline::new(&[device]);
        let mut witness = Self::start(device, config, reactors);
        witness.baseline = Some(baseline);
        witness
    }

    /// Starts a neighbour for `reactors` reactors under test on a device. This neighbour does not count objects.
    ///
    /// # Panics
    /// Panics if the device cannot be used.
    #[must_use]
    #[allow(clippy::disallowed_methods, reason = "a test's own thread")]
    pub fn start(device: Device, config: Config, reactors: u8) -> Self {
        let tally = Arc::new(Tally { echoes: (0..reactors).map(|_| AtomicU64::new(0)).collect(), ..Tally::default() });
        let (ready, started) = channel();
        let asker = Asker { tally: Arc::clone(&tally), asked: BTreeMap::new(), leaves: false };
        let thread = std::thread::spawn(move || live(asker, device, config, &ready));
        let (remote, address) = started.recv_timeout(PATIENCE).expect("the witness listens");
        let seen = vec![(0, now(), 0); usize::from(reactors)];
        Self { thread: Some(thread), remote: Some(remote), tally, address, baseline: None, excused: Vec::new(), seen }
    }

    /// Begins to connect a reactor under test to the neighbour.
    ///
    /// # Panics
    /// Panics if the reactor refuses.
    pub fn watch(&self, reactor: &mut Reactor, number: u8) {
        let options = ConnectOptions::new().private_data([MARK, &[number]].concat());
        reactor.context().connect_with(self.address, options).expect("connecting to the witness");
    }

    /// Permits reactor `number` to lose its connection, because the test ends that reactor.
    pub fn excuse(&mut self, number: u8) {
        self.excused.push(number);
    }

    /// Pauses the requests of the neighbour if `rests` is true, or continues them. The messages of the neighbour wake the reactors under
    /// test, and some tests need reactors that sleep.
    pub fn rest(&mut self, rests: bool) {
        self.tally.rests.store(rests, Ordering::Relaxed);
        self.seen.iter_mut().for_each(|seen| seen.2 = 0);
    }

    fn echoes(&self, number: usize) -> u64 {
        self.tally.echoes[number].load(Ordering::Relaxed)
    }

    fn watched(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.seen.len()).filter(|number| self.excused.iter().all(|excused| usize::from(*excused) != *number))
    }

    /// Returns, for each connection, the total number of echoes that proves further progress. [`Witness::has`] returns true when these
    /// numbers are reached.
    #[must_use]
    pub fn further(&self) -> Vec<u64> {
        (0..self.seen.len()).map(|number| self.echoes(number) + ECHOES).collect()
    }

    /// Returns true if, on each connection, at least the given number of echoes has arrived. A connection that may end is not checked.
    #[must_use]
    pub fn has(&self, echoes: &[u64]) -> bool {
        self.watched().all(|number| self.echoes(number) >= echoes[number])
    }

    /// Checks that nothing has disturbed the neighbour. Must be called after each turn of the reactors under test.
    ///
    /// # Panics
    /// Panics if something has disturbed it.
    pub fn check(&mut self) {
        let objections = self.tally.objections.lock().unwrap_or_else(PoisonError::into_inner);
        let objection = objections.iter().find(|(number, _)| !self.excused.contains(number));
        assert!(objection.is_none(), "the neighbour was disturbed: {objection:?}");
        drop(objections);
        if self.tally.rests.load(Ordering::Relaxed) {
            return;
        }
        for number in self.watched().collect::<Vec<_>>() {
            let echoes = self.echoes(number);
            let (seen, since, turns) = &mut self.seen[number];
            if echoes != *seen || *turns == 0 {
                (*seen, *since, *turns) = (echoes, now(), 1);
            }
            *turns += 1;
            let still = since.elapsed();
            assert!(still < STILL.0 || *turns < STILL.1, "no echo for {still:?} and {turns} turns of reactor {number}");
        }
    }

    /// Begins to close the neighbour's connections. The reactors under test must take turns until [`Self::is_over`] returns true.
    pub fn leave(&self) {
        self.remote.iter().for_each(ReactorHandle::stop);
    }

    /// Returns true if the neighbour's thread has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

/// Runs the neighbour on its thread.
fn live(mut asker: Asker, device: Device, config: Config, ready: &Sender<(ReactorHandle, SocketAddr)>) {
    let mut reactor = Reactor::new(config).expect("the witness's reactor");
    let listener = reactor.context().listen(device.address()).expect("listening");
    let address = reactor.context().listeners().local_address(listener).expect("it listens");
    ready.send((reactor.handle(), address)).expect("the test waits");
    reactor.run(&mut asker).expect("the witness's run");
    asker.leaves = true;
    reactor.shutdown(&mut asker, PATIENCE).expect("the witness's end");
}

/// Checks that no object remains. The reactors under test must be dropped before the neighbour.
impl Drop for Witness {
    fn drop(&mut self) {
        self.leave();
        let joined = self.thread.take().map_or(Ok(()), JoinHandle::join);
        self.remote = None;
        if !std::thread::panicking() {
            assert!(joined.is_ok(), "the witness has panicked");
            let objections = self.tally.objections.lock().unwrap_or_else(PoisonError::into_inner);
            let counts: Vec<_> = self.tally.echoes.iter().map(|echoes| echoes.load(Ordering::Relaxed)).collect();
            println!("echoes of the neighbour: {counts:?}; objections of the excused: {objections:?}");
            self.baseline.iter().for_each(Baseline::check);
        }
    }
}
