//! The pace of one connection: limits how much of its stream is received at a time, so that no connection starves the others.
//!
//! A budget of octets alone would not suffice: each FPDU takes processing time, and a peer may send any number of RDMA Writes without
//! payload, 13,000 of them in 256 KiB. Each FPDU therefore counts as additional octets. Everything that one receive call brings is
//! processed, so the call must be small enough beforehand: the next one receives no more than the budget allows if the stream continues as
//! it did.

/// The octets that an FPDU counts as, in addition to its own.
const FPDU_COST: usize = 1024;
/// A receive call that brought fewer octets is no sample of the stream.
const SAMPLE: usize = 4096;
/// The room of the first receive call, and the smallest room; both hold any header.
const FIRST: usize = 64 * 1024;
const LEAST: usize = 4096;

/// Octets of an incomplete frame that count as a sign of life: fewer than any TCP segment has that is not a frame's last. A peer that sends
/// its frames octet by octet is silent.
const SIGN: usize = 512;

/// The pace of one connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    room: usize,
    /// Octets since the last sign of life.
    trickled: usize,
}

impl Pace {
    pub(super) const fn new() -> Self {
        Self { room: FIRST, trickled: 0 }
    }

    /// Returns the octets that the next receive call may put into the staging buffer.
    #[inline]
    pub(super) const fn room(self) -> usize {
        self.room
    }

    /// Returns true if a receive call that brought so many octets and headers of FPDUs is a sign of life.
    #[inline]
    pub(super) const fn is_sign_of_life(&mut self, octets: usize, fpdus: usize) -> bool {
        self.trickled += octets;
        let sign = fpdus > 0 || self.trickled >= SIGN;
        if sign {
            self.trickled = 0;
        }
        sign
    }

    /// Records a receive call that brought so many octets and FPDUs. Returns its cost. `budget` is the cost that a connection may have per
    /// call of progress.
    #[inline]
    pub(super) fn cost(&mut self, octets: usize, fpdus: usize, budget: usize) -> usize {
        let cost = octets + fpdus * FPDU_COST;
        if octets >= SAMPLE {
            let fits = (budget as u64 * octets as u64 / cost as u64) as usize;
            // The room shrinks immediately and grows slowly. Otherwise a few large FPDUs would make room for many small ones.
            self.room = fits.min(self.room.saturating_mul(2)).max(LEAST);
        }
        cost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: usize = 512 * 1024;

    /// Makes calls until the room is constant, with FPDUs of one size. Returns the octets and the cost of the last call.
    fn settle(pace: &mut Pace, fpdu: usize) -> (usize, usize) {
        let mut last = (0, 0);
        for _ in 0..20 {
            let octets = pace.room().min(256 * 1024);
            last = (octets, pace.cost(octets, octets / fpdu, BUDGET));
        }
        last
    }

    #[test]
    fn large_fpdus_fill_the_buffer_and_empty_ones_do_not() {
        let mut pace = Pace::new();
        for (fpdu, least) in [(65_540, 128), (1448, 128), (200, 80)] {
            let (octets, cost) = settle(&mut pace, fpdu);
            assert!(cost <= BUDGET + BUDGET / 100 && octets >= least * 1024, "{fpdu}: {octets}");
        }
        let (octets, cost) = settle(&mut pace, 20);
        assert!(cost <= BUDGET + BUDGET / 100 && octets / 20 <= 512, "{octets}");
    }

    #[test]
    fn no_call_is_dear_for_long() {
        let mut pace = Pace::new();
        settle(&mut pace, 65_540);
        // Large and empty FPDUs alternate, to mislead the pace.
        let mut costs = Vec::new();
        for round in 0..40 {
            let octets = pace.room().min(256 * 1024);
            costs.push(pace.cost(octets, if round % 2 == 0 { octets / 20 } else { octets / 65_540 }, BUDGET));
        }
        assert!(costs.iter().skip(1).all(|&cost| cost <= 3 * BUDGET), "{costs:?}");
    }

    #[test]
    fn octet_by_octet_is_silence() {
        let mut pace = Pace::new();
        assert!(pace.is_sign_of_life(1, 1), "a header has come");
        let signs = (0..10 * SIGN).filter(|_| pace.is_sign_of_life(1, 0)).count();
        assert_eq!(signs, 10);
        assert!(pace.is_sign_of_life(SIGN, 0) && pace.is_sign_of_life(20, 1));
    }

    #[test]
    fn small_receives_change_nothing() {
        let mut pace = Pace::new();
        assert_eq!((pace.cost(88, 1, BUDGET), pace.room()), (1112, FIRST));
    }
}
