//! The parts of `rdma-hostile`: attacks by real processes over the loopback interface.
//!
//! The processes run one program in different roles ([`process`]). The roles are a server
//! ([`server`]), attackers, and honest clients. An [`attacker`] attacks the connection setup; a
//! [`flooder`] attacks over an established connection, and a [`scribbler`] and a [`lender`] in
//! shared memory. Honest clients connect repeatedly ([`newcomers`]), have one connection
//! ([`established`]), or have many at the same time ([`crowd`]). [`row`] defines the attacks and
//! runs one of them, [`verdict`] compares the outcome with the targets, and [`table`] prints it.
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

pub mod attacker;
pub mod credentials;
pub mod crowd;
pub mod established;
pub mod flooder;
pub mod grip;
pub mod lender;
pub mod newcomers;
pub mod process;
pub mod recording;
pub mod row;
pub mod scribbler;
pub mod server;
pub mod table;
pub mod verdict;

use std::error::Error;

use rdma_reactor::{Config, ProviderChoice, Security};

/// The result of a function of this program.
pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The server's limit of connections that are accepted but not established. It is the default of the library.
pub const MAX_PENDING: u32 = 1024;
/// The server's limit of connections in any state. It is the default of the library.
pub const MAX_CONNECTIONS: u32 = 10_000;

/// Returns the settings of the server and of its clients: the library's defaults, on the embedded provider. `within_host` selects
/// shared memory instead of TCP.
#[must_use]
pub fn config(security: Security, within_host: bool) -> Config {
    Config::default()
        .provider(if within_host { ProviderChoice::Shm } else { ProviderChoice::Iwarp })
        .max_pending(MAX_PENDING)
        .max_connections(MAX_CONNECTIONS)
        .security(security)
}
