//! The driver connects the state machines of connections with the providers, devices and timers. It passes each event to its connection,
//! and executes the actions that connections request. The driver does not call the handler of the program: callbacks are queued as events,
//! and the turn delivers them.

/// Logs at `warn` why an operation on a connection has failed. The number of such lines has a
/// limit.
macro_rules! failure_log {
    ($driver:expr, $id:expr, $($text:tt)+) => {
        if let Some((peer, now, limit)) = $driver.log_limit_of($id) {
            peer_log!(limit, now, Failed, Warn, peer, "{}: {}", $id, format_args!($($text)+));
        }
    };
}
pub(crate) use failure_log;

mod end;
mod memory;
pub(crate) mod open;
pub(crate) mod owners;
mod pending;
pub(crate) mod run;
pub(crate) mod stages;
pub(crate) mod table;
mod world;

use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rdma_transport::cm::{CmEvent, CmEventKind};
use rdma_transport::event::{self, DeviceEventKind};

use self::end::close::Ends;
use self::memory::large::LargeMessages;
use self::open::accept::Acceptor;
use self::open::connect::Connector;
use self::open::fallback::Fallback;
use self::open::group::GroupMembership;
use self::open::listen::Listeners;
use self::owners::CmIdOwner;
use self::run::device_event::DeviceEventReport;
use self::run::fair::Fair;
use self::run::queues::Queues;
use self::stages::Stages;
use self::world::Freed;
use crate::config::{Config, Framing};
use crate::conn::effects::Action;
use crate::conn::state::Ending;
use crate::conn::{Connection, Env};
use crate::device::pool::Buffer;
use crate::device::return_channel::{PoolId, Returned, ReturnedMemory};
use crate::error::{Error, RejectReason};
use crate::id::{ConnectionId, ListenerId};
use crate::options::{ConnectOptions, ListenOptions};
use crate::providers::{Handle, Providers, device_index};
use crate::seam::poller::{Clock, Poller};
use crate::seam::wake::WakeFlag;
use crate::stats::{ConnectionStats, MemoryStats, Stats};

pub(crate) use self::open::accept::CmStep;
pub(crate) use self::open::request::IncomingRequest;
pub use self::run::device_event::DeviceEvent;
pub(crate) use self::world::{TimerPurpose, World};

/// The driver of one reactor: the world, and the parts, each of which owns a part of the state. The
/// parts and the connections do not call other parts: they request actions, which the driver
/// executes. So only the driver knows more than one part.
///
/// The driver dereferences to its world, so that its callers can use the world directly.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) world: World,
    pub(crate) acceptor: Acceptor,
    connector: Connector,
    ends: Ends,
    pub(crate) fair: Fair,
    pub(crate) large: LargeMessages,
    pub(crate) listeners: Listeners,
    pub(crate) queues: Queues,
}

impl Deref for Driver {
    type Target = World;

    #[inline]
    fn deref(&self) -> &World {
        &self.world
    }
}

impl DerefMut for Driver {
    #[inline]
    fn deref_mut(&mut self) -> &mut World {
        &mut self.world
    }
}

impl Driver {
    pub(crate) fn new(
        config: Config,
        providers: Providers,
        seams: (Box<dyn Poller>, Box<dyn Clock>),
        wake: Arc<WakeFlag>,
    ) -> Self {
        Self {
            acceptor: Acceptor::default(),
            connector: Connector::default(),
            ends: Ends::default(),
            fair: Fair::default(),
            large: LargeMessages::new(config.large.memory),
            listeners: Listeners::default(),
            queues: Queues::new(&config),
            world: World::new(config, providers, seams, wake),
        }
    }

    /// Returns the counters, and the current values of the gauges.
    pub(crate) fn stats(&self) -> Stats {
        let World { stats, providers, table, registry, devices, .. } = &self.world;
        let mut stats = *stats;
        stats.completions.acknowledgements = providers.acknowledgements();
        stats.connections = ConnectionStats { current: table.count(), ..stats.connections };
        let (fetched_bytes, copied_bytes) = self.large.levels();
        stats.memory = MemoryStats {
            regions: registry.len(),
            direct_regions: registry.direct(),
            unreleased: stats.memory.unreleased + registry.unreleased(),
            unrevoked: registry.unrevoked(),
            held_receives: stats.memory.held_receives,
            kept_bytes: registry.kept(),
            fetched_bytes,
            copied_bytes,
            ..devices.levels()
        };
        stats
    }

