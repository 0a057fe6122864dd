//! A pair of devices whose operations need almost no instructions. When a post of a send returns, the message is already in the peer's
//! receive, and the send and the receive have completed. With these devices, nearly all instructions of a turn are those of the reactor, so
//! they measure its cost.
//!
//! Each device uses the embedded provider for connection management and regions. The devices support one connection. They support sends
//! and, for reactors, also writes and reads, but do not check keys. Credits ensure that each message finds a receive.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use mio::unix::SourceFd;
use mio::{Interest, Poll, Token};
use rdma_reactor::transport::caps::Features;
use rdma_reactor::transport::cm::{CmEvent, CmId, ConnectParam, ListenParam, PathOptions};
use rdma_reactor::transport::cq::{CqAttr, Notify};
use rdma_reactor::transport::datagram::DatagramSource;
use rdma_reactor::transport::iwarp::{Iwarp, TcpNet};
use rdma_reactor::transport::mem::Memory;
use rdma_reactor::transport::mr::{MemoryRegion, MrId};
use rdma_reactor::transport::provider::{Channel, CqId, DeviceId, DeviceInfo, Drive, PostError, Posted, Provider};
use rdma_reactor::transport::qp::{QpAttr, QpId};
use rdma_reactor::transport::roles::{
    Adapter, Datagrams, DeviceEvents, Exchange, Extensions, ForeignMemory, Handover, ImmediateSends, Liveness,
    OffLoopRegistration, Paths, RemoteKeys, SharedMemory, SharedReceives,
};
use rdma_reactor::transport::wc::{WcOpcode, WcStatus, WorkCompletion};
use rdma_reactor::transport::wr::{RecvWr, SendFlags, SendOp, SendWr, Sge};
use rdma_reactor::transport::{Access, Result, TransportError};
use rdma_reactor::{Clock, Config, Reactor};

use crate::parts::{embedded, reactor_with};

/// One side of the connection: the state of one device.
#[derive(Debug)]
struct End {
    qp: Option<QpId>,
    cq: Option<CqId>,
    receives: VecDeque<RecvWr>,
    completions: VecDeque<WorkCompletion>,
    /// If this device sends each message back, the completions that the next call of `progress` delivers; otherwise `None`.
    echoes: Option<VecDeque<WorkCompletion>>,
    armed: bool,
    /// A pair of sockets. The device writes to the first one for each event; the reactor polls the second one.
    bell: (UnixStream, UnixStream),
}

impl End {
    fn new() -> Self {
        let bell = UnixStream::pair().expect("two descriptors");
        for end in [&bell.0, &bell.1] {
            end.set_nonblocking(true).expect("it does not block");
        }
        let (receives, completions) = Default::default();
        Self { qp: None, cq: None, receives, completions, echoes: None, armed: false, bell }
    }

    fn complete(&mut self, wr_id: u64, opcode: WcOpcode, status: WcStatus, byte_len: u32) {
        let Some(qp) = self.qp else { return };
        let source = DatagramSource::default();
        let (vendor_error, immediate, invalidated) = (0, None, None);
        let wc = WorkCompletion { wr_id, qp, status, opcode, vendor_error, byte_len, immediate, invalidated, source };
        match &mut self.echoes {
            Some(echoes) => echoes.push_back(wc),
            None => self.arrive(wc),
        }
    }

    fn arrive(&mut self, wc: WorkCompletion) {
        self.completions.push_back(wc);
        if std::mem::take(&mut self.armed) {
            (&self.bell.0).write_all(&[1]).expect("room for one byte");
        }
    }

    /// Delivers the completions of the messages that this device sends back. Returns false if the device does not send messages back.
    fn echo(&mut self) -> bool {
        let Some(echoes) = &mut self.echoes else { return false };
        let mut echoes = std::mem::take(echoes);
        echoes.drain(..).for_each(|wc| self.arrive(wc));
        self.echoes = Some(echoes);
        true
    }

