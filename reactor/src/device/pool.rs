//! The buffer pool of a device. It has buffers of equal size, in slabs: large blocks of memory, each registered once.
//!
//! A [`Buffer`] is the right to access one buffer. It cannot be copied, so each buffer has one holder at a time: the
//! pool, a work request ([`Posted`]), a message, or the program. The unsafe code in this file relies on that. It also
//! relies on the promises of [`rdma_transport::Provider`] about memory that is posted to a device.

use std::fmt;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use rdma_transport::mem::Memory;
use rdma_transport::mr::LocalKey;
use rdma_transport::shares::is_scarce;
use rdma_transport::wr::Sge;

use crate::limits::{BUFFER_ALIGN, HEADER_LEN};

/// Smallest size of an ordinary slab, in bytes. The first slab is as large as its first user needs, but not smaller
/// than this. Each further slab doubles the pool. Only the pool's limit makes a slab smaller than this. A slab is longer
/// than [`LARGEST_SLAB`] only if it has a single, longer buffer. So the pool has few registrations, and little of the
/// pinned memory is unused.
const SMALLEST_SLAB: usize = 256 << 10;
const LARGEST_SLAB: usize = 4 << 20;
/// The smallest number of buffers in a slab that a peer on the same host maps (see `MappedSlab`),
/// unless the connection needs fewer. Such a slab may be longer than [`LARGEST_SLAB`].
const MIN_MAPPED_BUFFERS: usize = 4;
/// Largest number of buffers in one slab, because the index of a buffer has 16 bits.
const PER_SLAB: usize = 1 << 16;

/// The right to access one buffer. The fields are the number of the buffer's slab, and the index of the buffer in this
/// slab.
#[derive(Debug)]
#[must_use = "a dropped buffer does not return to its pool"]
pub(crate) struct Buffer {
    slab: u16,
    index: u16,
}

/// A buffer that belongs to a work request. Only the provider and its device access the buffer until the work request
/// has completed. The exception is a send that is prepared but not posted ([`Posted::unposted`]).
#[derive(Debug)]
#[must_use = "a dropped buffer does not return to its pool"]
pub(crate) struct Posted(Buffer);

impl Posted {
    /// Overwrites bytes of a buffer whose send is prepared but not posted to the device yet.
    pub(crate) fn patch(&mut self, slabs: &Slabs, at: usize, bytes: &[u8]) {
        self.unposted(slabs)[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Returns the whole buffer of a send that is prepared but not posted to the device yet.
    pub(crate) fn unposted<'a>(&'a mut self, slabs: &'a Slabs) -> &'a mut [u8] {
        slabs.bytes_mut(&mut self.0)
    }

    /// Returns the buffer. The caller knows that the work request has completed, or was destroyed with its queue pair.
    pub(crate) fn done(self) -> Buffer {
        self.0
    }
}

/// The memory of the pool's buffers. Each message and each send buffer that the program keeps holds a clone of the
/// `Arc<Slabs>`, so its bytes stay valid after the pool was dropped.
pub(crate) struct Slabs {
    stride: usize,
    memories: Vec<Arc<Memory>>, // bound: pool
}

impl fmt::Debug for Slabs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slabs").field("stride", &self.stride).field("slabs", &self.memories.len()).finish()
    }
}

impl Slabs {
    #[inline(always)]
    fn base(&self, buffer: &Buffer) -> NonNull<u8> {
        let memory = &self.memories[usize::from(buffer.slab)];
        let offset = usize::from(buffer.index) * self.stride;
        assert!(offset + self.stride <= memory.len(), "a buffer of another pool");
        // SAFETY: the assertion above shows that `stride` bytes from the offset on are inside the memory. The start of
        // a mapping is not null.
        unsafe { NonNull::new_unchecked(memory.as_ptr().add(offset)) }
    }

