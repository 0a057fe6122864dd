//! Runs many worlds, and reports one that has failed.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use rdma_reactor::SecurityMode;

use super::fabric::lock;
use super::rng::mix;
use super::world::{Faults, Report, Variant, World};

/// The number of lines of the history in the report of a failure.
const TAIL: usize = 400;

/// A broken promise.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The seed of the world.
    pub seed: u64,
    /// A description of the broken promise.
    pub what: String,
    /// The last lines of the history. Empty if they were not kept.
    pub tail: String,
    /// The kind of world.
    pub variant: Variant,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}seed {:#018x}: {}\n\nto see it again:\n  ", self.tail, self.seed, self.what)?;
        write!(
            f,
            "SIM_SEED={:#018x} SIM_SECURITY={} {}{}{}cargo test -p rdma-reactor-tests --test simulation replay -- --nocapture",
            self.seed,
            match self.variant.secured {
                SecurityMode::Tls => "tls",
                SecurityMode::Psk => "psk",
                _ => "plain",
            },
            if self.variant.one_host { "SIM_ONE_HOST=1 " } else { "" },
            if self.variant.tenants { "SIM_TENANTS=1 " } else { "" },
            match self.variant.faults {
                Faults::All => "",
                Faults::Slowness => "SIM_FAULTS=slowness ",
                Faults::Unasked => "SIM_FAULTS=unasked ",
            }
        )
    }
}

/// Returns the seed of the world with the number `nth`.
#[must_use]
pub const fn seed(nth: u64) -> u64 {
    mix(nth ^ 0x5eed)
}

pub(super) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    format!("a panic: {}", text.unwrap_or("of unknown kind"))
}

/// Runs the world with this seed, of this kind. Keeps the last `keep` lines of its history.
///
/// # Errors
/// A promise was broken. The error is the first one.
pub fn check(seed: u64, keep: usize, variant: Variant) -> Result<Report, Failure> {
    let mut world = World::new(seed, keep, variant);
    let fabric = world.fabric();
    let result = catch_unwind(AssertUnwindSafe(|| world.run()));
    let result = result.unwrap_or_else(|panic| {
        // After a panic, dropping the world could panic again, so it is leaked.
        std::mem::forget(world);
        Err(panic_text(&*panic))
    });
    result.map_err(|what| Failure { seed, what, tail: lock(&fabric).trace.tail(), variant })
}

/// The sum of the results of many worlds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Total {
    /// The number of worlds.
    pub worlds: u64,
    /// The sums of all counters, and the hashes combined.
    pub sum: Report,
}

/// Runs `count` worlds on `threads` threads. Returns the sum of their results.
///
/// # Errors
/// The number of the first world that failed, counted from 1, and its failure with the history.
pub fn check_many(first: u64, count: u64, threads: u64, variant: Variant) -> Result<Total, (u64, Failure)> {
    let total = Mutex::new(Total::default());
    let worst = AtomicU64::new(u64::MAX);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (total, worst) = (&total, &worst);
            scope.spawn(move || {
                for nth in (first + thread..first + count).step_by(threads as usize) {
                    if nth > worst.load(Ordering::Relaxed) {
                        return;
                    }
                    match check(seed(nth), 0, variant) {
                        Ok(report) => {
                            let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
                            total.worlds += 1;
                            total.sum.hash ^= report.hash;
                            total.sum.turns += report.turns;
                            total.sum.messages += report.messages;
                            total.sum.operations += report.operations;
                            total.sum.streamed += report.streamed;
                            total.sum.connections += report.connections;
                            total.sum.met += report.met;
                            total.sum.apart += report.apart;
                            total.sum.time += report.time;
                        }
                        Err(_) => {
                            worst.fetch_min(nth, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    match worst.into_inner() {
        u64::MAX => Ok(total.into_inner().unwrap_or_else(PoisonError::into_inner)),
        nth => {
            let seed = seed(nth);
            let lost = || Failure { seed, what: "it failed once, and not again".into(), tail: String::new(), variant };
            Err((nth - first + 1, check(seed, TAIL, variant).err().unwrap_or_else(lost)))
        }
    }
}
