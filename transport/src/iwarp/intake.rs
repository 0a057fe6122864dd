//! Where one receive call puts the next octets of a stream.
//!
//! What comes is staged, and copied to its place when it is known. Of large payloads the place is known before: the
//! rest of the current one, and those of the segments that are expected behind it. A receive call then has a piece for
//! each of them, and the headers and trailers between them are staged. If the stream goes on otherwise, what lies
//! in the wrong place is copied out and taken in order. Only memory that nobody looks at before its work request
//! completes is used for what is expected: posted receives, and memory that Reads of this side fill.

use std::io;

use super::placement::Place;
use super::wire::ddp::UNTAGGED_FPDU_HEADER_LEN;
use super::wire::mpa::CRC_LEN;
use crate::mem::{MAX_SLICES, RecvSlice};
use crate::slab::Key;
use crate::soft::keys::KeyTable;

/// Octets that are staged by one receive call.
const STAGED: usize = 256 * 1024;
/// Room for what is between two payloads: pad, CRC and header.
const GAP: usize = 32;
const _: () = assert!(3 + CRC_LEN + UNTAGGED_FPDU_HEADER_LEN <= GAP);
/// Most places of a call: each is a slice with one in front of it, and one is behind the last.
const PLACES: usize = (MAX_SLICES - 1) / 2;

/// A place, and the number of octets of the stream in front of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) gap: usize,
    pub(crate) place: Place,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Intake {
    steps: Vec<Step>,
    /// Octets to be staged behind the last place.
    tail: usize,
    /// Octets to be received besides the rest of a payload that has begun.
    room: usize,
    /// What is staged: a part for each gap, and the tail behind them.
    staging: Box<[u8]>,
    /// Octets that were not where they belong.
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

    /// A buffer for what nobody wants.
    pub(crate) fn scratch(&mut self) -> &mut [u8] {
        &mut self.staging
    }

    /// Begins a plan for a call that is to bring at most `room` octets besides the rest of a payload: all are staged.
    #[inline]
    pub(crate) fn begin(&mut self, room: usize) {
        self.steps.clear();
        self.room = room;
        self.tail = room.min(STAGED);
    }

    /// Adds the rest of a payload that has begun.
    pub(crate) fn rest(&mut self, place: Place) {
        self.steps.push(Step { gap: 0, place });
    }

    /// Adds a place that is expected behind `gap` octets. Returns false if the call is long enough without.
    pub(crate) fn expect(&mut self, gap: usize, place: Place) -> bool {
        let fits = self.steps.len() < PLACES && gap <= GAP && gap + place.len() <= self.room;
        if fits {
            self.room -= gap + place.len();
            self.steps.push(Step { gap, place });
        }
        fits
    }

    /// Ends the plan: at most `tail` octets are staged behind the last place.
    pub(crate) fn end(&mut self, tail: usize) {
        self.tail = self.tail.min(tail);
    }

    /// The places, with what is in front of each.
    #[inline]
    pub(crate) fn step(&self, index: usize) -> Option<Step> {
        self.steps.get(index).copied()
    }

    /// The first `len` octets in front of a place.
    pub(crate) fn gap(&self, index: usize, len: usize) -> &[u8] {
        self.staging.get(index * GAP..index * GAP + len).unwrap_or_default()
    }

    /// The first `len` octets behind the last place.
    #[inline]
    pub(crate) fn tail(&self, len: usize) -> &[u8] {
        self.staging.get(PLACES * GAP..PLACES * GAP + len).unwrap_or_default()
    }

    /// Makes the call. Returns the number of octets that have come, and whether the socket had no more.
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
            // The region was taken back: what comes is staged.
            *tail = STAGED;
        }
        slices[count] = RecvSlice::new(&mut rest[..*tail]);
        capacity += *tail;
        let n = recv(&mut slices[..=count])?;
        steps.truncate(used);
        Ok((n.min(capacity), n < capacity))
    }

    /// Takes out the `left` octets that a call has put behind the first `from` octets of a place. `None` if its region is gone.
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

    /// Takes the buffer of [`Intake::spill`] back.
    pub(crate) fn keep(&mut self, spilled: Vec<u8>) {
        self.spilled = spilled;
    }

    /// How many of the first `n` octets of a call were staged.
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

    /// How many octets were not where they belong since this was asked last.
    #[cfg(test)]
    pub(crate) fn spilled(&mut self) -> usize {
        std::mem::take(&mut self.spilled).len()
    }
}
