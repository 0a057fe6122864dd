//! One message for many connections, with a policy for each receiver that cannot keep up.
//!
//! # Slow receivers
//!
//! If the connection of a receiver has no room for a message, the message is queued for that receiver. The queue of a receiver holds at
//! most `depth` messages. When the queue is full, the receiver's [`OverflowPolicy`] decides what happens to the next message:
//!
//! - `Drop`: the oldest message of the queue is dropped.
//! - `Close`: the connection is closed.
//! - `Wait`: publishing is refused.
//!
//! A receiver with the policy `Drop` or `Close` never delays the publisher or another receiver.
//!
//! # Memory
//!
//! A message is copied once, into a slot, and all connections send it from that slot. The slots are memory that is registered with each
//! device that has receivers. There are `3 * depth` slots, each as long as the longest message, for
//! any number of receivers. A slot is free
//! again when the sends of its message to all receivers have completed.
//!
//! In these cases a message is copied for each receiver:
//!
//! - The sends in flight hold `2 * depth - 1` slots, or those to this receiver hold `depth` slots.
//!   Then the message is copied as by [`Context::send`].
//! - The message is longer than [`crate::ConnectionContext::buffer_size`], and
//!   [`Broadcast::fetchable`] is not set.
//! - The embedded provider sends the message, and the connection uses a CRC ([`CrcPolicy`](crate::transport::iwarp::CrcPolicy)).
//! - The connection is secured: it encrypts a copy of the message.

mod receiver;
mod slots;

use std::collections::BTreeMap;

use self::receiver::{BroadcastReceiver, SendAttempt};
use self::slots::{Slots, StoredMessage};
use crate::{Access, ConnectionId, Context, Error, Outcome, RegionOptions, SendId};

/// The policy for a receiver whose queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OverflowPolicy {
    /// Drops the oldest message of the queue. The receiver never gets that message.
    Drop,
    /// Closes the connection ([`Context::close`]). Until the close, the receiver gets the messages without a gap.
    Close,
    /// Refuses [`Broadcast::publish`] until the queue of this receiver has room again. So this receiver limits the rate at which all
    /// receivers of the broadcast get messages.
    Wait,
}

/// Counts the messages that were published for a receiver: sent, dropped, lost and pending ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tally {
    /// The number of messages whose sends have completed with [`Outcome::Sent`].
    pub sent: u64,
    /// The number of messages that were dropped because the queue of the receiver was full.
    pub dropped: u64,
    /// The number of messages that were not sent for another reason: the connection had ended, the connection or the peer's program did not
    /// accept the message, or the message was still queued when the receiver left or was closed.
    pub lost: u64,
    /// The number of messages that are queued or in flight.
    pub pending: u64,
}

/// The result of publishing a message. Each field is a number of receivers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Published {
    /// The number of receivers whose connections have accepted the message.
    pub accepted: usize,
    /// The number of receivers for which the message was lost, because the connection is ending or can never send the message. The message
    /// also counts in [`Tally::lost`].
    pub lost: usize,
    /// The number of receivers for which the message was queued.
    pub queued: usize,
    /// The number of receivers for which the oldest message of the queue was dropped. The published
    /// message was queued instead, so `queued` counts the receiver, too.
    pub dropped: usize,
    /// The number of receivers that were closed, because their queues were full.
    pub closed: usize,
}

/// The reason why a message was not published. No receiver gets the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// A receiver with [`OverflowPolicy::Wait`] cannot queue the message, because its queue is
    /// full. Publish again when
    /// [`Broadcast::is_full`] returns false. Check `is_full` after the program has forwarded `on_writable`, `on_send_complete` or
    /// `on_disconnect` to the broadcast.
    #[error("the queue of a receiver with OverflowPolicy::Wait is full: try again after the next callback")]
    Full,
    /// The message is longer than the argument `max_message` of [`Broadcast::new`].
    #[error("a message of {len} bytes is longer than {max}, the limit of this broadcast")]
    TooLong {
        /// The length of the message, in bytes.
        len: usize,
        /// The longest message of this broadcast, in bytes.
        max: usize,
    },
}

/// A broadcast to many connections; see the [module](self). A program's [`Handler`](crate::Handler) contains the broadcast, adds
/// connections to it as receivers, forwards three callbacks to it, and publishes messages:
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
    receivers: BTreeMap<ConnectionId, BroadcastReceiver>, // local: the program adds the receivers
    slots: Slots,
    depth: usize,
}

impl Broadcast {
    /// Creates a broadcast without receivers. `depth` is the largest number of messages in the queue of a receiver. `max_message` is the
    /// length of the longest message in bytes. A value of 0 has the same effect as 1.
    ///
    /// Example: [`Broadcast`].
    #[must_use]
    pub fn new(depth: usize, max_message: usize) -> Self {
        let depth = depth.max(1);
        let slots = Slots::new(depth, max_message.max(1), RegionOptions::new());
        Self { receivers: BTreeMap::new(), slots, depth }
    }

    /// Allows the peers of all connections to read the slots of messages. Messages longer than
    /// [`crate::ConnectionContext::buffer_size`] are then not copied for each receiver: every peer
    /// reads them from the slot by RDMA Read. A malicious peer can also read messages that were
    /// published before the peer joined, while they are in the slots. Secured connections refuse
    /// memory that every peer may read, unless [`crate::Config::allow_plain_remote_memory`] is set.
    /// Call `fetchable` before the first receiver joins.
    #[must_use]
    pub fn fetchable(mut self) -> Self {
        self.slots.options = RegionOptions::new().allow(Access::REMOTE_READ).any_peer();
        self
    }

