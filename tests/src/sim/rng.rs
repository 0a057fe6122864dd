//! Random numbers. Each subsystem has its own sequence, which the seed determines. So an additional number in one subsystem does not
//! change the sequences of others.

use std::ops::RangeInclusive;

/// A generator of random numbers (xoshiro256**), seeded by SplitMix64.
#[derive(Clone, Debug)]
pub struct Rng([u64; 4]);

/// Takes one step of SplitMix64. Returns a number that looks random for every input.
#[must_use]
pub const fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Rng {
    /// Returns the generator of the subsystem with the name `stream`.
    #[must_use]
    pub fn new(seed: u64, stream: &str) -> Self {
        let mut state = mix(seed);
        for byte in stream.bytes() {
            state = mix(state ^ u64::from(byte));
        }
        Self::from_state(state)
    }

    /// Returns the generator that this number determines.
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

    /// Returns a random index below `n`, which must not be 0.
    pub fn index(&mut self, n: usize) -> usize {
        self.below(n as u64) as usize
    }

    /// Returns a random number in the range.
    pub fn range(&mut self, range: RangeInclusive<u64>) -> u64 {
        range.start() + self.below(range.end() - range.start() + 1)
    }

    /// Returns a random number in the range. Numbers near the start of the range are more frequent: the number of significant bits is drawn
    /// first, so that small and large numbers of bits are equally likely.
    pub fn skewed(&mut self, range: RangeInclusive<u64>) -> u64 {
        let span = range.end() - range.start();
        let bits = u64::from(64 - span.leading_zeros());
        let cap = self.range(0..=bits);
        let drawn = if cap == 0 { 0 } else { self.bits() >> (64 - cap) };
        range.start() + drawn.min(span)
    }

    /// Returns true with a probability of `per_mille` in a thousand.
    pub fn chance(&mut self, per_mille: u32) -> bool {
        per_mille > 0 && self.below(1000) < u64::from(per_mille)
    }

    /// Returns a random item.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.index(items.len())]
    }

    /// Fills a buffer with random bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let bits = self.bits().to_le_bytes();
            chunk.copy_from_slice(&bits[..chunk.len()]);
        }
    }
}
