//! The [`Handler`] that runs on the reactor's thread. It carries out the commands of tasks, and notifies tasks of
//! messages, requests and ended connections through channels.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::link::{
    Connect, ConnectionHandle, ConnectionParts, EstablishedPeer, ListenerHandle, NewConnection, NewListener,
    PendingHandle, PendingSender, QueuedCall, QueuedMessage, ReceivedRequest, SharedState, ThreadCommand, ThreadLink,
    WaitingCaller,
};
use crate::approval::{NOT_APPROVED, TOO_MANY_PENDING};
use crate::call::{CallError, CallEvent, Calls, RefusedCall, RequestId};
use crate::{
    ConnectError, ConnectionId, Context, DetachedMessage, DisconnectReason, Error, Handler, ListenOptions, ListenerId,
    Message, Outcome, PeerIdentity, SendErrorKind, SendId, TimerId,
};

/// The channel to the task that waits for the end of a call.
type AnswerSender = oneshot::Sender<Result<Bytes, CallError>>;

/// The largest number of ended connections that may wait for a task to accept them on a listener.
/// At this number, new connections are closed. The number of connections that have not ended is
/// limited by [`crate::Config::max_connections`].
const MAX_ENDED_IN_BACKLOG: usize = 1024;

/// The handler of a [`super::ThreadedReactor`], see the [module](self).
pub(super) struct ThreadHandler {
    link: Weak<ThreadLink>,
    /// The connections that have not ended. The index is the slot of the [`ConnectionId`].
    entries: Vec<Option<ConnectionEntry>>, // bound: connections
    listeners: BTreeMap<ListenerId, ListenerBacklog>, // local: listeners of the program
    calls: Calls<AnswerSender>,
}

/// The data that the reactor's thread keeps for a connection that has not ended.
struct ConnectionEntry {
    id: ConnectionId,
    state: Arc<SharedState>,
    inbox: mpsc::UnboundedSender<DetachedMessage>,
    /// The channel to the program's `Requests`; `None` if the connection is not used for calls.
    requests: Option<mpsc::UnboundedSender<ReceivedRequest>>,
    /// The callers of the requests that the program has not answered or dropped, and that the peer
    /// has not cancelled.
    callers: BTreeMap<RequestId, WaitingCaller>, // bound: requests
    /// The channel to the task that waits until the connection is established; `None` once the connection is
    /// established.
    opening: Option<oneshot::Sender<Result<(), ConnectError>>>,
    /// The messages that wait for room on the connection, in the order in which they are sent.
    waiting: VecDeque<QueuedMessage>, // bound: thread-sends
    /// The sends whose completions tasks wait for, in the order of the sends. Each has the channel to the waiting task.
    reports: VecDeque<(SendId, oneshot::Sender<Outcome>)>, // bound: sends
    /// The channels to the tasks that wait for the completion of messages that the connection has
    /// not accepted, because the connection is ending. When the reason for the end is known, these
    /// channels are dropped. That wakes the tasks, which then read the reason.
    unsent: Vec<oneshot::Sender<Outcome>>, // local: tasks that wait
    /// True if the connection must be closed when `waiting` is empty.
    closing: bool,
}

/// For one listener: the channel to the program's `ThreadedListener`, and the connections in that channel.
struct ListenerBacklog {
    accepted: mpsc::UnboundedSender<ConnectionParts>,
    /// The channel to the task that approves peers; `None` if the listener accepts all peers that
    /// [`crate::Security`] accepts.
    pending: Option<PendingSender>,
    /// The connections in `accepted` that have ended. When the list is long, connections that a
    /// task has accepted meanwhile are removed from it.
    ended: Vec<Arc<SharedState>>, // bound: accept-queue
}

impl ListenerBacklog {
    /// Returns the channel for a new connection. Returns `None` if the new connection must be closed, because too many of
    /// the connections that no task has accepted have already ended.
    fn channel(&mut self) -> Option<mpsc::UnboundedSender<ConnectionParts>> {
        if self.ended.len() >= MAX_ENDED_IN_BACKLOG {
            self.ended.retain(|state| !state.taken.load(Ordering::Relaxed));
        }
        (self.ended.len() < MAX_ENDED_IN_BACKLOG).then(|| self.accepted.clone())
    }
}

