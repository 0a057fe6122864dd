//! Events of devices that do not concern a single connection (`ibv_get_async_event`(3)).

use crate::handle::{DeviceId, QpId, SrqId};

/// An asynchronous event of a device. An event of a single connection, such as the failure of its queue pair, is
/// reported as a [`crate::CmEvent`] of that connection instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncEvent {
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
    /// A port carries no traffic any more. Its connections get no event, and may continue when the port is active
    /// again.
    PortDown {
        /// The number of the port, from 1.
        port: u32,
    },
    /// The addresses of a port have changed. Connections that use an old address stall.
    AddressChange {
        /// The number of the port, from 1.
        port: u32,
    },
    /// Another event of a port: its LID, its partition keys or the subnet manager has changed, or the subnet manager
    /// requests that clients register again.
    Port {
        /// The code of the event, as the device reports it.
        code: u32,
        /// The number of the port, from 1.
        port: u32,
    },
    /// The device has failed. `Removed` follows.
    Fatal,
    /// The device is being removed. Each connection-manager id on the device receives
    /// [`crate::CmEventKind::DeviceRemoval`].
    Removed,
    /// A shared receive queue has failed. It delivers no further messages.
    SharedReceiveQueueFailed(SrqId),
    /// A queue pair that is being torn down has consumed its last receive from its shared receive queue.
    LastReceive(QpId),
    /// The code of an event that this library does not know.
    Other(u32),
}
