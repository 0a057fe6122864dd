//! Counters of a reactor, all since its start.

/// A snapshot; see [`crate::Reactor::stats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Turns of the loop.
    pub turns: u64,
    /// Waits in the operating system.
    pub waits: u64,
    /// Waits that found nothing.
    pub empty_waits: u64,
    /// Rounds of busy polling.
    pub spins: u64,
    /// Busy polls that ended with work.
    pub spin_hits: u64,
    /// Busy polls that ended without, and with a sleep.
    pub spin_misses: u64,
    /// Edges of connection-manager channels.
    pub cm_edges: u64,
    /// Edges of completion channels.
    pub completion_edges: u64,
    /// Completion events.
    pub completion_events: u64,
    /// Times a completion queue was armed.
    pub arms: u64,
    /// Times polling after arming found what would have been missed.
    pub arm_races: u64,
    /// Completions.
    pub completions: u64,
    /// Completions of connections that were gone.
    pub stale_completions: u64,
    /// Connections that came up.
    pub connected: u64,
    /// Connections that came up and went.
    pub disconnected: u64,
    /// Outgoing connections that did not come up.
    pub connect_errors: u64,
    /// Incoming connections that were refused or did not come up.
    pub refused: u64,
    /// Regions registered now.
    pub regions: u64,
    /// Messages sent.
    pub messages_sent: u64,
    /// Messages received.
    pub messages_received: u64,
    /// Payload bytes sent.
    pub bytes_sent: u64,
    /// Payload bytes received.
    pub bytes_received: u64,
    /// Chains of sends posted.
    pub doorbells: u64,
    /// Grants sent as messages of their own.
    pub credit_updates: u64,
    /// Sends refused because the window or the send queue was full.
    pub send_stalls: u64,
    /// Sends from other threads that found no connection to go out on.
    pub remote_sends_dropped: u64,
    /// Keepalive questions sent.
    pub pings: u64,
    /// Connections given up for silence.
    pub keepalive_timeouts: u64,
}
