//! The memory of a region, and counts of its users. The owner of the region can borrow the bytes as a reference only
//! while no one else may write to the bytes. The owner can change the bytes only while no operation reads or writes
//! them.
//!
//! Two rules make these references sound:
//!
//! - A work request gets its scatter/gather entry, and a [`Hold`], from the one handle of the region ([`RegionMemory::lend`]). The hold is
//!   released when the work request has completed or its queue pair is destroyed.
//! - Peers get rights when the memory is registered, and never later. These peers count as users until the rights are
//!   revoked.
//!
//! So if the owner finds no writer in the counts, there is no writer for as long as the owner borrows the handle.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use rdma_transport::mem::Memory;
use rdma_transport::mr::{Access, LocalKey};
use rdma_transport::wr::Sge;

use crate::seam::sync::{AtomicBool, AtomicU32, Mutex, MutexGuard};

/// Counts of the users of a region other than its owner. The region and its [`Hold`]s share them.
#[derive(Debug, Default)]
pub(crate) struct Users {
    /// The number of users of each kind, indexed by [`Use`].
    counts: [AtomicU32; 5],
    /// True if the owner has dropped the region.
    dropped: AtomicBool,
    lent: Mutex<LentRanges>,
}

/// The kinds of users of a region, besides its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// A work request reads the memory.
    Read,
    /// A work request writes to the memory.
    Write,
    /// The memory contains a message that a peer will fetch.
    Fetch,
    /// Peers have the right to read the memory.
    PeersRead,
    /// Peers have the right to write to the memory.
    PeersWrite,
}

/// The ranges that operations use, in the order in which the operations began. Each range has a number, with which its
/// [`Hold`] removes it.
#[derive(Debug, Default)]
struct LentRanges {
    ranges: VecDeque<(u32, Range<usize>)>, // bound: sends, large-messages, copies
    next: u32,
}

impl LentRanges {
    #[inline]
    fn add(&mut self, range: Range<usize>) -> u32 {
        self.next = self.next.wrapping_add(1);
        self.ranges.push_back((self.next, range));
        self.next
    }

    /// Removes a range. In most cases it is the first one in the list, because operations end in about the order in
    /// which they began.
    #[inline]
    fn remove(&mut self, number: u32) {
        if self.ranges.front().is_some_and(|&(of, _)| of == number) {
            self.ranges.pop_front();
        } else {
            self.remove_later(number);
        }
    }

    #[cold]
    fn remove_later(&mut self, number: u32) {
        if let Some(at) = self.ranges.iter().position(|&(of, _)| of == number) {
            self.ranges.remove(at);
        }
    }

    fn overlaps(&self, with: &Range<usize>) -> bool {
        self.ranges.iter().any(|(_, range)| range.start < with.end && with.start < range.end)
    }
}

impl Users {
    fn count(&self, of: Use) -> u32 {
        // If the count is 0, the caller may use the memory. `Acquire` ensures that the caller then sees all writes of
        // the users that have ended.
        self.counts[of as usize].load(Ordering::Acquire)
    }

    /// Returns true if an operation uses the memory: a work request, or a message that a peer will fetch.
    pub(crate) fn operate(&self) -> bool {
        self.count(Use::Read) + self.count(Use::Write) + self.count(Use::Fetch) > 0
    }

    /// Returns true if the memory contains a message that a peer will fetch.
    pub(crate) fn fetch(&self) -> bool {
        self.count(Use::Fetch) > 0
    }

    fn others_write(&self) -> bool {
        self.count(Use::Write) + self.count(Use::PeersWrite) > 0
    }

    /// Returns true if peers have rights to the memory.
    pub(crate) fn peers_may(&self) -> bool {
        self.count(Use::PeersRead) + self.count(Use::PeersWrite) > 0
    }

