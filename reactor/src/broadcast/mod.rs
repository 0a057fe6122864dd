//! One message for many connections, with a decision for each receiver that cannot keep up.
//!
//! # Slow receivers
//!
//! A message that a connection has no room for is queued, for at most `depth` messages per receiver. What happens to a receiver with
//! a full queue is its [`Slow`]: it loses the oldest message of the queue, loses its connection, or holds the publisher back. A receiver
//! that drops or is closed never holds anybody back, whatever its peer does.
//!
//! # Memory
//!
//! A message is copied once, into memory that is registered with each device that has receivers, and all connections send it from
//! there. There are `2 * depth` such places, each with room for the longest message, however many receivers there are; a place is free
//! when the device of every receiver is done with it. While receivers that are stuck hold all of them, messages are copied for each
//! receiver, as [`Context::send`] does. Messages past [`Context::buffer_size`] are copied for each receiver, too, unless
//! [`Broadcast::fetchable`] is set. The embedded provider copies what it sends with a CRC, and a secured connection what it seals.

mod receiver;
mod slots;

use std::collections::BTreeMap;
use std::fmt;

use self::receiver::Receiver;
use self::slots::{Parcel, Slots};
use crate::{Access, ConnectionId, Context, Error, Outcome, RegionOptions, SendId};

/// The decision about a receiver whose queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Slow {
    /// The oldest message of its queue is dropped. The receiver has a gap.
    Drop,
    /// Its connection is closed ([`Context::close`]). What was sent to it has no gap.
    Close,
    /// [`Broadcast::publish`] is refused until it has caught up. All receivers wait for the slowest.
    Wait,
}

/// The messages of a receiver, by what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tally {
    /// Messages that were sent: [`Outcome::Sent`].
    pub sent: u64,
    /// Messages that were dropped because the receiver was slow.
    pub dropped: u64,
    /// Messages that were lost with the connection, or left behind when the receiver was closed for being slow or has left.
    pub lost: u64,
    /// Messages that are queued or on their way.
    pub pending: u64,
}

/// The receivers of a message, by what became of it at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Published {
    /// Receivers whose connections have accepted the message.
    pub accepted: usize,
    /// Receivers in whose queue the message waits.
    pub queued: usize,
    /// Receivers that have lost a message, this one or an older one; those that lost an older one are among `queued`, too.
    pub dropped: usize,
    /// Receivers that were closed for being slow.
    pub closed: usize,
}

/// The reason why a message was not published. Nobody has got it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PublishError {
    /// A receiver with [`Slow::Wait`] is slow. Try again when [`Broadcast::is_full`] is false, which any of the callbacks may change.
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
            Self::Full => f.write_str("a receiver that the others wait for is slow: try again after the next callback"),
            Self::TooLong { len, max } => write!(f, "a message of {len} bytes: at most {max} can be published"),
        }
    }
}

impl std::error::Error for PublishError {}

/// Messages for many connections; see the [module](self). It is a part of a program's [`Handler`](crate::Handler), which says which
/// connections are receivers, passes three callbacks on, and publishes:
///
/// ```
/// use rdma_reactor::broadcast::{Broadcast, Slow};
/// use rdma_reactor::{ConnectionId, Context, DisconnectReason, Handler, Message, Outcome, SendId};
///
/// /// Sends what it receives from one peer on to all others.
/// struct Feed {
///     broadcast: Broadcast,
/// }
///
/// impl Handler for Feed {
///     fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
///         if let Err(error) = self.broadcast.join(cx, conn, Slow::Drop) {
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
    receivers: BTreeMap<ConnectionId, Receiver>,
    slots: Slots,
    depth: usize,
}

impl Broadcast {
    /// A broadcast without receivers. `depth`: the largest number of messages in the queue of a receiver, at least 1. `max_message`: the
    /// length of the longest message, bytes, at least 1.
    ///
    /// Example: [`Broadcast`].
    #[must_use]
    pub fn new(depth: usize, max_message: usize) -> Self {
        let depth = depth.max(1);
        let slots = Slots::new(depth.saturating_mul(2), max_message.max(1), RegionOptions::new());
        Self { receivers: BTreeMap::new(), slots, depth }
    }

