//! A client that reads or stores the value of one key, and ends.

use std::net::SocketAddr;

use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, Outcome, Reactor, SendId, SendKind,
};

use super::reader::{LookupResult, Reader};
use super::wire::{TableHello, encode_put};
use crate::pingpong::failure::Failure;
use crate::pingpong::interrupt::Interrupt;

/// The operation that the user requests.
// local: arguments of the program
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TableOperation {
    /// Read the value of this key.
    Get(Vec<u8>),
    /// Store this value under this key.
    Put(Vec<u8>, Vec<u8>),
}

/// The handler of a client with one operation.
// bound: tool-kv
#[derive(Debug)]
struct OneOperation {
    wish: TableOperation,
    reader: Option<Reader>,
    /// True if the server was asked to store the value.
    asked: bool,
    /// The result of the operation; `None` until the operation has ended. For a read it is the value; for a store it is empty.
    result: Option<Result<Vec<u8>, Failure>>,
}

impl OneOperation {
    /// Handles a message of the server. The first message has the address of the table: starts the operation and returns `None`. A second
    /// message is the answer to a store: returns an empty value, because the operation has ended.
    fn handle_message(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnectionId,
        message: &[u8],
    ) -> Result<Option<Vec<u8>>, Failure> {
        let Some(hello) = TableHello::decode(message) else {
            return match std::str::from_utf8(message) {
                Ok("") if self.asked => Ok(Some(Vec::new())),
                Ok(why) if !why.is_empty() => Err(Failure::new(why)),
                _ => Err(Failure::new("the server is not a kv server of this version")),
            };
        };
        match &self.wish {
            TableOperation::Get(key) => self.reader.insert(Reader::new(cx, conn, hello)?).look(cx, conn, key)?,
            TableOperation::Put(key, value) => {
                cx.send(conn, &encode_put(key, value)).map_err(Failure::new)?;
                self.asked = true;
            }
        }
        Ok(None)
    }

    /// Handles a completed read. Returns the value, or `None` if another read is needed.
    fn read(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<Option<Vec<u8>>, Failure> {
        let Some(reader) = &mut self.reader else { return Ok(None) };
        match reader.completed(cx, conn)? {
            LookupResult::NotYet => Ok(None),
            LookupResult::Nothing => Err(Failure::new("no such key")),
            LookupResult::Value(value) => Ok(Some(value.to_vec())),
        }
    }

    fn step(&mut self, cx: &mut Context<'_>, conn: ConnectionId, step: Result<Option<Vec<u8>>, Failure>) {
        if let Some(result) = step.transpose() {
            self.result.get_or_insert(result);
            cx.close(conn);
        }
    }
}

impl Handler for OneOperation {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let step = self.handle_message(cx, conn, &message);
        self.step(cx, conn, step);
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        if send.kind() == SendKind::Read && outcome.is_sent() {
            let step = self.read(cx, conn);
            self.step(cx, conn, step);
        }
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        self.result.get_or_insert_with(|| Err(Failure::new(format!("the connection has ended: {reason}"))));
        cx.stop();
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.result = Some(Err(Failure::no_connection(&error, "`kv server`")));
        cx.stop();
    }
}

/// Performs an operation. Returns the value, which is empty after a store. Returns `None` if the user interrupted the operation.
///
/// # Errors
/// The operation failed.
pub fn run(server: SocketAddr, wish: TableOperation, config: Config) -> Result<Option<Vec<u8>>, Failure> {
    let mut reactor = Reactor::new(config)?;
    Interrupt::on_signals()?.stops(reactor.handle());
    reactor.context().connect(server)?;
    let mut once = OneOperation { wish, reader: None, asked: false, result: None };
    reactor.run(&mut once)?;
    once.result.transpose()
}
