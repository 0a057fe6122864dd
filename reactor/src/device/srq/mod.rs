//! Receives that the connections of a device share: the queue they are posted to, and who may promise how many of them.

pub(crate) mod claims;
pub(crate) mod queue;