    /// Lets the peers of all connections read the memory of messages, so that messages past [`Context::buffer_size`] are not copied for
    /// each receiver: each one fetches them from the one copy. A peer that breaks the rules can read messages there that were published
    /// before it joined. Refused on secured connections ([`crate::Config::allow_plain_remote_memory`]). To be set before the first
    /// receiver joins.
    #[must_use]
    pub fn fetchable(mut self) -> Self {
        self.slots.options = RegionOptions::new().allow(Access::REMOTE_READ).any_peer();
        self
    }

    /// Makes a connection that is up a receiver of the messages that are published from now on; of one that is, or has left, changes
    /// `slow` only. The first one on a device registers memory there, which may block: see [`Context::register`].
    ///
    /// Example: [`Broadcast`].
    ///
    /// # Errors
    /// As [`Context::register`].
    pub fn join(&mut self, cx: &mut Context<'_>, conn: ConnectionId, slow: Slow) -> Result<(), Error> {
        let device = self.slots.device(cx, conn)?;
        let receiver = self.receivers.entry(conn).or_insert_with(|| Receiver::new(device, slow));
        (receiver.slow, receiver.open) = (slow, true);
        Ok(())
    }

    /// Publishes nothing more to a connection, which stays open. Its queue is lost.
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
        let parcel = slots.take(message).map(|slot| Parcel { slot, len });
        for (&conn, receiver) in receivers.iter_mut().filter(|(_, receiver)| receiver.open) {
            if receiver.try_send(cx, conn, (parcel, message), slots) {
                published.accepted += 1;
                continue;
            }
            let full = parcel.is_none() || receiver.queue.len() >= *depth;
            match (full, receiver.slow) {
                (true, Slow::Close) => {
                    receiver.end(slots);
                    cx.close(conn);
                    published.closed += 1;
                    continue;
                }
                // Where no place is left, it is this message that is dropped.
                (true, _) => {
                    if parcel.is_some() {
                        receiver.drop_oldest(slots);
                    }
                    receiver.tally.dropped += 1;
                    published.dropped += 1;
                }
                (false, _) => {}
            }
            if let Some(parcel) = parcel {
                receiver.push(parcel, slots);
                published.queued += 1;
            }
        }
        if let Some(parcel) = parcel {
            slots.release(parcel.slot);
        }
        Ok(published)
    }

    /// Returns true if [`Broadcast::publish`] would be refused now, because a receiver with [`Slow::Wait`] is slow.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let waits = |receiver: &Receiver| receiver.open && receiver.slow == Slow::Wait;
        let full = |receiver: &Receiver| receiver.queue.len() >= self.depth || !self.slots.has_room();
        self.receivers.values().any(|receiver| waits(receiver) && full(receiver))
    }

    /// What has become of the messages of a receiver so far; `None` if the connection was none.
    #[must_use]
    pub fn tally(&self, conn: ConnectionId) -> Option<Tally> {
        self.receivers.get(&conn).map(Receiver::tally)
    }

    /// To be called in [`crate::Handler::on_writable`]: sends what is queued for a receiver.
    ///
    /// Example: [`Broadcast`].
    pub fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if let Some(receiver) = self.receivers.get_mut(&conn) {
            receiver.pump(cx, conn, &mut self.slots);
        }
    }

    /// To be called in [`crate::Handler::on_send_complete`]. Returns true if the send was a message of this broadcast.
    ///
    /// Example: [`Broadcast`].
    pub fn on_send_complete(&mut self, conn: ConnectionId, send: SendId, outcome: Outcome) -> bool {
        let receiver = self.receivers.get_mut(&conn);
        receiver.is_some_and(|receiver| receiver.completed(send, outcome, &mut self.slots))
    }

    /// To be called in [`crate::Handler::on_disconnect`]: what became of the messages of a receiver. `None` if the connection was none.
    pub fn on_disconnect(&mut self, conn: ConnectionId) -> Option<Tally> {
        let mut receiver = self.receivers.remove(&conn)?;
        receiver.end(&mut self.slots);
        Some(receiver.tally())
    }
}
