//! [`World`]: the state that all parts of the driver share. A part owns its own state and takes the
//! world as an argument. It does not know the other parts.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_transport::caps::{Capabilities, Features};
use rdma_transport::cm::CmId;
use rdma_transport::log_limit::LogLimit;
use rdma_transport::newcomers::Host;
use rdma_transport::provider::Provider;
use rdma_transport::slab::Key;

use super::end::drain::Drain;
use super::owners::{CmIdOwner, Owners};
use super::stages::Stages;
use super::table::{ConnectionSlot, ConnectionTable};
use crate::config::Config;
use crate::conn::effects::Effects;
use crate::conn::{Connection, Env, Opening, Role};
use crate::device::Device;
use crate::device::pool::{Buffer, Slabs};
use crate::device::return_channel::ReturnChannel;
use crate::device::table::Devices;
use crate::error::{Error, SendErrorKind};
use crate::id::{ConnectionId, ReactorTag};
use crate::limits::{HEADER_LEN, TAG_ROOM};
use crate::memory::joins::Joins;
use crate::memory::registry::{Registry, Removed};
use crate::options::Service;
use crate::providers::{Handle, Providers, SHARED_MEMORY};
use crate::seam::io::Registrations;
use crate::seam::poller::{Clock, Poller};
use crate::seam::timer::Timers;
use crate::seam::wake::WakeFlag;
use crate::security::PeerIdentity;
use crate::stats::Stats;

/// The purpose of a timer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TimerPurpose {
    /// The program's timer, with its token.
    Program(u64),
    /// The earliest deadline of a connection.
    Connection(ConnectionId),
    /// The end of the time for which peers may access a region. After that, their access is
    /// revoked.
    Region(Key),
    /// The next attempt to listen, for a listener whose device was removed.
    Listen(Key),
    /// The deadline of a drain.
    Drain,
    /// The next check if pools have memory that is not needed any more.
    Trim,
    /// The next check if peers that answer no Reads hold memory that other connections wait for.
    Shortage,
    /// A timer of a datagram endpoint, or of a lookup of a peer. `EndpointToken` encodes the
    /// number.
    Endpoint(u64),
}

/// The interfaces to the operating system: readiness, time, descriptors, and wake-ups by other
/// threads.
#[derive(Debug)]
pub(crate) struct Os {
    pub(crate) poller: Box<dyn Poller>,
    pub(crate) clock: Box<dyn Clock>,
    /// The descriptors that the program has registered.
    pub(crate) io: Registrations,
    pub(crate) wake: Arc<WakeFlag>,
}

/// A connection or a region that was freed. The driver passes it to the parts that count such
/// objects.
#[derive(Debug)]
pub(super) enum Freed {
    /// A connection was removed from the table. `fetched_large` is the number of bytes that it had
    /// charged to the host of its peer.
    Connection { id: ConnectionId, host: Host, fetched_large: usize },
    /// A region was removed from the registry.
    Memory(Removed),
}

/// The state that all parts of the driver share. The comment of the [module](self) has an overview.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) config: Config,
    /// The time of the last reading of the clock: at the start of a turn, during and after a wait,
    /// or before a deadline is computed.
    pub(crate) now: Instant,
    pub(crate) providers: Providers,
    pub(crate) owners: Owners,
    pub(crate) os: Os,
    pub(crate) devices: Devices,
    pub(crate) stages: Stages,
    pub(crate) table: ConnectionTable,
    pub(super) registry: Registry,
    /// The memory in which messages that arrive in several buffers are joined.
    pub(super) joins: Joins,
    pub(crate) timers: Timers<TimerPurpose>,
    pub(crate) effects: Effects,
    /// The freed objects that the driver has not passed to its parts yet.
    pub(super) freed: VecDeque<Freed>, // bound: turn
    pub(crate) stats: Stats,
    pub(crate) drain: Drain,
    /// True if the program has requested that `run` returns.
    pub(crate) stop: bool,
}

impl World {
    pub(super) fn new(
        config: Config,
        providers: Providers,
        (poller, mut clock): (Box<dyn Poller>, Box<dyn Clock>),
        wake: Arc<WakeFlag>,
    ) -> Self {
        let (tag, now) = (ReactorTag::next(), clock.now());
        Self {
            now,
            providers,
            owners: Owners::default(),
            devices: Devices::new(Arc::clone(&wake), tag.number()),
            stages: Stages::CHANNELS | Stages::EVENTS,
            table: ConnectionTable::new(tag, now),
            registry: Registry::new(Arc::clone(&wake), config.large.cache),
            joins: Joins::new(config.large.cache),
            timers: Timers::default(),
            effects: Effects::default(),
            freed: VecDeque::new(),
            stats: Stats::default(),
            drain: Drain::default(),
            stop: false,
            os: Os { poller, clock, io: Registrations::default(), wake },
            config,
        }
    }

