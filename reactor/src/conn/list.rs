//! The state of lists: what is posted, what has ended, and the outcome. A list is a transfer of the program with many pieces, each one a
//! Read or a Write. [`batch`](super::batch) posts the pieces through the send queue.
//!
//! Pieces end in order. So three numbers describe the progress of a list: the pieces that have succeeded, those that are posted with an
//! unknown outcome, and those that were never posted.

use std::collections::VecDeque;
use std::time::Instant;

use rdma_transport::wc::{Failure, WcStatus};

use crate::error::Outcome;
use crate::id::TransferId;
use crate::memory::list::{Leases, Piece, TransferNotification, TransferOutcome};
use crate::memory::region::Region;

/// A batch ends with the piece that brings its length to this number of bytes. Between two batches
/// of a connection, other connections may post.
const BATCH: usize = 256 << 10;

/// The limit on the total length of the posted pieces of a connection, in bytes. When it is reached, no more pieces are posted until posted
/// pieces have ended.
const MOST: usize = 4 << 20;

/// The maximum length of a confirmation, in bytes. A confirmation is a Read that is posted after the last piece of a list. When this Read
/// has ended, all bytes of the list are in the peer's memory.
pub(crate) const CONFIRMATION_LEN: usize = 8;

/// The kind of a work request of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListPart {
    /// A piece. `before` is the number of earlier pieces in the same batch. When this piece completes, those pieces have ended too.
    Piece { before: u16 },
    /// The Read after the last piece of a list. When this Read has ended, all bytes of the list
    /// are in the peer's memory. `list` is [`List::number`].
    Confirmation { list: u32 },
    /// The message that notifies the peer after the last piece of a list. `list` is
    /// [`List::number`].
    Notification { list: u32 },
}

/// The reason why a list was stopped: it posts no more pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    Cancelled,
    Deadline,
}

/// The progress of a list's confirmation or notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartState {
    Waits,
    Posted,
    Ended,
}

/// The direction of a list. Each variant says what a completed piece proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListDirection {
    /// The bytes of the piece have arrived in local memory.
    Read,
    /// The local transport guarantees delivery of the piece. The bytes of the piece may not be in the peer's memory yet. If the connection
    /// ends, these bytes may never arrive there.
    Write,
    /// The bytes of the piece are in the peer's memory.
    PlacedWrite,
}

/// The contents of a list that has passed all checks of the driver.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) pieces: Vec<Piece>, // local: a list of the program
    pub(crate) leases: Leases,
    pub(crate) direction: ListDirection,
    pub(crate) deadline: Option<Instant>,
    pub(crate) notification: Option<TransferNotification>,
    /// The memory for the confirmation, if the program requested one.
    pub(crate) confirmation: Option<Box<Region>>,
}

/// A list in progress.
#[derive(Debug)]
pub(super) struct List {
    pub(super) id: TransferId,
    pub(super) order: Order,
    /// `posted` is the number of pieces that were added to the send queue. `ended` is the number of posted pieces that have ended.
    pub(super) posted: usize,
    pub(super) ended: usize,
    /// The number of pieces that have succeeded.
    pub(super) succeeded: usize,
    pub(super) confirmation: PartState,
    pub(super) notification: PartState,
    pub(super) stop: Option<Stop>,
    pub(super) failure: Option<Failure>,
}

impl List {
    /// Returns the number that identifies the list in its work requests: the low bits of the list's
    /// id. All lists in progress have different numbers.
    pub(super) const fn number(&self) -> u32 {
        self.id.number() as u32
    }

    /// Returns true if a piece, the confirmation or the notification of the list is in the send queue.
    pub(super) fn is_posted(&self) -> bool {
        self.posted > self.ended || self.confirmation == PartState::Posted || self.notification == PartState::Posted
    }

