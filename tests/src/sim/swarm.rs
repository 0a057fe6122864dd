//! Swarm testing: a seed first determines the kinds and rates of faults, and all sizes. So each seed has its own combination, and rare
//! combinations occur too.

use std::time::Duration;

use rdma_reactor::Timeouts;

use super::audit::LARGEST;
use super::rng::Rng;

/// Nanoseconds per millisecond.
pub const MS: u64 = 1_000_000;

/// Everything that is chosen before a world begins.
#[derive(Clone, Debug)]
pub struct Options {
    /// The virtual time during which there are faults and random calls, in ns.
    pub chaos: u64,
    /// The settings of each node.
    pub nodes: Vec<NodeOptions>,
    /// The behaviour of the network.
    pub net: NetOptions,
    /// True if the providers support atomics and immediate data.
    pub extensions: bool,
    /// The simulated asynchronous hardware; `None` to use the embedded provider directly.
    pub hardware: Option<HardwareOptions>,
    /// The faults of the world.
    pub faults: FaultOptions,
    /// The work of the programs.
    pub work: WorkOptions,
    /// The slowness of nodes, if it is the only fault of the world.
    pub slowness: Option<Slowness>,
}

/// The slowness of nodes: they take no turn for some time, or a call in a turn takes long.
#[derive(Clone, Debug)]
pub struct Slowness {
    /// The slow node; `None` if all nodes are slow.
    pub node: Option<usize>,
    /// The longest pause, in ns.
    pub longest: u64,
    /// The probability, per thousand, that a call in a turn takes up to `longest`.
    pub stalls: u32,
    /// The additional time of each call, in ns.
    pub toll: u64,
}

impl Slowness {
    /// Returns true if this node is slow.
    #[must_use]
    pub fn affects(&self, node: usize) -> bool {
        self.node.is_none_or(|slow| slow == node)
    }
}

/// The time limits of a node, in ns.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The shortest time after which the node may give up a peer that does not answer.
    pub silence: u64,
    /// The time that a connect may take.
    pub connect: u64,
    /// The time that a close may take.
    pub close: u64,
}

/// The shortest close timeout that a program may have, in ns.
pub const SHORTEST_CLOSE: u64 = 50 * MS;

/// The settings of one reactor, and of the loop around it.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "named as the settings of the reactor")]
pub struct NodeOptions {
    pub max_message: u32,
    pub transfer_memory: usize,
    pub receive_depth: u32,
    pub send_depth: u32,
    /// The number of connections that share a completion queue.
    pub per_queue: u32,
    pub completions_per_turn: u32,
    pub max_connections: u32,
    pub max_pending: u32,
    /// The time for which the reactor polls before it sleeps, in ns. With 0 it never polls.
    pub spin: u64,
    /// The limits of one connection in a turn: the number of its completions, and the number of its bytes.
    pub fairness: (u32, usize),
    /// True if the reactor decides itself whether it polls before it sleeps.
    pub adaptive: bool,
    pub keepalive: (u64, u64),
    pub connect_timeout: u64,
    pub handshake_timeout: u64,
    pub close_timeout: u64,
    pub flush_timeout: u64,
    /// The limit of each step of connecting within the provider, and of transfers; `None` for the defaults.
    pub steps: Option<u64>,
    pub crc: bool,
    /// True if the loop around the reactor watches the reactor's descriptor level-triggered. False if edge-triggered.
    pub level: bool,
}

