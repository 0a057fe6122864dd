//! The handler on the reactor's thread: it carries out commands, and passes on what arrives.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

use super::link::{
    Asked, Carried, Command, Connect, Hold, Link, ListenerHold, Opened, Opening, Outgoing, Question, State,
};
use crate::call::{CallError, CallEvent, Calls, RefusedCall};
use crate::{
    ConnectError, ConnectionId, Context, DetachedMessage, DisconnectReason, Error, Handler, ListenOptions, ListenerId,
    Message, Outcome, SendErrorKind, SendId, TimerId,
};

/// The task that waits for the end of a call.
type Answer = oneshot::Sender<Result<Bytes, CallError>>;

/// A connection that is not over.
struct Line {
    id: ConnectionId,
    state: Arc<State>,
    inbox: mpsc::UnboundedSender<DetachedMessage>,
    /// The way of requests to the tasks, if its messages are calls.
    requests: Option<mpsc::UnboundedSender<Asked>>,
    /// The task that waits until the connection is up.
    opening: Option<oneshot::Sender<Result<(), ConnectError>>>,
    /// Messages that there is no room for, in order.
    waiting: VecDeque<Outgoing>,
    /// Tasks that wait until a message is sent, in the order of the messages.
    reports: VecDeque<(SendId, oneshot::Sender<Outcome>)>,
    /// It is closed when nothing waits.
    closes: bool,
}

/// See the [module](self).
pub(super) struct Owner {
    link: Weak<Link>,
    /// The connections that are not over, by slot.
    lines: Vec<Option<Line>>,
    listeners: BTreeMap<ListenerId, mpsc::UnboundedSender<Carried>>,
    calls: Calls<Answer>,
}

impl Line {
    /// Sends what waits, while there is room.
    fn pump(&mut self, cx: &mut Context<'_>, calls: &mut Calls<Answer>) {
        while let Some(first) = self.waiting.pop_front() {
            if let Err(first) = self.send(cx, first) {
                self.waiting.push_front(first);
                return;
            }
        }
        if self.closes {
            calls.finish(cx, self.id);
        }
    }

    /// Closes the connection behind what waits, and behind its calls and requests.
    fn close(&mut self, cx: &mut Context<'_>, calls: &mut Calls<Answer>) {
        self.closes = true;
        self.pump(cx, calls);
    }

    /// Sends a message, or gives it back if there is no room.
    fn send(&mut self, cx: &mut Context<'_>, message: Outgoing) -> Result<(), Outgoing> {
        let sent = match message.report {
            None => cx.send(self.id, &message.payload),
            Some(_) => cx.reporting(self.id, |cx| cx.send(self.id, &message.payload)),
        };
        match sent {
            Ok(send) => self.reports.extend(message.report.map(|report| (send, report))),
            Err(SendErrorKind::WouldBlock(_)) => return Err(message),
            // The connection ends: whoever waits for a report hears of that.
            Err(SendErrorKind::Closed) => {}
            // A message that was taken is sent, or its connection ends.
            Err(error) => {
                log::warn!("{}: {error}", self.id);
                cx.abort(self.id);
            }
        }
        Ok(())
    }
}

impl Owner {
    pub(super) fn new(link: Weak<Link>) -> Self {
        Self { link, lines: Vec::new(), listeners: BTreeMap::new(), calls: Calls::new() }
    }

    fn line(&mut self, conn: ConnectionId) -> Option<&mut Line> {
        self.line_and_calls(conn).map(|(line, _)| line)
    }

    fn line_and_calls(&mut self, conn: ConnectionId) -> Option<(&mut Line, &mut Calls<Answer>)> {
        let line = self.lines.get_mut(conn.slot())?.as_mut().filter(|line| line.id == conn)?;
        Some((line, &mut self.calls))
    }

