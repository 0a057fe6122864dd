//! Steady states, whose instructions are counted. Two reactors in one thread take turns and repeat one action. When a side reads, its
//! socket already has all bytes that the other side sends in this round. So the cost of a turn depends only on the code.

use std::time::{Duration, Instant};

use rdma_reactor::call::{CallEvent, Calls};
use rdma_reactor::{
    Access, Clock, Config, ConnectionId, Context, Handler, Message, Outcome, Piece, ProviderChoice, Reactor, Region,
    RegionOptions, RemoteRegion, SecurityMode, SendId, SystemClock, TimerId, Transfer, TransferEnd, TransferId,
    TransferOptions, Wait,
};

use crate::identities::security;
use crate::null::Null;

const SIZE: usize = 64;
/// The length of a message that needs three buffers with the default settings.
const EAGER: usize = 20_000;
/// The length of a message that the peer fetches by RDMA Read with the default settings.
const OFFERED: usize = 300_000;
/// The number of blocks in a list.
const BLOCKS: usize = 10_000;
/// The number of different blocks in memory. A list uses each of them repeatedly.
const IN_MEMORY: usize = 64;
static LARGE: [u8; OFFERED] = [7; OFFERED];

/// The action that is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// The client sends 64 bytes, and the server sends them back.
    RoundTrip,
    /// The client calls the server with 64 bytes. The server answers with the same bytes.
    Call,
    /// A round trip of 64 bytes. The client's reactor runs its own loop, and the server runs on another thread, see [`crate::tasks`].
    Runs,
    /// A round trip of 64 bytes. The client is a task in the loop of its own reactor.
    TaskRuns,
    /// A round trip of 64 bytes. The client is a task in another executor.
    Task,
    /// Several tasks share a connection; the value is their number. The tasks send 64 bytes sequentially, see [`crate::tasks`].
    Senders(usize),
    /// The client sends a message that needs three buffers, and the server sends it back.
    Eager,
    /// The client sends a large message that the server fetches, and the server sends it back.
    Offered,
    /// The client sends messages of 64 bytes as long as the window is open.
    Stream,
    /// The client writes 64 bytes to the server's memory by RDMA Write, with 16 writes in flight.
    Write,
    /// The client writes or reads blocks in lists of 10,000.
    Blocks {
        /// The length of a block, in bytes.
        len: usize,
        /// True if the blocks are read, false if they are written.
        reads: bool,
    },
    /// A timer expires, and is set again: once in each turn.
    Timer,
    /// Turns in which nothing happens.
    Idle,
}

impl Work {
    const fn is_round_trip(self) -> bool {
        matches!(self, Self::RoundTrip | Self::Call | Self::Eager | Self::Offered)
    }

    /// Returns true if the messages of this work begin with a header.
    const fn has_frames(self) -> bool {
        self.is_one_sided() || matches!(self, Self::Call)
    }

    const fn is_one_sided(self) -> bool {
        matches!(self, Self::Write | Self::Blocks { .. })
    }

    /// Returns the length of each side's region, in bytes.
    const fn memory(self) -> usize {
        match self {
            Self::Blocks { len, .. } => len * IN_MEMORY,
            _ => SIZE,
        }
    }

    const fn payload(self) -> &'static [u8] {
        let len = match self {
            Self::Eager => EAGER,
            Self::Offered => OFFERED,
            _ => SIZE,
        };
        LARGE.split_at(len).0
    }
}

/// The side whose instructions are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The side that begins each round.
    Client,
    /// The side that answers or receives.
    Server,
}

/// The settings of both reactors.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mode {
    /// True if no callback reports the end of a send.
    pub quiet_sends: bool,
    /// True if the reactors poll and never prepare to sleep, so that nothing is armed.
    pub spins: bool,
    /// The number of further connections between both reactors, on which nothing is sent.
    pub idle: usize,
}

impl Mode {
    fn config(self, provider: ProviderChoice) -> Config {
        let config = Config::default().provider(provider).quiet_sends(self.quiet_sends);
        let config = match self.spins {
            // Looks for other events are due by time: a slow machine has more of them per message.
            // So the counts leave them out.
            true => config.wait(Wait::Spin(Duration::from_secs(60))).look_interval(Duration::from_secs(1)),
            false => config,
        };
        if self.idle == 0 {
            return config;
        }
        // No keepalive is due during the measurement.
        let hours = |hours: u64| Duration::from_secs(hours * 3_600);
        config
            .max_connections(self.idle as u32 + 1)
            .max_connections_per_host(self.idle as u32 + 1)
            .max_memory(4 << 30)
            .timeouts(|timeouts| (timeouts.keepalive_interval, timeouts.keepalive) = (hours(12), hours(24)))
    }
}

