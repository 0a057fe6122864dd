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

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_transport::caps::{Capabilities, Features};
use rdma_transport::cm::CmId;
use rdma_transport::slab::{Key, Slab};

use self::end::drain::Drain;
use self::memory::large::LargeMessages;
use self::open::group::GroupMembership;
use self::open::listen::ListenerEntry;
use self::open::lookup::Lookups;
use self::owners::Owners;
use self::run::fair::Fair;
use self::run::queues::Queues;
use self::stages::Stages;
use self::table::{ConnectionSlot, ConnectionTable};
use crate::config::Config;
use crate::conn::effects::{Action, Arrived, Effects, Event};
use crate::conn::{Connection, Env};
use crate::device::Device;
use crate::device::pool::{Buffer, Slabs};
use crate::device::return_channel::{PoolId, ReturnChannel, Returned, ReturnedMemory};
use crate::device::table::Devices;
use crate::error::{Error, SendErrorKind};
use crate::id::{ConnectionId, ReactorTag};
use crate::limits::{HEADER_LEN, TAG_ROOM};
use crate::memory::registry::Registry;
use crate::providers::{Handle, Providers, SHARED_MEMORY};
use crate::seam::io::Registrations;
use crate::seam::poller::{Clock, Poller};
use crate::seam::timer::{Expired, Timers};
use crate::seam::wake::WakeFlag;
use crate::security::PeerIdentity;
use crate::stats::{ConnectionStats, MemoryStats, Stats};

pub(crate) use self::open::accept::{CmStep, IncomingRequest};
pub use self::run::device_event::DeviceEvent;

/// The purpose of a timer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TimerPurpose {
    /// The program's timer, with its token.
    Program(u64),
    /// The timeout of a connection.
    Connection(ConnectionId),
    /// The time to send an early message on a connection whose peer has sent nothing, and the number of earlier ones.
    Nudge(ConnectionId, u8),
    /// The deadline of a connection's lists.
    Lists(ConnectionId),
    /// The end of the time within which the program must close a connection.
    Close(ConnectionId),
    /// The end of the time for which peers may access a region. After that, their access is revoked.
    Region(Key),
    /// The next attempt to listen, for a listener whose device was removed.
    Listen(Key),
    /// The deadline of a drain.
    Drain,
    /// The next check if pools have memory that is not needed any more.
    Trim,
    /// The next check if peers that answer no Reads hold memory that other connections wait for.
    Shortage,
    /// A timer of an endpoint, with the endpoint's number.
    Endpoint(u64),
}

/// The interfaces to the operating system: readiness, time, descriptors, and wake-ups by other threads.
#[derive(Debug)]
pub(crate) struct Os {
    pub(crate) poller: Box<dyn Poller>,
    pub(crate) clock: Box<dyn Clock>,
    /// The descriptors that the program has registered.
    pub(crate) io: Registrations,
    pub(crate) wake: Arc<WakeFlag>,
}

/// The driver of one reactor. The comment of the [module](self) has an overview.
#[derive(Debug)]
pub(crate) struct Driver {
    config: Config,
    /// The time of the last reading of the clock: at the start of a turn, during and after a wait, or before a deadline is computed.
    now: Instant,
    providers: Providers,
    owners: Owners,
    os: Os,
    devices: Devices,
    stages: Stages,
    queues: Queues,
    table: ConnectionTable,
    fair: Fair,
    listeners: Slab<ListenerEntry>, // local: listeners of the program
    registry: Registry,
    large: LargeMessages,
    timers: Timers<TimerPurpose>,
    effects: Effects,
    stats: Stats,
    drain: Drain,
    lookups: Lookups,
    /// The part of its group that this reactor keeps. `None` if the reactor is in no group.
    membership: Option<GroupMembership>,
    /// True if the program has requested that `run` returns.
    stop: bool,
}

