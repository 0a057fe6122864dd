//! [`Iwarp`]: the embedded implementation of [`Provider`].

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;

use super::config::{IwarpConfig, MAX_READ_DEPTH, SharedMemoryPolicy};
use super::endpoint::{Accepting, Attempt, CmEndpoint, EndpointState};
use super::half_open::Handshakes;
use super::hub::{Hub, Owner};
use super::net::{Net, NetChannel, Ready, SocketId};
use super::ports::Ports;
use super::queue_pair::{MAX_QUEUE_DEPTH, QueuePair, Role};
use super::setup_listener::{Links, SegmentSetup};
use super::startup::{self, FrameReader, MAX_PRIVATE_DATA_OUT, PATH_LEN, StartupTerms};
use super::transmit::MAX_INLINE;
use super::wire::StartupKind;
use super::{NAME, WITHIN_HOST};
use crate::caps::{Capabilities, Features};
use crate::cm::{
    CmEvent, CmEventKind, CmId, ConnectFailure, ConnectParam, Detached, DisconnectCause, ListenParam, PathOptions,
    Source,
};
use crate::cq::{CqAttr, Notify};
use crate::error::{Result, TransportError};
use crate::mem::{Memory, Sge};
use crate::mr::{Access, LocalKey, MemoryRegion, MrId, RemoteKey};
use crate::newcomers::Host;
use crate::provider::{self, CqId, DeviceId, DeviceInfo, Drive, Entropy, PostError, Posted, Provider};
use crate::qp::{QpAttr, QpId, SrqId};
use crate::roce::packet::MAX_PAYLOAD;
use crate::roles::{
    Adapter, Datagrams, DeviceEvents, Exchange, Extensions, ForeignMemory, Handover, ImmediateSends, Liveness,
    OffLoopRegistration, Paths, RemoteKeys, SharedMemory, SharedReceives,
};
use crate::shm::account::WindowAccount;
use crate::slab::{Key, Slab};
use crate::soft::checks::{EXTENSIONS, MAX_MESSAGE};
use crate::srq::SrqAttr;
use crate::wc::WorkCompletion;
use crate::wr::{RecvWr, RemoteAddress, SendWr};

pub(super) const DEVICE: DeviceId = DeviceId(0);
pub(super) const STALE_ID: TransportError = TransportError::Stale { object: "connection id" };
pub(super) const STALE_QP: TransportError = TransportError::Stale { object: "queue pair" };

/// The embedded provider: iWARP in user space. The provider has no thread: all its work is done during the calls of its methods.
pub struct Iwarp<N: Net> {
    /// What the engines share.
    pub(super) hub: Hub<N>,
    device: DeviceInfo,
    pub(super) endpoints: Slab<CmEndpoint<N::Segment>>, // bound: connections, half-open, queries
    pub(super) edges: Vec<(SocketId, Ready)>,           // bound: turn
    pub(super) handshakes: Handshakes,
    /// The connection that received most recently. A busy poll reads from this connection first.
    pub(super) hot: Option<Key>,
    pub(super) links: Links,
    pub(super) datagrams: Ports,
    /// The number of live connections.
    pub(super) live: usize,
    pub(super) spins: u32,
}

impl<N: Net> fmt::Debug for Iwarp<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Iwarp")
            .field("net", &self.hub.net)
            .field("endpoints", &self.endpoints.len())
            .field("live", &self.live)
            .field("handshakes", &self.handshakes.unfinished)
            .field("lingering", &self.hub.lingers.len())
            .finish_non_exhaustive()
    }
}