    /// Returns true if all pieces, the confirmation and the notification have succeeded.
    pub(super) fn is_done(&self) -> bool {
        let all = self.ended == self.order.pieces.len() && self.failure.is_none();
        all && self.confirmation == PartState::Ended && self.notification == PartState::Ended
    }

    /// Returns true if the deadline of the list has passed.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.order.deadline.is_some_and(|deadline| deadline <= now)
            && !crate::planted("a-transfer-outlives-its-deadline")
    }

    /// Returns true if the list may post more work requests, because it was not stopped and none of its work requests has failed.
    pub(super) const fn is_going(&self) -> bool {
        self.stop.is_none() && self.failure.is_none()
    }

    /// Returns true if the list has nothing in flight and will post nothing more, so that its end can be reported.
    pub(super) fn is_over(&self) -> bool {
        !self.is_posted() && (!self.is_going() || self.is_done())
    }

    pub(super) fn unposted(&self) -> usize {
        self.order.pieces.len() - self.posted
    }

    /// Returns the number of pieces in the next batch, and their total length in bytes. `most` is
    /// the number of pieces in a full batch, and `room` is the number of free send queue slots.
    /// `(pieces, bytes)` are the number and the total length of the posted pieces of all lists of
    /// this connection.
    ///
    /// The batch is full, unless fewer pieces remain, or the limit on its bytes is reached. A batch
    /// that does not fit into the free slots waits until posted pieces have ended. If no pieces are
    /// posted, a smaller batch is posted instead.
    pub(super) fn batch(&self, most: usize, room: usize, (pieces, bytes): (usize, usize)) -> (usize, usize) {
        let wanted = most.min(self.unposted());
        let room = room.min((2 * most).saturating_sub(pieces));
        if bytes >= MOST || (room < wanted && pieces > 0) {
            return (0, 0);
        }
        let pieces = &self.order.pieces[self.posted..self.posted + wanted.min(room)];
        let bytes = pieces.iter().map(Piece::len).sum();
        if bytes <= BATCH {
            return (pieces.len(), bytes);
        }
        let (mut count, mut bytes) = (0, 0);
        while bytes < BATCH {
            bytes += pieces[count].len();
            count += 1;
        }
        (count, bytes)
    }

    /// Returns true if the notification is the next work request to post. In a list of Reads, the notification must wait until all bytes
    /// have arrived.
    pub(super) fn wants_notification(&self) -> bool {
        let before = if self.order.direction == ListDirection::Read { self.ended } else { self.posted };
        self.is_going()
            && self.notification == PartState::Waits
            && before == self.order.pieces.len()
            && self.confirmation != PartState::Waits
    }

    /// Records the outcome of a work request. Returns true if no work request of the list has failed so far.
    pub(super) fn succeeds(&mut self, outcome: Outcome) -> bool {
        if let Outcome::Failed(failure) = outcome {
            self.failure.get_or_insert(failure);
        }
        self.failure.is_none()
    }

    /// Records the end of the next `count` pieces. Returns the total length of these pieces, in bytes.
    pub(super) fn end_pieces(&mut self, count: usize, outcome: Outcome) -> usize {
        let succeeded = if self.succeeds(outcome) { count } else { 0 };
        let bytes = self.order.pieces[self.ended..self.ended + count].iter().map(Piece::len).sum();
        self.ended += count;
        self.succeeded += succeeded;
        bytes
    }

    /// Records the end of the confirmation or the notification.
    pub(super) fn end_part(&mut self, part: ListPart, outcome: Outcome) {
        let succeeds = self.succeeds(outcome);
        if matches!(part, ListPart::Confirmation { .. }) {
            self.confirmation = PartState::Ended;
            if succeeds {
                self.order.direction = ListDirection::PlacedWrite;
            }
        } else {
            self.notification = PartState::Ended;
        }
    }

    /// Returns the outcome of the list, and the number of pieces at the beginning of the list that
    /// are certainly in the target memory.
    pub(super) fn result(&self) -> (TransferOutcome, usize) {
        let outcome = match (self.stop, self.failure) {
            _ if self.is_done() => TransferOutcome::Done,
            (Some(Stop::Cancelled), None) => TransferOutcome::Cancelled,
            (Some(Stop::Deadline), _) => TransferOutcome::Deadline,
            (_, Some(failure)) => TransferOutcome::Failed(failure),
            (None, None) => TransferOutcome::Failed(WcStatus::Flushed.into()),
        };
        let claims = self.order.direction != ListDirection::Write || crate::planted("a-write-is-there-when-tcp-has-it");
        (outcome, if claims { self.succeeded } else { 0 })
    }
}

