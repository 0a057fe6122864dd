//! The model of remote memory: the values that the bytes of every shared region may have, for all readers and writers.
//!
//! An accepted write may be visible or not until something proves that it is: the arrival of a message or of immediate
//! data sent behind it, or the completion of a read or an atomic operation behind it. From then on no other value is
//! valid. Each end that writes has its own part, so that the order of writes to a byte is the order of one queue pair.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use rdma_reactor::{Access, RemoteRegion};

use super::rng::{Rng, mix};

/// An end of a connection: its cookie, and which side.
pub type Who = (u64, usize);

/// The number of bytes at the beginning of a region that only atomic operations change: a counter, and a word to
/// compare and swap.
pub const WORDS: usize = 16;
/// The number of parts of a region that many peers may use.
const PARTS: usize = 4;

/// A write, or the owner's own change.
#[derive(Clone, Debug)]
struct Change {
    by: Option<Who>,
    /// The position of the write among the sends of its end, and the number of fences in front of it.
    sequence: u64,
    fences: u64,
    at: usize,
    bytes: Vec<u8>,
}

impl Change {
    fn says(&self, at: usize, byte: u8) -> bool {
        at.checked_sub(self.at).is_some_and(|nth| self.bytes.get(nth) == Some(&byte))
    }
}

/// A read that was accepted and has not ended.
#[derive(Clone, Debug)]
pub struct Reading {
    who: Who,
    fences: u64,
    at: usize,
    /// The bytes that were known at the post, including all earlier writes of this end.
    known: Vec<u8>,
    /// The index of the first change that the read may see, besides those in `pending`.
    since: usize,
    others: Vec<usize>,
}

/// The words of a region.
#[derive(Clone, Debug, Default)]
struct Words {
    /// The sum of the accepted additions. Below it: the sum of those that are known to be complete.
    asked: u64,
    added: u64,
    /// The returned old values, with the amount that was added to each.
    olds: BTreeMap<u64, u64>,
    /// The values that the second word was to get. Below it: those that are known to be replaced.
    swaps: BTreeSet<u64>,
    gone: BTreeSet<u64>,
}

/// A region that peers may use.
#[derive(Clone, Debug)]
pub struct Shared {
    /// The owner of the region. Without `any_peer`, only the owner's peer may use the region.
    pub owner: Who,
    /// The node that owns the region.
    pub node: usize,
    /// The name of the region for peers.
    pub remote: RemoteRegion,
    /// The rights of peers.
    pub access: Access,
    /// Every peer of the node has the rights.
    pub any_peer: bool,
    /// The rights expire by themselves.
    pub mortal: bool,
    /// The rights have ended.
    pub withdrawn: bool,
    /// Ends with failed operations on the region. Their requests may still be on their way.
    pub strays: Vec<Who>,
    /// The bytes may have changed, so the region is checked next.
    pub look: bool,
    parts: Vec<Who>,
    known: Vec<u8>,
    log: Vec<Change>,
    /// The changes that are not known to be visible.
    pending: Vec<usize>,
    words: Words,
}

impl Shared {
    /// Returns a region that holds `bytes`.
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

    /// Returns true if an end has these rights.
    #[must_use]
    pub fn allows(&self, who: Who, access: Access) -> bool {
        !self.withdrawn && self.access.contains(access) && (self.any_peer || self.owner == (who.0, 1 - who.1))
    }

    /// Returns the part that an end may write; an empty range if no part is left for it.
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

    /// Notes an accepted write.
    pub fn write(&mut self, by: Who, sequence: u64, fences: u64, at: usize, bytes: Vec<u8>) {
        self.pending.push(self.log.len());
        self.log.push(Change { by: Some(by), sequence, fences, at, bytes });
    }

    /// Notes that the owner has changed bytes that no peer writes.
    pub fn store(&mut self, at: usize, bytes: Vec<u8>) {
        self.known[at..at + bytes.len()].copy_from_slice(&bytes);
        self.log.push(Change { by: None, sequence: 0, fences: 0, at, bytes });
    }

    /// Notes that everything of an end up to `sequence` has arrived.
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

    /// Notes an accepted read.
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

    /// Returns the position of the first byte of a read that never had this value while the read was in flight.
    #[must_use]
    pub fn judge_read(&self, reading: &Reading, bytes: &[u8]) -> Option<usize> {
        let later = self.log[reading.since..].iter();
        // Operations behind a fence run after the reads in front of it.
        let later = later.filter(|change| change.by != Some(reading.who) || change.fences == reading.fences);
        let changes: Vec<&Change> = reading.others.iter().map(|&nth| &self.log[nth]).chain(later).collect();
        let mut pairs = reading.known.iter().zip(bytes).enumerate();
        let odd = |nth: usize, byte: u8| !changes.iter().any(|change| change.says(reading.at + nth, byte));
        pairs.find(|&(nth, (known, byte))| known != byte && odd(nth, *byte)).map(|(nth, _)| reading.at + nth)
    }

    /// Describes a wrong byte, if there is one.
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

    /// Returns the ends whose writes may be in flight.
    #[must_use]
    pub fn writers(&self) -> Vec<Who> {
        self.pending.iter().filter_map(|&nth| self.log[nth].by).collect()
    }

    /// Replaces the bytes by others, which peers must never see.
    pub fn hide(&mut self, bytes: Vec<u8>) {
        self.pending.clear();
        self.known = bytes;
    }

    /// Notes an accepted addition.
    pub fn add(&mut self, amount: u64) {
        self.words.asked += amount;
    }

    /// Notes a completed addition. Returns true if the old value is possible.
    pub fn added(&mut self, amount: u64, old: u64) -> bool {
        let words = &mut self.words;
        words.added += amount;
        let before = words.olds.range(..=old).next_back().is_none_or(|(&other, &amount)| other + amount <= old);
        let after = words.olds.range(old..).next().is_none_or(|(&other, _)| old + amount <= other);
        words.olds.insert(old, amount);
        before && after && old + amount <= words.asked
    }

    /// Draws a compare-and-swap: the expected value, and a new one that was never used before.
    pub fn swap(&mut self, rng: &mut Rng) -> (u64, u64) {
        let nth = rng.index(self.words.swaps.len() + 1);
        let expected = nth.checked_sub(1).and_then(|nth| self.words.swaps.iter().nth(nth)).copied().unwrap_or(0);
        let swap = mix(rng.bits()) | 1;
        (expected, swap)
    }

    /// Notes an accepted compare-and-swap.
    pub fn swapping(&mut self, swap: u64) {
        self.words.swaps.insert(swap);
    }

    /// Notes a completed compare-and-swap. Returns true if the old value is possible.
    pub fn swapped(&mut self, expected: u64, old: u64) -> bool {
        let possible = old == 0 || self.words.swaps.contains(&old);
        // A replaced value never returns.
        possible && (old != expected || self.words.gone.insert(old))
    }
}