    pub(crate) const fn tag(&self) -> ReactorTag {
        self.table.tag()
    }

    /// Updates `now` from the clock. Called before deadlines are computed, because callbacks may
    /// have taken a long time.
    #[inline]
    pub(crate) fn look_at_clock(&mut self) {
        self.now = self.os.clock.now();
    }

    /// Begins a turn.
    #[inline]
    pub(crate) fn enter_turn(&mut self) {
        self.look_at_clock();
        self.resume_turn();
    }

    /// Continues the last turn. Does not read the clock.
    #[inline]
    pub(crate) fn resume_turn(&mut self) {
        self.effects.outside = false;
        self.os.wake.enter();
    }

    /// Ends the turn. From now on, calls of the program are made outside of a turn.
    #[inline]
    pub(crate) fn leave_turn(&mut self) {
        self.effects.outside = true;
        self.os.wake.leave();
    }

    /// Destroys a connection-manager id that has no queue pair.
    pub(crate) fn discard(&mut self, cm: Handle<CmId>) {
        self.owners.discard(&mut self.providers, cm, self.now);
    }

    /// Wakes the reactor if no turn is running, because a call that was made outside of a turn
    /// requires a turn.
    pub(crate) fn ring(&self) {
        if self.effects.outside {
            self.os.wake.wake();
        }
    }

    /// Returns the time at which the next turn must run, even if no descriptor becomes readable.
    /// `None` if no timer is set.
    pub(crate) fn next_deadline(&mut self) -> Option<Instant> {
        [self.timers.next(), self.providers.next_deadline()].into_iter().flatten().min()
    }

    /// Returns a connection, and the environment for its inputs. `None` if the connection does not
    /// exist.
    #[inline]
    pub(crate) fn at(&mut self, id: ConnectionId) -> Option<(&mut ConnectionSlot, Env<'_>)> {
        let Self { table, devices, config, now, effects, stats, .. } = self;
        let slot = table.get_mut(id)?;
        let device = slot.link.binding.map_or(usize::MAX, |binding| binding.device);
        let buffers = devices.buffers(device);
        Some((slot, Env { now: *now, config, device, buffers, effects, stats }))
    }

    /// Passes an input to a connection. When the calling part of the driver has returned, the
    /// driver executes the actions that the connection has requested. Returns `None` if the
    /// connection does not exist.
    pub(super) fn pass<R>(
        &mut self,
        id: ConnectionId,
        input: impl FnOnce(&mut Connection, &mut Env<'_>) -> R,
    ) -> Option<R> {
        let (slot, mut env) = self.at(id)?;
        Some(input(&mut slot.conn, &mut env))
    }

    /// Returns a connection, the environment for its inputs, and its provider. `None` if the
    /// connection does not exist.
    #[inline]
    pub(super) fn at_with_provider(
        &mut self,
        id: ConnectionId,
    ) -> Option<(&mut ConnectionSlot, Env<'_>, &mut dyn Provider)> {
        let Self { table, devices, providers, config, now, effects, stats, .. } = self;
        let slot = table.get_mut(id)?;
        let provider = providers.numbered(slot.link.cm.provider);
        let device = slot.link.binding.map_or(usize::MAX, |binding| binding.device);
        let buffers = devices.buffers(device);
        let env = Env { now: *now, config, device, buffers, effects, stats };
        Some((slot, env, provider))
    }

    /// Returns the connection with this id. `None` if it does not exist, or if the program was not
    /// notified that it is up.
    pub(crate) fn announced(&self, id: ConnectionId) -> Option<&Connection> {
        self.table.get(id).map(|slot| &slot.conn).filter(|conn| conn.state().is_announced())
    }

    /// Returns the identity of a connection's peer, if the peer has proven it.
    pub(crate) fn identity(&self, id: ConnectionId) -> Option<&PeerIdentity> {
        self.table.get(id)?.conn.identity()
    }

    /// Returns the capabilities of a connection. These are the capabilities of the connection's
    /// device, without the features that cannot be used with this peer.
    pub(crate) fn capabilities(&self, id: ConnectionId) -> Option<Capabilities> {
        let slot = self.table.get(id)?;
        let device = self.devices.get(slot.link.binding?.device)?;
        let mut capabilities = self.providers.get(slot.link.cm.provider).device(device.id)?.capabilities;
        capabilities.features = self.features(slot);
        Some(capabilities)
    }

    /// Returns the features that can be used on a connection: the features of its device, without
    /// those that the peer or the security of the connection excludes.
    #[inline]
    pub(super) fn features(&self, slot: &ConnectionSlot) -> Features {
        let mut features = self.device_of(slot).map_or(Features::empty(), |device| device.features);
        if features.contains(Features::EXTENSIONS_BY_AGREEMENT) && !slot.conn.terms().extensions {
            features.remove(Features::WRITE_WITH_IMMEDIATE | Features::ATOMICS);
        }
        if slot.conn.is_secured() {
            // A Write with Immediate has no header, so the peer could not verify who has sent it.
            // On a secured connection, the peer is notified by an encrypted message instead.
            features.remove(Features::WRITE_WITH_IMMEDIATE);
        }
        features
    }

    /// Returns the device of a connection.
    #[inline]
    pub(super) fn device_of(&self, slot: &ConnectionSlot) -> Option<&Device> {
        self.devices.get(slot.link.binding?.device)
    }

    /// Returns the name of a connection's device.
    pub(crate) fn device_name(&self, id: ConnectionId) -> Option<&str> {
        let binding = self.table.get(id)?.link.binding?;
        self.devices.get(binding.device).map(|device| device.name.as_str())
    }

    /// Returns the name of the provider that carries a connection, or `shm` if the connection is in
    /// shared memory.
    pub(crate) fn carrier(&mut self, id: ConnectionId) -> Option<&'static str> {
        let link = &self.table.get(id)?.link;
        let (provider, qp) = (link.cm.provider, link.qp?);
        Some(if self.providers.is_in_memory(provider, qp) {
            SHARED_MEMORY
        } else {
            self.providers.get(provider).name()
        })
    }

