//! The RDMA Reads and atomic operations of the local side that are outstanding, oldest first. The peer responds in this order.

use std::collections::VecDeque;

use super::wire::{Tagged, TerminateCause};
use crate::mem::Sge;

/// An outstanding request, and the response that is expected.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outstanding {
    pub(crate) kind: RequestKind,
    /// The STag in the segments of the response. `offset` is the Tagged Offset of the first octet of the response.
    pub(crate) stag: u32,
    pub(crate) offset: u64,
    /// The scatter-gather entry to which the response is written. Empty for a ready-to-receive message.
    pub(crate) sink: Sge,
    pub(crate) len: u32,
    /// The number of octets of the response that have arrived.
    pub(crate) done: u32,
    /// The sequence number of the work request in the send queue. `None` for a ready-to-receive message, which has no work request.
    pub(crate) sequence: Option<u64>,
    /// The MSN of the request. A Terminate refers to the request by its MSN.
    pub(crate) msn: u32,
}

impl Outstanding {
    /// Returns true if the two responses are written to overlapping memory.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let [one, two] =
            [self, other].map(|read| (read.sink.address().addr(), read.sink.address().addr() + read.len as usize));
        one.0 < two.1 && two.0 < one.1
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestKind {
    Read,
    /// An atomic operation, with the identifier that its response repeats.
    Atomic(u32),
}

#[derive(Debug)]
pub(crate) struct Requester {
    queue: VecDeque<Outstanding>, // bound: reads
    /// The largest number of requests that may be outstanding (ORD).
    depth: usize,
    /// The MSN of the next request.
    pub(crate) msn: u32,
    /// The MSN of the next Atomic Response.
    pub(crate) atomic_msn: u32,
    /// One more than the sequence number of the last work request whose response has arrived. All Reads and atomic operations with smaller
    /// sequence numbers have their responses, too.
    answered: u64,
}

impl Requester {
    pub(crate) fn new() -> Self {
        Self { queue: VecDeque::new(), depth: 0, msn: 1, atomic_msn: 1, answered: 0 }
    }

    pub(crate) fn establish(&mut self, ord: u16) {
        self.depth = usize::from(ord);
    }

    /// Returns the largest number of requests that may be outstanding.
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

    /// Returns one more than the sequence number of the last work request whose response has arrived. All Reads and atomic operations with
    /// smaller sequence numbers have their responses, too.
    #[inline]
    pub(crate) fn answered(&self) -> u64 {
        self.answered
    }

    /// Adds a request that the caller is framing. Assigns the next MSN to the request, and returns this MSN.
    pub(crate) fn push(&mut self, mut request: Outstanding) -> u32 {
        request.msn = self.msn;
        self.msn = self.msn.wrapping_add(1);
        self.queue.push_back(request);
        request.msn
    }

    /// Returns the oldest request. The next response from the peer is for this request. Returns `None` if no request is outstanding.
    #[inline]
    pub(crate) fn front(&self) -> Option<&Outstanding> {
        self.queue.front()
    }

    /// Returns the Reads at the front of the queue, up to the first atomic operation.
    pub(crate) fn reads(&self) -> impl Iterator<Item = &Outstanding> {
        self.queue.iter().take_while(|request| request.kind == RequestKind::Read)
    }

    /// Checks that a Read Response segment with `len` octets of payload is the segment that is expected next.
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
        // The L bit must be set on exactly the segment that completes the response. An empty segment is only valid for an empty response.
        if header.last != (len == left) || (len == 0 && read.len > 0) {
            return Err(TerminateCause::RDMAP_STREAM_CATASTROPHIC);
        }
        Ok(())
    }

    /// Records that `n` more octets of the oldest request's response have arrived.
    #[inline]
    pub(crate) fn advance(&mut self, n: usize) {
        if let Some(front) = self.queue.front_mut() {
            front.done = front.done.saturating_add(n as u32).min(front.len);
        }
    }

    /// Removes the oldest request, after its whole response has arrived and every CRC was correct.
    pub(crate) fn complete(&mut self) {
        if let Some(sequence) = self.queue.pop_front().and_then(|front| front.sequence) {
            self.answered = sequence + 1;
        }
    }

    /// Returns the sequence number of the work request for which the request with this MSN was sent. Returns `None` if no such request is
    /// outstanding.
    pub(crate) fn find(&self, msn: u32) -> Option<u64> {
        self.queue.iter().find(|request| request.msn == msn)?.sequence
    }
}
