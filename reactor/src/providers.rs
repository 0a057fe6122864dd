//! The providers of a reactor: the implementations of RDMA that it can use. Their order is that in which the reactor tries them for an
//! address.

use std::net::IpAddr;
use std::time::Instant;

use rdma_transport::cm::{CmEvent, CmId, Detached};
use rdma_transport::event::DeviceEvent;
use rdma_transport::provider::{DeviceId, Drive, Provider};
use rdma_transport::qp::QpId;
use rdma_transport::slab::Key;

use crate::error::Error;

/// The largest number of providers of one reactor.
pub(crate) const MAX_PROVIDERS: usize = 8;

/// The provider name that the reactor reports for connections in shared memory.
pub(crate) const SHARED_MEMORY: &str = "shm";

/// The name of a feature, for the error of a provider whose queue pairs cannot connect by exchange.
pub(crate) const EXCHANGE: &str = "connecting by exchange";

/// The name of a feature, for the error of a provider that cannot pass a connect request to another reactor.
pub(crate) const HANDOVER: &str = "connect requests to hand over";

/// A handle of an object of a provider, with the index of that provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle<T> {
    pub(crate) provider: usize,
    pub(crate) id: T,
}

impl Handle<CmId> {
    /// The value for a connection that has no connection-manager id yet, because its address is not known. It identifies no object.
    pub(crate) const NONE: Self = Self { provider: 0, id: CmId(Key::NONE) };
}

/// Returns the index of a device in the reactor. The index also contains the index of the device's provider.
pub(crate) const fn device_index(provider: usize, device: DeviceId) -> usize {
    device.0 as usize * MAX_PROVIDERS + provider
}

/// Decodes the index of a device: returns the index of its provider, and the id that the provider uses for the device.
pub(crate) const fn device_of(index: usize) -> (usize, DeviceId) {
    (index % MAX_PROVIDERS, DeviceId((index / MAX_PROVIDERS) as u32))
}

/// The providers of a reactor, see the [module](self).
#[derive(Debug)]
pub(crate) struct Providers {
    all: Vec<Box<dyn Provider>>,
    /// The provider that is polled first for the next event. It changes with each event, so no provider can starve another.
    first: usize,
    /// The providers that the reactor has used, for instance for a connection. Each bit stands for one provider.
    used: u8,
    /// The providers that have carried a connection in shared memory. Each bit stands for one provider.
    in_memory: u8,
    /// The providers that have carried a connection that is not in shared memory. Each bit stands for one provider.
    on_wire: u8,
    /// The number of providers, counted from the first one, whose connection-manager channels the poller watches.
    watched: usize,
}