/// The transfers of lists of one connection, oldest first, and the send queue slots and credits
/// that they use or need.
#[derive(Debug, Default)]
pub(crate) struct Lists {
    pub(super) waiting: VecDeque<List>, // local: lists of the program
    /// The number that identifies the next list.
    pub(super) next: u64,
    /// `pieces` is the number of pieces in the send queue, of all lists. `bytes` is the total length of these pieces.
    pub(super) pieces: usize,
    pub(super) bytes: usize,
    /// The numbers of free send queue slots and of credits that the lists need to continue, with a
    /// batch, a confirmation or a notification.
    pub(super) missing: (usize, usize),
    /// The numbers of send queue slots and of credits that sends of the program must leave to the
    /// lists.
    pub(super) reserved: (usize, usize),
}

impl Lists {
    /// Returns true if the connection has a list that has not ended.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns the number of send queue slots that sends of the program must leave free for the
    /// lists.
    #[inline]
    pub(super) const fn reserved_places(&self) -> usize {
        self.reserved.0
    }

    /// Returns the number of credits that messages of the program must leave free for the lists.
    #[inline]
    pub(super) const fn reserved_credits(&self) -> usize {
        self.reserved.1
    }

    /// Reserves the send queue slots and the credits that the lists lack. Called when a send of the
    /// program was refused, because such sends would otherwise use all slots and credits that
    /// become free.
    pub(super) const fn reserve(&mut self) {
        self.reserved = self.missing;
    }