impl ConnectionEntry {
    /// Sends the messages in `waiting`, until `waiting` is empty or the connection has no room. If
    /// `closing` is true, closes the connection when `waiting` is empty. If messages remain, but
    /// some were sent, the time limit of the close starts again.
    fn send_queued(&mut self, cx: &mut Context<'_>, calls: &mut Calls<AnswerSender>) {
        let before = self.waiting.len();
        while let Some(first) = self.waiting.pop_front() {
            if let Err(first) = self.send(cx, first) {
                self.waiting.push_front(first);
                if self.closing && self.waiting.len() < before {
                    cx.limit_close(self.id);
                }
                return;
            }
        }
        if self.closing {
            calls.finish(cx, self.id);
        }
    }

    /// Closes the connection, but not before its waiting messages are sent, and its calls and requests have ended. If
    /// the peer accepts none of the waiting messages for `Timeouts::close`, the connection is aborted.
    fn close(&mut self, cx: &mut Context<'_>, calls: &mut Calls<AnswerSender>) {
        self.closing = true;
        if crate::planted("a-dropped-connection-drops-its-messages") {
            self.waiting.clear();
        }
        self.send_queued(cx, calls);
        if !self.waiting.is_empty() {
            cx.limit_close(self.id);
        }
    }

    /// Sends a message. If the connection has no room for the message now, returns the message as `Err`, so that the
    /// caller can queue it.
    fn send(&mut self, cx: &mut Context<'_>, message: QueuedMessage) -> Result<(), QueuedMessage> {
        let sent = match message.report {
            None => cx.send(self.id, &message.payload),
            Some(_) => cx.reporting(self.id, |cx| cx.send(self.id, &message.payload)),
        };
        match sent {
            Ok(send) => self.reports.extend(message.report.map(|report| (send, report))),
            Err(SendErrorKind::WouldBlock(_)) => return Err(message),
            // The connection is ending, so the message is dropped.
            Err(SendErrorKind::Closed) => self.unsent.extend(message.report),
            // The program believes that the message will be sent, because `Sender::send` has succeeded. If the message
            // cannot be sent, the connection must end. Otherwise the peer would receive later messages, but not this
            // one.
            Err(error) => {
                cx.log_failure(self.id, format_args!("{error}"));
                cx.abort(self.id);
                self.unsent.extend(message.report);
            }
        }
        Ok(())
    }
}

impl ThreadHandler {
    pub(super) fn new(link: Weak<ThreadLink>) -> Self {
        Self { link, entries: Vec::new(), listeners: BTreeMap::new(), calls: Calls::new() }
    }

    fn entry(&mut self, conn: ConnectionId) -> Option<&mut ConnectionEntry> {
        self.entry_and_calls(conn).map(|(entry, _)| entry)
    }

    fn entry_and_calls(&mut self, conn: ConnectionId) -> Option<(&mut ConnectionEntry, &mut Calls<AnswerSender>)> {
        let entry = self.entries.get_mut(conn.slot())?.as_mut().filter(|entry| entry.id == conn)?;
        Some((entry, &mut self.calls))
    }

    fn add(
        &mut self,
        link: Arc<ThreadLink>,
        id: ConnectionId,
        opening: Option<oneshot::Sender<Result<(), ConnectError>>>,
    ) -> ConnectionParts {
        let (state, (sender, inbox)) = (SharedState::new(link.depth), mpsc::unbounded_channel());
        let handle = Arc::new(ConnectionHandle { link, id, state: Arc::clone(&state) });
        let (waiting, reports) = (VecDeque::new(), VecDeque::new());
        if self.entries.len() <= id.slot() {
            self.entries.resize_with(id.slot() + 1, || None);
        }
        self.entries[id.slot()] = Some(ConnectionEntry {
            id,
            state,
            inbox: sender,
            requests: None,
            callers: BTreeMap::new(),
            opening,
            waiting,
            reports,
            unsent: Vec::new(),
            closing: false,
        });
        ConnectionParts { handle, inbox }
    }

