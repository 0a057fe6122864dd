//! Copies to and from memory that other threads, peers and devices may use at the same time.
//!
//! Such memory is read and written in whole words: 8 bytes at a multiple of 8, each by one relaxed atomic operation.
//! All accesses to a byte have the same width, so no two of them are a data race ([`std::sync::atomic`]). Each word of
//! a copy is the value that was there at some moment during the copy; different words may be of different moments.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// The length of a word, bytes.
pub(super) const WORD: usize = 8;

/// The largest number of attempts of a compare-and-exchange. Correct users of a word make it fail a few times; a peer
/// that writes the word all the time could make it fail forever.
pub(super) const ROUNDS: usize = 1 << 16;

/// The number of words from which on a copy uses one string instruction, if the processor has it. That moves 64 KiB as
/// fast as a plain copy; a loop over single words takes half as long again. For fewer words, starting the instruction
/// costs more than it saves.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const LONG: usize = 128;

/// Returns the word that holds the byte at `at`, and the offset of the byte in the word.
///
/// # Safety
/// The whole word lies in memory that stays valid for `'a`, and is either used only by atomic operations on whole
/// words, devices and the kernel, or only read.
#[inline]
unsafe fn word<'a>(at: NonNull<u8>) -> (&'a AtomicU64, usize) {
    let within = at.addr().get() % WORD;
    // SAFETY: this is the aligned word around `at`, which is valid and used atomically, as the caller promises.
    (unsafe { AtomicU64::from_ptr(at.as_ptr().sub(within).cast()) }, within)
}

/// Copies `len` bytes at `from` to `to`.
///
/// # Safety
/// Each word that holds one of the bytes at `from` is as [`word`] demands until the call returns. The caller may write
/// the `len` bytes at `to`, which are no part of those words.
#[inline]
pub(super) unsafe fn load(from: NonNull<u8>, to: *mut u8, len: usize) {
    let head = from.addr().get().wrapping_neg() % WORD;
    let mut done = 0;
    if head > 0 && len > 0 {
        done = head.min(len);
        // SAFETY: the first byte is one of those to copy; at most the rest of its word is copied here.
        unsafe {
            let (word, within) = word(from);
            let bytes = word.load(Ordering::Relaxed).to_ne_bytes();
            to.copy_from_nonoverlapping(bytes.as_ptr().add(within), done);
        }
    }
    let count = (len - done) / WORD;
    // SAFETY: `count` whole words follow, all of them among those to copy, and `to` has room for them.
    unsafe { load_words(from.add(done), to.add(done), count) };
    done += count * WORD;
    if done < len {
        // SAFETY: the remaining bytes begin at the start of a word and are fewer than a word has.
        unsafe {
            let bytes = word(from.add(done)).0.load(Ordering::Relaxed).to_ne_bytes();
            to.add(done).copy_from_nonoverlapping(bytes.as_ptr(), len - done);
        }
    }
}

/// Copies `len` bytes at `from` to `to`. Bytes beside them in the same words keep their value, even if others write
/// them at the same time. The exception is a peer that writes such a word more than [`ROUNDS`] times during the call.
///
/// # Safety
/// Each word that holds one of the bytes at `to` is as [`word`] demands until the call returns. The caller may read the
/// `len` bytes at `from`, which are no part of those words.
#[inline]
pub(super) unsafe fn store(from: *const u8, to: NonNull<u8>, len: usize) {
    let head = to.addr().get().wrapping_neg() % WORD;
    let mut done = 0;
    if head > 0 && len > 0 {
        done = head.min(len);
        // SAFETY: the first byte is one of those to write; at most the rest of its word is replaced here.
        unsafe { merge(to, from, done) };
    }
    let count = (len - done) / WORD;
    // SAFETY: `count` whole words follow, all of them among those to write, and `from` has bytes for them.
    unsafe { store_words(from.add(done), to.add(done), count) };
    done += count * WORD;
    if done < len {
        // SAFETY: the remaining bytes begin at the start of a word and are fewer than a word has.
        unsafe { merge(to.add(done), from.add(done), len - done) };
    }
}