impl<N: Net> Iwarp<N> {
    /// Creates a provider on the sockets of `net`. `entropy` produces the STags of memory regions and other secrets. A peer must not be
    /// able to predict the output of `entropy`.
    ///
    /// # Errors
    /// Returns an error if a setting is out of range.
    pub fn new(config: IwarpConfig, net: N, entropy: Entropy) -> Result<Self> {
        config.check()?;
        let features = Features::SERVER_SENDS_FIRST
            | Features::SOLICITED_EVENTS
            | Features::READ
            | Features::WRITE
            | Features::SEND_WITH_INVALIDATE
            | Features::REMOTE_INVALIDATION
            | Features::SHARED_RECEIVE_QUEUE
            | Features::GROWING_COMPLETION_QUEUES
            | if config.extensions { EXTENSIONS | Features::EXTENSIONS_BY_AGREEMENT } else { Features::empty() };
        let has_datagrams = net.has_packets() && config.shared_memory != SharedMemoryPolicy::Require;
        let of_datagrams = if has_datagrams { Features::DATAGRAMS | Features::MULTICAST } else { Features::empty() };
        let mut capabilities = Capabilities::portable(features | of_datagrams);
        capabilities.max_datagram = if has_datagrams { MAX_PAYLOAD as u32 } else { 0 };
        capabilities.max_inline = MAX_INLINE as u32;
        capabilities.max_queue_depth = MAX_QUEUE_DEPTH;
        capabilities.max_shared_receives = MAX_QUEUE_DEPTH;
        capabilities.max_completion_queue = 1 << 22;
        capabilities.max_private_data = MAX_PRIVATE_DATA_OUT;
        capabilities.max_message = MAX_MESSAGE;
        capabilities.max_read_depth = MAX_READ_DEPTH;
        let account = Arc::new(WindowAccount::new(config.within_host.limits()));
        Ok(Self {
            hub: Hub::new(config, net, entropy),
            device: DeviceInfo { name: "iwarp0".into(), capabilities },
            endpoints: Slab::default(),
            edges: Vec::with_capacity(256),
            handshakes: Handshakes::default(),
            hot: None,
            links: Links { account, ..Links::default() },
            datagrams: Ports::default(),
            live: 0,
            spins: 0,
        })
    }

    /// Returns the sockets.
    pub const fn net(&self) -> &N {
        &self.hub.net
    }

    /// Returns the sockets, so that the caller can change their settings.
    pub const fn net_mut(&mut self) -> &mut N {
        &mut self.hub.net
    }

    /// Changes the state of an endpoint, and updates the numbers of unfinished handshakes and of live connections. Returns the previous
    /// state, or `None` if the endpoint does not exist.
    pub(super) fn transition(&mut self, key: Key, state: EndpointState) -> Option<EndpointState> {
        let endpoint = self.endpoints.get_mut(key)?;
        self.handshakes.unfinished += usize::from(state.is_handshake());
        self.live += usize::from(matches!(state, EndpointState::Live));
        let previous = std::mem::replace(&mut endpoint.state, state);
        self.handshakes.unfinished -= usize::from(previous.is_handshake());
        self.live -= usize::from(matches!(previous, EndpointState::Live));
        let leaves = matches!(endpoint.state, EndpointState::Dead);
        self.links.count -= usize::from(leaves && matches!(previous, EndpointState::Live) && endpoint.link.is_some());
        let setup = if leaves { endpoint.setup.take() } else { None };
        if let EndpointState::Requesting { ticket, .. } = &previous {
            self.handshakes.half_open.remove(*ticket);
        }
        if previous.is_handshake() {
            self.resume();
        }
        if let Some(socket) = setup.and_then(|setup| setup.socket()) {
            self.hub.close(socket, false);
        }
        Some(previous)
    }

    pub(super) fn endpoint(&self, id: CmId) -> Result<&CmEndpoint<N::Segment>> {
        self.endpoints.get(id.0).filter(|e| !e.state.is_unknown()).ok_or(STALE_ID)
    }

    /// Returns the number of live connections and open UDP ports.
    pub(super) fn sockets(&self) -> usize {
        self.live + self.datagrams.tables.ports.len()
    }

    pub(super) fn is_device(device: DeviceId) -> Result<()> {
        if device == DEVICE { Ok(()) } else { Err(TransportError::Stale { object: "device" }) }
    }

    fn terms(&self, param: &ConnectParam<'_>) -> StartupTerms {
        let or_default = |depth| if depth == 0 { self.hub.config.read_depth } else { depth };
        let (ird, ord) = (or_default(param.responder_resources), or_default(param.initiator_depth));
        // An id may have no socket yet, so these terms treat the peer as remote. The caller applies the CRC policy again after TCP has
        // connected.
        StartupTerms::new(self.hub.config.crc.is_requested(false), ird, ord, self.hub.config.markers)
    }

