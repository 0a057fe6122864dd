//! Ports that are down.
//!
//! The provider sends no request through a port that is down. The connection manager would report the failure only after its time limit,
//! about a minute later. The device's events report the state of each port. A port that was down is queried, because not every driver
//! reports that it is up again.
//!
//! On rxe, a request through a port that is down also does damage. If the link is down and the connection manager cannot send a datagram,
//! rxe puts the manager's queue pair into the error state. The queue pair stays there until the device is removed, so the manager cannot
//! send any more. From then on no connect is answered, and a thread that destroys an id waits forever. So on rxe no id connects, answers or
//! disconnects while its port is down. Ids that the program destroys in this time are kept here until the port is up.

use std::sync::Arc;

use super::device::Driver;
use super::entry::IdState;
use super::hub::DeviceHub;
use super::id::RawId;
use crate::error::{Result, TransportError};
use crate::provider::DeviceId;

impl DeviceHub {
    /// Returns true if the port is down and the device's connection manager uses datagrams. Always false on iWARP, where each id has a TCP
    /// connection instead.
    fn is_down(&mut self, device: DeviceId, port: u8) -> bool {
        let device = self.devices.get_mut(device.0 as usize).filter(|device| !device.limits.iwarp);
        !crate::planted("a-request-through-a-port-that-is-down") && device.is_some_and(|device| device.is_down(port))
    }

    /// Returns an error if the port is down and the connection manager would send through it.
    pub(super) fn check_port(&mut self, device: Option<DeviceId>, port: u8) -> Result<()> {
        let Some(device) = device.filter(|device| self.is_down(*device, port)) else { return Ok(()) };
        let name = &self.devices[device.0 as usize].info.name;
        Err(TransportError::NoDevice { reason: format!("port {port} of {name} is down; `rdma link` shows it") })
    }

    /// Destroys an id. If the connection manager would send through a port that is down, the id is destroyed later instead. Fails if the
    /// device may still use the memory of the id's work requests. If another thread still shares the id, that thread destroys it later. In
    /// this case, returns `stopped`, which the caller has set to `Ok` if the queue pair is in the error state.
    pub(super) fn destroy_raw(
        &mut self,
        device: Option<DeviceId>,
        state: IdState,
        raw: Arc<RawId>,
        stopped: Result<()>,
    ) -> Result<()> {
        let silent = matches!(
            state,
            IdState::Listening | IdState::Bound | IdState::WatchingDevice | IdState::Resolving | IdState::Resolved
        );
        // Destroying an id that connects by out-of-band exchange sends nothing.
        let Some(device) = device.filter(|_| !silent && !raw.uses_exchange()) else {
            return RawId::destroy(raw, stopped);
        };
        let entry = &mut self.devices[device.0 as usize];
        if entry.limits.driver != Driver::Rxe || !entry.is_down(raw.port()) {
            return RawId::destroy(raw, stopped);
        }
        // After `flush`, the queue pair accesses no memory and consumes no shared receive.
        let stopped = raw.flush();
        entry.waiting_for_port.push((raw.port(), raw));
        stopped
    }

    /// Destroys each kept id of the device if the id's port is up now. An id is kept if the program destroys it while
    /// its port is down.
    pub(super) fn ports_changed(&mut self, device: DeviceId) {
        let device = &mut self.devices[device.0 as usize];
        for (port, raw) in std::mem::take(&mut device.waiting_for_port) {
            if device.is_down(port) || crate::planted("an-id-waits-for-its-port-for-ever") {
                device.waiting_for_port.push((port, raw));
            }
        }
    }

    /// Destroys the kept ids of a device even if their port is down, because the device was removed, or because the
    /// provider is being dropped.
    pub(super) fn release_waiting(&mut self, device: DeviceId) {
        let device = &mut self.devices[device.0 as usize];
        for (port, raw) in std::mem::take(&mut device.waiting_for_port) {
            if device.is_down(port) { self.connector.release(raw) } else { drop(raw) }
        }
    }
}
