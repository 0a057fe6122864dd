//! The settings of the embedded provider.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;

use crate::roce::RoceConfig;
use crate::shm::account::{MAX_IN_PROCESS, WindowLimits};
use rdma_transport::error::{Result, TransportError, in_range};

/// The largest number of RDMA Reads that may be outstanding in one direction of a connection.
pub(crate) const MAX_READ_DEPTH: u16 = 128;
/// The longest time that a setting can have, in milliseconds: 10 years. The sum of the current time and a longer time could be out of the
/// range of [`Instant`](std::time::Instant).
const MAX_TIME: u64 = 10 * 365 * 86_400_000;

/// The policy for the CRC32c of FPDUs (RFC 5044 §4.4). A connection uses a CRC if either peer requests it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CrcPolicy {
    /// Request a CRC, unless both peers are on this host: the two IP addresses of the TCP
    /// connection are equal or both loopback addresses, and both peers see the same addresses and
    /// ports. The data of such a connection stays in the memory of this host, so it needs no CRC.
    /// TCP has no checksum for such data. Behind a proxy, which may forward the bytes to another
    /// host, the peers see different addresses or ports. A proxy that shows each peer the other
    /// one's address and port is not noticed. A client that does not report the path that it sees,
    /// such as another implementation, counts as one on another host. A server of another
    /// implementation ignores the reported path, and may accept without a CRC:
    /// [`CrcPolicy::Require`] prevents that.
    #[default]
    BetweenHosts,
    /// Always request a CRC. TCP's own checksum misses about one in ten million damaged packets.
    Require,
    /// Never request a CRC. A connection still uses a CRC if its peer requests it.
    Off,
}

/// The policy for connections within the host. Such a connection can move from its TCP stream to memory that both processes map. The
/// connection moves only if both peers agree and both processes belong to the same user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SharedMemoryPolicy {
    /// Never use shared memory. The connection uses iWARP on TCP.
    #[default]
    Off,
    /// Use shared memory if possible. Otherwise the connection stays on TCP, and the reason is logged at `debug`.
    Prefer,
    /// Always use shared memory. A connection that cannot use shared memory fails.
    Require,
}

/// Settings of connections whose ends are both on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WithinHost {
    /// The TCP congestion control of these connections. The default is `reno`, which every Linux has. `None` leaves the choice to the
    /// system. The system also chooses if it lacks the named algorithm or does not allow it (`net.ipv4.tcp_allowed_congestion_control`).
    /// BBR, the default of some systems, paces traffic even within the host. Pacing costs one timer per chunk of data.
    pub congestion: Option<String>, // local: a setting
    /// The longest wait for the next message of the peer during the setup of shared memory. After
    /// this time, the connection stays on TCP. With [`SharedMemoryPolicy::Require`], the active
    /// side waits for the answer until the connection attempt times out.
    pub meeting_timeout: Duration,
    /// The largest sum of the lengths of the windows of all connections, in bytes. A window is
    /// memory of a peer that this process has mapped: the peer's messages and its direct regions.
    /// The windows of one connection may have a quarter of this limit. A quarter of the limit is
    /// reserved for the buffers of 256 KiB that every peer has for messages of more than 1 KiB. At
    /// the limit, no further memory is mapped: messages of more than 1 KiB arrive in parts of 1 KiB
    /// or 64 KiB, and direct regions are accessed like other regions. Default: 1 GiB. With 0,
    /// nothing is mapped.
    pub window_bytes: u64,
    /// The largest number of windows of all connections, 0 to 16,384. One connection has at most
    /// 32. A quarter of the limit is reserved for the same buffers as in `window_bytes`. All
    /// providers of a process together have at most 16,384 windows, which is a quarter of the
    /// default of `vm.max_map_count`. At the limit, no further memory is mapped. Default: 8,192.
    pub max_windows: usize,
}

impl Default for WithinHost {
    fn default() -> Self {
        Self {
            congestion: Some("reno".into()),
            meeting_timeout: Duration::from_secs(1),
            window_bytes: 1 << 30,
            max_windows: 8192,
        }
    }
}

impl WithinHost {
    /// Returns the limits of windows.
    pub(super) const fn limits(&self) -> WindowLimits {
        WindowLimits { bytes: self.window_bytes, count: self.max_windows }
    }
}

