//! Copies to and from memory that other threads, peers and devices may use at the same time.
//!
//! Such memory is read and written in whole words: 8 bytes at a multiple of 8, each by one relaxed atomic operation.
//! All accesses to a byte have the same width, so that no two of them are a data race ([`std::sync::atomic`]). A copy
//! holds, for each word, what was there at some moment during the copy; different words may be of different moments.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a word.
pub(super) const WORD: usize = 8;

/// Rounds of a compare-and-exchange that others may make fail. Those who use a word as it should be used make it fail a few times; a peer that
/// does nothing but write the word can go on for ever.
pub(super) const ROUNDS: usize = 1 << 16;

/// Copies of at least this many words use one string instruction where there is one: it moves 64 KiB as fast as a plain
/// copy does, where a loop of single words takes half as long again. Below this its start costs more than it saves.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const LONG: usize = 128;

/// The word that holds the byte at `at`, and where in the word that is.
///
/// # Safety
/// The whole word lies in memory that stays valid for `'a`, and is used by atomic operations on whole words, by devices
/// and by the kernel only, or else only read.
#[inline]
unsafe fn word<'a>(at: NonNull<u8>) -> (&'a AtomicU64, usize) {
    let within = at.addr().get() % WORD;
    // SAFETY: the aligned word around `at`, valid and used atomically as the caller promises.
    (unsafe { AtomicU64::from_ptr(at.as_ptr().sub(within).cast()) }, within)
}

/// Copies `len` bytes at `from` to `to`.
///
/// # Safety
/// Every word that holds one of the bytes at `from` is as [`word`] demands until the call returns. The `len` bytes at
/// `to` are the caller's to write, and no part of those words.
#[inline]
pub(super) unsafe fn load(from: NonNull<u8>, to: *mut u8, len: usize) {
    let head = from.addr().get().wrapping_neg() % WORD;
    let mut done = 0;
    if head > 0 && len > 0 {
        done = head.min(len);
        // SAFETY: the first byte is one of those to copy; at most the rest of its word is taken.
        unsafe {
            let (word, within) = word(from);
            let bytes = word.load(Ordering::Relaxed).to_ne_bytes();
            to.copy_from_nonoverlapping(bytes.as_ptr().add(within), done);
        }
    }
    let count = (len - done) / WORD;
    // SAFETY: `count` whole words follow, all of them among those to copy, and as many bytes of `to`.
    unsafe { load_words(from.add(done), to.add(done), count) };
    done += count * WORD;
    if done < len {
        // SAFETY: what is left begins at a word's start and is shorter than a word.
        unsafe {
            let bytes = word(from.add(done)).0.load(Ordering::Relaxed).to_ne_bytes();
            to.add(done).copy_from_nonoverlapping(bytes.as_ptr(), len - done);
        }
    }
}

/// Copies `len` bytes at `from` to `to`. Bytes beside them that share a word with them keep their value, whoever writes
/// them at the same time, but for those of a peer that writes the word more than [`ROUNDS`] times meanwhile.
///
/// # Safety
/// Every word that holds one of the bytes at `to` is as [`word`] demands until the call returns. The `len` bytes at
/// `from` are the caller's to read, and no part of those words.
#[inline]
pub(super) unsafe fn store(from: *const u8, to: NonNull<u8>, len: usize) {
    let head = to.addr().get().wrapping_neg() % WORD;
    let mut done = 0;
    if head > 0 && len > 0 {
        done = head.min(len);
        // SAFETY: the first byte is one of those to write; at most the rest of its word is replaced.
        unsafe { merge(to, from, done) };
    }
    let count = (len - done) / WORD;
    // SAFETY: `count` whole words follow, all of them among those to write, and as many bytes of `from`.
    unsafe { store_words(from.add(done), to.add(done), count) };
    done += count * WORD;
    if done < len {
        // SAFETY: what is left begins at a word's start and is shorter than a word.
        unsafe { merge(to.add(done), from.add(done), len - done) };
    }
}

