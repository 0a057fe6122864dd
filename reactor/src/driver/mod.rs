//! Where connections and the world meet: what a provider, a device or a timer says goes to its connection, and what the
//! connection wants is done. The driver knows no handler: callbacks to make are events, which the turn delivers.

mod accept;
pub(crate) mod choose;
mod close;
mod data_path;
mod device_event;
pub(crate) mod drain;
pub(crate) mod fair;
mod fallback;
pub(crate) mod group;
pub(crate) mod handover;
mod join;
mod large;
mod list;
mod listen;
mod lookup;
pub(crate) mod owners;
mod pending;
pub(crate) mod queues;
mod regions;
pub(crate) mod stages;
pub(crate) mod table;

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_transport::caps::{Capabilities, Features};
use rdma_transport::cm::CmId;
use rdma_transport::slab::{Key, Slab};

use self::drain::Drain;
use self::fair::Fair;
use self::group::Membership;
use self::large::LargeMessages;
use self::listen::Listener;
use self::lookup::Lookups;
use self::owners::Owners;
use self::queues::Queues;
use self::stages::Stages;
use self::table::{Seat, Table};
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
use crate::seam::timer::Timers;
use crate::seam::wake::WakeFlag;
use crate::security::PeerIdentity;
use crate::stats::{ConnectionStats, MemoryStats, Stats};

pub(crate) use self::accept::{CmStep, Request};
pub use self::device_event::DeviceEvent;

/// What a timer is for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Due {
    /// The program's timer, with its token.
    Program(u64),
    /// A connection has set a deadline.
    Connection(ConnectionId),
    /// The deadline of a list of transfers of a connection.
    Lists(ConnectionId),
    /// The lifetime of peers' rights to a region is over.
    Region(Key),
    /// Look whether a listener's device is back.
    Listen(Key),
    /// The time to drain is over.
    Drain,
    /// Look whether pools have memory that nobody needs.
    Trim,
    /// Look whether memory for large messages is with peers that answer no reads while others wait for it.
    Shortage,
    /// Something else than a connection has set it, with a number of its own.
    Guest(u64),
}

