//! Listeners. They outlive the removal of their device.

use std::net::SocketAddr;
use std::time::Duration;

use rdma_transport::cm::CmId;
use rdma_transport::slab::Key;

use super::fabric::Owner;
use super::{Driver, Due};
use crate::error::Error;
use crate::id::ListenerId;
use crate::options::{ListenOptions, check_security};

/// How often a listener without an id tries to listen again.
const LISTEN_AGAIN: Duration = Duration::from_secs(1);

/// A place where connections come in.
#[derive(Debug)]
pub(crate) struct Listener {
    /// `None` while the address is on no device.
    cm: Option<CmId>,
    /// Where it listens, with its port.
    address: SocketAddr,
    pub(super) options: ListenOptions,
}

impl Driver {
    pub(crate) fn listen(&mut self, address: SocketAddr, options: ListenOptions) -> Result<ListenerId, Error> {
        if self.drain.is_on() {
            return Err(Error::Drained);
        }
        options.check()?;
        check_security(options.security.as_ref().unwrap_or(&self.config.security), options.framing, false)?;
        let cm = self.fabric.provider.listen_with(address, self.config.backlog, &options.path)?;
        let address = self.fabric.provider.local_address(cm).unwrap_or(address);
        let key = self.listeners.insert(Listener { cm: Some(cm), address, options });
        self.fabric.own(cm, Owner::Listener(key));
        self.ring();
        Ok(ListenerId::new(self.tag, key))
    }

    pub(crate) fn local_address(&self, listener: ListenerId) -> Option<SocketAddr> {
        Some(self.listeners.get(listener.key(self.tag)?)?.address)
    }

    pub(crate) fn close_listener(&mut self, listener: ListenerId) {
        if let Some(key) = listener.key(self.tag) {
            self.drop_listener(key);
        }
    }

    fn drop_listener(&mut self, key: Key) {
        if let Some(cm) = self.listeners.remove(key).and_then(|listener| listener.cm) {
            self.fabric.disown(cm);
            self.fabric.provider.destroy_id(cm, self.now);
        }
    }

    /// Stops listening everywhere.
    pub(crate) fn close_listeners(&mut self) {
        for key in self.listeners.keys() {
            self.drop_listener(key);
        }
    }

    /// A listener's device was removed: what is left of it goes, so that the device can.
    pub(super) fn listener_lost(&mut self, key: Key) {
        if let Some(address) = self.stop_listening(key) {
            log::warn!("the device of {address} was removed: its listener waits for it to come back");
            self.timers.insert(self.now + LISTEN_AGAIN, Due::Listen(key));
        }
    }

    /// The address of a listener has moved to another device or port, where a new id has to listen.
    pub(super) fn listener_moved(&mut self, key: Key) {
        if let Some(address) = self.stop_listening(key) {
            log::warn!("{address} has moved to another device or port: its listener is made anew");
            self.listen_again(key);
        }
    }

    /// Destroys the id of a listener that is to listen again; returns the address, if there was an id.
    fn stop_listening(&mut self, key: Key) -> Option<SocketAddr> {
        let listener = self.listeners.get_mut(key)?;
        let (cm, address) = (listener.cm.take()?, listener.address);
        self.fabric.disown(cm);
        self.fabric.provider.destroy_id(cm, self.now);
        Some(address)
    }

    /// Listens again if the address is on a device, else tries again later.
    pub(crate) fn listen_again(&mut self, key: Key) {
        let Some(listener) = self.listeners.get_mut(key) else { return };
        match self.fabric.provider.listen_with(listener.address, self.config.backlog, &listener.options.path) {
            Ok(cm) => {
                log::info!("{} is listened on again", listener.address);
                listener.cm = Some(cm);
                self.fabric.own(cm, Owner::Listener(key));
            }
            Err(error) => {
                log::debug!("{error}");
                self.timers.insert(self.now + LISTEN_AGAIN, Due::Listen(key));
            }
        }
    }
}
