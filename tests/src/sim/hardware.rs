//! Simulated asynchronous hardware around a synchronous provider. Completions and connection-manager events arrive at random times, as the
//! contract in [`rdma_transport::provider`] permits.
//!
//! When the inner provider has produced a completion, it is in flight until it *arrives*. It can arrive between any two calls. It can also
//! arrive immediately before its queue is armed; the hardware then raises no event for it. If the queue is armed when the completion
//! arrives, the completion channel gets one event and one edge.
//!
//! A device may refuse to release a queue pair, a registration or a remote key. After such a refusal, the device continues to use the
//! object. So a later work request must not use memory of such a queue pair, and the program must not get access to the memory of such a
//! key (`Hardware::keeps`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rdma_transport::slab::Key;
use rdma_transport_embedded::iwarp::net::NetChannel;

use super::fabric::{Event, Fabric, Shared, index, lock};
use super::rng::Rng;
use super::swarm::{HardwareOptions, MS};
use crate::delegate::*;

/// A work queue: the queue pair, and the kind of work. Completions of one work queue stay in order. RDMA Reads have a separate work queue.
/// As in siw, a send may complete before an RDMA Read that was posted earlier.
type WorkQueue = (Key, Work);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Work {
    Send,
    Recv,
    Read,
}

impl Work {
    const fn of(opcode: WcOpcode) -> Self {
        match opcode {
            WcOpcode::Recv | WcOpcode::RecvWriteWithImmediate => Self::Recv,
            WcOpcode::Read | WcOpcode::Atomic => Self::Read,
            _ => Self::Send,
        }
    }
}

#[derive(Debug)]
struct Late<T> {
    at: u64,
    item: T,
}

/// A completion queue in memory that the hardware shares with the program.
#[derive(Debug)]
struct Queue {
    id: CqId,
    entries: usize,
    armed: bool,
    visible: VecDeque<WorkCompletion>,
    late: Vec<Late<WorkCompletion>>,
}

/// The simulated hardware of a node: the completions and events that have arrived, or are in flight.
#[derive(Debug)]
pub struct Hardware {
    queues: Vec<Queue>,
    events: VecDeque<CqId>,
    cm_visible: VecDeque<CmEvent>,
    cm_late: Vec<Late<CmEvent>>,
    /// The remote keys that the device has refused to release.
    kept: BTreeSet<u32>,
    /// The memory of the queue pairs that the device has refused to release. Each piece of memory is a pair: the address of its first byte,
    /// and the address after its last byte.
    kept_memory: Vec<(usize, usize)>,
    /// The number of queue pairs, and the number of registrations, that the device has refused to release.
    refused: (u64, usize),
}

impl Hardware {
    pub(super) const fn new() -> Self {
        Self {
            queues: Vec::new(),
            events: VecDeque::new(),
            cm_visible: VecDeque::new(),
            cm_late: Vec::new(),
            kept: BTreeSet::new(),
            kept_memory: Vec::new(),
            refused: (0, 0),
        }
    }

    /// Returns true if peers may still use the memory of the remote key `key`, because the device has refused to release this key.
    pub(super) fn keeps(&self, key: u32) -> bool {
        self.kept.contains(&key)
    }

    /// Resets the counters for another reactor on this node.
    fn new_reactor(&mut self) {
        (self.refused, self.kept_memory) = ((0, 0), Vec::new());
    }

    /// Returns true if a queue pair that the device has refused to release may still use some of this memory.
    pub(super) fn uses(&self, start: usize, end: usize) -> bool {
        self.kept_memory.iter().any(|&(from, to)| start < to && from < end)
    }

    /// Returns the number of queue pairs, and the number of registrations, that the device has refused to release since the last call of
    /// [`Hardware::new_reactor`].
    pub(super) const fn refused(&self) -> (u64, usize) {
        self.refused
    }

    pub(super) fn is_readable(&self, channel: usize) -> bool {
        if channel == index(NetChannel::Cm) { !self.cm_visible.is_empty() } else { !self.events.is_empty() }
    }

    /// Returns the number of completions that have arrived but that the program has not polled.
    pub(super) fn unpolled(&self) -> usize {
        self.queues.iter().map(|queue| queue.visible.len()).sum()
    }

    fn queue(&mut self, id: CqId) -> Option<&mut Queue> {
        self.queues.iter_mut().find(|queue| queue.id == id)
    }
}

impl Queue {
    /// Moves the completions that are due into the queue. Returns true if the queue raises an event.
    fn arrive(&mut self, now: u64) -> bool {
        let mut i = 0;
        let mut came = false;
        while i < self.late.len() {
            if self.late[i].at <= now {
                let completion = self.late.remove(i).item;
                self.visible.push_back(completion);
                came = true;
            } else {
                i += 1;
            }
        }
        came && std::mem::take(&mut self.armed)
    }
}

