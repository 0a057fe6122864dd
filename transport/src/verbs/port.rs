//! Ports that are down.
//!
//! Nothing is asked of a peer through a port that is down: it would end with a time limit of the connection manager, about a
//! minute later. Whether a port is down is known from the device's events, for the port that each id is on.
//!
//! On rxe more is at stake. A connection manager whose datagram cannot be sent because the link is down may never speak again:
//! rxe puts the manager's queue pair into the error state, where it stays until the device is removed. From then on no connect
//! is answered, and whoever destroys an id waits for ever, its process with it. So on rxe no id connects, answers or says
//! good-bye while its port is down, and ids that are to be destroyed wait here for the port.

use std::sync::Arc;

use super::core::Verbs;
use super::device::Driver;
use super::entry::IdState;
use super::id::RawId;
use crate::error::{Error, Result};
use crate::provider::DeviceId;

impl Verbs {
    /// Whether a port that datagrams connect on is down. iWARP has a TCP connection for each id, and needs no such thing.
    fn is_down(&mut self, device: DeviceId, port: u8) -> bool {
        let device = self.devices.get_mut(device.0 as usize).filter(|device| !device.limits.iwarp);
        device.is_some_and(|device| device.is_down(port))
    }

    /// The reason not to ask anything of a peer now.
    pub(super) fn check_port(&mut self, device: Option<DeviceId>, port: u8) -> Result<()> {
        let Some(device) = device.filter(|device| self.is_down(*device, port)) else { return Ok(()) };
        let name = &self.devices[device.0 as usize].info.name;
        Err(Error::NoDevice { reason: format!("port {port} of {name} is down; `rdma link` shows it") })
    }

    /// Destroys an id, later if it would say so through a port that is down. Fails if the device may go on using what the
    /// queue pair of the id was given. `stopped`: see [`RawId::destroy`].
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
        // Nor is anything sent to the port of a peer that is reached by exchange.
        let Some(device) = device.filter(|_| !silent && !raw.uses_exchange()) else {
            return RawId::destroy(raw, stopped);
        };
        let entry = &mut self.devices[device.0 as usize];
        if entry.limits.driver != Driver::Rxe || !entry.is_down(raw.port()) {
            return RawId::destroy(raw, stopped);
        }
        // From here on it touches no memory and takes no shared receive.
        let stopped = raw.flush();
        entry.waiting_for_port.push((raw.port(), raw));
        stopped
    }

    /// Destroys what waited for a port that is up again.
    pub(super) fn ports_changed(&mut self, device: DeviceId) {
        let device = &mut self.devices[device.0 as usize];
        for (port, raw) in std::mem::take(&mut device.waiting_for_port) {
            if device.is_down(port) {
                device.waiting_for_port.push((port, raw));
            }
        }
    }

    /// Destroys what waits for a port without waiting for it, because the device goes away, or this provider does.
    pub(super) fn release_waiting(&mut self, device: DeviceId) {
        let device = &mut self.devices[device.0 as usize];
        for (port, raw) in std::mem::take(&mut device.waiting_for_port) {
            if device.is_down(port) { self.connector.release(raw) } else { drop(raw) }
        }
    }
}
