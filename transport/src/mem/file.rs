//! Constructors of [`Memory`] for a memory file of the program.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use super::shared::{file_len, file_system, memfd, seal, seals, stat};
use super::{Backing, Memory, page_size};

impl Memory {
    /// Allocates `len` bytes, rounded up to whole pages, in a new memory file. Returns the memory and the descriptor of
    /// the file. A process that receives the descriptor can map the file, and then reads the bytes that peers write.
    ///
    /// # Errors
    /// The system's error if it cannot create the file; `InvalidInput` if `len` is 0 or above `i64::MAX`; `EFBIG` if `len`
    /// is above the process's limit of file sizes.
    pub fn new_file(len: usize) -> io::Result<(Self, OwnedFd)> {
        Self::file_in_pages(len, page_size())
    }

    fn file_in_pages(len: usize, page: usize) -> io::Result<(Self, OwnedFd)> {
        let len = file_len(len, page)?;
        let file = memfd(c"rdma", len)?;
        Ok((Self::map_in_pages(file.as_fd(), 0, len, page)?, file))
    }

    /// Maps `len` bytes of a memory file (`memfd_create`(2)) from `offset` on. The mapping is shared: other processes
    /// that map the file see the bytes that a peer writes here, and the program sees the bytes that these processes
    /// write.
    ///
    /// The file must not become shorter, because the system kills a process that accesses pages past the end of a
    /// file. So the file must be sealed with `F_SEAL_SHRINK`. If it is not, this call seals it, for which the file
    /// needs `MFD_ALLOW_SEALING`. The caller may close the descriptor afterwards.
    ///
    /// # Errors
    /// `InvalidInput` in these cases:
    /// - `offset` or `len` is not a multiple of the system's page size, or `len` is 0.
    /// - The range ends past the end of the file.
    /// - The file is not sealed and cannot be sealed.
    ///
    /// The system's error if the file cannot be mapped.
    pub fn map_file(file: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        Self::map_in_pages(file, offset, len, page_size())
    }

    fn map_in_pages(file: BorrowedFd<'_>, offset: u64, len: usize, page: usize) -> io::Result<Self> {
        let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        if len == 0 || offset % page as u64 != 0 || len % page != 0 {
            return wrong(format!(
                "{len} bytes from {offset} of a memory file: both numbers must be multiples of {page}"
            ));
        }
        if seals(file) & libc::F_SEAL_SHRINK == 0 {
            if let Err(error) = seal(file, libc::F_SEAL_SHRINK) {
                return wrong(format!("the file can become shorter ({error}); give a memfd, with MFD_ALLOW_SEALING"));
            }
        }
        if seals(file) < 0 {
            return wrong("the file has no seals; give a memfd".into());
        }
        let size = u64::try_from(stat(file)?.st_size).unwrap_or(0);
        if offset.checked_add(len as u64).is_none_or(|end| end > size) {
            return wrong(format!("{len} bytes from {offset}: the file has {size}"));
        }
        let start = i64::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let system = file_system(file)?;
        // The system maps and unmaps a file in huge pages only in whole huge pages.
        let whole = if system.f_type == libc::HUGETLBFS_MAGIC { usize::try_from(system.f_bsize).ok() } else { None };
        let mapped = len.next_multiple_of(whole.filter(|&whole| whole > 0).unwrap_or(page));
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses the address of the new mapping, so the mapping overlaps no memory in use.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, rights, libc::MAP_SHARED, file.as_raw_fd(), start) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self { base, len, backing: Backing::Mapping(mapped), file: None })
    }
}

#[cfg(test)]
mod tests {
    use super::super::LARGER_PAGES;
    use std::os::fd::FromRawFd;

    use super::*;

