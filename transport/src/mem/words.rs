//! Copies to and from memory that other threads, peers and devices may use at the same time.
//!
//! Memory with several users is read and written in whole words: 8 bytes at a multiple of 8, each by one relaxed atomic
//! operation. All accesses to a byte have the same width, so no two of them are a data race ([`std::sync::atomic`]).
//! Each word of a copy is a value that the word had at some moment during the copy. Different words may be from
//! different moments.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// The length of a word, in bytes.
pub(super) const WORD: usize = 8;

/// The maximum number of attempts of a compare-and-exchange. If all users of a word are correct, at most a few attempts
/// fail. A peer that writes the word continuously could make every attempt fail.
pub(super) const ROUNDS: usize = 1 << 16;

/// From this number of words on, a copy uses one string instruction if the processor has it. For 64 KiB this is as fast
/// as a plain copy, and a loop over single words takes 1.5 times as long. For fewer words, the time to start the
/// instruction is longer than the time that it saves.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const LONG: usize = 128;

/// Copies `len` bytes from `from`, which may have other users, to `to`.
///
/// # Safety
/// Each word that contains one of the bytes at `from` fulfils the requirements of [`word`] until the call returns. The
/// caller may write the `len` bytes at `to`, and these do not overlap the words of `from`.
#[inline]
pub(super) unsafe fn load(from: NonNull<u8>, to: *mut u8, len: usize) {
    let head = from.addr().get().wrapping_neg() % WORD;
    let mut done = 0;
    if head > 0 && len > 0 {
        done = head.min(len);
        // SAFETY: the first byte is one of those to copy. The range ends at the end of this byte's word, or earlier if
        // fewer bytes are to be copied.
        unsafe {
            let (word, within) = word(from);
            let bytes = word.load(Ordering::Relaxed).to_ne_bytes();
            to.copy_from_nonoverlapping(bytes.as_ptr().add(within), done);
        }
    }
    let count = (len - done) / WORD;
    // SAFETY: after the first `done` bytes, `count` whole words are to be copied, and `to` has room for them.
    unsafe { load_words(from.add(done), to.add(done), count) };
    done += count * WORD;
    if done < len {
        // SAFETY: the remaining bytes begin at the start of a word, and are fewer than 8.
        unsafe {
            let bytes = word(from.add(done)).0.load(Ordering::Relaxed).to_ne_bytes();
            to.add(done).copy_from_nonoverlapping(bytes.as_ptr(), len - done);
        }
    }
}

/// Copies `len` bytes from `from` to `to`, which may have other users. The other bytes of the first and the last word
/// keep their values, even if other users write them at the same time. The exception is a peer that writes one of these
/// two words more than [`ROUNDS`] times during the call.
///
/// # Safety
/// Each word that contains one of the bytes at `to` fulfils the requirements of [`word`] until the call returns. The
/// caller may read the `len` bytes at `from`, and these do not overlap the words of `to`.
#[inline]
pub(super) unsafe fn store(from: *const u8, to: NonNull<u8>, len: usize) {
    let head = to.addr().get().wrapping_neg() % WORD;
    let mut done = 0;
    if head > 0 && len > 0 {
        done = head.min(len);
        // SAFETY: the first byte is one of those to write. The range ends at the end of this byte's word, or earlier if
        // fewer bytes are to be copied.
        unsafe { merge(to, from, done) };
    }
    let count = (len - done) / WORD;
    // SAFETY: after the first `done` bytes, `count` whole words are to be written, and `from` has bytes for them.
    unsafe { store_words(from.add(done), to.add(done), count) };
    done += count * WORD;
    if done < len {
        // SAFETY: the remaining bytes begin at the start of a word, and are fewer than 8.
        unsafe { merge(to.add(done), from.add(done), len - done) };
    }
}

