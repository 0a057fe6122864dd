//! The lifecycle of ids on devices: assigning an id to a device, destroying an id, and closing a removed device after
//! its last id was destroyed.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use mio::unix::SourceFd;
use mio::{Interest, Token};

use super::context::RawContext;
use super::core::{ASYNC, STALE_ID, Verbs};
use super::device::ContextOwner;
use super::devices::Device;
use super::entry::{IdEntry, IdState};
use super::ffi::{self, RawAddress};
use super::gid::{self, PortGid};
use super::id::{RawId, Service};
use crate::cm::ExchangeOptions;
use crate::error::{Result, TransportError};
use crate::provider::DeviceId;
use crate::qp::QpId;
use crate::slab::Key;

impl Verbs {
    /// Finds the device of an id and records it in the id's entry. Opens the device if the provider has not opened it
    /// yet.
    pub(super) fn assign_device(&mut self, key: Key) -> Result<DeviceId> {
        let raw = Arc::clone(&self.ids.get(key).ok_or(STALE_ID)?.raw);
        let device = self.device_of(&raw)?;
        let entry = &mut self.devices[device.0 as usize];
        if let Some(open) = &entry.raw {
            raw.set_device(open);
        }
        if let Some(id) = self.ids.get_mut(key) {
            id.device = Some(device);
            entry.ids += 1;
        }
        Ok(device)
    }

    /// Returns the device of an id. Opens the device if the provider has not opened it yet. Fails if the device was removed and the
    /// provider has not closed it yet: an id on it would never receive the event of the removal.
    pub(super) fn device_of(&mut self, id: &RawId) -> Result<DeviceId> {
        let context = id.context();
        if context.is_null() {
            return Err(TransportError::NoDevice { reason: "the address is not on an RDMA device".into() });
        }
        let known = |device: &Device| device.raw.as_ref().is_some_and(|raw| raw.context() == context);
        if let Some(index) = self.devices.iter().position(known) {
            self.devices[index].live()?;
            return Ok(DeviceId(index as u32));
        }
        // Before the device is added, create a private id at the same address. The private id keeps the context open, and receives the
        // event of the device's removal.
        let address = id.local_address();
        let mut address = address.ok_or(TransportError::NoDevice { reason: "an id has no address".into() })?;
        address.set_port(0);
        let watch = Arc::new(RawId::create(self.manager()?, Service::Connected)?);
        watch.bind(&RawAddress::new(address))?;
        if watch.context() != context {
            return Err(TransportError::NoDevice { reason: format!("{} is on more than one device", address.ip()) });
        }
        let context_owner: ContextOwner = Arc::clone(&watch) as ContextOwner;
        // SAFETY: the id is on the device. librdmacm keeps the device's context open while the id exists.
        let device = unsafe { Device::open(context, context_owner, id.port(), true) }?;
        let handle = self.add_device(device)?;
        let mut watch = IdEntry::new(watch, IdState::WatchingDevice);
        watch.device = Some(handle);
        self.devices[handle.0 as usize].watch = Some(self.add(watch));
        Ok(handle)
    }

    /// Adds an open device to the table, and registers its descriptors in the epoll set.
    fn add_device(&mut self, device: Device) -> Result<DeviceId> {
        let index = self.devices.len();
        let fds: Vec<_> = device.live()?.event_fds().collect();
        let registry = self.event_set.poll.registry();
        for (nth, fd) in fds.iter().enumerate() {
            if let Err(source) = registry.register(&mut SourceFd(fd), Token(ASYNC + index), Interest::READABLE) {
                // The library keeps the device's descriptor open. If it stayed registered, each later attempt would fail.
                for fd in &fds[..nth] {
                    if let Err(error) = registry.deregister(&mut SourceFd(fd)) {
                        log::debug!("deregistering a device: {error}");
                    }
                }
                return Err(TransportError::io("watching a device", source));
            }
        }
        self.devices.push(device);
        Ok(DeviceId(index as u32))
    }

    /// Returns the device of a port, and opens it if necessary. If possible, the connection manager opens the device, because then the
    /// provider is notified of the device's removal. Otherwise the provider opens it directly.
    pub(super) fn device_of_port(&mut self, port_gid: &PortGid) -> Result<DeviceId> {
        let known = |device: &Device| device.info.name == port_gid.device && device.live().is_ok();
        if let Some(index) = self.devices.iter().position(known) {
            return Ok(DeviceId(index as u32));
        }
        if self.manager().is_ok() {
            match self.device_at_address(port_gid.address()) {
                Ok(device) if self.devices[device.0 as usize].info.name == port_gid.device => return Ok(device),
                other => log::debug!("{} is not opened by rdma_cm: {:?}", port_gid.device, other.err()),
            }
        }
        let opened = Arc::new(RawContext::new(&port_gid.device)?);
        let context = opened.context();
        // SAFETY: the context is open while `opened` exists, which becomes the context's owner.
        let device = unsafe { Device::open(context, opened as ContextOwner, port_gid.port, false) }?;
        if device.limits.iwarp {
            return Err(gid::IWARP);
        }
        self.add_device(device)
    }

    /// Returns the device that has this address of the local host.
    pub(super) fn device_at_address(&mut self, address: IpAddr) -> Result<DeviceId> {
        if self.manager().is_err() {
            return self.device_at_gid(address);
        }
        let id = RawId::create(self.manager()?, Service::Connected)?;
        id.bind(&RawAddress::new(ffi::scoped(address)))
            .map_err(|error| TransportError::NoDevice { reason: format!("the address {address}: {error}") })?;
        if id.context().is_null() {
            return Err(TransportError::NoDevice {
                reason: format!("{address} is not on an RDMA device: use the address of one"),
            });
        }
        self.device_up(&id)?.map_err(|reason| TransportError::NoDevice { reason })
    }