    /// Returns the first `len` bytes of a buffer.
    #[inline]
    pub(crate) fn bytes<'a>(&'a self, buffer: &'a Buffer, len: usize) -> &'a [u8] {
        let len = len.min(self.stride);
        // SAFETY: `base` is valid for `stride` bytes while `self` lives. The caller holds the `Buffer`, so no work
        // request and nobody else writes to these bytes.
        unsafe { slice::from_raw_parts(self.base(buffer).as_ptr(), len) }
    }

    /// Returns all bytes of a buffer, for writing.
    #[inline]
    pub(crate) fn bytes_mut<'a>(&'a self, buffer: &'a mut Buffer) -> &'a mut [u8] {
        // SAFETY: `base` is valid for `stride` bytes while `self` lives. The caller holds the `Buffer`, so no work
        // request uses these bytes. `&mut Buffer` makes this the only reference.
        unsafe { slice::from_raw_parts_mut(self.base(buffer).as_ptr(), self.stride) }
    }
}

/// The buffer pool of one device. Connections reserve buffers: [`Pool::take`] always succeeds for a connection that has
/// taken fewer buffers than it has reserved.
#[derive(Debug)]
pub(crate) struct Pool {
    slabs: Arc<Slabs>,
    keys: Vec<LocalKey>, // bound: pool
    /// The free buffers, used as a stack: `take` takes the buffer that was added last, because this buffer is the most
    /// likely to be in a processor's cache.
    free: Vec<Buffer>, // bound: pool
    /// The numbers of the slabs that were dropped. New slabs reuse these numbers. Until then, a dropped slab has no
    /// buffers, and its entries in `memories` and `keys` are those of the first slab.
    vacant: Vec<u16>, // bound: pool
    /// Number of buffers in each slab, by the slab's number.
    sizes: Vec<usize>, // bound: pool
    /// Largest sum of `reserved` and `lent` since the last call of [`Pool::trim`].
    high: usize,
    /// Number of buffers that connections have reserved.
    reserved: usize,
    /// Number of buffers that the program holds and that count towards no connection's reservation.
    lent: usize,
    capacity: usize,
    max_buffers: usize,
    /// The mapped slabs, by the slab's number; `None` for an ordinary slab.
    mapped_slabs: Vec<Option<MappedSlab>>, // bound: pool
    mapped_buffers: usize,
}

/// A slab for the sends of one connection whose peer is on this host. The peer maps the slab into its own memory, so it
/// receives messages from the slab without a copy. The buffers of the slab do not count towards `capacity`.
#[derive(Debug)]
struct MappedSlab {
    free: Vec<Buffer>, // bound: pool
    size: usize,
    /// True if the connection has ended. The slab is dropped when all its buffers have been returned.
    is_ending: bool,
}

/// The error of a reservation that would exceed the pool's limit.
#[derive(Debug)]
pub(crate) struct Exhausted;

impl Pool {
    /// Creates a pool of buffers of at least `size` bytes each. The sum of their lengths is at most `max_bytes`. The
    /// pool has no memory until buffers are reserved.
    pub(crate) fn new(size: usize, max_bytes: usize) -> Self {
        let stride = size.next_multiple_of(BUFFER_ALIGN);
        Self {
            slabs: Arc::new(Slabs { stride, memories: Vec::new() }),
            keys: Vec::new(),
            free: Vec::new(),
            vacant: Vec::new(),
            sizes: Vec::new(),
            high: 0,
            reserved: 0,
            lent: 0,
            capacity: 0,
            max_buffers: max_bytes / stride,
            mapped_slabs: Vec::new(),
            mapped_buffers: 0,
        }
    }

    /// Returns the memory of the pool. A holder of buffers outside of the pool, such as a kept message, clones this
    /// `Arc`.
    pub(crate) fn slabs(&self) -> &Arc<Slabs> {
        &self.slabs
    }

