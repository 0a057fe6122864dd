//! A connection, seen from the tasks of any thread.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

use super::calls::{Caller, Requests};
use super::error::{ConnectionEnd, DeliverError};
use super::link::{Carried, Command, Hold, Outgoing};
use crate::{ConnectionId, DetachedMessage, Outcome};

/// A connection. [`Connection::split`] makes two halves of it, for two tasks.
#[derive(Debug)]
pub struct Connection {
    sender: Sender,
    receiver: Receiver,
}

impl Connection {
    pub(super) fn new(Carried { hold, inbox }: Carried) -> Self {
        Self { sender: Sender { hold: Arc::clone(&hold) }, receiver: Receiver { hold, inbox } }
    }

    /// The half that sends, and the half that receives.
    #[must_use]
    pub fn split(self) -> (Sender, Receiver) {
        (self.sender, self.receiver)
    }

    /// The half that sends; it can be cloned.
    #[must_use]
    pub const fn sender(&self) -> &Sender {
        &self.sender
    }

    /// Makes calls of the messages of this connection, in both directions and for good; the peer does the same.
    ///
    /// Example: [`Caller`].
    #[must_use]
    pub fn calls(self) -> (Caller, Requests) {
        let Self { sender: Sender { hold }, receiver: Receiver { inbox, .. } } = self;
        let (asked, requests) = mpsc::unbounded_channel();
        hold.link.post(Command::Carry(hold.id, inbox, asked));
        (Caller::new(Arc::clone(&hold)), Requests::new(hold, requests))
    }

    /// The name of the connection, for [`super::ThreadedReactor::with`].
    #[must_use]
    pub fn id(&self) -> ConnectionId {
        self.sender.id()
    }

    /// Address of the peer; `None` if its connection had none.
    #[must_use]
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.sender.hold.state.peer.get().and_then(|&(_, address)| address)
    }

    /// As [`Sender::send`].
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub async fn send(&self, payload: impl Into<Bytes>) -> Result<(), ConnectionEnd> {
        self.sender.send(payload).await
    }

    /// As [`Receiver::recv`].
    ///
    /// # Errors
    /// As [`Receiver::recv`].
    pub async fn recv(&mut self) -> Result<DetachedMessage, ConnectionEnd> {
        self.receiver.recv().await
    }
}

/// The half of a connection that sends. Clones are of the same connection; messages of one task keep their order.
#[derive(Clone)]
pub struct Sender {
    hold: Arc<Hold>,
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sender({})", self.hold.id)
    }
}

impl Sender {
    /// The name of the connection, for [`super::ThreadedReactor::with`].
    #[must_use]
    pub fn id(&self) -> ConnectionId {
        self.hold.id
    }

    /// Sends a message; waits while 64 messages of this connection are queued, behind the tasks that wait already. It is
    /// not sent if the future is dropped before. When it is done, the message is queued; it is lost if the connection breaks before it
    /// is sent, see [`Sender::deliver`].
    ///
    /// Example: the [module](super).
    ///
    /// # Errors
    /// [`ConnectionEnd`].
    pub async fn send(&self, payload: impl Into<Bytes>) -> Result<(), ConnectionEnd> {
        self.queue(payload.into(), None).await
    }

    /// Sends a message as [`Sender::send`], and waits until it is sent: [`Outcome::Sent`] says what that means.
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
            // It was still queued when the connection or the reactor's thread ended.
            Err(_) => Err(self.hold.state.ended().into()),
        }
    }

    async fn queue(&self, payload: Bytes, report: Option<oneshot::Sender<Outcome>>) -> Result<(), ConnectionEnd> {
        let Hold { link, id, state } = &*self.hold;
        if let Some(&(max, _)) = state.peer.get().filter(|(max, _)| payload.len() as u64 > *max) {
            return Err(ConnectionEnd::TooLong { len: payload.len(), max });
        }
        let permit = Arc::clone(&state.room).acquire_owned().await.map_err(|_| state.ended())?;
        link.post(Command::Send(*id, Outgoing { payload, report, _permit: permit }));
        Ok(())
    }
}

/// The half of a connection that receives.
pub struct Receiver {
    hold: Arc<Hold>,
    inbox: mpsc::UnboundedReceiver<DetachedMessage>,
}

impl fmt::Debug for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Receiver({})", self.hold.id)
    }
}

impl Receiver {
    /// The next message. Messages that came before the end are received before its reason. The peer gets its credit back when the message
    /// is dropped. A future that is dropped takes no message with it.
    ///
    /// Example: the [module](super).
    ///
    /// # Errors
    /// [`ConnectionEnd::Disconnected`] or [`ConnectionEnd::Reactor`].
    pub async fn recv(&mut self) -> Result<DetachedMessage, ConnectionEnd> {
        self.inbox.recv().await.ok_or_else(|| self.hold.state.ended())
    }

    /// The next message that is here already, if there is one.
    pub fn try_recv(&mut self) -> Option<DetachedMessage> {
        self.inbox.try_recv().ok()
    }
}
