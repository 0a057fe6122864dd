//! Settings of the embedded provider.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;

use crate::error::{Error, Result};

/// The most outstanding RDMA Reads that peers accept.
pub(crate) const MAX_READ_DEPTH: u16 = 128;

/// Whether FPDUs carry a checked CRC32c (RFC 5044 §4.4). A connection uses it if either side asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CrcPolicy {
    /// Ask for it. TCP's own checksum misses about one in ten million damaged packets.
    #[default]
    Require,
    /// Do not ask for it. It is still used with a peer that asks.
    Off,
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
    /// anything is read from it or allocated for it.
    pub allowed_peers: Option<Vec<IpNet>>,
    /// Sockets of ended connections that still deliver what was sent. At the limit, a socket is closed at once and its
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
    /// RDMA Reads that may be outstanding in each direction where the user gives no number, 1 to 128.
    pub read_depth: u16,
    /// Whether to send MPA markers to a peer that requires them, as some adapters do. If not, such a peer is rejected.
    pub markers: bool,
    /// Whether to allow the extensions of RFC 7306, immediate data and atomics, on connections for which
    /// [`crate::Provider::enable_extensions`] was called.
    pub extensions: bool,
    /// Bytes received per connection and call of progress before the next connection has its turn. Each FPDU counts as
    /// 512 bytes more than it has, so that those without payload are bounded, too.
    pub receive_budget: usize,
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
            read_depth: 16,
            markers: true,
            extensions: false,
            receive_budget: 512 * 1024,
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
        Ok(())
    }
}
