//! The table of a reactor's regions. It registers memory, knows which peers have rights to it, and deregisters it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crossbeam_channel::Receiver;
use rdma_transport::caps::Features;
use rdma_transport::mem::{Memory, Sharing, page_size};
use rdma_transport::mr::{Access, MemoryRegion, MrId, RemoteKey};
use rdma_transport::provider::Provider;
use rdma_transport::qp::QpId;
use rdma_transport::slab::{Key, Slab};

use super::block_cache::{Block, BlockCache, Purpose};
use super::budget::MemoryUse;
use super::material::{Material, bytes};
use super::region::{DropChannel, Region, RegionOptions, RemoteRegion};
use super::region_memory::{Hold, RegionBytes, RegionMemory, Users};
use crate::error::Error;
use crate::id::ConnectionId;
use crate::providers::{Providers, device_of, role};
use crate::seam::wake::WakeFlag;

/// The rights that let a peer access a region. `READ_SINK` is one of these rights: on some devices, the peer that
/// answers a Read can write to the sink at any time.
const PEERS: Access = Access::REMOTE.union(Access::READ_SINK);

/// The device with which memory is registered, and the connection for which it is registered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegistrationTarget {
    pub(crate) device: usize,
    /// The connection and its queue pair; `None` for a registration without a connection. Only the
    /// peer of this connection gets rights to the region, except if the options grant rights to
    /// every peer.
    pub(crate) connection: Option<(ConnectionId, QpId)>,
}

/// The reactor's entry for one region.
#[derive(Debug)]
struct Registration {
    region: MemoryRegion,
    /// The memory of the region, for a later message to reuse; `None` for a region of the program.
    block: Option<Arc<Memory>>,
    access: Access,
    device: usize,
    users: Arc<Users>,
    /// The hold of the peers that have rights to the region; `None` if no peer has rights, or if the rights were
    /// revoked.
    peers: Option<Hold>,
    /// The connection, if only its peer has rights to the region. `None` if no peer or every peer has rights.
    connection: Option<ConnectionId>,
    timer: Option<Key>,
    /// The number of bytes that are charged to `account`.
    len: usize,
    account: MemoryUse,
    /// The connection for which the region was registered; `None` if it was registered without a connection.
    of: Option<ConnectionId>,
}

impl RegistrationTarget {
    fn connection(&self) -> Option<ConnectionId> {
        self.connection.map(|(id, _)| id)
    }
}

/// The state that the caller cleans up after peers have lost their rights to a region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RightsEnded {
    pub(crate) key: Key,
    /// The timer that would have revoked the rights at the end of the region's lifetime.
    pub(crate) timer: Option<Key>,
    /// The connection, if only its peer had rights to the region. `None` if every peer or no peer had rights.
    pub(crate) connection: Option<ConnectionId>,
}

/// A region that was taken out of the table. The caller needs these fields to return the region's memory to its budget.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Removed {
    pub(crate) rights: Option<RightsEnded>,
    pub(crate) account: MemoryUse,
    pub(crate) len: usize,
    /// The connection for which the region was registered; `None` if it was registered without a connection.
    pub(crate) of: Option<ConnectionId>,
}

/// The regions of a reactor; see the [module](self).
#[derive(Debug)]
pub(crate) struct Registry {
    regions: Slab<Registration>, // bound: large-messages, copies
    /// The regions to which a peer has rights, by device and remote key. This is a map, because a
    /// lookup must be fast: a peer may send any number of Sends with Invalidate, with any key.
    exposed: BTreeMap<(usize, u32), Key>, // bound: large-messages, copies
    kept: BlockCache,
    drop_channel: DropChannel,
    dropped: Receiver<Key>, // bound: large-messages, copies
    /// The number of direct regions. Each keeps the descriptor of its memory file, because peers
    /// may map it later.
    direct: usize, // bound: direct-regions
    /// The number of registrations that a device failed to release.
    unreleased: usize,
    /// The number of times that a device failed to revoke a remote key.
    unrevoked: usize,
}

impl Registry {
    pub(crate) fn new(wake: Arc<WakeFlag>, keep: usize) -> Self {
        let (sender, dropped) = crossbeam_channel::unbounded();
        let drop_channel = DropChannel { dropped: sender, wake };
        Self {
            regions: Slab::default(),
            exposed: BTreeMap::new(),
            kept: BlockCache::new(keep, page_size()),
            drop_channel,
            dropped,
            direct: 0,
            unreleased: 0,
            unrevoked: 0,
        }
    }

