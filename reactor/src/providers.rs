//! The providers of a reactor, that is, the implementations of RDMA that the reactor can use. They form a list. If several providers may
//! reach the address of a peer, the reactor tries them in the order of that list, and in reverse order for loopback addresses.

use std::net::IpAddr;
use std::time::Instant;

use rdma_transport::cm::{CmEvent, CmId, Detached};
use rdma_transport::event::AsyncEvent;
use rdma_transport::provider::{DeviceId, Drive, Provider};
use rdma_transport::qp::QpId;
use rdma_transport::slab::Key;

use crate::error::Error;

/// The largest number of providers of one reactor.
pub(crate) const MAX_PROVIDERS: usize = 8;

/// The provider name that the reactor reports for connections in shared memory.
pub(crate) const SHARED_MEMORY: &str = "shm";

/// The name of the feature "connecting by exchange". An error contains it if a provider does not have this feature.
pub(crate) const EXCHANGE: &str = "connecting by exchange";

/// The name of the feature that passes a connect request to another reactor. An error contains it if a provider does not have this feature.
pub(crate) const HANDOVER: &str = "connect requests to hand over";

/// The handle of an object that belongs to a provider: the index of the provider, and the id that the provider uses for the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle<T> {
    pub(crate) provider: usize,
    pub(crate) id: T,
}

impl Handle<CmId> {
    /// A handle that identifies no object. A connection has this handle until it gets a connection-manager id, for instance while the
    /// address of its host is looked up.
    pub(crate) const NONE: Self = Self { provider: 0, id: CmId(Key::NONE) };
}

impl Default for Handle<CmId> {
    fn default() -> Self {
        Self::NONE
    }
}

/// Returns the index that the reactor uses for a device. The index combines the index of the provider and the id of the device.
pub(crate) const fn device_index(provider: usize, device: DeviceId) -> usize {
    device.0 as usize * MAX_PROVIDERS + provider
}

/// Decodes the index that the reactor uses for a device. Returns the index of the provider, and the id that the provider uses for the
/// device.
pub(crate) const fn device_of(index: usize) -> (usize, DeviceId) {
    (index % MAX_PROVIDERS, DeviceId((index / MAX_PROVIDERS) as u32))
}

/// The providers of a reactor, see the [module](self).
#[derive(Debug)]
pub(crate) struct Providers {
    all: Vec<Box<dyn Provider>>, // local: the providers
    /// The index of the provider that is polled first for the next connection-manager event. After each poll the next provider is first, so
    /// that no provider starves another.
    first: usize,
    /// The providers that the reactor has used, for instance for a connection. Each bit stands for one provider.
    used: u8,
    /// The providers that have carried a connection in shared memory. Each bit stands for one provider.
    in_memory: u8,
    /// The providers that have carried a connection that is not in shared memory. Each bit stands for one provider.
    on_wire: u8,
    /// The number of providers whose connection-manager channels the poller watches. These are the first `watched` providers of the list.
    watched: usize,
}

impl Providers {
    /// Creates the list of the providers of a reactor.
    ///
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

    /// Returns a shared reference to the provider of a device. [`Providers::of_device`] returns a mutable reference.
    pub(crate) fn get_of_device(&self, index: usize) -> &dyn Provider {
        self.get(device_of(index).0)
    }

    /// Records that the reactor uses a provider.
    pub(crate) const fn note_use(&mut self, provider: usize) {
        self.used |= 1 << provider;
    }

    /// Returns the index of the next provider whose connection-manager channel the poller does not watch yet. Returns `None` if the poller
    /// watches the channels of all providers.
    #[inline]
    pub(crate) fn unwatched(&self) -> Option<usize> {
        (self.watched < self.len()).then_some(self.watched)
    }

    /// Records that the poller now watches the channel of the provider whose index [`Providers::unwatched`] has returned.
    pub(crate) const fn note_watched(&mut self) {
        self.watched += 1;
    }

    /// Records that a provider carries an established connection. Returns true if the connection uses shared memory.
    pub(crate) fn note_carried(&mut self, provider: usize, qp: QpId) -> bool {
        let in_memory = self.is_in_memory(provider, qp);
        if in_memory && self.in_memory & 1 << provider == 0 {
            local_log!(Info, "provider {SHARED_MEMORY}: for peers of this host and this user");
        }
        *(if in_memory { &mut self.in_memory } else { &mut self.on_wire }) |= 1 << provider;
        in_memory
    }

    /// Returns true if an established connection uses shared memory.
    pub(crate) fn is_in_memory(&mut self, provider: usize, qp: QpId) -> bool {
        self.numbered(provider).shared_memory().is_some_and(|role| role.is_shared(qp))
    }

    /// Returns the names of the providers that were used so far, separated by `+`. If no provider was used, returns the names of all
    /// providers. If a provider has carried connections in shared memory, [`SHARED_MEMORY`] follows the name of the provider. If the
    /// provider has carried only such connections, [`SHARED_MEMORY`] replaces the name.
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

    /// Returns the index of the provider that the reactor tries for a peer in attempt `nth`, counted from 0. For loopback addresses the
    /// order of the providers is reversed, because the last provider needs no device.
    pub(crate) fn nth_for(&self, peer: IpAddr, nth: usize) -> usize {
        if peer.is_loopback() { self.len() - 1 - nth } else { nth }
    }

