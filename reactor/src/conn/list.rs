//! Lists of pieces on their way: what of each is posted, what has ended, and what is known of it. A list knows no queue: [`batch`](super::batch)
//! has its way through one.
//!
//! Pieces end in order, so what is known of a list is three counts: the pieces that are there, those that are posted and of unknown
//! fate, and those that were never posted.

use std::collections::VecDeque;
use std::time::Instant;

use rdma_transport::wc::{Failure, WcStatus};

use crate::error::Outcome;
use crate::id::TransferId;
use crate::memory::list::{Leases, TransferNotification, Piece, TransferOutcome};
use crate::memory::region::Region;

/// Most bytes of a batch that has more than one piece. It is what one connection may post before others have their turn.
const BATCH: usize = 256 << 10;

/// Bytes of lists that are posted on a connection, past which nothing is added.
const MOST: usize = 4 << 20;

/// Longest Read that asks whether the bytes of a list are there, bytes.
pub(crate) const QUESTION: usize = 8;

/// A work request of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// A piece. A number of pieces before it, in the same batch, have ended when it has.
    Piece { before: u16 },
    /// The Read behind the last piece.
    Question,
    /// The message behind the last piece.
    News,
}

/// Why nothing more of a list is posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    Cancelled,
    Deadline,
}

/// The way from something that is to be done once to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Waits,
    Posted,
    Ended,
}

/// The direction of a list, and what is known of a piece that has completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// The piece has arrived.
    Read,
    /// The transport has taken responsibility for the piece.
    Write,
    /// The piece is in the memory of the peer.
    PlacedWrite,
}

/// What a list is made of, checked.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) pieces: Vec<Piece>,
    pub(crate) leases: Leases,
    pub(crate) way: Way,
    pub(crate) deadline: Option<Instant>,
    pub(crate) news: Option<TransferNotification>,
    /// Memory for the Read behind the last piece, if the list is to have one.
    pub(crate) question: Option<Box<Region>>,
}

/// A list on its way.
#[derive(Debug)]
pub(super) struct List {
    pub(super) id: TransferId,
    pub(super) order: Order,
    /// Number of pieces that were put into the send queue, and of those that have ended.
    pub(super) posted: usize,
    pub(super) ended: usize,
    /// Number of pieces that have succeeded.
    pub(super) succeeded: usize,
    pub(super) question: Step,
    pub(super) news: Step,
    pub(super) stop: Option<Stop>,
    pub(super) failure: Option<Failure>,
}

impl List {
    /// Whether a work request of the list is in the send queue.
    pub(super) fn is_posted(&self) -> bool {
        self.posted > self.ended || self.question == Step::Posted || self.news == Step::Posted
    }

    /// Whether all is done.
    pub(super) fn is_done(&self) -> bool {
        let all = self.ended == self.order.pieces.len() && self.failure.is_none();
        all && self.question == Step::Ended && self.news == Step::Ended
    }

    /// Whether the time of the list is over.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.order.deadline.is_some_and(|deadline| deadline <= now)
            && !cfg!(planted = "a-transfer-outlives-its-deadline")
    }

    /// Whether something of the list may be put into the send queue, now or later.
    pub(super) const fn is_going(&self) -> bool {
        self.stop.is_none() && self.failure.is_none()
    }

    /// Whether nothing of the list can change any more.
    pub(super) fn is_over(&self) -> bool {
        !self.is_posted() && (!self.is_going() || self.is_done())
    }

    pub(super) fn unposted(&self) -> usize {
        self.order.pieces.len() - self.posted
    }

    /// Number of pieces for the next batch, and their bytes: a whole batch, or what is left, or what fits if none of the lists'
    /// pieces are posted.
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

    /// Whether the message is the next thing to be put into the send queue. Behind a read it waits for the bytes.
    pub(super) fn wants_news(&self) -> bool {
        let before = if self.order.way == Way::Read { self.ended } else { self.posted };
        self.is_going() && self.news == Step::Waits && before == self.order.pieces.len() && self.question != Step::Waits
    }

    /// Takes note of a failure of a work request. Returns whether there has been none.
    pub(super) fn succeeds(&mut self, outcome: Outcome) -> bool {
        if let Outcome::Failed(failure) = outcome {
            self.failure.get_or_insert(failure);
        }
        self.failure.is_none()
    }

    /// Takes note of the end of pieces. Returns their length, bytes.
    pub(super) fn end_pieces(&mut self, count: usize, outcome: Outcome) -> usize {
        let succeeded = if self.succeeds(outcome) { count } else { 0 };
        let bytes = self.order.pieces[self.ended..self.ended + count].iter().map(Piece::len).sum();
        self.ended += count;
        self.succeeded += succeeded;
        bytes
    }

    /// Takes note of the end of what is behind the pieces.
    pub(super) fn end_part(&mut self, part: Part, outcome: Outcome) {
        let succeeds = self.succeeds(outcome);
        if part == Part::Question {
            self.question = Step::Ended;
            if succeeds {
                self.order.way = Way::PlacedWrite;
            }
        } else {
            self.news = Step::Ended;
        }
    }

    /// What the program is to hear of the list.
    pub(super) fn result(&self) -> (TransferOutcome, usize) {
        let outcome = match (self.stop, self.failure) {
            _ if self.is_done() => TransferOutcome::Done,
            (Some(Stop::Cancelled), None) => TransferOutcome::Cancelled,
            (Some(Stop::Deadline), _) => TransferOutcome::Deadline,
            (_, Some(failure)) => TransferOutcome::Failed(failure),
            (None, None) => TransferOutcome::Failed(WcStatus::Flushed.into()),
        };
        let claims = self.order.way != Way::Write || cfg!(planted = "a-write-is-there-when-tcp-has-it");
        (outcome, if claims { self.succeeded } else { 0 })
    }
}

