//! Memory that comes from elsewhere: pages of a memory file, and memory that the program has got on its own.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};

use super::{Backing, Memory, in_pages, page_size, words};

impl Memory {
    /// Memory of `len` bytes, rounded up to whole pages, in a new memory file, whose descriptor other processes can be given: they
    /// map it and see what peers write.
    ///
    /// # Errors
    /// The system's error when it makes no such file; `InvalidInput` for a length of 0 or past `i64::MAX`.
    pub fn new_file(len: usize) -> io::Result<(Self, OwnedFd)> {
        Self::file_in_pages(len, page_size())
    }

    fn file_in_pages(len: usize, page: usize) -> io::Result<(Self, OwnedFd)> {
        let whole = Some(in_pages(len, page)).filter(|&len| len > 0 && i64::try_from(len).is_ok());
        let len = whole.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        // SAFETY: a name that ends in zero.
        let fd = unsafe { libc::memfd_create(c"rdma".as_ptr(), libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was made above, for this owner.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: sets the length of a file, no memory.
        if unsafe { libc::ftruncate(fd, len as i64) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((Self::map_in_pages(file.as_fd(), 0, len, page)?, file))
    }

    /// Maps `len` bytes of a memory file (`memfd_create`(2)) from `offset` on, shared with every other mapping of the file: what a
    /// peer writes here, other processes see, and the other way round.
    ///
    /// The file must not become shorter, because the system ends a process that uses pages behind its end. So it must be sealed
    /// against that (`F_SEAL_SHRINK`), or be one that can be sealed (`MFD_ALLOW_SEALING`): then it is sealed here. The
    /// descriptor may be closed afterwards.
    ///
    /// # Errors
    /// `InvalidInput` for an offset or a length that is no multiple of the system's page size, a length of 0, bytes behind the
    /// file's end, and a file that is not sealed and cannot be; the system's error when it does not map the file.
    pub fn map_file(file: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        Self::map_in_pages(file, offset, len, page_size())
    }

    fn map_in_pages(file: BorrowedFd<'_>, offset: u64, len: usize, page: usize) -> io::Result<Self> {
        let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        if len == 0 || offset % page as u64 != 0 || len % page != 0 {
            return wrong(format!("{len} bytes from {offset} of a memory file: both must be multiples of {page}"));
        }
        let fd = file.as_raw_fd();
        // SAFETY: asks for the seals of a descriptor, no memory.
        let sealed = || unsafe { libc::fcntl(fd, libc::F_GET_SEALS) };
        // SAFETY: adds a seal to the file of a descriptor, no memory.
        let seal = || unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) };
        if sealed() & libc::F_SEAL_SHRINK == 0 && seal() != 0 {
            let error = io::Error::last_os_error();
            return wrong(format!("the file can become shorter ({error}); give a memfd, with MFD_ALLOW_SEALING"));
        }
        if sealed() < 0 {
            return wrong("the file has no seals; give a memfd".into());
        }
        // SAFETY: all fields are numbers.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: a place for the result.
        if unsafe { libc::fstat(fd, &raw mut stat) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if offset.checked_add(len as u64).is_none_or(|end| end > size) {
            return wrong(format!("{len} bytes from {offset}: the file has {size}"));
        }
        let start = i64::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, rights, libc::MAP_SHARED, fd, start) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self { base, len, backing: Backing::Mapping(len), file: None })
    }

    /// Takes memory that the program has got on its own, such as a mapping of another library. It is not given back when this is
    /// dropped.
    ///
    /// # Errors
    /// `InvalidInput` if it does not begin at a multiple of 8, has a length of 0 or one that is no multiple of 8.
    ///
    /// # Safety
    /// Until this is dropped, the bytes are mapped for reading and writing, at the same place and whole, and used as the rule of
    /// the [module](super) demands, with this as the memory in it. Every region that is registered over it has a share of it: it is
    /// dropped when the last region is deregistered, or the provider gone, and the program has dropped its own shares.
    pub unsafe fn from_raw(base: NonNull<u8>, len: usize) -> io::Result<Self> {
        if len == 0 || len % words::WORD != 0 || base.as_ptr().addr() % words::WORD != 0 {
            let what = format!("{len} bytes at {base:?}: address and length must be multiples of 8");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        Ok(Self { base, len, backing: Backing::Foreign, file: None })
    }
}

#[cfg(test)]
mod tests {
    use super::super::LARGER_PAGES;
    use super::*;

