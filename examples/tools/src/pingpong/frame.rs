//! The messages of `rdma-pingpong`. The first byte of a message is its kind. The length of data messages is part of the job. Control
//! messages have fixed lengths, so they also work if data messages have one byte.

use rdma_reactor::RemoteRegion;

/// The kind of a data message. The kinds of control messages follow.
const DATA: u8 = 0;
const LAST: u8 = 1;
const DONE: u8 = 2;
const LENT: u8 = 3;
const ASK: u8 = 4;
const SPENT: u8 = 5;

/// The length of the longest control message, in bytes.
pub const CONTROL_LEN: usize = 1 + RemoteRegion::LEN;

/// A message of `rdma-pingpong`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A data message. Its bytes have no meaning; only the number of data messages counts.
    Data,
    /// The client has sent this many messages, and now waits for [`Frame::Done`].
    Last(u64),
    /// The server has received all messages that precede [`Frame::Last`]. The field is the number of messages that the server has sent. For
    /// one-sided operations, it is the number from [`Frame::Last`].
    Done(u64),
    /// Memory of the sender of this frame, for one-sided operations of the receiver.
    Lent(RemoteRegion),
    /// The client has finished its measurement, and requests [`Frame::Spent`].
    Ask,
    /// The processor time that the server has used for this client, in ns.
    Spent(u64),
}

impl Frame {
    /// Marks a message as a data message by its first byte. An empty message stays unchanged.
    pub fn mark_data(message: &mut [u8]) {
        if let Some(first) = message.first_mut() {
            *first = DATA;
        }
    }

    /// Encodes a control message. For [`Frame::Data`], returns only the first byte.
    #[must_use]
    pub fn control(self) -> Vec<u8> {
        match self {
            Self::Data => vec![DATA],
            Self::Last(count) => [&[LAST][..], &count.to_le_bytes()].concat(),
            Self::Done(count) => [&[DONE][..], &count.to_le_bytes()].concat(),
            Self::Lent(region) => [&[LENT][..], &region.to_bytes()].concat(),
            Self::Ask => vec![ASK],
            Self::Spent(time) => [&[SPENT][..], &time.to_le_bytes()].concat(),
        }
    }

    /// Decodes a message. `size` is the length of the job's data messages. Returns `None` if the message is malformed.
    #[must_use]
    pub fn read(message: &[u8], size: u32) -> Option<Self> {
        let (&kind, rest) = message.split_first()?;
        if kind == DATA {
            return (message.len() == size as usize).then_some(Self::Data);
        }
        let count = || Some(u64::from_le_bytes(rest.try_into().ok()?));
        match kind {
            LAST => Some(Self::Last(count()?)),
            DONE => Some(Self::Done(count()?)),
            LENT if rest.len() == RemoteRegion::LEN => RemoteRegion::from_bytes(rest).map(Self::Lent),
            ASK if rest.is_empty() => Some(Self::Ask),
            SPENT => Some(Self::Spent(count()?)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_trip_and_others_are_nothing() {
        let lent = RemoteRegion { address: 1 << 40, len: 64, key: 7 };
        for frame in [Frame::Last(3), Frame::Done(u64::MAX), Frame::Lent(lent), Frame::Ask, Frame::Spent(7)] {
            assert_eq!(Frame::read(&frame.control(), 1), Some(frame));
        }
        assert_eq!(Frame::read(&[0], 1), Some(Frame::Data));
        assert_eq!(Frame::read(&[0, 0], 1), None);
        assert_eq!(Frame::read(&[1], 1), None);
        assert_eq!(Frame::read(&[ASK, 0], 1), None);
        assert_eq!(Frame::read(&[9; 9], 1), None);
        assert_eq!(Frame::read(&[LENT; CONTROL_LEN + 1], 1), None);
        assert_eq!(Frame::read(&[], 1), None);
    }
}
