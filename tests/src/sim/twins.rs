//! Two simulated devices of one reactor, which often assign equal keys to their regions. They are two embedded providers behind one
//! [`Provider`]. Each has the sockets of its own node.
//!
//! In each id, the lowest bit of the slot is the number of the device.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rdma_reactor::{Edge, Interest, Parts, Poller, Wake};
use rdma_transport::slab::Key;
use rdma_transport_embedded::iwarp::{Iwarp, IwarpConfig};

use super::fabric::Shared;
use super::net::{SimNet, descriptor};
use super::poller::{SimClock, SimPoller};
use super::rng::Rng;
use crate::delegate::*;
use crate::forward::Forward;
use crate::gate::Gate;

/// The number of different keys that a device uses.
const KEYS: u64 = 256;

/// The port that selects the first device for a connect. The next higher port selects the second device.
pub const PORT: u16 = 7471;

const fn outer(side: usize, key: Key) -> Key {
    Key::new(key.slot() << 1 | side as u32, key.generation())
}

const fn inner(key: Key) -> (usize, Key) {
    ((key.slot() & 1) as usize, Key::new(key.slot() >> 1, key.generation()))
}

/// Returns the number of the device with this address. The devices have the addresses of the first two nodes, see [`super::tcp::address`].
fn side_of(address: IpAddr) -> usize {
    match address {
        IpAddr::V4(ip) => usize::from(ip.octets()[3] == 2),
        IpAddr::V6(_) => 0,
    }
}

/// Returns a source of random bytes. Each group of four bytes is one of a few values only, so both devices often choose equal keys.
fn entropy(seed: u64) -> rdma_reactor::Entropy {
    let mut rng = Rng::new(seed, "keys");
    Box::new(move |bytes: &mut [u8]| {
        for chunk in bytes.chunks_mut(4) {
            let drawn = (2 + rng.below(KEYS) as u32).to_ne_bytes();
            chunk.copy_from_slice(&drawn[..chunk.len()]);
        }
    })
}

/// Returns the parts of a reactor that uses two devices. They are the devices of the first two nodes. Each device has a gate that can make
/// its calls fail.
///
/// # Panics
/// Panics if the default settings are refused.
#[must_use]
pub fn parts(seed: u64, fabric: &Shared, gates: &[Gate; 2]) -> Parts {
    let side = |node: usize| {
        let net = SimNet::new(node, Arc::clone(fabric));
        let iwarp = Iwarp::new(IwarpConfig::default(), net, entropy(seed)).expect("default settings");
        Forward::gated(Box::new(iwarp), gates[node].clone())
    };
    Parts {
        providers: vec![Box::new(Twins { sides: [side(0), side(1)], first: 0 })],
        poller: Box::new(TwinPoller([0, 1].map(|node| SimPoller::new(node, Arc::clone(fabric))))),
        clock: Box::new(SimClock(Arc::clone(fabric))),
    }
}

/// A poller for the descriptors of two nodes.
#[derive(Debug)]
struct TwinPoller([SimPoller; 2]);

impl TwinPoller {
    /// Returns the nodes that a descriptor belongs to, each with the node's own descriptor. The connection-manager descriptor of the first
    /// node stands for the connection-manager descriptors of both nodes.
    fn nodes_of(fd: RawFd) -> impl Iterator<Item = (usize, RawFd)> {
        let both = fd == descriptor(0, 0);
        let second = fd == descriptor(1, 1);
        [(0, fd), (1, if both { descriptor(1, 0) } else { fd })]
            .into_iter()
            .filter(move |&(node, _)| both || (node == 1) == second)
    }
}

impl Poller for TwinPoller {
    fn register(&mut self, fd: RawFd, token: usize, interest: Interest) -> io::Result<()> {
        Self::nodes_of(fd).try_for_each(|(node, fd)| self.0[node].register(fd, token, interest))
    }
    fn deregister(&mut self, fd: RawFd) -> io::Result<()> {
        Self::nodes_of(fd).try_for_each(|(node, fd)| self.0[node].deregister(fd))
    }
    fn wait(&mut self, timeout: Option<Duration>, edges: &mut Vec<Edge>) -> io::Result<()> {
        self.0.iter_mut().try_for_each(|poller| poller.wait(timeout, edges))
    }
    fn waker(&self) -> Arc<dyn Wake> {
        self.0[0].waker()
    }
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0[0].as_fd()
    }
}

/// The two devices, see the [module](self).
#[derive(Debug)]
struct Twins {
    sides: [Forward; 2],
    /// The number of the device that is polled first for the next event. The two devices alternate.
    first: usize,
}

impl Twins {
    fn of(&mut self, key: Key) -> (usize, &mut Forward, Key) {
        let (side, key) = inner(key);
        (side, &mut self.sides[side], key)
    }

