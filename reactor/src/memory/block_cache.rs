//! A cache of registered memory for messages that are longer than one buffer. When a message does not use its memory
//! any more, the memory is kept for later messages of about the same length. These messages then need no registration.
//!
//! If a peer could access the memory, this peer still has the remote key of the memory. Such memory is kept only for
//! messages to or from this peer.

use std::collections::VecDeque;
use std::sync::Arc;

use rdma_transport::mem::Memory;
use rdma_transport::mr::{MemoryRegion, RemoteKey};

use super::budget::MemoryUse;
use crate::id::ConnectionId;

/// The largest number of blocks that are kept. There is a limit because [`BlockCache::take`] and
/// [`BlockCache::take_of_key`] examine all blocks.
const MOST: usize = 256;

/// The length of a block is the length of its message, rounded up to a multiple of a step. To get the step, the length
/// of the message is rounded up to a power of two, and divided by `STEPS`. The step is at least one page.
const STEPS: usize = 16;

/// The purpose of a block. A later message can use the block only for the same purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Purpose {
    /// The index of the device with which the block is registered.
    pub(super) device: usize,
    pub(super) account: MemoryUse,
    /// The connection whose peer has the remote key of the block; `None` if no peer can access the block.
    pub(super) peer: Option<ConnectionId>,
}

/// Registered memory that an earlier message has used, and that no message uses now.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) memory: Arc<Memory>,
    pub(super) registered: MemoryRegion,
    pub(super) purpose: Purpose,
    /// True if no message has used the block since the last call of [`BlockCache::drop_idle`].
    idle: bool,
}

/// The blocks that are kept for later messages; see the [module](self).
#[derive(Debug)]
pub(super) struct BlockCache {
    /// The blocks, in the order in which they were kept, the oldest at the front.
    blocks: VecDeque<Block>, // bound: kept-blocks
    /// The sum of the lengths of all blocks, in bytes.
    bytes: usize,
    limit: usize,
    /// The granularity of [`Memory`], in bytes. The length of each block is a multiple of it.
    page: usize,
}

impl BlockCache {
    pub(super) const fn new(limit: usize, page: usize) -> Self {
        Self { blocks: VecDeque::new(), bytes: 0, limit, page }
    }

    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the length of the block for a message of `len` bytes, rounded up so that messages of about the same length can share it. If
    /// the block would be too long for the cache, its length is only rounded up to whole pages.
    pub(super) fn block_len(&self, len: usize) -> usize {
        let step = (len.next_power_of_two() / STEPS).max(self.page);
        let rounded = len.next_multiple_of(step);
        if rounded <= self.limit { rounded } else { len.next_multiple_of(self.page) }
    }

    /// Takes a block for a message of `len` bytes out of the cache. Returns `None` if no block has this purpose and the
    /// length [`BlockCache::block_len`] of the message.
    pub(super) fn take(&mut self, purpose: Purpose, len: usize) -> Option<Block> {
        let wanted = self.block_len(len);
        let at = self.blocks.iter().rposition(|block| block.purpose == purpose && block.memory.len() == wanted)?;
        let block = self.blocks.remove(at)?;
        self.bytes -= wanted;
        Some(block)
    }

    /// Keeps a block. If the limits are then exceeded, moves the oldest blocks to `gone`. If the new block alone is
    /// longer than the limit, moves only this block to `gone`. The caller deregisters the blocks in `gone`.
    pub(super) fn keep(
        &mut self,
        memory: Arc<Memory>,
        registered: MemoryRegion,
        purpose: Purpose,
        gone: &mut Vec<Block>,
    ) {
        let block = Block { memory, registered, purpose, idle: false };
        if block.memory.len() > self.limit {
            gone.push(block);
            return;
        }
        self.bytes += block.memory.len();
        self.blocks.push_back(block);
        while self.bytes > self.limit || self.blocks.len() > MOST {
            let Some(oldest) = self.blocks.pop_front() else { break };
            self.bytes -= oldest.memory.len();
            gone.push(oldest);
        }
    }

