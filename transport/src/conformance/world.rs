//! [`World`]: the providers of one case, driven as a reactor drives them.
//!
//! A side is driven when one of its channels has an edge, when its deadline has passed, and when it has said that there is more;
//! a completion queue that was armed and empty is polled after its event only. So an edge or an event that is lost is a case that
//! never ends. Each completion is checked against the [`Ledger`] of its side, whatever the case is about.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::environment::Environment;
use super::factory::{Deviation, Factory};
use super::ledger::{Ledger, Places, Sent};
use crate::caps::Capabilities;
use crate::cm::{
    CmEvent, CmEventKind, CmId, ConnectFailure, ConnectParam, DisconnectCause, ListenOptions, PathOptions, ReadDepth,
};
use crate::cq::{CqAttr, Notify};
use crate::handle::{CqId, DeviceId, QpId, SrqId};
use crate::mr::{Access, LocalKey, MemoryRegion};
use crate::provider::{Channel, Drive, PostError, Posted, Provider};
use crate::qp::QpAttr;
use crate::slab::Key;
use crate::station::Station;
use crate::wc::{WcStatus, WorkCompletion};
use crate::wr::{RemoteAddress, SendClass, SendFlags, SendOp};

/// The side that connects.
pub(super) const ACTIVE: usize = 0;
/// The side that listens.
pub(super) const PASSIVE: usize = 1;
/// The side that takes connect requests over.
pub(super) const THIRD: usize = 2;

/// Work requests of each queue.
pub(super) const DEPTH: usize = 16;
/// Bytes of a receive.
pub(super) const SLOT: usize = 256;
/// Bytes of the memory of a side.
const MEMORY: usize = 1 << 20;
/// Events that a getter may return in a row. It ends a loop.
const MANY: usize = 100_000;
/// Attempts to connect. The kernel's connection manager chooses a local port of its own, which TCP may have in use.
const TRIES: usize = 5;

/// One end of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    pub(super) side: usize,
    pub(super) id: CmId,
    pub(super) qp: QpId,
    pub(super) cq: CqId,
    pub(super) srq: Option<SrqId>,
}

/// The attributes of an end's queues.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spec {
    /// Receives of a slot each that are posted at first.
    pub(super) receives: usize,
    pub(super) max_inline: u32,
    pub(super) srq: Option<SrqId>,
    /// The completion queue; `None` for one of its own.
    pub(super) cq: Option<CqId>,
}

impl Default for Spec {
    fn default() -> Self {
        Self { receives: DEPTH, max_inline: 0, srq: None, cq: None }
    }
}

/// A connect request.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) id: CmId,
    pub(super) listener: CmId,
    pub(super) peer: SocketAddr,
    pub(super) private_data: Box<[u8]>,
    pub(super) read_depth: ReadDepth,
}

/// The state of a completion queue, as its driver knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Watch {
    /// It may have completions.
    Awake,
    /// It was empty after it was armed: it is polled after its event.
    Armed,
    /// The case polls it.
    Manual,
}

/// A completion that no case has looked at, and the places of its receive.
#[derive(Debug)]
struct Done {
    wc: WorkCompletion,
    places: Option<Places>,
}

#[derive(Debug)]
pub(super) struct Side {
    pub(super) station: Station,
    /// The key of the whole memory.
    key: LocalKey,
    pub(super) device: DeviceId,
    pub(super) capabilities: Capabilities,
    pub(super) address: SocketAddr,
    events: VecDeque<CmEvent>,
    done: VecDeque<Done>,
    queues: BTreeMap<Key, Watch>,
    /// Events of completion queues, as they came.
    pub(super) notified: Vec<CqId>,
    ledger: Ledger,
    /// The completions of the last poll, and how many were there before it.
    polled: Vec<WorkCompletion>,
    kept: usize,
    /// Ids that were destroyed.
    gone: BTreeSet<Key>,
    /// Whether the side is to be driven.
    due: bool,
    /// The first byte of the memory that is not in use.
    free: usize,
}

