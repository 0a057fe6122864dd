//! The limit of peers that wait for the approval of a task, and the texts that refuse peers, for
//! `aio` and `threaded`.

/// The largest number of peers that may wait for approval on a listener. Further peers are refused.
/// The value is the default of [`crate::Config::max_pending`]. A peer whose connection has ended
/// still counts, until a task removes it from the queue.
pub(crate) const MAX_PENDING_PEERS: usize = 1024;

/// The text that refuses a peer when no task accepts or refuses the peers of its listener.
pub(crate) const NOT_APPROVED: &str = "no task of the program accepts or refuses peers";

/// The text that refuses a peer while [`MAX_PENDING_PEERS`] wait.
pub(crate) const TOO_MANY_PENDING: &str = "too many peers wait for approval";
