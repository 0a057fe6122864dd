//! The listeners. When the device of a listener is removed, the listener waits for the return of
//! the device.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rdma_transport::cm::{self, CmId};
use rdma_transport::provider::Provider;
use rdma_transport::slab::{Key, Slab};

use crate::driver::owners::CmIdOwner;
use crate::driver::stages::Stages;
use crate::driver::{TimerPurpose, World};
use crate::error::Error;
use crate::id::ListenerId;
use crate::options::{ListenOptions, check_security};
use crate::providers::{EXCHANGE, Handle, Providers, role};

/// The interval between two attempts of a listener to listen, while no attempt succeeds.
const LISTEN_AGAIN: Duration = Duration::from_secs(1);

/// The number of ports that are tried for an address with port 0. If a provider cannot use the port
/// that the first provider has chosen, another port is tried.
const PORTS: usize = 4;

/// The listeners of the reactor.
#[derive(Debug, Default)]
pub(crate) struct Listeners {
    all: Slab<ListenerEntry>, // local: listeners of the program
}

/// A listener of the reactor.
#[derive(Debug)]
struct ListenerEntry {
    /// A connection-manager id for each provider that listens. Empty while no device has the
    /// address.
    ids: Vec<Handle<CmId>>, // local: one for each provider
    /// The address that the listener uses, with the actual port.
    address: SocketAddr,
    options: ListenOptions,
}

impl Listeners {
    pub(crate) fn listen(
        &mut self,
        world: &mut World,
        address: SocketAddr,
        options: ListenOptions,
    ) -> Result<ListenerId, Error> {
        if world.drain.is_on() {
            return Err(Error::Drained);
        }
        options.check()?;
        check_security(options.security.as_ref().unwrap_or(&world.config.security), options.framing, false)?;
        let ids = listen_on(world, address, &options)?;
        let address = ids.first().and_then(|&id| address_of(&world.providers, id)).unwrap_or(address);
        let key = self.all.insert(ListenerEntry { ids: Vec::new(), address, options });
        self.listens(world, key, ids);
        world.ring();
        Ok(ListenerId::new(world.tag(), key))
    }

    pub(crate) fn local_address(&self, listener: Key) -> Option<SocketAddr> {
        Some(self.all.get(listener)?.address)
    }

