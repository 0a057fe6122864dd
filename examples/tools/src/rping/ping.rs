//! The content of a ping: a text such as `rdma-ping-7: HIJK...`. The last byte of the text is NUL. The letters after the number are shifted
//! by one in each round.

use std::iter;

use crate::text::shown;

/// The characters that follow the number in a ping, written twice in sequence. So a slice of this text has all characters in sequence,
/// whichever character it begins with.
const ROW: &[u8; 2 * CHARACTERS] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrstuvwxyz\
    ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrstuvwxyz";
const CHARACTERS: usize = 58;

/// Fills `out` with the ping of this round.
pub fn fill(round: u64, out: &mut [u8]) {
    let mut at = 0;
    for piece in pieces(head(round).as_bytes(), round, out.len()) {
        out[at..at + piece.len()].copy_from_slice(piece);
        at += piece.len();
    }
}

/// Checks that `got` is the ping of this round.
///
/// # Errors
/// A byte differs. The text names the first one.
pub fn check(round: u64, got: &[u8]) -> Result<(), String> {
    let mut at = 0;
    for piece in pieces(head(round).as_bytes(), round, got.len()) {
        let part = &got[at..at + piece.len()];
        if part != piece {
            at += part.iter().zip(piece).take_while(|(got, want)| got == want).count();
            return Err(format!("byte {at} of {} in round {round} is not what was sent: {:#04x}", got.len(), got[at]));
        }
        at += piece.len();
    }
    Ok(())
}

/// Formats a ping as text, for `--verbose`. Hidden characters are escaped, because a peer may have written anything.
#[must_use]
pub fn text(ping: &[u8]) -> String {
    shown(&String::from_utf8_lossy(ping.split(|byte| *byte == 0).next().unwrap_or_default()))
}

fn head(round: u64) -> String {
    format!("rdma-ping-{round}: ")
}

/// Returns the parts of a ping of `len` bytes: the head, the characters repeated as often as needed, and the NUL.
fn pieces(head: &[u8], round: u64, len: usize) -> impl Iterator<Item = &[u8]> {
    let start = (round % CHARACTERS as u64) as usize;
    let row = &ROW[start..start + CHARACTERS];
    let mut left = len;
    iter::once(head).chain(iter::repeat(row)).map_while(move |piece| {
        let piece = match left {
            0 => return None,
            1 => &[0],
            _ => &piece[..piece.len().min(left - 1)],
        };
        left -= piece.len();
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ping_reads_as_of_rping() {
        let mut ping = [0xff; 64];
        fill(1, &mut ping);
        assert_eq!(&ping, b"rdma-ping-1: BCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrs\0");
        assert_eq!(check(1, &ping), Ok(()));
        let (mut again, mut wrapped) = ([0; 80], [0; 80]);
        fill(0, &mut again);
        fill(58, &mut wrapped);
        assert_eq!((text(&again).len(), &again[13..]), (79, &[&wrapped[14..79], b"H\0"].concat()[..]));
        assert_eq!(&again[69..73], b"yzAB");
    }

    #[test]
    fn a_ping_of_a_stranger_commands_no_terminal() {
        assert_eq!(text(b"rdma-ping-0: \x1b[2J\xff\0rest"), "rdma-ping-0: \\u{1b}[2J\u{fffd}");
    }

    #[test]
    fn any_length_will_do_and_any_difference_is_found() {
        for len in [1, 2, 13, 14, 100] {
            let mut ping = vec![0xff; len];
            fill(9, &mut ping);
            assert_eq!((check(9, &ping), ping[len - 1]), (Ok(()), 0));
            for at in 0..len {
                ping[at] ^= 1;
                assert!(check(9, &ping).unwrap_err().starts_with(&format!("byte {at} of {len} in round 9")));
                ping[at] ^= 1;
            }
        }
        let mut ping = [0; 64];
        fill(1, &mut ping);
        assert!(check(2, &ping).is_err(), "the ping of another round");
    }
}
