//! [`Iwarp`]: the embedded provider behind the [`Provider`] seam.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;

use super::NAME;
use super::config::{IwarpConfig, MAX_READ_DEPTH};
use super::endpoint::{Accepting, Attempt, Endpoint, State};
use super::half_open::Handshakes;
use super::linger::Linger;
use super::net::{Channel, Net, Ready, SocketId};
use super::queue_pair::{MAX_MESSAGE, MAX_QUEUE_DEPTH, QueuePair, Role, is_receive};
use super::resources::Resources;
use super::startup::{self, FrameReader, MAX_PRIVATE_DATA_OUT, Terms};
use super::transmit::MAX_INLINE;
use super::wire::StartupKind;
use crate::caps::{Capabilities, Features};
use crate::cm::{CmEvent, CmEventKind, CmId, ConnectFailure, ConnectParam, Detached, DisconnectCause};
use crate::error::{Error, Result};
use crate::mem::Memory;
use crate::mr::{Access, LocalKey, MemoryRegion, MrId, RemoteKey};
use crate::provider::{CqId, DeviceId, DeviceInfo, Drive, PostError, Provider};
use crate::qp::{QpAttr, QpId, SrqId};
use crate::slab::{Key, Slab};
use crate::wc::WorkCompletion;
use crate::wr::{RecvWr, SendWr};

pub(super) const DEVICE: DeviceId = DeviceId(0);
/// Size of the buffer that receives for all connections, bytes.
const STAGING: usize = 256 * 1024;
pub(super) const STALE_ID: Error = Error::Stale { object: "connection id" };
const STALE_QP: Error = Error::Stale { object: "queue pair" };

/// A source of randomness, which fills the slice that it gets.
pub type Entropy = Box<dyn FnMut(&mut [u8]) + Send>;

/// The owner of a socket or a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Owner {
    Endpoint(Key),
    Linger(Key),
}

/// iWARP in user space. One thread drives it, and it does nothing between two calls.
pub struct Iwarp<N: Net> {
    pub(super) config: IwarpConfig,
    pub(super) net: N,
    entropy: Entropy,
    device: DeviceInfo,
    pub(super) endpoints: Slab<Endpoint>,
    pub(super) lingers: Slab<Linger>,
    /// The owners of the sockets, by the slot of the socket's key.
    owners: Vec<Option<(SocketId, Owner)>>,
    pub(super) resources: Resources,
    pub(super) cm_events: VecDeque<CmEvent>,
    /// Deadlines, the earliest first. An entry counts only while its owner still has that deadline.
    pub(super) deadlines: BinaryHeap<Reverse<(Instant, Owner)>>,
    /// Connections that have something to read or to send.
    pub(super) ready: VecDeque<Key>,
    /// Listeners that may have more connections to accept.
    pub(super) backlog: VecDeque<Key>,
    pub(super) staging: Box<[u8]>,
    pub(super) edges: Vec<(SocketId, Ready)>,
    pub(super) handshakes: Handshakes,
    /// Listeners that wait for room.
    pub(super) paused: Vec<Key>,
    /// The connection that received something last.
    pub(super) hot: Option<Key>,
    pub(super) live: usize,
    pub(super) spins: u32,
    /// Whether this is within the getter of the CM channel, which will return what is raised now.
    pub(super) within_cm: bool,
}

impl<N: Net> fmt::Debug for Iwarp<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Iwarp")
            .field("net", &self.net)
            .field("endpoints", &self.endpoints.len())
            .field("live", &self.live)
            .field("handshakes", &self.handshakes.unfinished)
            .field("lingering", &self.lingers.len())
            .finish_non_exhaustive()
    }
}

