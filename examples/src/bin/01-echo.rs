//! A server that sends every message back, and a client that says hello: two reactors in one process.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::error::Error;
use std::thread;

use rdma_reactor::{Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, Reactor};

struct Echo;

impl Handler for Echo {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        // A client that sends without reading answers fills the window. This server does not wait for such a client.
        if let Err(error) = cx.send(conn, &message) {
            eprintln!("{conn}: {error}");
            cx.close(conn);
        }
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

    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        eprintln!("{conn}: {error}");
        cx.stop();
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut server = Reactor::new(Config::default())?;
    let listener = server.context().listen("127.0.0.1:0".parse()?)?;
    let address = server.context().local_address(listener).ok_or("the listener is gone")?;
    let remote = server.remote();
    let thread = thread::spawn(move || server.run(&mut Echo));

    let mut client = Reactor::new(Config::default())?;
    client.context().connect(address)?;
    client.run(&mut Hello)?;

    remote.stop();
    thread.join().map_err(|_| "the server panicked")??;
    Ok(())
}
