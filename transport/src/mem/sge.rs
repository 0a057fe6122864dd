//! Scatter/gather entries: the parts of registered memory that a work request names.

use std::ptr::{self, NonNull};
use std::slice;

use super::iovec::{RecvSlice, SendSlice};
use super::{Span, words};
use crate::mr::LocalKey;

/// A scatter/gather entry (`ibv_sge` in `ibv_post_send`(3)): a part of registered memory, with a promise of the program
/// about the other users of that part.
///
/// There are two kinds of entries. They differ in the users that the bytes may have, besides the provider, while a work
/// request with the entry is posted:
///
/// - [`Sge::new`]: none. The embedded provider copies the bytes with plain accesses, and sends
///   large payloads without a copy.
/// - [`super::Memory::shared_entry`]: peers, and the program through the functions of [`super::Memory`]. The embedded
///   provider copies the bytes with atomic operations. If the payload has a CRC, it sends a copy, so that the CRC
///   matches the sent bytes.
///
/// Devices treat both kinds in the same way.
#[derive(Clone, Copy, Debug)]
pub struct Sge {
    base: NonNull<u8>,
    /// The length in bytes, in the lower 31 bits. The highest bit, [`SHARED`], is set in entries of
    /// [`super::Memory::shared_entry`] and of [`Sge::of_device`].
    len: u32,
    key: LocalKey,
}

/// The bit of `Sge::len` that marks an entry of [`super::Memory::shared_entry`] or of [`Sge::of_device`].
const SHARED: u32 = 1 << 31;
/// The size of the pieces in which [`visit_copies`] copies bytes that other users may change.
const CHUNK: usize = 4096;

impl Default for Sge {
    #[inline]
    fn default() -> Self {
        Self { base: NonNull::dangling(), len: 0, key: LocalKey(0) }
    }
}

// SAFETY: an entry is an address with a promise (`Sge::new`, `Memory::shared_entry`). The promise does not depend on
// the thread.
unsafe impl Send for Sge {}

impl Sge {
    /// The maximum length of an entry: 2 GiB less one byte, which is also the limit of adapters.
    pub const MAX_LEN: u32 = SHARED - 1;

    /// Makes an entry for `len` bytes at `base` that have no other user than the provider. `len` is at most
    /// [`Sge::MAX_LEN`].
    ///
    /// # Safety
    /// The caller promises the following for the time from the post of a work request with this entry until the work
    /// request is done. The first guarantee of [`Provider`](crate::Provider) lists when a work request is done. It is
    /// not done if [`destroy_id`](crate::Provider::destroy_id) of its queue pair has failed.
    ///
    /// - The bytes are valid and initialised.
    /// - If the work request is a send or a write, nothing changes the bytes.
    /// - If it is a receive, a read or an atomic operation, nothing but the provider uses the bytes.
    ///
    /// If the bytes are in a [`super::Memory`], the promise also covers all other bytes of the aligned 8-byte words in
    /// which they are.
    #[must_use]
    #[inline]
    pub const unsafe fn new(base: NonNull<u8>, len: u32, key: LocalKey) -> Self {
        debug_assert!(len <= Self::MAX_LEN);
        Self { base, len: len & Self::MAX_LEN, key }
    }

    /// Makes the entry of [`super::Memory::shared_entry`].
    ///
    /// # Safety
    /// The bytes are a part of a `Memory`. The caller keeps the promise of `shared_entry`.
    #[inline]
    pub(super) const unsafe fn shared(base: NonNull<u8>, len: u32, key: LocalKey) -> Self {
        debug_assert!(len <= Self::MAX_LEN);
        Self { base, len: len & Self::MAX_LEN | SHARED, key }
    }

    /// The lowest address of an entry that names memory of a device. The system maps no memory of a program at this
    /// address or above it. So these entries can be recognised, and the processor never copies their bytes.
    pub const DEVICE: u64 = 1 << 63;

