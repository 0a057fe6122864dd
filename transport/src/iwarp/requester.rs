//! Our RDMA Reads and atomics that the peer has not answered yet, oldest first: it answers in that order.

use std::collections::VecDeque;

use super::wire::{Tagged, TerminateCause};
use crate::mem::Sge;

/// What an answer must look like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outstanding {
    pub(crate) kind: Kind,
    /// The STag that its segments must name, and the Tagged Offset of its first octet.
    pub(crate) stag: u32,
    pub(crate) offset: u64,
    /// The entry of the work request, which is where it goes; an empty one of an RTR.
    pub(crate) sink: Sge,
    pub(crate) len: u32,
    /// How much of it has come.
    pub(crate) done: u32,
    /// The work request, counted from the start of the send queue; `None` of an RTR.
    pub(crate) sequence: Option<u64>,
    /// MSN of the request, to find it in a Terminate.
    pub(crate) msn: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    /// The identifier that its response carries.
    Atomic(u32),
}

#[derive(Debug)]
pub(crate) struct Requester {
    queue: VecDeque<Outstanding>,
    /// How many may be outstanding (ORD).
    depth: usize,
    /// Of the next request.
    pub(crate) msn: u32,
    /// Of the next Atomic Response.
    pub(crate) atomic_msn: u32,
    /// Requests of work requests below this are answered.
    answered: u64,
}

impl Requester {
    pub(crate) fn new() -> Self {
        Self { queue: VecDeque::new(), depth: 0, msn: 1, atomic_msn: 1, answered: 0 }
    }

    pub(crate) fn establish(&mut self, ord: u16) {
        self.depth = usize::from(ord);
        self.queue.reserve(self.depth + 1);
    }

    /// How many requests may be outstanding.
    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.queue.is_empty()
    }

    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        self.queue.len() < self.depth
    }

    /// Work requests below this have their answer.
    #[inline]
    pub(crate) fn answered(&self) -> u64 {
        self.answered
    }

    /// Takes note of a request that is framed now; returns its MSN.
    pub(crate) fn push(&mut self, mut request: Outstanding) -> u32 {
        request.msn = self.msn;
        self.msn = self.msn.wrapping_add(1);
        self.queue.push_back(request);
        request.msn
    }

    /// The request that is answered next.
    #[inline]
    pub(crate) fn front(&self) -> Option<&Outstanding> {
        self.queue.front()
    }

    /// Judges a segment of a Read Response with `len` bytes of payload: it must be exactly the next one.
    pub(crate) fn judge_response(&self, header: &Tagged, len: usize) -> Result<(), TerminateCause> {
        let read = self.front().filter(|front| front.kind == Kind::Read);
        let Some(read) = read else { return Err(TerminateCause::DDP_LOCAL_CATASTROPHIC) };
        let left = (read.len - read.done) as usize;
        if len > 0 {
            if header.stag != read.stag {
                return Err(TerminateCause::DDP_TAGGED_INVALID_STAG);
            }
            if len > left || header.offset != read.offset.wrapping_add(read.done.into()) {
                return Err(TerminateCause::DDP_TAGGED_BOUNDS);
            }
        }
        // The last segment is the one that makes it whole, and no other; none is empty but of an empty answer.
        if header.last != (len == left) || (len == 0 && read.len > 0) {
            return Err(TerminateCause::RDMAP_STREAM_CATASTROPHIC);
        }
        Ok(())
    }

    /// Takes note of `n` bytes of the answer that are in place.
    #[inline]
    pub(crate) fn advance(&mut self, n: usize) {
        if let Some(front) = self.queue.front_mut() {
            front.done = front.done.saturating_add(n as u32).min(front.len);
        }
    }

    /// Ends the oldest request: its answer is whole and undamaged.
    pub(crate) fn complete(&mut self) {
        if let Some(sequence) = self.queue.pop_front().and_then(|front| front.sequence) {
            self.answered = sequence + 1;
        }
    }

    /// The work request whose request had this MSN.
    pub(crate) fn find(&self, msn: u32) -> Option<u64> {
        self.queue.iter().find(|request| request.msn == msn)?.sequence
    }
}
