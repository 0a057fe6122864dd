//! The records of a handshake. They are sent as a stream of bytes, which may be split at any position. Each record is preceded by its
//! length: two bytes, little-endian.

use super::SecurityError;

/// The longest record that is sent, in bytes, before it is encrypted.
const LONGEST: usize = 16 << 10;

/// The largest number of records that a peer may send. An honest handshake of 64 KiB, which is the longest that a connection accepts, has
/// about ten records. Each record costs work, and the peer has not proven its identity yet.
const MAX_RECORDS: u32 = 64;

/// The bytes that the peer has sent and that are not consumed yet. The connection limits their number.
#[derive(Debug, Default)]
pub(super) struct Records {
    bytes: Vec<u8>, // bound: handshake-bytes
    /// The number of bytes at the front of `bytes` that belong to consumed records.
    consumed: usize,
    /// The number of consumed records.
    count: u32,
}

impl Records {
    /// Appends bytes that the peer has sent.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.consumed);
        self.consumed = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// Consumes the next complete record and returns it. `None` if some of its bytes have not arrived.
    ///
    /// # Errors
    /// [`SecurityError::Peer`] for an empty record, and for more records than a handshake may have.
    pub(super) fn next(&mut self) -> Result<Option<Vec<u8>>, SecurityError> {
        let left = &self.bytes[self.consumed..];
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

    /// Returns `true` if all bytes are consumed.
    pub(super) fn is_empty(&self) -> bool {
        self.consumed == self.bytes.len()
    }
}

/// Splits bytes into records and appends the records to `out`. `seal` is called for each record, and may encrypt it and append up to 64
/// bytes to it.
pub(super) fn emit(bytes: &[u8], out: &mut Vec<u8>, mut seal: impl FnMut(&mut Vec<u8>)) {
    for part in bytes.chunks(LONGEST) {
        let mut record = part.to_vec();
        seal(&mut record);
        out.extend_from_slice(&(record.len() as u16).to_le_bytes());
        out.extend_from_slice(&record);
    }
}
