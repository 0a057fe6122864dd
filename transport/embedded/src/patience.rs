//! A helper for tests that wait for another thread or for the kernel.
#![allow(clippy::disallowed_methods, reason = "the events happen in the system's time")]

use std::time::{Duration, Instant};

/// The timeout of [`until`]. The timeout makes a test that hangs fail. It is so long that a test on a slow machine does
/// not reach it.
const PATIENCE: Duration = Duration::from_secs(120);

/// Calls `ready` repeatedly until it returns `Some`, and returns that value.
///
/// # Panics
/// If the timeout passes before `ready` returns `Some`. The message contains `what`.
#[track_caller]
pub(crate) fn until<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(Instant::now() < end, "not within {PATIENCE:?}: {what}");
        std::thread::yield_now();
    }
}
