//! The parts that the embedding examples share: an echo server on a separate thread, and a client. The client sends many messages,
//! pauses, and repeats that.

pub mod asyncio;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DisconnectReason, Error, Handler, Message, ProviderChoice, Reactor,
    ReactorHandle, TimerId,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The number of messages that a [`Load`] sends and receives back.
pub const MESSAGES: u64 = 10_000;
/// The largest number of messages in flight.
const WINDOW: u64 = 16;
/// The number of messages between two pauses.
const BURST: u64 = 500;
/// The length of a pause. During a pause, nothing is in flight, so only the reactor's timer can end it.
const REST: Duration = Duration::from_millis(5);

/// Returns the settings of the server and the client.
#[must_use]
pub fn config() -> Config {
    Config::default().provider(ProviderChoice::Iwarp)
}

/// Registers a reactor's descriptor with the tokio runtime of the caller.
///
/// # Errors
/// The system has no descriptors left.
#[allow(deprecated, reason = "the safe one of two; what it could be misused for, an OwnedFd does not do")]
pub fn on_tokio(reactor: &Reactor) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(reactor.as_fd().try_clone_to_owned()?, Interest::READABLE)
}

/// Sends every message back, and drops an echo that is refused. [`Load`] has few messages in flight, so none of its echoes is refused.
/// Other servers must keep refused answers, as the server in the README does.
#[derive(Debug)]
pub struct Echo;

impl Handler for Echo {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if let Err(error) = cx.send(conn, &message) {
            log::warn!("{conn}: {error}");
        }
    }
}

/// An echo server on a separate thread.
#[derive(Debug)]
pub struct Server {
    /// The address that the server listens on.
    pub address: SocketAddr,
    remote: ReactorHandle,
    thread: JoinHandle<Result<(), Error>>,
}

impl Server {
    /// Starts a server on a free port of this machine.
    ///
    /// # Errors
    /// The system has no descriptors or ports left.
    pub fn start() -> Result<Self, Error> {
        let mut reactor = Reactor::new(config())?;
        let listener = reactor.context().listen(([127, 0, 0, 1], 0).into())?;
        let address = reactor.context().listeners().local_address(listener).ok_or(Error::Gone("listener"))?;
        let remote = reactor.handle();
        Ok(Self { address, remote, thread: thread::spawn(move || reactor.run(&mut Echo)) })
    }

    /// Stops the server and waits for its thread.
    ///
    /// # Errors
    /// The error that the server's reactor ended with.
    pub fn stop(self) -> Result<(), Error> {
        self.remote.stop();
        self.thread.join().map_err(|_| Error::Gone("server's thread"))?
    }
}

/// A client that sends [`MESSAGES`] messages, checks that their echoes arrive in order, and pauses now and then.
#[derive(Debug, Default)]
pub struct Load {
    sent: u64,
    echoed: u64,
    rests: u64,
    resting: Option<ConnectionId>,
    /// True if all messages are echoed and the connection is closed. Also true if the client failed.
    pub done: bool,
    /// The reason why the client failed; `None` if it did not fail.
    pub failure: Option<String>,
}

impl Load {
    /// Makes a reactor that connects to the server.
    ///
    /// # Errors
    /// Those of [`Reactor::new`].
    pub fn reactor(server: &Server) -> Result<Reactor, Error> {
        let mut reactor = Reactor::new(config())?;
        reactor.context().connect(server.address)?;
        Ok(reactor)
    }

    fn pump(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let end = MESSAGES.min(self.rests * BURST + BURST);
        while self.sent < end && self.sent - self.echoed < WINDOW && cx.send(conn, &self.sent.to_le_bytes()).is_ok() {
            self.sent += 1;
        }
    }

    fn end(&mut self, failure: String) {
        self.failure = Some(failure);
        self.done = true;
    }

    /// Prints one line about the run. `heartbeats` is the number of events of the other event source in the example's event loop.
    ///
    /// # Errors
    /// The client failed.
    pub fn report(&self, heartbeats: u64) -> Result<(), Box<dyn std::error::Error>> {
        match &self.failure {
            Some(failure) => Err(failure.clone().into()),
            None => {
                println!("{} echoes, {} rests, {heartbeats} heartbeats of the outer loop", self.echoed, self.rests);
                Ok(())
            }
        }
    }
}

impl Handler for Load {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.pump(cx, conn);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if *message != self.echoed.to_le_bytes() {
            return self.end(format!("echo {} differs: {:?}", self.echoed, &message[..]));
        }
        self.echoed += 1;
        if self.echoed == MESSAGES {
            cx.close(conn);
        } else if self.echoed == self.rests * BURST + BURST {
            // Nothing is in flight now, so only this timer can wake the loop.
            cx.timers().set(REST, 0);
            self.resting = Some(conn);
        } else {
            self.pump(cx, conn);
        }
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.pump(cx, conn);
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        if let Some(conn) = self.resting.take() {
            self.rests += 1;
            self.pump(cx, conn);
        }
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        self.done = true;
        if self.echoed < MESSAGES {
            self.end(format!("the end after {} echoes: {reason}", self.echoed));
        }
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.end(error.to_string());
    }
}
