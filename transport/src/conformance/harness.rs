//! [`Harness`]: the providers of one case, driven in the way in which a reactor drives them.
//!
//! A side is one provider with its memory. The harness drives a side when one of its channels has
//! an edge, when its deadline has passed, and when its last `progress` has returned true. The
//! harness arms a completion queue, polls it once more, and from then on polls it only after the
//! queue's event. So a case hangs if an edge or an event is lost. In every case the [`Ledger`] of
//! each side checks each completion.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

pub(super) use super::cm_events::{IncomingRequest, disconnected, failed, port_in_use, requested};
use super::environment::Environment;
use super::factory::{Deviation, Factory};
use super::ledger::{Ledger, LedgerSend, RecvRanges};
use crate::caps::Capabilities;
use crate::cm::{CmEvent, CmEventKind, CmId, ConnectParam, DisconnectCause, ListenParam, PathOptions, ReadDepth};
use crate::cq::{CqAttr, Notify};
use crate::handle::{CqId, DeviceId, QpId, SrqId};
use crate::mr::{Access, LocalKey, MemoryRegion};
use crate::provider::{Channel, Drive, PostError, Posted, Provider};
use crate::qp::QpAttr;
use crate::slab::Key;
use crate::station::Station;
use crate::wc::{WcStatus, WorkCompletion};
use crate::wr::{RemoteAddress, SendClass, SendFlags, SendOp};

/// The index of the side that connects.
pub(super) const ACTIVE: usize = 0;
/// The index of the side that listens.
pub(super) const PASSIVE: usize = 1;
/// The index of a side that accepts connect requests which another side has detached.
pub(super) const THIRD: usize = 2;

/// The depth of each send and receive queue.
pub(super) const DEPTH: usize = 16;
/// The length of a receive, in bytes.
pub(super) const SLOT: usize = 256;
/// The length of the memory of a side, in bytes.
const MEMORY: usize = 1 << 20;
/// The maximum number of events that a getter returns before the harness reports an endless loop.
const MANY: usize = 100_000;
/// The maximum number of attempts to connect. An attempt may fail, because the kernel's connection manager chooses a
/// local port that TCP may already use.
const TRIES: usize = 5;

/// One end of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnectionEnd {
    pub(super) side: usize,
    pub(super) id: CmId,
    pub(super) qp: QpId,
    pub(super) cq: CqId,
    pub(super) srq: Option<SrqId>,
}

/// The attributes of the queues of one end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spec {
    /// The number of receives, each of [`SLOT`] bytes, that are posted at the start.
    pub(super) receives: usize,
    pub(super) max_inline: u32,
    pub(super) srq: Option<SrqId>,
    /// The completion queue of the end. With `None`, the harness creates a new one for this end.
    pub(super) cq: Option<CqId>,
}

impl Default for Spec {
    fn default() -> Self {
        Self { receives: DEPTH, max_inline: 0, srq: None, cq: None }
    }
}

/// The way in which the harness polls a completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PollMode {
    /// The queue may have completions. The harness polls it in the next turn.
    Awake,
    /// The queue was empty after it was armed. The harness polls it after its event.
    Armed,
    /// The harness does not arm or poll the queue: the case does.
    Manual,
}

/// A completion that the harness has polled and the case has not used yet. `ranges` is the memory
/// of a receive; `None` for a send.
#[derive(Debug)]
struct PolledCompletion {
    wc: WorkCompletion,
    ranges: Option<RecvRanges>,
}

/// One side of a case: its provider, and everything that the provider has reported.
#[derive(Debug)]
pub(super) struct HarnessSide {
    pub(super) station: Station,
    /// The local key of the region that covers the whole memory.
    key: LocalKey,
    pub(super) device: DeviceId,
    pub(super) capabilities: Capabilities,
    pub(super) address: SocketAddr,
    events: VecDeque<CmEvent>,
    done: VecDeque<PolledCompletion>,
    queues: BTreeMap<Key, PollMode>,
    /// The completion queues that had an event, in the order of the events.
    pub(super) notified: Vec<CqId>,
    ledger: Ledger,
    /// The vector into which completions were last polled. Its first `kept` completions (0 or 1)
    /// were in it before that poll, and the poll has appended the others.
    polled: Vec<WorkCompletion>,
    kept: usize,
    /// The slab keys of the connection-manager ids that the case has destroyed.
    gone: BTreeSet<Key>,
    /// True if the harness must drive the side in the next step.
    due: bool,
    /// The offset of the first byte of the side's memory that is not allocated yet.
    free: usize,
}