    /// Returns the number of regions that are registered now.
    pub(crate) fn len(&self) -> usize {
        self.regions.len()
    }

    /// Returns the number of direct regions that are registered now.
    pub(crate) const fn direct(&self) -> usize {
        self.direct
    }

    /// Returns the number of bytes of the blocks that stay registered for later messages.
    pub(crate) const fn kept(&self) -> usize {
        self.kept.bytes()
    }

    /// Returns the number of registrations that a device failed to release.
    pub(crate) const fn unreleased(&self) -> usize {
        self.unreleased
    }

    /// Returns the number of times that a device failed to revoke a remote key.
    pub(crate) const fn unrevoked(&self) -> usize {
        self.unrevoked
    }

    /// Returns the channel by which regions report to this reactor that they were dropped.
    pub(crate) const fn drop_channel(&self) -> &DropChannel {
        &self.drop_channel
    }

    /// Returns the key of the next region that its owner has dropped; `None` if there is none at the moment.
    pub(crate) fn next_dropped(&mut self) -> Option<Key> {
        let key = self.dropped.try_recv().ok()?;
        if let Some(registration) = self.regions.get(key) {
            registration.users.set_dropped();
        }
        Some(key)
    }

    /// Registers memory of the program, and returns it as a region.
    pub(crate) fn register(
        &mut self,
        providers: &mut Providers,
        target: &RegistrationTarget,
        material: Material<'_>,
        options: &RegionOptions,
    ) -> Result<Region, Error> {
        let (provider, device) = (providers.of_device(target.device), device_of(target.device).1);
        let (registered, bytes, len) = material.register(provider, device, options.access)?;
        let scoped = options.access.intersects(Access::REMOTE) && !options.any_peer;
        if scoped {
            self.restrict(providers, registered.id, target)?;
        }
        let connection = target.connection().filter(|_| scoped);
        Ok(self.add(target, registered, RegionMemory::new(bytes, len), options.access, connection, MemoryUse::Program))
    }

    /// Returns a region for a message that is longer than one buffer. If a kept block fits, reuses the block as the memory of the region,
    /// and returns false as the second value. The memory then contains bytes of an earlier message with the same purpose. Otherwise
    /// registers new memory, and returns true as the second value.
    ///
    /// The message has `len` bytes. The region has `tail` bytes in addition, for the authentication tags of an encrypted message. These
    /// `tail` bytes are not charged to the account.
    pub(crate) fn block(
        &mut self,
        providers: &mut Providers,
        target: &RegistrationTarget,
        (len, tail): (usize, usize),
        account: MemoryUse,
    ) -> Result<(Region, bool), Error> {
        let open_sinks = || {
            let (provider, device) = device_of(target.device);
            let info = providers.get(provider).device(device);
            info.is_some_and(|info| info.capabilities.features.contains(Features::OPEN_READ_SINKS))
        };
        let access = match account {
            MemoryUse::Copied => Access::LOCAL_WRITE | Access::REMOTE_READ,
            _ if open_sinks() => Access::READ_SINK,
            _ => Access::LOCAL_WRITE,
        };
        // If the peer of the target's connection gets rights to the block, the peer learns the
        // block's key, and can use it later. On a device with open sinks, the peer also learns the
        // key of a block that is the target of a Read. So this block is reused only for messages to
        // or from this peer.
        let peer = target.connection().filter(|_| access.intersects(PEERS));
        let purpose = Purpose { device: target.device, account, peer };
        let (memory, registered, fresh) = match self.kept.take(purpose, len + tail) {
            Some(Block { memory, registered, .. }) => (memory, registered, false),
            None => {
                // For a message to a peer on the same host, `reader` is the queue pair that is connected to the peer.
                // Such a peer maps the memory, and copies the message from there.
                let reader = target.connection.map(|(_, qp)| qp).filter(|&qp| {
                    account == MemoryUse::Copied && providers.is_in_memory(device_of(target.device).0, qp)
                });
                let (memory, registered, file) =
                    self.register_block(providers, target, len + tail, (access, reader.is_some()))?;
                if peer.is_some() {
                    self.restrict(providers, registered.id, target)?;
                }
                let role = providers.of_device(target.device).shared_memory();
                if let (Some(qp), Some(file), Some(role)) = (reader, file, role) {
                    role.lend(qp, registered.id, Some(file))?;
                }
                (memory, registered, true)
            }
        };
        // A peer on this host that maps a copy can also write to it.
        let memory =
            if account == MemoryUse::Copied { RegionBytes::Shared(memory) } else { bytes(memory, access, false) };
        let memory = RegionMemory::new(memory, len + tail);
        let region = self.add(target, registered, memory, access, peer, account);
        if let Some(registration) = self.regions.get_mut(region.key()) {
            registration.len = len;
        }
        Ok((region, fresh))
    }

