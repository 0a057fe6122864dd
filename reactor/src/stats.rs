//! The statistics of a reactor. They contain counters, which count events since the start of the reactor, and levels,
//! which are current values.

use std::time::Duration;

/// A snapshot of all counters and levels; see [`crate::Reactor::stats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Stats {
    /// Counters of the reactor's event loop.
    pub turns: TurnStats,
    /// Counters of the completion queues.
    pub completions: CompletionStats,
    /// Counters of connections.
    pub connections: ConnectionStats,
    /// Counters of messages and datagrams.
    pub messages: MessageStats,
    /// Levels of memory, and counters of memory that could not be released.
    pub memory: MemoryStats,
}

/// Counters of the reactor's event loop. An iteration of that loop is a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct TurnStats {
    /// Number of turns.
    pub taken: u64,
    /// Number of calls that waited in the operating system for an event. This includes calls with a timeout of 0, with
    /// which a busy or polling reactor checks for events.
    pub waits: u64,
    /// Number of waits that returned no event.
    pub empty_waits: u64,
    /// Number of rounds of busy polling. A round polls each completion queue once, and ends at the
    /// first completion.
    pub spins: u64,
    /// Number of periods of busy polling that ended with a completion.
    pub spin_hits: u64,
    /// Number of periods of busy polling that ended without a completion.
    pub spin_misses: u64,
    /// Number of times that the poller reported a connection-manager channel as ready. The poller is edge-triggered: it
    /// reports a descriptor once after each change.
    pub cm_edges: u64,
    /// Number of times that the poller reported a completion channel as ready.
    pub completion_edges: u64,
    /// Number of times that the poller reported that a descriptor of the program is ready. The program registers such
    /// descriptors with [`crate::IoContext::register`].
    pub io_edges: u64,
    /// Number of turns in which the poller reported a ready descriptor, and which then found completions.
    pub wakes: u64,
    /// Number of completions that were polled in the turns that the counter `wakes` counts.
    pub wake_completions: u64,
    /// Number of requests that other threads made through a [`crate::ReactorHandle`]: messages for the reactor
    /// ([`crate::Handler::on_wake`]), and sends on connections.
    pub handle_commands: u64,
    /// Largest number of requests of other threads (see `handle_commands`) that the reactor processed in one turn. A
    /// large number means that the reactor's thread had been busy or suspended for a long time.
    pub handle_commands_max: u64,
    /// Number of panics in callbacks of the program, see [`crate::Config::contain_panics`].
    pub panics: u64,
}

