//! Scatter/gather entries: the parts of registered memory that a work request names.

use std::ptr::{self, NonNull};
use std::slice;

use super::iovec::{RecvSlice, SendSlice};
use super::{Span, words};
use crate::mr::LocalKey;

/// A scatter/gather entry (`ibv_sge` in `ibv_post_send`(3)): a part of registered memory, with a promise about it.
///
/// There are two kinds, which differ in who else may use the memory while a work request has it: nobody ([`Sge::new`]),
/// or peers and the program itself through the functions of [`super::Memory`] ([`super::Memory::shared_entry`]). The
/// embedded provider copies from an entry of the first kind with plain accesses, and sends its large payloads without a
/// copy. It copies from an entry of the second kind with atomic operations, and sends a copy if the payload has a CRC,
/// so that the CRC matches the bytes that are sent. Devices do not distinguish the kinds.
#[derive(Clone, Copy, Debug)]
pub struct Sge {
    base: NonNull<u8>,
    /// The length, with the kind in the highest bit.
    len: u32,
    key: LocalKey,
}

/// The bit of `Sge::len` that is set in an entry of `shared_entry`.
const SHARED: u32 = 1 << 31;
/// The size of the copies by which [`visit_copies`] shows bytes that others may write.
const CHUNK: usize = 4096;

impl Default for Sge {
    fn default() -> Self {
        Self { base: NonNull::dangling(), len: 0, key: LocalKey(0) }
    }
}

// SAFETY: an entry is an address with a promise (`Sge::new`, `Memory::shared_entry`) that does not depend on the
// thread.
unsafe impl Send for Sge {}

impl Sge {
    /// The longest entry: 2 GiB less one byte, as on adapters.
    pub const MAX_LEN: u32 = SHARED - 1;

    /// Makes an entry for `len` bytes at `base`, at most [`Sge::MAX_LEN`], that nobody else uses.
    ///
    /// # Safety
    /// From the post of a work request with this entry until its completion was polled, or
    /// [`destroy_id`](crate::Provider::destroy_id) of its queue pair has returned, the bytes are valid and initialised.
    /// In that time nobody writes them if the work request is a send or a write; if it is a receive, a read or an
    /// atomic operation, only the provider reads or writes them. The same holds for bytes of a [`super::Memory`] that
    /// share an aligned word of 8 bytes with them.
    #[must_use]
    #[inline]
    pub const unsafe fn new(base: NonNull<u8>, len: u32, key: LocalKey) -> Self {
        debug_assert!(len <= Self::MAX_LEN);
        Self { base, len: len & Self::MAX_LEN, key }
    }

    /// Makes the entry of [`super::Memory::shared_entry`].
    ///
    /// # Safety
    /// As for `shared_entry`; the bytes are a part of a `Memory`.
    #[inline]
    pub(super) const unsafe fn shared(base: NonNull<u8>, len: u32, key: LocalKey) -> Self {
        debug_assert!(len <= Self::MAX_LEN);
        Self { base, len: len & Self::MAX_LEN | SHARED, key }
    }

    /// The lowest address that names memory of a device. No program has memory mapped in this half of the address
    /// space, so such entries can be told from others, and the processor never copies from there.
    pub const DEVICE: u64 = 1 << 63;

    /// Makes an entry for `len` bytes, at most [`Sge::MAX_LEN`], of a region over a dma-buf, from `address` on. `None`
    /// if the address is below [`Sge::DEVICE`] or the entry would be too long.
    ///
    /// # Safety
    /// The bytes are inside a region that [`register_dmabuf`](crate::roles::ForeignMemory::register_dmabuf) has
    /// registered at addresses from [`Sge::DEVICE`] on, and `key` is the key of that region. Work requests with this
    /// entry are posted to the provider of that region only.
    #[must_use]
    pub const unsafe fn of_device(address: u64, len: usize, key: LocalKey) -> Option<Self> {
        if address < Self::DEVICE || len > Self::MAX_LEN as usize {
            return None;
        }
        let Some(base) = NonNull::new(ptr::without_provenance_mut(address as usize)) else { return None };
        Some(Self { base, len: len as u32 | SHARED, key })
    }

    /// Returns true if the bytes are memory of a device, which only devices can access.
    #[must_use]
    #[inline]
    pub fn is_of_device(&self) -> bool {
        self.base.as_ptr().addr() as u64 >= Self::DEVICE
    }

