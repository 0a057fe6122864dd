//! Honest clients that connect one after another, ask for an echo, and leave.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rdma_reactor::{ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, Reactor, TimerId, Wait};
use serde::{Deserialize, Serialize};

use super::credentials::Credentials;
use super::{Result, config};

/// The settings of the process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// The server.
    pub server: SocketAddr,
    /// What the clients prove who they are with.
    pub credentials: Credentials,
    /// Number of clients.
    pub count: usize,
    /// Time from the beginning of one to that of the next.
    pub every: Duration,
    /// The most that are on their way at a time: a client that has no processor for a while does not become a crowd.
    pub at_once: usize,
    /// Time that a client has for coming up.
    pub patience: Duration,
    /// The connections are in shared memory.
    pub within_host: bool,
}

/// What became of the clients.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Microseconds from connecting to the echo, ascending, of those who came up.
    pub micros: Vec<u64>,
    /// How many did not, by the reason.
    pub failed: BTreeMap<String, usize>,
}

impl Outcome {
    /// Number of clients that came up.
    #[must_use]
    pub fn up(&self) -> usize {
        self.micros.len()
    }

    /// Number of clients.
    #[must_use]
    pub fn all(&self) -> usize {
        self.up() + self.failed.values().sum::<usize>()
    }

    /// The share of those that came up: 0 to 1.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.up() as f64 / self.all().max(1) as f64
    }

    /// The time within which this share of those who came up had their echo, microseconds.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Option<u64> {
        let nth = (share * self.up() as f64).ceil() as usize;
        self.micros.get(nth.clamp(1, self.up().max(1)) - 1).copied()
    }
}

#[derive(Debug)]
struct Clients {
    settings: Settings,
    begun: usize,
    open: BTreeMap<ConnectionId, Instant>,
    outcome: Outcome,
}

impl Clients {
    fn ended(&mut self, cx: &mut Context<'_>, conn: ConnectionId, why: &str) {
        if self.open.remove(&conn).is_some() {
            *self.outcome.failed.entry(why.to_owned()).or_default() += 1;
        }
        self.stop_when_done(cx);
    }

    fn stop_when_done(&self, cx: &mut Context<'_>) {
        if self.outcome.all() == self.settings.count {
            cx.stop();
        }
    }
}

impl Handler for Clients {
    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        if self.open.len() >= self.settings.at_once {
            cx.set_timer(self.settings.every, 0);
            return;
        }
        self.begun += 1;
        if self.begun < self.settings.count {
            cx.set_timer(self.settings.every, 0);
        }
        let now = Instant::now();
        match cx.connect(self.settings.server) {
            Ok(conn) => drop(self.open.insert(conn, now)),
            Err(error) => *self.outcome.failed.entry(error.to_string()).or_default() += 1,
        }
        self.stop_when_done(cx);
    }

    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        // A new connection has room.
        let _ = cx.send(conn, b"hello");
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, _: Message<'_>) {
        if let Some(begun) = self.open.remove(&conn) {
            self.outcome.micros.push(begun.elapsed().as_micros() as u64);
        }
        cx.close(conn);
        self.stop_when_done(cx);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        self.ended(cx, conn, &format!("up, and without an echo: {reason}"));
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        self.ended(cx, conn, &error.to_string());
    }
}

/// Connects as the settings say, until all clients have an outcome.
///
/// # Errors
/// The reactor fails.
pub fn run(settings: Settings) -> Result<Outcome> {
    // Sleeping leaves the processors to the server and the attackers.
    let config = config(settings.credentials.security()?, settings.within_host);
    let config = config.wait(Wait::Event).timeouts(|t| t.connect = settings.patience);
    let mut reactor = Reactor::new(config)?;
    reactor.context().set_timer(Duration::ZERO, 0);
    let mut clients = Clients { settings, begun: 0, open: BTreeMap::new(), outcome: Outcome::default() };
    reactor.run(&mut clients)?;
    clients.outcome.micros.sort_unstable();
    Ok(clients.outcome)
}
