//! Settings of the completion queues.

use rdma_transport::caps::Moderation;

/// The settings of the completion queues, and the largest number of completions that the reactor handles in one turn.
/// Change them with [`Config::completions`](crate::Config::completions).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CompletionSettings {
    /// Number of entries of a completion queue, or the device's limit if that is lower. If the
    /// connections of a device need more entries, the reactor creates further queues, and polls all
    /// of them. Default: `None`, which means 16,384. On a device whose queues use memory only for
    /// the completions in them, as in the embedded provider, it means the device's limit.
    pub queue: Option<u32>,
    /// The completion vector of the completion queues. It selects the interrupt that reports their events, and so the
    /// processor that handles the interrupt. Range: 0 to one less than `Capabilities::completion_vectors`. The first
    /// use of a device fails if the device has several vectors but not this one. If the device has only one vector, the
    /// reactor ignores this setting and logs that at `info`. Default: `None`, which spreads the reactors of the process
    /// over the vectors.
    pub vector: Option<u32>,
    /// Interrupt moderation. The two numbers of [`Moderation`] are a count of completions and a time in microseconds.
    /// The device raises an event when it has gathered this count of completions, or when this time has passed since
    /// the first of them. Range: 1 to `Capabilities::completion_moderation`, for both numbers. A sleeping reactor is
    /// woken less often, at the cost of latency. A polling reactor sees no difference. If the device does not support
    /// moderation, connecting fails with [`crate::ConnectError::Unsupported`], and incoming connections are rejected.
    /// Default: `None`, no moderation: while the reactor sleeps, the next completion raises an event immediately.
    pub moderation: Option<Moderation>,
    /// Largest number of completions that the reactor handles in one turn. After that many
    /// completions, it handles timers, descriptors and messages from other threads. The callbacks
    /// of the completions delay these other events, so a loop that also serves other event sources
    /// needs a lower number, such as 64. Default: 1,024.
    pub per_turn: u32,
}

impl Default for CompletionSettings {
    fn default() -> Self {
        Self { queue: None, vector: None, moderation: None, per_turn: 1024 }
    }
}
