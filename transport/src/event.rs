//! Events of devices that belong to no connection (`ibv_get_async_event`(3)).

use crate::handle::{DeviceId, QpId, SrqId};

/// An asynchronous event of a device. Events of one connection, such as a queue pair that failed, come as
/// [`crate::CmEvent`] of its id instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceEvent {
    /// The device.
    pub device: DeviceId,
    /// What happened.
    pub kind: DeviceEventKind,
}

/// Kinds of device events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceEventKind {
    /// A port can carry traffic again.
    PortActive {
        /// Its number, from 1.
        port: u32,
    },
    /// A port carries no traffic. Its connections are not told, and may outlive it.
    PortDown {
        /// Its number, from 1.
        port: u32,
    },
    /// Addresses of a port changed. Connections on an old one go silent.
    AddressChange {
        /// Its number, from 1.
        port: u32,
    },
    /// Another event of a port: the LID, partition keys or subnet manager changed, or clients must register again.
    Port {
        /// The device's code.
        code: u32,
        /// The port's number, from 1.
        port: u32,
    },
    /// The device failed; `Removed` follows.
    Fatal,
    /// The device is going away; every id on it gets [`crate::CmEventKind::DeviceRemoval`].
    Removed,
    /// A shared receive queue failed. Nothing arrives through it any more.
    SharedReceiveQueueFailed(SrqId),
    /// A queue pair that ends has taken its last receive from its shared queue.
    LastReceive(QpId),
    /// An event this library does not know.
    Other(u32),
}