/// Copies `len` bytes between two places that others may use at the same time. Bytes beside those written keep their value.
///
/// # Safety
/// Every word that holds one of the bytes, on either side, is as [`word`] demands until the call returns. No word holds bytes of both
/// sides.
pub(super) unsafe fn transfer(from: NonNull<u8>, to: NonNull<u8>, len: usize) {
    const CHUNK: usize = 512;
    let mut copy = [0; CHUNK];
    let mut part = |at: usize, len: usize| {
        // SAFETY: a part of both sides; the copy is ours.
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
        // SAFETY: `count` whole words of both sides.
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
/// As [`store`], and the bytes are in one word.
unsafe fn merge(to: NonNull<u8>, from: *const u8, len: usize) {
    // SAFETY: as the caller promises.
    let (word, within) = unsafe { word(to) };
    let (mut value, mut mask) = ([0; WORD], [0; WORD]);
    mask[within..within + len].fill(0xff);
    // SAFETY: `len` bytes may be read, and `value` has room for them: they are within one word.
    unsafe { value.as_mut_ptr().add(within).copy_from_nonoverlapping(from, len) };
    let (value, mask) = (u64::from_ne_bytes(value), u64::from_ne_bytes(mask));
    let mut old = word.load(Ordering::Relaxed);
    // Each round means that somebody else's write to the word got through.
    for _ in 0..ROUNDS {
        match word.compare_exchange_weak(old, old & !mask | value, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => old = now,
        }
    }
    // Whoever has made it fail so often may write all of the word.
    word.store(old & !mask | value, Ordering::Relaxed);
}

/// Copies `count` words from an aligned place.
///
/// # Safety
/// As [`load`]; `from` is aligned.
#[inline]
unsafe fn load_words(from: NonNull<u8>, to: *mut u8, count: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if count >= LONG {
        // SAFETY: as the caller promises.
        return unsafe { move_words(from.as_ptr(), to, count) };
    }
    for index in 0..count {
        // SAFETY: one of the caller's words, and 8 bytes of `to`.
        unsafe {
            let word = word(from.add(index * WORD)).0.load(Ordering::Relaxed);
            to.add(index * WORD).cast::<u64>().write_unaligned(word);
        }
    }
}

/// Copies `count` words to an aligned place.
///
/// # Safety
/// As [`store`]; `to` is aligned.
#[inline]
unsafe fn store_words(from: *const u8, to: NonNull<u8>, count: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if count >= LONG {
        // SAFETY: as the caller promises.
        return unsafe { move_words(from, to.as_ptr(), count) };
    }
    for index in 0..count {
        // SAFETY: 8 bytes of `from`, and one of the caller's words.
        unsafe {
            let bytes = from.add(index * WORD).cast::<u64>().read_unaligned();
            word(to.add(index * WORD)).0.store(bytes, Ordering::Relaxed);
        }
    }
}

/// Copies `count` words between aligned places.
///
/// # Safety
/// As [`transfer`]; both are aligned.
#[inline]
unsafe fn transfer_words(from: NonNull<u8>, to: NonNull<u8>, count: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if count >= LONG {
        // SAFETY: as the caller promises.
        return unsafe { move_words(from.as_ptr(), to.as_ptr(), count) };
    }
    for index in 0..count {
        // SAFETY: one of the caller's words on each side.
        unsafe {
            let value = word(from.add(index * WORD)).0.load(Ordering::Relaxed);
            word(to.add(index * WORD)).0.store(value, Ordering::Relaxed);
        }
    }
}

/// Copies `count` words by one instruction, for which each side that others use is aligned.
///
/// # Safety
/// As [`load_words`], [`store_words`] or [`transfer_words`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn move_words(from: *const u8, to: *mut u8, count: usize) {
    // SAFETY: both sides are valid for `count` words and do not overlap. The instruction reads and writes each word as
    // a relaxed atomic access of x86-64 does: an aligned quadword, undivided, in no order relative to the other words.
    // The compiler takes an asm block for one that may do such accesses.
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
        /// Against plain copies, for every alignment of both sides; nothing beside the bytes changes.
        #[test]
        fn as_a_plain_copy(
            shared_at in 0usize..24, private_at in 0usize..24, len in prop_oneof![0usize..100, 900usize..2500],
        ) {
            let bytes: Vec<u8> = (0..2600_usize).map(|n| (n * 7 + n / 256) as u8).collect();
            let shared: Vec<AtomicU64> = (0..320_u64).map(|n| AtomicU64::new(n.wrapping_mul(0x0101_0101_0101_0101))).collect();
            let base = NonNull::new(shared.as_ptr().cast_mut().cast::<u8>()).unwrap();
            let mut model: Vec<u8> = (0..320_u64).flat_map(|n| (n.wrapping_mul(0x0101_0101_0101_0101)).to_ne_bytes()).collect();
            model[shared_at..shared_at + len].copy_from_slice(&bytes[private_at..private_at + len]);
            // SAFETY: within both vectors, whose words are atomic.
            unsafe { store(bytes[private_at..].as_ptr(), base.add(shared_at), len) };
            let now: Vec<u8> = shared.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect();
            prop_assert!(now == model);
            let mut out = vec![0xaa; 2600];
            // SAFETY: as above.
            unsafe { load(base.add(shared_at), out[private_at..].as_mut_ptr(), len) };
            prop_assert!(out[private_at..private_at + len] == model[shared_at..shared_at + len]);
            prop_assert!(out[..private_at].iter().chain(&out[private_at + len..]).all(|&byte| byte == 0xaa));
        }

        /// Between two shared places, for every alignment of both.
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
            // SAFETY: within two vectors, whose words are atomic.
            unsafe { transfer(base(&from).add(from_at), base(&to).add(to_at), len) };
            prop_assert!(bytes(&to) == model && bytes(&from) == source);
        }
    }
}