    fn add_region(&mut self, memory: &Arc<Memory>, range: Range<usize>, access: Access) -> Result<MemoryRegion> {
        if access.contains(Access::ON_DEMAND) {
            return Err(TransportError::Unsupported { provider: NAME, feature: "on-demand paging" });
        }
        let entropy = &mut self.hub.entropy;
        let (id, stag) = self.hub.resources.keys.register(memory, range, access, || {
            let mut bytes = [0; 4];
            entropy(&mut bytes);
            u32::from_ne_bytes(bytes)
        })?;
        Ok(MemoryRegion { id, local_key: LocalKey(stag), remote_key: RemoteKey(stag) })
    }

    fn add_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId> {
        let endpoint = self.endpoint(id)?;
        let free = match &endpoint.state {
            EndpointState::Resolved(_) | EndpointState::Offered(_) => endpoint.qp.is_none(),
            &EndpointState::Datagram(id) => self.datagrams.may_have_queue_pair(id)?,
            state => return Err(TransportError::InvalidState { call: "create_qp", state: state.name() }),
        };
        if !free {
            return Err(TransportError::InvalidState { call: "create_qp", state: "with a queue pair" });
        }
        attr.check(&self.device.capabilities)?;
        self.hub.resources.cqs.reserve(attr.send_cq, attr.max_send_wr)?;
        let receives = match attr.srq {
            Some(srq) => self.hub.resources.attach(srq, attr.recv_cq),
            None => self.hub.resources.cqs.reserve(attr.recv_cq, attr.max_recv_wr),
        };
        if let Err(error) = receives {
            self.hub.resources.cqs.release(attr.send_cq, attr.max_send_wr, 0);
            return Err(error);
        }
        match self.endpoints.get_mut(id.0) {
            Some(&mut CmEndpoint { state: EndpointState::Datagram(id), .. }) => {
                self.datagrams.add_queue_pair(&mut self.hub, id, attr)?;
            }
            Some(endpoint) => endpoint.qp = Some(Box::new(QueuePair::new(QpId(id.0), attr))),
            None => {}
        }
        Ok(QpId(id.0))
    }
}

