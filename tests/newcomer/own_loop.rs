//! A program with its own loop: a reactor, a UDP socket and a timer in one thread. Each tick of the
//! timer sends some messages over the reactor, and a datagram. A server on another thread returns
//! the messages.

use std::collections::{BTreeMap, VecDeque};
use std::error::Error;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use polling::{Event, Events, PollMode, Poller};
use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DetachedMessage, DisconnectReason, Handler, Message, ProviderChoice,
    Reactor, SendErrorKind,
};

const REACTOR: usize = 0;
const SOCKET: usize = 1;
const TICK: Duration = Duration::from_millis(1);
const TICKS: u64 = 100;
const MESSAGES_PER_TICK: u64 = 10;
const MESSAGES: u64 = TICKS * MESSAGES_PER_TICK;
/// The deadline of the drains, and of the whole program.
const PATIENCE: Duration = Duration::from_secs(300);

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The server. It keeps messages whose echo is refused, so a client that does not read is slowed
/// down.
#[derive(Default)]
struct Echo {
    waiting: BTreeMap<ConnectionId, VecDeque<DetachedMessage>>,
    ends: Vec<DisconnectReason>,
}

impl Handler for Echo {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.waiting.entry(conn).or_default().push_back(message.detach());
        self.on_writable(cx, conn);
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let Some(waiting) = self.waiting.get_mut(&conn) else { return };
        while let Some(message) = waiting.front() {
            match cx.send(conn, message) {
                Ok(_) => drop(waiting.pop_front()),
                Err(SendErrorKind::WouldBlock(_)) => return,
                // The client will miss this echo, and report that.
                Err(_) => return cx.close(conn),
            }
        }
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        self.waiting.remove(&conn);
        self.ends.push(reason);
    }
}

/// The client in the loop. Message number `n` is `n` as 8 bytes.
#[derive(Default)]
struct Client {
    conn: Option<ConnectionId>,
    /// The number of messages that may be sent so far.
    released: u64,
    sent: u64,
    echoed: u64,
    end: Option<DisconnectReason>,
    failure: Option<String>,
}

impl Client {
    /// Sends what may be sent. The rest waits for `on_writable`.
    fn send(&mut self, cx: &mut Context<'_>) {
        let Some(conn) = self.conn else { return };
        while self.sent < self.released {
            match cx.send(conn, &self.sent.to_le_bytes()) {
                Ok(_) => self.sent += 1,
                Err(SendErrorKind::WouldBlock(_)) => return,
                Err(error) => return self.failure = Some(error.to_string()),
            }
        }
    }
}

impl Handler for Client {
    fn on_connect(&mut self, _: &mut Context<'_>, conn: ConnectionId) {
        self.conn = Some(conn);
    }

    fn on_recv(&mut self, _: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        if message[..] != self.echoed.to_le_bytes() {
            self.failure = Some(format!("{:?} instead of echo {}", &message[..], self.echoed));
        }
        self.echoed += 1;
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, _: ConnectionId) {
        self.send(cx);
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        if self.echoed < MESSAGES {
            self.failure = Some(format!("after {} echoes: {reason}", self.echoed));
        }
        self.conn = None;
        self.end = Some(reason);
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.failure = Some(error.to_string());
    }
}

/// The program's own sources: a timer, and a socket that receives the datagrams of its ticks.
struct Own {
    socket: UdpSocket,
    /// The time of the next tick. `None` after the last one, and before the first one.
    next: Option<Instant>,
    ticks: u64,
    datagrams: u64,
}

