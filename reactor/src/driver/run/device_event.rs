//! Stage 5: handles the asynchronous events of devices.

use rdma_transport::event::{self, DeviceEventKind};
use rdma_transport::qp::SrqId;

use crate::conn::state::Ending;
use crate::driver::Driver;
use crate::driver::stages::Stages;
use crate::error::DisconnectReason;
use crate::providers::device_index;

/// An asynchronous event of a device that the reactor uses; see [`crate::Handler::on_device_event`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceEvent {
    /// The name of the device, such as `mlx5_0`. If the device was removed before the reactor used it, the name is not known, and this is
    /// `device N`.
    pub device: String, // local: the name of a device
    /// The kind of the event. Events of a single queue pair or receive queue are not reported: the reactor handles them.
    pub kind: DeviceEventKind,
}

/// The event to report to the program, and the index of the device if it has failed.
#[derive(Debug, Default)]
pub(crate) struct DeviceEventReport {
    pub(crate) event: Option<DeviceEvent>,
    pub(crate) failed: Option<usize>,
}

impl Driver {
    /// Handles the next event of a device. If connections cannot continue after the event, ends them. Returns `None` if there is no event.
    pub(crate) fn next_device_event(&mut self) -> Option<DeviceEventReport> {
        let (provider, event) = self.providers.next_device_event()?;
        let event::AsyncEvent { device, kind } = event;
        let index = device_index(provider, device);
        let mut told = DeviceEventReport::default();
        match kind {
            DeviceEventKind::LastReceive(_) => return Some(told),
            DeviceEventKind::SharedReceiveQueueFailed(srq) => {
                self.shared_queue_failed(index, srq);
                return Some(told);
            }
            DeviceEventKind::Fatal | DeviceEventKind::Removed => {
                self.end_connections_of(index);
                told.failed = Some(index);
            }
            _ => {}
        }
        let name = match self.devices.get(index) {
            Some(used) => used.name.clone(),
            None => match self.providers.get(provider).device(device) {
                Some(info) => info.name.clone(),
                None => format!("device {}", device.0),
            },
        };
        told.event = Some(DeviceEvent { device: name, kind });
        Some(told)
    }

    /// Ends the connections that use the shared receive queue of a device, because that queue has failed. When nothing uses the queue any
    /// more, the next connection with shared receives gets a new one.
    fn shared_queue_failed(&mut self, device: usize, srq: SrqId) {
        if !self.devices.buffers(device).shared.as_mut().is_some_and(|shared| shared.fail(srq)) {
            return;
        }
        for id in self.table.ids() {
            let on_it = self.table.get(id).is_some_and(|slot| {
                slot.conn.receives().is_shared() && slot.link.place.is_some_and(|place| place.device == device)
            });
            if on_it {
                let reason = DisconnectReason::Internal("the shared receive queue failed".into());
                self.input(id, |conn, env| conn.end(Ending::decided(reason), env));
            }
        }
        self.note(Stages::ENDS);
    }
}
