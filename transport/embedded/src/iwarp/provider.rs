//! [`Iwarp`]: the embedded implementation of [`Provider`].

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;

use super::NAME;
use super::config::{IwarpConfig, MAX_READ_DEPTH, SharedMemoryPolicy};
use super::endpoint::{Attempt, AttemptStep, CmEndpoint, Request, RequestStep, Startup, WorkMut};
use super::endpoints::Endpoints;
use super::flow::End;
use super::frame::Frame;
use super::hub::{DEVICE, Hub, Owner, STALE_QP};
use super::net::{Net, NetChannel, Ready, SocketId};
use super::ports::Ports;
use super::queue_pair::{MAX_QUEUE_DEPTH, QueuePair};
use super::rendezvous::Rendezvous;
use super::rings::Rings;
use super::startup::{self, FrameReader, MAX_PRIVATE_DATA_OUT, PATH_LEN};
use super::transmit::MAX_INLINE;
use super::wire::StartupKind;
use crate::roce::packet::MAX_PAYLOAD;
use crate::soft::checks::{EXTENSIONS, MAX_MESSAGE};
use rdma_transport::caps::{Capabilities, Features};
use rdma_transport::cm::{
    CmEvent, CmEventKind, CmId, ConnectFailure, ConnectParam, DisconnectCause, ListenParam, PathOptions, Source,
};
use rdma_transport::cq::{CqAttr, Notify};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::mem::{Memory, Sge};
use rdma_transport::mr::{Access, MemoryRegion, MrId};
use rdma_transport::newcomers::Host;
use rdma_transport::provider::{self, CqId, DeviceId, DeviceInfo, Drive, Entropy, PostError, Posted, Provider};
use rdma_transport::qp::{QpAttr, QpId, SrqId};
use rdma_transport::roles::{
    Adapter, Datagrams, DeviceEvents, Exchange, Extensions, ForeignMemory, Handover, ImmediateSends, Liveness,
    OffLoopRegistration, RemoteKeys, SharedMemory, SharedReceives,
};
use rdma_transport::srq::SrqAttr;
use rdma_transport::wc::WorkCompletion;
use rdma_transport::wr::{RecvWr, RemoteAddress, SendWr};

/// Returns an error unless `device` is [`DEVICE`], the only device of this provider.
pub(super) fn is_device(device: DeviceId) -> Result<()> {
    if device == DEVICE { Ok(()) } else { Err(TransportError::Stale { object: "device" }) }
}

/// The embedded provider: iWARP in user space. The provider has no thread: all its work is done
/// during the calls of its methods.
pub struct Iwarp<N: Net> {
    /// The state that the engines share.
    pub(super) hub: Hub<N>,
    device: DeviceInfo,
    pub(super) endpoints: Endpoints<N>,
    pub(super) rendezvous: Rendezvous,
    pub(super) rings: Rings,
    pub(super) datagrams: Ports,
    pub(super) edges: Vec<(SocketId, Ready)>, // bound: turn
    /// The number of rounds of a busy poll while some stream is hot (`Hub::hot`), modulo 2^32.
    /// Every `SPIN_FULL`-th round checks all sockets. If the provider also has other sockets, every
    /// second round does.
    pub(super) spins: u32,
}

impl<N: Net> fmt::Debug for Iwarp<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Iwarp")
            .field("net", &self.hub.net)
            .field("endpoints", &self.endpoints.len())
            .field("live", &self.sockets())
            .field("handshakes", &self.endpoints.handshakes.unfinished)
            .field("lingering", &self.hub.lingers.len())
            .finish_non_exhaustive()
    }
}

impl<N: Net> Iwarp<N> {
    /// Creates a provider on the sockets of `net`. `entropy` produces the STags of memory regions
    /// and other secrets. A peer must not be able to predict the output of `entropy`.
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
        Ok(Self {
            hub: Hub::new(config, net, entropy),
            device: DeviceInfo { name: "iwarp0".into(), capabilities },
            endpoints: Endpoints::new(),
            rendezvous: Rendezvous::default(),
            rings: Rings::default(),
            datagrams: Ports::default(),
            edges: Vec::with_capacity(256),
            spins: 0,
        })
    }
}

