//! How a connection or a listener is opened: what differs from one to the next, where [`crate::Config`] is for all.

use rdma_transport::cm::{self, ConnectParam, ExchangeOptions, PathOptions, ReadDepth, Retries, Source};

use crate::config::Framing;
use crate::error::Error;
use crate::security::{Security, SecurityError};

/// What a device is asked for on a connection, on either side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Service {
    retries: Retries,
    read_depth: ReadDepth,
    /// The program knows that the peer has the extensions of the embedded provider.
    pub(crate) extensions: bool,
}

impl Service {
    /// What the connection manager is told.
    pub(crate) const fn param(self, private_data: &[u8]) -> ConnectParam<'_> {
        let ReadDepth { responder_resources, initiator_depth } = self.read_depth;
        ConnectParam { private_data, responder_resources, initiator_depth, retries: self.retries }
    }
}

/// Checks whether connections of a framing can be secured. `connects`: by the side that connects.
pub(crate) fn check_security(security: &Security, framing: Framing, connects: bool) -> Result<(), SecurityError> {
    if framing == Framing::Raw && !security.is_plain() {
        let why = "Framing::Raw has nothing that could be secured: use Framing::Credits, or Security::Plain";
        return Err(SecurityError::Settings(why.into()));
    }
    security.check(connects)
}

/// How to open a connection. What the transport cannot do is ignored, with one line in the log at `info`; a source that it
/// cannot choose, and a value out of its range, are errors of [`crate::Context::connect_with`].
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
    /// The defaults: no private data, [`Framing::Credits`], and the way that the system chooses.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Data for the peer's `on_connect_request`: at most [`crate::MAX_USER_PRIVATE_DATA`] bytes. Default: none.
    #[must_use]
    pub fn private_data(mut self, data: impl Into<Vec<u8>>) -> Self {
        self.private_data = data.into();
        self
    }

    /// How messages travel. Default: [`Framing::Credits`].
    #[must_use]
    pub const fn framing(mut self, framing: Framing) -> Self {
        self.framing = framing;
        self
    }

    /// The type of service of every packet, with the DSCP in the upper six bits (RFC 2474): 0 to 255. On InfiniBand and RoCE it
    /// holds for what the peer sends, too. On InfiniBand the subnet
    /// manager chooses the service level by it. Default: what the system or the administrator has set
    /// (`rdma_set_option`(3), `RDMA_OPTION_ID_TOS`).
    #[must_use]
    pub const fn type_of_service(mut self, octet: u8) -> Self {
        self.path.type_of_service = Some(octet);
        self
    }

    /// Time after which the device sends a request again that nobody answers: a code from 0 to 31, for 4.096 us times two to
    /// its power; 0 is for ever (`rdma_set_option`(3), `RDMA_OPTION_ID_ACK_TIMEOUT`). iWARP has none. Default: what the
    /// connection manager takes, about 2 s.
    #[must_use]
    pub const fn ack_timeout(mut self, code: u8) -> Self {
        self.path.ack_timeout = Some(code);
        self
    }

    /// The address or the device of ours that the connection leaves from. Default: the system's routes decide.
    #[must_use]
    pub fn source(mut self, source: Source) -> Self {
        self.path.source = source;
        self
    }

    /// How often the device tries again before the connection fails, and how long a peer waits that found no receive here
    /// (`rdma_connect`(3)). iWARP has none: TCP tries again. Default: [`Retries::default`].
    #[must_use]
    pub const fn retries(mut self, retries: Retries) -> Self {
        self.service.retries = retries;
        self
    }

    /// RDMA Reads and atomics that may be outstanding: the peer's here and ours there, each cut to what the device has.
    /// 0, the default, takes the device's own.
    #[must_use]
    pub const fn read_depth(mut self, depth: ReadDepth) -> Self {
        self.service.read_depth = depth;
        self
    }

    /// With [`Framing::Raw`] on the embedded provider: the program knows that the peer has the extensions of RFC 7306, which are writes
    /// with immediate data and atomics. MPA cannot negotiate them, and a peer that lacks them ends the connection. Elsewhere this has
    /// no effect: devices have the operations or not, and with [`Framing::Credits`] the greetings agree. Default: false.
    #[must_use]
    pub const fn extensions(mut self, of_peer: bool) -> Self {
        self.service.extensions = of_peer;
        self
    }

    /// Connects by exchange: the two sides tell each other of their queue pairs over a TCP connection to the peer's address, without
    /// rdma_cm. The peer listens with [`ListenOptions::exchange`]. The options say which port and GID the queue pair has, where that does
    /// not follow from the address. See the [page about it](crate::guide::exchange). Default: none, which connects by rdma_cm.
    #[must_use]
    pub fn exchange(mut self, options: ExchangeOptions) -> Self {
        self.exchange = Some(options);
        self
    }

    /// How the connection is secured. Default: as [`crate::Config::security`] says.
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

