//! One side of a history: a connection, the parts of the reactor that it needs, and a program that uses the connection and checks its
//! callbacks.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_transport::cm::DisconnectCause;
use rdma_transport::mem::Memory;
use rdma_transport::mr::LocalKey;
use rdma_transport::qp::SrqId;
use rdma_transport::slab::Key;
use rdma_transport::wc::WcStatus;

use super::device::{Completion, DeviceModel};
use crate::config::{Config, Framing};
use crate::conn::deadlines::Due;
use crate::conn::effects::{Action, Effects, Event};
use crate::conn::greeting::Greeting;
use crate::conn::life::Silence;
use crate::conn::recv_queue::RecvQueue;
use crate::conn::state::State;
use crate::conn::{Connection, Env, Opening, Role};
use crate::device::Buffers;
use crate::device::pool::{Buffer, Exhausted, Pool};
use crate::device::srq::queue::SharedReceives;
use crate::error::DisconnectReason;
use crate::id::{ConnectionId, ReactorTag, SendId, TransferId};
use crate::limits::{CONTROL_CREDITS, MAX_TRANSFERS, buffer_len};
use crate::memory::landing::Offered;
use crate::memory::list::TransferOutcome;
use crate::memory::region::{DropChannel, Region, RemoteRegion};
use crate::memory::region_memory::{RegionBytes, RegionMemory};
use crate::seam::wake::{NoWake, WakeFlag};
use crate::security::Security;
use crate::stats::Stats;

/// The largest payload of a message in one buffer, in bytes.
pub(super) const BUFFER: usize = 32;

/// The settings of a side.
#[derive(Clone, Debug)]
pub(super) struct SideOptions {
    pub(super) receive_depth: u32,
    pub(super) send_depth: u32,
    pub(super) framing: Framing,
    pub(super) shared: bool,
    pub(super) in_order: bool,
    pub(super) quiet: bool,
    pub(super) abrupt: bool,
    /// True if the active side comes up only when the device of the peer has acknowledged its hello.
    pub(super) probes: bool,
}

/// Something that one program has sent and the program of the peer must receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Said {
    Message {
        tag: u32,
        len: usize,
    },
    /// A message in several buffers.
    Cut {
        tag: u32,
        len: usize,
    },
    Large {
        len: usize,
    },
    Immediate {
        value: u32,
    },
}

impl Said {
    /// Returns true if the peer's program may receive `heard` when this side has sent `self`. A tag of 0 in `self` matches any tag.
    pub(super) fn matches(self, heard: Self) -> bool {
        match (self, heard) {
            (Self::Message { tag, len }, Self::Message { tag: other, len: heard }) => {
                len == heard && (tag == 0 || tag == other)
            }
            (Self::Cut { tag, len }, Self::Cut { tag: other, len: heard }) => {
                len == heard && (tag == 0 || tag == other)
            }
            (said, heard) => said == heard,
        }
    }
}

/// The way in which the program treats the messages that it receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Manner {
    LetGo,
    Keep,
    /// The program keeps the message, and releases it before its callback returns.
    GiveBackInside,
    /// The program closes the connection in the callback.
    Close,
}

/// The end of the connection, as it was reported to the program. No callback may follow.
#[derive(Debug)]
pub(super) struct Ended {
    /// The reason of `on_disconnect`. `None` if the connection was never up.
    pub(super) reason: Option<DisconnectReason>,
}

