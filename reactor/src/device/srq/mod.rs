//! The receives that the connections of a device share: the queue, and the claims that decide how many of them each
//! connection may promise.

pub(crate) mod claims;
pub(crate) mod queue;
