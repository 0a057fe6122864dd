//! Listeners: they outlive the removal of their device.

use std::net::SocketAddr;
use std::time::Duration;

use rdma_transport::cm::CmId;

use crate::choose::Use;
use crate::config::Framing;
use crate::core::{Core, Owner, TimerKind};
use crate::error::Error;
use crate::id::ListenerId;

/// How often a listener whose device was removed looks whether it is back.
const LISTEN_AGAIN: Duration = Duration::from_secs(1);

/// Where connections come in.
#[derive(Debug)]
pub(crate) struct Listener {
    /// `None` while its device is away.
    pub(crate) cm: Option<CmId>,
    /// Where it listens, with its port.
    address: SocketAddr,
    pub(crate) framing: Framing,
}

impl Core {
    pub(crate) fn listen(&mut self, address: SocketAddr, framing: Framing) -> Result<ListenerId, Error> {
        self.decide(address, Use::Listen);
        let cm = self.provider.listen(address, self.config.backlog)?;
        let address = self.provider.local_address(cm).unwrap_or(address);
        let id = ListenerId(self.listeners.insert(Listener { cm: Some(cm), address, framing }));
        self.own(cm, Owner::Listener(id));
        Ok(id)
    }

    pub(crate) fn local_address(&self, listener: ListenerId) -> Option<SocketAddr> {
        Some(self.listeners.get(listener.0)?.address)
    }

    pub(crate) fn close_listener(&mut self, listener: ListenerId) {
        if let Some(cm) = self.listeners.remove(listener.0).and_then(|listener| listener.cm) {
            self.disown(cm);
            self.provider.destroy_id(cm, self.now);
        }
    }

    /// A listener's device was removed: what is left of it goes, so that the device can.
    pub(crate) fn listener_lost(&mut self, id: ListenerId) {
        let Some(listener) = self.listeners.get_mut(id.0) else { return };
        let Some(cm) = listener.cm.take() else { return };
        log::warn!("the device of {} was removed: its listener waits for it to come back", listener.address);
        self.disown(cm);
        self.provider.destroy_id(cm, self.now);
        self.timers.insert(self.now + LISTEN_AGAIN, TimerKind::Listen(id));
    }

    /// Listens again if the device is back, else looks again later.
    pub(crate) fn listen_again(&mut self, id: ListenerId) {
        let Some(listener) = self.listeners.get_mut(id.0) else { return };
        match self.provider.listen(listener.address, self.config.backlog) {
            Ok(cm) => {
                log::info!("{} is listened on again", listener.address);
                listener.cm = Some(cm);
                self.own(cm, Owner::Listener(id));
            }
            Err(error) => {
                log::debug!("{error}");
                self.timers.insert(self.now + LISTEN_AGAIN, TimerKind::Listen(id));
            }
        }
    }
}
