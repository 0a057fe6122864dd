//! The memory of connections: regions and one-sided operations, large messages, and lists.

mod join;
pub(in crate::driver) mod large;
mod list;
mod regions;
