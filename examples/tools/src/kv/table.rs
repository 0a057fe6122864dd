//! The table: slots of equal length, each with at most one entry. The server overwrites an entry in place while clients read it.
//!
//! ```text
//!  0  8  version: 0 if never used, odd during a write, even otherwise
//!  8  8  checksum of the version and of all bytes from offset 16
//! 16  4  length of the key        20  4  length of the value
//! 24  K  the key, then the value
//! ```
//!
//! All numbers are little-endian. A reader accepts an entry only if its checksum is right. The version alone would not suffice, because
//! a device may read the bytes of a slot in any order. An odd version shows that a write is in progress, so the reader need not compute
//! the checksum.

use crc_fast::{CrcAlgorithm, Digest};
use rdma_reactor::{Lent, Region};

use crate::pingpong::failure::Failure;

/// The length of the longest key, in bytes.
pub const MAX_KEY: usize = 64;
/// The largest permitted [`Geometry::max_value`], in bytes.
pub const MAX_VALUE: u32 = 16 << 20;
/// The length of the header of an entry, in bytes. The key follows it.
pub(super) const HEADER: usize = 24;
/// The number of consecutive slots in which a key may be stored.
const PROBES: u32 = 8;

/// The shape of a table: the number of slots and the length of the longest value. The latter determines the length of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The number of slots.
    pub slots: u32,
    /// The length of the longest value, in bytes.
    pub max_value: u32,
}

impl Geometry {
    /// Returns the length of a slot, in bytes.
    #[must_use]
    pub const fn slot_len(self) -> usize {
        (HEADER + MAX_KEY + self.max_value as usize).next_multiple_of(8)
    }

    /// Returns the length of the table, in bytes.
    #[must_use]
    pub const fn table_len(self) -> u64 {
        self.slot_len() as u64 * self.slots as u64
    }

    /// Returns the offsets of the slots in which a key may be stored, the preferred slot first.
    pub fn places(self, key: &[u8]) -> impl Iterator<Item = u64> + use<> {
        let hash = crc_fast::checksum(CrcAlgorithm::Crc64Nvme, key);
        let slots = u64::from(self.slots.max(1));
        (0..u64::from(PROBES).min(slots)).map(move |i| (hash % slots + i) % slots * self.slot_len() as u64)
    }
}

/// The content of a slot.
#[derive(Debug, PartialEq, Eq)]
pub enum Slot<'a> {
    /// The slot was never written.
    Empty,
    /// The slot was read during a write, so its bytes are inconsistent. The reader must read it again.
    Torn,
    /// A consistent entry.
    Entry {
        /// The version of the entry.
        version: u64,
        /// The key of the entry.
        key: &'a [u8],
        /// The value of the entry.
        value: &'a [u8],
    },
}

impl<'a> Slot<'a> {
    /// Parses the bytes of a slot.
    #[must_use]
    pub fn parse(bytes: &'a [u8]) -> Self {
        Self::entry(bytes).unwrap_or(Self::Torn)
    }

    /// Parses the bytes of a slot. Returns `None` if they are inconsistent.
    fn entry(bytes: &'a [u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
        let (version, sum, lengths) = (word(0)?, word(8)?, word(16)?);
        if version == 0 {
            return Some(Self::Empty);
        }
        let (key_len, value_len) = (lengths as u32 as usize, (lengths >> 32) as usize);
        let end = HEADER.checked_add(key_len)?.checked_add(value_len)?;
        let content = bytes.get(16..end)?;
        if version % 2 == 1 || key_len > MAX_KEY || checksum(version, content) != sum {
            return None;
        }
        let (key, value) = bytes[HEADER..end].split_at(key_len);
        Some(Self::Entry { version, key, value })
    }
}

fn checksum(version: u64, content: &[u8]) -> u64 {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    digest.update(&version.to_le_bytes());
    digest.update(content);
    digest.finalize()
}

/// The table, as the server stores and writes it.
#[derive(Debug)]
pub struct Table {
    geometry: Geometry, // bound: tool-kv
    region: Region,
    /// The buffer in which the next entry is assembled.
    draft: Vec<u8>, // bound: tool-kv
}

impl Table {
    /// Makes an empty table in a region of [`Geometry::table_len`] zeros. Only the server may write to the region.
    #[must_use]
    pub fn new(geometry: Geometry, region: Region) -> Self {
        Self { geometry, region, draft: Vec::new() }
    }

    /// Returns the region of the table. The server sends the region's address and key to clients.
    #[must_use]
    pub const fn region(&self) -> &Region {
        &self.region
    }

