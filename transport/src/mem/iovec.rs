//! Buffers of send and receive calls that may lie in memory which others use at the same time.
//!
//! The slices of the standard library ([`std::io::IoSlice`]) are references, and there must be no reference to memory
//! that another thread, a peer or a device writes. These slices hold an address instead; only the kernel or an atomic
//! copy accesses the bytes.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};

use super::words;

/// The most slices that one call can send or receive.
pub const MAX_SLICES: usize = 64;

/// Bytes to be sent.
#[derive(Clone, Copy, Debug)]
pub struct SendSlice<'a> {
    base: NonNull<u8>,
    len: usize,
    /// True for a part of a `Memory` that others may write.
    shared: bool,
    life: PhantomData<&'a [u8]>,
}

impl<'a> SendSlice<'a> {
    /// Makes a slice of bytes that nobody writes while the slice lives.
    #[must_use]
    #[inline]
    pub fn new(bytes: &'a [u8]) -> Self {
        let base = NonNull::from(bytes).cast();
        Self { base, len: bytes.len(), shared: false, life: PhantomData }
    }

    /// Makes a slice of the bytes of a work request or of a region.
    ///
    /// # Safety
    /// The bytes are valid and initialised for `'a`. If `shared` is set, they are a part of a `Memory` that is used by
    /// atomic operations, devices and the kernel only; otherwise nobody writes them.
    #[inline]
    pub(super) const unsafe fn from_parts(base: NonNull<u8>, len: usize, shared: bool) -> Self {
        Self { base, len, shared, life: PhantomData }
    }

    /// Returns the length, bytes.
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

    /// Returns the slice without its first `n` bytes; an empty one if it has no more.
    #[must_use]
    #[inline]
    pub fn skip(self, n: usize) -> Self {
        let n = n.min(self.len);
        // SAFETY: the result is within the bytes, or at their end.
        let base = unsafe { self.base.add(n) };
        Self { base, len: self.len - n, ..self }
    }

    /// Appends a copy of the first bytes, at most `most`, to `out`. Returns their number.
    pub fn append_to(&self, out: &mut Vec<u8>, most: usize) -> usize {
        let (start, len) = (out.len(), self.len.min(most));
        out.reserve(len);
        // SAFETY: the bytes are valid as `new` and `from_parts` demand. The vector has room for `len` bytes behind its
        // end, which are written before they are counted.
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

/// Room for bytes to be received.
#[derive(Debug)]
pub struct RecvSlice<'a> {
    base: NonNull<u8>,
    len: usize,
    /// True for a part of a `Memory` that others may use.
    shared: bool,
    life: PhantomData<&'a mut [u8]>,
}

impl<'a> RecvSlice<'a> {
    /// Makes an empty slice.
    #[must_use]
    pub const fn none() -> Self {
        Self { base: NonNull::dangling(), len: 0, shared: false, life: PhantomData }
    }

    /// Makes a slice of bytes that nobody else uses while the slice lives.
    #[must_use]
    #[inline]
    pub fn new(bytes: &'a mut [u8]) -> Self {
        let len = bytes.len();
        Self { base: NonNull::from(bytes).cast(), len, shared: false, life: PhantomData }
    }

    /// Makes a slice of the memory of a work request or of a region.
    ///
    /// # Safety
    /// The memory is valid and initialised for `'a`. If `shared` is set, it is a part of a `Memory` that is used by
    /// atomic operations, devices and the kernel only; otherwise nobody else uses it.
    #[inline]
    pub(super) const unsafe fn from_parts(base: NonNull<u8>, len: usize, shared: bool) -> Self {
        Self { base, len, shared, life: PhantomData }
    }

    /// Returns the length, bytes.
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

    /// Copies `bytes` to the start, as many as fit. Returns their number.
    pub fn fill(&mut self, bytes: &[u8]) -> usize {
        let len = self.len.min(bytes.len());
        // SAFETY: the memory is valid as `new` and `from_parts` demand. `bytes` is a reference, so it does not overlap
        // the memory that is written here.
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

/// Converts the result of a system call that returns a number of bytes.
fn moved(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Receives into `slices`, in order (`recv`(2), `readv`(2)). Returns the number of bytes; 0 at the end of the stream.
/// Uses only the first [`MAX_SLICES`] slices.
///
/// # Errors
/// Those of the system, including `WouldBlock`.
#[inline]
pub fn receive(socket: BorrowedFd<'_>, slices: &mut [RecvSlice<'_>]) -> io::Result<usize> {
    let fd = socket.as_raw_fd();
    if let [one] = slices {
        // SAFETY: the kernel may write the `len` bytes for as long as the slice lives.
        return moved(unsafe { libc::recv(fd, one.base.as_ptr().cast(), one.len, 0) });
    }
    let mut vector = [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; MAX_SLICES];
    let mut count = 0;
    for (entry, slice) in vector.iter_mut().zip(slices.iter()) {
        *entry = libc::iovec { iov_base: slice.base.as_ptr().cast(), iov_len: slice.len };
        count += 1;
    }
    // SAFETY: the kernel may write the bytes of each of the `count` entries, as above.
    moved(unsafe { libc::readv(fd, vector.as_ptr(), count) })
}

/// Sends the bytes of `slices`, in order, without a signal if the peer is gone (`sendmsg`(2), `MSG_NOSIGNAL`). Returns
/// the number of bytes. Uses only the first [`MAX_SLICES`] slices.
///
/// # Errors
/// Those of the system, including `WouldBlock`.
#[inline]
pub fn send(socket: BorrowedFd<'_>, slices: &[SendSlice<'_>]) -> io::Result<usize> {
    let fd = socket.as_raw_fd();
    if let [one] = slices {
        // SAFETY: the kernel may read the `len` bytes for as long as the slice lives.
        return moved(unsafe { libc::send(fd, one.base.as_ptr().cast(), one.len, libc::MSG_NOSIGNAL) });
    }
    let mut vector = [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; MAX_SLICES];
    let mut count = 0;
    for (entry, slice) in vector.iter_mut().zip(slices) {
        *entry = libc::iovec { iov_base: slice.base.as_ptr().cast(), iov_len: slice.len };
        count += 1;
    }
    // SAFETY: zeros are a message header without address, vector and control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (vector.as_mut_ptr(), count);
    // SAFETY: the kernel may read the bytes of each of the `count` entries, as above, and writes none.
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