impl Own {
    fn new() -> Result<Self> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        socket.connect(socket.local_addr()?)?;
        socket.set_nonblocking(true)?;
        Ok(Self { socket, next: None, ticks: 0, datagrams: 0 })
    }

    /// Runs a tick if it is due: sends a datagram. Returns true if it ran.
    fn tick(&mut self, now: Instant) -> Result<bool> {
        if self.next.is_none_or(|next| now < next) {
            return Ok(false);
        }
        self.socket.send(&self.ticks.to_le_bytes())?;
        self.ticks += 1;
        self.next = (self.ticks < TICKS).then(|| now + TICK);
        Ok(true)
    }

    /// Receives all datagrams that have arrived.
    fn receive(&mut self) -> Result<()> {
        let mut datagram = [0; 8];
        loop {
            match self.socket.recv(&mut datagram) {
                Ok(_) if datagram == self.datagrams.to_le_bytes() => self.datagrams += 1,
                Ok(_) => return Err(format!("{datagram:?} instead of datagram {}", self.datagrams).into()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Runs the loop until the reactor is drained.
fn run_loop(poller: &Poller, reactor: &mut Reactor, client: &mut Client, own: &mut Own) -> Result<()> {
    let give_up = Instant::now() + PATIENCE;
    let (mut events, mut more, mut draining) = (Events::new(), false, false);
    while !reactor.is_drained() {
        let deadline = reactor.next_deadline();
        let wake = [deadline, own.next].into_iter().flatten().fold(give_up, Instant::min);
        let timeout = if more { Duration::ZERO } else { wake.saturating_duration_since(Instant::now()) };
        events.clear();
        poller.wait(&mut events, Some(timeout))?;
        let now = Instant::now();
        if now >= give_up {
            return Err(format!("not done after {PATIENCE:?}: {} echoes", client.echoed).into());
        }

        if events.iter().any(|event| event.key == SOCKET) {
            own.receive()?;
        }
        if own.tick(now)? {
            client.released += MESSAGES_PER_TICK;
            client.send(&mut reactor.context());
        }
        let readable = events.iter().any(|event| event.key == REACTOR);
        if more || readable || deadline.is_some_and(|at| at <= now) {
            more = reactor.turn(client, Duration::ZERO)?.more;
        }

        if let Some(failure) = client.failure.take() {
            return Err(failure.into());
        }
        if own.ticks == 0 && own.next.is_none() && client.conn.is_some() {
            own.next = Some(now);
        }
        if !draining && client.echoed == MESSAGES && own.datagrams == TICKS {
            // Requests from outside of a turn make the reactor's descriptor readable.
            reactor.context().drain(PATIENCE);
            draining = true;
        }
    }
    Ok(())
}

/// Runs the server on its own thread, and the client in the loop of this thread.
pub(super) fn run() -> Result<()> {
    let config = Config::default().provider(ProviderChoice::Iwarp);
    let mut server = Reactor::new(config.clone())?;
    let listener = server.context().listen(([127, 0, 0, 1], 0).into())?;
    let address = server.context().listeners().local_address(listener).ok_or("the listener is gone")?;
    let remote = server.handle();
    let thread = thread::spawn(move || {
        let mut echo = Echo::default();
        server.run(&mut echo).map(|()| echo)
    });

    let (mut reactor, mut client, mut own) = (Reactor::new(config)?, Client::default(), Own::new()?);
    reactor.context().connect(address)?;
    let poller = Poller::new()?;
    // SAFETY: both sources are removed from the poller before they are dropped.
    unsafe {
        poller.add_with_mode(&reactor, Event::readable(REACTOR), PollMode::Level)?;
        poller.add_with_mode(&own.socket, Event::readable(SOCKET), PollMode::Level)?;
    }
    let result = run_loop(&poller, &mut reactor, &mut client, &mut own);
    poller.delete(&reactor)?;
    poller.delete(&own.socket)?;
    remote.drain(PATIENCE);
    let echo = thread.join().map_err(|_| "the server has panicked")??;
    result?;

    // The client closes the connection first. If the drain of the server begins before it notices,
    // both have closed it.
    let closed = [DisconnectReason::Closed, DisconnectReason::Local { complete: true }];
    if client.end.as_ref() != closed.last() || echo.ends.len() != 1 || !closed.contains(&echo.ends[0]) {
        return Err(format!("the connection ended otherwise: {:?}, {:?}", client.end, echo.ends).into());
    }
    let (echoed, ticks, datagrams) = (client.echoed, own.ticks, own.datagrams);
    if (echoed, ticks, datagrams) != (MESSAGES, TICKS, TICKS) {
        return Err(format!("{echoed} echoes, {ticks} ticks, {datagrams} datagrams").into());
    }
    println!("{echoed} echoes, {ticks} ticks, {datagrams} datagrams");
    Ok(())
}