/// Copies `len` bytes from `from` to `to`, both of which may have other users. The other bytes of the first and the
/// last word at `to` keep their values, as in [`store`].
///
/// # Safety
/// Each word that contains one of the bytes at `from` or at `to` fulfils the requirements of
/// [`word`] until the call returns. The two ranges may overlap: the result may then contain bytes
/// that this call has already copied.
pub(super) unsafe fn transfer(from: NonNull<u8>, to: NonNull<u8>, len: usize) {
    const CHUNK: usize = 512;
    let mut copy = [0; CHUNK];
    let mut part = |at: usize, len: usize| {
        // SAFETY: the range is a part of the `len` bytes at `from` and at `to`. `copy` is a local array.
        unsafe {
            load(from.add(at), copy.as_mut_ptr(), len);
            store(copy.as_ptr(), to.add(at), len);
        }
    };
    let (mut done, mut end) = (0, len);
    if (from.addr().get() ^ to.addr().get()) % WORD == 0 {
        // Both addresses have the same offset within a word, so whole words can be copied without an intermediate copy.
        let head = (from.addr().get().wrapping_neg() % WORD).min(len);
        let count = (len - head) / WORD;
        part(0, head);
        // SAFETY: these are `count` whole words at `from` and at `to`.
        unsafe { transfer_words(from.add(head), to.add(head), count) };
        (done, end) = (head + count * WORD, len);
    }
    while done < end {
        let now = (end - done).min(CHUNK);
        part(done, now);
        done += now;
    }
}

/// Replaces the `len` bytes at `to` by those at `from`. All bytes at `to` are in one word.
///
/// # Safety
/// The requirements of [`store`]; also, the bytes are in one word.
#[inline]
unsafe fn merge(to: NonNull<u8>, from: *const u8, len: usize) {
    // SAFETY: the word that contains `to` fulfils the requirements of `word`, because `to` fulfils those of `store`.
    let (word, within) = unsafe { word(to) };
    let (mut value, mut mask) = ([0; WORD], [0; WORD]);
    let whole = crate::planted("a-part-overwrites-its-word");
    mask[if whole { 0..WORD } else { within..within + len }].fill(0xff);
    // SAFETY: the caller may read `len` bytes at `from`. `value` has room for them, because they are within one word.
    unsafe { value.as_mut_ptr().add(within).copy_from_nonoverlapping(from, len) };
    let (value, mask) = (u64::from_ne_bytes(value), u64::from_ne_bytes(mask));
    let mut old = word.load(Ordering::Relaxed);
    // Another attempt is necessary if another user has written the word, or if the exchange failed spuriously.
    for _ in 0..ROUNDS {
        match word.compare_exchange_weak(old, old & !mask | value, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => old = now,
        }
    }
    // Only a peer that has the right to write the whole word can make every attempt fail. So it is permitted to
    // overwrite the peer's value.
    word.store(old & !mask | value, Ordering::Relaxed);
}

/// Copies `count` words from the aligned address `from`.
///
/// # Safety
/// The requirements of [`load`]; also, `from` is aligned.
#[inline]
unsafe fn load_words(from: NonNull<u8>, to: *mut u8, count: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if count >= LONG {
        // SAFETY: the caller fulfils the requirements of `load_words`, so those of `move_words` are fulfilled.
        return unsafe { move_words(from.as_ptr(), to, count) };
    }
    for index in 0..count {
        // SAFETY: the calls access one of the `count` words at `from`, and 8 of the bytes that the caller may write at `to`.
        unsafe {
            let word = word(from.add(index * WORD)).0.load(Ordering::Relaxed);
            to.add(index * WORD).cast::<u64>().write_unaligned(word);
        }
    }
}

/// Copies `count` words to the aligned address `to`.
///
/// # Safety
/// The requirements of [`store`]; also, `to` is aligned.
#[inline]
unsafe fn store_words(from: *const u8, to: NonNull<u8>, count: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if count >= LONG {
        // SAFETY: the caller fulfils the requirements of `store_words`, so those of `move_words` are fulfilled.
        return unsafe { move_words(from, to.as_ptr(), count) };
    }
    for index in 0..count {
        // SAFETY: the calls access 8 of the bytes that the caller may read at `from`, and one of the `count` words at `to`.
        unsafe {
            let bytes = from.add(index * WORD).cast::<u64>().read_unaligned();
            word(to.add(index * WORD)).0.store(bytes, Ordering::Relaxed);
        }
    }
}

