//! What the loop's stages and the callbacks share: the tables, and the operations of [`crate::Context`].

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use rdma_transport::cm::CmId;
use rdma_transport::provider::{DeviceId, Provider};
use rdma_transport::slab::{Key, Slab};
use rdma_transport::wr::{RecvWr, SendFlags, SgeList};

use crate::buffer::{Home, Returned, SendBuffer};
use crate::choose::{self, Use};
use crate::config::{Config, ConnectOptions, Framing};
use crate::connection::{Connection, Ending, Owes, Phase};
use crate::credit::{ReceiveWindow, SendWindow};
use crate::device::Device;
use crate::error::{ConnectError, DisconnectReason, Error, SendError, SendErrorKind};
use crate::fair::{Allowance, Fair};
use crate::frame::{HEADER_LEN, Header, Kind, MAX_USER_PRIVATE_DATA};
use crate::id::{ConnectionId, GENERATION_BITS, ListenerId, SendId, SendKind, WorkId, WorkKind};
use crate::io::Registrations;
use crate::listener::Listener;
use crate::one_sided::Registration;
use crate::poller::Poller;
use crate::pool::Buffer;
use crate::remote::WakeFlag;
use crate::stats::Stats;

/// What a timer is for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TimerKind {
    /// A user's, with its token.
    User(u64),
    /// The current phase of a connection has lasted long enough.
    Phase(ConnectionId),
    /// Look whether a connection is still alive.
    Keepalive(ConnectionId),
    /// The lifetime of a peer's rights is over.
    Region(Key),
    /// Look whether a listener's device is back.
    Listen(ListenerId),
}

/// Whose a connection-manager id is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Owner {
    Connection(ConnectionId),
    Listener(ListenerId),
}

#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) config: Config,
    pub(crate) provider: Box<dyn Provider>,
    pub(crate) poller: Box<dyn Poller>,
    /// Descriptors of the program's own.
    pub(crate) io: Registrations,
    /// The first address used decides on another provider.
    undecided: bool,
    /// The provider's connection-manager channel is not registered yet.
    pub(crate) new_provider: bool,
    pub(crate) connections: Slab<Connection>,
    pub(crate) listeners: Slab<Listener>,
    pub(crate) regions: Slab<Registration>,
    /// Copies of messages that peers are to fetch.
    pub(crate) copied_bytes: usize,
    /// Messages that were or are being fetched.
    pub(crate) fetched_bytes: usize,
    /// Connections that wait for memory for such a message.
    pub(crate) starved: Vec<ConnectionId>,
    /// By slot of the connection-manager id.
    owners: Vec<Option<(CmId, Owner)>>,
    /// By device number.
    pub(crate) devices: Vec<Option<Device>>,
    /// Devices that came into use and whose channels are not registered yet.
    pub(crate) new_devices: Vec<DeviceId>,
    pub(crate) timers: crate::timer::Timers<TimerKind>,
    pub(crate) fair: Fair,
    /// Connections with something to post.
    dirty: Vec<ConnectionId>,
    /// Connections that were refused a send and may have room again.
    pub(crate) writable: Vec<ConnectionId>,
    /// Connections on their way out.
    pub(crate) ending: Vec<ConnectionId>,
    /// One of them may have come to its end: stage 10 is to look before anything sleeps.
    pub(crate) endings_moved: bool,
    /// Accepted and not announced yet.
    pub(crate) pending: u32,
    pub(crate) returned: Receiver<Returned>,
    pub(crate) return_to: Sender<Returned>,
    pub(crate) wake: Arc<WakeFlag>,
    pub(crate) stats: Stats,
    pub(crate) now: Instant,
    pub(crate) stop: bool,
    receive_chain: Vec<RecvWr>,
}