/// The lists of a connection, oldest first, and what they have in the send queue.
#[derive(Debug, Default)]
pub(crate) struct Lists {
    pub(super) waiting: VecDeque<List>,
    /// Number of the next list.
    pub(super) next: u64,
    /// Pieces in the send queue, and their bytes.
    pub(super) pieces: usize,
    pub(super) bytes: usize,
    /// Places and credits that the lists have not found.
    pub(super) missing: (usize, usize),
    /// Places and credits that sends of the program leave to the lists.
    pub(super) reserved: (usize, usize),
}

impl Lists {
    /// Whether there is a list.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Number of places that sends of the program leave to the lists.
    #[inline]
    pub(super) const fn reserved_places(&self) -> usize {
        self.reserved.0
    }

    /// Number of credits that messages of the program leave to the lists.
    #[inline]
    pub(super) const fn reserved_credits(&self) -> usize {
        self.reserved.1
    }

    /// A send of the program was refused: what comes free next is for the lists, as far as they wait for it.
    pub(super) const fn reserve(&mut self) {
        self.reserved = self.missing;
    }

    /// The earliest deadline.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.waiting.iter().filter_map(|list| list.order.deadline).min()
    }

    /// Takes a list out that nothing is left to do for, and gives up what was reserved if no other wants it.
    pub(super) fn take_over(&mut self, at: usize) -> Option<List> {
        let list = self.waiting.remove(at)?;
        if !self.waiting.iter().any(|list| list.is_going() && (list.unposted() > 0 || list.wants_news())) {
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
        let (leases, deadline, news, question) = (Leases::default(), None, None, None);
        let way = if reads { Way::Read } else { Way::Write };
        let order = Order { pieces, leases, way, deadline, news, question };
        let (question, news) = (Step::Ended, Step::Ended);
        let id = TransferId::new(0);
        List { id, order, posted: 0, ended: 0, succeeded: 0, question, news, stop: None, failure: None }
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
            // What comes behind a failure counts for nothing.
            of.end_pieces(1, Outcome::Sent);
            assert!(of.is_over() && !of.is_done(), "no more is posted");
            let failure = WcStatus::RemoteAccessError.into();
            assert_eq!(of.result(), (TransferOutcome::Failed(failure), usize::from(proves)));
        }
    }

    #[test]
    fn an_answer_behind_a_write_shows_that_it_is_there() {
        let mut of = list(false, &[1; 2]);
        (of.posted, of.question, of.news) = (2, Step::Posted, Step::Waits);
        assert!(of.wants_news(), "it may go right behind the pieces");
        of.news = Step::Posted;
        assert_eq!(of.end_pieces(2, Outcome::Sent), 2);
        assert_eq!(of.result().1, 0);
        of.end_part(Part::Question, Outcome::Sent);
        assert_eq!((of.is_over(), of.result().1), (false, 2), "the message is on its way");
        of.end_part(Part::News, Outcome::Sent);
        assert_eq!((of.is_over(), of.result()), (true, (TransferOutcome::Done, 2)));
    }

    #[test]
    fn a_message_behind_a_read_waits_for_the_bytes() {
        let mut of = list(true, &[1; 2]);
        (of.posted, of.news) = (2, Step::Waits);
        of.end_pieces(1, Outcome::Sent);
        assert!(!of.wants_news());
        of.end_pieces(1, Outcome::Sent);
        assert!(of.wants_news() && !of.is_over());
        of.stop = Some(Stop::Cancelled);
        assert!(!of.wants_news() && of.is_over());
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
        // All was done before the stop could matter.
        let mut of = list(true, &[1]);
        (of.posted, of.stop) = (1, Some(Stop::Deadline));
        of.end_pieces(1, Outcome::Sent);
        assert_eq!(of.result(), (TransferOutcome::Done, 1));
    }
}
