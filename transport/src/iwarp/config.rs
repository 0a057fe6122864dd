//! Settings of the embedded provider.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;

use crate::error::{Error, Result};

/// The most RDMA Reads outstanding that peers take.
pub(crate) const MAX_READ_DEPTH: u16 = 128;

/// Whether FPDUs carry a checked CRC32c (RFC 5044 §4.4). A connection uses it if either side asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CrcPolicy {
    /// Ask for it: TCP's own checksum lets one error in some ten million damaged packets through.
    #[default]
    Require,
    /// Do not ask; it is used all the same with a peer that does.
    Off,
}

/// Settings of [`crate::iwarp::Iwarp`]; the defaults suit a server on a network it does not control.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct IwarpConfig {
    /// CRC of FPDUs.
    pub crc: CrcPolicy,
    /// Incoming connections whose handshake is not finished, 1 or more. At the limit, the oldest that has not sent its
    /// request gives way to a new one once it has had its `request_grace`; connections that wait for the user's accept or
    /// reject do not give way, and while there are only those, new ones wait in the listener's backlog. Each takes a
    /// descriptor and less than 2 KiB.
    pub max_handshakes: usize,
    /// Of these, connections from one address that have not sent their request, 1 or more; of IPv6 addresses the first 64
    /// bits count. At the limit the oldest of that address gives way likewise. `None`, the default, is half of
    /// `max_handshakes`, so that no address can keep the others out.
    pub max_handshakes_per_peer: Option<usize>,
    /// Networks whose hosts may connect; `None`, the default, is everybody. A connection from elsewhere is reset before
    /// anything is read from it or allocated for it.
    pub allowed_peers: Option<Vec<IpNet>>,
    /// Closed sockets that still deliver what was sent; one more is closed without.
    pub max_lingering: usize,
    /// From a TCP connection to its complete MPA request.
    pub request_timeout: Duration,
    /// The time that a new connection has for sending its request before it may have to give way to others.
    pub request_grace: Duration,
    /// From the request to the user's accept or reject; then the peer is rejected.
    pub accept_timeout: Duration,
    /// From accept to the first bytes of a peer that promised to send some.
    pub ready_timeout: Duration,
    /// From our end of the stream to the peer's.
    pub linger: Duration,
    /// How long a server's sends are held after the reply to a client that promised no first bytes.
    pub reply_grace: Duration,
    /// Pause after the system had no descriptor for a new connection.
    pub accept_backoff: Duration,
    /// Try once more with MPA revision 1 when a peer hangs up on revision 2.
    pub retry_v1: bool,
    /// RDMA Reads outstanding per direction where the user names none.
    pub read_depth: u16,
    /// Send MPA markers to a peer that requires them, as some adapters do; else it is rejected.
    pub markers: bool,
    /// Allow the extensions of RFC 7306, immediate data and atomics, where [`crate::Provider::enable_extensions`]
    /// says that the peer agreed.
    pub extensions: bool,
    /// Bytes received per connection and call of progress before the next connection has its turn. Each FPDU counts as 512
    /// bytes more than it has, so that those without payload are bounded, too.
    pub receive_budget: usize,
}

impl Default for IwarpConfig {
    fn default() -> Self {
        Self {
            crc: CrcPolicy::default(),
            max_handshakes: 128,
            max_handshakes_per_peer: None,
            allowed_peers: None,
            max_lingering: 1024,
            request_timeout: Duration::from_secs(5),
            request_grace: Duration::from_millis(50),
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

    /// Refuses what cannot work.
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
