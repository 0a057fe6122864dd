//! Random histories of two connections, without reactor, provider and clock. The promises of the library must hold in every history, in any
//! order of events.
//!
//! A history is a list of steps, drawn by proptest. A step is an act of one of the programs, of a device or of the wire, a passage of time,
//! or a message that violates the protocol. After each step [`Side::check`] runs. At the end of a history, both connections end.
//!
//! | file | contents |
//! |---|---|
//! | `side.rs` | a connection, the parts of the reactor that it needs, and the conditions that must hold for it |
//! | `program.rs` | the program that uses the connection and checks its callbacks |
//! | `device.rs` | a model of a device's queue pair, and the wire |

mod device;
mod program;
mod side;

use std::time::{Duration, Instant};

use proptest::prelude::*;
use rdma_transport::cm::{ConnectFailure, DisconnectCause};
use rdma_transport::wc::WcStatus;

use self::device::{Completion, Item, WireBytes};
use self::side::{BUFFER, Manner, Side, SideOptions};
use crate::config::{Config, Framing};
use crate::conn::effects::Event;
use crate::conn::frame::{FrameHeader, MAX_FOLLOWING, MessageKind, Offer, TransferProgress};
use crate::conn::list::ListDirection;
use crate::conn::state::State;
use crate::conn::{Connection, Role};
use crate::error::{ConnectError, DisconnectReason};
use crate::limits::{CONTROL_CREDITS, MAX_CONTROL, MAX_TRANSFERS};
use crate::memory::list::TransferOutcome;
use crate::memory::region::RemoteRegion;

/// The largest number of turns in which both sides must complete all their work. If a side still has work after these turns, the test
/// fails.
const PATIENCE: usize = 20_000;

#[derive(Clone, Copy, Debug)]
enum Program {
    Send(usize),
    SendFilled(usize),
    Append(usize),
    SendFrom(usize),
    SendCut { len: usize, copy: bool },
    Offer { len: usize, copy: bool },
    Read(usize),
    FetchAdd,
    Write,
    WriteAndTell { native: bool },
    Fence,
    Tell(bool),
    Cork,
    Flush,
    Close,
    Abort,
    Behave(Manner),
    Release(usize),
    Starve,
    Feed,
    Ask,
}

#[derive(Clone, Copy, Debug)]
enum EnvironmentStep {
    /// The connection manager reports that the connection is up.
    Established,
    Transmit(usize),
    Complete(usize),
    Arrive(usize),
    Poll(usize),
    /// Posts the collected work requests.
    Post,
    Turn,
    EndEvent,
    Fail(WcStatus),
    PostingFails,
    /// Everything that is in flight to this side is lost, and the connection of the transport breaks.
    Cut,
    DeviceRemoved,
    ConnectFails,
    Time(Duration),
    /// From now on, the device does not answer the peer's Reads.
    NoAnswers,
    /// The peer sends bytes that an honest peer would not send.
    Hostile(WireBytes),
}

#[derive(Clone, Copy, Debug)]
enum HistoryStep {
    Program(usize, Program),
    Environment(usize, EnvironmentStep),
}

impl HistoryStep {
    /// Returns the step that a number encodes. proptest shrinks a failing case towards small numbers, so small numbers encode the steps
    /// with the least effect.
    fn of(word: u64) -> Self {
        let (end, n, m) = ((word & 1) as usize, (word >> 8) as usize & 0xff, word >> 16);
        let len = n % (BUFFER + 1);
        let program = |what| Self::Program(end, what);
        let world = |what| Self::Environment(end, what);
        match (word >> 1) & 0x7f {
            0..8 => world(EnvironmentStep::Turn),
            8..14 => world(EnvironmentStep::Transmit(1 + n % 4)),
            14..20 => world(EnvironmentStep::Complete(1 + n % 4)),
            20..30 => world(EnvironmentStep::Arrive(1 + n % 4)),
            30..40 => world(EnvironmentStep::Poll(1 + n % 4)),
            40..52 => world(EnvironmentStep::Post),
            52..61 => program(Program::Send(len)),
            61..66 => program(Program::SendCut { len: BUFFER + 1 + n % (9 * BUFFER), copy: m & 3 != 0 }),
            66..68 => program(Program::SendFilled(len)),
            68..72 => program(Program::Append(len)),
            72..74 => program(Program::SendFrom(len)),
            74..79 => {
                let len = if n == 0 { 5 << 20 } else { BUFFER + n };
                program(Program::Offer { len, copy: m & 1 == 0 })
            }
            79..82 => program(Program::Read(1 + n % 4)),
            82 => program(Program::FetchAdd),
            83..85 => program(Program::Write),
            85..88 => program(Program::WriteAndTell { native: m & 1 == 0 }),
            88 => program(if n & 3 == 0 { Program::Tell(m & 1 == 0) } else { Program::Fence }),
            89 => program(Program::Cork),
            90..92 => program(Program::Flush),
            92..96 => program(Program::Behave(match n & 3 {
                0 => Manner::LetGo,
                1 | 2 => Manner::Keep,
                _ => Manner::GiveBackInside,
            })),
            96..102 => program(Program::Release(1 + n % 8)),
            102 => program(Program::Starve),
            103..105 => program(Program::Feed),
            105 => program(Program::Ask),
            106..112 => world(EnvironmentStep::Established),
            112..116 => world(EnvironmentStep::Time(Duration::from_millis(1 << (n % 15)))),
            116 => world(EnvironmentStep::NoAnswers),
            117 => match n {
                0..64 => program(Program::Close),
                64..96 => program(Program::Abort),
                96..128 => program(Program::Behave(Manner::Close)),
                _ => world(EnvironmentStep::Turn),
            },
            118 => match n {
                0..20 => world(EnvironmentStep::Fail(WcStatus::RetryExceeded)),
                20..30 => world(EnvironmentStep::Fail(WcStatus::Flushed)),
                30..40 => world(EnvironmentStep::PostingFails),
                40..60 => world(EnvironmentStep::Cut),
                60..65 => world(EnvironmentStep::DeviceRemoved),
                65..75 => world(EnvironmentStep::ConnectFails),
                _ => world(EnvironmentStep::EndEvent),
            },
            119..122 if n < 27 => world(EnvironmentStep::Hostile(hostile(n, m))),
            _ => world(EnvironmentStep::Turn),
        }
    }
}

