//! Attacks during connection setup, by real processes over the loopback: the parts of `rdma-hostile`.
//!
//! A server ([`server`]), the attackers ([`attacker`]; [`flooder`] for connected ones, and [`scribbler`] for those in shared memory) and
//! the honest clients ([`newcomers`]; [`established`] for a connected one) are separate processes of one program ([`process`]). [`row`] has
//! the attacks and runs one of them, [`verdict`] compares the outcome with the targets, and [`table`] prints it.
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

pub mod attacker;
pub mod credentials;
pub mod established;
pub mod flooder;
pub mod grip;
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

/// The result of a part of the program.
pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The limit of connections that are accepted and not established. Below it: the limit of all connections. Both are the
/// defaults of the library.
pub const MAX_PENDING: u32 = 1024;
/// See above.
pub const MAX_CONNECTIONS: u32 = 10_000;

/// Returns the settings of the server and of its clients: the defaults, on the embedded provider, over TCP or in shared
/// memory.
#[must_use]
pub fn config(security: Security, within_host: bool) -> Config {
    Config::default()
        .provider(if within_host { ProviderChoice::Shm } else { ProviderChoice::Iwarp })
        .max_pending(MAX_PENDING)
        .max_connections(MAX_CONNECTIONS)
        .security(security)
}
