//! Buffers of send and receive calls in memory that other threads, peers or devices may use at the same time.
//!
//! The slices of the standard library ([`std::io::IoSlice`]) are references. A reference to memory that something else
//! writes is undefined behaviour. The slices of this file hold an address instead, and only the kernel or an atomic
//! copy accesses the bytes.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};

use super::words;

/// The maximum number of slices that one call sends or receives.
pub const MAX_SLICES: usize = 64;

/// Bytes that a send call sends.
#[derive(Clone, Copy, Debug)]
pub struct SendSlice<'a> {
    base: NonNull<u8>,
    len: usize,
    /// True if the bytes are a part of a `Memory` that other users may write.
    shared: bool,
    life: PhantomData<&'a [u8]>,
}

impl<'a> SendSlice<'a> {
    /// Makes a slice of bytes that nothing writes while the slice exists.
    #[must_use]
    #[inline]
    pub fn new(bytes: &'a [u8]) -> Self {
        let base = NonNull::from(bytes).cast();
        Self { base, len: bytes.len(), shared: false, life: PhantomData }
    }

    /// Makes a slice of the bytes of a work request or of a region.
    ///
    /// # Safety
    /// The bytes are valid and initialised for `'a`. If `shared` is true, they are a part of a `Memory`, and only
    /// atomic operations, devices and the kernel use them. If `shared` is false, nothing writes them.
    #[inline]
    pub(super) const unsafe fn from_parts(base: NonNull<u8>, len: usize, shared: bool) -> Self {
        Self { base, len, shared, life: PhantomData }
    }

    /// Returns the length, in bytes.
    #[must_use]
    #[inline]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the slice has no bytes.
    #[must_use]
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the slice without its first `n` bytes. Returns an empty slice if the slice has at most `n` bytes.
    #[must_use]
    #[inline]
    pub fn skip(self, n: usize) -> Self {
        let n = n.min(self.len);
        // SAFETY: the result is within the bytes, or at their end.
        let base = unsafe { self.base.add(n) };
        Self { base, len: self.len - n, ..self }
    }

    /// Appends a copy of the first bytes to `out`, at most `most` bytes. Returns the number of copied bytes.
    pub fn append_to(&self, out: &mut Vec<u8>, most: usize) -> usize {
        let (start, len) = (out.len(), self.len.min(most));
        out.reserve(len);
        // SAFETY: the bytes are valid, as `new` and `from_parts` require. The vector has reserved `len` bytes past
        // its end, and they are written before `set_len` includes them.
        unsafe {
            let to = out.as_mut_ptr().add(start);
            if self.shared {
                words::load(self.base, to, len);
            } else {
                ptr::copy_nonoverlapping(self.base.as_ptr(), to, len);
            }
            out.set_len(start + len);
        }
        len
    }
}

/// Memory into which a receive call places bytes.
#[derive(Debug)]
pub struct RecvSlice<'a> {
    base: NonNull<u8>,
    len: usize,
    /// True if the memory is a part of a `Memory` that other users may access.
    shared: bool,
    life: PhantomData<&'a mut [u8]>,
}

impl<'a> RecvSlice<'a> {
    /// Makes an empty slice.
    #[must_use]
    pub const fn none() -> Self {
        Self { base: NonNull::dangling(), len: 0, shared: false, life: PhantomData }
    }

    /// Makes a slice of bytes that nothing else uses while the slice exists.
    #[must_use]
    #[inline]
    pub fn new(bytes: &'a mut [u8]) -> Self {
        let len = bytes.len();
        Self { base: NonNull::from(bytes).cast(), len, shared: false, life: PhantomData }
    }

    /// Makes a slice of the memory of a work request or of a region.
    ///
    /// # Safety
    /// The memory is valid and initialised for `'a`. If `shared` is true, it is a part of a `Memory`, and only atomic
    /// operations, devices and the kernel use it. If `shared` is false, nothing else uses it.
    #[inline]
    pub(super) const unsafe fn from_parts(base: NonNull<u8>, len: usize, shared: bool) -> Self {
        Self { base, len, shared, life: PhantomData }
    }

    /// Returns the length, in bytes.
    #[must_use]
    #[inline]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the slice has no bytes.
    #[must_use]
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies `bytes` to the start of the slice. Copies fewer bytes if the slice is shorter. Returns the number of
    /// copied bytes.
    pub fn fill(&mut self, bytes: &[u8]) -> usize {
        let len = self.len.min(bytes.len());
        // SAFETY: the memory is valid, as `new` and `from_parts` require. `bytes` is a reference, so it does not
        // overlap this memory.
        unsafe {
            if self.shared {
                words::store(bytes.as_ptr(), self.base, len);
            } else {
                ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.as_ptr(), len);
            }
        }
        len
    }
}