/// Counters of the completion queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct CompletionStats {
    /// Number of completions that the reactor polled.
    pub polled: u64,
    /// Number of completions that were not processed in the turn in which they were polled. They are deferred to a
    /// later turn, so that one connection cannot delay the others.
    pub deferred: u64,
    /// Number of completions that belong to no posted work request, usually because their connections had already
    /// ended.
    pub stale: u64,
    /// Number of events that completion channels delivered.
    pub events: u64,
    /// Number of calls that acknowledged completion events. Each call acknowledges several events, and locks a mutex of
    /// libibverbs. The embedded provider needs no such calls.
    pub acknowledgements: u64,
    /// Number of times that the reactor armed a completion queue, that is, requested an event for its next completion.
    pub arms: u64,
    /// Number of times that the reactor armed a completion queue, polled the queue once more, and found a completion.
    /// Without that poll the completion would have been missed, because no event reports it.
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
    /// Number of connections that the local side closed, and that ended before all accepted messages were sent, see
    /// [`crate::DisconnectReason::Local`].
    pub cut_off: u64,
    /// Number of outgoing connections that were not established.
    pub connect_errors: u64,
    /// Number of connections whose security handshake failed on the local side, which refused the peer.
    pub insecure: u64,
    /// Number of incoming connections that were refused or not established.
    pub refused: u64,
    /// Number of incoming connections that the reactor closed, before they were established, to make room for new ones.
    /// See [`crate::Config::max_pending`].
    pub evicted: u64,
    /// Number of connect requests that this reactor passed to other reactors of its group ([`crate::Reactors`]).
    pub handed_over: u64,
    /// Number of connect requests that this reactor received from other reactors of its group.
    pub taken_over: u64,
    /// Number of keepalive pings sent.
    pub pings: u64,
    /// Number of connections that ended because the peer sent nothing for too long, see
    /// [`crate::DisconnectReason::KeepaliveTimeout`].
    pub keepalive_timeouts: u64,
    /// Number of connections for which the device did not complete all flushed work requests within
    /// [`crate::Timeouts::flush`].
    pub unflushed: u64,
    /// Number of queue pairs and shared receive queues that a device failed to destroy. A queue pair is destroyed when
    /// its connection or endpoint ends, and a shared receive queue when no connection uses it any more. If the device
    /// fails to destroy the queue, the buffers of the queue, and the regions that operations of the queue used, stay
    /// allocated until the reactor stops using the device.
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
    /// Number of registrations of memory for messages that are longer than one buffer. Messages of similar length reuse
    /// registered memory ([`crate::LargeMessageSettings::cache`]): they do not increase this number.
    pub large_registrations: u64,
    /// Number of datagrams sent.
    pub datagrams_sent: u64,
    /// Number of datagrams received.
    pub datagrams_received: u64,
    /// Number of chains of send work requests that the reactor posted. Each chain is posted with one call to the
    /// device.
    pub doorbells: u64,
    /// Number of credit grants that were sent in separate messages. Grants inside other messages are not counted.
    pub credit_updates: u64,
    /// Number of sends that were refused because a resource was used up: credits, slots of the send
    /// queue, the allowed number of large messages, or the memory for large messages. Each call of
    /// [`crate::Context::await_room`] counts as a refused send.
    pub send_stalls: u64,
    /// Sum of the times, over all connections, from the first refused send to the next `on_writable`. A time that has
    /// not ended yet is not included.
    #[cfg_attr(feature = "serde", serde(serialize_with = "seconds"))]
    pub stall_time: Duration,
    /// Number of sends, requested by other threads, that were dropped because the connection was not open or did not
    /// accept the message.
    pub handle_sends_dropped: u64,
}

/// Levels of memory, and counters of memory that could not be released.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct MemoryStats {
    /// Number of registered regions.
    pub regions: usize,
    /// Number of registered regions that peers on this host may map
    /// ([`crate::RegionOptions::direct`]). Each of them keeps a descriptor open.
    pub direct_regions: usize,
    /// Number of times that a device has failed to deregister a region or buffers since the start
    /// of the reactor. The memory of the region or of the buffers is never freed. If a peer may
    /// write to that memory, the program never gets it as a slice again.
    pub unreleased: usize,
    /// Number of times that a device has failed to invalidate the remote key of a region since the start of the
    /// reactor. Until such a region is deregistered, peers may continue to access it, and the program does not get its
    /// memory as a slice. The reactor invalidates a key in these cases:
    ///
    /// - The program called [`crate::RegionContext::revoke`].
    /// - [`crate::RegionOptions::lifetime`] has passed since peers got access.
    /// - The connection of the region ended.
    /// - The program dropped the region while an operation still used it.
    /// - The peer invalidated the key.
    pub unrevoked: usize,
    /// Number of buffers in the pools of all devices: the free buffers and the buffers in use.
    pub pool_buffers: usize,
    /// Number of free buffers in the pools of all devices.
    pub pool_free: usize,
    /// Number of receives that are posted to shared receive queues, see [`crate::Config::shared_receives`].
    pub shared_posted: usize,
    /// Number of receives in the shared receive queues that no connection has reserved. Each new
    /// connection reserves five receives.
    pub shared_unclaimed: usize,
    /// Number of receives of open connections that the program occupies, because it keeps their
    /// messages ([`crate::Message::detach`]). When it occupies all receives of a connection, the
    /// peer can send no data.
    pub held_receives: usize,
    /// Number of bytes of received messages that are longer than one buffer. The number includes
    /// messages that the reactor is still fetching from peers, and messages that the program keeps.
    /// A message shorter than a page counts for more than its length, see
    /// [`crate::LargeMessageSettings::memory`].
    pub fetched_bytes: usize,
    /// Number of bytes of unused memory that stays registered, so that later messages longer than one buffer can use
    /// it. See [`crate::LargeMessageSettings::cache`].
    pub kept_bytes: usize,
    /// Number of bytes of the copies of sent messages that are longer than one buffer and that peers have not fetched
    /// yet.
    pub copied_bytes: usize,
}

#[cfg(feature = "serde")]
fn seconds<S: serde::Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_secs_f64())
}