    /// Returns the index of the first provider that has a device with this local address. If no provider has such a device, returns the
    /// index of the last provider.
    pub(crate) fn serving(&mut self, local: IpAddr) -> usize {
        let last = self.len() - 1;
        for (index, provider) in self.all[..last].iter_mut().enumerate() {
            match provider.device_at(local) {
                Ok(_) => return index,
                Err(error) => local_log!(Info, "provider {}: not for {local}: {error}", provider.name()),
            }
        }
        last
    }

    /// Returns the index of the first provider that can connect by exchange.
    ///
    /// # Errors
    /// `Unsupported` if no provider can connect by exchange.
    pub(crate) fn exchanging(&mut self) -> rdma_transport::Result<usize> {
        let found = self.all.iter_mut().position(|provider| provider.exchange().is_some());
        let provider = self.get(0).name();
        found.ok_or(rdma_transport::TransportError::Unsupported { provider, feature: EXCHANGE })
    }

    /// Returns the time by which the reactor must call [`Providers::progress`] again; `None` if no provider has a timer.
    #[inline]
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        match &self.all[..] {
            // With one provider, which is the usual case, no search is needed. That saves time, because this function is called several
            // times in each turn.
            [only] => only.next_deadline(),
            all => all.iter().filter_map(|provider| provider.next_deadline()).min(),
        }
    }

    /// Lets each provider transfer data and run its timers. Returns `true` if a provider had more work than its budget for one call allows.
    /// The caller must then call `progress` again.
    pub(crate) fn progress(&mut self, now: Instant, drive: Drive) -> bool {
        let mut more = false;
        for provider in &mut self.all {
            more |= provider.progress(now, drive);
        }
        more
    }

    /// Returns the next event of a connection manager, and the index of the provider of that connection manager. Returns `None` if no
    /// provider has an event.
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

    /// Returns the next event of a device, and the index of the provider of that device. Returns `None` if no device has an event.
    pub(crate) fn next_device_event(&mut self) -> Option<(usize, AsyncEvent)> {
        let next = |provider: &mut Box<dyn Provider>| provider.device_events()?.next_device_event();
        self.all.iter_mut().enumerate().find_map(|(index, provider)| Some((index, next(provider)?)))
    }

    /// Attaches a connect request that another reactor has detached, so that this reactor can accept it. Returns the new id of the request,
    /// and the index of its device. This reactor must have a provider with the same name as the provider that detached the request. If this
    /// reactor has several such providers, one of them must have the index that the detaching provider has in the other reactor. Otherwise
    /// the call fails.
    pub(crate) fn attach(
        &mut self,
        request: Handle<Detached>,
        now: Instant,
    ) -> rdma_transport::Result<(Handle<CmId>, usize)> {
        let Handle { provider: number, id: request } = request;
        let name = request.provider();
        let of_kind: Vec<usize> = (0..self.len()).filter(|&index| self.get(index).name() == name).collect();
        let same = of_kind.iter().copied().find(|&index| index == number || of_kind.len() == 1);
        let provider = same.ok_or(rdma_transport::TransportError::Unsupported { provider: name, feature: HANDOVER })?;
        let (id, device) = role(self.numbered(provider), Provider::handover, HANDOVER)?.attach(request, now)?;
        self.note_use(provider);
        Ok((Handle { provider, id }, device_index(provider, device)))
    }

    /// Returns the number of calls that have acknowledged completion events, for [`crate::CompletionStats::acknowledgements`].
    pub(crate) fn acknowledgements(&self) -> u64 {
        self.iter().filter_map(|provider| Some(provider.adapter()?.acknowledgements())).sum()
    }
}

/// Returns a role of a provider. A role is a trait for a feature that not all providers have.
///
/// # Errors
/// `Unsupported` if the provider does not have the role. The error contains the names of the provider and of the feature.
pub(crate) fn role<'a, T: ?Sized>(
    provider: &'a mut dyn Provider,
    role: impl FnOnce(&'a mut dyn Provider) -> Option<&'a mut T>,
    feature: &'static str,
) -> rdma_transport::Result<&'a mut T> {
    let name = provider.name();
    role(provider).ok_or(rdma_transport::TransportError::Unsupported { provider: name, feature })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rdma_transport::cm::{CmEventKind, ConnectParam};
    use rdma_transport::qp::QpAttr;
    use rdma_transport::{CqAttr, ListenParam, PathOptions};
    use rdma_transport_embedded::iwarp::{Iwarp, IwarpConfig, TcpNet};

    use super::*;
    use crate::seam::poller::{Clock, SystemClock, system_entropy};

    fn embedded() -> Box<dyn Provider> {
        let net = TcpNet::new().expect("the channels");
        Box::new(Iwarp::new(IwarpConfig::default(), net, system_entropy()).expect("good settings"))
    }

    /// Waits until the last provider has an event, and returns its newest event. Drops all older events of that provider, and all events of
    /// the other providers.
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
        let listener = from.listen("127.0.0.1:0".parse().unwrap(), &ListenParam::default()).unwrap();
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