    fn flush(&mut self) {
        for receive in std::mem::take(&mut self.receives) {
            self.complete(receive.wr_id, WcOpcode::Recv, WcStatus::Flushed, 0);
        }
    }
}

/// Copies a message into a receive. Returns its length, or `None` if the receive is too short.
fn copy(from: &[Sge], to: &[Sge]) -> Option<usize> {
    let [to] = to else { return None };
    let mut len = 0;
    for from in from {
        if from.len() > to.len() - len {
            return None;
        }
        // SAFETY: the entries of a posted work request describe memory that the device may use until the request has completed. The two
        // pieces of memory are not in the same buffer, because each buffer is posted once. `to` has space for the bytes.
        unsafe {
            ptr::copy_nonoverlapping(from.address().cast::<u8>(), to.address().cast::<u8>().add(len), from.len())
        };
        len += from.len();
    }
    Some(len)
}

/// Copies bytes between the entries of an operation and the peer's memory at the address `remote`: to the entries if `reads` is true, and
/// to the peer's memory otherwise. Both are in this process.
fn place(local: &[Sge], mut remote: u64, reads: bool) {
    for entry in local {
        let peer = ptr::with_exposed_provenance_mut::<u8>(remote as usize);
        let (from, to) = if reads { (peer, entry.address()) } else { (entry.address(), peer) };
        // SAFETY: the entries describe memory that the device may use until the operation has completed. The peer's address is in a
        // region of this process. The reactor has checked that the operation is within the region, and regions do not overlap.
        unsafe { ptr::copy_nonoverlapping(from, to, entry.len()) };
        remote += entry.len() as u64;
    }
}

/// One device of the pair, see the [module](self).
#[derive(Debug)]
pub struct Null {
    inner: Iwarp<TcpNet>,
    info: DeviceInfo,
    side: usize,
    ends: Arc<Mutex<[End; 2]>>,
    channel: Poll,
}

impl Null {
    /// Creates a pair of devices, for one connection between them.
    ///
    /// # Panics
    /// Panics if the system has no descriptors left.
    #[must_use]
    pub fn pair() -> [Self; 2] {
        let ends = Arc::new(Mutex::new([End::new(), End::new()]));
        [0, 1].map(|side| {
            let inner = embedded();
            let mut info = inner.device(DeviceId(0)).expect("its device").clone();
            info.capabilities.features = Features::SOLICITED_EVENTS;
            // The reactor polls one descriptor. It covers the sockets of the embedded provider and the events of this device.
            let channel = Poll::new().expect("a descriptor");
            let sockets = inner.channel(Channel::Completions(DeviceId(0))).expect("its channel");
            for descriptor in [sockets, lock(&ends)[side].bell.1.as_raw_fd()] {
                let mut source = SourceFd(&descriptor);
                channel.registry().register(&mut source, Token(0), Interest::READABLE).expect("a descriptor");
            }
            Self { inner, info, side, ends: Arc::clone(&ends), channel }
        })
    }

    /// Creates two reactors, each on one device of a pair. Returns them, and the [`Mirror`] of the first device.
    ///
    /// # Panics
    /// Panics if the system has no descriptors left, or if a setting is out of range.
    #[must_use]
    pub fn reactors(config: &Config, clock: impl Fn() -> Box<dyn Clock>) -> ([Reactor; 2], Mirror) {
        let pair = Self::pair().map(Self::with_one_sided);
        let mirror = Mirror(Arc::clone(&pair[0].ends));
        (pair.map(|provider| reactor_with(vec![Box::new(provider)], config.clone(), clock())), mirror)
    }

    /// Enables writes and reads. The device does not check the keys of these operations, so the conformance suite must not use this device.
    fn with_one_sided(mut self) -> Self {
        self.info.capabilities.features |= Features::READ | Features::WRITE;
        self
    }

    fn unsupported(&self, feature: &'static str) -> TransportError {
        TransportError::Unsupported { provider: self.name(), feature }
    }
}

