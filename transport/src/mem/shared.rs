//! Memory files that two processes of a host map. One process makes the file and seals it. The other process checks the
//! seals before it maps the file.
//!
//! The system kills a process that touches a mapped page if the file has become shorter, or if the page cannot be
//! allocated. To prevent both, the file's size is sealed, and its pages are allocated before any process maps the file.
//!
//! A process that accesses a hole of the file, a missing page, is charged for the new page until
//! all processes have closed and unmapped the file. There are two kinds of files:
//!
//! - The pages of a *fixed* file cannot be removed. The seal for that is `F_SEAL_FUTURE_WRITE`,
//!   which also prevents new writable mappings. If the peer may only read, the owner of the
//!   file adds this seal. Otherwise the peer adds it after it has mapped the file. So at most one
//!   peer has a writable mapping of the file. No process is charged for pages of another one, but
//!   the owner's pages are not freed while a peer has the file.
//! - The pages of a *lent* file can be removed by both processes, and nobody can prevent that
//!   (`F_SEAL_SEAL`). Each process removes all pages when it drops the memory. So no page outlives
//!   the use of the file, even if a process keeps its descriptor. Both processes can write to the
//!   file.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::{Backing, Memory, Sge, Span, in_pages, page_size};

/// The rights of the other process on a memory file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// The other process may only read. A seal prevents new writable mappings of the file, and calls that write to it.
    Read,
    /// The other process may read and write.
    Write,
    /// The memory is lent for some time, and both processes can write to it. When one of them drops
    /// its [`Memory`] or [`Window`], all pages are removed, and the other process reads zeros.
    Lent,
}

/// The seals of a file whose size cannot change any more.
const SIZE: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
/// The seal of a file whose pages cannot be removed any more.
const PAGES: libc::c_int = libc::F_SEAL_FUTURE_WRITE;
/// The seals of a fixed file. If a file has one of them, its pages cannot be removed.
const FIXED: libc::c_int = libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_WRITE;
const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

impl Memory {
    /// Allocates `len` bytes, rounded up to whole pages, in a memory file. The file's descriptor
    /// may be sent to another process of this host ([`Memory::file`]). All pages are allocated, the
    /// file's size is sealed, and the mapping is excluded from child processes and core dumps. With
    /// [`Sharing::Lent`], the drop of the memory removes all pages, even if another process has the
    /// file.
    ///
    /// # Errors
    /// The system's error if it has no memory or no descriptor left; `InvalidInput` if `len` is 0 or above `i64::MAX`;
    /// `EFBIG` if `len` is above the process's limit of file sizes.
    pub fn new_shared(len: usize, sharing: Sharing) -> io::Result<Self> {
        Self::shared_in_pages(len, sharing, page_size())
    }

    fn shared_in_pages(len: usize, sharing: Sharing, page: usize) -> io::Result<Self> {
        let len = file_len(len, page)?;
        let file = memfd(c"rdma-shared", len)?;
        // SAFETY: the call allocates the pages of a file, and accesses no memory of this process.
        checked(unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len as i64) })?;
        let mut memory = map(&file, len, READ_WRITE)?;
        match sharing {
            Sharing::Read => seal(file.as_fd(), SIZE | PAGES | libc::F_SEAL_SEAL)?,
            Sharing::Write => seal(file.as_fd(), SIZE)?,
            Sharing::Lent => {
                seal(file.as_fd(), SIZE | libc::F_SEAL_SEAL)?;
                memory.backing = Backing::Lent(len, AtomicBool::new(true));
            }
        }
        memory.file = Some(file);
        Ok(memory)
    }

    /// Returns true if the memory is lent ([`Sharing::Lent`]).
    #[inline]
    #[must_use]
    pub const fn is_lent(&self) -> bool {
        matches!(self.backing, Backing::Lent(..))
    }

    /// Keeps the pages of lent memory when the memory is dropped. The other process can then still
    /// read the bytes.
    pub fn keep_pages(&self) {
        if let Backing::Lent(_, removes) = &self.backing {
            removes.store(false, Ordering::Relaxed);
        }
    }
}

/// A mapping of another process's memory file. The other process may use the memory at the same time.
#[derive(Debug)]
pub struct Window {
    memory: Memory,
    sharing: Sharing,
    /// The number of pages of a lent file that this process is possibly charged for.
    charged: AtomicU64,
}

