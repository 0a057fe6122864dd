//! The outstanding RDMA Reads and atomics of this side, oldest first. The peer responds in that order.

use std::collections::VecDeque;

use super::wire::{Tagged, TerminateCause};
use crate::mem::Sge;

/// An outstanding request, and the expected response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outstanding {
    pub(crate) kind: RequestKind,
    /// The STag that the segments of the response must name, and the Tagged Offset of its first octet.
    pub(crate) stag: u32,
    pub(crate) offset: u64,
    /// The entry of the work request that the response goes to. Empty for a ready-to-receive message.
    pub(crate) sink: Sge,
    pub(crate) len: u32,
    /// Octets of the response that have arrived.
    pub(crate) done: u32,
    /// Number of the work request, counted from the first of the send queue; `None` for a ready-to-receive message.
    pub(crate) sequence: Option<u64>,
    /// MSN of the request, by which a Terminate names it.
    pub(crate) msn: u32,
}

impl Outstanding {
    /// Returns true if the memory of both overlaps.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let [one, two] =
            [self, other].map(|read| (read.sink.address().addr(), read.sink.address().addr() + read.len as usize));
        one.0 < two.1 && two.0 < one.1
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestKind {
    Read,
    /// An atomic operation, with the identifier that its response carries.
    Atomic(u32),
}

#[derive(Debug)]
pub(crate) struct Requester {
    queue: VecDeque<Outstanding>,
    /// The largest number of outstanding requests (ORD).
    depth: usize,
    /// MSN of the next request.
    pub(crate) msn: u32,
    /// MSN of the next Atomic Response.
    pub(crate) atomic_msn: u32,
    /// Work requests with numbers below this one have their responses.
    answered: u64,
}

impl Requester {
    pub(crate) fn new() -> Self {
        Self { queue: VecDeque::new(), depth: 0, msn: 1, atomic_msn: 1, answered: 0 }
    }

    pub(crate) fn establish(&mut self, ord: u16) {
        self.depth = usize::from(ord);
    }

    /// Returns the largest number of outstanding requests.
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

    /// Returns the number below which all work requests have their responses.
    #[inline]
    pub(crate) fn answered(&self) -> u64 {
        self.answered
    }

    /// Adds a request that is being framed. Returns its MSN.
    pub(crate) fn push(&mut self, mut request: Outstanding) -> u32 {
        request.msn = self.msn;
        self.msn = self.msn.wrapping_add(1);
        self.queue.push_back(request);
        request.msn
    }

    /// Returns the request whose response is next.
    #[inline]
    pub(crate) fn front(&self) -> Option<&Outstanding> {
        self.queue.front()
    }

    /// Returns the Reads whose responses are next, up to the first atomic.
    pub(crate) fn reads(&self) -> impl Iterator<Item = &Outstanding> {
        self.queue.iter().take_while(|request| request.kind == RequestKind::Read)
    }

    /// Checks a segment of a Read Response with `len` octets of payload. It must be exactly the next one.
    pub(crate) fn judge_response(&self, header: &Tagged, len: usize) -> Result<(), TerminateCause> {
        let read = self.front().filter(|front| front.kind == RequestKind::Read);
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
        // Only the segment that completes the response is the last one, and only an empty response has an empty segment.
        if header.last != (len == left) || (len == 0 && read.len > 0) {
            return Err(TerminateCause::RDMAP_STREAM_CATASTROPHIC);
        }
        Ok(())
    }

    /// Records `n` octets of the response that are in place.
    #[inline]
    pub(crate) fn advance(&mut self, n: usize) {
        if let Some(front) = self.queue.front_mut() {
            front.done = front.done.saturating_add(n as u32).min(front.len);
        }
    }

    /// Ends the oldest request, after its whole response has arrived undamaged.
    pub(crate) fn complete(&mut self) {
        if let Some(sequence) = self.queue.pop_front().and_then(|front| front.sequence) {
            self.answered = sequence + 1;
        }
    }

    /// Returns the number of the work request whose request has this MSN.
    pub(crate) fn find(&self, msn: u32) -> Option<u64> {
        self.queue.iter().find(|request| request.msn == msn)?.sequence
    }
}