/// Copies `len` bytes from `from` to `to`; others may use both at the same time. Bytes beside the written ones keep
/// their value, as in [`store`].
///
/// # Safety
/// Each word that holds one of the bytes, on either side, is as [`word`] demands until the call returns. No word holds
/// bytes of both sides.
pub(super) unsafe fn transfer(from: NonNull<u8>, to: NonNull<u8>, len: usize) {
    const CHUNK: usize = 512;
    let mut copy = [0; CHUNK];
    let mut part = |at: usize, len: usize| {
        // SAFETY: the bytes are a part of both sides; the copy is a local array.
        unsafe {
            load(from.add(at), copy.as_mut_ptr(), len);
            store(copy.as_ptr(), to.add(at), len);
        }
    };
    let (mut done, mut end) = (0, len);
    if (from.addr().get() ^ to.addr().get()) % WORD == 0 {
        // Whole words of one side are whole words of the other.
        let head = (from.addr().get().wrapping_neg() % WORD).min(len);
        let count = (len - head) / WORD;
        part(0, head);
        // SAFETY: these are `count` whole words of both sides.
        unsafe { transfer_words(from.add(head), to.add(head), count) };
        (done, end) = (head + count * WORD, len);
    }
    while done < end {
        let now = (end - done).min(CHUNK);
        part(done, now);
        done += now;
    }
}

/// Replaces `len` bytes at `to` within one word.
///
/// # Safety
/// As for [`store`]; the bytes are in one word.
unsafe fn merge(to: NonNull<u8>, from: *const u8, len: usize) {
    // SAFETY: the caller promises it.
    let (word, within) = unsafe { word(to) };
    let (mut value, mut mask) = ([0; WORD], [0; WORD]);
    mask[within..within + len].fill(0xff);
    // SAFETY: the caller may read `len` bytes, and `value` has room for them, because they are within one word.
    unsafe { value.as_mut_ptr().add(within).copy_from_nonoverlapping(from, len) };
    let (value, mask) = (u64::from_ne_bytes(value), u64::from_ne_bytes(mask));
    let mut old = word.load(Ordering::Relaxed);
    // A further round means that somebody else has written the word, or that the exchange failed spuriously.
    for _ in 0..ROUNDS {
        match word.compare_exchange_weak(old, old & !mask | value, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => old = now,
        }
    }
    // Only a peer that may write the whole word can make it fail so often.
    word.store(old & !mask | value, Ordering::Relaxed);
}

/// Copies `count` words from an aligned address.
///
/// # Safety
/// As for [`load`]; `from` is aligned.
#[inline]
unsafe fn load_words(from: NonNull<u8>, to: *mut u8, count: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if count >= LONG {
        // SAFETY: the caller promises it.
        return unsafe { move_words(from.as_ptr(), to, count) };
    }
    for index in 0..count {
        // SAFETY: this is one of the caller's words, and 8 bytes of `to`.
        unsafe {
            let word = word(from.add(index * WORD)).0.load(Ordering::Relaxed);
            to.add(index * WORD).cast::<u64>().write_unaligned(word);
        }
    }
}

/// Copies `count` words to an aligned address.
///
/// # Safety
/// As for [`store`]; `to` is aligned.
#[inline]
unsafe fn store_words(from: *const u8, to: NonNull<u8>, count: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if count >= LONG {
        // SAFETY: the caller promises it.
        return unsafe { move_words(from, to.as_ptr(), count) };
    }
    for index in 0..count {
        // SAFETY: these are 8 bytes of `from`, and one of the caller's words.
        unsafe {
            let bytes = from.add(index * WORD).cast::<u64>().read_unaligned();
            word(to.add(index * WORD)).0.store(bytes, Ordering::Relaxed);
        }
    }
}