impl Window {
    /// Maps a whole memory file that another process has made. The file must have `len` bytes,
    /// rounded up to whole pages, all of which are allocated. The caller may close the descriptor
    /// afterwards.
    ///
    /// With [`Sharing::Write`], the call makes the file a fixed one: afterwards no process can
    /// remove its pages, or map it for writing. With [`Sharing::Lent`], the file must be a lent
    /// one. It can be written, and the drop of the window removes its pages. With
    /// [`Sharing::Read`], the file may be of either kind.
    ///
    /// # Errors
    /// `InvalidInput` if the file has another size, if its size is not sealed, if pages are
    /// missing, if it is of the wrong kind, or if it is in huge pages; the system's error if the
    /// file cannot be mapped, or another process maps it already with [`Sharing::Write`].
    pub fn map(file: &OwnedFd, len: usize, sharing: Sharing) -> io::Result<Self> {
        Self::map_in_pages(file, len, sharing, page_size())
    }

    fn map_in_pages(file: &OwnedFd, len: usize, sharing: Sharing, page: usize) -> io::Result<Self> {
        let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        let seals = seals(file.as_fd());
        if seals < 0 || seals & SIZE != SIZE {
            return wrong(format!("the size of a peer's memory file is not sealed ({seals:#x})"));
        }
        if file_system(file.as_fd())?.f_type != libc::TMPFS_MAGIC {
            return wrong("a peer's memory file is in huge pages, which may be missing when they are touched".into());
        }
        let whole = in_pages(len, page);
        let size = stat(file.as_fd())?.st_size;
        if whole == 0 || u64::try_from(size) != Ok(whole as u64) {
            return wrong(format!("a peer's memory file has {size} bytes instead of {len} in whole pages"));
        }
        let is_lent = sharing != Sharing::Write && seals & (FIXED | libc::F_SEAL_SEAL) == libc::F_SEAL_SEAL;
        // SAFETY: the call reads the mode of a descriptor, and accesses no memory.
        let mode = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
        let can_be_removed = is_lent && mode & libc::O_ACCMODE == libc::O_RDWR;
        if (is_lent || sharing == Sharing::Lent) && !can_be_removed {
            return wrong(format!("the pages of a peer's memory file, which is lent, cannot be removed ({seals:#x})"));
        }
        let writes = if sharing == Sharing::Read { 0 } else { libc::PROT_WRITE };
        let mut memory = map(file, whole, libc::PROT_READ | writes)?;
        if !is_lent && seals & PAGES == 0 && !crate::planted("pages-of-a-peer-can-be-removed") {
            seal(file.as_fd(), PAGES)?;
        }
        // From here on, nobody can remove a page of a fixed file. So if all its pages are allocated
        // now, they stay allocated. `st_blocks` counts units of 512 bytes on every file system.
        let allocated = u64::try_from(stat(file.as_fd())?.st_blocks).unwrap_or(0).saturating_mul(512);
        if allocated < whole as u64 {
            return wrong(format!("a peer's memory file has {allocated} bytes in pages instead of {whole}"));
        }
        if is_lent {
            // Without huge pages, each page that the peer has removed causes one page fault, so
            // that `fetch` can count them.
            advise(&memory, libc::MADV_NOHUGEPAGE);
            memory.backing = Backing::Lent(whole, AtomicBool::new(true));
        }
        Ok(Self { memory, sharing, charged: AtomicU64::new(0) })
    }

    /// Converts the window into a `Memory`, which can be read and written.
    ///
    /// # Errors
    /// Returns the window unchanged if it is read-only.
    pub fn into_memory(self) -> Result<Memory, Self> {
        if self.sharing == Sharing::Read { Err(self) } else { Ok(self.memory) }
    }

    /// Returns the length of the mapping, in bytes.
    #[allow(clippy::len_without_is_empty, reason = "no window is empty")]
    #[inline]
    #[must_use]
    pub const fn len(&self) -> usize {
        self.memory.len()
    }

    /// Returns true if the other process can remove pages of the file.
    #[inline]
    #[must_use]
    pub const fn is_lent(&self) -> bool {
        self.memory.is_lent()
    }

