//! A single-threaded, edge-triggered reactor for RDMA. To use it, implement [`Handler`], create a [`Reactor`], and call
//! [`Reactor::run`].
//!
//! - [`Config`] has every limit and timeout, with its default and range.
//! - [`Context`] has the operations that callbacks use: connect, listen, send, close, set timers.
//!   Its table lists them.
//! - [`Message`] is a received message, in the registered buffer in which it arrived.
//! - [`Region`] is registered memory for one-sided operations; [`RemoteRegion`] describes such memory to a peer.
//! - `datagram` has unreliable datagrams and multicast groups, on devices that support them and on the embedded
//!   provider (feature `datagram`).
//! - [`stream`] has byte streams instead of messages, for programs written for sockets.
//! - [`broadcast`] sends one message to many connections, with a policy for each connection that is too slow.
//! - [`call`] has requests with deadlines, and their answers.
//! - `aio` has futures for the operations of connections, for programs with async/await (feature `async`).
//! - `threaded` runs a reactor on a separate thread. Tasks of any thread use its connections as futures (feature
//!   `tokio`).
//! - [`Reactor::turn`], [`Reactor::next_deadline`] and `AsRawFd` embed a reactor in another event loop.
//! - [`ReactorHandle`] has the operations that other threads may call.
//! - [`Reactors`] is a group of reactors, one per thread, which share the incoming connections.
//!
//! | feature | what it adds |
//! |---|---|
//! | `verbs`, on by default | RDMA devices, through libibverbs and librdmacm, which are loaded when a device is first used |
//! | `rdma-sys` | the same, but linked with the libraries when the program is built |
//! | `async` | `aio` |
//! | `tokio` | `aio::drive` and `threaded` |
//! | `tls`, `psk` | authenticated and encrypted connections: `Security` |
//! | `keylog` | `Tls::log_keys`: secrets of connections in the file that `SSLKEYLOGFILE` names, for debugging |
//! | `datagram` | `datagram`, and `Context::datagrams` |
//! | `bytes` | the conversion of `DetachedMessage` to `bytes::Bytes` |
//! | `serde` | `serde::Serialize` for [`Stats`] |
//!
//! A reactor is used by one thread at a time. Only its methods `run`, `turn`, `step` and `shutdown` wait for events. The
//! [guide] begins with a first program, and ends with the wire protocol.

// On docs.rs, each item names the feature that it needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

#[macro_use(local_log, peer_log)]
extern crate rdma_transport;

/// The transport: the interface of providers (`rdma-transport`), the embedded provider
/// (`rdma-transport-embedded`) and the provider for RDMA devices (`rdma-transport-verbs`).
pub mod transport {
    pub use rdma_transport::*;
    pub use rdma_transport_embedded::{iwarp, packets, passing, shm, soft};
    #[cfg(feature = "verbs")]
    pub use rdma_transport_verbs as verbs;
}

#[cfg(feature = "async")]
pub mod aio;
mod api;
#[cfg(feature = "async")]
mod approval;
mod backoff;
pub mod broadcast;
pub mod call;
mod config;
mod conn;
#[cfg(feature = "datagram")]
pub mod datagram;
#[cfg(not(feature = "datagram"))]
#[allow(dead_code, unreachable_pub, unused_imports, reason = "no program opens an endpoint")]
mod datagram;
mod device;
mod driver;
mod error;
pub mod guide;
mod id;
mod limits;
mod memory;
mod options;
mod prometheus;
mod providers;
mod seam;
mod security;
mod stats;
pub mod stream;
#[cfg(feature = "tokio")]
pub mod threaded;
mod turn;

pub use crate::api::context::{
    ConnectionContext, Context, IoContext, ListenerContext, RegionContext, RemoteContext, TimerContext,
};
#[cfg(feature = "datagram")]
pub use crate::api::context::{DatagramContext, DatagramHandler};
pub use crate::api::handle::{HandleError, ReactorHandle};
pub use crate::api::handler::{ConnectRequest, Decision, Handler};
pub use crate::api::message::{DetachedMessage, Message, SendBuffer, SendError};
pub use crate::backoff::Backoff;
pub use crate::config::{CompletionSettings, Config, Framing, LargeMessageSettings, ProviderChoice, Timeouts, Wait};
pub use crate::conn::frame::Immediate;
pub use crate::conn::greeting::MAX_USER_PRIVATE_DATA;
#[cfg(feature = "datagram")]
pub use crate::datagram::{Datagram, EndpointId, EndpointOptions, Origin, PeerId};
pub use crate::driver::DeviceEvent;
pub use crate::driver::open::choose::open as open_providers;
pub use crate::driver::open::group::{Place, Reactors};
pub use crate::error::{
    Blocked, ConnectError, DisconnectReason, Error, MemoryLocation, Outcome, PeerViolation, RejectReason, SendErrorKind,
};
pub use crate::id::{ConnectionId, IoId, ListenerId, OfferId, SendId, SendKind, TimerId, TransferId};
pub use crate::memory::landing::Offered;
pub use crate::memory::list::{Piece, Transfer, TransferEnd, TransferOptions, TransferOutcome};
pub use crate::memory::material::{PreparedRegion, RegionMaker};
pub use crate::memory::region::{Lent, Region, RegionOptions, RemoteRegion};
pub use crate::options::{ConnectOptions, ListenOptions};
pub use crate::seam::poller::{
    Clock, Edge, Entropy, Interest, MioPoller, Poller, Readiness, SystemClock, system_entropy,
};
pub use crate::seam::wake::Wake;
#[cfg(feature = "tls")]
pub use crate::security::names::PeerName;
#[cfg(feature = "psk")]
pub use crate::security::psk::Psk;
#[cfg(feature = "tls")]
pub use crate::security::tls::{Tls, TlsIdentity};
pub use crate::security::{PeerIdentity, Security, SecurityError, SecurityMode};
pub use crate::stats::{CompletionStats, ConnectionStats, MemoryStats, MessageStats, Stats, TurnStats};
pub use crate::turn::{Parts, Reactor, Turn};
#[doc(inline)]
pub use rdma_transport::caps::{Capabilities, Features};
#[doc(inline)]
pub use rdma_transport::cm::{ConnectFailure, DisconnectCause, ExchangeOptions, ReadDepth, Retries, Source};
pub use rdma_transport::event::DeviceEventKind;
pub use rdma_transport::mr::Access;
use rdma_transport::planted;
#[doc(inline)]
pub use rdma_transport::wc::Failure;
pub use rdma_transport_embedded::iwarp::IpNet;
#[cfg(feature = "tls")]
pub use rustls;

/// The programs of the README, compiled and run.
#[cfg(all(doctest, feature = "tokio"))]
#[doc = include_str!("../README.md")]
pub struct Readme;
