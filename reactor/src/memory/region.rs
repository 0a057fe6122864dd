//! Registered memory of the program (regions), the options of a region, and the description with which peers access a
//! region.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Sender;
use rdma_transport::mem::{Memory, Sharing};
use rdma_transport::mr::{Access, LocalKey, RemoteKey};
use rdma_transport::slab::Key;
use rdma_transport::wr::{RemoteAddress, Sge};

use super::region_memory::{CopyRefused, Hold, Lease, RegionMemory};
use crate::seam::wake::WakeFlag;

/// The options of a region, for [`crate::RegionContext::register`] and similar methods.
#[derive(Clone, Debug)]
pub struct RegionOptions {
    pub(crate) access: Access,
    pub(crate) any_peer: bool,
    pub(crate) direct: bool,
    pub(crate) lifetime: Option<Duration>,
}

impl Default for RegionOptions {
    fn default() -> Self {
        Self { access: Access::LOCAL_WRITE, any_peer: false, direct: false, lifetime: None }
    }
}

impl RegionOptions {
    /// Creates options that give peers no rights. Local operations may always read and write the memory.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives the peer these rights: to read, to write, or to do atomic operations. No right implies another one.
    /// `LOCAL_WRITE` is always granted.
    ///
    /// On devices with `Features::OPEN_READ_SINKS`, such as iWARP adapters, the target of an RDMA Read must be a region with
    /// `Access::READ_SINK`. The program can copy the bytes of such a region, but can never borrow them, on any device.
    #[must_use]
    pub const fn allow(mut self, access: Access) -> Self {
        self.access = self.access.union(access);
        self
    }

    /// Grants the rights of [`RegionOptions::allow`] to every peer that is or will be connected through the device.
    /// Without this option, only the peer of the connection for which the region is registered has the rights, until
    /// the connection ends. Some devices cannot tell connections apart (the embedded provider can). On such a device,
    /// any peer that has obtained the remote key can use the rights.
    #[must_use]
    pub const fn any_peer(mut self) -> Self {
        self.any_peer = true;
        self
    }

    /// Lets peers on this host map the memory of the region. These peers access the memory
    /// directly, without the device, as far as the rights of the region allow. This option grants
    /// these rights to every peer. Peers on other hosts access the region through the device. If
    /// peers may write the region, or change it by atomic operations, only the first peer that maps
    /// it accesses it directly, and all others through the device. The option has four
    /// consequences:
    ///
    /// - A peer **keeps the pages** that it has mapped until the memory is freed. So
    ///   [`RegionContext::revoke`](crate::RegionContext::revoke) and [`RegionOptions::lifetime`]
    ///   have no effect.
    /// - The program can copy the bytes, but never borrow them.
    /// - The region keeps a descriptor open ([`crate::MemoryStats::direct_regions`]).
    /// - The region must allocate the memory itself, in
    ///   [`RegionContext::register`](crate::RegionContext::register) or
    ///   [`RegionContext::register_at`](crate::RegionContext::register_at).
    ///
    /// Only the embedded provider has such regions.
    #[must_use]
    pub const fn direct(mut self) -> Self {
        (self.direct, self.any_peer) = (true, true);
        self.access = self.access.union(Access::DIRECT);
        self
    }

    /// Allocates the memory for a region of `len` bytes with these options.
    pub(crate) fn memory(&self, len: usize) -> Result<Memory, rdma_transport::TransportError> {
        let writes = self.access.intersects(Access::REMOTE_WRITE.union(Access::REMOTE_ATOMIC));
        let made = match self.direct {
            true => Memory::new_shared(len, if writes { Sharing::Write } else { Sharing::Read }),
            false => Memory::new(len),
        };
        made.map_err(|source| rdma_transport::TransportError::Memory { bytes: len, source })
    }

    /// Limits the time for which peers have rights to the region: the reactor revokes the rights when `lifetime` has
    /// passed since the registration.
    #[must_use]
    pub const fn lifetime(mut self, lifetime: Duration) -> Self {
        self.lifetime = Some(lifetime);
        self
    }
}

