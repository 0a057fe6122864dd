//! Events of devices that belong to no connection (`ibv_get_async_event`(3)).

use crate::handle::{DeviceId, QpId, SrqId};

/// An asynchronous event of a device. Events of one connection, such as the failure of its queue pair, are reported as
/// a [`crate::CmEvent`] of its id instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceEvent {
    /// The device.
    pub device: DeviceId,
    /// The kind of event.
    pub kind: DeviceEventKind,
}

/// The kinds of device events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceEventKind {
    /// A port can carry traffic again.
    PortActive {
        /// The number of the port, from 1.
        port: u32,
    },
    /// A port carries no traffic. Its connections get no event, and may survive until the port is active again.
    PortDown {
        /// The number of the port, from 1.
        port: u32,
    },
    /// Addresses of a port have changed. Connections with an old address stall.
    AddressChange {
        /// The number of the port, from 1.
        port: u32,
    },
    /// Another event of a port: the LID, the partition keys or the subnet manager has changed, or clients must register
    /// again.
    Port {
        /// The device's code.
        code: u32,
        /// The number of the port, from 1.
        port: u32,
    },
    /// The device has failed; `Removed` follows.
    Fatal,
    /// The device is being removed; each id on it gets [`crate::CmEventKind::DeviceRemoval`].
    Removed,
    /// A shared receive queue has failed. It delivers no further messages.
    SharedReceiveQueueFailed(SrqId),
    /// A queue pair that is ending has taken its last receive from its shared receive queue.
    LastReceive(QpId),
    /// An event that this library does not know.
    Other(u32),
}