    /// Returns an upper bound of the bytes of a lent file that this process is charged for, because
    /// the peer had removed them when [`super::EntryAccess::fetch`] read them. The bound can also
    /// include pages that this process has accessed for the first time, and pages of the
    /// destination if this process has forked during the call.
    #[inline]
    #[must_use]
    pub fn charged(&self) -> u64 {
        self.charged.load(Ordering::Relaxed) * page_size() as u64
    }

    /// Fills the entry `to` with the bytes of the window from `offset` on. Copies nothing if not
    /// all of them are inside the window. For a lent file, counts the page faults as pages that
    /// this process is charged for, and returns the length of these pages in bytes.
    pub(super) fn fetch(&self, offset: usize, to: &Sge) -> u64 {
        let Some(source) = self.memory.span(offset, to.len()) else { return 0 };
        if !self.is_lent() {
            to.fill_from(source);
            return 0;
        }
        let page = page_size();
        // Touch all pages of the entry first, so that only pages of the window cause faults.
        (0..to.len()).step_by(page).chain(to.len().checked_sub(1)).for_each(|at| to.part(at, 1).fill(&[0]));
        let before = page_faults();
        to.fill_from(source);
        let faults = page_faults().saturating_sub(before);
        self.charged.fetch_add(faults, Ordering::Relaxed);
        faults * page as u64
    }

    /// Returns a part of the window for reading. Returns `None` if the part is not inside the window.
    ///
    /// # Safety
    /// Nothing is written to the part: this process may have no right to write it.
    #[inline]
    pub unsafe fn source(&self, offset: usize, len: usize) -> Option<Span<'_>> {
        self.memory.span(offset, len)
    }

    /// Returns a part of the window for writing. Returns `None` if the part is not inside the window, or if the window
    /// is read-only.
    #[inline]
    pub fn sink(&self, offset: usize, len: usize) -> Option<Span<'_>> {
        if self.sharing == Sharing::Read { None } else { self.memory.span(offset, len) }
    }
}

/// Creates a memory file of `len` bytes that can be sealed.
pub(super) fn memfd(name: &CStr, len: usize) -> io::Result<OwnedFd> {
    // SAFETY: the name is a NUL-terminated string.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC) };
    checked(fd)?;
    // SAFETY: `memfd_create` has returned this descriptor, which has no other owner.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the call sets the length of a file, and accesses no memory.
    checked(unsafe { libc::ftruncate(fd, len as i64) })?;
    Ok(file)
}

/// Returns the seals of a file. Returns a negative number if the file cannot have seals.
pub(super) fn seals(file: BorrowedFd<'_>) -> libc::c_int {
    // SAFETY: the call reads the seals of a file, and accesses no memory.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) }
}

pub(super) fn seal(file: BorrowedFd<'_>, seals: libc::c_int) -> io::Result<()> {
    // SAFETY: the call seals a file, and accesses no memory.
    checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) })
}

/// Removes the pages of a lent file.
///
/// # Safety
/// The caller has mapped the whole file at `base`, and no code uses the mapping any more.
pub(super) unsafe fn remove_pages(base: NonNull<u8>, len: usize) {
    if crate::planted("lent-pages-are-kept") {
        return;
    }
    let base = base.as_ptr().cast();
    // SAFETY: these are the pages of a mapping that the caller does not use any more. Other
    // processes that use the file read zeros, which their copies tolerate.
    let remove = || unsafe { libc::madvise(base, len, libc::MADV_REMOVE) } == 0;
    // A mapping in locked memory, or one for reading on older systems, must be prepared first.
    // SAFETY: the calls change the attributes of the same pages.
    let prepare = || unsafe { libc::munlock(base, len) == 0 && libc::mprotect(base, len, READ_WRITE) == 0 };
    if !(remove() || prepare() && remove()) {
        log::debug!("cannot remove {len} bytes of lent memory: {}", io::Error::last_os_error());
    }
}

pub(super) fn stat(file: BorrowedFd<'_>) -> io::Result<libc::stat> {
    // SAFETY: all fields are numbers, for which zeros are valid.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a structure for the result.
    checked(unsafe { libc::fstat(file.as_raw_fd(), &raw mut stat) })?;
    Ok(stat)
}

pub(super) fn file_system(file: BorrowedFd<'_>) -> io::Result<libc::statfs> {
    // SAFETY: all fields are numbers, for which zeros are valid.
    let mut system: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a structure for the result.
    checked(unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut system) })?;
    Ok(system)
}