/// The description of a region, or of a part of a region, with which a peer can access it. The program sends the
/// description to the peer as data, encoded by [`RemoteRegion::to_bytes`] or in any other form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRegion {
    /// The virtual address of the first byte, in the process that owns the region. In iWARP this is the tagged offset.
    pub address: u64,
    /// The length of the described region or part, in bytes. The local reactor refuses an operation beyond this length
    /// before it posts anything. The device of the region's owner checks each access, too.
    pub len: u64,
    /// The remote key of the region. In iWARP this is the STag.
    pub key: u32,
}

impl RemoteRegion {
    /// The length of an encoded description ([`RemoteRegion::to_bytes`]), in bytes.
    pub const LEN: usize = 20;

    /// Encodes the description in 20 bytes: `address:8 | len:8 | key:4`, each little-endian.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..8].copy_from_slice(&self.address.to_le_bytes());
        out[8..16].copy_from_slice(&self.len.to_le_bytes());
        out[16..].copy_from_slice(&self.key.to_le_bytes());
        out
    }

    /// Decodes a description from the first [`RemoteRegion::LEN`] bytes. Returns `None` if there are fewer bytes, or if
    /// the region would extend beyond the largest address.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (address, rest) = bytes.split_first_chunk()?;
        let (len, rest) = rest.split_first_chunk()?;
        let key = u32::from_le_bytes(*rest.first_chunk()?);
        let (address, len) = (u64::from_le_bytes(*address), u64::from_le_bytes(*len));
        address.checked_add(len)?;
        Some(Self { address, len, key })
    }

    /// Returns the description of a part: `len` bytes from `offset` on. Returns `None` if the part is not inside this
    /// region.
    ///
    /// Example: [`Region`].
    #[must_use]
    pub const fn part(self, offset: u64, len: u64) -> Option<Self> {
        match (offset.checked_add(len), self.address.checked_add(offset)) {
            (Some(end), Some(address)) if end <= self.len => Some(Self { address, len, key: self.key }),
            _ => None,
        }
    }

    pub(crate) const fn address(self) -> RemoteAddress {
        RemoteAddress { address: self.address, key: RemoteKey(self.key) }
    }
}

/// Memory that is registered with a device. It is the source or target of one-sided operations, and of sends without a
/// copy.
///
/// The program can borrow the bytes ([`Region::bytes`]) while no local operation writes to them and no peer has the
/// right to write. The program can always copy bytes out. Such a copy may mix old and new bytes if an operation or a
/// peer writes at the same time. The program cannot copy into bytes that a local operation uses ([`Lent`]). A region
/// can be dropped at any time, on any thread. The reactor deregisters a dropped region when the last operation on it
/// has ended.
///
/// ```
/// use rdma_reactor::{Config, ProviderChoice, Reactor, RegionOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
/// let mut region = reactor.context().regions().register_at("127.0.0.1".parse()?, 64, &RegionOptions::new())?;
/// region.copy_from(8, b"bytes")?;
/// region.store(0, 42)?;
/// let mut out = [0; 5];
/// region.copy_to(8, &mut out);
/// assert_eq!((region.load(0), &out), (42, b"bytes"));
/// // No peer may write, and no operation is in progress.
/// assert!(region.bytes().is_some_and(|bytes| bytes[8..13] == *b"bytes"));
/// // The second half, as a peer would know it.
/// assert_eq!(region.remote().part(32, 32).map(|part| part.len), Some(32));
/// # Ok(())
/// # }
/// ```
pub struct Region {
    memory: RegionMemory,
    /// The key of the region in the reactor's table of regions.
    key: Key,
    local_key: LocalKey,
    remote: RemoteRegion,
    /// The index of the device with which the region is registered.
    device: usize,
    drop_channel: DropChannel,
}

/// The channel by which a dropped region notifies its reactor, so that the reactor deregisters it.
#[derive(Clone, Debug)]
pub(crate) struct DropChannel {
    pub(crate) dropped: Sender<Key>,
    pub(crate) wake: Arc<WakeFlag>,
}

/// The error of an attempt to change bytes of a region that an unfinished operation uses. The program can try again
/// after the callback that reports the end of the operation: `on_send_complete`, `on_transfer` or `on_landed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("these bytes are lent to an operation: wait for its on_send_complete")]
pub struct Lent;

impl Region {
    pub(crate) const fn new(
        memory: RegionMemory,
        key: Key,
        local_key: LocalKey,
        remote: RemoteRegion,
        device: usize,
        drop_channel: DropChannel,
    ) -> Self {
        Self { memory, key, local_key, remote, device, drop_channel }
    }