    /// Allocates and registers memory for a message of `len` bytes, with the rights `access`. If `shared` is true, a peer on this host can
    /// map the memory, and the result has the descriptor of its file. If the system permits no such
    /// file, for example because the process has no descriptor left, the memory is private and
    /// there is no descriptor. If the system refuses to allocate or register the memory,
    /// deregisters the blocks that are kept on the device, and tries once more.
    fn register_block(
        &mut self,
        providers: &mut Providers,
        target: &RegistrationTarget,
        len: usize,
        (access, shared): (Access, bool),
    ) -> Result<(Arc<Memory>, MemoryRegion, Option<OwnedFd>), Error> {
        let bytes = self.kept.block_len(len);
        let register = |provider: &mut dyn Provider| -> Result<_, rdma_transport::TransportError> {
            let memory = if shared { new_shared(bytes) } else { Memory::new(bytes) };
            let mut memory = memory.map_err(|source| rdma_transport::TransportError::Memory { bytes, source })?;
            memory.prefer_huge_pages();
            let (file, memory) = (memory.take_file(), Arc::new(memory));
            let registered = provider.register(device_of(target.device).1, &memory, 0..bytes, access)?;
            Ok((memory, registered, file))
        };
        match register(providers.of_device(target.device)) {
            Err(error @ rdma_transport::TransportError::Memory { .. }) if self.kept.bytes() > 0 => {
                log::debug!("{error}: the kept blocks are released");
                self.forget_device(providers, target.device);
                Ok(register(providers.of_device(target.device))?)
            }
            made => Ok(made?),
        }
    }

    /// Adds a registered region to the table, and returns the region.
    fn add(
        &mut self,
        target: &RegistrationTarget,
        registered: MemoryRegion,
        mut memory: RegionMemory,
        access: Access,
        connection: Option<ConnectionId>,
        account: MemoryUse,
    ) -> Region {
        let (device, len, address) = (target.device, memory.len(), memory.address());
        let peers = memory.expose(access);
        let is_exposed = peers.is_some();
        self.direct += usize::from(access.contains(Access::DIRECT));
        let key = self.regions.insert(Registration {
            region: registered,
            block: if account == MemoryUse::Program { None } else { memory.share() },
            access,
            device,
            users: Arc::clone(memory.users()),
            peers,
            connection,
            timer: None,
            len,
            account,
            of: target.connection(),
        });
        if is_exposed {
            self.exposed.insert((device, registered.remote_key.0), key);
        }
        let remote = RemoteRegion { address, len: len as u64, key: registered.remote_key.0 };
        Region::new(memory, key, registered.local_key, remote, device, self.drop_channel.clone())
    }

    /// Stores the timer that will revoke the rights of peers, so that the timer can be cancelled.
    pub(crate) fn set_timer(&mut self, key: Key, timer: Key) {
        if let Some(registration) = self.regions.get_mut(key) {
            registration.timer = Some(timer);
        }
    }

    /// Returns true if a region belongs to this reactor and is still registered.
    pub(crate) fn knows(&self, region: &Region) -> bool {
        region.is_of(&self.drop_channel.dropped) && self.regions.get(region.key()).is_some()
    }

    /// Returns true if only the peer of this connection has rights to a region.
    pub(crate) fn belongs_to(&self, key: Key, id: ConnectionId) -> bool {
        self.regions.get(key).is_some_and(|registration| registration.connection == Some(id))
    }

    /// Returns true if the region has `READ_SINK`, so that it can be the target of an RDMA Read on every device.
    pub(crate) fn is_sink(&self, key: Key) -> bool {
        self.regions.get(key).is_some_and(|registration| registration.access.contains(Access::READ_SINK))
    }

