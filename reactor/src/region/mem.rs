//! The memory of a region, with those who use it counted, so that its bytes are handed out as references only while
//! nobody else may write them.
//!
//! What it rests on: a work request gets its entry ([`RegionMemory::lend`]) through the one handle, and its [`Hold`] is
//! given back when it has completed or its queue pair is destroyed. Peers get rights when the memory is registered and
//! never later; they are counted until these are taken back. So whoever sees no writer sees none as long as it borrows
//! the handle.

use std::ops::Range;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rdma_transport::mem::Memory;
use rdma_transport::mr::{Access, LocalKey};
use rdma_transport::wr::Sge;

/// Who uses a region, besides its owner.
#[derive(Debug, Default)]
pub(crate) struct Users {
    /// Work requests that read it, and peers that may.
    readers: AtomicU32,
    /// Work requests that write it, and peers that may.
    writers: AtomicU32,
}

impl Users {
    /// How many do.
    pub(crate) fn count(&self) -> usize {
        (self.readers.load(Ordering::Relaxed) + self.writers.load(Ordering::Relaxed)) as usize
    }

    fn of(&self, writes: bool) -> &AtomicU32 {
        if writes { &self.writers } else { &self.readers }
    }
}

/// One use of a region: by a work request that has not completed, or by peers that have not lost their rights.
#[derive(Debug)]
#[must_use = "a hold that is dropped keeps its region from its owner for good"]
pub(crate) struct Hold {
    users: Arc<Users>,
    writes: bool,
}

impl Hold {
    /// The work request has completed or its queue pair is destroyed; the peers can no longer reach the memory.
    pub(crate) fn done(self) {
        // Everything done to the memory before is seen by whoever sees the count go down.
        self.users.of(self.writes).fetch_sub(1, Ordering::Release);
    }
}

/// Memory that work requests and peers use, in the hands of its one owner.
#[derive(Debug)]
pub(crate) struct RegionMemory {
    memory: Arc<Memory>,
    len: usize,
    users: Arc<Users>,
}

impl RegionMemory {
    pub(crate) fn new(memory: Arc<Memory>, len: usize) -> Self {
        debug_assert!(len <= memory.len());
        Self { memory, len, users: Arc::default() }
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn users(&self) -> Arc<Users> {
        Arc::clone(&self.users)
    }

    /// Counts peers with these rights, if there are any, before the memory is registered with them.
    pub(crate) fn expose(&mut self, access: Access) -> Option<Hold> {
        let writes = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        (writes || access.contains(Access::REMOTE_READ)).then(|| self.hold(writes))
    }

    /// Counts one more user.
    pub(crate) fn hold(&self, writes: bool) -> Hold {
        self.users.of(writes).fetch_add(1, Ordering::Relaxed);
        Hold { users: Arc::clone(&self.users), writes }
    }

    /// An entry for a work request that reads the memory; `None` if the range is not inside.
    pub(crate) fn lend(&self, range: Range<usize>, key: LocalKey) -> Option<(Sge, Hold)> {
        Some((self.sge(range, key)?, self.hold(false)))
    }

    /// An entry for a work request that writes the memory; `None` if the range is not inside.
    pub(crate) fn lend_mut(&mut self, range: Range<usize>, key: LocalKey) -> Option<(Sge, Hold)> {
        Some((self.sge(range, key)?, self.hold(true)))
    }

    fn sge(&self, range: Range<usize>, key: LocalKey) -> Option<Sge> {
        self.is_inside(&range).then_some(())?;
        // SAFETY: the registration keeps the memory alive while the entry is in use. The hold that goes with it keeps the
        // owner from handing out references that would conflict; all other uses go through `Memory`.
        unsafe { self.memory.shared_entry(range, key) }
    }

    /// Whether a range is wholly inside.
    const fn is_inside(&self, range: &Range<usize>) -> bool {
        range.start <= range.end && range.end <= self.len
    }

    /// The bytes; `None` while anybody may write them.
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        if self.users.writers.load(Ordering::Acquire) > 0 {
            return None;
        }
        // SAFETY: valid for `len` bytes while self lives. Nobody writes them, and nobody starts to while self is
        // borrowed: that takes `&mut self`.
        Some(unsafe { slice::from_raw_parts(self.memory.as_ptr(), self.len) })
    }