    fn link(&self) -> Result<Arc<ThreadLink>, Error> {
        self.link.upgrade().ok_or(Error::Gone("reactor"))
    }

    fn connect(&mut self, cx: &mut Context<'_>, connect: Connect) -> Result<NewConnection, Error> {
        let (link, (up, is_up)) = (self.link()?, oneshot::channel());
        let id = connect(cx)?;
        Ok((self.add(link, id, Some(up)), is_up))
    }

    fn listen(
        &mut self,
        cx: &mut Context<'_>,
        address: SocketAddr,
        options: ListenOptions,
        pending: Option<PendingSender>,
    ) -> Result<NewListener, Error> {
        let link = self.link()?;
        let id = cx.listen_with(address, options)?;
        let (handle, (accepted, backlog)) = (ListenerHandle { link, id }, mpsc::unbounded_channel());
        let address = cx.listeners().local_address(id).ok_or(Error::Gone("listener"))?;
        self.listeners.insert(id, ListenerBacklog { accepted, pending, ended: Vec::new() });
        Ok((handle, address, backlog))
    }

    /// Switches a connection to calls. The messages that have arrived until now are handled as frames of calls.
    fn enable_calls(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnectionId,
        mut arrived: mpsc::UnboundedReceiver<DetachedMessage>,
        requests: mpsc::UnboundedSender<ReceivedRequest>,
    ) {
        let Some(entry) = self.entry(conn) else { return };
        entry.requests = Some(requests.clone());
        while let Ok(message) = arrived.try_recv() {
            self.on_frame(cx, conn, message, &requests);
        }
    }

    /// Handles a message that arrived on a connection that is used for calls: a request, an answer or another frame of
    /// [`crate::call`].
    fn on_frame(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnectionId,
        message: impl Deref<Target = [u8]>,
        requests: &mpsc::UnboundedSender<ReceivedRequest>,
    ) {
        match self.calls.on_recv(cx, conn, message) {
            // The payloads of requests and answers are copied. So a payload that no task has received yet occupies no
            // receive buffer.
            Some(CallEvent::Request { id, payload }) => {
                let until = cx.now() + self.calls.time_left(cx, id).unwrap_or_default();
                let caller = WaitingCaller(Arc::new(Semaphore::new(0)));
                let request = (id, Bytes::copy_from_slice(&payload), until, Arc::clone(&caller.0));
                if requests.send(request).is_err() {
                    self.calls.dismiss(cx, id);
                } else if let Some(entry) = self.entry(conn) {
                    entry.callers.insert(id, caller);
                }
            }
            Some(CallEvent::Cancelled(id)) => self.forget(id),
            // `tag` is the channel to the task that made the call. If sending on this channel fails, the task has
            // stopped waiting, and the answer is dropped.
            Some(CallEvent::Answer { tag, payload, .. }) => _ = tag.send(Ok(Bytes::copy_from_slice(&payload))),
            Some(CallEvent::Failed(failed)) => _ = failed.tag.send(Err(failed.error)),
            _ => {}
        }
    }

    /// Makes a call that a task has queued. The call gets the time that is left until its deadline. If the deadline has
    /// passed, the call ends in the next turn.
    fn call(&mut self, cx: &mut Context<'_>, conn: ConnectionId, call: QueuedCall) {
        let QueuedCall { payload, until, answer, call_id, _permit } = call;
        let within = until.saturating_duration_since(cx.now());
        match self.calls.call(cx, conn, &payload, within, answer) {
            Ok(call) => _ = call_id.set(call),
            Err(RefusedCall { why, tag }) => _ = tag.send(Err(why.into())),
        }
    }

    /// Drops the caller of a request, because the program has ended the request, or the caller has
    /// cancelled its call.
    fn forget(&mut self, request: RequestId) {
        if let Some(entry) = self.entry(request.connection()) {
            entry.callers.remove(&request);
        }
    }

