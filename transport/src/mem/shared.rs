//! Memory files that two processes of a host map. One makes the file and seals it; the other checks the seals before it maps.
//!
//! A file that can become shorter would end a process that uses the pages behind its end, and a page that is missing when it is
//! touched may not be found then: so the size is sealed, and the pages are allocated before anybody maps the file. A peer may still punch
//! holes where it may write. Then zeros are read there, as the peer could have written them; in huge pages a hole could not be filled again, so
//! files of those are refused.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};

use super::{Backing, Memory, Span, in_pages, page_size};

/// What the other process may do with a memory file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Read it. The file is sealed against each new way to write it.
    Read,
    /// Read and write it.
    Write,
}

/// The seals of a file whose size never changes.
const SIZE: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

impl Memory {
    /// Memory of `len` bytes, rounded up to whole pages, in a memory file that a process of this host can be given ([`Memory::file`]). Its
    /// pages are allocated, its size is sealed, and it is left out of children and of core dumps.
    ///
    /// # Errors
    /// The system's error when there is no memory, or no descriptor; `InvalidInput` for a length of 0 or past `i64::MAX`.
    pub fn new_shared(len: usize, sharing: Sharing) -> io::Result<Self> {
        Self::shared_in_pages(len, sharing, page_size())
    }

    fn shared_in_pages(len: usize, sharing: Sharing, page: usize) -> io::Result<Self> {
        let len = Some(in_pages(len, page)).filter(|&len| len > 0 && i64::try_from(len).is_ok());
        let len = len.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        if len as u64 > longest_file()? {
            // The system would end the process with a signal (SIGXFSZ).
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        // SAFETY: a name that ends in zero.
        let fd = unsafe { libc::memfd_create(c"rdma-shared".as_ptr(), libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was made above, for this owner.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: sets the length of a file, no memory.
        checked(unsafe { libc::ftruncate(fd, len as i64) })?;
        // SAFETY: allocates the pages of a file, no memory of ours.
        checked(unsafe { libc::fallocate(fd, 0, 0, len as i64) })?;
        let mut memory = map(&file, len, libc::PROT_READ | libc::PROT_WRITE)?;
        let seals = if sharing == Sharing::Read { SIZE | libc::F_SEAL_FUTURE_WRITE } else { SIZE };
        // SAFETY: seals a file, no memory.
        checked(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) })?;
        memory.file = Some(file);
        Ok(memory)
    }

    /// Takes the memory file out: it is given to one process, and the descriptor is closed then.
    pub(crate) fn take_file(&mut self) -> Option<OwnedFd> {
        self.file.take()
    }

    /// The memory file, if this is memory that another process can be given.
    #[must_use]
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }
}

/// Memory of another process, which uses it at the same time.
#[derive(Debug)]
pub struct Window {
    memory: Memory,
    sharing: Sharing,
}

impl Window {
    /// Maps the whole of a memory file of `len` bytes, rounded up to whole pages, that another process has made. The descriptor may be
    /// closed afterwards.
    ///
    /// # Errors
    /// `InvalidInput` if the size is another one or is not sealed; the system's error when it does not map the file.
    pub fn map(file: &OwnedFd, len: usize, sharing: Sharing) -> io::Result<Self> {
        Self::map_in_pages(file, len, sharing, page_size())
    }

    fn map_in_pages(file: &OwnedFd, len: usize, sharing: Sharing, page: usize) -> io::Result<Self> {
        let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        // SAFETY: asks for the seals of a descriptor, no memory.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & SIZE != SIZE {
            return wrong(format!("the size of a peer's memory file is not sealed ({seals:#x})"));
        }
        // SAFETY: all fields are numbers.
        let mut system: libc::statfs = unsafe { std::mem::zeroed() };
        // SAFETY: a place for the result.
        checked(unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut system) })?;
        if system.f_type != libc::TMPFS_MAGIC {
            return wrong("a peer's memory file is in huge pages, which may be gone when they are touched".into());
        }
        // SAFETY: all fields are numbers.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: a place for the result.
        checked(unsafe { libc::fstat(file.as_raw_fd(), &raw mut stat) })?;
        let whole = in_pages(len, page);
        if whole == 0 || u64::try_from(stat.st_size) != Ok(whole as u64) {
            return wrong(format!("a peer's memory file has {} bytes, and not {len} in whole pages", stat.st_size));
        }
        let write = if sharing == Sharing::Write { libc::PROT_WRITE } else { 0 };
        Ok(Self { memory: map(file, whole, libc::PROT_READ | write)?, sharing })
    }

    /// The memory, to read and write; the window again if it may only be read.
    ///
    /// # Errors
    /// It may only be read.
    pub fn into_memory(self) -> Result<Memory, Self> {
        if self.sharing == Sharing::Write { Ok(self.memory) } else { Err(self) }
    }

    /// A part of it to read from; `None` if it is not wholly inside.
    #[inline]
    pub(crate) fn source(&self, offset: usize, len: usize) -> Option<Span<'_>> {
        self.memory.span(offset, len)
    }

    /// A part of it to write to; `None` if it is not wholly inside or may only be read.
    #[inline]
    pub(crate) fn sink(&self, offset: usize, len: usize) -> Option<Span<'_>> {
        if self.sharing == Sharing::Write { self.memory.span(offset, len) } else { None }
    }
}

