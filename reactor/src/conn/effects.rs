//! The output of a connection: callbacks to make, and actions to take for it.

use std::collections::VecDeque;
use std::time::Instant;

use rdma_transport::mr::RemoteKey;
use rdma_transport::slab::Key;
use rdma_transport::wc::Failure;

use super::frame::Immediate;
use crate::device::pool::Buffer;
use crate::error::{ConnectError, DisconnectReason, Outcome};
use crate::id::{ConnectionId, SendId, TransferId};
use crate::log_limit::LogLimit;
use crate::memory::landing::Offered;
use crate::memory::list::TransferEnd;
use crate::memory::region::Region;

/// A callback to make.
#[derive(Debug)]
pub(crate) enum Event {
    /// The peer of a connection that is being secured has proven who it is. The program is to accept it or not.
    Identified,
    /// The connection is up.
    Connected,
    /// A message arrived.
    Message(Arrived),
    /// A message in several buffers arrived.
    Fragments(Box<Fragments>),
    /// The peer offers a message past one buffer.
    Offered(Offered),
    /// A message past one buffer was fetched.
    Fetched(Box<Region>),
    /// A message past one buffer is in the program's memory, or its connection has ended first.
    Landed(Box<(Offered, Result<(), Failure>)>),
    /// A write with immediate data by the peer was placed.
    Immediate(Immediate),
    /// So many sends that follow one another have ended, each in this way. There is one callback for each.
    Sent { send: SendId, count: u32, outcome: Outcome },
    /// A transfer of a list has ended.
    Transferred(Box<(TransferId, TransferEnd)>),
    /// A send like one that was refused would be taken now.
    Writable,
    /// The last callback of a connection that was up.
    Disconnected(Box<DisconnectReason>),
    /// The only callback of a connection that did not come up.
    ConnectError(Box<ConnectError>),
}

/// A message in a buffer of the pool.
#[derive(Debug)]
pub(crate) struct Arrived {
    /// The buffer; `None` once the program has detached it or it was freed.
    pub(crate) buffer: Option<Buffer>,
    /// Offsets at which the payload begins and ends in the buffer, bytes.
    pub(crate) start: u32,
    pub(crate) end: u32,
    /// Index of the device.
    pub(crate) device: u16,
    /// The connection takes its receives from the shared queue.
    pub(crate) shared: bool,
}

/// A message in several buffers of the pool, or the beginning of one.
#[derive(Debug)]
pub(crate) struct Fragments {
    /// Its parts in order, each with the offset at which the part ends in the buffer, bytes. Headers are in front of them.
    pub(crate) parts: Vec<(Buffer, u32)>,
    /// Length of the parts that are there, bytes.
    pub(crate) len: usize,
    /// Number of parts that are still to come.
    pub(crate) following: u32,
    /// Time at which the first part arrived. The limit on the message as a whole counts from here.
    pub(crate) since: Instant,
    /// Index of the device.
    pub(crate) device: usize,
}

/// Something to do for a connection.
#[derive(Debug)]
pub(crate) enum Action {
    /// Call [`super::Connection::timeout`] then; `None`: not at all. This replaces what was said before.
    Deadline(Option<Instant>),
    /// Call [`super::Connection::timeout`] then, unless it is to be called earlier.
    LookBy(Instant),
    /// Call [`super::Connection::lists_due`] then. This replaces what was said before.
    ListsBy(Instant),
    /// Have the device flush the queues, and wait for that.
    Flush,
    /// Watch the connection: it has begun to end.
    Ending,
    /// The connection that a peer has opened is up.
    Settled,
    /// The peer's Send with Invalidate has taken back a remote key of this device.
    Invalidated { device: usize, key: RemoteKey },
    /// A region that its owner has dropped may be unused now.
    Unused(Key),
    /// Memory of a message past one buffer is not wanted any more, or was never needed.
    Discard(Box<Region>),
    /// The connection does not wait for memory any more.
    NoMemory,
    /// Something is to be posted, and no turn is going on: have one taken.
    Ring,
}

/// See the [module](self). The lists are reused.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    /// In order, behind `arrived`.
    pub(crate) events: VecDeque<(ConnectionId, Event)>,
    /// A message that arrived while no callback was to be made. The list is spared for it, as most messages arrive so.
    pub(crate) arrived: Option<(ConnectionId, Arrived)>,
    /// In order.
    pub(crate) actions: VecDeque<(ConnectionId, Action)>,
    /// Connections with something to post, each once.
    pub(crate) to_post: Vec<ConnectionId>,
    /// Connections that were refused a send and may have room again.
    pub(crate) to_ask: VecDeque<ConnectionId>,
    /// The limit on log lines about peers.
    pub(crate) log_limit: LogLimit,
    /// No turn is going on.
    pub(crate) outside: bool,
}

impl Effects {
    /// The next callback to make.
    #[inline]
    pub(crate) fn next_event(&mut self) -> Option<(ConnectionId, Event)> {
        match self.arrived.take() {
            Some((id, arrived)) => Some((id, Event::Message(arrived))),
            None => self.events.pop_front(),
        }
    }
}
