//! Completion queues, and how many completions a turn handles.

use rdma_transport::caps::Moderation;

/// The completion queues, and how many completions a turn handles; see [`Config::completions`](crate::Config::completions).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CompletionSettings {
    /// Entries of a completion queue, or what the device has if that is less; connections that do not fit get another
    /// one. Default: 16,384.
    pub queue: u32,
    /// The completion vector of the completion queues, which is the interrupt, and so the processor, that their events
    /// come on: 0 to what `Capabilities::completion_vectors` says, less one. A number that a device with several
    /// vectors does not have is an error when the device is first used; a device with one has no choice, and says so at
    /// `info`. Default: `None`, the reactors of the process are spread over the vectors in turn.
    pub vector: Option<u32>,
    /// Has the device wake the reactor only when so many completions have gathered, or so many microseconds have passed
    /// since the first: 1 to what `Capabilities::completion_moderation` says, both. Saves wake-ups at the cost of
    /// latency, where the reactor sleeps; one that polls does not notice. A device that cannot:
    /// [`crate::ConnectError::Unsupported`], and who connects to it is refused. Default: an event for each completion
    /// that is waited for.
    pub moderation: Option<Moderation>,
    /// Completions handled in one turn before the other stages get theirs. A turn takes as long as their callbacks: a
    /// loop that shares its thread with timers of its own wants fewer, such as 64. Default: 1,024.
    pub per_turn: u32,
}

impl Default for CompletionSettings {
    fn default() -> Self {
        Self { queue: 16 << 10, vector: None, moderation: None, per_turn: 1024 }
    }
}