    fn device_mut(&mut self, device: DeviceId) -> Result<(usize, &mut Forward)> {
        let side = device.0 as usize;
        let provider = self.sides.get_mut(side).ok_or(TransportError::Stale { object: "device" })?;
        Ok((side, provider))
    }

    fn attr(attr: &QpAttr) -> QpAttr {
        let cq = |cq: CqId| CqId(inner(cq.0).1);
        let srq = attr.srq.map(|srq| SrqId(inner(srq.0).1));
        QpAttr { send_cq: cq(attr.send_cq), recv_cq: cq(attr.recv_cq), srq, ..*attr }
    }

    const fn region(side: usize, region: MemoryRegion) -> MemoryRegion {
        MemoryRegion { id: MrId(outer(side, region.id.0)), ..region }
    }

    /// Returns an event of one device, with its ids converted to those of the combined provider.
    fn event(side: usize, event: CmEvent) -> CmEvent {
        let device = DeviceId(side as u32);
        let kind = match event.kind {
            CmEventKind::Resolved { .. } => CmEventKind::Resolved { device },
            CmEventKind::ConnectRequest { listener, peer, private_data, read_depth, .. } => {
                let listener = CmId(outer(side, listener.0));
                CmEventKind::ConnectRequest { listener, device, peer, private_data, read_depth }
            }
            other => other,
        };
        CmEvent { id: CmId(outer(side, event.id.0)), kind }
    }
}