    fn add(
        &mut self,
        link: Arc<Link>,
        id: ConnectionId,
        opening: Option<oneshot::Sender<Result<(), ConnectError>>>,
    ) -> Carried {
        let (state, (sender, inbox)) = (State::new(link.depth), mpsc::unbounded_channel());
        let hold = Arc::new(Hold { link, id, state: Arc::clone(&state) });
        let (waiting, reports) = (VecDeque::new(), VecDeque::new());
        if self.lines.len() <= id.slot() {
            self.lines.resize_with(id.slot() + 1, || None);
        }
        self.lines[id.slot()] =
            Some(Line { id, state, inbox: sender, requests: None, opening, waiting, reports, closes: false });
        Carried { hold, inbox }
    }

    fn link(&self) -> Result<Arc<Link>, Error> {
        self.link.upgrade().ok_or(Error::Gone("reactor"))
    }

    fn connect(&mut self, cx: &mut Context<'_>, connect: Connect) -> Result<Opened, Error> {
        let (link, (up, is_up)) = (self.link()?, oneshot::channel());
        let id = connect(cx)?;
        Ok((self.add(link, id, Some(up)), is_up))
    }

    fn listen(&mut self, cx: &mut Context<'_>, address: SocketAddr, options: ListenOptions) -> Result<Opening, Error> {
        let link = self.link()?;
        let id = cx.listen_with(address, options)?;
        let (hold, (accepted, backlog)) = (ListenerHold { link, id }, mpsc::unbounded_channel());
        let address = cx.local_address(id).ok_or(Error::Gone("listener"))?;
        self.listeners.insert(id, accepted);
        Ok((hold, address, backlog))
    }

    /// Makes calls of the messages of a connection.
    fn carry(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnectionId,
        mut arrived: mpsc::UnboundedReceiver<DetachedMessage>,
        requests: mpsc::UnboundedSender<Asked>,
    ) {
        let Some(line) = self.line(conn) else { return };
        line.requests = Some(requests.clone());
        while let Ok(message) = arrived.try_recv() {
            self.carried(cx, conn, message, &requests);
        }
    }

    /// Handles a message of a connection that carries calls.
    fn carried(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnectionId,
        message: impl Deref<Target = [u8]>,
        requests: &mpsc::UnboundedSender<Asked>,
    ) {
        match self.calls.on_recv(cx, conn, message) {
            // It is copied: requests and answers that wait for their tasks hold no receive of the connection.
            Some(CallEvent::Request { id, payload }) => {
                let until = cx.now() + self.calls.time_left(cx, id).unwrap_or_default();
                if requests.send((id, Bytes::copy_from_slice(&payload), until)).is_err() {
                    self.calls.dismiss(cx, id);
                }
            }
            // If nobody waits for it any more, it is dropped.
            Some(CallEvent::Answer { tag, payload, .. }) => _ = tag.send(Ok(Bytes::copy_from_slice(&payload))),
            Some(CallEvent::Failed(failed)) => _ = failed.tag.send(Err(failed.error)),
            _ => {}
        }
    }

    /// Makes a call. It is made within its time: if that is over, it ends in the next turn.
    fn call(&mut self, cx: &mut Context<'_>, conn: ConnectionId, question: Question) {
        let Question { payload, until, answer, name, _permit } = question;
        let within = until.saturating_duration_since(cx.now());
        match self.calls.call(cx, conn, &payload, within, answer) {
            Ok(call) => _ = name.set(call),
            Err(RefusedCall { why, tag }) => _ = tag.send(Err(why.into())),
        }
    }

    /// Notifies the tasks whose calls have ended without an answer.
    fn end_calls(&mut self) {
        while let Some(failed) = self.calls.next_failed() {
            let _ = failed.tag.send(Err(failed.error));
        }
    }

    /// Takes a connection away that is over.
    fn take(&mut self, conn: ConnectionId) -> Option<Line> {
        self.lines.get_mut(conn.slot())?.take_if(|line| line.id == conn)
    }
}

