//! Access to all bytes of a message: written before it is sent,
//! and read after it has arrived, as programs with real data do.

use std::hint::black_box;

/// Writes each byte. `value` changes with each message, so that no write leaves a byte as it was.
pub fn write(message: &mut [u8], value: &mut u8) {
    *value = value.wrapping_add(1);
    message.fill(*value);
}

/// Reads each byte.
pub fn read(message: &[u8]) {
    let mut words = message.chunks_exact(8);
    let sum = words.by_ref().fold(0, |sum: u64, word| {
        let word = word.try_into().map_or(0, u64::from_ne_bytes);
        sum.wrapping_add(word)
    });
    black_box(words.remainder().iter().fold(sum, |sum, &byte| sum.wrapping_add(byte.into())));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_is_written_anew() {
        let (mut message, mut value) = ([0; 11], 254);
        write(&mut message, &mut value);
        assert_eq!(message, [255; 11]);
        write(&mut message, &mut value);
        assert_eq!((message, value), ([0; 11], 0));
        read(&message);
    }
}