// SAFETY: every call is forwarded to the provider to which its id belongs, and the answer is returned. The lowest bit of an id
// distinguishes the providers, also in completions.
unsafe impl Provider for Twins {
    fn name(&self) -> &'static str {
        "twins"
    }
    fn device(&self, device: DeviceId) -> Option<&DeviceInfo> {
        self.sides.get(device.0 as usize)?.device(DeviceId(0))
    }
    fn device_at(&mut self, address: IpAddr) -> Result<DeviceId> {
        Ok(DeviceId(side_of(address) as u32))
    }
    fn channel(&self, channel: Channel) -> Result<RawFd> {
        match channel {
            Channel::ConnectionManager => self.sides[0].channel(channel),
            Channel::Completions(device) => {
                let side = self.sides.get(device.0 as usize).ok_or(TransportError::Stale { object: "device" })?;
                side.channel(Channel::Completions(DeviceId(0)))
            }
        }
    }
    fn next_deadline(&self) -> Option<Instant> {
        self.sides.iter().filter_map(Provider::next_deadline).min()
    }
    fn progress(&mut self, now: Instant, drive: Drive) -> bool {
        let [one, two] = &mut self.sides;
        let more = one.progress(now, drive);
        two.progress(now, drive) || more
    }
    fn listen(&mut self, address: SocketAddr, options: &ListenParam) -> Result<CmId> {
        let side = side_of(address.ip());
        Ok(CmId(outer(side, self.sides[side].listen(address, options)?.0)))
    }
    fn local_address(&self, id: CmId) -> Option<SocketAddr> {
        let (side, key) = inner(id.0);
        self.sides[side].local_address(CmId(key))
    }
    fn resolve(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId> {
        let side = usize::from(peer.port() > PORT);
        Ok(CmId(outer(side, self.sides[side].resolve(peer, options, deadline)?.0)))
    }
    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()> {
        let (_, provider, key) = self.of(id.0);
        provider.connect(CmId(key), param)
    }
    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()> {
        let (_, provider, key) = self.of(id.0);
        provider.accept(CmId(key), param, now)
    }
    fn reject(&mut self, id: CmId, private_data: &[u8], now: Instant) -> Result<()> {
        let (_, provider, key) = self.of(id.0);
        provider.reject(CmId(key), private_data, now)
    }
    fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()> {
        let (_, provider, key) = self.of(id.0);
        provider.disconnect(CmId(key), now)
    }
    fn destroy_id(&mut self, id: CmId, now: Instant) -> Result<()> {
        let (_, provider, key) = self.of(id.0);
        provider.destroy_id(CmId(key), now)
    }
    fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>> {
        self.first = 1 - self.first;
        for side in [self.first, 1 - self.first] {
            if let Some(event) = self.sides[side].next_cm_event(now)? {
                return Ok(Some(Self::event(side, event)));
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
        let (side, provider) = self.device_mut(device)?;
        Ok(Self::region(side, provider.register(DeviceId(0), memory, range, access)?))
    }
    fn deregister(&mut self, region: MrId) -> Result<()> {
        let (_, provider, key) = self.of(region.0);
        provider.deregister(MrId(key))
    }
    fn create_cq(&mut self, device: DeviceId, attr: &CqAttr) -> Result<CqId> {
        let (side, provider) = self.device_mut(device)?;
        Ok(CqId(outer(side, provider.create_cq(DeviceId(0), attr)?.0)))
    }
    fn destroy_cq(&mut self, cq: CqId) -> Result<()> {
        let (_, provider, key) = self.of(cq.0);
        provider.destroy_cq(CqId(key))
    }
    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId> {
        let (side, provider, key) = self.of(id.0);
        Ok(QpId(outer(side, provider.create_qp(CmId(key), &Self::attr(attr))?.0)))
    }
    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        let (_, provider, key) = self.of(qp.0);
        provider.post_recv(QpId(key), chain)
    }
    fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> std::result::Result<Posted, PostError> {
        let (_, provider, key) = self.of(qp.0);
        provider.post_send(QpId(key), chain)
    }
    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> {
        let before = out.len();
        let (side, provider, key) = self.of(cq.0);
        let count = provider.poll_cq(CqId(key), max, out)?;
        out[before..].iter_mut().for_each(|completion| completion.qp = QpId(outer(side, completion.qp.0)));
        Ok(count)
    }
    fn req_notify(&mut self, cq: CqId, notify: Notify) -> Result<()> {
        let (_, provider, key) = self.of(cq.0);
        provider.req_notify(CqId(key), notify)
    }
    fn next_completion_event(&mut self, device: DeviceId) -> Result<Option<CqId>> {
        let (side, provider) = self.device_mut(device)?;
        Ok(provider.next_completion_event(DeviceId(0))?.map(|cq| CqId(outer(side, cq.0))))
    }
    roles!(
        own:
        shared_receives remote_keys liveness extensions adapter immediate_sends device_events
    );
    roles!(none: handover off_loop_registration foreign_memory datagrams shared_memory exchange);
}

impl SharedReceives for Twins {
    fn create_srq(&mut self, device: DeviceId, attr: &SrqAttr) -> Result<SrqId> {
        let (side, provider) = self.device_mut(device)?;
        Ok(SrqId(outer(side, provider.create_srq(DeviceId(0), attr)?.0)))
    }
    fn destroy_srq(&mut self, srq: SrqId) -> Result<()> {
        let (_, provider, key) = self.of(srq.0);
        provider.destroy_srq(SrqId(key))
    }
    fn post_srq_recv(&mut self, srq: SrqId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        let (_, provider, key) = self.of(srq.0);
        provider.post_srq_recv(SrqId(key), chain)
    }
}

impl RemoteKeys for Twins {
    fn restrict(&mut self, region: MrId, qp: QpId) -> Result<bool> {
        let (_, provider, key) = self.of(region.0);
        provider.restrict(MrId(key), QpId(inner(qp.0).1))
    }
    fn invalidate(&mut self, region: MrId) -> Result<()> {
        let (_, provider, key) = self.of(region.0);
        provider.invalidate(MrId(key))
    }
}

impl Liveness for Twins {
    fn last_heard(&self, qp: QpId) -> Option<Instant> {
        let (side, key) = inner(qp.0);
        self.sides[side].last_heard(QpId(key))
    }
    fn has_unread(&self, qp: QpId) -> bool {
        let (side, key) = inner(qp.0);
        self.sides[side].has_unread(QpId(key))
    }
}

impl Extensions for Twins {
    fn enable_extensions(&mut self, qp: QpId) -> Result<()> {
        let (_, provider, key) = self.of(qp.0);
        provider.enable_extensions(QpId(key))
    }
}

impl Adapter for Twins {
    fn has_failed(&self, cq: CqId) -> bool {
        let (side, key) = inner(cq.0);
        self.sides[side].has_failed(CqId(key))
    }
    fn acknowledgements(&self) -> u64 {
        self.sides.iter().map(Adapter::acknowledgements).sum()
    }
}

impl ImmediateSends for Twins {
    fn send_now(&mut self, qp: QpId, header: &[u8], payload: &[u8]) -> bool {
        let (_, provider, key) = self.of(qp.0);
        provider.immediate_sends().is_some_and(|role| role.send_now(QpId(key), header, payload))
    }
    fn write_now(&mut self, qp: QpId, local: &Sge, remote: RemoteAddress) -> bool {
        let (_, provider, key) = self.of(qp.0);
        provider.immediate_sends().is_some_and(|role| role.write_now(QpId(key), local, remote))
    }
    fn ring(&mut self, qp: QpId) -> Posted {
        let (_, provider, key) = self.of(qp.0);
        provider.immediate_sends().map_or(Posted::Pending, |role| role.ring(QpId(key)))
    }
}

impl DeviceEvents for Twins {
    fn next_device_event(&mut self) -> Option<AsyncEvent> {
        (0..2).find_map(|side| {
            let event = self.sides[side].next_device_event()?;
            Some(AsyncEvent { device: DeviceId(side as u32), ..event })
        })
    }
}
