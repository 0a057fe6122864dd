//! The link from the program's handles to the reactor's thread, and the commands that tasks post to that thread.

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

use super::error::{ConnectionEnd, ThreadError};
use crate::approval::NOT_APPROVED;
use crate::call::{CallError, CallId, CallLimits, RequestId};
use crate::{
    ConnectError, ConnectionId, Context, DetachedMessage, DisconnectReason, Error, ListenOptions, ListenerId, Outcome,
    PeerIdentity, ReactorHandle,
};

/// The time limit of the drain that begins when the program drops the last handle of the reactor.
const LINGER: Duration = Duration::from_secs(10);

/// A command that a task posts to the reactor's thread, which carries it out.
pub(super) enum ThreadCommand {
    Send(ConnectionId, QueuedMessage),
    Connect(Connect, oneshot::Sender<Result<NewConnection, Error>>),
    Close(ConnectionId),
    // local: options of the program
    Listen(SocketAddr, ListenOptions, Option<PendingSender>, oneshot::Sender<Result<NewListener, Error>>),
    /// Accepts or refuses a peer that waits for approval.
    Judge(ConnectionId, Result<(), String>), // local: a text of the program
    StopListening(ListenerId),
    /// Switches a connection to calls. The first channel contains the messages that have already arrived. They and all later messages are
    /// frames of calls. The reactor's thread sends the requests of the peer to the second channel.
    // bound: receives
    EnableCalls(ConnectionId, mpsc::UnboundedReceiver<DetachedMessage>, mpsc::UnboundedSender<ReceivedRequest>),
    Call(ConnectionId, QueuedCall),
    CancelCall(Arc<OnceLock<CallId>>),
    Answer(RequestId, Bytes),
    Dismiss(RequestId),
    /// Dismisses the requests in this channel, which no task has received. The program has dropped the `Requests` that had the channel.
    DismissQueued(mpsc::UnboundedReceiver<ReceivedRequest>), // bound: requests
    Run(Act),
    LimitCalls(Box<dyn FnOnce(&mut CallLimits) + Send>),
}

