//! The time limit of every wait in these tests. It ends a hang; a busy machine never reaches it.

use std::time::Duration;

/// The longest life of a program under test, and longest wait for it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);