    /// Returns the earliest deadline of a list. `None` if no list has one.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.waiting.iter().filter_map(|list| list.order.deadline).min()
    }

    /// Removes and returns the list at index `at`, because it has ended or its connection ends. `None` if there is no such list. If no
    /// other list needs the reserved slots and credits, they are released.
    pub(super) fn take_over(&mut self, at: usize) -> Option<List> {
        let list = self.waiting.remove(at)?;
        let waits =
            |list: &List| list.unposted() > 0 || list.confirmation == PartState::Waits || list.wants_notification();
        if !self.waiting.iter().any(|list| list.is_going() && waits(list)) {
            (self.missing, self.reserved) = Default::default();
        }
        Some(list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::region::RemoteRegion;

    fn list(reads: bool, lens: &[u64]) -> List {
        let piece = |&len| Piece::new(0, RemoteRegion { address: 0, len, key: 0 });
        let pieces = lens.iter().map(piece).collect();
        let (leases, deadline, notification, confirmation) = (Leases::default(), None, None, None);
        let direction = if reads { ListDirection::Read } else { ListDirection::Write };
        let order = Order { pieces, leases, direction, deadline, notification, confirmation };
        let (confirmation, notification) = (PartState::Ended, PartState::Ended);
        let id = TransferId::new(0);
        List { id, order, posted: 0, ended: 0, succeeded: 0, confirmation, notification, stop: None, failure: None }
    }

    fn failed(status: WcStatus) -> Outcome {
        Outcome::Failed(status.into())
    }

    #[test]
    fn a_batch_is_whole_or_the_rest_or_what_there_is_room_for() {
        let mut of = list(true, &[100; 20]);
        assert_eq!(of.batch(8, 100, (0, 0)).0, 8);
        assert_eq!(of.batch(8, 100, (8, 800)).0, 8);
        assert_eq!(of.batch(8, 100, (16, 1600)).0, 0, "two thirds of the queue have pieces");
        assert_eq!(of.batch(8, 7, (8, 800)).0, 0, "a whole batch will fit when those pieces have ended");
        assert_eq!(of.batch(8, 7, (0, 0)).0, 7, "no piece will end");
        assert_eq!(of.batch(8, 0, (0, 0)).0, 0);
        of.posted = 15;
        assert_eq!(of.batch(8, 100, (8, 800)).0, 5);
        let long = list(true, &[100 << 10; 20]);
        assert_eq!(long.batch(8, 100, (0, 0)).0, 3, "bytes are a limit, too");
        assert_eq!(long.batch(8, 100, (3, MOST)).0, 0);
        assert_eq!(list(true, &[u64::from(u32::MAX)]).batch(8, 1, (0, 0)).0, 1, "one always fits");
    }

    #[test]
    fn what_is_said_is_what_is_known() {
        for (reads, proves) in [(true, true), (false, false)] {
            let mut of = list(reads, &[1; 4]);
            of.posted = 3;
            of.end_pieces(1, Outcome::Sent);
            assert!(of.is_posted() && !of.is_over());
            of.end_pieces(1, failed(WcStatus::RemoteAccessError));
            // Successful pieces after a failed one are not counted.
            of.end_pieces(1, Outcome::Sent);
            assert!(of.is_over() && !of.is_done(), "no more is posted");
            let failure = WcStatus::RemoteAccessError.into();
            assert_eq!(of.result(), (TransferOutcome::Failed(failure), usize::from(proves)));
        }
    }

    #[test]
    fn an_answer_behind_a_write_shows_that_it_is_there() {
        let mut of = list(false, &[1; 2]);
        (of.posted, of.confirmation, of.notification) = (2, PartState::Posted, PartState::Waits);
        assert!(of.wants_notification(), "it may go right behind the pieces");
        of.notification = PartState::Posted;
        assert_eq!(of.end_pieces(2, Outcome::Sent), 2);
        assert_eq!(of.result().1, 0);
        of.end_part(ListPart::Confirmation { list: 0 }, Outcome::Sent);
        assert_eq!((of.is_over(), of.result().1), (false, 2), "the message is in flight");
        of.end_part(ListPart::Notification { list: 0 }, Outcome::Sent);
        assert_eq!((of.is_over(), of.result()), (true, (TransferOutcome::Done, 2)));
    }

    #[test]
    fn a_message_behind_a_read_waits_for_the_bytes() {
        let mut of = list(true, &[1; 2]);
        (of.posted, of.notification) = (2, PartState::Waits);
        of.end_pieces(1, Outcome::Sent);
        assert!(!of.wants_notification());
        of.end_pieces(1, Outcome::Sent);
        assert!(of.wants_notification() && !of.is_over());
        of.stop = Some(Stop::Cancelled);
        assert!(!of.wants_notification() && of.is_over());
        assert_eq!(of.result(), (TransferOutcome::Cancelled, 2));
    }

    #[test]
    fn a_list_that_is_stopped_ends_with_what_is_posted() {
        let mut of = list(true, &[1; 2]);
        assert!(of.is_going() && !of.is_over());
        (of.posted, of.stop) = (1, Some(Stop::Cancelled));
        assert!(!of.is_over());
        of.end_pieces(1, Outcome::Sent);
        assert_eq!((of.is_over(), of.result()), (true, (TransferOutcome::Cancelled, 1)));
        // The list has succeeded as a whole, though its deadline passed before its last piece ended.
        let mut of = list(true, &[1]);
        (of.posted, of.stop) = (1, Some(Stop::Deadline));
        of.end_pieces(1, Outcome::Sent);
        assert_eq!(of.result(), (TransferOutcome::Done, 1));
    }
}
