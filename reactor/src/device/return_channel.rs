//! The channel through which the program returns memory to the reactor, from any thread: the buffers of messages that
//! it has kept, and send buffers that it has not sent.

use std::sync::Arc;

use crossbeam_channel::Sender;

use super::pool::Buffer;
use crate::id::ConnectionId;
use crate::seam::wake::WakeFlag;

/// The id of a pool of buffers. A device has a new pool, with another id, each time that it is added to the table of
/// devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolId {
    /// The index of the device to which the pool belongs.
    pub(crate) device: usize,
    /// The number of the pool, unique among all pools that the reactor has ever created.
    pub(crate) number: u64,
}

/// Memory that the program has released, on its way to the reactor.
#[derive(Debug)]
pub(crate) struct Returned {
    /// The pool to which the memory belongs.
    pub(crate) pool: PoolId,
    pub(crate) memory: ReturnedMemory,
    /// If the memory contained a received message: the connection that received it. If this connection still exists,
    /// the buffers are posted as receives again. `None` for a send buffer.
    pub(crate) receive_of: Option<ConnectionId>,
}

/// The kinds of memory that the program may keep.
#[derive(Debug)]
pub(crate) enum ReturnedMemory {
    Buffer(Buffer),
    Joined(JoinedMessage),
}

/// A message that arrived in several buffers. Its parts are copied into one piece of separate memory.
#[derive(Debug)]
pub(crate) struct JoinedMessage {
    pub(crate) bytes: Vec<u8>, // bound: large-messages, receives
    /// The receive buffers in which the message arrived, if `LargeMessageSettings::memory` has no room for `bytes`. In
    /// that case, the peer gets no credits for these buffers until the message is released. If there is room, this list
    /// is empty.
    pub(crate) receives: Vec<Buffer>, // bound: receives
}

/// The sending end of the channel, for memory of one pool.
#[derive(Debug)]
pub(crate) struct ReturnChannel {
    pub(crate) pool: PoolId,
    pub(crate) sender: Sender<Returned>,
    pub(crate) wake: Arc<WakeFlag>,
}

impl ReturnChannel {
    /// Returns a buffer to the reactor. If the reactor was dropped, the buffer is dropped instead. Its memory is freed
    /// when the last clone of the pool's [`Slabs`](super::pool::Slabs) is dropped.
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
