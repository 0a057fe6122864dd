//! Counters and levels of a reactor. A level has its current value. A counter counts from the reactor's start.

use std::time::Duration;

/// A snapshot of all counters and levels; see [`crate::Reactor::stats`].
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
    /// Levels of memory, see [`MemoryStats`].
    pub memory: MemoryStats,
}

/// Counters of the loop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct TurnStats {
    /// Number of turns.
    pub taken: u64,
    /// Number of waits in the operating system.
    pub waits: u64,
    /// Number of waits that returned no event.
    pub empty_waits: u64,
    /// Number of rounds of busy polling.
    pub spins: u64,
    /// Number of periods of busy polling that ended with a completion.
    pub spin_hits: u64,
    /// Number of periods of busy polling that ended without a completion.
    pub spin_misses: u64,
    /// Number of edges of connection-manager channels.
    pub cm_edges: u64,
    /// Number of edges of completion channels.
    pub completion_edges: u64,
    /// Number of edges of descriptors that were registered with [`crate::Context::register_io`].
    pub io_edges: u64,
    /// Number of wake-ups by an edge after which there were completions.
    pub wakes: u64,
    /// Number of completions polled in the turns after those wake-ups.
    pub wake_completions: u64,
    /// Number of messages and sends received from other threads.
    pub handle_commands: u64,
    /// Largest number of messages and sends of other threads received in one turn. A large number means that the
    /// reactor's thread had been busy or suspended for long.
    pub handle_commands_max: u64,
    /// Number of callbacks that panicked, see [`crate::Config::contain_panics`].
    pub panics: u64,
}

/// Counters of the completion queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct CompletionStats {
    /// Number of completions polled.
    pub polled: u64,
    /// Number of completions deferred to a later turn, so that other connections get their share.
    pub deferred: u64,
    /// Number of completions of connections that did not exist any more.
    pub stale: u64,
    /// Number of completion events.
    pub events: u64,
    /// Number of calls that acknowledged completion events, in batches. Each call takes a lock. The embedded provider
    /// needs none.
    pub acknowledgements: u64,
    /// Number of times that a completion queue was armed.
    pub arms: u64,
    /// Number of times that polling after arming found a completion that would otherwise have been missed.
    pub arm_races: u64,
}

/// Counters of connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct ConnectionStats {
    /// Number of current connections, in any state.
    pub current: usize,
    /// Number of connections that were established.
    pub connected: u64,
    /// Number of established connections that have ended.
    pub disconnected: u64,
    /// Number of connections that the local side closed and that ended before everything was sent, see
    /// [`crate::DisconnectReason::Local`].
    pub cut_off: u64,
    /// Number of outgoing connections that were not established.
    pub connect_errors: u64,
    /// Number of connections whose security handshake failed.
    pub insecure: u64,
    /// Number of incoming connections that were refused or not established.
    pub refused: u64,
    /// Number of incoming connections that were evicted for new ones before they were established, see
    /// [`crate::Config::max_pending`].
    pub evicted: u64,
    /// Number of connect requests handed over to other reactors of the group.
    pub handed_over: u64,
    /// Number of connect requests taken over from other reactors of the group.
    pub taken_over: u64,
    /// Number of keepalive pings sent.
    pub pings: u64,
    /// Number of connections that ended because the peer was silent, see [`crate::DisconnectReason::KeepaliveTimeout`].
    pub keepalive_timeouts: u64,
    /// Number of connections whose device did not flush their work requests within [`crate::Timeouts::flush`].
    pub unflushed: u64,
    /// Number of queue pairs that a device failed to destroy when their connection or endpoint ended, and of shared
    /// receive queues that it failed to destroy when they were unused. Their buffers, and the regions that their
    /// operations used, stay allocated until the reactor stops using the device.
    pub undestroyed: u64,
}

/// Counters of messages and datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct MessageStats {
    /// Number of messages sent.
    pub sent: u64,
    /// Number of messages received.
    pub received: u64,
    /// Number of payload bytes sent.
    pub bytes_sent: u64,
    /// Number of payload bytes received.
    pub bytes_received: u64,
    /// Number of registrations of memory for messages past one buffer. Messages of similar length reuse registered
    /// memory ([`crate::LargeMessageSettings::cache`]), and then this number does not grow.
    pub large_registrations: u64,
    /// Number of datagrams sent.
    pub datagrams_sent: u64,
    /// Number of datagrams received.
    pub datagrams_received: u64,
    /// Number of chains of send work requests posted.
    pub doorbells: u64,
    /// Number of grants sent as separate messages.
    pub credit_updates: u64,
    /// Number of sends refused because a resource was used up: a credit, a slot of the send queue, the number of large
    /// messages, or their memory.
    pub send_stalls: u64,
    /// Time during which sends were refused, summed over all connections, up to the last `on_writable` of each.
    #[cfg_attr(feature = "serde", serde(serialize_with = "seconds"))]
    pub stall_time: Duration,
    /// Number of sends from other threads that were dropped because the connection was not open or did not accept them.
    pub handle_sends_dropped: u64,
}

/// Levels of memory, and counters of memory that could not be released.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct MemoryStats {
    /// Number of registered regions.
    pub regions: usize,
    /// Number of registrations of regions and buffers that a device failed to release, since the reactor's start. Their
    /// memory is never freed, and never lent as a slice if a peer may write it.
    pub unreleased: usize,
    /// Number of times that a device failed to invalidate a remote key, since the reactor's start: when
    /// [`crate::Context::revoke`] was called, when the rights of peers had lasted for
    /// [`crate::RegionOptions::lifetime`], when their connection ended, or when a peer invalidated the key. Peers may
    /// go on using such a region until it is deregistered, and its memory is never lent as a slice in the meantime.
    pub unrevoked: usize,
    /// Number of pooled buffers.
    pub pool_buffers: usize,
    /// Number of pooled buffers that are free.
    pub pool_free: usize,
    /// Number of receives posted to shared receive queues, see [`crate::Config::shared_receives`].
    pub shared_posted: usize,
    /// Number of receives of shared receive queues that no connection claims. Each new connection needs five.
    pub shared_unclaimed: usize,
    /// Number of bytes of messages past one buffer that are being fetched, or were fetched and are kept by the program.
    pub fetched_bytes: usize,
    /// Number of bytes that stay registered for later messages past one buffer, see
    /// [`crate::LargeMessageSettings::cache`].
    pub kept_bytes: usize,
    /// Number of bytes of messages past one buffer that peers have yet to fetch.
    pub copied_bytes: usize,
}

#[cfg(feature = "serde")]
fn seconds<S: serde::Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_secs_f64())
}