    /// Returns the options of a listener. `None` if it was closed.
    pub(crate) fn options(&self, listener: Key) -> Option<&ListenOptions> {
        Some(&self.all.get(listener)?.options)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(crate) fn close_listener(&mut self, world: &mut World, listener: ListenerId) {
        let Some(key) = listener.key(world.tag()) else { return };
        self.drop_listener(world, key);
        if world.drain.is_on() {
            // The drain may have waited for this listener only. The last stages of the next turn
            // check if the drain is complete.
            world.note(Stages::ENDS);
            world.ring();
        }
    }

    fn drop_listener(&mut self, world: &mut World, key: Key) {
        for id in self.all.remove(key).map(|listener| listener.ids).unwrap_or_default() {
            world.discard(id);
        }
    }

    /// Closes all listeners.
    pub(crate) fn close_listeners(&mut self, world: &mut World) {
        for key in self.all.keys() {
            self.drop_listener(world, key);
        }
    }

    /// Stops a listener whose device was removed: destroys its ids, so that the device can be
    /// closed. The listener tries again later.
    pub(crate) fn listener_lost(&mut self, world: &mut World, key: Key) {
        if let Some(address) = self.stop_listening(world, key) {
            local_log!(Warn, "the device of {address} was removed: its listener waits for its return");
            world.timers.insert(world.now + LISTEN_AGAIN, TimerPurpose::Listen(key));
        }
    }

    /// Stops a listener and makes it listen again, because its address has moved to another device
    /// or to another port of a device.
    pub(crate) fn listener_moved(&mut self, world: &mut World, key: Key) {
        if let Some(address) = self.stop_listening(world, key) {
            local_log!(Warn, "{address} has moved to another device or port: its listener is recreated");
            self.listen_again(world, key);
        }
    }

    /// Destroys the connection-manager ids of a listener that will listen again later. Returns the
    /// address of the listener, or `None` if it has no ids.
    fn stop_listening(&mut self, world: &mut World, key: Key) -> Option<SocketAddr> {
        let listener = self.all.get_mut(key)?;
        let (ids, address) = (std::mem::take(&mut listener.ids), listener.address);
        let any = !ids.is_empty();
        ids.into_iter().for_each(|id| world.discard(id));
        any.then_some(address)
    }

    /// Listens again on the address of a listener. If no device has the address, tries again later.
    pub(crate) fn listen_again(&mut self, world: &mut World, key: Key) {
        let Some(listener) = self.all.get(key) else { return };
        let (address, options) = (listener.address, listener.options.clone());
        match listen_on(world, address, &options) {
            Ok(ids) => {
                local_log!(Info, "{address} is listened on again");
                self.listens(world, key, ids);
            }
            Err(error) => {
                log::debug!("{error}");
                world.timers.insert(world.now + LISTEN_AGAIN, TimerPurpose::Listen(key));
            }
        }
    }

    /// Stores the ids of a listener, and registers the listener as their owner.
    fn listens(&mut self, world: &mut World, key: Key, ids: Vec<Handle<CmId>>) {
        for &id in &ids {
            world.owners.own(id, CmIdOwner::Listener(key));
            world.providers.note_use(id.provider);
        }
        if let Some(listener) = self.all.get_mut(key) {
            listener.ids = ids;
        }
    }

    /// Passes a stream that the program has accepted to a listener, as if the listener had accepted
    /// the stream. The connection is then set up by exchange of queue pair numbers over this
    /// stream.
    pub(crate) fn take_stream(&self, world: &mut World, listener: ListenerId, stream: OwnedFd) -> Result<(), Error> {
        let key = listener.key(world.tag()).and_then(|key| self.all.get(key));
        let id = *key.and_then(|listener| listener.ids.first()).ok_or(Error::Gone("listener"))?;
        let (now, (provider, id)) = (world.now, world.providers.of(id));
        role(provider, Provider::exchange, EXCHANGE)?.accept_stream(id, stream, now)?;
        world.ring();
        Ok(())
    }
}

/// Listens on an address. All providers listen on an unspecified address. On any other address,
/// only the first provider that has a device with that address listens. Returns the new ids.
fn listen_on(world: &mut World, address: SocketAddr, options: &ListenOptions) -> Result<Vec<Handle<CmId>>, Error> {
    if let Some(exchange) = &options.exchange {
        let provider = world.providers.exchanging()?;
        let by = world.providers.numbered(provider);
        local_log!(Info, "provider {}: listens on {address} for exchange", by.name());
        let id = role(by, Provider::exchange, EXCHANGE)?.listen_exchange(address, &options.path, exchange)?;
        return Ok(vec![Handle { provider, id }]);
    }
    let options = &options.path;
    if address.ip().is_unspecified() && world.providers.len() > 1 {
        return listen_on_all(world, address, options);
    }
    let first = world.providers.serving(address.ip());
    listen_from(&mut world.providers, first, address, options)
}

/// Tries the providers from `first` on, until one can listen. A provider cannot listen if it has no
/// device with the address, or no connection manager for that device. Any other error ends the
/// attempts, and is returned.
fn listen_from(
    providers: &mut Providers,
    first: usize,
    address: SocketAddr,
    options: &cm::ListenParam,
) -> Result<Vec<Handle<CmId>>, Error> {
    let last = providers.len() - 1;
    for provider in first..=last {
        let name = providers.get(provider).name();
        match listen_at(providers, provider, address, options) {
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

fn listen_at(
    providers: &mut Providers,
    provider: usize,
    address: SocketAddr,
    options: &cm::ListenParam,
) -> Result<Handle<CmId>, rdma_transport::TransportError> {
    Ok(Handle { provider, id: providers.numbered(provider).listen(address, options)? })
}

fn address_of(providers: &Providers, id: Handle<CmId>) -> Option<SocketAddr> {
    providers.get(id.provider).local_address(id.id)
}

/// Listens on all providers, at the same port. If an iWARP device already uses this TCP port, the
/// embedded provider cannot use it. In this case, only the other providers listen.
fn listen_on_all(
    world: &mut World,
    address: SocketAddr,
    options: &cm::ListenParam,
) -> Result<Vec<Handle<CmId>>, Error> {
    let providers = &mut world.providers;
    let tries = if address.port() == 0 { PORTS } else { 1 };
    // The listening ids of failed attempts: another provider could not listen on the same port.
    // These ids stay open until an attempt succeeds, so that each new attempt gets a different
    // port.
    let mut given_up = Vec::new();
    let listening = loop {
        let first = match listen_at(providers, 0, address, options) {
            Ok(first) => first,
            Err(rdma_transport::TransportError::NoDevice { .. }) => break listen_from(providers, 1, address, options),
            Err(error) => break Err(error.into()),
        };
        let same =
            SocketAddr::new(address.ip(), address_of(providers, first).map_or(address.port(), |local| local.port()));
        let (mut ids, mut refused) = (vec![first], None);
        for provider in 1..providers.len() {
            match listen_at(providers, provider, same, options) {
                Ok(id) => ids.push(id),
                Err(error) => refused = Some((providers.get(provider).name(), error)),
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
    given_up.into_iter().flatten().for_each(|id| world.discard(id));
    listening
}