    /// Reserves `count` buffers for a connection. If the pool has too few buffers, adds slabs: `register` allocates a
    /// slab of the given number of bytes and registers it with the device.
    pub(crate) fn reserve<E: From<Exhausted>>(
        &mut self,
        count: usize,
        mut register: impl FnMut(usize) -> Result<(Arc<Memory>, LocalKey), E>,
    ) -> Result<(), E> {
        let wanted = self.reserved + self.lent + count;
        if wanted > self.max_buffers - self.mapped_buffers {
            return Err(Exhausted.into());
        }
        while self.capacity < wanted {
            let (buffers, slab) = self.next_slab(wanted - self.capacity)?;
            let (memory, key) = register(buffers * self.slabs.stride)?;
            self.grow(slab, buffers, memory, key);
        }
        self.reserved += count;
        self.high = self.high.max(wanted);
        Ok(())
    }

    /// Returns true if `count` more buffers would include the last buffers of the pool
    /// ([`is_scarce`]). The `shared` buffers, which all connections use together, do not count.
    pub(crate) const fn is_crowded(&self, count: usize, shared: usize) -> bool {
        let taken = self.reserved + self.lent + self.mapped_buffers + count;
        is_scarce(taken.saturating_sub(shared), self.max_buffers.saturating_sub(shared))
    }

    /// Returns the number of buffers that the next slab should have, and the number under which to add the slab.
    /// `missing` is the number of buffers that the pool lacks.
    fn next_slab(&self, missing: usize) -> Result<(usize, u16), Exhausted> {
        let slab = match self.vacant.last() {
            Some(&slab) => slab,
            None => u16::try_from(self.slabs.memories.len()).map_err(|_| Exhausted)?,
        };
        let stride = self.slabs.stride;
        let smallest = (SMALLEST_SLAB / stride).max(1);
        let largest = (LARGEST_SLAB / stride).clamp(1, PER_SLAB);
        let left = self.max_buffers - self.capacity - self.mapped_buffers;
        Ok((missing.max(self.capacity).max(smallest).min(largest).min(left), slab))
    }

    fn grow(&mut self, slab: u16, buffers: usize, memory: Arc<Memory>, key: LocalKey) {
        let buffers = self.add_slab(slab, buffers, memory, key);
        self.capacity += buffers;
        self.free.reserve(buffers);
        self.free.extend((0..buffers).rev().map(|index| Buffer { slab, index: index as u16 }));
    }

    /// Adds a slab's memory under the number `slab`. Returns the number of buffers in the slab.
    fn add_slab(&mut self, slab: u16, buffers: usize, memory: Arc<Memory>, key: LocalKey) -> usize {
        let buffers = buffers.min(memory.len() / self.slabs.stride);
        let mut memories = self.slabs.memories.clone();
        if self.vacant.pop().is_some() {
            let slab = usize::from(slab);
            (memories[slab], self.keys[slab], self.sizes[slab]) = (memory, key, buffers);
        } else {
            memories.push(memory);
            self.keys.push(key);
            self.sizes.push(buffers);
        }
        self.slabs = Arc::new(Slabs { stride: self.slabs.stride, memories });
        buffers
    }

    // Slabs that the peers of connections map.

    /// Returns the length that a new mapped slab for one connection should have, in bytes: `count` buffers, or fewer if
    /// `count` buffers are longer than the largest slab. Returns `None` if the slab would exceed the pool's limit, or
    /// if no slab number is free.
    pub(crate) fn mapped_slab_len(&self, count: usize) -> Option<usize> {
        let stride = self.slabs.stride;
        let buffers = (LARGEST_SLAB / stride).max(MIN_MAPPED_BUFFERS).min(count).min(PER_SLAB);
        let used = self.capacity.max(self.reserved + self.lent) + self.mapped_buffers;
        (used + buffers <= self.max_buffers && self.next_slab(1).is_ok()).then_some(buffers * stride)
    }

