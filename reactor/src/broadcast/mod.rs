//! One message for many connections, with a policy for each receiver that cannot keep up.
//!
//! # Slow receivers
//!
//! If a connection has no room for a message, the message is queued. The queue of a receiver holds at most `depth` messages. The
//! [`OverflowPolicy`] of a receiver with a full queue decides: the oldest message of the queue is dropped, the connection is closed, or
//! publishing is refused. A receiver with one of the first two policies never delays the publisher or another receiver.
//!
//! # Memory
//!
//! A message is copied once, into a slot of memory that is registered with each device that has receivers, and all connections send it
//! from there. There are `2 * depth` slots, each as long as the longest message, for any number of receivers. A slot is free when the
//! device has completed the sends to all receivers. While slow receivers hold all slots, messages are copied for each receiver, as
//! [`Context::send`] does. Messages longer than [`Context::buffer_size`] are copied for each receiver, too, unless
//! [`Broadcast::fetchable`] is set. The embedded provider also copies messages that it sends with a CRC, and a secured connection copies
//! each message to encrypt it.

mod receiver;
mod slots;

use std::collections::BTreeMap;
use std::fmt;

use self::receiver::BroadcastReceiver;
use self::slots::{Slots, StoredMessage};
use crate::{Access, ConnectionId, Context, Error, Outcome, RegionOptions, SendId};

/// The policy for a receiver whose queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OverflowPolicy {
    /// Drops the oldest message of the queue. The receiver has a gap.
    Drop,
    /// Closes the connection ([`Context::close`]). The messages that were sent have no gap.
    Close,
    /// Refuses [`Broadcast::publish`] until the receiver has caught up. All receivers wait for the slowest.
    Wait,
}

/// The numbers of messages of a receiver, by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tally {
    /// Messages that were sent: [`Outcome::Sent`].
    pub sent: u64,
    /// Messages that were dropped because the receiver was slow.
    pub dropped: u64,
    /// Messages that were lost with the connection, or that were queued when the receiver was closed or left.
    pub lost: u64,
    /// Messages that are queued or in flight.
    pub pending: u64,
}

/// The numbers of receivers of a published message, by immediate result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Published {
    /// Receivers whose connections have accepted the message.
    pub accepted: usize,
    /// Receivers that have the message in their queues.
    pub queued: usize,
    /// Receivers for which a message was dropped, this one or an older one. If an older one was dropped, `queued` counts the receiver, too.
    pub dropped: usize,
    /// Receivers that were closed because their queues were full.
    pub closed: usize,
}

/// The reason why a message was not published. No receiver gets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PublishError {
    /// The queue of a receiver with [`OverflowPolicy::Wait`] is full. Try again when [`Broadcast::is_full`] returns false; each of the
    /// three callbacks may change it.
    Full,
    /// The message is longer than the limit of [`Broadcast::new`].
    TooLong {
        /// Its length, bytes.
        len: usize,
        /// The limit, bytes.
        max: usize,
    },
}

impl fmt::Display for PublishError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str(
                "the queue of a receiver with OverflowPolicy::Wait is full: try again after the next callback",
            ),
            Self::TooLong { len, max } => {
                write!(f, "a message of {len} bytes is longer than {max}, the limit of this broadcast")
            }
        }
    }
}

impl std::error::Error for PublishError {}

/// A broadcast to many connections; see the [module](self). A program's [`Handler`](crate::Handler) contains it, adds connections as
/// receivers, forwards three callbacks, and publishes:
///
/// ```
/// use rdma_reactor::broadcast::{Broadcast, OverflowPolicy};
/// use rdma_reactor::{ConnectionId, Context, DisconnectReason, Handler, Message, Outcome, SendId};
///
/// /// Forwards each received message to all receivers.
/// struct Feed {
///     broadcast: Broadcast,
/// }
///
/// impl Handler for Feed {
///     fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
///         if let Err(error) = self.broadcast.join(cx, conn, OverflowPolicy::Drop) {
///             println!("{conn}: {error}");
///             cx.close(conn);
///         }
///     }
///
///     fn on_recv(&mut self, cx: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
///         if let Err(error) = self.broadcast.publish(cx, &message) {
///             println!("not published: {error}");
///         }
///     }
///
///     fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
///         self.broadcast.on_writable(cx, conn);
///     }
///
///     fn on_send_complete(&mut self, _: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
///         self.broadcast.on_send_complete(conn, send, outcome);
///     }
///
///     fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, _: DisconnectReason) {
///         if let Some(tally) = self.broadcast.on_disconnect(conn) {
///             println!("{conn}: {} messages sent, {} dropped", tally.sent, tally.dropped);
///         }
///     }
/// }
///
/// let feed = Feed { broadcast: Broadcast::new(64, 4096) };
/// # drop(feed);
/// ```
#[derive(Debug)]
pub struct Broadcast {
    receivers: BTreeMap<ConnectionId, BroadcastReceiver>,
    slots: Slots,
    depth: usize,
}

impl Broadcast {
    /// Creates a broadcast without receivers. `depth` is the largest number of messages in the queue of a receiver, and `max_message` the
    /// length of the longest message in bytes. Both are at least 1; 0 counts as 1.
    ///
    /// Example: [`Broadcast`].
    #[must_use]
    pub fn new(depth: usize, max_message: usize) -> Self {
        let depth = depth.max(1);
        let slots = Slots::new(depth.saturating_mul(2), max_message.max(1), RegionOptions::new());
        Self { receivers: BTreeMap::new(), slots, depth }
    }

