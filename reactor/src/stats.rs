//! Counters of a reactor. Those that are no levels count from its start.

use std::time::Duration;

/// A snapshot; see [`crate::Reactor::stats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Stats {
    /// What the loop did.
    pub turns: TurnStats,
    /// What came out of the completion queues.
    pub completions: CompletionStats,
    /// What became of connections.
    pub connections: ConnectionStats,
    /// What was sent and received.
    pub messages: MessageStats,
    /// What is in use.
    pub memory: MemoryStats,
}

/// What the loop did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct TurnStats {
    /// Turns taken.
    pub taken: u64,
    /// Waits in the operating system.
    pub waits: u64,
    /// Waits that found nothing.
    pub empty_waits: u64,
    /// Rounds of busy polling.
    pub spins: u64,
    /// Busy polls that ended with work.
    pub spin_hits: u64,
    /// Busy polls that ended without.
    pub spin_misses: u64,
    /// Edges of connection-manager channels.
    pub cm_edges: u64,
    /// Edges of completion channels.
    pub completion_edges: u64,
    /// Edges of descriptors of [`crate::Context::register_io`].
    pub io_edges: u64,
    /// Wake-ups by an edge after which there were completions.
    pub wakes: u64,
    /// Completions polled in the turns of those wake-ups.
    pub wake_completions: u64,
    /// Time from those edges to the first callback, all together.
    #[cfg_attr(feature = "serde", serde(serialize_with = "seconds"))]
    pub wake_time: Duration,
    /// The longest of them.
    #[cfg_attr(feature = "serde", serde(serialize_with = "seconds"))]
    pub wake_time_max: Duration,
    /// Messages and sends taken from other threads.
    pub remote_commands: u64,
    /// The most of them taken in one turn: many say that the reactor's thread was held up before.
    pub remote_commands_max: u64,
}

/// What came out of the completion queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct CompletionStats {
    /// Completions polled.
    pub polled: u64,
    /// Completions that waited for another turn, for the sake of other connections.
    pub deferred: u64,
    /// Completions of connections that were gone.
    pub stale: u64,
    /// Completion events.
    pub events: u64,
    /// Calls that acknowledged completion events, in batches, each under a lock; none on the embedded provider.
    pub acknowledgements: u64,
    /// Times a completion queue was armed.
    pub arms: u64,
    /// Times polling after arming found what would have been missed.
    pub arm_races: u64,
}

/// What became of connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct ConnectionStats {
    /// Connections now, in any state.
    pub current: usize,
    /// Connections that came up.
    pub connected: u64,
    /// Connections that came up and ended.
    pub disconnected: u64,
    /// Outgoing connections that did not come up.
    pub connect_errors: u64,
    /// Incoming connections that were refused or did not come up.
    pub refused: u64,
    /// Connect requests handed over to other reactors of the group.
    pub handed_over: u64,
    /// Connect requests taken over from other reactors of the group.
    pub taken_over: u64,
    /// Keepalive questions sent.
    pub pings: u64,
    /// Connections given up for silence.
    pub keepalive_timeouts: u64,
}

/// What was sent and received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct MessageStats {
    /// Messages sent.
    pub sent: u64,
    /// Messages received.
    pub received: u64,
    /// Payload bytes sent.
    pub bytes_sent: u64,
    /// Payload bytes received.
    pub bytes_received: u64,
    /// Datagrams sent.
    pub datagrams_sent: u64,
    /// Datagrams received.
    pub datagrams_received: u64,
    /// Chains of sends posted.
    pub doorbells: u64,
    /// Grants sent as messages of their own.
    pub credit_updates: u64,
    /// Sends refused because the window or the send queue was full.
    pub send_stalls: u64,
    /// Time with refused sends, of all connections together.
    #[cfg_attr(feature = "serde", serde(serialize_with = "seconds"))]
    pub stall_time: Duration,
    /// Sends from other threads that found no connection to go out on.
    pub remote_sends_dropped: u64,
}

/// What is in use now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct MemoryStats {
    /// Regions registered.
    pub regions: usize,
    /// Pooled buffers.
    pub pool_buffers: usize,
    /// Pooled buffers that nobody holds.
    pub pool_free: usize,
    /// Receives posted to shared queues, see [`crate::Config::shared_receives`].
    pub shared_posted: usize,
    /// Receives of shared queues that no connection claims: each new connection needs five.
    pub shared_unclaimed: usize,
    /// Bytes of messages past one buffer that are being fetched or were fetched and kept.
    pub fetched_bytes: usize,
    /// Bytes of messages past one buffer that peers are to fetch.
    pub copied_bytes: usize,
}

#[cfg(feature = "serde")]
fn seconds<S: serde::Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_secs_f64())
}