/// The behaviour of the network, within what TCP permits.
#[derive(Clone, Debug)]
pub struct NetOptions {
    /// The maximum segment size, in bytes.
    pub segment: usize,
    /// The shortest and the longest delay of a segment, in ns.
    pub latency: (u64, u64),
    /// The largest number of bytes that are in flight or unread, in each direction.
    pub buffer: usize,
    /// The probability, per thousand, that a send accepts fewer bytes than there is space for.
    pub short_write: u32,
    /// The probability, per thousand, that a call is interrupted.
    pub interrupted: u32,
    /// The probability, per thousand, that a write arrives in many small pieces.
    pub shred: u32,
    /// The probability, per thousand, that a spurious edge is reported.
    pub spurious: u32,
    /// The probability, per thousand, that a poll stops early and reports that.
    pub poll_cut: u32,
    /// The probability, per thousand, that a connect or an accept fails because the system has no resources left.
    pub exhausted: u32,
    /// The probability, per thousand, that the first packet of a connect is lost.
    pub lost_connect: u32,
    /// The longest virtual time that a call or a reading of the clock takes, in ns.
    pub tick: u64,
}

/// The behaviour of simulated asynchronous hardware.
#[derive(Clone, Debug)]
pub struct HardwareOptions {
    /// The probability, per thousand, that a completion arrives late.
    pub late: u32,
    /// The longest delay of a late completion, in ns.
    pub late_by: u64,
    /// The probability, per thousand, that a connection-manager event arrives late.
    pub cm_late: u32,
    /// The probability, per thousand, that a poll returns fewer completions than are available.
    pub short_poll: u32,
    /// The probability, per thousand, that completions arrive just before their queue is armed.
    pub before_arming: u32,
    /// The probability, per thousand, that the flushed completions of a connection are delayed by up to 2 s each, which may be longer than
    /// the flush timeout.
    pub lazy_flush: u32,
    /// The probability, per thousand, that `Disconnected` arrives twice.
    pub twice: u32,
    /// The probability, per thousand, that `Disconnected` never arrives.
    pub never: u32,
    /// The probability, per thousand, that destroying a queue pair removes its completions from the queue.
    pub purge: u32,
    /// True if the hardware provides the extensions of the inner provider, and reports the number of received bytes.
    pub extensions: bool,
    /// True if sends may complete before earlier reads.
    pub overtaking: bool,
    /// The probability, per thousand, that the device refuses to release a queue pair, a registration or a remote key.
    pub keeps: u32,
}

/// The faults of links and nodes.
#[derive(Clone, Debug)]
pub struct FaultOptions {
    /// The mean time between two faults, in ns. With 0 there are none.
    pub every: u64,
    /// The kinds of faults that may happen.
    pub kinds: Vec<Fault>,
}

/// A fault of a link (a connection) or of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// Both ends receive the end of the stream.
    End,
    /// Both ends receive a reset.
    Reset,
    /// Nothing arrives from now on, and neither end is notified.
    Blackhole,
    /// Nothing arrives in one direction from now on.
    HalfBlackhole,
    /// Nothing arrives for some time.
    Stall,
    /// A node is paused for some time.
    Pause,
}

/// The work of the programs.
#[derive(Clone, Debug)]
pub struct WorkOptions {
    /// The number of connections that the world opens.
    pub connections: u32,
    /// The largest number of messages on a connection, in each direction.
    pub messages: u64,
    /// The largest number of random calls in a callback.
    pub calls: u64,
    /// The kinds of random calls.
    pub kinds: Vec<Call>,
    /// The total number of random calls of a node.
    pub budget: u32,
    /// The number of connections that a node opens in a storm. Each of them replaces a connection that has just ended. 0 if there is no
    /// storm.
    pub storm: u32,
    /// The probability, per thousand, that a program refuses a connect request.
    pub refuse: u32,
    /// The probability, per thousand, that a program keeps a message after its callback.
    pub detach: u32,
    /// The largest number of messages that a program sends before it waits for a completion.
    pub burst: u64,
    /// The number of one-sided operations of a node.
    pub operations: u32,
    /// The largest number of calls about one-sided operations in a callback.
    pub operations_burst: u64,
    /// The length of the largest region, in bytes.
    pub region: u64,
    /// The probability, per thousand, that a program posts an operation that it has no right to.
    pub trespass: u32,
    /// The probability, per thousand, that a connection carries a byte stream.
    pub streams: u32,
    /// The largest number of bytes in each direction of a stream.
    pub stream_bytes: u64,
    /// The number of messages that other threads send to a node.
    pub said: u32,
    /// The largest number of messages of other threads in flight to a node.
    pub unheard: u32,
}

