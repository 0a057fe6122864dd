//! Memory files for tests, like those of hostile peers and like those of correct peers. The crate
//! `rdma-transport-embedded` links to this source file.
#![allow(dead_code, reason = "each crate uses a part")]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

/// The seals that fix the length of a file.
const SIZE: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
/// The seal after which no page of a file can be removed.
const PAGES: libc::c_int = libc::F_SEAL_FUTURE_WRITE;

/// Makes memory files like those of hostile peers, and like those of correct peers.
#[derive(Debug)]
pub(crate) struct HostileFile;

impl HostileFile {
    /// Makes a file whose size is sealed, without pages.
    pub(crate) fn sparse(len: u64) -> OwnedFd {
        Self::sealed(len, false, SIZE)
    }

    /// Makes a file whose size is sealed, with all pages allocated. Holes can be punched into it.
    pub(crate) fn with_pages(len: u64) -> OwnedFd {
        Self::sealed(len, true, SIZE)
    }

    /// Makes a file as a correct peer does: its size is sealed, and its pages cannot be removed.
    pub(crate) fn fixed(len: u64) -> OwnedFd {
        Self::sealed(len, true, SIZE | PAGES)
    }

    /// Makes a file as a correct peer does to lend it: its size is sealed, and its pages can always
    /// be removed, because no more seals can be added.
    pub(crate) fn lent(len: u64) -> OwnedFd {
        Self::sealed(len, true, SIZE | libc::F_SEAL_SEAL)
    }

    /// Returns the length of all allocated pages of a file, in bytes.
    pub(crate) fn allocated(file: &OwnedFd) -> u64 {
        std::fs::File::from(file.try_clone().expect("a descriptor")).metadata().expect("the file's state").blocks()
            * 512
    }

    /// Makes a file with all pages, whose size can change.
    pub(crate) fn unsealed(len: u64) -> OwnedFd {
        Self::sealed(len, true, 0)
    }

    fn sealed(len: u64, has_pages: bool, seals: libc::c_int) -> OwnedFd {
        // SAFETY: the name is a NUL-terminated string.
        let fd = unsafe { libc::memfd_create(c"rdma-hostile".as_ptr(), libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC) };
        assert!(fd >= 0, "{}", io::Error::last_os_error());
        // SAFETY: `memfd_create` has returned this descriptor, which has no other owner.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: the calls set the length, the pages and the seals of a file.
        unsafe {
            assert_eq!(libc::ftruncate(fd, len as i64), 0);
            assert!(!has_pages || libc::fallocate(fd, 0, 0, len as i64) == 0);
            assert_eq!(libc::fcntl(fd, libc::F_ADD_SEALS, seals), 0);
        }
        file
    }

    /// Punches a hole into a file. Returns false if the file does not permit that.
    pub(crate) fn punch(file: &OwnedFd, at: u64, len: u64) -> bool {
        let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: the call changes bytes of a `Memory` in the same way as a peer that writes them.
        unsafe { libc::fallocate(file.as_raw_fd(), hole, at as i64, len as i64) == 0 }
    }
}
