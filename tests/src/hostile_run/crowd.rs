//! Many honest connections of one client at the same time. On each of them, the client requests the
//! echo of one large message.

use std::collections::BTreeMap;
use std::time::Instant;

use rdma_reactor::{ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, Reactor, Wait};

use super::newcomers::{Outcome, Settings};
use super::{Result, config};

/// The length of a message, in bytes. The receiver fetches a message of this length.
const LEN: usize = 300_000;
/// The largest number of messages in flight.
const IN_FLIGHT: usize = 16;

#[derive(Debug)]
struct Crowd {
    settings: Settings,
    /// The connections that are up and have sent nothing.
    up: Vec<ConnectionId>,
    asked: BTreeMap<ConnectionId, Instant>,
    outcome: Outcome,
}

fn message(conn: ConnectionId) -> Vec<u8> {
    (0..LEN).map(|at| (at / 7 + conn.slot()) as u8).collect()
}

impl Crowd {
    /// Sends further messages. Begins when all connections are up or have failed.
    fn ask(&mut self, cx: &mut Context<'_>) {
        if self.outcome.all() == self.settings.count {
            return cx.stop();
        }
        let begins = self.up.len() + self.outcome.all() == self.settings.count;
        while (begins || self.outcome.up() > 0) && self.asked.len() < IN_FLIGHT {
            let Some(conn) = self.up.pop() else { return };
            match cx.send(conn, &message(conn)) {
                Ok(_) => drop(self.asked.insert(conn, Instant::now())),
                Err(error) => self.fails(cx, &error.to_string()),
            }
        }
    }

    fn fails(&mut self, cx: &mut Context<'_>, why: &str) {
        *self.outcome.failed.entry(why.to_owned()).or_default() += 1;
        self.ask(cx);
    }
}

impl Handler for Crowd {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.up.push(conn);
        self.ask(cx);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, echo: Message<'_>) {
        let Some(asked) = self.asked.remove(&conn) else { return };
        if *echo != *message(conn) {
            return self.fails(cx, "the echo differs from the request");
        }
        self.outcome.micros.push(asked.elapsed().as_micros() as u64);
        self.ask(cx);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        let waited = self.up.len();
        self.up.retain(|&other| other != conn);
        if self.asked.remove(&conn).is_some() || self.up.len() < waited {
            self.fails(cx, &reason.to_string());
        }
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.fails(cx, &error.to_string());
    }
}

/// Opens `count` connections, and requests one echo on each. Returns the outcome.
///
/// # Errors
/// The reactor fails.
pub fn run(settings: Settings) -> Result<Outcome> {
    let config = config(settings.credentials.security()?, settings.within_host);
    let config = config.wait(Wait::Event).timeouts(|t| t.connect = settings.patience);
    let mut reactor = Reactor::new(config)?;
    for _ in 0..settings.count {
        reactor.context().connect(settings.server)?;
    }
    let mut crowd = Crowd { settings, up: Vec::new(), asked: BTreeMap::new(), outcome: Outcome::default() };
    reactor.run(&mut crowd)?;
    crowd.outcome.micros.sort_unstable();
    Ok(crowd.outcome)
}