    /// Makes an entry for `len` bytes from `address` on, in a region that was registered for a dma-buf. Returns `None`
    /// if `address` is below [`Sge::DEVICE`] or `len` exceeds [`Sge::MAX_LEN`].
    ///
    /// # Safety
    /// The bytes are inside a region that [`register_dmabuf`](crate::roles::ForeignMemory::register_dmabuf) has
    /// registered at addresses from [`Sge::DEVICE`] on, and `key` is the key of that region. Work requests with this
    /// entry are posted only to the provider of that region.
    #[must_use]
    pub const unsafe fn of_device(address: u64, len: usize, key: LocalKey) -> Option<Self> {
        if address < Self::DEVICE || len > Self::MAX_LEN as usize {
            return None;
        }
        let Some(base) = NonNull::new(ptr::without_provenance_mut(address as usize)) else { return None };
        Some(Self { base, len: len as u32 | SHARED, key })
    }

    /// Returns true if the bytes are memory of a device, which the processor cannot access.
    #[must_use]
    #[inline]
    pub fn is_of_device(&self) -> bool {
        self.base.as_ptr().addr() as u64 >= Self::DEVICE
    }

    /// Returns the length, in bytes.
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

    /// Returns true if the bytes may have other users while a work request with the entry is posted.
    #[must_use]
    #[inline]
    pub const fn is_shared(&self) -> bool {
        self.len & SHARED != 0
    }

    /// Returns the address of the first byte.
    #[must_use]
    #[inline]
    pub const fn address(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Returns the key of the region.
    #[must_use]
    #[inline]
    pub const fn local_key(&self) -> LocalKey {
        self.key
    }

    /// Returns an entry for at most `len` bytes from `offset` on. Returns an empty entry if `offset` is past the end.
    #[must_use]
    #[inline]
    pub fn part(&self, offset: usize, len: usize) -> Self {
        let offset = offset.min(self.len());
        let len = len.min(self.len() - offset);
        // Use wrapping arithmetic, because device memory is not an allocation of this program. If the address wraps to
        // null, the part is empty, and any address is correct.
        let base = NonNull::new(self.base.as_ptr().wrapping_add(offset)).unwrap_or(self.base);
        Self { base, len: len as u32 | self.len & SHARED, key: self.key }
    }

    /// Returns an entry for the same bytes, with another key.
    ///
    /// # Safety
    /// The promise of the function that made the entry holds for the new key, too.
    #[must_use]
    #[inline]
    pub const unsafe fn with_key(self, key: LocalKey) -> Self {
        Self { key, ..self }
    }

    // The following functions are for providers, which call them through `EntryAccess`.

    /// Copies the bytes to `out`. Copies fewer bytes if `out` is shorter.
    #[inline]
    pub(super) fn copy_to(&self, out: &mut [u8]) {
        // SAFETY: the entry and `out` have at least this number of bytes.
        unsafe { self.copy(out.as_mut_ptr(), self.len().min(out.len())) };
    }

    /// Appends a copy of the bytes to `out`.
    #[inline]
    pub(super) fn append_to(&self, out: &mut Vec<u8>) {
        let (start, len) = (out.len(), self.len());
        out.reserve(len);
        // SAFETY: the vector has reserved `len` bytes past its end, and they are written before `set_len` includes
        // them.
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
        // SAFETY: the bytes are valid by the promise of the entry. While an entry of `new` is posted, nothing changes
        // the bytes of a send, and only the provider changes the bytes of a receive, but not during this call. The
        // bytes of an entry of `shared_entry` are a part of a `Memory`, and only atomic operations and devices use
        // these bytes. The caller owns the bytes at `to`, so they are not in posted memory.
        unsafe {
            if self.is_shared() {
                words::load(self.base, to, len);
            } else {
                ptr::copy_nonoverlapping(self.base.as_ptr(), to, len);
            }
        }
    }

    /// Copies `bytes` to the start of the entry. Copies fewer bytes if the entry is shorter.
    #[inline]
    pub(super) fn fill(&self, bytes: &[u8]) {
        let len = self.len().min(bytes.len());
        // SAFETY: the bytes are valid by the promise of the entry. An entry of `new` belongs to a posted receive or
        // read, so nothing but the provider uses the bytes until that work request completes. The provider holds no
        // reference to them between calls. The bytes of an entry of `shared_entry` are a part of a `Memory`, and only
        // atomic operations and devices use these bytes.
        unsafe {
            if self.is_shared() {
                words::store(bytes.as_ptr(), self.base, len);
            } else {
                ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.as_ptr(), len);
            }
        }
    }

