//! The time limit of every wait in these tests. It turns a hang into a failure, and is so long that a busy machine never reaches it.

use std::time::Duration;

/// The time limit of a program under test, and of each wait for it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);
