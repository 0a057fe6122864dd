//! Handshake messages in a stream of octets that may be cut anywhere: a length of two octets, little-endian, in front of
//! each.

/// Longest record, bytes.
const LONGEST: usize = 16 << 10;

/// The octets of the peer that are not a whole record yet. The connection limits how many there are.
#[derive(Debug, Default)]
pub(super) struct Records(Vec<u8>);

impl Records {
    /// Takes octets.
    pub(super) fn push(&mut self, octets: &[u8]) {
        self.0.extend_from_slice(octets);
    }

    /// The next whole record.
    pub(super) fn next(&mut self) -> Option<Vec<u8>> {
        let len = usize::from(u16::from_le_bytes(*self.0.first_chunk()?));
        if self.0.len() < 2 + len {
            return None;
        }
        let record = self.0[2..2 + len].to_vec();
        self.0.drain(..2 + len);
        Some(record)
    }

    /// Whether no octets are left.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
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
