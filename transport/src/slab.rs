//! Slots with generations: a stale key is an error, never another object.

use std::fmt;

/// A slot and the generation it was taken in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    slot: u32,
    generation: u32,
}

impl Key {
    /// Builds a key from its parts, as unpacked from a work request id.
    #[must_use]
    pub const fn new(slot: u32, generation: u32) -> Self {
        Self { slot, generation }
    }

    /// Index of the slot. Reused after removal, under another generation.
    #[must_use]
    pub const fn slot(self) -> u32 {
        self.slot
    }

    /// Which use of the slot this key names.
    #[must_use]
    pub const fn generation(self) -> u32 {
        self.generation
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.slot, self.generation)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.slot, self.generation)
    }
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

/// A growable table of `T` with stable keys; insert, look-up and remove are O(1).
#[derive(Debug)]
pub struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    generation_mask: u32,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self::with_generation_bits(32)
    }
}

impl<T> Slab<T> {
    /// A table whose generations wrap at `bits` bits (1 to 32), for keys that travel in fewer than 64 bits.
    #[must_use]
    pub fn with_generation_bits(bits: u32) -> Self {
        debug_assert!((1..=32).contains(&bits));
        Self { slots: Vec::new(), free: Vec::new(), generation_mask: u32::MAX >> (32 - bits.clamp(1, 32)) }
    }

    /// Stores `value` and returns its key.
    pub fn insert(&mut self, value: T) -> Key {
        if let Some(slot) = self.free.pop() {
            let entry = &mut self.slots[slot as usize];
            entry.value = Some(value);
            return Key { slot, generation: entry.generation };
        }
        let slot = u32::try_from(self.slots.len()).expect("a table of 2^32 live objects does not fit in memory");
        self.slots.push(Slot { generation: 1 & self.generation_mask, value: Some(value) });
        Key { slot, generation: 1 & self.generation_mask }
    }

    /// Takes the value out; its key and all copies of it are stale from now on.
    pub fn remove(&mut self, key: Key) -> Option<T> {
        let mask = self.generation_mask;
        let entry = self.slots.get_mut(key.slot as usize).filter(|s| s.generation == key.generation)?;
        let value = entry.value.take()?;
        entry.generation = entry.generation.wrapping_add(1) & mask;
        self.free.push(key.slot);
        Some(value)
    }

    /// The live value under `key`.
    #[must_use]
    #[inline]
    pub fn get(&self, key: Key) -> Option<&T> {
        self.slots.get(key.slot as usize).filter(|s| s.generation == key.generation)?.value.as_ref()
    }

    /// The live value under `key`, to change.
    #[inline]
    pub fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        self.slots.get_mut(key.slot as usize).filter(|s| s.generation == key.generation)?.value.as_mut()
    }

    /// The live value in `slot`, whatever its generation, with its key.
    #[must_use]
    pub fn at(&self, slot: u32) -> Option<(Key, &T)> {
        let entry = self.slots.get(slot as usize)?;
        Some((Key { slot, generation: entry.generation }, entry.value.as_ref()?))
    }

    /// Number of live values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether nothing is stored.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Live values with their keys, by slot.
    pub fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        self.slots.iter().enumerate().filter_map(|(slot, entry)| {
            let key = Key { slot: slot as u32, generation: entry.generation };
            entry.value.as_ref().map(|value| (key, value))
        })
    }

    /// Keys of the live values, by slot.
    #[must_use]
    pub fn keys(&self) -> Vec<Key> {
        self.iter().map(|(key, _)| key).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_key_finds_nothing() {
        let mut slab = Slab::default();
        let first = slab.insert("a");
        assert_eq!(slab.remove(first), Some("a"));
        let second = slab.insert("b");
        assert_eq!(first.slot(), second.slot());
        assert_eq!(slab.get(first), None);
        assert_eq!(slab.remove(first), None);
        assert_eq!(slab.get(second), Some(&"b"));
        assert_eq!(slab.len(), 1);
    }

    #[test]
    fn generations_wrap_within_their_bits() {
        let mut slab = Slab::with_generation_bits(4);
        for _ in 0..100 {
            let key = slab.insert(());
            assert!(key.generation() < 16);
            slab.remove(key);
        }
        assert!(slab.is_empty());
    }
}