impl Core {
    pub(crate) fn new(
        config: Config,
        provider: Box<dyn Provider>,
        poller: Box<dyn Poller>,
        wake: Arc<WakeFlag>,
        now: Instant,
    ) -> Self {
        let (return_to, returned) = crossbeam_channel::unbounded();
        Self {
            undecided: false,
            new_provider: true,
            config,
            provider,
            poller,
            io: Registrations::default(),
            connections: Slab::with_generation_bits(GENERATION_BITS),
            listeners: Slab::default(),
            regions: Slab::default(),
            copied_bytes: 0,
            fetched_bytes: 0,
            starved: Vec::new(),
            owners: Vec::new(),
            devices: Vec::new(),
            new_devices: Vec::new(),
            timers: crate::timer::Timers::default(),
            fair: Fair::default(),
            dirty: Vec::new(),
            writable: Vec::new(),
            ending: Vec::new(),
            endings_moved: false,
            pending: 0,
            returned,
            return_to,
            wake,
            stats: Stats::default(),
            now,
            stop: false,
            receive_chain: Vec::new(),
        }
    }

    /// The counters, and the levels of now.
    pub(crate) fn snapshot(&self) -> Stats {
        let pools = self.devices.iter().flatten().map(|device| &device.pool);
        let (pool_buffers, pool_free) =
            pools.fold((0, 0), |(all, free), pool| (all + pool.capacity(), free + pool.available()));
        Stats { connections: self.connections.len(), pool_buffers, pool_free, ..self.stats }
    }

    /// Lets the first address that is used decide on the provider.
    pub(crate) const fn stay_undecided(&mut self) {
        self.undecided = true;
    }

    pub(crate) fn decide(&mut self, address: SocketAddr, usage: Use) {
        if std::mem::take(&mut self.undecided)
            && let Some(provider) = choose::for_address(address, usage)
        {
            // Nothing was made on the old one yet.
            self.provider = provider;
            self.new_provider = true;
        }
    }

    // Connection-manager ids.

    pub(crate) fn own(&mut self, cm: CmId, owner: Owner) {
        let slot = cm.0.slot() as usize;
        if self.owners.len() <= slot {
            self.owners.resize(slot + 1, None);
        }
        self.owners[slot] = Some((cm, owner));
    }

    pub(crate) fn disown(&mut self, cm: CmId) {
        if self.owner(cm).is_some() {
            self.owners[cm.0.slot() as usize] = None;
        }
    }

    pub(crate) fn owner(&self, cm: CmId) -> Option<Owner> {
        self.owners.get(cm.0.slot() as usize)?.filter(|(id, _)| *id == cm).map(|(_, owner)| owner)
    }

    // Connections.

    pub(crate) fn connect(&mut self, peer: SocketAddr, options: ConnectOptions) -> Result<ConnectionId, Error> {
        let ConnectOptions { private_data, framing } = options;
        if framing == Framing::Credits && private_data.len() > MAX_USER_PRIVATE_DATA {
            return Err(Error::PrivateDataTooLong { len: private_data.len(), max: MAX_USER_PRIVATE_DATA });
        }
        if self.connections.len() >= self.config.max_connections as usize {
            return Err(Error::Limit { limit: "max_connections", value: self.config.max_connections.into() });
        }
        self.decide(peer, Use::Connect);
        let deadline = self.now + self.config.connect_timeout;
        let cm = self.provider.resolve(peer, deadline)?;
        let id = self.insert(cm, peer, framing, Phase::Resolving, private_data);
        self.set_phase_timer(id, self.config.connect_timeout);
        Ok(id)
    }

    /// Adds a connection to the tables.
    pub(crate) fn insert(
        &mut self,
        cm: CmId,
        peer: SocketAddr,
        framing: Framing,
        phase: Phase,
        private_data: Vec<u8>,
    ) -> ConnectionId {
        let key = self.connections.insert(Connection {
            id: ConnectionId(Key::new(0, 0)),
            cm,
            qp: None,
            equipped: false,
            announced: false,
            closed_here: false,
            device: 0,
            cq: 0,
            peer,
            active: phase == Phase::Resolving,
            framing,
            extensions: false,
            phase,
            ending: None,
            private_data,
            user: 0,
            tx: SendWindow::new(0),
            rx: ReceiveWindow::new(self.config.receive_depth),
            max_message: 0,
            largest_message: 0,
            transfers: crate::rendezvous::Transfers::default(),
            send_slots: self.config.send_slots() as usize,
            sends: std::collections::VecDeque::new(),
            answers: 0,
            holds: std::collections::VecDeque::new(),
            sends_done: 0,
            chain: Vec::new(),
            chained_message: false,
            fence: false,
            unsignaled: 0,
            receives: std::collections::VecDeque::new(),
            reposts: Vec::new(),
            detached: 0,
            provisional: false,
            next_send: 0,
            blocked: false,
            blocked_for_slot: false,
            regions: Vec::new(),
            blocked_since: self.now,
            stalled: Duration::ZERO,
            fair: Allowance::default(),
            dirty: false,
            owes: Owes::default(),
            last_heard: self.now,
            received: 0,
            pinged: false,
            unheard: false,
            phase_timer: None,
            keepalive_timer: None,
        });
        let id = ConnectionId(key);
        if let Some(c) = self.connections.get_mut(key) {
            c.id = id;
        }
        self.own(cm, Owner::Connection(id));
        id
    }