/// Returns a message of a hostile peer. Most of these messages violate the protocol.
fn hostile(n: usize, m: u64) -> WireBytes {
    let grant = (m >> 8) as u32;
    let near = grant % 64;
    let message = |kind, grant| FrameHeader { kind, grant }.emit();
    match n % 9 {
        0 => WireBytes::of(&m.to_le_bytes()[..(m & 7) as usize]),
        1 => WireBytes::of(&m.to_le_bytes()),
        2 => WireBytes::of(&message(MessageKind::Data, near)),
        3 => WireBytes::of(&message(
            [MessageKind::Hello, MessageKind::Ping, MessageKind::Pong, MessageKind::Credit][(m & 3) as usize],
            near,
        )),
        4 => WireBytes::of(&message(MessageKind::Credit, grant)),
        5 => {
            let len = if m & 1 == 0 { 100 } else { m };
            let region = RemoteRegion { address: 0, len: len >> 1, key: 1 };
            let offer = Offer { number: grant % 8, region, tag: (m & 2 == 0).then_some(m) };
            WireBytes::of(&[&message(MessageKind::Offer, near)[..], offer.emit(&mut [0; MAX_CONTROL])].concat())
        }
        6 => {
            let following = if m & 1 == 0 { (m >> 1) as u32 & 7 } else { (m >> 1) as u32 & MAX_FOLLOWING };
            let header = FrameHeader { kind: MessageKind::Fragment, grant: near }.emit_before(following);
            WireBytes::of(&[&header[..], &m.to_le_bytes()[..(grant & 7) as usize]].concat())
        }
        7 if m & 1 == 0 => WireBytes::of(
            &[
                &message([MessageKind::Fetched, MessageKind::Refused][(m >> 1 & 1) as usize], near)[..],
                &(grant % 4).to_le_bytes(),
            ]
            .concat(),
        ),
        7 => {
            let progress = TransferProgress { number: grant % 4, done: if m & 2 == 0 { 4 << 20 } else { m } };
            WireBytes::of(&[&message(MessageKind::Progress, near)[..], &progress.emit()].concat())
        }
        _ => WireBytes::of(&[&message(MessageKind::Immediate, near)[..], &m.to_le_bytes()].concat()),
    }
}

#[derive(Debug)]
struct History {
    terms: SideOptions,
    sides: [Side; 2],
    /// For each side, true if that side was notified that the transport is up or has failed.
    established: [bool; 2],
    /// The private data of the passive side's reply.
    reply: Vec<u8>,
    /// True as long as nothing was lost on the wire, and no fault was injected.
    intact: bool,
}

impl History {
    fn new(terms: &[SideOptions; 2], now: Instant) -> Self {
        let mut sides = [Side::new(Role::Active, &terms[0], now), Side::new(Role::Passive, &terms[1], now)];
        let request = sides[0].greeting();
        sides[1].agree(&request);
        let reply = sides[1].greeting();
        Self { terms: terms[0].clone(), sides, established: [false; 2], reply, intact: true }
    }

    fn step(&mut self, step: HistoryStep) {
        match step {
            HistoryStep::Program(end, what) => self.program(end, what),
            HistoryStep::Environment(end, what) => self.world(end, what),
        }
        self.check();
    }

    fn program(&mut self, end: usize, what: Program) {
        let side = &mut self.sides[end];
        if !side.is_known() {
            return;
        }
        let raw = self.terms.framing == Framing::Raw;
        match what {
            Program::Send(len) => side.send(len),
            Program::SendFilled(len) => side.send_filled(len),
            Program::Append(len) => side.append(len),
            Program::SendFrom(len) => side.send_from(len),
            Program::SendCut { len, copy } => side.send_cut(len, copy),
            Program::Offer { len, copy } => side.offer(len, copy),
            Program::Read(ranges) => side.read(ranges),
            Program::FetchAdd => side.fetch_add(),
            Program::Write => side.write(),
            Program::WriteAndTell { native } => side.write_and_tell(native || raw),
            Program::Fence => side.fence(),
            Program::Tell(telling) => side.tell_of_next(telling),
            Program::Cork => side.cork(),
            Program::Flush => side.flush_now(),
            Program::Close => side.close(),
            Program::Abort => {
                self.intact = false;
                side.close();
                side.tell(Connection::abort);
            }
            Program::Behave(manner) => side.manner = manner,
            Program::Release(count) => side.release(count),
            Program::Starve => side.starved = true,
            Program::Feed => side.feed(),
            Program::Ask => side.ask_peer(),
        }
    }

    fn world(&mut self, end: usize, what: EnvironmentStep) {
        let honest = self.asserts_receives();
        let [side, peer] = pair(&mut self.sides, end);
        match what {
            EnvironmentStep::Established => self.establish(end),
            EnvironmentStep::Transmit(count) => times(count, || side.device.transmit()),
            EnvironmentStep::Complete(count) => times(count, || side.device.complete()),
            EnvironmentStep::Arrive(count) => times(count, || side.device.arrive(&mut peer.device, honest)),
            EnvironmentStep::Poll(count) => times(count, || side.poll()),
            EnvironmentStep::Post => times(1, || side.post()),
            EnvironmentStep::Turn => times(1, || self.turn(end)),
            EnvironmentStep::EndEvent => times(1, || self.end_event(end)),
            EnvironmentStep::Time(time) => self.sides.iter_mut().for_each(|side| side.advance(time)),
            EnvironmentStep::NoAnswers => side.device.answers = false,
            EnvironmentStep::Hostile(bytes) => {
                peer.device.wire.push_back(Item::Message(bytes));
                self.sides.iter_mut().for_each(|side| side.trusts = false);
            }
            fault => {
                self.fault(end, fault);
                self.intact = false;
            }
        }
    }

    /// Injects a fault on the side `end`.
    fn fault(&mut self, end: usize, fault: EnvironmentStep) {
        let [side, peer] = pair(&mut self.sides, end);
        match fault {
            EnvironmentStep::Fail(status) => side.device.fail(status),
            EnvironmentStep::PostingFails => {
                side.device.go_down(DisconnectCause::Path("cut".to_owned()));
                side.tell(|conn, env| conn.posting_failed("no".to_owned(), env));
            }
            EnvironmentStep::Cut => {
                peer.device.wire.clear();
                side.device.go_down(DisconnectCause::Truncated);
            }
            EnvironmentStep::DeviceRemoved => _ = side.tell(Connection::device_removed),
            // The event that the transport is up did not arrive on this side, but messages may have.
            EnvironmentStep::ConnectFails if !std::mem::replace(&mut self.established[end], true) => {
                side.device.up = false;
                side.tell(|conn, env| conn.connect_failed(ConnectFailure::Timeout, env));
            }
            _ => {}
        }
    }

