//! Accesses all bytes of a message: writes them before it is sent, and reads them after it has arrived. Programs with real data do the
//! same.

use std::hint::black_box;

/// Increments `value`, and writes it to each byte of a message. So consecutive messages in the same buffer differ in every byte.
pub fn write(message: &mut [u8], value: &mut u8) {
    *value = value.wrapping_add(1);
    message.fill(*value);
}

/// Reads each byte of a message.
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
