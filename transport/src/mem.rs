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

/// Size and alignment of a huge page, bytes.
const HUGE_PAGE: usize = 2 << 20;

impl Memory {
    /// Maps `len` bytes, rounded up to whole pages; from 2 MiB on, at a multiple of that.
    ///
    /// # Errors
    /// `ENOMEM` when the system has none; `InvalidInput` for a length of 0 or past `isize::MAX`.
    pub fn new(len: usize) -> io::Result<Self> {
        const PAGE: usize = 4096;
        let len = len.checked_next_multiple_of(PAGE).filter(|&n| n > 0 && isize::try_from(n).is_ok());
        let len = len.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        // Room to move the beginning to where a huge page may begin.
        let spare = if len >= HUGE_PAGE { HUGE_PAGE - PAGE } else { 0 };
        let all = len.checked_add(spare).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no memory of ours.
        let start = unsafe { libc::mmap(ptr::null_mut(), all, rights, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let head = if spare > 0 { start.align_offset(HUGE_PAGE).min(spare) } else { 0 };
        let base = start.wrapping_byte_add(head);
        for (part, len) in [(start, head), (base.wrapping_byte_add(len), spare - head)] {
            // SAFETY: whole pages at the ends of the mapping just made, which nobody knows of.
            if len > 0 && unsafe { libc::munmap(part, len) } != 0 {
                log::warn!("{len} bytes beside a mapping cannot be given back: {}", io::Error::last_os_error());
            }
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

    /// Has the system back it by huge pages where it can: fewer faults and translations for memory that is going to be used
    /// whole, and 2 MiB at once for memory that is not. Nothing happens below 2 MiB, to vectors, and on systems without.
    pub fn prefer_huge_pages(&self) {
        if self.vector.is_none() && self.len >= HUGE_PAGE {
            // SAFETY: advice on a whole mapping of ours, which changes none of its bytes. Its failure changes nothing.
            let _ = unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, libc::MADV_HUGEPAGE) };
        }
    }

    /// Has pages that are not touched yet come from a NUMA node while that has some. Nothing happens to vectors, and where
    /// there is no such node.
    pub fn prefer_node(&self, node: u32) {
        const NODES: usize = 1024;
        let mut mask = [0_u64; NODES / 64];
        let Some(word) = mask.get_mut(node as usize / 64).filter(|_| self.vector.is_none()) else { return };
        *word |= 1 << (node % 64);
        let (base, len) = (self.base.as_ptr(), self.len);
        // SAFETY: advice on a whole mapping of ours, which changes none of its bytes, with a mask of as many bits as said.
        // Its failure changes nothing.
        let _ = unsafe { libc::syscall(libc::SYS_mbind, base, len, libc::MPOL_PREFERRED, mask.as_ptr(), NODES, 0) };
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What the system says of the mapping that an address is in.
    fn account_of(memory: &Memory) -> String {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let address = memory.as_ptr() as usize;
        let mut inside = false;
        let lines = text.lines().filter(|line| {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let hex = |text| usize::from_str_radix(text, 16).ok();
            if let Some((from, to)) = range.and_then(|(from, to)| Some((hex(from)?, hex(to)?))) {
                inside = (from..to).contains(&address);
            }
            inside
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn large_mappings_are_aligned_and_take_huge_pages() {
        for len in [HUGE_PAGE, HUGE_PAGE + 1, 3 * HUGE_PAGE + 4096] {
            let memory = Memory::new(len).unwrap();
            assert_eq!((memory.as_ptr() as usize % HUGE_PAGE, memory.len()), (0, len.next_multiple_of(4096)));
            memory.prefer_huge_pages();
            memory.write(memory.len() - 1, &[7]);
            assert_eq!(memory.read(0, 1), [0]);
            if std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
                let account = account_of(&memory);
                let flags = account.lines().find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
                assert!(flags.split(' ').any(|flag| flag == "hg"), "{account}");
            }
        }
    }

    #[test]
    fn what_cannot_be_preferred_changes_nothing() {
        let small = Memory::new(HUGE_PAGE - 4096).unwrap();
        let vector = Memory::from_vec(vec![1; 2 * HUGE_PAGE]).unwrap();
        for memory in [&small, &vector] {
            memory.prefer_huge_pages();
            for node in [0, 63, 1023, 1024, u32::MAX] {
                memory.prefer_node(node);
            }
            memory.write(5, &[9]);
            assert_eq!(memory.read(5, 1), [9]);
        }
    }
}
