//! Waiting in tests for events that another thread or the kernel causes.
#![allow(clippy::disallowed_methods, reason = "the events happen in the system's time")]

use std::time::{Duration, Instant};

/// The timeout. It ends a test that hangs; a busy machine never reaches it.
const PATIENCE: Duration = Duration::from_secs(120);

/// Calls `ready` until it returns a value.
///
/// # Panics
/// After the timeout.
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
