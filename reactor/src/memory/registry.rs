//! All regions of a reactor, as the reactor knows them: how they are registered, who may reach them, when they go.

use std::sync::Arc;

use crossbeam_channel::Receiver;
use rdma_transport::caps::Features;
use rdma_transport::mem::Memory;
use rdma_transport::mr::{Access, MemoryRegion, MrId, RemoteKey};
use rdma_transport::provider::{DeviceId, Provider};
use rdma_transport::qp::QpId;
use rdma_transport::slab::{Key, Slab};

use super::budget::Account;
use super::cells::{Hold, RegionMemory, Users};
use super::kept::{Block, Kept, Purpose};
use super::material::{Material, bytes};
use super::region::{Home, Region, RegionOptions, RemoteRegion};
use crate::error::Error;
use crate::id::ConnectionId;
use crate::seam::wake::WakeFlag;

/// The rights by which a peer can reach a region. A sink of Reads is open to the peer that answers them.
const PEERS: Access = Access::REMOTE.union(Access::READ_SINK);

/// A region as the reactor knows it.
#[derive(Debug)]
struct Registration {
    region: MemoryRegion,
    /// The memory, if it is kept for other messages afterwards.
    block: Option<Arc<Memory>>,
    access: Access,
    device: usize,
    users: Arc<Users>,
    /// The peers that may reach it.
    peers: Option<Hold>,
    /// The connection whose peer alone may.
    connection: Option<ConnectionId>,
    timer: Option<Key>,
    /// What it counts for in its account, bytes.
    len: usize,
    account: Account,
    /// The connection that it was registered for.
    of: Option<ConnectionId>,
}

/// Where memory is to be registered, and for whom.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Site {
    pub(crate) device: DeviceId,
    /// The connection whose peer gets the rights, if they are not for every peer, and its queue pair.
    pub(crate) connection: Option<(ConnectionId, QpId)>,
}

impl Site {
    fn connection(&self) -> Option<ConnectionId> {
        self.connection.map(|(id, _)| id)
    }
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
    /// The connection that it was registered for.
    pub(crate) of: Option<ConnectionId>,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Registry {
    regions: Slab<Registration>,
    kept: Kept,
    home: Home,
    dropped: Receiver<Key>,
}

impl Registry {
    pub(crate) fn new(wake: Arc<WakeFlag>, keep: usize) -> Self {
        let (sender, dropped) = crossbeam_channel::unbounded();
        Self { regions: Slab::default(), kept: Kept::new(keep), home: Home { dropped: sender, wake }, dropped }
    }

    /// Regions registered now.
    pub(crate) fn len(&self) -> usize {
        self.regions.len()
    }

