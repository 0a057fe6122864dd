//! The way home for buffers that have left a callback. It may be used from any thread.

use std::sync::Arc;

use crossbeam_channel::Sender;

use super::pool::Buffer;
use crate::id::ConnectionId;
use crate::seam::wake::WakeFlag;

/// Names a pool of buffers. A device that is used again after nothing was left on it has another pool, with another name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolId {
    /// The index of the device.
    pub(crate) device: usize,
    /// The number of the pool among all pools of the reactor.
    pub(crate) number: u64,
}

/// Memory on its way back to the reactor.
#[derive(Debug)]
pub(crate) struct Returned {
    /// The pool that the memory belongs to.
    pub(crate) pool: PoolId,
    pub(crate) memory: ReturnedMemory,
    /// The connection, if the memory held a received message; then its buffers are to be posted again.
    pub(crate) receive_of: Option<ConnectionId>,
}

/// The things that a program may keep.
#[derive(Debug)]
pub(crate) enum ReturnedMemory {
    Buffer(Buffer),
    Joined(JoinedMessage),
}

/// A message that came in several buffers, in memory of its own.
#[derive(Debug)]
pub(crate) struct JoinedMessage {
    pub(crate) bytes: Vec<u8>,
    /// The buffers that it came in, if the memory is not accounted for. Then the message uses up its receives, as one in a
    /// single buffer does.
    pub(crate) receives: Vec<Buffer>,
}

/// The place to which the buffers of a pool go back.
#[derive(Debug)]
pub(crate) struct ReturnChannel {
    pub(crate) pool: PoolId,
    pub(crate) sender: Sender<Returned>,
    pub(crate) wake: Arc<WakeFlag>,
}

impl ReturnChannel {
    /// Sends a buffer home. When the reactor is gone, nobody needs the buffer; its memory goes with the last holder.
    pub(crate) fn return_buffer(&self, buffer: Buffer, receive_of: Option<ConnectionId>) {
        self.send(ReturnedMemory::Buffer(buffer), receive_of);
    }

    /// Sends the memory of a message home.
    pub(crate) fn return_joined(&self, joined: JoinedMessage, connection: ConnectionId) {
        self.send(ReturnedMemory::Joined(joined), Some(connection));
    }

    fn send(&self, memory: ReturnedMemory, receive_of: Option<ConnectionId>) {
        if self.sender.send(Returned { pool: self.pool, memory, receive_of }).is_ok() {
            self.wake.wake();
        }
    }
}
