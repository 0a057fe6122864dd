//! Handles, which name the objects of a provider.

use crate::slab::Key;

/// A device: its position in the provider's list, which does not change while the provider lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub u32);

/// A connection-manager id: a listener, or one end of a connection with its queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CmId(pub Key);

/// A queue pair. It is destroyed with its connection-manager id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QpId(pub Key);

/// A completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CqId(pub Key);

/// A memory region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MrId(pub Key);

/// An address handle: the route to a port, for datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AddressId(pub Key);

/// A shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SrqId(pub Key);
