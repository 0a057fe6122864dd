//! Stage 5: handles the asynchronous events of devices.

use rdma_transport::event::DeviceEventKind;

/// An asynchronous event of a device that the reactor uses; see
/// [`crate::Handler::on_device_event`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceEvent {
    /// The name of the device, such as `mlx5_0`. If the device was removed before the reactor used
    /// it, the name is not known, and this is `device N`.
    pub device: String, // local: the name of a device
    /// The kind of the event. Events of a single queue pair or receive queue are not reported: the
    /// reactor handles them.
    pub kind: DeviceEventKind,
}

/// The event to report to the program, and the index of the device if it has failed.
#[derive(Debug, Default)]
pub(crate) struct DeviceEventReport {
    pub(crate) event: Option<DeviceEvent>,
    pub(crate) failed: Option<usize>,
}