    /// Returns true if the peer of a connection has the right to read a region.
    pub(crate) fn readable_by(&self, key: Key, id: ConnectionId) -> bool {
        self.regions.get(key).is_some_and(|registration| {
            registration.access.contains(Access::REMOTE_READ)
                && registration.peers.is_some()
                && registration.connection.is_none_or(|owner| owner == id)
        })
    }

    /// Revokes the rights of peers to a region. Returns the state that the caller cleans up; `None` if no peer had
    /// rights to the region.
    ///
    /// # Errors
    /// The device failed to revoke the remote key. Peers still count as users of the memory, so the program does not get a reference to the
    /// memory.
    pub(crate) fn revoke(&mut self, providers: &mut Providers, key: Key) -> Result<Option<RightsEnded>, Error> {
        let Some(registration) = self.regions.get(key).filter(|registration| registration.peers.is_some()) else {
            return Ok(None);
        };
        let planted = crate::planted("rights-outlive-their-end");
        let provider = providers.of_device(registration.device);
        let keys = role(provider, Provider::remote_keys, "local invalidation");
        let revoked = if planted { Ok(()) } else { keys.and_then(|keys| keys.invalidate(registration.region.id)) };
        match revoked {
            Err(error) if !crate::planted("a-kept-region-counts-as-released") => {
                local_log!(Error, "revoking a remote key: {error}");
                self.unrevoked += 1;
                Err(error.into())
            }
            _ => Ok(self.rights_ended(key)),
        }
    }

    /// Records that no peer has rights to a region any more. Returns the state that the caller cleans up; `None` if no
    /// peer had rights.
    fn rights_ended(&mut self, key: Key) -> Option<RightsEnded> {
        let peers = self.regions.get_mut(key)?.peers.take()?;
        // The result of `done` says if the owner has dropped the region. The callers of `rights_ended` check that
        // themselves.
        let _ = peers.done();
        self.without_peers(key)
    }

    /// Returns the state that the caller cleans up when peers lose their rights to a region, or when the region is
    /// removed. Removes this state from the region's entry. Returns `None` if there is no such region.
    fn without_peers(&mut self, key: Key) -> Option<RightsEnded> {
        let registration = self.regions.get_mut(key)?;
        // A device that was removed and has returned may have given the remote key to another
        // region.
        let name = (registration.device, registration.region.remote_key.0);
        if self.exposed.get(&name) == Some(&key) {
            self.exposed.remove(&name);
        }
        Some(RightsEnded { key, timer: registration.timer.take(), connection: registration.connection.take() })
    }

    /// Handles a Send with Invalidate: the peer of the connection `by` has revoked the remote key `remote`. If the peer has rights to a
    /// region with this key, revokes them and returns the state that the caller cleans up. Otherwise deregisters the kept block with this
    /// key, if there is one, and returns `None`. Also returns `None` if the device failed to revoke the key.
    ///
    /// A key is unique only on one device. A region to which only the peer of another connection
    /// has rights is not revoked.
    pub(crate) fn invalidated(
        &mut self,
        providers: &mut Providers,
        (device, by): (usize, ConnectionId),
        remote: RemoteKey,
    ) -> Option<RightsEnded> {
        let found = if crate::planted("keys-without-their-device") {
            self.exposed.iter().find(|((_, key), _)| *key == remote.0).map(|(_, &key)| key)
        } else {
            let of_peer = |key: &Key| {
                self.regions
                    .get(*key)
                    .is_some_and(|registration| registration.connection.is_none_or(|owner| owner == by))
            };
            self.exposed.get(&(device, remote.0)).copied().filter(of_peer)
        };
        match found {
            // The local side revokes the key as well, because the peer's message does not prove that the device has
            // invalidated the key.
            Some(key) => self.revoke(providers, key).unwrap_or(None),
            None => {
                let gone = self.kept.take_of_key(device, by, remote);
                self.drop_blocks(providers, gone);
                None
            }
        }
    }

    /// Returns true if the owner has dropped the region and no operation uses it. Peers may still have rights to the
    /// region.
    pub(crate) fn is_abandoned(&self, key: Key) -> bool {
        self.regions.get(key).is_some_and(|registration| {
            let users = &registration.users;
            users.is_dropped() && !users.operate()
        })
    }

