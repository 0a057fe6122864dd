//! The channel through which buffers that the program kept return to the reactor. It can be used on any thread.

use std::sync::Arc;

use crossbeam_channel::Sender;

use super::pool::Buffer;
use crate::id::ConnectionId;
use crate::seam::wake::WakeFlag;

/// The id of a pool of buffers. A device that is used again after it was unused has a new pool, with another id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolId {
    /// The index of the device.
    pub(crate) device: usize,
    /// The number of the pool among all pools of the reactor.
    pub(crate) number: u64,
}

/// Memory that is being returned to the reactor.
#[derive(Debug)]
pub(crate) struct Returned {
    /// The pool that the memory belongs to.
    pub(crate) pool: PoolId,
    pub(crate) memory: ReturnedMemory,
    /// The connection that received the message, if the memory held one. Its buffers are then posted again.
    pub(crate) receive_of: Option<ConnectionId>,
}

/// The kinds of memory that a program may keep.
#[derive(Debug)]
pub(crate) enum ReturnedMemory {
    Buffer(Buffer),
    Joined(JoinedMessage),
}

/// A message that arrived in several buffers, in separate memory.
#[derive(Debug)]
pub(crate) struct JoinedMessage {
    pub(crate) bytes: Vec<u8>,
    /// The buffers that the message arrived in, if the memory is not accounted for. The message then occupies its
    /// receives, as a message in one buffer does.
    pub(crate) receives: Vec<Buffer>,
}

/// The sending end of the channel, for the buffers of one pool.
#[derive(Debug)]
pub(crate) struct ReturnChannel {
    pub(crate) pool: PoolId,
    pub(crate) sender: Sender<Returned>,
    pub(crate) wake: Arc<WakeFlag>,
}

impl ReturnChannel {
    /// Returns a buffer. If the reactor was dropped, the buffer is dropped, and its memory is freed with its last
    /// holder.
    pub(crate) fn return_buffer(&self, buffer: Buffer, receive_of: Option<ConnectionId>) {
        self.send(ReturnedMemory::Buffer(buffer), receive_of);
    }

    /// Returns the memory of a message that arrived in several buffers.
    pub(crate) fn return_joined(&self, joined: JoinedMessage, connection: ConnectionId) {
        self.send(ReturnedMemory::Joined(joined), Some(connection));
    }

    fn send(&self, memory: ReturnedMemory, receive_of: Option<ConnectionId>) {
        if self.sender.send(Returned { pool: self.pool, memory, receive_of }).is_ok() {
            self.wake.wake();
        }
    }
}