impl<N: Net> Iwarp<N> {
    /// A provider on `net`. `entropy` gives the keys of memory regions, which are as unpredictable as it is.
    ///
    /// # Errors
    /// For settings out of range.
    pub fn new(config: IwarpConfig, net: N, entropy: Entropy) -> Result<Self> {
        config.check()?;
        let extensions = Features::WRITE_WITH_IMMEDIATE | Features::ATOMICS;
        let features = Features::SERVER_SENDS_FIRST
            | Features::READ
            | Features::WRITE
            | Features::SEND_WITH_INVALIDATE
            | Features::REMOTE_INVALIDATION
            | Features::SHARED_RECEIVE_QUEUE
            | if config.extensions { extensions | Features::EXTENSIONS_BY_AGREEMENT } else { Features::empty() };
        let mut capabilities = Capabilities::portable(features);
        capabilities.max_inline = MAX_INLINE as u32;
        capabilities.max_queue_depth = MAX_QUEUE_DEPTH;
        capabilities.max_shared_receives = MAX_QUEUE_DEPTH;
        capabilities.max_completion_queue = 1 << 22;
        capabilities.max_private_data = MAX_PRIVATE_DATA_OUT;
        capabilities.max_message = MAX_MESSAGE;
        capabilities.max_read_depth = MAX_READ_DEPTH;
        Ok(Self {
            config,
            net,
            entropy,
            device: DeviceInfo { name: "iwarp0".into(), capabilities },
            endpoints: Slab::default(),
            lingers: Slab::default(),
            owners: Vec::new(),
            resources: Resources::default(),
            cm_events: VecDeque::new(),
            deadlines: BinaryHeap::new(),
            ready: VecDeque::new(),
            backlog: VecDeque::new(),
            staging: vec![0; STAGING].into_boxed_slice(),
            edges: Vec::with_capacity(256),
            handshakes: Handshakes::default(),
            paused: Vec::new(),
            hot: None,
            live: 0,
            spins: 0,
            within_cm: false,
        })
    }

    /// The sockets.
    pub const fn net(&self) -> &N {
        &self.net
    }

    /// The sockets, to change something about them.
    pub const fn net_mut(&mut self) -> &mut N {
        &mut self.net
    }

    pub(super) fn owner(&self, socket: SocketId) -> Option<Owner> {
        let (id, owner) = (*self.owners.get(socket.0.slot() as usize)?)?;
        (id == socket).then_some(owner)
    }

    pub(super) fn own(&mut self, socket: SocketId, owner: Owner) {
        let slot = socket.0.slot() as usize;
        if slot >= self.owners.len() {
            self.owners.resize(slot + 1, None);
        }
        self.owners[slot] = Some((socket, owner));
    }

    pub(super) fn disown(&mut self, socket: SocketId) {
        if let Some(owner) = self.owners.get_mut(socket.0.slot() as usize)
            && owner.is_some_and(|(id, _)| id == socket)
        {
            *owner = None;
        }
    }

    pub(super) fn close(&mut self, socket: SocketId, reset: bool) {
        self.disown(socket);
        self.net.close(socket, reset);
    }

    /// Closes a socket after `rest` is sent.
    pub(super) fn linger(&mut self, socket: SocketId, rest: Vec<u8>, now: Instant) {
        if self.lingers.len() >= self.config.max_lingering {
            self.close(socket, false);
            return;
        }
        let mut linger = Linger::new(socket, rest, now + self.config.linger);
        if linger.serve(&mut self.net, &mut self.staging) {
            self.close(socket, false);
            return;
        }
        let deadline = linger.deadline;
        let owner = Owner::Linger(self.lingers.insert(linger));
        self.own(socket, owner);
        self.push_deadline(deadline, owner);
    }

    /// Sets or clears the one deadline of an endpoint.
    pub(super) fn set_deadline(&mut self, key: Key, deadline: Option<Instant>) {
        if let Some(endpoint) = self.endpoints.get_mut(key) {
            endpoint.deadline = deadline;
            if let Some(deadline) = deadline {
                self.push_deadline(deadline, Owner::Endpoint(key));
            }
        }
    }

    fn push_deadline(&mut self, deadline: Instant, owner: Owner) {
        if self.deadlines.len() > 64 + 4 * (self.endpoints.len() + self.lingers.len()) {
            let mut deadlines = std::mem::take(&mut self.deadlines);
            deadlines.retain(|&Reverse((at, owner))| self.is_due(at, owner));
            self.deadlines = deadlines;
        }
        self.deadlines.push(Reverse((deadline, owner)));
    }