    fn lent(&self) -> MutexGuard<'_, LentRanges> {
        // A poisoned lock is harmless: no code that holds this lock can panic in the middle of a change of the list.
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the owner has dropped the region.
    pub(crate) fn set_dropped(&self) {
        self.dropped.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_dropped(&self) -> bool {
        self.dropped.load(Ordering::Relaxed)
    }
}

/// One use of a region. The use counts until [`Hold::done`] is called. The user is a work request that has not completed, a message that a
/// peer has yet to fetch, or peers that still have rights.
#[derive(Debug)]
#[must_use = "a hold that is dropped withholds the region from its owner for ever"]
pub(crate) struct Hold {
    users: Arc<Users>,
    what: Use,
    /// The number of the range in [`LentRanges`]; `None` for peers with rights.
    range: Option<u32>,
}

impl Hold {
    /// Ends the use. The caller knows that the user is gone: the work request has completed or its queue pair is
    /// destroyed, the message was fetched, or the peers can no longer reach the memory. Returns true if the owner has
    /// dropped the region: the caller then checks if the region has any other user.
    #[inline]
    pub(crate) fn done(self) -> bool {
        if let Some(range) = self.range {
            self.users.lent().remove(range);
        }
        let order = if crate::planted("lent-before-it-is-written") { Ordering::Relaxed } else { Ordering::Release };
        self.users.counts[self.what as usize].fetch_sub(1, order);
        self.users.is_dropped()
    }
}

/// The memory of a region. The variants differ in who else may access the memory.
#[derive(Debug)]
pub(crate) enum RegionBytes {
    /// Memory that belongs to this region alone.
    Own(Arc<Memory>),
    /// Memory that others may write to at any time. For example, the program shares it, other processes have mapped it, or it is a sink of
    /// RDMA Reads, to which some devices let peers write for as long as it is registered. The owner never gets a reference to this memory.
    Shared(Arc<Memory>),
    /// Memory of a device, registered as a dma-buf at this address. The program cannot access it.
    Device(u64),
}

impl RegionBytes {
    /// Returns the scatter/gather entry for a range inside the region; `None` if the range is longer than
    /// [`Sge::MAX_LEN`]. The caller must have a [`Hold`] on the range, or a borrow of the region, for as long as the
    /// entry is in use.
    #[inline]
    fn entry(&self, range: Range<usize>, key: LocalKey) -> Option<Sge> {
        match self {
            // SAFETY: the registration keeps the memory alive while the entry is in use. The hold that goes with the entry, or the borrow
            // of the region that `RegionMemory::entry` requires, keeps the owner from getting a conflicting reference. All other accesses
            // here, and those through other shares of the memory, use the functions of `Memory`, which tolerate concurrent access.
            Self::Own(memory) | Self::Shared(memory) => unsafe { memory.shared_entry(range, key) },
            // SAFETY: the range is inside the region, which was registered from this address on. `Driver::check_local`
            // ensures that operations use the entry only on connections of the region's device.
            Self::Device(address) => unsafe { Sge::of_device(address + range.start as u64, range.len(), key) },
        }
    }
}

/// A part of a region that all work requests of a list use under a single hold. No work request uses an entry of the lease after
/// [`Lease::done`]: the caller of `done` knows that the last work request has ended.
#[derive(Debug)]
pub(crate) struct Lease {
    bytes: RegionBytes,
    /// The scatter/gather entry for the whole range. The entries of the work requests are parts of this entry. `None`
    /// if the range is too long for one entry; then [`Lease::entry`] creates each entry separately.
    whole: Option<Sge>,
    range: Range<usize>,
    key: LocalKey,
    hold: Hold,
}

impl Lease {
    /// Returns the scatter/gather entry of one work request of the list: `len` bytes from `offset` on. `offset` counts from the beginning
    /// of the region. Returns `None` if the bytes are not inside the leased range.
    #[inline]
    pub(crate) fn entry(&self, offset: usize, len: usize) -> Option<Sge> {
        let (at, lent) = (offset.wrapping_sub(self.range.start), self.range.len());
        if at > lent || len > lent - at {
            return None;
        }
        match &self.whole {
            Some(whole) => Some(whole.part(at, len)),
            None => self.bytes.entry(offset..offset + len, self.key),
        }
    }

    /// Ends the lease. Returns true if the owner has dropped the region, and false otherwise, like [`Hold::done`].
    pub(crate) fn done(self) -> bool {
        self.hold.done()
    }
}

/// The handle of a region's memory. It also counts the users of the memory. Each region has one handle, and the owner
/// of the region holds it.
#[derive(Debug)]
pub(crate) struct RegionMemory {
    bytes: RegionBytes,
    len: usize,
    users: Arc<Users>,
}

/// The reason why bytes of the region could not be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyRefused {
    /// The bytes are not inside the region, or are not aligned as required, or the memory belongs to a device.
    Outside,
    /// An operation uses the bytes.
    Lent,
}

