//! Registered memory of the program, and its description for peers.

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

/// The options of a registration: see [`crate::Context::register`].
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
    /// Creates options without rights for peers: memory for local operations, which may always read and write it.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets the peer read, write or do atomic operations. No right implies another one; `LOCAL_WRITE` is always
    /// granted.
    ///
    /// A region that is read into needs `Access::READ_SINK` on devices with `Features::OPEN_READ_SINKS`, which iWARP adapters
    /// have. The bytes of such a region can be copied and not borrowed, on every device.
    #[must_use]
    pub const fn allow(mut self, access: Access) -> Self {
        self.access = self.access.union(access);
        self
    }

    /// Grants these rights to every peer on the device, now and later. Without this, only the peer of the one
    /// connection has them, if the device can tell connections apart (the embedded provider can), and they end with the
    /// connection.
    #[must_use]
    pub const fn any_peer(mut self) -> Self {
        self.any_peer = true;
        self
    }

    /// Lets peers of this host map the memory, and read and write it without the local processor, by the rights that every peer gets. Such
    /// a peer **keeps the pages**: the rights cannot be revoked, so [`Context::revoke`](crate::Context::revoke) and
    /// [`RegionOptions::lifetime`] have no effect, and the peer can reach the contents until the memory is freed. The bytes can be copied
    /// and not borrowed. Other peers use the region like any other. The memory must be allocated by the region
    /// ([`Context::register`](crate::Context::register) and [`Context::register_at`](crate::Context::register_at) do that). Only the
    /// embedded provider has such regions.
    #[must_use]
    pub const fn direct(mut self) -> Self {
        (self.direct, self.any_peer) = (true, true);
        self.access = self.access.union(Access::DIRECT);
        self
    }

    /// Allocates memory for `len` bytes of a region with these options.
    pub(crate) fn memory(&self, len: usize) -> Result<Memory, rdma_transport::Error> {
        let writes = self.access.intersects(Access::REMOTE_WRITE.union(Access::REMOTE_ATOMIC));
        let made = match self.direct {
            true => Memory::new_shared(len, if writes { Sharing::Write } else { Sharing::Read }),
            false => Memory::new(len),
        };
        made.map_err(|source| rdma_transport::Error::Memory { bytes: len, source })
    }

    /// Revokes the rights after this time.
    #[must_use]
    pub const fn lifetime(mut self, lifetime: Duration) -> Self {
        self.lifetime = Some(lifetime);
        self
    }
}

/// The description of a region, or of a part of it, with which a peer can read or write there. Send it as data, as
/// [`RemoteRegion::to_bytes`] or in any other form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRegion {
    /// The virtual address in the peer (the tagged offset of iWARP).
    pub address: u64,
    /// The length, in bytes. It is checked locally before anything is sent, and always by the peer's device.
    pub len: u64,
    /// The remote key (the STag of iWARP).
    pub key: u32,
}

impl RemoteRegion {
    /// The length of [`RemoteRegion::to_bytes`], in bytes.
    pub const LEN: usize = 20;

    /// Encodes the description: `address:8 | len:8 | key:4`, little-endian.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..8].copy_from_slice(&self.address.to_le_bytes());
        out[8..16].copy_from_slice(&self.len.to_le_bytes());
        out[16..].copy_from_slice(&self.key.to_le_bytes());
        out
    }

    /// Decodes the first [`RemoteRegion::LEN`] bytes. Returns `None` if there are fewer, or the region would wrap
    /// around.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (address, rest) = bytes.split_first_chunk()?;
        let (len, rest) = rest.split_first_chunk()?;
        let key = u32::from_le_bytes(*rest.first_chunk()?);
        let (address, len) = (u64::from_le_bytes(*address), u64::from_le_bytes(*len));
        address.checked_add(len)?;
        Some(Self { address, len, key })
    }

    /// Returns a part of it. `None` if that is not inside.
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

/// Memory registered with a device: source and target of one-sided operations, and of sends without a copy.
///
/// The bytes can be borrowed while no one else may write them: no local operation writes them, and no peer has the
/// right to. They can always be copied out; a copy that overlaps with an operation or a peer's write may mix old and
/// new bytes. Copies into bytes that a local operation uses are refused ([`Lent`]). Dropping a region, on any thread,
/// deregisters it when its last operation has ended.
///
/// ```
/// use rdma_reactor::{Config, ProviderChoice, Reactor, RegionOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
/// let mut region = reactor.context().register_at("127.0.0.1".parse()?, 64, &RegionOptions::new())?;
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
    /// Its key in the reactor's tables.
    key: Key,
    local_key: LocalKey,
    remote: RemoteRegion,
    /// The index of its device.
    device: usize,
    drop_channel: DropChannel,
}

/// The channel by which a region notifies its reactor when it is dropped.
#[derive(Clone, Debug)]
pub(crate) struct DropChannel {
    pub(crate) dropped: Sender<Key>,
    pub(crate) wake: Arc<WakeFlag>,
}