impl Providers {
    /// # Errors
    /// [`Error::NoProvider`] if the list is empty, or has more than [`MAX_PROVIDERS`] providers.
    pub(crate) fn new(all: Vec<Box<dyn Provider>>) -> Result<Self, Error> {
        if (1..=MAX_PROVIDERS).contains(&all.len()) {
            return Ok(Self { all, first: 0, used: 0, in_memory: 0, on_wire: 0, watched: 0 });
        }
        let reason = format!("a reactor has 1 to {MAX_PROVIDERS} providers, not {}", all.len());
        Err(Error::NoProvider { provider: "any", reason })
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &dyn Provider> {
        self.all.iter().map(|provider| &**provider)
    }

    #[inline]
    pub(crate) fn get(&self, provider: usize) -> &dyn Provider {
        &*self.all[provider]
    }

    #[inline]
    pub(crate) fn numbered(&mut self, provider: usize) -> &mut dyn Provider {
        &mut *self.all[provider]
    }

    /// Returns the provider of a handle, and the id that the provider uses for the object.
    pub(crate) fn of<T>(&mut self, handle: Handle<T>) -> (&mut dyn Provider, T) {
        (self.numbered(handle.provider), handle.id)
    }

    /// Returns the provider of a device.
    #[inline]
    pub(crate) fn of_device(&mut self, index: usize) -> &mut dyn Provider {
        self.numbered(device_of(index).0)
    }

    /// Returns the provider of a device, as [`Providers::of_device`] does, but as a shared reference.
    pub(crate) fn get_of_device(&self, index: usize) -> &dyn Provider {
        self.get(device_of(index).0)
    }

    /// Records that the reactor uses a provider.
    pub(crate) const fn note_use(&mut self, provider: usize) {
        self.used |= 1 << provider;
    }

    /// Returns the index of the next provider whose connection-manager channel the poller does not watch yet. `None` if it watches all.
    #[inline]
    pub(crate) fn unwatched(&self) -> Option<usize> {
        (self.watched < self.len()).then_some(self.watched)
    }

    /// Records that the poller watches the channel of the provider that [`Providers::unwatched`] has returned.
    pub(crate) const fn note_watched(&mut self) {
        self.watched += 1;
    }

    /// Records that a provider carries an established connection. Returns true if the connection uses shared memory.
    pub(crate) fn note_carried(&mut self, provider: usize, qp: QpId) -> bool {
        let in_memory = self.is_in_memory(provider, qp);
        if in_memory && self.in_memory & 1 << provider == 0 {
            log::info!("provider {SHARED_MEMORY}: for peers of this host and this user");
        }
        *(if in_memory { &mut self.in_memory } else { &mut self.on_wire }) |= 1 << provider;
        in_memory
    }

    /// Returns true if an established connection uses shared memory.
    pub(crate) fn is_in_memory(&mut self, provider: usize, qp: QpId) -> bool {
        self.numbered(provider).shared_memory().is_some_and(|role| role.is_shared(qp))
    }

    /// Returns the names of the providers that were used so far, separated by `+`. If no provider was used, returns the names of all. If a
    /// provider has carried connections in shared memory, [`SHARED_MEMORY`] follows its name. If it has carried no other connections,
    /// [`SHARED_MEMORY`] replaces its name.
    pub(crate) fn name(&self) -> String {
        let has = |bits: u8, index: usize| bits & 1 << index != 0;
        let counts = |&index: &usize| self.used == 0 || has(self.used, index);
        let mut names: Vec<&str> = Vec::new();
        for index in (0..self.len()).filter(counts) {
            if !has(self.in_memory, index) || has(self.on_wire, index) {
                names.push(self.get(index).name());
            }
            if has(self.in_memory, index) {
                names.push(SHARED_MEMORY);
            }
        }
        names.join("+")
    }

    /// Returns the index of the provider that the reactor tries as the `nth` one for a peer, from 0. For loopback addresses the order is
    /// reversed, because the last provider needs no device.
    pub(crate) fn nth_for(&self, peer: IpAddr, nth: usize) -> usize {
        if peer.is_loopback() { self.len() - 1 - nth } else { nth }
    }

    /// Returns the index of the first provider that has a device with this local address. If no provider has one, returns the index of the
    /// last provider.
    pub(crate) fn serving(&mut self, local: IpAddr) -> usize {
        let last = self.len() - 1;
        for (index, provider) in self.all[..last].iter_mut().enumerate() {
            match provider.device_at(local) {
                Ok(_) => return index,
                Err(error) => log::info!("provider {}: not for {local}: {error}", provider.name()),
            }
        }
        last
    }

    /// Returns the index of the first provider that can connect by exchange.
    ///
    /// # Errors
    /// No provider can connect by exchange.
    pub(crate) fn exchanging(&mut self) -> rdma_transport::Result<usize> {
        let found = self.all.iter_mut().position(|provider| provider.exchange().is_some());
        let provider = self.get(0).name();
        found.ok_or(rdma_transport::Error::Unsupported { provider, feature: EXCHANGE })
    }

    /// Returns the latest time for the next call of [`Providers::progress`]; `None` if no provider has a timer.
    #[inline]
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        match &self.all[..] {
            // A reactor with one provider, the usual case, avoids the search: this function is called several times in each turn.
            [only] => only.next_deadline(),
            all => all.iter().filter_map(|provider| provider.next_deadline()).min(),
        }
    }

    /// Lets each provider transfer data and run its timers. Returns `true` if a provider has more work than its budget for one call: then
    /// it must be called again.
    pub(crate) fn progress(&mut self, now: Instant, drive: Drive) -> bool {
        let mut more = false;
        for provider in &mut self.all {
            more |= provider.progress(now, drive);
        }
        more
    }

    /// Returns the next event of a connection manager, and the index of its provider. `None` if no provider has an event.
    pub(crate) fn next_cm_event(&mut self, now: Instant) -> rdma_transport::Result<Option<(usize, CmEvent)>> {
        let first = self.first;
        self.first = (first + 1) % self.len();
        for nth in 0..self.len() {
            let index = (first + nth) % self.len();
            if let Some(event) = self.numbered(index).next_cm_event(now)? {
                return Ok(Some((index, event)));
            }
        }
        Ok(None)
    }

    /// Returns the next event of a device, and the index of its provider. `None` if no device has an event.
    pub(crate) fn next_device_event(&mut self) -> Option<(usize, DeviceEvent)> {
        let next = |provider: &mut Box<dyn Provider>| provider.device_events()?.next_device_event();
        self.all.iter_mut().enumerate().find_map(|(index, provider)| Some((index, next(provider)?)))
    }

