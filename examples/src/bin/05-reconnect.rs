//! A client that survives its server. When a connect fails or the connection ends, the client connects again after growing pauses with
//! jitter. It then repeats the ping that was not answered. The server of this example ends twice: the first time with an orderly close, the
//! second time without a close, as in a crash.
//!
//! `05-reconnect [HOST:PORT]`: with an address, pings an echo server there until Ctrl-C.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::error::Error;
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use rdma_reactor::{
    Backoff, Config, ConnectError, ConnectOptions, ConnectionId, Context, DisconnectReason, Handler, Message,
    ProviderChoice, Reactor, TimerId,
};

/// The time between two pings.
const INTERVAL: Duration = Duration::from_millis(20);
/// The number of answered pings after which the example ends.
const PINGS: u64 = 30;

/// The token of the timer that sends the next ping.
const PING: u64 = 0;
/// The token of the timer that connects again.
const CONNECT: u64 = 1;

/// Pings a server, and reconnects until enough pings are answered.
struct Client {
    host: String,
    port: u16,
    conn: Option<ConnectionId>,
    backoff: Backoff,
    /// The number of answered pings. The next ping has this number. If that ping is not answered, the client sends it again on the next
    /// connection.
    answered: u64,
    most: u64,
    reconnects: u64,
}

impl Client {
    fn connect(&mut self, cx: &mut Context<'_>) {
        if let Err(error) = cx.connect_host(&self.host, self.port, ConnectOptions::new()) {
            self.try_later(cx, &error);
        }
    }

    fn try_later(&mut self, cx: &mut Context<'_>, reason: &dyn Error) {
        let pause = self.backoff.next_pause();
        println!("{reason}; attempt {} in {pause:?}", self.backoff.attempts());
        self.conn = None;
        cx.timers().set(pause, CONNECT);
    }

    fn ping(&self, cx: &mut Context<'_>, conn: ConnectionId) {
        if let Err(error) = cx.send(conn, &self.answered.to_le_bytes()) {
            // The connection is ending, so the ping is sent again on the next connection.
            println!("ping {}: {error}", self.answered);
        }
    }
}

impl Handler for Client {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.conn = Some(conn);
        self.reconnects += 1;
        self.ping(cx, conn);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if *message != self.answered.to_le_bytes() {
            return;
        }
        // Only an answer shows that the server works, so only an answer resets the pauses. If a connection is established and ends
        // without an answer, the pauses keep growing.
        self.backoff.reset();
        self.answered += 1;
        if self.answered == self.most {
            cx.close(conn);
        } else {
            cx.timers().set(INTERVAL, PING);
        }
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, token: u64) {
        match (token, self.conn) {
            (CONNECT, _) => self.connect(cx),
            (_, Some(conn)) => self.ping(cx, conn),
            // The ping is due, but there is no connection. The client sends the ping when the next connection is established.
            (_, None) => {}
        }
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        if self.answered == self.most {
            return cx.stop();
        }
        self.try_later(cx, &reason);
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.try_later(cx, &error);
    }
}

/// Sends pings back. After `left` pings, the next ping stops the server's reactor instead.
struct Server {
    left: u64,
}

impl Handler for Server {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        if self.left == 0 {
            return cx.stop();
        }
        self.left -= 1;
        if let Err(error) = cx.send(conn, &message) {
            println!("the server: {error}");
        }
    }
}

/// Runs three servers on one address, sequentially. The first server ends with an orderly close, the second one ends as in a crash, and the
/// third one does not end.
fn lives(mut first: Reactor, config: Config, address: SocketAddr) -> Result<(), rdma_reactor::Error> {
    for life in 0..3 {
        let mut reactor = if life == 0 {
            std::mem::replace(&mut first, Reactor::new(config.clone())?)
        } else {
            let mut reactor = Reactor::new(config.clone())?;
            // The previous server's port may still be in use for a moment, so the listen is retried.
            while let Err(error) = reactor.context().listen(address) {
                println!("the server: {error}");
                thread::sleep(Duration::from_millis(100));
            }
            reactor
        };
        let mut server = Server { left: if life == 2 { u64::MAX } else { 10 } };
        reactor.run(&mut server)?;
        if life == 0 {
            reactor.shutdown(&mut server, Duration::from_secs(1))?;
        }
        // Only the first server calls `shutdown`, which ends its connections with an orderly close. The second reactor is dropped with open
        // connections, as in a crash.
        drop(reactor);
        thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let config = Config::default().provider(ProviderChoice::Iwarp);
    let (host, port, most) = match std::env::args().nth(1) {
        Some(to) => {
            let wrong = || format!("{to}: give HOST:PORT");
            let (host, port) = to.rsplit_once(':').ok_or_else(wrong)?;
            (host.to_owned(), port.parse::<u16>().map_err(|_| wrong())?, u64::MAX)
        }
        None => {
            let mut server = Reactor::new(config.clone())?;
            let listener = server.context().listen(([127, 0, 0, 1], 0).into())?;
            let address = server.context().listeners().local_address(listener).ok_or("nobody listens")?;
            let config = config.clone();
            // The server's thread is not joined: it ends with the process.
            thread::spawn(move || lives(server, config, address));
            ("localhost".to_owned(), address.port(), PINGS)
        }
    };
    let backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(10));
    let mut client = Client { host, port, conn: None, backoff, answered: 0, most, reconnects: 0 };
    let mut reactor = Reactor::new(config)?;
    client.connect(&mut reactor.context());
    reactor.run(&mut client)?;
    println!("{} pings over {} connections", client.answered, client.reconnects);
    Ok(())
}
