//! Slots with generations: a stale key is an error, never another object.

use std::fmt;

/// Names an object in a [`Slab`]: a slot, and which use of the slot is meant.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    slot: u32,
    generation: u32,
}

impl Key {
    /// The key of no object: no slab has so many slots.
    pub const NONE: Self = Self::new(u32::MAX, 0);

    /// Builds a key from its parts, as unpacked from a work request id.
    #[must_use]
    pub const fn new(slot: u32, generation: u32) -> Self {
        Self { slot, generation }
    }

    /// Index of the slot. It is used again after removal, under another generation.
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

impl<T> Slot<T> {
    #[inline]
    fn is(&self, key: Key) -> bool {
        self.generation == key.generation || cfg!(planted = "no-generation-check")
    }
}

/// A growable table of `T` with stable keys. Inserting, looking up and removing take constant time.
///
/// A key is used once: a slot whose generations are used up is retired and stays empty for good, so that no stale key
/// ever names another object. That is one slot of memory for every 2^bits objects that the slot has held.
#[derive(Debug)]
pub struct Slab<T> {
    slots: Vec<Slot<T>>,
    /// Empty slots that have a generation left, the last one used first.
    free: Vec<u32>,
    /// Empty slots that have none.
    retired: usize,
    last_generation: u32,
}

/// The first use of a slot. Generation 0 is never used: such a key names nothing.
const FIRST: u32 = 1;

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self::with_generation_bits(32)
    }
}

impl<T> Slab<T> {
    /// A table whose generations fit `bits` bits (1 to 32), for keys that travel in fewer than 64 bits.
    #[must_use]
    pub fn with_generation_bits(bits: u32) -> Self {
        debug_assert!((1..=32).contains(&bits));
        let last_generation = u32::MAX >> (32 - bits.clamp(1, 32));
        Self { slots: Vec::new(), free: Vec::new(), retired: 0, last_generation }
    }

    /// Stores `value` and returns its key.
    ///
    /// # Panics
    /// When there are 2^32 slots, which do not fit in memory.
    pub fn insert(&mut self, value: T) -> Key {
        if let Some(slot) = self.free.pop() {
            let entry = &mut self.slots[slot as usize];
            entry.value = Some(value);
            return Key { slot, generation: entry.generation };
        }
        let slot = u32::try_from(self.slots.len()).expect("a table of 2^32 slots does not fit in memory");
        self.slots.push(Slot { generation: FIRST, value: Some(value) });
        Key { slot, generation: FIRST }
    }

    /// Takes the value out. Its key and all copies of it name nothing from now on.
    pub fn remove(&mut self, key: Key) -> Option<T> {
        let entry = self.slots.get_mut(key.slot as usize).filter(|slot| slot.generation == key.generation)?;
        let value = entry.value.take()?;
        if entry.generation == self.last_generation {
            self.retired += 1;
        } else {
            entry.generation += 1;
            self.free.push(key.slot);
        }
        Some(value)
    }

    /// The live value under `key`.
    #[must_use]
    #[inline]
    pub fn get(&self, key: Key) -> Option<&T> {
        self.slots.get(key.slot as usize).filter(|slot| slot.is(key))?.value.as_ref()
    }

    /// The live value under `key`, to change.
    #[inline]
    pub fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        self.slots.get_mut(key.slot as usize).filter(|slot| slot.is(key))?.value.as_mut()
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
        self.slots.len() - self.free.len() - self.retired
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
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

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
    fn generations_fit_their_bits_and_a_slot_without_one_is_retired() {
        let mut slab = Slab::with_generation_bits(4);
        for round in 0..100 {
            let key = slab.insert(());
            assert_eq!((key.slot(), key.generation()), (round / 15, round % 15 + 1));
            slab.remove(key);
        }
        assert!(slab.is_empty());
    }

    proptest! {
        /// Against a map: no key is given twice, whatever happens, and every key that was ever given finds its own
        /// value or none.
        #[test]
        fn as_a_map(bits in 1u32..4, steps in prop::collection::vec((0usize..4, any::<prop::sample::Index>()), 1..200)) {
            let mut slab = Slab::with_generation_bits(bits);
            let (mut model, mut given) = (BTreeMap::new(), BTreeSet::new());
            for (number, (step, index)) in steps.into_iter().enumerate() {
                if step == 0 || given.is_empty() {
                    let key = slab.insert(number);
                    prop_assert!(given.insert(key) && u64::from(key.generation()) < 1 << bits);
                    model.insert(key, number);
                } else {
                    let all: Vec<&Key> = given.iter().collect();
                    let key = *all[index.index(all.len())];
                    prop_assert_eq!(slab.remove(key), model.remove(&key));
                }
                prop_assert_eq!(slab.len(), model.len());
                for &key in &given {
                    prop_assert_eq!(slab.get(key), model.get(&key));
                    prop_assert_eq!(slab.get_mut(key).copied(), model.get(&key).copied());
                    prop_assert_eq!(slab.at(key.slot()).filter(|found| found.0 == key).map(|found| found.1), model.get(&key));
                }
                let live: Vec<_> = slab.iter().map(|(key, &value)| (key, value)).collect();
                prop_assert_eq!(live, model.iter().map(|(&key, &value)| (key, value)).collect::<Vec<_>>());
            }
        }
    }
}