impl HarnessSide {
    /// Polls a completion queue once. Returns the number of completions.
    fn poll(&mut self, cq: CqId) -> usize {
        const MOST: usize = 7;
        // In every second poll, the vector has an old completion, so the provider must append to it. In the other polls
        // the vector is empty, so the provider may swap its buffer.
        let mut out = std::mem::take(&mut self.polled);
        let kept = out.len().min(1 - self.kept);
        out.truncate(kept);
        let old = out.first().map(|wc| wc.wr_id);
        let count = self.station.provider().poll_cq(cq, MOST, &mut out).expect("a completion queue to poll");
        assert!(count == out.len() - kept && count <= MOST, "{count} of {MOST} completions: {out:?}");
        assert!(kept == 0 || out.first().map(|wc| wc.wr_id) == old, "what was in the vector stays: {out:?}");
        for wc in &out[kept..] {
            let ranges = self.ledger.complete(cq, wc);
            self.done.push_back(PolledCompletion { wc: *wc, ranges });
        }
        (self.polled, self.kept) = (out, kept);
        count
    }

    /// Does nothing unless the queue's mode is `Awake`. Polls the queue until it is empty, arms it, and polls it again.
    /// Repeats this until the queue is empty after it was armed, and sets its mode to `Armed`.
    fn drain(&mut self, cq: CqId) {
        while self.queues.get(&cq.0) == Some(&PollMode::Awake) {
            while self.poll(cq) > 0 {}
            self.station.provider().req_notify(cq, Notify::Any).expect("a completion queue to arm");
            if self.poll(cq) == 0 {
                self.queues.insert(cq.0, PollMode::Armed);
            }
        }
    }

    fn turn(&mut self, now: Instant) {
        self.due = self.station.provider().progress(now, Drive::Full);
        for nth in 0.. {
            let Some(event) = self.station.provider().next_cm_event(now).expect("the next event") else { break };
            assert!(nth < MANY, "events without end: {event:?}");
            let late = matches!(event.kind, CmEventKind::Disconnected(_) | CmEventKind::TimewaitExit);
            assert!(late || !self.gone.contains(&event.id.0), "an event of an id that is destroyed: {event:?}");
            if !self.gone.contains(&event.id.0) && !matches!(event.kind, CmEventKind::TimewaitExit) {
                self.events.push_back(event);
            }
        }
        self.take_notifications();
        for cq in self.queues.keys().copied().collect::<Vec<_>>() {
            self.drain(CqId(cq));
        }
    }

    /// Reads the events of completion queues. Sets each of these queues that is `Armed` to `Awake`.
    pub(super) fn take_notifications(&mut self) {
        let device = self.device;
        for nth in 0.. {
            let Some(cq) = self.station.provider().next_completion_event(device).expect("the next event") else {
                break;
            };
            assert!(nth < MANY, "events without end: {cq:?}");
            self.notified.push(cq);
            if let Some(watch) = self.queues.get_mut(&cq.0).filter(|watch| **watch == PollMode::Armed) {
                *watch = PollMode::Awake;
            }
        }
    }

    /// Returns the bytes of a part of the memory.
    pub(super) fn bytes(&mut self, part: &Range<usize>) -> Vec<u8> {
        let mut out = Vec::new();
        self.station.read(part.clone(), &mut out).expect("a part of the memory");
        out
    }

    /// Calls [`write_now`](crate::roles::ImmediateSends::write_now) to write a part of the memory to the peer, and then
    /// overwrites the part. Returns false if the provider could not write without a work request.
    pub(super) fn write_now(&mut self, end: &ConnectionEnd, part: &Range<usize>, remote: RemoteAddress) -> bool {
        let written = self.station.write_now(end.qp, part.clone(), remote).expect("a part of the memory");
        self.station.write(part.start, &vec![0xee; part.len()]).expect("a part of the memory");
        written
    }

