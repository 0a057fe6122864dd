//! Parts of a memory that peers may use at the same time as the program.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::iovec::{RecvSlice, SendSlice};
use super::{Memory, Sge, words};

/// A part of a [`Memory`]. The span borrows the memory. Peers, through the provider, may use the bytes at the same
/// time. So may other threads of the program, through the functions of [`Memory`].
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    base: NonNull<u8>,
    len: usize,
    memory: PhantomData<&'a Memory>,
}

impl<'a> Span<'a> {
    /// Makes a span of the `len` bytes of `memory` from `start` on. Returns `None` if these bytes are not inside the
    /// memory.
    #[inline]
    pub(super) fn new(memory: &'a Memory, start: usize, len: usize) -> Option<Self> {
        if start.checked_add(len)? > memory.len() {
            return None;
        }
        // SAFETY: the start is within the memory, or at its end with a length of 0.
        let base = unsafe { memory.base.add(start) };
        Some(Self { base, len, memory: PhantomData })
    }

    /// Returns the address of the first byte.
    #[inline]
    pub(super) const fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the length, in bytes.
    #[inline]
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the span has no bytes.
    #[inline]
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies the bytes to `out`. Copies fewer bytes if `out` is shorter.
    #[inline]
    pub(super) fn copy_to(self, out: &mut [u8]) {
        // SAFETY: the bytes are a part of a borrowed `Memory`. Only atomic operations, devices and the kernel use its
        // words (see `Memory`). `out` is a reference, so it does not overlap the memory.
        unsafe { words::load(self.base, out.as_mut_ptr(), self.len.min(out.len())) };
    }

    /// Appends a copy of the bytes to `out`.
    #[inline]
    pub fn append_to(self, out: &mut Vec<u8>) {
        let start = out.len();
        out.reserve(self.len);
        // SAFETY: the bytes are a part of a borrowed `Memory`, whose words only atomic operations, devices and the
        // kernel use. The vector has reserved `self.len` bytes past its end, and they are written before `set_len`
        // includes them.
        unsafe {
            words::load(self.base, out.as_mut_ptr().add(start), self.len);
            out.set_len(start + self.len);
        }
    }

    /// Copies `bytes` to the start of the span. Copies fewer bytes if the span is shorter.
    #[inline]
    pub fn fill(self, bytes: &[u8]) {
        // SAFETY: the span is a part of a borrowed `Memory`, whose words only atomic operations, devices and the kernel
        // use. `bytes` is a reference, so it does not overlap the memory.
        unsafe { words::store(bytes.as_ptr(), self.base, bytes.len().min(self.len)) };
    }

    /// Copies the bytes of `from` to the start of this span. Copies fewer bytes if this span is
    /// shorter. If the two spans overlap, the result may contain bytes that this call has already
    /// copied.
    #[inline]
    pub fn fill_from(self, from: Span<'_>) {
        // SAFETY: both spans are parts of borrowed `Memory`s, whose words only atomic operations, devices and the
        // kernel use.
        unsafe { words::transfer(from.base, self.base, self.len.min(from.len)) };
    }

    /// Returns at most `len` bytes of the span from `offset` on. Returns an empty span if `offset` is past the end.
    #[inline]
    pub fn part(self, offset: usize, len: usize) -> Self {
        let offset = offset.min(self.len);
        // SAFETY: the result is within the span, or at its end.
        let base = unsafe { self.base.add(offset) };
        Self { base, len: len.min(self.len - offset), memory: PhantomData }
    }

    /// Calls `each` with the first `len` bytes of the span, for example to compute a checksum. The
    /// caller has placed these bytes for an RDMA Read of the local program. `entry` is the part of
    /// that Read's local scatter/gather entry that begins at this span. If nothing else may use the
    /// bytes of `entry`, `each` gets the bytes in place. Otherwise `each` gets copies of
    /// consecutive parts.
    pub(super) fn visit(self, len: usize, entry: Sge, each: impl FnMut(&[u8])) {
        let len = len.min(self.len);
        if !entry.is_shared() && entry.address() == self.base.as_ptr() && len <= entry.len() {
            return entry.part(0, len).visit(each);
        }
        // SAFETY: the bytes are a part of a borrowed `Memory`, whose words only atomic operations, devices and the
        // kernel use.
        unsafe { super::sge::visit_copies(self.base, len, each) };
    }

