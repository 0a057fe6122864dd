//! Memory that devices read and write: the region itself, and the scatter/gather entries that name parts of it.
//!
//! All unsafe code of the embedded provider is here. The rule it rests on is the one of the hardware: whoever posts a
//! work request gives up the memory it names until the work request has completed or its queue pair is destroyed.
//! [`Sge::new`] is where the promise is made; everything after it is safe.
//!
//! Memory that a peer may reach is another matter: nobody promises to leave it alone while a peer reads or writes it.
//! It is reached through `Span` only, by raw copies, by one atomic operation, or by the kernel; what a copy holds
//! when the program writes at the same time is as undefined as with an adapter, and is never acted upon.

use std::io;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::mr::LocalKey;

/// Memory to register: pages of its own, zeroed, that cost nothing until they are touched; or a vector's.
#[derive(Debug)]
pub struct Memory {
    base: NonNull<u8>,
    len: usize,
    /// Capacity of the vector it was.
    vector: Option<usize>,
}

// SAFETY: `Memory` owns its pages and gives out raw pointers only; who may use them when is promised at `Sge::new`
// and in the buffer pool.
unsafe impl Send for Memory {}
// SAFETY: as above; `&Memory` allows nothing but reading its address and length.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps `len` bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// `ENOMEM` when the system has none; `InvalidInput` for a length of 0 or past `isize::MAX`.
    pub fn new(len: usize) -> io::Result<Self> {
        const PAGE: usize = 4096;
        let len = len.checked_next_multiple_of(PAGE).filter(|&n| n > 0 && isize::try_from(n).is_ok());
        let len = len.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self { base, len, vector: None })
    }

    /// Takes a vector's bytes.
    ///
    /// # Errors
    /// `InvalidInput` for an empty one.
    pub fn from_vec(bytes: Vec<u8>) -> io::Result<Self> {
        if bytes.is_empty() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut bytes = std::mem::ManuallyDrop::new(bytes);
        let base = NonNull::new(bytes.as_mut_ptr()).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { base, len: bytes.len(), vector: Some(bytes.capacity()) })
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Never: a region has at least one page.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// First byte. Dereferencing it is up to the rules of the [module](self).
    #[must_use]
    pub const fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }
}

impl Memory {
    /// A part of it for as long as it is borrowed; `None` if that is not wholly inside.
    pub(crate) fn span(&self, offset: usize, len: usize) -> Option<Span<'_>> {
        let end = offset.checked_add(len)?;
        if end > self.len {
            return None;
        }
        // SAFETY: the offset is within the mapping, or one past its end with a length of 0.
        let base = unsafe { self.base.add(offset) };
        Some(Span { base, len, memory: PhantomData })
    }

    /// An entry for a part of it; `None` if that is not wholly inside. For [`crate::station`], and for the tests of this
    /// crate: they keep the promise of [`Sge::new`].
    pub(crate) fn entry(&self, offset: usize, len: usize, key: LocalKey) -> Option<Sge> {
        let base = self.span(offset, len)?.base;
        let len = u32::try_from(len).ok()?;
        // SAFETY: inside the mapping; the rest is promised above.
        Some(unsafe { Sge::new(base, len, key) })
    }
}

/// Part of a memory region that a peer may reach, alive while its region's table entry is borrowed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span<'a> {
    base: NonNull<u8>,
    len: usize,
    memory: PhantomData<&'a Memory>,
}

impl<'a> Span<'a> {
    /// Length in bytes.
    #[inline]
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Copies `bytes` to its start, as many as fit.
    #[inline]
    pub(crate) fn fill(self, bytes: &[u8]) {
        let len = bytes.len().min(self.len);
        // SAFETY: `base` is valid for `len` bytes while the memory is borrowed (`Memory::span`); it may overlap
        // `bytes`, and nobody else in this thread holds a reference into it.
        unsafe { ptr::copy(bytes.as_ptr(), self.base.as_ptr(), len) };
    }

    /// Appends a copy of its bytes.
    #[inline]
    pub(crate) fn append_to(self, out: &mut Vec<u8>) {
        out.reserve(self.len);
        let start = out.len();
        // SAFETY: `base` is valid for `len` bytes while the memory is borrowed; the vector has room for as many behind
        // its end, and they are written before they count.
        unsafe {
            ptr::copy(self.base.as_ptr(), out.as_mut_ptr().add(start), self.len);
            out.set_len(start + self.len);
        }
    }

    /// As a place for the kernel to receive into, for one system call; nobody may look at the bytes.
    pub(crate) fn as_iovec(self) -> &'a mut [u8] {
        // SAFETY: valid for `len` bytes while the memory is borrowed. The slice goes into a receive call and nowhere
        // else; the program's own accesses on other threads race with the kernel's, as they would with an adapter's.
        unsafe { slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }

