//! The way home for buffers that have left a callback. It may be used from any thread.

use std::sync::Arc;

use crossbeam_channel::Sender;

use super::pool::Buffer;
use crate::id::ConnectionId;
use crate::seam::wake::WakeFlag;

/// A buffer on its way back to the reactor.
#[derive(Debug)]
pub(crate) struct Returned {
    /// Index of its device.
    pub(crate) device: usize,
    pub(crate) buffer: Buffer,
    /// The connection, if the buffer held a received message; then the buffer is to be posted again.
    pub(crate) receive_of: Option<ConnectionId>,
}

/// The place to which the buffers of a device go back.
#[derive(Debug)]
pub(crate) struct Home {
    pub(crate) device: usize,
    pub(crate) channel: Sender<Returned>,
    pub(crate) wake: Arc<WakeFlag>,
}

impl Home {
    /// Sends a buffer home. When the reactor is gone, nobody needs the buffer; its memory goes with the last holder.
    pub(crate) fn give(&self, buffer: Buffer, receive_of: Option<ConnectionId>) {
        if self.channel.send(Returned { device: self.device, buffer, receive_of }).is_ok() {
            self.wake.wake();
        }
    }
}