    /// Attaches a connect request that another reactor has detached, to accept it here. Returns the new id of the request, and the index of
    /// its device. The request needs a provider with the same name as the provider that detached it. If several providers have that name,
    /// one of them must have the same index as that provider had in the other reactor. Otherwise the call fails.
    pub(crate) fn attach(
        &mut self,
        request: Handle<Detached>,
        now: Instant,
    ) -> rdma_transport::Result<(Handle<CmId>, usize)> {
        let Handle { provider: number, id: request } = request;
        let name = request.provider();
        let of_kind: Vec<usize> = (0..self.len()).filter(|&index| self.get(index).name() == name).collect();
        let same = of_kind.iter().copied().find(|&index| index == number || of_kind.len() == 1);
        let provider = same.ok_or(rdma_transport::Error::Unsupported { provider: name, feature: HANDOVER })?;
        let (id, device) = role(self.numbered(provider), Provider::handover, HANDOVER)?.attach(request, now)?;
        self.note_use(provider);
        Ok((Handle { provider, id }, device_index(provider, device)))
    }

    /// Returns the number of calls that have acknowledged completion events, for [`crate::CompletionStats::acknowledgements`].
    pub(crate) fn acknowledgements(&self) -> u64 {
        self.iter().filter_map(|provider| Some(provider.adapter()?.acknowledgements())).sum()
    }
}

/// Returns a role of a provider: a trait for a feature that not all providers have.
///
/// # Errors
/// The provider does not have the role. The error names the provider and the feature.
pub(crate) fn role<'a, T: ?Sized>(
    provider: &'a mut dyn Provider,
    role: impl FnOnce(&'a mut dyn Provider) -> Option<&'a mut T>,
    feature: &'static str,
) -> rdma_transport::Result<&'a mut T> {
    let name = provider.name();
    role(provider).ok_or(rdma_transport::Error::Unsupported { provider: name, feature })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rdma_transport::cm::{CmEventKind, ConnectParam};
    use rdma_transport::iwarp::{Iwarp, IwarpConfig, TcpNet};
    use rdma_transport::qp::QpAttr;
    use rdma_transport::{CqAttr, ListenOptions, PathOptions};

    use super::*;
    use crate::seam::poller::{Clock, SystemClock, system_entropy};

    fn embedded() -> Box<dyn Provider> {
        let net = TcpNet::new().expect("the channels");
        Box::new(Iwarp::new(IwarpConfig::default(), net, system_entropy()).expect("good settings"))
    }

    /// Waits for an event of the last provider, and returns it. Drops the events of the other providers, and all but the last one of the
    /// last provider.
    fn event(all: &mut [&mut dyn Provider]) -> CmEvent {
        let (start, mut found) = (SystemClock.now(), None);
        while found.is_none() {
            let now = SystemClock.now();
            assert!(now - start < Duration::from_secs(300), "an event");
            for provider in &mut *all {
                provider.progress(now, Drive::Full);
                found = None;
                while let Some(event) = provider.next_cm_event(now).expect("a channel") {
                    found = Some(event);
                }
            }
        }
        found.expect("one was found")
    }

    #[test]
    fn a_request_goes_to_the_provider_that_it_is_for() {
        let (mut from, mut client, now) = (embedded(), embedded(), SystemClock.now());
        let listener = from.listen("127.0.0.1:0".parse().unwrap(), &ListenOptions::default()).unwrap();
        let address = from.local_address(listener).unwrap();
        let mut attach = |providers: &mut Providers, number| {
            let id = client.resolve(address, &PathOptions::default(), now + Duration::from_secs(300)).unwrap();
            event(&mut [&mut *from, &mut *client]);
            let cq = client.create_cq(DeviceId(0), &CqAttr::new(2)).unwrap();
            client.create_qp(id, &QpAttr::new(cq, cq, 1, 1)).unwrap();
            client.connect(id, &ConnectParam::default()).unwrap();
            let request = event(&mut [&mut *client, &mut *from]);
            assert!(matches!(request.kind, CmEventKind::ConnectRequest { .. }));
            let id = from.handover().unwrap().detach(request.id).unwrap();
            providers.attach(Handle { provider: number, id }, now).map(|(handle, _)| handle.provider)
        };
        let mut two = Providers::new(vec![embedded(), embedded()]).unwrap();
        assert_eq!((attach(&mut two, 0).unwrap(), attach(&mut two, 1).unwrap()), (0, 1));
        assert!(attach(&mut two, 2).is_err(), "it is unclear which of the two");
        let mut one = Providers::new(vec![embedded()]).unwrap();
        assert_eq!(attach(&mut one, 2).unwrap(), 0);
    }
}
