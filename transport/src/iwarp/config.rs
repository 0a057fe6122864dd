//! Settings of the embedded provider.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;

use crate::error::{Error, Result};
use crate::roce::RoceConfig;

/// The most outstanding RDMA Reads that peers accept.
pub(crate) const MAX_READ_DEPTH: u16 = 128;

/// Whether FPDUs carry a checked CRC32c (RFC 5044 §4.4). A connection uses it if either side asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CrcPolicy {
    /// Ask for it, unless both ends of the TCP connection are on this host: their addresses are the same, or both of the loopback. What
    /// stays within a host's memory is not checked by TCP either. A proxy may pass such a connection on to another host; then
    /// [`CrcPolicy::Require`] is for you.
    #[default]
    BetweenHosts,
    /// Ask for it. TCP's own checksum misses about one in ten million damaged packets.
    Require,
    /// Do not ask for it. It is still used with a peer that asks.
    Off,
}

/// Whether a connection within the host leaves its TCP stream for memory that both processes map. Both sides have to want it; the peer is
/// a process of the same user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SharedMemoryPolicy {
    /// Never: iWARP is on the wire.
    #[default]
    Off,
    /// Where it is possible. Whatever speaks against it leaves the connection on TCP, with the reason in the log at `debug`.
    Prefer,
    /// Always: a connection for which it is not possible fails.
    Require,
}

/// Settings of connections whose ends are both on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WithinHost {
    /// Their TCP congestion control; `None` leaves it to the system, and so does a system that lacks it or does not allow it
    /// (`net.ipv4.tcp_allowed_congestion_control`). The default, `reno`, is in every Linux. BBR, which some systems use for all
    /// connections, paces what a host sends to itself, which takes a timer for each piece.
    pub congestion: Option<String>,
    /// The time that a peer has to answer in shared memory; then the connection stays on TCP.
    pub meeting_timeout: Duration,
}

impl Default for WithinHost {
    fn default() -> Self {
        Self { congestion: Some("reno".into()), meeting_timeout: Duration::from_secs(1) }
    }
}

/// Settings of [`crate::iwarp::Iwarp`]; the defaults suit a server on a network it does not control.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct IwarpConfig {
    /// Whether to ask for a CRC of FPDUs.
    pub crc: CrcPolicy,
    /// Incoming connections whose handshake is not finished, 1 or more. At the limit, the oldest that has not sent its
    /// request gives way to a new one once it has had its `request_grace`; connections that wait for the user's accept
    /// or reject do not give way, and while there are only those, new ones wait in the listener's backlog. Each takes a
    /// descriptor and less than 2 KiB.
    pub max_handshakes: usize,
    /// How many of these connections may be from one address and without a request, 1 or more; IPv6 addresses with the
    /// same first 64 bits count as one. At the limit, the oldest from that address gives way in the same manner.
    /// `None`, the default, is half of `max_handshakes`, so that no address can keep the others out.
    pub max_handshakes_per_peer: Option<usize>,
    /// The networks that may connect; `None`, the default, lets everybody. A connection from elsewhere is reset before
    /// anything is read from it or allocated for it; a datagram from elsewhere is dropped.
    pub allowed_peers: Option<Vec<IpNet>>,
    /// Sockets of ended connections that still deliver what was sent. At the limit, the oldest is closed, and its
    /// unsent bytes are lost.
    pub max_lingering: usize,
    /// The time from a TCP connection to its complete MPA request; then it is reset.
    pub request_timeout: Duration,
    /// The time that a new connection has for sending its request before it may have to give way to others. Longer is
    /// kinder to clients that are slow in a burst of more than the limits allow; shorter lets new ones in faster while
    /// somebody holds all places with silent connections.
    pub request_grace: Duration,
    /// The time from the request to the user's accept or reject; then the peer is rejected.
    pub accept_timeout: Duration,
    /// The time from accept to the first bytes of a peer that promised to send first; then the connection fails.
    pub ready_timeout: Duration,
    /// The time from the end of our stream to the end of the peer's; then the socket is closed.
    pub linger: Duration,
    /// How long a server's sends are held after the reply to a client that promised no first bytes.
    pub reply_grace: Duration,
    /// How long a listener waits after the system had no descriptor for a new connection.
    pub accept_backoff: Duration,
    /// Whether to try once more with MPA revision 1 when a peer closes the connection on revision 2.
    pub retry_v1: bool,
    /// RDMA Reads that may be outstanding in each direction where the user gives no number, 1 to 128. The most that were outstanding at a
    /// time take memory, about 80 bytes each on both sides, until the connection ends.
    pub read_depth: u16,
    /// Whether to send MPA markers to a peer that requires them, as some adapters do. If not, such a peer is rejected.
    pub markers: bool,
    /// Whether to allow the extensions of RFC 7306, immediate data and atomics, on connections for which
    /// [`crate::roles::Extensions::enable_extensions`] was called.
    pub extensions: bool,
    /// Bytes received per connection and call of progress before the next connection has its turn. Each FPDU counts as
    /// 512 bytes more than it has, so that those without payload are bounded, too.
    pub receive_budget: usize,
    /// Whether connections within the host use shared memory.
    pub shared_memory: SharedMemoryPolicy,
    /// The rest about connections within the host.
    pub within_host: WithinHost,
    /// The UDP ports of datagrams.
    pub roce: RoceConfig,
}

impl CrcPolicy {
    /// Whether this side asks a peer, which may be on this host.
    pub(crate) fn asks(self, within_host: impl FnOnce() -> bool) -> bool {
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
    /// The most connections from one host that have not sent their request.
    pub(super) fn handshakes_per_peer(&self) -> usize {
        self.max_handshakes_per_peer.unwrap_or(self.max_handshakes.div_ceil(2))
    }

    /// Whether a host may connect.
    pub(super) fn admits(&self, peer: IpAddr) -> bool {
        let peer = peer.to_canonical();
        self.allowed_peers.as_ref().is_none_or(|networks| networks.iter().any(|network| network.contains(&peer)))
    }

    /// Refuses settings that cannot work.
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
        // The highest bit is for management (InfiniBand Architecture Specification, volume 1, §10.2.5).
        if self.roce.queue_key >> 31 != 0 {
            return range("queue key of datagrams", self.roce.queue_key.into(), "below 0x80000000");
        }
        Ok(())
    }
}
