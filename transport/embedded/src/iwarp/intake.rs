//! The plan of one receive call: the destinations of the octets that it receives.
//!
//! Received octets are normally put into a staging buffer. After the header of a segment is parsed, the octets of its payload are copied to
//! their destination. The destinations of two kinds of large payloads are known before the call: the rest of the current payload, and the
//! payloads of the segments that are expected next. For each such payload, the receive call has a slice of the destination's memory. The
//! headers and trailers between these payloads are staged. If the forecast was wrong, the octets in the wrong destination are copied out
//! and processed in order.
//!
//! An expected payload is only received into memory that the program may not read before the work request completes: a posted receive, or
//! the sink of a local Read. So the program never sees octets of a wrong forecast.

use std::io;

use super::placement::PayloadBuffer;
use super::wire::ddp::UNTAGGED_FPDU_HEADER_LEN;
use super::wire::mpa::CRC_LEN;
use crate::soft::keys::KeyTable;
use rdma_transport::mem::{MAX_SLICES, RecvSlice};
use rdma_transport::slab::Key;

/// The largest number of octets that one receive call puts into the staging buffer behind the last destination.
const STAGED: usize = 256 * 1024;
/// The room in the staging buffer for the octets between two payloads: pad, CRC and header.
const GAP: usize = 32;
const _: () = assert!(3 + CRC_LEN + UNTAGGED_FPDU_HEADER_LEN <= GAP);
/// The largest number of destinations of one receive call. A destination needs two slices: one for its payload, and one for the gap in
/// front of it. One more slice receives the octets behind the last destination.
const BUFFERS: usize = (MAX_SLICES - 1) / 2;

/// A destination, and the gap in front of it: the number of octets of the stream between the previous destination and this one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanStep {
    pub(crate) gap: usize,
    pub(crate) buffer: PayloadBuffer,
}

/// The plan of a receive call and its staging buffer. See the [module](self).
#[derive(Debug)]
pub(crate) struct Intake {
    steps: Vec<PlanStep>, // bound: receive-call
    /// The largest number of octets to stage behind the last destination.
    tail: usize,
    /// The number of octets for which destinations can still be added to the plan. The rest of the current payload does not count.
    room: usize,
    /// The staging buffer: a fixed part for each gap, then the part behind the last destination.
    staging: Box<[u8]>,
    /// The octets that [`Intake::spill`] copies out of the destinations of a wrong forecast.
    spilled: Vec<u8>, // bound: receive-call
}

impl Intake {
    pub(crate) fn new() -> Self {
        Self {
            steps: Vec::with_capacity(BUFFERS),
            tail: 0,
            room: 0,
            staging: vec![0; BUFFERS * GAP + STAGED].into_boxed_slice(),
            spilled: Vec::new(),
        }
    }

    /// Returns memory into which a caller can receive octets that are discarded.
    pub(crate) fn scratch(&mut self) -> &mut [u8] {
        &mut self.staging
    }

    /// Begins the plan of a call that receives at most `room` octets. The rest of the current payload does not count. Until a destination
    /// is added, all octets of the call are staged.
    #[inline]
    pub(crate) fn begin(&mut self, room: usize) {
        self.steps.clear();
        self.room = room;
        self.tail = room.min(STAGED);
    }

    /// Adds the destination of the rest of the current payload. This destination must be the first one of the plan.
    pub(crate) fn add_remaining(&mut self, buffer: PayloadBuffer) {
        self.steps.push(PlanStep { gap: 0, buffer });
    }

    /// Adds the destination of an expected payload. Between this destination and the previous one are `gap` octets of the stream. Returns
    /// false, and adds nothing, if the plan has too many destinations, the gap is too long, or the call would receive more octets than
    /// [`Intake::begin`] allowed.
    pub(crate) fn expect(&mut self, gap: usize, buffer: PayloadBuffer) -> bool {
        let fits = self.steps.len() < BUFFERS && gap <= GAP && gap + buffer.len() <= self.room;
        if fits {
            self.room -= gap + buffer.len();
            self.steps.push(PlanStep { gap, buffer });
        }
        fits
    }

    /// Ends the plan: at most `tail` octets are staged behind the last destination.
    pub(crate) fn end(&mut self, tail: usize) {
        self.tail = self.tail.min(tail);
    }

    /// Returns the destination with this index, and the length of the gap in front of it. Returns `None` if the plan has no such
    /// destination.
    #[inline]
    pub(crate) fn step(&self, index: usize) -> Option<PlanStep> {
        self.steps.get(index).copied()
    }

