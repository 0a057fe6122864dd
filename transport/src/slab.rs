//! A table of slots. A key contains the generation of the object in its slot. So a stale key finds nothing, even if the
//! slot holds another object now.

use std::fmt;

/// The key of an object in a [`Slab`]: a slot, and the generation of the object in that slot.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    slot: u32,
    generation: u32,
}

impl Key {
    /// A key that names no object: no slab has a slot with this index.
    pub const NONE: Self = Self::new(u32::MAX, 0);

    /// Makes a key from a slot and a generation, for example from a slot and a generation that were stored in a
    /// `wr_id`.
    #[must_use]
    #[inline]
    pub const fn new(slot: u32, generation: u32) -> Self {
        Self { slot, generation }
    }

    /// Returns the index of the slot. After the object is removed, another object may use the slot, with another
    /// generation.
    #[must_use]
    #[inline]
    pub const fn slot(self) -> u32 {
        self.slot
    }

    /// Returns the generation of the object in the slot.
    #[must_use]
    #[inline]
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
        self.generation == key.generation || crate::planted("no-generation-check")
    }
}

/// A growable table of `T` with stable keys. Inserting, looking up and removing take constant time.
///
/// No key is returned twice. A slot is retired when its generations are used up: it stays empty forever, so that no
/// stale key ever names another object. The cost is the memory of one retired slot for about every 2^`bits` objects
/// that the slot has held, where `bits` is the argument of [`Slab::with_generation_bits`].
#[derive(Debug)]
pub struct Slab<T> {
    slots: Vec<Slot<T>>,
    /// Empty slots that can be used again. The slot that was emptied last is at the end, and is used next.
    free: Vec<u32>,
    /// The number of retired slots, which are empty forever.
    retired: usize,
    last_generation: u32,
}

/// The first generation of a slot. Generation 0 is never used, so a key with generation 0 names no object.
const FIRST: u32 = 1;

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self::with_generation_bits(32)
    }
}

impl<T> Slab<T> {
    /// Makes a table whose generations fit in `bits` bits (1 to 32). Use fewer than 32 if a key must be stored in fewer
    /// than 64 bits.
    #[must_use]
    pub fn with_generation_bits(bits: u32) -> Self {
        debug_assert!((1..=32).contains(&bits));
        let last_generation = u32::MAX >> (32 - bits.clamp(1, 32));
        Self { slots: Vec::new(), free: Vec::new(), retired: 0, last_generation }
    }

    /// Stores `value` and returns its key.
    ///
    /// # Panics
    /// If there are 2^32 slots already, which do not fit in memory.
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

    /// Removes the value with this key, and returns it. Returns `None` if the key is stale or was never valid.
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

    /// Returns the value with this key; `None` if the value was removed.
    #[must_use]
    #[inline]
    pub fn get(&self, key: Key) -> Option<&T> {
        self.slots.get(key.slot as usize).filter(|slot| slot.is(key))?.value.as_ref()
    }

    /// Returns the value with this key, mutably; `None` if the value was removed.
    #[inline]
    pub fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        self.slots.get_mut(key.slot as usize).filter(|slot| slot.is(key))?.value.as_mut()
    }

    /// Returns the value in `slot`, of any generation, with its key. Returns `None` if the slot is empty or does not
    /// exist.
    #[must_use]
    pub fn at(&self, slot: u32) -> Option<(Key, &T)> {
        let entry = self.slots.get(slot as usize)?;
        Some((Key { slot, generation: entry.generation }, entry.value.as_ref()?))
    }

    /// Returns the number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len() - self.retired
    }

    /// Returns true if the table has no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Iterates over the values with their keys, in the order of slots.
    pub fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        self.slots.iter().enumerate().filter_map(|(slot, entry)| {
            let key = Key { slot: slot as u32, generation: entry.generation };
            entry.value.as_ref().map(|value| (key, value))
        })
    }

    /// Returns the keys of the values, in the order of slots.
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
        /// Compares the table with a map as its model. Checks that no key is returned twice, and that each key finds
        /// its own value, or nothing after that value was removed.
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
