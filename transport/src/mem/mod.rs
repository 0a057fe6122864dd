//! Memory that devices read and write, the entries by which work requests name parts of it, and the buffers of system
//! calls.
//!
//! | file | holds |
//! |---|---|
//! | `mod.rs` | [`Memory`]: pages or a vector, and copies that may race with other accesses |
//! | `advice.rs` | advice to the system about the pages of a memory (Linux) |
//! | `access.rs` | [`EntryAccess`]: the use of entries by a provider |
//! | `file.rs` | memory in a memory file of the program (Linux) |
//! | `sge.rs` | [`Sge`]: an entry of a work request, with a promise about the other users of its bytes |
//! | `span.rs` | parts of a memory that peers may use at the same time |
//! | `shared.rs` | memory files that two processes map (Linux): [`Memory::new_shared`], [`Window`] |
//! | `frame.rs` | appending a frame (header, payload, padding) to a vector |
//! | `iovec.rs` | [`SendSlice`], [`RecvSlice`]: buffers of send and receive calls |
//! | `words.rs` | copies by atomic operations |
//!
//! At any time, each aligned word of 8 bytes of a [`Memory`] is used in one of two ways.
//!
//! - *Exclusive use.* The word has one user: a reference of the program, or a work request whose entry is from
//!   [`Sge::new`]. It may have several such users while all of them only read it. Making the reference or the entry is
//!   unsafe: the code that makes it promises that nothing else uses the word in the meantime, or that nothing changes
//!   the word.
//! - *Shared use.* The word has any number of users. The program uses the word through the functions of [`Memory`], on
//!   any thread. Peers and work requests use it through a device, which is the embedded provider or the kernel.
//!   Accesses by this process are atomic on whole words, so they are no data race. Accesses from outside the process
//!   are no data race either. A copy that is made during a write is a mixture: each of its words is a value that the
//!   word had at some moment during the copy.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;
#[cfg(target_os = "linux")]
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::mr::LocalKey;

mod access;
#[cfg(target_os = "linux")]
mod advice;
#[cfg(target_os = "linux")]
mod file;
pub mod frame;
mod iovec;
mod sge;
#[cfg(target_os = "linux")]
mod shared;
mod span;
mod words;

pub use access::EntryAccess;
pub use iovec::{MAX_SLICES, RecvSlice, SendSlice, receive, send};
pub use sge::Sge;
#[cfg(target_os = "linux")]
pub use shared::{Sharing, Window};
pub use span::Span;

/// Memory that can be registered: zeroed pages, the bytes of a vector, a memory file, or memory that the program has
/// allocated itself. The system allocates zeroed pages when they are first used. The memory begins at a multiple of 8
/// bytes. Only a memory that is made of a vector may have a length that is not a multiple of 8. Then the remaining bytes
/// of its last word also belong to the memory, and nothing else uses them.
#[derive(Debug)]
pub struct Memory {
    base: NonNull<u8>,
    len: usize,
    backing: Backing,
    /// The memory file that holds the bytes, if its descriptor may be sent to another process. Otherwise `None`.
    file: Option<OwnedFd>,
}

/// The origin of a memory. It decides how the memory is freed.
#[derive(Debug)]
enum Backing {
    /// A mapping with this length, in bytes.
    Mapping(usize),
    /// A mapping of a whole memory file with this length, in bytes. If the flag is true, the pages
    /// of the file are removed when the memory is dropped.
    #[cfg(target_os = "linux")]
    Lent(usize, AtomicBool),
    /// A vector with this capacity, in bytes. All words that contain a byte of the memory are inside the capacity, and
    /// are initialised.
    Vector(usize),
    /// Memory that the program has allocated. `Memory` does not free it.
    Foreign,
}

// SAFETY: a `Memory` owns its bytes, and no operation on them depends on the thread.
unsafe impl Send for Memory {}
// SAFETY: functions of `&Memory` access the bytes by relaxed atomic operations only, each on a whole aligned word. Code
// that makes references or entries from the address promises to keep the rule of this module.
unsafe impl Sync for Memory {}

