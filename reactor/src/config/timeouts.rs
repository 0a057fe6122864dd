//! How long things may take.

use std::time::Duration;

use crate::error::Error;

/// How long things may take, each 1 ms to 24 h; see [`Config::timeouts`](crate::Config::timeouts).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Timeouts {
    /// Time an outgoing connection may take until `on_connect`. 1 ms to 24 h. Default: 10 s.
    pub connect: Duration,
    /// Time that an RDMA device has to resolve the address of a peer, before [`ProviderChoice::Auto`](super::ProviderChoice::Auto) takes the
    /// embedded provider for the connection, with a line in the log at `info`. A path of InfiniBand that was not used
    /// for a while may take longer than the default. The other choices do not use it. 1 ms to 24 h. Default: 200 ms.
    pub resolve: Duration,
    /// Time that one address of a peer has to answer, as long as the peer has further addresses
    /// ([`crate::Context::connect_any`], [`crate::Context::connect_host`]); then the next one is tried. The last
    /// address has `connect`, and no address has more than that. 1 ms to 24 h. Default: 2 s, in which TCP asks
    /// twice.
    pub attempt: Duration,
    /// Time an incoming connection may take from the accept to `on_connect`. 1 ms to 24 h. Default: 5 s.
    pub handshake: Duration,
    /// Silence after which the peer is asked whether it is there. Default: 5 s.
    pub keepalive_interval: Duration,
    /// Silence after which the peer is given up, longer than `keepalive_interval`. Only this time matters to the peer:
    /// it answers whatever its own settings are. Default: 15 s.
    pub keepalive: Duration,
    /// Time that a message past [`Config::buffer_size`](crate::Config::buffer_size) may stand still, in either direction, while the connection is otherwise
    /// alive: a peer that neither fetches what it was offered nor lets its own offer be fetched loses its connection,
    /// since others want the memory. While some wait for it, a peer that answers no read for 2 s loses its connection.
    /// A peer that waits for memory of its own may do so for four times this. A message in several buffers has this
    /// time as a whole. The side that sends hears of every 4 MiB that its peer has fetched, so the time may be short
    /// for long messages, too. 1 ms to 24 h. Default: 30 s.
    pub transfer: Duration,
    /// Time a closed connection gets to send what was accepted, and again for each message, or 4 MiB of one, that the
    /// peer has fetched meanwhile. What is left then is not sent: `on_send_complete` says so. On an iWARP device (siw)
    /// the connection ends when the peer has got everything, within the same time. 1 ms to 24 h. Default: 2 s.
    pub close: Duration,
    /// Time a device gets to flush a connection's queues before it is destroyed. 1 ms to 24 h. Default: 1 s.
    pub flush: Duration,
    /// Time after which the pool gives memory back to the system: slabs whose buffers nobody holds, and which were not
    /// needed since. The first slab stays. Default: 30 s.
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