impl RegionMemory {
    pub(crate) fn new(bytes: RegionBytes, len: usize) -> Self {
        debug_assert!(if let RegionBytes::Own(memory) | RegionBytes::Shared(memory) = &bytes {
            len <= memory.len()
        } else {
            true
        });
        Self { bytes, len, users: Arc::default() }
    }

    /// Returns the memory, if the program can access it; `None` for memory of a device.
    fn memory(&self) -> Option<&Memory> {
        match &self.bytes {
            RegionBytes::Own(memory) | RegionBytes::Shared(memory) => Some(memory),
            RegionBytes::Device(_) => None,
        }
    }

    /// Copies the bytes into new memory that belongs to one region alone ([`RegionBytes::Own`]), and returns the new
    /// memory. Returns `None` if this memory is `Own` itself.
    pub(crate) fn private_copy(&self) -> io::Result<Option<Self>> {
        if matches!(self.bytes, RegionBytes::Own(_)) {
            return Ok(None);
        }
        let mut own = Self::new(RegionBytes::Own(Arc::new(Memory::new(self.len)?)), self.len);
        if let Some(bytes) = own.bytes_mut() {
            self.copy_to(0, bytes);
        }
        Ok(Some(own))
    }

    /// Returns true if this memory can also be accessed in other ways than through this region, at any time: by the
    /// program, by other processes, or by a device.
    pub(crate) const fn is_shared(&self) -> bool {
        !matches!(self.bytes, RegionBytes::Own(_))
    }

    /// Returns a clone of the memory's `Arc`; `None` for memory of a device.
    pub(crate) fn share(&self) -> Option<Arc<Memory>> {
        match &self.bytes {
            RegionBytes::Own(memory) | RegionBytes::Shared(memory) => Some(Arc::clone(memory)),
            RegionBytes::Device(_) => None,
        }
    }

    /// Returns the address of the first byte: the address that scatter/gather entries and peers use for this byte.
    pub(crate) fn address(&self) -> u64 {
        match &self.bytes {
            RegionBytes::Own(memory) | RegionBytes::Shared(memory) => memory.as_ptr() as u64,
            RegionBytes::Device(address) => *address,
        }
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn users(&self) -> &Arc<Users> {
        &self.users
    }

    /// Counts the peers as a user of the memory, if `access` gives rights to peers. The caller does this before it
    /// hands out the region. Returns the hold of the peers; `None` if `access` gives no rights to peers.
    pub(crate) fn expose(&mut self, access: Access) -> Option<Hold> {
        if access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC | Access::READ_SINK) {
            return Some(self.hold(Use::PeersWrite, None));
        }
        access.contains(Access::REMOTE_READ).then(|| self.hold(Use::PeersRead, None))
    }

    #[inline]
    fn hold(&self, what: Use, range: Option<Range<usize>>) -> Hold {
        let range = range.map(|range| self.users.lent().add(range));
        self.users.counts[what as usize].fetch_add(1, Ordering::Relaxed);
        Hold { users: Arc::clone(&self.users), what, range }
    }

    /// Lends a range to a work request that reads it. Returns the scatter/gather entry and the hold; `None` if the
    /// range is not inside the region, or is longer than [`Sge::MAX_LEN`].
    #[inline]
    pub(crate) fn lend(&self, range: Range<usize>, key: LocalKey) -> Option<(Sge, Hold)> {
        Some((self.sge(range.clone(), key)?, self.hold(Use::Read, Some(range))))
    }

    /// Returns the scatter/gather entry of a range, without a hold. The entry is only for reading, and only for as long as the caller
    /// borrows the region. Returns `None` if the range is not inside the region, or is longer than [`Sge::MAX_LEN`].
    #[inline]
    pub(crate) fn entry(&self, range: Range<usize>, key: LocalKey) -> Option<Sge> {
        self.sge(range, key)
    }