/// Returns the page size of this system, in bytes. It is 4 KiB on most systems, and 16 or 64 KiB on some.
#[must_use]
pub fn page_size() -> usize {
    // SAFETY: the call only returns a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Rounds `len` bytes up to a multiple of `page`, the size of a page in bytes. Returns 0 if the
/// result would overflow.
#[must_use]
pub fn in_pages(len: usize, page: usize) -> usize {
    len.checked_next_multiple_of(page).unwrap_or(0)
}

/// Page sizes, in bytes, that are larger than those of the systems that run the tests.
#[cfg(test)]
pub(crate) const LARGER_PAGES: [usize; 2] = [16 << 10, 64 << 10];

/// The size of a huge page, which is also its alignment, in bytes.
const HUGE_PAGE: usize = 2 << 20;

impl Memory {
    /// Maps `len` zeroed bytes, rounded up to whole pages. If `len` is at least 2 MiB, the memory begins at a multiple
    /// of 2 MiB, so that the system can use huge pages.
    ///
    /// # Errors
    /// `ENOMEM` if the system has no memory left; `InvalidInput` if `len` is 0 or above `isize::MAX`.
    pub fn new(len: usize) -> io::Result<Self> {
        Self::in_pages(len, page_size())
    }

    fn in_pages(len: usize, page: usize) -> io::Result<Self> {
        let len = Some(in_pages(len, page)).filter(|&n| n > 0 && isize::try_from(n).is_ok());
        let len = len.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        if cfg!(any(fuzzing, heap_memory)) {
            // Miri returns vectors at any address, aligned or not. `from_vec` copies an unaligned vector to a new
            // `Memory`, which would call this function again without end. So allocate vectors until one is aligned.
            let mut vectors = std::iter::repeat_with(|| vec![0; len]);
            return Self::from_vec(vectors.find(|bytes| bytes.as_ptr().addr() % words::WORD == 0).unwrap_or_default());
        }
        // Map more bytes than needed, so that the memory can begin at a multiple of the huge page's size.
        let spare = if len >= HUGE_PAGE { HUGE_PAGE - page } else { 0 };
        let all = len.checked_add(spare).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: the kernel chooses the address of the new mapping, so the mapping overlaps no memory in use.
        let start = unsafe { libc::mmap(ptr::null_mut(), all, rights, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let head = if spare > 0 { start.align_offset(HUGE_PAGE).min(spare) } else { 0 };
        let base = start.wrapping_byte_add(head);
        for (part, len) in [(start, head), (base.wrapping_byte_add(len), spare - head)] {
            // SAFETY: these are whole pages at the ends of the new mapping. No other pointer to them exists.
            if len > 0 && unsafe { libc::munmap(part, len) } != 0 {
                local_log!(Warn, "cannot unmap {len} bytes beside a mapping: {}", io::Error::last_os_error());
            }
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self { base, len, backing: Backing::Mapping(len), file: None })
    }

    /// Makes a memory of the bytes of a vector. Copies the bytes if the vector does not begin at a multiple of 8, or if
    /// its capacity is too small to round its length up to whole words.
    ///
    /// # Errors
    /// `InvalidInput` for an empty vector; `ENOMEM` if a copy is necessary and the system has no memory left.
    pub fn from_vec(mut bytes: Vec<u8>) -> io::Result<Self> {
        let len = bytes.len();
        if len == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        bytes.resize(len.next_multiple_of(words::WORD), 0);
        if bytes.as_ptr().addr() % words::WORD != 0 {
            let mut memory = Self::new(len)?;
            let copied = memory.copy_in(0, &bytes[..len]);
            debug_assert!(copied, "the mapping is as long as the vector at least");
            memory.len = len;
            return Ok(memory);
        }
        let mut bytes = std::mem::ManuallyDrop::new(bytes);
        let base = NonNull::new(bytes.as_mut_ptr()).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { base, len, backing: Backing::Vector(bytes.capacity()), file: None })
    }

    /// Makes a `Memory` of memory that the program has allocated itself, such as a mapping of
    /// another library. Dropping the result does not free the memory.
    ///
    /// # Errors
    /// `InvalidInput` if the address or the length is not a multiple of 8, or if the length is 0.
    ///
    /// # Safety
    /// Until the result is dropped, the bytes stay mapped for reading and writing at the same
    /// address, and are used only as the rule of the [module](self) allows. A provider that
    /// registers the result keeps an `Arc` of it until the region is deregistered or the provider
    /// is dropped, and longer if a device can still access the memory. So the result is dropped
    /// when the program and all providers have dropped their `Arc`s, which may never happen.
    pub unsafe fn from_raw(base: NonNull<u8>, len: usize) -> io::Result<Self> {
        if len == 0 || len % words::WORD != 0 || base.as_ptr().addr() % words::WORD != 0 {
            let what = format!("{len} bytes at {base:?}: address and length must be multiples of 8");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        Ok(Self { base, len, backing: Backing::Foreign, file: None })
    }

    /// Returns the length, in bytes.
    #[must_use]
    #[inline]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns false: no memory has a length of 0.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the first byte. A program that accesses the bytes through this pointer must keep the rule
    /// of the [module](self).
    #[must_use]
    #[inline]
    pub const fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Removes the descriptor of the memory file from this `Memory`, and returns the descriptor.
    /// Returns `None` if there is no descriptor. A caller that sends the descriptor to only one
    /// process uses this function, and closes the descriptor after it is sent.
    pub fn take_file(&mut self) -> Option<OwnedFd> {
        self.file.take()
    }

    /// Returns the descriptor of the memory file. Returns `None` if the memory is not in a file
    /// that can be sent.
    #[must_use]
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    /// Copies the bytes from `offset` on into the whole of `out`. Returns false, and copies nothing, if the range
    /// exceeds the memory.
    ///
    /// Any thread may call this function, even while other threads, peers or work requests with shared entries use the
    /// same bytes. If one of these writes during the call, `out` is a mixture of old and new words. The call never
    /// blocks.
    #[must_use]
    #[inline]
    pub fn copy_out(&self, offset: usize, out: &mut [u8]) -> bool {
        self.span(offset, out.len()).map(|span| span.copy_to(out)).is_some()
    }

    /// Copies `bytes` into the memory at `offset`. Returns false, and copies nothing, if the range exceeds the memory.
    ///
    /// Any thread may call this function, even while other threads, peers or work requests with shared entries use the
    /// same bytes. A concurrent reader gets a mixture of old and new words. After two concurrent writes, each byte has
    /// the value of one of the writes. Bytes outside the range do not change. The call never blocks.
    #[must_use]
    #[inline]
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) -> bool {
        self.span(offset, bytes.len()).map(|span| span.fill(bytes)).is_some()
    }

    /// Returns the word at `offset`, on which the program can use loads, stores and atomic operations. Returns `None`
    /// if `offset` is not a multiple of 8 or the word is not inside the memory.
    ///
    /// The value is in the byte order of this machine. Atomic operations of a peer of the embedded
    /// provider are also atomic with respect to this reference. On other devices, a peer's atomic
    /// operations may not be atomic with respect to this reference ([`crate::Features::ATOMICS`]).
    #[must_use]
    #[inline]
    pub fn word(&self, offset: usize) -> Option<&AtomicU64> {
        self.span(offset, words::WORD)?.word()
    }

    /// Makes an entry for a part of the memory. While a work request with the entry is posted, the bytes of the part
    /// may have other users. Returns `None` if the part is not inside the memory, or is longer than [`Sge::MAX_LEN`].
    ///
    /// # Safety
    /// The caller promises the following for the time from the post of a work request with this entry until the work
    /// request is done. The first guarantee of [`Provider`](crate::Provider) lists when a work request is done. It is
    /// not done if [`destroy_id`](crate::Provider::destroy_id) of its queue pair has failed.
    ///
    /// - The memory is not freed.
    /// - Only the functions of this type, peers and other work requests use the words of this part.
    /// - References to these words exist only while nothing writes the words. A receive, a read and an atomic operation
    ///   write them.
    #[must_use]
    #[inline]
    pub unsafe fn shared_entry(&self, range: Range<usize>, key: LocalKey) -> Option<Sge> {
        let span = self.span(range.start, range.end.checked_sub(range.start)?)?;
        let len = u32::try_from(span.len()).ok().filter(|&len| len <= Sge::MAX_LEN)?;
        // SAFETY: the span is a part of this memory. The caller of `shared_entry` keeps the promise in its section
        // Safety.
        Some(unsafe { Sge::shared(span.base(), len, key) })
    }

    /// Returns a [`Span`] for a part of the memory. The span borrows the memory. Returns `None` if the part is not
    /// inside the memory.
    #[must_use]
    #[inline]
    pub fn span(&self, offset: usize, len: usize) -> Option<Span<'_>> {
        Span::new(self, offset, len)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let base = self.base;
        let unmap = |len| {
            // SAFETY: this is the whole mapping that a constructor made. Nothing uses it any more.
            let rc = unsafe { libc::munmap(base.as_ptr().cast(), len) };
            debug_assert_eq!(rc, 0, "munmap of a whole mapping");
        };
        match self.backing {
            // SAFETY: the pointer and the capacity are those of the vector that `from_vec` has dismantled, and the
            // length is at most the vector's length. Nothing uses the bytes any more.
            Backing::Vector(capacity) => drop(unsafe { Vec::from_raw_parts(base.as_ptr(), self.len, capacity) }),
            Backing::Foreign => {}
            Backing::Mapping(len) => unmap(len),
            #[cfg(target_os = "linux")]
            Backing::Lent(len, ref removes) => {
                if removes.load(Relaxed) {
                    // SAFETY: this is the mapping of a whole file. Nothing uses it any more.
                    unsafe { shared::remove_pages(base, len) };
                }
                unmap(len);
            }
        }
    }
}

#[cfg(test)]
mod hostile_file;
#[cfg(test)]
mod test_memory;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::test_memory::TestMemory;

    /// Returns the entry of `/proc/self/smaps` for the mapping of a memory.
    #[cfg(not(any(fuzzing, heap_memory)))]
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

    // Under Miri and in fuzzing, a `Memory` is on the heap, so there are no mappings to test.
    #[cfg(not(any(fuzzing, heap_memory)))]
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

    /// On systems with larger pages a mapping must consist of whole larger pages, because the system unmaps only whole
    /// pages.
    #[cfg(not(any(fuzzing, heap_memory)))]
    #[test]
    fn mappings_consist_of_whole_pages_of_the_system() {
        assert!(page_size().is_power_of_two() && page_size() >= 4096);
        assert_eq!(Memory::new(1).unwrap().len(), page_size());
        for page in LARGER_PAGES {
            for (len, wanted) in [(1, page), (page + 1, 2 * page), (HUGE_PAGE + 1, HUGE_PAGE + page)] {
                let memory = Memory::in_pages(len, page).unwrap();
                assert_eq!(memory.len(), wanted);
                memory.write(wanted - 1, &[7]);
            }
        }
    }

    /// A memory made of a vector of any length, at any address, consists of whole words and has the vector's bytes.
    #[test]
    fn vectors_become_whole_words() {
        for len in 1..40 {
            let memory = Memory::from_vec((0..len).collect()).unwrap();
            assert_eq!(memory.as_ptr().addr() % 8, 0);
            assert_eq!((memory.len(), memory.read(0, len.into())), (len.into(), (0..len).collect()));
            assert!(!memory.copy_out(len.into(), &mut [0]) && !memory.copy_in(usize::MAX, &[0, 0]));
            assert!(memory.word(usize::from(len / 8) * 8).is_none() && memory.word(4).is_none());
            assert_eq!(memory.word(0).is_some(), len >= 8);
        }
        assert!(Memory::from_vec(Vec::new()).is_err());
    }

    /// Miri fails this test if a copy is not atomic, or not in whole words.
    #[test]
    #[allow(clippy::disallowed_methods, reason = "other threads are what it is about")]
    fn threads_copy_and_count_at_the_same_time() {
        const ROUNDS: u64 = if cfg!(miri) { 30 } else { 20_000 };
        let memory = Memory::from_vec(vec![0; 4096]).unwrap();
        std::thread::scope(|scope| {
            for (at, value) in [(3, 0x11), (8, 0x22), (1, 0x33)] {
                let memory = &memory;
                scope.spawn(move || {
                    // Use a range that does not consist of whole words. The copy must not change the bytes outside the
                    // range.
                    let bytes = vec![value; 2000 + at];
                    (0..ROUNDS).for_each(|_| assert!(memory.copy_in(16 + at, &bytes)));
                });
            }
            scope.spawn(|| {
                let word = memory.word(0).unwrap();
                for _ in 0..ROUNDS {
                    word.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                }
            });
            let mut out = vec![0; 2100];
            for _ in 0..ROUNDS {
                assert!(memory.copy_out(13, &mut out));
                assert!(out.iter().all(|byte| [0, 0x11, 0x22, 0x33].contains(byte)), "{out:x?}");
                // Also copy with the two functions with which the embedded provider copies.
                memory.span(9, 2000).unwrap().append_to(&mut Vec::new());
                memory.shared_sge(5, 1999).append_to(&mut Vec::new());
            }
        });
        assert_eq!(memory.word(0).unwrap().load(std::sync::atomic::Ordering::Relaxed), ROUNDS);
        assert_eq!((memory.read(8, 9), memory.read(16 + 2008 + 8, 8)), (vec![0; 9], vec![0; 8]));
    }

    #[test]
    fn memory_of_the_program_s_own_is_left_to_it() {
        let mut own = vec![0_u64; 512];
        let base = NonNull::new(own.as_mut_ptr().cast::<u8>()).unwrap();
        {
            // SAFETY: the vector outlives the memory, and nothing else uses the vector in that
            // time.
            let memory = unsafe { Memory::from_raw(base, 4096) }.unwrap();
            assert!(memory.copy_in(8, &7_u64.to_ne_bytes()));
            memory.prefer_huge_pages();
            memory.prefer_node(0);
        }
        assert_eq!(own[1], 7);
        for (offset, len) in [(1, 4088), (0, 4095), (0, 0)] {
            // SAFETY: the call fails before it accesses the memory.
            let refused = unsafe { Memory::from_raw(base.byte_add(offset), len) };
            assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }
}