impl Fabric {
    /// Delivers the completions and events that are due at the hardware of a node.
    pub(super) fn hardware_arrives(&mut self, node: usize) {
        let now = self.now;
        let hardware = &mut self.ports[node].hardware;
        let mut raised = [false; 2];
        for i in 0..hardware.queues.len() {
            if hardware.queues[i].arrive(now) {
                let id = hardware.queues[i].id;
                hardware.events.push_back(id);
                raised[index(NetChannel::Completion)] = true;
            }
        }
        let mut i = 0;
        while i < hardware.cm_late.len() {
            if hardware.cm_late[i].at <= now {
                let event = hardware.cm_late.remove(i).item;
                hardware.cm_visible.push_back(event);
                raised[index(NetChannel::Cm)] = true;
            } else {
                i += 1;
            }
        }
        for (channel, raised) in raised.into_iter().enumerate() {
            if raised {
                self.raise(node, channel);
            }
        }
    }
}

fn busy(call: &'static str) -> TransportError {
    TransportError::io(call, std::io::Error::from_raw_os_error(libc::EBUSY))
}

/// A provider that simulates asynchronous hardware around another provider.
pub struct HardwareProvider<P> {
    inner: P,
    node: usize,
    fabric: Shared,
    options: HardwareOptions,
    rng: Rng,
    /// The time of the last arrival in each work queue. Later completions arrive no earlier.
    last: BTreeMap<WorkQueue, u64>,
    cm_last: BTreeMap<Key, u64>,
    /// The queue pairs that were flushed. A value is true if the flushed completions of its queue pair arrive slowly.
    lazy: BTreeMap<Key, bool>,
    scratch: Vec<WorkCompletion>,
    /// The remote key of each region to which peers have rights.
    keys: BTreeMap<Key, u32>,
    /// The outstanding work requests of each queue pair. They are recorded only if the device may refuse to release queue pairs.
    posted: BTreeMap<Key, Outstanding>,
}

/// The work requests of a queue pair that have not completed, with their memory.
#[derive(Debug, Default)]
struct Outstanding {
    receives: VecDeque<SgeList>,
    /// The sends: the id of the work request, true if the send completes only after an answer of the peer, and the entries.
    sends: VecDeque<(u64, bool, SgeList)>,
}

impl Outstanding {
    /// Records that a completion was polled.
    fn done(&mut self, wr_id: u64) {
        match self.sends.iter().position(|&(of, ..)| of == wr_id) {
            // The completion of this send also completes the earlier sends, except for those that need an answer of the peer. Each of those
            // sends has its own completion.
            Some(at) => {
                let mut nth = 0;
                self.sends.retain(|&(.., answered, _)| {
                    nth += 1;
                    nth - 1 > at || nth - 1 < at && answered
                });
            }
            None => drop(self.receives.pop_front()),
        }
    }
}

fn parts(sges: &SgeList) -> impl Iterator<Item = (usize, usize)> + '_ {
    sges.as_slice().iter().map(|sge| (sge.address().addr(), sge.address().addr() + sge.len()))
}

impl<P: Provider> std::fmt::Debug for HardwareProvider<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HardwareProvider of {:?}", self.inner)
    }
}

impl<P: Provider> HardwareProvider<P> {
    /// Returns simulated hardware on `node`, around `inner`.
    pub fn new(inner: P, node: usize, fabric: Shared, options: HardwareOptions, rng: Rng) -> Self {
        lock(&fabric).ports[node].hardware.new_reactor();
        Self {
            inner,
            node,
            fabric,
            options,
            rng,
            last: BTreeMap::new(),
            cm_last: BTreeMap::new(),
            lazy: BTreeMap::new(),
            scratch: Vec::new(),
            keys: BTreeMap::new(),
            posted: BTreeMap::new(),
        }
    }

    /// Returns true if the device refuses to release an object. The decision is random.
    fn refuses(&mut self) -> bool {
        self.options.keeps > 0 && self.rng.chance(self.options.keeps)
    }

    /// Releases a remote key or a registration of `region`: calls `take` on the inner provider, unless the device refuses the release.
    fn take_back(&mut self, region: MrId, take: impl FnOnce(&mut P) -> Result<()>) -> Result<()> {
        let refused = self.refuses();
        let hardware = &mut lock(&self.fabric).ports[self.node].hardware;
        if refused {
            hardware.kept.extend(self.keys.get(&region.0));
            return Err(busy("ibv_dereg_mr"));
        }
        if let Some(key) = self.keys.remove(&region.0) {
            hardware.kept.remove(&key);
        }
        take(&mut self.inner)
    }