    /// Removes all blocks for which `condition` returns true, and returns them.
    fn drop_where(&mut self, condition: impl Fn(&Block) -> bool) -> Vec<Block> {
        let all = std::mem::take(&mut self.blocks);
        let (gone, left): (Vec<_>, Vec<_>) = all.into_iter().partition(condition);
        self.blocks = left.into();
        self.bytes -= gone.iter().map(|block| block.memory.len()).sum::<usize>();
        gone
    }

    /// Removes all blocks that are registered with a device, and returns them.
    pub(super) fn drop_of_device(&mut self, device: usize) -> Vec<Block> {
        self.drop_where(|block| block.purpose.device == device)
    }

    /// Removes all blocks that are kept for the peer of a connection, and returns them.
    pub(super) fn drop_of_peer(&mut self, id: ConnectionId) -> Vec<Block> {
        self.drop_where(|block| block.purpose.peer == Some(id))
    }

    /// Removes the block that has this remote key on this device and is kept for the peer of this
    /// connection, and returns it. There is at most one, because keys are unique on a device.
    pub(super) fn take_of_key(&mut self, device: usize, peer: ConnectionId, key: RemoteKey) -> Option<Block> {
        let at = self.blocks.iter().position(|block| {
            let Purpose { device: of, peer: reader, .. } = block.purpose;
            of == device && reader == Some(peer) && block.registered.remote_key == key
        })?;
        let block = self.blocks.remove(at)?;
        self.bytes -= block.memory.len();
        Some(block)
    }

    /// Removes all blocks that no message has used since the last call, and returns them.
    pub(super) fn drop_idle(&mut self) -> Vec<Block> {
        let gone = self.drop_where(|block| block.idle);
        self.blocks.iter_mut().for_each(|block| block.idle = true);
        gone
    }
}

#[cfg(test)]
mod tests {
    use rdma_transport::mr::{LocalKey, MrId};
    use rdma_transport::slab::Key;

    use super::*;
    use crate::id::ReactorTag;

    const MIB: usize = 1 << 20;
    const PAGE: usize = 4 << 10;

    fn purpose(account: MemoryUse, peer: Option<ConnectionId>) -> Purpose {
        Purpose { device: 0, account, peer }
    }

    fn keep(kept: &mut BlockCache, len: usize, key: u32, purpose: Purpose) -> usize {
        let registered =
            MemoryRegion { id: MrId(Key::new(key, 1)), local_key: LocalKey(key), remote_key: RemoteKey(key) };
        let mut gone = Vec::new();
        kept.keep(Arc::new(Memory::new(kept.block_len(len)).unwrap()), registered, purpose, &mut gone);
        gone.len()
    }

    #[test]
    fn messages_of_about_one_length_share_blocks() {
        let kept = BlockCache::new(64 * MIB, PAGE);
        for (len, block) in [(1, PAGE), (PAGE, PAGE), (10_000, 12_288), (MIB, MIB), (MIB + 1, MIB + MIB / 8)] {
            assert_eq!(kept.block_len(len), block, "{len}");
        }
        assert_eq!(kept.block_len(64 * MIB), 64 * MIB);
        // A block that is longer than the limit is not kept. So its length is rounded up only to whole pages.
        assert_eq!(kept.block_len(65 * MIB + 1), 65 * MIB + PAGE);
        assert_eq!(BlockCache::new(0, PAGE).block_len(5 * MIB + 1), 5 * MIB + PAGE);
    }

    /// The system allocates whole pages. So the length that `block_len` returns is a multiple of the page size, too. If
    /// it differed from the length of the allocated memory, no later message would find the block.
    #[test]
    fn blocks_consist_of_whole_pages_of_the_system() {
        for page in [PAGE, 4 * PAGE, 16 * PAGE] {
            for limit in [0, 64 * MIB] {
                let kept = BlockCache::new(limit, page);
                for len in [1, PAGE + 1, 10_000, 100_000, 300_000, MIB + 1, 65 * MIB + 1] {
                    let block = kept.block_len(len);
                    assert!(block >= len && block % page == 0, "{block} bytes for {len}, pages of {page}");
                }
            }
            let mut kept = BlockCache::new(64 * MIB, page);
            assert_eq!([1, 2 * PAGE, page].map(|len| kept.block_len(len)), [page, page.max(2 * PAGE), page]);
            keep(&mut kept, 10_000, 1, purpose(MemoryUse::Fetched, None));
            assert!(kept.take(purpose(MemoryUse::Fetched, None), 10_001).is_some());
        }
    }

