//! The packets on the Unix socket of a connection. A call wakes a side that sleeps. An announcement has the descriptor
//! of memory that the receiver may map.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rdma_transport::mem::Memory;
use rdma_transport::mr::Access;

/// The length of the longest packet in bytes.
pub(crate) const MAX_PACKET: usize = 40;

/// The peer's announcement of memory that the peer lends. The values of the announcement are not checked yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReceivedAnnouncement {
    pub(super) slot: u8,
    pub(super) word: u64,
    pub(super) rights: Access,
    /// The address of the memory's first byte in the peer's process.
    pub(super) base: u64,
    pub(super) len: u64,
}

/// A packet from the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packet {
    /// Wakes the receiver.
    Call,
    /// The passive side has mapped the segment.
    Accepted,
    /// The peer lends memory. The descriptor of the memory file is attached to the packet.
    Window(ReceivedAnnouncement),
}

const CALL: u8 = 0;
const ACCEPTED: u8 = 1;
const WINDOW: u8 = 2;

/// The bytes of [`Packet::Call`].
pub(crate) const CALL_PACKET: [u8; 1] = [CALL];
/// The bytes of [`Packet::Accepted`].
pub(crate) const ACCEPTED_PACKET: [u8; 1] = [ACCEPTED];

impl Packet {
    /// Parses a packet. A packet that is unknown or malformed is treated as a call, which does no harm.
    pub(crate) fn parse(packet: &[u8]) -> Self {
        match packet.first() {
            Some(&ACCEPTED) => Self::Accepted,
            Some(&WINDOW) => Announcement::parse(packet).map_or(Self::Call, Self::Window),
            _ => Self::Call,
        }
    }
}

/// An announcement to the peer: the local side lends memory that the peer may map.
#[derive(Debug)]
pub(crate) struct Announcement {
    pub(super) slot: u8,
    pub(super) word: u64,
    pub(super) rights: Access,
    pub(super) memory: Arc<Memory>,
    /// The number of bytes that are lent, from the start of `memory`.
    pub(super) len: usize,
    /// The descriptor of the memory file. `None` if `memory` has the descriptor.
    pub(super) file: Option<OwnedFd>,
}

impl Announcement {
    /// Returns the descriptor to attach to the packet. Returns `None` if the memory has no descriptor.
    pub(crate) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd).or_else(|| self.memory.file())
    }

    /// Returns the bytes of the packet.
    pub(crate) fn emit(&self) -> [u8; MAX_PACKET] {
        let mut out = [0; MAX_PACKET];
        (out[0], out[1]) = (WINDOW, self.slot);
        out[4..8].copy_from_slice(&self.rights.bits().to_le_bytes());
        out[8..16].copy_from_slice(&self.word.to_le_bytes());
        out[16..24].copy_from_slice(&(self.memory.as_ptr() as u64).to_le_bytes());
        out[24..32].copy_from_slice(&(self.len as u64).to_le_bytes());
        out
    }

    fn parse(packet: &[u8]) -> Option<ReceivedAnnouncement> {
        let octets: &[u8; MAX_PACKET] = packet.try_into().ok()?;
        let u64_at = |at: usize| Some(u64::from_le_bytes(*octets.get(at..)?.first_chunk()?));
        let rights = Access::from_bits_truncate(u32_at(octets, 4)?) & Access::REMOTE;
        Some(ReceivedAnnouncement { slot: octets[1], word: u64_at(8)?, rights, base: u64_at(16)?, len: u64_at(24)? })
    }
}

fn u32_at(octets: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*octets.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_read_as_they_were_written() {
        assert_eq!(Packet::parse(&CALL_PACKET), Packet::Call);
        assert_eq!(Packet::parse(&ACCEPTED_PACKET), Packet::Accepted);
        assert_eq!(
            (Packet::parse(&[]), Packet::parse(&[WINDOW; 9]), Packet::parse(&[9; 40])),
            (Packet::Call, Packet::Call, Packet::Call)
        );
        let memory = Arc::new(Memory::new(4096).unwrap());
        let announcement =
            Announcement { slot: 3, word: 1 << 32 | 77, rights: Access::REMOTE_READ, memory, len: 4096, file: None };
        let Packet::Window(read) = Packet::parse(&announcement.emit()) else { panic!() };
        assert_eq!((read.slot, read.word, read.rights, read.len), (3, 1 << 32 | 77, Access::REMOTE_READ, 4096));
    }
}