/// The handler of one side, which does its part of the work.
#[derive(Debug)]
struct Program {
    work: Work,
    payload: &'static [u8],
    /// True if received messages are sent back.
    round_trips: bool,
    echoes: bool,
    conn: Option<ConnectionId>,
    /// The number of rounds that must still begin.
    left: u64,
    /// The number of rounds in progress.
    under_way: u64,
    done: u64,
    /// The number of completed rounds at which the reactor stops.
    stops_at: u64,
    blocked: bool,
    local: Option<Region>,
    remote: Option<RemoteRegion>,
    /// The pieces of the list. The vector is empty while the list is in flight.
    list: Vec<Piece>,
    calls: Calls,
    /// The number of connections that are up. All but the last one are idle.
    up: usize,
}

impl Program {
    fn new(work: Work, echoes: bool) -> Self {
        let (conn, local, remote) = (None, None, None);
        let (payload, round_trips) = (work.payload(), work.is_round_trip());
        Self {
            work,
            payload,
            round_trips,
            echoes,
            conn,
            left: 0,
            under_way: 0,
            done: 0,
            stops_at: 0,
            blocked: false,
            local,
            remote,
            list: Vec::new(),
            calls: Calls::new(),
            up: 0,
        }
    }

    fn pump(&mut self, cx: &mut Context<'_>) {
        let Some(conn) = self.conn else { return };
        if let Work::Blocks { reads, .. } = self.work {
            return self.move_blocks(cx, conn, reads);
        }
        let most = if self.work == Work::Write { 16 } else { u64::MAX };
        while self.left > 0 && !self.blocked && self.under_way < most {
            let begun = match (self.work, &self.local, &self.remote) {
                (Work::Write, Some(local), Some(remote)) => cx.remote(conn).write(*remote, local, 0..SIZE).map(drop),
                (Work::Call, ..) => {
                    call(&mut self.calls, cx, conn, self.payload);
                    Ok(())
                }
                _ => cx.send(conn, self.payload).map(drop),
            };
            self.blocked = begun.is_err();
            if !self.blocked {
                self.left -= 1;
                self.under_way += 1;
                // In the work `Stream`, a round is done when the message was accepted. In all other works, a later callback ends the round.
                self.done += u64::from(self.work == Work::Stream);
            }
        }
    }
}

impl Program {
    /// Starts a list with the blocks that remain. Does nothing while another list is in flight.
    fn move_blocks(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reads: bool) {
        let Some(local) = self.local.as_mut().filter(|_| self.left > 0 && self.under_way == 0) else { return };
        let mut list = std::mem::take(&mut self.list);
        list.truncate(usize::try_from(self.left).unwrap_or(BLOCKS));
        (self.left, self.under_way) = (self.left - list.len() as u64, list.len() as u64);
        let options = TransferOptions::within(Duration::from_secs(600));
        let begun = match reads {
            true => cx.remote(conn).transfer(Transfer::Read(&mut [local]), list, &options),
            false => cx.remote(conn).transfer(Transfer::Write(&[local]), list, &options),
        };
        begun.expect("an open connection");
    }
}

/// The time limit of a call.
const WITHIN: Duration = Duration::from_secs(600);

fn call(calls: &mut Calls, cx: &mut Context<'_>, conn: ConnectionId, payload: &[u8]) {
    calls.call(cx, conn, payload, WITHIN, ()).expect("an open connection");
}

impl Program {
    #[cold]
    #[inline(never)]
    fn deadline(&mut self, cx: &mut Context<'_>, timer: TimerId) {
        self.calls.on_timer(cx, timer);
    }

