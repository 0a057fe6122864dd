//! What goes to the reactor's thread, and the way there.

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

/// Time that connections have to close when nobody holds the reactor any more.
const LINGER: Duration = Duration::from_secs(10);

/// Something that a task asks for.
pub(super) enum Command {
    Send(ConnectionId, Outgoing),
    Connect(Connect, oneshot::Sender<Result<Opened, Error>>),
    Close(ConnectionId),
    Listen(SocketAddr, ListenOptions, oneshot::Sender<Result<Opening, Error>>),
    StopListening(ListenerId),
    /// Makes calls of the messages of a connection: those that have arrived, and those to come.
    Carry(ConnectionId, mpsc::UnboundedReceiver<DetachedMessage>, mpsc::UnboundedSender<Asked>),
    Call(ConnectionId, Question),
    CancelCall(Arc<OnceLock<CallId>>),
    Answer(RequestId, Bytes),
    Dismiss(RequestId),
    Act(Act),
    LimitCalls(Box<dyn FnOnce(&mut CallLimits) + Send>),
}

/// Opens a connection.
pub(super) type Connect = Box<dyn FnOnce(&mut Context<'_>) -> Result<ConnectionId, Error> + Send>;

/// Does something of the program's.
pub(super) type Act = Box<dyn FnOnce(&mut Context<'_>) + Send>;

/// A connection, and the news that it is up.
pub(super) type Opened = (Carried, oneshot::Receiver<Result<(), ConnectError>>);

/// A listener with its address, and the connections that come through it.
pub(super) type Opening = (ListenerHold, SocketAddr, mpsc::UnboundedReceiver<Carried>);

/// A message that a task has sent.
pub(super) struct Outgoing {
    pub(super) payload: Bytes,
    /// The task that waits until the message is sent.
    pub(super) report: Option<oneshot::Sender<Outcome>>,
    /// Given back when the device has accepted the message.
    pub(super) _permit: OwnedSemaphorePermit,
}

/// A call that a task makes.
pub(super) struct Question {
    pub(super) payload: Bytes,
    pub(super) until: Instant,
    pub(super) answer: oneshot::Sender<Result<Bytes, CallError>>,
    /// The place of its name, once it has one.
    pub(super) name: Arc<OnceLock<CallId>>,
    /// Given back when the call is made.
    pub(super) _permit: OwnedSemaphorePermit,
}

/// A request of a peer, on its way to a task: its name, its payload, and the time until which its caller waits.
pub(super) type Asked = (RequestId, Bytes, Instant);

/// A connection, on its way to a task.
pub(super) struct Carried {
    pub(super) hold: Arc<Hold>,
    pub(super) inbox: mpsc::UnboundedReceiver<DetachedMessage>,
}

/// What both sides of the queue know of a connection.
#[derive(Debug)]
pub(super) struct State {
    /// Permits for messages that the device has not accepted. Closed at the end of the connection.
    pub(super) room: Arc<Semaphore>,
    pub(super) end: OnceLock<DisconnectReason>,
    /// Length of the longest message that the peer takes, bytes, and the peer's address; from when the connection is up.
    pub(super) peer: OnceLock<(u64, Option<SocketAddr>)>,
}

impl State {
    pub(super) fn new(depth: usize) -> Arc<Self> {
        let room = Arc::new(Semaphore::new(depth));
        Arc::new(Self { room, end: OnceLock::new(), peer: OnceLock::new() })
    }

    /// The end of the connection, or of the reactor's thread.
    pub(super) fn ended(&self) -> ConnectionEnd {
        self.end.get().map_or(ConnectionEnd::Reactor, |reason| ConnectionEnd::Disconnected(reason.clone()))
    }
}

/// The program's hold of a connection: it is closed when nobody has it any more.
pub(super) struct Hold {
    pub(super) link: Arc<Link>,
    pub(super) id: ConnectionId,
    pub(super) state: Arc<State>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.link.post(Command::Close(self.id));
    }
}

/// The program's hold of a listener.
pub(super) struct ListenerHold {
    pub(super) link: Arc<Link>,
    pub(super) id: ListenerId,
}

impl Drop for ListenerHold {
    fn drop(&mut self) {
        self.link.post(Command::StopListening(self.id));
    }
}

/// The way to the reactor's thread. The thread ends when nobody has it any more.
pub(super) struct Link {
    pub(super) handle: ReactorHandle<Command>,
    pub(super) thread: ThreadId,
    pub(super) end: watch::Receiver<Option<Result<(), ThreadError>>>,
    /// Largest number of messages of a connection that are queued.
    pub(super) depth: usize,
}

impl Link {
    /// Drains the reactor behind what was asked for before.
    pub(super) fn drain(&self, deadline: Duration) {
        self.post(Command::Act(Box::new(move |cx| cx.drain(deadline))));
    }

    /// Gives a command to the reactor's thread. If it has ended, the command is dropped, and whoever waits for its answer hears of that.
    pub(super) fn post(&self, command: Command) {
        let _ = self.handle.post(command);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.drain(LINGER);
    }
}