    /// Makes an open connection a receiver of the messages that are published from now on. If the connection is a receiver already, only
    /// its policy changes. A connection that has left may join again. When the first connection of a device joins, the slots are registered
    /// with that device, which may block: see [`crate::RegionContext::register`].
    ///
    /// Example: [`Broadcast`].
    ///
    /// # Errors
    /// The errors of [`crate::RegionContext::register`].
    pub fn join(&mut self, cx: &mut Context<'_>, conn: ConnectionId, policy: OverflowPolicy) -> Result<(), Error> {
        let device = self.slots.device(cx, conn)?;
        let receiver = self.receivers.entry(conn).or_insert_with(|| BroadcastReceiver::new(device, policy));
        (receiver.policy, receiver.open) = (policy, true);
        Ok(())
    }

    /// Removes a receiver from the broadcast. The connection stays open. The messages in the queue of the receiver are not sent.
    pub fn leave(&mut self, conn: ConnectionId) {
        if let Some(receiver) = self.receivers.get_mut(&conn) {
            receiver.end(&mut self.slots);
        }
    }

    /// Sends a message to each receiver. If the connection of a receiver has no room, the message is queued for that receiver. Each
    /// receiver gets its messages in the order in which they were published. Returns the number of receivers for which the message was
    /// accepted, lost, queued or dropped, and the number of receivers that were closed.
    ///
    /// Example: [`Broadcast`].
    ///
    /// # Errors
    /// [`PublishError`].
    pub fn publish(&mut self, cx: &mut Context<'_>, message: &[u8]) -> Result<Published, PublishError> {
        self.publish_to(cx, message, |_| true)
    }

    /// Sends a message to each receiver but one, as [`Broadcast::publish`] does. A chat forwards a
    /// message of `sender` in this way to the others.
    ///
    /// ```
    /// use rdma_reactor::broadcast::Broadcast;
    /// use rdma_reactor::{ConnectionId, Context};
    ///
    /// /// Called in `on_recv` of a chat.
    /// fn forward(room: &mut Broadcast, cx: &mut Context<'_>, from: ConnectionId, message: &[u8]) {
    ///     if let Err(error) = room.publish_except(cx, from, message) {
    ///         eprintln!("{from}: {error}");
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// [`PublishError`]. [`PublishError::Full`] also if the queue of `sender` is the full one.
    pub fn publish_except(
        &mut self,
        cx: &mut Context<'_>,
        sender: ConnectionId,
        message: &[u8],
    ) -> Result<Published, PublishError> {
        self.publish_to(cx, message, |conn| conn != sender)
    }

    /// Sends a message to the receivers for which `selects` returns true.
    fn publish_to(
        &mut self,
        cx: &mut Context<'_>,
        message: &[u8],
        selects: impl Fn(ConnectionId) -> bool,
    ) -> Result<Published, PublishError> {
        let (len, max) = (message.len(), self.slots.len());
        if len > max {
            return Err(PublishError::TooLong { len, max });
        }
        if self.is_full() {
            return Err(PublishError::Full);
        }
        let Self { receivers, slots, depth } = self;
        let mut published = Published::default();
        let Some(slot) = slots.take(message) else { return Ok(published) };
        let stored = StoredMessage { slot, len };
        for (&conn, receiver) in receivers.iter_mut().filter(|(conn, receiver)| receiver.open && selects(**conn)) {
            match receiver.try_send(cx, conn, stored, slots) {
                SendAttempt::Accepted => {
                    published.accepted += 1;
                    continue;
                }
                SendAttempt::Lost => {
                    published.lost += 1;
                    continue;
                }
                SendAttempt::Waits => {}
            }
            if receiver.queue.len() >= *depth {
                if receiver.policy == OverflowPolicy::Close {
                    receiver.end(slots);
                    cx.close(conn);
                    published.closed += 1;
                    continue;
                }
                receiver.drop_oldest(slots);
                receiver.tally.dropped += 1;
                published.dropped += 1;
            }
            receiver.push(stored, slots);
            published.queued += 1;
        }
        slots.release(slot);
        Ok(published)
    }

    /// Returns true if [`Broadcast::publish`] would fail with [`PublishError::Full`] now.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let waits = |receiver: &BroadcastReceiver| receiver.open && receiver.policy == OverflowPolicy::Wait;
        self.receivers.values().any(|receiver| waits(receiver) && receiver.queue.len() >= self.depth)
    }

    /// Returns the numbers of messages that were sent, dropped, lost or are pending for a receiver. Returns `None` if the connection never
    /// joined or has ended.
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
    /// broadcast. Returns false if the program made the send itself.
    ///
    /// Example: [`Broadcast`].
    pub fn on_send_complete(&mut self, conn: ConnectionId, send: SendId, outcome: Outcome) -> bool {
        let receiver = self.receivers.get_mut(&conn);
        receiver.is_some_and(|receiver| receiver.completed(send, outcome, &mut self.slots))
    }

    /// Removes a receiver whose connection has ended. Call this in [`crate::Handler::on_disconnect`]. Returns the final [`Tally`] of the
    /// receiver; `None` if the connection never joined.
    pub fn on_disconnect(&mut self, conn: ConnectionId) -> Option<Tally> {
        let mut receiver = self.receivers.remove(&conn)?;
        receiver.end(&mut self.slots);
        receiver.lose_unreported(&mut self.slots);
        Some(receiver.tally())
    }
}
