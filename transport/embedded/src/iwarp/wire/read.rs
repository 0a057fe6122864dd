//! The RDMAP header of a Read Request (RFC 5040 §4.4).

use super::{be32, be64};

/// The length in octets of the Read Request header, which follows the untagged DDP header (RFC 5040 §4.4).
pub const READ_REQUEST_LEN: usize = 28;

/// The header of a Read Request. This header follows the untagged DDP header (RFC 5040 §4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// Data Sink STag: the region of the requester to which the data is written.
    pub sink_stag: u32,
    /// Data Sink Tagged Offset: the first byte in the sink region.
    pub sink_offset: u64,
    /// RDMA Read Message Size: the number of bytes. If the size is 0, the STags must not be checked (RFC 5040 §5.2.1).
    pub size: u32,
    /// Data Source STag: the region of the responder from which the data is read.
    pub source_stag: u32,
    /// Data Source Tagged Offset: the first byte in the source region.
    pub source_offset: u64,
}

impl ReadRequest {
    /// Parses the header. Parsing cannot fail, because every value of every field can be represented.
    pub fn parse(bytes: &[u8; READ_REQUEST_LEN]) -> Self {
        Self {
            sink_stag: be32(bytes, 0),
            sink_offset: be64(bytes, 4),
            size: be32(bytes, 12),
            source_stag: be32(bytes, 16),
            source_offset: be64(bytes, 20),
        }
    }

    /// Returns the octets of the header.
    pub fn emit(&self) -> [u8; READ_REQUEST_LEN] {
        let mut out = [0; READ_REQUEST_LEN];
        out[..4].copy_from_slice(&self.sink_stag.to_be_bytes());
        out[4..12].copy_from_slice(&self.sink_offset.to_be_bytes());
        out[12..16].copy_from_slice(&self.size.to_be_bytes());
        out[16..20].copy_from_slice(&self.source_stag.to_be_bytes());
        out[20..].copy_from_slice(&self.source_offset.to_be_bytes());
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn read_request_round_trip(bytes: [u8; READ_REQUEST_LEN]) {
            prop_assert_eq!(ReadRequest::parse(&bytes).emit(), bytes);
        }

        #[test]
        fn read_request_fields(sink_stag: u32, sink_offset: u64, size: u32, source_stag: u32, source_offset: u64) {
            let request = ReadRequest { sink_stag, sink_offset, size, source_stag, source_offset };
            prop_assert_eq!(ReadRequest::parse(&request.emit()), request);
        }
    }
}
