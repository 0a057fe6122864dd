//! The server's records about its memory: the regions that it shares, the messages and buffers that it holds, and the expected bytes.

use std::collections::BTreeMap;

use rdma_reactor::{ConnectionId, DetachedMessage, ListenerId, Region, SendBuffer};

use super::super::rng::Rng;
use super::HEAD;
use crate::gate::Gate;

/// The rights of peers to a region, as the server knows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rights {
    /// Peers may use the region.
    Live,
    /// An operation that ends the rights is in progress.
    Ending,
    /// The rights should have ended, but the device has refused to release the region or its key.
    Kept,
    /// Only the program may use the region. Its bytes are derived from this number.
    Ended(u64),
}

#[derive(Debug)]
pub(super) struct Lent {
    pub(super) region: Region,
    pub(super) side: usize,
    /// The connection whose peer may use the region; `None` if all peers may.
    pub(super) owner: Option<ConnectionId>,
    pub(super) rights: Rights,
}

impl Lent {
    /// Returns true if the device has refused to release the region or its key.
    fn is_kept(&self, gates: &[Gate; 2]) -> bool {
        gates[self.side].keeps(self.region.remote().address)
    }
}

/// A message or a buffer that the program holds. Its bytes are derived from the number.
#[derive(Debug)]
pub(super) enum Held {
    Message(DetachedMessage, u64),
    /// A send buffer. The last field has the device of the buffer, and the number of times that the reactor had given up that device before
    /// the buffer was taken.
    Buffer(SendBuffer, u64, (usize, u32)),
}

impl Held {
    /// Returns the bytes of the message or buffer, and the number from which they must be derived.
    pub(super) fn bytes(&self) -> (&[u8], u64) {
        match self {
            Self::Message(message, number) => (message, *number),
            Self::Buffer(buffer, number, _) => (buffer, *number),
        }
    }

    pub(super) fn is_whole(&self) -> bool {
        match self {
            Self::Message(message, number) => is_data(message, *number),
            Self::Buffer(buffer, number, _) => is_filled(buffer, *number),
        }
    }
}

/// The records of the server.
#[derive(Debug, Default)]
pub(super) struct Book {
    pub(super) gates: [Gate; 2],
    pub(super) listeners: Vec<ListenerId>,
    /// The devices of the connections that the server has opened.
    pub(super) opened: BTreeMap<ConnectionId, usize>,
    /// The device of each established connection.
    pub(super) up: BTreeMap<ConnectionId, usize>,
    pub(super) lent: BTreeMap<u64, Lent>,
    pub(super) held: Vec<Held>,
    /// The number of messages in flight that invalidate a key, for each device and key.
    pub(super) asked: BTreeMap<(usize, u32), u32>,
    /// The number of times that the reactor has given up each device.
    pub(super) times: [u32; 2],
    pub(super) next: u64,
    pub(super) received: u64,
    pub(super) taken: u64,
    pub(super) wrong: Vec<String>,
}

impl Book {
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Overwrites the regions for which `ended` returns true. The rights of peers to these regions have ended, so no peer may change or
    /// read the new bytes.
    pub(super) fn hide(&mut self, ended: impl Fn(u64, &Lent) -> bool) {
        for number in self.lent.keys().copied().collect::<Vec<_>>() {
            let bytes = self.number();
            let Some(lent) = self.lent.get_mut(&number).filter(|lent| ended(number, lent)) else { continue };
            if matches!(lent.rights, Rights::Ended(_)) {
                continue;
            }
            let is_kept = lent.is_kept(&self.gates);
            match lent.region.bytes_mut() {
                Some(place) if !is_kept => {
                    fill(place, bytes);
                    lent.rights = Rights::Ended(bytes);
                }
                None if is_kept => lent.rights = Rights::Kept,
                _ => self.wrong.push(format!("region {number}: its rights were to end, kept: {is_kept}: {lent:?}")),
            }
        }
    }

    /// Records that a peer has invalidated the key of region `number`.
    pub(super) fn taken_back(&mut self, conn: ConnectionId, number: u64) {
        self.taken += 1;
        let Some(lent) = self.lent.get(&number) else { return };
        let (side, key) = (lent.side, lent.region.remote().key);
        if lent.owner.is_some_and(|owner| owner != conn) {
            return self.wrong.push(format!("region {number} was announced to the wrong peer"));
        }
        self.hide(|_, lent| {
            let of_peer = lent.owner.is_none_or(|owner| owner == conn);
            lent.rights == Rights::Ending && (lent.side, lent.region.remote().key) == (side, key) && of_peer
        });
        self.asked.entry((side, key)).and_modify(|count| *count -= 1);
    }

    /// Checks all regions, messages and buffers that the program holds.
    pub(super) fn check(&mut self) {
        let bytes = self.next + 1;
        for (number, lent) in &mut self.lent {
            let (is_lent, is_kept) = (lent.region.bytes_mut().is_some(), lent.is_kept(&self.gates));
            let wrong = match lent.rights {
                Rights::Live if is_lent => "lent while peers may use it",
                Rights::Ending | Rights::Kept if is_lent && is_kept => "lent while the device has it",
                Rights::Kept if !is_lent && !is_kept => "not lent, though the device has released it at last",
                Rights::Ended(_) if !is_lent => "not lent, though its rights have ended",
                Rights::Ended(bytes) if !is_filled(lent.region.bytes().unwrap_or(&[]), bytes) => "written by somebody",
                Rights::Ending | Rights::Kept if is_lent => {
                    // The rights of peers to this region have ended since the last check.
                    let place = lent.region.bytes_mut().expect("it is lent");
                    fill(place, bytes);
                    lent.rights = Rights::Ended(bytes);
                    continue;
                }
                _ => continue,
            };
            self.wrong.push(format!("region {number} is {wrong}: {lent:?}"));
        }
        self.next = bytes;
        let mut places = Vec::new();
        for held in &self.held {
            if !held.is_whole() {
                self.wrong.push(format!("the bytes of {held:?} changed"));
            }
            let (bytes, number) = held.bytes();
            let start = bytes.as_ptr() as usize;
            places.push((start, start + bytes.len(), number));
        }
        places.sort_unstable();
        if let Some(twins) = places.windows(2).find(|pair| pair[0].1 > pair[1].0) {
            self.wrong.push(format!(
                "two that the program holds are the same memory: numbers {} and {}",
                twins[0].2, twins[1].2
            ));
        }
    }
}

/// Fills `place` with bytes that are derived from `number`.
pub(super) fn fill(place: &mut [u8], number: u64) {
    Rng::from_state(number).fill(place);
}

fn is_filled(bytes: &[u8], number: u64) -> bool {
    let mut expected = vec![0; bytes.len()];
    fill(&mut expected, number);
    bytes == expected
}

/// Returns a message of this kind with `len` bytes of content. If `keep` is true, the message requests that the server keeps it.
pub(super) fn message(kind: u8, keep: bool, number: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; HEAD + len];
    (bytes[0], bytes[1]) = (kind, keep.into());
    bytes[2..HEAD].copy_from_slice(&number.to_le_bytes());
    fill(&mut bytes[HEAD..], number);
    bytes
}

pub(super) fn number_of(bytes: &[u8]) -> u64 {
    bytes.get(2..HEAD).map_or(0, |number| u64::from_le_bytes(number.try_into().expect("eight bytes")))
}

pub(super) fn is_data(bytes: &[u8], number: u64) -> bool {
    bytes.len() >= HEAD && number_of(bytes) == number && is_filled(&bytes[HEAD..], number)
}
