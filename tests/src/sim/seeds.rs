//! Runs the worlds of a test that defines its own kind of world, one for each seed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// The default number of worlds.
const WORLDS: u64 = 4_000;
/// The number of threads that run worlds.
const THREADS: usize = 2;

/// Runs a world for each seed. The environment variable `NAME_SEED` selects a single seed.
/// `NAME_FIRST` sets the first seed, and `NAME_WORLDS` the number of worlds. Passes the result of
/// each world to `sum`. Returns the number of worlds.
///
/// # Panics
/// Panics if a world panics. The message has its seed.
pub fn each_world<T>(name: &str, world: impl Fn(u64) -> T + Sync, sum: impl FnMut(T) + Send) -> u64 {
    each_world_of(name, WORLDS, world, sum)
}

/// Runs worlds like [`each_world`], with the default number `worlds`.
///
/// # Panics
/// Panics if a world panics. The message has its seed.
pub fn each_world_of<T>(name: &str, worlds: u64, world: impl Fn(u64) -> T + Sync, sum: impl FnMut(T) + Send) -> u64 {
    let number = |what: &str| {
        let text = std::env::var(format!("{name}_{what}")).ok();
        text.map(|text| text.parse::<u64>().expect("a number"))
    };
    let seeds = match number("SEED") {
        Some(seed) => seed..seed + 1,
        None => {
            let first = number("FIRST").unwrap_or(0);
            first..first + number("WORLDS").unwrap_or(worlds)
        }
    };
    let (next, failed) = (AtomicU64::new(seeds.start), AtomicU64::new(u64::MAX));
    let sum = Mutex::new(sum);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end || failed.load(Ordering::Relaxed) < seed {
                        return;
                    }
                    match catch_unwind(AssertUnwindSafe(|| world(seed))) {
                        Ok(seen) => sum.lock().unwrap_or_else(PoisonError::into_inner)(seen),
                        Err(_) => _ = failed.fetch_min(seed, Ordering::Relaxed),
                    }
                }
            });
        }
    });
    let failed = failed.into_inner();
    assert!(failed == u64::MAX, "world {failed}: run it alone with {name}_SEED={failed}");
    seeds.end - seeds.start
}
