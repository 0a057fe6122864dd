//! The messages on a link between two ranks. The first byte of each is its kind. All numbers are little-endian.

use rdma_reactor::RemoteRegion;

/// The length of a message's header, in bytes: `kind:1 | number:8`.
pub const HEAD: usize = 9;
/// The length of a message of the all-to-all load, in bytes.
pub const LOAD: usize = 4096;

const PING: u8 = 1;
const PONG: u8 = 2;
const BORROW: u8 = 3;
const LENT: u8 = 4;
const WRITTEN: u8 = 5;
const SEEN: u8 = 6;
const REFUSED: u8 = 7;
const LOAD_ONE: u8 = 8;
const LOAD_END: u8 = 9;
const READY: u8 = 10;

/// A message on a link. The first field is the number of the measurement, unless the variant's comment says otherwise.
// bound: tool-mesh
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkFrame {
    /// The sender has accepted the connection, and the connection is established on the sender's side too. So both sides may use the link.
    Ready,
    /// A request to send this whole message back, as a pong.
    Ping,
    /// The answer to a ping.
    Pong(u32),
    /// A request for memory to write to. The second field is the length of this memory, in bytes.
    Borrow(u32, u32),
    /// The memory that the peer may write to.
    Lent(u32, RemoteRegion),
    /// All writes of this measurement were sent before this message, so the peer may release the memory.
    Written(u32),
    /// The answer to [`LinkFrame::Written`]: all writes have arrived.
    Seen(u32),
    /// The request cannot be carried out; the text gives the reason.
    Refused(u32, String),
    /// A message of the all-to-all load. The field is the number of the message, or `None` if the message has wrong content.
    Load(Option<u64>),
    /// The end of the all-to-all load. The field is the number of messages that the sender has sent in this load.
    LoadEnd(u64),
}

fn head(kind: u8, number: u64) -> Vec<u8> {
    [&[kind][..], &number.to_le_bytes()].concat()
}

impl LinkFrame {
    /// Encodes a message. For a ping, encodes only the header.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Ready => head(READY, 0),
            Self::Ping => head(PING, 0),
            Self::Pong(task) => head(PONG, (*task).into()),
            Self::Borrow(task, len) => [&head(BORROW, (*task).into())[..], &len.to_le_bytes()].concat(),
            Self::Lent(task, region) => [&head(LENT, (*task).into())[..], &region.to_bytes()].concat(),
            Self::Written(task) => head(WRITTEN, (*task).into()),
            Self::Seen(task) => head(SEEN, (*task).into()),
            Self::Refused(task, why) => [&head(REFUSED, (*task).into())[..], why.as_bytes()].concat(),
            Self::Load(number) => {
                let mut message = vec![0; LOAD];
                fill_load(&mut message, number.unwrap_or_default());
                message
            }
            Self::LoadEnd(count) => head(LOAD_END, *count),
        }
    }

    /// Decodes a message. Returns `None` if its kind is unknown or it is malformed.
    #[must_use]
    pub fn decode(message: &[u8]) -> Option<Self> {
        let ([kind], rest) = message.split_first_chunk()?;
        let (number, rest) = rest.split_first_chunk()?;
        let number = u64::from_le_bytes(*number);
        let task = number as u32;
        Some(match *kind {
            READY => Self::Ready,
            PING => Self::Ping,
            PONG => Self::Pong(task),
            BORROW => Self::Borrow(task, u32::from_le_bytes(*rest.first_chunk()?)),
            LENT => Self::Lent(task, RemoteRegion::from_bytes(rest)?),
            WRITTEN => Self::Written(task),
            SEEN => Self::Seen(task),
            REFUSED => Self::Refused(task, String::from_utf8_lossy(rest).into_owned()),
            LOAD_ONE => {
                let whole = message.len() == LOAD && rest.last_chunk() == Some(&number.to_le_bytes());
                Self::Load(whole.then_some(number))
            }
            LOAD_END => Self::LoadEnd(number),
            _ => return None,
        })
    }
}

/// Makes a ping of `size` bytes. `size` must be at least [`HEAD`].
#[must_use]
pub fn ping(task: u32, size: usize) -> Vec<u8> {
    let mut message = head(PING, task.into());
    message.resize(size.max(HEAD), 0);
    message
}

/// Turns a ping into a pong, in place.
pub fn answer(ping: &mut [u8]) {
    if let Some(kind) = ping.first_mut() {
        *kind = PONG;
    }
}

/// Writes a message of the all-to-all load into a buffer of [`LOAD`] bytes. The number is at both ends of the message, so that the receiver
/// can check that the message is complete.
pub fn fill_load(buffer: &mut [u8], number: u64) {
    let number = number.to_le_bytes();
    if let Some((first, rest)) = buffer.split_first_mut() {
        *first = LOAD_ONE;
        if let Some(start) = rest.first_chunk_mut() {
            *start = number;
        }
        if let Some(end) = rest.last_chunk_mut() {
            *end = number;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_trip_and_nonsense_does_not() {
        let region = RemoteRegion { address: 1 << 40, len: 65_536, key: 9 };
        let frames = [
            LinkFrame::Ready,
            LinkFrame::Ping,
            LinkFrame::Pong(7),
            LinkFrame::Borrow(7, 65_536),
            LinkFrame::Lent(7, region),
            LinkFrame::Written(u32::MAX),
            LinkFrame::Seen(1),
            LinkFrame::Refused(1, "no memory".into()),
            LinkFrame::Load(Some(1 << 50)),
            LinkFrame::LoadEnd(3),
        ];
        for frame in frames {
            assert_eq!(LinkFrame::decode(&frame.encode()), Some(frame));
        }
        assert_eq!(LinkFrame::decode(&[0; 20]), None);
        assert_eq!(LinkFrame::decode(&LinkFrame::Ping.encode()[..8]), None);
        assert_eq!(LinkFrame::decode(&LinkFrame::Lent(7, region).encode()[..20]), None);
    }

    #[test]
    fn a_ping_becomes_its_answer_and_a_changed_load_is_noticed() {
        let mut message = ping(5, 64);
        assert_eq!((message.len(), LinkFrame::decode(&message)), (64, Some(LinkFrame::Ping)));
        answer(&mut message);
        assert_eq!(LinkFrame::decode(&message), Some(LinkFrame::Pong(5)));

        let mut message = LinkFrame::Load(Some(5)).encode();
        message[LOAD - 8] ^= 1;
        assert_eq!(LinkFrame::decode(&message), Some(LinkFrame::Load(None)));
        assert_eq!(LinkFrame::decode(&LinkFrame::Load(Some(5)).encode()[..LOAD - 1]), Some(LinkFrame::Load(None)));
    }
}