    /// Returns true if a connection is still being established.
    pub(crate) fn is_coming_up(&self, id: ConnectionId) -> bool {
        self.table.get(id).is_some_and(|slot| slot.conn.state().is_handshake())
    }

    /// Returns the connection with this id if it is open. Otherwise returns the error with which a
    /// send on this connection is refused.
    pub(super) fn open_slot(&self, id: ConnectionId) -> Result<&ConnectionSlot, SendErrorKind> {
        self.table.get(id).filter(|slot| slot.conn.state().is_open()).ok_or(SendErrorKind::Closed)
    }

    /// Returns a buffer on the connection's device for the program to fill. Also returns the
    /// capacity of the buffer in bytes, the slabs that contain it, and the channel through which
    /// the program returns it.
    pub(crate) fn send_buffer_for(
        &mut self,
        id: ConnectionId,
    ) -> Option<(usize, Buffer, Arc<Slabs>, Arc<ReturnChannel>)> {
        let Self { table, devices, providers, .. } = self;
        let slot = table.get_mut(id).filter(|slot| slot.conn.state().is_open())?;
        let device = devices.get_mut(slot.link.binding?.device)?;
        let provider = providers.numbered(slot.link.cm.provider);
        // On a secured connection the peer must not see a message before it is encrypted.
        let qp = slot.link.qp.filter(|_| !slot.conn.is_secured());
        let apart = *slot.link.apart.get_or_insert_with(|| device.add_mapped_slab(provider, qp));
        let apart = apart.and_then(|slab| device.buffers.pool.take_mapped(slab));
        let buffer = apart.or_else(|| device.take_for_program(provider))?;
        let pool = &device.buffers.pool;
        let capacity = slot.conn.terms().buffer_size.min(pool.stride() - HEADER_LEN - TAG_ROOM);
        Some((capacity, buffer, Arc::clone(pool.slabs()), Arc::clone(&device.return_channel)))
    }

    /// Returns true if the buffers that return through this channel belong to a device of this
    /// reactor.
    pub(crate) fn owns_buffers_of(&self, channel: &ReturnChannel) -> bool {
        self.devices.owns_buffers_of(channel)
    }

    /// Checks that the buffers that return through this channel are registered on the device of a
    /// connection. Returns the mapped slab of the connection, if it has one.
    pub(crate) fn check_buffer(&self, id: ConnectionId, channel: &ReturnChannel) -> Result<Option<u16>, SendErrorKind> {
        let slot = self.open_slot(id)?;
        let same = slot.link.binding.is_some_and(|binding| binding.device == channel.pool.device);
        if same && self.owns_buffers_of(channel) {
            Ok(slot.link.apart.flatten())
        } else {
            Err(SendErrorKind::ForeignBuffer)
        }
    }

