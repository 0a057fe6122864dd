//! The private data of a connect request. It identifies the rank that connects, and the purpose of the connection.

/// The magic number: three bytes for the name of the protocol, and one for its version. The version changes if the format of this private
/// data or of any message changes.
const MAGIC: [u8; 4] = *b"RMS\x01";

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The control connection of a rank: rank 0 sends orders, the other rank sends reports.
    Control,
    /// A link between two ranks, for measurements.
    Link {
        /// The number of the run. Rank 0 sends it to each rank that joins.
        run: u64,
        /// The number of earlier connects from this rank to the same peer. Only the link of the last connect is used.
        attempt: u32,
    },
}

/// The content of a connect request's private data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The rank that connects.
    pub rank: usize,
    /// The number of ranks in the run, according to the command line or the launcher of the connecting rank.
    pub ranks: usize,
    /// The purpose of the connection.
    pub purpose: Purpose,
}

impl Hello {
    /// Encodes the private data: `magic:4 | rank:4 | ranks:4 | link:1 | run:8 | attempt:4`, little-endian.
    #[must_use]
    pub fn encode(self) -> Vec<u8> {
        let (kind, run, attempt) = match self.purpose {
            Purpose::Control => (0, 0, 0),
            Purpose::Link { run, attempt } => (1, run, attempt),
        };
        let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes();
        [&MAGIC[..], &number(self.rank), &number(self.ranks), &[kind], &run.to_le_bytes(), &attempt.to_le_bytes()]
            .concat()
    }

    /// Decodes private data. Returns `None` if it has another magic number, or if the rank is out of range.
    #[must_use]
    pub fn decode(data: &[u8]) -> Option<Self> {
        let (rank, rest) = data.strip_prefix(&MAGIC)?.split_first_chunk()?;
        let (ranks, rest) = rest.split_first_chunk()?;
        let ([kind], rest) = rest.split_first_chunk()?;
        let (run, rest) = rest.split_first_chunk()?;
        let (run, attempt) = (u64::from_le_bytes(*run), u32::from_le_bytes(*rest.first_chunk()?));
        let purpose = match kind {
            0 => Purpose::Control,
            1 => Purpose::Link { run, attempt },
            _ => return None,
        };
        let (rank, ranks) = (u32::from_le_bytes(*rank) as usize, u32::from_le_bytes(*ranks) as usize);
        (rank < ranks).then_some(Self { rank, ranks, purpose })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rdma_reactor::MAX_USER_PRIVATE_DATA;

    #[test]
    fn a_hello_survives_the_trip_and_nonsense_does_not() {
        for purpose in [Purpose::Control, Purpose::Link { run: u64::MAX - 7, attempt: 3 }] {
            let hello = Hello { rank: 3, ranks: 1000, purpose };
            let bytes = hello.encode();
            assert!(bytes.len() <= MAX_USER_PRIVATE_DATA);
            assert_eq!(Hello::decode(&bytes), Some(hello));
            assert_eq!(Hello::decode(&bytes[..bytes.len() - 1]), None);
        }
        assert_eq!(Hello::decode(&Hello { rank: 4, ranks: 4, purpose: Purpose::Control }.encode()), None);
        assert_eq!(Hello::decode(b"RPP\x01 and the rest of it, long enough"), None);
    }
}
