//! Options of one connection or one listener; [`crate::Config`] holds the settings for all.

use rdma_transport::cm::{self, ConnectParam, ExchangeOptions, PathOptions, ReadDepth, Retries, Source};

use crate::config::Framing;
use crate::error::Error;
use crate::security::{Security, SecurityError};

/// The service that a connection requests from its device, on either side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Service {
    retries: Retries,
    read_depth: ReadDepth,
    /// True if the program knows that the peer has the extensions of the embedded provider.
    pub(crate) extensions: bool,
}

impl Service {
    /// Returns the parameters for the connection manager.
    pub(crate) const fn param(self, private_data: &[u8]) -> ConnectParam<'_> {
        let ReadDepth { responder_resources, initiator_depth } = self.read_depth;
        ConnectParam { private_data, responder_resources, initiator_depth, retries: self.retries }
    }
}

/// Checks if connections of a framing can be secured. `connects`: for the connecting side.
pub(crate) fn check_security(security: &Security, framing: Framing, connects: bool) -> Result<(), SecurityError> {
    if framing == Framing::Raw && !security.is_plain() {
        let why = "Framing::Raw has nothing that could be secured: use Framing::Credits, or Security::Plain";
        return Err(SecurityError::Settings(why.into()));
    }
    security.check(connects)
}

/// The options of a new connection. An option that the transport does not support is ignored, with one line in the log at `info`; a source
/// that it cannot choose, and a value out of its range, are errors of [`crate::Context::connect_with`].
#[derive(Clone, Debug, Default)]
pub struct ConnectOptions {
    pub(crate) private_data: Vec<u8>,
    pub(crate) framing: Framing,
    pub(crate) path: PathOptions,
    pub(crate) exchange: Option<ExchangeOptions>,
    pub(crate) service: Service,
    pub(crate) security: Option<Security>,
}

impl ConnectOptions {
    /// Creates the defaults: no private data, [`Framing::Credits`], and the route that the system chooses.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the data for the peer's `on_connect_request`: at most [`crate::MAX_USER_PRIVATE_DATA`] bytes. Default:
    /// none.
    #[must_use]
    pub fn private_data(mut self, data: impl Into<Vec<u8>>) -> Self {
        self.private_data = data.into();
        self
    }

    /// Sets how messages travel. Default: [`Framing::Credits`].
    #[must_use]
    pub const fn framing(mut self, framing: Framing) -> Self {
        self.framing = framing;
        self
    }

    /// Sets the type of service of every packet, with the DSCP in the upper six bits (RFC 2474): 0 to 255. On InfiniBand and RoCE it also
    /// applies to the packets of the peer. On InfiniBand the subnet manager chooses the service level by it. Default: the setting of the
    /// system or the administrator (`rdma_set_option`(3), `RDMA_OPTION_ID_TOS`).
    #[must_use]
    pub const fn type_of_service(mut self, octet: u8) -> Self {
        self.path.type_of_service = Some(octet);
        self
    }

    /// Sets the time after which the device retransmits an unacknowledged request: a code from 0 to 31, for 4.096 us times two to the power
    /// of the code; 0 means never (`rdma_set_option`(3), `RDMA_OPTION_ID_ACK_TIMEOUT`). It has no effect on iWARP. Default: the connection
    /// manager's, about 2 s.
    #[must_use]
    pub const fn ack_timeout(mut self, code: u8) -> Self {
        self.path.ack_timeout = Some(code);
        self
    }

    /// Sets the local address or device of the connection. Default: the system's routes decide.
    #[must_use]
    pub fn source(mut self, source: Source) -> Self {
        self.path.source = source;
        self
    }

    /// Sets how often the device retries before the connection fails, and how long a peer waits if it found no posted
    /// receive here (`rdma_connect`(3)). It has no effect on iWARP, where TCP retransmits. Default:
    /// [`Retries::default`].
    #[must_use]
    pub const fn retries(mut self, retries: Retries) -> Self {
        self.service.retries = retries;
        self
    }

