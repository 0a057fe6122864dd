//! Steady states: two reactors in one thread take turns, and do one thing again and again. The cost of a turn depends
//! only on the code, because the octets of one side are in the socket when the other side looks.

use std::time::Duration;

use rdma_reactor::{
    Access, Config, ConnectionId, Context, Handler, Message, Outcome, ProviderChoice, Reactor, Region, RegionOptions,
    RemoteRegion, SecurityMode, SendId, TimerId,
};

use crate::identities::security;
use crate::null::Null;

const SIZE: usize = 64;
/// Lengths of a message in three buffers and of one that is fetched, at default settings.
const EAGER: usize = 20_000;
const OFFERED: usize = 300_000;
static LARGE: [u8; OFFERED] = [7; OFFERED];

/// The thing that is done again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// The client sends 64 bytes, the server sends them back.
    RoundTrip,
    /// The same, with a client whose reactor runs while the server does: [`crate::tasks`].
    Runs,
    /// The same, with a client that is a task.
    TaskRuns,
    /// The client is a task of an executor of others.
    Task,
    /// The client sends a message in three buffers, the server sends it back.
    Eager,
    /// The client sends a message that is offered and fetched, the server sends it back.
    Offered,
    /// The client sends 64 bytes as long as there is room.
    Stream,
    /// The client writes 64 bytes to the server's memory, 16 writes at a time.
    Write,
    /// A timer fires, and is set again.
    Timer,
    /// Nothing.
    Idle,
}

impl Work {
    const fn is_round_trip(self) -> bool {
        matches!(self, Self::RoundTrip | Self::Eager | Self::Offered)
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

/// The side that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The side that begins.
    Client,
    /// The side that answers or receives.
    Server,
}

/// A program that does its part of the work.
#[derive(Debug)]
struct Program {
    work: Work,
    payload: &'static [u8],
    /// What comes is sent back.
    round_trips: bool,
    echoes: bool,
    conn: Option<ConnectionId>,
    /// Number of times that are not begun yet.
    left: u64,
    /// Number of times that are begun and not done.
    under_way: u64,
    done: u64,
    blocked: bool,
    local: Option<Region>,
    remote: Option<RemoteRegion>,
}

impl Program {
    const fn new(work: Work, echoes: bool) -> Self {
        let (conn, local, remote) = (None, None, None);
        let (payload, round_trips) = (work.payload(), work.is_round_trip());
        Self { work, payload, round_trips, echoes, conn, left: 0, under_way: 0, done: 0, blocked: false, local, remote }
    }

    fn pump(&mut self, cx: &mut Context<'_>) {
        let Some(conn) = self.conn else { return };
        let most = if self.work == Work::Write { 16 } else { u64::MAX };
        while self.left > 0 && !self.blocked && self.under_way < most {
            let begun = match (self.work, &self.local, &self.remote) {
                (Work::Write, Some(local), Some(remote)) => cx.write(conn, *remote, local, 0..SIZE),
                _ => cx.send(conn, self.payload),
            };
            self.blocked = begun.is_err();
            if !self.blocked {
                self.left -= 1;
                self.under_way += 1;
                // Not every program hears of the end of a message.
                self.done += u64::from(self.work == Work::Stream);
            }
        }
    }
}

impl Handler for Program {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.conn = Some(conn);
        if self.work == Work::Write {
            let region = cx.register(conn, SIZE, &RegionOptions::new().allow(Access::REMOTE_WRITE)).expect("memory");
            if self.echoes {
                cx.send(conn, &region.remote().to_bytes()).expect("room");
            }
            self.local = Some(region);
        }
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if self.work == Work::Write {
            self.remote = RemoteRegion::from_bytes(&message);
            return;
        }
        self.done += 1;
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

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        self.done += 1;
        cx.set_timer(Duration::ZERO, 0);
    }
}

/// Two reactors with one connection, and their work.
#[derive(Debug)]
pub struct Steady {
    work: Work,
    looks_at: Side,
    client: (Reactor, Program),
    server: (Reactor, Program),
}

impl Steady {
    /// Makes two connected reactors on the embedded provider.
    #[must_use]
    pub fn new(work: Work, looks_at: Side) -> Self {
        Self::with(work, looks_at, Config::default())
    }

    /// The same, with a connection that is secured in this way.
    #[must_use]
    pub fn secured(work: Work, looks_at: Side, mode: SecurityMode) -> Self {
        Self::with(work, looks_at, Config::default().security(security(mode)))
    }

    /// The same, with these settings.
    #[must_use]
    pub fn with(work: Work, looks_at: Side, config: Config) -> Self {
        let config = config.provider(ProviderChoice::Iwarp);
        let reactor = || Reactor::new(config.clone()).expect("a reactor");
        Self::between(work, looks_at, [reactor(), reactor()])
    }

    /// The same, on devices that cost next to nothing.
    #[must_use]
    pub fn on_null(work: Work, looks_at: Side) -> Self {
        Self::between(work, looks_at, Null::reactors(&Config::default()))
    }

    fn between(work: Work, looks_at: Side, [client, server]: [Reactor; 2]) -> Self {
        let client = (client, Program::new(work, false));
        let server = (server, Program::new(work, true));
        let mut steady = Self { work, looks_at, client, server };
        let mut server = steady.server.0.context();
        let listener = server.listen("127.0.0.1:0".parse().expect("an address")).expect("a listener");
        let address = server.local_address(listener).expect("it listens");
        steady.client.0.context().connect(address).expect("connecting");
        while steady.client.1.conn.is_none() || (work == Work::Write && steady.client.1.remote.is_none()) {
            steady.turn();
        }
        if work == Work::Timer {
            steady.client.0.context().set_timer(Duration::ZERO, 0);
        }
        steady
    }

    /// Does the work `times` times, or a few times more.
    pub fn repeat(&mut self, times: u64) {
        let end = self.client.1.done + times;
        if self.work.is_round_trip() || matches!(self.work, Work::Stream | Work::Write) {
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

    fn turn(&mut self) {
        for side in [Side::Client, Side::Server] {
            let (reactor, program) = if side == Side::Client { &mut self.client } else { &mut self.server };
            if side == self.looks_at { measured_turn(reactor, program) } else { turn(reactor, program) }
        }
    }
}

/// Takes a turn of the side that is measured. Only instructions in this function count.
#[inline(never)]
fn measured_turn(reactor: &mut Reactor, program: &mut Program) {
    turn(reactor, program);
}

fn turn(reactor: &mut Reactor, program: &mut Program) {
    reactor.turn(program, Some(Duration::ZERO)).expect("a turn");
}
