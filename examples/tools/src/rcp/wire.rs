//! The messages between sender and receiver. Messages with the bytes of the file are sent between the messages From and End.
//!
//! ```text
//! sender                               receiver
//! Offer: length and name          ->
//!                                 <-   Have: length and hash of the part that exists, or Refuse
//! From: that length, or 0         ->
//! the bytes, in any pieces        ->
//! End: the hash of all of it      ->
//!                                 <-   Done, or Refuse
//! ```
//!
//! If the receiver already has a complete file of that name and length, it answers with Exists instead of Have. The sender then sends End
//! with the hash of its own file. The receiver answers with Done if the hashes of the two files are equal, and otherwise with Refuse. In
//! this way, a peer cannot obtain the hash of an existing file.
//!
//! Folder requests a directory; Done or Refuse answers it. A connection carries copies sequentially.

/// A BLAKE3 hash of a file or its beginning.
pub type Hash = [u8; 32];

/// The first bytes of an offer. They show the receiver whether the peer runs this version of the program.
const MAGIC: &[u8; 4] = b"RCP2";

/// A message. It consists of a tag, then little-endian numbers, then text until the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyMessage<'a> {
    /// The sender offers a file.
    Offer {
        /// The length of the file, in bytes.
        len: u64,
        /// The name of the copy.
        name: &'a str,
    },
    /// The sender requests a directory with this name.
    Folder(&'a str),
    /// The receiver has a file with the offered name and length.
    Exists,
    /// The receiver has a partial copy of the file. The partial copy may be empty.
    Have {
        /// The length of the partial copy, in bytes.
        len: u64,
        /// The hash of the partial copy.
        hash: Hash,
    },
    /// The sender continues with the bytes from this offset.
    From(u64),
    /// The sender has sent the whole file, which has this hash.
    End(Hash),
    /// The receiver has stored the complete file under its final name.
    Done,
    /// The receiver refuses, for this reason.
    Refuse(&'a str),
}

impl<'a> CopyMessage<'a> {
    /// Encodes a message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Offer { len, name } => [b"O", &MAGIC[..], &len.to_le_bytes(), name.as_bytes()].concat(),
            Self::Folder(name) => [b"M", &MAGIC[..], name.as_bytes()].concat(),
            Self::Exists => b"X".to_vec(),
            Self::Have { len, hash } => [b"H", &len.to_le_bytes()[..], hash].concat(),
            Self::From(offset) => [b"F", &offset.to_le_bytes()[..]].concat(),
            Self::End(hash) => [b"E", &hash[..]].concat(),
            Self::Done => b"D".to_vec(),
            Self::Refuse(why) => [b"R", why.as_bytes()].concat(),
        }
    }

    /// Decodes a message. Returns `None` if its kind is unknown or it is malformed.
    #[must_use]
    pub fn decode(message: &'a [u8]) -> Option<Self> {
        let (tag, rest) = message.split_first()?;
        let number = |bytes: &'a [u8]| bytes.split_first_chunk().map(|(n, rest)| (u64::from_le_bytes(*n), rest));
        match tag {
            b'O' => {
                let (len, name) = number(rest.strip_prefix(MAGIC)?)?;
                Some(Self::Offer { len, name: std::str::from_utf8(name).ok()? })
            }
            b'M' => Some(Self::Folder(std::str::from_utf8(rest.strip_prefix(MAGIC)?).ok()?)),
            b'X' => rest.is_empty().then_some(Self::Exists),
            b'H' => {
                let (len, hash) = number(rest)?;
                Some(Self::Have { len, hash: hash.try_into().ok()? })
            }
            b'F' => number(rest).filter(|(_, rest)| rest.is_empty()).map(|(offset, _)| Self::From(offset)),
            b'E' => Some(Self::End(rest.try_into().ok()?)),
            b'D' => rest.is_empty().then_some(Self::Done),
            b'R' => Some(Self::Refuse(std::str::from_utf8(rest).ok()?)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_understood() {
        let all = [
            CopyMessage::Offer { len: 7, name: "a file" },
            CopyMessage::Folder("a/b"),
            CopyMessage::Exists,
            CopyMessage::Have { len: u64::MAX, hash: [3; 32] },
            CopyMessage::From(9),
            CopyMessage::End([4; 32]),
            CopyMessage::Done,
            CopyMessage::Refuse("no"),
        ];
        for say in all {
            let bytes = say.encode();
            assert_eq!(CopyMessage::decode(&bytes), Some(say));
            let cut = CopyMessage::decode(&bytes[..bytes.len() - 1]);
            assert!(
                cut.is_none()
                    || matches!(say, CopyMessage::Offer { .. } | CopyMessage::Folder(_) | CopyMessage::Refuse(_)),
                "{cut:?}"
            );
        }
        assert_eq!(CopyMessage::decode(b"ORCP1\0\0\0\0\0\0\0\0x"), None);
        assert_eq!(CopyMessage::decode(b""), None);
    }
}