    /// Restarts the deadline of a connection's phase.
    pub(crate) fn set_phase_timer(&mut self, id: ConnectionId, timeout: Duration) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        if let Some(timer) = c.phase_timer.take() {
            self.timers.cancel(timer);
        }
        c.phase_timer = Some(self.timers.insert(self.now + timeout, TimerKind::Phase(id)));
    }

    /// A connection that the user has been told of.
    pub(crate) fn announced(&self, id: ConnectionId) -> Option<&Connection> {
        self.connections.get(id.0).filter(|c| c.announced)
    }

    /// The device of an index, made on first use.
    pub(crate) fn device(&mut self, id: DeviceId) -> &mut Device {
        let index = id.0 as usize;
        if self.devices.len() <= index {
            self.devices.resize_with(index + 1, || None);
        }
        let new_devices = &mut self.new_devices;
        let home = || Home { pool: index, channel: self.return_to.clone(), wake: Arc::clone(&self.wake) };
        self.devices[index].get_or_insert_with(|| {
            new_devices.push(id);
            Device::new(id, &*self.provider, &self.config, home())
        })
    }

    /// Gives a connection its queue pair and posts its receives.
    pub(crate) fn equip(&mut self, id: ConnectionId, device: DeviceId) -> Result<(), Error> {
        self.device(device);
        let index = device.0 as usize;
        let (Some(c), Some(dev)) = (self.connections.get_mut(id.0), self.devices[index].as_mut()) else {
            return Err(Error::Gone("connection"));
        };
        let cq = dev.claim(&mut *self.provider, &self.config)?;
        let cq_id = dev.cqs[cq].id;
        let attr = rdma_transport::QpAttr {
            send_cq: cq_id,
            recv_cq: cq_id,
            max_send_wr: self.config.send_slots(),
            max_recv_wr: self.config.receive_depth,
            max_inline: 0,
        };
        match self.provider.create_qp(c.cm, &attr) {
            Ok(qp) => c.qp = Some(qp),
            Err(error) => {
                dev.release(cq, &self.config, 0);
                return Err(error.into());
            }
        }
        (c.device, c.cq, c.equipped) = (index, cq, true);
        let depth = self.config.receive_depth as usize;
        c.receives.reserve(depth);
        c.reposts.reserve(depth);
        c.sends.reserve(c.send_slots);
        c.chain.reserve(c.send_slots);
        c.reposts.extend((0..depth).map_while(|_| dev.pool.take()));
        // These are the receives that the greeting grants: they are not news for the peer.
        self.post_receives(id)?;
        if let Some(c) = self.connections.get_mut(id.0) {
            c.rx = ReceiveWindow::new(self.config.receive_depth);
        }
        Ok(())
    }

    // Sending.

    #[inline]
    pub(crate) fn send(&mut self, id: ConnectionId, payload: &[u8]) -> Result<SendId, SendErrorKind> {
        let c = self.connections.get_mut(id.0).ok_or(SendErrorKind::Closed)?;
        if let Err(kind) = c.check_send(payload.len()) {
            let large = payload.len() as u64 <= c.largest_message && matches!(kind, SendErrorKind::TooLong { .. });
            return if large { self.send_large(id, payload) } else { Err(self.refuse_send(id, kind)) };
        }
        let device = self.devices[c.device].as_mut().ok_or(SendErrorKind::Closed)?;
        let Some(mut buffer) = device.pool.take() else {
            debug_assert!(false, "every send slot has a buffer promised");
            return Err(SendErrorKind::WouldBlock);
        };
        let header = c.header_len();
        device.pool.slabs().bytes_mut(&mut buffer)[header..header + payload.len()].copy_from_slice(payload);
        Ok(self.queue_send(id, buffer, payload.len()))
    }

    pub(crate) fn buffer(&mut self, id: ConnectionId) -> Option<SendBuffer> {
        let c = self.connections.get(id.0).filter(|c| c.phase == Phase::Open)?;
        let device = self.devices[c.device].as_mut()?;
        let buffer = device.take_for_user(&mut *self.provider)?;
        Some(SendBuffer {
            len: 0,
            capacity: c.max_message.min(device.pool.stride() - HEADER_LEN),
            buffer: Some(buffer),
            slabs: Arc::clone(device.pool.slabs()),
            home: device.home.clone(),
        })
    }

    #[allow(clippy::result_large_err)]
    pub(crate) fn send_buffer(&mut self, id: ConnectionId, buffer: SendBuffer) -> Result<SendId, SendError> {
        let Some(c) = self.connections.get_mut(id.0) else {
            return Err(SendError { kind: SendErrorKind::Closed, buffer });
        };
        // Of another reactor, or of a device this connection is not on: its memory is not registered there.
        let ours = buffer.home.channel.same_channel(&self.return_to) && buffer.home.pool == c.device;
        let check = if ours { c.check_send(buffer.len) } else { Err(SendErrorKind::Closed) };
        if let Err(kind) = check {
            let kind = self.refuse_send(id, kind);
            return Err(SendError { kind, buffer });
        }
        let framing = c.framing;
        let Some(device) = self.devices[c.device].as_mut() else {
            return Err(SendError { kind: SendErrorKind::Closed, buffer });
        };
        let slabs = Arc::clone(device.pool.slabs());
        device.pool.unlend();
        match buffer.into_parts() {
            Some((mut buffer, len)) => {
                if framing == Framing::Raw {
                    // The room kept for the header is not wanted: the payload starts the message.
                    slabs.bytes_mut(&mut buffer).copy_within(HEADER_LEN..HEADER_LEN + len, 0);
                }
                Ok(self.queue_send(id, buffer, len))
            }
            None => unreachable!("a SendBuffer holds its buffer until it is dropped"),
        }
    }

    /// Notes that a message was not taken.
    pub(crate) fn refuse_send(&mut self, id: ConnectionId, kind: SendErrorKind) -> SendErrorKind {
        if kind == SendErrorKind::WouldBlock { self.would_block(id, false) } else { kind }
    }

    /// Notes that a send was refused for want of room. `for_slot`: it needs no credit.
    pub(crate) fn would_block(&mut self, id: ConnectionId, for_slot: bool) -> SendErrorKind {
        if let Some(c) = self.connections.get_mut(id.0) {
            c.blocked_for_slot = for_slot && (!c.blocked || c.blocked_for_slot);
            c.block(self.now);
        }
        self.stats.send_stalls += 1;
        SendErrorKind::WouldBlock
    }

    /// Queues a message of ours with a short payload. The caller knows of a credit and a place for it.
    pub(crate) fn queue_message(&mut self, id: ConnectionId, kind: Kind, payload: &[u8], name: Option<SendId>) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        let Some(device) = self.devices[c.device].as_mut() else { return };
        push_message(c, device, kind, payload, name);
        self.mark_dirty(id);
    }

    /// Queues a data message whose payload is in place.
    #[inline]
    pub(crate) fn queue_send(&mut self, id: ConnectionId, mut buffer: Buffer, len: usize) -> SendId {
        let c = self.connections.get_mut(id.0).expect("checked by the caller");
        let device = self.devices[c.device].as_mut().expect("an open connection has a device");
        if c.framing == Framing::Credits {
            let header = Header { kind: Kind::Data, grant: c.rx.told() };
            device.pool.slabs().bytes_mut(&mut buffer)[..HEADER_LEN].copy_from_slice(&header.emit());
        }
        let send = c.next_send_id(SendKind::Message);
        let (posted, sge) = device.pool.post(buffer, c.header_len() + len);
        c.push_send(posted, sge, Some(send));
        self.stats.messages_sent += 1;
        self.stats.bytes_sent += len as u64;
        self.mark_dirty(id);
        send
    }

    pub(crate) fn writable(&self, id: ConnectionId) -> usize {
        let Some(c) = self.connections.get(id.0).filter(|c| c.phase == Phase::Open) else { return 0 };
        match c.framing {
            Framing::Credits => {
                c.free_slots().min((c.tx.available_for_data() as usize).saturating_sub(c.transfers.credits()))
            }
            Framing::Raw => c.free_slots(),
        }
    }

    /// Whether a send would have to wait for room; one that has failed already does not.
    pub(crate) fn must_wait(&self, id: ConnectionId) -> bool {
        self.connections.get(id.0).is_some_and(|c| match c.phase {
            Phase::Open => !c.has_room(),
            phase => phase < Phase::Open,
        })
    }

    // The end of the turn.

    #[inline]
    pub(crate) fn mark_dirty(&mut self, id: ConnectionId) {
        if let Some(c) = self.connections.get_mut(id.0)
            && !c.dirty
        {
            c.dirty = true;
            self.dirty.push(id);
        }
    }

    /// Posts what the turn has gathered: receives first, so that the sends can grant them.
    pub(crate) fn flush(&mut self) {
        let mut dirty = std::mem::take(&mut self.dirty);
        for id in dirty.drain(..) {
            if let Some(c) = self.connections.get_mut(id.0) {
                c.dirty = false;
                self.flush_one(id);
            }
        }
        // Posting marks nothing dirty: the emptied list goes back with its capacity.
        if self.dirty.is_empty() {
            self.dirty = dirty;
        }
    }

    fn flush_one(&mut self, id: ConnectionId) {
        let posted = self.post_receives(id).and_then(|()| {
            if self.connections.get(id.0).is_some_and(|c| c.transfers.is_active()) {
                self.pump_transfers(id)?;
            }
            self.post_sends(id)
        });
        if let Err(error) = posted {
            log::warn!("{id}: posting failed: {error}");
            self.end(id, Ending::Disconnect(DisconnectReason::Internal(error.to_string())));
        }
    }

    /// Queues the message that opens the peer's side, before anything the user sends.
    pub(crate) fn queue_hello(&mut self, id: ConnectionId) {
        self.queue_message(id, Kind::Hello, &[], None);
    }

    fn post_receives(&mut self, id: ConnectionId) -> Result<(), Error> {
        let Some(c) = self.connections.get_mut(id.0) else { return Ok(()) };
        let (Some(qp), Some(device)) = (c.qp, self.devices[c.device].as_mut()) else { return Ok(()) };
        if c.reposts.is_empty() || (c.phase >= Phase::Draining && !c.exchanges()) {
            return Ok(());
        }
        self.receive_chain.clear();
        let size = device.pool.stride();
        let count = c.reposts.len();
        for buffer in c.reposts.drain(..) {
            let (posted, sge) = device.pool.post(buffer, size);
            let wr_id = WorkId { kind: WorkKind::Recv, connection: id, sequence: 0 }.pack();
            self.receive_chain.push(RecvWr { wr_id, sges: SgeList::one(sge) });
            c.receives.push_back(posted);
        }
        if let Err(failed) = self.provider.post_recv(qp, &self.receive_chain) {
            for _ in failed.posted..count {
                if let Some(posted) = c.receives.pop_back() {
                    c.reposts.push(posted.done());
                }
            }
            return Err(failed.error.into());
        }
        c.rx.posted(count as u32);
        Ok(())
    }

    fn post_sends(&mut self, id: ConnectionId) -> Result<(), Error> {
        let Some(c) = self.connections.get_mut(id.0) else { return Ok(()) };
        let (Some(qp), Some(device)) = (c.qp, self.devices[c.device].as_mut()) else { return Ok(()) };
        if c.phase > Phase::Draining || c.phase < Phase::Open {
            return Ok(());
        }
        if c.framing == Framing::Credits {
            let control = c.due_control();
            if let Some(kind) = control {
                queue_control(c, device, kind, &mut self.stats);
            }
            let message = c.sends.iter_mut().rev().find_map(|send| send.buffer.as_mut());
            if std::mem::take(&mut c.chained_message)
                && let Some(message) = message
            {
                // A message shows life, and brings the newest grant. A question stays one until it is asked.
                c.owes.pong = false;
                c.owes.ping &= control != Some(Kind::Ping);
                message.patch(device.pool.slabs(), 4, &c.rx.grant().to_le_bytes());
            }
        }
        let Some(last) = c.chain.last_mut() else { return Ok(()) };
        last.flags |= SendFlags::SIGNALED;
        c.unsignaled = 0;
        self.stats.doorbells += 1;
        match self.provider.post_send(qp, &c.chain) {
            Ok(()) => c.chain.clear(),
            Err(failed) => {
                c.chain.drain(..failed.posted);
                return Err(failed.error.into());
            }
        }
        Ok(())
    }

    // Ending.

    pub(crate) fn close(&mut self, id: ConnectionId) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        c.closed_here = true;
        let (open, active) = (c.phase >= Phase::Open, c.active);
        self.discard_held(id);
        let ending = match (open, active) {
            (true, _) => Ending::Disconnect(DisconnectReason::Local),
            (false, true) => Ending::ConnectError(ConnectError::Cancelled),
            (false, false) => Ending::Silent(None),
        };
        self.end(id, ending);
    }

    /// Marks a connection as ending, for the first reason given. The rest happens at the end of the turn.
    pub(crate) fn end(&mut self, id: ConnectionId, ending: Ending) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        if c.phase == Phase::Draining && !matches!(ending, Ending::Disconnect(DisconnectReason::Local)) {
            // It was leaving anyway; what was still to be sent cannot be.
            self.start_flush(id);
            return;
        }
        if c.ending.is_some() {
            return;
        }
        log::debug!("{id}: ending: {ending:?}");
        let graceful = matches!(ending, Ending::Disconnect(DisconnectReason::Local));
        // One that was never announced has no disconnect to report.
        c.ending = Some(match ending {
            Ending::Disconnect(reason @ DisconnectReason::Peer) if c.phase < Phase::Open && !c.active => {
                Ending::Silent(Some(reason))
            }
            _ if c.phase < Phase::Open && !c.active => Ending::Silent(None),
            Ending::Disconnect(reason) if c.phase < Phase::Open => {
                Ending::ConnectError(ConnectError::Local(reason.to_string()))
            }
            other => other,
        });
        self.ending.push(id);
        self.endings_moved = true;
        if graceful && c.phase == Phase::Open {
            c.phase = Phase::Draining;
            self.set_phase_timer(id, self.config.close_timeout);
            self.mark_dirty(id);
        } else {
            self.start_flush(id);
        }
    }

    /// Has the device flush the queues of a connection.
    pub(crate) fn start_flush(&mut self, id: ConnectionId) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        if c.phase == Phase::Flushing {
            return;
        }
        if c.phase < Phase::Open && !c.active {
            self.pending = self.pending.saturating_sub(1);
        }
        c.phase = Phase::Flushing;
        self.endings_moved = true;
        if c.qp.is_some()
            && let Err(error) = self.provider.disconnect(c.cm, self.now)
        {
            log::debug!("{id}: disconnecting: {error}");
        }
        self.set_phase_timer(id, self.config.flush_timeout);
    }
}

/// Adds a control message to a connection's chain. A credit and a slot are there: data never takes the last ones.
fn queue_control(c: &mut Connection, device: &mut Device, kind: Kind, stats: &mut Stats) {
    debug_assert!(c.has_room_for_control());
    stats.pings += u64::from(kind == Kind::Ping);
    stats.credit_updates += u64::from(kind == Kind::Credit);
    push_message(c, device, kind, &[], None);
}

/// Adds a message of ours to a connection's chain; the newest grant is put in when it is posted.
fn push_message(c: &mut Connection, device: &mut Device, kind: Kind, payload: &[u8], name: Option<SendId>) {
    let Some(mut buffer) = device.pool.take() else { return };
    let bytes = device.pool.slabs().bytes_mut(&mut buffer);
    bytes[..HEADER_LEN].copy_from_slice(&Header { kind, grant: c.rx.told() }.emit());
    bytes[HEADER_LEN..HEADER_LEN + payload.len()].copy_from_slice(payload);
    let (posted, sge) = device.pool.post(buffer, HEADER_LEN + payload.len());
    c.push_send(posted, sge, name);
}
