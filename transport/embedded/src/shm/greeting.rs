//! The messages with which two sides that are connected by TCP move their connection to shared memory.
//!
//! The active side sets a reserved bit of its MPA request if it can use shared memory. The passive side appends an
//! [`Offer`] to the private data of its reply. The offer names a Unix socket and contains a secret. The active side
//! connects to the socket and sends a [`Hello`] with the secret and the descriptor of a new segment. Only the active
//! side has received the offer, so the secret proves that the hello is from the peer.

use rdma_transport::slab::Key;

/// The first bytes of a hello, and the last bytes of an offer.
const MAGIC: [u8; 4] = *b"RDXS";
/// The version of the layouts of offer and hello.
const VERSION: u8 = 2;
/// The length of a Unix socket's abstract name (`unix`(7)), without the zero byte in front.
pub(crate) const NAME_LEN: usize = 16;
/// The length of an [`Offer`] on the wire, in bytes.
pub(crate) const OFFER_LEN: usize = 48;
/// The length of a [`Hello`] on the wire, in bytes.
pub(crate) const HELLO_LEN: usize = 36;

/// The secret of an offer, which the hello must repeat: 128 random bits.
pub(crate) type Secret = [u8; 16];

/// The data with which the active side connects to the passive side on the same host. An offer is at the end of the
/// private data of the MPA reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    /// The abstract name of the Unix socket.
    pub(crate) name: [u8; NAME_LEN],
    /// The secret that the hello must repeat.
    pub(crate) secret: Secret,
    /// The passive side's handle of the connection, which the hello must repeat.
    pub(crate) key: Key,
    /// True if the passive side accepts no message on the TCP stream. An active side that cannot use the shared memory
    /// ends its attempt.
    pub(crate) required: bool,
}

impl Offer {
    /// Returns the bytes of the offer.
    pub(crate) fn emit(&self) -> [u8; OFFER_LEN] {
        let mut out = [0; OFFER_LEN];
        out[..16].copy_from_slice(&self.name);
        out[16..32].copy_from_slice(&self.secret);
        out[32..36].copy_from_slice(&self.key.slot().to_le_bytes());
        out[36..40].copy_from_slice(&self.key.generation().to_le_bytes());
        out[40] = u8::from(self.required);
        // Version and magic are the last bytes of the offer, so that [`Offer::split`] finds them at the end of the
        // private data.
        out[43] = VERSION;
        out[44..].copy_from_slice(&MAGIC);
        out
    }

    /// Splits the private data of a reply into the program's private data and the offer. Returns `None` if there is no
    /// offer.
    pub(crate) fn split(data: &[u8]) -> Option<(&[u8], Self)> {
        let (rest, octets) = data.split_last_chunk::<OFFER_LEN>()?;
        if octets[44..] != MAGIC || octets[43] != VERSION {
            return None;
        }
        let key = Key::new(u32_at(octets, 32)?, u32_at(octets, 36)?);
        let (name, secret, required) = (*octets.first_chunk()?, *octets[16..].first_chunk()?, octets[40] & 1 == 1);
        Some((rest, Self { name, secret, key, required }))
    }
}

/// The first packet that the active side sends on the Unix socket. The descriptor of the new segment is attached to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The secret of the offer.
    pub(crate) secret: Secret,
    /// The handle of the connection, from the offer.
    pub(crate) key: Key,
    /// A hash of the two addresses of the TCP connection, as the active side sees them. If the
    /// passive side computes another hash, a proxy is between the two sides.
    pub(crate) path: u32,
}

impl Hello {
    /// Returns the bytes of the hello.
    pub(crate) fn emit(&self) -> [u8; HELLO_LEN] {
        let mut out = [0; HELLO_LEN];
        out[..4].copy_from_slice(&MAGIC);
        out[4] = VERSION;
        out[8..12].copy_from_slice(&self.key.slot().to_le_bytes());
        out[12..16].copy_from_slice(&self.key.generation().to_le_bytes());
        out[16..32].copy_from_slice(&self.secret);
        out[32..].copy_from_slice(&self.path.to_le_bytes());
        out
    }

    /// Parses a hello. Returns `None` if the packet is not a hello of this version.
    pub(crate) fn parse(packet: &[u8]) -> Option<Self> {
        let octets: &[u8; HELLO_LEN] = packet.try_into().ok()?;
        if octets[..4] != MAGIC || octets[4] != VERSION {
            return None;
        }
        let key = Key::new(u32_at(octets, 8)?, u32_at(octets, 12)?);
        Some(Self { secret: *octets[16..].first_chunk()?, key, path: u32_at(octets, 32)? })
    }
}

fn u32_at(octets: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*octets.get(at..)?.first_chunk()?))
}

/// Compares two secrets in constant time, so that the time does not reveal how many bytes of a guess are right.
pub(crate) fn is_same_secret(shown: &Secret, offered: &Secret) -> bool {
    shown.iter().zip(offered).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offers_and_hellos_are_read_as_they_were_written() {
        let (name, secret, key) = (*b"0123456789abcdef", [7; 16], Key::new(5, 9));
        let offer = Offer { name, secret, key, required: true };
        let mut data = b"private".to_vec();
        data.extend_from_slice(&offer.emit());
        assert_eq!(Offer::split(&data), Some((&b"private"[..], offer)));
        let optional = Offer { required: false, ..offer };
        assert_eq!(Offer::split(&optional.emit()), Some((&b""[..], optional)));
        assert_eq!(Offer::split(&data[1..]).unwrap().0, b"rivate");
        for at in [data.len() - 1, data.len() - 5] {
            let mut other = data.clone();
            other[at] ^= 1;
            assert_eq!(Offer::split(&other), None);
        }
        assert_eq!(Offer::split(&data[8..]), None);
        let hello = Hello { secret, key, path: 77 };
        assert_eq!(Hello::parse(&hello.emit()), Some(hello));
        assert_eq!((Hello::parse(&hello.emit()[1..]), Hello::parse(&[0; HELLO_LEN])), (None, None));
        assert!(
            is_same_secret(&secret, &[7; 16])
                && !is_same_secret(&secret, &[7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 6])
        );
    }
}