/// Maps `len` bytes of a memory file. The caller has set or checked the size of the file. The size is sealed already, or
/// the caller seals it after this call.
fn map(file: &OwnedFd, len: usize, rights: libc::c_int) -> io::Result<Memory> {
    // SAFETY: the kernel chooses the address of the new mapping, so the mapping overlaps no memory in use.
    let base = unsafe { libc::mmap(ptr::null_mut(), len, rights, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
    let memory = Memory { base, len, backing: Backing::Mapping(len), file: None };
    advise(&memory, libc::MADV_DONTFORK);
    advise(&memory, libc::MADV_DONTDUMP);
    Ok(memory)
}

fn advise(memory: &Memory, advice: libc::c_int) {
    // SAFETY: this is advice about a whole mapping, and changes none of its bytes.
    if unsafe { libc::madvise(memory.base.as_ptr().cast(), memory.len, advice) } != 0 {
        log::debug!("madvise({advice}) on shared memory failed: {}", io::Error::last_os_error());
    }
}

/// Returns the number of minor page faults of this thread: those without I/O.
fn page_faults() -> u64 {
    // SAFETY: all fields are numbers, for which zeros are valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a structure for the result. If the call fails, the result is 0.
    let _ = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    u64::try_from(usage.ru_minflt).unwrap_or(0)
}

/// Returns `len` rounded up to whole pages: the length of a file for memory of `len` bytes. Returns `InvalidInput` if `len` is 0 or above
/// `i64::MAX`, and `EFBIG` if this process may not create such a long file.
pub(super) fn file_len(len: usize, page: usize) -> io::Result<usize> {
    let len = Some(in_pages(len, page)).filter(|&len| len > 0 && i64::try_from(len).is_ok());
    let len = len.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    if len as u64 > max_file_size()? {
        // Without this check, the system would end the process by the signal SIGXFSZ.
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    Ok(len)
}

/// Returns the largest size of a file that this process may create (`ulimit -f`), in bytes.
fn max_file_size() -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a structure for the result.
    checked(unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) })?;
    Ok(limit.rlim_cur)
}

