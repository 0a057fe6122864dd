//! The model of remote memory. For every byte of every shared region, it has the values that a reader may see.
//!
//! An accepted write may be visible or not, until something proves that it is. Such a proof is the arrival of a later message or of later
//! immediate data, or the completion of a later read or atomic operation. After the proof, the old value is invalid. Each end that writes
//! has its own part of the region, so all writes to a byte are in the order of one queue pair.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use rdma_reactor::{Access, RemoteRegion};

use super::rng::{Rng, mix};

/// The name of an end: the cookie of its connection, and the side.
pub type Who = (u64, usize);

/// The number of bytes at the beginning of a region that only atomic operations change. The first word is a counter, the second word is for
/// compare-and-swap.
pub const WORDS: usize = 16;
/// The number of parts into which a region for many peers is divided. Each end writes to its own part.
const PARTS: usize = 4;

/// A change of a region: a write of a peer, or a store of the owner.
#[derive(Clone, Debug)]
struct Change {
    by: Option<Who>,
    /// The number of the write among the sends of its end.
    sequence: u64,
    /// The number of fences before the write.
    fences: u64,
    at: usize,
    bytes: Vec<u8>,
}

impl Change {
    fn says(&self, at: usize, byte: u8) -> bool {
        at.checked_sub(self.at).is_some_and(|nth| self.bytes.get(nth) == Some(&byte))
    }
}

/// A read that was accepted and has not completed.
#[derive(Clone, Debug)]
pub struct Reading {
    who: Who,
    fences: u64,
    at: usize,
    /// The values of the bytes when the read was posted, including the earlier writes of the end that reads.
    known: Vec<u8>,
    /// The index of the first change after the read was posted. The read may see this change and later ones.
    since: usize,
    others: Vec<usize>,
}

/// The state of the words that atomic operations change.
#[derive(Clone, Debug, Default)]
struct Words {
    /// The sum of all additions that were accepted.
    asked: u64,
    /// The sum of all additions that have completed.
    added: u64,
    /// The old values that additions have returned, with the amount of each addition.
    olds: BTreeMap<u64, u64>,
    /// The values that compare-and-swaps may have stored.
    swaps: BTreeSet<u64>,
    /// The values that compare-and-swaps have certainly replaced.
    gone: BTreeSet<u64>,
}

/// The model of a region that peers may use.
#[derive(Clone, Debug)]
pub struct Shared {
    /// The end that owns the region. If `any_peer` is false, only the peer of this end may use the region.
    pub owner: Who,
    /// The node that owns the region.
    pub node: usize,
    /// The address and the key of the region.
    pub remote: RemoteRegion,
    /// The rights that peers have.
    pub access: Access,
    /// True if every peer of the node that owns the region has these rights.
    pub any_peer: bool,
    /// True if the rights expire after a time.
    pub mortal: bool,
    /// True if the rights have ended.
    pub withdrawn: bool,
    /// The ends whose operations on the region have failed. The requests of these operations may still be in flight.
    pub strays: Vec<Who>,
    /// True if the bytes may have changed, so that the region must be checked.
    pub look: bool,
    parts: Vec<Who>,
    known: Vec<u8>,
    log: Vec<Change>,
    /// The indices of the changes that are not yet proven to be visible.
    pending: Vec<usize>,
    words: Words,
}

impl Shared {
    /// Returns the model of a region that contains `bytes`.
    #[must_use]
    pub fn new(owner: Who, node: usize, remote: RemoteRegion, access: Access, any_peer: bool, bytes: Vec<u8>) -> Self {
        Self {
            owner,
            node,
            remote,
            access,
            any_peer,
            mortal: false,
            withdrawn: false,
            strays: Vec::new(),
            look: false,
            parts: Vec::new(),
            known: bytes,
            log: Vec::new(),
            pending: Vec::new(),
            words: Words::default(),
        }
    }

    /// Returns true if the end `who` has the rights `access` to the region.
    #[must_use]
    pub fn allows(&self, who: Who, access: Access) -> bool {
        !self.withdrawn && self.access.contains(access) && (self.any_peer || self.owner == (who.0, 1 - who.1))
    }

    /// Returns the part of the region that the end `who` may write to. The returned range is empty if all parts belong to other ends.
    pub fn part(&mut self, who: Who) -> Range<usize> {
        let len = self.known.len() - WORDS;
        if !self.any_peer {
            return WORDS..WORDS + len;
        }
        let nth = self.parts.iter().position(|&part| part == who).unwrap_or_else(|| {
            self.parts.push(who);
            self.parts.len() - 1
        });
        if nth < PARTS { WORDS + len * nth / PARTS..WORDS + len * (nth + 1) / PARTS } else { WORDS..WORDS }
    }

    /// Records that a write was accepted.
    pub fn write(&mut self, by: Who, sequence: u64, fences: u64, at: usize, bytes: Vec<u8>) {
        self.pending.push(self.log.len());
        self.log.push(Change { by: Some(by), sequence, fences, at, bytes });
    }

    /// Records that the owner has changed bytes that no peer may write to.
    pub fn store(&mut self, at: usize, bytes: Vec<u8>) {
        self.known[at..at + bytes.len()].copy_from_slice(&bytes);
        self.log.push(Change { by: None, sequence: 0, fences: 0, at, bytes });
    }

