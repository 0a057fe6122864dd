//! The server, which owns the table and stores the values that clients send. The server does nothing when clients read the table.

use rdma_reactor::{
    Access, Config, ConnectionId, Context, DisconnectReason, Handler, Message, Reactor, RegionOptions, SendErrorKind,
};

use super::table::{Geometry, Table};
use super::wire::{TableHello, decode_put};
use crate::pingpong::failure::Failure;
use crate::pingpong::interrupt::Interrupt;
use crate::pingpong::output::Output;

/// The server's handler.
#[derive(Debug)]
struct TableServer {
    geometry: Geometry,
    /// The table; `None` before the first connection. The table is registered with the device of that connection.
    table: Option<Table>,
    /// The reason why there is no table; `None` if there is one, or before the first connection.
    failure: Option<Failure>,
}

impl TableServer {
    /// Returns the table. The first call allocates it, because registering memory needs a connection.
    fn table(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<&mut Table, Failure> {
        match &mut self.table {
            Some(table) => Ok(table),
            none => {
                // All clients may read the table, including those that connect later. Only the server may write it.
                let options = RegionOptions::new().allow(Access::REMOTE_READ).any_peer();
                let len = usize::try_from(self.geometry.table_len()).map_err(Failure::new)?;
                let region = cx.regions().register(conn, len, &options).map_err(|error| {
                    let cure = "give fewer --slots or a smaller --max-value";
                    Failure::new(format!("a table of {len} bytes: {error}; {cure}"))
                })?;
                Ok(none.insert(Table::new(self.geometry, region)))
            }
        }
    }

    fn welcome(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<(), Failure> {
        let geometry = self.geometry;
        let region = self.table(cx, conn)?.region().remote();
        cx.send(conn, &TableHello { geometry, region }.encode()).map_err(Failure::new)?;
        Ok(())
    }

    fn store(&mut self, message: &[u8]) -> Result<(), Failure> {
        let (key, value) = decode_put(message).ok_or_else(|| Failure::new("a message of another kind"))?;
        let table = self.table.as_mut().ok_or_else(|| Failure::new("there is no table yet"))?;
        table.put(key, value)
    }
}

impl Handler for TableServer {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        match self.welcome(cx, conn) {
            Ok(()) => {}
            // Without a table, the server can serve no client.
            Err(failure) if self.table.is_none() => {
                self.failure.get_or_insert(failure);
                cx.stop();
            }
            Err(failure) => {
                eprintln!("kv: {conn}: {failure}");
                cx.close(conn);
            }
        }
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let answer = self.store(&message).err().map(|failure| failure.to_string()).unwrap_or_default();
        match cx.send(conn, answer.as_bytes()) {
            Ok(_) | Err(SendErrorKind::Closed) => {}
            Err(error) => {
                // The client sends stores but does not receive the answers, so the answer to this store cannot be sent. The server does
                // not wait for a client that does not receive.
                eprintln!("kv: {conn}: {error}");
                cx.close(conn);
            }
        }
    }

    fn on_disconnect(&mut self, _: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        log::info!("{conn}: {reason}");
    }
}

/// Serves until SIGINT, SIGTERM or SIGHUP.
///
/// # Errors
/// The reactor cannot listen on the address, there is not enough memory for the table, or the reactor fails.
pub fn run(address: std::net::SocketAddr, geometry: Geometry, config: Config) -> Result<(), Failure> {
    let mut reactor = Reactor::new(config)?;
    Interrupt::on_signals()?.stops(reactor.handle());
    let listener = reactor.context().listen(address)?;
    let address = reactor.context().listeners().local_address(listener).unwrap_or(address);
    Output::stdout().line(format!("listening on {address}"));
    let mut server = TableServer { geometry, table: None, failure: None };
    reactor.run(&mut server)?;
    server.failure.map_or(Ok(()), Err)
}
