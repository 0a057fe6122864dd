//! A connection that tasks of any thread may use.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use super::calls::{Caller, Requests};
use super::error::{ConnectionEnd, DeliverError};
use super::link::{ConnectionHandle, ConnectionParts, QueuedMessage, ThreadCommand};
use crate::{ConnectionId, DetachedMessage, Outcome, PeerIdentity};

/// A connection of a [`super::ThreadedReactor`]. To send in one task and receive in another, split the connection into two halves with
/// [`ThreadedConnection::split`].
#[derive(Debug)]
pub struct ThreadedConnection {
    pub(super) sender: Sender,
    pub(super) receiver: Receiver,
}

impl ThreadedConnection {
    pub(super) fn new(ConnectionParts { handle, inbox }: ConnectionParts) -> Self {
        handle.state.taken.store(true, Ordering::Relaxed);
        Self { sender: Sender { handle: Arc::clone(&handle) }, receiver: Receiver { handle, inbox } }
    }

    /// Splits the connection into the half that sends and the half that receives.
    #[must_use]
    pub fn split(self) -> (Sender, Receiver) {
        (self.sender, self.receiver)
    }

    /// Returns the half that sends. The program may clone it.
    #[must_use]
    pub const fn sender(&self) -> &Sender {
        &self.sender
    }

    /// Uses this connection only for calls, in both directions, until the connection ends. The peer must use the connection for calls, too.
    /// Returns the handle that makes calls, and the requests of the peer.
    ///
    /// Example: [`Caller`].
    #[must_use]
    pub fn calls(self) -> (Caller, Requests) {
        let Self { sender: Sender { handle }, receiver: Receiver { inbox, .. } } = self;
        let (received, requests) = mpsc::unbounded_channel();
        handle.link.post(ThreadCommand::EnableCalls(handle.id, inbox, received));
        (Caller::new(Arc::clone(&handle)), Requests::new(handle, requests))
    }

    /// Returns the id of the connection. The program passes it to the operations of [`crate::Context`], to which
    /// [`super::ThreadedReactor::with`] gives access.
    #[must_use]
    pub fn id(&self) -> ConnectionId {
        self.sender.id()
    }

    /// Returns the address of the peer. Returns `None` if the reactor did not know the address when the connection was established.
    #[must_use]
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.sender.handle.state.peer.get().and_then(|peer| peer.address)
    }

    /// Returns the identity that the peer has proven in the handshake. Returns `None` if the
    /// connection is not secured. The identity is also known after the connection has ended.
    #[must_use]
    pub fn identity(&self) -> Option<&PeerIdentity> {
        self.sender.handle.state.peer.get()?.identity.as_ref()
    }

    /// Sends a message, as [`Sender::send`] does.
    ///
    /// # Errors
    /// The errors of [`Sender::send`].
    pub async fn send(&self, payload: impl Into<Bytes>) -> Result<(), ConnectionEnd> {
        self.sender.send(payload).await
    }

    /// Waits for the next message, as [`Receiver::recv`] does.
    ///
    /// # Errors
    /// The errors of [`Receiver::recv`].
    pub async fn recv(&mut self) -> Result<DetachedMessage, ConnectionEnd> {
        self.receiver.recv().await
    }
}

/// The half of a connection that sends. Clones share the connection. The messages that one task sends arrive in the order in which the task
/// sends them.
#[derive(Clone)]
pub struct Sender {
    pub(super) handle: Arc<ConnectionHandle>,
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sender({})", self.handle.id)
    }
}

impl Sender {
    /// Returns the id of the connection. The program passes it to the operations of [`crate::Context`], to which
    /// [`super::ThreadedReactor::with`] gives access.
    #[must_use]
    pub fn id(&self) -> ConnectionId {
        self.handle.id
    }

    /// Queues a message for sending. Waits while 64 messages of this connection are queued. If several tasks wait, they continue in the
    /// order in which they began to wait. If the future is dropped before it is done, the message is not sent. If the connection fails
    /// before a queued message is sent, the message is lost, and `send` does not report the loss. [`Sender::deliver`] reports it.
    ///
    /// Example: the [module](super).
    ///
    /// # Errors
    /// [`ConnectionEnd`].
    pub async fn send(&self, payload: impl Into<Bytes>) -> Result<(), ConnectionEnd> {
        self.queue(payload.into(), None).await
    }

    /// Queues a message as [`Sender::send`] does, and waits until the message is sent, in the sense of [`Outcome::Sent`].
    ///
    /// ```
    /// use rdma_reactor::threaded::{DeliverError, Sender};
    ///
    /// async fn last_words(sender: &Sender) -> Result<(), DeliverError> {
    ///     sender.deliver("goodbye").await
    /// }
    /// ```
    ///
    /// # Errors
    /// [`DeliverError`].
    pub async fn deliver(&self, payload: impl Into<Bytes>) -> Result<(), DeliverError> {
        let (report, outcome) = oneshot::channel();
        self.queue(payload.into(), Some(report)).await?;
        match outcome.await {
            Ok(outcome) if outcome.is_sent() => Ok(()),
            Ok(outcome) => Err(DeliverError::Unknown(outcome)),
            // The connection or the reactor's thread has ended while the message was still queued.
            Err(_) => Err(self.handle.state.ended().into()),
        }
    }

    async fn queue(&self, payload: Bytes, report: Option<oneshot::Sender<Outcome>>) -> Result<(), ConnectionEnd> {
        let state = &self.handle.state;
        let max = state.peer.get().map_or(u64::MAX, |peer| peer.max_message);
        if payload.len() as u64 > max {
            return Err(ConnectionEnd::TooLong { len: payload.len(), max });
        }
        let permit = Arc::clone(&state.room).acquire_owned().await.map_err(|_| state.ended())?;
        self.post(payload, report, permit);
        Ok(())
    }

    /// Queues a message for which there is room.
    pub(super) fn post(&self, payload: Bytes, report: Option<oneshot::Sender<Outcome>>, permit: OwnedSemaphorePermit) {
        let ConnectionHandle { link, id, .. } = &*self.handle;
        link.post(ThreadCommand::Send(*id, QueuedMessage { payload, report, _permit: permit }));
    }
}

/// The half of a connection that receives.
pub struct Receiver {
    handle: Arc<ConnectionHandle>,
    pub(super) inbox: mpsc::UnboundedReceiver<DetachedMessage>, // bound: receives
}

impl fmt::Debug for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Receiver({})", self.handle.id)
    }
}

impl Receiver {
    /// Waits for the next message, and returns it. Once the connection has ended, `recv` first returns the messages that arrived before the
    /// end, and then the error. A message occupies a receive buffer. When the program drops the message, the peer gets a credit for another
    /// message. Dropping the future loses no message.
    ///
    /// Example: the [module](super).
    ///
    /// # Errors
    /// [`ConnectionEnd::Disconnected`] if the connection has ended, or [`ConnectionEnd::Reactor`] if the reactor's thread has ended.
    pub async fn recv(&mut self) -> Result<DetachedMessage, ConnectionEnd> {
        self.inbox.recv().await.ok_or_else(|| self.handle.state.ended())
    }

    /// Returns the next message; `None` if no message has arrived. Does not wait, and does not report the end of the connection.
    pub fn try_recv(&mut self) -> Option<DetachedMessage> {
        self.inbox.try_recv().ok()
    }
}
