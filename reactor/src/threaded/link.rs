//! The link from the program's handles to the reactor's thread, and the commands that tasks post to that thread.

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

/// The deadline of the drain that begins when the program drops the last handle of the reactor.
const LINGER: Duration = Duration::from_secs(10);

/// A command of a task, which the reactor's thread carries out.
pub(super) enum ThreadCommand {
    Send(ConnectionId, QueuedMessage),
    Connect(Connect, oneshot::Sender<Result<NewConnection, Error>>),
    Close(ConnectionId),
    Listen(SocketAddr, ListenOptions, oneshot::Sender<Result<NewListener, Error>>),
    StopListening(ListenerId),
    /// Uses a connection for calls. The messages that have arrived, in the first channel, and all later ones are frames of calls. The
    /// second channel is for the requests of the peer.
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

/// A closure of the program, which runs on the reactor's thread.
pub(super) type Act = Box<dyn FnOnce(&mut Context<'_>) + Send>;

/// A connection that is being opened, and the channel on which the reactor's thread reports that it is established or has failed.
pub(super) type NewConnection = (ConnectionParts, oneshot::Receiver<Result<(), ConnectError>>);

/// A listener, its address, and the channel of the connections that it has accepted.
pub(super) type NewListener = (ListenerHandle, SocketAddr, mpsc::UnboundedReceiver<ConnectionParts>);

/// A message that a task sends, until the connection has accepted it.
pub(super) struct QueuedMessage {
    pub(super) payload: Bytes,
    /// The channel to the task that waits for the completion of the send; `None` if no task waits for it.
    pub(super) report: Option<oneshot::Sender<Outcome>>,
    /// A permit of [`SharedState::room`]. Dropped, with the message, when the connection has accepted the message.
    pub(super) _permit: OwnedSemaphorePermit,
}

/// A call that a task makes, until the reactor's thread makes it on the connection.
pub(super) struct QueuedCall {
    pub(super) payload: Bytes,
    pub(super) until: Instant,
    pub(super) answer: oneshot::Sender<Result<Bytes, CallError>>,
    /// The cell in which the reactor's thread stores the id when it makes the call.
    pub(super) call_id: Arc<OnceLock<CallId>>,
    /// A permit of [`SharedState::room`]. Dropped when the call is made.
    pub(super) _permit: OwnedSemaphorePermit,
}

/// A request of a peer that waits for a task: its id, payload and deadline.
pub(super) type ReceivedRequest = (RequestId, Bytes, Instant);

/// The parts of a new connection, which the reactor's thread sends to a task.
pub(super) struct ConnectionParts {
    pub(super) handle: Arc<ConnectionHandle>,
    pub(super) inbox: mpsc::UnboundedReceiver<DetachedMessage>,
}

/// The state of a connection that tasks and the reactor's thread share.
#[derive(Debug)]
pub(super) struct SharedState {
    /// The permits for queued messages and calls: each needs one, so the permits limit their number. Closed at the end of the
    /// connection.
    pub(super) room: Arc<Semaphore>,
    /// The reason for the end of the connection. Empty before the end.
    pub(super) end: OnceLock<DisconnectReason>,
    /// The length in bytes of the longest message that the peer accepts, and the address of the peer. Empty before the connection is
    /// established.
    pub(super) peer: OnceLock<(u64, Option<SocketAddr>)>,
}

impl SharedState {
    pub(super) fn new(depth: usize) -> Arc<Self> {
        let room = Arc::new(Semaphore::new(depth));
        Arc::new(Self { room, end: OnceLock::new(), peer: OnceLock::new() })
    }

    /// Returns the reason for the end of the connection. If the connection has no reason, the reactor's thread has ended before it.
    pub(super) fn ended(&self) -> ConnectionEnd {
        self.end.get().map_or(ConnectionEnd::Reactor, |reason| ConnectionEnd::Disconnected(reason.clone()))
    }
}

/// The part that all handles of a connection share. When the last handle drops it, the connection is closed.
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

/// The part of a `ThreadedListener` that closes the listener when it is dropped.
pub(super) struct ListenerHandle {
    pub(super) link: Arc<ThreadLink>,
    pub(super) id: ListenerId,
}

impl Drop for ListenerHandle {
    fn drop(&mut self) {
        self.link.post(ThreadCommand::StopListening(self.id));
    }
}

/// The link to the reactor's thread, which all handles of the program share. When the last handle drops it, the reactor is drained, and
/// the thread ends.
pub(super) struct ThreadLink {
    pub(super) handle: ReactorHandle<ThreadCommand>,
    pub(super) thread: ThreadId,
    /// The result of the thread; `None` before it has ended.
    pub(super) end: watch::Receiver<Option<Result<(), ThreadError>>>,
    /// The largest number of queued messages and calls of a connection.
    pub(super) depth: usize,
}

impl ThreadLink {
    /// Drains the reactor. The reactor's thread first carries out the commands that were posted before.
    pub(super) fn drain(&self, deadline: Duration) {
        self.post(ThreadCommand::Run(Box::new(move |cx| cx.drain(deadline))));
    }

    /// Posts a command to the reactor's thread. If the thread has ended, the command is dropped with its channel, which wakes the task
    /// that waits for the result.
    pub(super) fn post(&self, command: ThreadCommand) {
        let _ = self.handle.post(command);
    }
}

impl Drop for ThreadLink {
    fn drop(&mut self) {
        self.drain(LINGER);
    }
}