/// One side of a history: its connection, its device, and its program.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) conn: Option<Connection>,
    pub(super) config: Config,
    pub(super) buffers: Buffers,
    pub(super) effects: Effects,
    pub(super) stats: Stats,
    pub(super) now: Instant,
    /// The time at which the timer of the connection expires. The side sets the timer as the driver
    /// does.
    timer: Option<Instant>,
    pub(super) device: DeviceModel,
    /// The number of buffers that the connection and the shared queue may use.
    pub(super) promised: usize,
    pub(super) drop_channel: DropChannel,
    // The way in which the program treats the messages that it receives. This field and the fields below it are the state of the program.
    pub(super) manner: Manner,
    pub(super) kept: Vec<Buffer>,
    /// True if the side has no memory to fetch large messages.
    pub(super) starved: bool,
    pub(super) announced: bool,
    /// True if the program has called `close`.
    pub(super) closed: bool,
    /// True if all sends that were accepted before the close have been sent.
    pub(super) drained: bool,
    pub(super) refused: bool,
    /// True if the ends of all sends are reported to the program now, even those of copied messages.
    pub(super) telling: bool,
    /// True if the peer has not violated the protocol. In this case, each message that arrives must be one that the peer's program has
    /// sent.
    pub(super) trusts: bool,
    /// The sends that have not ended, in order, except large messages. An id is `None` if the program does not know it.
    pub(super) sends: VecDeque<Option<SendId>>,
    /// The large messages that were offered to the peer and have not ended.
    pub(super) offers: Vec<SendId>,
    /// The large messages that are being read into memory of the program, each with that memory.
    pub(super) landings: Vec<(Offered, Region)>,
    /// The lists that have ended, in the order of their ends.
    pub(super) transferred: Vec<(TransferId, TransferOutcome)>,
    /// Everything that was sent and that the peer has not received yet.
    pub(super) said: VecDeque<Said>,
    pub(super) heard: VecDeque<Said>,
    pub(super) tag: u32,
    pub(super) writes: u32,
    /// The number of receives that have completed successfully.
    pub(super) arrivals: u64,
    pub(super) last_arrival: Instant,
    pub(super) settled: u32,
    pub(super) source: Region,
    pub(super) sink: Region,
    pub(super) ended: Option<Ended>,
}

pub(super) fn region(drop_channel: &DropChannel, len: usize, key: u32) -> Region {
    // A large region gets a separate mapping, so that the system never allocates the pages that a history does not use.
    let memory = if len > 1 << 16 { Memory::new(len) } else { Memory::from_vec(vec![0; len]) };
    let memory = Arc::new(memory.expect("memory"));
    let remote = RemoteRegion { address: memory.as_ptr() as u64, len: len as u64, key };
    Region::new(
        RegionMemory::new(RegionBytes::Own(memory), len),
        Key::new(key, 1),
        LocalKey(key),
        remote,
        0,
        drop_channel.clone(),
    )
}

impl Side {
    pub(super) fn new(role: Role, terms: &SideOptions, now: Instant) -> Self {
        let config = Config::default()
            .buffer_size(BUFFER as u32)
            .receive_depth(terms.receive_depth)
            .send_depth(terms.send_depth)
            .shared_receives(terms.shared.then_some(terms.receive_depth.max(8) * 2))
            .quiet_sends(terms.quiet);
        let mut pool = Pool::new(buffer_len(BUFFER as u32), 1 << 20);
        let shared = config.shared_receives.unwrap_or(0);
        let own = if terms.shared { 0 } else { config.receive_depth };
        let promised = (config.send_slots() + own + shared) as usize;
        let mut memory = None;
        pool.reserve(promised, |bytes| {
            let slab = Arc::new(Memory::new(bytes).map_err(|_| Exhausted)?);
            memory = Some(Arc::clone(&slab));
            Ok::<_, Exhausted>((slab, LocalKey(1)))
        })
        .expect("room for a few buffers");
        let memory = memory.expect("one slab");
        let queue = terms.shared.then(|| {
            let srq = SrqId(Key::new(0, 1));
            SharedReceives::new(&mut pool, srq, shared, buffer_len(BUFFER as u32))
        });
        let (dropped, _) = crossbeam_channel::unbounded();
        let drop_channel = DropChannel { dropped, wake: Arc::new(WakeFlag::new(Arc::new(NoWake))) };
        let id = ConnectionId::new(ReactorTag::next(), 0, 1);
        let peer = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let framing = terms.framing;
        let (security, probes) = (Security::Plain, terms.probes);
        let opening = Opening { framing, peer, host: None, private_data: Vec::new(), probes, security };
        let mut conn = Connection::new(id, role, opening, &config, now);
        conn.deadlines.step = Some(now + Duration::from_secs(10));
        let mut side = Self {
            conn: Some(conn),
            device: DeviceModel::new(memory, terms.in_order, terms.shared),
            config,
            buffers: Buffers { pool, shared: queue },
            effects: Effects::default(),
            stats: Stats::default(),
            now,
            timer: Some(now + Duration::from_secs(10)),
            promised,
            manner: Manner::LetGo,
            kept: Vec::new(),
            starved: false,
            announced: false,
            closed: false,
            drained: false,
            refused: false,
            telling: false,
            trusts: true,
            sends: VecDeque::new(),
            offers: Vec::new(),
            landings: Vec::new(),
            transferred: Vec::new(),
            said: VecDeque::new(),
            heard: VecDeque::new(),
            tag: 0,
            writes: 0,
            arrivals: 0,
            last_arrival: now,
            settled: 0,
            source: region(&drop_channel, 64, 1),
            sink: region(&drop_channel, 64, 2),
            drop_channel,
            ended: None,
        };
        side.device.abrupt = terms.abrupt;
        side.create_queue_pair(terms);
        side
    }