    /// Copies the bytes of `from` to the start of the entry. Copies fewer bytes if the entry is shorter. Other users
    /// may write `from` at the same time.
    #[inline]
    pub(super) fn fill_from(&self, from: Span<'_>) {
        let len = self.len().min(from.len());
        // SAFETY: the entry's bytes are valid, and no reference to them exists, by the promise of
        // `new` or `shared_entry`. The bytes of `from` are a part of a borrowed `Memory`: only
        // atomic operations, devices and the kernel use them. The same is true for the bytes of an
        // entry of `shared_entry`. Nothing but this call uses the bytes of an entry of `new`, so
        // these do not overlap `from`.
        unsafe {
            if self.is_shared() {
                words::transfer(from.base(), self.base, len);
            } else {
                words::load(from.base(), self.base.as_ptr(), len);
            }
        }
    }

    /// Copies the first bytes of the entry to `to`, at most `most` bytes. `to` is a part of a borrowed `Memory` with at
    /// least `most` bytes.
    #[inline]
    pub(super) fn store_into(&self, to: NonNull<u8>, most: usize) {
        let len = self.len().min(most);
        // SAFETY: the entry's bytes are valid by the promise of `new` or `shared_entry`. During
        // this call nothing changes the bytes of an entry of `new`. The bytes of an entry of
        // `shared_entry`, and those at `to`, are a part of a `Memory`. Nothing else uses the bytes
        // of an entry of `new`, so they do not overlap those at `to`.
        unsafe {
            if self.is_shared() {
                words::transfer(self.base, to, len);
            } else {
                words::store(self.base.as_ptr(), to, len);
            }
        }
    }

    /// Calls `each` with the bytes of the entry, in order. If nothing may change the bytes, `each` gets all of them in
    /// place, in one call. Otherwise `each` gets copies of consecutive parts.
    #[inline]
    pub(super) fn visit(&self, mut each: impl FnMut(&[u8])) {
        if self.is_shared() {
            // SAFETY: the bytes are a part of a `Memory` by the promise of `shared_entry`.
            return unsafe { visit_copies(self.base, self.len(), each) };
        }
        // SAFETY: the bytes are valid, and nothing but the provider may change them, by the promise of `Sge::new`. The
        // slice exists until this call returns, and in this time the provider does not write to posted memory.
        each(unsafe { slice::from_raw_parts(self.base.as_ptr(), self.len()) });
    }

    /// Returns the bytes as a buffer for a send call.
    #[inline]
    pub(super) fn send_slice(&self) -> SendSlice<'_> {
        // SAFETY: the bytes are valid by the promise of the entry until its work request is done.
        unsafe { SendSlice::from_parts(self.base, self.len(), self.is_shared()) }
    }

    /// Returns the bytes as a buffer for a receive call.
    #[inline]
    pub(super) fn receive_slice(&self) -> RecvSlice<'_> {
        // SAFETY: the bytes are valid by the promise of the entry until its work request is done.
        unsafe { RecvSlice::from_parts(self.base, self.len(), self.is_shared()) }
    }
}

/// Calls `each` with copies of consecutive parts of the `len` bytes at `base`.
///
/// # Safety
/// The bytes are a part of a `Memory` that is not freed during the call. Only atomic operations, devices and the kernel
/// use them.
pub(super) unsafe fn visit_copies(base: NonNull<u8>, len: usize, mut each: impl FnMut(&[u8])) {
    let mut copy = [0; CHUNK];
    let mut done = 0;
    while done < len {
        let now = (len - done).min(CHUNK);
        // SAFETY: the caller promises that the bytes are a part of a `Memory`. `copy` is a local array.
        unsafe { words::load(base.add(done), copy.as_mut_ptr(), now) };
        each(&copy[..now]);
        done += now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Device addresses are in no allocation of this program. Pointer arithmetic that must stay within an allocation is
    /// undefined behaviour for them, and Miri would fail this test.
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
        // The address after the last byte would wrap to 0, which is no valid address. An empty part there keeps the
        // entry's address.
        let last = of_device(u64::MAX - 7, 8).unwrap();
        assert_eq!((last.part(7, 1).address().addr(), last.part(8, 1).len()), (usize::MAX, 0));
        assert!(last.part(8, 1).is_of_device());
        assert!(of_device(Sge::DEVICE - 1, 1).is_none());
    }
}
