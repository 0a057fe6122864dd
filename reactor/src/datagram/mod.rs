//! Unreliable datagrams, on devices that support them and on the embedded provider (feature `datagram`). The guide has
//! a page about them: [`crate::guide::datagrams`].
//!
//! An *endpoint* ([`DatagramContext::open`](crate::DatagramContext::open)) is one queue pair at an address of a device. It receives
//! from anybody and sends to anybody. A *peer* is a destination. It is another endpoint, found by its address
//! ([`DatagramContext::find_peer`](crate::DatagramContext::find_peer)) or from a received datagram
//! ([`DatagramContext::peer_of`](crate::DatagramContext::peer_of)), or a multicast group
//! ([`DatagramContext::join`](crate::DatagramContext::join)). Addresses are those of the connection manager's UDP port space
//! (`RDMA_PS_UDP`), so endpoints and programs that use librdmacm find each other. The callbacks are in
//! [`DatagramHandler`](crate::DatagramHandler).
//!
//! Datagrams have these properties:
//!
//! - A datagram arrives whole or not at all, in any order, maybe more than once. Nobody is notified of a loss. There
//!   are no credits: a datagram that finds no posted receive is lost. [`EndpointOptions::receive_depth`] is the number
//!   of datagrams that may arrive in one burst.
//! - A datagram has at most [`DatagramContext::max_datagram`](crate::DatagramContext::max_datagram) bytes. The device's port, or
//!   the network interface, sets this limit, from 256 to 4,096.
//! - [`Outcome::Sent`](crate::Outcome::Sent) means that the device has sent the datagram. It says nothing about the
//!   peer.
//! - The sender ([`Origin`]) is known only as far as the network reports it. Nothing is authenticated, and anybody may
//!   send.
//! - A member of a group may receive its own datagrams to the group; the device decides on loopback.
//!
//! The route header in front of a received datagram is not part of its payload. Each endpoint has separate memory,
//! which `Config::max_memory` does not count: `max_datagram` + 40 bytes for each receive and each send.

mod endpoint;
pub(crate) mod endpoints;
mod group;
mod message;
mod peer;

pub use message::{Datagram, Origin};

use crate::error::Error;
use crate::id::define_id;

define_id!(
    /// The id of a datagram endpoint.
    EndpointId, "endpoint"
);
define_id!(
    /// The id of a peer of an endpoint. It is stale when the peer was forgotten, its group was left, or the endpoint
    /// has ended.
    PeerId, "peer"
);

/// Largest number of receives of an endpoint, and of sends.
const MAX_DEPTH: u32 = 16_384;

/// The options of an endpoint.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct EndpointOptions {
    pub(crate) receive_depth: u32,
    pub(crate) send_depth: u32,
}

impl Default for EndpointOptions {
    fn default() -> Self {
        Self { receive_depth: 64, send_depth: 64 }
    }
}

impl EndpointOptions {
    /// Returns the default options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the number of receives that are posted. If more datagrams arrive in one turn, the excess is lost. Range: 1
    /// to 16,384, or the device's limit if that is lower. Default: 64.
    #[must_use]
    pub const fn receive_depth(mut self, datagrams: u32) -> Self {
        self.receive_depth = datagrams;
        self
    }

    /// Sets the number of sends that may be outstanding. Range: 1 to 16,384, or the device's limit if that is lower.
    /// Default: 64.
    #[must_use]
    pub const fn send_depth(mut self, datagrams: u32) -> Self {
        self.send_depth = datagrams;
        self
    }

    fn validate(self) -> Result<(), Error> {
        let settings = [("endpoint's receive_depth", self.receive_depth), ("endpoint's send_depth", self.send_depth)];
        for (setting, value) in settings {
            if value == 0 || value > MAX_DEPTH {
                return Err(Error::Config { setting, value: value.into(), range: "1 to 16,384 datagrams" });
            }
        }
        Ok(())
    }
}
