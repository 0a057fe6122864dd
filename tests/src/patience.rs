//! The time limits of tests. A test waits for an event, however long it takes. A limit only ends a hang, and a busy machine never reaches
//! it. So there is one limit for all.

use std::time::Duration;

use rdma_reactor::Config;

/// The longest wait for an event.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// The longest time of a whole test.
pub const TEST: Duration = Duration::from_secs(900);

/// A time longer than any test.
pub const HOUR: Duration = Duration::from_secs(3600);

/// Returns `config` with timeouts that no pause of the process reaches, for tests on real sockets whose subject is not time.
#[must_use]
pub fn patient(config: Config) -> Config {
    config
        .timeouts(|t| (t.keepalive_interval, t.keepalive) = (HOUR, 2 * HOUR))
        .timeouts(|t| t.connect = HOUR)
        .timeouts(|t| t.attempt = HOUR)
        .timeouts(|t| t.handshake = HOUR)
        .timeouts(|t| t.close = HOUR)
        .timeouts(|t| t.transfer = HOUR)
        .timeouts(|t| t.pool_idle = HOUR)
}