    /// Returns true if the owner has dropped the region, and the region contains no message that a peer has yet to
    /// fetch. In that case, the rights of peers can be revoked.
    pub(crate) fn is_unwanted(&self, key: Key) -> bool {
        self.regions.get(key).is_some_and(|registration| {
            let users = &registration.users;
            users.is_dropped() && !users.fetch()
        })
    }

    /// Deregisters a region, and takes it out of the table. Its peers count as users of the memory until the device has deregistered the
    /// region. If the device fails to do so, peers may still reach the memory, so they count as users for ever. Returns `None` if there is
    /// no such region.
    pub(crate) fn remove(&mut self, providers: &mut Providers, key: Key) -> Option<Removed> {
        let Registration { region, device, .. } = self.regions.get(key)?;
        let (region, device) = (region.id, *device);
        let released = self.deregister(providers, device, region);
        let rights = if released { self.rights_ended(key) } else { self.without_peers(key) };
        let Registration { account, len, of, access, .. } = self.regions.remove(key)?;
        self.direct -= usize::from(access.contains(Access::DIRECT));
        Some(Removed { rights, account, len, of })
    }

    /// Takes the region of a finished message out of the table, and keeps its memory for a later message. Returns `None`, and changes
    /// nothing, in these cases:
    ///
    /// - The region is charged to no budget ([`MemoryUse::Program`]).
    /// - The owner has not dropped the region yet, or an operation still uses it.
    /// - The peer has lost its rights to the region, so the key is of no use to a later message.
    pub(crate) fn retire(&mut self, providers: &mut Providers, key: Key) -> Option<Removed> {
        let whole = |registration: &&Registration| {
            let of_its_peer = registration.peers.is_some() && registration.connection.is_some();
            registration.account != MemoryUse::Program && (of_its_peer || !registration.access.intersects(PEERS))
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
        self.drop_blocks(providers, gone);
        Some(Removed { rights, account, len, of })
    }

    /// Deregisters the blocks that are kept for the peer of a connection that has ended.
    pub(crate) fn forget_peer(&mut self, providers: &mut Providers, id: ConnectionId) {
        let gone = self.kept.drop_of_peer(id);
        self.drop_blocks(providers, gone);
    }

    /// Deregisters the blocks that no message has used since the last call.
    pub(crate) fn trim(&mut self, providers: &mut Providers) {
        let gone = self.kept.drop_idle();
        self.drop_blocks(providers, gone);
    }

    /// Deregisters all blocks that are kept on a device, for example because the device is being removed.
    pub(crate) fn forget_device(&mut self, providers: &mut Providers, device: usize) {
        let gone = self.kept.drop_of_device(device);
        self.drop_blocks(providers, gone);
    }

    /// Returns the keys of the regions that are registered with a device.
    pub(crate) fn of_device(&self, device: usize) -> Vec<Key> {
        self.regions.iter().filter(|(_, registration)| registration.device == device).map(|(key, _)| key).collect()
    }

    /// Restricts the rights to a region to the peer of the target's connection, if the device can tell peers apart. If the device fails to
    /// do so, deregisters the region and returns the error.
    fn restrict(&mut self, providers: &mut Providers, region: MrId, target: &RegistrationTarget) -> Result<(), Error> {
        let Some((_, qp)) = target.connection else { return Ok(()) };
        // On a device without the role `remote_keys`, a key is valid for all connections of a protection domain. The
        // only protection from other peers is that they do not know the key.
        let Some(keys) = providers.of_device(target.device).remote_keys() else { return Ok(()) };
        if let Err(error) = keys.restrict(region, qp) {
            self.deregister(providers, target.device, region);
            return Err(error.into());
        }
        Ok(())
    }

    fn drop_blocks(&mut self, providers: &mut Providers, blocks: impl IntoIterator<Item = Block>) {
        for block in blocks {
            self.deregister(providers, block.purpose.device, block.registered.id);
        }
    }

    /// Deregisters a region. Returns true if the device has deregistered it. Otherwise returns false, and the provider
    /// keeps its share of the memory, so that the memory is not freed.
    fn deregister(&mut self, providers: &mut Providers, device: usize, region: MrId) -> bool {
        let released = providers.of_device(device).deregister(region);
        if let Err(error) = &released {
            local_log!(Error, "a memory region stays registered: {error}");
            self.unreleased += 1;
        }
        released.is_ok() || crate::planted("a-kept-region-counts-as-released")
    }
}

/// Allocates memory that a peer on this host can map. If there is memory, but the system permits no
/// file for it, the memory is private: then its bytes are copied for the peer.
fn new_shared(bytes: usize) -> io::Result<Memory> {
    Memory::new_shared(bytes, Sharing::Lent).or_else(|error| match error.kind() {
        io::ErrorKind::OutOfMemory | io::ErrorKind::StorageFull => Err(error),
        _ => {
            log::debug!("a message to a peer of this host is copied: no memory file: {error}");
            Memory::new(bytes)
        }
    })
}

#[cfg(test)]
mod tests {
    use rdma_transport::provider::DeviceId;
    use rdma_transport_embedded::iwarp::{Iwarp, IwarpConfig, TcpNet};