    /// Passes an input to a connection, and executes the actions that it requests. Returns `None` if the connection does not exist.
    #[inline]
    pub(crate) fn input<R>(
        &mut self,
        id: ConnectionId,
        input: impl FnOnce(&mut Connection, &mut Env<'_>) -> R,
    ) -> Option<R> {
        let (slot, mut env) = self.world.at(id)?;
        let result = input(&mut slot.conn, &mut env);
        self.act();
        Some(result)
    }

    /// Executes the actions that connections have requested.
    #[inline]
    pub(crate) fn act(&mut self) {
        if !self.world.effects.actions.is_empty() {
            self.act_on_all();
        }
    }

    /// Executes the requested actions like [`Driver::act`]. If a connection or a region was freed,
    /// notifies the parts of the driver that count it.
    #[inline]
    pub(super) fn settle(&mut self) {
        if !self.world.effects.actions.is_empty() || !self.world.freed.is_empty() {
            self.act_on_all();
        }
    }

    #[cold]
    fn act_on_all(&mut self) {
        let Self { world, ends, large, acceptor, .. } = self;
        loop {
            while let Some((id, action)) = world.effects.actions.pop_front() {
                match action {
                    Action::Deadline => world.set_timer(id),
                    Action::Flush => ends.begin_flush(world, id),
                    Action::Ending => ends.watch_end(world, id),
                    Action::Settled => world.table.settled(id),
                    Action::Invalidated { device, key } => {
                        let ended = world.registry.invalidated(&mut world.providers, (device, id), key);
                        world.forget_rights(ended);
                    }
                    Action::Unused(key) => world.deregister_unused(key),
                    // After this drop, the region is deregistered as soon as no work request uses
                    // it any more.
                    Action::Discard(region) => drop(region),
                    Action::NoMemory => large.leave_lines(world, id),
                    Action::Ring => world.os.wake.wake(),
                }
            }
            match world.freed.pop_front() {
                Some(Freed::Connection { id, host, fetched_large }) => {
                    large.leave_lines(world, id);
                    large.relieve(world, host, fetched_large);
                    acceptor.lost();
                }
                Some(Freed::Memory(removed)) => large.settle(world, removed.account, removed.len, removed.of),
                None => return,
            }
        }
    }

    /// Makes this reactor a member of a group. If it is draining already, it accepts no connections of the group.
    pub(crate) fn join_group(&mut self, membership: GroupMembership) {
        if self.world.drain.is_on() {
            membership.close();
        }
        self.acceptor.membership = Some(membership);
    }

    /// Notes that the program keeps a message after its callback.
    pub(crate) fn keep_message(&mut self, id: ConnectionId) {
        self.input(id, Connection::keep_message);
    }

    /// Stage 9: frees the memory of messages that the program has released.
    pub(crate) fn take_returned(&mut self) {
        while let Some(Returned { pool, memory, receive_of }) = self.world.devices.next_returned() {
            match memory {
                ReturnedMemory::Buffer(buffer) => self.take_home(pool, buffer, receive_of),
                ReturnedMemory::Joined(joined) => self.take_joined_home(pool, joined, receive_of),
            }
        }
    }

    /// Frees a buffer that the program has released. If the pool of the buffer does not exist any more, does nothing: the memory of that
    /// pool is freed with the last reference to that memory.
    pub(crate) fn take_home(&mut self, pool: PoolId, buffer: Buffer, receive_of: Option<ConnectionId>) {
        if !self.world.devices.has_pool(pool) {
            return;
        }
        if let Some((slot, mut env)) = receive_of.and_then(|id| self.world.at(id)) {
            slot.conn.message_returned(buffer, &mut env);
            if slot.conn.state().is_ending() {
                self.world.note(Stages::ENDS);
            }
            return self.act();
        }
        let buffers = self.world.devices.buffers(pool.device);
        // The connection has ended. If the shared queue still lacks receives that ended connections had used, this buffer goes to the
        // shared queue.
        let buffer = match &mut buffers.shared {
            Some(shared) if receive_of.is_some() => shared.return_orphan(buffer),
            _ => Some(buffer),
        };
        match buffer {
            Some(buffer) => {
                buffers.pool.unlend(&buffer);
                buffers.pool.give(buffer);
                self.world.expect_trim();
            }
            // The next flush posts the buffer to the shared queue.
            None => self.world.ring(),
        }
    }

    /// Releases entries that [`World::claim_room`] has reserved.
    pub(crate) fn release_room(&mut self, device: usize, cq: usize, entries: u32) {
        if let Some(used) = self.world.devices.get_mut(device) {
            used.release_room(cq, entries);
        }
        self.world.drop_if_abandoned(device);
        self.settle();
    }

    /// Opens a connection to the first of `peers` that can be reached.
    pub(crate) fn connect(&mut self, peers: &[SocketAddr], options: ConnectOptions) -> Result<ConnectionId, Error> {
        Connector::connect(&mut self.world, peers, options).inspect(|_| self.acceptor.gained())
    }

    /// Opens a connection over a stream that the program has connected.
    pub(crate) fn connect_over(&mut self, stream: OwnedFd, options: ConnectOptions) -> Result<ConnectionId, Error> {
        Connector::connect_over(&mut self.world, stream, options).inspect(|_| self.acceptor.gained())
    }

    /// Opens a connection to a host by its name.
    pub(crate) fn connect_host(
        &mut self,
        host: &str,
        port: u16,
        options: ConnectOptions,
    ) -> Result<ConnectionId, Error> {
        let opened = self.connector.connect_host(&mut self.world, (host, port), options);
        opened.inspect(|_| self.acceptor.gained())
    }

    pub(crate) fn listen(&mut self, address: SocketAddr, options: ListenOptions) -> Result<ListenerId, Error> {
        self.listeners.listen(&mut self.world, address, options)
    }

    pub(crate) fn local_address(&self, listener: ListenerId) -> Option<SocketAddr> {
        self.listeners.local_address(listener.key(self.world.tag())?)
    }

    pub(crate) fn close_listener(&mut self, listener: ListenerId) {
        self.listeners.close_listener(&mut self.world, listener);
    }

    /// Passes a stream that the program has accepted to a listener.
    pub(crate) fn take_stream(&mut self, listener: ListenerId, stream: OwnedFd) -> Result<(), Error> {
        self.listeners.take_stream(&mut self.world, listener, stream)
    }

    /// Accepts a request, as the program has decided. `answer` is the private data for the peer.
    pub(crate) fn accept(&mut self, request: IncomingRequest, answer: &[u8]) {
        self.acceptor.accept(&mut self.world, request, answer);
        self.settle();
    }

    /// Handles the next event of the connection manager.
    pub(crate) fn next_cm(&mut self) -> Result<CmStep, Error> {
        let Some((provider, event)) = self.world.providers.next_cm_event(self.world.now)? else {
            self.world.drop_removed_devices();
            self.settle();
            return Ok(CmStep::Nothing);
        };
        log::trace!("connection manager: {event:?}");
        let CmEvent { id, kind } = event;
        // The connection-manager id of a new connect request has no owner yet. So the owner of the
        // listener's id handles the event.
        let of = if let CmEventKind::ConnectRequest { listener, .. } = kind { listener } else { id };
        let owner = self.world.owners.owner(Handle { provider, id: of });
        let cm = Handle { provider, id };
        if let Some(CmIdOwner::Endpoint(number)) = owner {
            return Ok(CmStep::Endpoint(number, cm, kind));
        }
        match (owner, kind) {
            (Some(CmIdOwner::Listener(key)), CmEventKind::ConnectRequest { device, peer, private_data, .. }) => {
                let device = device_index(provider, device);
                let Some(options) = self.listeners.options(key) else { return Ok(CmStep::Done) };
                let request = self.acceptor.request(&self.world, (key, options), cm, device, (peer, private_data));
                return Ok(CmStep::Request(request));
            }
            (_, CmEventKind::ConnectRequest { .. }) => self.world.reject(cm, Framing::Raw, RejectReason::Busy, &[]),
            (Some(CmIdOwner::Listener(key)), CmEventKind::DeviceRemoval) => {
                self.listeners.listener_lost(&mut self.world, key)
            }
            (Some(CmIdOwner::Listener(key)), CmEventKind::AddressChange) => {
                self.listeners.listener_moved(&mut self.world, key)
            }
            (Some(CmIdOwner::Connection(id)), CmEventKind::Resolved { device }) => {
                self.cm_resolved(id, device_index(provider, device));
            }
            (Some(CmIdOwner::Connection(id)), kind) => self.cm_event(id, kind),
            // The event is for a connection or a listener that has ended, or is of a kind that the
            // owner does not need.
            _ => {}
        }
        Ok(CmStep::Done)
    }

    /// Handles the event that the address of a new connection is resolved: a provider has found a
    /// device through which it can reach the peer.
    fn cm_resolved(&mut self, id: ConnectionId, device: usize) {
        if let Some(slot) = self.world.table.get_mut(id) {
            self.world.providers.note_use(slot.link.cm.provider);
            let limit = slot.link.fallback.as_mut().and_then(Fallback::resolved);
            slot.link.fallback.take_if(|fallback| fallback.is_empty());
            if limit.is_some() {
                self.world.set_deadline(id, limit);
            }
        }
        if let Err(error) = self.world.resolved(id, device) {
            let ending = Ending::ConnectError(error.into());
            self.input(id, |conn, env| conn.end(ending, env));
        }
    }

    fn cm_event(&mut self, id: ConnectionId, kind: CmEventKind) {
        match kind {
            CmEventKind::Established { private_data, .. } => {
                let own = self.world.buffer_size_of(id);
                let offers = self.input(id, |conn, env| conn.established(&private_data, own, env));
                self.world.note_carried(id);
                // The peer has accepted the connection at this address. The time limit of a single
                // attempt, which is shorter, no longer applies, so the handshake gets the full
                // connect timeout.
                let slot = self.world.table.get(id);
                if slot.is_some_and(|slot| slot.link.fallback.is_some() && slot.conn.state().is_securing()) {
                    self.world.set_timeout(id, self.world.config.timeouts.connect);
                }
                if self.world.agree_on_extensions(id, offers == Some(true)) {
                    self.input(id, |conn, _| conn.use_extensions());
                }
            }
            CmEventKind::Rejected { private_data } => {
                self.input(id, |conn, env| conn.rejected(private_data.into_vec(), env));
            }
            CmEventKind::ConnectFailed(failure) => {
                self.input(id, |conn, env| conn.connect_failed(failure, env));
            }
            CmEventKind::Disconnected(cause) => {
                self.input(id, |conn, env| conn.disconnected(cause, env));
                self.world.note(Stages::ENDS);
            }
            CmEventKind::DeviceRemoval => {
                self.input(id, Connection::device_removed);
                self.world.note(Stages::ENDS);
            }
            CmEventKind::TimewaitExit => {}
            other => log::debug!("{id}: {other:?} ignored"),
        }
    }

    /// Checks for results and requests from other threads: regions that the program has dropped,
    /// resolved host names, and a request to drain.
    pub(crate) fn check_inbox(&mut self) {
        self.world.take_dropped_regions();
        self.connector.take_lookups(&mut self.world);
        self.settle();
        if let Some(deadline) = self.world.os.wake.take_drain() {
            self.want_drain(deadline);
        }
    }

    /// Notes that the program has postponed its decision about the peer's identity. From now on, no
    /// other address is tried: all attempts of a connection have the same id, so the decision could
    /// be mistaken for a decision about the peer at another address.
    pub(crate) fn postpone_judgement(&mut self, id: ConnectionId) {
        let Some(slot) = self.world.table.get_mut(id) else { return };
        if slot.conn.postpone_judgement() {
            slot.link.fallback = None;
        }
    }

    /// Handles the next event of a device. If connections cannot continue after the event, ends
    /// them. Returns `None` if there is no event.
    pub(crate) fn next_device_event(&mut self) -> Option<DeviceEventReport> {
        let (provider, event) = self.world.providers.next_device_event()?;
        let event::AsyncEvent { device, kind } = event;
        let index = device_index(provider, device);
        let mut report = DeviceEventReport::default();
        match kind {
            DeviceEventKind::LastReceive(_) => return Some(report),
            DeviceEventKind::SharedReceiveQueueFailed(srq) => {
                self.world.shared_queue_failed(index, srq);
                self.act();
                return Some(report);
            }
            DeviceEventKind::Fatal | DeviceEventKind::Removed => {
                self.world.end_connections_of(index);
                self.act();
                report.failed = Some(index);
            }
            _ => {}
        }
        let name = match self.world.devices.get(index) {
            Some(used) => used.name.clone(),
            None => match self.world.providers.get(provider).device(device) {
                Some(info) => info.name.clone(),
                None => format!("device {}", device.0),
            },
        };
        report.event = Some(DeviceEvent { device: name, kind });
        Some(report)
    }
}
