//! The seeds of a test that has worlds of its own.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Worlds unless the environment says how many.
const WORLDS: u64 = 10_000;

/// Runs a world for each seed: that of `NAME_SEED` alone, or the first `NAME_WORLDS` ones. Returns their number.
///
/// # Panics
/// When a world does, with its seed.
pub fn each_world(name: &str, mut world: impl FnMut(u64)) -> u64 {
    let number = |what: &str| {
        let text = std::env::var(format!("{name}_{what}")).ok();
        text.map(|text| text.parse::<u64>().expect("a number"))
    };
    let seeds = match number("SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("WORLDS").unwrap_or(WORLDS),
    };
    let worlds = seeds.end - seeds.start;
    for seed in seeds {
        let run = catch_unwind(AssertUnwindSafe(|| world(seed)));
        run.unwrap_or_else(|_| panic!("world {seed}: run it alone with {name}_SEED={seed}"));
    }
    worlds
}