    /// Returns the length, bytes.
    #[must_use]
    #[inline]
    pub const fn len(&self) -> usize {
        (self.len & Self::MAX_LEN) as usize
    }

    /// Returns true if the entry has no bytes.
    #[must_use]
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns true if others may use the memory while a work request has it.
    #[must_use]
    #[inline]
    pub const fn is_shared(&self) -> bool {
        self.len & SHARED != 0
    }

    /// Returns the address.
    #[must_use]
    #[inline]
    pub const fn address(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Returns the key.
    #[must_use]
    #[inline]
    pub const fn local_key(&self) -> LocalKey {
        self.key
    }

    /// Returns the part from `offset` on, at most `len` bytes; an empty entry if `offset` is past the end.
    #[must_use]
    #[inline]
    pub fn part(&self, offset: usize, len: usize) -> Self {
        let offset = offset.min(self.len());
        let len = len.min(self.len() - offset);
        // Memory of a device has no provenance. A part that would begin at null is empty, and keeps the address of the
        // entry.
        let base = NonNull::new(self.base.as_ptr().wrapping_add(offset)).unwrap_or(self.base);
        Self { base, len: len as u32 | self.len & SHARED, key: self.key }
    }

    /// Appends a copy of the bytes to `out`, for a provider that executes the work request of the entry.
    ///
    /// # Safety
    /// The work request of the entry was posted to the provider and is not done.
    #[inline]
    pub unsafe fn load(&self, out: &mut Vec<u8>) {
        self.append_to(out);
    }

    /// Copies `bytes` to the start, as many as fit, for a provider that executes the work request of the entry.
    ///
    /// # Safety
    /// As for [`Sge::load`]; the work request is a receive, a read or an atomic operation.
    #[inline]
    pub unsafe fn store(&self, bytes: &[u8]) {
        self.fill(bytes);
    }

    // Functions of the embedded provider, for entries of work requests that were posted to it and are not done.

    /// Copies the first bytes to `out`, as many as fit.
    #[inline]
    pub(crate) fn copy_to(&self, out: &mut [u8]) {
        // SAFETY: `out` has room for this number of bytes.
        unsafe { self.copy(out.as_mut_ptr(), self.len().min(out.len())) };
    }

    /// Appends a copy of the bytes to `out`.
    #[inline]
    pub(crate) fn append_to(&self, out: &mut Vec<u8>) {
        let (start, len) = (out.len(), self.len());
        out.reserve(len);
        // SAFETY: the vector has room for `len` bytes behind its end, which are written before they are counted.
        unsafe {
            self.copy(out.as_mut_ptr().add(start), len);
            out.set_len(start + len);
        }
    }

    /// Copies the first `len` bytes to `to`.
    ///
    /// # Safety
    /// The entry has `len` bytes, and the caller may write `len` bytes at `to`.
    #[inline]
    pub(super) unsafe fn copy(&self, to: *mut u8, len: usize) {
        // SAFETY: the bytes are valid by the promise of the entry. An entry of `new` belongs to a posted send, which
        // nobody writes, or to a posted receive, which only the provider writes, and not now. The bytes of one of
        // `shared_entry` are a part of a `Memory`, used by atomic operations and devices. The bytes at `to` belong to
        // the caller, so they are no part of posted memory.
        unsafe {
            if self.is_shared() {
                words::load(self.base, to, len);
            } else {
                ptr::copy_nonoverlapping(self.base.as_ptr(), to, len);
            }
        }
    }

    /// Copies `bytes` to the start, as many as fit.
    #[inline]
    pub(crate) fn fill(&self, bytes: &[u8]) {
        let len = self.len().min(bytes.len());
        // SAFETY: the bytes are valid by the promise of the entry. An entry of `new` that is filled belongs to a posted
        // receive or read, which nobody else uses on any thread until it has completed; the provider holds no reference
        // to its bytes between calls. The bytes of one of `shared_entry` are a part of a `Memory`, used by atomic
        // operations and devices.
        unsafe {
            if self.is_shared() {
                words::store(bytes.as_ptr(), self.base, len);
            } else {
                ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.as_ptr(), len);
            }
        }
    }

