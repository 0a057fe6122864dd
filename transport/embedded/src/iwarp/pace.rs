//! The pace of one connection: limits how many octets of its stream are received at a time, so that no connection starves other
//! connections.
//!
//! A limit of octets alone would not suffice, because each FPDU takes processing time, too. A peer may send any number of RDMA Writes
//! without payload: 13,000 of them fit into 256 KiB. Therefore each FPDU costs additional octets of the budget.
//!
//! Everything that a receive call returns is processed, so the length of the call must be limited beforehand. The pace assumes that the
//! stream continues as in the last call, and chooses a length that costs no more than the budget.

/// The number of octets that each FPDU costs in addition to its own length.
const FPDU_COST: usize = 1024;
/// The pace adapts only after receive calls that returned at least this number of octets. Shorter calls are too small a sample of the
/// stream.
const SAMPLE: usize = 4096;
/// The room is the number of octets that a receive call may return. `FIRST` is the room of the first call, and `LEAST` is the least room of
/// any call. Any header fits in both.
const FIRST: usize = 64 * 1024;
const LEAST: usize = 4096;

/// If at least this number of bytes of an incomplete FPDU arrives, they are a sign of life of the
/// peer. A TCP segment in the middle of an FPDU normally has more bytes, so a live peer counts as
/// alive. A peer that sends its FPDUs byte by byte does not count as alive.
const SIGN: usize = 512;

/// The pace of one connection: the room for its next receive call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    room: usize,
    /// The number of octets received since the last sign of life.
    trickled: usize,
}

impl Pace {
    pub(super) const fn new() -> Self {
        Self { room: FIRST, trickled: 0 }
    }

    /// Returns the number of octets that the next receive call may return. The rest of the current payload does not count.
    #[inline]
    pub(super) const fn room(self) -> usize {
        self.room
    }

    /// Returns true if a receive call is a sign of life of the peer. `bytes` is the number of bytes
    /// that the call returned. `fpdus` is the number of FPDU headers that the call completed.
    #[inline]
    pub(super) const fn is_sign_of_life(&mut self, bytes: usize, fpdus: usize) -> bool {
        self.trickled += bytes;
        let sign = fpdus > 0 || self.trickled >= SIGN;
        if sign {
            self.trickled = 0;
        }
        sign
    }

    /// Records a receive call that returned `bytes` bytes and completed the headers of `fpdus`
    /// FPDUs. Adapts the room for the next call. Returns the cost of the call. `budget` is the
    /// largest cost that one connection may cause per call of `progress`.
    #[inline]
    pub(super) fn cost(&mut self, bytes: usize, fpdus: usize, budget: usize) -> usize {
        let cost = bytes + fpdus * FPDU_COST;
        if bytes >= SAMPLE {
            let fits = ((budget as u64).saturating_mul(bytes as u64) / cost as u64) as usize;
            // In one step, the room may shrink to any size, but at most doubles. Otherwise a peer could gain room with a few large FPDUs
            // and then send many small FPDUs.
            self.room = fits.min(self.room.saturating_mul(2)).max(LEAST);
        }
        cost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: usize = 512 * 1024;

    /// Makes receive calls until the room is constant. All FPDUs have `fpdu` octets. Returns the octets and the cost of the last call.
    fn settle(pace: &mut Pace, fpdu: usize) -> (usize, usize) {
        let mut last = (0, 0);
        for _ in 0..20 {
            let bytes = pace.room().min(256 * 1024);
            last = (bytes, pace.cost(bytes, bytes / fpdu, BUDGET));
        }
        last
    }

    #[test]
    fn large_fpdus_fill_the_buffer_and_empty_ones_do_not() {
        let mut pace = Pace::new();
        for (fpdu, least) in [(65_540, 128), (1448, 128), (200, 80)] {
            let (bytes, cost) = settle(&mut pace, fpdu);
            assert!(cost <= BUDGET + BUDGET / 100 && bytes >= least * 1024, "{fpdu}: {bytes}");
        }
        let (bytes, cost) = settle(&mut pace, 20);
        assert!(cost <= BUDGET + BUDGET / 100 && bytes / 20 <= 512, "{bytes}");
    }

    #[test]
    fn no_call_is_dear_for_long() {
        let mut pace = Pace::new();
        settle(&mut pace, 65_540);
        // The peer alternates between large and empty FPDUs, to mislead the pace.
        let mut costs = Vec::new();
        for round in 0..40 {
            let bytes = pace.room().min(256 * 1024);
            costs.push(pace.cost(bytes, if round % 2 == 0 { bytes / 20 } else { bytes / 65_540 }, BUDGET));
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

    /// A program can set the largest possible budget, so that no connection stops receiving for the sake of others.
    #[test]
    fn the_largest_budget_does_not_overflow() {
        let mut pace = Pace::new();
        assert_eq!(pace.cost(FIRST, 1, usize::MAX), FIRST + FPDU_COST);
        assert_eq!(pace.room(), 2 * FIRST);
    }

    #[test]
    fn small_receives_change_nothing() {
        let mut pace = Pace::new();
        assert_eq!((pace.cost(88, 1, BUDGET), pace.room()), (1112, FIRST));
    }
}
