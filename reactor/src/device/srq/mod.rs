//! The shared receive queue of a device, and the claims of connections on its receives. A claim limits the number of
//! receives that a connection may promise to its peer.

pub(crate) mod claims;
pub(crate) mod queue;