    /// Returns the bytes as a buffer for a send call.
    #[inline]
    pub fn send_slice(self) -> SendSlice<'a> {
        // SAFETY: the bytes are a part of a `Memory` that is borrowed for as long as the slice exists.
        unsafe { SendSlice::from_parts(self.base, self.len, true) }
    }

    /// Returns the bytes as a buffer for a receive call.
    #[inline]
    pub fn receive_slice(self) -> RecvSlice<'a> {
        // SAFETY: the bytes are a part of a `Memory` that is borrowed for as long as the slice exists.
        unsafe { RecvSlice::from_parts(self.base, self.len, true) }
    }

    /// Returns the span as one word, in the byte order of this machine. Returns `None` unless the span is 8 bytes long
    /// and begins at a multiple of 8.
    #[inline]
    pub(super) fn word(self) -> Option<&'a AtomicU64> {
        if self.len != words::WORD || self.base.addr().get() % words::WORD != 0 {
            return None;
        }
        // SAFETY: this is a whole aligned word of a `Memory` that is borrowed for as long as the reference exists. Only
        // atomic operations, devices and the kernel use it.
        Some(unsafe { AtomicU64::from_ptr(self.base.as_ptr().cast()) })
    }

    /// Atomically adds `add` to the word, and returns the old value. Values are in the byte order
    /// of this machine. Returns `None` if the span is not a whole word (8 bytes at a multiple of
    /// 8).
    ///
    /// The processor adds in one operation, not in a loop of compare-and-swaps. So a peer that has
    /// mapped the word and writes it continuously cannot prevent the addition.
    #[inline]
    pub fn fetch_add(self, add: u64) -> Option<u64> {
        Some(self.word()?.fetch_add(add, Ordering::SeqCst))
    }

    /// Atomically replaces the word by `swap` if its value is `expected`. Returns the old value,
    /// whether the word was replaced or not. The byte order and the result `None` are those of
    /// [`Span::fetch_add`].
    #[inline]
    pub fn compare_swap(self, expected: u64, swap: u64) -> Option<u64> {
        match self.word()?.compare_exchange(expected, swap, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(old) | Err(old) => Some(old),
        }
    }

    /// Atomically replaces the word by `update(value)`, for operations that the processor does not
    /// have. Returns the old value. The byte order and the result `None` are those of
    /// [`Span::fetch_add`]. The number of attempts is limited. Only a peer with a writable mapping
    /// of the word can make all attempts fail. In this case the call overwrites the peer's value.
    pub fn update(self, mut update: impl FnMut(u64) -> u64) -> Option<u64> {
        let word = self.word()?;
        let mut old = word.load(Ordering::SeqCst);
        // Another attempt is necessary if another user has changed the word in the meantime.
        for _ in 0..words::ROUNDS {
            match word.compare_exchange_weak(old, update(old), Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Some(old),
                Err(now) => old = now,
            }
        }
        word.store(update(old), Ordering::SeqCst);
        Some(old)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer that has mapped a word may change it continuously. Then `update` overwrites the word
    /// after `ROUNDS` attempts. It does not fail: an error would end the connection of the peer
    /// that requested the operation.
    #[test]
    fn an_update_ends_and_succeeds_though_the_word_never_stays() {
        let memory = Memory::new(64).unwrap();
        let word = memory.span(8, 8).unwrap();
        assert_eq!((word.update(|old| old + 5), word.update(|old| old * 2)), (Some(0), Some(5)));
        let mut rounds = 0;
        let restless = word.update(|old| {
            rounds += 1;
            memory.word(8).unwrap().fetch_add(1, Ordering::SeqCst);
            old
        });
        assert_eq!((restless, rounds), (Some(10 + words::ROUNDS as u64), words::ROUNDS + 1));
        assert_eq!(memory.span(9, 8).unwrap().update(|old| old), None);
    }

    #[test]
    fn atomic_operations_return_the_old_value() {
        let memory = Memory::new(64).unwrap();
        let (word, odd) = (memory.span(8, 8).unwrap(), memory.span(9, 8).unwrap());
        assert_eq!((word.fetch_add(5), word.fetch_add(u64::MAX)), (Some(0), Some(5)));
        assert_eq!((word.compare_swap(4, 7), word.compare_swap(4, 9)), (Some(4), Some(7)));
        assert_eq!(word.fetch_add(0), Some(7));
        assert_eq!((odd.fetch_add(1), odd.compare_swap(0, 1)), (None, None));
    }
}
