//! The output of a connection: callbacks, and actions for the driver.

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

/// A callback.
#[derive(Debug)]
pub(crate) enum Event {
    /// The identity of the peer is proven on a connection that is being secured. The program must accept it or not.
    Identified,
    /// The connection is up.
    Connected,
    /// A message arrived.
    Message(Arrived),
    /// A message in several buffers arrived.
    Fragments(Box<Fragments>),
    /// The peer offers a message longer than one buffer.
    Offered(Offered),
    /// A message longer than one buffer was fetched.
    Fetched(Box<Region>),
    /// A message longer than one buffer is in the program's memory, or its connection ended first.
    Landed(Box<(Offered, Result<(), Failure>)>),
    /// A write with immediate data by the peer was placed.
    Immediate(Immediate),
    /// This many consecutive sends have ended with the same outcome. There is one callback for each.
    Sent { send: SendId, count: u32, outcome: Outcome },
    /// A transfer of a list has ended.
    Transferred(Box<(TransferId, TransferEnd)>),
    /// A send like the refused one would be accepted now.
    Writable,
    /// The last callback of a connection that was up.
    Disconnected(Box<DisconnectReason>),
    /// The only callback of a connection that did not come up.
    ConnectError(Box<ConnectError>),
}

/// A message in a buffer of the pool.
#[derive(Debug)]
pub(crate) struct Arrived {
    /// The buffer. `None` once the program has detached it or it was freed.
    pub(crate) buffer: Option<Buffer>,
    /// The offsets at which the payload begins and ends in the buffer, in bytes.
    pub(crate) start: u32,
    pub(crate) end: u32,
    /// The index of the device.
    pub(crate) device: u16,
    /// True if the connection uses receives of the shared queue.
    pub(crate) shared: bool,
}

/// A message in several buffers of the pool, or the beginning of one.
#[derive(Debug)]
pub(crate) struct Fragments {
    /// Its parts in order, each with the offset at which the part ends in the buffer, in bytes. Each part has a header in front.
    pub(crate) parts: Vec<(Buffer, u32)>,
    /// The length of the parts that have arrived, in bytes.
    pub(crate) len: usize,
    /// The number of parts that have not arrived.
    pub(crate) following: u32,
    /// The time at which the first part arrived. The limit on the message as a whole counts from here.
    pub(crate) since: Instant,
    /// The index of the device.
    pub(crate) device: usize,
}

/// An action for a connection.
#[derive(Debug)]
pub(crate) enum Action {
    /// Call [`super::Connection::timeout`] at this time, or never for `None`. This replaces the earlier schedule.
    Deadline(Option<Instant>),
    /// Call [`super::Connection::timeout`] at this time, unless an earlier call is scheduled.
    LookBy(Instant),
    /// Call [`super::Connection::lists_due`] at this time. This replaces the earlier schedule.
    ListsBy(Instant),
    /// Make the device flush the queues, and wait for that.
    Flush,
    /// Watch the connection: it has begun to end.
    Ending,
    /// Note that the connection that a peer has opened is up.
    Settled,
    /// Handle the peer's Send with Invalidate, which has revoked a remote key of this device.
    Invalidated { device: usize, key: RemoteKey },
    /// Check a region that its owner has dropped: it may be unused now.
    Unused(Key),
    /// Release memory of a message longer than one buffer: it is not needed any more, or never was.
    Discard(Box<Region>),
    /// Note that the connection does not wait for memory any more.
    NoMemory,
    /// Trigger a turn, because there is something to post and no turn is running.
    Ring,
}

/// See the [module](self). The lists are reused.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    /// The callbacks in order, behind `arrived`.
    pub(crate) events: VecDeque<(ConnectionId, Event)>,
    /// A message that arrived while no callback was pending. Most messages arrive so, and do not use the list.
    pub(crate) arrived: Option<(ConnectionId, Arrived)>,
    /// The actions in order.
    pub(crate) actions: VecDeque<(ConnectionId, Action)>,
    /// Connections with work requests to post, without duplicates.
    pub(crate) to_post: Vec<ConnectionId>,
    /// Connections that were refused a send and may have capacity again.
    pub(crate) to_ask: VecDeque<ConnectionId>,
    /// The limit on log lines about peers.
    pub(crate) log_limit: LogLimit,
    /// True if no turn is running.
    pub(crate) outside: bool,
}

impl Effects {
    /// Returns the next callback.
    #[inline]
    pub(crate) fn next_event(&mut self) -> Option<(ConnectionId, Event)> {
        match self.arrived.take() {
            Some((id, arrived)) => Some((id, Event::Message(arrived))),
            None => self.events.pop_front(),
        }
    }
}
