//! Regions of connections: registration, and the revocation of peers' access.

use std::net::IpAddr;

use rdma_transport::mr::Access;
use rdma_transport::slab::Key;

use crate::device::Device;
use crate::driver::stages::Stages;
use crate::driver::table::ConnectionSlot;
use crate::driver::world::Freed;
use crate::driver::{TimerPurpose, World};
use crate::error::Error;
use crate::id::ConnectionId;
use crate::memory::budget::MemoryUse;
use crate::memory::material::{Material, PreparedRegion, RegionMaker};
use crate::memory::region::{Region, RegionOptions};
use crate::memory::registry::{RegistrationTarget, RightsEnded};
use crate::providers::device_index;
use crate::security::{SecurityError, channel};

impl World {
    /// Registers memory on the device of a connection, which must have a queue pair. Without a queue pair, remote access to the memory
    /// could not be restricted to the peer of the connection, and would not be revoked when the connection ends.
    pub(crate) fn register(
        &mut self,
        id: ConnectionId,
        material: Material<'_>,
        options: &RegionOptions,
    ) -> Result<Region, Error> {
        let target = self.registration_target(id)?;
        let region = self.register_on(&target, material, options)?;
        if options.access.intersects(Access::REMOTE) && !options.any_peer {
            if let Some(slot) = self.table.get_mut(id) {
                slot.link.regions.push(region.key());
            }
        }
        Ok(region)
    }

    /// Registers memory on the device that has the local address `local`, for connections that do not exist yet.
    pub(crate) fn register_at(
        &mut self,
        local: IpAddr,
        material: Material<'_>,
        options: &RegionOptions,
    ) -> Result<Region, Error> {
        if options.access.intersects(Access::REMOTE.union(Access::READ_SINK)) && !options.any_peer {
            return Err(Error::NoPeer);
        }
        if self.drain.refuses_all() {
            return Err(Error::Drained);
        }
        let Self { devices, providers, config, stages, .. } = self;
        let provider = providers.serving(local);
        let device = device_index(provider, providers.numbered(provider).device_at(local)?);
        providers.note_use(provider);
        stages.insert(Stages::CHANNELS);
        if devices.use_device(device, providers, config).removed {
            return Err(Error::Gone("device"));
        }
        self.register_on(&RegistrationTarget { device, connection: None }, material, options)
    }

    fn register_on(
        &mut self,
        target: &RegistrationTarget,
        material: Material<'_>,
        options: &RegionOptions,
    ) -> Result<Region, Error> {
        let hidden = match target.connection {
            Some((id, _)) => self.table.get(id).is_some_and(|slot| self.hides_memory(slot)),
            None => !self.config.plain_remote_memory && !self.config.security.is_plain(),
        };
        if hidden && options.access.intersects(Access::REMOTE) {
            let why = "a region that peers may use would travel in the clear on secured connections: \
                       send messages, or set allow_plain_remote_memory";
            return Err(SecurityError::Settings(why.into()).into());
        }
        let region = self.registry.register(&mut self.providers, target, material, options)?;
        if let Some(lifetime) = options.lifetime.filter(|_| options.access.intersects(Access::REMOTE)) {
            // The registration, or the callback before it, may have taken a long time, so `now` may be out of date.
            self.look_at_clock();
            if let Some(at) = self.now.checked_add(lifetime) {
                let timer = self.timers.insert(at, TimerPurpose::Region(region.key()));
                self.registry.set_timer(region.key(), timer);
                // A program that embeds the reactor in its own loop may be waiting for a later deadline than that of the new timer.
                self.ring();
            }
        }
        Ok(region)
    }

    /// Returns memory for a message longer than one buffer, on the device of a connection; see
    /// [`Registry::block`](crate::memory::registry::Registry::block).
    pub(crate) fn block(&mut self, id: ConnectionId, len: usize, account: MemoryUse) -> Result<Region, Error> {
        let target = self.registration_target(id)?;
        let secured = self.table.get(id).is_some_and(|slot| slot.conn.is_secured());
        let tail = if secured { channel::tail(len as u64) as usize } else { 0 };
        let (region, fresh) = self.registry.block(&mut self.providers, &target, (len, tail), account)?;
        self.stats.messages.large_registrations += u64::from(fresh);
        if self.registry.belongs_to(region.key(), id) {
            if let Some(slot) = self.table.get_mut(id) {
                slot.link.regions.push(region.key());
            }
        }
        Ok(region)
    }

    /// Returns the device on which memory is registered for a connection, and the queue pair that may access this memory.
    fn registration_target(&self, id: ConnectionId) -> Result<RegistrationTarget, Error> {
        let slot = self.table.get(id).ok_or(Error::Gone("connection"))?;
        let (Some(qp), Some(binding)) = (slot.link.qp, slot.link.binding) else {
            return Err(Error::Gone("connection"));
        };
        self.live_device(binding.device)?;
        Ok(RegistrationTarget { device: binding.device, connection: Some((id, qp)) })
    }

    fn live_device(&self, index: usize) -> Result<&Device, Error> {
        self.devices.get(index).filter(|device| !device.removed).ok_or(Error::Gone("device"))
    }

