//! CRC32c, the checksum of an FPDU (RFC 5044 §4.4).

use crc_fast::{CrcAlgorithm, Digest};

/// A CRC32c that is computed in parts, as the octets of a segment arrive.
///
/// On the wire, the value is stored little-endian: `finish().to_le_bytes()`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crc32c {
    /// The CRC register. The checksum is its complement.
    state: u32,
}

/// The value of the CRC register before the first octet (RFC 5044 §4.4).
const INITIAL: u32 = !0;

/// For at most this number of octets, the table is faster than the `crc_fast` library, which needs some setup for each call. Such short
/// pieces occur as pads and at the ends of receive calls.
const SMALL: usize = 8;

/// The effect of one octet on the CRC register. The polynomial is 0x1edc6f41, with its bits reflected.
const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut value = index as u32;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 1 == 1 { value >> 1 ^ 0x82f6_3b78 } else { value >> 1 };
            bit += 1;
        }
        table[index] = value;
        index += 1;
    }
    table
};

impl Crc32c {
    /// Begins a checksum, without any octets.
    pub const fn new() -> Self {
        Self { state: INITIAL }
    }

    /// Adds the next octets, in the order of the wire.
    pub fn update(&mut self, bytes: &[u8]) {
        self.state = if bytes.len() <= SMALL {
            bytes.iter().fold(self.state, |state, &byte| state >> 8 ^ TABLE[usize::from(state as u8 ^ byte)])
        } else if self.state == INITIAL {
            // For the first octets of a checksum, the one-shot function is faster than a digest, because creating a digest copies its
            // parameters.
            !crc_fast::crc32_iscsi(bytes)
        } else {
            let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(self.state));
            digest.update(bytes);
            digest.get_state() as u32
        };
    }

    /// Returns the checksum of all octets that were added.
    pub const fn finish(self) -> u32 {
        !self.state
    }
}

impl Default for Crc32c {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the CRC32c of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Computes the CRC bit by bit, as the standard defines it.
    fn reference(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0u32, |state, &byte| {
            (0..8).fold(state ^ u32::from(byte), |s, _| s >> 1 ^ if s & 1 == 1 { 0x82f6_3b78 } else { 0 })
        })
    }

    #[test]
    fn check_value() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(b""), 0);
        assert_eq!(Crc32c::default().finish(), 0);
    }

    #[test]
    fn every_length_up_to_two_blocks() {
        let bytes: Vec<u8> = (0..1100u32).map(|i| ((i * 131) >> 3) as u8).collect();
        for len in 0..bytes.len() {
            let mut running = Crc32c::new();
            running.update(&bytes[..len]);
            assert_eq!(crc32c(&bytes[..len]), reference(&bytes[..len]), "{len}");
            assert_eq!(running.finish(), reference(&bytes[..len]), "{len}");
        }
    }

    /// In the middle of a message, the CRC register can have its initial value again. `update` must not mistake this position for the start
    /// of a message.
    #[test]
    fn register_back_at_the_initial_value() {
        let mut running = Crc32c::new();
        let mut message = b"a header of sixteen+".to_vec();
        running.update(&message);
        // Four octets can bring the register to any value. Compute these octets backwards from the wanted value.
        let mut wanted = INITIAL;
        let mut indices = [0u8; 4];
        for index in indices.iter_mut().rev() {
            let found = TABLE.iter().position(|entry| entry >> 24 == wanted >> 24).unwrap();
            *index = found as u8;
            wanted = (wanted ^ TABLE[found]) << 8;
        }
        let mut state = running.state;
        for index in indices {
            message.push(state as u8 ^ index);
            state = state >> 8 ^ TABLE[usize::from(index)];
        }
        assert_eq!(state, INITIAL);
        running.update(&message[20..]);
        assert_eq!(running.state, INITIAL);
        message.extend_from_slice(b"and some more octets behind it");
        running.update(&message[24..]);
        assert_eq!(running.finish(), reference(&message));
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same(parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..8)) {
            let whole = parts.concat();
            let mut running = Crc32c::new();
            for part in &parts {
                running.update(part);
            }
            prop_assert_eq!(running.finish(), reference(&whole));
            prop_assert_eq!(crc32c(&whole), reference(&whole));
        }
    }
}
