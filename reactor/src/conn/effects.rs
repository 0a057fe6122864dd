//! The outputs of a connection: callbacks for the program, and actions for the driver.

use std::collections::VecDeque;
use std::time::Instant;

use rdma_transport::log_limit::LogLimit;
use rdma_transport::mr::RemoteKey;
use rdma_transport::slab::Key;
use rdma_transport::wc::Failure;

use super::frame::Immediate;
use crate::device::pool::Buffer;
use crate::error::{ConnectError, DisconnectReason, Outcome};
use crate::id::{ConnectionId, SendId, TransferId};
use crate::memory::landing::Offered;
use crate::memory::list::TransferEnd;
use crate::memory::region::Region;

/// A pending callback of the program.
#[derive(Debug)]
pub(crate) enum Event {
    /// The peer has proven its identity on a connection that is being secured. The program must accept or refuse the peer.
    Identified,
    /// The connection is up.
    Connected,
    /// A message arrived.
    Message(Arrived),
    /// A message in several buffers arrived.
    Fragments(Box<Fragments>),
    /// The peer offers a message longer than one buffer.
    Offered(Offered),
    /// A message longer than one buffer was fetched into memory of the library.
    Fetched(Box<Region>),
    /// A message longer than one buffer was fetched into memory of the program, or the connection ended before the message was complete.
    Landed(Box<(Offered, Result<(), Failure>)>),
    /// A Write with Immediate from the peer has placed its data.
    Immediate(Immediate),
    /// `count` consecutive sends have ended with the same outcome; `send` is the first of them. The program receives a callback for each
    /// send.
    Sent { send: SendId, count: u32, outcome: Outcome },
    /// A list, which is a transfer of many Reads or Writes, has ended.
    Transferred(Box<(TransferId, TransferEnd)>),
    /// A send was refused for lack of capacity, and enough capacity for that send is available now. The program may repeat the send.
    Writable,
    /// The last callback of a connection that was up.
    Disconnected(Box<DisconnectReason>),
    /// The only callback of a connection that did not come up.
    ConnectError(Box<ConnectError>),
}

/// A message in a buffer of the pool.
#[derive(Debug)]
pub(crate) struct Arrived {
    /// The buffer. `None` if the program has detached it, or it was freed.
    pub(crate) buffer: Option<Buffer>,
    /// The payload in the buffer begins at the offset `start` and ends at the offset `end`, in bytes.
    pub(crate) start: u32,
    pub(crate) end: u32,
    /// The index of the device.
    pub(crate) device: u16,
    /// True if the message arrived in a receive of the device's shared receive queue.
    pub(crate) shared: bool,
}

/// A message in several buffers of the pool. Its last parts may not have arrived yet.
#[derive(Debug)]
pub(crate) struct Fragments {
    /// For each part, in order: its buffer, and the offset at which the part ends in that buffer, in bytes. Each part begins with a header.
    pub(crate) parts: Vec<(Buffer, u32)>, // bound: receives
    /// The total length of the parts that have arrived, without their headers, in bytes.
    pub(crate) len: usize,
    /// The number of parts that have not arrived.
    pub(crate) following: u32,
    /// The time at which the first part arrived. The time limit for the whole message starts at this time.
    pub(crate) since: Instant,
    /// The index of the device.
    pub(crate) device: usize,
}

/// An action that a connection requests from the driver.
#[derive(Debug)]
pub(crate) enum Action {
    /// Set the timer of the connection to [`super::Connection::next_timeout`], which has changed.
    Deadline,
    /// Disconnect, so that the device flushes the queues of the queue pair, and wait for the flushed completions.
    Flush,
    /// Add the connection to the list of ending connections.
    Ending,
    /// Remove the connection from the list of unfinished handshakes. The peer has opened the connection, and the connection is up now.
    Settled,
    /// The peer has sent a Send with Invalidate, which has invalidated this remote key on this device. The driver must update the key's
    /// region.
    Invalidated { device: usize, key: RemoteKey },
    /// Check a region that the program has dropped. If no work request uses the region any more, deregister it.
    Unused(Key),
    /// Release the library's memory for a message longer than one buffer, because the message does not need it any more. If a Read into
    /// that memory is in flight, the memory stays registered until the Read ends.
    Discard(Box<Region>),
    /// Remove the connection from the connections that wait for memory.
    NoMemory,
    /// Trigger a turn, because the connection has something to post and no turn is running.
    Ring,
}

/// The outputs of all connections of a reactor. The allocations are reused from turn to turn.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    /// The pending callbacks in order. If `arrived` is set, the callback for that message is made before all of these.
    events: VecDeque<(ConnectionId, Event)>, // bound: turn
    /// The number of callbacks in `events` that are for new connections.
    connected: usize,
    /// A message that arrived while no other callback was pending, which is the usual case. Such a message is stored here and not in
    /// `events`, because that costs less time.
    pub(crate) arrived: Option<(ConnectionId, Arrived)>,
    /// The actions in order.
    pub(crate) actions: VecDeque<(ConnectionId, Action)>, // bound: turn
    /// Connections with work requests to post, without duplicates.
    pub(crate) to_post: Vec<ConnectionId>, // bound: connections
    /// Connections on which a send was refused. The driver checks for each of them if the send would be accepted now.
    pub(crate) to_ask: VecDeque<ConnectionId>, // bound: turn
    /// Limits the number of log lines that peers can cause.
    pub(crate) log_limit: LogLimit,
    /// True if no turn of the reactor is running.
    pub(crate) outside: bool,
}

impl Effects {
    /// Adds a callback behind all pending ones.
    #[inline]
    pub(crate) fn push_event(&mut self, id: ConnectionId, event: Event) {
        self.connected += usize::from(matches!(event, Event::Connected));
        self.events.push_back((id, event));
    }

    /// Removes the next callback and returns it. `None` if no callback is pending.
    #[inline]
    pub(crate) fn next_event(&mut self) -> Option<(ConnectionId, Event)> {
        if let Some((id, arrived)) = self.arrived.take() {
            return Some((id, Event::Message(arrived)));
        }
        let next = self.events.pop_front()?;
        self.connected -= usize::from(matches!(next.1, Event::Connected));
        Some(next)
    }

    /// Removes the pending callbacks for which `keeps` returns false.
    pub(crate) fn retain_events(&mut self, mut keeps: impl FnMut(ConnectionId, &mut Event) -> bool) {
        let connected = &mut self.connected;
        self.events.retain_mut(|(id, event)| {
            let kept = keeps(*id, event);
            *connected -= usize::from(!kept && matches!(event, Event::Connected));
            kept
        });
    }

    /// Returns true if a callback other than that for `arrived` is pending.
    #[inline]
    pub(crate) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Returns true if the callback for a new connection is pending.
    #[inline]
    pub(crate) const fn has_connected(&self) -> bool {
        self.connected > 0
    }
}
