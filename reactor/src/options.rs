//! The options of one connection or one listener. The settings for all connections and listeners are in [`crate::Config`].

use rdma_transport::cm::{self, ConnectParam, ExchangeOptions, PathOptions, ReadDepth, Retries, Source};

use crate::config::Framing;
use crate::error::Error;
use crate::security::{Security, SecurityError};

/// The retries, the read depth and the RFC 7306 extensions that a connection requests from its
/// device. The options of a listener contain them for the connections that the listener accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Service {
    retries: Retries,
    read_depth: ReadDepth,
    /// True if the program has declared, with [`ConnectOptions::extensions`], that the peer supports the extensions of RFC 7306.
    pub(crate) extensions: bool,
}

impl Service {
    /// Returns the parameters with which the connection manager connects or accepts. With
    /// [`Framing::Credits`], the private data is a greeting, which contains its own length.
    pub(crate) const fn param(self, private_data: &[u8], framing: Framing) -> ConnectParam<'_> {
        let ReadDepth { responder_resources, initiator_depth } = self.read_depth;
        let self_delimiting = matches!(framing, Framing::Credits);
        ConnectParam { private_data, responder_resources, initiator_depth, retries: self.retries, self_delimiting }
    }
}

/// Returns an error if connections with `framing` cannot be secured with the settings `security`. `connects` is true for the side that
/// connects, and false for the side that listens.
pub(crate) fn check_security(security: &Security, framing: Framing, connects: bool) -> Result<(), SecurityError> {
    if framing == Framing::Raw && !security.is_plain() {
        let why = "Framing::Raw has nothing that could be secured: use Framing::Credits, or Security::Plain";
        return Err(SecurityError::Settings(why.into()));
    }
    security.check(connects)
}

/// The options of a new connection. If the transport does not support an option, the transport ignores the option, and writes one line to
/// the log at `info`. [`crate::Context::connect_with`] returns an error if the value of an option is out of range, or if the transport
/// cannot select the source address or device.
#[derive(Clone, Debug, Default)]
pub struct ConnectOptions {
    pub(crate) private_data: Vec<u8>, // local: private data of the program
    pub(crate) framing: Framing,
    pub(crate) path: PathOptions,
    pub(crate) exchange: Option<ExchangeOptions>,
    pub(crate) service: Service,
    pub(crate) security: Option<Security>,
}

impl ConnectOptions {
    /// Returns the default options: no private data, [`Framing::Credits`], and the route that the system chooses.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the private data that the peer receives in `on_connect_request`: at most [`crate::MAX_USER_PRIVATE_DATA`] bytes. Default: no
    /// data.
    #[must_use]
    pub fn private_data(mut self, data: impl Into<Vec<u8>>) -> Self {
        self.private_data = data.into();
        self
    }

    /// Sets the framing, which defines the format of messages and their flow control. Default: [`Framing::Credits`].
    #[must_use]
    pub const fn framing(mut self, framing: Framing) -> Self {
        self.framing = framing;
        self
    }

    /// Sets the type of service of every packet, from 0 to 255. The upper six bits of the value are the DSCP (RFC 2474). On InfiniBand and
    /// RoCE, the peer's packets have the same value as the local side's packets. On InfiniBand, the subnet manager uses the value to choose
    /// the service level. Default: the setting of the system or of the administrator (`rdma_set_option`(3), `RDMA_OPTION_ID_TOS`).
    #[must_use]
    pub const fn type_of_service(mut self, octet: u8) -> Self {
        self.path.type_of_service = Some(octet);
        self
    }

    /// Sets the time after which the device retransmits an unacknowledged request, as a code from 0 to 31. The time is 4.096 us times two
    /// to the power of the code. 0 means that the device never retransmits (`rdma_set_option`(3), `RDMA_OPTION_ID_ACK_TIMEOUT`). The option
    /// has no effect on iWARP. Default: the value of the connection manager, about 2 s.
    #[must_use]
    pub const fn ack_timeout(mut self, code: u8) -> Self {
        self.path.ack_timeout = Some(code);
        self
    }

    /// Sets the local address or the device of the connection. Default: the routes of the system select both.
    #[must_use]
    pub fn source(mut self, source: Source) -> Self {
        self.path.source = source;
        self
    }

    /// Sets how often the devices retransmit a request before the connection fails, and how long the peer's device waits before it
    /// retransmits a message for which the local side had no posted receive (`rdma_connect`(3)). The option has no effect on iWARP, where
    /// TCP retransmits. Default: [`Retries::default`].
    #[must_use]
    pub const fn retries(mut self, retries: Retries) -> Self {
        self.service.retries = retries;
        self
    }

    /// Sets the largest number of RDMA Reads and atomics that may be in flight in each direction. A number above the limit of the device is
    /// reduced to that limit. 0, the default, selects the limit of the device.
    #[must_use]
    pub const fn read_depth(mut self, depth: ReadDepth) -> Self {
        self.service.read_depth = depth;
        self
    }