    /// Returns true if no message has violated the protocol so far.
    fn is_honest(&self) -> bool {
        self.sides[0].trusts
    }

    /// Returns true if each message must find a posted receive, so that a message without one fails the test.
    fn asserts_receives(&self) -> bool {
        self.is_honest() && self.terms.framing == Framing::Credits
    }

    /// Notifies a side that the transport is up.
    fn establish(&mut self, end: usize) {
        if !std::mem::replace(&mut self.established[end], true) {
            let private_data = if end == 0 { self.reply.as_slice() } else { &[] };
            self.sides[end].tell(|conn, env| conn.established(private_data, BUFFER as u32, env));
        }
    }

    /// Delivers the connection manager's event that the connection has ended, if everything that the peer had sent before the end has
    /// arrived. Returns false if there is nothing to deliver.
    fn end_event(&mut self, end: usize) -> bool {
        let [side, peer] = pair(&mut self.sides, end);
        if side.deliver_end_event() {
            return true;
        }
        let gone = !peer.device.up && peer.device.wire.is_empty() && side.device.up;
        if gone {
            side.tell(|conn, env| conn.disconnected(DisconnectCause::Peer, env));
        }
        gone && side.ended.is_none()
    }

    /// Runs a turn of the reactor of one side. The device of that side first does everything that it can do. Returns false if neither the
    /// reactor nor the device had anything to do.
    fn turn(&mut self, end: usize) -> bool {
        let honest = self.asserts_receives();
        let [side, peer] = pair(&mut self.sides, end);
        let mut moved = false;
        while side.device.transmit() || side.device.arrive(&mut peer.device, honest) || side.device.complete() {
            moved = true;
        }
        moved |= self.end_event(end);
        let side = &mut self.sides[end];
        while side.poll() {
            moved = true;
        }
        moved |= side.post();
        moved | side.end()
    }

    /// Runs turns of both sides until neither has anything to do.
    fn settle(&mut self) {
        for _ in 0..PATIENCE {
            let moved = [self.turn(0), self.turn(1)];
            self.check();
            if moved == [false; 2] {
                return;
            }
        }
        panic!("they never come to rest: {:?}", self.sides);
    }

    /// Checks the conditions that must hold after every step. One of these conditions: the messages that a side has received are those that
    /// the peer has sent, in the same order.
    fn check(&mut self) {
        for end in 0..2 {
            self.sides[end].check();
            let [side, peer] = pair(&mut self.sides, end);
            while let Some(heard) = side.heard.pop_front() {
                let said = peer.said.pop_front();
                let matches = said.is_some_and(|said| said.matches(heard));
                assert!(matches, "{heard:?} was heard, {said:?} was said");
            }
        }
    }

    /// Ends the history. No message may wait forever, both connections must end, and all buffers must return to their pools.
    fn end(mut self) {
        for end in 0..2 {
            self.establish(end);
            let side = &mut self.sides[end];
            if side.manner == Manner::Close {
                side.manner = Manner::Keep;
            }
        }
        self.settle();
        let up = |history: &Self| history.intact && history.is_honest() && history.sides.iter().all(Side::is_open);
        let answers = self.sides.iter().all(|side| side.device.answers);
        if up(&self) && answers && self.terms.framing == Framing::Credits {
            self.check_windows();
        }
        for side in &mut self.sides {
            side.manner = Manner::LetGo;
            side.release(usize::MAX);
            side.feed();
            side.flush_now();
            side.device.answers = true;
        }
        self.settle();
        if up(&self) {
            for side in &self.sides {
                side.check_quiet("both are open and idle");
                assert!(side.said.is_empty(), "never heard: {:?}", side.said);
            }
            self.idle();
            assert!(
                up(&self),
                "a peer that is there was given up: {:?}",
                self.sides.each_ref().map(|side| &side.ended)
            );
        }
        self.part();
        for side in &mut self.sides {
            side.check_home();
        }
    }

    /// Checks two idle sides. Every offered message must be fetched, unless the offering side is corked or the receiving side has no memory
    /// or receives for it. Pings must be answered. A side must be able to send, unless the program of its peer keeps nearly all receives.
    fn check_windows(&mut self) {
        for end in 0..2 {
            let [side, peer] = pair(&mut self.sides, end);
            let fetched = side.offers.is_empty() || side.is_corked() || peer.starved || !side.must_let_peer_send();
            assert!(fetched, "{:?} were never fetched", side.offers);
        }
        self.sides.iter_mut().for_each(Side::flush_now);
        self.settle();
        for end in 0..2 {
            let [side, peer] = pair(&mut self.sides, end);
            assert!(
                !peer.must_let_peer_send() || side.credits() > CONTROL_CREDITS,
                "a grant that is due was never given: {side:?} {peer:?}"
            );
            let before = side.arrivals;
            side.ask_peer();
            self.settle();
            assert!(self.sides[end].arrivals > before, "a question was not answered");
        }
    }

    /// Advances the time by twice the keepalive timeout. Both sides run often enough to answer pings.
    fn idle(&mut self) {
        for _ in 0..10 {
            self.sides.iter_mut().for_each(|side| side.advance(Duration::from_secs(3)));
            self.settle();
        }
    }

    /// Ends both connections.
    fn part(&mut self) {
        let closer = usize::from(self.sides[0].ended.is_some());
        if self.sides[closer].is_known() {
            self.sides[closer].close();
        }
        for _ in 0..100 {
            self.settle();
            if self.sides.iter().all(|side| side.ended.is_some()) {
                break;
            }
            self.sides.iter_mut().for_each(|side| side.advance(Duration::from_secs(1)));
        }
        let honest = self.is_honest();
        for end in 0..2 {
            let [side, peer] = pair(&mut self.sides, end);
            let ended = side.ended.as_ref().expect("every connection ends");
            if let Some(DisconnectReason::PeerViolation(what)) = ended.reason {
                assert!(!honest, "an honest peer was accused: {what}");
            }
            // Everything that one side had sent before its orderly close must have been delivered to the other side.
            let orderly = matches!(ended.reason, Some(DisconnectReason::Closed | DisconnectReason::Lost));
            if honest && self.intact && orderly && !side.closed && peer.drained {
                assert!(peer.said.is_empty(), "lost at the end: {:?}", peer.said);
            }
        }
    }
}