/// An operation that has not ended uses these bytes: wait for its `on_send_complete`.
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

    /// Returns the length, in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.memory.len()
    }

    /// Always returns `false`: a region has at least one byte.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.memory.len() == 0
    }

    /// Returns its description for a peer. A peer can use it only with the rights that the region was registered with,
    /// until they end.
    #[must_use]
    pub const fn remote(&self) -> RemoteRegion {
        self.remote
    }

    /// Returns the bytes. `None` while an operation or a peer may write them, and always if others share the memory
    /// ([`crate::Context::register_memory`], [`crate::Context::register_dmabuf`], `Access::READ_SINK`).
    #[must_use]
    pub fn bytes(&self) -> Option<&[u8]> {
        self.memory.bytes()
    }

    /// Returns the bytes, to change. `None` while an operation or a peer may read or write them, and if [`Region::bytes`] never lends them.
    #[must_use]
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        self.memory.bytes_mut()
    }

    /// Copies bytes out. The copy may mix old and new bytes while an operation or a peer writes.
    ///
    /// Example: [`Region`].
    ///
    /// # Panics
    /// If the range is not inside, as with slices, and on a region over a dma-buf.
    pub fn copy_to(&self, offset: usize, out: &mut [u8]) {
        assert!(self.memory.copy_to(offset, out), "{} bytes at {offset} of a region of {}", out.len(), self.len());
    }

    /// Copies like [`Region::copy_to`]. Returns false if the range is not inside or the program cannot reach the
    /// memory.
    pub(crate) fn try_copy_to(&self, offset: usize, out: &mut [u8]) -> bool {
        self.memory.copy_to(offset, out)
    }

    /// Copies bytes in. A peer that reads at the same time may see a mixture.
    ///
    /// Example: [`Region`].
    ///
    /// # Errors
    /// [`Lent`]; nothing was copied.
    ///
    /// # Panics
    /// If the range is not inside, as with slices, and on a region over a dma-buf.
    pub fn copy_from(&mut self, offset: usize, bytes: &[u8]) -> Result<(), Lent> {
        self.memory.copy_from(offset, bytes).map_err(|refused| match refused {
            CopyRefused::Lent => Lent,
            CopyRefused::Outside => panic!("{} bytes at {offset} of a region of {}", bytes.len(), self.len()),
        })
    }

    /// Returns the 8 bytes at an offset as a number in native byte order, read atomically.
    ///
    /// # Panics
    /// If the offset is not a multiple of 8, or not inside, and on a region over a dma-buf.
    #[must_use]
    pub fn load(&self, offset: usize) -> u64 {
        self.memory.load(offset).unwrap_or_else(|| panic!("a word at {offset} of a region of {}", self.len()))
    }

    /// Writes 8 bytes atomically, after everything that this thread has written here before.
    ///
    /// Example: [`Region`].
    ///
    /// # Errors
    /// [`Lent`]; nothing was written.
    ///
    /// # Panics
    /// If the offset is not a multiple of 8, or not inside, and on a region over a dma-buf.
    pub fn store(&mut self, offset: usize, value: u64) -> Result<(), Lent> {
        self.memory.store(offset, value).map_err(|refused| match refused {
            CopyRefused::Lent => Lent,
            CopyRefused::Outside => panic!("a word at {offset} of a region of {}", self.len()),
        })
    }

    /// Replaces memory that peers could write by a copy that no one else can reach. Operations cannot use the copy, because it is not
    /// registered.
    pub(crate) fn make_private(&mut self) -> io::Result<()> {
        if let Some(copy) = self.memory.private_copy()? {
            (self.memory, self.device) = (copy, usize::MAX);
        }
        Ok(())
    }

    /// Returns true if anyone but local operations may reach the memory, or shares it.
    pub(crate) fn is_open(&self) -> bool {
        self.memory.is_shared()
    }

    /// See [`RegionMemory::part_mut`].
    pub(crate) fn part_mut(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        self.memory.part_mut(range)
    }

    /// Drops the bytes behind the first `len`.
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

    /// Returns true if it belongs to the reactor that listens at the other end of `dropped`.
    pub(crate) fn is_of(&self, dropped: &Sender<Key>) -> bool {
        self.drop_channel.dropped.same_channel(dropped)
    }

    /// Returns true if peers may use the memory.
    pub(crate) fn is_exposed(&self) -> bool {
        self.memory.users().peers_may()
    }

    /// See [`RegionMemory::lend`].
    #[inline]
    pub(crate) fn lend(&self, range: Range<usize>) -> Option<(Sge, Hold)> {
        self.memory.lend(range, self.local_key)
    }

    /// See [`RegionMemory::entry`].
    #[inline]
    pub(crate) fn entry(&self, range: Range<usize>) -> Option<Sge> {
        self.memory.entry(range, self.local_key)
    }

    /// See [`RegionMemory::lend_mut`].
    pub(crate) fn lend_mut(&mut self, range: Range<usize>) -> Option<(Sge, Hold)> {
        self.memory.lend_mut(range, self.local_key)
    }

    /// See [`RegionMemory::lease`].
    pub(crate) fn lease(&self, range: Range<usize>) -> Option<Lease> {
        self.memory.lease(range, self.local_key)
    }

    /// See [`RegionMemory::lease_mut`].
    pub(crate) fn lease_mut(&mut self, range: Range<usize>) -> Option<Lease> {
        self.memory.lease_mut(range, self.local_key)
    }

    /// See [`RegionMemory::lend_to_peer`].
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
        // A reactor that was dropped has deregistered everything.
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