    /// Ends a request without an answer.
    fn dismiss(&mut self, cx: &mut Context<'_>, request: RequestId) {
        self.forget(request);
        self.calls.dismiss(cx, request);
    }

    /// For each call that has ended without an answer, sends the error to the task that waits for the call.
    fn report_failed_calls(&mut self) {
        while let Some(failed) = self.calls.next_failed() {
            let _ = failed.tag.send(Err(failed.error));
        }
    }

    /// Returns the backlog of the listener on which a connection has arrived. Returns `None` if the local side has opened the connection,
    /// or if the program has dropped the listener.
    fn backlog(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Option<&mut ListenerBacklog> {
        self.listeners.get_mut(&cx.connection(conn).listener()?)
    }

    /// Removes and returns the entry of a connection. Returns `None` if the connection has no entry.
    fn take(&mut self, conn: ConnectionId) -> Option<ConnectionEntry> {
        self.entries.get_mut(conn.slot())?.take_if(|entry| entry.id == conn)
    }
}

impl Handler<ThreadCommand> for ThreadHandler {
    fn on_wake(&mut self, cx: &mut Context<'_>, command: ThreadCommand) {
        match command {
            // If the task has stopped waiting, the result is dropped. That closes the new connection or listener.
            ThreadCommand::Connect(connect, answer) => _ = answer.send(self.connect(cx, connect)),
            ThreadCommand::Listen(address, options, pending, answer) => {
                let _ = answer.send(self.listen(cx, address, options, pending));
            }
            // `judge` ignores all decisions but the first, and connections that have ended. If the
            // program has dropped the listener, no task would get the connection, so the peer is
            // refused.
            ThreadCommand::Judge(conn, decision) => {
                let listens = cx.connection(conn).listener().is_some_and(|id| self.listeners.contains_key(&id));
                let decision = if listens { decision } else { decision.and(Err(NOT_APPROVED.into())) };
                let _ = cx.connection(conn).judge(decision);
            }
            // The program has dropped its last handle of the connection. The connection is closed after its waiting
            // messages are sent.
            ThreadCommand::Close(conn) => {
                if let Some((entry, calls)) = self.entry_and_calls(conn) {
                    entry.close(cx, calls);
                }
            }
            ThreadCommand::StopListening(listener) => {
                self.listeners.remove(&listener);
                cx.listeners().close(listener);
            }
            ThreadCommand::Run(act) => act(cx),
            ThreadCommand::LimitCalls(set) => set(self.calls.limits()),
            ThreadCommand::EnableCalls(conn, arrived, requests) => self.enable_calls(cx, conn, arrived, requests),
            ThreadCommand::Call(conn, call) => self.call(cx, conn, call),
            ThreadCommand::CancelCall(call_id) => _ = call_id.get().and_then(|&call| self.calls.cancel(cx, call)),
            // An error is ignored: the caller has stopped waiting, or the connection did not accept the answer.
            ThreadCommand::Answer(request, payload) => {
                self.forget(request);
                let _ = self.calls.answer(cx, request, &payload);
            }
            ThreadCommand::Dismiss(request) => self.dismiss(cx, request),
            ThreadCommand::DismissQueued(mut received) => {
                // Only this thread adds requests to the channel, so none is added while the channel is emptied.
                received.close();
                while let Ok((request, ..)) = received.try_recv() {
                    self.dismiss(cx, request);
                }
            }
            ThreadCommand::Send(conn, message) => {
                // If the connection has ended, the message is dropped. That wakes the task that waits for the
                // completion of the send.
                if let Some((entry, calls)) = self.entry_and_calls(conn) {
                    entry.waiting.push_back(message);
                    if entry.waiting.len() == 1 {
                        entry.send_queued(cx, calls);
                    }
                }
            }
        }
    }

    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let peer = EstablishedPeer {
            max_message: cx.connection(conn).max_copied().unwrap_or(0),
            address: cx.connection(conn).peer_address(),
            identity: cx.connection(conn).identity().cloned(),
        };
        if let Some(entry) = self.entry(conn) {
            let _ = entry.state.peer.set(peer);
            if let Some(opening) = entry.opening.take() {
                let _ = opening.send(Ok(()));
            }
            return;
        }
        let accepted = self.backlog(cx, conn).and_then(ListenerBacklog::channel);
        let Some((accepted, link)) = accepted.zip(self.link.upgrade()) else { return cx.close(conn) };
        let parts = self.add(link, conn, None);
        let _ = parts.handle.state.peer.set(peer);
        // If the program has dropped the listener meanwhile, nobody receives `parts`. Then `parts` is dropped, which
        // closes the connection.
        let _ = accepted.send(parts);
    }

