//! The advert: a message that describes memory of its sender, by `address:8 | key:4 | size:4`, big-endian.

use rdma_reactor::RemoteRegion;

/// The length of every message, in bytes.
pub const LEN: usize = 16;

/// Encodes an advert of a region. The region must be shorter than 4 GiB.
#[must_use]
pub fn encode(region: RemoteRegion) -> [u8; LEN] {
    let size = u32::try_from(region.len).expect("the region is at most --size, which is less");
    let mut out = [0; LEN];
    out[..8].copy_from_slice(&region.address.to_be_bytes());
    out[8..12].copy_from_slice(&region.key.to_be_bytes());
    out[12..].copy_from_slice(&size.to_be_bytes());
    out
}

/// Decodes an advert. Returns the region that it describes.
///
/// # Errors
/// The message is not an advert, or its region is empty.
pub fn decode(message: &[u8]) -> Result<RemoteRegion, String> {
    let [a @ .., k0, k1, k2, k3, s0, s1, s2, s3] = *checked(message)?;
    let size = u32::from_be_bytes([s0, s1, s2, s3]);
    let region =
        RemoteRegion { address: u64::from_be_bytes(a), len: size.into(), key: u32::from_be_bytes([k0, k1, k2, k3]) };
    match region.address.checked_add(region.len) {
        Some(_) if size > 0 => Ok(region),
        _ => Err(format!("it offers {size} bytes at {:#x}", region.address)),
    }
}

/// Checks that a message has the length of an advert.
///
/// # Errors
/// The message has another length.
pub fn checked(message: &[u8]) -> Result<&[u8; LEN], String> {
    message.try_into().map_err(|_| format!("a message of {} bytes where rping has {LEN}", message.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_advert_is_what_rping_sends() {
        let region = RemoteRegion { address: 0x5566_7788_99aa_bbcc, len: 64, key: 0x0102_0304 };
        let bytes = encode(region);
        assert_eq!(bytes, *b"\x55\x66\x77\x88\x99\xaa\xbb\xcc\x01\x02\x03\x04\0\0\0\x40");
        assert_eq!(decode(&bytes), Ok(region));
        assert_eq!(decode(&bytes[1..]).unwrap_err(), "a message of 15 bytes where rping has 16");
        assert!(decode(&[0; LEN]).is_err(), "nothing");
        assert!(decode(&[0xff; LEN]).is_err(), "it wraps around");
    }
}