    /// Stores a value while clients may be reading.
    ///
    /// # Errors
    /// The key or the value is too long, or no slot is left for the key.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), Failure> {
        if key.is_empty() || key.len() > MAX_KEY {
            return Err(Failure::new(format!("a key of {} bytes: give 1 to {MAX_KEY}", key.len())));
        }
        if value.len() > self.geometry.max_value as usize {
            let max = self.geometry.max_value;
            return Err(Failure::new(format!("a value of {} bytes: the limit of this table is {max}", value.len())));
        }
        let bytes = self.region.bytes().ok_or_else(|| Failure::new("peers may write the table"))?;
        let place = self.geometry.places(key).find_map(|offset| {
            let offset = offset as usize;
            match Slot::parse(&bytes[offset..offset + self.geometry.slot_len()]) {
                Slot::Empty => Some((offset, 0)),
                Slot::Entry { version, key: other, .. } if other == key => Some((offset, version)),
                Slot::Entry { .. } | Slot::Torn => None,
            }
        });
        let Some((offset, before)) = place else {
            return Err(Failure::new("no slot left for this key: start the server with more --slots"));
        };
        let version = before.wrapping_add(2).max(2);
        self.draft.clear();
        self.draft.extend_from_slice(&(key.len() as u32).to_le_bytes());
        self.draft.extend_from_slice(&(value.len() as u32).to_le_bytes());
        self.draft.extend_from_slice(key);
        self.draft.extend_from_slice(value);
        self.write(offset, version).map_err(|error| Failure::new(error.to_string()))
    }

    /// Writes the draft to a slot. First writes an odd version, so that readers see that the slot is being written.
    fn write(&mut self, offset: usize, version: u64) -> Result<(), Lent> {
        self.region.store(offset, (version - 1).to_le())?;
        self.region.store(offset + 8, checksum(version, &self.draft).to_le())?;
        self.region.copy_from(offset + 16, &self.draft)?;
        self.region.store(offset, version.to_le())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(version: u64, key: &[u8], value: &[u8]) -> Vec<u8> {
        let lengths = [(key.len() as u32).to_le_bytes(), (value.len() as u32).to_le_bytes()].concat();
        let content = [&lengths[..], key, value].concat();
        [&version.to_le_bytes()[..], &checksum(version, &content).to_le_bytes(), &content, &[0; 50]].concat()
    }

    #[test]
    fn an_entry_is_read_as_it_was_written() {
        let bytes = slot(4, b"key", b"value");
        assert_eq!(Slot::parse(&bytes), Slot::Entry { version: 4, key: b"key", value: b"value" });
        assert_eq!(Slot::parse(&slot(2, b"k", b"")), Slot::Entry { version: 2, key: b"k", value: b"" });
        assert_eq!(Slot::parse(&[0; 100]), Slot::Empty);
    }

    #[test]
    fn any_mixture_of_two_versions_is_torn() {
        let (old, new) = (slot(4, b"key", b"old value"), slot(6, b"key", b"new value"));
        let end = 24 + 3 + 9;
        for cut in 1..end {
            for (front, back) in [(&old, &new), (&new, &old)] {
                let mixed = [&front[..cut], &back[cut..]].concat();
                let whole = mixed == old || mixed == new;
                assert_eq!(Slot::parse(&mixed) == Slot::Torn, !whole, "cut at {cut}");
            }
        }
        assert_eq!(Slot::parse(&slot(5, b"key", b"value")), Slot::Torn);
    }

    #[test]
    fn nonsense_is_torn_and_never_a_panic() {
        for len in 0..40 {
            assert_eq!(Slot::parse(&vec![0xff; len]), Slot::Torn, "{len} bytes");
        }
        let mut long = slot(2, b"key", b"value");
        long[20..24].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(Slot::parse(&long), Slot::Torn);
    }

    #[test]
    fn places_are_slots_of_the_table_and_differ() {
        for slots in [1, 2, 7, 8, 9, 1000] {
            let geometry = Geometry { slots, max_value: 100 };
            for key in [&b"a"[..], b"b", b"something longer"] {
                let mut places: Vec<_> = geometry.places(key).collect();
                assert_eq!(places.len(), slots.min(8) as usize);
                assert!(places.iter().all(|at| at % geometry.slot_len() as u64 == 0 && *at < geometry.table_len()));
                places.sort_unstable();
                places.dedup();
                assert_eq!(places.len(), slots.min(8) as usize);
            }
        }
    }
}