    /// Allocates `len` bytes of the memory that no allocation has used before.
    pub(super) fn allocate(&mut self, len: usize) -> Range<usize> {
        let start = self.free;
        self.free = (start + len.max(1)).next_multiple_of(64);
        assert!(self.free <= MEMORY, "the case uses too much memory");
        start..start + len
    }

    /// Allocates memory for `bytes`, and copies the bytes to it.
    pub(super) fn allocate_with(&mut self, bytes: &[u8]) -> Range<usize> {
        let range = self.allocate(bytes.len());
        self.station.write(range.start, bytes).expect("a part of the memory");
        range
    }

    /// Makes later work requests use the local key of `region`. Returns the local key of the region that covers the
    /// whole memory. With this key the case can undo the change.
    pub(super) fn use_key(&mut self, region: MemoryRegion) -> LocalKey {
        self.station.use_key(region.local_key);
        self.key
    }

    /// Registers a part of the memory for access by peers. Returns the region, and the address by which peers name the
    /// part.
    pub(super) fn expose(&mut self, part: &Range<usize>, access: Access) -> (MemoryRegion, RemoteAddress) {
        let region = self.station.expose_range(self.device, part.clone(), access).expect("a region");
        (region, RemoteAddress { address: self.station.address(part.start), key: region.remote_key })
    }
}

/// The providers of one case, driven as a reactor drives them.
#[derive(Debug)]
pub struct Harness {
    // The sides are dropped before the environment, because the environment watches their channels.
    sides: Vec<HarnessSide>,
    environment: Box<dyn Environment>,
    patience: Duration,
    /// For a case with a known deviation: the message of the wait that fails
    /// ([`Deviation::finds`](super::Deviation::finds)), and the timeout of this wait. `None` for
    /// other cases.
    known: Option<(&'static str, Duration)>,
    grace: Duration,
    ends: Vec<ConnectionEnd>,
    listener: Option<(CmId, SocketAddr)>,
    /// The `wr_id` of the work request that was posted last.
    last: u64,
}

impl Harness {
    pub(super) fn new(factory: &dyn Factory, sides: usize, known: Option<&Deviation>) -> Self {
        let (providers, mut environment) = factory.open(sides);
        assert_eq!(providers.len(), sides, "a provider for each side");
        let side = |(at, mut provider): (usize, Box<dyn Provider>)| {
            let address = factory.address(at);
            let device = provider.device_at(address.ip()).expect("the device of the address");
            for channel in [Channel::ConnectionManager, Channel::Completions(device)] {
                environment.watch(at, provider.channel(channel).expect("the descriptor of a channel"));
            }
            let capabilities = provider.device(device).expect("the device").capabilities;
            let mut station = Station::new(provider, MEMORY).expect("memory");
            let region = station.expose(device, Access::LOCAL_WRITE | Access::READ_SINK).expect("a region");
            let key = region.local_key;
            station.use_key(key);
            let (events, done, queues, notified, ledger, polled, gone) = Default::default();
            HarnessSide {
                station,
                key,
                device,
                capabilities,
                address,
                events,
                done,
                queues,
                notified,
                ledger,
                polled,
                kept: 0,
                gone,
                due: true,
                free: 0,
            }
        };
        let sides = providers.into_iter().enumerate().map(side).collect();
        let (patience, grace) = (factory.patience(), factory.grace());
        let known = known.map(|row| (row.finds, factory.short_patience()));
        Self { sides, environment, patience, known, grace, ends: Vec::new(), listener: None, last: 0 }
    }

    pub(super) fn side(&mut self, side: usize) -> &mut HarnessSide {
        &mut self.sides[side]
    }

    pub(super) fn provider(&mut self, side: usize) -> &mut dyn Provider {
        self.sides[side].station.provider()
    }

    pub(super) fn now(&mut self) -> Instant {
        self.environment.now()
    }

    // Functions that drive the sides.