/// Descriptors, and calls from other threads.
#[derive(Debug)]
pub(crate) struct Os {
    pub(crate) poller: Box<dyn Poller>,
    pub(crate) clock: Box<dyn Clock>,
    /// Descriptors of the program's own.
    pub(crate) io: Registrations,
    pub(crate) wake: Arc<WakeFlag>,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Driver {
    config: Config,
    /// The time of this turn.
    now: Instant,
    providers: Providers,
    owners: Owners,
    os: Os,
    devices: Devices,
    stages: Stages,
    queues: Queues,
    table: Table,
    fair: Fair,
    listeners: Slab<Listener>,
    registry: Registry,
    large: LargeMessages,
    timers: Timers<Due>,
    effects: Effects,
    stats: Stats,
    drain: Drain,
    lookups: Lookups,
    /// The group of reactors that this one is in.
    membership: Option<Membership>,
    /// The program wants `run` to return.
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
            table: Table::new(tag, now),
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

    /// A turn begins.
    pub(crate) fn enter_turn(&mut self) {
        self.look_at_clock();
        self.resume_turn();
    }

    /// The last turn goes on.
    pub(crate) fn resume_turn(&mut self) {
        self.effects.outside = false;
        self.os.wake.enter();
    }

    /// The turn has ended, or what follows is called from outside.
    pub(crate) fn leave_turn(&mut self) {
        self.effects.outside = true;
        self.os.wake.leave();
    }

    /// Makes the driver's time that of the clock. What sets a deadline does so, because callbacks may have taken long.
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

    pub(crate) const fn timers_mut(&mut self) -> &mut Timers<Due> {
        &mut self.timers
    }

    pub(crate) const fn counters(&mut self) -> &mut Stats {
        &mut self.stats
    }

    pub(crate) const fn connections(&self) -> &Table {
        &self.table
    }

    /// The counters, and the levels of now.
    pub(crate) fn stats(&self) -> Stats {
        let mut stats = self.stats;
        stats.completions.acknowledgements = self.providers.acknowledgements();
        stats.connections = ConnectionStats { current: self.table.len(), ..stats.connections };
        let (fetched_bytes, copied_bytes) = self.large.levels();
        let (regions, kept_bytes) = (self.registry.len(), self.registry.kept());
        let unreleased = stats.memory.unreleased + self.registry.unreleased();
        let unrevoked = self.registry.unrevoked();
        let levels = self.devices.levels();
        stats.memory =
            MemoryStats { regions, unreleased, unrevoked, kept_bytes, fetched_bytes, copied_bytes, ..levels };
        stats
    }

    /// Has a turn taken if none is going on: something was asked for from outside that a turn has to see to.
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

    /// When a turn is due at the latest, though nothing becomes readable.
    pub(crate) fn next_deadline(&mut self) -> Option<Instant> {
        [self.timers.next(), self.providers.next_deadline()].into_iter().flatten().min()
    }

    // Connections.

    /// A connection, and what its inputs work with.
    #[inline]
    pub(crate) fn at(&mut self, id: ConnectionId) -> Option<(&mut Seat, Env<'_>)> {
        let Self { table, devices, config, now, effects, stats, .. } = self;
        let seat = table.get_mut(id)?;
        let device = seat.link.place.map_or(usize::MAX, |place| place.device);
        let buffers = devices.buffers(device);
        Some((seat, Env { now: *now, config, device, buffers, effects, stats }))
    }

    /// Gives a connection an input, and does what it wants then. `None` if there is no such connection.
    #[inline]
    pub(crate) fn input<R>(
        &mut self,
        id: ConnectionId,
        input: impl FnOnce(&mut Connection, &mut Env<'_>) -> R,
    ) -> Option<R> {
        let (seat, mut env) = self.at(id)?;
        let result = input(&mut seat.conn, &mut env);
        self.act();
        Some(result)
    }

    /// Does what connections want.
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
                Action::Flush => self.begin_flush(id),
                Action::Ending => self.watch_end(id),
                Action::Settled => self.table.settled(id),
                Action::Invalidated { device, key } => {
                    let ended = self.registry.invalidated(&mut self.providers, (device, id), key);
                    self.forget_rights(ended);
                }
                Action::Unused(key) => self.deregister_unused(key),
                // Dropping a region has it deregistered when nothing uses it any more.
                Action::Discard(region) => drop(region),
                Action::NoMemory => self.large.leave(id),
                Action::Ring => self.os.wake.wake(),
            }
        }
    }

    /// The next callback to make, if it is that of a message which waits for no others.
    #[inline]
    pub(crate) fn next_arrived(&mut self) -> Option<(ConnectionId, Arrived)> {
        self.effects.arrived.take()
    }

    /// The next callback to make.
    #[inline]
    pub(crate) fn next_event(&mut self) -> Option<(ConnectionId, Event)> {
        self.effects.next_event()
    }

    /// A connection that the program was told of.
    pub(crate) fn announced(&self, id: ConnectionId) -> Option<&Connection> {
        self.table.get(id).map(|seat| &seat.conn).filter(|conn| conn.state().is_announced())
    }

    /// Who the peer of a connection is, if that is proven.
    pub(crate) fn identity(&self, id: ConnectionId) -> Option<&PeerIdentity> {
        self.table.get(id)?.conn.identity()
    }

    /// What the device of a connection can do.
    pub(crate) fn capabilities(&self, id: ConnectionId) -> Option<Capabilities> {
        let seat = self.table.get(id)?;
        let device = self.devices.get(seat.link.place?.device)?;
        let mut capabilities = self.providers.get(seat.link.cm.provider).device(device.id)?.capabilities;
        capabilities.features = self.features(seat);
        Some(capabilities)
    }

    /// What a connection can do: what its device can, without what its peer does not know.
    #[inline]
    pub(super) fn features(&self, seat: &Seat) -> Features {
        let mut features = self.device_of(seat).map_or(Features::empty(), |device| device.features);
        if features.contains(Features::EXTENSIONS_BY_AGREEMENT) && !seat.conn.terms().extensions {
            features.remove(Features::WRITE_WITH_IMMEDIATE | Features::ATOMICS);
        }
        if seat.conn.is_secured() {
            // The news of such a write has no header that could be authenticated: a sealed message replaces it.
            features.remove(Features::WRITE_WITH_IMMEDIATE);
        }
        features
    }

    /// The device that a connection is on.
    #[inline]
    pub(super) fn device_of(&self, seat: &Seat) -> Option<&Device> {
        self.devices.get(seat.link.place?.device)
    }

    /// Name of the device that a connection is on.
    pub(crate) fn device_name(&self, id: ConnectionId) -> Option<&str> {
        let place = self.table.get(id)?.link.place?;
        self.devices.get(place.device).map(|device| device.name.as_str())
    }

    /// Name of what carries a connection.
    pub(crate) fn carrier(&mut self, id: ConnectionId) -> Option<&'static str> {
        let link = &self.table.get(id)?.link;
        let (provider, qp) = (link.cm.provider, link.qp?);
        Some(if self.providers.is_in_memory(provider, qp) {
            SHARED_MEMORY
        } else {
            self.providers.get(provider).name()
        })
    }

    /// Whether a connection is neither up nor ending yet.
    pub(crate) fn is_coming_up(&self, id: ConnectionId) -> bool {
        self.table.get(id).is_some_and(|seat| seat.conn.state().is_handshake())
    }

    /// Enters a group.
    pub(crate) fn join_group(&mut self, membership: Membership) {
        self.membership = Some(membership);
    }

    /// A connection that is open.
    pub(super) fn open_seat(&self, id: ConnectionId) -> Result<&Seat, SendErrorKind> {
        self.table.get(id).filter(|seat| seat.conn.state().is_open()).ok_or(SendErrorKind::Closed)
    }

    // Buffers.

    /// A buffer for a program to fill, of a connection's device, with what it holds and where it belongs.
    pub(crate) fn send_buffer_for(
        &mut self,
        id: ConnectionId,
    ) -> Option<(usize, Buffer, Arc<Slabs>, Arc<ReturnChannel>)> {
        let Self { table, devices, providers, .. } = self;
        let seat = table.get_mut(id).filter(|seat| seat.conn.state().is_open())?;
        let device = devices.get_mut(seat.link.place?.device)?;
        let provider = providers.numbered(seat.link.cm.provider);
        let apart = *seat.link.apart.get_or_insert_with(|| device.add_mapped_slab(provider, seat.link.qp));
        let apart = apart.and_then(|slab| device.buffers.pool.take_mapped(slab));
        let buffer = apart.or_else(|| device.take_for_program(provider))?;
        let pool = &device.buffers.pool;
        let capacity = seat.conn.terms().buffer_size.min(pool.stride() - HEADER_LEN - TAG_ROOM);
        Some((capacity, buffer, Arc::clone(pool.slabs()), Arc::clone(&device.return_channel)))
    }

    /// Whether a buffer is of this reactor.
    pub(crate) fn owns_buffers_of(&self, channel: &ReturnChannel) -> bool {
        self.devices.owns_buffers_of(channel)
    }

    /// Checks that a buffer belongs to the pool of a connection's device: its memory is registered nowhere else.
    pub(crate) fn check_buffer(&self, id: ConnectionId, channel: &ReturnChannel) -> Result<(), SendErrorKind> {
        let seat = self.open_seat(id)?;
        let same = seat.link.place.is_some_and(|place| place.device == channel.pool.device);
        if same && self.owns_buffers_of(channel) { Ok(()) } else { Err(SendErrorKind::ForeignBuffer) }
    }

    /// Where the buffers of a device are, and where they belong. `None` never happens for the device of a message that is to be
    /// delivered: the claim of its connection keeps the device until the connection is released, and that is after its messages. If it
    /// happened, there would be no pool that the buffers could go back to.
    pub(crate) fn lender(&self, device: usize) -> Option<(Arc<Slabs>, Arc<ReturnChannel>)> {
        let device = self.devices.get(device);
        debug_assert!(device.is_some(), "a message of a device that is gone");
        let device = device?;
        Some((Arc::clone(device.buffers.pool.slabs()), Arc::clone(&device.return_channel)))
    }

    /// Whether that is still where the buffers of a device are: a pool may have grown.
    #[inline]
    pub(crate) fn is_lender(&self, device: usize, slabs: &Arc<Slabs>) -> bool {
        self.devices.get(device).is_some_and(|device| Arc::ptr_eq(slabs, device.buffers.pool.slabs()))
    }

    /// The buffer of a message that the program has not kept is free again.
    #[inline]
    pub(crate) fn free_receive(&mut self, device: usize, buffer: Buffer, shared: bool) {
        self.devices.buffers(device).free_receive(buffer, shared);
    }

    /// The program keeps a message.
    pub(crate) fn keep_message(&mut self, id: ConnectionId) {
        self.input(id, |conn, _| conn.receives_mut().keep());
    }

    /// Stage 9: takes the buffers that came home from the program.
    pub(crate) fn take_returned(&mut self) {
        while let Some(Returned { pool, memory, receive_of }) = self.devices.next_returned() {
            match memory {
                ReturnedMemory::Buffer(buffer) => self.take_home(pool, buffer, receive_of),
                ReturnedMemory::Joined(joined) => self.take_joined_home(pool, joined, receive_of),
            }
        }
    }

    /// Takes a buffer back from the program's hands. A buffer of a pool that is gone is discarded: it names nothing any more, and
    /// its memory goes with the last holder.
    pub(crate) fn take_home(&mut self, pool: PoolId, buffer: Buffer, receive_of: Option<ConnectionId>) {
        if !self.devices.has_pool(pool) {
            return;
        }
        if let Some((seat, mut env)) = receive_of.and_then(|id| self.at(id)) {
            seat.conn.message_returned(buffer, &mut env);
            if seat.conn.state().is_ending() {
                self.note(Stages::ENDS);
            }
            return;
        }
        let buffers = self.devices.buffers(pool.device);
        // A receive of the shared queue that a connection which is gone had kept, or any in its place.
        let buffer = match &mut buffers.shared {
            Some(shared) if receive_of.is_some() => shared.return_orphan(buffer),
            _ => Some(buffer),
        };
        if let Some(buffer) = buffer {
            buffers.pool.unlend(&buffer);
            buffers.pool.give(buffer);
            self.expect_trim();
        }
    }

    // Devices.

    pub(crate) fn device(&self, index: usize) -> Option<&Device> {
        self.devices.get(index)
    }

    /// Claims completion entries on a device, for something else than a connection; returns the index of their queue.
    pub(crate) fn claim_room(&mut self, index: usize, entries: u32) -> Result<usize, Error> {
        let Self { devices, providers, config, stages, .. } = self;
        stages.insert(Stages::CHANNELS);
        let device = devices.use_device(index, providers, config);
        if device.removed {
            return Err(Error::Gone("device"));
        }
        device.claim_room(providers.of_device(index), config, entries)
    }

    /// Gives them back.
    pub(crate) fn release_room(&mut self, device: usize, cq: usize, entries: u32) {
        if let Some(used) = self.devices.get_mut(device) {
            used.release_room(cq, entries);
        }
        self.drop_if_abandoned(device);
    }

    /// Pools have let go of buffers, or memory of large messages was kept: looks later whether it is needed.
    pub(crate) fn expect_trim(&mut self) {
        let kept = self.registry.kept() + self.large.joins.kept();
        if !self.devices.trimming && (self.devices.are_excessive() || kept > 0) {
            self.devices.trimming = true;
            let idle = self.config.timeouts.pool_idle;
            self.timers.insert(self.now + idle, Due::Trim);
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

    /// Has `Connection::timeout` called then, instead of when it was to be called.
    fn set_deadline(&mut self, id: ConnectionId, at: Option<Instant>) {
        let Some(seat) = self.table.get_mut(id) else { return };
        if let Some((timer, _)) = seat.link.timer.take() {
            self.timers.cancel(timer);
        }
        seat.link.timer = at.map(|at| (self.timers.insert(at, Due::Connection(id)), at));
    }

    /// Has it called then, unless it is to be called earlier.
    fn look_by(&mut self, id: ConnectionId, at: Instant) {
        if self.table.get(id).is_some_and(|seat| seat.link.timer.is_none_or(|(_, earlier)| at < earlier)) {
            self.set_deadline(id, Some(at));
        }
    }

    fn set_timeout(&mut self, id: ConnectionId, timeout: Duration) {
        self.set_deadline(id, Some(self.now + timeout));
    }
}
