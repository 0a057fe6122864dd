//! Counters of a reactor. Levels have their current value; all other counters count from the reactor's start.

use std::time::Duration;

/// A snapshot of all counters; see [`crate::Reactor::stats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Stats {
    /// Counters of the loop.
    pub turns: TurnStats,
    /// Counters of the completion queues.
    pub completions: CompletionStats,
    /// Counters of connections.
    pub connections: ConnectionStats,
    /// Counters of messages and datagrams.
    pub messages: MessageStats,
    /// Levels of memory.
    pub memory: MemoryStats,
}

/// Counters of the loop.
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
    /// Times of busy polling that ended with a completion.
    pub spin_hits: u64,
    /// Times of busy polling that ended without a completion.
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
    /// Messages and sends taken from other threads.
    pub handle_commands: u64,
    /// Largest number of such messages and sends taken in one turn. A large number means that the reactor's thread was
    /// held up before.
    pub handle_commands_max: u64,
    /// Callbacks that panicked, see [`crate::Config::contain_panics`].
    pub panics: u64,
}

/// Counters of the completion queues.
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
    /// Times that polling after arming found a completion which would have been missed.
    pub arm_races: u64,
}

/// Counters of connections.
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
    /// Connections that this side closed and that ended before everything was sent, see
    /// [`crate::DisconnectReason::Local`].
    pub cut_off: u64,
    /// Outgoing connections that did not come up.
    pub connect_errors: u64,
    /// Connections whose peer was not accepted in the handshake that secures them.
    pub insecure: u64,
    /// Incoming connections that were refused or did not come up.
    pub refused: u64,
    /// Incoming connections that were not up yet and gave way to new ones: see [`crate::Config::max_pending`].
    pub evicted: u64,
    /// Connect requests handed over to other reactors of the group.
    pub handed_over: u64,
    /// Connect requests taken over from other reactors of the group.
    pub taken_over: u64,
    /// Keepalive questions sent.
    pub pings: u64,
    /// Connections given up for silence.
    pub keepalive_timeouts: u64,
    /// Connections whose device had not flushed their work requests within [`crate::Timeouts::flush`].
    pub unflushed: u64,
    /// Queue pairs that a device has not destroyed when their connection or endpoint ended, and shared receive queues that it has not
    /// destroyed when nothing else was left on it. Their buffers, and the regions that their operations used, are lost until the
    /// reactor's device is gone.
    pub undestroyed: u64,
}

/// Counters of messages and datagrams.
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
    /// Registrations of memory for messages past one buffer. Where those are of about one length, the memory of the first
    /// ones is kept for the others ([`crate::LargeMessageSettings::cache`]), and this number stays as it is.
    pub large_registrations: u64,
    /// Datagrams sent.
    pub datagrams_sent: u64,
    /// Datagrams received.
    pub datagrams_received: u64,
    /// Chains of sends posted.
    pub doorbells: u64,
    /// Grants sent as messages of their own.
    pub credit_updates: u64,
    /// Sends refused for want of room: a credit, a place in the send queue, or a large message too many.
    pub send_stalls: u64,
    /// Total time in which sends were refused, of all connections, up to their last `on_writable`.
    #[cfg_attr(feature = "serde", serde(serialize_with = "seconds"))]
    pub stall_time: Duration,
    /// Sends from other threads that were dropped, because the connection was not open or did not take them.
    pub handle_sends_dropped: u64,
}

/// Levels of memory, now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct MemoryStats {
    /// Regions registered.
    pub regions: usize,
    /// Registrations that a device has not given back, of regions and of buffers, since the reactor's start. Their memory is
    /// never freed, and never lent as a slice if a peer may write it.
    pub unreleased: usize,
    /// Times that a device has not taken a remote key back, since the reactor's start: when [`crate::Context::revoke`] was called, when
    /// the rights of peers had lasted for [`crate::RegionOptions::lifetime`], when their connection ended, or when a peer took the key
    /// back itself. Peers may go on using such a region until it is deregistered, and its memory is never lent as a slice meanwhile.
    pub unrevoked: usize,
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
    /// Bytes registered and kept for messages past one buffer to come, see [`crate::LargeMessageSettings::cache`].
    pub kept_bytes: usize,
    /// Bytes of messages past one buffer that peers are to fetch.
    pub copied_bytes: usize,
}

#[cfg(feature = "serde")]
fn seconds<S: serde::Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_secs_f64())
}