    /// Drives the sides that are due. If no side is due, waits for an edge on a channel or for the
    /// deadline of a provider, at most until `until`, and marks the affected sides as due.
    fn step(&mut self, until: Instant) {
        let mut idle = true;
        for side in &mut self.sides {
            if side.due {
                side.turn(self.environment.now());
                idle = false;
            }
        }
        if !idle {
            return;
        }
        let deadline = |side: &mut HarnessSide| side.station.provider().next_deadline();
        let deadline = self.sides.iter_mut().filter_map(deadline).min();
        let mut edges = Vec::new();
        self.environment.wait(deadline.map_or(until, |deadline| deadline.min(until)), &mut edges);
        edges.into_iter().for_each(|side| self.sides[side].due = true);
        let now = self.environment.now();
        for side in &mut self.sides {
            side.due |= side.station.provider().next_deadline().is_some_and(|deadline| deadline <= now);
        }
    }

    /// Drives the sides until `ready` returns `Some`, and returns its value. Panics if the timeout passes first. `what`
    /// names the awaited event in the panic's message.
    #[track_caller]
    pub(super) fn wait_for<T>(&mut self, what: &str, mut ready: impl FnMut(&mut Self) -> Option<T>) -> T {
        let missing = format!("no {what}");
        let known = self.known.filter(|(finds, _)| *finds == missing);
        let end = self.now() + known.map_or(self.patience, |(_, patience)| patience);
        loop {
            if let Some(found) = ready(self) {
                return found;
            }
            if self.now() >= end {
                let seen = |side: &HarnessSide| format!("{:?} {:?}", side.events, side.done);
                panic!("{missing}: {:?}", self.sides.iter().map(seen).collect::<Vec<_>>());
            }
            self.step(end);
        }
    }

    /// Drives the sides for the time of [`Factory::grace`]. The calling case then checks that nothing has happened.
    pub(super) fn settle(&mut self) {
        let end = self.now() + self.grace;
        while self.now() < end {
            self.step(end);
        }
    }

    // Functions that wait for events.

    /// Waits for an event of a side for which `wanted` returns `Some`. Removes this event, and returns the value in the
    /// `Some`.
    #[track_caller]
    pub(super) fn wait_for_event<T>(&mut self, what: &str, side: usize, wanted: impl Fn(&CmEvent) -> Option<T>) -> T {
        self.wait_for(what, |harness| harness.take_event(side, &wanted))
    }

    /// Calls `wanted` with each event of a side that has arrived, in order. Removes the first event for which `wanted`
    /// returns `Some`, and returns the value in the `Some`. Returns `None` if `wanted` has returned `None` for every
    /// event.
    pub(super) fn take_event<T>(&mut self, side: usize, wanted: impl Fn(&CmEvent) -> Option<T>) -> Option<T> {
        let events = &mut self.sides[side].events;
        let (at, found) = events.iter().enumerate().find_map(|(at, event)| Some((at, wanted(event)?)))?;
        events.remove(at);
        Some(found)
    }

    #[track_caller]
    pub(super) fn established(&mut self, end: &ConnectionEnd) -> (Box<[u8]>, ReadDepth) {
        self.wait_for_event("Established", end.side, |event| match &event.kind {
            CmEventKind::Established { private_data, read_depth } if event.id == end.id => {
                Some((private_data.clone(), *read_depth))
            }
            _ => None,
        })
    }

    #[track_caller]
    pub(super) fn disconnected(&mut self, end: &ConnectionEnd) -> DisconnectCause {
        self.wait_for_event("Disconnected", end.side, |event| disconnected(event, end.id))
    }

    // Functions that establish connections.

    /// Makes a listener on a free port of `side`. Returns its id and its address.
    pub(super) fn listen(&mut self, side: usize) -> (CmId, SocketAddr) {
        let address = self.sides[side].address;
        let listener = self.provider(side).listen(address, &ListenParam::default()).expect("a listener");
        let bound = self.provider(side).local_address(listener).expect("the address of a listener");
        assert_ne!(bound.port(), 0, "port 0 takes a free one");
        (listener, SocketAddr::new(address.ip(), bound.port()))
    }