    /// Returns a [`RegionMaker`], with which other threads register regions on the connection's device.
    pub(crate) fn region_maker(&mut self, id: ConnectionId, options: RegionOptions) -> Result<RegionMaker, Error> {
        let binding = self.table.get(id).and_then(|slot| slot.link.binding).ok_or(Error::Gone("connection"))?;
        let device = self.live_device(binding.device)?.id;
        let role = self.providers.of_device(binding.device).off_loop_registration();
        let registrar = role.map(|role| role.registrar(device)).transpose()?;
        Ok(RegionMaker {
            registrar,
            options,
            device: binding.device,
            drop_channel: self.registry.drop_channel().clone(),
        })
    }

    /// Turns memory that another thread has registered on the connection's device into a region of this reactor.
    pub(crate) fn adopt(&mut self, id: ConnectionId, prepared: PreparedRegion) -> Result<Region, Error> {
        let PreparedRegion { memory, len, registration, options, device, drop_channel } = prepared;
        let binding = self.table.get(id).and_then(|slot| slot.link.binding).ok_or(Error::Gone("connection"))?;
        if binding.device != device || !drop_channel.dropped.same_channel(&self.registry.drop_channel().dropped) {
            return Err(Error::ForeignDevice);
        }
        self.register(id, Material::Prepared(memory, len, registration), &options)
    }

    /// Revokes the peers' access to a region, as requested by the program.
    pub(crate) fn revoke(&mut self, region: &Region) -> Result<(), Error> {
        match self.registry.knows(region) {
            true => self.revoke_region(region.key()),
            false if region.is_exposed() => Err(Error::Gone("registration of the region")),
            false => Ok(()),
        }
    }

    /// Revokes the peers' access to a region: as requested by the program, because the time limit
    /// of the access has passed, or because the connection of the region has ended. A failure is
    /// logged and counted.
    pub(crate) fn revoke_region(&mut self, key: Key) -> Result<(), Error> {
        let ended = self.registry.revoke(&mut self.providers, key)?;
        self.forget_rights(ended);
        Ok(())
    }

    /// Cancels the timer that would end the peers' access to a region, and removes the region from the list of its connection, because that
    /// access has ended. Does nothing for `None`.
    pub(crate) fn forget_rights(&mut self, ended: Option<RightsEnded>) {
        let Some(RightsEnded { key, timer, connection }) = ended else { return };
        if let Some(timer) = timer {
            self.timers.cancel(timer);
        }
        if let Some(slot) = connection.and_then(|id| self.table.get_mut(id)) {
            slot.link.regions.retain(|&of_peer| of_peer != key);
        }
    }

    /// Revokes the peer's access to all regions of a connection, because the connection has ended.
    pub(crate) fn revoke_regions_of(&mut self, id: ConnectionId) {
        let Some(slot) = self.table.get_mut(id) else { return };
        for key in std::mem::take(&mut slot.link.regions) {
            _ = self.revoke_region(key);
        }
        self.registry.forget_peer(&mut self.providers, id);
    }

    /// Handles the regions that the program has dropped since the last call.
    pub(crate) fn take_dropped_regions(&mut self) {
        while let Some(key) = self.registry.next_dropped() {
            self.deregister_unused(key);
        }
    }

    /// Handles a region that the program has dropped. If the region was memory of a finished message, it is kept for a later message.
    /// Otherwise the region is deregistered, if no work request uses it. If one does, only the peers' access is revoked. Nothing happens
    /// while the region contains a message that a peer has not fetched yet.
    pub(crate) fn deregister_unused(&mut self, key: Key) {
        if let Some(retired) = self.registry.retire(&mut self.providers, key) {
            self.forget_rights(retired.rights);
            self.freed.push_back(Freed::Memory(retired));
            self.expect_trim();
            return;
        }
        if !self.registry.is_unwanted(key) {
            return;
        }
        if self.registry.is_abandoned(key) {
            // Deregistering the region also ends the peers' access to it.
            self.remove_region(key);
        } else {
            _ = self.revoke_region(key);
        }
    }

    fn remove_region(&mut self, key: Key) {
        if let Some(removed) = self.registry.remove(&mut self.providers, key) {
            self.forget_rights(removed.rights);
            self.freed.push_back(Freed::Memory(removed));
        }
    }

    /// Deregisters all regions of a device that is being removed. The program can still access the memory of these regions, but cannot use
    /// it in work requests.
    pub(crate) fn drop_regions_of_device(&mut self, device: usize) {
        for key in self.registry.of_device(device) {
            self.remove_region(key);
        }
        self.registry.forget_device(&mut self.providers, device);
    }

    /// Returns true if one-sided operations are refused on this connection. These operations are not encrypted, so a secured connection
    /// refuses them, unless [`crate::Config::allow_plain_remote_memory`] is set.
    #[inline]
    pub(crate) fn hides_memory(&self, slot: &ConnectionSlot) -> bool {
        !self.config.plain_remote_memory && slot.conn.is_secured()
    }
}
