//! The kinds of memory from which a region can be made, and the registration of each kind.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rdma_transport::caps::Features;
use rdma_transport::mem::{Memory, page_size};
use rdma_transport::mr::{Access, MemoryRegion};
use rdma_transport::provider::{DeviceId, Provider};
use rdma_transport::registrar::{Registrar, Registration};
use rdma_transport::wr::Sge;

use super::region::{DropChannel, RegionOptions};
use super::region_memory::RegionBytes;
use crate::error::Error;
use crate::providers::role;

/// The memory from which a region is made.
#[derive(Debug)]
pub(crate) enum Material<'a> {
    /// Memory that belongs to the region alone, and the length of the region in bytes.
    Own(Memory, usize),
    /// Memory that the program shares with the region, and may access at any time.
    Shared(Arc<Memory>),
    /// A part of a dma-buf: the descriptor, the offset and the length, in bytes.
    DmaBuf(BorrowedFd<'a>, u64, usize),
    /// Memory that a [`RegionMaker`] has prepared on another thread, and the length of the region in bytes. The
    /// registration is `None` if the provider registers only on the reactor's thread.
    Prepared(Arc<Memory>, usize, Option<Registration>),
}

impl Material<'_> {
    /// Registers the memory with a device. Returns the registration, the [`RegionBytes`] of the region, and the length
    /// of the region in bytes.
    pub(super) fn register(
        self,
        provider: &mut dyn Provider,
        device: DeviceId,
        access: Access,
    ) -> Result<(MemoryRegion, RegionBytes, usize), Error> {
        let late =
            provider.device(device).is_some_and(|info| info.capabilities.features.contains(Features::LATE_PLACEMENT));
        let (memory, len) = match self {
            Self::Own(memory, len) => (Arc::new(memory), len),
            Self::Shared(memory) => {
                let len = memory.len();
                let registered = provider.register(device, &memory, 0..len, access)?;
                return Ok((registered, RegionBytes::Shared(memory), len));
            }
            Self::DmaBuf(buffer, offset, len) => {
                let address = device_address(offset, page_size());
                let foreign = role(provider, Provider::foreign_memory, "regions over a dma-buf")?;
                let registered = foreign.register_dmabuf(device, buffer, offset, len, address, access)?;
                return Ok((registered, RegionBytes::Device(address), len));
            }
            Self::Prepared(memory, len, Some(registration)) => {
                let role = role(provider, Provider::off_loop_registration, "registration on other threads")?;
                return Ok((role.adopt(registration)?, bytes(memory, access, late), len));
            }
            Self::Prepared(memory, len, None) => (memory, len),
        };
        memory.prefer_huge_pages();
        Ok((provider.register(device, &memory, 0..len, access)?, bytes(memory, access, late), len))
    }
}

/// Returns an address under which to register a dma-buf from its byte `offset` on. The device requires that the address
/// and `offset` are equal modulo the page size.
const fn device_address(offset: u64, page: usize) -> u64 {
    Sge::DEVICE + offset % page as u64
}

/// Returns the [`RegionBytes`] of a region to which `memory` belongs alone. The result is `Own`, except in three cases. In these cases it
/// is `Shared`, so that the program gets no reference to the bytes:
///
/// - The region is a sink of RDMA Reads (`READ_SINK`). Some devices let peers write to a sink even after its remote key is revoked.
/// - The region is a direct one (`DIRECT`): peers on this host can map its memory.
/// - Peers may write to the region, and the device may still place bytes of their writes after the peers have lost the
///   right to write (`late` is true).
pub(super) fn bytes(memory: Arc<Memory>, access: Access, late: bool) -> RegionBytes {
    let written = access.intersects(Access::REMOTE_WRITE.union(Access::REMOTE_ATOMIC));
    let open = access.intersects(Access::READ_SINK.union(Access::DIRECT));
    if open || late && written { RegionBytes::Shared(memory) } else { RegionBytes::Own(memory) }
}

/// Prepares memory for regions of one device, on any thread. [`crate::RegionContext::adopt`] makes
/// a region of the prepared memory. [`crate::RegionContext::maker`] returns a `RegionMaker`.
#[derive(Debug)]
pub struct RegionMaker {
    /// The part of the provider that registers memory on other threads; `None` if the provider
    /// registers memory only on the reactor's thread. In that case [`crate::RegionContext::adopt`]
    /// registers the memory. Registration takes no time on such a provider.
    pub(crate) registrar: Option<Box<dyn Registrar>>,
    pub(crate) options: RegionOptions,
    /// The index of the device for which memory is prepared.
    pub(crate) device: usize,
    pub(crate) drop_channel: DropChannel,
}

/// Memory that a [`RegionMaker`] has prepared. [`crate::RegionContext::adopt`] makes a region of
/// it. If the `PreparedRegion` is dropped instead, the memory is deregistered and freed.
#[derive(Debug)]
pub struct PreparedRegion {
    pub(crate) memory: Arc<Memory>,
    pub(crate) len: usize,
    pub(crate) registration: Option<Registration>,
    pub(crate) options: RegionOptions,
    pub(crate) device: usize,
    pub(crate) drop_channel: DropChannel,
}

impl RegionMaker {
    /// Allocates `len` zeroed bytes and registers them with the device. `len` ranges from 1 to the limit of the device. This **blocks** the
    /// calling thread while the system pins the memory, for about a quarter of a second per gibibyte. The thread of the reactor is not
    /// blocked.
    ///
    /// # Errors
    /// The system refuses to allocate or register the memory, or the device was removed.
    pub fn prepare(&self, len: usize) -> Result<PreparedRegion, Error> {
        let memory =
            Memory::new(len).map_err(|source| rdma_transport::TransportError::Memory { bytes: len, source })?;
        memory.prefer_huge_pages();
        let (memory, options) = (Arc::new(memory), self.options.clone());
        let registration = match &self.registrar {
            Some(registrar) => Some(registrar.register(&memory, 0..len, options.access)?),
            None => None,
        };
        Ok(PreparedRegion {
            memory,
            len,
            registration,
            options,
            device: self.device,
            drop_channel: self.drop_channel.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dma_buf_has_the_same_place_in_a_page_of_any_size() {
        for page in [4 << 10, 16 << 10, 64 << 10] {
            for offset in [0, 1, 4 << 10, 5 << 10, 60 << 10, (1 << 40) + 4096] {
                assert_eq!(
                    device_address(offset, page) % page as u64,
                    offset % page as u64,
                    "{offset}, pages of {page}"
                );
            }
        }
    }
}