/// A kind of random call in a callback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// `send` on a random connection.
    Send,
    /// `buffer`, and then `send_buffer` immediately.
    SendBuffer,
    /// `buffer`. The buffer is sent or dropped in a later callback.
    HoldBuffer,
    /// `close` on the connection of the callback.
    CloseSelf,
    /// `close` on any other connection.
    CloseOther,
    /// All calls, with the id of a connection that has ended.
    Stale,
    /// `connect`.
    Connect,
    /// `close` of a listener, and `listen` again.
    Relisten,
    /// `set` of a timer.
    SetTimer,
    /// `cancel` of a timer.
    CancelTimer,
    /// Drops a message that the program has kept.
    Release,
    /// Calls that only query a value, and `set_user`.
    Look,
    /// Sends a message that is too long.
    TooLong,
    /// `register` or `deregister`, with a descriptor of the program.
    Watch,
    /// Another thread sends a message to the reactor during the callback.
    Speak,
    /// The callback takes a long time.
    Dawdle,
}

const CALLS: [Call; 16] = [
    Call::Send,
    Call::SendBuffer,
    Call::HoldBuffer,
    Call::CloseSelf,
    Call::CloseOther,
    Call::Stale,
    Call::Connect,
    Call::Relisten,
    Call::SetTimer,
    Call::CancelTimer,
    Call::Release,
    Call::Look,
    Call::TooLong,
    Call::Watch,
    Call::Speak,
    Call::Dawdle,
];

const FAULTS: [Fault; 6] =
    [Fault::End, Fault::Reset, Fault::Blackhole, Fault::HalfBlackhole, Fault::Stall, Fault::Pause];

/// Returns a random rate, per thousand: 0 in half of the cases, and otherwise at most `most`.
fn rate(rng: &mut Rng, most: u64) -> u32 {
    if rng.chance(500) { 0 } else { rng.skewed(1..=most) as u32 }
}

impl Options {
    /// Chooses all options from a seed.
    #[must_use]
    pub fn draw(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "swarm");
        let nodes = if rng.chance(200) { 3 } else { 2 };
        let base = rng.pick(&[16, 200, 1500, 5000, 20_000, 70_000]);
        let crc = rng.chance(700);
        let nodes: Vec<_> = (0..nodes).map(|_| NodeOptions::draw(rng, base, crc)).collect();
        let largest = nodes.iter().map(|node| node.max_message).max().unwrap_or(1);
        let depth = nodes.iter().map(|node| node.receive_depth).max().unwrap_or(5);
        Self {
            chaos: rng.range(20 * MS..=1500 * MS),
            net: NetOptions::draw(rng, largest),
            extensions: rng.chance(600),
            hardware: rng.chance(650).then(|| HardwareOptions::draw(rng)),
            faults: FaultOptions::draw(rng),
            work: WorkOptions::draw(rng, largest, depth),
            nodes,
            slowness: None,
        }
    }

    /// Makes slowness the only fault of the world. In three of four worlds, one node is slow: it
    /// has the drawn time limits or the defaults, and all other nodes have time limits of a day. In
    /// the other worlds, all nodes are slow and have time limits of a day.
    #[must_use]
    pub fn slow(mut self, seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "slow");
        let node = rng.chance(750).then(|| rng.index(self.nodes.len()));
        for (i, options) in self.nodes.iter_mut().enumerate() {
            if node != Some(i) {
                options.wait_for(DAY);
            } else if rng.chance(500) {
                options.take_defaults();
            } else {
                // Slow worlds last longer than others. With the drawn keepalive times, they would
                // consist mostly of pings.
                let (interval, keepalive) = options.keepalive;
                options.keepalive = (10 * interval, 10 * keepalive);
            }
        }
        self.chaos = rng.skewed(1_000 * MS..=20 * LONGEST_LIMIT);
        self.faults = FaultOptions { every: self.chaos / rng.range(1..=20), kinds: vec![Fault::Pause] };
        (self.net.exhausted, self.net.lost_connect, self.work.trespass) = (0, 0, 0);
        // A program that keeps messages withholds credits. Its peer may then be unable to confirm a
        // large message, and the connection ends after `Timeouts::transfer`, although no node is
        // slow. Slow worlds last longer than this timeout, so their programs keep no messages.
        self.work.detach = 0;
        if let Some(hardware) = &mut self.hardware {
            (hardware.never, hardware.extensions) = (0, true);
        }
        let (stalls, toll) = (rate(rng, 20), if rng.chance(250) { rng.skewed(1_000..=100 * MS) } else { 0 });
        self.slowness = Some(Slowness { node, longest: 10 * LONGEST_LIMIT, stalls, toll });
        self
    }
}

