//! The first byte of every message says what it is. Data is as long as the job says; control messages have a length
//! of their own, so that they work with messages of one byte.

use rdma_reactor::RemoteRegion;

/// First byte of data.
const DATA: u8 = 0;
const LAST: u8 = 1;
const DONE: u8 = 2;
const LENT: u8 = 3;

/// Length of the longest control message, bytes.
pub const CONTROL_LEN: usize = 1 + RemoteRegion::LEN;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// One of those that are counted.
    Data,
    /// From the client: it has sent this many, and waits for [`Frame::Done`].
    Last(u64),
    /// From the server: all that came before [`Frame::Last`] has arrived; this many were sent the other way, or of
    /// one-sided operations, announced.
    Done(u64),
    /// Memory for the operations of who gets this.
    Lent(RemoteRegion),
}

impl Frame {
    /// Marks a message of at least one byte as data.
    pub fn mark_data(message: &mut [u8]) {
        if let Some(first) = message.first_mut() {
            *first = DATA;
        }
    }

    /// The bytes of a control message; of data, an empty one.
    #[must_use]
    pub fn control(self) -> Vec<u8> {
        match self {
            Self::Data => vec![DATA],
            Self::Last(count) => [&[LAST][..], &count.to_le_bytes()].concat(),
            Self::Done(count) => [&[DONE][..], &count.to_le_bytes()].concat(),
            Self::Lent(region) => [&[LENT][..], &region.to_bytes()].concat(),
        }
    }

    /// Reads a message of a job with messages of `size` bytes; `None` when there is no such message.
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
        for frame in [Frame::Last(3), Frame::Done(u64::MAX), Frame::Lent(lent)] {
            assert_eq!(Frame::read(&frame.control(), 1), Some(frame));
        }
        assert_eq!(Frame::read(&[0], 1), Some(Frame::Data));
        assert_eq!(Frame::read(&[0, 0], 1), None);
        assert_eq!(Frame::read(&[1], 1), None);
        assert_eq!(Frame::read(&[9; 9], 1), None);
        assert_eq!(Frame::read(&[LENT; CONTROL_LEN + 1], 1), None);
        assert_eq!(Frame::read(&[], 1), None);
    }
}
