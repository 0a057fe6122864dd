//! The time limits of tests. A test waits for an event, not for a time, and fails if the event does not happen within the limit. The limits
//! are so long that even a busy machine does not reach them.

use std::time::Duration;

use rdma_reactor::Config;

/// The time limit of a wait for an event.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// The time limit of a whole test.
pub const TEST: Duration = Duration::from_secs(900);

/// A duration that is longer than any test.
pub const HOUR: Duration = Duration::from_secs(3600);

/// Returns `config` with timeouts that are longer than any pause of the process. Tests that use real sockets, but do not test time, use
/// these settings.
#[must_use]
pub fn patient(config: Config) -> Config {
    limited_to(HOUR, config)
        .timeouts(|t| (t.keepalive_interval, t.keepalive) = (HOUR, 2 * HOUR))
        .timeouts(|t| t.close = HOUR)
        .timeouts(|t| t.pool_idle = HOUR)
}

/// Returns `config` with `limit` as the time limit of each step of connecting, and of transfers.
#[must_use]
pub fn limited_to(limit: Duration, config: Config) -> Config {
    config
        .timeouts(|t| (t.connect, t.attempt) = (limit, limit))
        .timeouts(|t| t.handshake = limit)
        .timeouts(|t| t.transfer = limit)
        .iwarp(|i| (i.request_timeout, i.accept_timeout, i.ready_timeout) = (limit, limit, limit))
        .iwarp(|i| i.within_host.meeting_timeout = limit)
}
