//! The destinations of one receive call in a stream.
//!
//! Received octets are staged and copied to their destination once it is known. For large payloads it is known in advance: the remaining
//! part of the current payload, and the payloads of the segments that are expected behind it. The receive call then has one slice for each
//! of them, and stages the headers and trailers in between. If the forecast was wrong, the octets in the wrong destination are copied out
//! and processed in order. Expected payloads are received only into memory that the program may not read before its work request completes:
//! posted receives, and the sinks of local Reads.

use std::io;

use super::placement::PayloadBuffer;
use super::wire::ddp::UNTAGGED_FPDU_HEADER_LEN;
use super::wire::mpa::CRC_LEN;
use crate::mem::{MAX_SLICES, RecvSlice};
use crate::slab::Key;
use crate::soft::keys::KeyTable;

/// The largest number of octets that one receive call stages.
const STAGED: usize = 256 * 1024;
/// Room for the octets between two payloads: pad, CRC and header.
const GAP: usize = 32;
const _: () = assert!(3 + CRC_LEN + UNTAGGED_FPDU_HEADER_LEN <= GAP);
/// The largest number of destinations of a call. Each has its own slice and one for the gap in front of it; one more slice is behind the
/// last.
const PLACES: usize = (MAX_SLICES - 1) / 2;

/// A destination, and the number of octets of the stream in front of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanStep {
    pub(crate) gap: usize,
    pub(crate) place: PayloadBuffer,
}

/// The plan and the buffers of receive calls; see the [module](self).
#[derive(Debug)]
pub(crate) struct Intake {
    steps: Vec<PlanStep>,
    /// Octets to be staged behind the last destination.
    tail: usize,
    /// Octets to be received besides the remaining part of the payload in progress.
    room: usize,
    /// The staged octets: a part for each gap, and the tail behind them.
    staging: Box<[u8]>,
    /// Octets that were received into the wrong destination.
    spilled: Vec<u8>,
}

impl Intake {
    pub(crate) fn new() -> Self {
        Self {
            steps: Vec::with_capacity(PLACES),
            tail: 0,
            room: 0,
            staging: vec![0; PLACES * GAP + STAGED].into_boxed_slice(),
            spilled: Vec::new(),
        }
    }

    /// Returns a buffer for octets to discard.
    pub(crate) fn scratch(&mut self) -> &mut [u8] {
        &mut self.staging
    }

    /// Begins the plan of a call that receives at most `room` octets besides the remaining part of a payload. All of them are staged.
    #[inline]
    pub(crate) fn begin(&mut self, room: usize) {
        self.steps.clear();
        self.room = room;
        self.tail = room.min(STAGED);
    }

    /// Adds the remaining part of the payload in progress.
    pub(crate) fn add_remaining(&mut self, place: PayloadBuffer) {
        self.steps.push(PlanStep { gap: 0, place });
    }

    /// Adds an expected destination behind `gap` octets. Returns false if the call is long enough without it.
    pub(crate) fn expect(&mut self, gap: usize, place: PayloadBuffer) -> bool {
        let fits = self.steps.len() < PLACES && gap <= GAP && gap + place.len() <= self.room;
        if fits {
            self.room -= gap + place.len();
            self.steps.push(PlanStep { gap, place });
        }
        fits
    }

    /// Ends the plan: at most `tail` octets are staged behind the last place.
    pub(crate) fn end(&mut self, tail: usize) {
        self.tail = self.tail.min(tail);
    }

    /// Returns a destination, with the number of octets in front of it.
    #[inline]
    pub(crate) fn step(&self, index: usize) -> Option<PlanStep> {
        self.steps.get(index).copied()
    }

    /// Returns the first `len` octets in front of a destination.
    pub(crate) fn gap(&self, index: usize, len: usize) -> &[u8] {
        self.staging.get(index * GAP..index * GAP + len).unwrap_or_default()
    }

    /// Returns the first `len` octets behind the last destination.
    #[inline]
    pub(crate) fn tail(&self, len: usize) -> &[u8] {
        self.staging.get(PLACES * GAP..PLACES * GAP + len).unwrap_or_default()
    }

    /// Makes the call. Returns the number of received octets, and true if the socket was drained.
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
            let n = recv(&mut [RecvSlice::new(&mut self.staging[PLACES * GAP..][..room])])?;
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
        let (gaps, rest) = staging.split_at_mut(PLACES * GAP);
        let mut held = Some(held);
        let mut slices = [const { RecvSlice::none() }; MAX_SLICES];
        let (mut count, mut used, mut capacity) = (0, 0, 0);
        for (step, gap) in steps.iter().zip(gaps.chunks_exact_mut(GAP)) {
            let Some(place) = step.place.receive_slice(&mut held, scope, keys) else { break };
            if step.gap > 0 {
                slices[count] = RecvSlice::new(&mut gap[..step.gap]);
                count += 1;
            }
            capacity += step.gap + place.len();
            slices[count] = place;
            count += 1;
            used += 1;
        }
        if used < steps.len() {
            // The region was revoked: the octets are staged.
            *tail = STAGED;
        }
        slices[count] = RecvSlice::new(&mut rest[..*tail]);
        capacity += *tail;
        let n = recv(&mut slices[..=count])?;
        steps.truncate(used);
        Ok((n.min(capacity), n < capacity))
    }

    /// Copies out the `left` octets that a call has put behind the first `from` octets of a destination. Returns `None` if its region was
    /// revoked.
    pub(crate) fn spill(&mut self, index: usize, from: usize, mut left: usize, keys: &KeyTable) -> Option<Vec<u8>> {
        let mut out = std::mem::take(&mut self.spilled);
        out.clear();
        for (nth, step) in self.steps.iter().enumerate().skip(index) {
            let (gap, from) = if nth == index { (0, from) } else { (left.min(step.gap), 0) };
            out.extend_from_slice(self.gap(nth, gap));
            left -= gap;
            let here = left.min(step.place.len() - from);
            step.place.append_to(from, here, keys, &mut out)?;
            left -= here;
        }
        out.extend_from_slice(self.tail(left));
        Some(out)
    }

    /// Returns the buffer of [`Intake::spill`] for reuse.
    pub(crate) fn keep(&mut self, spilled: Vec<u8>) {
        self.spilled = spilled;
    }

    /// Returns how many of the first `n` octets of a call were staged.
    #[cfg(test)]
    pub(crate) fn staged(&self, n: usize) -> usize {
        let (mut left, mut staged) = (n, 0);
        for step in &self.steps {
            let gap = left.min(step.gap);
            staged += gap;
            left = (left - gap).saturating_sub(step.place.len());
        }
        staged + left
    }

    /// Returns the number of octets in wrong destinations since the last call.
    #[cfg(test)]
    pub(crate) fn spilled(&mut self) -> usize {
        std::mem::take(&mut self.spilled).len()
    }
}
