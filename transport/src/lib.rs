//! RDMA transport: queue pairs, completion queues, memory regions and connection management.
//!
//! These are the layers, from the top down. Each file holds one noun, and no FFI type appears in a signature.
//!
//! | module | holds |
//! |---|---|
//! | [`provider`] | the seam: [`Provider`] and its written contract |
//! | [`cm`], [`event`], [`qp`], [`wr`], [`wc`], [`mr`], [`caps`], [`error`], [`datagram`] | the field's nouns, provider-neutral |
//! | [`mem`] | registered memory, and the unsafe code of this crate outside `verbs` |
//! | [`handle`], [`slab`] | what names a provider's objects: slots with generations |
//! | [`iwarp`] | the embedded provider: iWARP in user space over TCP |
//! | [`place`] | where a connection goes: an IP address, or one of InfiniBand |
//! | [`registrar`] | registration of memory on other threads |
//! | `dual` | feature `verbs`: devices, and the embedded provider for what they do not reach, as one provider |
//! | [`station`] | a provider with memory of its own, to post work requests without unsafe code |
//! | `verbs` | feature `verbs`, on by default: RDMA devices, through librdmacm and libibverbs |
//!
//! A program drives a provider from one thread. Nothing here blocks, starts a thread or reads a clock: time is an
//! argument. The crate `rdma-reactor` is the loop on top.

pub mod caps;
pub mod cm;
pub mod datagram;
#[cfg(feature = "verbs")]
pub mod dual;
pub mod error;
pub mod event;
pub mod handle;
pub mod iwarp;
pub mod mem;
pub mod mr;
pub mod place;
pub mod provider;
pub mod qp;
pub mod registrar;
pub mod slab;
pub mod station;
mod targets;
#[cfg(feature = "verbs")]
pub mod verbs;
pub mod wc;
pub mod wr;

pub use caps::{Capabilities, Features};
pub use cm::{
    CmEvent, CmEventKind, CmId, ConnectParam, Detached, DisconnectCause, ListenOptions, PathOptions, ReadDepth,
    Retries, Source,
};
pub use datagram::{AddressId, DatagramPeer, DatagramSource, Destination, Route};
pub use error::{Error, Result};
pub use event::{DeviceEvent, DeviceEventKind};
pub use mem::Memory;
pub use mr::{Access, LocalKey, MemoryRegion, RemoteKey};
pub use place::{IbAddress, Place};
pub use provider::{CqId, DeviceId, DeviceInfo, Drive, PathState, Provider};
pub use qp::{QpAttr, QpId, SrqId};
pub use registrar::{Registrar, Registration};
pub use station::Station;
pub use wc::{Failure, WcOpcode, WcStatus, WorkCompletion};
pub use wr::{RecvWr, SendFlags, SendOp, SendWr, Sge, SgeList};
