//! Clients use the memory of a server by one-sided operations, without involving the server's program. Each client draws a ticket from a
//! counter by an atomic fetch-and-add, and writes its name to the entry with the ticket's number. When all clients have reported that they
//! are done, the server reads the memory.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::error::Error;
use std::thread;

use rdma_reactor::{
    Access, Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, Outcome, ProviderChoice,
    Reactor, Region, RegionOptions, RemoteRegion, SendId,
};

const CLIENTS: usize = 3;

/// The length of an entry, in bytes. Entry 0 holds the counter; names start at entry 1.
const PLACE: usize = 64;

/// The server's handler, which owns the memory.
#[derive(Default)]
struct Board {
    region: Option<Region>,
    done: usize,
}

impl Handler for Board {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if self.region.is_none() {
            // All peers may write to this memory and use atomic operations on it. Without `any_peer`, only the peer of this connection
            // could access the memory.
            let rights = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
            let options = RegionOptions::new().allow(rights).any_peer();
            match cx.regions().register(conn, (1 + CLIENTS) * PLACE, &options) {
                Ok(region) => self.region = Some(region),
                Err(error) => return eprintln!("{conn}: {error}"),
            }
        }
        // Sends the address and the key of the memory. A peer needs both to use the memory.
        let place = self.region.as_ref().map(|region| region.remote().to_bytes()).unwrap_or_default();
        if let Err(error) = cx.send(conn, &place) {
            eprintln!("{conn}: {error}");
        }
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, _: ConnectionId, _: Message<'_>) {
        // A client's operations and messages arrive in the order of sending. So the client's message shows that its earlier write has
        // arrived.
        self.done += 1;
        if self.done == CLIENTS {
            cx.stop();
        }
    }
}

/// The client: draws a ticket, writes its name, and reports with a message that it is done.
struct Client {
    name: String,
    board: Option<RemoteRegion>,
    /// Local memory. The fetch-and-add stores the ticket in its first 8 bytes; the name follows.
    own: Option<Region>,
    ticket: Option<u64>,
    failed: Option<String>,
}

impl Client {
    /// Takes the next step: draws the ticket, or writes the name once the ticket has arrived. Does nothing until the memory of both
    /// sides is available.
    fn step(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<(), Box<dyn Error>> {
        let (Some(board), Some(own)) = (self.board, &mut self.own) else { return Ok(()) };
        let Some(ticket) = self.ticket else {
            cx.remote(conn).fetch_add(board, own, 0, 1)?;
            return Ok(());
        };
        let place = board.part((1 + ticket) * PLACE as u64, PLACE as u64).ok_or("no entry is left")?;
        cx.remote(conn).write(place, own, 8..8 + PLACE)?;
        // The message arrives after the write, because both use one connection.
        cx.send(conn, b"done")?;
        Ok(())
    }
}

impl Handler for Client {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.board = RemoteRegion::from_bytes(&message);
        let own = cx.regions().register(conn, 8 + PLACE, &RegionOptions::new());
        let made = own.map_err(Box::<dyn Error>::from).and_then(|mut own| {
            own.copy_from(8, self.name.as_bytes())?;
            self.own = Some(own);
            self.step(cx, conn)
        });
        if let Err(error) = made {
            self.failed = Some(error.to_string());
            cx.stop();
        }
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        if !outcome.is_sent() {
            self.failed = Some(format!("{send:?}: {outcome:?}"));
            return cx.stop();
        }
        if self.ticket.is_none() {
            self.ticket = self.own.as_ref().map(|own| own.load(0));
            if let Err(error) = self.step(cx, conn) {
                self.failed = Some(error.to_string());
                cx.stop();
            }
        } else {
            // The write or the message has completed. The first of these two completions closes the connection. At the second one, `close`
            // has no effect.
            cx.close(conn);
        }
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        if reason != (DisconnectReason::Local { complete: true }) {
            self.failed = Some(format!("{conn}: {reason}"));
        }
        cx.stop();
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.failed = Some(error.to_string());
        cx.stop();
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let config = Config::default().provider(ProviderChoice::Iwarp);
    let mut server = Reactor::new(config.clone())?;
    let listener = server.context().listen("127.0.0.1:0".parse()?)?;
    let address = server.context().listeners().local_address(listener).ok_or("the listener is gone")?;
    let thread = thread::spawn(move || {
        let mut board = Board::default();
        server.run(&mut board).map(|()| board)
    });
    for number in 1..=CLIENTS {
        let name = format!("client {number}");
        let mut client = Client { name, board: None, own: None, ticket: None, failed: None };
        let mut reactor = Reactor::new(config.clone())?;
        reactor.context().connect(address)?;
        reactor.run(&mut client)?;
        if let Some(why) = client.failed {
            return Err(why.into());
        }
    }
    let board = thread.join().map_err(|_| "the server panicked")??;
    let region = board.region.ok_or("nobody came")?;
    println!("{} tickets were drawn", region.load(0));
    for ticket in 0..CLIENTS {
        let mut name = [0; PLACE];
        // Peers may write to the region at any time. So the program copies the bytes instead of borrowing them.
        region.copy_to((1 + ticket) * PLACE, &mut name);
        println!("{ticket}: {}", String::from_utf8_lossy(&name).trim_end_matches('\0'));
    }
    Ok(())
}
