//! How connections begin: names, addresses and providers, listeners, connect requests, and the
//! group of reactors that shares them.

pub(crate) mod accept;
pub(crate) mod choose;
pub(crate) mod connect;
mod establish;
pub(crate) mod fallback;
pub(crate) mod group;
mod handover;
pub(crate) mod listen;
mod lookup;
pub(crate) mod request;