// SAFETY: Each number is a duty in the documentation of `Provider`.
// 1. The scatter-gather entries of a work request are in the queues of its queue pair or of the shared queue. The entries stay there from
//    the post until the call that adds the completion to the completion queue. Before that call, an FPDU that still refers to such an entry
//    is sent or copied. `destroy_id` and `destroy_srq` drop the queues; `QueuePair::end` and `abandon` drop the FPDUs. An entry is only
//    written for receives, Reads and atomic operations.
// 2. A completion is created when its work request leaves the queue. A receive is only filled within its entries.
// 3. Work requests leave their queue in order, and completions leave the completion queue in order.
// 4. The table of STags holds the memory of regions. For every access that this provider makes for a peer, the region is looked up in this
//    table, and the access ends within the same call. A direct region (`Access::DIRECT`) is the exception: peers on this host map it, and
//    can access its pages even after `deregister`, as the documentation of that right says.
// 5. The provider owns all these objects, and uses them only within calls of its methods. When it is dropped, its links are dropped, and
//    with them the lendings of memory to peers on this host end.
// 6. Handles are keys of slabs, which never reuse a key.
#[allow(unsafe_code, reason = "the promise above; the code it is about has no unsafe part")]
unsafe impl<N: Net> Provider for Iwarp<N> {
    fn name(&self) -> &'static str {
        if self.hub.requires_shared_memory() { WITHIN_HOST } else { NAME }
    }

    fn device(&self, device: DeviceId) -> Option<&DeviceInfo> {
        (device == DEVICE).then_some(&self.device)
    }

    fn device_at(&mut self, _: IpAddr) -> Result<DeviceId> {
        Ok(DEVICE)
    }

    fn channel(&self, channel: provider::Channel) -> Result<RawFd> {
        match channel {
            provider::Channel::ConnectionManager => Ok(self.hub.net.channel(NetChannel::Cm)),
            provider::Channel::Completions(device) => {
                Self::is_device(device)?;
                Ok(self.hub.net.channel(NetChannel::Completion))
            }
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.hub.deadlines.next()
    }

    fn progress(&mut self, now: Instant, drive: Drive) -> bool {
        let more = self.drive(now, drive);
        // The caller polls for completion events after `progress`, so `progress` need not wake the completion channel.
        self.hub.resources.cqs.take_edge();
        more
    }

    fn listen(&mut self, address: SocketAddr, options: &ListenParam) -> Result<CmId> {
        options.note_ignored(NAME)?;
        let socket = self
            .hub
            .net
            .listen(address, options.backlog)
            .map_err(|source| TransportError::Listen { address, source })?;
        let key = self.endpoints.insert(CmEndpoint::new(EndpointState::Listening(Accepting::Yes), Some(socket)));
        self.hub.own(socket, Owner::Endpoint(key));
        Ok(CmId(key))
    }

    fn local_address(&self, id: CmId) -> Option<SocketAddr> {
        match self.endpoint(id).ok()? {
            &CmEndpoint { state: EndpointState::Datagram(id), .. } => self.datagrams.address_of(id),
            endpoint => self.hub.net.local_address(endpoint.socket?).ok(),
        }
    }

    fn resolve(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId> {
        options.check()?;
        if options.source != Source::Any {
            return Err(TransportError::Unsupported {
                provider: NAME,
                feature: "choice of the source of a connection",
            });
        }
        options.note_ignored(NAME);
        let key = self.endpoints.insert(CmEndpoint::new(EndpointState::Resolving(peer), None));
        self.hub.deadlines.set(Owner::Endpoint(key), deadline);
        self.hub.enqueue_start(Host::of(peer.ip()), key, CmEventKind::Resolved { device: DEVICE });
        Ok(CmId(key))
    }

    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()> {
        self.device.capabilities.check_private_data(NAME, param.private_data)?;
        param.note_ignored("iwarp");
        let endpoint = self.endpoint(id)?;
        if let EndpointState::Datagram(id) = endpoint.state {
            return self.datagrams.query_peer(&mut self.hub, id, param.private_data);
        }
        let EndpointState::Resolved(peer) = endpoint.state else {
            return Err(TransportError::InvalidState { call: "connect", state: endpoint.state.name() });
        };
        if endpoint.qp.is_none() {
            return Err(TransportError::InvalidState { call: "connect", state: "without a queue pair" });
        }
        let attempt = Attempt {
            terms: self.terms(param),
            private_data: param.private_data.to_vec(),
            shows_path: param.self_delimiting && param.private_data.len() + PATH_LEN <= MAX_PRIVATE_DATA_OUT,
            reader: FrameReader::new(StartupKind::Reply),
        };
        self.open(id.0, Box::new(attempt), peer);
        self.hub.wake_completions();
        Ok(())
    }

    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()> {
        self.device.capabilities.check_private_data(NAME, param.private_data)?;
        param.note_ignored("iwarp");
        let terms = self.terms(param);
        let key = id.0;
        let endpoint = self.endpoint(id)?;
        if let EndpointState::Datagram(id) = endpoint.state {
            return self.datagrams.reply_to_query(&mut self.hub, id, id, "accept", param.private_data);
        }
        let (EndpointState::Offered(asked), Some(socket)) = (&endpoint.state, endpoint.socket) else {
            return Err(TransportError::InvalidState { call: "accept", state: endpoint.state.name() });
        };
        if endpoint.qp.is_none() {
            return Err(TransportError::InvalidState { call: "accept", state: "without a queue pair" });
        }
        let asked = *asked;
        let path = self.hub.net.local_path(socket);
        let crc = self.hub.config.crc.is_requested(path.is_some() && path == asked.path);
        let offer = self.offer(key, path, &asked, now);
        if offer.is_none() && self.hub.requires_shared_memory() {
            let (why, is_temporary) = match path {
                None => ("the peer is on another host", false),
                Some(_) if !asked.local => ("the peer uses no shared memory", false),
                Some(_) if !asked.is_direct(path) => ("there is a proxy between the peer and this process", false),
                _ if self.links.listener.shut_until.is_some() => ("other users have disturbed its setup", true),
                Some(_) => ("there is no listener for it", true),
            };
            return Err(TransportError::SharedMemoryOnly { provider: WITHIN_HOST, why, is_temporary });
        }
        let mut private_data = param.private_data.to_vec();
        offer.iter().for_each(|offer| private_data.extend_from_slice(&offer.emit()));
        let (frame, agreement) = startup::accept(&StartupTerms { crc, ..terms }, &asked, &private_data);
        self.transition(key, EndpointState::Live);
        if let Some(endpoint) = self.endpoints.get_mut(key) {
            endpoint.frame = frame;
            endpoint.setup = offer.map(|offer| Box::new(SegmentSetup::Offered(offer.secret)));
        }
        self.begin(key, socket, Role::Responder, &agreement, now);
        self.hub.wake_completions();
        Ok(())
    }

    fn reject(&mut self, id: CmId, private_data: &[u8], now: Instant) -> Result<()> {
        self.device.capabilities.check_private_data(NAME, private_data)?;
        let endpoint = self.endpoint(id)?;
        if let EndpointState::Datagram(datagrams) = endpoint.state {
            self.datagrams.reject_query(&mut self.hub, datagrams, private_data)?;
            self.remove(id.0);
            return Ok(());
        }
        let EndpointState::Offered(asked) = endpoint.state else {
            return Err(TransportError::InvalidState { call: "reject", state: endpoint.state.name() });
        };
        let reply = startup::reject(&asked, private_data);
        if let Some(socket) = self.remove(id.0) {
            self.hub.linger(socket, reply, now);
        }
        Ok(())
    }

    fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()> {
        let key = id.0;
        let endpoint = self.endpoint(id)?;
        match &endpoint.state {
            EndpointState::Listening(_) => {
                return Err(TransportError::InvalidState { call: "disconnect", state: "listening" });
            }
            &EndpointState::Datagram(id) => self.datagrams.end_datagrams(&mut self.hub, id)?,
            EndpointState::Requesting { .. } | EndpointState::Queued(..) | EndpointState::Dead => {}
            EndpointState::Live => self.end(key, DisconnectCause::Local, None, now),
            EndpointState::Offered(asked) => {
                let reply = startup::reject(asked, &[]);
                self.fail(key, None, Some(reply), now);
            }
            EndpointState::Resolving(_) | EndpointState::Resolved(_) => self.fail(key, None, None, now),
            EndpointState::Connecting(..) | EndpointState::Replying(..) | EndpointState::SettingUp(_) => {
                let failure = ConnectFailure::System("disconnected here while connecting".into());
                self.fail(key, Some(failure), None, now);
            }
        }
        self.hub.wake_completions();
        Ok(())
    }

    fn destroy_id(&mut self, id: CmId, now: Instant) -> Result<()> {
        let key = id.0;
        if self.endpoint(id).is_err() {
            return Ok(());
        }
        let rest = match self.endpoints.get_mut(key) {
            Some(endpoint) => match &endpoint.state {
                EndpointState::Offered(asked) => Some(startup::reject(asked, &[])),
                EndpointState::Live if endpoint.link.is_some() => {
                    self.leave_link(key);
                    None
                }
                EndpointState::Live => {
                    let rest = endpoint.qp.as_mut().map(|qp| qp.abandon()).unwrap_or_default();
                    Some(endpoint.unsent(rest))
                }
                _ => None,
            },
            None => None,
        };
        if let Some(socket) = self.remove(key) {
            match rest {
                Some(rest) => self.hub.linger(socket, rest, now),
                None => self.hub.close(socket, false),
            }
        }
        Ok(())
    }

    fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>> {
        (self.hub.now, self.hub.within_cm) = (Some(now), true);
        let event = self.next_event(now);
        self.hub.within_cm = false;
        self.hub.wake_completions();
        event
    }

    fn register(
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
        self.revoke(region)?;
        self.hub.resources.keys.deregister(region)
    }

    fn create_cq(&mut self, device: DeviceId, attr: &CqAttr) -> Result<CqId> {
        Self::is_device(device)?;
        attr.check(NAME, &self.device.capabilities)?;
        Ok(self.hub.resources.cqs.create(attr.entries as usize))
    }

    fn destroy_cq(&mut self, cq: CqId) -> Result<()> {
        self.hub.resources.cqs.destroy(cq)
    }

    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId> {
        self.add_qp(id, attr)
    }

    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        let result = match self.endpoints.get_mut(qp.0) {
            Some(CmEndpoint { link: Some(link), .. }) => link.post_recv(chain, &mut self.hub.resources.cqs),
            Some(CmEndpoint { qp: Some(qp), .. }) => qp.post_recv(chain, &mut self.hub.resources.cqs),
            Some(&mut CmEndpoint { state: EndpointState::Datagram(id), .. }) => {
                self.datagrams.post_recv(&mut self.hub, id, chain)
            }
            _ => return Err(PostError { posted: 0, error: STALE_QP }),
        };
        self.hub.wake_completions();
        result
    }

    fn post_send(&mut self, id: QpId, chain: &[SendWr]) -> std::result::Result<Posted, PostError> {
        let before = self.hub.resources.cqs.pushed();
        let result = match self.endpoints.get_mut(id.0) {
            Some(CmEndpoint { link: Some(link), .. }) => link.post_send(chain, &mut self.hub.resources),
            Some(CmEndpoint { qp: Some(qp), .. }) => qp.post_send(chain, &mut self.hub.resources),
            Some(&mut CmEndpoint { state: EndpointState::Datagram(id), .. }) => {
                let result = self.datagrams.post_send(&mut self.hub, id, chain);
                self.hub.wake_completions();
                return result.map(|()| Posted::of(self.hub.resources.cqs.pushed() != before));
            }
            _ => return Err(PostError { posted: 0, error: STALE_QP }),
        };
        self.transmit(id.0);
        self.hub.wake_completions();
        result.map(|()| Posted::of(self.hub.resources.cqs.pushed() != before))
    }

    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> {
        let start = out.len();
        let count = self.hub.resources.cqs.poll(cq, max, out)?;
        if count == 0 {
            return Ok(0);
        }
        for of_one in out[start..].chunk_by(|one, next| one.qp == next.qp) {
            let id = of_one[0].qp;
            let mut endpoint = self.endpoints.get_mut(id.0);
            for completion in of_one {
                let shared = match &mut endpoint {
                    Some(CmEndpoint { link: Some(link), .. }) => link.polled(completion.opcode),
                    Some(CmEndpoint { qp: Some(qp), .. }) => qp.polled(completion.opcode),
                    Some(CmEndpoint { state: EndpointState::Datagram(id), .. }) => {
                        self.datagrams.polled(*id, completion.opcode)
                    }
                    _ => {
                        self.hub.resources.orphan_polled(cq, id, completion.opcode.is_receive());
                        None
                    }
                };
                if let Some(srq) = shared {
                    self.hub.resources.receive_polled(srq);
                }
            }
        }
        Ok(count)
    }

    fn req_notify(&mut self, cq: CqId, _: Notify) -> Result<()> {
        self.hub.resources.cqs.arm(cq)?;
        if self.links.unarmed && self.arm_links() {
            self.hub.net.wake(NetChannel::Completion);
        }
        Ok(())
    }

    fn next_completion_event(&mut self, device: DeviceId) -> Result<Option<CqId>> {
        Self::is_device(device)?;
        Ok(self.hub.resources.cqs.next_event())
    }

    fn shared_receives(&mut self) -> Option<&mut dyn SharedReceives> {
        Some(self)
    }

    fn remote_keys(&mut self) -> Option<&mut dyn RemoteKeys> {
        Some(self)
    }

    fn liveness(&self) -> Option<&dyn Liveness> {
        Some(self)
    }

    fn extensions(&mut self) -> Option<&mut dyn Extensions> {
        Some(self)
    }

    fn handover(&mut self) -> Option<&mut dyn Handover> {
        Some(self)
    }

    fn off_loop_registration(&mut self) -> Option<&mut dyn OffLoopRegistration> {
        None
    }

    fn foreign_memory(&mut self) -> Option<&mut dyn ForeignMemory> {
        None
    }

    fn datagrams(&mut self) -> Option<&mut dyn Datagrams> {
        self.device.capabilities.features.contains(Features::DATAGRAMS).then_some(self)
    }

    fn paths(&self) -> Option<&dyn Paths> {
        None
    }

    fn adapter(&self) -> Option<&dyn Adapter> {
        None
    }

    fn immediate_sends(&mut self) -> Option<&mut dyn ImmediateSends> {
        Some(self)
    }

    fn shared_memory(&mut self) -> Option<&mut dyn SharedMemory> {
        (self.hub.config.shared_memory != SharedMemoryPolicy::Off).then_some(self)
    }

    fn exchange(&mut self) -> Option<&mut dyn Exchange> {
        None
    }

    fn device_events(&mut self) -> Option<&mut dyn DeviceEvents> {
        None
    }
}