/// Maps a file whose size was checked and is sealed, or is about to be.
fn map(file: &OwnedFd, len: usize, rights: libc::c_int) -> io::Result<Memory> {
    // SAFETY: a mapping at an address of the kernel's choice touches no memory of ours.
    let base = unsafe { libc::mmap(ptr::null_mut(), len, rights, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
        // SAFETY: advice on the whole mapping just made, which changes none of its bytes.
        if unsafe { libc::madvise(base, len, advice) } != 0 {
            log::debug!("advice {advice} on shared memory: {}", io::Error::last_os_error());
        }
    }
    let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
    Ok(Memory { base, len, backing: Backing::Mapping(len), file: None })
}

/// The length that a file of this process may have at most (`ulimit -f`), bytes.
fn longest_file() -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a place for the result.
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
        window.source(77, 7).unwrap().append_to(&mut seen);
        assert_eq!(seen, b"to read");
        window.sink(8184, 8).unwrap().fill(b"written!");
        assert_eq!(ours.read(8184, 8), b"written!");
        assert!(window.source(8185, 8).is_none() && window.sink(usize::MAX, 8).is_none());
        assert!(window.into_memory().is_ok());
    }

    /// Where pages are larger, both processes round to those.
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
        let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: no memory of ours changes: it fails.
        assert_eq!(unsafe { libc::fallocate(file.as_raw_fd(), hole, 0, 4096) }, -1);
        assert_eq!(ours.read(0, 10), b"still ours");
    }

    /// Files that could end a process are not mapped.
    #[test]
    fn a_file_of_another_size_or_without_seals_is_refused() {
        let said = |file: &OwnedFd, len| Window::map(file, len, Sharing::Read).unwrap_err().to_string();
        let (_unsealed, file) = Memory::new_file(8192).unwrap();
        assert!(said(&file, 8192).contains("not sealed"));
        let ordinary: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
        assert!(said(&ordinary, 4096).contains("not sealed"));
        let sealed = Memory::new_shared(8192, Sharing::Write).unwrap();
        let file = again(sealed.file().unwrap());
        for len in [0, 4096, 8193, usize::MAX] {
            assert!(said(&file, len).contains("has 8192 bytes"), "{len}");
        }
        // SAFETY: changes the length of a file, no memory: it fails.
        assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), 4096) }, -1);
    }

    /// A hole in huge pages is filled from a pool, and ends the process that touches it when that is empty.
    #[test]
    fn huge_pages_are_refused() {
        let flags = libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC | libc::MFD_HUGETLB | libc::MFD_HUGE_2MB;
        // SAFETY: a name that ends in zero.
        let fd = unsafe { libc::memfd_create(c"huge".as_ptr(), flags) };
        if fd < 0 {
            // A system without huge pages: a peer has none, either.
            assert!(
                [libc::ENOSYS, libc::ENODEV, libc::EINVAL]
                    .contains(&io::Error::last_os_error().raw_os_error().unwrap())
            );
            return;
        }
        // SAFETY: the descriptor was made above, for this owner.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: sets the length and the seals of a file, no memory.
        let rc = unsafe { (libc::ftruncate(fd, 2 << 20), libc::fcntl(fd, libc::F_ADD_SEALS, SIZE)) };
        assert_eq!(rc, (0, 0));
        assert!(Window::map(&file, 2 << 20, Sharing::Read).unwrap_err().to_string().contains("huge pages"));
    }

    /// A peer that may write may also give pages back: zeros are there then.
    #[test]
    fn a_hole_reads_as_zeros() {
        let ours = Memory::new_shared(8192, Sharing::Write).unwrap();
        let file = again(ours.file().unwrap());
        ours.write(0, &[7; 8192]);
        let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: the bytes of a `Memory` change, as by a peer.
        assert_eq!(unsafe { libc::fallocate(file.as_raw_fd(), hole, 4096, 4096) }, 0);
        assert_eq!((ours.read(4095, 1), ours.read(4096, 4096)), (vec![7], vec![0; 4096]));
    }
}