    /// Sets the limit of outstanding RDMA Reads and atomics in each direction, cut to the limits of the device. 0, the
    /// default, uses the device's own.
    #[must_use]
    pub const fn read_depth(mut self, depth: ReadDepth) -> Self {
        self.service.read_depth = depth;
        self
    }

    /// Declares that the peer has the extensions of RFC 7306: writes with immediate data, and atomics. It applies to [`Framing::Raw`] on
    /// the embedded provider. MPA cannot negotiate them, and a peer that lacks them ends the connection. Elsewhere it has no effect:
    /// devices have the operations or not, and with [`Framing::Credits`] the greetings negotiate them. Default: false.
    #[must_use]
    pub const fn extensions(mut self, of_peer: bool) -> Self {
        self.service.extensions = of_peer;
        self
    }

    /// Connects by exchange: the two sides exchange the parameters of their queue pairs over a TCP connection to the peer's address,
    /// without rdma_cm. The peer listens with [`ListenOptions::exchange`]. The options say which port and GID the queue pair has, if that
    /// does not follow from the address. See the [page about it](crate::guide::exchange). Default: none, which connects by rdma_cm.
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

    /// Checks the ranges.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.path.check()?;
        self.service.retries.check()?;
        Ok(())
    }
}

/// The options of a listener and of its connections. An option that the transport does not support is ignored, with one line in the log at
/// `info`; a value out of its range is an error of [`crate::Context::listen_with`].
#[derive(Clone, Debug, Default)]
pub struct ListenOptions {
    pub(crate) framing: Framing,
    pub(crate) path: cm::ListenOptions,
    pub(crate) exchange: Option<ExchangeOptions>,
    pub(crate) service: Service,
    pub(crate) security: Option<Security>,
}

impl ListenOptions {
    /// Creates the defaults: [`Framing::Credits`], and the system's choices.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how messages travel. Default: [`Framing::Credits`].
    #[must_use]
    pub const fn framing(mut self, framing: Framing) -> Self {
        self.framing = framing;
        self
    }

    /// Sets the type of service, like [`ConnectOptions::type_of_service`], for the packets that the local side sends on iWARP. It has no
    /// effect on InfiniBand and RoCE, where the connecting side decides for both directions.
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

    /// Sets the number of connect requests that may wait to be accepted before the system refuses more (`rdma_listen`(3), `listen`(2)).
    /// Default: 1,024.
    #[must_use]
    pub const fn backlog(mut self, requests: u32) -> Self {
        self.path.backlog = requests;
        self
    }

    /// Sets if an IPv6 address accepts IPv6 only (true) or IPv4 too (`rdma_set_option`(3), `RDMA_OPTION_ID_AFONLY`). Default: the system's
    /// setting.
    #[must_use]
    pub const fn ipv6_only(mut self, only: bool) -> Self {
        self.path.ipv6_only = Some(only);
        self
    }

    /// Sets the retries, like [`ConnectOptions::retries`]. The connecting side decides the number of retransmissions.
    #[must_use]
    pub const fn retries(mut self, retries: Retries) -> Self {
        self.service.retries = retries;
        self
    }

    /// Sets the depth, like [`ConnectOptions::read_depth`]; the depth that the peer requests is the upper limit.
    #[must_use]
    pub const fn read_depth(mut self, depth: ReadDepth) -> Self {
        self.service.read_depth = depth;
        self
    }

    /// Declares the extensions, like [`ConnectOptions::extensions`], for every peer of this listener.
    #[must_use]
    pub const fn extensions(mut self, of_peers: bool) -> Self {
        self.service.extensions = of_peers;
        self
    }

    /// Listens for peers that connect by exchange ([`ConnectOptions::exchange`]), on a TCP port. The address may be any of this host; the
    /// options say which port and GID the queue pairs have, if that does not follow from the address that a peer connected to. Default:
    /// none, which listens by rdma_cm.
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

    /// Checks the ranges that the transport does not check before a connection arrives.
    pub(crate) fn check(&self) -> Result<(), Error> {
        Ok(self.service.retries.check()?)
    }
}