fn pair(sides: &mut [Side; 2], end: usize) -> [&mut Side; 2] {
    let [first, second] = sides;
    if end == 0 { [first, second] } else { [second, first] }
}

/// Runs `step` up to `count` times, and stops when it returns false.
fn times(count: usize, mut step: impl FnMut() -> bool) {
    for _ in 0..count {
        if !step() {
            return;
        }
    }
}

fn start() -> Instant {
    #[allow(clippy::disallowed_methods, reason = "a point in time to count from")]
    Instant::now()
}

fn terms() -> impl Strategy<Value = [SideOptions; 2]> {
    let depths = || (prop_oneof![5..9_u32, 5..24_u32], 1..12_u32, 0..6_u8, any::<bool>(), any::<bool>());
    (depths(), depths(), 0..8_u8, any::<bool>(), any::<bool>()).prop_map(|(a, b, raw, in_order, probes)| {
        let framing = if raw == 7 { Framing::Raw } else { Framing::Credits };
        [a, b].map(|(receive_depth, send_depth, shared, quiet, abrupt)| SideOptions {
            receive_depth,
            send_depth,
            framing,
            shared: shared == 5 && framing == Framing::Credits,
            in_order,
            quiet,
            abrupt: abrupt && framing == Framing::Credits,
            probes,
        })
    })
}

fn steps() -> impl Strategy<Value = Vec<HistoryStep>> {
    proptest::collection::vec(any::<u64>().prop_map(HistoryStep::of), 0..150)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    /// These promises hold in any history:
    /// - No message is sent without a receive or a credit.
    /// - Each send ends exactly once, each connection ends exactly once, and no callback follows the one for the end.
    /// - No send, message or connection waits forever.
    /// - Everything is delivered in order, or the connection has failed.
    /// - An honest peer is never accused of a violation.
    /// - Every buffer is returned.
    #[test]
    fn every_promise_holds_in_every_history(terms in terms(), steps in steps()) {
        let mut history = History::new(&terms, start());
        for step in steps {
            history.step(step);
        }
        history.end();
    }
}

/// Returns the number of histories to try: `PROPTEST_CASES`, or 2,000.
fn cases() -> u32 {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    cases.unwrap_or(2000)
}

/// Returns two sides with these queue depths, whose connection is up.
fn connected(receive_depth: u32, send_depth: u32) -> History {
    connected_on(true, receive_depth, send_depth)
}

/// Returns two sides like [`connected`]. If `in_order` is false, a send may complete before a Read that was posted earlier, as on siw.
fn connected_on(in_order: bool, receive_depth: u32, send_depth: u32) -> History {
    let (framing, shared, quiet, abrupt, probes) = (Framing::Credits, false, false, false, false);
    let terms = SideOptions { receive_depth, send_depth, framing, shared, in_order, quiet, abrupt, probes };
    let mut history = History::new(&[terms.clone(), terms], start());
    (0..2).for_each(|end| history.establish(end));
    history.settle();
    history
}

/// A connection that probes its peer comes up when the peer's device has acknowledged the hello, or when a message of the peer arrives
/// before that. Otherwise it fails: because of a failed hello, the time limit, or the end of the transport.
#[test]
fn a_connection_that_probes_waits_for_the_acknowledgement_of_its_hello() {
    let probing = || {
        let (framing, shared, in_order, quiet, abrupt) = (Framing::Credits, false, true, true, false);
        let (receive_depth, send_depth, probes) = (8, 8, true);
        let terms = SideOptions { receive_depth, send_depth, framing, shared, in_order, quiet, abrupt, probes };
        let mut history = History::new(&[terms.clone(), terms], start());
        (0..2).for_each(|end| history.establish(end));
        assert!(history.sides[0].post() && history.sides[0].device.transmit());
        assert!(!history.sides[0].announced, "the hello is in flight");
        history
    };
    let failed = |history: &History| history.sides[0].conn.as_ref().and_then(Connection::failed_attempt).cloned();

    let mut acknowledged = probing();
    assert!(acknowledged.sides[0].device.complete() && acknowledged.sides[0].poll());
    assert!(acknowledged.sides[0].announced);
    acknowledged.end();

    let mut answered = probing();
    let [active, passive] = &mut answered.sides;
    assert!(passive.device.arrive(&mut active.device, true) && passive.poll() && passive.announced);
    passive.send(4);
    assert!(active.device.arrive(&mut passive.device, true) && active.poll());
    assert!(active.announced && active.arrivals == 1, "the acknowledgement is late");
    answered.end();

    let mut unreachable = probing();
    unreachable.sides[0].device.fail(WcStatus::RetryExceeded);
    assert!(unreachable.sides[0].poll());
    let error = failed(&unreachable);
    assert!(matches!(error, Some(ConnectError::Transport(ConnectFailure::Unreachable(_)))), "{error:?}");

    let mut silent = probing();
    silent.sides[0].advance(Duration::from_secs(11));
    assert_eq!(failed(&silent), Some(ConnectError::Timeout));

    // The event that the transport has ended is processed before the completion of the hello. If
    // the hello was acknowledged, the peer was up.
    for acknowledged in [true, false] {
        let mut ended = probing();
        let side = &mut ended.sides[0];
        assert!(!acknowledged || side.device.complete());
        side.tell(|conn, env| conn.disconnected(DisconnectCause::Peer, env));
        times(1, || side.poll());
        assert_eq!(side.announced, acknowledged);
    }
}

/// The peer's hello arrives before the event that the transport is up, and the connection manager then reports a failure instead of that
/// event. The program was notified of the connection, so the connection ends with `on_disconnect`.
#[test]
fn a_connection_that_was_reported_does_not_end_with_a_connect_error() {
    let (framing, shared, in_order, quiet, abrupt) = (Framing::Credits, false, true, false, false);
    let terms =
        SideOptions { receive_depth: 8, send_depth: 8, framing, shared, in_order, quiet, abrupt, probes: false };
    let mut history = History::new(&[terms.clone(), terms], start());
    history.establish(0);
    history.settle();
    assert!(history.sides[1].announced && !history.established[1]);
    history.world(1, EnvironmentStep::ConnectFails);
    history.settle();
    let reason = history.sides[1].ended.as_ref().and_then(|ended| ended.reason.as_ref());
    assert!(matches!(reason, Some(DisconnectReason::Transport(DisconnectCause::Path(_)))), "{reason:?}");
    history.end();
}

