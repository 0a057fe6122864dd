//! The frames of the program. The first byte of every message is its kind. The job sets the length of data
//! messages. Control messages have fixed lengths, so that they also work with data messages of one byte.

use rdma_reactor::RemoteRegion;

/// The first byte of data.
const DATA: u8 = 0;
const LAST: u8 = 1;
const DONE: u8 = 2;
const LENT: u8 = 3;
const ASK: u8 = 4;
const SPENT: u8 = 5;

/// The length of the longest control message, bytes.
pub const CONTROL_LEN: usize = 1 + RemoteRegion::LEN;

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A data message. Data messages are counted.
    Data,
    /// The client has sent this many messages, and waits for [`Frame::Done`].
    Last(u64),
    /// The server has received everything before [`Frame::Last`]. The number is that
    /// of messages sent to the client, or for one-sided operations the announced number.
    Done(u64),
    /// Memory that the sender of this frame lends for the receiver's operations.
    Lent(RemoteRegion),
    /// The client is done, and requests [`Frame::Spent`].
    Ask,
    /// The server's processor time for this client, ns.
    Spent(u64),
}

impl Frame {
    /// Marks a message of at least one byte as data.
    pub fn mark_data(message: &mut [u8]) {
        if let Some(first) = message.first_mut() {
            *first = DATA;
        }
    }

    /// Encodes a control message. Empty for data.
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

    /// Decodes a message of a job with messages of `size` bytes. Returns `None` if there is no such message.
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
