//! Settings of the completion queues.

use rdma_transport::caps::Moderation;

/// The settings of completion queues, and the number of completions that a turn handles; see
/// [`Config::completions`](crate::Config::completions).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CompletionSettings {
    /// Number of entries of a completion queue, or the device's limit if that is lower. Connections that do not fit
    /// into one queue get another one. Default: 16,384.
    pub queue: u32,
    /// The completion vector of the completion queues. It selects the interrupt, and so the processor, that handles
    /// their events. Range: 0 to one less than `Capabilities::completion_vectors`. If a device with several vectors
    /// does not have this one, its first use fails. A device with one vector ignores this setting, and the reactor logs
    /// that at `info`. Default: `None`, which spreads the reactors of the process over the vectors.
    pub vector: Option<u32>,
    /// Interrupt moderation: the device raises an event only when so many completions have gathered, or so many
    /// microseconds have passed since the first one. Range: 1 to `Capabilities::completion_moderation`, for both. It
    /// saves wake-ups of a reactor that sleeps, at the cost of latency. It has no effect while the reactor polls. If
    /// the device does not support it, connecting fails with [`crate::ConnectError::Unsupported`], and incoming
    /// connections are rejected. Default: `None`, an event for each completion that the reactor waits for.
    pub moderation: Option<Moderation>,
    /// Largest number of completions that the reactor handles in one turn before the other stages run. A turn takes as
    /// long as their callbacks, so a loop that also serves other event sources needs fewer, such as 64. Default: 1,024.
    pub per_turn: u32,
}

impl Default for CompletionSettings {
    fn default() -> Self {
        Self { queue: 16 << 10, vector: None, moderation: None, per_turn: 1024 }
    }
}
