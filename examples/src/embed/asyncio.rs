//! An example of async/await on a reactor. One handler keeps the messages that came and the wakers of waiting tasks,
//! and futures look there. Only [`Net::drive`] depends on tokio.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::error::Error;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DetachedMessage, DisconnectReason, Handler, Message, Reactor,
    SendErrorKind,
};

/// One connection, as its futures see it.
#[derive(Debug, Default)]
struct Line {
    up: bool,
    end: Option<String>,
    messages: VecDeque<DetachedMessage>,
    waiting: Vec<Waker>,
}

#[derive(Debug, Default)]
struct Lines(BTreeMap<ConnectionId, Line>);

impl Lines {
    fn change(&mut self, conn: ConnectionId, change: impl FnOnce(&mut Line)) {
        if let Some(line) = self.0.get_mut(&conn) {
            change(line);
            line.waiting.drain(..).for_each(Waker::wake);
        }
    }
}

impl Handler for Lines {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.change(conn, |line| line.up = true);
    }

    fn on_recv(&mut self, _: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        // The message is kept without a copy. If the peer sends more than is read, its window closes.
        self.change(conn, |line| line.messages.push_back(message.detach()));
    }

    fn on_writable(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.change(conn, |_| {});
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        self.change(conn, |line| line.end = Some(reason.to_string()));
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        self.change(conn, |line| line.end = Some(error.to_string()));
    }
}

/// A reactor and the connections of all tasks of a thread.
#[derive(Clone, Debug)]
pub struct Net(Rc<RefCell<(Reactor, Lines)>>);

impl Net {
    /// Makes a reactor without connections.
    ///
    /// # Errors
    /// As [`Reactor::new`].
    pub fn new(config: Config) -> Result<Self, rdma_reactor::Error> {
        Ok(Self(Rc::new(RefCell::new((Reactor::new(config)?, Lines::default())))))
    }

    /// Takes turns of the reactor. One task runs this beside all others.
    ///
    /// # Errors
    /// The reactor as a whole failed.
    pub async fn drive(&self) -> Result<(), Box<dyn Error>> {
        let readable = super::on_tokio(&self.0.borrow().0)?;
        loop {
            let (more, deadline) = {
                let (reactor, lines) = &mut *self.0.borrow_mut();
                (reactor.turn(lines, Duration::ZERO)?.more, reactor.next_deadline())
            };
            // A reactor without timers is looked at once an hour.
            let due = deadline.map_or_else(|| tokio::time::Instant::now() + Duration::from_secs(3600), Into::into);
            if more {
                tokio::task::yield_now().await;
            } else if let Ok(ready) = tokio::time::timeout_at(due, readable.readable()).await {
                ready?.clear_ready();
            }
        }
    }

    /// Runs `act`, and has the driver take a turn.
    fn with<T>(&self, act: impl FnOnce(&mut Context<'_>, &mut Lines) -> T) -> T {
        let (reactor, lines) = &mut *self.0.borrow_mut();
        let result = act(&mut reactor.context(), lines);
        reactor.remote().wake();
        result
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// The reason why the connection did not come up.
    pub async fn connect(&self, peer: SocketAddr) -> Result<Conn, String> {
        let id = self.with(|cx, lines| {
            let id = cx.connect(peer).map_err(|error| error.to_string())?;
            lines.0.insert(id, Line::default());
            Ok::<_, String>(id)
        })?;
        let conn = Conn { net: self.clone(), id };
        conn.until(|_, line| line.up.then_some(())).await?;
        Ok(conn)
    }
}

/// A connection. It is closed when it is dropped.
#[derive(Debug)]
pub struct Conn {
    net: Net,
    id: ConnectionId,
}

impl Conn {
    /// Waits until `look` finds something, or until the connection ends.
    async fn until<T>(&self, mut look: impl FnMut(&mut Context<'_>, &mut Line) -> Option<T>) -> Result<T, String> {
        poll_fn(|task| {
            let (reactor, lines) = &mut *self.net.0.borrow_mut();
            let Some(line) = lines.0.get_mut(&self.id) else { return Poll::Ready(Err("closed".into())) };
            match (look(&mut reactor.context(), line), &line.end) {
                (Some(value), _) => Poll::Ready(Ok(value)),
                (None, Some(end)) => Poll::Ready(Err(end.clone())),
                (None, None) => {
                    line.waiting.push(task.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// Sends a message; waits while the window is closed.
    ///
    /// # Errors
    /// The connection is gone, or the message is too long.
    pub async fn send(&self, payload: &[u8]) -> Result<(), String> {
        let id = self.id;
        let sent = self.until(|cx, _| match cx.send(id, payload) {
            Err(SendErrorKind::WouldBlock(_)) => None,
            done => Some(done.map(drop).map_err(|error| error.to_string())),
        });
        let sent = sent.await?;
        self.net.with(|_, _| sent)
    }

    /// Waits for the next message.
    ///
    /// # Errors
    /// The reason why the connection ended, once all messages are read.
    pub async fn recv(&self) -> Result<DetachedMessage, String> {
        self.until(|_, line| line.messages.pop_front()).await
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        let id = self.id;
        self.net.with(|cx, lines| {
            cx.close(id);
            lines.0.remove(&id);
        });
    }
}