    use super::*;
    use crate::id::ReactorTag;
    use crate::providers::device_index;
    use crate::seam::wake::NoWake;

    /// Returns a device that makes its keys from a fixed seed, so that two such devices use the same keys.
    fn device() -> Iwarp<TcpNet> {
        let mut seed = 7_u32;
        let entropy = move |bytes: &mut [u8]| {
            for byte in bytes {
                seed = seed.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
                *byte = (seed >> 24) as u8;
            }
        };
        Iwarp::new(IwarpConfig::default(), TcpNet::new().unwrap(), Box::new(entropy)).unwrap()
    }

    #[test]
    fn direct_regions_are_counted_while_they_are_registered() {
        let mut providers = Providers::new(vec![Box::new(device())]).unwrap();
        let mut registry = Registry::new(Arc::new(WakeFlag::new(Arc::new(NoWake))), 0);
        let target = RegistrationTarget { device: device_index(0, DeviceId(0)), connection: None };
        let readable = || RegionOptions::new().allow(Access::REMOTE_READ);
        let regions = [readable().direct(), readable().any_peer(), readable().direct()].map(|options| {
            let memory = options.memory(4096).unwrap();
            assert_eq!(memory.file().is_some(), options.direct);
            registry.register(&mut providers, &target, Material::Own(memory, 4096), &options).unwrap()
        });
        let counts = regions.map(|region| {
            let count = registry.direct();
            registry.remove(&mut providers, region.key()).unwrap();
            count
        });
        assert_eq!((counts, registry.direct()), ([2, 1, 1], 0));
    }

    #[test]
    fn a_peer_takes_back_the_key_of_its_device_and_of_nobody_else() {
        let mut providers = Providers::new(vec![Box::new(device()), Box::new(device())]).unwrap();
        let mut registry = Registry::new(Arc::new(WakeFlag::new(Arc::new(NoWake))), 0);
        let [owner, other] = [1, 2].map(|slot| ConnectionId::new(ReactorTag::next(), slot, 0));
        let options = RegionOptions::new().allow(Access::REMOTE_WRITE).any_peer();
        let devices = [0, 1].map(|provider| device_index(provider, DeviceId(0)));
        let [mut first, mut second] = devices.map(|device| {
            let memory = Material::Own(Memory::new(4096).unwrap(), 4096);
            registry
                .register(&mut providers, &RegistrationTarget { device, connection: None }, memory, &options)
                .unwrap()
        });
        let key = RemoteKey(first.remote().key);
        assert_eq!(key.0, second.remote().key);
        assert!(first.bytes_mut().is_none() && second.bytes_mut().is_none(), "peers may write");

        assert!(registry.invalidated(&mut providers, (devices[1], owner), key).is_some());
        assert!(first.bytes_mut().is_none(), "a reference to memory that peers still write");
        assert!(second.bytes_mut().is_some());
        assert!(registry.invalidated(&mut providers, (devices[1], owner), key).is_none(), "once is enough");

        // Now only the peer of `owner` has rights to the first region. A Send with Invalidate from another peer has no
        // effect.
        registry.regions.get_mut(first.key()).unwrap().connection = Some(owner);
        assert!(registry.invalidated(&mut providers, (devices[0], other), key).is_none());
        assert!(first.bytes_mut().is_none());
        assert_eq!(registry.invalidated(&mut providers, (devices[0], owner), key).unwrap().connection, Some(owner));
        assert!(first.bytes_mut().is_some());
    }
}