/// Copies `count` words between two aligned addresses.
///
/// # Safety
/// The requirements of [`transfer`]; also, both addresses are aligned.
#[inline]
unsafe fn transfer_words(from: NonNull<u8>, to: NonNull<u8>, count: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if count >= LONG {
        // SAFETY: the caller fulfils the requirements of `transfer_words`, so those of `move_words` are fulfilled.
        return unsafe { move_words(from.as_ptr(), to.as_ptr(), count) };
    }
    for index in 0..count {
        // SAFETY: the calls access one of the `count` words at `from`, and one of the `count` words at `to`.
        unsafe {
            let value = word(from.add(index * WORD)).0.load(Ordering::Relaxed);
            word(to.add(index * WORD)).0.store(value, Ordering::Relaxed);
        }
    }
}

/// Copies `count` words by one string instruction. An address whose words have other users must be aligned.
///
/// # Safety
/// The requirements of [`load_words`], [`store_words`] or [`transfer_words`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn move_words(from: *const u8, to: *mut u8, count: usize) {
    // SAFETY: both addresses are valid for `count` words, and if these overlap, the copy is a
    // mixture. The instruction accesses each aligned word like a relaxed atomic access of x86-64:
    // undivided, and in no order relative to the other words. The compiler allows an asm block to
    // make such accesses.
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

/// Returns the word that contains the byte at `at`, and the offset of the byte in the word.
///
/// # Safety
/// The whole word is in memory that stays valid for `'a`. Either only atomic operations on whole
/// words, devices and the kernel use the word, or all of its users only read it.
#[inline]
unsafe fn word<'a>(at: NonNull<u8>) -> (&'a AtomicU64, usize) {
    let within = at.addr().get() % WORD;
    // SAFETY: this is the aligned word that contains `at`. The caller promises that the word is
    // valid, and that all of its users use atomic operations or only read it.
    (unsafe { AtomicU64::from_ptr(at.as_ptr().sub(within).cast()) }, within)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compares `load` and `store` with plain copies, for each alignment of source and destination. Bytes outside
        /// the range do not change.
        #[test]
        fn as_a_plain_copy(
            shared_at in 0usize..24, private_at in 0usize..24, len in prop_oneof![0usize..100, 900usize..2500],
        ) {
            let bytes: Vec<u8> = (0..2600_usize).map(|n| (n * 7 + n / 256) as u8).collect();
            let shared: Vec<AtomicU64> = (0..320_u64).map(|n| AtomicU64::new(n.wrapping_mul(0x0101_0101_0101_0101))).collect();
            let base = NonNull::new(shared.as_ptr().cast_mut().cast::<u8>()).unwrap();
            let mut model: Vec<u8> = (0..320_u64).flat_map(|n| (n.wrapping_mul(0x0101_0101_0101_0101)).to_ne_bytes()).collect();
            model[shared_at..shared_at + len].copy_from_slice(&bytes[private_at..private_at + len]);
            // SAFETY: the bytes are within both vectors. The words of the shared vector are atomic.
            unsafe { store(bytes[private_at..].as_ptr(), base.add(shared_at), len) };
            let now: Vec<u8> = shared.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect();
            prop_assert!(now == model);
            let mut out = vec![0xaa; 2600];
            // SAFETY: the bytes are within both vectors. The words of the shared vector are atomic.
            unsafe { load(base.add(shared_at), out[private_at..].as_mut_ptr(), len) };
            prop_assert!(out[private_at..private_at + len] == model[shared_at..shared_at + len]);
            prop_assert!(out[..private_at].iter().chain(&out[private_at + len..]).all(|&byte| byte == 0xaa));
        }

        /// Compares transfers between two shared vectors with plain copies, for each alignment of source and
        /// destination.
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
            // SAFETY: the bytes are within the two vectors, whose words are atomic.
            unsafe { transfer(base(&from).add(from_at), base(&to).add(to_at), len) };
            prop_assert!(bytes(&to) == model && bytes(&from) == source);
        }
    }
}