    /// Adds a mapped slab for one connection. Returns the slab's number; `None` if no number is free.
    pub(crate) fn add_mapped_slab(&mut self, memory: Arc<Memory>, key: LocalKey) -> Option<u16> {
        let slab = self.next_slab(1).ok()?.1;
        let size = self.add_slab(slab, PER_SLAB, memory, key);
        let free = (0..size).rev().map(|index| Buffer { slab, index: index as u16 }).collect();
        self.mapped_slabs.resize_with(self.sizes.len(), || None);
        self.mapped_slabs[usize::from(slab)] = Some(MappedSlab { free, size, is_ending: false });
        self.mapped_buffers += size;
        Some(slab)
    }

    fn mapped_slab(&mut self, slab: u16) -> Option<&mut MappedSlab> {
        self.mapped_slabs.get_mut(usize::from(slab))?.as_mut()
    }

    /// Takes a free buffer of a mapped slab; `None` if the slab has no free buffer, or is not a mapped slab.
    pub(crate) fn take_mapped(&mut self, slab: u16) -> Option<Buffer> {
        self.mapped_slab(slab)?.free.pop()
    }

    /// Returns `true` if the buffer is in a mapped slab other than `apart`, so that the peer of
    /// another connection can read it.
    #[inline]
    pub(crate) fn is_mapped_by_another(&mut self, buffer: &Buffer, apart: Option<u16>) -> bool {
        self.mapped_buffers > 0 && apart != Some(buffer.slab) && self.mapped_slab(buffer.slab).is_some()
    }

    /// Copies all bytes of `from` to `to`, overwrites `from` with zeros, and returns `from` to its
    /// slab. Returns `to`.
    pub(crate) fn relocate(&mut self, mut from: Buffer, mut to: Buffer) -> Buffer {
        let bytes = self.slabs.bytes_mut(&mut from);
        self.slabs.bytes_mut(&mut to).copy_from_slice(bytes);
        bytes.fill(0);
        self.give(from);
        to
    }

    /// Drops a mapped slab: immediately if all its buffers have been returned, and otherwise when the last one is
    /// returned. Returns the local key of its registration; `None` if `slab` is not a mapped slab.
    pub(crate) fn end_mapped_slab(&mut self, slab: u16) -> Option<LocalKey> {
        self.mapped_slab(slab)?.is_ending = true;
        let key = self.keys[usize::from(slab)];
        self.drop_mapped_slab(slab);
        Some(key)
    }

    /// Returns a buffer to its mapped slab or to the pool's free buffers. [`Pool::give`] calls this function only if
    /// the pool has a mapped slab. Without one, `give` returns the buffer directly, which is faster.
    #[inline(never)]
    fn return_any(&mut self, buffer: Buffer) {
        let slab = buffer.slab;
        match self.mapped_slab(slab) {
            Some(mapped) => {
                mapped.free.push(buffer);
                self.drop_mapped_slab(slab);
            }
            None => self.free.push(buffer),
        }
    }

    /// Drops a mapped slab if its connection has ended and all its buffers were returned. The entries of a dropped slab
    /// refer to the memory of the first slab.
    fn drop_mapped_slab(&mut self, slab: u16) {
        let at = usize::from(slab);
        let unused = self.mapped_slabs[at].take_if(|slab| slab.is_ending && slab.free.len() == slab.size);
        let Some(unused) = unused else { return };
        self.mapped_buffers -= unused.size;
        let mut memories = self.slabs.memories.clone();
        memories[at] = Arc::clone(&memories[0]);
        (self.keys[at], self.sizes[at]) = (self.keys[0], 0);
        self.vacant.push(slab);
        self.slabs = Arc::new(Slabs { stride: self.slabs.stride, memories });
    }

    /// Releases the reservation of `count` buffers. The pool keeps their memory for later connections, until
    /// [`Pool::trim`].
    pub(crate) fn unreserve(&mut self, count: usize) {
        self.reserved -= count;
    }

