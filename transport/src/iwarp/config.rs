//! Settings of the embedded provider.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;

use crate::error::{Error, Result};
use crate::roce::RoceConfig;

/// The largest number of outstanding RDMA Reads that peers accept.
pub(crate) const MAX_READ_DEPTH: u16 = 128;

/// The policy for the CRC32c of FPDUs (RFC 5044 §4.4). A connection uses it if either peer requests it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CrcPolicy {
    /// Request it, unless both ends of the TCP connection are on this host: their addresses are the same, or both are loopback addresses.
    /// TCP does not checksum data that stays in the memory of one host either. If a proxy may forward such a connection to another host,
    /// use [`CrcPolicy::Require`].
    #[default]
    BetweenHosts,
    /// Request it. TCP's own checksum misses about one in ten million damaged packets.
    Require,
    /// Do not request it. It is still used with a peer that requests it.
    Off,
}

/// The policy for connections within the host: they can leave their TCP stream for memory that both processes map. This happens only if
/// both peers want it and both processes belong to the same user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SharedMemoryPolicy {
    /// Never use shared memory. The connection uses iWARP on TCP.
    #[default]
    Off,
    /// Use shared memory if possible. Otherwise the connection stays on TCP, and the reason is logged at `debug`.
    Prefer,
    /// Always use shared memory. A connection that cannot use it fails.
    Require,
}

/// Settings of connections whose ends are both on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WithinHost {
    /// The TCP congestion control of these connections. `None` leaves the choice to the system. If the system lacks the named one or does
    /// not allow it (`net.ipv4.tcp_allowed_congestion_control`), the system's choice applies as well. The default, `reno`, is in every
    /// Linux. BBR, which is the default on some systems, paces traffic even within the host, at the cost of one timer per chunk.
    pub congestion: Option<String>,
    /// The time in which a peer must answer in shared memory. After it, the connection stays on TCP.
    pub meeting_timeout: Duration,
}

impl Default for WithinHost {
    fn default() -> Self {
        Self { congestion: Some("reno".into()), meeting_timeout: Duration::from_secs(1) }
    }
}

/// Settings of [`crate::iwarp::Iwarp`]. The defaults suit a server on a network that it does not control.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct IwarpConfig {
    /// The CRC policy for FPDUs.
    pub crc: CrcPolicy,
    /// The largest number of incoming connections with an unfinished handshake, at least 1. At the limit, a new connection evicts the
    /// oldest one that has not sent its request, provided that its `request_grace` is over. Connections that wait for the program's accept
    /// or reject are never evicted: while only those remain, new connections wait in the listener's backlog. Each connection uses one
    /// descriptor and less than 2 KiB.
    pub max_handshakes: usize,
    /// The largest number of these connections that one address may have without a request, at least 1. IPv6 addresses with the same first
    /// 64 bits count as one address. At the limit, the oldest connection from that address is evicted in the same manner. `None`, the
    /// default, means half of `max_handshakes`, so that no single address can exclude the others.
    pub max_handshakes_per_peer: Option<usize>,
    /// The networks that may connect. `None`, the default, admits every address. A connection from any other address is reset before
    /// anything is read from it or allocated for it; a datagram from there is dropped.
    pub allowed_peers: Option<Vec<IpNet>>,
    /// The largest number of sockets that still deliver sent bytes after their connection has ended. At the limit, the oldest one is closed
    /// and its unsent bytes are lost.
    pub max_lingering: usize,
    /// The longest time from a TCP connection to its complete MPA request. After it, the connection is reset.
    pub request_timeout: Duration,
    /// The time that a new connection has to send its request before others may evict it. A longer time favors slow clients in a burst that
    /// exceeds the limits. A shorter time admits new connections sooner while an attacker fills the limit with silent connections.
    pub request_grace: Duration,
    /// The longest time from the request to the program's accept or reject. After it, the peer is rejected.
    pub accept_timeout: Duration,
    /// The longest time from accept to the first bytes of a peer that promised to send first. After it, the connection fails.
    pub ready_timeout: Duration,
    /// The longest time from the end of the local stream to the end of the peer's stream. After it, the socket is closed.
    pub linger: Duration,
    /// The time for which a server holds its sends after the reply to a client that promised no first bytes.
    pub reply_grace: Duration,
    /// The time for which a listener waits after the system had no descriptor for a new connection.
    pub accept_backoff: Duration,
    /// If true, a connect is tried once more with MPA revision 1 if the peer closes the connection on revision 2.
    pub retry_v1: bool,
    /// The number of RDMA Reads that may be outstanding in each direction if the program gives no number, 1 to 128. Each connection keeps
    /// memory for the largest number that was outstanding at one time, about 80 bytes per Read on both peers, until it ends.
    pub read_depth: u16,
    /// If true, MPA markers are sent to a peer that requires them, as some adapters do. If false, such a peer is rejected.
    pub markers: bool,
    /// If true, the extensions of RFC 7306 (immediate data and atomics) are allowed on connections for which
    /// [`crate::roles::Extensions::enable_extensions`] was called.
    pub extensions: bool,
    /// The number of bytes that one connection may receive per call of progress before the next connection is served. Each FPDU counts as
    /// 1,024 bytes more than it has, which also bounds FPDUs without payload.
    pub receive_budget: usize,
    /// The policy for shared memory on connections within the host.
    pub shared_memory: SharedMemoryPolicy,
    /// The other settings of connections within the host.
    pub within_host: WithinHost,
    /// The settings of datagrams: UDP ports and queue key.
    pub roce: RoceConfig,
}

impl CrcPolicy {
    /// Returns true if this policy requests a CRC. `within_host` returns true if the peer is on this host.
    pub(crate) fn is_requested(self, within_host: impl FnOnce() -> bool) -> bool {
        match self {
            Self::BetweenHosts => !within_host(),
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
    /// Returns the largest number of connections from one host that have not sent their request.
    pub(super) fn handshakes_per_peer(&self) -> usize {
        self.max_handshakes_per_peer.unwrap_or(self.max_handshakes.div_ceil(2))
    }

    /// Returns true if a host may connect.
    pub(super) fn admits(&self, peer: IpAddr) -> bool {
        let peer = peer.to_canonical();
        self.allowed_peers.as_ref().is_none_or(|networks| networks.iter().any(|network| network.contains(&peer)))
    }

    /// Returns an error for settings that cannot work.
    pub(crate) fn check(&self) -> Result<()> {
        let range = |what, value, range| Err(Error::OutOfRange { what, value, range });
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
        if self.roce.port == Some(0) || self.roce.group_port == 0 {
            return range("UDP port of datagrams or groups", 0, "at least 1");
        }
        // The highest bit marks the keys of management (InfiniBand Architecture Specification, volume 1, §10.2.5).
        if self.roce.queue_key >> 31 != 0 {
            return range("queue key of datagrams", self.roce.queue_key.into(), "below 0x80000000");
        }
        Ok(())
    }
}