    /// Whether `owner` still has this deadline.
    pub(super) fn is_due(&self, at: Instant, owner: Owner) -> bool {
        match owner {
            Owner::Endpoint(key) => self.endpoints.get(key).is_some_and(|endpoint| endpoint.deadline == Some(at)),
            Owner::Linger(key) => self.lingers.get(key).is_some_and(|linger| linger.deadline == at),
        }
    }

    /// Queues an event of the CM channel.
    pub(super) fn raise(&mut self, key: Key, kind: CmEventKind) {
        if self.cm_events.is_empty() && !self.within_cm {
            self.net.wake(Channel::Cm);
        }
        self.cm_events.push_back(CmEvent { id: CmId(key), kind });
    }

    /// Changes the state of an endpoint, and the counters that depend on it; returns the previous state.
    pub(super) fn transition(&mut self, key: Key, state: State) -> Option<State> {
        let endpoint = self.endpoints.get_mut(key)?;
        self.handshakes.unfinished += usize::from(state.is_handshake());
        self.live += usize::from(matches!(state, State::Live));
        let previous = std::mem::replace(&mut endpoint.state, state);
        self.handshakes.unfinished -= usize::from(previous.is_handshake());
        self.live -= usize::from(matches!(previous, State::Live));
        if let State::Requesting { ticket, .. } = &previous {
            self.handshakes.half_open.remove(*ticket);
        }
        if previous.is_handshake() {
            self.resume();
        }
        Some(previous)
    }

    /// Wakes the completion channel for events that came outside of progress.
    pub(super) fn wake_completions(&mut self) {
        if self.resources.cqs.take_edge() {
            self.net.wake(Channel::Completion);
        }
    }

    pub(super) fn endpoint(&self, id: CmId) -> Result<&Endpoint> {
        self.endpoints.get(id.0).filter(|e| !matches!(e.state, State::Requesting { .. })).ok_or(STALE_ID)
    }

    fn is_device(device: DeviceId) -> Result<()> {
        if device == DEVICE { Ok(()) } else { Err(Error::Stale { object: "device" }) }
    }

    fn private_data(data: &[u8]) -> Result<()> {
        let (len, max) = (data.len(), MAX_PRIVATE_DATA_OUT);
        if len > max { Err(Error::PrivateDataTooLong { provider: NAME, len, max }) } else { Ok(()) }
    }

    fn terms(&self, param: &ConnectParam<'_>) -> Terms {
        let or_default = |depth| if depth == 0 { self.config.read_depth } else { depth };
        let (ird, ord) = (or_default(param.responder_resources), or_default(param.initiator_depth));
        Terms::new(self.config.crc, ird, ord, self.config.markers)
    }

    fn add_region(&mut self, memory: &Arc<Memory>, range: Range<usize>, access: Access) -> Result<MemoryRegion> {
        if access.contains(Access::ON_DEMAND) {
            return Err(Error::Unsupported { provider: NAME, feature: "on-demand paging" });
        }
        let entropy = &mut self.entropy;
        let (id, stag) = self.resources.stags.register(memory, range, access, || {
            let mut bytes = [0; 4];
            entropy(&mut bytes);
            u32::from_ne_bytes(bytes)
        })?;
        Ok(MemoryRegion { id, local_key: LocalKey(stag), remote_key: RemoteKey(stag) })
    }

    fn add_qp(&mut self, id: CmId, attr: &QpAttr, srq: Option<SrqId>) -> Result<QpId> {
        let endpoint = self.endpoint(id)?;
        if !matches!(endpoint.state, State::Resolved(_) | State::Offered(_)) {
            return Err(Error::InvalidState { call: "create_qp", state: endpoint.state.name() });
        }
        if endpoint.qp.is_some() {
            return Err(Error::InvalidState { call: "create_qp", state: "with a queue pair" });
        }
        let qp = QueuePair::new(QpId(id.0), attr, srq)?;
        self.resources.cqs.reserve(attr.send_cq, attr.max_send_wr)?;
        let receives = match srq {
            Some(srq) => self.resources.attach(srq, attr.recv_cq),
            None => self.resources.cqs.reserve(attr.recv_cq, attr.max_recv_wr),
        };
        if let Err(error) = receives {
            self.resources.cqs.release(attr.send_cq, attr.max_send_wr, 0);
            return Err(error);
        }
        if let Some(endpoint) = self.endpoints.get_mut(id.0) {
            endpoint.qp = Some(Box::new(qp));
        }
        Ok(QpId(id.0))
    }
}