    /// Declares that the peer supports the extensions of RFC 7306: RDMA Writes with immediate data, and atomics. The option applies only to
    /// connections of the embedded provider with [`Framing::Raw`]. The two sides of such a connection cannot negotiate the extensions,
    /// because MPA has no field for them. A peer that does not support the extensions ends the connection when the local side uses an
    /// extension. The option has no effect on other connections: with [`Framing::Credits`] the greetings negotiate the extensions, and on
    /// RDMA devices only the device decides if they are used. Default: false.
    #[must_use]
    pub const fn extensions(mut self, of_peer: bool) -> Self {
        self.service.extensions = of_peer;
        self
    }

    /// Connects by exchange, without rdma_cm: the two sides exchange the parameters of their queue pairs over a TCP connection to the
    /// peer's address. The peer must listen with [`ListenOptions::exchange`]. `options` select the port and the GID of the local queue
    /// pair, if the address does not determine them. See the [page about exchange](crate::guide::exchange). Default: not set, which means
    /// rdma_cm.
    #[must_use]
    pub fn exchange(mut self, options: ExchangeOptions) -> Self {
        self.exchange = Some(options);
        self
    }

    /// Sets how the connection is secured. Default: [`crate::Config::security`].
    #[must_use]
    pub fn security(mut self, security: Security) -> Self {
        self.security = Some(security);
        self
    }

    /// Returns an error if the value of an option is out of range.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.path.check()?;
        self.service.retries.check()?;
        Ok(())
    }
}

/// The options of a listener and of its connections. If the transport does not support an option,
/// the transport ignores the option, and writes one line to the log at `info`.
/// [`crate::Context::listen_with`] returns an error if the value of an option is out of
/// range.
#[derive(Clone, Debug, Default)]
pub struct ListenOptions {
    pub(crate) framing: Framing,
    pub(crate) path: cm::ListenParam,
    pub(crate) exchange: Option<ExchangeOptions>,
    pub(crate) service: Service,
    pub(crate) security: Option<Security>,
}

impl ListenOptions {
    /// Returns the default options: [`Framing::Credits`], and the settings of the system for all other options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the framing, which defines the format of messages and their flow control. Default: [`Framing::Credits`].
    #[must_use]
    pub const fn framing(mut self, framing: Framing) -> Self {
        self.framing = framing;
        self
    }

    /// Sets the type of service of the packets that the local side sends, like [`ConnectOptions::type_of_service`]. The option has an
    /// effect only on iWARP. On InfiniBand and RoCE, the side that connects sets the type of service of both directions.
    #[must_use]
    pub const fn type_of_service(mut self, octet: u8) -> Self {
        self.path.type_of_service = Some(octet);
        self
    }

    /// Sets the retransmission timeout, like [`ConnectOptions::ack_timeout`].
    #[must_use]
    pub const fn ack_timeout(mut self, code: u8) -> Self {
        self.path.ack_timeout = Some(code);
        self
    }

    /// Sets the number of connect requests that may wait until the reactor accepts them. The system refuses further requests
    /// (`rdma_listen`(3), `listen`(2)). Linux limits the number to `net.core.somaxconn` (4,096), and with devices to
    /// `net.rdma_ucm.max_backlog` (1,024). Default: 4,096.
    #[must_use]
    pub const fn backlog(mut self, requests: u32) -> Self {
        self.path.backlog = requests;
        self
    }

    /// Sets the address families of the peers that a listener on an IPv6 address accepts: only IPv6 if `only` is true; IPv6 and IPv4 if
    /// `only` is false (`rdma_set_option`(3), `RDMA_OPTION_ID_AFONLY`). Default: the setting of the system.
    #[must_use]
    pub const fn ipv6_only(mut self, only: bool) -> Self {
        self.path.ipv6_only = Some(only);
        self
    }

    /// Sets the retries, like [`ConnectOptions::retries`]. [`Retries::path`], the number of retransmissions, is ignored here: both sides
    /// use the value of the side that connects.
    #[must_use]
    pub const fn retries(mut self, retries: Retries) -> Self {
        self.service.retries = retries;
        self
    }

    /// Sets the largest number of RDMA Reads and atomics in flight, like [`ConnectOptions::read_depth`]. The number in flight cannot exceed
    /// the number that the peer requests when it connects.
    #[must_use]
    pub const fn read_depth(mut self, depth: ReadDepth) -> Self {
        self.service.read_depth = depth;
        self
    }

    /// Declares that every peer of this listener supports the extensions of RFC 7306, like [`ConnectOptions::extensions`].
    #[must_use]
    pub const fn extensions(mut self, of_peers: bool) -> Self {
        self.service.extensions = of_peers;
        self
    }

    /// Listens for peers that connect by exchange ([`ConnectOptions::exchange`]), on a TCP port. The listener may have any address of this
    /// host. `options` select the port and the GID of the queue pairs, if the address to which a peer connects does not determine them.
    /// Default: not set, which means rdma_cm.
    #[must_use]
    pub fn exchange(mut self, options: ExchangeOptions) -> Self {
        self.exchange = Some(options);
        self
    }

    /// Sets how incoming connections are secured. Default: [`crate::Config::security`].
    #[must_use]
    pub fn security(mut self, security: Security) -> Self {
        self.security = Some(security);
        self
    }

    /// Returns an error if the value of an option is out of range. Checks only those options that the transport would check too late, when
    /// a connection arrives.
    pub(crate) fn check(&self) -> Result<(), Error> {
        Ok(self.service.retries.check()?)
    }
}