    /// Returns the listener of the passive side, and its address. The first call makes the listener.
    pub(super) fn listener(&mut self) -> (CmId, SocketAddr) {
        let listener = self.listener.unwrap_or_else(|| self.listen(PASSIVE));
        *self.listener.insert(listener)
    }

    /// Starts a connection attempt that fails if it is not established within the time `within`. Waits until the
    /// address `to` is resolved, and returns the id of the attempt.
    #[track_caller]
    pub(super) fn resolved(&mut self, to: SocketAddr, within: Duration) -> CmId {
        let deadline = self.now() + within;
        self.resolved_by(to, deadline).expect("it is resolved in time")
    }

    /// Starts a connection attempt that fails at `deadline`. Waits until the address `to` is resolved, and returns the
    /// id of the attempt. Returns `None` if the deadline passes before the address is resolved.
    #[track_caller]
    pub(super) fn resolved_by(&mut self, to: SocketAddr, deadline: Instant) -> Option<CmId> {
        let id = self.provider(ACTIVE).resolve(to, &PathOptions::default(), deadline).expect("an attempt");
        let device = self.wait_for_event("Resolved", ACTIVE, |event| match event.kind {
            CmEventKind::Resolved { device } if event.id == id => Some(Some(device)),
            _ => failed(event, id).map(|_| None),
        });
        let Some(device) = device else {
            self.destroy_id(ACTIVE, id);
            return None;
        };
        assert_eq!(device, self.sides[ACTIVE].device);
        Some(id)
    }

    pub(super) fn create_cq(&mut self, side: usize, entries: usize) -> CqId {
        let side = &mut self.sides[side];
        let cq = side.station.provider().create_cq(side.device, &CqAttr::new(entries as u32)).expect("a queue");
        side.queues.insert(cq.0, PollMode::Awake);
        // Drive the side in the next step, because only driving the side arms the new queue.
        side.due = true;
        cq
    }

    /// Lets the case arm and poll the completion queue of an end, instead of the harness.
    pub(super) fn poll_manually(&mut self, end: &ConnectionEnd) {
        self.sides[end.side].queues.insert(end.cq.0, PollMode::Manual);
    }

    /// Polls a completion queue until it is empty. Returns the number of completions.
    pub(super) fn poll(&mut self, side: usize, cq: CqId) -> usize {
        std::iter::from_fn(|| Some(self.sides[side].poll(cq)).filter(|&count| count > 0)).sum()
    }

    pub(super) fn attr(cq: CqId, spec: &Spec) -> QpAttr {
        let attr = QpAttr::new(cq, cq, DEPTH as u32, DEPTH as u32);
        QpAttr { max_inline: spec.max_inline, srq: spec.srq, ..attr }
    }

    /// Creates the queue pair of an id, and posts its first receives.
    pub(super) fn create_queue_pair(&mut self, side: usize, id: CmId, spec: &Spec) -> ConnectionEnd {
        let cq = spec.cq.unwrap_or_else(|| self.create_cq(side, 3 * DEPTH));
        let qp = self.provider(side).create_qp(id, &Self::attr(cq, spec)).expect("a queue pair");
        self.sides[side].ledger.add(qp, cq);
        let end = ConnectionEnd { side, id, qp, cq, srq: spec.srq };
        self.ends.push(end);
        let count = if spec.srq.is_some() { 0 } else { spec.receives };
        for _ in 0..count {
            let range = self.sides[side].allocate(SLOT);
            self.post_recv(&end, &[range]);
        }
        end
    }

    /// Sends a connect request to the listener of the passive side. Returns the active end and the incoming request.
    #[track_caller]
    pub(super) fn request(&mut self, spec: &Spec, param: &ConnectParam<'_>) -> (ConnectionEnd, IncomingRequest) {
        let (listener, to) = self.listener();
        for _ in 0..TRIES {
            let id = self.resolved(to, self.patience);
            let end = self.create_queue_pair(ACTIVE, id, spec);
            self.provider(ACTIVE).connect(id, param).expect("a connect");
            let request = self.wait_for("connect request", |harness| {
                if harness.take_event(ACTIVE, port_in_use).is_some() {
                    return Some(None);
                }
                harness.take_event(PASSIVE, requested).map(Some)
            });
            if let Some(request) = request {
                assert_eq!(request.listener, listener);
                return (end, request);
            }
            self.destroy(&end);
        }
        panic!("no port that TCP has free in {TRIES} attempts");
    }

