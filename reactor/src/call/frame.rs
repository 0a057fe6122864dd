//! The header of a frame. A frame is a message of a connection that carries calls: a header of 16 bytes, then the payload. `docs/wire.md`
//! describes the layout.

use std::time::Duration;

/// The length of the header, in bytes.
pub(super) const HEADER: usize = 16;

/// The longest remaining time that a header can carry: about 71 minutes.
pub(super) const MAX_TIME: Duration = Duration::from_micros(u32::MAX as u64);

/// The status in an answer. `DONE` means that the answer has a payload. Every other value is the reason for a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Status(pub(super) u8);

impl Status {
    pub(super) const DONE: Self = Self(0);
    pub(super) const OVERLOADED: Self = Self(1);
    pub(super) const DRAINING: Self = Self(2);
    pub(super) const UNANSWERED: Self = Self(3);
    pub(super) const TOO_LONG: Self = Self(4);
}

/// The kind of a frame, with the fields of that kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallKind {
    /// A request. The value is the time that is left until the deadline of the call, in microseconds.
    Request(u32),
    /// An answer, or the refusal of a request. The status distinguishes the two.
    Answer(Status),
    /// A cancel: the caller has stopped waiting for the answer.
    Cancel,
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallHeader {
    pub(super) kind: CallKind,
    /// The id of the call. The caller chooses the id; the server copies it into the answer.
    pub(super) id: u64,
}

/// The reason why a received message is not a valid frame. Each of these violations aborts the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// A message is shorter than a header.
    #[error("a message of {0} bytes is not a frame of a call: the header alone has 16")]
    Short(usize),
    /// The kind of the frame is unknown.
    #[error("a frame of the unknown kind {0}")]
    Kind(u8),
    /// A reserved byte is not zero.
    #[error("a frame with a reserved byte that is not zero")]
    Reserved,
}

impl CallHeader {
    #[inline]
    pub(super) const fn request(id: u64, left: Duration) -> Self {
        let micros = left.as_secs().saturating_mul(1_000_000).saturating_add(left.subsec_micros() as u64);
        let left = if micros > u32::MAX as u64 { u32::MAX } else { micros as u32 };
        Self { kind: CallKind::Request(left), id }
    }

    #[inline]
    pub(super) const fn answer(id: u64, status: Status) -> Self {
        Self { kind: CallKind::Answer(status), id }
    }

    #[inline]
    pub(super) fn write(self) -> [u8; HEADER] {
        let (kind, status, left) = match self.kind {
            CallKind::Request(left) => (0, 0, left),
            CallKind::Answer(Status(status)) => (1, status, 0),
            CallKind::Cancel => (2, 0, 0),
        };
        let first = u64::from(left) << 32 | u64::from(status) << 8 | kind;
        let mut octets = [0; HEADER];
        octets[..8].copy_from_slice(&first.to_le_bytes());
        octets[8..].copy_from_slice(&self.id.to_le_bytes());
        octets
    }

    #[inline]
    pub(super) fn read(message: &[u8]) -> Result<Self, Violation> {
        let Some((octets, _)) = message.split_first_chunk::<HEADER>() else {
            return Err(Violation::Short(message.len()));
        };
        let &[kind, status, a, b, left @ .., _, _, _, _, _, _, _, _] = octets;
        let id = u64::from_le_bytes([
            octets[8], octets[9], octets[10], octets[11], octets[12], octets[13], octets[14], octets[15],
        ]);
        let left = u32::from_le_bytes(left);
        let kind = match (kind, status, left) {
            (0, 0, left) => CallKind::Request(left),
            (1, status, 0) => CallKind::Answer(Status(status)),
            (2, 0, 0) => CallKind::Cancel,
            (0..=2, ..) => return Err(Violation::Reserved),
            (kind, ..) => return Err(Violation::Kind(kind)),
        };
        if (a, b) != (0, 0) {
            return Err(Violation::Reserved);
        }
        Ok(Self { kind, id })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_layout_is_that_of_the_document() {
        let left = Duration::from_micros(0x0403_0201);
        let request = CallHeader::request(0x0807_0605_0403_0201, left).write();
        assert_eq!(request, [0, 0, 0, 0, 1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(CallHeader::answer(1, Status::OVERLOADED).write(), [1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        let cancel = CallHeader { kind: CallKind::Cancel, id: 1 };
        assert_eq!(cancel.write(), [2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_long_time_is_cut_and_a_short_one_is_none() {
        assert_eq!(CallHeader::request(0, Duration::MAX).kind, CallKind::Request(u32::MAX));
        assert_eq!(CallHeader::request(0, MAX_TIME).kind, CallKind::Request(u32::MAX));
        assert_eq!(CallHeader::request(0, Duration::from_nanos(999)).kind, CallKind::Request(0));
    }

    #[test]
    fn what_is_no_frame_is_named() {
        assert_eq!(CallHeader::read(&[0; 15]), Err(Violation::Short(15)));
        let with = |at: usize, value: u8| {
            let mut octets = CallHeader::answer(7, Status::DONE).write();
            octets[at] = value;
            CallHeader::read(&octets)
        };
        assert_eq!(with(0, 3), Err(Violation::Kind(3)));
        // Fields that a kind of frame does not use must be zero: an answer has no remaining time, and a cancel has no status.
        assert_eq!(with(4, 1), Err(Violation::Reserved));
        assert_eq!(with(2, 1), Err(Violation::Reserved));
        let cancel = [2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(CallHeader::read(&cancel), Err(Violation::Reserved));
        // A later version may define further statuses of an answer, so every value is accepted.
        assert_eq!(with(1, 200).map(|header| header.kind), Ok(CallKind::Answer(Status(200))));
    }

    proptest! {
        #[test]
        fn any_octets_are_a_violation_or_come_back(octets in prop::collection::vec(any::<u8>(), 0..40), kind in 0_u8..4) {
            let mut octets = octets;
            octets.iter_mut().take(1).for_each(|first| *first = kind);
            if let Ok(header) = CallHeader::read(&octets) {
                prop_assert_eq!(&header.write()[..], &octets[..HEADER]);
            }
        }
    }
}
