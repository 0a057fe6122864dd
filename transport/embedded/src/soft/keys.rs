//! The table of memory regions. The table finds the memory that a peer may access with an STag.
//!
//! STags are 32 random bits, and their low bits are the hash of the table. Peers do not choose the
//! STags, so no peer can slow down the search by collisions. The memory is looked up for each
//! access and no result is kept, so that this process never accesses a revoked region for a peer.

use std::ops::Range;
use std::sync::Arc;

use rdma_transport::error::{Result, TransportError};
use rdma_transport::mem::{Memory, Span, in_pages, page_size};
use rdma_transport::mr::{Access, MrId};
use rdma_transport::slab::{Key, Slab};

/// The reasons for which an access with an STag is refused. The peer receives only the error code of the RFCs. From this code, the peer
/// cannot distinguish a missing region from a region that exists only for other connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// No region has this STag, or the peer may not use the region: it is invalidated, has no remote rights, or is restricted to another
    /// connection.
    Unknown,
    /// The peer may use the region, but not for this operation.
    Access,
    /// The accessed range is not within the region.
    Bounds,
    /// The end of the range is past the largest address.
    Wrap,
    /// The address of an atomic operation is not a multiple of 8 (RFC 7306 §8.2).
    Misaligned,
}

const STALE: TransportError = TransportError::Stale { object: "memory region" };
const DIRECT_OF_PART: &str =
    "direct regions of a part of a memory, or of one that peers cannot map: see Memory::new_shared";

#[derive(Debug)]
struct RegionEntry {
    stag: u32,
    /// The Tagged Offset of the region's first byte, which is the virtual address of the byte.
    base: u64,
    len: usize,
    /// The offset of the region's first byte in `memory`.
    start: usize,
    memory: Arc<Memory>,
    access: Access,
    /// True if peers may use the STag: the region has remote rights and is not invalidated.
    valid: bool,
    /// The only connection whose peer may use the STag. `None` if all peers may use it.
    owner: Option<Key>,
    /// The connection whose peer may map the memory. `None` if no peer may map it, or if the region
    /// is direct, so that all peers on this host may map it.
    lent_to: Option<Key>,
}

impl RegionEntry {
    fn span(&self, offset: u64, len: usize) -> std::result::Result<Span<'_>, Miss> {
        let end = offset.checked_add(len as u64).ok_or(Miss::Wrap)?;
        let limit = self.base.saturating_add(self.len as u64);
        if offset < self.base || end > limit && !rdma_transport::planted("a-region-ends-with-its-memory") {
            return Err(Miss::Bounds);
        }
        self.memory.span(self.start + (offset - self.base) as usize, len).ok_or(Miss::Bounds)
    }
}

/// All memory regions of a provider.
#[derive(Debug, Default)]
pub struct KeyTable {
    regions: Slab<RegionEntry>, // bound: pool, large-messages, copies, kept-blocks
    /// A hash table from STags to regions, at most half full. The hash is the low bits of the STag. On a collision, the next free slot is
    /// used. An STag of 0 marks an empty slot.
    index: Vec<(u32, Key)>, // bound: pool, large-messages, copies, kept-blocks
    /// The number of regions that peers on this host may map ([`Access::DIRECT`]).
    direct: usize,
}

const EMPTY: (u32, Key) = (0, Key::new(0, 0));

impl KeyTable {
    /// Adds a region of `memory` with these rights, and returns its id and its STag. `random` returns random numbers, from which the STag
    /// is chosen.
    pub fn register(
        &mut self,
        memory: &Arc<Memory>,
        range: Range<usize>,
        access: Access,
        mut random: impl FnMut() -> u32,
    ) -> Result<(MrId, u32)> {
        if range.start > range.end || range.end > memory.len() {
            let range_text = "within the memory";
            return Err(TransportError::OutOfRange {
                what: "end of the region",
                value: range.end as u64,
                range: range_text,
            });
        }
        let direct = access.contains(Access::DIRECT);
        if direct && (memory.file().is_none() || range.start != 0 || in_pages(range.end, page_size()) != memory.len()) {
            return Err(TransportError::Unsupported { provider: "iwarp", feature: DIRECT_OF_PART });
        }
        if (self.regions.len() + 1) * 2 > self.index.len() {
            self.grow();
        }
        let mut stag = random();
        // An STag of 0 marks an empty slot. An STag of 1 in a ready-to-receive message means that there is no region. Neither is assigned.
        while stag <= 1 || self.find(stag).is_some() {
            stag = random().wrapping_add(stag).wrapping_add(1);
        }
        let (start, len) = (range.start, range.end - range.start);
        let base = memory.as_ptr() as u64 + start as u64;
        let valid = access.intersects(Access::REMOTE);
        let memory = Arc::clone(memory);
        let key = self.regions.insert(RegionEntry {
            stag,
            base,
            len,
            start,
            memory,
            access,
            valid,
            owner: None,
            lent_to: None,
        });
        self.insert(stag, key);
        self.direct += usize::from(direct);
        Ok((MrId(key), stag))
    }