impl Side {
    /// Polls a queue once; returns the number of completions.
    fn poll(&mut self, cq: CqId) -> usize {
        const MOST: usize = 7;
        // Each second poll is behind an old completion, so that it appends; the others may get a buffer of the provider's.
        let mut out = std::mem::take(&mut self.polled);
        let kept = out.len().min(1 - self.kept);
        out.truncate(kept);
        let old = out.first().map(|wc| wc.wr_id);
        let count = self.station.provider().poll_cq(cq, MOST, &mut out).expect("a completion queue to poll");
        assert!(count == out.len() - kept && count <= MOST, "{count} of {MOST} completions: {out:?}");
        assert!(kept == 0 || out.first().map(|wc| wc.wr_id) == old, "what was in the vector stays: {out:?}");
        for wc in &out[kept..] {
            let places = self.ledger.complete(cq, wc);
            self.done.push_back(Done { wc: *wc, places });
        }
        (self.polled, self.kept) = (out, kept);
        count
    }

    /// Polls an awake queue until it is empty after it was armed.
    fn drain(&mut self, cq: CqId) {
        while self.queues.get(&cq.0) == Some(&Watch::Awake) {
            while self.poll(cq) > 0 {}
            self.station.provider().req_notify(cq, Notify::Any).expect("a completion queue to arm");
            if self.poll(cq) == 0 {
                self.queues.insert(cq.0, Watch::Armed);
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

    /// Takes the events of completion queues.
    pub(super) fn take_notifications(&mut self) {
        let device = self.device;
        for nth in 0.. {
            let Some(cq) = self.station.provider().next_completion_event(device).expect("the next event") else {
                break;
            };
            assert!(nth < MANY, "events without end: {cq:?}");
            self.notified.push(cq);
            if let Some(watch) = self.queues.get_mut(&cq.0).filter(|watch| **watch == Watch::Armed) {
                *watch = Watch::Awake;
            }
        }
    }

    /// The bytes of a part of the memory.
    pub(super) fn bytes(&mut self, part: &Range<usize>) -> Vec<u8> {
        let mut out = Vec::new();
        self.station.read(part.clone(), &mut out).expect("a part of the memory");
        out
    }

    /// Takes `len` bytes of the memory that nothing has used.
    pub(super) fn room(&mut self, len: usize) -> Range<usize> {
        let start = self.free;
        self.free = (start + len.max(1)).next_multiple_of(64);
        assert!(self.free <= MEMORY, "the case uses too much memory");
        start..start + len
    }

    /// Takes as many bytes as there are, and puts them there.
    pub(super) fn place(&mut self, bytes: &[u8]) -> Range<usize> {
        let place = self.room(bytes.len());
        self.station.write(place.start, bytes).expect("a part of the memory");
        place
    }

    /// Names the memory of work requests by the key of a region; returns the key of before.
    pub(super) fn use_key(&mut self, region: MemoryRegion) -> LocalKey {
        self.station.use_key(region.local_key);
        self.key
    }

    /// Registers a part of the memory for peers.
    pub(super) fn expose(&mut self, part: &Range<usize>, access: Access) -> (MemoryRegion, RemoteAddress) {
        let region = self.station.expose_range(self.device, part.clone(), access).expect("a region");
        (region, RemoteAddress { address: self.station.address(part.start), key: region.remote_key })
    }
}

/// The providers of one case, driven as a reactor drives them.
#[derive(Debug)]
pub struct World {
    // The sides are dropped first: their channels are watched.
    sides: Vec<Side>,
    environment: Box<dyn Environment>,
    patience: Duration,
    /// What the case is known to fail with, and the longest wait for it.
    known: Option<(&'static str, Duration)>,
    grace: Duration,
    ends: Vec<End>,
    listener: Option<(CmId, SocketAddr)>,
    /// Number of the last work request.
    last: u64,
}

impl World {
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
            Side {
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

    pub(super) fn side(&mut self, side: usize) -> &mut Side {
        &mut self.sides[side]
    }

    pub(super) fn provider(&mut self, side: usize) -> &mut dyn Provider {
        self.sides[side].station.provider()
    }

    pub(super) fn now(&mut self) -> Instant {
        self.environment.now()
    }

    // Driving.

    /// Drives the sides that are due. If none is, waits for an edge or a deadline, until `until` at the latest.
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
        let deadline = |side: &mut Side| side.station.provider().next_deadline();
        let deadline = self.sides.iter_mut().filter_map(deadline).min();
        let mut edges = Vec::new();
        self.environment.wait(deadline.map_or(until, |deadline| deadline.min(until)), &mut edges);
        edges.into_iter().for_each(|side| self.sides[side].due = true);
        let now = self.environment.now();
        for side in &mut self.sides {
            side.due |= side.station.provider().next_deadline().is_some_and(|deadline| deadline <= now);
        }
    }

    /// Drives the sides until `ready` has something.
    #[track_caller]
    pub(super) fn until<T>(&mut self, what: &str, mut ready: impl FnMut(&mut Self) -> Option<T>) -> T {
        let missing = format!("no {what}");
        let known = self.known.filter(|(finds, _)| *finds == missing);
        let end = self.now() + known.map_or(self.patience, |(_, patience)| patience);
        loop {
            if let Some(found) = ready(self) {
                return found;
            }
            if self.now() >= end {
                let seen = |side: &Side| format!("{:?} {:?}", side.events, side.done);
                panic!("{missing}: {:?}", self.sides.iter().map(seen).collect::<Vec<_>>());
            }
            self.step(end);
        }
    }

    /// Drives the sides for a while, for what must not happen.
    pub(super) fn settle(&mut self) {
        let end = self.now() + self.grace;
        while self.now() < end {
            self.step(end);
        }
    }

    // Events.

    /// The next event of a side that `wanted` takes.
    #[track_caller]
    pub(super) fn event<T>(&mut self, what: &str, side: usize, wanted: impl Fn(&CmEvent) -> Option<T>) -> T {
        self.until(what, |world| world.seen(side, &wanted))
    }

    /// As [`World::event`], if it is there.
    pub(super) fn seen<T>(&mut self, side: usize, wanted: impl Fn(&CmEvent) -> Option<T>) -> Option<T> {
        let events = &mut self.sides[side].events;
        let (at, found) = events.iter().enumerate().find_map(|(at, event)| Some((at, wanted(event)?)))?;
        events.remove(at);
        Some(found)
    }

    #[track_caller]
    pub(super) fn established(&mut self, end: &End) -> (Box<[u8]>, ReadDepth) {
        self.event("Established", end.side, |event| match &event.kind {
            CmEventKind::Established { private_data, read_depth } if event.id == end.id => {
                Some((private_data.clone(), *read_depth))
            }
            _ => None,
        })
    }

    #[track_caller]
    pub(super) fn disconnected(&mut self, end: &End) -> DisconnectCause {
        self.event("Disconnected", end.side, |event| disconnected(event, end))
    }

    // Connections.

    /// A listener on a free port.
    pub(super) fn listen(&mut self, side: usize) -> (CmId, SocketAddr) {
        let address = self.sides[side].address;
        let listener = self.provider(side).listen(address, &ListenOptions::default()).expect("a listener");
        let bound = self.provider(side).local_address(listener).expect("the address of a listener");
        assert_ne!(bound.port(), 0, "port 0 takes a free one");
        (listener, SocketAddr::new(address.ip(), bound.port()))
    }

    /// The listener of the passive side.
    pub(super) fn listener(&mut self) -> (CmId, SocketAddr) {
        let listener = self.listener.unwrap_or_else(|| self.listen(PASSIVE));
        *self.listener.insert(listener)
    }

    /// Begins an attempt that fails after `within`.
    #[track_caller]
    pub(super) fn resolved(&mut self, to: SocketAddr, within: Duration) -> CmId {
        let deadline = self.now() + within;
        self.resolved_by(to, deadline).expect("it is resolved in time")
    }

    /// Begins an attempt that fails at its deadline; `None` if it fails before the address is resolved.
    #[track_caller]
    pub(super) fn resolved_by(&mut self, to: SocketAddr, deadline: Instant) -> Option<CmId> {
        let id = self.provider(ACTIVE).resolve(to, &PathOptions::default(), deadline).expect("an attempt");
        let device = self.event("Resolved", ACTIVE, |event| match event.kind {
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
        side.queues.insert(cq.0, Watch::Awake);
        // It has to be armed.
        side.due = true;
        cq
    }

    /// Leaves a queue to the case, which arms and polls it.
    pub(super) fn leave(&mut self, end: &End) {
        self.sides[end.side].queues.insert(end.cq.0, Watch::Manual);
    }

    /// Polls a queue until it is empty; returns the number of completions.
    pub(super) fn poll(&mut self, side: usize, cq: CqId) -> usize {
        std::iter::from_fn(|| Some(self.sides[side].poll(cq)).filter(|&count| count > 0)).sum()
    }

    pub(super) fn attr(cq: CqId, spec: &Spec) -> QpAttr {
        let attr = QpAttr::new(cq, cq, DEPTH as u32, DEPTH as u32);
        QpAttr { max_inline: spec.max_inline, srq: spec.srq, ..attr }
    }

    /// Gives an id its queue pair, and posts receives.
    pub(super) fn equip(&mut self, side: usize, id: CmId, spec: &Spec) -> End {
        let cq = spec.cq.unwrap_or_else(|| self.create_cq(side, 3 * DEPTH));
        let qp = self.provider(side).create_qp(id, &Self::attr(cq, spec)).expect("a queue pair");
        self.sides[side].ledger.add(qp, cq);
        let end = End { side, id, qp, cq, srq: spec.srq };
        self.ends.push(end);
        let count = if spec.srq.is_some() { 0 } else { spec.receives };
        for _ in 0..count {
            let place = self.sides[side].room(SLOT);
            self.post_recv(&end, &[place]);
        }
        end
    }

    /// Asks the listener for a connection; returns the active end and the request.
    #[track_caller]
    pub(super) fn request(&mut self, spec: &Spec, param: &ConnectParam<'_>) -> (End, Request) {
        let (listener, to) = self.listener();
        for _ in 0..TRIES {
            let id = self.resolved(to, self.patience);
            let end = self.equip(ACTIVE, id, spec);
            self.provider(ACTIVE).connect(id, param).expect("a connect");
            let request = self.until("connect request", |world| {
                if world.seen(ACTIVE, port_in_use).is_some() {
                    return Some(None);
                }
                world.seen(PASSIVE, requested).map(Some)
            });
            if let Some(request) = request {
                assert_eq!(request.listener, listener);
                return (end, request);
            }
            self.destroy(&end);
        }
        panic!("no port that TCP has free in {TRIES} attempts");
    }

    /// A connection, the active end first.
    #[track_caller]
    pub(super) fn pair(&mut self) -> [End; 2] {
        self.pair_of(&Spec::default(), &Spec::default())
    }

    #[track_caller]
    pub(super) fn pair_of(&mut self, active: &Spec, passive: &Spec) -> [End; 2] {
        let (active, request) = self.request(active, &ConnectParam::default());
        let passive = self.equip(PASSIVE, request.id, passive);
        let now = self.now();
        self.provider(PASSIVE).accept(passive.id, &ConnectParam::default(), now).expect("an accept");
        self.established(&active);
        self.established(&passive);
        [active, passive]
    }

    /// Allows the extensions on both sides of a connection, where the provider has them.
    pub(super) fn extend(&mut self, pair: &[End; 2]) {
        for end in pair {
            if let Some(role) = self.provider(end.side).extensions() {
                role.enable_extensions(end.qp).expect("the extensions");
            }
        }
    }

    pub(super) fn disconnect(&mut self, end: &End) {
        let now = self.now();
        self.provider(end.side).disconnect(end.id, now).expect("a disconnect");
    }

    /// Waits until each work request of an end has completed.
    #[track_caller]
    pub(super) fn flushed(&mut self, end: &End) {
        self.until("completion of each work request", |world| (world.outstanding(end) == 0).then_some(()));
    }

    pub(super) fn outstanding(&mut self, end: &End) -> usize {
        self.sides[end.side].ledger.outstanding(end.qp)
    }

    /// Destroys an id without a queue pair.
    pub(super) fn destroy_id(&mut self, side: usize, id: CmId) {
        let now = self.now();
        self.provider(side).destroy_id(id, now).expect("a destroy");
        self.forget(side, id);
    }

    /// Takes note that an id is gone.
    pub(super) fn forget(&mut self, side: usize, id: CmId) {
        self.sides[side].gone.insert(id.0);
        self.sides[side].events.retain(|event| event.id != id);
    }

    /// Destroys an end. The completions that are there are polled; none of it may come later.
    pub(super) fn destroy(&mut self, end: &End) {
        self.destroy_id(end.side, end.id);
        self.sides[end.side].ledger.destroyed(end.qp);
        self.poll(end.side, end.cq);
        self.sides[end.side].ledger.forget();
        self.ends.retain(|other| other.id != end.id || other.side != end.side);
    }

    /// Destroys all that is left. Nothing may happen afterwards.
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

    /// Forgets a queue that the case has destroyed.
    pub(super) fn forget_cq(&mut self, side: usize, cq: CqId) {
        self.sides[side].queues.remove(&cq.0);
    }

    // Work requests.

    /// Takes the number of the next work request.
    pub(super) fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    pub(super) fn post_recv(&mut self, end: &End, places: &[Range<usize>]) -> u64 {
        let wr_id = self.number();
        let side = &mut self.sides[end.side];
        match end.srq {
            Some(srq) => {
                side.ledger.shares(wr_id, places.to_vec());
                side.station.post_srq_recv(srq, wr_id, places).expect("room for a shared receive");
            }
            None => {
                side.ledger.receives(end.qp, wr_id, places.to_vec());
                side.station.post_recv(end.qp, wr_id, places).expect("room for a receive");
            }
        }
        wr_id
    }

    /// Posts receives of a place each in one chain.
    pub(super) fn post_recvs(&mut self, end: &End, places: &[Range<usize>]) -> Result<(), PostError> {
        let chain: Vec<_> = places.iter().map(|place| (self.number(), place.clone())).collect();
        let side = &mut self.sides[end.side];
        let result = match end.srq {
            Some(srq) => side.station.post_srq_recvs(srq, chain.iter().cloned()),
            None => side.station.post_recvs(end.qp, chain.iter().cloned()),
        };
        for (wr_id, place) in chain.into_iter().take(taken(&result, places.len())) {
            match end.srq {
                Some(_) => side.ledger.shares(wr_id, vec![place]),
                None => side.ledger.receives(end.qp, wr_id, vec![place]),
            }
        }
        result
    }

    /// Posts sends in one chain; returns their numbers.
    pub(super) fn post_sends(
        &mut self,
        end: &End,
        chain: &[(SendOp, Range<usize>, SendFlags)],
    ) -> (Vec<u64>, Result<Posted, PostError>) {
        let numbers: Vec<u64> = chain.iter().map(|_| self.number()).collect();
        let side = &mut self.sides[end.side];
        let requests = numbers.iter().zip(chain).map(|(&wr_id, (op, part, flags))| (wr_id, *op, part.clone(), *flags));
        let result = side.station.post_sends(end.qp, requests);
        for (&wr_id, (op, part, flags)) in numbers.iter().zip(chain).take(taken(&result, chain.len())) {
            let signaled = flags.contains(SendFlags::SIGNALED);
            side.ledger.sent(end.qp, Sent { wr_id, class: op.class(), signaled, len: part.len() });
        }
        (numbers, result)
    }

    /// Takes note of a send that the case posts itself.
    pub(super) fn adopt(&mut self, end: &End, wr_id: u64, len: usize) {
        self.sides[end.side].ledger.sent(end.qp, Sent { wr_id, class: SendClass::Send, signaled: true, len });
    }

    /// Posts sends that the peer may never take. The post may fail.
    pub(super) fn post_sends_unchecked(&mut self, end: &End, count: usize) {
        let part = self.sides[end.side].place(&[0xee; SLOT]);
        let chain = vec![(SendOp::Send, part, SendFlags::SIGNALED); count];
        let (_, _may_fail) = self.post_sends(end, &chain);
    }

    /// Posts one signaled send; returns its number.
    #[track_caller]
    pub(super) fn post(&mut self, end: &End, op: SendOp, part: &Range<usize>) -> u64 {
        let (numbers, result) = self.post_sends(end, &[(op, part.clone(), SendFlags::SIGNALED)]);
        if let Err(error) = result {
            panic!("{op:?}: {}", error.error);
        }
        numbers[0]
    }

    /// The completion of a work request, if it was polled.
    pub(super) fn done(&mut self, end: &End, wr_id: u64) -> Option<WorkCompletion> {
        let done = &mut self.sides[end.side].done;
        let at = done.iter().position(|done| done.wc.wr_id == wr_id)?;
        done.remove(at).map(|done| done.wc)
    }

    #[track_caller]
    pub(super) fn completion(&mut self, end: &End, wr_id: u64) -> WorkCompletion {
        self.until("completion", |world| world.done(end, wr_id))
    }

    /// Waits for the success of a work request.
    #[track_caller]
    pub(super) fn success(&mut self, end: &End, wr_id: u64) -> WorkCompletion {
        let wc = self.completion(end, wr_id);
        assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
        wc
    }

    /// Posts one signaled send, and waits for its success.
    #[track_caller]
    pub(super) fn good(&mut self, end: &End, op: SendOp, part: &Range<usize>) -> WorkCompletion {
        let wr_id = self.post(end, op, part);
        self.success(end, wr_id)
    }

    /// The next completion of a receive, its bytes and its places.
    #[track_caller]
    pub(super) fn received(&mut self, end: &End) -> (WorkCompletion, Vec<u8>, Places) {
        let (wc, places) = self.until("completion of a receive", |world| {
            let done = &mut world.sides[end.side].done;
            let at = done.iter().position(|done| done.places.is_some() && done.wc.qp == end.qp)?;
            done.remove(at).and_then(|done| Some((done.wc, done.places?)))
        });
        let mut bytes: Vec<u8> = places.iter().flat_map(|place| self.sides[end.side].bytes(place)).collect();
        bytes.truncate(if wc.status.is_success() { wc.byte_len as usize } else { 0 });
        (wc, bytes, places)
    }

    /// The places of the next receive that a destroyed end has completed.
    pub(super) fn left_by(&mut self, end: &End) -> Option<Places> {
        let done = &mut self.sides[end.side].done;
        let at = done.iter().position(|done| done.places.is_some() && done.wc.qp == end.qp)?;
        done.remove(at)?.places
    }

    /// The next message of an end, whose receive is posted again.
    #[track_caller]
    pub(super) fn expect(&mut self, end: &End, bytes: &[u8]) -> WorkCompletion {
        let (wc, got, places) = self.received(end);
        assert_eq!((wc.status, got.len()), (WcStatus::Success, bytes.len()), "{wc:?}");
        assert!(got == bytes, "other bytes than were sent");
        self.post_recv(end, &places);
        wc
    }

    /// One message, which arrives.
    #[track_caller]
    pub(super) fn message(&mut self, from: &End, to: &End, bytes: &[u8]) {
        let part = self.sides[from.side].place(bytes);
        let wr_id = self.post(from, SendOp::Send, &part);
        self.expect(to, bytes);
        self.success(from, wr_id);
    }

    /// Posts an operation that the peer must refuse: the connection ends.
    #[track_caller]
    pub(super) fn refused(&mut self, end: &End, op: SendOp, part: &Range<usize>) {
        let wr_id = self.post(end, op, part);
        self.until("end of the connection", |world| {
            let wc = world.done(end, wr_id);
            if let Some(wc) = wc.filter(|wc| wc.status.is_success()) {
                // A write may be done when it is sent.
                assert!(!op.answered(), "the peer has served it: {wc:?}");
            } else if wc.is_some() {
                return Some(());
            }
            world.seen(end.side, |event| disconnected(event, end)).map(drop)
        });
    }
}

/// The cause, if an event is the end of a connection.
pub(super) fn disconnected(event: &CmEvent, end: &End) -> Option<DisconnectCause> {
    match &event.kind {
        CmEventKind::Disconnected(cause) if event.id == end.id => Some(cause.clone()),
        _ => None,
    }
}

/// The failure, if an event is that of an attempt.
pub(super) fn failed(event: &CmEvent, id: CmId) -> Option<ConnectFailure> {
    match &event.kind {
        CmEventKind::ConnectFailed(failure) if event.id == id => Some(failure.clone()),
        _ => None,
    }
}

fn requested(event: &CmEvent) -> Option<Request> {
    match &event.kind {
        CmEventKind::ConnectRequest { listener, peer, private_data, read_depth, .. } => Some(Request {
            id: event.id,
            listener: *listener,
            peer: *peer,
            private_data: private_data.clone(),
            read_depth: *read_depth,
        }),
        _ => None,
    }
}

fn port_in_use(event: &CmEvent) -> Option<()> {
    let CmEventKind::ConnectFailed(failure) = &event.kind else { return None };
    failure.to_string().contains(&format!("(os error {})", libc::EADDRINUSE)).then_some(())
}

/// Number of work requests of a chain that were taken.
fn taken<T>(result: &Result<T, PostError>, all: usize) -> usize {
    let taken = result.as_ref().map_or_else(|error| error.posted, |_| all);
    assert!(taken < all || result.is_ok(), "a chain that is taken whole is no error");
    taken
}
