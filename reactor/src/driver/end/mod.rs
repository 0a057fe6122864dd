//! How connections end, and how a reactor drains.

mod close;
pub(in crate::driver) mod drain;
