//! Unreliable datagrams, on devices that support them and on the embedded provider (feature `datagram`). The guide has
//! a page about them: [`crate::guide::datagrams`].
//!
//! An *endpoint* ([`DatagramContext::open`](crate::DatagramContext::open)) is one queue pair at an address of a device. It can receive from
//! every other endpoint, and send to every other endpoint. A *peer* of an endpoint is a destination of the endpoint's datagrams. There are
//! three kinds of peers:
//!
//! - an endpoint at a known address: [`DatagramContext::find_peer`](crate::DatagramContext::find_peer);
//! - the sender of a received datagram: [`DatagramContext::peer_of`](crate::DatagramContext::peer_of);
//! - a multicast group: [`DatagramContext::join`](crate::DatagramContext::join).
//!
//! Addresses are those of the connection manager's UDP port space (`RDMA_PS_UDP`), so endpoints and programs that use librdmacm
//! find each other. The callbacks are in [`DatagramHandler`](crate::DatagramHandler).
//!
//! Datagrams have these properties:
//!
//! - A datagram arrives whole or not at all. Datagrams may arrive in any order, and more than once. Losses are not reported.
//! - There are no credits. If the receiver has no posted receive when a datagram arrives, the datagram is lost.
//!   [`EndpointOptions::receive_depth`] is the number of datagrams that may arrive in one burst.
//! - A datagram has at most [`DatagramContext::max_datagram`](crate::DatagramContext::max_datagram) bytes. This limit depends on
//!   the device's port or on the network interface. It is between 256 and 4,096 bytes.
//! - [`Outcome::Sent`](crate::Outcome::Sent) means that the device has sent the datagram. It does not mean that the peer has
//!   received it.
//! - The sender ([`Origin`]) is known only as far as the network reports it. Nothing is authenticated: every host of the network
//!   may send to an endpoint.
//! - A member of a group may receive the datagrams that it sends to the group. That depends on the device.
//!
//! The route header (GRH) of 40 bytes before a received datagram is not a part of its payload. Each endpoint has its own memory:
//! `max_datagram` + 40 bytes for each receive and each send. `Config::max_memory` does not include this memory.

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
    /// The id of a peer of an endpoint. The id becomes invalid when the program forgets the peer, when the peer is a group and the endpoint
    /// leaves that group, or when the endpoint ends.
    PeerId, "peer"
);

/// The largest number of receives of an endpoint, and the largest number of its sends in flight.
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

    /// Sets the number of receives that the reactor keeps posted. The reactor posts receives once per turn. If more datagrams than this
    /// arrive before the next posting, the excess datagrams are lost. Range: 1 to 16,384, or the device's limit if that is lower. Default:
    /// 64.
    #[must_use]
    pub const fn receive_depth(mut self, datagrams: u32) -> Self {
        self.receive_depth = datagrams;
        self
    }

    /// Sets the number of sends that may be in flight. A further send is refused with `WouldBlock`. Range: 1 to 16,384, or the
    /// device's limit if that is lower. Default: 64.
    #[must_use]
    pub const fn send_depth(mut self, datagrams: u32) -> Self {
        self.send_depth = datagrams;
        self
    }

    fn validate(self) -> Result<(), Error> {
        let settings = [("endpoint's receive_depth", self.receive_depth), ("endpoint's send_depth", self.send_depth)];
        for (setting, value) in settings {
            if value == 0 || value > MAX_DEPTH {
                return Err(Error::Config { setting, value: value.into(), range: "1 to 16,384 datagrams".into() });
            }
        }
        Ok(())
    }
}