// SAFETY: Each number is a duty in the documentation of `Provider`.
// 1. The scatter-gather entries of a work request are in the queues of its queue pair or of the
//    shared queue. The entries stay there from the post until the call that adds the completion to
//    the completion queue. Before that call, an FPDU that still refers to such an entry is sent or
//    copied. `destroy_id` and `destroy_srq` drop the queues; `QueuePair::end` and `abandon` drop
//    the FPDUs. An entry is only written for receives, Reads and atomic operations.
// 2. A completion is created when its work request leaves the queue. A receive is only filled
//    within its entries.
// 3. Work requests leave their queue in order, and completions leave the completion queue in order.
// 4. The table of STags holds the memory of regions. For every access that this provider makes for
//    a peer, the region is looked up in this table, and the access ends within the same call. A
//    direct region (`Access::DIRECT`) is the exception: peers on this host map it, and can access
//    its pages even after `deregister`, as the documentation of that right says.
// 5. The provider owns all these objects, and uses them only within calls of its methods. When it
//    is dropped, its links are dropped, and with them the lendings of memory to peers on this host
//    end.
// 6. Handles are keys of slabs, which never reuse a key.
#[allow(unsafe_code, reason = "the promise above; the code it is about has no unsafe part")]
unsafe impl<N: Net> Provider for Iwarp<N> {
    fn name(&self) -> &'static str {
        self.hub.name()
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
                is_device(device)?;
                Ok(self.hub.net.channel(NetChannel::Completion))
            }
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.hub.deadlines.next()
    }

    fn progress(&mut self, now: Instant, drive: Drive) -> bool {
        let more = self.drive(now, drive);
        // The caller polls for completion events after `progress`, so `progress` need not wake the
        // completion channel.
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
        let key = self.endpoints.insert(CmEndpoint::Listener(socket));
        self.hub.own(socket, Owner::Endpoint(key));
        Ok(CmId(key))
    }

    fn local_address(&self, id: CmId) -> Option<SocketAddr> {
        match self.endpoints.known(id).ok()? {
            &CmEndpoint::Datagram(key) => self.datagrams.address_of(key),
            endpoint => self.hub.net.local_address(endpoint.socket()?).ok(),
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
        let attempt = Attempt { peer, step: AttemptStep::Resolving, qp: None, closed: false };
        let key = self.endpoints.insert(CmEndpoint::Attempt(Box::new(attempt)));
        self.hub.deadlines.set(Owner::Endpoint(key), deadline);
        self.hub.enqueue_start(Host::of(peer.ip()), key, CmEventKind::Resolved { device: DEVICE });
        Ok(CmId(key))
    }

    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()> {
        self.device.capabilities.check_private_data(NAME, param.private_data)?;
        param.note_ignored("iwarp");
        match self.endpoints.known(id)? {
            &CmEndpoint::Datagram(key) => return self.datagrams.query_peer(&mut self.hub, key, param.private_data),
            CmEndpoint::Attempt(attempt) if matches!(attempt.step, AttemptStep::Resolved) => {
                if attempt.qp.is_none() {
                    return Err(TransportError::InvalidState { call: "connect", state: "without a queue pair" });
                }
            }
            endpoint => return Err(TransportError::InvalidState { call: "connect", state: endpoint.name() }),
        }
        let startup = Startup {
            terms: self.hub.terms(param),
            private_data: param.private_data.to_vec(),
            shows_path: param.self_delimiting && param.private_data.len() + PATH_LEN <= MAX_PRIVATE_DATA_OUT,
            connected: false,
            request: Frame::default(),
            reader: FrameReader::new(StartupKind::Reply),
        };
        self.endpoints.open(&mut self.hub, id.0, Box::new(startup));
        self.hub.wake_completions();
        Ok(())
    }

    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()> {
        self.device.capabilities.check_private_data(NAME, param.private_data)?;
        param.note_ignored("iwarp");
        if let &CmEndpoint::Datagram(key) = self.endpoints.known(id)? {
            return self.datagrams.reply_to_query(&mut self.hub, key, key, "accept", param.private_data);
        }
        let terms = self.hub.terms(param);
        self.endpoints.accept(&mut self.rendezvous, &mut self.hub, id.0, terms, param.private_data, now)?;
        self.hub.wake_completions();
        Ok(())
    }

    fn reject(&mut self, id: CmId, private_data: &[u8], now: Instant) -> Result<()> {
        self.device.capabilities.check_private_data(NAME, private_data)?;
        match self.endpoints.known(id)? {
            &CmEndpoint::Datagram(key) => {
                self.datagrams.reject_query(&mut self.hub, key, private_data)?;
                self.endpoints.remove_datagrams(&mut self.datagrams, &mut self.hub, id);
            }
            &CmEndpoint::Request(Request { step: RequestStep::Offered(requested), .. }) => {
                self.endpoints.turn_away(&mut self.hub, id.0, &requested, private_data, now);
            }
            endpoint => return Err(TransportError::InvalidState { call: "reject", state: endpoint.name() }),
        }
        Ok(())
    }

    fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()> {
        let Self { hub, endpoints, .. } = self;
        match endpoints.known(id)? {
            CmEndpoint::Listener(_) => {
                return Err(TransportError::InvalidState { call: "disconnect", state: "listening" });
            }
            &CmEndpoint::Datagram(key) => self.datagrams.end_datagrams(hub, key)?,
            CmEndpoint::Stream(_) | CmEndpoint::Ring(_) => {
                endpoints.end(hub, id.0, End::of(DisconnectCause::Local), now)
            }
            CmEndpoint::Request(request) => {
                if let RequestStep::Offered(requested) = &request.step {
                    let reply = startup::reject(requested, &[]);
                    endpoints.fail(hub, id.0, None, Some((reply, now)));
                }
            }
            CmEndpoint::Attempt(attempt) => {
                let is_connecting = !matches!(attempt.step, AttemptStep::Resolving | AttemptStep::Resolved);
                let failure = || ConnectFailure::System("disconnected here while connecting".into());
                endpoints.fail(hub, id.0, is_connecting.then(failure), None);
            }
            CmEndpoint::Dead(_) => {}
        }
        self.hub.wake_completions();
        Ok(())
    }

    fn destroy_id(&mut self, id: CmId, now: Instant) -> Result<()> {
        let rest = match self.endpoints.known_mut(id) {
            Err(_) => return Ok(()),
            Ok(CmEndpoint::Datagram(_)) => {
                self.endpoints.remove_datagrams(&mut self.datagrams, &mut self.hub, id);
                return Ok(());
            }
            Ok(CmEndpoint::Request(Request { step: RequestStep::Offered(requested), .. })) => {
                Some(startup::reject(requested, &[]))
            }
            Ok(CmEndpoint::Stream(flow)) => Some(flow.abandon()),
            Ok(_) => None,
        };
        match (self.endpoints.remove(&mut self.hub, id.0, now), rest) {
            (Some(socket), Some(rest)) => self.hub.linger(socket, rest, now),
            (Some(socket), None) => self.hub.close(socket, false),
            (None, _) => {}
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
        is_device(device)?;
        self.hub.register(memory, range, access)
    }

    fn deregister(&mut self, region: MrId) -> Result<()> {
        self.endpoints.revoke(&mut self.hub, region)?;
        self.hub.resources.keys.deregister(region)
    }

    fn create_cq(&mut self, device: DeviceId, attr: &CqAttr) -> Result<CqId> {
        is_device(device)?;
        attr.check(NAME, &self.device.capabilities)?;
        Ok(self.hub.resources.cqs.create(attr.entries as usize))
    }

    fn destroy_cq(&mut self, cq: CqId) -> Result<()> {
        self.hub.resources.cqs.destroy(cq)
    }

    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId> {
        let free = match self.endpoints.known(id)? {
            CmEndpoint::Attempt(attempt) if matches!(attempt.step, AttemptStep::Resolved) => attempt.qp.is_none(),
            CmEndpoint::Request(Request { step: RequestStep::Offered(_), qp, .. }) => qp.is_none(),
            CmEndpoint::Datagram(key) => self.datagrams.may_have_queue_pair(*key)?,
            endpoint => return Err(TransportError::InvalidState { call: "create_qp", state: endpoint.name() }),
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
        let new = || Some(Box::new(QueuePair::new(QpId(id.0), attr)));
        match self.endpoints.get_mut(id.0) {
            Some(CmEndpoint::Attempt(attempt)) => attempt.qp = new(),
            Some(CmEndpoint::Request(request)) => request.qp = new(),
            Some(&mut CmEndpoint::Datagram(key)) => self.datagrams.add_queue_pair(&mut self.hub, key, attr)?,
            _ => {}
        }
        Ok(QpId(id.0))
    }

    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        let result = match self.endpoints.get_mut(qp.0) {
            Some(&mut CmEndpoint::Datagram(key)) => self.datagrams.post_recv(&mut self.hub, key, chain),
            endpoint => match endpoint.and_then(CmEndpoint::work) {
                Some(WorkMut::Stream(qp)) => qp.post_recv(chain, &mut self.hub.resources.cqs),
                Some(WorkMut::Ring(link)) => link.post_recv(chain, &mut self.hub.resources.cqs),
                None => return Err(PostError { posted: 0, error: STALE_QP }),
            },
        };
        self.hub.wake_completions();
        result
    }

    fn post_send(&mut self, id: QpId, chain: &[SendWr]) -> std::result::Result<Posted, PostError> {
        let Self { hub, endpoints, .. } = self;
        let before = hub.resources.cqs.pushed();
        let result = match endpoints.get_mut(id.0) {
            Some(CmEndpoint::Stream(flow)) => {
                let result = flow.qp.post_send(chain, &mut hub.resources);
                flow.transmit(hub);
                result
            }
            Some(CmEndpoint::Ring(flow)) => {
                let result = flow.link.post_send(chain, &mut hub.resources);
                if flow.pump(hub) {
                    self.rings.heat(endpoints, hub, id.0);
                }
                result
            }
            Some(&mut CmEndpoint::Datagram(key)) => self.datagrams.post_send(hub, key, chain),
            endpoint => match endpoint.and_then(CmEndpoint::work) {
                Some(WorkMut::Stream(qp)) => qp.post_send(chain, &mut hub.resources),
                Some(WorkMut::Ring(link)) => link.post_send(chain, &mut hub.resources),
                None => return Err(PostError { posted: 0, error: STALE_QP }),
            },
        };
        hub.wake_completions();
        result.map(|()| Posted::of(hub.resources.cqs.pushed() != before))
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
                    Some(CmEndpoint::Stream(flow)) => flow.qp.polled(completion.opcode),
                    Some(CmEndpoint::Ring(flow)) => flow.link.polled(completion.opcode),
                    Some(CmEndpoint::Datagram(key)) => self.datagrams.polled(*key, completion.opcode),
                    other => match other.as_mut().and_then(|other| other.work()) {
                        Some(WorkMut::Stream(qp)) => qp.polled(completion.opcode),
                        Some(WorkMut::Ring(link)) => link.polled(completion.opcode),
                        None => {
                            self.hub.resources.orphan_polled(cq, id, completion.opcode.is_receive());
                            None
                        }
                    },
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
        if self.rings.unarmed && self.rings.arm_all(&mut self.endpoints, &mut self.hub) {
            self.hub.net.wake(NetChannel::Completion);
        }
        Ok(())
    }

    fn next_completion_event(&mut self, device: DeviceId) -> Result<Option<CqId>> {
        is_device(device)?;
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
            Some(CmEndpoint::Stream(flow)) => flow.qp.send_now(header, payload),
            Some(CmEndpoint::Ring(flow)) => flow.link.send_now(header, payload),
            _ => false,
        }
    }

    fn write_now(&mut self, id: QpId, local: &Sge, remote: RemoteAddress) -> bool {
        match self.endpoints.get_mut(id.0) {
            Some(CmEndpoint::Stream(flow)) => flow.qp.tx.frame_write_now(local, &remote),
            _ => false,
        }
    }

    fn ring(&mut self, id: QpId) -> Posted {
        let before = self.hub.resources.cqs.pushed();
        let is_unarmed = match self.endpoints.get_mut(id.0) {
            Some(CmEndpoint::Stream(flow)) => {
                flow.transmit(&mut self.hub);
                false
            }
            Some(CmEndpoint::Ring(flow)) => flow.pump(&mut self.hub),
            _ => false,
        };
        if is_unarmed {
            self.rings.heat(&mut self.endpoints, &mut self.hub, id.0);
        }
        self.hub.wake_completions();
        Posted::of(self.hub.resources.cqs.pushed() != before)
    }
}

impl<N: Net> SharedReceives for Iwarp<N> {
    fn create_srq(&mut self, device: DeviceId, attr: &SrqAttr) -> Result<SrqId> {
        is_device(device)?;
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