    /// Returns `true` if [`Pool::trim`] may be able to drop a slab: the pool has more than one slab, and some of its
    /// buffers are neither reserved nor lent.
    pub(crate) fn is_excessive(&self) -> bool {
        self.sizes.len() - self.vacant.len() > 1 && self.capacity > self.reserved + self.lent
    }

    /// Drops slabs whose buffers are all free, and calls `deregister` with the local key of each of them. The pool
    /// keeps at least as many buffers as were reserved and lent together at any time since the last call.
    pub(crate) fn trim(&mut self, mut deregister: impl FnMut(LocalKey)) {
        let mut excess = self.capacity.saturating_sub(self.high);
        self.high = self.reserved + self.lent;
        if excess == 0 || self.sizes.len() < 2 {
            return;
        }
        let mut idle = vec![0; self.sizes.len()];
        for buffer in &self.free {
            idle[usize::from(buffer.slab)] += 1;
        }
        // The loop below goes from the last slab to the second one. It never drops the first slab, because the entries
        // of dropped slabs refer to the memory of the first slab.
        let mut gone = vec![false; self.sizes.len()];
        let mut memories = self.slabs.memories.clone();
        for slab in (1..self.sizes.len()).rev() {
            let size = self.sizes[slab];
            if self.mapped_slabs.get(slab).is_some_and(Option::is_some)
                || size == 0
                || idle[slab] < size
                || size > excess
            {
                continue;
            }
            deregister(self.keys[slab]);
            memories[slab] = Arc::clone(&memories[0]);
            (self.keys[slab], self.sizes[slab], gone[slab]) = (self.keys[0], 0, true);
            self.vacant.push(slab as u16);
            self.capacity -= size;
            excess -= size;
        }
        self.free.retain(|buffer| !gone[usize::from(buffer.slab)]);
        // After this sort, calls of `take` return the buffers of the first slabs first. So the last slabs become idle,
        // and a later call of `trim` can drop them.
        self.free.sort_unstable_by_key(|buffer| std::cmp::Reverse((buffer.slab, buffer.index)));
        self.slabs = Arc::new(Slabs { stride: self.slabs.stride, memories });
    }

    /// Counts `count` more buffers as lent: the program holds them, and no connection has reserved them.
    pub(crate) fn lend(&mut self, count: usize) {
        self.lent += count;
        self.high = self.high.max(self.reserved + self.lent);
    }

    /// Counts a lent buffer as not lent any more: the program has returned it, or a connection's reservation covers it
    /// from now on.
    pub(crate) fn unlend(&mut self, buffer: &Buffer) {
        if self.mapped_slab(buffer.slab).is_some() {
            return;
        }
        debug_assert!(self.lent > 0, "a buffer was returned that was not lent");
        self.lent = self.lent.saturating_sub(1);
    }

    /// Returns the number of buffers in ordinary slabs, whether they are free or not.
    pub(crate) const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the number of free buffers in ordinary slabs.
    pub(crate) fn available(&self) -> usize {
        self.free.len()
    }