/// On some devices, such as iWARP, a disconnect loses everything in flight. On such a device, the side that closes the connection does not
/// disconnect. It waits until the peer has received everything and disconnects.
#[test]
fn an_end_does_not_overtake_what_was_sent() {
    let mut history = connected(16, 8);
    let side = &mut history.sides[0];
    side.device.abrupt = true;
    (0..3).for_each(|_| side.send(4));
    side.close();
    // All sends of the side complete, including the goodbye, before any of them has arrived at the
    // peer.
    for _ in 0..2 {
        while side.post() || side.device.transmit() || side.device.complete() || side.poll() {}
        side.end();
    }
    assert!(side.device.up);
    history.part();
    assert!(history.sides[0].said.is_empty());
    let ended = history.sides.each_ref().map(|side| side.ended.as_ref().and_then(|ended| ended.reason.clone()));
    assert_eq!(ended, [Some(DisconnectReason::Local { complete: true }), Some(DisconnectReason::Closed)]);
    history.sides.iter_mut().for_each(Side::check_home);
}

/// The program releases the first `gone` messages, and keeps all later ones. The peer must always get the credits that are due. The peer
/// may stall only if the program keeps all but four receives.
#[test]
fn kept_messages_withhold_no_grant_that_is_due() {
    for depth in 5..40 {
        for gone in 0..depth {
            let mut history = connected(depth, 8);
            for nth in 0..gone + depth - 4 {
                history.sides[1].manner = if nth < gone { Manner::LetGo } else { Manner::Keep };
                assert!(history.sides[0].credits() > CONTROL_CREDITS, "{nth} of depth {depth}, {gone} of them gone");
                history.sides[0].send(4);
                history.settle();
            }
            history.part();
        }
    }
}

/// If the send queue has no free slot for a control message, the message is sent as soon as a slot is free.
#[test]
fn a_control_message_that_found_no_place_is_tried_again() {
    let mut history = connected(16, 1);
    let side = &mut history.sides[0];
    // The reactor queues this message, and does not complete it when it is posted. So the message occupies a slot.
    side.send_filled(4);
    for _ in 0..3 {
        side.ask_peer();
        side.post();
    }
    assert_eq!(
        (0..9).take_while(|_| side.device.transmit()).count(),
        3,
        "one place of the program, and two for control"
    );
    while side.device.complete() || side.poll() {}
    assert!(side.post() && side.device.transmit(), "the third question was forgotten");
}

/// On some devices, such as siw, a message may complete before the Reads of a list that were posted earlier. Its end is reported when the
/// last of these Reads has ended.
#[test]
fn a_message_that_completes_before_a_batch_of_reads_ends_with_them() {
    let mut history = connected_on(false, 16, 8);
    let [side, peer] = pair(&mut history.sides, 0);
    let list = side.begin_list(ListDirection::Read, 2, false);
    assert!(side.post());
    side.send_filled(4);
    assert!(side.post());
    while side.device.transmit() {}
    assert!(side.device.complete() && side.poll(), "no Read was answered, but the message has left");
    assert!(side.sends.len() == 1 && side.transferred.is_empty(), "sends end in order");
    while peer.device.arrive(&mut side.device, true) {}
    while side.device.arrive(&mut peer.device, true) {}
    while side.device.complete() || side.poll() {}
    assert_eq!(side.transferred, [(list, TransferOutcome::Done)]);
    assert!(side.sends.is_empty(), "the end of the message was forgotten");
    history.end();
}

/// A list of Reads sends its message when all bytes have arrived. A later list of Writes may send its message before that. The end of this
/// message ends the list of Writes, not the older list.
#[test]
fn the_end_of_a_notification_ends_its_own_list() {
    let mut history = connected(16, 8);
    let [side, peer] = pair(&mut history.sides, 0);
    let reads = side.begin_list(ListDirection::Read, 2, true);
    let writes = side.begin_list(ListDirection::Write, 1, true);
    assert!(side.post());
    while side.device.transmit() {}
    while peer.device.arrive(&mut side.device, true) {}
    while side.device.arrive(&mut peer.device, true) {}
    // Both Reads complete. Only the second one is signaled.
    assert!(side.device.complete() && side.device.complete() && side.poll());
    assert!(side.post() && side.device.transmit(), "the message of the Reads");
    assert!(side.device.complete() && side.poll(), "the Write");
    assert!(side.transferred.is_empty(), "both messages are in flight");
    assert!(side.device.complete() && side.poll(), "the message of the Writes");
    assert_eq!(side.transferred, [(writes, TransferOutcome::Done)]);
    history.settle();
    assert_eq!(history.sides[0].transferred, [(writes, TransferOutcome::Done), (reads, TransferOutcome::Done)]);
    history.end();
}

/// If both programs close the connection at the same time, the goodbye of a side may be flushed before its completion. A goodbye is not a
/// send of the program, so nothing was cut off.
#[test]
fn a_goodbye_that_is_flushed_cuts_nothing_off() {
    let mut history = connected(16, 8);
    for side in &mut history.sides {
        side.close();
        side.end();
        assert!(side.post() && side.device.transmit(), "the goodbye");
    }
    for end in 0..2 {
        let [side, peer] = pair(&mut history.sides, end);
        assert!(side.device.arrive(&mut peer.device, true) && side.poll(), "the goodbye of the peer");
    }
    history.part();
    let ended = history.sides.each_ref().map(|side| side.ended.as_ref().and_then(|ended| ended.reason.clone()));
    assert_eq!(ended, [0, 1].map(|_| Some(DisconnectReason::Local { complete: true })));
    history.sides.iter_mut().for_each(Side::check_home);
}

/// The program closes the connection after a send whose end is not reported. That send fails when
/// the goodbye is already posted. The close is not complete.
#[test]
fn a_quiet_send_that_fails_before_the_goodbye_makes_the_close_incomplete() {
    let terms = SideOptions { quiet: true, ..connected(8, 16).terms };
    let mut history = History::new(&[terms.clone(), terms], start());
    (0..2).for_each(|end| history.establish(end));
    history.settle();
    let side = &mut history.sides[0];
    side.send_filled(4);
    assert!(side.post());
    side.close();
    side.end();
    assert!(side.post(), "the goodbye");
    side.device.fail(WcStatus::RetryExceeded);
    assert!(side.poll());
    history.intact = false;
    history.part();
    let ended = history.sides[0].ended.as_ref().expect("every connection ends");
    assert_eq!(ended.reason, Some(DisconnectReason::Local { complete: false }));
    history.sides.iter_mut().for_each(Side::check_home);
}

