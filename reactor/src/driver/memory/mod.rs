//! The memory of connections: regions and one-sided operations, large messages, and lists.

pub(crate) mod large;
mod operations;
mod regions;