fn checked(rc: libc::c_int) -> io::Result<()> {
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::super::LARGER_PAGES;
    use super::*;
    use crate::mem::hostile_file::HostileFile;
    use crate::mem::test_memory::TestMemory;

    fn read(window: &Window, offset: usize, len: usize) -> Option<Span<'_>> {
        // SAFETY: the tests only read the part.
        unsafe { window.source(offset, len) }
    }

    fn again(file: BorrowedFd<'_>) -> OwnedFd {
        file.try_clone_to_owned().unwrap()
    }

    #[test]
    fn both_sides_see_what_either_writes() {
        let ours = Memory::new_shared(5000, Sharing::Write).unwrap();
        assert_eq!(ours.len(), 8192);
        let window = Window::map(&again(ours.file().unwrap()), 8192, Sharing::Write).unwrap();
        ours.write(77, b"to read");
        let mut seen = Vec::new();
        read(&window, 77, 7).unwrap().append_to(&mut seen);
        assert_eq!(seen, b"to read");
        window.sink(8184, 8).unwrap().fill(b"written!");
        assert_eq!(ours.read(8184, 8), b"written!");
        assert!(read(&window, 8185, 8).is_none() && window.sink(usize::MAX, 8).is_none());
        assert!(window.into_memory().is_ok());
    }

    /// On systems with larger pages, both processes round the length up to whole larger pages.
    #[test]
    fn shared_memory_consists_of_whole_pages_of_the_system() {
        for page in LARGER_PAGES {
            let ours = Memory::shared_in_pages(page + 1, Sharing::Write, page).unwrap();
            assert_eq!(ours.len(), 2 * page);
            let file = again(ours.file().unwrap());
            let map = |len| Window::map_in_pages(&file, len, Sharing::Write, page);
            assert_eq!(map(page + 1).unwrap().memory.len(), 2 * page);
            assert!(map(page).is_err() && map(2 * page + 1).is_err());
        }
    }

    #[test]
    fn what_may_only_be_read_cannot_be_written_by_any_way() {
        let ours = Memory::new_shared(4096, Sharing::Read).unwrap();
        let file = again(ours.file().unwrap());
        ours.write(0, b"still ours");
        let window = Window::map(&file, 4096, Sharing::Read).unwrap();
        assert!(window.sink(0, 8).is_none() && window.into_memory().is_err());
        assert!(Window::map(&file, 4096, Sharing::Write).is_err());
        assert!(!HostileFile::punch(&file, 0, 4096));
        // SAFETY: the call fails, and changes no memory. These are whole pages of `ours`.
        assert_eq!(unsafe { libc::madvise(ours.as_ptr().cast(), 4096, libc::MADV_REMOVE) }, -1);
        assert_eq!(ours.read(0, 10), b"still ours");
    }

    /// A file that could cause the system to kill this process is not mapped.
    #[test]
    fn a_file_of_another_size_or_without_seals_is_refused() {
        let said = |file: &OwnedFd, len| Window::map(file, len, Sharing::Read).unwrap_err().to_string();
        let (_unsealed, file) = Memory::new_file(8192).unwrap();
        assert!(said(&file, 8192).contains("not sealed"));
        let ordinary: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
        assert!(said(&ordinary, 4096).contains("not sealed"));
        let sealed = Memory::new_shared(8192, Sharing::Read).unwrap();
        let file = again(sealed.file().unwrap());
        for len in [0, 4096, 8193, usize::MAX] {
            assert!(said(&file, len).contains("has 8192 bytes"), "{len}");
        }
        // SAFETY: the call fails, and accesses no memory.
        assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), 4096) }, -1);
    }

    /// Huge pages are from a pool. If a peer punches a hole in the file and the pool is empty, the system kills the
    /// process that touches the hole.
    #[test]
    fn huge_pages_are_refused() {
        let flags = libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC | libc::MFD_HUGETLB | libc::MFD_HUGE_2MB;
        // SAFETY: the name is a NUL-terminated string.
        let fd = unsafe { libc::memfd_create(c"huge".as_ptr(), flags) };
        if fd < 0 {
            // `memfd_create` fails if this system has no huge pages. In this case no peer can use them, either.
            assert!(
                [libc::ENOSYS, libc::ENODEV, libc::EINVAL]
                    .contains(&io::Error::last_os_error().raw_os_error().unwrap())
            );
            return;
        }
        // SAFETY: `memfd_create` has returned this descriptor, which has no other owner.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: the calls set the length and the seals of a file, and access no memory.
        let rc = unsafe { (libc::ftruncate(fd, 2 << 20), libc::fcntl(fd, libc::F_ADD_SEALS, SIZE)) };
        assert_eq!(rc, (0, 0));
        assert!(Window::map(&file, 2 << 20, Sharing::Read).unwrap_err().to_string().contains("huge pages"));
    }

    /// A file with missing pages is refused: this process would be charged for each page that it
    /// reads.
    #[test]
    fn a_file_without_all_its_pages_is_refused() {
        let said = |file: &OwnedFd, len| Window::map(file, len, Sharing::Write).unwrap_err().to_string();
        assert!(said(&HostileFile::sparse(1 << 40), 1 << 40).contains("0 bytes in pages"));
        let file = HostileFile::with_pages(1 << 20);
        assert!(HostileFile::punch(&file, 4 << 10, 64 << 10));
        assert!(said(&file, 1 << 20).contains("983040 bytes in pages instead of 1048576"));
    }

    /// Dropping the `Memory` or the `Window` of a lent file removes its pages, although a hostile
    /// process keeps the file open and mapped. No seal can prevent this. After `keep_pages`, the
    /// pages stay.
    #[test]
    fn the_pages_of_a_lent_file_come_back() {
        const LEN: usize = 64 << 10;
        for sharing in [Sharing::Read, Sharing::Lent] {
            for of_maker in [true, false] {
                let ours = Memory::new_shared(LEN, Sharing::Lent).unwrap();
                let kept = again(ours.file().unwrap());
                let mapped = map(&kept, LEN, READ_WRITE).unwrap();
                let window = Window::map(&kept, LEN, sharing).unwrap();
                ours.write(0, &[7; LEN]);
                for seals in [libc::F_SEAL_WRITE, PAGES, libc::F_SEAL_GROW] {
                    assert!(seal(kept.as_fd(), seals).is_err(), "a peer has added {seals:#x}");
                }
                assert_eq!((mapped.read(LEN - 1, 1), HostileFile::allocated(&kept)), (vec![7], LEN as u64));
                let other: Box<dyn std::any::Any> = if of_maker {
                    drop(ours);
                    Box::new(window)
                } else {
                    drop(window);
                    Box::new(ours)
                };
                assert_eq!(HostileFile::allocated(&kept), 0, "{sharing:?}, {of_maker}");
                assert_eq!(mapped.read(0, 8), [0; 8]);
                drop(other);
                assert_eq!(HostileFile::allocated(&kept), 0, "{sharing:?}, {of_maker}");
            }
        }
        let ours = Memory::new_shared(LEN, Sharing::Lent).unwrap();
        let kept = again(ours.file().unwrap());
        ours.keep_pages();
        drop(ours);
        assert_eq!(HostileFile::allocated(&kept), LEN as u64);
    }

    /// A process maps a file as a lent one only if it can remove the pages, and nobody can prevent
    /// that later.
    #[test]
    fn a_file_whose_pages_might_stay_is_not_mapped_as_a_lent_one() {
        let said = |file: &OwnedFd, sharing| Window::map(file, 4096, sharing).unwrap_err().to_string();
        for other in [Sharing::Read, Sharing::Write] {
            let fixed = Memory::new_shared(4096, other).unwrap();
            assert!(said(&again(fixed.file().unwrap()), Sharing::Lent).contains("cannot be removed"), "{other:?}");
        }
        let lent = Memory::new_shared(4096, Sharing::Lent).unwrap();
        let file = again(lent.file().unwrap());
        assert!(Window::map(&file, 4096, Sharing::Write).is_err(), "it cannot become a fixed one");
        let again = std::fs::File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap().into();
        for sharing in [Sharing::Read, Sharing::Lent] {
            assert!(said(&again, sharing).contains("cannot be removed"), "{sharing:?}");
        }
    }

    /// If a peer removes the pages of a lent file that this process has mapped, `fetch` counts each
    /// page that this process is charged for.
    #[test]
    fn pages_that_a_peer_has_removed_are_counted() {
        const LEN: usize = 1 << 20;
        let theirs = Memory::new_shared(LEN, Sharing::Lent).unwrap();
        let file = again(theirs.file().unwrap());
        let window = Window::map(&file, LEN, Sharing::Read).unwrap();
        let sink = Memory::new(LEN).unwrap();
        theirs.write(0, &[7; LEN]);
        let honest = window.fetch(0, &sink.sge(0, LEN));
        assert!(sink.read(0, LEN) == [7; LEN] && honest <= LEN as u64 / 4, "{honest} of an honest peer");
        assert!(HostileFile::punch(&file, 0, LEN as u64));
        let removed = window.fetch(0, &sink.sge(0, LEN));
        assert!(removed >= HostileFile::allocated(&file) && removed >= LEN as u64, "{removed}");
        assert_eq!((sink.read(0, LEN), window.charged()), (vec![0; LEN], honest + removed));
        assert_eq!(window.fetch(1, &sink.sge(0, LEN)), 0, "bytes outside of the window");
        drop(window);
        assert_eq!(HostileFile::allocated(&file), 0);
    }

    /// Once a process has mapped a fixed file of a peer, the peer can neither remove pages nor make
    /// the file shorter, not even through a writable mapping that it made before.
    #[test]
    fn the_pages_of_a_mapped_file_stay() {
        const LEN: usize = 8192;
        for sharing in [Sharing::Read, Sharing::Write] {
            let theirs = Memory::new_shared(LEN, sharing).unwrap();
            let file = again(theirs.file().unwrap());
            theirs.write(0, &[7; LEN]);
            let window = Window::map(&file, LEN, sharing).unwrap();
            assert!(!HostileFile::punch(&file, 4096, 4096), "{sharing:?}");
            // SAFETY: the calls fail, and change no memory. These are whole pages of `theirs`.
            let rc = unsafe {
                let removed = libc::madvise(theirs.as_ptr().cast(), LEN, libc::MADV_REMOVE);
                (removed, libc::ftruncate(file.as_raw_fd(), 4096))
            };
            assert_eq!(rc, (-1, -1), "{sharing:?}");
            let mut seen = Vec::new();
            read(&window, 0, LEN).unwrap().append_to(&mut seen);
            assert!(seen == [7; LEN] && Window::map(&file, LEN, Sharing::Write).is_err(), "{sharing:?}");
        }
    }
}