    /// Lends a range to a work request that writes to it. Returns the scatter/gather entry and the hold; `None` if the
    /// range is not inside the region, or is longer than [`Sge::MAX_LEN`].
    pub(crate) fn lend_mut(&mut self, range: Range<usize>, key: LocalKey) -> Option<(Sge, Hold)> {
        Some((self.sge(range.clone(), key)?, self.hold(Use::Write, Some(range))))
    }

    /// Holds a range from which a peer will fetch a message. The range must be inside the region. It may be longer than the longest range
    /// that one scatter/gather entry can describe.
    pub(crate) fn lend_to_peer(&self, range: Range<usize>) -> Hold {
        self.hold(Use::Fetch, Some(range))
    }

    /// Leases a range to a list of work requests that read it. Returns `None` if the range is not inside the region.
    pub(crate) fn lease(&self, range: Range<usize>, key: LocalKey) -> Option<Lease> {
        self.lease_for(Use::Read, range, key)
    }

    /// Leases a range to a list of work requests that write to it. Returns `None` if the range is not inside the
    /// region.
    pub(crate) fn lease_mut(&mut self, range: Range<usize>, key: LocalKey) -> Option<Lease> {
        self.lease_for(Use::Write, range, key)
    }

    fn lease_for(&self, what: Use, range: Range<usize>, key: LocalKey) -> Option<Lease> {
        self.contains(&range).then_some(())?;
        let bytes = match &self.bytes {
            RegionBytes::Own(memory) => RegionBytes::Own(Arc::clone(memory)),
            RegionBytes::Shared(memory) => RegionBytes::Shared(Arc::clone(memory)),
            RegionBytes::Device(address) => RegionBytes::Device(*address),
        };
        let whole = bytes.entry(range.clone(), key);
        Some(Lease { bytes, whole, range: range.clone(), key, hold: self.hold(what, Some(range)) })
    }

    #[inline]
    fn sge(&self, range: Range<usize>, key: LocalKey) -> Option<Sge> {
        self.contains(&range).then_some(())?;
        self.bytes.entry(range, key)
    }

    const fn contains(&self, range: &Range<usize>) -> bool {
        range.start <= range.end && range.end <= self.len
    }