    /// Establishes a connection. Returns its two ends, the active one first.
    #[track_caller]
    pub(super) fn pair(&mut self) -> [ConnectionEnd; 2] {
        self.pair_of(&Spec::default(), &Spec::default())
    }

    #[track_caller]
    pub(super) fn pair_of(&mut self, active: &Spec, passive: &Spec) -> [ConnectionEnd; 2] {
        let (active, request) = self.request(active, &ConnectParam::default());
        let passive = self.create_queue_pair(PASSIVE, request.id, passive);
        let now = self.now();
        self.provider(PASSIVE).accept(passive.id, &ConnectParam::default(), now).expect("an accept");
        self.established(&active);
        self.established(&passive);
        [active, passive]
    }

    /// Enables the extensions on both ends of a connection. Does nothing if the provider does not have the role
    /// `Extensions`.
    pub(super) fn enable_extensions(&mut self, pair: &[ConnectionEnd; 2]) {
        for end in pair {
            if let Some(role) = self.provider(end.side).extensions() {
                role.enable_extensions(end.qp).expect("the extensions");
            }
        }
    }

    pub(super) fn disconnect(&mut self, end: &ConnectionEnd) {
        let now = self.now();
        self.provider(end.side).disconnect(end.id, now).expect("a disconnect");
    }

    /// Waits until every outstanding work request of an end has completed.
    #[track_caller]
    pub(super) fn flushed(&mut self, end: &ConnectionEnd) {
        self.wait_for("completion of each work request", |harness| (harness.outstanding(end) == 0).then_some(()));
    }

    pub(super) fn outstanding(&mut self, end: &ConnectionEnd) -> usize {
        self.sides[end.side].ledger.outstanding(end.qp)
    }

    /// Destroys an id that has no queue pair.
    pub(super) fn destroy_id(&mut self, side: usize, id: CmId) {
        let now = self.now();
        self.provider(side).destroy_id(id, now).expect("a destroy");
        self.forget(side, id);
    }

    /// Records that an id is destroyed, and drops its events.
    pub(super) fn forget(&mut self, side: usize, id: CmId) {
        self.sides[side].gone.insert(id.0);
        self.sides[side].events.retain(|event| event.id != id);
    }

    /// Destroys an end, and polls its remaining completions. From then on the ledger accepts no completion of the end's
    /// queue pair.
    pub(super) fn destroy(&mut self, end: &ConnectionEnd) {
        self.destroy_id(end.side, end.id);
        self.sides[end.side].ledger.destroyed(end.qp);
        self.poll(end.side, end.cq);
        self.sides[end.side].ledger.forget();
        self.ends.retain(|other| other.id != end.id || other.side != end.side);
    }

    /// Destroys all remaining objects, and checks that nothing happens afterwards.
    pub(super) fn finish(mut self) {
        while let Some(end) = self.ends.last().copied() {
            self.destroy(&end);
        }
        self.settle();
        for side in 0..self.sides.len() {
            for cq in self.sides[side].queues.keys().copied().map(CqId).collect::<Vec<_>>() {
                assert_eq!(self.poll(side, cq), 0, "completions of queue pairs that are destroyed");
                if let Err(error) = self.provider(side).destroy_cq(cq) {
                    panic!("{cq:?}, which no queue pair uses: {error}");
                }
            }
        }
    }

    /// Records that the case has destroyed a completion queue.
    pub(super) fn forget_cq(&mut self, side: usize, cq: CqId) {
        self.sides[side].queues.remove(&cq.0);
    }

    // Functions that post work requests and wait for their completions.

