//! The embedded provider of RDMA: iWARP in user space over TCP, connections within one host in
//! shared memory, and RoCE datagrams over UDP. It needs no RDMA device and no root.
//!
//! | module | contents |
//! |---|---|
//! | [`iwarp`] | the provider, and iWARP in user space over TCP |
//! | [`shm`] | connections within one host: rings in shared memory |
//! | `roce` | datagrams: RoCE version 2 over UDP |
//! | [`soft`] | parts for providers in software: queues, keys, events |
//! | [`packets`], [`passing`] | UDP packets in batches, and Unix packets with a descriptor |
//!
//! The provider is [`iwarp::Iwarp`]. It implements [`rdma_transport::Provider`], whose
//! documentation has the rules. The crate `rdma-reactor` uses it.

// The unit tests do not run in the build that includes the fuzz targets.
#![cfg(not(all(test, fuzz_targets)))]
#![deny(unsafe_code)]
#[macro_use(local_log, peer_log)]
extern crate rdma_transport;

#[allow(unsafe_code, reason = "the promise of a provider")]
mod entries;
pub mod iwarp;
#[allow(unsafe_code, reason = "system calls")]
pub mod packets;
#[allow(unsafe_code, reason = "system calls")]
pub mod passing;
#[cfg(test)]
mod patience;
mod roce;
pub mod shm;
pub mod soft;
#[cfg(any(test, fuzz_targets))]
#[allow(unsafe_code, reason = "entries of tests")]
mod test_memory;
