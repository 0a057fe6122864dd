//! The first byte of every message says what it is. Data is as long as the job says; control messages have a length
//! of their own, so that they work with messages of one byte.

/// First byte of data.
const DATA: u8 = 0;
const LAST: u8 = 1;
const DONE: u8 = 2;

/// Length of a control message, bytes.
pub const CONTROL_LEN: usize = 9;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// One of those that are counted.
    Data,
    /// From the client: it has sent this many, and waits for [`Frame::Done`].
    Last(u64),
    /// From the server: all that came before [`Frame::Last`] has arrived; this many were sent the other way.
    Done(u64),
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
    pub fn control(self) -> [u8; CONTROL_LEN] {
        let (kind, count) = match self {
            Self::Data => (DATA, 0),
            Self::Last(count) => (LAST, count),
            Self::Done(count) => (DONE, count),
        };
        let mut out = [0; CONTROL_LEN];
        out[0] = kind;
        out[1..].copy_from_slice(&count.to_le_bytes());
        out
    }

    /// Reads a message of a job with messages of `size` bytes; `None` when there is no such message.
    #[must_use]
    pub fn read(message: &[u8], size: u32) -> Option<Self> {
        let (&kind, rest) = message.split_first()?;
        if kind == DATA {
            return (message.len() == size as usize).then_some(Self::Data);
        }
        let count = u64::from_le_bytes(rest.try_into().ok()?);
        match kind {
            LAST => Some(Self::Last(count)),
            DONE => Some(Self::Done(count)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_trip_and_others_are_nothing() {
        for frame in [Frame::Last(3), Frame::Done(u64::MAX)] {
            assert_eq!(Frame::read(&frame.control(), 1), Some(frame));
        }
        assert_eq!(Frame::read(&[0], 1), Some(Frame::Data));
        assert_eq!(Frame::read(&[0, 0], 1), None);
        assert_eq!(Frame::read(&[1], 1), None);
        assert_eq!(Frame::read(&[9; 9], 1), None);
        assert_eq!(Frame::read(&[], 1), None);
    }
}
