//! The limit and the texts of the approval of peers by tasks, in `aio` and in `threaded`.

/// The largest number of peers that may wait for approval on a listener. Further peers are refused.
/// The value is the default of [`crate::Config::max_pending`]. A peer whose connection has ended
/// still counts, until a task removes it from the queue.
pub(crate) const MAX_PENDING_PEERS: usize = 1024;

/// The text that refuses a peer whom nobody can approve.
pub(crate) const NOT_APPROVED: &str = "no task of the program accepts or refuses peers";

/// The text that refuses a peer while [`MAX_PENDING_PEERS`] wait.
pub(crate) const TOO_MANY_PENDING: &str = "too many peers wait for approval";