impl Driver {
    pub(crate) fn new(
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
            queues: Queues::new(&config),
            table: ConnectionTable::new(tag, now),
            fair: Fair::default(),
            listeners: Slab::default(),
            registry: Registry::new(Arc::clone(&wake), config.large.cache),
            large: LargeMessages::new(config.large.memory, config.large.cache),
            timers: Timers::default(),
            effects: Effects::default(),
            stats: Stats::default(),
            drain: Drain::default(),
            lookups: Lookups::default(),
            membership: None,
            stop: false,
            os: Os { poller, clock, io: Registrations::default(), wake },
            config,
        }
    }

    pub(crate) const fn tag(&self) -> ReactorTag {
        self.table.tag()
    }

    pub(crate) const fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) const fn now(&self) -> Instant {
        self.now
    }

    /// Begins a turn.
    pub(crate) fn enter_turn(&mut self) {
        self.look_at_clock();
        self.resume_turn();
    }

    /// Continues the last turn. Does not read the clock.
    pub(crate) fn resume_turn(&mut self) {
        self.effects.outside = false;
        self.os.wake.enter();
    }

    /// Ends the turn. From now on, calls of the program are made outside of a turn.
    pub(crate) fn leave_turn(&mut self) {
        self.effects.outside = true;
        self.os.wake.leave();
    }

    /// Updates `now` from the clock. Called before deadlines are computed, because callbacks may have taken a long time.
    pub(crate) fn look_at_clock(&mut self) {
        self.now = self.os.clock.now();
    }

    pub(crate) const fn providers(&self) -> &Providers {
        &self.providers
    }

    pub(crate) const fn providers_mut(&mut self) -> &mut Providers {
        &mut self.providers
    }

    pub(crate) const fn owners_mut(&mut self) -> &mut Owners {
        &mut self.owners
    }

    /// Destroys a connection-manager id that has no queue pair.
    pub(crate) fn discard(&mut self, cm: Handle<CmId>) {
        self.owners.discard(&mut self.providers, cm, self.now);
    }

    pub(crate) const fn os(&self) -> &Os {
        &self.os
    }

    pub(crate) const fn os_mut(&mut self) -> &mut Os {
        &mut self.os
    }

    /// Returns the timers that have expired.
    pub(crate) fn expired_timers(&self) -> Expired {
        self.timers.expired(self.now)
    }

    pub(crate) const fn timers_mut(&mut self) -> &mut Timers<TimerPurpose> {
        &mut self.timers
    }

    pub(crate) const fn counters(&mut self) -> &mut Stats {
        &mut self.stats
    }

    pub(crate) const fn connections(&self) -> &ConnectionTable {
        &self.table
    }

    /// Returns the counters, and the current values of the gauges.
    pub(crate) fn stats(&self) -> Stats {
        let mut stats = self.stats;
        stats.completions.acknowledgements = self.providers.acknowledgements();
        stats.connections = ConnectionStats { current: self.table.count(), ..stats.connections };
        let (fetched_bytes, copied_bytes) = self.large.levels();
        let (regions, kept_bytes) = (self.registry.len(), self.registry.kept());
        let unreleased = stats.memory.unreleased + self.registry.unreleased();
        let (unrevoked, held_receives) = (self.registry.unrevoked(), stats.memory.held_receives);
        let levels = self.devices.levels();
        stats.memory = MemoryStats {
            regions,
            direct_regions: self.registry.direct(),
            unreleased,
            unrevoked,
            held_receives,
            kept_bytes,
            fetched_bytes,
            copied_bytes,
            ..levels
        };
        stats
    }

    /// Wakes the reactor if no turn is running, because a call that was made outside of a turn requires a turn.
    pub(crate) fn ring(&self) {
        if self.effects.outside {
            self.os.wake.wake();
        }
    }

    /// Makes `run` return after this turn.
    pub(crate) const fn stop(&mut self) {
        self.stop = true;
    }

    pub(crate) const fn take_stop(&mut self) -> bool {
        std::mem::replace(&mut self.stop, false)
    }

    /// Returns the time at which the next turn must run, even if no descriptor becomes readable. `None` if no timer is set.
    pub(crate) fn next_deadline(&mut self) -> Option<Instant> {
        [self.timers.next(), self.providers.next_deadline()].into_iter().flatten().min()
    }

    // Connections.

    /// Returns a connection, and the environment for its inputs. `None` if the connection does not exist.
    #[inline]
    pub(crate) fn at(&mut self, id: ConnectionId) -> Option<(&mut ConnectionSlot, Env<'_>)> {
        let Self { table, devices, config, now, effects, stats, .. } = self;
        let slot = table.get_mut(id)?;
        let device = slot.link.place.map_or(usize::MAX, |place| place.device);
        let buffers = devices.buffers(device);
        Some((slot, Env { now: *now, config, device, buffers, effects, stats }))
    }

    /// Passes an input to a connection, and executes the actions that it requests. Returns `None` if the connection does not exist.
    #[inline]
    pub(crate) fn input<R>(
        &mut self,
        id: ConnectionId,
        input: impl FnOnce(&mut Connection, &mut Env<'_>) -> R,
    ) -> Option<R> {
        let (slot, mut env) = self.at(id)?;
        let result = input(&mut slot.conn, &mut env);
        self.act();
        Some(result)
    }

    /// Executes the actions that connections have requested.
    #[inline]
    pub(crate) fn act(&mut self) {
        if !self.effects.actions.is_empty() {
            self.act_on_all();
        }
    }

    #[cold]
    fn act_on_all(&mut self) {
        while let Some((id, action)) = self.effects.actions.pop_front() {
            match action {
                Action::Deadline(at) => self.set_deadline(id, at),
                Action::LookBy(at) => self.look_by(id, at),
                Action::ListsBy(at) => self.watch_lists(id, at),
                Action::Nudge(after, earlier) => {
                    self.timers.insert(self.now + after, TimerPurpose::Nudge(id, earlier));
                }
                Action::Flush => self.begin_flush(id),
                Action::Ending => self.watch_end(id),
                Action::Settled => self.table.settled(id),
                Action::Invalidated { device, key } => {
                    let ended = self.registry.invalidated(&mut self.providers, (device, id), key);
                    self.forget_rights(ended);
                }
                Action::Unused(key) => self.deregister_unused(key),
                // After this drop, the region is deregistered as soon as no work request uses it any more.
                Action::Discard(region) => drop(region),
                Action::NoMemory => self.leave_lines(id),
                Action::Ring => self.os.wake.wake(),
            }
        }
    }

    /// Returns the message in `Effects::arrived`, if there is one: the next callback is the one for this message. Otherwise returns `None`.
    #[inline]
    pub(crate) fn next_arrived(&mut self) -> Option<(ConnectionId, Arrived)> {
        self.effects.arrived.take()
    }

    /// Returns the next pending callback, with the id of its connection. `None` if no callback is pending.
    #[inline]
    pub(crate) fn next_event(&mut self) -> Option<(ConnectionId, Event)> {
        self.effects.next_event()
    }

    /// Returns the connection with this id. `None` if it does not exist, or if the program was not notified that it is up.
    pub(crate) fn announced(&self, id: ConnectionId) -> Option<&Connection> {
        self.table.get(id).map(|slot| &slot.conn).filter(|conn| conn.state().is_announced())
    }

    /// Returns the identity of a connection's peer, if the peer has proven it.
    pub(crate) fn identity(&self, id: ConnectionId) -> Option<&PeerIdentity> {
        self.table.get(id)?.conn.identity()
    }

    /// Returns the capabilities of a connection. These are the capabilities of the connection's device, without the features that cannot be
    /// used with this peer.
    pub(crate) fn capabilities(&self, id: ConnectionId) -> Option<Capabilities> {
        let slot = self.table.get(id)?;
        let device = self.devices.get(slot.link.place?.device)?;
        let mut capabilities = self.providers.get(slot.link.cm.provider).device(device.id)?.capabilities;
        capabilities.features = self.features(slot);
        Some(capabilities)
    }

    /// Returns the features that can be used on a connection: the features of its device, without those that the peer or the security of
    /// the connection excludes.
    #[inline]
    pub(super) fn features(&self, slot: &ConnectionSlot) -> Features {
        let mut features = self.device_of(slot).map_or(Features::empty(), |device| device.features);
        if features.contains(Features::EXTENSIONS_BY_AGREEMENT) && !slot.conn.terms().extensions {
            features.remove(Features::WRITE_WITH_IMMEDIATE | Features::ATOMICS);
        }
        if slot.conn.is_secured() {
            // A Write with Immediate has no header, so the peer could not verify who has sent it. On a secured connection, the peer is
            // notified by an encrypted message instead.
            features.remove(Features::WRITE_WITH_IMMEDIATE);
        }
        features
    }

    /// Returns the device of a connection.
    #[inline]
    pub(super) fn device_of(&self, slot: &ConnectionSlot) -> Option<&Device> {
        self.devices.get(slot.link.place?.device)
    }

    /// Returns the name of a connection's device.
    pub(crate) fn device_name(&self, id: ConnectionId) -> Option<&str> {
        let place = self.table.get(id)?.link.place?;
        self.devices.get(place.device).map(|device| device.name.as_str())
    }

    /// Returns the name of the provider that carries a connection, or that of shared memory.
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

    /// Makes this reactor a member of a group. If it is draining already, it accepts no connections of the group.
    pub(crate) fn join_group(&mut self, membership: GroupMembership) {
        if self.drain.is_on() {
            membership.close();
        }
        self.membership = Some(membership);
    }

    /// Returns the connection with this id if it is open. Otherwise returns the error with which a send on this connection is refused.
    pub(super) fn open_slot(&self, id: ConnectionId) -> Result<&ConnectionSlot, SendErrorKind> {
        self.table.get(id).filter(|slot| slot.conn.state().is_open()).ok_or(SendErrorKind::Closed)
    }

    // Buffers.

    /// Returns a buffer on the connection's device for the program to fill. Also returns the capacity of the buffer in bytes, the slabs
    /// that contain it, and the channel through which the program returns it.
    pub(crate) fn send_buffer_for(
        &mut self,
        id: ConnectionId,
    ) -> Option<(usize, Buffer, Arc<Slabs>, Arc<ReturnChannel>)> {
        let Self { table, devices, providers, .. } = self;
        let slot = table.get_mut(id).filter(|slot| slot.conn.state().is_open())?;
        let device = devices.get_mut(slot.link.place?.device)?;
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

    /// Returns true if the buffers that return through this channel belong to a device of this reactor.
    pub(crate) fn owns_buffers_of(&self, channel: &ReturnChannel) -> bool {
        self.devices.owns_buffers_of(channel)
    }

    /// Checks that the buffers that return through this channel are registered on the device of a
    /// connection. Returns the mapped slab of the connection, if it has one.
    pub(crate) fn check_buffer(&self, id: ConnectionId, channel: &ReturnChannel) -> Result<Option<u16>, SendErrorKind> {
        let slot = self.open_slot(id)?;
        let same = slot.link.place.is_some_and(|place| place.device == channel.pool.device);
        if same && self.owns_buffers_of(channel) {
            Ok(slot.link.apart.flatten())
        } else {
            Err(SendErrorKind::ForeignBuffer)
        }
    }

    /// Returns the slabs and the return channel of a device's buffers. `None` if the device was closed.
    ///
    /// A device is not closed while a message can still be delivered: the message's connection has reserved capacity on the device until
    /// the connection is released.
    pub(crate) fn lender(&self, device: usize) -> Option<(Arc<Slabs>, Arc<ReturnChannel>)> {
        let device = self.devices.get(device);
        debug_assert!(device.is_some(), "a message of a device that was removed");
        let device = device?;
        Some((Arc::clone(device.buffers.pool.slabs()), Arc::clone(&device.return_channel)))
    }

    /// Returns true if `slabs` are the current slabs of the device's buffers. These are replaced when the pool grows.
    #[inline]
    pub(crate) fn is_lender(&self, device: usize, slabs: &Arc<Slabs>) -> bool {
        self.devices.get(device).is_some_and(|device| Arc::ptr_eq(slabs, device.buffers.pool.slabs()))
    }

    /// Frees the buffer of a message that the program has not kept after its callback.
    #[inline]
    pub(crate) fn free_receive(&mut self, device: usize, buffer: Buffer, shared: bool) {
        self.devices.buffers(device).free_receive(buffer, shared);
    }

    /// Notes that the program keeps a message after its callback.
    pub(crate) fn keep_message(&mut self, id: ConnectionId) {
        self.input(id, Connection::keep_message);
    }

    /// Stage 9: frees the memory of messages that the program has released.
    pub(crate) fn take_returned(&mut self) {
        while let Some(Returned { pool, memory, receive_of }) = self.devices.next_returned() {
            match memory {
                ReturnedMemory::Buffer(buffer) => self.take_home(pool, buffer, receive_of),
                ReturnedMemory::Joined(joined) => self.take_joined_home(pool, joined, receive_of),
            }
        }
    }

    /// Frees a buffer that the program has released. If the pool of the buffer does not exist any more, does nothing: the memory of that
    /// pool is freed with the last reference to that memory.
    pub(crate) fn take_home(&mut self, pool: PoolId, buffer: Buffer, receive_of: Option<ConnectionId>) {
        if !self.devices.has_pool(pool) {
            return;
        }
        if let Some((slot, mut env)) = receive_of.and_then(|id| self.at(id)) {
            slot.conn.message_returned(buffer, &mut env);
            if slot.conn.state().is_ending() {
                self.note(Stages::ENDS);
            }
            return self.act();
        }
        let buffers = self.devices.buffers(pool.device);
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
                self.expect_trim();
            }
            // The next flush posts the buffer to the shared queue.
            None => self.ring(),
        }
    }

    // Devices.

    pub(crate) fn device(&self, index: usize) -> Option<&Device> {
        self.devices.get(index)
    }

    /// Reserves entries of a completion queue on a device, for an endpoint. Returns the index of the queue.
    pub(crate) fn claim_room(&mut self, index: usize, entries: u32) -> Result<usize, Error> {
        let Self { devices, providers, config, stages, .. } = self;
        stages.insert(Stages::CHANNELS);
        let device = devices.use_device(index, providers, config);
        if device.removed {
            return Err(Error::Gone("device"));
        }
        device.claim_room(providers.of_device(index), config, entries)
    }

    /// Releases entries that [`Driver::claim_room`] has reserved.
    pub(crate) fn release_room(&mut self, device: usize, cq: usize, entries: u32) {
        if let Some(used) = self.devices.get_mut(device) {
            used.release_room(cq, entries);
        }
        self.drop_if_abandoned(device);
    }

    /// Schedules a check for memory that is not needed any more, because buffers or memory of large messages were released.
    pub(crate) fn expect_trim(&mut self) {
        let kept = self.registry.kept() + self.large.joins.kept();
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
        self.large.joins.trim();
        self.expect_trim();
    }

    /// Schedules `Connection::timeout` for `at`, and cancels the call that was scheduled before. `None` only cancels that call.
    fn set_deadline(&mut self, id: ConnectionId, at: Option<Instant>) {
        let Some(slot) = self.table.get_mut(id) else { return };
        slot.link.suspect = None;
        if let Some((timer, _)) = slot.link.timer.take() {
            self.timers.cancel(timer);
        }
        slot.link.timer = at.map(|at| (self.timers.insert(at, TimerPurpose::Connection(id)), at));
    }

    /// Schedules `Connection::timeout` for `at`, unless an earlier call is already scheduled.
    fn look_by(&mut self, id: ConnectionId, at: Instant) {
        if self.table.get(id).is_some_and(|slot| slot.link.timer.is_none_or(|(_, earlier)| at < earlier)) {
            self.set_deadline(id, Some(at));
        }
    }

    /// Schedules `Connection::timeout` for the end of `timeout`, which begins now. Reads the clock, because a callback of this turn may
    /// have run for a long time, so `now` may be out of date. Returns the time that it has read.
    fn set_timeout(&mut self, id: ConnectionId, timeout: Duration) -> Instant {
        let begun = self.os.clock.now();
        self.set_deadline(id, Some(begun + timeout));
        begun
    }
}
