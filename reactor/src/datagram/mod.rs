//! Unreliable datagrams, on devices that have them and on the embedded provider. Needs feature `datagram`. The guide has a page about
//! them: [`crate::guide::datagrams`].
//!
//! An *endpoint* ([`Datagrams::open`](crate::Datagrams::open)) is one queue pair at an address of a device. It receives
//! from everybody and sends to anybody. A *peer* is a destination: an endpoint elsewhere, found by its address
//! ([`Datagrams::find_peer`](crate::Datagrams::find_peer)) or from a datagram that came
//! ([`Datagrams::peer_of`](crate::Datagrams::peer_of)), or a multicast group
//! ([`Datagrams::join`](crate::Datagrams::join)). Addresses are those of the connection manager's UDP port space:
//! librdmacm's programs find an endpoint, and are found. Callbacks are those of
//! [`DatagramHandler`](crate::DatagramHandler).
//!
//! The properties of a datagram:
//!
//! - It arrives whole or not at all, in any order, maybe more than once, and nobody is told of a loss. A datagram that
//!   finds no receive posted is lost; [`EndpointOptions::receive_depth`] is how many may come at once. There are no
//!   credits.
//! - It is at most [`Datagrams::max_datagram`](crate::Datagrams::max_datagram) bytes long. The device's port, or the
//!   interface, sets this limit, from 256 to 4,096.
//! - [`Outcome::Sent`](crate::Outcome::Sent) says that the device has sent it, and nothing about the peer.
//! - Its sender ([`Origin`]) is known from the network only. Nothing is authenticated, and anybody may send.
//! - A member of a group may hear its own datagrams to the group; the device decides on loopback.
//!
//! The reader of a datagram does not see the route header in front of it. Each endpoint has memory of its own, which
//! `Config::max_memory` does not count. Each receive and each send takes `max_datagram` + 40 bytes.

mod endpoint;
pub(crate) mod endpoints;
mod group;
mod message;
mod peer;

pub use message::{Datagram, Origin};

use crate::error::Error;
use crate::id::define_id;

define_id!(
    /// Names one datagram endpoint.
    EndpointId, "endpoint"
);
define_id!(
    /// Names one peer of one endpoint. The name is stale when the peer was forgotten, its group was left, or the endpoint is
    /// gone.
    PeerId, "peer"
);

/// Largest number of receives of an endpoint, and largest number of sends.
const MAX_DEPTH: u32 = 16_384;

/// Options of an endpoint.
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
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the number of receives posted. If more datagrams come in one turn, the rest is lost. Range: 1 to 16,384, or
    /// less if the device's limit is lower. Default: 64.
    #[must_use]
    pub const fn receive_depth(mut self, datagrams: u32) -> Self {
        self.receive_depth = datagrams;
        self
    }

    /// Sets the number of sends that may be on their way. Range: 1 to 16,384, or less if the device's limit is lower.
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