impl Options {
    /// Sets keepalive times of a day, so that no ping or pong hides a lost wake-up. Pauses of nodes
    /// are the only remaining fault: a connection that the network has cut at one end is detected
    /// only by a keepalive.
    #[must_use]
    pub fn unasked(mut self) -> Self {
        for node in &mut self.nodes {
            node.keepalive = (DAY / 2, DAY);
        }
        self.faults.kinds.retain(|kind| *kind == Fault::Pause);
        if self.faults.kinds.is_empty() {
            self.faults.every = 0;
        }
        self.net.lost_connect = 0;
        if let Some(hardware) = &mut self.hardware {
            hardware.never = 0;
        }
        self
    }
}

/// A day, in ns: the longest time limit that a reactor accepts.
const DAY: u64 = 86_400_000 * MS;

/// The longest default limit of a reactor, in ns: `Timeouts::transfer`.
const LONGEST_LIMIT: u64 = 30_000 * MS;

impl NodeOptions {
    /// Returns the time limits of the node.
    #[must_use]
    pub fn limits(&self) -> Limits {
        let (interval, keepalive) = self.keepalive;
        let provider = self.steps.unwrap_or(5_000 * MS);
        let silence = [keepalive - interval, self.connect_timeout, self.handshake_timeout, provider];
        Limits {
            silence: silence.into_iter().fold(u64::MAX, u64::min),
            connect: self.connect_timeout,
            close: self.close_timeout,
        }
    }

    /// Sets all limits of time for the behaviour of peers to `time`.
    fn wait_for(&mut self, time: u64) {
        self.keepalive = (time / 2, time);
        (self.connect_timeout, self.handshake_timeout, self.close_timeout) = (time, time, time);
        self.steps = Some(time);
    }

    /// Sets the limits of time to the defaults of a reactor.
    fn take_defaults(&mut self) {
        let Timeouts { connect, handshake, keepalive_interval, keepalive, close, flush, .. } = Timeouts::default();
        let ns = |time: Duration| time.as_nanos() as u64;
        self.keepalive = (ns(keepalive_interval), ns(keepalive));
        (self.connect_timeout, self.handshake_timeout) = (ns(connect), ns(handshake));
        (self.close_timeout, self.flush_timeout) = (ns(close), ns(flush));
    }

