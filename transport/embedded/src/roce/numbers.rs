//! Assigns queue pair numbers. The lower 16 of the 24 bits are a slot of a table; the upper 8 bits count the uses of the slot.

use std::collections::VecDeque;

use rdma_transport::slab::Key;

/// The lowest number of a queue pair. Smaller numbers are not assigned: 0 and 1 are reserved for management.
const FIRST: u32 = 16;
/// The largest number of queue pairs at one time. With this limit, no queue pair gets the number 0xffffff, which stands for multicast
/// groups.
const MOST: usize = 0xff00;

/// The queue pairs of a provider, by their numbers.
#[derive(Debug, Default)]
pub(crate) struct QueuePairNumbers {
    slots: Vec<(u32, Option<Key>)>, // local: endpoints of the program
    /// Slots without a queue pair, in the order of their release. The slot that was released first is assigned first, so that a number is
    /// reused as late as possible.
    free: VecDeque<u32>, // local: endpoints of the program
}

impl QueuePairNumbers {
    /// Assigns a number to the queue pair `key` and returns the number. Returns `None` if all numbers are in use.
    ///
    /// The first number of a slot has `salt` as its upper 8 bits. With a random salt, packets for a queue pair of an earlier process are
    /// unlikely to reach a queue pair of this process.
    pub(crate) fn assign(&mut self, key: Key, salt: u8) -> Option<u32> {
        let slot = match self.free.pop_front() {
            Some(slot) => slot,
            None if self.slots.len() < MOST => {
                self.slots.push((u32::from(salt) << 16 | (self.slots.len() as u32 + FIRST), None));
                self.slots.len() as u32 - 1
            }
            None => return None,
        };
        let (number, owner) = self.slots.get_mut(slot as usize)?;
        *owner = Some(key);
        Some(*number)
    }

    fn slot(number: u32) -> usize {
        (number & 0xffff).wrapping_sub(FIRST) as usize
    }

    /// Releases a number. The next queue pair in its slot gets a number with other upper bits.
    pub(crate) fn remove(&mut self, number: u32) {
        let slot = Self::slot(number);
        if let Some((of, owner)) = self.slots.get_mut(slot).filter(|(of, owner)| *of == number && owner.is_some()) {
            *owner = None;
            if !rdma_transport::planted("a-queue-pair-number-returns-at-once") {
                *of = of.wrapping_add(1 << 16) & 0x00ff_ffff;
            }
            self.free.push_back(slot as u32);
        }
    }

    /// Returns the queue pair with this number, or `None` if no queue pair has this number.
    #[inline]
    pub(crate) fn find(&self, number: u32) -> Option<Key> {
        self.slots.get(Self::slot(number)).filter(|(of, _)| *of == number)?.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_names_one_queue_pair_and_comes_back_late() {
        let mut numbers = QueuePairNumbers::default();
        let keys = [1, 2, 3].map(|slot| Key::new(slot, 1));
        let first = numbers.assign(keys[0], 0xff).unwrap();
        let second = numbers.assign(keys[1], 0x12).unwrap();
        assert_eq!((first, second), (0xff_0010, 0x12_0011));
        assert_eq!((numbers.find(first), numbers.find(second)), (Some(keys[0]), Some(keys[1])));
        numbers.remove(first);
        numbers.remove(first);
        assert_eq!(numbers.find(first), None);
        let third = numbers.assign(keys[2], 0).unwrap();
        assert_eq!((third, numbers.find(third), numbers.find(first)), (0x00_0010, Some(keys[2]), None));
        for nothing in [0, 1, 15, 0x00ff_ffff, 0x13_0011, 0x00_0012] {
            assert_eq!(numbers.find(nothing), None, "{nothing:#x}");
            numbers.remove(nothing);
        }
        let more = (0..MOST).map_while(|slot| numbers.assign(Key::new(slot as u32, 9), 0xff)).max();
        assert_eq!(more, Some(0xff_0000 | (MOST as u32 + FIRST - 1)), "less than the number of groups");
        assert_eq!(numbers.assign(keys[0], 0), None);
    }
}