    /// Takes a free buffer out of the pool; `None` if no buffer is free.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<Buffer> {
        self.free.pop()
    }

    /// Takes a free buffer for a closure of the program to fill; `None` if no buffer is free.
    #[inline]
    pub(crate) fn take_to_fill(&mut self) -> Option<Filling<'_>> {
        let buffer = self.free.pop();
        buffer.is_some().then_some(Filling { pool: self, buffer })
    }

    /// Returns a buffer to the pool.
    #[inline]
    pub(crate) fn give(&mut self, buffer: Buffer) {
        if self.mapped_buffers > 0 {
            return self.return_any(buffer);
        }
        debug_assert!(self.free.len() < self.capacity(), "a buffer was returned twice");
        self.free.push(buffer);
    }

    /// Prepares a work request for the first `len` bytes of a buffer. Returns the buffer as [`Posted`], and the
    /// scatter/gather entry for these bytes.
    #[inline]
    pub(crate) fn post(&self, buffer: Buffer, len: usize) -> (Posted, Sge) {
        let posted = Posted(buffer);
        let sge = self.sge(&posted, len);
        (posted, sge)
    }

    /// Copies `header` and `payload` into a buffer, and prepares a work request for them, like [`Pool::post`]. The
    /// buffer must have room for both.
    #[inline(always)]
    pub(crate) fn post_copy(&self, mut buffer: Buffer, header: &[u8], payload: &[u8]) -> (Posted, Sge) {
        let (head, rest) = self.slabs.bytes_mut(&mut buffer).split_at_mut(header.len());
        head.copy_from_slice(header);
        rest[..payload.len()].copy_from_slice(payload);
        self.post(buffer, header.len() + payload.len())
    }

    /// Copies `header` to the beginning of a buffer, and prepares a work request for the header and the next `len`
    /// bytes, like [`Pool::post`].
    #[inline]
    pub(crate) fn post_behind(&self, mut buffer: Buffer, header: [u8; HEADER_LEN], len: usize) -> (Posted, Sge) {
        self.slabs.bytes_mut(&mut buffer)[..HEADER_LEN].copy_from_slice(&header);
        self.post(buffer, HEADER_LEN + len)
    }

    /// Returns the scatter/gather entry for the first `len` bytes of a buffer that belongs to a work request.
    #[inline]
    pub(crate) fn sge(&self, posted: &Posted, len: usize) -> Sge {
        let buffer = &posted.0;
        let key = self.keys[usize::from(buffer.slab)];
        let len = len.min(self.slabs.stride) as u32;
        // SAFETY: the pool holds the slab list, which keeps the memory alive. The device has registered the memory. The
        // buffer is in a `Posted`, which gives no access to the bytes until the work request has completed.
        unsafe { Sge::new(self.slabs.base(buffer), len, key) }
    }

    /// Returns the length of one buffer, in bytes. It is a multiple of the alignment.
    pub(crate) fn stride(&self) -> usize {
        self.slabs.stride
    }
}

/// A buffer that a closure of the program fills. If it is dropped without [`Filling::keep`], for example because the
/// closure panics, the buffer returns to its pool.
#[derive(Debug)]
pub(crate) struct Filling<'a> {
    pool: &'a mut Pool,
    buffer: Option<Buffer>,
}

impl Filling<'_> {
    /// Returns all bytes of the buffer, for writing.
    #[inline]
    pub(crate) fn room(&mut self) -> &mut [u8] {
        self.buffer.as_mut().map_or(&mut [], |buffer| self.pool.slabs.bytes_mut(buffer))
    }

    /// Ends the filling, and returns the filled buffer, which the caller sends. The buffer does not return to the pool.
    /// The result is `Some`, because a `Filling` always has its buffer until `keep` or a drop.
    #[inline]
    pub(crate) fn keep(mut self) -> Option<Buffer> {
        self.buffer.take()
    }
}