    /// Creates the queue pair of the connection, as the driver does.
    fn create_queue_pair(&mut self, terms: &SideOptions) {
        let conn = self.conn.as_mut().expect("it is new");
        if conn.is_active() {
            assert!(conn.resolved());
        }
        if let Some(shared) = &mut self.buffers.shared {
            let claim = shared.claims.join(self.now).expect("room for one");
            let window = claim.receives();
            conn.set_queues((self.config.send_slots(), true), RecvQueue::shared(claim), window);
            self.post_shared();
            return;
        }
        let size = if terms.framing == Framing::Raw { BUFFER } else { buffer_len(BUFFER as u32) };
        conn.set_queues((self.config.send_slots(), true), RecvQueue::own(self.config.receive_depth, size), 0);
        self.post_receives();
        self.input(|conn, env| conn.grant_initial(env.config.receive_depth));
    }

    pub(super) fn greeting(&self) -> Vec<u8> {
        self.conn.as_ref().expect("it is new").greeting(&[], BUFFER as u32, false, &self.config)
    }

    /// Processes the peer's greeting, as the driver does when it accepts a request.
    pub(super) fn agree(&mut self, request: &[u8]) {
        let raw = Greeting::reject(crate::error::RejectReason::Refused, request);
        let conn = self.conn.as_mut().expect("it is new");
        let greeting = match conn.framing() {
            Framing::Raw => raw,
            Framing::Credits => Greeting::parse(request).and_then(Greeting::checked).expect("our own greeting"),
        };
        conn.agree(&greeting, BUFFER as u32, false, &self.config);
    }

    // Tasks of the driver.