/// A closure that opens a connection.
pub(super) type Connect = Box<dyn FnOnce(&mut Context<'_>) -> Result<ConnectionId, Error> + Send>;

/// A closure of the program, which runs on the reactor's thread.
pub(super) type Act = Box<dyn FnOnce(&mut Context<'_>) + Send>;

/// A connection that is being opened, and the channel on which the reactor's thread reports that the connection is established or has
/// failed.
pub(super) type NewConnection = (ConnectionParts, oneshot::Receiver<Result<(), ConnectError>>);

/// A listener, the address of the listener, and the channel that delivers the accepted connections of the listener.
pub(super) type NewListener = (ListenerHandle, SocketAddr, mpsc::UnboundedReceiver<ConnectionParts>);

/// The channel to the task that approves the peers of a listener.
pub(super) type PendingSender = mpsc::Sender<PendingHandle>; // bound: approvals

/// A message that a task sends, and that the connection has not accepted yet.
pub(super) struct QueuedMessage {
    pub(super) payload: Bytes,
    /// The channel to the task that waits for the completion of the send; `None` if no task waits.
    pub(super) report: Option<oneshot::Sender<Outcome>>,
    /// A permit of [`SharedState::room`]. When the connection accepts the message, the message and its permit are dropped.
    pub(super) _permit: OwnedSemaphorePermit,
}

/// A call that a task makes, and that the reactor's thread has not made on the connection yet.
pub(super) struct QueuedCall {
    pub(super) payload: Bytes,
    pub(super) until: Instant,
    pub(super) answer: oneshot::Sender<Result<Bytes, CallError>>,
    /// The cell in which the reactor's thread stores the id of the call when it makes the call.
    pub(super) call_id: Arc<OnceLock<CallId>>,
    /// A permit of [`SharedState::room`]. The permit is dropped when the reactor's thread makes the call.
    pub(super) _permit: OwnedSemaphorePermit,
}

/// A request of a peer that no task has received yet: the id, the payload and the deadline of the
/// request, and the semaphore of its [`WaitingCaller`].
pub(super) type ReceivedRequest = (RequestId, Bytes, Instant, Arc<Semaphore>);

/// The caller of a request that the program has not answered. The semaphore has no permits. It is
/// closed when the `WaitingCaller` is dropped: the caller does not wait any more.
#[derive(Debug)]
pub(super) struct WaitingCaller(pub(super) Arc<Semaphore>);

impl Drop for WaitingCaller {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The parts of a new connection. The reactor's thread sends them to the task that gets the connection.
pub(super) struct ConnectionParts {
    pub(super) handle: Arc<ConnectionHandle>,
    pub(super) inbox: mpsc::UnboundedReceiver<DetachedMessage>, // bound: receives
}

/// The state of a connection. The tasks that use the connection and the reactor's thread share this state.
#[derive(Debug)]
pub(super) struct SharedState {
    /// The permits for queued messages and calls. Each message or call needs one permit, so the number of permits limits how many are
    /// queued. The semaphore is closed when the connection ends.
    pub(super) room: Arc<Semaphore>,
    /// The reason for the end of the connection. It is not set before the connection has ended.
    pub(super) end: OnceLock<DisconnectReason>,
    /// The peer. It is not set before the connection is established.
    pub(super) peer: OnceLock<EstablishedPeer>,
    /// True once a task has got the connection, from a listener or by connecting.
    pub(super) taken: AtomicBool,
}

/// The properties of a peer that do not change while the connection exists.
#[derive(Debug)]
pub(super) struct EstablishedPeer {
    /// The length of the longest message that can be sent to the peer, in bytes.
    pub(super) max_message: u64,
    pub(super) address: Option<SocketAddr>,
    /// The identity that the peer has proven; `None` if the connection is not secured.
    pub(super) identity: Option<PeerIdentity>,
}

impl SharedState {
    pub(super) fn new(depth: usize) -> Arc<Self> {
        let room = Arc::new(Semaphore::new(depth));
        Arc::new(Self { room, end: OnceLock::new(), peer: OnceLock::new(), taken: AtomicBool::new(false) })
    }

    /// Returns the reason for the end of the connection. If no reason is set, returns `ConnectionEnd::Reactor`: the reactor's thread has
    /// ended before the connection.
    pub(super) fn ended(&self) -> ConnectionEnd {
        self.end.get().map_or(ConnectionEnd::Reactor, |reason| ConnectionEnd::Disconnected(reason.clone()))
    }
}

/// The part that all handles of a connection share. Dropping the last of these handles drops this part, which closes the connection.
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

/// The part of a `ThreadedListener` that closes the listener: when this part is dropped, the reactor stops listening.
pub(super) struct ListenerHandle {
    pub(super) link: Arc<ThreadLink>,
    pub(super) id: ListenerId,
}

impl Drop for ListenerHandle {
    fn drop(&mut self) {
        self.link.post(ThreadCommand::StopListening(self.id));
    }
}

/// The part of a `ThreadedPendingPeer` that decides: when this part is dropped without a decision,
/// the peer is refused. Nobody else decides about the peer. This part does not keep the reactor's
/// thread alive. When the thread ends, connections that are not established end, too.
pub(super) struct PendingHandle {
    pub(super) link: Weak<ThreadLink>,
    pub(super) id: ConnectionId,
    pub(super) identity: PeerIdentity,
    pub(super) address: Option<SocketAddr>,
    pub(super) is_decided: bool,
}

impl PendingHandle {
    pub(super) fn decide(&mut self, decision: Result<(), String>) {
        let decides = !std::mem::replace(&mut self.is_decided, true);
        if let Some(link) = self.link.upgrade().filter(|_| decides) {
            link.post(ThreadCommand::Judge(self.id, decision));
        }
    }
}

impl Drop for PendingHandle {
    fn drop(&mut self) {
        self.decide(Err(NOT_APPROVED.into()));
    }
}

/// The link to the reactor's thread. All handles of the program share it. Dropping the last of these handles drops this link: then the
/// reactor is drained, and the thread ends.
pub(super) struct ThreadLink {
    pub(super) handle: ReactorHandle<ThreadCommand>,
    pub(super) thread: ThreadId,
    /// The result with which the reactor's thread has ended; `None` while the thread runs.
    pub(super) end: watch::Receiver<Option<Result<(), ThreadError>>>,
    /// The largest number of queued messages and calls of a connection.
    pub(super) depth: usize,
}

impl ThreadLink {
    /// Drains the reactor. The reactor's thread first carries out all commands that were posted earlier.
    pub(super) fn drain(&self, deadline: Duration) {
        self.post(ThreadCommand::Run(Box::new(move |cx| cx.drain(deadline))));
    }

    /// Posts a command to the reactor's thread, also if the command queue is full: the end of a
    /// connection must not be lost. The number of such commands has a limit for each connection,
    /// listener, call and request. If the thread has ended, the command is dropped. If a task waits
    /// for the result of the command, dropping the command wakes that task.
    pub(super) fn post(&self, command: ThreadCommand) {
        self.handle.post_past_limit(command);
    }
}

impl Drop for ThreadLink {
    fn drop(&mut self) {
        self.drain(LINGER);
    }
}