    fn registered(&mut self, region: MemoryRegion, access: Access) -> MemoryRegion {
        if access.intersects(Access::REMOTE) {
            self.keys.insert(region.id.0, region.remote_key.0);
        }
        region
    }

    /// Records the memory of posted work requests. Reports a violation if a queue pair that was not released still uses that memory.
    fn give<'a>(&mut self, qp: QpId, given: impl Iterator<Item = (&'a SgeList, Option<(u64, bool)>)>) {
        if self.options.keeps == 0 {
            return;
        }
        let posted = self.posted.entry(qp.0).or_default();
        for (sges, send) in given {
            for (start, end) in parts(sges) {
                let mut fabric = lock(&self.fabric);
                if fabric.ports[self.node].hardware.uses(start, end) {
                    let what = if send.is_some() { "sent from" } else { "received in" };
                    fabric.violation(format!("node{}: {what} memory that a queue pair has kept", self.node));
                }
            }
            match send {
                Some((wr_id, answered)) => posted.sends.push_back((wr_id, answered, *sges)),
                None => posted.receives.push_back(*sges),
            }
        }
    }

    /// Polls the completions of the inner provider, and schedules their arrivals.
    fn harvest(&mut self) {
        let mut fabric = lock(&self.fabric);
        fabric.tick();
        let now = fabric.now();
        let cqs: Vec<CqId> = fabric.ports[self.node].hardware.queues.iter().map(|queue| queue.id).collect();
        drop(fabric);
        for cq in cqs {
            self.scratch.clear();
            if self.inner.poll_cq(cq, usize::MAX, &mut self.scratch).is_err() {
                continue;
            }
            for i in 0..self.scratch.len() {
                let completion = self.scratch[i];
                let at = self.arrival(&completion, now);
                self.send_on(cq, completion, at);
            }
        }
        let mut fabric = lock(&self.fabric);
        fabric.hardware_arrives(self.node);
    }

    /// Chooses a random time at which a completion arrives.
    fn arrival(&mut self, completion: &WorkCompletion, now: u64) -> u64 {
        let mut at = now;
        if self.rng.chance(self.options.late) {
            at += self.rng.skewed(0..=self.options.late_by);
        }
        if completion.status == WcStatus::Flushed {
            let rng = &mut self.rng;
            let lazy = self.options.lazy_flush;
            if *self.lazy.entry(completion.qp.0).or_insert_with(|| rng.chance(lazy)) {
                at += rng.range(0..=2000 * MS);
            }
        }
        let (qp, work) = (completion.qp.0, Work::of(completion.opcode));
        if work == Work::Read {
            // A read never completes before earlier sends. Later sends complete after the read, unless the device permits overtaking.
            at = at.max(self.last.get(&(qp, Work::Send)).copied().unwrap_or(0));
        }
        let queue = (qp, if work == Work::Read && !self.options.overtaking { Work::Send } else { work });
        let last = self.last.entry(queue).or_default();
        at = at.max(*last);
        *last = at;
        at
    }

    fn send_on(&mut self, cq: CqId, mut completion: WorkCompletion, at: u64) {
        if !completion.status.is_success() {
            // In a completion without success, only `wr_id`, `qp` and the kind (a receive or not) are valid. All other fields get
            // random values.
            let noise = WcOpcode::Other(self.rng.below(9) as u32);
            completion.opcode = if Work::of(completion.opcode) == Work::Recv { WcOpcode::Recv } else { noise };
            completion.byte_len = self.rng.bits() as u32;
        }
        let mut fabric = lock(&self.fabric);
        let node = self.node;
        if let Some(queue) = fabric.ports[node].hardware.queue(cq) {
            queue.late.push(Late { at, item: completion });
            let (held, entries) = (queue.late.len() + queue.visible.len(), queue.entries);
            if held > entries {
                fabric.violation(format!("node{node}: {held} completions overran a queue of {entries}"));
            }
        }
        fabric.at(at, Event::Hardware(node));
    }

    /// Polls the connection-manager events of the inner provider, and schedules their arrivals.
    fn harvest_cm(&mut self, now: Instant) -> Result<()> {
        while let Some(event) = self.inner.next_cm_event(now)? {
            let mut fabric = lock(&self.fabric);
            let mut at = fabric.now();
            if self.rng.chance(self.options.cm_late) {
                at += self.rng.skewed(0..=self.options.late_by);
            }
            let last = self.cm_last.entry(event.id.0).or_default();
            at = at.max(*last);
            *last = at;
            if let CmEventKind::Disconnected(cause) = &event.kind {
                if self.rng.chance(self.options.never) {
                    continue;
                }
                if self.rng.chance(self.options.twice) {
                    let again = at + self.rng.skewed(0..=20 * MS);
                    let twin = CmEvent { id: event.id, kind: CmEventKind::Disconnected(cause.clone()) };
                    fabric.ports[self.node].hardware.cm_late.push(Late { at: again, item: twin });
                    fabric.at(again, Event::Hardware(self.node));
                }
            }
            fabric.ports[self.node].hardware.cm_late.push(Late { at, item: event });
            fabric.at(at, Event::Hardware(self.node));
        }
        Ok(())
    }

    /// Handles the remaining completions of a destroyed queue pair: delivers all of them immediately, or drops all of them.
    fn settle(&mut self, id: CmId) {
        let purge = self.rng.chance(self.options.purge);
        let mut fabric = lock(&self.fabric);
        let now = fabric.now();
        let hardware = &mut fabric.ports[self.node].hardware;
        for queue in &mut hardware.queues {
            if purge {
                queue.visible.retain(|completion| completion.qp.0 != id.0);
                queue.late.retain(|late| late.item.qp.0 != id.0);
            }
            for late in &mut queue.late {
                if late.item.qp.0 == id.0 {
                    late.at = late.at.min(now);
                }
            }
        }
        // After an id is destroyed, a late `Disconnected` event may still arrive, but no other event.
        let stays = |event: &CmEvent| event.id != id || matches!(event.kind, CmEventKind::Disconnected(_));
        hardware.cm_visible.retain(stays);
        hardware.cm_late.retain(|late| stays(&late.item));
        fabric.hardware_arrives(self.node);
        for work in [Work::Send, Work::Recv, Work::Read] {
            self.last.remove(&(id.0, work));
        }
        self.cm_last.remove(&id.0);
        self.lazy.remove(&id.0);
    }
}

