//! A provider within one process: connections between the providers of one [`Network`], without a socket. `docs/writing-a-provider.md`
//! walks through this file.

use std::collections::{BTreeSet, VecDeque};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write};
use std::os::{fd::AsRawFd, fd::RawFd, unix::net::UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{net::IpAddr, net::SocketAddr, ops::Range, time::Instant};

use rdma_transport::{roles::*, slab::Key, slab::Slab, *};
use rdma_transport_embedded::soft::{cq::CompletionQueues, keys::KeyTable, work_queues::WorkQueues};

const NAME: &str = "loopback";
const DEVICE: DeviceId = DeviceId(0);
// SAFETY: entries of sends are read in the post, and those of receives are written until these
// complete or are flushed.
const ENTRIES: mem::EntryAccess = unsafe { mem::EntryAccess::new() };
const NO_QUEUE_PAIR: TransportError = TransportError::Stale { object: "queue pair" };

// The channels by which a provider notifies its user.

/// A descriptor that is readable after `ring`, until `silence` is called.
#[derive(Debug)]
struct Bell { far: UnixStream, near: UnixStream, rung: bool }

impl Bell {
    fn new() -> io::Result<Self> {
        let (far, near) = UnixStream::pair()?;
        far.set_nonblocking(true)?;
        near.set_nonblocking(true)?;
        Ok(Self { far, near, rung: false })
    }

    fn ring(&mut self) {
        if !std::mem::replace(&mut self.rung, true) {
            _ = (&self.far).write(&[1]); // The stream is empty, so the write succeeds.
        }
    }

    /// Clears the descriptor. A getter that has nothing to return calls this, so that the next event raises an edge. Returns `None`.
    fn silence<T>(&mut self) -> Option<T> {
        if std::mem::take(&mut self.rung) { _ = (&self.near).read(&mut [0]); }
        None
    }
}

// The state that the providers share.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State { Listening, Resolved, Connecting, Requested, Up, Ended }

impl State {
    const fn refuse<T>(self, call: &'static str) -> Result<T> {
        let names = ["listening", "resolved", "connecting", "requested", "up", "ended"];
        Err(TransportError::InvalidState { call, state: names[self as usize] })
    }
}

/// A connection-manager id, with its queue pair.
#[derive(Debug)]
struct Id {
    side: Key, state: State, local: SocketAddr, read_depth: ReadDepth, queues: Option<WorkQueues>,
    /// The address of the peer.
    remote: SocketAddr,
    /// The id of the connection at the peer. Set when the peer has got the connect request.
    peer: Key,
    /// The time by which this side's connect must have succeeded.
    deadline: Option<Instant>,
}

/// The state of one provider.
#[derive(Debug)]
struct Side {
    address: IpAddr, cqs: CompletionQueues, keys: KeyTable, events: VecDeque<CmEvent>,
    deadlines: BTreeSet<(Instant, Key)>, cm: Bell, completions: Bell,
}

impl Side {
    fn report(&mut self, id: Key, kind: CmEventKind) {
        self.events.push_back(CmEvent { id: CmId(id), kind });
        self.cm.ring();
    }

    /// Makes the descriptor readable if a completion was pushed. Each call that may push completions calls this.
    fn ring_if_completed(&mut self) {
        if self.cqs.take_edge() { self.completions.ring(); }
    }
}

#[derive(Debug, Default)]
struct Shared { sides: Slab<Side>, ids: Slab<Id> }

impl Shared {
    fn side(&mut self, side: Key) -> &mut Side { self.sides.get_mut(side).expect("lives as long as its provider") }

    /// Returns an id of the provider `side`. Returns an error if the id belongs to another provider or does not exist.
    fn id(&mut self, side: Key, id: Key) -> Result<&mut Id> {
        self.ids.get_mut(id).filter(|id| id.side == side).ok_or(TransportError::Stale { object: "connection id" })
    }

    /// Returns the queue pair of an id, and the state of the id's provider. Returns `None` if the id has no queue pair or does not exist.
    fn queues(&mut self, id: Key) -> Option<(&mut WorkQueues, &mut Side)> {
        let id = self.ids.get_mut(id)?;
        Some((id.queues.as_mut()?, self.sides.get_mut(id.side)?))
    }

    /// Returns the listener at an address, and the listener's provider. Returns `None` if no listener has this address.
    fn listener(&self, address: SocketAddr) -> Option<(Key, Key)> {
        let mut ids = self.ids.iter();
        ids.find(|(_, id)| id.state == State::Listening && id.local == address).map(|(key, id)| (key, id.side))
    }

    fn insert(&mut self, side: Key, state: State, local: SocketAddr, remote: SocketAddr) -> Key {
        let (read_depth, queues, peer, deadline) = (ReadDepth::default(), None, Key::NONE, None);
        self.ids.insert(Id { side, state, local, remote, peer, deadline, read_depth, queues })
    }

    /// Moves an id to its next state. At the end of a connection, flushes its queue pair first. Reports the event last.
    fn advance(&mut self, key: Key, state: State, event: CmEventKind) {
        let Some(id) = self.ids.get_mut(key) else { return };
        let Some(side) = self.sides.get_mut(id.side) else { return };
        id.state = state;
        if let Some(deadline) = id.deadline.take() { side.deadlines.remove(&(deadline, key)); }
        if state == State::Ended { id.queues.iter_mut().for_each(|queues| queues.flush(&mut side.cqs)); }
        side.ring_if_completed();
        side.report(key, event);
    }

    /// Ends an id, and then its peer.
    fn end(&mut self, key: Key, event: CmEventKind, why: DisconnectCause) {
        self.advance(key, State::Ended, event);
        self.lose(self.ids.get(key).map_or(Key::NONE, |id| id.peer), why);
    }

    /// Ends an id whose peer has ended.
    fn lose(&mut self, key: Key, why: DisconnectCause) {
        let event = match self.ids.get(key).map(|id| id.state) {
            Some(State::Up) => CmEventKind::Disconnected(why),
            Some(State::Connecting) => CmEventKind::Rejected { private_data: Box::default() },
            Some(State::Requested) => CmEventKind::ConnectFailed(ConnectFailure::PeerClosed),
            _ => return,
        };
        self.advance(key, State::Ended, event);
    }

    fn destroy(&mut self, key: Key) {
        let Some(id) = self.ids.remove(key) else { return };
        let side = self.side(id.side);
        let asked = |event: &CmEvent| match event.kind {
            CmEventKind::ConnectRequest { listener, .. } if listener.0 == key => Some(event.id.0),
            _ => None,
        };
        let unseen: Vec<Key> = side.events.iter().filter_map(asked).collect();
        side.events.retain(|event| event.id.0 != key);
        side.deadlines.retain(|deadline| deadline.1 != key);
        id.queues.into_iter().for_each(|queues| queues.release(&mut side.cqs));
        self.lose(id.peer, DisconnectCause::Peer);
        unseen.into_iter().for_each(|request| self.destroy(request));
    }

    /// Posts a receive. If the connection has ended, the receive is flushed immediately.
    fn post_recv(&mut self, side: Key, qp: Key, wr: &RecvWr) -> Result<()> {
        let ended = self.id(side, qp)?.state == State::Ended;
        let (queues, side) = self.queues(qp).ok_or(NO_QUEUE_PAIR)?;
        queues.post_recv(wr)?;
        if ended { queues.flush(&mut side.cqs); }
        side.ring_if_completed();
        Ok(())
    }

    /// Posts a send, carries it out and completes it.
    fn post_send(&mut self, side: Key, qp: Key, wr: &SendWr) -> Result<()> {
        let id = self.id(side, qp)?;
        let (state, peer) = (id.state, id.peer);
        id.queues.as_ref().ok_or(NO_QUEUE_PAIR)?.check_send(wr)?;
        let (status, byte_len) = match state {
            State::Up => self.carry_out(qp, peer, wr).map_or_else(|status| (status, 0), |len| (WcStatus::Success, len)),
            State::Ended => (WcStatus::Flushed, 0),
            _ => return state.refuse("post_send"),
        };
        let (queues, side) = self.queues(qp).ok_or(NO_QUEUE_PAIR)?;
        queues.send_done(wr, status, byte_len, &mut side.cqs);
        side.ring_if_completed();
        if state == State::Up && !status.is_success() {
            let event = CmEventKind::Disconnected(DisconnectCause::WorkRequest(status.into()));
            self.end(qp, event, DisconnectCause::PeerViolation(status.to_string()));
        }
        Ok(())
    }

    /// Carries out a send. Returns the number of its bytes, or the status with which it fails.
    fn carry_out(&mut self, own: Key, peer: Key, wr: &SendWr) -> std::result::Result<u32, WcStatus> {
        let (queues, side) = self.queues(peer).ok_or(WcStatus::RetryExceeded)?;
        let (mut bytes, len) = (Vec::new(), wr.sges.total_len());
        let reach = |at: RemoteAddress, right| {
            side.keys.remote(peer, at.key.0, at.address, len, right).map_err(|_| WcStatus::RemoteAccessError)
        };
        if !wr.op.answered() {
            wr.sges.as_slice().iter().for_each(|sge| ENTRIES.append_to(sge, &mut bytes));
        }
        match wr.op {
            SendOp::Write(_) | SendOp::Read(_) if len == 0 => {}
            SendOp::Write(at) => reach(at, Access::REMOTE_WRITE)?.fill(&bytes),
            SendOp::Read(at) => {
                reach(at, Access::REMOTE_READ)?.append_to(&mut bytes);
                let sink = wr.sges.as_slice().first().ok_or(WcStatus::LocalProtectionError)?;
                let (_, side) = self.queues(own).ok_or(WcStatus::Flushed)?;
                let span = side.keys.sink(sink.local_key().0, sink.address() as u64, len);
                span.ok_or(WcStatus::LocalProtectionError)?.fill(&bytes);
            }
            SendOp::Send => {
                let delivered = queues.deliver(&bytes, &mut side.cqs);
                side.ring_if_completed();
                delivered?;
            }
            _ => return Err(WcStatus::LocalQpOperationError), // `post_send` has refused other operations.
        }
        Ok(len as u32)
    }
}

/// A network within the process. The providers on one network can connect to each other.
#[derive(Clone, Debug, Default)]
pub struct Network(Arc<Mutex<Shared>>);

impl Network {
    fn lock(&self) -> MutexGuard<'_, Shared> { self.0.lock().unwrap_or_else(PoisonError::into_inner) }
}

// The provider itself.

/// A provider with one device and one address.
#[derive(Debug)]
pub struct Loopback { network: Network, side: Key, address: IpAddr, info: DeviceInfo, channels: [RawFd; 2] }

impl Loopback {
    /// Makes a provider with this address.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub fn new(network: &Network, address: IpAddr) -> io::Result<Self> {
        let features = Features::SERVER_SENDS_FIRST | Features::SOLICITED_EVENTS | Features::READ | Features::WRITE;
        let mut capabilities = Capabilities::portable(features);
        capabilities.max_inline = 256;
        let info = DeviceInfo { name: "loopback0".into(), capabilities };
        let (cm, completions) = (Bell::new()?, Bell::new()?);
        let channels = [cm.near.as_raw_fd(), completions.near.as_raw_fd()];
        let (cqs, keys, events, deadlines) = Default::default();
        let side = network.lock().sides.insert(Side { address, cqs, keys, events, deadlines, cm, completions });
        Ok(Self { network: network.clone(), side, address, info, channels })
    }

    fn lock(&self) -> MutexGuard<'_, Shared> { self.network.lock() }

    fn check_device(&self, device: DeviceId) -> Result<()> {
        if device == DEVICE { Ok(()) } else { Err(TransportError::Stale { object: "device" }) }
    }

    /// Returns the RDMA Read depths that the program requests. A requested depth of 0 means the largest depth of the device.
    fn read_depth(&self, param: &ConnectParam<'_>) -> ReadDepth {
        let depth = |asked: u16| if asked == 0 { self.info.capabilities.max_read_depth } else { asked };
        let (responder_resources, initiator_depth) = (depth(param.responder_resources), depth(param.initiator_depth));
        ReadDepth { responder_resources, initiator_depth }
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        let mut shared = self.lock();
        let own: Vec<Key> = shared.ids.iter().filter(|(_, id)| id.side == self.side).map(|(key, _)| key).collect();
        own.into_iter().for_each(|id| shared.destroy(id));
        shared.sides.remove(self.side);
    }
}

