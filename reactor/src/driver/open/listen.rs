//! The listeners. When the device of a listener is removed, the listener waits for the return of the device.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rdma_transport::cm::{self, CmId};
use rdma_transport::provider::Provider;
use rdma_transport::slab::Key;

use crate::driver::owners::CmIdOwner;
use crate::driver::stages::Stages;
use crate::driver::{Driver, TimerPurpose};
use crate::error::Error;
use crate::id::ListenerId;
use crate::options::{ListenOptions, check_security};
use crate::providers::{EXCHANGE, Handle, role};

/// The interval between two attempts of a listener to listen, while no attempt succeeds.
const LISTEN_AGAIN: Duration = Duration::from_secs(1);

/// The number of ports that are tried for an address with port 0. If a provider cannot use the port that the first provider has chosen,
/// another port is tried.
const PORTS: usize = 4;

/// A listener of the reactor.
#[derive(Debug)]
pub(crate) struct ListenerEntry {
    /// A connection-manager id for each provider that listens. Empty while no device has the address.
    ids: Vec<Handle<CmId>>, // local: one for each provider
    /// The address that the listener uses, with the actual port.
    address: SocketAddr,
    pub(in crate::driver) options: ListenOptions,
}

impl Driver {
    pub(crate) fn listen(&mut self, address: SocketAddr, options: ListenOptions) -> Result<ListenerId, Error> {
        if self.drain.is_on() {
            return Err(Error::Drained);
        }
        options.check()?;
        check_security(options.security.as_ref().unwrap_or(&self.config.security), options.framing, false)?;
        let ids = self.listen_on(address, &options)?;
        let address = ids.first().and_then(|&id| self.address_of(id)).unwrap_or(address);
        let key = self.listeners.insert(ListenerEntry { ids: Vec::new(), address, options });
        self.listens(key, ids);
        self.ring();
        Ok(ListenerId::new(self.tag(), key))
    }

    pub(crate) fn local_address(&self, listener: ListenerId) -> Option<SocketAddr> {
        Some(self.listeners.get(listener.key(self.tag())?)?.address)
    }

    pub(crate) fn close_listener(&mut self, listener: ListenerId) {
        let Some(key) = listener.key(self.tag()) else { return };
        self.drop_listener(key);
        if self.drain.is_on() {
            // The drain may have waited for this listener only. Its end is checked at the end of the last stages.
            self.note(Stages::ENDS);
            self.ring();
        }
    }

    fn drop_listener(&mut self, key: Key) {
        for id in self.listeners.remove(key).map(|listener| listener.ids).unwrap_or_default() {
            self.discard(id);
        }
    }

    /// Closes all listeners.
    pub(crate) fn close_listeners(&mut self) {
        for key in self.listeners.keys() {
            self.drop_listener(key);
        }
    }

    /// Stops a listener whose device was removed: destroys its ids, so that the device can be closed. The listener tries again later.
    pub(in crate::driver) fn listener_lost(&mut self, key: Key) {
        if let Some(address) = self.stop_listening(key) {
            local_log!(Warn, "the device of {address} was removed: its listener waits for its return");
            self.timers.insert(self.now + LISTEN_AGAIN, TimerPurpose::Listen(key));
        }
    }

    /// Stops a listener and makes it listen again, because its address has moved to another device or to another port of a device.
    pub(in crate::driver) fn listener_moved(&mut self, key: Key) {
        if let Some(address) = self.stop_listening(key) {
            local_log!(Warn, "{address} has moved to another device or port: its listener is recreated");
            self.listen_again(key);
        }
    }

    /// Destroys the connection-manager ids of a listener that will listen again later. Returns the address of the listener, or `None` if it
    /// has no ids.
    fn stop_listening(&mut self, key: Key) -> Option<SocketAddr> {
        let listener = self.listeners.get_mut(key)?;
        let (ids, address) = (std::mem::take(&mut listener.ids), listener.address);
        let any = !ids.is_empty();
        ids.into_iter().for_each(|id| self.discard(id));
        any.then_some(address)
    }

    /// Listens again on the address of a listener. If no device has the address, tries again later.
    pub(crate) fn listen_again(&mut self, key: Key) {
        let Some(listener) = self.listeners.get(key) else { return };
        let (address, options) = (listener.address, listener.options.clone());
        match self.listen_on(address, &options) {
            Ok(ids) => {
                local_log!(Info, "{address} is listened on again");
                self.listens(key, ids);
            }
            Err(error) => {
                log::debug!("{error}");
                self.timers.insert(self.now + LISTEN_AGAIN, TimerPurpose::Listen(key));
            }
        }
    }

