//! The kinds of memory that can become a region, and their registration.

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

/// The memory to register.
#[derive(Debug)]
pub(crate) enum Material<'a> {
    /// Memory that only the region will have, and its length.
    Own(Memory, usize),
    /// Memory that the program shares.
    Shared(Arc<Memory>),
    /// A part of a dma-buf: the descriptor, the offset and the length, in bytes.
    DmaBuf(BorrowedFd<'a>, u64, usize),
    /// Memory that another thread has prepared.
    Prepared(Arc<Memory>, usize, Option<Registration>),
}

impl Material<'_> {
    /// Registers the memory; also returns its bytes and their number.
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

/// Returns the address at which a dma-buf is registered from an offset on: the address and the offset have the same
/// position in a page.
const fn device_address(offset: u64, page: usize) -> u64 {
    Sge::DEVICE + offset % page as u64
}

/// Returns the bytes of memory that was allocated for a region. They count as shared in three cases: they are a sink of Reads, which some
/// devices open to peers even after the remote key is revoked; they are those of a direct region, which its peers keep; or peers may write
/// them on a device that may place their writes after the right has ended (`late`).
pub(super) fn bytes(memory: Arc<Memory>, access: Access, late: bool) -> RegionBytes {
    let written = access.intersects(Access::REMOTE_WRITE.union(Access::REMOTE_ATOMIC));
    let open = access.intersects(Access::READ_SINK.union(Access::DIRECT));
    if open || late && written { RegionBytes::Shared(memory) } else { RegionBytes::Own(memory) }
}

/// Prepares memory of one device to be a region, on any thread: see [`crate::Context::region_maker`].
#[derive(Debug)]
pub struct RegionMaker {
    /// `None` if registration takes no time.
    pub(crate) registrar: Option<Box<dyn Registrar>>,
    pub(crate) options: RegionOptions,
    /// The index of the device.
    pub(crate) device: usize,
    pub(crate) drop_channel: DropChannel,
}

/// Memory that is to become a region: [`crate::Context::adopt`] does that. Dropping it frees the memory.
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
    /// Allocates and registers `len` zeroed bytes, from 1 up to the limit of the device. **Blocks** while the pages are pinned, about a
    /// quarter of a second for a gibibyte; the reactor's thread continues meanwhile.
    ///
    /// # Errors
    /// The system refuses, or the device was removed.
    pub fn prepare(&self, len: usize) -> Result<PreparedRegion, Error> {
        let memory = Memory::new(len).map_err(|source| rdma_transport::Error::Memory { bytes: len, source })?;
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