    /// Returns the `wr_id` for the next work request.
    pub(super) fn next_wr_id(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    pub(super) fn post_recv(&mut self, end: &ConnectionEnd, ranges: &[Range<usize>]) -> u64 {
        let wr_id = self.next_wr_id();
        let side = &mut self.sides[end.side];
        match end.srq {
            Some(srq) => {
                side.ledger.shares(wr_id, ranges.to_vec());
                side.station.post_srq_recv(srq, wr_id, ranges).expect("room for a shared receive");
            }
            None => {
                side.ledger.receives(end.qp, wr_id, ranges.to_vec());
                side.station.post_recv(end.qp, wr_id, ranges).expect("room for a receive");
            }
        }
        wr_id
    }

    /// Posts receives in one chain. Each receive has one of the `ranges`.
    pub(super) fn post_recvs(&mut self, end: &ConnectionEnd, ranges: &[Range<usize>]) -> Result<(), PostError> {
        let chain: Vec<_> = ranges.iter().map(|range| (self.next_wr_id(), range.clone())).collect();
        let side = &mut self.sides[end.side];
        let result = match end.srq {
            Some(srq) => side.station.post_srq_recvs(srq, chain.iter().cloned()),
            None => side.station.post_recvs(end.qp, chain.iter().cloned()),
        };
        for (wr_id, range) in chain.into_iter().take(taken(&result, ranges.len())) {
            match end.srq {
                Some(_) => side.ledger.shares(wr_id, vec![range]),
                None => side.ledger.receives(end.qp, wr_id, vec![range]),
            }
        }
        result
    }

    /// Posts sends in one chain. Returns their `wr_id`s, and the result of the post.
    pub(super) fn post_sends(
        &mut self,
        end: &ConnectionEnd,
        chain: &[(SendOp, Range<usize>, SendFlags)],
    ) -> (Vec<u64>, Result<Posted, PostError>) {
        let numbers: Vec<u64> = chain.iter().map(|_| self.next_wr_id()).collect();
        let side = &mut self.sides[end.side];
        let requests = numbers.iter().zip(chain).map(|(&wr_id, (op, part, flags))| (wr_id, *op, part.clone(), *flags));
        let result = side.station.post_sends(end.qp, requests);
        for (&wr_id, (op, part, flags)) in numbers.iter().zip(chain).take(taken(&result, chain.len())) {
            let signaled = flags.contains(SendFlags::SIGNALED);
            side.ledger.sent(end.qp, LedgerSend { wr_id, class: op.class(), signaled, len: part.len() });
        }
        (numbers, result)
    }

    /// Records in the ledger a send that the case has posted itself.
    pub(super) fn record_send(&mut self, end: &ConnectionEnd, wr_id: u64, len: usize) {
        self.sides[end.side].ledger.sent(end.qp, LedgerSend { wr_id, class: SendClass::Send, signaled: true, len });
    }

    /// Posts sends whose arrival is not checked. The post may fail.
    pub(super) fn post_sends_unchecked(&mut self, end: &ConnectionEnd, count: usize) {
        let part = self.sides[end.side].allocate_with(&[0xee; SLOT]);
        let chain = vec![(SendOp::Send, part, SendFlags::SIGNALED); count];
        let (_, _may_fail) = self.post_sends(end, &chain);
    }

    /// Posts one signaled send. Returns its `wr_id`.
    #[track_caller]
    pub(super) fn post(&mut self, end: &ConnectionEnd, op: SendOp, part: &Range<usize>) -> u64 {
        let (numbers, result) = self.post_sends(end, &[(op, part.clone(), SendFlags::SIGNALED)]);
        if let Err(error) = result {
            panic!("{op:?}: {}", error.error);
        }
        numbers[0]
    }

    /// Removes the completion of a work request, and returns it. Returns `None` if it was not polled yet.
    pub(super) fn take_completion(&mut self, end: &ConnectionEnd, wr_id: u64) -> Option<WorkCompletion> {
        let done = &mut self.sides[end.side].done;
        let at = done.iter().position(|done| done.wc.wr_id == wr_id)?;
        done.remove(at).map(|done| done.wc)
    }

    #[track_caller]
    pub(super) fn completion(&mut self, end: &ConnectionEnd, wr_id: u64) -> WorkCompletion {
        self.wait_for("completion", |harness| harness.take_completion(end, wr_id))
    }

    /// Waits for the completion of a work request. Panics unless the completion is successful.
    #[track_caller]
    pub(super) fn success(&mut self, end: &ConnectionEnd, wr_id: u64) -> WorkCompletion {
        let wc = self.completion(end, wr_id);
        assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
        wc
    }

    /// Posts one signaled send, and waits for its completion. Panics unless the completion is successful.
    #[track_caller]
    pub(super) fn post_and_wait(&mut self, end: &ConnectionEnd, op: SendOp, part: &Range<usize>) -> WorkCompletion {
        let wr_id = self.post(end, op, part);
        self.success(end, wr_id)
    }

    /// Waits for the next completion of a receive. Returns the completion, the received bytes, and the memory ranges of
    /// the receive.
    #[track_caller]
    pub(super) fn received(&mut self, end: &ConnectionEnd) -> (WorkCompletion, Vec<u8>, RecvRanges) {
        let (wc, ranges) = self.wait_for("completion of a receive", |harness| {
            let done = &mut harness.sides[end.side].done;
            let at = done.iter().position(|done| done.ranges.is_some() && done.wc.qp == end.qp)?;
            done.remove(at).and_then(|done| Some((done.wc, done.ranges?)))
        });
        let mut bytes: Vec<u8> = ranges.iter().flat_map(|range| self.sides[end.side].bytes(range)).collect();
        bytes.truncate(if wc.status.is_success() { wc.byte_len as usize } else { 0 });
        (wc, bytes, ranges)
    }

    /// Returns the ranges of the next completed receive of an end that is destroyed. Returns `None` if there is none.
    pub(super) fn take_left_receive(&mut self, end: &ConnectionEnd) -> Option<RecvRanges> {
        let done = &mut self.sides[end.side].done;
        let at = done.iter().position(|done| done.ranges.is_some() && done.wc.qp == end.qp)?;
        done.remove(at)?.ranges
    }

    /// Waits for the next message of an end, checks the message's bytes, and posts the receive of the message again.
    /// Returns the completion of the receive.
    #[track_caller]
    pub(super) fn expect_message(&mut self, end: &ConnectionEnd, bytes: &[u8]) -> WorkCompletion {
        let (wc, got, ranges) = self.received(end);
        assert_eq!((wc.status, got.len()), (WcStatus::Success, bytes.len()), "{wc:?}");
        assert!(got == bytes, "other bytes than were sent");
        self.post_recv(end, &ranges);
        wc
    }

    /// Sends one message, and waits until it has arrived and its send has completed.
    #[track_caller]
    pub(super) fn message(&mut self, from: &ConnectionEnd, to: &ConnectionEnd, bytes: &[u8]) {
        let part = self.sides[from.side].allocate_with(bytes);
        let wr_id = self.post(from, SendOp::Send, &part);
        self.expect_message(to, bytes);
        self.success(from, wr_id);
    }

    /// Posts an operation that the peer must refuse, and waits until the connection ends.
    #[track_caller]
    pub(super) fn refused(&mut self, end: &ConnectionEnd, op: SendOp, part: &Range<usize>) {
        let wr_id = self.post(end, op, part);
        self.wait_for("end of the connection", |harness| {
            let wc = harness.take_completion(end, wr_id);
            if let Some(wc) = wc.filter(|wc| wc.status.is_success()) {
                // A write may complete successfully before the peer has refused it.
                assert!(!op.answered(), "the peer has served it: {wc:?}");
            } else if wc.is_some() {
                return Some(());
            }
            harness.take_event(end.side, |event| disconnected(event, end.id)).map(drop)
        });
    }
}

/// Returns how many of the `all` work requests of a chain were posted, from the `result` of the post.
fn taken<T>(result: &Result<T, PostError>, all: usize) -> usize {
    let taken = result.as_ref().map_or_else(|error| error.posted, |_| all);
    assert!(taken < all || result.is_ok(), "a chain that is taken whole is no error");
    taken
}