/// Copies `count` words between aligned addresses.
///
/// # Safety
/// As for [`transfer`]; both addresses are aligned.
#[inline]
unsafe fn transfer_words(from: NonNull<u8>, to: NonNull<u8>, count: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if count >= LONG {
        // SAFETY: the caller promises it.
        return unsafe { move_words(from.as_ptr(), to.as_ptr(), count) };
    }
    for index in 0..count {
        // SAFETY: this is one of the caller's words on each side.
        unsafe {
            let value = word(from.add(index * WORD)).0.load(Ordering::Relaxed);
            word(to.add(index * WORD)).0.store(value, Ordering::Relaxed);
        }
    }
}

/// Copies `count` words by one instruction. A side that others use must be aligned.
///
/// # Safety
/// The caller keeps the promises of [`load_words`], [`store_words`] or [`transfer_words`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn move_words(from: *const u8, to: *mut u8, count: usize) {
    // SAFETY: both sides are valid for `count` words and do not overlap. The instruction accesses each aligned word as
    // a relaxed atomic access of x86-64 does: undivided, in no order relative to the other words. The compiler assumes
    // that an asm block may make such accesses.
    unsafe {
        std::arch::asm!(
            "rep movsq",
            inout("rcx") count => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compares with plain copies, for each alignment of both sides. Nothing beside the bytes changes.
        #[test]
        fn as_a_plain_copy(
            shared_at in 0usize..24, private_at in 0usize..24, len in prop_oneof![0usize..100, 900usize..2500],
        ) {
            let bytes: Vec<u8> = (0..2600_usize).map(|n| (n * 7 + n / 256) as u8).collect();
            let shared: Vec<AtomicU64> = (0..320_u64).map(|n| AtomicU64::new(n.wrapping_mul(0x0101_0101_0101_0101))).collect();
            let base = NonNull::new(shared.as_ptr().cast_mut().cast::<u8>()).unwrap();
            let mut model: Vec<u8> = (0..320_u64).flat_map(|n| (n.wrapping_mul(0x0101_0101_0101_0101)).to_ne_bytes()).collect();
            model[shared_at..shared_at + len].copy_from_slice(&bytes[private_at..private_at + len]);
            // SAFETY: the bytes are within both vectors, and the words of the shared one are atomic.
            unsafe { store(bytes[private_at..].as_ptr(), base.add(shared_at), len) };
            let now: Vec<u8> = shared.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect();
            prop_assert!(now == model);
            let mut out = vec![0xaa; 2600];
            // SAFETY: as above.
            unsafe { load(base.add(shared_at), out[private_at..].as_mut_ptr(), len) };
            prop_assert!(out[private_at..private_at + len] == model[shared_at..shared_at + len]);
            prop_assert!(out[..private_at].iter().chain(&out[private_at + len..]).all(|&byte| byte == 0xaa));
        }

        /// Compares transfers between two shared vectors with plain copies, for each alignment of both.
        #[test]
        fn a_transfer_is_a_plain_copy(from_at in 0usize..24, to_at in 0usize..24, len in prop_oneof![0usize..100, 900usize..2500]) {
            let words = |seed: u64| (0..320_u64).map(|n| AtomicU64::new((n + 1).wrapping_mul(seed))).collect::<Vec<_>>();
            let bytes = |words: &[AtomicU64]| -> Vec<u8> {
                words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect()
            };
            let (from, to) = (words(0x0102_0304_0506_0708), words(0x1112_1314_1516_1718));
            let (source, mut model) = (bytes(&from), bytes(&to));
            model[to_at..to_at + len].copy_from_slice(&source[from_at..from_at + len]);
            let base = |words: &[AtomicU64]| NonNull::new(words.as_ptr().cast_mut().cast::<u8>()).unwrap();
            // SAFETY: the bytes are within two vectors, whose words are atomic.
            unsafe { transfer(base(&from).add(from_at), base(&to).add(to_at), len) };
            prop_assert!(bytes(&to) == model && bytes(&from) == source);
        }
    }
}