    /// Handles a message that begins with a header.
    #[inline(never)]
    fn framed(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if self.work == Work::Call {
            return match self.calls.on_recv(cx, conn, message) {
                Some(CallEvent::Request { id, payload }) => {
                    self.done += 1;
                    self.calls.answer(cx, id, &payload).expect("its caller waits");
                }
                Some(CallEvent::Answer { payload, .. }) => {
                    self.done += 1;
                    if self.left > 0 {
                        self.left -= 1;
                        call(&mut self.calls, cx, conn, &payload);
                    }
                }
                other => panic!("{other:?}"),
            };
        }
        self.remote = RemoteRegion::from_bytes(&message);
        if let (Work::Blocks { len, .. }, Some(remote)) = (self.work, self.remote) {
            let block = |nth: usize| {
                let at = nth % IN_MEMORY * len;
                Piece::new(at, remote.part(at as u64, len as u64).expect("inside"))
            };
            self.list = (0..BLOCKS).map(block).collect();
        }
    }
}

impl Handler for Program {
    fn on_transfer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: TransferId, end: TransferEnd) {
        assert!(end.is_done(), "{:?}", end.outcome);
        self.done += std::mem::take(&mut self.under_way);
        self.list = end.pieces;
        self.list.resize(BLOCKS, self.list[0]);
        if let Work::Blocks { reads, .. } = self.work {
            self.move_blocks(cx, conn, reads);
        }
    }

    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.conn = Some(conn);
        self.up += 1;
        if self.work.is_one_sided() {
            let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
            let options = if self.echoes { RegionOptions::new().allow(access) } else { RegionOptions::new() };
            let region = cx.regions().register(conn, self.work.memory(), &options).expect("memory");
            if self.echoes {
                cx.send(conn, &region.remote().to_bytes()).expect("room");
            }
            self.local = Some(region);
        }
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if self.work.has_frames() {
            return self.framed(cx, conn, message);
        }
        self.done += 1;
        if self.done == self.stops_at {
            cx.stop();
        }
        if self.round_trips {
            if self.echoes {
                cx.send(conn, &message).expect("room for an answer");
            } else if self.left > 0 {
                self.left -= 1;
                cx.send(conn, &message).expect("room for a question");
            }
        }
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: SendId, outcome: Outcome) {
        assert!(outcome.is_sent(), "{outcome:?}");
        self.under_way = self.under_way.saturating_sub(1);
        self.done += u64::from(self.work == Work::Write);
        if matches!(self.work, Work::Stream | Work::Write) {
            self.pump(cx);
        }
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, _: ConnectionId) {
        self.blocked = false;
        self.pump(cx);
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, _: u64) {
        if self.work == Work::Call {
            return self.deadline(cx, timer);
        }
        self.done += 1;
        cx.timers().set(Duration::ZERO, 0);
    }
}

/// Two reactors with one connection, and the work that they repeat.
#[derive(Debug)]
pub struct Steady {
    work: Work,
    looks_at: Side,
    /// True if the reactors do not arm anything at the end of a turn.
    spins: bool,
    client: (Reactor, Program),
    server: (Reactor, Program),
}

impl Steady {
    /// Returns two connected reactors over TCP whose connection is secured in this mode. The
    /// instructions of the side `looks_at` are counted.
    #[must_use]
    pub fn secured(work: Work, looks_at: Side, mode: SecurityMode) -> Self {
        let config = Config::default().provider(ProviderChoice::Iwarp).security(security(mode));
        Self::on(work, looks_at, &config, Mode::default())
    }

    /// Returns two reactors on the embedded provider, with one connection whose instructions are
    /// counted, and the idle ones of `mode`.
    #[must_use]
    pub fn with(work: Work, looks_at: Side, provider: ProviderChoice, mode: Mode) -> Self {
        Self::on(work, looks_at, &mode.config(provider), mode)
    }

    fn on(work: Work, looks_at: Side, config: &Config, mode: Mode) -> Self {
        let reactors = [(); 2].map(|()| Reactor::new(config.clone()).expect("a reactor"));
        Self::between(work, looks_at, reactors, mode)
    }

    /// Returns two connected reactors on the devices of [`crate::null`], whose operations need almost no instructions.
    #[must_use]
    pub fn on_null(work: Work, looks_at: Side) -> Self {
        Self::between(work, looks_at, Null::reactors(&Config::default(), || Box::new(SystemClock)).0, Mode::default())
    }

    /// Runs `times` round trips of one reactor on a device of [`crate::null`] that sends each message back itself. The reactor runs its own
    /// loop, without sleeping if `mode` says so.
    ///
    /// # Panics
    /// Panics if the system has no descriptors left.
    pub fn alone(times: u64, mode: Mode) {
        let config = mode.config(ProviderChoice::Auto);
        let (reactors, mirror) = Null::reactors(&config, || Box::new(Steps::new()));
        let mut steady = Self::between(Work::RoundTrip, Side::Client, reactors, Mode::default());
        steady.repeat(10);
        mirror.up();
        let (reactor, program) = &mut steady.client;
        (program.left, program.stops_at) = (1, program.done + times);
        program.pump(&mut reactor.context());
        program.left = times - 1;
        measured_turns(reactor, program);
    }