// SAFETY: every call is forwarded to the inner provider. Completions are only delayed or dropped, never added.
unsafe impl<P: Provider> Provider for HardwareProvider<P> {
    delegate!(
        self.inner:
        name device device_at channel next_deadline listen local_address resolve reject create_qp
    );

    fn progress(&mut self, now: Instant, drive: Drive) -> bool {
        let more = self.inner.progress(now, drive);
        self.harvest();
        more
    }

    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()> {
        let result = self.inner.connect(id, param);
        self.harvest();
        result
    }

    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()> {
        let result = self.inner.accept(id, param, now);
        self.harvest();
        result
    }

    fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()> {
        let result = self.inner.disconnect(id, now);
        self.harvest();
        result
    }

    fn destroy_id(&mut self, id: CmId, now: Instant) -> Result<()> {
        let posted = self.posted.remove(&id.0);
        let refused = posted.is_some() && self.refuses();
        if refused {
            // The device refuses to release the queue pair. The id is destroyed, but the queue pair continues to use its memory.
            self.inner.disconnect(id, now)?;
            let Outstanding { receives, sends } = posted.unwrap_or_default();
            let all = receives.iter().chain(sends.iter().map(|(.., sges)| sges));
            let hardware = &mut lock(&self.fabric).ports[self.node].hardware;
            hardware.kept_memory.extend(all.flat_map(parts));
            hardware.refused.0 += 1;
        } else {
            self.inner.destroy_id(id, now)?;
        }
        self.harvest();
        self.settle(id);
        if refused { Err(busy("ibv_destroy_qp")) } else { Ok(()) }
    }

    fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>> {
        self.harvest_cm(now)?;
        self.harvest();
        let hardware = &mut lock(&self.fabric).ports[self.node].hardware;
        while let Some(event) = hardware.cm_visible.pop_front() {
            let is_failure =
                |other: &CmEvent| other.id == event.id && matches!(other.kind, CmEventKind::ConnectFailed(_));
            let mut later = hardware.cm_visible.iter().chain(hardware.cm_late.iter().map(|late| &late.item));
            // An attempt that has failed since is not reported as resolved.
            if !matches!(event.kind, CmEventKind::Resolved { .. }) || !later.any(is_failure) {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }

    fn register(
        &mut self,
        device: DeviceId,
        memory: &Arc<Memory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<MemoryRegion> {
        let region = self.inner.register(device, memory, range, access)?;
        Ok(self.registered(region, access))
    }

    fn deregister(&mut self, region: MrId) -> Result<()> {
        let result = self.take_back(region, |inner| inner.deregister(region));
        lock(&self.fabric).ports[self.node].hardware.refused.1 += usize::from(result.is_err());
        result
    }

    fn create_cq(&mut self, device: DeviceId, attr: &CqAttr) -> Result<CqId> {
        let id = self.inner.create_cq(device, attr)?;
        let queue =
            Queue { id, entries: attr.entries as usize, armed: false, visible: VecDeque::new(), late: Vec::new() };
        lock(&self.fabric).ports[self.node].hardware.queues.push(queue);
        Ok(id)
    }

    fn destroy_cq(&mut self, cq: CqId) -> Result<()> {
        self.inner.destroy_cq(cq)?;
        let hardware = &mut lock(&self.fabric).ports[self.node].hardware;
        hardware.queues.retain(|queue| queue.id != cq);
        hardware.events.retain(|&event| event != cq);
        Ok(())
    }

    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        self.give(qp, chain.iter().map(|wr| (&wr.sges, None)));
        let result = self.inner.post_recv(qp, chain);
        self.harvest();
        result
    }

    fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> std::result::Result<Posted, PostError> {
        let answered = |op| matches!(op, SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
        self.give(qp, chain.iter().map(|wr| (&wr.sges, Some((wr.wr_id, answered(wr.op))))));
        let result = self.inner.post_send(qp, chain);
        self.harvest();
        result
    }

    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> {
        let short = self.rng.chance(self.options.short_poll);
        let cut = self.rng.bits();
        let mut fabric = lock(&self.fabric);
        fabric.tick();
        let node = self.node;
        let Some(queue) = fabric.ports[node].hardware.queue(cq) else {
            return Err(TransportError::Stale { object: "completion queue" });
        };
        let mut count = max.min(queue.visible.len());
        if short && count > 1 {
            count = 1 + cut as usize % count;
        }
        for wc in queue.visible.drain(..count) {
            if let Some(posted) = self.posted.get_mut(&wc.qp.0) {
                posted.done(wc.wr_id);
            }
            out.push(wc);
        }
        Ok(count)
    }

    fn req_notify(&mut self, cq: CqId, _: Notify) -> Result<()> {
        let early = self.rng.chance(self.options.before_arming);
        let mut fabric = lock(&self.fabric);
        fabric.tick();
        let now = fabric.now();
        let node = self.node;
        let queue =
            fabric.ports[node].hardware.queue(cq).ok_or(TransportError::Stale { object: "completion queue" })?;
        if early {
            if let Some(soonest) = queue.late.iter().map(|late| late.at).min() {
                // Very late completions stay in flight, because their work requests are not finished yet.
                if soonest < now + 10 * MS && queue.arrive(soonest.max(now)) {
                    fabric.ports[node].hardware.events.push_back(cq);
                    fabric.raise(node, index(NetChannel::Completion));
                }
            }
        }
        if let Some(queue) = fabric.ports[node].hardware.queue(cq) {
            queue.armed = true;
        }
        Ok(())
    }

    fn next_completion_event(&mut self, device: DeviceId) -> Result<Option<CqId>> {
        self.inner.next_completion_event(device)?;
        Ok(lock(&self.fabric).ports[self.node].hardware.events.pop_front())
    }

    fn liveness(&self) -> Option<&dyn Liveness> {
        if self.options.extensions { Some(self) } else { None }
    }

    fn extensions(&mut self) -> Option<&mut dyn Extensions> {
        if self.options.extensions { Some(self) } else { None }
    }

    roles!(own: remote_keys);
    roles!(
        none:
        shared_receives handover off_loop_registration foreign_memory datagrams adapter
        immediate_sends shared_memory exchange device_events
    );
}

impl<P: Provider> RemoteKeys for HardwareProvider<P> {
    fn restrict(&mut self, region: MrId, qp: QpId) -> Result<bool> {
        self.inner.remote_keys().map_or(Ok(false), |keys| keys.restrict(region, qp))
    }

    fn invalidate(&mut self, region: MrId) -> Result<()> {
        self.take_back(region, |inner| inner.remote_keys().map_or(Ok(()), |keys| keys.invalidate(region)))
    }
}

impl<P: Provider> Liveness for HardwareProvider<P> {
    fn last_heard(&self, qp: QpId) -> Option<Instant> {
        self.inner.liveness()?.last_heard(qp)
    }

    fn has_unread(&self, qp: QpId) -> bool {
        self.inner.liveness().is_some_and(|liveness| liveness.has_unread(qp))
    }
}

impl<P: Provider> Extensions for HardwareProvider<P> {
    fn enable_extensions(&mut self, qp: QpId) -> Result<()> {
        self.inner.extensions().map_or(Ok(()), |role| role.enable_extensions(qp))
    }
}