impl Handler<Command> for Owner {
    fn on_wake(&mut self, cx: &mut Context<'_>, command: Command) {
        match command {
            // If nobody waits for an answer any more, its drop gives back what is in it.
            Command::Connect(connect, answer) => _ = answer.send(self.connect(cx, connect)),
            Command::Listen(address, options, answer) => _ = answer.send(self.listen(cx, address, options)),
            // Nobody holds it any more: it is closed behind the messages that wait.
            Command::Close(conn) => {
                if let Some((line, calls)) = self.line_and_calls(conn) {
                    line.close(cx, calls);
                }
            }
            Command::StopListening(listener) => {
                self.listeners.remove(&listener);
                cx.close_listener(listener);
            }
            Command::Act(act) => act(cx),
            Command::LimitCalls(set) => set(self.calls.limits()),
            Command::Carry(conn, arrived, requests) => self.carry(cx, conn, arrived, requests),
            Command::Call(conn, question) => self.call(cx, conn, question),
            Command::CancelCall(name) => _ = name.get().and_then(|&call| self.calls.cancel(cx, call)),
            // If its caller has gone, it is dropped.
            Command::Answer(request, payload) => _ = self.calls.answer(cx, request, &payload),
            Command::Dismiss(request) => self.calls.dismiss(cx, request),
            Command::Send(conn, message) => {
                // A message for a connection that is over is dropped, and whoever waits for its report hears of that.
                if let Some((line, calls)) = self.line_and_calls(conn) {
                    line.waiting.push_back(message);
                    if line.waiting.len() == 1 {
                        line.pump(cx, calls);
                    }
                }
            }
        }
    }

    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let peer = (cx.max_message(conn).unwrap_or(0), cx.peer_address(conn));
        if let Some(line) = self.line(conn) {
            let _ = line.state.peer.set(peer);
            if let Some(opening) = line.opening.take() {
                let _ = opening.send(Ok(()));
            }
            return;
        }
        let accepted = cx.listener(conn).and_then(|listener| self.listeners.get(&listener).cloned());
        let Some((accepted, link)) = accepted.zip(self.link.upgrade()) else { return cx.close(conn) };
        let carried = self.add(link, conn, None);
        let _ = carried.hold.state.peer.set(peer);
        // If nobody listens any more, its drop closes it.
        let _ = accepted.send(carried);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let Some(line) = self.line(conn) else { return };
        match line.requests.clone() {
            Some(requests) => self.carried(cx, conn, message, &requests),
            // If nobody receives any more, the message is dropped.
            None => _ = line.inbox.send(message.detach()),
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, _: u64) {
        self.calls.on_timer(cx, timer);
        self.end_calls();
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.calls.on_writable(cx, conn);
        if let Some((line, calls)) = self.line_and_calls(conn) {
            line.pump(cx, calls);
        }
    }

    fn on_send_complete(&mut self, _: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        let Some(line) = self.line(conn) else { return };
        if let Some(at) = line.reports.iter().position(|&(id, _)| id == send) {
            if let Some((_, report)) = line.reports.remove(at) {
                let _ = report.send(outcome);
            }
        }
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        self.calls.on_disconnect(conn, &reason);
        self.end_calls();
        if let Some(line) = self.take(conn) {
            let _ = line.state.end.set(reason);
            line.state.room.close();
        }
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        if let Some(opening) = self.take(conn).and_then(|line| line.opening) {
            let _ = opening.send(Err(error));
        }
    }

    fn on_drain(&mut self, cx: &mut Context<'_>, _: Duration) {
        // Whoever waits for connections gets no more.
        self.listeners.clear();
        // Those that come up now have no line.
        let Self { lines, calls, .. } = self;
        lines.iter_mut().flatten().for_each(|line| line.close(cx, calls));
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // The reactor's thread ends: no task waits for room any more.
        self.lines.iter().flatten().for_each(|line| line.state.room.close());
    }
}
