//! How connections begin: names, addresses and providers, listeners, connect requests, and the
//! group of reactors that shares them.

pub(in crate::driver) mod accept;
pub(crate) mod choose;
pub(in crate::driver) mod fallback;
pub(crate) mod group;
pub(in crate::driver) mod handover;
pub(in crate::driver) mod listen;
pub(in crate::driver) mod lookup;