    /// Adds a region with this STag. The Tagged Offset of the region's first byte is `base`. Used to replay recorded connections, because
    /// the recorded peers use the STags and addresses of the recording.
    #[cfg(any(test, fuzz_targets))]
    pub fn register_at(&mut self, memory: &Arc<Memory>, base: u64, len: usize, access: Access, stag: u32) {
        let (id, got) = self.register(memory, 0..len, access, || stag).unwrap();
        assert_eq!(got, stag);
        self.regions.get_mut(id.0).unwrap().base = base;
    }

    fn grow(&mut self) {
        let len = (self.index.len() * 2).max(64);
        let old = std::mem::replace(&mut self.index, vec![EMPTY; len]);
        for (stag, key) in old.into_iter().filter(|entry| entry.0 != 0) {
            self.insert(stag, key);
        }
    }

    fn insert(&mut self, stag: u32, key: Key) {
        let mask = self.index.len() - 1;
        let mut at = stag as usize & mask;
        while self.index[at].0 != 0 {
            at = (at + 1) & mask;
        }
        self.index[at] = (stag, key);
    }

    #[inline]
    fn position(&self, stag: u32) -> Option<usize> {
        let mask = self.index.len().checked_sub(1)?;
        let mut at = stag as usize & mask;
        loop {
            match self.index[at].0 {
                0 => return None,
                found if found == stag => return Some(at),
                _ => at = (at + 1) & mask,
            }
        }
    }

    #[inline]
    fn find(&self, stag: u32) -> Option<&RegionEntry> {
        if stag == 0 {
            return None;
        }
        self.regions.get(self.index[self.position(stag)?].1)
    }

