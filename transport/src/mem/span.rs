//! Parts of memory regions that a peer may reach.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::iovec::{RecvSlice, SendSlice};
use super::{Memory, Sge, words};

/// A part of a [`Memory`] for as long as that is borrowed. Others may use it at the same time: peers through the
/// provider, the program on any thread through the functions of [`Memory`].
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    base: NonNull<u8>,
    len: usize,
    memory: PhantomData<&'a Memory>,
}

impl<'a> Span<'a> {
    /// A part of `memory`; `None` if it is not wholly inside.
    #[inline]
    pub(super) fn new(memory: &'a Memory, start: usize, len: usize) -> Option<Self> {
        if start.checked_add(len)? > memory.len() {
            return None;
        }
        // SAFETY: the start is within the memory, or one past its end with a length of 0.
        let base = unsafe { memory.base.add(start) };
        Some(Self { base, len, memory: PhantomData })
    }

    /// Its first byte.
    #[inline]
    pub(super) const fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    #[inline]
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if there are no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies the first bytes to `out`, as many as fit.
    #[inline]
    pub(super) fn copy_to(self, out: &mut [u8]) {
        // SAFETY: a part of a borrowed `Memory`, whose whole words belong to it and are used by atomic operations,
        // devices and the kernel (see `Memory`); `out` is a reference and so no part of it.
        unsafe { words::load(self.base, out.as_mut_ptr(), self.len.min(out.len())) };
    }

    /// Appends a copy of the bytes.
    #[inline]
    pub fn append_to(self, out: &mut Vec<u8>) {
        let start = out.len();
        out.reserve(self.len);
        // SAFETY: as in `copy_to`; the vector has room for as many bytes behind its end, and they are written before
        // they count.
        unsafe {
            words::load(self.base, out.as_mut_ptr().add(start), self.len);
            out.set_len(start + self.len);
        }
    }

    /// Copies `bytes` to the start, as many as fit.
    #[inline]
    pub fn fill(self, bytes: &[u8]) {
        // SAFETY: as in `copy_to`.
        unsafe { words::store(bytes.as_ptr(), self.base, bytes.len().min(self.len)) };
    }

    /// Copies the first bytes of `from`, as many as fit, to the start.
    #[inline]
    pub(crate) fn fill_from(self, from: Span<'_>) {
        // SAFETY: as in `copy_to`, for both sides: they are different words, or the same ones, of which each keeps its value.
        unsafe { words::transfer(from.base, self.base, self.len.min(from.len)) };
    }

    /// Copies the first bytes of `from`, as many as fit, to the start.
    #[inline]
    pub(crate) fn fill_from_entry(self, from: &Sge) {
        from.store_into(self.base, self.len);
    }

    /// The part from `offset`, at most `len` long; empty past the end.
    #[inline]
    pub(crate) fn part(self, offset: usize, len: usize) -> Self {
        let offset = offset.min(self.len);
        // SAFETY: within the part of the memory, or one past its end.
        let base = unsafe { self.base.add(offset) };
        Self { base, len: len.min(self.len - offset), memory: PhantomData }
    }

    /// Shows the first `len` bytes, of the sink of a read of ours that begins with `entry`, to `each`: where they are
    /// if the entry promises that nobody else uses them, else copies of parts.
    pub(crate) fn visit(self, len: usize, entry: Sge, each: impl FnMut(&[u8])) {
        let len = len.min(self.len);
        if !entry.is_shared() && entry.address() == self.base.as_ptr() && len <= entry.len() {
            return entry.part(0, len).visit(each);
        }
        // SAFETY: a part of a borrowed `Memory`, as in `copy_to`.
        unsafe { super::sge::visit_copies(self.base, len, each) };
    }

    /// The bytes, for a send call.
    pub(crate) fn send_slice(self) -> SendSlice<'a> {
        // SAFETY: a part of a `Memory` that is borrowed for as long as the slice lives.
        unsafe { SendSlice::from_parts(self.base, self.len, true) }
    }

    /// The bytes, for a receive call.
    pub(crate) fn receive_slice(self) -> RecvSlice<'a> {
        // SAFETY: a part of a `Memory` that is borrowed for as long as the slice lives.
        unsafe { RecvSlice::from_parts(self.base, self.len, true) }
    }

    /// The 8 bytes at its start, in the order of this machine; `None` if it is not 8 bytes at a multiple of 8.
    #[inline]
    pub(super) fn word(self) -> Option<&'a AtomicU64> {
        if self.len != words::WORD || self.base.addr().get() % words::WORD != 0 {
            return None;
        }
        // SAFETY: a whole aligned word of a `Memory` that is borrowed for as long as the reference lives, used by
        // atomic operations, devices and the kernel.
        Some(unsafe { AtomicU64::from_ptr(self.base.as_ptr().cast()) })
    }

    /// Replaces the word by what `update` makes of it, atomically; returns what was there. The number is in the byte order of this
    /// machine. `None` if the part is not 8 bytes at a multiple of 8, or if a peer that has mapped it does nothing but change it.
    pub fn update(self, mut update: impl FnMut(u64) -> u64) -> Option<u64> {
        let word = self.word()?;
        let mut old = word.load(Ordering::SeqCst);
        // Each round means that somebody else changed the word.
        for _ in 0..words::ROUNDS {
            match word.compare_exchange_weak(old, update(old), Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Some(old),
                Err(now) => old = now,
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer that has mapped a word may change it at any time, and costs nobody more than the work request.
    #[test]
    fn an_update_ends_though_the_word_never_stays() {
        let memory = Memory::new(64).unwrap();
        let word = memory.span(8, 8).unwrap();
        assert_eq!((word.update(|old| old + 5), word.update(|old| old * 2)), (Some(0), Some(5)));
        let mut rounds = 0;
        let restless = word.update(|old| {
            rounds += 1;
            memory.word(8).unwrap().fetch_add(1, Ordering::SeqCst);
            old
        });
        assert_eq!((restless, rounds), (None, words::ROUNDS));
        assert_eq!(memory.span(9, 8).unwrap().update(|old| old), None);
    }
}