    /// Returns the first `len` staged octets of the gap in front of the destination with this index.
    pub(crate) fn gap(&self, index: usize, len: usize) -> &[u8] {
        self.staging.get(index * GAP..index * GAP + len).unwrap_or_default()
    }

    /// Returns the first `len` staged octets behind the last destination.
    #[inline]
    pub(crate) fn tail(&self, len: usize) -> &[u8] {
        self.staging.get(BUFFERS * GAP..BUFFERS * GAP + len).unwrap_or_default()
    }

    /// Receives according to the plan. Returns the number of received octets, and true if the socket was drained: the call received less
    /// than the plan has room for. `held` is the buffer of [`PayloadBuffer::Held`].
    #[inline]
    pub(crate) fn receive(
        &mut self,
        held: &mut [u8],
        scope: Key,
        keys: &KeyTable,
        recv: &mut impl FnMut(&mut [RecvSlice<'_>]) -> io::Result<usize>,
    ) -> io::Result<(usize, bool)> {
        if self.steps.is_empty() {
            let room = self.tail;
            let n = recv(&mut [RecvSlice::new(&mut self.staging[BUFFERS * GAP..][..room])])?;
            return Ok((n.min(room), n < room));
        }
        self.scatter(held, scope, keys, recv)
    }

    #[inline(never)]
    fn scatter(
        &mut self,
        held: &mut [u8],
        scope: Key,
        keys: &KeyTable,
        recv: &mut impl FnMut(&mut [RecvSlice<'_>]) -> io::Result<usize>,
    ) -> io::Result<(usize, bool)> {
        let Self { steps, tail, staging, .. } = self;
        let (gaps, rest) = staging.split_at_mut(BUFFERS * GAP);
        let mut held = Some(held);
        let mut slices = [const { RecvSlice::none() }; MAX_SLICES];
        let (mut count, mut used, mut capacity) = (0, 0, 0);
        for (step, gap) in steps.iter().zip(gaps.chunks_exact_mut(GAP)) {
            let Some(buffer) = step.buffer.receive_slice(&mut held, scope, keys) else { break };
            if step.gap > 0 {
                slices[count] = RecvSlice::new(&mut gap[..step.gap]);
                count += 1;
            }
            capacity += step.gap + buffer.len();
            slices[count] = buffer;
            count += 1;
            used += 1;
        }
        if used < steps.len() {
            // The region of a destination was revoked after the plan was made. The octets for this destination and for all later
            // destinations are staged.
            *tail = STAGED;
        }
        slices[count] = RecvSlice::new(&mut rest[..*tail]);
        capacity += *tail;
        let n = recv(&mut slices[..=count])?;
        steps.truncate(used);
        Ok((n.min(capacity), n < capacity))
    }

    /// Copies the last `left` octets of a receive call out of the wrong destinations, the gaps and the staging buffer. The first of these
    /// octets is `from` octets behind the start of the destination with the index `index`. Returns `None` if the region of a destination
    /// was revoked after the receive call.
    pub(crate) fn spill(&mut self, index: usize, from: usize, mut left: usize, keys: &KeyTable) -> Option<Vec<u8>> {
        let mut out = std::mem::take(&mut self.spilled);
        out.clear();
        for (nth, step) in self.steps.iter().enumerate().skip(index) {
            let (gap, from) = if nth == index { (0, from) } else { (left.min(step.gap), 0) };
            out.extend_from_slice(self.gap(nth, gap));
            left -= gap;
            let here = left.min(step.buffer.len() - from);
            step.buffer.append_to(from, here, keys, &mut out)?;
            left -= here;
        }
        out.extend_from_slice(self.tail(left));
        Some(out)
    }

    /// Stores the buffer that [`Intake::spill`] has returned, to reuse its memory.
    pub(crate) fn keep(&mut self, spilled: Vec<u8>) {
        self.spilled = spilled;
    }

    /// Returns the number of staged octets among the first `n` octets of a call.
    #[cfg(test)]
    pub(crate) fn staged(&self, n: usize) -> usize {
        let (mut left, mut staged) = (n, 0);
        for step in &self.steps {
            let gap = left.min(step.gap);
            staged += gap;
            left = (left - gap).saturating_sub(step.buffer.len());
        }
        staged + left
    }

    /// Returns the number of octets that the last [`Intake::spill`] has copied out.
    #[cfg(test)]
    pub(crate) fn spilled(&mut self) -> usize {
        std::mem::take(&mut self.spilled).len()
    }
}
