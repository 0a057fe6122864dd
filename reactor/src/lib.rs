//! A single-threaded, edge-triggered reactor for RDMA.

mod buffer;
mod choose;
mod config;
mod connection;
mod context;
mod core;
mod credit;
mod device;
mod dispatch;
mod error;
mod establish;
mod frame;
mod handler;
mod id;
mod poller;
mod pool;
mod reactor;
mod remote;
mod stats;
mod teardown;
mod timer;

pub use crate::buffer::{DetachedMessage, Message, SendBuffer};
pub use crate::config::{Config, Framing, ProviderChoice, Wait};
pub use crate::context::{ConnectOptions, Context};
pub use crate::error::{ConnectError, DisconnectReason, Error, Outcome, PeerViolation, SendError, SendErrorKind};
pub use crate::frame::{MAX_USER_PRIVATE_DATA, RejectReason};
pub use crate::handler::{ConnectRequest, Decision, Handler};
pub use crate::id::{ConnectionId, ListenerId, SendId, TimerId};
pub use crate::poller::{Clock, Entropy, MioPoller, Poller, SystemClock, system_entropy};
pub use crate::reactor::{Parts, Reactor, Turn};
pub use crate::remote::{Remote, Wake};
pub use crate::stats::Stats;
pub use rdma_transport as transport;
