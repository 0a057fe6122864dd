//! Handshake records in a stream of bytes that may be cut anywhere. In front of each record is its length: two bytes,
//! little-endian.

use super::SecurityError;

/// Length of the longest record that is sent, before it is sealed, bytes.
const LONGEST: usize = 16 << 10;

/// Largest number of records of a peer. An honest handshake of 64 KiB, the most that a connection accepts, has about
/// ten. Each record costs work, and the peer has not proven its identity yet.
const MAX_RECORDS: u32 = 64;

/// The bytes of the peer that are not consumed yet. The connection limits their number.
#[derive(Debug, Default)]
pub(super) struct Records {
    octets: Vec<u8>,
    /// Number of bytes at the front that belong to consumed records.
    consumed: usize,
    /// Number of consumed records.
    count: u32,
}

impl Records {
    /// Appends bytes of the peer.
    pub(super) fn push(&mut self, octets: &[u8]) {
        self.octets.drain(..self.consumed);
        self.consumed = 0;
        self.octets.extend_from_slice(octets);
    }

    /// Returns the next whole record; `None` if not all of its bytes have arrived.
    ///
    /// # Errors
    /// [`SecurityError::Peer`] for an empty record, and for more records than a handshake may have.
    pub(super) fn next(&mut self) -> Result<Option<Vec<u8>>, SecurityError> {
        let left = &self.octets[self.consumed..];
        let Some((len, rest)) = left.split_first_chunk() else { return Ok(None) };
        let len = usize::from(u16::from_le_bytes(*len));
        if len == 0 || self.count == MAX_RECORDS {
            return Err(SecurityError::Peer("its handshake has an empty record, or too many records".into()));
        }
        let Some(record) = rest.get(..len).map(<[u8]>::to_vec) else { return Ok(None) };
        self.consumed += 2 + len;
        self.count += 1;
        Ok(Some(record))
    }

    /// Returns `true` if no bytes are left.
    pub(super) fn is_empty(&self) -> bool {
        self.consumed == self.octets.len()
    }
}

/// Appends records with these bytes. `seal` changes each, and may append up to 64 bytes to it.
pub(super) fn emit(octets: &[u8], out: &mut Vec<u8>, mut seal: impl FnMut(&mut Vec<u8>)) {
    for part in octets.chunks(LONGEST) {
        let mut record = part.to_vec();
        seal(&mut record);
        out.extend_from_slice(&(record.len() as u16).to_le_bytes());
        out.extend_from_slice(&record);
    }
}