    /// The bytes, to change; `None` while anybody else may read or write them.
    pub(crate) fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        if self.users.writers.load(Ordering::Acquire) > 0 || self.users.readers.load(Ordering::Acquire) > 0 {
            return None;
        }
        // SAFETY: as in `bytes`, and nobody reads them either; that takes a borrow of self to start.
        Some(unsafe { slice::from_raw_parts_mut(self.memory.as_ptr(), self.len) })
    }

    /// Copies out, whoever else uses the memory; `false` if the range is not inside.
    pub(crate) fn copy_to(&self, offset: usize, out: &mut [u8]) -> bool {
        let Some(end) = offset.checked_add(out.len()) else { return false };
        self.is_inside(&(offset..end)) && self.memory.copy_out(offset, out)
    }

    /// Copies in, whoever else uses the memory; `false` if the range is not inside.
    pub(crate) fn copy_from(&mut self, offset: usize, bytes: &[u8]) -> bool {
        let Some(end) = offset.checked_add(bytes.len()) else { return false };
        self.is_inside(&(offset..end)) && self.memory.copy_in(offset, bytes)
    }

    /// 8 aligned bytes in the order of this machine; `None` if the offset is not aligned or not inside.
    pub(crate) fn word(&self, offset: usize) -> Option<&AtomicU64> {
        self.is_inside(&(offset..offset.checked_add(8)?)).then(|| self.memory.word(offset))?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(len: usize) -> RegionMemory {
        RegionMemory::new(Arc::new(Memory::new(len).unwrap()), len)
    }

    const KEY: LocalKey = LocalKey(7);

    #[test]
    fn references_are_given_only_while_nobody_conflicts() {
        let mut region = region(100);
        region.bytes_mut().unwrap()[99] = 1;
        let (sge, read) = region.lend(0..100, KEY).unwrap();
        assert_eq!(sge.len(), 100);
        assert!(region.bytes().is_some() && region.bytes_mut().is_none());
        let (_, write) = region.lend_mut(50..60, KEY).unwrap();
        assert!(region.bytes().is_none() && region.bytes_mut().is_none());
        write.done();
        assert!(region.bytes().is_some() && region.bytes_mut().is_none());
        read.done();
        assert_eq!(region.bytes_mut().unwrap()[99], 1);
    }

    #[test]
    fn peers_count_until_their_rights_are_taken_back() {
        let mut region = region(8);
        assert!(region.expose(Access::LOCAL_WRITE).is_none());
        let readers = region.expose(Access::REMOTE_READ).unwrap();
        assert!(region.bytes().is_some() && region.bytes_mut().is_none());
        let writers = region.expose(Access::REMOTE_WRITE | Access::REMOTE_READ).unwrap();
        assert!(region.bytes().is_none());
        assert!(region.copy_from(0, &[1; 8]));
        let mut copy = [0; 8];
        assert!(region.copy_to(0, &mut copy));
        assert_eq!(copy, [1; 8]);
        writers.done();
        readers.done();
        assert!(region.bytes_mut().is_some());
    }

    #[test]
    fn nothing_outside_is_reached() {
        let mut region = region(100);
        assert!(region.lend(100..100, KEY).is_some());
        #[allow(clippy::reversed_empty_ranges, reason = "what a careless caller asks for")]
        let backwards = 60..50;
        for range in [0..101, 101..101, backwards, usize::MAX - 1..usize::MAX] {
            assert!(region.lend(range.clone(), KEY).is_none());
            assert!(region.lend_mut(range, KEY).is_none());
        }
        assert!(!region.copy_to(93, &mut [0; 8]) && !region.copy_from(usize::MAX, &[0; 2]));
        assert!(region.word(88).is_some());
        assert!(region.word(93).is_none() && region.word(96).is_none() && region.word(usize::MAX - 3).is_none());
    }
}