/// The settings of [`crate::iwarp::Iwarp`]. The defaults suit a server on a network that it does not control. No time may be longer than
/// 10 years.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct IwarpConfig {
    /// The CRC policy for FPDUs.
    pub crc: CrcPolicy,
    /// The largest number of incoming connections with an unfinished handshake, at least 1. Each such connection uses one descriptor and
    /// less than 2 KiB.
    ///
    /// At the limit, a new connection evicts the oldest connection that has not sent its request, if the `request_grace` of that connection
    /// is over. Connections that wait for the program to accept or reject them are never evicted. While no connection can be evicted, new
    /// connections wait in the backlog of the listener.
    pub max_handshakes: usize,
    /// The largest number of incoming connections from one address that have not sent their request, at least 1. IPv6 addresses with the
    /// same first 64 bits count as one address. At the limit, a new connection from that address evicts the oldest of these connections, if
    /// the `request_grace` of the oldest one is over. `None`, the default, means half of `max_handshakes`, so that connections from one
    /// address cannot exclude those from other addresses.
    pub max_handshakes_per_peer: Option<usize>,
    /// The networks that may connect. `None`, the default, admits every address. A connection from any other address is reset before
    /// anything is read from it or allocated for it. A datagram from any other address is dropped.
    pub allowed_peers: Option<Vec<IpNet>>, // local: a setting
    /// The largest number of sockets that still deliver bytes after their connection has ended. At
    /// the limit, or if these sockets have 64 MiB of unsent bytes, the oldest socket is closed, and
    /// its unsent bytes are lost. With 0, only the bytes that fit into the socket's buffer when the
    /// connection ends are sent.
    pub max_lingering: usize,
    /// The longest time from the start of a TCP connection until its MPA request has arrived completely. After this time, the connection is
    /// reset.
    pub request_timeout: Duration,
    /// The time that a new connection has to send its request before a newer connection may evict it. A longer time favors slow clients in
    /// a burst of more connections than [`IwarpConfig::max_handshakes`] allows. A shorter time admits new connections sooner while an
    /// attacker keeps that many silent connections open.
    pub request_grace: Duration,
    /// The longest time from the event of a connect request to the program's accept or reject. After this time, the peer is rejected.
    pub accept_timeout: Duration,
    /// The longest time from the program's accept to the first message of a peer that has agreed to send first. After this time, the
    /// connection fails.
    pub ready_timeout: Duration,
    /// The longest time from the end of the local stream to the end of the peer's stream. After this time, the socket is closed.
    pub linger: Duration,
    /// The time for which a server holds its sends after the MPA reply, so that the client does not read the reply and the first FPDU in
    /// one call. Connections whose client has agreed to send first do not wait for this time.
    pub reply_grace: Duration,
    /// The time for which a listener pauses when the system has no descriptor for a new connection, at least 1 ms.
    pub accept_backoff: Duration,
    /// If true, a connection attempt is repeated once with MPA revision 1 when the peer closes the TCP connection instead of answering the
    /// MPA request of revision 2.
    pub retry_v1: bool,
    /// The number of RDMA Reads that may be outstanding in each direction, 1 to 128. Used if the program gives no number for a connection.
    /// A connection keeps memory for the largest number of Reads that were ever outstanding at the same time, about 80 bytes per Read on
    /// each peer.
    pub read_depth: u16,
    /// If true, MPA markers are sent to a peer that requires markers, as some adapters do. If false, a peer that requires markers is
    /// rejected.
    pub markers: bool,
    /// If true, the extensions of RFC 7306 (immediate data and atomic operations) can be used. Each connection also needs a call of
    /// [`rdma_transport::roles::Extensions::enable_extensions`].
    pub extensions: bool,
    /// The number of bytes that one connection may receive per call of `progress` before other connections are served. Each FPDU counts as
    /// 1,024 bytes more than its length, so that the number of FPDUs without payload is limited, too.
    pub receive_budget: usize,
    /// The policy for shared memory on connections within the host.
    pub shared_memory: SharedMemoryPolicy,
    /// The other settings for connections within the host.
    pub within_host: WithinHost,
    /// The settings of datagrams, such as UDP ports and Q_Key.
    pub roce: RoceConfig,
}

impl CrcPolicy {
    /// Returns true if this policy requests a CRC. `within_host` is true if both ends of the
    /// connection are on this host, without a proxy between them.
    pub(crate) const fn is_requested(self, within_host: bool) -> bool {
        match self {
            Self::BetweenHosts => !within_host,
            Self::Require => true,
            Self::Off => false,
        }
    }
}

