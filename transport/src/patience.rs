//! Waiting in tests for what another thread, or the kernel, is about to do.
#![allow(clippy::disallowed_methods, reason = "what is waited for happens in the system's time")]

use std::time::{Duration, Instant};

/// Longest wait. It ends a hang; a busy machine never reaches it.
const PATIENCE: Duration = Duration::from_secs(120);

/// Asks `ready` again and again until it has something.
///
/// # Panics
/// When it has nothing for too long.
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