    /// Removes a region. No [`Span`] of the region is in use, since a span borrows this table.
    pub fn deregister(&mut self, id: MrId) -> Result<()> {
        let region = self.regions.remove(id.0).ok_or(STALE)?;
        self.direct -= usize::from(region.access.contains(Access::DIRECT));
        let Some(mut hole) = self.position(region.stag) else { return Ok(()) };
        let mask = self.index.len() - 1;
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let stag = self.index[at].0;
            if stag == 0 || rdma_transport::planted("a-hole-hides-the-keys-behind-it") {
                break;
            }
            // If the hole stayed empty, a search for this entry would end at the hole. So the entry moves into the hole, and the old slot
            // of the entry becomes the hole.
            if (at.wrapping_sub(stag as usize) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.index[hole] = self.index[at];
                hole = at;
            }
        }
        self.index[hole] = EMPTY;
        Ok(())
    }

    /// Restricts a region's STag to the peer of the connection `owner`.
    pub fn restrict(&mut self, id: MrId, owner: Key) -> Result<()> {
        self.revocable(id, "way to restrict a direct region to one peer")?.owner = Some(owner);
        Ok(())
    }

    /// Revokes the right of all peers to use a region's STag.
    ///
    /// # Errors
    /// Returns an error if the region does not exist, or is [direct](Access::DIRECT).
    pub fn invalidate(&mut self, id: MrId) -> Result<()> {
        self.revocable(id, "way to invalidate a direct region, whose pages its peers keep")?.valid = false;
        Ok(())
    }

    /// Returns a region whose rights can still be restricted. Returns an error for a direct region, which peers may already have mapped.
    fn revocable(&mut self, id: MrId, feature: &'static str) -> Result<&mut RegionEntry> {
        let region = self.regions.get_mut(id.0).ok_or(STALE)?;
        if region.access.contains(Access::DIRECT) {
            return Err(TransportError::Unsupported { provider: "iwarp", feature });
        }
        Ok(region)
    }

    /// Returns the STag, the memory and the rights of a region.
    ///
    /// # Errors
    /// Returns an error if the region does not exist.
    pub(crate) fn memory(&self, id: MrId) -> Result<(u32, &Arc<Memory>, Access)> {
        self.regions.get(id.0).map(|region| (region.stag, &region.memory, region.access)).ok_or(STALE)
    }

    /// Records that the peer of a connection may map a region.
    ///
    /// # Errors
    /// Returns an error if the region does not exist.
    pub(crate) fn lend(&mut self, id: MrId, connection: Key) -> Result<()> {
        self.regions.get_mut(id.0).map(|region| region.lent_to = Some(connection)).ok_or(STALE)
    }

    /// Returns the connection to whose peer a region is lent. Returns `None` if the region is lent
    /// to no peer, or does not exist.
    pub(crate) fn lent_to(&self, id: MrId) -> Option<Key> {
        self.regions.get(id.0)?.lent_to
    }

    /// Returns true if the region with this STag is valid and peers on this host may map it.
    #[inline]
    pub(crate) fn is_direct(&self, stag: u32) -> bool {
        self.direct > 0 && self.direct(stag).is_some()
    }

    /// Returns the memory of the region with this STag, its length, and the rights that peers have
    /// on it. Returns `None` if the region does not exist, was invalidated, or may not be mapped by
    /// peers on this host.
    pub(crate) fn direct(&self, stag: u32) -> Option<(&Arc<Memory>, usize, Access)> {
        let region = self.find(stag).filter(|region| region.valid && region.access.contains(Access::DIRECT))?;
        Some((&region.memory, region.len, region.access & Access::REMOTE))
    }

    /// Returns the region with this STag. Returns an error if there is none, or if the peer of `connection` may not use it.
    #[inline]
    fn exposed(&self, stag: u32, connection: Key) -> std::result::Result<&RegionEntry, Miss> {
        self.find(stag)
            .filter(|region| region.valid && region.owner.is_none_or(|owner| owner == connection))
            .ok_or(Miss::Unknown)
    }

    /// Returns the memory that the peer of `connection` accesses with an STag, if the region has the rights in `need`. The caller handles a
    /// length of 0 itself, because an access without bytes must not be checked (RFC 5041 §5.2, RFC 5040 §5.2.1).
    #[inline]
    pub fn remote(
        &self,
        connection: Key,
        stag: u32,
        offset: u64,
        len: usize,
        need: Access,
    ) -> std::result::Result<Span<'_>, Miss> {
        let region = self.exposed(stag, connection)?;
        if !region.access.contains(need) {
            return Err(Miss::Access);
        }
        region.span(offset, len)
    }

    /// Returns the memory to which the response to a local Read or atomic operation is written.
    /// Returns `None` if the region does not exist, is too short, or has neither the right
    /// [`Access::LOCAL_WRITE`] nor [`Access::READ_SINK`].
    #[inline]
    pub fn sink(&self, stag: u32, offset: u64, len: usize) -> Option<Span<'_>> {
        let region =
            self.find(stag).filter(|region| region.access.intersects(Access::LOCAL_WRITE.union(Access::READ_SINK)))?;
        region.span(offset, len).ok()
    }

    /// Returns true if the peer of `connection` may invalidate an STag. No peer may invalidate a direct region, because peers keep its
    /// pages mapped. Invalidation ends only the access of peers. Local requests can still use an invalidated STag.
    pub fn may_invalidate(&self, connection: Key, stag: u32) -> bool {
        self.exposed(stag, connection).is_ok_and(|region| !region.access.contains(Access::DIRECT))
    }

    /// Invalidates an STag at the request of the peer of `connection`. Returns false if the peer may not invalidate the STag.
    pub fn invalidate_remotely(&mut self, connection: Key, stag: u32) -> bool {
        if !self.may_invalidate(connection, stag) {
            return false;
        }
        let Some(at) = self.position(stag) else { return false };
        let key = self.index[at].1;
        self.regions.get_mut(key).is_some_and(|region| std::mem::replace(&mut region.valid, false))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const REMOTE: Access = Access::REMOTE;

    const ME: Key = Key::new(1, 1);
    const OTHER: Key = Key::new(2, 1);

    fn table() -> (KeyTable, Arc<Memory>) {
        (KeyTable::default(), Arc::new(Memory::new(8192).unwrap()))
    }

    fn add(table: &mut KeyTable, memory: &Arc<Memory>, access: Access, stag: u32) -> (MrId, u32) {
        let (id, got) = table.register(memory, 100..1100, access, || stag).unwrap();
        assert_eq!(got, stag);
        (id, stag)
    }

    fn miss(result: std::result::Result<Span<'_>, Miss>) -> Option<Miss> {
        result.err()
    }

    #[test]
    fn every_edge_of_a_region() {
        let (mut table, memory) = table();
        let (_, stag) = add(&mut table, &memory, REMOTE, 77);
        let base = memory.as_ptr() as u64 + 100;
        for (offset, len, want) in [
            (base, 1, None),
            (base, 1000, None),
            (base + 999, 1, None),
            (base + 1000, 1, Some(Miss::Bounds)),
            (base - 1, 1, Some(Miss::Bounds)),
            (base - 1, 2, Some(Miss::Bounds)),
            (base, 1001, Some(Miss::Bounds)),
            (base + 1, 1000, Some(Miss::Bounds)),
            (0, 1, Some(Miss::Bounds)),
            (u64::MAX, 1, Some(Miss::Wrap)),
            (u64::MAX - 999, 1001, Some(Miss::Wrap)),
            (u64::MAX - 7, 8, Some(Miss::Wrap)),
            (base, usize::MAX, Some(Miss::Wrap)),
            (base, u32::MAX as usize, Some(Miss::Bounds)),
        ] {
            assert_eq!(miss(table.remote(ME, stag, offset, len, Access::REMOTE_WRITE)), want, "{offset:x}+{len}");
        }
    }

    #[test]
    fn every_kind_of_miss() {
        let (mut table, memory) = table();
        let base = memory.as_ptr() as u64 + 100;
        let ask = |table: &KeyTable, who, stag, need| miss(table.remote(who, stag, base, 8, need));
        let (_, local) = add(&mut table, &memory, Access::LOCAL_WRITE, 2);
        let (readable, read) = add(&mut table, &memory, Access::REMOTE_READ, 3);
        let (bound, own) = add(&mut table, &memory, REMOTE, 4);
        table.restrict(bound, ME).unwrap();
        let unknown = Some(Miss::Unknown);
        for stag in [0, 1, 5, u32::MAX, local] {
            assert_eq!(ask(&table, ME, stag, Access::REMOTE_READ), unknown, "{stag}");
        }
        assert_eq!(ask(&table, ME, read, Access::REMOTE_READ), None);
        assert_eq!(ask(&table, ME, read, Access::REMOTE_WRITE), Some(Miss::Access));
        assert_eq!(ask(&table, ME, own, REMOTE), None);
        assert_eq!(ask(&table, OTHER, own, REMOTE), unknown);
        assert!(!table.invalidate_remotely(OTHER, own) && table.invalidate_remotely(ME, own));
        assert!(!table.invalidate_remotely(ME, own) && !table.invalidate_remotely(ME, local));
        assert_eq!(ask(&table, ME, own, REMOTE), unknown);
        table.invalidate(readable).unwrap();
        assert_eq!(ask(&table, ME, read, Access::REMOTE_READ), unknown);
        assert!(table.sink(local, base, 8).is_some() && table.sink(local, base, 1001).is_none());
        assert!(table.sink(read, base, 8).is_none());
        table.deregister(readable).unwrap();
        assert!(matches!(table.deregister(readable), Err(TransportError::Stale { .. })));
        assert!(matches!(table.invalidate(readable), Err(TransportError::Stale { .. })));
        // The deregistered region has released the memory. `memory` and two regions still own it.
        assert_eq!(Arc::strong_count(&memory), 3);
    }

    #[test]
    fn a_region_is_within_its_memory() {
        let (mut table, memory) = table();
        assert!(table.register(&memory, 0..8193, REMOTE, || 9).is_err());
        #[allow(clippy::reversed_empty_ranges)]
        let backwards = 9..8;
        assert!(table.register(&memory, backwards, REMOTE, || 9).is_err());
        table.register(&memory, 8192..8192, REMOTE, || 9).unwrap();
        assert_eq!(miss(table.remote(ME, 9, memory.as_ptr() as u64 + 8192, 1, REMOTE)), Some(Miss::Bounds));
    }

    /// If `random` always returns the same number, STags are predictable, but no two regions have the same STag.
    #[test]
    fn poor_entropy_does_no_harm() {
        let (mut table, memory) = table();
        let mut stags: Vec<u32> = (0..500).map(|_| table.register(&memory, 0..1, REMOTE, || 0).unwrap().1).collect();
        stags.sort_unstable();
        stags.dedup();
        assert_eq!(stags.len(), 500);
    }

    proptest! {
        #[test]
        fn as_a_map(steps in prop::collection::vec((any::<bool>(), 0u32..40), 1..300)) {
            let (mut table, memory) = table();
            let mut model = std::collections::BTreeMap::new();
            let base = memory.as_ptr() as u64;
            for (add, n) in steps {
                // All these STags hash to the same few slots, so that searches meet collisions.
                let stag = 2 + (n % 5) + 1024 * n;
                if add && !model.contains_key(&stag) {
                    let (id, got) = table.register(&memory, 0..1, REMOTE, || stag).unwrap();
                    prop_assert_eq!(got, stag);
                    model.insert(stag, id);
                } else if let Some(id) = model.remove(&stag) {
                    table.deregister(id).unwrap();
                }
                for n in 0..40 {
                    let stag = 2 + (n % 5) + 1024 * n;
                    prop_assert_eq!(table.remote(ME, stag, base, 1, REMOTE).is_ok(), model.contains_key(&stag));
                }
            }
        }
    }
}