/// On some devices, such as siw, a message may complete before a Read that was posted earlier. If the Read never completes, the message was
/// sent all the same.
#[test]
fn a_message_that_has_completed_before_a_lost_read_was_sent() {
    let mut history = connected_on(false, 16, 8);
    let side = &mut history.sides[0];
    side.read(1);
    side.send_filled(4);
    assert!(side.post());
    while side.device.transmit() {}
    assert!(side.device.complete() && side.poll() && side.sends.len() == 2, "the Read is not answered");
    side.tell(Connection::device_removed);
    side.input(Connection::finish);
    let mut sent = Vec::new();
    while let Some((_, event)) = side.effects.next_event() {
        if let Event::Sent { outcome, .. } = event {
            sent.push(outcome.is_sent());
        }
    }
    assert_eq!(sent, [false, true]);
}

/// If the device cannot destroy the queue pair, it may still write to the program's memory into which a message is being read. The program
/// is notified of the end, but can never borrow that memory again.
#[test]
fn a_place_that_the_device_may_still_write_is_not_given_back() {
    let mut history = connected(16, 8);
    history.sides[0].offer(2 * BUFFER, false);
    assert!(history.sides[0].post() && history.sides[0].device.transmit());
    let [side, peer] = pair(&mut history.sides, 1);
    assert!(side.device.arrive(&mut peer.device, true) && side.poll(), "the offer");
    assert!(side.post() && side.device.transmit(), "the Read");
    side.tell(|conn, env| conn.disconnected(DisconnectCause::Peer, env));
    side.input(|conn, _| conn.forsake());
    let (offered, memory) = side.landings.pop().expect("a message that is being read");
    side.input(Connection::finish);
    let mut landed = Vec::new();
    while let Some((_, event)) = side.effects.next_event() {
        if let Event::Landed(ended) = event {
            landed.push((ended.0, ended.1.is_ok()));
        }
    }
    assert_eq!(landed, [(offered, false)]);
    assert!(memory.bytes().is_none(), "a device may write what a program may look at");
}

/// The transport ends. After that, a message that violates the protocol is processed. No later
/// message is delivered.
#[test]
fn nothing_is_delivered_behind_a_violation_that_is_found_late() {
    let mut history = connected(16, 8);
    let [side, peer] = pair(&mut history.sides, 1);
    side.trusts = false;
    peer.device.wire.push_back(Item::Message(WireBytes::of(&[0xff; 8])));
    peer.send_filled(4);
    assert!(peer.post() && peer.device.transmit());
    while side.device.arrive(&mut peer.device, false) {}
    side.tell(|conn, env| conn.disconnected(DisconnectCause::Peer, env));
    assert!(side.poll() && side.poll() && !side.poll());
    assert_eq!(side.stats.messages.received, 0);
}

/// The transport ends. After that, a message that violates the protocol is processed, and then the
/// hello of the peer. The connection does not come up, and no message is delivered.
#[test]
fn nothing_comes_up_behind_a_violation_that_is_found_late() {
    let terms = connected(16, 8).terms;
    let mut history = History::new(&[terms.clone(), terms], start());
    (0..2).for_each(|end| history.establish(end));
    let [side, peer] = pair(&mut history.sides, 1);
    side.trusts = false;
    peer.device.wire.push_back(Item::Message(WireBytes::of(&[0xff; 8])));
    peer.send_filled(4);
    assert!(peer.post() && peer.device.transmit() && peer.device.transmit(), "the hello and the message");
    while side.device.arrive(&mut peer.device, false) {}
    side.tell(|conn, env| conn.disconnected(DisconnectCause::Peer, env));
    assert!(side.poll() && side.poll() && side.poll() && !side.poll());
    assert!(!side.announced && side.stats.messages.received == 0);
}

/// A message in several buffers begins while the connection ends. The flush timeout does not
/// change, although the transfer timeout is shorter.
#[test]
fn a_message_that_begins_at_the_end_does_not_shorten_the_flush() {
    let mut history = connected(16, 8);
    let [side, peer] = pair(&mut history.sides, 1);
    let [transfer, flush] = [1, 2].map(Duration::from_secs);
    side.config = side.config.clone().timeouts(|t| (t.transfer, t.flush) = (transfer, flush));
    peer.send_cut(BUFFER + 1, true);
    assert!(peer.post() && peer.device.transmit() && peer.device.transmit(), "two parts");
    while side.device.arrive(&mut peer.device, true) {}
    side.tell(|conn, env| conn.disconnected(DisconnectCause::Peer, env));
    let end = Some(side.now + flush);
    let deadline = |side: &Side| side.conn.as_ref().and_then(Connection::next_timeout);
    assert_eq!(deadline(side), end);
    assert!(side.poll() && side.poll() && !side.poll());
    assert_eq!((side.heard.len(), deadline(side)), (1, end));
}

/// The deadline of a list passes at the same time as the next check of the peer. The connection
/// ends, and the flush still gets its full timeout.
#[test]
fn a_late_list_leaves_the_flush_its_time() {
    let mut history = connected(16, 8);
    let [side, _] = pair(&mut history.sides, 1);
    let (within, flush) = (Duration::from_secs(3), side.config.timeouts.flush);
    side.begin_list_within(ListDirection::Read, 2, false, Some(side.now + within));
    assert!(side.post());
    let conn = side.conn.as_mut().expect("it is open");
    conn.deadlines.step = Some(side.now + within);
    side.advance(within);
    let conn = side.conn.as_ref().expect("it waits for the flush");
    assert!(matches!(conn.state(), State::Closing(_)));
    assert_eq!(conn.next_timeout(), Some(side.now + flush));
}

