//! The shared receive queue of a device, and the claims of its connections. A claim decides how many receives a
//! connection may promise to its peer.

pub(crate) mod claims;
pub(crate) mod queue;