    fn between(work: Work, looks_at: Side, [client, server]: [Reactor; 2], mode: Mode) -> Self {
        let client = (client, Program::new(work, false));
        let server = (server, Program::new(work, true));
        let mut steady = Self { work, looks_at, spins: mode.spins, client, server };
        let mut server = steady.server.0.context();
        let listener = server.listen("127.0.0.1:0".parse().expect("an address")).expect("a listener");
        let address = server.listeners().local_address(listener).expect("it listens");
        for up in 1..=mode.idle + 1 {
            steady.client.0.context().connect(address).expect("connecting");
            while steady.client.1.up < up || steady.server.1.up < up {
                steady.prepare();
            }
        }
        while work.is_one_sided() && steady.client.1.remote.is_none() {
            steady.prepare();
        }
        if work == Work::Timer {
            // The early messages to a silent peer have a separate timer. It expires for the last
            // time 300 ms after the connection was established.
            let end = steady.client.0.context().now() + Duration::from_millis(400);
            while steady.client.0.context().now() < end {
                steady.prepare();
            }
            steady.client.0.context().timers().set(Duration::ZERO, 0);
        }
        steady
    }

    /// Repeats the action at least `times` times. The number of repetitions may be a few more.
    pub fn repeat(&mut self, times: u64) {
        let end = self.client.1.done + times;
        if self.work.is_round_trip() || self.work.is_one_sided() || self.work == Work::Stream {
            let (reactor, program) = &mut self.client;
            let at_once = if self.work.is_round_trip() { 1 } else { times };
            let rest = times - at_once;
            program.left += at_once;
            program.pump(&mut reactor.context());
            program.left += rest;
        }
        let mut turns = 0;
        while if self.work == Work::Idle { turns < times } else { self.client.1.done < end } {
            self.turn();
            turns += 1;
        }
    }

    /// Takes a turn of each side that is not counted.
    fn prepare(&mut self) {
        for (reactor, program) in [&mut self.client, &mut self.server] {
            turn(reactor, program);
        }
    }

    fn turn(&mut self) {
        for side in [Side::Client, Side::Server] {
            let (reactor, program) = if side == Side::Client { &mut self.client } else { &mut self.server };
            match (side == self.looks_at, self.spins) {
                (true, true) => measured_turn_of_spinner(reactor, program),
                (true, false) => measured_turn(reactor, program),
                (false, true) => spin(reactor, program),
                (false, false) => turn(reactor, program),
            }
        }
    }
}

/// Takes a turn of the reactor whose instructions are counted. callgrind counts only the instructions in this function and its callees.
#[inline(never)]
fn measured_turn(reactor: &mut Reactor, program: &mut Program) {
    turn(reactor, program);
}

/// The same as [`measured_turn`], for a reactor that polls without sleeping.
#[inline(never)]
fn measured_turn_of_spinner(reactor: &mut Reactor, program: &mut Program) {
    spin(reactor, program);
}

/// Runs a reactor until its handler stops it. callgrind counts only the instructions in this function and its callees.
#[inline(never)]
fn measured_turns(reactor: &mut Reactor, program: &mut Program) {
    reactor.run(program).expect("turns");
}

/// A clock that advances by half a microsecond with each reading. That is about the time of a round trip on the devices of
/// [`crate::null`].
#[derive(Debug)]
pub struct Steps(Instant);

impl Steps {
    /// Makes a clock that begins at the current time.
    #[must_use]
    #[allow(clippy::disallowed_methods, clippy::new_without_default, reason = "a point in time to count from")]
    pub fn new() -> Self {
        Self(Instant::now())
    }
}

impl Clock for Steps {
    fn now(&mut self) -> Instant {
        self.0 += Duration::from_nanos(500);
        self.0
    }
}

fn turn(reactor: &mut Reactor, program: &mut Program) {
    reactor.turn(program, Some(Duration::ZERO)).expect("a turn");
}

fn spin(reactor: &mut Reactor, program: &mut Program) {
    reactor.step(program, Some(Duration::ZERO)).expect("a turn");
}