/// A callback panics while the callbacks for later messages are pending. None of these is made.
#[test]
fn nothing_is_delivered_after_a_panic() {
    let mut history = connected(16, 8);
    let [side, peer] = pair(&mut history.sides, 1);
    (0..2).for_each(|_| peer.send_filled(4));
    assert!(peer.post());
    while peer.device.transmit() || side.device.arrive(&mut peer.device, true) {}
    while let Some(Completion::Receive { slot, completed }) = side.device.completions.pop_front() {
        side.input(|conn, env| conn.received(slot, &completed, env));
    }
    let Some((_, Event::Message(first))) = side.effects.next_event() else { panic!("no message has arrived") };
    side.buffers.free_receive(first.buffer.expect("it was not detached yet"), first.shared);
    side.input(|conn, env| conn.panicked("on_recv panicked".to_owned(), env));
    assert!(side.effects.next_event().is_none(), "the second message");
    history.part();
    let ended = history.sides[1].ended.as_ref().expect("every connection ends");
    assert!(matches!(ended.reason, Some(DisconnectReason::Internal(_))), "{ended:?}");
    history.sides.iter_mut().for_each(Side::check_home);
}

/// A message with a tag is always offered. If it was refused because too many offers are in flight, capacity for its fragments does not
/// help.
#[test]
fn a_tagged_offer_does_not_wait_for_fragments() {
    let mut history = connected(40, 40);
    let side = &mut history.sides[0];
    (0..MAX_TRANSFERS).for_each(|_| side.offer(BUFFER + 2, false));
    assert!(!side.refused);
    side.offer(BUFFER + 2, false);
    let conn = side.conn.as_ref().expect("it is up");
    assert!(side.refused && conn.may_cut(BUFFER + 2));
    assert_eq!(conn.is_unblocked(), None, "it would be refused again");
    history.end();
}

/// A ping waits for a credit. A message of the peer brings one, so the connection must be flushed.
#[test]
fn a_message_of_the_peer_posts_a_ping_that_waits_for_a_credit() {
    let mut history = connected(16, 40);
    history.step(HistoryStep::Program(1, Program::Send(4)));
    history.step(HistoryStep::Environment(1, EnvironmentStep::Post));
    history.step(HistoryStep::Environment(1, EnvironmentStep::Transmit(1)));
    let conn = history.sides[0].conn.as_mut().expect("it is up");
    assert!(!conn.is_marked());
    conn.keepalive.owes_ping = true;
    history.step(HistoryStep::Environment(0, EnvironmentStep::Arrive(1)));
    history.step(HistoryStep::Environment(0, EnvironmentStep::Poll(1)));
    assert!(history.sides[0].conn.as_ref().is_some_and(Connection::is_marked), "nothing posts the ping");
}

/// A list that waits for a credit ends. The credit that was reserved for it is free now, so the
/// driver must check if the program's refused send would be accepted.
#[test]
fn the_end_of_a_list_wakes_a_refused_send() {
    let mut history = connected(16, 40);
    let side = &mut history.sides[0];
    while side.credits() > CONTROL_CREDITS {
        side.send(4);
    }
    let list = side.begin_list(ListDirection::Write, 1, true);
    assert!(side.post());
    while side.device.transmit() || side.device.complete() || side.poll() {}
    side.post();
    side.send(4);
    assert!(side.refused && side.transferred.is_empty(), "no credit is left for the message of the list");
    let (before, conn) = (side.credits(), side.conn.as_mut().expect("it is up"));
    for limit in 1.. {
        conn.tx.grant(limit).expect("it is one more than before");
        if conn.tx.available() > before {
            break;
        }
    }
    assert_eq!(conn.is_unblocked(), None, "the list comes first");
    side.effects.to_ask.clear();
    assert_eq!(side.input(|conn, env| conn.cancel_list(list, env)), Some(true));
    assert!(!side.effects.to_ask.is_empty(), "nobody asks about the refused send");
    assert!(side.conn.as_ref().is_some_and(|conn| conn.is_unblocked().is_some()));
}

/// A program fills each slot that becomes free before the lists get one. The list and its
/// confirmation get one nevertheless, whether the program sends until it is refused, or exactly as
/// much as fits.
#[test]
fn a_confirmation_gets_a_slot() {
    for sends in [8, 9] {
        let mut history = connected(16, 8);
        history.sides[0].begin_confirmed_list();
        (0..16).for_each(|_| history.fill_before_lists(sends));
        assert_eq!(history.sides[0].transferred.len(), 1, "the list has not ended");
        history.end();
    }
}

/// A connection without headers sends no grants, so no grant is due that would override a cork.
#[test]
fn a_cork_holds_a_connection_without_headers() {
    let terms = SideOptions { framing: Framing::Raw, ..connected(8, 8).terms };
    let mut history = History::new(&[terms.clone(), terms], start());
    (0..2).for_each(|end| history.establish(end));
    history.settle();
    for _ in 0..32 {
        history.sides[1].send(4);
        history.settle();
    }
    let side = &mut history.sides[0];
    side.cork();
    side.send(4);
    side.post();
    assert!(!side.device.transmit(), "the cork holds it back");
    side.flush_now();
    assert!(side.device.transmit());
    history.end();
}

impl History {
    /// Runs a turn of each side. The passive side posts as many Writes as fit, at most `most`,
    /// after its completions and before its lists.
    fn fill_before_lists(&mut self, most: usize) {
        self.turn(1);
        let [side, peer] = pair(&mut self.sides, 0);
        while side.device.transmit() || side.device.arrive(&mut peer.device, true) || side.device.complete() {}
        while side.poll() {}
        (0..most).for_each(|_| side.write());
        side.post();
    }

    /// Makes the peer of the passive side send a message. If a receive is posted, the passive side handles the message.
    fn attack(&mut self, kind: MessageKind, grant: u32, payload: &[u8]) {
        let message = WireBytes::of(&[&FrameHeader { kind, grant }.emit()[..], payload].concat());
        self.step(HistoryStep::Environment(1, EnvironmentStep::Hostile(message)));
        let [victim, attacker] = pair(&mut self.sides, 1);
        while victim.device.transmit() || victim.device.arrive(&mut attacker.device, false) || victim.device.complete()
        {
        }
        while victim.poll() {}
        victim.post();
        self.sides[0].device.wire.clear();
        self.check();
    }
}

