//! Randomness: one seed, and one stream per subsystem, so that one more draw in one subsystem does not change the draws
//! of the others.

use std::ops::RangeInclusive;

/// xoshiro256**, seeded by SplitMix64.
#[derive(Clone, Debug)]
pub struct Rng([u64; 4]);

/// Runs one step of SplitMix64: returns a well mixed number for every input.
#[must_use]
pub const fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Rng {
    /// Returns the stream of this name.
    #[must_use]
    pub fn new(seed: u64, stream: &str) -> Self {
        let mut state = mix(seed);
        for byte in stream.bytes() {
            state = mix(state ^ u64::from(byte));
        }
        Self::from_state(state)
    }

    /// Returns the stream of this number.
    #[must_use]
    pub fn from_state(state: u64) -> Self {
        Self(std::array::from_fn(|i| mix(state.wrapping_add(i as u64))))
    }

    /// Returns 64 random bits.
    pub fn bits(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.0;
        let result = b.wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let t = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= t;
        *d = d.rotate_left(45);
        result
    }

    /// Returns a number below `n`, or 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(n)) >> 64) as u64
    }

    /// Returns an index into something of length `n`, which is not 0.
    pub fn index(&mut self, n: usize) -> usize {
        self.below(n as u64) as usize
    }

    /// Returns a number of the range.
    pub fn range(&mut self, range: RangeInclusive<u64>) -> u64 {
        range.start() + self.below(range.end() - range.start() + 1)
    }

    /// Returns a number of the range, small ones more often: every power of two is equally likely.
    pub fn skewed(&mut self, range: RangeInclusive<u64>) -> u64 {
        let span = range.end() - range.start();
        let bits = u64::from(64 - span.leading_zeros());
        let cap = self.range(0..=bits);
        let drawn = if cap == 0 { 0 } else { self.bits() >> (64 - cap) };
        range.start() + drawn.min(span)
    }

    /// Returns true `per_mille` times out of a thousand.
    pub fn chance(&mut self, per_mille: u32) -> bool {
        per_mille > 0 && self.below(1000) < u64::from(per_mille)
    }

    /// Returns one of the items.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.index(items.len())]
    }

    /// Random bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let bits = self.bits().to_le_bytes();
            chunk.copy_from_slice(&bits[..chunk.len()]);
        }
    }
}
