//! The devices of ids: opening a device for its first id, destroying an id, and closing a removed
//! device after its last id was destroyed.

use std::net::IpAddr;
use std::sync::Arc;

use mio::unix::SourceFd;
use mio::{Interest, Token};

use super::capabilities::port_state;
use super::context::RawContext;
use super::device::ContextOwner;
use super::devices::Device;
use super::entry::{IdEntry, IdState};
use super::ffi::{self, RawAddress};
use super::gid::{self, PortGid};
use super::hub::{ASYNC, DeviceHub, STALE_ID};
use super::id::{RawId, Service};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::provider::DeviceId;
use rdma_transport::slab::Key;

impl DeviceHub {
    /// Finds the device of an id and records it in the id's entry. Opens the device if the provider has not opened it
    /// yet.
    pub(super) fn assign_device(&mut self, key: Key) -> Result<DeviceId> {
        let raw = Arc::clone(&self.ids.get(key).ok_or(STALE_ID)?.raw);
        let device = self.device_of(&raw)?;
        self.set_device(key, device);
        Ok(device)
    }

    /// Records that an id is on `device`.
    pub(super) fn set_device(&mut self, key: Key, device: DeviceId) {
        let entry = &mut self.devices[device.0 as usize];
        let Some(id) = self.ids.get_mut(key) else { return };
        if let Some(open) = &entry.raw {
            id.raw.set_device(open);
        }
        id.device = Some(device);
        entry.ids += 1;
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
                // The library keeps the device's descriptors open. If one stayed registered, each
                // later attempt to add the device would fail.
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

    /// Returns the device to which the connection manager binds this address of the local host.
    pub(super) fn device_at_address(&mut self, address: IpAddr) -> Result<DeviceId> {
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

    /// Returns `Ok(Ok(device))` if the port of an id is active. If the port is not active, returns
    /// `Ok(Err(reason))`.
    pub(super) fn device_up(&mut self, id: &RawId) -> Result<std::result::Result<DeviceId, String>> {
        // Open the device in the same way as for a connection, so that the provider is notified of
        // the device's removal.
        let device = self.device_of(id)?;
        let entry = &self.devices[device.0 as usize];
        let (name, port) = (&entry.info.name, id.port());
        Ok(match port_state(entry.live()?.context(), port)? {
            Ok(()) => Ok(device),
            Err(state) => Err(format!("port {port} of {name} is {state}; `ip link` and `rdma link` say more")),
        })
    }

    /// Destroys an id that was removed from the table. Fails if the device may still use the memory
    /// of the id's work requests. If another thread has an `Arc` of the id, that thread destroys it
    /// later, and the call returns `stopped`: the result of putting the queue pair into the error
    /// state.
    pub(super) fn destroy(&mut self, id: IdEntry, stopped: Result<()>) -> Result<()> {
        let IdEntry { raw, device, handshaking, state, .. } = id;
        if handshaking {
            // On iWARP, destroying the id waits for the end of its handshake, so a private thread destroys it.
            self.connector.release(raw);
            return stopped;
        }
        raw.abandon();
        let Some(device) = device else { return RawId::destroy(raw, stopped) };
        self.devices[device.0 as usize].destroy_raw(state, raw, stopped)
    }

    /// Destroys an id that has no queue pair. Logs an error instead of returning it. An exchange
    /// socket of the id must be closed by the caller.
    pub(super) fn discard(&mut self, key: Key) {
        let Some(id) = self.ids.remove(key) else { return };
        debug_assert!(id.qp.is_none(), "a queue pair has entries in its queues");
        let device = id.device_in_use();
        if let Err(error) = self.destroy(id, Ok(())) {
            local_log!(Error, "{error}");
        }
        self.leave_device(device);
    }

    /// Decrements the number of ids on a device. If the device was removed,
    /// [`Verbs`](super::Verbs) closes it when it has no id any more.
    pub(super) fn leave_device(&mut self, device: Option<DeviceId>) {
        let Some(device) = device else { return };
        let entry = &mut self.devices[device.0 as usize];
        entry.ids -= 1;
        if entry.removed {
            self.left.push(device);
        }
    }

    /// Closes a removed device, so that the kernel can finish the removal. The caller has destroyed
    /// all objects on the device.
    pub(super) fn close(&mut self, device: DeviceId) {
        let entry = &mut self.devices[device.0 as usize];
        entry.armed = 0;
        let (raw, watch) = (entry.raw.take(), entry.watch.take());
        local_log!(Info, "the device {} is closed", entry.info.name);
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