    /// The bytes, of the sink of a Read of our own that has not completed.
    pub(crate) fn as_sink(&self) -> &[u8] {
        // SAFETY: valid for `len` bytes while the memory is borrowed. `Sge::new` promises for the entry that made it a
        // sink that nobody but the provider touches it; the provider drops the slice before it places anything.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    /// Replaces the 8 bytes at its start, aligned and in the order of this machine, by what `update` makes of them;
    /// returns what was there. `None` if it is not 8 aligned bytes.
    pub(crate) fn update(self, mut update: impl FnMut(u64) -> u64) -> Option<u64> {
        if self.len != 8 || !(self.base.as_ptr() as usize).is_multiple_of(8) {
            return None;
        }
        // SAFETY: 8 aligned bytes, valid while the memory is borrowed, touched by atomic operations here.
        let word = unsafe { AtomicU64::from_ptr(self.base.as_ptr().cast()) };
        let mut old = word.load(Ordering::SeqCst);
        // Against other threads of the program; each round means that one of them got through.
        while let Err(now) = word.compare_exchange_weak(old, update(old), Ordering::SeqCst, Ordering::SeqCst) {
            old = now;
        }
        Some(old)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(capacity) = self.vector {
            // SAFETY: the parts of the vector that `from_vec` took apart, which nobody can name any more.
            drop(unsafe { Vec::from_raw_parts(self.base.as_ptr(), self.len, capacity) });
            return;
        }
        // SAFETY: base and len are what mmap gave; the region is ours alone and nobody can name it any more.
        let rc = unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert_eq!(rc, 0, "munmap of a whole mapping");
    }
}

/// A scatter/gather entry: a part of registered memory.
#[derive(Clone, Copy, Debug)]
pub struct Sge {
    base: NonNull<u8>,
    len: u32,
    key: LocalKey,
}

impl Default for Sge {
    fn default() -> Self {
        Self { base: NonNull::dangling(), len: 0, key: LocalKey(0) }
    }
}

// SAFETY: an entry is an address with a promise (see `Sge::new`) that does not depend on the thread.
unsafe impl Send for Sge {}

impl Sge {
    /// Names `len` bytes at `base`.
    ///
    /// # Safety
    /// From the post of a work request with this entry until its completion, or the destruction of its queue pair,
    /// the memory is valid; of a send nobody writes it, of a receive or read nobody reads or writes it but through
    /// this entry.
    #[must_use]
    pub const unsafe fn new(base: NonNull<u8>, len: u32, key: LocalKey) -> Self {
        Self { base, len, key }
    }

    /// Length in bytes.
    #[must_use]
    #[inline]
    pub const fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether it names no memory.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its address.
    #[must_use]
    pub const fn address(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Its key.
    #[must_use]
    pub const fn local_key(&self) -> LocalKey {
        self.key
    }

    /// The part from `offset`, at most `len` long; empty past the end.
    #[must_use]
    #[inline]
    pub fn part(&self, offset: usize, len: usize) -> Self {
        let offset = offset.min(self.len());
        let len = len.min(self.len() - offset);
        // SAFETY: offset is within the entry.
        let base = unsafe { self.base.add(offset) };
        Self { base, len: len as u32, key: self.key }
    }

    /// The bytes, of a send that has not completed.
    #[must_use]
    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the promise of `new`: valid, and nobody writes it until the work request completes; the embedded
        // provider calls this on posted sends only and drops the slice before it reports completion.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.len()) }
    }

    /// The bytes to fill, of a receive that has not completed.
    #[inline]
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the promise of `new`: valid, and nobody else touches it until the work request completes; the
        // embedded provider calls this on posted receives only and drops the slice before it reports completion.
        unsafe { slice::from_raw_parts_mut(self.base.as_ptr(), self.len()) }
    }
}

#[cfg(test)]
impl Sge {
    pub(crate) fn with_key(self, key: LocalKey) -> Self {
        Self { key, ..self }
    }
}

/// Shorthands for the tests of this crate, which post an entry only while its memory lives and leave it alone.
#[cfg(test)]
impl Memory {
    pub(crate) fn sge(&self, offset: usize, len: usize) -> Sge {
        self.entry(offset, len, LocalKey(0)).expect("a part of the memory")
    }

    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        self.sge(offset, bytes.len()).bytes_mut().copy_from_slice(bytes);
    }

    pub(crate) fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        self.sge(offset, len).bytes().to_vec()
    }
}
