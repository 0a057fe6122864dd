//! An honest client with one connection. On this connection, the client requests echoes, one at a time.

use std::time::Instant;

use rdma_reactor::{ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, Reactor, TimerId, Wait};

use super::newcomers::{Outcome, Settings};
use super::server::GUARD;
use super::{Result, config};

/// The length of a request, in bytes. In shared memory, the server copies each request into memory that the client maps.
const LEN: usize = 2000;

#[derive(Debug)]
struct Client {
    settings: Settings,
    /// The connection, and the time at which the last request was sent. `None` before the connection is established.
    asked: Option<(ConnectionId, Instant)>,
    outcome: Outcome,
}

impl Client {
    fn ask(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.asked = Some((conn, Instant::now()));
        // There is a credit for this send, because only one request is in flight.
        let _ = cx.send(conn, &self.question());
    }

    /// Returns the next request. It differs from the previous one.
    fn question(&self) -> Vec<u8> {
        vec![self.outcome.up() as u8; LEN]
    }

    fn ended(&mut self, cx: &mut Context<'_>, why: &str) {
        self.outcome.failed.insert(why.to_owned(), self.settings.count - self.outcome.up());
        cx.stop();
    }
}

impl Handler for Client {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        // This message requests that the server reserves memory for this client. The server checks that no process changes that memory.
        if self.settings.within_host {
            let _ = cx.send(conn, GUARD);
        }
        self.ask(cx, conn);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, _: ConnectionId, message: Message<'_>) {
        if *message != *self.question() {
            return self.ended(cx, "the echo differs from the request");
        }
        if let Some((_, asked)) = self.asked {
            self.outcome.micros.push(asked.elapsed().as_micros() as u64);
        }
        if self.outcome.up() == self.settings.count {
            cx.stop();
        } else {
            cx.timers().set(self.settings.every, 0);
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        if let Some((conn, _)) = self.asked {
            self.ask(cx, conn);
        }
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        self.ended(cx, &reason.to_string());
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.ended(cx, &error.to_string());
    }
}

/// Connects, and requests `count` echoes, with a pause between two requests. Returns the outcome.
///
/// # Errors
/// The reactor fails.
pub fn run(settings: Settings) -> Result<Outcome> {
    // The client sleeps while it waits, so that the server and the attackers can use the processors.
    let config = config(settings.credentials.security()?, settings.within_host).wait(Wait::Event);
    let mut reactor = Reactor::new(config)?;
    reactor.context().connect(settings.server)?;
    let mut client = Client { settings, asked: None, outcome: Outcome::default() };
    reactor.run(&mut client)?;
    client.outcome.micros.sort_unstable();
    Ok(client.outcome)
}