// SAFETY: 1. The entries of work requests are in the queues of their queue pair, or of their shared queue, from post
// until the call that puts the completion into the ring; an FPDU that still names one is sent or copied before.
// `destroy_id` and `destroy_srq` drop the queues, `QueuePair::end` and `abandon` the FPDUs. An entry is written for
// receives, reads and atomics only. 2. Each completion is made where a work request leaves its queue, and receives are
// filled within their entries. 3. The table of STags holds the memory; every use by a peer is looked up there and ends
// with the call. 4. All of this is owned by the provider and used within its calls only. 5. Handles are keys of slabs,
// which never reuse one.
#[allow(unsafe_code, reason = "the promise above; the code it is about has no unsafe part")]
unsafe impl<N: Net> Provider for Iwarp<N> {
    fn name(&self) -> &'static str {
        NAME
    }

    fn device(&self, device: DeviceId) -> Option<&DeviceInfo> {
        (device == DEVICE).then_some(&self.device)
    }

    fn cm_channel(&self) -> RawFd {
        self.net.channel(Channel::Cm)
    }

    fn completion_channel(&self, device: DeviceId) -> Result<RawFd> {
        Self::is_device(device)?;
        Ok(self.net.channel(Channel::Completion))
    }

    fn next_deadline(&self) -> Option<Instant> {
        let Reverse((at, owner)) = *self.deadlines.peek()?;
        if self.is_due(at, owner) {
            return Some(at);
        }
        // The earliest entry no longer counts.
        self.deadlines.iter().filter(|Reverse((at, owner))| self.is_due(*at, *owner)).map(|Reverse((at, _))| *at).min()
    }

    fn progress(&mut self, now: Instant, drive: Drive) -> bool {
        let more = self.drive(now, drive);
        // The caller asks for completion events next, so no edge is needed.
        self.resources.cqs.take_edge();
        more
    }

    fn listen(&mut self, address: SocketAddr, backlog: u32) -> Result<CmId> {
        let socket = self.net.listen(address, backlog).map_err(|source| Error::Listen { address, source })?;
        let key = self.endpoints.insert(Endpoint::new(State::Listening(Accepting::Yes), Some(socket)));
        self.own(socket, Owner::Endpoint(key));
        Ok(CmId(key))
    }

    fn local_address(&self, id: CmId) -> Option<SocketAddr> {
        self.net.local_address(self.endpoint(id).ok()?.socket?).ok()
    }

    fn resolve(&mut self, peer: SocketAddr, deadline: Instant) -> Result<CmId> {
        let key = self.endpoints.insert(Endpoint::new(State::Resolved(peer), None));
        self.set_deadline(key, Some(deadline));
        self.raise(key, CmEventKind::Resolved { device: DEVICE });
        Ok(CmId(key))
    }

    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()> {
        Self::private_data(param.private_data)?;
        param.note_ignored("iwarp");
        let endpoint = self.endpoint(id)?;
        let State::Resolved(peer) = endpoint.state else {
            return Err(Error::InvalidState { call: "connect", state: endpoint.state.name() });
        };
        if endpoint.qp.is_none() {
            return Err(Error::InvalidState { call: "connect", state: "without a queue pair" });
        }
        let attempt = Attempt {
            terms: self.terms(param),
            private_data: param.private_data.to_vec(),
            reader: FrameReader::new(StartupKind::Reply),
        };
        self.open(id.0, Box::new(attempt), peer);
        self.wake_completions();
        Ok(())
    }

    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()> {
        Self::private_data(param.private_data)?;
        param.note_ignored("iwarp");
        let terms = self.terms(param);
        let key = id.0;
        let endpoint = self.endpoint(id)?;
        let (State::Offered(asked), Some(socket)) = (&endpoint.state, endpoint.socket) else {
            return Err(Error::InvalidState { call: "accept", state: endpoint.state.name() });
        };
        if endpoint.qp.is_none() {
            return Err(Error::InvalidState { call: "accept", state: "without a queue pair" });
        }
        let (frame, agreement) = startup::accept(&terms, asked, param.private_data);
        self.transition(key, State::Live);
        if let Some(endpoint) = self.endpoints.get_mut(key) {
            endpoint.frame = frame;
        }
        self.begin(key, socket, Role::Responder, &agreement, now);
        self.wake_completions();
        Ok(())
    }

    fn reject(&mut self, id: CmId, private_data: &[u8], now: Instant) -> Result<()> {
        Self::private_data(private_data)?;
        let endpoint = self.endpoint(id)?;
        let State::Offered(asked) = endpoint.state else {
            return Err(Error::InvalidState { call: "reject", state: endpoint.state.name() });
        };
        let reply = startup::reject(&asked, private_data);
        if let Some(socket) = self.remove(id.0) {
            self.linger(socket, reply, now);
        }
        Ok(())
    }

    fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()> {
        let key = id.0;
        let endpoint = self.endpoint(id)?;
        match &endpoint.state {
            State::Listening(_) => return Err(Error::InvalidState { call: "disconnect", state: "listening" }),
            State::Requesting { .. } | State::Dead => {}
            State::Live => self.end(key, DisconnectCause::Local, None, now),
            State::Offered(asked) => {
                let reply = startup::reject(asked, &[]);
                self.fail(key, None, Some(reply), now);
            }
            State::Resolved(_) => self.fail(key, None, None, now),
            State::Connecting(..) | State::Replying(..) => {
                let failure = ConnectFailure::System("disconnected here while connecting".into());
                self.fail(key, Some(failure), None, now);
            }
        }
        self.wake_completions();
        Ok(())
    }

    fn destroy_id(&mut self, id: CmId, now: Instant) {
        let key = id.0;
        if self.endpoint(id).is_err() {
            return;
        }
        let rest = match self.endpoints.get_mut(key) {
            Some(endpoint) => match &endpoint.state {
                State::Offered(asked) => Some(startup::reject(asked, &[])),
                State::Live => {
                    let rest = endpoint.qp.as_mut().map(|qp| qp.abandon()).unwrap_or_default();
                    Some(endpoint.unsent(rest))
                }
                _ => None,
            },
            None => None,
        };
        if let Some(socket) = self.remove(key) {
            match rest {
                Some(rest) => self.linger(socket, rest, now),
                None => self.close(socket, false),
            }
        }
    }

    fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>> {
        self.within_cm = true;
        let event = self.next_event(now);
        self.within_cm = false;
        self.wake_completions();
        event
    }

    fn detach(&mut self, id: CmId) -> Result<Detached> {
        self.hand_out(id)
    }

    fn attach(&mut self, request: Detached, now: Instant) -> Result<(CmId, DeviceId)> {
        self.take_in(request, now)
    }

    fn register(&mut self, device: DeviceId, memory: &Arc<Memory>, access: Access) -> Result<MemoryRegion> {
        Self::is_device(device)?;
        self.add_region(memory, 0..memory.len(), access)
    }

    fn device_at(&mut self, _: IpAddr) -> Result<DeviceId> {
        Ok(DEVICE)
    }

    fn register_range(
        &mut self,
        device: DeviceId,
        memory: &Arc<Memory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<MemoryRegion> {
        Self::is_device(device)?;
        self.add_region(memory, range, access)
    }

    fn deregister(&mut self, region: MrId) -> Result<()> {
        self.resources.stags.deregister(region)
    }

    fn restrict(&mut self, region: MrId, qp: QpId) -> Result<()> {
        self.resources.stags.restrict(region, qp.0)
    }

    fn invalidate(&mut self, region: MrId) -> Result<()> {
        self.resources.stags.invalidate(region)
    }

    fn create_cq(&mut self, device: DeviceId, entries: u32) -> Result<CqId> {
        Self::is_device(device)?;
        if entries == 0 || entries > self.device.capabilities.max_completion_queue {
            let (value, range) = (entries.into(), "1 to the device's max_completion_queue");
            return Err(Error::OutOfRange { what: "entries of a completion queue", value, range });
        }
        Ok(self.resources.cqs.create(entries as usize))
    }

    fn destroy_cq(&mut self, cq: CqId) -> Result<()> {
        self.resources.cqs.destroy(cq)
    }

    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId> {
        self.add_qp(id, attr, None)
    }

    fn create_qp_with_srq(&mut self, id: CmId, attr: &QpAttr, srq: SrqId) -> Result<QpId> {
        self.add_qp(id, attr, Some(srq))
    }

    fn create_srq(&mut self, device: DeviceId, max_wr: u32) -> Result<SrqId> {
        Self::is_device(device)?;
        if max_wr == 0 || max_wr > MAX_QUEUE_DEPTH {
            return Err(Error::OutOfRange { what: "max_wr", value: max_wr.into(), range: "1 to 32768" });
        }
        Ok(self.resources.create_srq(max_wr))
    }

    fn destroy_srq(&mut self, srq: SrqId) -> Result<()> {
        self.resources.destroy_srq(srq)
    }

    fn post_srq_recv(&mut self, srq: SrqId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        for (posted, wr) in chain.iter().enumerate() {
            let result = self.resources.srq(srq).and_then(|queue| queue.post(*wr));
            result.map_err(|error| PostError { posted, error })?;
        }
        Ok(())
    }

    fn last_heard(&self, qp: QpId) -> Option<Instant> {
        self.endpoints.get(qp.0)?.last_heard
    }

    fn has_unread(&self, qp: QpId) -> bool {
        self.endpoints.get(qp.0).is_some_and(|endpoint| matches!(endpoint.state, State::Live) && endpoint.readable)
    }

    fn enable_extensions(&mut self, qp: QpId) -> Result<()> {
        if !self.config.extensions {
            return Err(Error::Unsupported { provider: NAME, feature: "extensions: see IwarpConfig::extensions" });
        }
        let qp = self.endpoints.get_mut(qp.0).and_then(|endpoint| endpoint.qp.as_mut()).ok_or(STALE_QP)?;
        qp.enable_extensions();
        Ok(())
    }

    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        let Some(qp) = self.endpoints.get_mut(qp.0).and_then(|endpoint| endpoint.qp.as_mut()) else {
            return Err(PostError { posted: 0, error: STALE_QP });
        };
        let result = qp.post_recv(chain, &mut self.resources.cqs);
        self.wake_completions();
        result
    }

    fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> std::result::Result<(), PostError> {
        let key = qp.0;
        let Some(qp) = self.endpoints.get_mut(key).and_then(|endpoint| endpoint.qp.as_mut()) else {
            return Err(PostError { posted: 0, error: STALE_QP });
        };
        let result = qp.post_send(chain, &mut self.resources);
        self.transmit(key);
        self.wake_completions();
        result
    }

    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> {
        let start = out.len();
        let count = self.resources.cqs.poll(cq, max, out)?;
        if count == 0 {
            return Ok(0);
        }
        for of_one in out[start..].chunk_by(|one, next| one.qp == next.qp) {
            let id = of_one[0].qp;
            if let Some(qp) = self.endpoints.get_mut(id.0).and_then(|endpoint| endpoint.qp.as_mut()) {
                for completion in of_one {
                    if let Some(srq) = qp.polled(completion.opcode) {
                        self.resources.receive_polled(srq);
                    }
                }
            } else {
                for completion in of_one {
                    self.resources.orphan_polled(cq, id, is_receive(completion.opcode));
                }
            }
        }
        Ok(count)
    }

    fn req_notify(&mut self, cq: CqId) -> Result<()> {
        self.resources.cqs.arm(cq)
    }

    fn next_completion_event(&mut self, device: DeviceId) -> Result<Option<CqId>> {
        Self::is_device(device)?;
        Ok(self.resources.cqs.next_event())
    }
}