    #[test]
    fn blocks_come_back_for_the_same_purpose_only() {
        let mut kept = BlockCache::new(64 * MIB, PAGE);
        let [first, second] = [1, 2].map(|slot| ConnectionId::new(ReactorTag::next(), slot, 0));
        let fetched = purpose(MemoryUse::Fetched, None);
        keep(&mut kept, MIB, 1, fetched);
        keep(&mut kept, MIB, 2, purpose(MemoryUse::Copied, Some(first)));
        assert!(kept.take(purpose(MemoryUse::Copied, Some(second)), MIB).is_none(), "another peer has the key");
        assert!(kept.take(purpose(MemoryUse::Fetched, None), MIB + 1).is_none());
        assert!(kept.take(Purpose { device: 1, ..fetched }, MIB).is_none());
        assert_eq!(kept.take(purpose(MemoryUse::Copied, Some(first)), MIB - 7).unwrap().registered.remote_key.0, 2);
        assert_eq!(kept.take(fetched, MIB).unwrap().registered.remote_key.0, 1);
        assert!(kept.take(fetched, MIB).is_none());
        assert_eq!(kept.bytes(), 0);
    }

    #[test]
    fn the_oldest_make_room_and_the_idle_go() {
        let mut kept = BlockCache::new(4 * MIB, PAGE);
        let fetched = purpose(MemoryUse::Fetched, None);
        assert_eq!((0..6).map(|key| keep(&mut kept, MIB, key, fetched)).collect::<Vec<_>>(), [0, 0, 0, 0, 1, 1]);
        assert_eq!(kept.bytes(), 4 * MIB);
        assert_eq!(keep(&mut kept, 5 * MIB, 9, fetched), 1, "a block longer than the limit is not kept");
        assert_eq!(kept.bytes(), 4 * MIB);

        assert_eq!(kept.drop_of_device(0).len(), 4);
        keep(&mut kept, MIB, 1, fetched);
        keep(&mut kept, MIB, 2, fetched);
        assert_eq!(kept.drop_idle().len(), 0);
        let used = kept.take(fetched, MIB).unwrap();
        keep(&mut kept, MIB, used.registered.remote_key.0, fetched);
        assert_eq!(kept.drop_idle().iter().map(|block| block.registered.remote_key.0).collect::<Vec<_>>(), [1]);
        assert_eq!(kept.drop_idle().len(), 1);

        let mut few = BlockCache::new(usize::MAX, PAGE);
        assert_eq!((0..MOST as u32 + 3).map(|key| keep(&mut few, 1, key, fetched)).sum::<usize>(), 3);
        assert_eq!(few.drop_of_device(1).len(), 0);
        assert_eq!(few.drop_of_device(0).len(), MOST);
    }

    #[test]
    fn a_key_that_a_peer_has_taken_back_and_a_peer_that_is_gone_leave_nothing() {
        let mut kept = BlockCache::new(64 * MIB, PAGE);
        let [conn, other] = [1, 2].map(|slot| ConnectionId::new(ReactorTag::next(), slot, 0));
        for key in [1, 2, 3] {
            keep(&mut kept, MIB, key, purpose(MemoryUse::Copied, Some(conn)));
        }
        keep(&mut kept, MIB, 2, purpose(MemoryUse::Fetched, None));
        // This block has the same key as another one, but on another device. A search for the key on device 0 must not
        // find this block.
        keep(&mut kept, MIB, 2, Purpose { device: 1, ..purpose(MemoryUse::Copied, Some(conn)) });
        assert!(
            kept.take_of_key(0, other, RemoteKey(2)).is_none() && kept.take_of_key(2, conn, RemoteKey(2)).is_none()
        );
        assert_eq!(kept.take_of_key(0, conn, RemoteKey(2)).map(|block| block.purpose.device), Some(0));
        assert_eq!(kept.drop_of_peer(conn).len(), 3);
        assert_eq!(kept.bytes(), MIB);
    }
}