    /// Returns the length of the region, in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.memory.len()
    }

    /// Always returns `false`: a region has at least one byte.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.memory.len() == 0
    }

    /// Returns the description of the region for a peer. The peer has the rights with which the region was registered,
    /// until these rights end.
    #[must_use]
    pub const fn remote(&self) -> RemoteRegion {
        self.remote
    }

    /// Returns the bytes of the region. Returns `None` while an operation or a peer may write to the bytes. Always
    /// returns `None` for the following regions, because their bytes may change at any time:
    ///
    /// - memory that the program shares ([`crate::RegionContext::register_memory`]) and dma-bufs
    ///   ([`crate::RegionContext::register_dmabuf`]);
    /// - regions with `Access::READ_SINK` or [`RegionOptions::direct`];
    /// - regions to which peers may write, on devices with `Features::LATE_PLACEMENT`.
    #[must_use]
    pub fn bytes(&self) -> Option<&[u8]> {
        self.memory.bytes()
    }

    /// Returns the bytes of the region, for writing. Returns `None` while an operation or a peer may read or write the bytes. Always
    /// returns `None` for those regions for which [`Region::bytes`] always returns `None`.
    #[must_use]
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        self.memory.bytes_mut()
    }

    /// Copies bytes of the region, from `offset` on, to `out`. The copy may mix old and new bytes if an operation or a
    /// peer writes at the same time.
    ///
    /// Example: [`Region`].
    ///
    /// # Panics
    /// If the range is not inside the region, as with slices, or if the region is a dma-buf.
    #[track_caller]
    pub fn copy_to(&self, offset: usize, out: &mut [u8]) {
        assert!(self.memory.copy_to(offset, out), "{} bytes at {offset} of a region of {}", out.len(), self.len());
    }

    /// Copies bytes like [`Region::copy_to`], without a panic. Returns true if the bytes were copied. Returns false if
    /// the range is not inside the region, or if the region is a dma-buf.
    pub(crate) fn try_copy_to(&self, offset: usize, out: &mut [u8]) -> bool {
        self.memory.copy_to(offset, out)
    }

    /// Copies `bytes` into the region, to `offset` and the following bytes. A peer that reads at the same time may see
    /// a mixture of old and new bytes.
    ///
    /// Example: [`Region`].
    ///
    /// # Errors
    /// [`Lent`] if an operation uses some of these bytes. In that case, nothing was copied.
    ///
    /// # Panics
    /// If the range is not inside the region, as with slices, or if the region is a dma-buf.
    #[track_caller]
    pub fn copy_from(&mut self, offset: usize, bytes: &[u8]) -> Result<(), Lent> {
        match self.memory.copy_from(offset, bytes) {
            Ok(()) => Ok(()),
            Err(CopyRefused::Lent) => Err(Lent),
            // This is no closure, because the panic would then report the closure as its
            // location, and not the caller.
            Err(CopyRefused::Outside) => panic!("{} bytes at {offset} of a region of {}", bytes.len(), self.len()),
        }
    }

    /// Returns the 8 bytes at an offset as a number in native byte order. The 8 bytes are read atomically.
    ///
    /// # Panics
    /// If the offset is not a multiple of 8, if the 8 bytes are not inside the region, or if the region is a dma-buf.
    #[must_use]
    #[track_caller]
    pub fn load(&self, offset: usize) -> u64 {
        match self.memory.load(offset) {
            Some(word) => word,
            None => panic!("a word at {offset} of a region of {}", self.len()),
        }
    }

    /// Writes a number to the 8 bytes at an offset, in native byte order. The write is atomic, and takes effect after
    /// all earlier writes of this thread to the region.
    ///
    /// Example: [`Region`].
    ///
    /// # Errors
    /// [`Lent`] if an operation uses some of these bytes. In that case, nothing was written.
    ///
    /// # Panics
    /// If the offset is not a multiple of 8, if the 8 bytes are not inside the region, or if the region is a dma-buf.
    #[track_caller]
    pub fn store(&mut self, offset: usize, value: u64) -> Result<(), Lent> {
        match self.memory.store(offset, value) {
            Ok(()) => Ok(()),
            Err(CopyRefused::Lent) => Err(Lent),
            Err(CopyRefused::Outside) => panic!("a word at {offset} of a region of {}", self.len()),
        }
    }

    /// Replaces memory that is not [`RegionBytes::Own`](super::region_memory::RegionBytes::Own) with a copy that only the program can
    /// access. Operations cannot use the copy, because it is not registered. Does nothing if the memory belongs to this region alone.
    pub(crate) fn make_private(&mut self) -> io::Result<()> {
        if let Some(copy) = self.memory.private_copy()? {
            (self.memory, self.device) = (copy, usize::MAX);
        }
        Ok(())
    }

    /// Returns true if the memory does not belong to this region alone: others may change it at any time, so the program
    /// never gets a reference to it. See [`RegionMemory::is_shared`].
    pub(crate) fn is_open(&self) -> bool {
        self.memory.is_shared()
    }

    /// Returns a part of the bytes, for writing; see [`RegionMemory::part_mut`].
    pub(crate) fn part_mut(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        self.memory.part_mut(range)
    }

    /// Shortens the region to its first `len` bytes. The memory stays registered.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.memory.truncate(len);
        self.remote.len = self.memory.len() as u64;
    }

    pub(crate) const fn key(&self) -> Key {
        self.key
    }

    pub(crate) const fn device(&self) -> usize {
        self.device
    }

    /// Returns true if `dropped` is the channel to which this region sends its key when it is dropped. Each reactor has
    /// one such channel, so the region belongs to the reactor of this channel.
    pub(crate) fn is_of(&self, dropped: &Sender<Key>) -> bool {
        self.drop_channel.dropped.same_channel(dropped)
    }

    /// Returns true if peers still have rights to the memory.
    pub(crate) fn is_exposed(&self) -> bool {
        self.memory.users().peers_may()
    }

    /// Lends a range to a work request that reads it; see [`RegionMemory::lend`].
    #[inline]
    pub(crate) fn lend(&self, range: Range<usize>) -> Option<(Sge, Hold)> {
        self.memory.lend(range, self.local_key)
    }

    /// Returns the scatter/gather entry of a range, without a hold on the region; see [`RegionMemory::entry`].
    #[inline]
    pub(crate) fn entry(&self, range: Range<usize>) -> Option<Sge> {
        self.memory.entry(range, self.local_key)
    }

    /// Lends a range to a work request that writes to it; see [`RegionMemory::lend_mut`].
    pub(crate) fn lend_mut(&mut self, range: Range<usize>) -> Option<(Sge, Hold)> {
        self.memory.lend_mut(range, self.local_key)
    }

    /// Leases a range to a list of work requests that read it; see [`RegionMemory::lease`].
    pub(crate) fn lease(&self, range: Range<usize>) -> Option<Lease> {
        self.memory.lease(range, self.local_key)
    }

    /// Leases a range to a list of work requests that write to it; see [`RegionMemory::lease_mut`].
    pub(crate) fn lease_mut(&mut self, range: Range<usize>) -> Option<Lease> {
        self.memory.lease_mut(range, self.local_key)
    }

    /// Holds a range from which a peer will fetch a message; see [`RegionMemory::lend_to_peer`].
    pub(crate) fn lend_to_peer(&self, range: Range<usize>) -> Hold {
        self.memory.lend_to_peer(range)
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} bytes at {:#x})", self.len(), self.remote.address)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // If sending fails, the reactor was dropped, and has deregistered the region.
        if self.drop_channel.dropped.send(self.key).is_ok() {
            self.drop_channel.wake.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_survives_the_trip_and_has_parts() {
        let region = RemoteRegion { address: 0x7f00_1234_5678, len: 1000, key: 0xdead_beef };
        assert_eq!(RemoteRegion::from_bytes(&region.to_bytes()), Some(region));
        assert_eq!(RemoteRegion::from_bytes(&region.to_bytes()[..19]), None);
        let part = region.part(900, 100).unwrap();
        assert_eq!((part.address, part.len, part.key), (region.address + 900, 100, region.key));
        assert!(region.part(1000, 0).is_some());
        assert!(region.part(901, 100).is_none() && region.part(u64::MAX, 2).is_none());
        let wraps = RemoteRegion { address: u64::MAX, len: 2, key: 1 };
        assert_eq!(RemoteRegion::from_bytes(&wraps.to_bytes()), None);
        assert!(wraps.part(0, 1).is_some() && wraps.part(1, 1).is_none());
    }
}