impl<N: Net> ImmediateSends for Iwarp<N> {
    fn send_now(&mut self, id: QpId, header: &[u8], payload: &[u8]) -> bool {
        match self.endpoints.get_mut(id.0) {
            Some(CmEndpoint { state: EndpointState::Live, link: Some(link), .. }) => link.send_now(header, payload),
            Some(CmEndpoint { state: EndpointState::Live, qp: Some(qp), .. }) => qp.send_now(header, payload),
            _ => false,
        }
    }

    fn write_now(&mut self, id: QpId, local: &Sge, remote: RemoteAddress) -> bool {
        match self.endpoints.get_mut(id.0) {
            Some(CmEndpoint { state: EndpointState::Live, link: None, qp: Some(qp), .. }) => {
                qp.write_now(local, &remote)
            }
            _ => false,
        }
    }

    fn ring(&mut self, id: QpId) -> Posted {
        let before = self.hub.resources.cqs.pushed();
        self.transmit(id.0);
        self.hub.wake_completions();
        Posted::of(self.hub.resources.cqs.pushed() != before)
    }
}

impl<N: Net> SharedReceives for Iwarp<N> {
    fn create_srq(&mut self, device: DeviceId, attr: &SrqAttr) -> Result<SrqId> {
        Self::is_device(device)?;
        attr.check(&self.device.capabilities)?;
        Ok(self.hub.resources.create_srq(attr.max_wr))
    }

