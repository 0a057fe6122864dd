//! Timeouts.

use std::time::Duration;

use crate::error::Error;

/// The timeouts of a reactor, each 1 ms to 24 h; see [`Config::timeouts`](crate::Config::timeouts).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Timeouts {
    /// Time for an outgoing connection until `on_connect`. Default: 10 s.
    pub connect: Duration,
    /// Time for an RDMA device to resolve the address of a peer. After that,
    /// [`ProviderChoice::Auto`](super::ProviderChoice::Auto) uses the embedded provider for the connection, and the
    /// reactor logs it at `info`. A path of InfiniBand that was not used for a while may need more than the default.
    /// The other choices do not use this timeout. Default: 200 ms.
    pub resolve: Duration,
    /// Time for one address of a peer to answer, if the peer has further addresses ([`crate::Context::connect_any`],
    /// [`crate::Context::connect_host`]); then the next one is tried. The last address has `connect`, and no address
    /// has more than that. Default: 2 s, in which TCP sends two SYNs.
    pub attempt: Duration,
    /// Time for an incoming connection from the accept to `on_connect`. Default: 5 s.
    pub handshake: Duration,
    /// Silence of the peer after which the reactor sends it a keepalive ping. Default: 5 s.
    pub keepalive_interval: Duration,
    /// Silence of the peer after which the reactor ends the connection; longer than `keepalive_interval`. The peer
    /// answers pings whatever its own settings are. Default: 15 s.
    pub keepalive: Duration,
    /// Time that a message past [`Config::buffer_size`](crate::Config::buffer_size) may make no progress, in either
    /// direction, on a connection that is otherwise alive. A peer that neither fetches an offered message nor lets its
    /// own offer be fetched for so long loses its connection, because others need the memory. Three rules add to this:
    ///
    /// - While others wait for the memory, a peer that answers no Read for 2 s loses its connection.
    /// - A peer that waits for memory itself has four times this timeout.
    /// - A message in several buffers has this timeout as a whole.
    ///
    /// The sender gets a report for every 4 MiB that its peer has fetched, so the timeout may be short for long
    /// messages, too. Default: 30 s.
    pub transfer: Duration,
    /// Time for a closed connection to send everything that was accepted, and again for each message, or each 4 MiB of
    /// one, that the peer has fetched in the meantime. The rest is not sent, and `on_send_complete` reports that.
    /// On an iWARP device (siw) the connection ends when the peer has received everything, within the same time.
    /// Default: 2 s.
    pub close: Duration,
    /// Time for a device to flush a connection's queues before the reactor destroys them. Default: 1 s.
    pub flush: Duration,
    /// Time after which the pool returns memory to the system: slabs whose buffers are all free, and which were not
    /// needed during that time. The first slab stays. Default: 30 s.
    pub pool_idle: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            resolve: Duration::from_millis(200),
            attempt: Duration::from_secs(2),
            handshake: Duration::from_secs(5),
            keepalive_interval: Duration::from_secs(5),
            keepalive: Duration::from_secs(15),
            transfer: Duration::from_secs(30),
            close: Duration::from_secs(2),
            flush: Duration::from_secs(1),
            pool_idle: Duration::from_secs(30),
        }
    }
}

impl Timeouts {
    /// Checks each time against its range.
    pub(super) fn validate(&self) -> Result<(), Error> {
        let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let day = Duration::from_secs(86_400);
        for (setting, value) in [
            ("timeouts.connect", self.connect),
            ("timeouts.resolve", self.resolve),
            ("timeouts.attempt", self.attempt),
            ("timeouts.handshake", self.handshake),
            ("timeouts.keepalive_interval", self.keepalive_interval),
            ("timeouts.keepalive", self.keepalive),
            ("timeouts.transfer", self.transfer),
            ("timeouts.close", self.close),
            ("timeouts.flush", self.flush),
            ("timeouts.pool_idle", self.pool_idle),
        ] {
            if value < Duration::from_millis(1) || value > day {
                let range = "1 ms to 24 h (given here in ms)";
                return Err(Error::Config { setting, value: milliseconds(value), range });
            }
        }
        if self.keepalive <= self.keepalive_interval {
            let (setting, range) = ("timeouts.keepalive", "longer than timeouts.keepalive_interval (both in ms)");
            return Err(Error::Config { setting, value: milliseconds(self.keepalive), range });
        }
        Ok(())
    }
}
