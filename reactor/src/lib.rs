//! A single-threaded, edge-triggered reactor for RDMA: implement [`Handler`], make a [`Reactor`], call
//! [`Reactor::run`].
//!
//! - [`Config`] has every limit and timeout, with its default and range.
//! - [`Context`] is what a callback may do: connect, listen, send, close, set timers.
//! - [`Message`] is what arrived, in the registered buffer it arrived in.
//! - [`Region`] is registered memory for one-sided operations, [`RemoteRegion`] its name for a peer.
//! - [`datagram`] is what may be lost: unreliable datagrams and multicast groups, where the device has them.
//! - [`stream`] is ordered bytes instead of messages, for programs that know sockets.
//! - [`Reactor::turn`], [`Reactor::next_deadline`] and `AsRawFd` embed it in another loop.
//! - [`Remote`] is what other threads may do.
//! - [`Reactors`] is several reactors with a thread each, among which connections are spread.
//!
//! One thread drives a reactor; no call but `run` and `turn` blocks. What the loop does, stage by stage, is in
//! `docs/loop.md`; what goes over the wire in `docs/wire.md`.

mod adaptive;
mod buffer;
mod choose;
mod config;
mod connection;
mod context;
mod core;
mod credit;
pub mod datagram;
mod device;
mod device_event;
mod dispatch;
mod drain;
mod ending;
mod error;
mod establish;
mod fair;
mod frame;
mod handler;
mod handover;
mod id;
mod io;
mod listener;
mod one_sided;
mod poller;
mod pool;
mod posting;
mod reactor;
mod reactors;
mod region;
mod remote;
mod rendezvous;
mod sending;
mod share;
mod shared;
mod stats;
pub mod stream;
mod teardown;
mod timer;
mod waiting;

pub use crate::buffer::{DetachedMessage, Message, SendBuffer};
pub use crate::config::{Config, ConnectOptions, Framing, ProviderChoice, Wait};
pub use crate::context::Context;
pub use crate::datagram::{Datagram, EndpointId, EndpointOptions, Origin, PeerId};
pub use crate::device_event::DeviceEvent;
pub use crate::error::{ConnectError, DisconnectReason, Error, Outcome, PeerViolation, SendError, SendErrorKind};
pub use crate::frame::{MAX_USER_PRIVATE_DATA, RejectReason};
pub use crate::handler::{ConnectRequest, Decision, Handler, Immediate};
pub use crate::id::{ConnectionId, ListenerId, SendId, SendKind, TimerId};
pub use crate::io::{Interest, IoId, Readiness};
pub use crate::poller::{Clock, Edge, Entropy, MioPoller, Poller, SystemClock, system_entropy};
pub use crate::reactor::{Parts, Reactor, Turn};
pub use crate::reactors::{Place, Reactors};
pub use crate::region::{Region, RegionOptions, RemoteRegion};
pub use crate::remote::{Remote, RemoteError, Wake};
pub use crate::stats::Stats;
pub use rdma_transport as transport;
pub use rdma_transport::event::DeviceEventKind;
pub use rdma_transport::mr::Access;

/// The README's program, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
