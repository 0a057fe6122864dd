//! The timeouts of a reactor.

use std::time::Duration;

use crate::error::Error;

/// The timeouts of a reactor, each 1 ms to 24 h. Change them with [`Config::timeouts`](crate::Config::timeouts).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Timeouts {
    /// Longest time to establish an outgoing connection at the last or only address of the peer, up
    /// to `on_connect`. Before this attempt, the lookup of the peer's name may take the same time,
    /// and each attempt at an earlier address may take [`Timeouts::attempt`]. If the peer accepts
    /// the connection at an earlier address, the security handshake there may again take this time.
    /// Default: 10 s.
    pub connect: Duration,
    /// Longest time for an RDMA device to resolve the address of a peer. After that time,
    /// [`ProviderChoice::Auto`](super::ProviderChoice::Auto) uses the embedded provider for the connection, and the
    /// reactor logs that at `info`. An InfiniBand path that was not used for a while may need more than the default.
    /// The other values of `ProviderChoice` ignore this timeout. Default: 200 ms.
    pub resolve: Duration,
    /// Time for which the reactor waits for an answer from one address of a peer, if more addresses
    /// follow ([`crate::Context::connect_any`], [`crate::Context::connect_host`]). After this time,
    /// the reactor tries the next address. For the last address, [`Timeouts::connect`] applies
    /// instead. If `attempt` is longer than `connect`, `connect` applies to every address. Default:
    /// 2 s, in which TCP sends two SYNs.
    pub attempt: Duration,
    /// Longest time for each step of an incoming connection in which the local side waits for the
    /// peer, from the acceptance of the connection to `on_connect`. A plain connection has one
    /// step, or two in shared memory. A secured connection has one step for each message of its
    /// handshake that the local side sends. A step begins when the local side has sent its message.
    /// If the local side takes no turn when the time expires, the peer gets additional time: the
    /// delay until the next turn, at most as long as this timeout. Default: 5 s.
    pub handshake: Duration,
    /// The reactor sends the peer a keepalive ping when the peer has sent nothing for this time. Default: 5 s.
    pub keepalive_interval: Duration,
    /// The reactor ends the connection when the peer has sent nothing for this time. The time must
    /// be longer than `keepalive_interval`. The peer answers pings, regardless of its own settings.
    /// On a device, a ping waits behind the work requests that were posted before it, so the time
    /// must also be longer than their transmission takes. On the embedded provider, an
    /// acknowledgement counts as a sign of life if it frees space in TCP's send buffer for waiting
    /// data. So there the time must be longer than the transmission of one full send buffer takes.
    /// On Linux, the buffer has up to 4 MiB by default, see
    /// [`TcpConfig::send_buffer`](crate::transport::iwarp::TcpConfig::send_buffer). After an outage
    /// of the path, TCP notices only with its next retransmission that the path works again. On
    /// Linux 6.15 and later, two retransmissions are at most an eighth of `keepalive` apart, but
    /// this interval is at least 1 s and at most 2 minutes. Earlier kernels double the interval
    /// after each retransmission, so an outage of more than half of `keepalive` may end the
    /// connection. Default: 15 s.
    pub keepalive: Duration,
    /// Time for which a message longer than [`Config::buffer_size`](crate::Config::buffer_size) may make no progress,
    /// in either direction, on a connection that is otherwise alive. A peer stops the progress if it does not fetch a
    /// message that it was offered, or does not answer the Reads for a message that it has offered. After this time the
    /// reactor ends the connection, because other connections need the memory. Four more rules apply:
    ///
    /// - If a peer answers no RDMA Read for 2 s while other connections wait for memory, the reactor ends the
    ///   connection.
    /// - If the peer has reported that it has no memory for the message yet, the timeout is four times as long.
    /// - A message that arrives in several buffers must be complete within this timeout.
    /// - Time in which the local side takes no turn does not count. The reactor checks the timeout
    ///   eight times, and adds the delay of each late check to the timeout. For each check that is
    ///   late by an eighth of the timeout or more, it adds another eighth. These eighths together
    ///   are at most as long as the timeout.
    ///
    /// While the receiver fetches a message, it sends a report to the sender for every 4 MiB that it has fetched. Each
    /// report counts as progress. So the timeout may be short even for long messages. Default: 30 s.
    pub transfer: Duration,
    /// Time for which a closed connection continues to send the accepted messages. The time starts
    /// again each time that the peer has fetched a message, or another 4 MiB of a message. Messages
    /// that are not sent within this time are discarded, and `on_send_complete` reports that. On an
    /// iWARP device (siw), the connection ends when the peer has received all data, or when this
    /// time has passed. The time also limits the wait of `crate::threaded` and `crate::call` before
    /// they close a connection whose messages, answers or refusals are still in their queues, see
    /// [`crate::Context::limit_close`]. Default: 2 s.
    pub close: Duration,
    /// Longest time for a device to flush the queues of an ended connection. After this time, the reactor destroys the
    /// queues. Default: 1 s.
    pub flush: Duration,
    /// Time after which the pool returns unused memory to the system: slabs (registered blocks of buffers) that were
    /// not needed during this time and whose buffers are all free. The first slab always stays. Default: 30 s.
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
    /// Checks that each timeout is in its range.
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
                let range = "1 ms to 24 h (given here in ms)".into();
                return Err(Error::Config { setting, value: milliseconds(value), range });
            }
        }
        if self.keepalive <= self.keepalive_interval {
            let (setting, range) =
                ("timeouts.keepalive", "longer than timeouts.keepalive_interval (both in ms)".into());
            return Err(Error::Config { setting, value: milliseconds(self.keepalive), range });
        }
        Ok(())
    }
}
