//! Listeners, of which one on an unspecified address takes connections from both providers.

use std::net::SocketAddr;
use std::time::Instant;

use super::Dual;
use super::ids::{Outer, Side};
use crate::cm::{CmEvent, CmId, ListenOptions};
use crate::error::Result;
use crate::provider::Provider;

/// Ports that are tried when any will do and somebody else has the first in TCP.
const PORTS: usize = 4;

/// A listener on both providers, by the ids that it has there. The one on the devices stands for it.
#[derive(Debug)]
pub(super) struct Listener {
    devices: CmId,
    embedded: CmId,
}

impl<E: Provider> Dual<E> {
    pub(super) fn listen_on(&mut self, address: SocketAddr, backlog: u32, options: &ListenOptions) -> Result<CmId> {
        let (side, why) = self.serving(address);
        let both = side == Side::Devices && address.ip().is_unspecified();
        log::info!("provider {}: {why}", self.look_at(side).name());
        if both {
            return self.listen_on_both(address, backlog, options);
        }
        let id = self.at(side).listen_with(address, backlog, options)?;
        self.note_use(side);
        Ok(id.outer(side))
    }

    fn listen_on_both(&mut self, address: SocketAddr, backlog: u32, options: &ListenOptions) -> Result<CmId> {
        let tries = if address.port() == 0 { PORTS } else { 1 };
        let mut taken = Vec::new();
        let (devices, embedded) = loop {
            let id = self.devices.listen_with(address, backlog, options)?;
            let port = self.devices.local_address(id).map_or(address.port(), |local| local.port());
            let same = SocketAddr::new(address.ip(), port);
            let result = self.embedded.listen_with(same, backlog, options);
            match result {
                // The ids of the ports before are still open, so that this one is another port.
                Err(_) if taken.len() + 1 < tries => taken.push(id),
                result => break (id, result),
            }
        };
        for id in taken {
            self.devices.unlisten(id);
        }
        self.note_use(Side::Devices);
        match embedded {
            Ok(embedded) => {
                self.note_use(Side::Embedded);
                log::info!("provider {}: listens beside the devices", self.embedded.name());
                self.listeners.push(Listener { devices, embedded });
            }
            Err(error) => log::info!(
                "{address} is listened on by the devices alone, which may have the port of TCP themselves: clients over the \
                 loopback and over other networks are refused ({error})"
            ),
        }
        Ok(devices.outer(Side::Devices))
    }

    /// Destroys the other half of a listener, if the id of the devices is one.
    pub(super) fn end_listener(&mut self, devices: CmId, now: Instant) {
        if let Some(at) = self.listeners.iter().position(|listener| listener.devices == devices) {
            let Listener { embedded, .. } = self.listeners.swap_remove(at);
            self.embedded.destroy_id(embedded, now);
        }
    }

    /// An event of one provider, in ids of both.
    pub(super) fn translate(&self, side: Side, event: CmEvent) -> CmEvent {
        side.outer_cm_event(event, |listener| {
            let both = self.listeners.iter().find(|both| side == Side::Embedded && both.embedded == listener);
            both.map_or(listener.outer(side), |both| both.devices.outer(Side::Devices))
        })
    }
}
