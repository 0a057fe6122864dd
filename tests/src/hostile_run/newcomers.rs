//! Honest clients, which start at regular intervals. Each client connects, requests one echo, and closes its connection.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rdma_reactor::{ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, Reactor, TimerId, Wait};
use serde::{Deserialize, Serialize};

use super::credentials::Credentials;
use super::{Result, config};

/// The settings of the clients' process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// The address of the server.
    pub server: SocketAddr,
    /// The credentials of the clients.
    pub credentials: Credentials,
    /// The number of clients.
    pub count: usize,
    /// The time between the starts of two clients.
    pub every: Duration,
    /// The largest number of clients at the same time. With this limit, a process that got no processor for a while does not start too many
    /// clients together afterwards.
    pub at_once: usize,
    /// The time limit for a client, from its connect to its echo.
    pub patience: Duration,
    /// True if the connections use shared memory.
    pub within_host: bool,
}

/// The results of the clients.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// The time of each successful client from its start to its echo, in microseconds, in ascending order.
    pub micros: Vec<u64>,
    /// The number of failed clients for each reason.
    pub failed: BTreeMap<String, usize>,
}

impl Outcome {
    /// Returns the number of successful clients.
    #[must_use]
    pub fn up(&self) -> usize {
        self.micros.len()
    }

    /// Returns the number of clients.
    #[must_use]
    pub fn all(&self) -> usize {
        self.up() + self.failed.values().sum::<usize>()
    }

    /// Returns the fraction of successful clients, from 0 to 1.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.up() as f64 / self.all().max(1) as f64
    }

    /// Returns a quantile of the times of successful clients, in microseconds: the fraction `share` of these clients had their echo within
    /// the returned time. Returns `None` if no client was successful.
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
            cx.timers().set(self.settings.every, 0);
            return;
        }
        self.begun += 1;
        if self.begun < self.settings.count {
            cx.timers().set(self.settings.every, 0);
        }
        let now = Instant::now();
        match cx.connect(self.settings.server) {
            Ok(conn) => drop(self.open.insert(conn, now)),
            Err(error) => *self.outcome.failed.entry(error.to_string()).or_default() += 1,
        }
        self.stop_when_done(cx);
    }

    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        // There is a credit for this send, because it is the first one on the connection.
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
        self.ended(cx, conn, &format!("connected, and without an echo: {reason}"));
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        self.ended(cx, conn, &error.to_string());
    }
}

/// Runs the clients. Returns when all of them have a result.
///
/// # Errors
/// The reactor fails.
pub fn run(settings: Settings) -> Result<Outcome> {
    // The clients sleep while they wait, so that the server and the attackers can use the processors.
    let config = config(settings.credentials.security()?, settings.within_host);
    let config = config.wait(Wait::Event).timeouts(|t| t.connect = settings.patience);
    let mut reactor = Reactor::new(config)?;
    reactor.context().timers().set(Duration::ZERO, 0);
    let mut clients = Clients { settings, begun: 0, open: BTreeMap::new(), outcome: Outcome::default() };
    reactor.run(&mut clients)?;
    clients.outcome.micros.sort_unstable();
    Ok(clients.outcome)
}
