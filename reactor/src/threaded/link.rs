//! The link to the reactor's thread, and the commands that tasks post to it.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

use super::error::{ConnectionEnd, ThreadError};
use crate::call::{CallError, CallId, CallLimits, RequestId};
use crate::{
    ConnectError, ConnectionId, Context, DetachedMessage, DisconnectReason, Error, ListenOptions, ListenerId, Outcome,
    ReactorHandle,
};

/// The deadline of the drain when the last handle of the reactor is dropped.
const LINGER: Duration = Duration::from_secs(10);

/// A command of a task, which the reactor's thread carries out.
pub(super) enum ThreadCommand {
    Send(ConnectionId, QueuedMessage),
    Connect(Connect, oneshot::Sender<Result<NewConnection, Error>>),
    Close(ConnectionId),
    Listen(SocketAddr, ListenOptions, oneshot::Sender<Result<NewListener, Error>>),
    StopListening(ListenerId),
    /// Uses a connection for calls: the messages that have arrived, and all later ones, are frames.
    EnableCalls(ConnectionId, mpsc::UnboundedReceiver<DetachedMessage>, mpsc::UnboundedSender<ReceivedRequest>),
    Call(ConnectionId, QueuedCall),
    CancelCall(Arc<OnceLock<CallId>>),
    Answer(RequestId, Bytes),
    Dismiss(RequestId),
    Run(Act),
    LimitCalls(Box<dyn FnOnce(&mut CallLimits) + Send>),
}

/// A closure that opens a connection.
pub(super) type Connect = Box<dyn FnOnce(&mut Context<'_>) -> Result<ConnectionId, Error> + Send>;

/// A closure of the program.
pub(super) type Act = Box<dyn FnOnce(&mut Context<'_>) + Send>;

/// A connection that is being opened, and the notification that it is up.
pub(super) type NewConnection = (ConnectionParts, oneshot::Receiver<Result<(), ConnectError>>);

/// A listener with its address, and the connections that it accepts.
pub(super) type NewListener = (ListenerHandle, SocketAddr, mpsc::UnboundedReceiver<ConnectionParts>);

/// A message of a task, on its way to the device.
pub(super) struct QueuedMessage {
    pub(super) payload: Bytes,
    /// The task to notify when the send completes, if it waits for that.
    pub(super) report: Option<oneshot::Sender<Outcome>>,
    /// Released when the connection has accepted the message.
    pub(super) _permit: OwnedSemaphorePermit,
}

/// A call of a task, on its way to the reactor's thread.
pub(super) struct QueuedCall {
    pub(super) payload: Bytes,
    pub(super) until: Instant,
    pub(super) answer: oneshot::Sender<Result<Bytes, CallError>>,
    /// The id, which the reactor's thread sets when it makes the call.
    pub(super) call_id: Arc<OnceLock<CallId>>,
    /// Released when the call is made.
    pub(super) _permit: OwnedSemaphorePermit,
}

/// A request of a peer, on its way to a task: its id, payload and deadline.
pub(super) type ReceivedRequest = (RequestId, Bytes, Instant);

/// The parts of a connection, on their way to a task.
pub(super) struct ConnectionParts {
    pub(super) handle: Arc<ConnectionHandle>,
    pub(super) inbox: mpsc::UnboundedReceiver<DetachedMessage>,
}

/// The state of a connection that tasks and the reactor's thread share.
#[derive(Debug)]
pub(super) struct SharedState {
    /// Permits for messages and calls that are queued. Closed at the end of the connection.
    pub(super) room: Arc<Semaphore>,
    /// The reason for the end of the connection, once it has ended.
    pub(super) end: OnceLock<DisconnectReason>,
    /// The length of the longest message that the peer accepts, bytes, and the peer's address. Set once the connection is up.
    pub(super) peer: OnceLock<(u64, Option<SocketAddr>)>,
}

impl SharedState {
    pub(super) fn new(depth: usize) -> Arc<Self> {
        let room = Arc::new(Semaphore::new(depth));
        Arc::new(Self { room, end: OnceLock::new(), peer: OnceLock::new() })
    }

    /// Returns the reason for the end of the connection; without one, the reactor's thread has ended.
    pub(super) fn ended(&self) -> ConnectionEnd {
        self.end.get().map_or(ConnectionEnd::Reactor, |reason| ConnectionEnd::Disconnected(reason.clone()))
    }
}

/// The program's handle of a connection. Dropping the last one closes the connection.
pub(super) struct ConnectionHandle {
    pub(super) link: Arc<ThreadLink>,
    pub(super) id: ConnectionId,
    pub(super) state: Arc<SharedState>,
}

impl Drop for ConnectionHandle {
    fn drop(&mut self) {
        self.link.post(ThreadCommand::Close(self.id));
    }
}

/// The program's handle of a listener. Dropping it closes the listener.
pub(super) struct ListenerHandle {
    pub(super) link: Arc<ThreadLink>,
    pub(super) id: ListenerId,
}

impl Drop for ListenerHandle {
    fn drop(&mut self) {
        self.link.post(ThreadCommand::StopListening(self.id));
    }
}

/// The link to the reactor's thread. Dropping the last reference drains the reactor, and the thread ends.
pub(super) struct ThreadLink {
    pub(super) handle: ReactorHandle<ThreadCommand>,
    pub(super) thread: ThreadId,
    /// The result of the thread, once it has ended.
    pub(super) end: watch::Receiver<Option<Result<(), ThreadError>>>,
    /// Largest number of queued messages and calls of a connection.
    pub(super) depth: usize,
}

impl ThreadLink {
    /// Drains the reactor, after the commands that were posted before.
    pub(super) fn drain(&self, deadline: Duration) {
        self.post(ThreadCommand::Run(Box::new(move |cx| cx.drain(deadline))));
    }

    /// Posts a command to the reactor's thread. If the thread has ended, the command is dropped, which wakes the task that waits for it.
    pub(super) fn post(&self, command: ThreadCommand) {
        let _ = self.handle.post(command);
    }
}

impl Drop for ThreadLink {
    fn drop(&mut self) {
        self.drain(LINGER);
    }
}