/// The peer offers a message that can never be fetched, and sends further messages. These wait for the offered message and occupy receives,
/// so the peer runs out of credits and can send no more messages.
#[test]
fn a_peer_that_lets_nothing_be_fetched_fills_no_memory() {
    let mut history = connected(16, 8);
    let offer = Offer { number: 0, region: RemoteRegion { address: 0, len: 100, key: 1 }, tag: None };
    history.attack(MessageKind::Offer, 17, offer.emit(&mut [0; MAX_CONTROL]));
    for nth in 0..1000 {
        history.attack(MessageKind::Immediate, 18 + nth, &[0; 8]);
    }
    history.part();
    history.sides.iter_mut().for_each(Side::check_home);
}

/// If the last fragment of a message never arrives, the message occupies only the receives of its fragments, and the connection ends after
/// the transfer timeout.
#[test]
fn a_peer_that_never_finishes_a_message_fills_no_memory_and_is_given_up() {
    let mut history = connected(16, 8);
    history.sides[1].config = Config::default().timeouts(|t| t.transfer = Duration::from_secs(2));
    let part = |following: u32| {
        let header = FrameHeader { kind: MessageKind::Fragment, grant: 17 }.emit_before(following);
        HistoryStep::Environment(1, EnvironmentStep::Hostile(WireBytes::of(&[&header[..], &[1; 8]].concat())))
    };
    for nth in 0..10 {
        history.step(part(12 - nth));
        history.settle();
        assert!(history.sides[1].is_open(), "part {nth}");
    }
    for _ in 0..4 {
        history.sides[1].advance(Duration::from_secs(1));
        history.settle();
    }
    let ended = history.sides[1].ended.as_ref().expect("the transfer timeout");
    assert!(matches!(ended.reason, Some(DisconnectReason::TransferTimeout)), "{ended:?}");
    history.part();
    history.sides.iter_mut().for_each(Side::check_home);
}

/// A large message may take longer than the transfer timeout, as long as the peer reports progress.
#[test]
fn a_message_that_moves_slowly_is_not_given_up() {
    let mut history = connected(16, 8);
    for side in &mut history.sides {
        side.config = side.config.clone().timeouts(|t| t.transfer = Duration::from_secs(2));
    }
    history.sides[0].offer(20 << 20, false);
    for _ in 0..30 {
        history.sides[0].device.answers = true;
        history.step(HistoryStep::Environment(0, EnvironmentStep::Arrive(1)));
        history.sides[0].device.answers = false;
        history.settle();
        history.sides.iter_mut().for_each(|side| side.advance(Duration::from_millis(200)));
    }
    let ended = history.sides[0].ended.as_ref().and_then(|ended| ended.reason.as_ref());
    assert!(ended.is_none() && history.sides[0].offers.is_empty(), "{ended:?}");
    history.part();
    history.sides.iter_mut().for_each(Side::check_home);
}

/// A peer that reports impossible progress violates the protocol. If such reports were accepted, a peer could pretend forever that it is
/// fetching a message.
#[test]
fn news_of_parts_that_cannot_be_is_refused() {
    const STRIDE: u64 = 4 << 20;
    let progress = |number, done| (MessageKind::Progress, TransferProgress { number, done }.emit());
    for (what, end_event) in [
        ("too small a part", &[progress(0, STRIDE - 1)][..]),
        ("the same part twice", &[progress(0, STRIDE), progress(0, STRIDE)]),
        ("the whole message, and more", &[progress(0, STRIDE), progress(0, 4 * STRIDE)]),
        ("an unknown message", &[progress(1, STRIDE)]),
    ] {
        let mut history = connected(16, 8);
        // `attack` delivers its messages to the passive side, so the passive side must be the side that offers a message.
        history.sides[1].offer(2 * STRIDE as usize, false);
        for (kind, payload) in end_event {
            assert!(history.sides[1].is_open(), "{what}");
            history.attack(*kind, 17, payload);
        }
        assert!(!history.sides[1].is_open(), "{what}");
        history.part();
        let ended = history.sides[1].ended.as_ref().expect(what);
        assert!(matches!(ended.reason, Some(DisconnectReason::PeerViolation(_))), "{what}: {ended:?}");
        history.sides.iter_mut().for_each(Side::check_home);
    }
}

/// Fragments that do not form a valid message end the connection.
#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let fragment = |following: u32, payload: &[u8]| {
        let header = FrameHeader { kind: MessageKind::Fragment, grant: 17 }.emit_before(following);
        WireBytes::of(&[&header[..], payload].concat())
    };
    let data = WireBytes::of(&FrameHeader { kind: MessageKind::Data, grant: 17 }.emit());
    let ping = WireBytes::of(&FrameHeader { kind: MessageKind::Ping, grant: 17 }.emit());
    for (what, messages) in [
        ("a last part alone", &[fragment(0, &[1])][..]),
        ("an empty part", &[fragment(1, &[])]),
        ("a part is missing", &[fragment(3, &[1]), fragment(1, &[1])]),
        ("a part came twice", &[fragment(3, &[1]), fragment(3, &[1])]),
        ("more parts than credits", &[fragment(16, &[1])]),
        ("data between parts", &[fragment(1, &[1]), data]),
        ("a ping between parts", &[fragment(1, &[1]), ping]),
    ] {
        let mut history = connected(16, 8);
        for &message in messages {
            assert!(history.sides[1].is_open(), "{what}");
            history.step(HistoryStep::Environment(1, EnvironmentStep::Hostile(message)));
            history.settle();
        }
        let ended = history.sides[1].ended.as_ref().expect(what);
        assert!(matches!(ended.reason, Some(DisconnectReason::PeerViolation(_))), "{what}: {ended:?}");
        history.part();
        history.sides.iter_mut().for_each(Side::check_home);
    }
}

/// A peer offers messages, and grants no credits for the reports that these messages were fetched. The number of messages that are fetched
/// and not reported never exceeds the maximum number of transfers in flight.
#[test]
fn a_peer_that_cannot_be_told_of_what_was_fetched_fills_no_memory() {
    let mut history = connected(16, 8);
    let mut limit = 16;
    for number in 0..1000 {
        let offer = Offer { number, region: RemoteRegion { address: 0, len: 100, key: 1 }, tag: None };
        let [victim, attacker] = pair(&mut history.sides, 1);
        // The peer answers the Reads. The credits that it grants are enough for control messages only.
        attacker.device.wire.push_back(Item::Response);
        limit = limit.max(limit - victim.credits() + CONTROL_CREDITS);
        history.attack(MessageKind::Offer, limit, offer.emit(&mut [0; MAX_CONTROL]));
    }
    history.part();
    history.sides.iter_mut().for_each(Side::check_home);
}
