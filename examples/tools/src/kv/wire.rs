//! The messages between the server and its clients. All numbers are little-endian.

use rdma_reactor::RemoteRegion;

use super::table::{Geometry, MAX_VALUE};

/// The server's first message: `"KV01" | slots:4 | max_value:4 | region:20`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableHello {
    /// The shape of the table.
    pub geometry: Geometry,
    /// The address and the key of the table's region.
    pub region: RemoteRegion,
}

const MAGIC: &[u8; 4] = b"KV01";

impl TableHello {
    /// Encodes the hello as a message.
    #[must_use]
    pub fn encode(self) -> Vec<u8> {
        let Geometry { slots, max_value } = self.geometry;
        [&MAGIC[..], &slots.to_le_bytes(), &max_value.to_le_bytes(), &self.region.to_bytes()].concat()
    }

    /// Decodes a hello. Returns `None` if the message is not a hello or describes an invalid table.
    #[must_use]
    pub fn decode(message: &[u8]) -> Option<Self> {
        let (slots, rest) = message.strip_prefix(MAGIC)?.split_first_chunk()?;
        let (max_value, rest) = rest.split_first_chunk()?;
        let geometry = Geometry { slots: u32::from_le_bytes(*slots), max_value: u32::from_le_bytes(*max_value) };
        let region = RemoteRegion::from_bytes(rest)?;
        let sound = geometry.slots > 0 && geometry.max_value <= MAX_VALUE && region.len == geometry.table_len();
        sound.then_some(Self { geometry, region })
    }
}

/// Encodes a request to store a value: `key length:4 | key | value`. If the server has stored the value, its answer is an empty message.
/// Otherwise, its answer is the reason as text.
#[must_use]
pub fn encode_put(key: &[u8], value: &[u8]) -> Vec<u8> {
    [&(key.len() as u32).to_le_bytes()[..], key, value].concat()
}

/// Decodes a request to store a value. Returns the key and the value, or `None` if the message is not a valid request to store.
#[must_use]
pub fn decode_put(message: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = message.split_first_chunk()?;
    rest.split_at_checked(u32::from_le_bytes(*len) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_trip_and_nonsense_does_not() {
        let geometry = Geometry { slots: 10, max_value: 100 };
        let hello = TableHello { geometry, region: RemoteRegion { address: 7, len: geometry.table_len(), key: 3 } };
        assert_eq!(TableHello::decode(&hello.encode()), Some(hello));
        let small = TableHello { region: RemoteRegion { len: 5, ..hello.region }, ..hello };
        let huge = TableHello { geometry: Geometry { max_value: u32::MAX, ..geometry }, ..hello };
        assert!(TableHello::decode(&small.encode()).is_none() && TableHello::decode(&huge.encode()).is_none());
        assert!(TableHello::decode(&hello.encode()[..31]).is_none() && TableHello::decode(b"KV02").is_none());

        assert_eq!(decode_put(&encode_put(b"key", b"value")), Some((&b"key"[..], &b"value"[..])));
        assert_eq!(decode_put(&encode_put(b"", b"")), Some((&b""[..], &b""[..])));
        assert!(decode_put(b"\xff\xff\xff\xffkey").is_none() && decode_put(b"abc").is_none());
    }
}
