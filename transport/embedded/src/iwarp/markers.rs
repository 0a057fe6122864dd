//! MPA markers (RFC 5044 §4.3). The stream contains a marker every 512 octets. A marker points back to the start of its FPDU. This provider
//! sends markers if the peer requires them, and never requires them itself.

use super::wire::mpa::CRC_LEN;

/// The length in octets of a marker.
pub(crate) const LEN: usize = 4;
/// The distance in octets from the start of one marker to the start of the next one. Positions are counted from the first octet behind the
/// startup frame.
pub(crate) const SPACING: usize = 512;

/// Appends an FPDU to `out` and inserts the markers, including a marker directly in front of the CRC. `fpdu` does not include the CRC, and
/// its length is a multiple of 4. `position` is the position of the FPDU in the stream.
pub(crate) fn insert(fpdu: &[u8], position: u64, out: &mut Vec<u8>) {
    let mut at = (position % SPACING as u64) as usize;
    let mut behind = 0;
    let mut rest = fpdu;
    loop {
        if at == 0 {
            // A marker directly in front of an FPDU is a part of that FPDU, and has the pointer 0.
            let [high, low] = (behind as u16).to_be_bytes();
            out.extend_from_slice(&[0, 0, high, low]);
            at = LEN;
            behind += if behind == 0 { 0 } else { LEN };
        }
        if rest.is_empty() {
            return;
        }
        let (now, later) = rest.split_at(rest.len().min(SPACING - at));
        out.extend_from_slice(now);
        behind += now.len();
        at = (at + now.len()) % SPACING;
        rest = later;
    }
}

const _: () = assert!(CRC_LEN == 4 && SPACING % 4 == 0);

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::iwarp::wire::crc32c;
    use crate::iwarp::wire::mpa::fpdu_len;

    /// Checks and removes the markers of a whole stream. Replaces the CRC of every FPDU with the CRC of the same FPDU without markers.
    pub(crate) fn strip(stream: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let mut at = 0;
        while at < stream.len() {
            let mut with = Vec::new();
            let mut plain = Vec::new();
            let mut start = at;
            let mut need = 2;
            while plain.len() < need {
                if at % SPACING == 0 {
                    if plain.is_empty() {
                        start = at + LEN;
                    }
                    let pointer = u16::from_be_bytes([stream[at + 2], stream[at + 3]]);
                    assert_eq!((stream[at], stream[at + 1]), (0, 0));
                    assert_eq!(usize::from(pointer), at.saturating_sub(start), "marker at {at}");
                    with.extend_from_slice(&stream[at..at + LEN]);
                    at += LEN;
                }
                let now = &stream[at..at + 4];
                plain.extend_from_slice(now);
                need = fpdu_len(usize::from(u16::from_be_bytes([plain[0], plain[1]])));
                if plain.len() < need {
                    with.extend_from_slice(now);
                }
                at += 4;
            }
            let end = plain.len() - CRC_LEN;
            let crc = plain.split_off(end);
            if crc != [0; CRC_LEN] {
                assert_eq!(crc, crc32c(&with).to_le_bytes(), "CRC with markers");
                plain.extend_from_slice(&crc32c(&plain).to_le_bytes());
            } else {
                plain.extend_from_slice(&crc);
            }
            out.extend_from_slice(&plain);
        }
        out
    }

    fn framed(fpdu: &[u8], position: u64) -> Vec<u8> {
        let mut out = Vec::new();
        insert(fpdu, position, &mut out);
        let crc = crc32c(&out);
        out.extend_from_slice(&crc.to_le_bytes());
        out
    }

    /// The FPDUs of figures 5 and 6 in RFC 5044, with markers.
    #[test]
    fn vectors() {
        let fpdu = |msn: u8| {
            let mut bytes = vec![0, 0x2a, 0x41, 0x43];
            bytes.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, msn, 0, 0, 0, 0]);
            bytes.extend([0; 24]);
            bytes
        };
        let first = framed(&fpdu(1), 0);
        assert_eq!((&first[..4], &first[48..]), (&[0; 4][..], &[0x52, 0x23, 0x99, 0x83][..]));
        assert_eq!(strip(&first)[44..], [0xb7, 0x24, 0x3e, 0xc3]);
        // The marker is behind the header of 20 octets, so its pointer is 20.
        let second = framed(&fpdu(2), 512 - 20);
        assert_eq!((&second[20..24], &second[48..]), (&[0, 0, 0, 0x14][..], &[0x84, 0x92, 0x58, 0x98][..]));
    }

    #[test]
    fn every_alignment() {
        for position in (0..SPACING as u64).step_by(4) {
            let fpdu: Vec<u8> = (0..1500u32).map(|n| n as u8).collect();
            let out = framed(&fpdu, position);
            let markers = (0..out.len() - CRC_LEN).filter(|at| (position + *at as u64) % SPACING as u64 == 0).count();
            assert_eq!(out.len(), fpdu.len() + CRC_LEN + LEN * markers, "{position}");
        }
    }
}
