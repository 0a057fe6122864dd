//! The Reads and atomic operations of the local side that are outstanding, oldest first. The peer
//! responds in this order.

use std::collections::VecDeque;

use rdma_transport::mem::Sge;

/// An outstanding request, and the progress of its response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutstandingRequest {
    /// The scatter-gather entry to which the response is written. Empty for a ready-to-receive
    /// message of iWARP.
    pub(crate) sink: Sge,
    /// The STag and the Tagged Offset of `sink`, which the segments of the response carry on iWARP.
    pub(crate) stag: u32,
    pub(crate) offset: u64,
    /// The length of the response in bytes, and the number of these bytes that have arrived.
    pub(crate) len: u32,
    pub(crate) done: u32,
    /// True for an atomic operation, false for a Read.
    pub(crate) atomic: bool,
    /// The sequence number of the work request in the send queue. `None` for a ready-to-receive
    /// message, which has no work request.
    pub(crate) sequence: Option<u64>,
}

impl OutstandingRequest {
    pub(crate) fn new(sink: Sge, len: u32, atomic: bool, sequence: Option<u64>) -> Self {
        let (stag, offset) = (sink.local_key().0, sink.address() as u64);
        Self { sink, stag, offset, len, done: 0, atomic, sequence }
    }

    /// Returns true if the two responses are written to overlapping memory.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let [one, two] =
            [self, other].map(|read| (read.sink.address().addr(), read.sink.address().addr() + read.len as usize));
        one.0 < two.1 && two.0 < one.1
    }
}

/// The requests of the local side whose responses have not completely arrived.
#[derive(Debug)]
pub(crate) struct OutstandingRequests {
    queue: VecDeque<OutstandingRequest>, // bound: reads
    /// The largest number of requests that may be outstanding (ORD).
    depth: usize,
    /// The number of the next request, modulo 2^32: on iWARP, its MSN. The first one has number 1.
    next: u32,
    /// One more than the sequence number of the last work request whose response has arrived. All
    /// Reads and atomic operations with smaller sequence numbers have their responses, too.
    answered: u64,
}

impl OutstandingRequests {
    /// Creates an empty list. At most `depth` requests may be outstanding.
    pub(crate) const fn new(depth: u16) -> Self {
        Self { queue: VecDeque::new(), depth: depth as usize, next: 1, answered: 0 }
    }

    /// Returns the largest number of requests that may be outstanding.
    #[inline]
    pub(crate) const fn depth(&self) -> usize {
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

    /// Returns one more than the sequence number of the last work request whose response has
    /// arrived.
    #[inline]
    pub(crate) const fn answered(&self) -> u64 {
        self.answered
    }

    /// Adds a request that the caller is sending. Returns the number of the request.
    pub(crate) fn push(&mut self, request: OutstandingRequest) -> u32 {
        self.queue.push_back(request);
        let number = self.next;
        self.next = number.wrapping_add(1);
        number
    }

    /// Returns the oldest request. The next response from the peer is for this request. Returns
    /// `None` if no request is outstanding.
    #[inline]
    pub(crate) fn front(&self) -> Option<&OutstandingRequest> {
        self.queue.front()
    }

    /// Returns the number of the oldest request, or of the next one if no request is outstanding.
    pub(crate) fn front_number(&self) -> u32 {
        self.next.wrapping_sub(self.queue.len() as u32)
    }

    /// Returns the sequence number of the work request to which the oldest request belongs. Returns
    /// `None` if no request is outstanding, or if the oldest request is a ready-to-receive message.
    pub(crate) fn oldest(&self) -> Option<u64> {
        self.front()?.sequence
    }

    /// Finds the outstanding request with the number `number`, and returns the sequence number of
    /// its work request. Returns `None` if no outstanding request has this number, or if the
    /// request is a ready-to-receive message.
    pub(crate) fn find(&self, number: u32) -> Option<u64> {
        self.queue.get(number.wrapping_sub(self.front_number()) as usize)?.sequence
    }

    /// Returns the Reads at the front of the queue, up to the first atomic operation.
    pub(crate) fn reads(&self) -> impl Iterator<Item = &OutstandingRequest> {
        self.queue.iter().take_while(|request| !request.atomic)
    }

    /// Returns true if an atomic operation is outstanding.
    pub(crate) fn has_atomic(&self) -> bool {
        self.queue.iter().any(|request| request.atomic)
    }

    /// Records that `n` more bytes of the oldest request's response have arrived.
    #[inline]
    pub(crate) fn advance(&mut self, n: usize) {
        if let Some(front) = self.queue.front_mut() {
            front.done = front.done.saturating_add(n as u32).min(front.len);
        }
    }

    /// Removes the oldest request, after its whole response has arrived and was found correct.
    pub(crate) fn complete(&mut self) {
        if let Some(sequence) = self.queue.pop_front().and_then(|front| front.sequence) {
            self.answered = sequence + 1;
        }
    }

    /// Removes all requests: the connection has ended.
    pub(crate) fn clear(&mut self) {
        self.queue.clear();
    }
}