    /// Records that all sends of the end `by` up to the number `sequence` have arrived. So the writes among these sends are visible.
    pub fn arrived(&mut self, by: Who, sequence: u64) {
        let (log, known) = (&self.log, &mut self.known);
        let before = self.pending.len();
        self.pending.retain(|&nth| {
            let change = &log[nth];
            let there = change.by == Some(by) && change.sequence <= sequence;
            if there {
                known[change.at..change.at + change.bytes.len()].copy_from_slice(&change.bytes);
            }
            !there
        });
        self.look |= self.pending.len() < before;
    }

    /// Records that a read was accepted. Returns the state that [`Shared::judge_read`] needs to check the result of the read.
    #[must_use]
    pub fn read(&self, who: Who, fences: u64, range: Range<usize>) -> Reading {
        let mut known = self.known.clone();
        let mut others = Vec::new();
        for &nth in &self.pending {
            let change = &self.log[nth];
            if change.by == Some(who) {
                known[change.at..change.at + change.bytes.len()].copy_from_slice(&change.bytes);
            } else {
                others.push(nth);
            }
        }
        Reading { who, fences, at: range.start, known: known[range].to_vec(), since: self.log.len(), others }
    }

    /// Checks the bytes that a read has returned. Returns the position of the first byte whose value the region never had at this position
    /// during the read, or `None` if there is no such byte.
    #[must_use]
    pub fn judge_read(&self, reading: &Reading, bytes: &[u8]) -> Option<usize> {
        let later = self.log[reading.since..].iter();
        // If the reading end has posted a fenced send after this read, its writes from then on are carried out after the read, so the read
        // cannot see them.
        let later = later.filter(|change| change.by != Some(reading.who) || change.fences == reading.fences);
        let changes: Vec<&Change> = reading.others.iter().map(|&nth| &self.log[nth]).chain(later).collect();
        let mut pairs = reading.known.iter().zip(bytes).enumerate();
        let odd = |nth: usize, byte: u8| !changes.iter().any(|change| change.says(reading.at + nth, byte));
        pairs.find(|&(nth, (known, byte))| known != byte && odd(nth, *byte)).map(|(nth, _)| reading.at + nth)
    }

    /// Checks the bytes of the region. Returns a description of the first wrong byte or word, or `None` if there is none.
    #[must_use]
    pub fn judge(&self, bytes: &[u8]) -> Option<String> {
        let pending = |at: usize, byte: u8| self.pending.iter().any(|&nth| self.log[nth].says(at, byte));
        if bytes[WORDS..] != self.known[WORDS..] {
            for (at, (&byte, &known)) in bytes.iter().zip(&self.known).enumerate().skip(WORDS) {
                if byte != known && !pending(at, byte) {
                    return Some(format!("byte {at} is {byte:#04x}, should be {known:#04x}"));
                }
            }
        }
        let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let (counter, swapped, words) = (word(0), word(8), &self.words);
        if !(words.added..=words.asked).contains(&counter) {
            return Some(format!("the counter is {counter}, of {} added and {} asked for", words.added, words.asked));
        }
        let possible = swapped == 0 || words.swaps.contains(&swapped);
        (!possible || words.gone.contains(&swapped)).then(|| format!("the swapped word is {swapped:#x}"))
    }

    /// Returns the ends that have writes in flight.
    #[must_use]
    pub fn writers(&self) -> Vec<Who> {
        self.pending.iter().filter_map(|&nth| self.log[nth].by).collect()
    }

    /// Replaces the content by bytes that peers must never see, because their rights have ended.
    pub fn hide(&mut self, bytes: Vec<u8>) {
        self.pending.clear();
        self.known = bytes;
    }

    /// Records that an atomic addition was accepted.
    pub fn add(&mut self, amount: u64) {
        self.words.asked += amount;
    }

    /// Records that an atomic addition has completed. Returns true if the word may have had the returned value `old`.
    pub fn added(&mut self, amount: u64, old: u64) -> bool {
        let words = &mut self.words;
        words.added += amount;
        let before = words.olds.range(..=old).next_back().is_none_or(|(&other, &amount)| other + amount <= old);
        let after = words.olds.range(old..).next().is_none_or(|(&other, _)| old + amount <= other);
        words.olds.insert(old, amount);
        before && after && old + amount <= words.asked
    }

    /// Chooses the operands of a random compare-and-swap. Returns the expected value, and a new value that was never used before.
    pub fn swap(&mut self, rng: &mut Rng) -> (u64, u64) {
        let nth = rng.index(self.words.swaps.len() + 1);
        let expected = nth.checked_sub(1).and_then(|nth| self.words.swaps.iter().nth(nth)).copied().unwrap_or(0);
        let swap = mix(rng.bits()) | 1;
        (expected, swap)
    }

    /// Records that a compare-and-swap was accepted.
    pub fn swapping(&mut self, swap: u64) {
        self.words.swaps.insert(swap);
    }

    /// Records that a compare-and-swap has completed. Returns true if the word may have had the returned value `old`.
    pub fn swapped(&mut self, expected: u64, old: u64) -> bool {
        let possible = old == 0 || self.words.swaps.contains(&old);
        // New values are unique, so a value can be replaced only once.
        possible && (old != expected || self.words.gone.insert(old))
    }
}