    /// Returns the slabs and the return channel of a device's buffers. `None` if the device was
    /// closed.
    ///
    /// A device is not closed while a message can still be delivered: the message's connection has
    /// reserved capacity on the device until the connection is released.
    pub(crate) fn lender(&self, device: usize) -> Option<(Arc<Slabs>, Arc<ReturnChannel>)> {
        let device = self.devices.get(device);
        debug_assert!(device.is_some(), "a message of a device that was removed");
        let device = device?;
        Some((Arc::clone(device.buffers.pool.slabs()), Arc::clone(&device.return_channel)))
    }

    /// Returns true if `slabs` are the current slabs of the device's buffers. These are replaced
    /// when the pool grows.
    #[inline]
    pub(crate) fn is_lender(&self, device: usize, slabs: &Arc<Slabs>) -> bool {
        self.devices.get(device).is_some_and(|device| Arc::ptr_eq(slabs, device.buffers.pool.slabs()))
    }

    /// Reserves entries of a completion queue on a device, for an endpoint. Returns the index of
    /// the queue.
    pub(crate) fn claim_room(&mut self, index: usize, entries: u32) -> Result<usize, Error> {
        let Self { devices, providers, config, stages, .. } = self;
        stages.insert(Stages::CHANNELS);
        let device = devices.use_device(index, providers, config);
        if device.removed {
            return Err(Error::Gone("device"));
        }
        device.claim_room(providers.of_device(index), config, entries)
    }

    /// Schedules a check for memory that is not needed any more, because buffers or memory of large
    /// messages were released.
    pub(crate) fn expect_trim(&mut self) {
        let kept = self.registry.kept() + self.joins.kept();
        if !self.devices.trimming && (self.devices.are_excessive() || kept > 0) {
            self.devices.trimming = true;
            let idle = self.config.timeouts.pool_idle;
            self.timers.insert(self.now + idle, TimerPurpose::Trim);
        }
    }

    pub(crate) fn trim_pools(&mut self) {
        self.devices.trimming = false;
        for device in self.devices.iter_mut() {
            self.stats.memory.unreleased += device.trim(self.providers.of_device(device.index()));
        }
        self.registry.trim(&mut self.providers);
        self.joins.trim();
        self.expect_trim();
    }

    /// Sets the timer of a connection to its earliest deadline.
    pub(super) fn set_timer(&mut self, id: ConnectionId) {
        let Some(slot) = self.table.get_mut(id) else { return };
        let next = slot.conn.next_timeout();
        if slot.link.timer.map(|(_, at)| at) == next {
            return;
        }
        if let Some((timer, _)) = slot.link.timer.take() {
            self.timers.cancel(timer);
        }
        slot.link.timer = next.map(|at| (self.timers.insert(at, TimerPurpose::Connection(id)), at));
    }

    /// Sets the deadline `step` of a connection, and its timer.
    pub(super) fn set_deadline(&mut self, id: ConnectionId, at: Option<Instant>) {
        if let Some(slot) = self.table.get_mut(id) {
            slot.conn.deadlines.step = at;
            self.set_timer(id);
        }
    }

    /// Limits the current step of a connection to `timeout`, which begins now. Reads the clock,
    /// because a callback of this turn may have run for a long time, so `now` may be out of date.
    /// Returns the time that it has read.
    pub(super) fn set_timeout(&mut self, id: ConnectionId, timeout: Duration) -> Instant {
        let begun = self.os.clock.now();
        self.set_deadline(id, Some(begun + timeout));
        begun
    }

    /// Sets the flag of a stage.
    #[inline]
    pub(crate) fn note(&mut self, stage: Stages) {
        self.stages.insert(stage);
    }

    /// Returns true if one of the stages that do not run in every turn has work.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        !self.stages.is_empty() || self.timers.may_be_due(self.now) || self.os.wake.is_pending()
    }

    /// Adds a new connection to the table and returns its id.
    pub(super) fn insert(&mut self, cm: Handle<CmId>, service: Service, role: Role, opening: Opening) -> ConnectionId {
        let (config, now) = (&self.config, self.now);
        let id =
            self.table.insert(|id| ConnectionSlot::new(Connection::new(id, role, opening, config, now), cm, service));
        if cm != Handle::NONE {
            self.owners.own(cm, CmIdOwner::Connection(id));
        }
        id
    }

    /// Returns the address of a connection's peer, the time, and the limit on log lines about
    /// peers.
    pub(crate) fn log_limit_of(&mut self, id: ConnectionId) -> Option<(SocketAddr, Instant, &mut LogLimit)> {
        let peer = self.table.get(id)?.conn.peer();
        Some((peer, self.now, &mut self.effects.log_limit))
    }
}
