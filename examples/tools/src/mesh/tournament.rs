//! The order in which pairs are measured: the rounds of a round-robin tournament, by the circle method. In a round, each rank is in at
//! most one pair. So no two measurements share a rank's port.

/// Returns the number of rounds that are needed to measure all pairs of `ranks` ranks.
#[must_use]
pub const fn rounds(ranks: usize) -> usize {
    match ranks {
        0 | 1 => 0,
        even if even % 2 == 0 => even - 1,
        odd => odd,
    }
}

/// Returns the pairs of a round, each with its lower rank first. If the number of ranks is odd, one rank has no pair in the round.
pub fn pairs(ranks: usize, round: usize) -> impl Iterator<Item = (usize, usize)> {
    // The circle method: one seat is fixed, and the ranks on the other seats move by one seat in each round. If the number of ranks is
    // odd, the fixed seat is empty.
    let seats = ranks + ranks % 2;
    let others = seats.saturating_sub(1).max(1);
    let at = move |place: usize| (round + place) % others;
    (0..seats / 2)
        .map(move |place| match place {
            0 => (at(0), others),
            _ => (at(place), at(others - place)),
        })
        .filter(move |&(a, b)| a < ranks && b < ranks)
        .map(|(a, b)| (a.min(b), a.max(b)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn all_pairs_meet_once_and_nobody_plays_twice_in_a_round() {
        for ranks in (0..=33).chain([200]) {
            let mut met = BTreeSet::new();
            for round in 0..rounds(ranks) {
                let mut busy = BTreeSet::new();
                let mut count = 0;
                for (a, b) in pairs(ranks, round) {
                    assert!(a < b && b < ranks, "{ranks} ranks: {a} and {b}");
                    assert!(busy.insert(a) && busy.insert(b), "{ranks} ranks, round {round}: {a} and {b}");
                    assert!(met.insert((a, b)), "{ranks} ranks: {a} and {b} meet twice");
                    count += 1;
                }
                assert_eq!(count, ranks / 2, "{ranks} ranks, round {round}");
            }
            assert_eq!(met.len(), ranks * ranks.saturating_sub(1) / 2, "{ranks} ranks");
        }
    }
}