    /// Passes an input to the connection, and executes the actions that the connection requests. Returns the result of `input`, or `None`
    /// if the connection has ended.
    pub(super) fn input<R>(&mut self, input: impl FnOnce(&mut Connection, &mut Env<'_>) -> R) -> Option<R> {
        let Self { conn, config, buffers, effects, stats, now, .. } = self;
        let mut env = Env { now: *now, config, device: 0, buffers, effects, stats };
        let result = input(conn.as_mut()?, &mut env);
        while let Some((_, action)) = self.effects.actions.pop_front() {
            self.act(action);
        }
        Some(result)
    }

    /// Passes an input to the connection like [`Side::input`], and then calls the pending callbacks.
    pub(super) fn tell<R>(&mut self, input: impl FnOnce(&mut Connection, &mut Env<'_>) -> R) -> Option<R> {
        let result = self.input(input);
        while let Some((_, event)) = self.effects.next_event() {
            self.event(event);
        }
        result
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Flush => {
                if std::mem::take(&mut self.device.up) {
                    self.device.end_event = Some(DisconnectCause::Local);
                    if self.device.abrupt {
                        self.device.wire.clear();
                    }
                }
                let end = self.now + self.config.timeouts.flush;
                self.conn.as_mut().expect("it wants a flush").deadlines.step = Some(end);
                self.set_timer();
            }
            Action::Settled => self.settled += 1,
            Action::Discard(region) => drop(region),
            Action::Deadline => self.set_timer(),
            Action::Ending | Action::Invalidated { .. } | Action::Unused(_) | Action::NoMemory | Action::Ring => {}
        }
    }

    /// Sets the timer to the earliest deadline of the connection.
    fn set_timer(&mut self) {
        self.timer = self.conn.as_ref().and_then(Connection::next_timeout);
    }

    fn post_receives(&mut self) {
        let mut chain = Vec::new();
        let count = self.input(|conn, env| {
            let id = conn.id();
            let count = conn.receives.prepare(id, &mut env.buffers.pool, &mut chain);
            conn.receives_posted(count);
            count
        });
        assert!(count.is_some_and(|count| count as usize == chain.len()), "every receive has a buffer promised");
        self.device.post_receives(&chain);
    }

    fn post_shared(&mut self) {
        let mut chain = Vec::new();
        if let Some(shared) = &mut self.buffers.shared {
            shared.prepare(&self.buffers.pool, &mut chain);
        }
        self.device.post_receives(&chain);
    }

    /// Posts the collected work requests, as stage 11 of a turn does. Returns false if there was nothing to post.
    pub(super) fn post(&mut self) -> bool {
        self.post_shared();
        assert!(self.effects.to_post.len() <= 1, "marked twice");
        if self.effects.to_post.pop().is_none() {
            return false;
        }
        self.find_memory();
        let sends_first = self.input(|conn, _| conn.sends_first()) == Some(true);
        if sends_first {
            self.post_sends();
        }
        self.input(Connection::renew_claim);
        if self.input(|conn, _| conn.receives_due()) == Some(true) {
            self.post_receives();
        }
        if !sends_first {
            self.input(Connection::pump_transfers);
            if self.conn.as_ref().is_some_and(Connection::has_lists) {
                self.input(Connection::pump_lists);
            }
            self.post_sends();
        }
        self.input(|conn, _| conn.unmark());
        true
    }

    pub(super) fn post_sends(&mut self) {
        let device = &mut self.device;
        let Self { conn, config, buffers, effects, stats, now, .. } = self;
        let mut env = Env { now: *now, config, device: 0, buffers, effects, stats };
        let Some(conn) = conn.as_mut() else { return };
        let chain = conn.ready_chain(&mut env);
        device.post_sends(chain);
        let count = chain.len();
        conn.sends.taken(count);
    }

    /// Does what `Context::flush` does.
    pub(super) fn flush_now(&mut self) {
        self.input(|conn, _| conn.corked = false);
        self.post_sends();
    }

    fn find_memory(&mut self) {
        while let Some(len) =
            self.conn.as_ref().filter(|conn| !self.starved && conn.state().is_open()).and_then(Connection::wants_memory)
        {
            let region = Box::new(region(&self.drop_channel, len, 3));
            self.input(|conn, _| conn.give_memory(*region));
        }
    }

    pub(super) fn feed(&mut self) {
        if std::mem::take(&mut self.starved) {
            self.input(|conn, env| conn.mark(env));
        }
    }

    /// Handles the next completion. Returns false if there is none.
    pub(super) fn poll(&mut self) -> bool {
        let Some(completion) = self.device.completions.pop_front() else { return false };
        let now = self.now;
        let taken = match completion {
            Completion::Send { sequence, status } => {
                let result = if status.is_success() { Ok(()) } else { Err(status.into()) };
                self.tell(|conn, env| conn.sent(sequence, result, env))
            }
            Completion::Receive { slot, completed } => {
                if completed.result.is_ok() {
                    self.arrivals += 1;
                    self.last_arrival = now;
                }
                self.tell(|conn, env| conn.received(slot, &completed, env))
            }
        };
        assert_ne!(taken, Some(false), "{completion:?} is of nothing that was posted");
        self.ask();
        true
    }

    /// If a send was refused and would be accepted now, notifies the program.
    fn ask(&mut self) {
        while self.effects.to_ask.pop_front().is_some() {
            if self.conn.as_ref().is_some_and(|conn| conn.is_unblocked().is_some()) {
                self.tell(Connection::unblock);
            }
        }
    }

    /// Delivers the connection manager's event that the connection has ended. Returns false if there is none.
    pub(super) fn deliver_end_event(&mut self) -> bool {
        let Some(cause) = self.device.end_event.take() else { return false };
        self.tell(|conn, env| conn.disconnected(cause, env)).is_some()
    }

    /// Advances the end of the connection, as stage 10 of a turn does. Returns true if the connection has ended.
    pub(super) fn end(&mut self) -> bool {
        if let Some(conn) = self.conn.as_ref().filter(|conn| conn.is_drained()) {
            self.drained = conn.sends.is_empty();
            let abrupt = self.device.abrupt;
            self.tell(|conn, env| conn.leave(abrupt, env));
        }
        let empty = self.device.completions.is_empty();
        let over = empty && self.conn.as_ref().is_some_and(Connection::is_flushed);
        if over {
            self.finish();
            let reason = self.ended.as_ref().and_then(|ended| ended.reason.as_ref());
            let guess = DisconnectReason::Transport(DisconnectCause::WorkRequest(WcStatus::Flushed.into()));
            assert_ne!(reason, Some(&guess), "the connection manager knew better");
        }
        over
    }

    /// Advances the time. Then handles the timer of the connection, if it has expired.
    pub(super) fn advance(&mut self, time: Duration) {
        self.now += time;
        if self.timer.is_none_or(|at| at > self.now) {
            return;
        }
        while let Some(due) = self.tell(Connection::due).flatten() {
            assert!(matches!(due, Due::Step(_)), "no program has a limit for its close");
            self.step_due();
        }
        self.set_timer();
    }

    /// Handles the deadline `step` of the connection.
    fn step_due(&mut self) {
        if self.conn.as_ref().is_some_and(|conn| matches!(conn.state(), State::Closing(_))) {
            // The flush timeout has expired. The side handles the completions that are in the queue now, and does not wait for later ones.
            while self.poll() {}
            return self.finish();
        }
        if self.device.abrupt {
            // The peer did not end the connection in time. Messages in flight to the peer may be lost, so the test no longer requires their
            // delivery.
            self.drained = false;
        }
        let caught_up = self.device.completions.is_empty();
        let silence = Silence { heard: None, caught_up, since: None, late: Duration::ZERO };
        self.tell(|conn, env| conn.timeout(&silence, env));
    }

    fn finish(&mut self) {
        self.device.up = false;
        let last = self.tell(Connection::finish).flatten();
        while let Some((_, event)) = self.effects.next_event() {
            self.event(event);
        }
        let Some(mut conn) = self.conn.take() else { return };
        let (announced, active) = (conn.state().is_announced(), conn.is_active());
        assert_eq!(announced, self.announced, "{:?}", conn.state());
        let reason = match last {
            Some(Event::Disconnected(reason)) if announced => Some(*reason),
            Some(Event::ConnectError(_)) if !announced && active => None,
            None if !announced && !active => None,
            last => panic!("{last:?} is no end of {:?}", conn.state()),
        };
        assert!(self.sends.is_empty() && self.offers.is_empty(), "sends without an end: {:?}", self.sends);
        assert!(self.landings.is_empty(), "places without an end: {:?}", self.landings);
        // `Action::Settled` is requested only for a passive connection that was up, and at most once.
        assert!(self.settled <= u32::from(!active && announced), "settled {} times", self.settled);
        let lost = matches!(reason, Some(DisconnectReason::KeepaliveTimeout));
        let silence = self.now.saturating_duration_since(self.last_arrival);
        assert!(!lost || silence >= self.config.timeouts.keepalive, "given up {silence:?} after it was heard");
        self.ended = Some(Ended { reason });
        // Releases the claim on the shared queue, and the buffers, as the driver does.
        let kept = conn.receives.kept();
        if let Some(claim) = conn.receives.claim() {
            let claimed = claim.receives();
            let shared = self.buffers.shared.as_mut().expect("the queue of the claim");
            shared.claims.forget(claim);
            shared.claims.take_back(claimed - kept.min(claimed));
        }
        conn.receives.empty(&mut self.buffers.pool);
        self.effects.to_post.clear();
        self.effects.to_ask.clear();
    }

    // Checks.

    /// Checks the conditions that must hold after every step.
    pub(super) fn check(&mut self) {
        let Self { conn, config, buffers, device, promised, sink, source, timer, .. } = self;
        let used = buffers.pool.capacity() - buffers.pool.available();
        assert!(used <= *promised, "{used} buffers in use, {promised} promised");
        let Some(conn) = conn else { return };
        let next = conn.next_timeout();
        assert!(next.is_none_or(|next| timer.is_some_and(|at| at <= next)), "{next:?}, {timer:?}");
        assert!(conn.sends.posted() <= config.send_slots() as usize, "more sends than the queue pair has places");
        let outstanding = conn.rx.outstanding() as usize;
        let arrived = device.completions.iter().filter(|entry| matches!(entry, Completion::Receive { .. })).count();
        let has = device.posted_receives() + arrived;
        assert!(
            !device.up || conn.framing() == Framing::Raw || outstanding <= has,
            "{outstanding} promised, {has} there"
        );
        let [outgoing, incoming, held, fetched] = conn.transfers.queued();
        assert!(outgoing <= MAX_TRANSFERS && incoming <= MAX_TRANSFERS && fetched <= MAX_TRANSFERS);
        let most = config.receive_depth as usize + MAX_TRANSFERS;
        assert!(held <= most, "{held} messages are held back, of {most}");
        let joining = conn.transfers.joining().map_or(0, |joining| joining.parts.len());
        assert!(joining <= config.receive_depth as usize, "{joining} parts of a message");
        let early = conn.state().setup().map_or(0, |setup| setup.early.len());
        assert!(early <= config.receive_depth as usize);
        if device.uses(sink.remote()) {
            assert!(sink.bytes().is_none(), "a device may write what a program may look at");
        }
        if device.uses(source.remote()) {
            assert!(source.bytes_mut().is_none(), "a device may read what a program may change");
        }
    }

    /// Returns true if the peer must be able to send data when both sides are idle. This is not
    /// required of a side that has no memory for large messages, that uses a shared receive queue,
    /// or whose program keeps so many messages that at most four receives are left.
    pub(super) fn must_let_peer_send(&self) -> bool {
        let depth = self.config.receive_depth as usize;
        !self.starved && self.buffers.shared.is_none() && self.kept.len() + CONTROL_CREDITS as usize + 2 <= depth
    }

    /// Returns true if the program knows the connection: the program has opened it, or was notified that it is up.
    pub(super) fn is_known(&self) -> bool {
        self.announced || self.conn.as_ref().is_some_and(Connection::is_active)
    }

    pub(super) fn is_corked(&self) -> bool {
        self.conn.as_ref().is_some_and(|conn| conn.corked)
    }

    /// Returns the number of messages that the peer allows this side to send.
    pub(super) fn credits(&self) -> u32 {
        self.conn.as_ref().map_or(0, |conn| conn.tx.available())
    }

    /// Checks that the program of an idle side waits for nothing: neither for the end of a send or of a large message, nor for an
    /// `on_writable`.
    pub(super) fn check_quiet(&self, why: &str) {
        assert!(
            self.sends.is_empty() && self.offers.is_empty() && self.landings.is_empty(),
            "{why}: {:?}, {:?} and {:?} never end",
            self.sends,
            self.offers,
            self.landings
        );
        assert!(!self.refused, "{why}: the program was never notified that it may send again");
    }

    /// Checks that all buffers are returned to the pool after the connection has ended. Before the check, the program releases all messages
    /// that it keeps.
    pub(super) fn check_home(&mut self) {
        self.release(usize::MAX);
        self.post_shared();
        let shared = self.buffers.shared.as_ref().map_or(0, SharedReceives::posted);
        let pool = &self.buffers.pool;
        assert_eq!(pool.available() + shared, pool.capacity(), "buffers are lost");
        assert_eq!(shared, self.config.shared_receives.unwrap_or(0) as usize, "shared receives are lost");
    }
}
