//! All regions of a reactor, as the reactor knows them: how they are registered, who may reach them, when they go.

use std::sync::Arc;

use crossbeam_channel::Receiver;
use rdma_transport::mr::{Access, MrId, RemoteKey};
use rdma_transport::provider::{DeviceId, Provider};
use rdma_transport::qp::QpId;
use rdma_transport::slab::{Key, Slab};

use super::cells::{Hold, RegionMemory, Users};
use super::material::Material;
use super::region::{Home, Region, RegionOptions, RemoteRegion};
use crate::error::Error;
use crate::id::ConnectionId;
use crate::seam::wake::WakeFlag;

/// What the memory of a region is counted as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Account {
    /// The program's own.
    Program,
    /// A copy of a message that the peer is to fetch.
    Copied,
    /// A message that is being fetched, or was.
    Fetched,
}

/// A region as the reactor knows it.
#[derive(Debug)]
struct Registration {
    region: MrId,
    key: RemoteKey,
    access: Access,
    device: usize,
    users: Arc<Users>,
    /// The peers that may reach it.
    peers: Option<Hold>,
    /// The connection whose peer alone may.
    connection: Option<ConnectionId>,
    timer: Option<Key>,
    len: usize,
    account: Account,
}

/// Where memory is to be registered, and for whom.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Site {
    pub(crate) device: DeviceId,
    /// The connection whose peer gets the rights, if they are not for every peer.
    pub(crate) connection: ConnectionId,
    pub(crate) qp: QpId,
}

/// The rights of peers to a region have ended: what was kept for that moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RightsEnded {
    pub(crate) key: Key,
    /// It would have ended them.
    pub(crate) timer: Option<Key>,
    /// The connection whose peer had them.
    pub(crate) connection: Option<ConnectionId>,
}

/// A region that is gone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Removed {
    pub(crate) rights: Option<RightsEnded>,
    pub(crate) account: Account,
    pub(crate) len: usize,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Registry {
    regions: Slab<Registration>,
    home: Home,
    dropped: Receiver<Key>,
}

impl Registry {
    pub(crate) fn new(wake: Arc<WakeFlag>) -> Self {
        let (sender, dropped) = crossbeam_channel::unbounded();
        Self { regions: Slab::default(), home: Home { dropped: sender, wake }, dropped }
    }

    /// Regions registered now.
    pub(crate) fn len(&self) -> usize {
        self.regions.len()
    }

    /// The way by which regions tell that they were dropped.
    pub(crate) const fn home(&self) -> &Home {
        &self.home
    }

    /// The next region that its owner has dropped.
    pub(crate) fn next_dropped(&mut self) -> Option<Key> {
        let key = self.dropped.try_recv().ok()?;
        if let Some(registration) = self.regions.get(key) {
            registration.users.set_dropped();
        }
        Some(key)
    }

    /// Registers memory.
    pub(crate) fn register(
        &mut self,
        provider: &mut dyn Provider,
        site: &Site,
        material: Material<'_>,
        options: &RegionOptions,
        account: Account,
    ) -> Result<Region, Error> {
        let access = options.access;
        let (registered, bytes, len) = material.register(provider, site.device, access)?;
        let scoped = access.intersects(Access::REMOTE) && !options.any_peer;
        if scoped {
            match provider.restrict(registered.id, site.qp) {
                // The keys of such a device are of a whole protection domain: the key is all that the other peers lack.
                Ok(()) | Err(rdma_transport::Error::Unsupported { .. }) => {}
                Err(error) => {
                    deregister(provider, registered.id);
                    return Err(error.into());
                }
            }
        }
        let mut memory = RegionMemory::new(bytes, len);
        let address = memory.address();
        let device = site.device.0 as usize;
        let key = self.regions.insert(Registration {
            region: registered.id,
            key: registered.remote_key,
            access,
            device,
            users: Arc::clone(memory.users()),
            peers: memory.expose(access),
            connection: scoped.then_some(site.connection),
            timer: None,
            len,
            account,
        });
        let remote = RemoteRegion { address, len: len as u64, key: registered.remote_key.0 };
        Ok(Region::new(memory, key, registered.local_key, remote, device, self.home.clone()))
    }

    /// Has a timer end the rights of peers.
    pub(crate) fn set_timer(&mut self, key: Key, timer: Key) {
        if let Some(registration) = self.regions.get_mut(key) {
            registration.timer = Some(timer);
        }
    }

    /// Whether a region is of this reactor, and still registered.
    pub(crate) fn knows(&self, region: &Region) -> bool {
        region.is_of(&self.home.dropped) && self.regions.get(region.key()).is_some()
    }

    /// Whether the peer of a connection may read a region.
    pub(crate) fn readable_by(&self, key: Key, id: ConnectionId) -> bool {
        self.regions.get(key).is_some_and(|registration| {
            registration.access.contains(Access::REMOTE_READ)
                && registration.peers.is_some()
                && registration.connection.is_none_or(|owner| owner == id)
        })
    }

    /// Takes the rights of peers to a region back; `None` if there are none, or it cannot be done.
    pub(crate) fn revoke(&mut self, provider: &mut dyn Provider, key: Key) -> Option<RightsEnded> {
        let registration = self.regions.get(key).filter(|registration| registration.peers.is_some())?;
        if !cfg!(planted = "rights-outlive-their-end")
            && let Err(error) = provider.invalidate(registration.region)
        {
            // The memory stays counted as written by peers: nobody gets a reference to it any more.
            log::warn!("taking back a remote key: {error}");
            return None;
        }
        self.rights_ended(key)
    }

    /// Nobody but the program reaches a region any more.
    fn rights_ended(&mut self, key: Key) -> Option<RightsEnded> {
        let registration = self.regions.get_mut(key)?;
        // Whether its owner has dropped it is looked at by the caller.
        let _ = registration.peers.take()?.done();
        Some(RightsEnded { key, timer: registration.timer.take(), connection: registration.connection.take() })
    }

    /// A peer's Send with Invalidate has taken a remote key back.
    pub(crate) fn invalidated(&mut self, remote: RemoteKey) -> Option<RightsEnded> {
        let (key, _) = self.regions.iter().find(|(_, registration)| registration.key == remote)?;
        self.rights_ended(key)
    }

    /// Whether a region that its owner has dropped is used by nobody but peers with rights to it.
    pub(crate) fn is_abandoned(&self, key: Key) -> bool {
        self.regions.get(key).is_some_and(|registration| {
            let users = &registration.users;
            users.is_dropped() && !users.operate()
        })
    }

    /// Whether peers may lose their rights to a region that its owner has dropped: no message is to be fetched from it.
    pub(crate) fn is_unwanted(&self, key: Key) -> bool {
        self.regions.get(key).is_some_and(|registration| {
            let users = &registration.users;
            users.is_dropped() && !users.fetch()
        })
    }

    /// Deregisters a region, and only then lets go of what peers could reach.
    pub(crate) fn remove(&mut self, provider: &mut dyn Provider, key: Key) -> Option<Removed> {
        deregister(provider, self.regions.get(key)?.region);
        let rights = self.rights_ended(key);
        let Registration { account, len, .. } = self.regions.remove(key)?;
        Some(Removed { rights, account, len })
    }

    /// The regions on a device.
    pub(crate) fn of_device(&self, device: usize) -> Vec<Key> {
        self.regions.iter().filter(|(_, registration)| registration.device == device).map(|(key, _)| key).collect()
    }
}

fn deregister(provider: &mut dyn Provider, region: MrId) {
    if let Err(error) = provider.deregister(region) {
        log::warn!("deregistering a memory region: {error}");
    }
}
