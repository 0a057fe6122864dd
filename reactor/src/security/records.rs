//! Handshake messages in a stream of octets that may be cut anywhere: a length of two octets, little-endian, in front of
//! each.

use super::SecurityError;

/// Longest record, bytes.
const LONGEST: usize = 16 << 10;

/// Largest number of records of a peer. An honest handshake of 64 KiB, the most that a connection accepts, has about ten. Each
/// record costs work, and the peer has proven nothing yet.
const MOST: u32 = 64;

/// The octets of the peer that are not a whole record yet. The connection limits how many there are.
#[derive(Debug, Default)]
pub(super) struct Records {
    octets: Vec<u8>,
    /// Number of octets at the front that belong to records that were taken.
    taken: usize,
    /// Number of records that were taken.
    count: u32,
}

impl Records {
    /// Adds octets of the peer.
    pub(super) fn push(&mut self, octets: &[u8]) {
        self.octets.drain(..self.taken);
        self.taken = 0;
        self.octets.extend_from_slice(octets);
    }

    /// Returns the next whole record; `None` if its octets have not all arrived.
    ///
    /// # Errors
    /// [`SecurityError::Peer`] for an empty record, and for more records than a handshake has.
    pub(super) fn next(&mut self) -> Result<Option<Vec<u8>>, SecurityError> {
        let left = &self.octets[self.taken..];
        let Some((len, rest)) = left.split_first_chunk() else { return Ok(None) };
        let len = usize::from(u16::from_le_bytes(*len));
        if len == 0 || self.count == MOST {
            return Err(SecurityError::Peer("its handshake is cut into pieces that no honest peer sends".into()));
        }
        let Some(record) = rest.get(..len).map(<[u8]>::to_vec) else { return Ok(None) };
        self.taken += 2 + len;
        self.count += 1;
        Ok(Some(record))
    }

    /// Returns true if no octets are left.
    pub(super) fn is_empty(&self) -> bool {
        self.taken == self.octets.len()
    }
}

/// Adds records with these octets. `seal` changes each, and may add up to 64 octets to it.
pub(super) fn emit(octets: &[u8], out: &mut Vec<u8>, mut seal: impl FnMut(&mut Vec<u8>)) {
    for part in octets.chunks(LONGEST) {
        let mut record = part.to_vec();
        seal(&mut record);
        out.extend_from_slice(&(record.len() as u16).to_le_bytes());
        out.extend_from_slice(&record);
    }
}