    /// Searches the GID tables for the device that has an address. Used if there is no connection manager.
    fn device_at_gid(&mut self, address: IpAddr) -> Result<DeviceId> {
        let options = ExchangeOptions::default();
        let port_gid = gid::choose(&self.exchanges.sysfs, Some(SocketAddr::new(address, 0)), &options)?;
        let device = self.device_of_port(&port_gid)?;
        self.check_port(Some(device), port_gid.port)?;
        Ok(device)
    }

    /// Puts a private id on every device that has an address. librdmacm opens all devices when it lists them. Without a private id, the
    /// provider would not be notified of the removal of such a device.
    fn watch_all(&mut self) {
        let Ok(manager) = self.manager().cloned() else { return };
        for address in ffi::local_addresses() {
            let watched = RawId::create(&manager, Service::Connected).and_then(|id| {
                id.bind(&RawAddress::new(address))?;
                if id.context().is_null() { Ok(()) } else { self.device_of(&id).map(drop) }
            });
            if let Err(error) = watched {
                // The address is not on an RDMA device, like most addresses of a host.
                log::trace!("{} is not watched: {error}", address.ip());
            }
        }
    }

    /// Destroys an id that has no queue pair. Logs an error instead of returning it.
    pub(super) fn discard(&mut self, key: Key) {
        if let Err(error) = self.remove(key) {
            local_log!(Error, "{error}");
        }
    }

    /// Destroys an id and its queue pair. The id is invalid afterwards. Fails if the device may still use the memory of the id's work
    /// requests. After such an error, the entries that the id has reserved in its completion queue and shared receive queue stay reserved.
    pub(super) fn remove(&mut self, key: Key) -> Result<()> {
        self.leave_all(key);
        let Some(mut id) = self.ids.remove(key) else { return Ok(()) };
        let exchange = id.exchange.take();
        let on_shared = id.qp.as_ref().filter(|qp| qp.srq.is_some());
        let held = id.handshaking || Arc::strong_count(&id.raw) > 1;
        // If the queue pair uses a shared queue, put it into the error state first, so that the device completes the
        // shared receives that the queue pair has consumed. If another thread still has an `Arc` of the id, the queue
        // pair is destroyed later, so it must not access memory from now on.
        let stopped = if held || on_shared.is_some() { id.raw.flush() } else { Ok(()) };
        if let Some(qp) = on_shared {
            // Poll the completions of shared receives before the queue pair is destroyed, because some libraries drop the completions of a
            // queue pair that they destroy. The shared queue would count the receives of dropped completions as outstanding forever.
            self.stash_completions(key, qp);
        }
        if let Some(now) = self.now.filter(|_| on_shared.is_some() && stopped.is_ok() && self.must_retire(&id)) {
            if let Some(exchange) = exchange {
                self.close_exchange(key, id.state, exchange);
            }
            self.retire(key, id, now);
            return Ok(());
        }
        let IdEntry { raw, qp, device, handshaking, state, .. } = id;
        let ended = if handshaking {
            // On iWARP, destroying the id waits for the end of its handshake, so a private thread destroys it.
            self.connector.release(raw);
            stopped
        } else {
            raw.abandon();
            self.destroy_raw(device, state, raw, stopped)
        };
        if let Some(qp) = qp {
            if qp.srq.is_some() {
                self.stash_completions(key, &qp);
            }
            if ended.is_ok() {
                self.release_entries(&qp);
            }
            if let Some(device) = device {
                self.devices[device.0 as usize].numbers.remove(qp.number, QpId(key));
            }
        }
        if let Some(exchange) = exchange {
            self.close_exchange(key, state, exchange);
        }
        if let Some(device) = device.filter(|_| state != IdState::WatchingDevice) {
            self.devices[device.0 as usize].ids -= 1;
            self.close_if_unused(device);
        }
        ended
    }

    /// Closes a removed device and destroys all objects on it, if no id is on the device any more. Then the kernel can
    /// finish the removal.
    pub(super) fn close_if_unused(&mut self, device: DeviceId) {
        let entry = &mut self.devices[device.0 as usize];
        if !entry.removed || entry.ids > 0 || entry.raw.is_none() {
            return;
        }
        self.release_waiting(device);
        let entry = &mut self.devices[device.0 as usize];
        entry.armed = 0;
        let (raw, watch) = (entry.raw.take(), entry.watch.take());
        local_log!(Info, "the device {} is closed", entry.info.name);
        for key in self.cqs.keys() {
            if let Some(cq) = self.cqs.get_mut(key).filter(|cq| cq.device == device.0) {
                cq.armed = false;
                cq.raw = None;
            }
        }
        for key in self.addresses.keys() {
            if let Some(address) = self.addresses.get_mut(key).filter(|address| address.device == device.0) {
                address.raw = None;
            }
        }
        for key in self.srqs.keys() {
            if let Some(srq) = self.srqs.get_mut(key).filter(|srq| srq.device == device.0) {
                if let Err(error) = srq.destroy() {
                    local_log!(Error, "{error}: the shared receive queue is left as it is");
                }
            }
        }
        for key in self.regions.keys() {
            if let Some(region) = self.regions.get_mut(key).filter(|region| region.device == device.0) {
                if let Err(error) = region.deregister() {
                    local_log!(Error, "{error}: the memory stays registered");
                }
            }
        }
        for fd in raw.iter().flat_map(|raw| raw.event_fds()) {
            if let Err(error) = self.event_set.poll.registry().deregister(&mut SourceFd(&fd)) {
                log::debug!("deregistering a device: {error}");
            }
        }
        if let Some(watch) = watch {
            self.discard(watch);
        }
        drop(raw);
        self.watch_all();
    }
}