    fn on_identity(&mut self, cx: &mut Context<'_>, conn: ConnectionId, peer: &PeerIdentity) -> Result<(), String> {
        let Some(listener) = cx.connection(conn).listener() else { return Ok(()) };
        // The program has dropped the listener, so no task would get the connection.
        let backlog = self.listeners.get(&listener).ok_or(NOT_APPROVED)?;
        let Some(pending) = &backlog.pending else { return Ok(()) };
        let (identity, address, link) = (peer.clone(), cx.connection(conn).peer_address(), Weak::clone(&self.link));
        match pending.try_reserve() {
            Ok(permit) => permit.send(PendingHandle { link, id: conn, identity, address, is_decided: false }),
            Err(mpsc::error::TrySendError::Full(())) => return Err(TOO_MANY_PENDING.into()),
            Err(mpsc::error::TrySendError::Closed(())) => return Err(NOT_APPROVED.into()),
        }
        // If a task has dropped the queue meanwhile, it may have emptied the queue before this peer
        // was added. No task would decide about the peer then.
        if pending.is_closed() {
            return Err(NOT_APPROVED.into());
        }
        cx.connection(conn).postpone_judgement();
        Ok(())
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let Some(entry) = self.entry(conn) else { return };
        match entry.requests.clone() {
            Some(requests) => self.on_frame(cx, conn, message, &requests),
            // If the program has dropped the `Receiver`, the message is dropped.
            None => _ = entry.inbox.send(message.detach()),
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, _: u64) {
        self.calls.on_timer(cx, timer);
        self.report_failed_calls();
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.calls.on_writable(cx, conn);
        if let Some((entry, calls)) = self.entry_and_calls(conn) {
            entry.send_queued(cx, calls);
        }
    }

    fn on_send_complete(&mut self, _: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        let Some(entry) = self.entry(conn) else { return };
        if let Some(at) = entry.reports.iter().position(|&(id, _)| id == send) {
            if let Some((_, report)) = entry.reports.remove(at) {
                let _ = report.send(outcome);
            }
        }
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        self.calls.on_disconnect(conn, &reason);
        self.report_failed_calls();
        if let Some(entry) = self.take(conn) {
            let _ = entry.state.end.set(reason);
            if !crate::planted("an-ended-connection-wakes-no-task") {
                entry.state.room.close();
            }
            if let Some(backlog) = self.backlog(cx, conn).filter(|_| !entry.state.taken.load(Ordering::Relaxed)) {
                backlog.ended.push(entry.state);
            }
        }
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        if let Some(opening) = self.take(conn).and_then(|entry| entry.opening) {
            let _ = opening.send(Err(error));
        }
    }

    fn on_drain(&mut self, cx: &mut Context<'_>, _: Duration) {
        // Each listener has a channel to its task. When the channel is dropped, `ThreadedListener::accept` returns
        // `None`.
        self.listeners.clear();
        let Self { entries, calls, .. } = self;
        entries.iter_mut().flatten().for_each(|entry| entry.close(cx, calls));
        cx.close_unestablished();
    }
}

impl Drop for ThreadHandler {
    fn drop(&mut self) {
        // The reactor's thread ends, so no more messages are sent. Closing `room` wakes the tasks that wait to queue a
        // message or a call.
        self.entries.iter().flatten().for_each(|entry| entry.state.room.close());
    }
}
