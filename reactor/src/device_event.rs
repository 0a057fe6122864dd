//! Stage 5: what devices say on their own account.

use rdma_transport::event::{self, DeviceEventKind};

use crate::connection::Ending;
use crate::context::Context;
use crate::core::Core;
use crate::error::DisconnectReason;
use crate::handler::Handler;
use crate::id::ConnectionId;

/// Events handled in one turn before the other stages get theirs.
const EVENTS_PER_TURN: usize = 256;

/// An asynchronous event of a device in use; see [`Handler::on_device_event`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceEvent {
    /// Name of the device, such as `mlx5_0`; `device N` when it was removed before anything was on it.
    pub device: String,
    /// What happened. What concerns one queue pair or receive queue is the reactor's own affair and not told.
    pub kind: DeviceEventKind,
}

impl Core {
    /// Runs the stage; `true` when it stopped with events left.
    pub(crate) fn device_events<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, progressed: &mut bool) -> bool {
        for _ in 0..EVENTS_PER_TURN {
            let Some(event) = self.provider.next_device_event() else { return false };
            *progressed = true;
            self.device_event(handler, event);
        }
        true
    }

    fn device_event<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, event: event::DeviceEvent) {
        let event::DeviceEvent { device, kind } = event;
        match kind {
            DeviceEventKind::LastReceive(_) | DeviceEventKind::SharedReceivesLow(_) => return,
            DeviceEventKind::SharedReceiveQueueFailed(_) => return self.shared_queue_failed(device.0 as usize),
            DeviceEventKind::Fatal | DeviceEventKind::Removed => self.device_failed(device.0 as usize),
            _ => {}
        }
        let device = match self.devices.get(device.0 as usize).and_then(Option::as_ref) {
            Some(used) => used.name.clone(),
            None => match self.provider.device(device) {
                Some(info) => info.name.clone(),
                None => format!("device {}", device.0),
            },
        };
        handler.on_device_event(&mut Context { core: self }, &DeviceEvent { device, kind });
    }

    /// Ends what is on a device that failed, whether or not each connection is told on its own.
    fn device_failed(&mut self, device: usize) {
        for key in self.connections.keys() {
            if self.connections.get(key).is_some_and(|c| c.equipped && c.device == device) {
                self.end(ConnectionId(key), Ending::Disconnect(DisconnectReason::DeviceRemoved));
            }
        }
        self.end_endpoints_of(device);
    }
}