/// Converts the result of a system call into the number of bytes that the call has transferred, or into the system's
/// error.
fn moved(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Receives bytes into `slices`, in order (`recv`(2), `readv`(2)). Returns the number of bytes; 0 means the end of the
/// stream. Uses only the first [`MAX_SLICES`] slices.
///
/// # Errors
/// The errors of the system call, including `WouldBlock`.
#[inline]
pub fn receive(socket: BorrowedFd<'_>, slices: &mut [RecvSlice<'_>]) -> io::Result<usize> {
    let fd = socket.as_raw_fd();
    if let [one] = slices {
        // SAFETY: the kernel may write the slice's `len` bytes for as long as the slice exists.
        return moved(unsafe { libc::recv(fd, one.base.as_ptr().cast(), one.len, 0) });
    }
    let mut vector = [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; MAX_SLICES];
    let mut count = 0;
    for (entry, slice) in vector.iter_mut().zip(slices.iter()) {
        *entry = libc::iovec { iov_base: slice.base.as_ptr().cast(), iov_len: slice.len };
        count += 1;
    }
    // SAFETY: the kernel may write the bytes of each of the `count` slices for as long as the slices exist.
    moved(unsafe { libc::readv(fd, vector.as_ptr(), count) })
}

/// Sends the bytes of `slices`, in order (`sendmsg`(2)). Returns the number of bytes. Uses only the first
/// [`MAX_SLICES`] slices. Raises no `SIGPIPE` if the peer has closed the connection (`MSG_NOSIGNAL`).
///
/// # Errors
/// The errors of the system call, including `WouldBlock`.
#[inline]
pub fn send(socket: BorrowedFd<'_>, slices: &[SendSlice<'_>]) -> io::Result<usize> {
    let fd = socket.as_raw_fd();
    if let [one] = slices {
        // SAFETY: the kernel may read the slice's `len` bytes for as long as the slice exists.
        return moved(unsafe { libc::send(fd, one.base.as_ptr().cast(), one.len, libc::MSG_NOSIGNAL) });
    }
    let mut vector = [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; MAX_SLICES];
    let mut count = 0;
    for (entry, slice) in vector.iter_mut().zip(slices) {
        *entry = libc::iovec { iov_base: slice.base.as_ptr().cast(), iov_len: slice.len };
        count += 1;
    }
    // SAFETY: a message header of zeros is valid: it has no address, no vector and no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (vector.as_mut_ptr(), count);
    // SAFETY: the kernel may read the bytes of each of the `count` slices for as long as the slices exist. It writes
    // none.
    moved(unsafe { libc::sendmsg(fd, &raw const message, libc::MSG_NOSIGNAL) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn slices_go_through_a_socket_in_order() {
        let (mut a, mut b) = UnixStream::pair().unwrap();
        let parts: Vec<Vec<u8>> = (0..MAX_SLICES + 1).map(|n| vec![n as u8; n]).collect();
        let slices: Vec<_> = parts.iter().map(|part| SendSlice::new(part)).collect();
        let all: Vec<u8> = parts[..MAX_SLICES].concat();
        assert_eq!(send(a.as_fd(), &slices).unwrap(), all.len());
        let mut got = vec![0; all.len()];
        b.read_exact(&mut got).unwrap();
        assert!(got == all);
        assert_eq!(send(a.as_fd(), &[slices[9].skip(4)]).unwrap(), 5);
        b.read_exact(&mut got[..5]).unwrap();
        assert_eq!(got[..5], [9; 5]);
        assert_eq!((slices[3].skip(9).len(), slices[3].append_to(&mut got, 2)), (0, 2));
        assert_eq!(got[all.len()..], [3, 3]);

        b.write_all(b"one two").unwrap();
        let (mut one, mut two) = ([0; 3], [0; 9]);
        let n = receive(a.as_fd(), &mut [RecvSlice::new(&mut one), RecvSlice::new(&mut two)]).unwrap();
        assert_eq!((n, &one, &two[..4]), (7, b"one", &b" two"[..]));
        a.set_nonblocking(true).unwrap();
        let error = receive(a.as_fd(), &mut [RecvSlice::new(&mut one)]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(b);
        assert_eq!(receive(a.as_fd(), &mut [RecvSlice::new(&mut one)]).unwrap(), 0);
        assert_eq!(send(a.as_fd(), &[SendSlice::new(&one)]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        let _ = a.flush();
    }
}