    /// Bytes that are registered for messages past one buffer, and that none of them has now.
    pub(crate) const fn kept(&self) -> usize {
        self.kept.bytes()
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

    /// Registers memory of the program.
    pub(crate) fn register(
        &mut self,
        provider: &mut dyn Provider,
        site: &Site,
        material: Material<'_>,
        options: &RegionOptions,
    ) -> Result<Region, Error> {
        let (registered, bytes, len) = material.register(provider, site.device, options.access)?;
        let scoped = options.access.intersects(Access::REMOTE) && !options.any_peer;
        if scoped {
            restrict(provider, registered.id, site)?;
        }
        let connection = site.connection().filter(|_| scoped);
        Ok(self.add(site, registered, RegionMemory::new(bytes, len), options.access, connection, Account::Program))
    }

    /// Memory for a message past one buffer, and whether it had to be registered. It may hold what an earlier message of the
    /// same purpose has left. Behind the message there is room for the `tail` of a sealed one, which the region includes and its
    /// account does not.
    pub(crate) fn block(
        &mut self,
        provider: &mut dyn Provider,
        site: &Site,
        (len, tail): (usize, usize),
        account: Account,
    ) -> Result<(Region, bool), Error> {
        let open_sinks = || {
            let info = provider.device(site.device);
            info.is_some_and(|info| info.capabilities.features.contains(Features::OPEN_READ_SINKS))
        };
        let access = match account {
            Account::Copied => Access::LOCAL_WRITE | Access::REMOTE_READ,
            _ if open_sinks() => Access::READ_SINK,
            _ => Access::LOCAL_WRITE,
        };
        // A peer learns the key of an open sink from the Read that it answers.
        let peer = site.connection().filter(|_| access.intersects(PEERS));
        let purpose = Purpose { device: site.device.0 as usize, account, peer };
        let (memory, registered, fresh) = match self.kept.take(purpose, len + tail) {
            Some(Block { memory, registered, .. }) => (memory, registered, false),
            None => {
                let (memory, registered) = self.register_block(provider, site, len + tail, access)?;
                if peer.is_some() {
                    restrict(provider, registered.id, site)?;
                }
                (memory, registered, true)
            }
        };
        let memory = RegionMemory::new(bytes(memory, access), len + tail);
        let region = self.add(site, registered, memory, access, peer, account);
        if let Some(registration) = self.regions.get_mut(region.key()) {
            registration.len = len;
        }
        Ok((region, fresh))
    }

    /// Registers memory for a message of `len` bytes. If there is none, what was kept on the device goes first.
    fn register_block(
        &mut self,
        provider: &mut dyn Provider,
        site: &Site,
        len: usize,
        access: Access,
    ) -> Result<(Arc<Memory>, MemoryRegion), Error> {
        let bytes = self.kept.block_len(len);
        let register = |provider: &mut dyn Provider| -> Result<_, rdma_transport::Error> {
            let memory = Memory::new(bytes).map_err(|source| rdma_transport::Error::Memory { bytes, source })?;
            memory.prefer_huge_pages();
            let memory = Arc::new(memory);
            let registered = provider.register_range(site.device, &memory, 0..bytes, access)?;
            Ok((memory, registered))
        };
        match register(provider) {
            Err(error @ rdma_transport::Error::Memory { .. }) if self.kept.bytes() > 0 => {
                log::debug!("{error}: what was kept is given back");
                drop_blocks(provider, self.kept.drop_of_device(site.device.0 as usize));
                Ok(register(provider)?)
            }
            made => Ok(made?),
        }
    }

    /// Adds what was registered.
    fn add(
        &mut self,
        site: &Site,
        registered: MemoryRegion,
        mut memory: RegionMemory,
        access: Access,
        connection: Option<ConnectionId>,
        account: Account,
    ) -> Region {
        let (device, len, address) = (site.device.0 as usize, memory.len(), memory.address());
        let key = self.regions.insert(Registration {
            region: registered,
            block: if account == Account::Program { None } else { memory.share() },
            access,
            device,
            users: Arc::clone(memory.users()),
            peers: memory.expose(access),
            connection,
            timer: None,
            len,
            account,
            of: site.connection(),
        });
        let remote = RemoteRegion { address, len: len as u64, key: registered.remote_key.0 };
        Region::new(memory, key, registered.local_key, remote, device, self.home.clone())
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

    /// Whether a region is for the peer of a connection alone.
    pub(crate) fn belongs_to(&self, key: Key, id: ConnectionId) -> bool {
        self.regions.get(key).is_some_and(|registration| registration.connection == Some(id))
    }

    /// Whether a region may be read into on every device.
    pub(crate) fn is_sink(&self, key: Key) -> bool {
        self.regions.get(key).is_some_and(|registration| registration.access.contains(Access::READ_SINK))
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
            && let Err(error) = provider.invalidate(registration.region.id)
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
    pub(crate) fn invalidated(&mut self, provider: &mut dyn Provider, remote: RemoteKey) -> Option<RightsEnded> {
        let found = self.regions.iter().find(|(_, registration)| registration.region.remote_key == remote);
        if let Some((key, _)) = found {
            return self.rights_ended(key);
        }
        drop_blocks(provider, self.kept.drop_of_key(remote));
        None
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
        deregister(provider, self.regions.get(key)?.region.id);
        let rights = self.rights_ended(key);
        let Registration { account, len, of, .. } = self.regions.remove(key)?;
        Some(Removed { rights, account, len, of })
    }

    /// Keeps the memory of a message past one buffer for the next one. `None` if it is something else, somebody uses it still,
    /// or the peer has lost its right to it.
    pub(crate) fn retire(&mut self, provider: &mut dyn Provider, key: Key) -> Option<Removed> {
        let whole = |registration: &&Registration| {
            let of_its_peer = registration.peers.is_some() && registration.connection.is_some();
            registration.account != Account::Program && (of_its_peer || !registration.access.intersects(PEERS))
        };
        let unused = |registration: &&Registration| registration.users.is_dropped() && !registration.users.operate();
        let registration = self.regions.get_mut(key).filter(|it| whole(&&**it) && unused(&&**it))?;
        let memory = registration.block.take()?;
        let (registered, device, account) = (registration.region, registration.device, registration.account);
        let purpose = Purpose { device, account, peer: registration.connection };
        let rights = self.rights_ended(key);
        let Registration { len, of, .. } = self.regions.remove(key)?;
        let mut gone = Vec::new();
        self.kept.keep(memory, registered, purpose, &mut gone);
        drop_blocks(provider, gone);
        Some(Removed { rights, account, len, of })
    }

    /// The peer of a connection is gone: so is what was kept for it.
    pub(crate) fn forget_peer(&mut self, provider: &mut dyn Provider, id: ConnectionId) {
        drop_blocks(provider, self.kept.drop_of_peer(id));
    }

    /// Gives back what was kept and not used since the last call.
    pub(crate) fn trim(&mut self, provider: &mut dyn Provider) {
        drop_blocks(provider, self.kept.drop_idle());
    }

    /// A device is going: nothing is kept on it.
    pub(crate) fn forget_device(&mut self, provider: &mut dyn Provider, device: usize) {
        drop_blocks(provider, self.kept.drop_of_device(device));
    }

    /// The regions on a device.
    pub(crate) fn of_device(&self, device: usize) -> Vec<Key> {
        self.regions.iter().filter(|(_, registration)| registration.device == device).map(|(key, _)| key).collect()
    }
}

/// Lets only the peer of the site's connection use a region, where the provider can tell peers apart. If that fails, the region
/// goes.
fn restrict(provider: &mut dyn Provider, region: MrId, site: &Site) -> Result<(), Error> {
    let Some((_, qp)) = site.connection else { return Ok(()) };
    match provider.restrict(region, qp) {
        // The keys of such a device are of a whole protection domain: the key is all that the other peers lack.
        Ok(()) | Err(rdma_transport::Error::Unsupported { .. }) => Ok(()),
        Err(error) => {
            deregister(provider, region);
            Err(error.into())
        }
    }
}

fn drop_blocks(provider: &mut dyn Provider, blocks: Vec<Block>) {
    for block in blocks {
        deregister(provider, block.registered.id);
    }
}

fn deregister(provider: &mut dyn Provider, region: MrId) {
    if let Err(error) = provider.deregister(region) {
        log::warn!("deregistering a memory region: {error}");
    }
}