    fn destroy_srq(&mut self, srq: SrqId) -> Result<()> {
        self.hub.resources.destroy_srq(srq)
    }

    fn post_srq_recv(&mut self, srq: SrqId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        for (posted, wr) in chain.iter().enumerate() {
            let result = self.hub.resources.srq(srq).and_then(|queue| queue.post(*wr));
            result.map_err(|error| PostError { posted, error })?;
        }
        Ok(())
    }
}

impl<N: Net> RemoteKeys for Iwarp<N> {
    fn restrict(&mut self, region: MrId, qp: QpId) -> Result<bool> {
        self.hub.resources.keys.restrict(region, qp.0).map(|()| true)
    }

    fn invalidate(&mut self, region: MrId) -> Result<()> {
        self.hub.resources.keys.invalidate(region)
    }
}

impl<N: Net> Liveness for Iwarp<N> {
    fn last_heard(&self, qp: QpId) -> Option<Instant> {
        self.endpoints.get(qp.0)?.last_heard
    }

    fn has_unread(&self, qp: QpId) -> bool {
        self.endpoints.get(qp.0).is_some_and(|endpoint| {
            let waits = || endpoint.link.as_ref().is_some_and(|link| link.has_news());
            matches!(endpoint.state, EndpointState::Live) && (endpoint.readable || waits())
        })
    }
}

impl<N: Net> Extensions for Iwarp<N> {
    fn enable_extensions(&mut self, qp: QpId) -> Result<()> {
        if !self.hub.config.extensions {
            return Err(TransportError::Unsupported {
                provider: NAME,
                feature: "extensions: see IwarpConfig::extensions",
            });
        }
        match self.endpoints.get_mut(qp.0) {
            Some(CmEndpoint { link: Some(link), .. }) => link.enable_extensions(),
            Some(CmEndpoint { qp: Some(qp), .. }) => qp.enable_extensions(),
            _ => return Err(STALE_QP),
        }
        Ok(())
    }
}

impl<N: Net> Handover for Iwarp<N> {
    fn detach(&mut self, id: CmId) -> Result<Detached> {
        self.detach_request(id)
    }

    fn attach(&mut self, request: Detached, now: Instant) -> Result<(CmId, DeviceId)> {
        self.attach_request(request, now)
    }
}
