//! Stage 5: what devices say on their own account.

use rdma_transport::event::{self, DeviceEventKind};

use super::Driver;
use super::stages::Stages;
use crate::conn::state::Ending;
use crate::error::DisconnectReason;
use crate::providers::device_index;

/// An asynchronous event of a device in use; see [`crate::Handler::on_device_event`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceEvent {
    /// Name of the device, such as `mlx5_0`; `device N` when it was removed before anything was on it.
    pub device: String,
    /// What happened. What concerns one queue pair or receive queue is the reactor's own affair and not told.
    pub kind: DeviceEventKind,
}

/// An event of a device, and the index of a device on which nothing can go on.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) event: Option<DeviceEvent>,
    pub(crate) failed: Option<usize>,
}

impl Driver {
    /// Takes the next event of a device. Connections that it ends are ended.
    pub(crate) fn next_device_event(&mut self) -> Option<Told> {
        let (provider, event) = self.providers.next_device_event()?;
        let event::DeviceEvent { device, kind } = event;
        let index = device_index(provider, device);
        let mut told = Told::default();
        match kind {
            DeviceEventKind::LastReceive(_) => return Some(told),
            DeviceEventKind::SharedReceiveQueueFailed(_) => {
                self.shared_queue_failed(index);
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

    /// A shared queue takes nothing any more: the connections that live on it cannot go on.
    fn shared_queue_failed(&mut self, device: usize) {
        for id in self.table.ids() {
            let on_it = self.table.get(id).is_some_and(|seat| {
                seat.conn.receives().is_shared() && seat.link.place.is_some_and(|place| place.device == device)
            });
            if on_it {
                let reason = DisconnectReason::Internal("the shared receive queue failed".into());
                self.input(id, |conn, env| conn.end(Ending::decided(reason), env));
            }
        }
        self.note(Stages::ENDS);
    }
}
