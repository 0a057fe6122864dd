//! The invariant CRC (ICRC) of a RoCE version 2 packet (InfiniBand Architecture Specification, volume 1, annex A17.3.3). It is a CRC-32
//! over those fields of the packet, from the IP header on, that routers do not change.
//!
//! The ICRC also covers the identification of an IPv4 header, which a socket does not expose. The CRC is linear: if two packets differ only
//! in these 16 bits, the difference of their CRCs depends only on the 16 bits and on the number of octets behind them. The receiver
//! therefore computes the CRC with the identification 0, and subtracts this CRC from the ICRC in the packet. If an identification exists
//! that causes this difference, [`identification`] finds it, and the ICRC is valid. If none exists, the packet is damaged.

/// The length of the CRC in octets.
pub(crate) const LEN: usize = 4;

/// The polynomial of CRC-32 (ISO 3309) with its bits reflected: the highest bit is the coefficient of 1.
const POLYNOMIAL: u32 = 0xedb8_8320;
/// `BACK[n]` undoes the effect of 2^n zero octets on the CRC register, by multiplication. The value is the polynomial x^(-8 * 2^n).
const BACK: [u32; 14] = {
    // Begin with 1 and divide by x eight times: one octet backwards.
    let mut power: u32 = 1 << 31;
    let mut bit = 0;
    while bit < 8 {
        power = if power >> 31 == 1 { (power ^ POLYNOMIAL) << 1 | 1 } else { power << 1 };
        bit += 1;
    }
    let mut table = [0; 14];
    let mut index = 0;
    while index < table.len() {
        table[index] = power;
        power = multiply(power, power);
        index += 1;
    }
    table
};

/// Returns the CRC of `octets`. The caller has set the fields that routers may change to ones, as the standard requires.
pub(crate) fn of(octets: &[u8]) -> u32 {
    crc_fast::crc32_iso_hdlc(octets)
}

/// Finds the two octets that change the CRC of a packet by `difference` when they replace two zero
/// octets. Returns them as a big-endian number. `behind` is the number of octets that follow the
/// two octets in the packet. Returns `None` if no two octets cause this difference.
pub(crate) fn identification(difference: u32, behind: usize) -> Option<u16> {
    let mut register = difference;
    let octets = behind + 2;
    for (index, back) in BACK.iter().enumerate() {
        if octets >> index & 1 == 1 {
            register = multiply(register, *back);
        }
    }
    // The register is reflected: its lowest 8 bits are the first of the two octets. If any of its upper 16 bits is set, no two octets cause
    // the difference.
    let explained = octets < 1 << BACK.len() && register >> 16 == 0;
    explained.then_some((register as u16).swap_bytes())
}

/// Returns the product of two polynomials, modulo the polynomial of the CRC.
const fn multiply(one: u32, mut other: u32) -> u32 {
    let mut product = 0;
    let mut bit = 32;
    while bit > 0 {
        bit -= 1;
        if one >> bit & 1 == 1 {
            product ^= other;
        }
        other = if other & 1 == 1 { other >> 1 ^ POLYNOMIAL } else { other >> 1 };
    }
    product
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Computes the CRC bit by bit, as the standard defines it.
    fn reference(octets: &[u8]) -> u32 {
        !octets.iter().fold(!0_u32, |state, &octet| {
            (0..8).fold(state ^ u32::from(octet), |s, _| s >> 1 ^ if s & 1 == 1 { POLYNOMIAL } else { 0 })
        })
    }

    #[test]
    fn check_value() {
        assert_eq!(of(b"123456789"), 0xcbf4_3926);
        assert_eq!(multiply(1 << 31, 0x1234_5678), 0x1234_5678, "1 is neutral");
        assert_eq!(multiply(BACK[0], 1 << 23), 1 << 31, "x^8 and back");
    }

    proptest! {
        #[test]
        fn the_identification_is_found_and_nothing_else(
            mut octets in prop::collection::vec(any::<u8>(), 6..4300),
            wanted: u16,
            at in 0..60_usize,
            damage in 1..=u32::MAX,
        ) {
            let at = at.min(octets.len() - 2);
            octets[at..at + 2].fill(0);
            let without = of(&octets);
            prop_assert_eq!(without, reference(&octets));
            octets[at..at + 2].copy_from_slice(&wanted.to_be_bytes());
            let (with, behind) = (of(&octets), octets.len() - at - 2);
            prop_assert_eq!(identification(without ^ with, behind), Some(wanted));
            // Even for a damaged CRC, an identification may exist with which the packet has exactly this CRC.
            if let Some(other) = identification(without ^ damage, behind) {
                octets[at..at + 2].copy_from_slice(&other.to_be_bytes());
                prop_assert_eq!(of(&octets), damage);
            }
        }
    }
}