/// How to listen, and what the connections that come in have. What the transport cannot do is ignored, with one line in the
/// log at `info`; a value out of its range is an error of [`crate::Context::listen_with`].
#[derive(Clone, Debug, Default)]
pub struct ListenOptions {
    pub(crate) framing: Framing,
    pub(crate) path: cm::ListenOptions,
    pub(crate) exchange: Option<ExchangeOptions>,
    pub(crate) service: Service,
    pub(crate) security: Option<Security>,
}

impl ListenOptions {
    /// The defaults: [`Framing::Credits`], and what the system chooses.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// How messages travel. Default: [`Framing::Credits`].
    #[must_use]
    pub const fn framing(mut self, framing: Framing) -> Self {
        self.framing = framing;
        self
    }

    /// As [`ConnectOptions::type_of_service`], for what this side sends on iWARP. On InfiniBand and RoCE the side that connects
    /// decides for both directions, and this one has no effect.
    #[must_use]
    pub const fn type_of_service(mut self, octet: u8) -> Self {
        self.path.type_of_service = Some(octet);
        self
    }

    /// As [`ConnectOptions::ack_timeout`].
    #[must_use]
    pub const fn ack_timeout(mut self, code: u8) -> Self {
        self.path.ack_timeout = Some(code);
        self
    }

    /// Connect requests that wait for this side before the system refuses more (`rdma_listen`(3), `listen`(2)). Default: 1,024.
    #[must_use]
    pub const fn backlog(mut self, requests: u32) -> Self {
        self.path.backlog = requests;
        self
    }

    /// Whether an IPv6 address takes IPv6 only or IPv4 too (`rdma_set_option`(3), `RDMA_OPTION_ID_AFONLY`). Default: as the
    /// system is set.
    #[must_use]
    pub const fn ipv6_only(mut self, only: bool) -> Self {
        self.path.ipv6_only = Some(only);
        self
    }

    /// As [`ConnectOptions::retries`]. The count of retries without an answer is decided by the side that connects.
    #[must_use]
    pub const fn retries(mut self, retries: Retries) -> Self {
        self.service.retries = retries;
        self
    }

    /// As [`ConnectOptions::read_depth`]; the peer's wish is the upper limit.
    #[must_use]
    pub const fn read_depth(mut self, depth: ReadDepth) -> Self {
        self.service.read_depth = depth;
        self
    }

    /// As [`ConnectOptions::extensions`], for every peer of this listener.
    #[must_use]
    pub const fn extensions(mut self, of_peers: bool) -> Self {
        self.service.extensions = of_peers;
        self
    }

    /// Listens for peers that connect by exchange ([`ConnectOptions::exchange`]), on a port of TCP. The address may be any of this host;
    /// the options say which port and GID the queue pairs have, where that does not follow from the address that a peer has
    /// reached. Default: none, which listens by rdma_cm.
    #[must_use]
    pub fn exchange(mut self, options: ExchangeOptions) -> Self {
        self.exchange = Some(options);
        self
    }

    /// How the connections that come in are secured. Default: as [`crate::Config::security`] says.
    #[must_use]
    pub fn security(mut self, security: Security) -> Self {
        self.security = Some(security);
        self
    }

    /// Checks the ranges that the transport does not look at before a connection comes in.
    pub(crate) fn check(&self) -> Result<(), Error> {
        Ok(self.service.retries.check()?)
    }
}