/// A switch for the first device of a pair. When it is on, the device sends each message back by itself, as the peer would, in its next
/// call of `progress`.
#[derive(Debug)]
pub struct Mirror(Arc<Mutex<[End; 2]>>);

impl Mirror {
    /// Switches the mirror on. From then on, the peer gets no messages.
    pub fn up(&self) {
        lock(&self.0)[0].echoes = Some(VecDeque::new());
    }
}

fn lock(ends: &Mutex<[End; 2]>) -> MutexGuard<'_, [End; 2]> {
    ends.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns this side's end of the connection, and the peer's end.
fn both(ends: &mut [End; 2], side: usize) -> [&mut End; 2] {
    let [first, second] = ends;
    if side == 0 { [first, second] } else { [second, first] }
}

// SAFETY: under the lock of both ends, a post reads the memory of its send, and writes the memory of the peer's receive. When the post
// returns, the send and the receive have completed, and the device keeps no reference to their memory. `destroy_id` drops the remaining
// receives. Regions are those of the inner provider.
unsafe impl Provider for Null {
    fn name(&self) -> &'static str {
        "null"
    }
    fn device(&self, device: DeviceId) -> Option<&DeviceInfo> {
        (device == DeviceId(0)).then_some(&self.info)
    }
    fn device_at(&mut self, address: IpAddr) -> Result<DeviceId> {
        self.inner.device_at(address)
    }
    fn channel(&self, channel: Channel) -> Result<RawFd> {
        match channel {
            Channel::ConnectionManager => self.inner.channel(channel),
            Channel::Completions(_) => Ok(self.channel.as_raw_fd()),
        }
    }
    fn next_deadline(&self) -> Option<Instant> {
        self.inner.next_deadline()
    }
    fn progress(&mut self, now: Instant, drive: Drive) -> bool {
        !lock(&self.ends)[self.side].echo() && self.inner.progress(now, drive)
    }
    fn listen(&mut self, address: SocketAddr, options: &ListenParam) -> Result<CmId> {
        self.inner.listen(address, options)
    }
    fn local_address(&self, id: CmId) -> Option<SocketAddr> {
        self.inner.local_address(id)
    }
    fn resolve(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId> {
        self.inner.resolve(peer, options, deadline)
    }
    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()> {
        self.inner.connect(id, param)
    }
    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()> {
        self.inner.accept(id, param, now)
    }
    fn reject(&mut self, id: CmId, private_data: &[u8], now: Instant) -> Result<()> {
        self.inner.reject(id, private_data, now)
    }
    fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()> {
        lock(&self.ends)[self.side].flush();
        self.inner.disconnect(id, now)
    }
    fn destroy_id(&mut self, id: CmId, now: Instant) -> Result<()> {
        let end = &mut lock(&self.ends)[self.side];
        (end.qp, end.cq) = (None, None);
        end.receives.clear();
        self.inner.destroy_id(id, now)
    }
    fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>> {
        self.inner.next_cm_event(now)
    }
    fn register(
        &mut self,
        device: DeviceId,
        memory: &Arc<Memory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<MemoryRegion> {
        self.inner.register(device, memory, range, access)
    }
    fn deregister(&mut self, region: MrId) -> Result<()> {
        self.inner.deregister(region)
    }
    fn create_cq(&mut self, device: DeviceId, attr: &CqAttr) -> Result<CqId> {
        self.inner.create_cq(device, attr)
    }
    fn destroy_cq(&mut self, cq: CqId) -> Result<()> {
        self.inner.destroy_cq(cq)
    }
    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId> {
        let end = &mut lock(&self.ends)[self.side];
        if end.qp.is_some() || attr.send_cq != attr.recv_cq {
            return Err(self.unsupported("second connection, nor for two completion queues"));
        }
        let qp = self.inner.create_qp(id, attr)?;
        (end.qp, end.cq) = (Some(qp), Some(attr.send_cq));
        Ok(qp)
    }
    fn post_recv(&mut self, _: QpId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        lock(&self.ends)[self.side].receives.extend(chain);
        Ok(())
    }
    fn post_send(&mut self, _: QpId, chain: &[SendWr]) -> std::result::Result<Posted, PostError> {
        let mut ends = lock(&self.ends);
        let [own, peer] = both(&mut ends, self.side);
        for (posted, wr) in chain.iter().enumerate() {
            match wr.op {
                SendOp::Send => {}
                SendOp::Write(to) if self.info.capabilities.features.contains(Features::WRITE) => {
                    place(wr.sges.as_slice(), to.address, false);
                    if wr.flags.contains(SendFlags::SIGNALED) {
                        own.complete(wr.wr_id, WcOpcode::Write, WcStatus::Success, 0);
                    }
                    continue;
                }
                SendOp::Read(from) if self.info.capabilities.features.contains(Features::READ) => {
                    place(wr.sges.as_slice(), from.address, true);
                    if wr.flags.contains(SendFlags::SIGNALED) {
                        own.complete(wr.wr_id, WcOpcode::Read, WcStatus::Success, 0);
                    }
                    continue;
                }
                _ => {
                    return Err(PostError { posted, error: self.unsupported("operation but to send") });
                }
            }
            if wr.flags.contains(SendFlags::SIGNALED) {
                own.complete(wr.wr_id, WcOpcode::Send, WcStatus::Success, 0);
            }
            let taker = if own.echoes.is_some() { &mut *own } else { &mut *peer };
            let receive = taker.receives.pop_front().expect("credits are given for receives that are posted");
            let len = copy(wr.sges.as_slice(), receive.sges.as_slice()).expect("messages fit the receives");
            taker.complete(receive.wr_id, WcOpcode::Recv, WcStatus::Success, len as u32);
        }
        Ok(Posted::of(!own.completions.is_empty()))
    }
    fn poll_cq(&mut self, _: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> {
        let completions = &mut lock(&self.ends)[self.side].completions;
        let count = max.min(completions.len());
        out.extend(completions.drain(..count));
        Ok(count)
    }
    fn req_notify(&mut self, _: CqId, _: Notify) -> Result<()> {
        lock(&self.ends)[self.side].armed = true;
        Ok(())
    }
    fn next_completion_event(&mut self, _: DeviceId) -> Result<Option<CqId>> {
        let end = &mut lock(&self.ends)[self.side];
        let rung = (&end.bell.1).read(&mut [0]).is_ok();
        Ok(end.cq.filter(|_| rung))
    }
    fn shared_receives(&mut self) -> Option<&mut dyn SharedReceives> {
        None
    }
    fn remote_keys(&mut self) -> Option<&mut dyn RemoteKeys> {
        None
    }
    fn liveness(&self) -> Option<&dyn Liveness> {
        None
    }
    fn extensions(&mut self) -> Option<&mut dyn Extensions> {
        None
    }
    fn handover(&mut self) -> Option<&mut dyn Handover> {
        None
    }
    fn off_loop_registration(&mut self) -> Option<&mut dyn OffLoopRegistration> {
        None
    }
    fn foreign_memory(&mut self) -> Option<&mut dyn ForeignMemory> {
        None
    }
    fn datagrams(&mut self) -> Option<&mut dyn Datagrams> {
        None
    }
    fn paths(&self) -> Option<&dyn Paths> {
        None
    }
    fn adapter(&self) -> Option<&dyn Adapter> {
        None
    }
    fn immediate_sends(&mut self) -> Option<&mut dyn ImmediateSends> {
        None
    }
    fn shared_memory(&mut self) -> Option<&mut dyn SharedMemory> {
        None
    }
    fn exchange(&mut self) -> Option<&mut dyn Exchange> {
        None
    }
    fn device_events(&mut self) -> Option<&mut dyn DeviceEvents> {
        None
    }
}
