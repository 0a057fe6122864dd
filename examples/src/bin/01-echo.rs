//! A server that sends every message back, and a client that sends `hello` and prints the answer. Each side has its own reactor; both
//! run in one process.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "a program, not the library")]

use std::collections::{HashMap, VecDeque};
use std::error::Error;
use std::{process, thread};

use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DetachedMessage, DisconnectReason, Handler, Message, Reactor,
    SendErrorKind,
};

/// Sends every message back. If an echo is refused for lack of credit, the server keeps the message. The message's receive buffer is
/// not reposted until the echo is sent. So a client that does not read its echoes is slowed down.
#[derive(Default)]
struct Echo {
    waiting: HashMap<ConnectionId, VecDeque<DetachedMessage>>,
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
                // There is no credit, so the message stays in `waiting`. The reactor calls `on_writable` when credit arrives.
                Err(SendErrorKind::WouldBlock(_)) => return,
                Err(error) => {
                    eprintln!("{conn}: {error}");
                    return cx.close(conn);
                }
            }
        }
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, _: DisconnectReason) {
        self.waiting.remove(&conn);
    }
}

struct Hello;

impl Handler for Hello {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if let Err(error) = cx.send(conn, b"hello") {
            eprintln!("{conn}: {error}");
        }
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        println!("{conn}: {}", String::from_utf8_lossy(&message));
        cx.close(conn);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        println!("{conn}: {reason}");
        cx.stop();
    }

    fn on_connect_error(&mut self, _: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        eprintln!("{conn}: {error}");
        process::exit(1);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut server = Reactor::new(Config::default())?;
    let listener = server.context().listen("127.0.0.1:0".parse()?)?;
    let address = server.context().listeners().local_address(listener).ok_or("the listener is gone")?;
    let remote = server.handle();
    let thread = thread::spawn(move || server.run(&mut Echo::default()));

    let mut client = Reactor::new(Config::default())?;
    client.context().connect(address)?;
    client.run(&mut Hello)?;

    remote.stop();
    thread.join().map_err(|_| "the server panicked")??;
    Ok(())
}
