//! The private data of a connect request: the rank that connects, and its purpose.

/// The magic: the name of the protocol, and the version of the bytes that follow and of all messages.
const MAGIC: [u8; 4] = *b"RMS\x01";

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The control connection: orders of rank 0, and reports of another rank.
    Control,
    /// A link of the mesh.
    Link {
        /// The number of the run, which rank 0 gives to the ranks that join.
        run: u64,
        /// The number of earlier connects to this rank. The link of the last connect counts.
        attempt: u32,
    },
}

/// The first data of a rank to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The rank that connects.
    pub rank: usize,
    /// The number of ranks that it expects.
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

    /// Decodes private data. Returns `None` if it is of another program or version, or if the rank is out of range.
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