    /// Returns the bytes of the region. Returns `None` while an operation or a peer may write to the bytes, and always
    /// if the memory is not [`RegionBytes::Own`].
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        let RegionBytes::Own(memory) = &self.bytes else { return None };
        if self.users.others_write() {
            return None;
        }
        // SAFETY: the pointer is valid for `len` bytes while self lives. No operation or peer writes to the bytes now. None can begin to
        // write while self is borrowed, because a new writer needs `&mut self`.
        Some(unsafe { slice::from_raw_parts(memory.as_ptr(), self.len) })
    }

    /// Returns the bytes of the region, for writing. Returns `None` while an operation or a peer may read or write the
    /// bytes, and always if the memory is not [`RegionBytes::Own`].
    pub(crate) fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        let RegionBytes::Own(memory) = &self.bytes else { return None };
        if self.users.operate() || self.users.peers_may() {
            return None;
        }
        // SAFETY: the pointer is valid for `len` bytes while self lives. No operation or peer reads or writes the bytes
        // now. None can begin to while self is borrowed mutably, because a new user needs a borrow of self.
        Some(unsafe { slice::from_raw_parts_mut(memory.as_ptr(), self.len) })
    }

    /// Returns a range of the bytes, for writing. Operations may use other ranges of the region at the same time. Returns `None` if an
    /// operation uses a byte of this range, if peers have rights to the memory, if the memory is not [`RegionBytes::Own`], or if the range
    /// is not inside the region.
    pub(crate) fn part_mut(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        let RegionBytes::Own(memory) = &self.bytes else { return None };
        if !self.contains(&range) || self.users.peers_may() || self.is_lent(&range) {
            return None;
        }
        // SAFETY: the range is inside the memory. No operation uses a byte of it, and no peer has
        // rights to the memory. No operation can begin to use the range, and no peer can get
        // rights, while self is borrowed mutably. An operation on a neighbouring range may access
        // the words of 8 bytes that both ranges share, but it changes none of the bytes of this
        // range. A provider in software does that only in calls of this thread, which cannot happen
        // while the result borrows self; a device accesses single bytes.
        Some(unsafe { slice::from_raw_parts_mut(memory.as_ptr().add(range.start), range.len()) })
    }

    /// Shortens the region to its first `len` bytes. Does nothing if the region is not longer. The memory after these
    /// bytes stays registered.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Copies the bytes from `offset` on to `out`, even if operations or peers use the memory. Returns true if the bytes were copied.
    /// Returns false if the range is not inside the region, or if the memory belongs to a device. The copy may mix old and new bytes if an
    /// operation or a peer writes at the same time.
    pub(crate) fn copy_to(&self, offset: usize, out: &mut [u8]) -> bool {
        let inside = offset.checked_add(out.len()).is_some_and(|end| end <= self.len);
        inside && self.memory().is_some_and(|memory| memory.copy_out(offset, out))
    }

    /// Returns true if an operation uses at least one byte of a range.
    fn is_lent(&self, range: &Range<usize>) -> bool {
        self.users.operate() && self.users.lent().overlaps(range)
    }

    /// Copies `bytes` into the region, from `offset` on, even if peers have rights to the memory. Copies nothing and
    /// returns an error if an operation uses this part of the region.
    pub(crate) fn copy_from(&mut self, offset: usize, bytes: &[u8]) -> Result<(), CopyRefused> {
        let end = offset.checked_add(bytes.len()).filter(|&end| end <= self.len).ok_or(CopyRefused::Outside)?;
        if self.is_lent(&(offset..end)) {
            return Err(CopyRefused::Lent);
        }
        let copied = self.memory().is_some_and(|memory| memory.copy_in(offset, bytes));
        if copied { Ok(()) } else { Err(CopyRefused::Outside) }
    }

    /// Returns 8 bytes as an atomic number. Returns `None` if the offset is not a multiple of 8, if the bytes are not
    /// inside the region, or if the memory belongs to a device.
    fn word(&self, offset: usize) -> Option<&AtomicU64> {
        self.memory()?.word(offset).filter(|_| offset + 8 <= self.len)
    }

    /// Reads 8 bytes atomically. Returns `None` if the offset is not a multiple of 8, or if the program cannot access
    /// the bytes.
    pub(crate) fn load(&self, offset: usize) -> Option<u64> {
        self.word(offset).map(|word| word.load(Ordering::Acquire))
    }

    /// Writes 8 bytes atomically, with release ordering: a thread that reads the new value also sees all earlier writes
    /// of this thread.
    pub(crate) fn store(&mut self, offset: usize, value: u64) -> Result<(), CopyRefused> {
        let word = self.word(offset).ok_or(CopyRefused::Outside)?;
        if self.is_lent(&(offset..offset + 8)) {
            return Err(CopyRefused::Lent);
        }
        word.store(value, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(len: usize) -> RegionMemory {
        RegionMemory::new(RegionBytes::Own(Arc::new(Memory::new(len).unwrap())), len)
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
        assert!(!write.done());
        assert!(region.bytes().is_some() && region.bytes_mut().is_none());
        assert!(!read.done());
        assert_eq!(region.bytes_mut().unwrap()[99], 1);
    }

    #[test]
    fn what_an_operation_uses_is_not_changed() {
        let mut region = region(16);
        assert_eq!(region.copy_from(0, &[1; 16]), Ok(()));
        for lend in [
            |region: &mut RegionMemory| region.lend(0..8, KEY).unwrap().1,
            |region: &mut RegionMemory| region.lend_mut(0..8, KEY).unwrap().1,
            |region: &mut RegionMemory| region.lend_to_peer(0..8),
        ] {
            let hold = lend(&mut region);
            assert_eq!(region.copy_from(7, &[2; 2]), Err(CopyRefused::Lent));
            assert_eq!(region.store(0, 2), Err(CopyRefused::Lent));
            assert_eq!(region.load(0), Some(u64::from_ne_bytes([1; 8])));
            assert_eq!((region.copy_from(8, &[1; 8]), region.store(8, 3)), (Ok(()), Ok(())), "that part is not lent");
            region.users().set_dropped();
            assert!(hold.done(), "its owner has dropped it meanwhile");
            assert_eq!((region.copy_from(0, &[1; 8]), region.store(0, u64::from_ne_bytes([1; 8]))), (Ok(()), Ok(())));
        }
    }

    #[test]
    fn a_lease_reaches_for_what_is_lent_and_no_further() {
        let mut region = region(100);
        let lease = region.lease_mut(10..60, KEY).unwrap();
        assert!(region.bytes().is_none() && region.copy_from(59, &[1; 2]) == Err(CopyRefused::Lent));
        let base = region.address();
        for (offset, len) in [(10, 50), (10, 0), (59, 1), (60, 0), (30, 7)] {
            let entry = lease.entry(offset, len).unwrap();
            assert_eq!((entry.address() as u64 - base, entry.len()), (offset as u64, len));
        }
        for (offset, len) in [(9, 1), (10, 51), (60, 1), (61, 0), (0, 0), (usize::MAX, 2), (20, usize::MAX)] {
            assert!(lease.entry(offset, len).is_none(), "{len} bytes at {offset}");
        }
        region.users().set_dropped();
        assert!(lease.done(), "its owner has dropped it meanwhile");
        assert!(region.bytes_mut().is_some());
        let reading = region.lease(0..100, KEY).unwrap();
        assert!(region.bytes().is_some() && region.bytes_mut().is_none() && region.lease(0..101, KEY).is_none());
        let _ = reading.done();
    }

    #[test]
    fn peers_count_until_their_rights_are_taken_back() {
        let mut region = region(8);
        assert!(region.expose(Access::LOCAL_WRITE).is_none());
        let readers = region.expose(Access::REMOTE_READ).unwrap();
        assert!(region.bytes().is_some() && region.bytes_mut().is_none());
        let writers = region.expose(Access::REMOTE_WRITE | Access::REMOTE_READ).unwrap();
        assert!(region.bytes().is_none());
        assert_eq!(region.copy_from(0, &[1; 8]), Ok(()), "peers may see it change");
        let mut copy = [0; 8];
        assert!(region.copy_to(0, &mut copy));
        assert_eq!(copy, [1; 8]);
        let _ = (writers.done(), readers.done());
        assert!(region.bytes_mut().is_some());
    }

    #[test]
    fn memory_of_others_is_copied_and_never_behind_a_reference() {
        let memory = Arc::new(Memory::new(8).unwrap());
        let mut region = RegionMemory::new(RegionBytes::Shared(Arc::clone(&memory)), 8);
        assert!(region.bytes().is_none() && region.bytes_mut().is_none());
        assert_eq!(region.copy_from(0, &[3; 8]), Ok(()));
        let mut seen = [0; 8];
        assert!(memory.copy_out(0, &mut seen));
        assert_eq!((seen, region.load(0)), ([3; 8], Some(u64::from_ne_bytes([3; 8]))));

        let mut region = RegionMemory::new(RegionBytes::Device(Sge::DEVICE + 4096), 64);
        assert!(region.bytes().is_none() && region.bytes_mut().is_none() && region.load(0).is_none());
        assert!(!region.copy_to(0, &mut seen) && region.copy_from(0, &[1]).is_err() && region.store(0, 1).is_err());
        let (sge, hold) = region.lend_mut(8..64, KEY).unwrap();
        assert_eq!((sge.address() as u64, sge.len(), sge.is_of_device()), (Sge::DEVICE + 4104, 56, true));
        assert!(!hold.done() && region.lend(8..65, KEY).is_none());
    }

    #[test]
    fn nothing_outside_is_reached() {
        let mut region = region(100);
        assert!(region.lend(100..100, KEY).is_some());
        #[allow(clippy::reversed_empty_ranges, reason = "the ranges of a careless caller")]
        let backwards = 60..50;
        for range in [0..101, 101..101, backwards, usize::MAX - 1..usize::MAX] {
            assert!(region.lend(range.clone(), KEY).is_none());
            assert!(region.lend_mut(range, KEY).is_none());
        }
        assert!(!region.copy_to(93, &mut [0; 8]));
        assert_eq!(region.copy_from(usize::MAX, &[0; 2]), Err(CopyRefused::Outside));
        assert!(region.load(88).is_some());
        assert!(region.load(93).is_none() && region.load(96).is_none() && region.load(usize::MAX - 3).is_none());
    }
}