    fn memfd(flags: libc::c_uint, len: i64) -> OwnedFd {
        // SAFETY: a name that ends in zero; the result is checked.
        let fd = unsafe { libc::memfd_create(c"rdma".as_ptr(), flags) };
        assert!(fd >= 0);
        // SAFETY: made above, for this owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: changes the length of a file, no memory.
        assert_eq!(unsafe { libc::ftruncate(fd.as_raw_fd(), len) }, 0);
        fd
    }

    #[test]
    fn two_mappings_of_a_file_are_one_memory() {
        let (all, file) = Memory::new_file(2 * 4096 + 1).unwrap();
        assert_eq!(all.len(), 3 * 4096);
        let last = Memory::map_file(file.as_fd(), 2 * 4096, 4096).unwrap();
        assert!(all.copy_in(2 * 4096 + 5, b"seen"));
        let mut out = [0; 4];
        assert!(last.copy_out(5, &mut out));
        assert_eq!(&out, b"seen");
        // SAFETY: changes the length of a file, no memory.
        assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), 4096) }, -1, "it cannot become shorter");
        last.prefer_huge_pages();
        last.prefer_node(0);
    }

    /// Where pages are larger, the kernel maps nothing from between two of them, and files consist of whole ones.
    #[test]
    fn files_consist_of_whole_pages_of_the_system() {
        for page in LARGER_PAGES {
            let (memory, file) = Memory::file_in_pages(page + 1, page).unwrap();
            assert_eq!(memory.len(), 2 * page);
            assert_eq!(Memory::map_in_pages(file.as_fd(), page as u64, page, page).unwrap().len(), page);
            for (offset, len) in [(4096, page), (0, page + 4096)] {
                let refused = Memory::map_in_pages(file.as_fd(), offset, len, page).unwrap_err();
                assert!(refused.to_string().contains(&format!("multiples of {page}")), "{refused}");
            }
        }
    }

    #[test]
    fn files_that_could_become_shorter_are_refused() {
        let said = |file: BorrowedFd<'_>, offset, len| Memory::map_file(file, offset, len).unwrap_err().to_string();
        let open = memfd(libc::MFD_ALLOW_SEALING, 8192);
        assert!(said(open.as_fd(), 0, 3 * 4096).contains("the file has 8192"));
        assert!(said(open.as_fd(), 1, 4096).contains("multiples of 4096"));
        assert!(said(open.as_fd(), 0, 0).contains("multiples of 4096"));
        assert!(said(open.as_fd(), u64::MAX - 4095, 4096).contains("the file has"));
        assert!(said(memfd(0, 8192).as_fd(), 0, 4096).contains("MFD_ALLOW_SEALING"));
        let ordinary = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(said(ordinary.as_fd(), 0, 4096).contains("give a memfd"));
    }

    #[test]
    fn memory_of_the_program_s_own_is_left_to_it() {
        let mut own = vec![0_u64; 512];
        let base = NonNull::new(own.as_mut_ptr().cast::<u8>()).unwrap();
        {
            // SAFETY: the vector outlives it and is not used meanwhile.
            let memory = unsafe { Memory::from_raw(base, 4096) }.unwrap();
            assert!(memory.copy_in(8, &7_u64.to_ne_bytes()));
            memory.prefer_huge_pages();
            memory.prefer_node(0);
        }
        assert_eq!(own[1], 7);
        for (offset, len) in [(1, 4088), (0, 4095), (0, 0)] {
            // SAFETY: refused before it is used.
            let refused = unsafe { Memory::from_raw(base.byte_add(offset), len) };
            assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }
}