const fn unsupported<T>(feature: &'static str) -> Result<T> { Err(TransportError::Unsupported { provider: NAME, feature }) }

/// Posts a chain of work requests up to the first one that fails.
fn post<T>(chain: &[T], one: impl FnMut(&T) -> Result<()>) -> std::result::Result<(), PostError> {
    let mut results = chain.iter().map(one).enumerate();
    results.try_for_each(|(posted, result)| result.map_err(|error| PostError { posted, error }))
}

// SAFETY: the memory of a send is read in `Shared::carry_out`, before its completion is pushed. The memory of a receive is written only
// while the receive is in its queue; the receive is removed from the queue when its completion is pushed. `Shared::destroy` drops the
// queues, and `Drop` calls `Shared::destroy`. Regions are looked up for each use, under the lock that `deregister` takes. Handles are keys
// of slabs.
unsafe impl Provider for Loopback {
    fn name(&self) -> &'static str { NAME }

    fn device(&self, device: DeviceId) -> Option<&DeviceInfo> { (device == DEVICE).then_some(&self.info) }

    fn device_at(&mut self, address: IpAddr) -> Result<DeviceId> {
        let other = || TransportError::NoDevice { reason: format!("{NAME} is at {}, and not at {address}", self.address) };
        (address == self.address || address.is_unspecified()).then_some(DEVICE).ok_or_else(other)
    }

    fn channel(&self, channel: Channel) -> Result<RawFd> {
        match channel {
            Channel::ConnectionManager => Ok(self.channels[0]),
            Channel::Completions(device) => self.check_device(device).map(|()| self.channels[1]),
        }
    }

    fn next_deadline(&self) -> Option<Instant> { self.lock().side(self.side).deadlines.first().map(|first| first.0) }

    fn progress(&mut self, now: Instant, _: Drive) -> bool {
        let mut shared = self.lock();
        while let Some(&(_, id)) = shared.side(self.side).deadlines.first().filter(|first| first.0 <= now) {
            shared.end(id, CmEventKind::ConnectFailed(ConnectFailure::Timeout), DisconnectCause::Peer);
        }
        false
    }

    fn listen(&mut self, address: SocketAddr, options: &ListenParam) -> Result<CmId> {
        options.note_ignored(NAME)?;
        let refuse = |kind: io::ErrorKind| Err(TransportError::Listen { address, source: kind.into() });
        if self.device_at(address.ip()).is_err() { return refuse(io::ErrorKind::AddrNotAvailable); }
        let mut shared = self.lock();
        let ports = if address.port() == 0 { 1..=u16::MAX } else { address.port()..=address.port() };
        let free = ports.map(|port| SocketAddr::new(self.address, port)).find(|to| shared.listener(*to).is_none());
        let Some(local) = free else { return refuse(io::ErrorKind::AddrInUse) };
        Ok(CmId(shared.insert(self.side, State::Listening, local, local)))
    }

    fn local_address(&self, id: CmId) -> Option<SocketAddr> { self.lock().id(self.side, id.0).ok().map(|id| id.local) }

    fn resolve(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId> {
        options.check()?;
        options.note_ignored(NAME);
        let from_here = match &options.source {
            Source::Any => true,
            Source::Address(address) => *address == self.address,
            Source::Device { name, .. } => *name == self.info.name,
        };
        let mut shared = self.lock();
        if !from_here || shared.sides.iter().all(|(_, side)| side.address != peer.ip()) {
            return Err(TransportError::NoDevice { reason: format!("{NAME} does not reach {peer} from {:?}", options.source) });
        }
        let id = shared.insert(self.side, State::Resolved, SocketAddr::new(self.address, 0), peer);
        shared.id(self.side, id)?.deadline = Some(deadline);
        shared.side(self.side).deadlines.insert((deadline, id));
        shared.side(self.side).report(id, CmEventKind::Resolved { device: DEVICE });
        Ok(CmId(id))
    }

    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()> {
        self.info.capabilities.check_private_data(NAME, param.private_data)?;
        let (mut shared, read_depth) = (self.lock(), self.read_depth(param));
        let from = shared.id(self.side, id.0)?;
        if from.state != State::Resolved || from.queues.is_none() { return from.state.refuse("connect"); }
        (from.state, from.read_depth) = (State::Connecting, read_depth);
        let (peer, to) = (from.local, from.remote);
        let Some((listener, side)) = shared.listener(to) else {
            shared.advance(id.0, State::Ended, CmEventKind::ConnectFailed(ConnectFailure::Refused));
            return Ok(());
        };
        let request = shared.insert(side, State::Requested, to, peer);
        shared.id(self.side, id.0)?.peer = request;
        shared.id(side, request)?.peer = id.0;
        let ReadDepth { responder_resources: initiator_depth, initiator_depth: responder_resources } = read_depth;
        let read_depth = ReadDepth { responder_resources, initiator_depth };
        let (listener, device, private_data) = (CmId(listener), DEVICE, param.private_data.into());
        let event = CmEventKind::ConnectRequest { listener, device, peer, private_data, read_depth };
        shared.side(side).report(request, event);
        Ok(())
    }

    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, _: Instant) -> Result<()> {
        self.info.capabilities.check_private_data(NAME, param.private_data)?;
        let (mut shared, own) = (self.lock(), self.read_depth(param));
        let to = shared.id(self.side, id.0)?;
        if to.state != State::Requested || to.queues.is_none() { return to.state.refuse("accept"); }
        let peer = to.peer;
        let theirs = shared.ids.get(peer).map(|id| id.read_depth).unwrap_or_default();
        let out = own.initiator_depth.min(theirs.responder_resources);
        let back = theirs.initiator_depth.min(own.responder_resources);
        let here = ReadDepth { responder_resources: back, initiator_depth: out };
        let there = ReadDepth { responder_resources: out, initiator_depth: back };
        let up = |data: &[u8], read_depth| CmEventKind::Established { private_data: data.into(), read_depth };
        shared.advance(id.0, State::Up, up(&[], here));
        shared.advance(peer, State::Up, up(param.private_data, there));
        Ok(())
    }

    fn reject(&mut self, id: CmId, private_data: &[u8], _: Instant) -> Result<()> {
        self.info.capabilities.check_private_data(NAME, private_data)?;
        let mut shared = self.lock();
        let to = shared.id(self.side, id.0)?;
        if to.state != State::Requested { return to.state.refuse("reject"); }
        let peer = to.peer;
        shared.advance(peer, State::Ended, CmEventKind::Rejected { private_data: private_data.into() });
        shared.destroy(id.0);
        Ok(())
    }

    fn disconnect(&mut self, id: CmId, _: Instant) -> Result<()> {
        let mut shared = self.lock();
        let event = match shared.id(self.side, id.0)?.state {
            State::Listening => return State::Listening.refuse("disconnect"),
            State::Ended => return Ok(()),
            State::Up => CmEventKind::Disconnected(DisconnectCause::Local),
            _ => CmEventKind::ConnectFailed(ConnectFailure::System("given up here".into())),
        };
        shared.end(id.0, event, DisconnectCause::Peer);
        Ok(())
    }

    fn destroy_id(&mut self, id: CmId, _: Instant) -> Result<()> {
        let mut shared = self.lock();
        if shared.id(self.side, id.0).is_ok() { shared.destroy(id.0); }
        Ok(())
    }

    fn next_cm_event(&mut self, _: Instant) -> Result<Option<CmEvent>> {
        let mut shared = self.lock();
        let side = shared.side(self.side);
        Ok(side.events.pop_front().or_else(|| side.cm.silence()))
    }

    fn register(
        &mut self, device: DeviceId, memory: &Arc<Memory>, range: Range<usize>, access: Access,
    ) -> Result<MemoryRegion> {
        self.check_device(device)?;
        if access.contains(Access::ON_DEMAND) { return unsupported("on-demand paging"); }
        let random = || RandomState::new().build_hasher().finish() as u32;
        let (id, key) = self.lock().side(self.side).keys.register(memory, range, access, random)?;
        Ok(MemoryRegion { id, local_key: LocalKey(key), remote_key: RemoteKey(key) })
    }

    fn deregister(&mut self, region: MrId) -> Result<()> { self.lock().side(self.side).keys.deregister(region) }

    fn create_cq(&mut self, device: DeviceId, attr: &CqAttr) -> Result<CqId> {
        self.check_device(device)?;
        attr.check(NAME, &self.info.capabilities)?;
        Ok(self.lock().side(self.side).cqs.create(attr.entries as usize))
    }

    fn destroy_cq(&mut self, cq: CqId) -> Result<()> { self.lock().side(self.side).cqs.destroy(cq) }

    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId> {
        let mut shared = self.lock();
        let of = shared.id(self.side, id.0)?;
        let fits = matches!(of.state, State::Resolved | State::Requested) && of.queues.is_none();
        if !fits { return of.state.refuse("create_qp"); }
        if attr.srq.is_some() { return unsupported("shared receives"); }
        let limits = &self.info.capabilities;
        let queues = WorkQueues::new(QpId(id.0), attr, limits, &mut shared.side(self.side).cqs, ENTRIES)?;
        shared.id(self.side, id.0)?.queues = Some(queues);
        Ok(QpId(id.0))
    }

    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        let mut shared = self.lock();
        post(chain, |wr| shared.post_recv(self.side, qp.0, wr))
    }

    fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> std::result::Result<Posted, PostError> {
        let (mut shared, features) = (self.lock(), self.info.capabilities.features);
        let before = shared.side(self.side).cqs.pushed();
        let mut one = |wr: &SendWr| shared.post_send(self.side, qp.0, wr);
        post(chain, |wr| if features.contains(wr.op.feature()) { one(wr) } else { unsupported(wr.op.name()) })?;
        Ok(Posted::of(shared.side(self.side).cqs.pushed() != before))
    }

    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> {
        let mut shared = self.lock();
        let (start, polled) = (out.len(), shared.side(self.side).cqs.poll(cq, max, out)?);
        for completion in &out[start..] {
            match shared.queues(completion.qp.0) {
                Some((queues, _)) => queues.polled(completion.opcode),
                None => shared.side(self.side).cqs.release_orphan(cq),
            }
        }
        Ok(polled)
    }

    fn req_notify(&mut self, cq: CqId, _: Notify) -> Result<()> { self.lock().side(self.side).cqs.arm(cq) }

    fn next_completion_event(&mut self, _: DeviceId) -> Result<Option<CqId>> {
        let mut shared = self.lock();
        let side = shared.side(self.side);
        Ok(side.cqs.next_event().or_else(|| side.completions.silence()))
    }

    fn shared_receives(&mut self) -> Option<&mut dyn SharedReceives> { None }
    fn remote_keys(&mut self) -> Option<&mut dyn RemoteKeys> { None }
    fn liveness(&self) -> Option<&dyn Liveness> { None }
    fn extensions(&mut self) -> Option<&mut dyn Extensions> { None }
    fn handover(&mut self) -> Option<&mut dyn Handover> { None }
    fn off_loop_registration(&mut self) -> Option<&mut dyn OffLoopRegistration> { None }
    fn foreign_memory(&mut self) -> Option<&mut dyn ForeignMemory> { None }
    fn datagrams(&mut self) -> Option<&mut dyn Datagrams> { None }
    fn adapter(&self) -> Option<&dyn Adapter> { None }
    fn immediate_sends(&mut self) -> Option<&mut dyn ImmediateSends> { None }
    fn shared_memory(&mut self) -> Option<&mut dyn SharedMemory> { None }
    fn exchange(&mut self) -> Option<&mut dyn Exchange> { None }
    fn device_events(&mut self) -> Option<&mut dyn DeviceEvents> { None }
}