    /// Stores the ids of a listener, and registers the listener as their owner.
    fn listens(&mut self, key: Key, ids: Vec<Handle<CmId>>) {
        for &id in &ids {
            self.owners.own(id, CmIdOwner::Listener(key));
            self.providers.note_use(id.provider);
        }
        if let Some(listener) = self.listeners.get_mut(key) {
            listener.ids = ids;
        }
    }

    // Choosing the providers.

    /// Listens on an address. All providers listen on an unspecified address. On any other address, only the first provider that has a
    /// device with that address listens. Returns the new ids.
    fn listen_on(&mut self, address: SocketAddr, options: &ListenOptions) -> Result<Vec<Handle<CmId>>, Error> {
        if let Some(exchange) = &options.exchange {
            let provider = self.providers.exchanging()?;
            let by = self.providers.numbered(provider);
            local_log!(Info, "provider {}: listens on {address} for exchange", by.name());
            let id = role(by, Provider::exchange, EXCHANGE)?.listen_exchange(address, &options.path, exchange)?;
            return Ok(vec![Handle { provider, id }]);
        }
        let options = &options.path;
        if address.ip().is_unspecified() && self.providers.len() > 1 {
            return self.listen_on_all(address, options);
        }
        let first = self.providers.serving(address.ip());
        self.listen_from(first, address, options)
    }

    /// Tries the providers from `first` on, until one can listen. A provider cannot listen if it has no device with the address, or no
    /// connection manager for that device. Any other error ends the attempts, and is returned.
    fn listen_from(
        &mut self,
        first: usize,
        address: SocketAddr,
        options: &cm::ListenParam,
    ) -> Result<Vec<Handle<CmId>>, Error> {
        let last = self.providers.len() - 1;
        for provider in first..=last {
            let name = self.providers.get(provider).name();
            match self.listen_at(provider, address, options) {
                Err(error @ rdma_transport::TransportError::NoDevice { .. }) if provider < last => {
                    local_log!(Info, "provider {name}: not for {address}: {error}");
                }
                listening => {
                    local_log!(Info, "provider {name}: listens on {address}");
                    return Ok(vec![listening?]);
                }
            }
        }
        Ok(Vec::new())
    }

    /// Passes a stream that the program has accepted to a listener, as if the listener had accepted the stream. The connection is then set
    /// up by exchange of queue pair numbers over this stream.
    pub(crate) fn take_stream(&mut self, listener: ListenerId, stream: OwnedFd) -> Result<(), Error> {
        let key = listener.key(self.tag()).and_then(|key| self.listeners.get(key));
        let id = *key.and_then(|listener| listener.ids.first()).ok_or(Error::Gone("listener"))?;
        let (now, (provider, id)) = (self.now, self.providers.of(id));
        role(provider, Provider::exchange, EXCHANGE)?.accept_stream(id, stream, now)?;
        self.ring();
        Ok(())
    }

    fn listen_at(
        &mut self,
        provider: usize,
        address: SocketAddr,
        options: &cm::ListenParam,
    ) -> Result<Handle<CmId>, rdma_transport::TransportError> {
        Ok(Handle { provider, id: self.providers.numbered(provider).listen(address, options)? })
    }

    fn address_of(&self, id: Handle<CmId>) -> Option<SocketAddr> {
        self.providers.get(id.provider).local_address(id.id)
    }

    /// Listens on all providers, at the same port. If an iWARP device already uses this TCP port, the embedded provider cannot use it. In
    /// this case, only the other providers listen.
    fn listen_on_all(&mut self, address: SocketAddr, options: &cm::ListenParam) -> Result<Vec<Handle<CmId>>, Error> {
        let tries = if address.port() == 0 { PORTS } else { 1 };
        // The listening ids of failed attempts: another provider could not listen on the same port. These ids stay open until an attempt
        // succeeds, so that each new attempt gets a different port.
        let mut given_up = Vec::new();
        let listening = loop {
            let first = match self.listen_at(0, address, options) {
                Ok(first) => first,
                Err(rdma_transport::TransportError::NoDevice { .. }) => break self.listen_from(1, address, options),
                Err(error) => break Err(error.into()),
            };
            let same =
                SocketAddr::new(address.ip(), self.address_of(first).map_or(address.port(), |local| local.port()));
            let (mut ids, mut refused) = (vec![first], None);
            for provider in 1..self.providers.len() {
                match self.listen_at(provider, same, options) {
                    Ok(id) => ids.push(id),
                    Err(error) => refused = Some((self.providers.get(provider).name(), error)),
                }
            }
            let Some((name, error)) = refused else { break Ok(ids) };
            if given_up.len() + 1 < tries {
                given_up.push(ids);
                continue;
            }
            local_log!(
                Info,
                "{same} is listened on without the provider {name}, as a device may have the port of TCP itself: clients over \
                 the loopback and over other networks are refused ({error})"
            );
            break Ok(ids);
        };
        given_up.into_iter().flatten().for_each(|id| self.discard(id));
        listening
    }
}