impl Drop for Filling<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pool.give(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(len: usize) -> Result<(Arc<Memory>, LocalKey), Exhausted> {
        Ok((Arc::new(Memory::new(len).unwrap()), LocalKey(7)))
    }

    #[test]
    fn buffers_do_not_overlap_and_all_come_home() {
        let mut pool = Pool::new(100, 1 << 20);
        pool.reserve(10, memory).unwrap();
        let mut taken: Vec<Buffer> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(taken.len(), pool.capacity());
        let slabs = Arc::clone(pool.slabs());
        for (i, buffer) in taken.iter_mut().enumerate() {
            slabs.bytes_mut(buffer).fill(i as u8);
        }
        for (i, buffer) in taken.iter().enumerate() {
            assert!(slabs.bytes(buffer, 128).iter().all(|&b| b == i as u8));
        }
        for buffer in taken {
            pool.give(buffer);
        }
        assert_eq!(pool.available(), pool.capacity());
    }

    #[test]
    fn growth_keeps_old_buffers_and_stops_at_the_limit() {
        let mut pool = Pool::new(1 << 20, 8 << 20);
        pool.reserve(4, memory).unwrap();
        assert_eq!(pool.capacity(), 4);
        let mut first = pool.take().unwrap();
        let slabs = Arc::clone(pool.slabs());
        slabs.bytes_mut(&mut first)[0] = 42;
        pool.reserve(2, memory).unwrap();
        assert_eq!(pool.capacity(), 8, "it doubles");
        assert_eq!(pool.slabs().bytes(&first, 1), [42]);
        assert!(pool.reserve(3, memory).is_err());
        pool.unreserve(2);
        pool.reserve(1, memory).unwrap();
        assert_eq!(pool.capacity(), 8, "no growth for what was released");
        pool.give(first);
    }

    #[test]
    fn the_first_slab_is_small_and_none_is_large() {
        let mut sizes = Vec::new();
        let mut pool = Pool::new(4096, 64 << 20);
        let mut grown = |bytes: usize| {
            sizes.push(bytes);
            memory(bytes)
        };
        pool.reserve(10, &mut grown).unwrap();
        for _ in 0..600 {
            pool.reserve(10, &mut grown).unwrap();
        }
        assert_eq!(sizes[..6], [256 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20]);
        assert!(sizes.iter().all(|&bytes| bytes <= 4 << 20));
        // One large reservation gets slabs of the largest size immediately. The pool does not add the smaller sizes
        // first.
        sizes.clear();
        let mut pool = Pool::new(4096, 64 << 20);
        pool.reserve(1500, |bytes| {
            sizes.push(bytes);
            memory(bytes)
        })
        .unwrap();
        assert_eq!(sizes, [4 << 20, 4 << 20]);
    }

    /// Reserves buffers. Each new slab gets its own number as its key, so that the tests can identify it.
    fn numbered(pool: &mut Pool, count: usize) {
        let mut next = pool.sizes.len() as u32;
        pool.reserve(count, |bytes| {
            next += 1;
            Ok::<_, Exhausted>((Arc::new(Memory::new(bytes).unwrap()), LocalKey(next - 1)))
        })
        .unwrap();
    }

    fn trimmed(pool: &mut Pool) -> Vec<u32> {
        let mut gone = Vec::new();
        pool.trim(|key| gone.push(key.0));
        gone
    }

    #[test]
    fn a_slab_is_given_back_when_it_was_not_needed_for_a_while() {
        let mut pool = Pool::new(1 << 20, 64 << 20);
        for _ in 0..3 {
            numbered(&mut pool, 4);
        }
        assert_eq!((pool.capacity(), pool.sizes.len()), (12, 3));
        pool.unreserve(7);
        assert!(pool.is_excessive());
        assert!(trimmed(&mut pool).is_empty(), "twelve were needed since the last trimming");
        assert_eq!(trimmed(&mut pool), [2]);
        assert_eq!((pool.capacity(), pool.available()), (8, 8));
        assert!(trimmed(&mut pool).is_empty(), "five are reserved");
        // Five buffers are lent and returned between two trims. The first trim after that keeps the slabs of these
        // buffers, and the second one drops one slab.
        pool.unreserve(5);
        pool.lend(5);
        let buffer = pool.take().unwrap();
        (0..5).for_each(|_| pool.unlend(&buffer));
        pool.give(buffer);
        assert!(trimmed(&mut pool).is_empty());
        assert_eq!(trimmed(&mut pool), [1]);
        assert!(!pool.is_excessive() && trimmed(&mut pool).is_empty(), "the first one stays");
        // New slabs reuse the numbers of dropped slabs.
        numbered(&mut pool, 10);
        assert_eq!((pool.capacity(), pool.sizes.len()), (12, 3));
    }

    #[test]
    fn a_slab_with_a_buffer_in_use_stays_and_what_is_read_stays_readable() {
        let mut pool = Pool::new(1 << 20, 64 << 20);
        numbered(&mut pool, 4);
        numbered(&mut pool, 4);
        let mut taken: Vec<Buffer> = std::iter::from_fn(|| pool.take()).collect();
        let slabs = Arc::clone(pool.slabs());
        let at = taken.iter().position(|buffer| buffer.slab == 1).unwrap();
        let mut kept = taken.swap_remove(at);
        slabs.bytes_mut(&mut kept)[0] = 42;
        taken.drain(..).for_each(|buffer| pool.give(buffer));
        pool.unreserve(8);
        pool.lend(1);
        assert!(trimmed(&mut pool).is_empty() && trimmed(&mut pool).is_empty());
        assert_eq!(pool.slabs().bytes(&kept, 1), [42]);
        // After a trim, the pool takes buffers of the first slab first.
        let first = pool.take().unwrap();
        assert_eq!(first.slab, 0);
        pool.give(first);
        pool.unlend(&kept);
        pool.give(kept);
        assert_eq!(trimmed(&mut pool), [1]);
        assert_eq!((pool.capacity(), pool.available()), (4, 4));
    }

    /// The buffers of a mapped slab are separate from those of the pool. The slab is dropped when its last buffer is
    /// returned.
    #[test]
    fn a_slab_apart_goes_with_its_connection() {
        let mut pool = Pool::new(1 << 20, 10 << 20);
        pool.reserve(4, memory).unwrap();
        assert_eq!((pool.mapped_slab_len(64), pool.mapped_slab_len(2)), (Some(4 << 20), Some(2 << 20)));
        let slab = pool.add_mapped_slab(memory(4 << 20).unwrap().0, LocalKey(9)).unwrap();
        assert_eq!((slab, pool.capacity(), pool.available(), pool.mapped_slab_len(64)), (1, 4, 4, None));
        // The buffers of mapped and of ordinary slabs together count towards the pool's limit.
        assert!(pool.reserve(3, memory).is_err());
        let mut kept = pool.take_mapped(slab).unwrap();
        let slabs = Arc::clone(pool.slabs());
        slabs.bytes_mut(&mut kept)[0] = 42;
        let (posted, sge) = pool.post(kept, 8);
        assert_eq!(sge.local_key(), LocalKey(9));
        let kept = posted.done();
        let others: Vec<Buffer> = std::iter::from_fn(|| pool.take()).collect();
        assert!(others.len() == 4 && others.iter().all(|buffer| buffer.slab == 0));
        others.into_iter().for_each(|buffer| pool.give(buffer));
        assert_eq!(pool.end_mapped_slab(slab), Some(LocalKey(9)));
        assert!(trimmed(&mut pool).is_empty() && pool.mapped_slab_len(64).is_none());
        pool.unlend(&kept);
        assert_eq!(slabs.bytes(&kept, 1), [42]);
        pool.give(kept);
        assert_eq!((pool.available(), pool.capacity(), pool.mapped_slab_len(64)), (4, 4, Some(4 << 20)));
        // A new mapped slab reuses the number of the dropped one.
        assert_eq!(pool.add_mapped_slab(memory(4 << 20).unwrap().0, LocalKey(9)), Some(1));
    }

    #[test]
    fn a_posted_buffer_names_its_own_memory() {
        let mut pool = Pool::new(64, 1 << 20);
        pool.reserve(2, memory).unwrap();
        let (first, second) = (pool.take().unwrap(), pool.take().unwrap());
        let (a, sge_a) = pool.post(first, 10);
        let (b, sge_b) = pool.post(second, 999);
        assert_eq!((sge_a.len(), sge_b.len()), (10, 64));
        assert_ne!(sge_a.address(), sge_b.address());
        pool.give(a.done());
        pool.give(b.done());
    }
}