    fn new_memfd(flags: libc::c_uint, len: i64) -> OwnedFd {
        // SAFETY: the name is a NUL-terminated string.
        let fd = unsafe { libc::memfd_create(c"rdma".as_ptr(), flags) };
        assert!(fd >= 0);
        // SAFETY: `memfd_create` has returned this descriptor, which has no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: the call changes the length of a file, and accesses no memory.
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
        // SAFETY: the call changes the length of a file, and accesses no memory.
        assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), 4096) }, -1, "it cannot become shorter");
        last.prefer_huge_pages();
        last.prefer_node(0);
    }

    /// On systems with larger pages, the offset and the length of a mapping must be multiples of the larger size.
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

    /// The signal SIGXFSZ would kill a process that makes a file longer than its limit. The limit
    /// applies to a whole process, so the test sets it in a new process. That process is not a
    /// fork, which would cause page faults in this process, and other tests count page faults.
    #[test]
    fn a_file_above_the_limit_of_the_process_is_an_error() {
        const LIMITED: &str = "RDMA_TEST_FILE_LIMIT";
        if std::env::var_os(LIMITED).is_some() {
            let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: the pointer is to a structure for the result.
            assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut before) }, 0);
            let limit = |limit: libc::rlimit| {
                // SAFETY: the pointer is to a structure that the call reads.
                assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
            };
            limit(libc::rlimit { rlim_cur: 8192, ..before });
            assert_eq!(Memory::new_file(8193).unwrap_err().raw_os_error(), Some(libc::EFBIG));
            // Restore the limit: if its coverage is measured, the process writes a longer file when
            // it exits.
            return limit(before);
        }
        if std::env::var_os("EMULATED").is_some() {
            // `tests/cross.sh` sets the variable. The test harness would hide the text of
            // `eprintln!`.
            let why = b"the emulator starts no second program: the limit of files is not tested\n";
            return std::io::Write::write_all(&mut std::io::stderr(), why).unwrap();
        }
        let test = "mem::file::tests::a_file_above_the_limit_of_the_process_is_an_error";
        let mut limited = std::process::Command::new(std::env::current_exe().unwrap());
        let output = limited.args(["--exact", test]).env(LIMITED, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }

    /// If a program maps a part of a huge page, the system maps the whole huge page. The program
    /// must unmap the whole huge page, too.
    #[test]
    fn a_part_of_a_huge_page_is_mapped_and_unmapped() {
        const HUGE: usize = 2 << 20;
        let flags = libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC | libc::MFD_HUGETLB | libc::MFD_HUGE_2MB;
        // SAFETY: the name is a NUL-terminated string.
        let fd = unsafe { libc::memfd_create(c"huge".as_ptr(), flags) };
        if fd < 0 {
            // This system has no huge pages.
            return;
        }
        // SAFETY: `memfd_create` has returned this descriptor, which has no other owner.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: the call changes the length of a file, and accesses no memory.
        assert_eq!(unsafe { libc::ftruncate(fd, HUGE as i64) }, 0);
        match Memory::map_file(file.as_fd(), 0, page_size()) {
            Ok(memory) => {
                assert!(memory.len() == page_size() && matches!(memory.backing, Backing::Mapping(HUGE)));
                // Dropping the memory checks that the system has unmapped it.
            }
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOMEM), "no huge page is free: {error}"),
        }
    }

    #[test]
    fn files_that_could_become_shorter_are_refused() {
        let said = |file: BorrowedFd<'_>, offset, len| Memory::map_file(file, offset, len).unwrap_err().to_string();
        let open = new_memfd(libc::MFD_ALLOW_SEALING, 8192);
        assert!(said(open.as_fd(), 0, 3 * 4096).contains("the file has 8192"));
        assert!(said(open.as_fd(), 1, 4096).contains("multiples of 4096"));
        assert!(said(open.as_fd(), 0, 0).contains("multiples of 4096"));
        assert!(said(open.as_fd(), u64::MAX - 4095, 4096).contains("the file has"));
        assert!(said(new_memfd(0, 8192).as_fd(), 0, 4096).contains("MFD_ALLOW_SEALING"));
        let ordinary = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(said(ordinary.as_fd(), 0, 4096).contains("give a memfd"));
    }
}