    /// Allows the peers of all connections to read the memory of messages. Messages longer than [`Context::buffer_size`] are then not
    /// copied for each receiver: every peer fetches them from the one copy. A malicious peer can read messages there that were published
    /// before it joined. Secured connections refuse such memory ([`crate::Config::allow_plain_remote_memory`]). Call this before the first
    /// receiver joins.
    #[must_use]
    pub fn fetchable(mut self) -> Self {
        self.slots.options = RegionOptions::new().allow(Access::REMOTE_READ).any_peer();
        self
    }

    /// Makes an open connection a receiver of the messages that are published from now on. A connection that is a receiver gets the new
    /// `policy`, and one that has left joins again. The first receiver on a device registers memory there, which may block: see
    /// [`Context::register`].
    ///
    /// Example: [`Broadcast`].
    ///
    /// # Errors
    /// As [`Context::register`].
    pub fn join(&mut self, cx: &mut Context<'_>, conn: ConnectionId, policy: OverflowPolicy) -> Result<(), Error> {
        let device = self.slots.device(cx, conn)?;
        let receiver = self.receivers.entry(conn).or_insert_with(|| BroadcastReceiver::new(device, policy));
        (receiver.policy, receiver.open) = (policy, true);
        Ok(())
    }

    /// Removes a receiver. Its connection stays open, and its queued messages are lost.
    pub fn leave(&mut self, conn: ConnectionId) {
        if let Some(receiver) = self.receivers.get_mut(&conn) {
            receiver.end(&mut self.slots);
        }
    }

    /// Sends a message to each receiver, or queues it there. The messages of a receiver arrive in the order in which they were
    /// published.
    ///
    /// Example: [`Broadcast`].
    ///
    /// # Errors
    /// [`PublishError`].
    pub fn publish(&mut self, cx: &mut Context<'_>, message: &[u8]) -> Result<Published, PublishError> {
        let (len, max) = (message.len(), self.slots.len());
        if len > max {
            return Err(PublishError::TooLong { len, max });
        }
        if self.is_full() {
            return Err(PublishError::Full);
        }
        let Self { receivers, slots, depth } = self;
        let mut published = Published::default();
        let stored = slots.take(message).map(|slot| StoredMessage { slot, len });
        for (&conn, receiver) in receivers.iter_mut().filter(|(_, receiver)| receiver.open) {
            if receiver.try_send(cx, conn, (stored, message), slots) {
                published.accepted += 1;
                continue;
            }
            let full = stored.is_none() || receiver.queue.len() >= *depth;
            match (full, receiver.policy) {
                (true, OverflowPolicy::Close) => {
                    receiver.end(slots);
                    cx.close(conn);
                    published.closed += 1;
                    continue;
                }
                // Without a free slot, the new message is dropped instead of the oldest.
                (true, _) => {
                    if stored.is_some() {
                        receiver.drop_oldest(slots);
                    }
                    receiver.tally.dropped += 1;
                    published.dropped += 1;
                }
                (false, _) => {}
            }
            if let Some(stored) = stored {
                receiver.push(stored, slots);
                published.queued += 1;
            }
        }
        if let Some(stored) = stored {
            slots.release(stored.slot);
        }
        Ok(published)
    }

    /// Returns true if [`Broadcast::publish`] would fail with [`PublishError::Full`] now.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let waits = |receiver: &BroadcastReceiver| receiver.open && receiver.policy == OverflowPolicy::Wait;
        let full = |receiver: &BroadcastReceiver| receiver.queue.len() >= self.depth || !self.slots.has_room();
        self.receivers.values().any(|receiver| waits(receiver) && full(receiver))
    }

    /// Returns the numbers of messages of a receiver; `None` if the connection never joined.
    #[must_use]
    pub fn tally(&self, conn: ConnectionId) -> Option<Tally> {
        self.receivers.get(&conn).map(BroadcastReceiver::tally)
    }

    /// Sends the queued messages of a receiver. Call this in [`crate::Handler::on_writable`].
    ///
    /// Example: [`Broadcast`].
    pub fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if let Some(receiver) = self.receivers.get_mut(&conn) {
            receiver.send_queued(cx, conn, &mut self.slots);
        }
    }

    /// Handles the completion of a send. Call this in [`crate::Handler::on_send_complete`]. Returns true if the send was a message of this
    /// broadcast.
    ///
    /// Example: [`Broadcast`].
    pub fn on_send_complete(&mut self, conn: ConnectionId, send: SendId, outcome: Outcome) -> bool {
        let receiver = self.receivers.get_mut(&conn);
        receiver.is_some_and(|receiver| receiver.completed(send, outcome, &mut self.slots))
    }

    /// Removes a receiver whose connection has ended. Call this in [`crate::Handler::on_disconnect`]. Returns the final numbers of its
    /// messages; `None` if the connection never joined.
    pub fn on_disconnect(&mut self, conn: ConnectionId) -> Option<Tally> {
        let mut receiver = self.receivers.remove(&conn)?;
        receiver.end(&mut self.slots);
        Some(receiver.tally())
    }
}