impl Default for IwarpConfig {
    fn default() -> Self {
        Self {
            crc: CrcPolicy::default(),
            max_handshakes: 4096,
            max_handshakes_per_peer: None,
            allowed_peers: None,
            max_lingering: 1024,
            request_timeout: Duration::from_secs(5),
            request_grace: Duration::from_millis(500),
            accept_timeout: Duration::from_secs(10),
            ready_timeout: Duration::from_secs(10),
            linger: Duration::from_secs(1),
            reply_grace: Duration::from_millis(10),
            accept_backoff: Duration::from_millis(100),
            retry_v1: true,
            read_depth: 64,
            markers: true,
            extensions: false,
            receive_budget: 512 * 1024,
            shared_memory: SharedMemoryPolicy::Off,
            within_host: WithinHost::default(),
            roce: RoceConfig::default(),
        }
    }
}

impl IwarpConfig {
    /// Returns the largest allowed number of half-open connections from one host. A connection is half-open until its MPA request has
    /// arrived.
    pub(super) fn handshakes_per_peer(&self) -> usize {
        self.max_handshakes_per_peer.unwrap_or(self.max_handshakes.div_ceil(2))
    }

    /// Returns true if the settings allow connections from this address.
    pub(super) fn admits(&self, peer: IpAddr) -> bool {
        let peer = peer.to_canonical();
        self.allowed_peers.as_ref().is_none_or(|networks| networks.iter().any(|network| network.contains(&peer)))
    }

    /// Returns the names and the values of the settings that are times.
    const fn times(&self) -> [(&'static str, Duration); 8] {
        [
            ("request_timeout", self.request_timeout),
            ("request_grace", self.request_grace),
            ("accept_timeout", self.accept_timeout),
            ("ready_timeout", self.ready_timeout),
            ("linger", self.linger),
            ("reply_grace", self.reply_grace),
            ("accept_backoff", self.accept_backoff),
            ("meeting_timeout", self.within_host.meeting_timeout),
        ]
    }

    /// Returns an error if a setting is out of its range.
    pub(crate) fn check(&self) -> Result<()> {
        let range = |what, value, range| Err(TransportError::OutOfRange { what, value, range });
        if self.max_handshakes == 0 {
            return range("max_handshakes", 0, "at least 1");
        }
        if self.max_handshakes_per_peer == Some(0) {
            return range("max_handshakes_per_peer", 0, "at least 1");
        }
        if self.read_depth == 0 || self.read_depth > MAX_READ_DEPTH {
            return range("read_depth", self.read_depth.into(), "1 to 128");
        }
        if self.receive_budget == 0 {
            return range("receive_budget", 0, "at least 1");
        }
        in_range("max_windows", self.within_host.max_windows as u64, 0..=MAX_IN_PROCESS as u64, "at most 16384")?;
        for (what, time) in self.times() {
            let milliseconds = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
            in_range(what, milliseconds, 0..=MAX_TIME, "at most 10 years (given here in ms)")?;
        }
        if self.accept_backoff < Duration::from_millis(1) {
            // With a pause of 0, the call that handles deadlines would never return.
            return range("accept_backoff", 0, "at least 1 ms (given here in ms)");
        }
        if self.roce.port == Some(0) || self.roce.group_port == 0 {
            return range("UDP port of datagrams or groups", 0, "at least 1");
        }
        // Q_Keys with the highest bit set are reserved for management (InfiniBand Architecture Specification, volume 1, §10.2.5).
        if self.roce.queue_key >> 31 != 0 {
            return range("queue key of datagrams", self.roce.queue_key.into(), "below 0x80000000");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Setting = fn(&mut IwarpConfig) -> &mut Duration;

    /// Each time is accepted up to `MAX_TIME`, and refused above it, because a deadline could be
    /// out of range.
    #[test]
    fn no_time_leaves_the_range_of_deadlines() {
        let settings: [(&str, Setting); 8] = [
            ("request_timeout", |config| &mut config.request_timeout),
            ("request_grace", |config| &mut config.request_grace),
            ("accept_timeout", |config| &mut config.accept_timeout),
            ("ready_timeout", |config| &mut config.ready_timeout),
            ("linger", |config| &mut config.linger),
            ("reply_grace", |config| &mut config.reply_grace),
            ("accept_backoff", |config| &mut config.accept_backoff),
            ("meeting_timeout", |config| &mut config.within_host.meeting_timeout),
        ];
        for (name, of) in settings {
            let mut config = IwarpConfig::default();
            *of(&mut config) = Duration::from_millis(MAX_TIME);
            config.check().unwrap();
            for time in [Duration::from_millis(MAX_TIME + 1), Duration::MAX] {
                *of(&mut config) = time;
                let refused = matches!(config.check(), Err(TransportError::OutOfRange { what, .. }) if what == name);
                assert!(refused, "{name} {time:?}");
            }
            *of(&mut config) = Duration::ZERO;
            assert_eq!(config.check().is_err(), name == "accept_backoff", "{name}");
        }
    }
}