    /// Copies the first bytes of `from`, which others may write at the same time, to the start, as many as fit.
    #[inline]
    pub(crate) fn fill_from(&self, from: Span<'_>) {
        let len = self.len().min(from.len());
        // SAFETY: the bytes are valid by the promise of the entry, as in `fill`; those of `from` are a part of a
        // borrowed `Memory`. If both are parts of a `Memory`, they are used by atomic operations, devices and the
        // kernel only.
        unsafe {
            if self.is_shared() {
                words::transfer(from.base(), self.base, len);
            } else {
                words::load(from.base(), self.base.as_ptr(), len);
            }
        }
    }

    /// Copies the first bytes, at most `most`, to `to`: a part of a borrowed `Memory` that has at least `most` bytes.
    #[inline]
    pub(super) fn store_into(&self, to: NonNull<u8>, most: usize) {
        let len = self.len().min(most);
        // SAFETY: the bytes are valid by the promise of the entry, as in `copy`; those at `to` belong to a `Memory`.
        unsafe {
            if self.is_shared() {
                words::transfer(self.base, to, len);
            } else {
                words::store(self.base.as_ptr(), to, len);
            }
        }
    }

    /// Calls `each` with the bytes, in order: with all of them in place if nobody may write them, otherwise with copies
    /// of parts.
    #[inline]
    pub(crate) fn visit(&self, mut each: impl FnMut(&[u8])) {
        if self.is_shared() {
            // SAFETY: the bytes are a part of a `Memory` by the promise of `shared_entry`.
            return unsafe { visit_copies(self.base, self.len(), each) };
        }
        // SAFETY: as in `copy`; the slice lives until this call returns, and the provider writes no posted memory in
        // that time.
        each(unsafe { slice::from_raw_parts(self.base.as_ptr(), self.len()) });
    }

    /// Returns the bytes as a buffer for a send call.
    #[inline]
    pub(crate) fn send_slice(&self) -> SendSlice<'_> {
        // SAFETY: the bytes are valid by the promise of the entry, for as long as the provider has its work request.
        unsafe { SendSlice::from_parts(self.base, self.len(), self.is_shared()) }
    }

    /// Returns the bytes as a buffer for a receive call.
    #[inline]
    pub(crate) fn receive_slice(&self) -> RecvSlice<'_> {
        // SAFETY: the bytes are valid by the promise of the entry, for as long as the provider has its work request.
        unsafe { RecvSlice::from_parts(self.base, self.len(), self.is_shared()) }
    }
}

/// Calls `each` with copies of `len` bytes at `base`, part by part.
///
/// # Safety
/// The bytes are a part of a live `Memory`, used by atomic operations, devices and the kernel only.
pub(super) unsafe fn visit_copies(base: NonNull<u8>, len: usize, mut each: impl FnMut(&[u8])) {
    let mut copy = [0; CHUNK];
    let mut done = 0;
    while done < len {
        let now = (len - done).min(CHUNK);
        // SAFETY: the bytes are a part of those that the caller promises; the copy is a local array.
        unsafe { words::load(base.add(done), copy.as_mut_ptr(), now) };
        each(&copy[..now]);
        done += now;
    }
}

#[cfg(any(test, fuzz_targets))]
impl Sge {
    /// Returns an entry for the same bytes with another key.
    pub(crate) fn with_key(self, key: LocalKey) -> Self {
        Self { key, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Addresses of a device belong to no memory of this program. Pointer arithmetic that must stay within an
    /// allocation is undefined for them, and Miri would end the test there.
    #[test]
    fn parts_of_device_memory_are_parts_of_its_addresses() {
        // SAFETY: the entries are never posted.
        let of_device = |address, len| unsafe { Sge::of_device(address, len, LocalKey(7)) };
        let whole = of_device(Sge::DEVICE + 8, 4096).unwrap();
        for (offset, len, wanted) in
            [(0, 4096, (0, 4096)), (100, 50, (100, 50)), (4000, 500, (4000, 96)), (5000, 1, (4096, 0))]
        {
            let part = whole.part(offset, len);
            assert_eq!(part.address().addr() as u64, Sge::DEVICE + 8 + wanted.0);
            assert_eq!((part.len(), part.local_key(), part.is_shared()), (wanted.1, LocalKey(7), true));
            assert!(part.is_of_device());
        }
        // The end of the address space is no address. An empty part there keeps a valid one.
        let last = of_device(u64::MAX - 7, 8).unwrap();
        assert_eq!((last.part(7, 1).address().addr(), last.part(8, 1).len()), (usize::MAX, 0));
        assert!(last.part(8, 1).is_of_device());
        assert!(of_device(Sge::DEVICE - 1, 1).is_none());
    }
}
