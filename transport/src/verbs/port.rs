//! Ports that are down: nothing is said there.
//!
//! A connection manager whose datagram cannot be sent because the link is down may never speak again: rxe puts its queue
//! pair into the error state, where it stays until the device is removed. From then on no connect is answered, and
//! whoever destroys an id waits for ever, its process with it. So while a port is down no id connects, answers or
//! says good-bye; those that are to be destroyed wait here for the port. iWARP has a TCP connection per id and knows
//! no such thing.

use std::sync::Arc;

use super::id::{RawId, State};
use super::provider::Verbs;
use crate::error::{Error, Result};
use crate::provider::DeviceId;

impl Verbs {
    /// Whether a port that datagrams connect on is down. Asks the device: its event may come later than its effect.
    fn is_down(&mut self, device: DeviceId) -> bool {
        let Some(device) = self.devices.get_mut(device.0 as usize).filter(|device| !device.limits.iwarp) else {
            return false;
        };
        if let Some(raw) = &device.raw {
            device.down = raw.port_state(device.port).is_ok_and(|state| state == Err("down"));
        }
        device.down
    }

    /// The reason not to speak to a peer now.
    pub(super) fn check_port(&mut self, device: Option<DeviceId>) -> Result<()> {
        let Some(device) = device.filter(|device| self.is_down(*device)) else { return Ok(()) };
        let reason = format!("the port of {} is down", self.devices[device.0 as usize].info.name);
        Err(Error::NoDevice { reason })
    }

    /// Takes an id that is to be destroyed and would say so on a port that is down.
    pub(super) fn park(&mut self, device: Option<DeviceId>, state: State, raw: Arc<RawId>) -> Option<Arc<RawId>> {
        let silent =
            matches!(state, State::Listening | State::Bound | State::Watching | State::Resolving | State::Resolved);
        let Some(device) = device.filter(|_| !silent) else { return Some(raw) };
        let over = matches!(state, State::Disconnecting | State::Dead);
        let down = if over { self.devices[device.0 as usize].down } else { self.is_down(device) };
        if !down {
            return Some(raw);
        }
        // From here on it touches no memory and takes no shared receive.
        if let Err(error) = raw.flush() {
            log::debug!("{error}");
        }
        self.devices[device.0 as usize].parked.push(raw);
        None
    }

    /// A port has changed: destroys what waited for it to be up.
    pub(super) fn port_changed(&mut self, device: DeviceId) {
        if !self.is_down(device) {
            self.devices[device.0 as usize].parked.clear();
        }
    }

    /// Destroys what waits for a port without waiting for it: the device goes away, or this provider does.
    pub(super) fn release_parked(&mut self, device: DeviceId) {
        let device = &mut self.devices[device.0 as usize];
        for raw in std::mem::take(&mut device.parked) {
            if device.down { self.connector.release(raw) } else { drop(raw) }
        }
    }
}