    fn draw(rng: &mut Rng, base: u64, crc: bool) -> Self {
        let interval = rng.range(100 * MS..=500 * MS);
        Self {
            max_message: rng.range(1 + base / 2..=base) as u32,
            transfer_memory: rng.skewed(LARGEST..=2 * LARGEST) as usize,
            receive_depth: rng.skewed(5..=16) as u32,
            send_depth: rng.skewed(1..=16) as u32,
            per_queue: rng.range(1..=3) as u32,
            completions_per_turn: rng.skewed(1..=64) as u32,
            max_connections: rng.range(4..=24) as u32,
            max_pending: rng.range(1..=8) as u32,
            spin: if rng.chance(300) { rng.range(1_000..=50_000) } else { 0 },
            fairness: (rng.skewed(1..=128) as u32, rng.skewed(1..=1 << 18) as usize),
            adaptive: rng.chance(400),
            keepalive: (interval, interval * rng.range(3..=6)),
            connect_timeout: rng.range(300 * MS..=3000 * MS),
            handshake_timeout: rng.range(300 * MS..=2000 * MS),
            close_timeout: rng.range(SHORTEST_CLOSE..=1000 * MS),
            flush_timeout: rng.range(50 * MS..=500 * MS),
            steps: None,
            crc,
            level: rng.chance(300),
        }
    }
}

impl NetOptions {
    fn draw(rng: &mut Rng, largest: u32) -> Self {
        let fastest = rng.skewed(1_000..=2 * MS);
        let buffer = rng.pick(&[2_000, 20_000, 200_000]).max(u64::from(largest) / 16);
        Self {
            segment: rng.pick(&[128, 536, 1448, 8948, 65_483]),
            latency: (fastest, fastest + rng.skewed(1_000..=10 * MS)),
            buffer: buffer as usize,
            short_write: rate(rng, 400),
            interrupted: rate(rng, 100),
            shred: rate(rng, 200),
            spurious: rate(rng, 200),
            poll_cut: rate(rng, 500),
            exhausted: rate(rng, 300),
            lost_connect: rate(rng, 300),
            tick: rng.pick(&[100, 1_000, 20_000]),
        }
    }
}

impl HardwareOptions {
    fn draw(rng: &mut Rng) -> Self {
        Self {
            late: rate(rng, 900),
            late_by: rng.skewed(1_000..=3 * MS),
            cm_late: rate(rng, 700),
            short_poll: rate(rng, 700),
            before_arming: rate(rng, 700),
            lazy_flush: rate(rng, 900),
            twice: rate(rng, 500),
            never: rate(rng, 300),
            purge: rate(rng, 1000),
            extensions: rng.chance(700),
            overtaking: rng.chance(400),
            keeps: if rng.chance(250) { rng.skewed(1..=400) as u32 } else { 0 },
        }
    }
}

impl FaultOptions {
    fn draw(rng: &mut Rng) -> Self {
        let kinds: Vec<_> = FAULTS.into_iter().filter(|_| rng.chance(400)).collect();
        let on = !kinds.is_empty() && rng.chance(600);
        Self { every: if on { rng.range(5 * MS..=300 * MS) } else { 0 }, kinds }
    }
}

impl WorkOptions {
    fn draw(rng: &mut Rng, largest: u32, depth: u32) -> Self {
        let bytes = 600_000 / u64::from(largest.max(100));
        Self {
            connections: if rng.chance(850) { rng.range(1..=8) } else { rng.range(9..=40) } as u32,
            messages: rng.skewed(1..=200).min(bytes.max(4 * u64::from(depth))),
            calls: rng.below(4),
            kinds: CALLS.into_iter().filter(|_| rng.chance(600)).collect(),
            budget: rng.skewed(1..=400) as u32,
            storm: if rng.chance(150) { rng.range(20..=300) as u32 } else { 0 },
            refuse: rate(rng, 200),
            detach: rate(rng, 500),
            burst: rng.skewed(1..=64),
            operations: if rng.chance(500) { rng.range(20..=400) as u32 } else { 0 },
            operations_burst: rng.range(1..=6),
            region: rng.skewed(64..=6_000),
            trespass: if rng.chance(300) { rng.skewed(1..=100) as u32 } else { 0 },
            streams: if rng.chance(350) { rng.pick(&[200, 600, 1000]) } else { 0 },
            stream_bytes: rng.skewed(1..=60_000).min(150 * u64::from(largest)),
            said: if rng.chance(500) { rng.skewed(1..=300) as u32 } else { 0 },
            unheard: rng.skewed(1..=64) as u32,
        }
    }
}
