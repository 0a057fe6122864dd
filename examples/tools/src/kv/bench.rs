//! Clients that read values while another client writes without pause. Each value that a reader accepts must be a complete stored value.
//! The value must not be older than a value of the same key that the same reader has read earlier.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, Outcome, Reactor, SendErrorKind,
    SendId, SendKind, TimerId,
};

use super::reader::{LookupResult, Reader};
use super::wire::{TableHello, encode_put};
use crate::pingpong::failure::{Ending, Failure};
use crate::pingpong::interrupt::Interrupt;

/// The parameters of a run.
#[derive(Clone, Copy, Debug)]
pub struct BenchPlan {
    /// The number of connections that read.
    pub readers: u32,
    /// The number of keys that are written and read.
    pub keys: u32,
    /// The length of the run.
    pub time: Duration,
}

/// The results of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BenchFigures {
    /// The number of values that were read.
    pub reads: u64,
    /// The number of reads that were repeated because the server was writing the slot during the read.
    pub torn: u64,
    /// The number of values that were stored. The first value of each key does not count, because it is stored before the first read.
    pub writes: u64,
    /// The time from the first read to the end of the run, in nanoseconds.
    pub nanos: u128,
}

/// The largest number of stores in flight.
const DEPTH: u64 = 16;

/// The role of a connection.
#[derive(Debug)]
enum ConnectionRole {
    /// The server has not yet sent the address of its table.
    New,
    /// The connection stores values. `sent` is the number of values sent, and `stored` the number of values that the server has stored.
    Writer {
        hello: TableHello,
        sent: u64,
        stored: u64,
    },
    Reader(Box<BenchState>),
}

/// The state of a connection that reads values.
// local: keys of the benchmark
#[derive(Debug)]
struct BenchState {
    reader: Reader,
    key: u32,
    /// The number in the newest value that this connection has read, for each key. Newer values
    /// have greater numbers.
    newest: Vec<u64>,
}

// local: connections of the benchmark
#[derive(Debug)]
struct Bench {
    plan: BenchPlan,
    server: SocketAddr,
    /// The role of each connection. The index is the connection's slot.
    roles: Vec<ConnectionRole>,
    figures: BenchFigures,
    since: Option<Instant>,
    failure: Option<Failure>,
    /// The buffer in which the next value is assembled.
    value: Vec<u8>,
}

fn key(number: u32) -> Vec<u8> {
    format!("key {number}").into_bytes()
}

/// Returns the number that every 8 bytes of the value contain. Returns `None` if they contain different numbers, which means that the value
/// is not one complete stored value.
fn number(value: &[u8]) -> Option<u64> {
    let first = u64::from_le_bytes(*value.first_chunk()?);
    value.chunks_exact(8).all(|word| word == first.to_le_bytes()).then_some(first)
}

impl Bench {
    fn role(&mut self, conn: ConnectionId) -> &mut ConnectionRole {
        if self.roles.len() <= conn.slot() {
            self.roles.resize_with(conn.slot() + 1, || ConnectionRole::New);
        }
        &mut self.roles[conn.slot()]
    }

    /// Returns the results of a run. `nanos` is the time since the first read, in nanoseconds.
    fn figures(&self, nanos: u128) -> BenchFigures {
        let mut figures = BenchFigures { nanos, ..self.figures };
        for role in &self.roles {
            match role {
                ConnectionRole::New => {}
                ConnectionRole::Writer { stored, .. } => {
                    figures.writes += stored.saturating_sub(u64::from(self.plan.keys));
                }
                ConnectionRole::Reader(looks) => figures.torn += looks.reader.retries,
            }
        }
        figures
    }

    /// Returns true if every key has a value, so that readers may begin.
    fn is_loaded(&self) -> bool {
        self.since.is_some()
    }

    fn handle_message(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: &[u8]) -> Result<(), Failure> {
        let (keys, loaded) = (self.plan.keys, self.is_loaded());
        match self.role(conn) {
            ConnectionRole::New => {
                let hello = TableHello::decode(message)
                    .ok_or_else(|| Failure::new("the server is not a kv server of this version"))?;
                let most = hello.geometry.max_value;
                if most < 8 {
                    let cure = "start the server with a larger --max-value";
                    return Err(Failure::new(format!("a value of 8 bytes: the limit of this table is {most}; {cure}")));
                }
                *self.role(conn) = if loaded {
                    let newest = vec![0; keys as usize];
                    let looks = BenchState { reader: Reader::new(cx, conn, hello)?, key: 0, newest };
                    ConnectionRole::Reader(Box::new(looks))
                } else {
                    ConnectionRole::Writer { hello, sent: 0, stored: 0 }
                };
            }
            ConnectionRole::Writer { stored, .. } if message.is_empty() => {
                *stored += 1;
                if !loaded && *stored >= u64::from(keys) {
                    self.since = Some(Instant::now());
                    cx.timers().set(self.plan.time, 0);
                    for _ in 0..self.plan.readers {
                        cx.connect(self.server)?;
                    }
                }
            }
            ConnectionRole::Writer { .. } => return Err(Failure::new(String::from_utf8_lossy(message))),
            ConnectionRole::Reader(_) => return Err(Failure::new("an answer without a question")),
        }
        self.go(cx, conn)
    }

    /// Starts the next read or the next stores on a connection.
    fn go(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<(), Failure> {
        let keys = u64::from(self.plan.keys);
        let mut value = std::mem::take(&mut self.value);
        match self.role(conn) {
            ConnectionRole::New => {}
            ConnectionRole::Writer { hello, sent, stored } => {
                while *sent < *stored + DEPTH {
                    value.clear();
                    let words = hello.geometry.max_value as usize / 8;
                    value.extend(std::iter::repeat_n(sent.to_le_bytes(), words).flatten());
                    match cx.send(conn, &encode_put(&key((*sent % keys) as u32), &value)) {
                        Ok(_) => *sent += 1,
                        // No credit is left. The reactor calls `on_writable` when credit arrives.
                        Err(SendErrorKind::WouldBlock(_)) => break,
                        Err(error) => return Err(Failure::new(error)),
                    }
                }
            }
            ConnectionRole::Reader(looks) => looks.reader.look(cx, conn, &key(looks.key))?,
        }
        self.value = value;
        Ok(())
    }

    /// Handles a completed read: checks the value, and starts the next read.
    fn read(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<(), Failure> {
        let keys = self.plan.keys;
        let ConnectionRole::Reader(looks) = self.role(conn) else { return Ok(()) };
        let name = looks.key;
        let value = match looks.reader.completed(cx, conn)? {
            LookupResult::NotYet => return Ok(()),
            LookupResult::Nothing => return Err(Failure::new(format!("{:?} was stored but is missing", key(name)))),
            LookupResult::Value(value) => number(value),
        };
        let Some(value) = value else {
            return Err(Failure::new(format!("a torn value of key {name} was accepted as a whole one")));
        };
        let newest = &mut looks.newest[name as usize];
        if value < *newest || value % u64::from(keys) != u64::from(name) {
            return Err(Failure::new(format!("key {name} had value {newest} and then {value}")));
        }
        *newest = value;
        looks.key = (name + 1) % keys;
        self.figures.reads += 1;
        self.go(cx, conn)
    }

    fn check(&mut self, cx: &mut Context<'_>, result: Result<(), Failure>) {
        if let Err(failure) = result {
            self.failure.get_or_insert(failure);
            cx.stop();
        }
    }
}

impl Handler for Bench {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let result = self.handle_message(cx, conn, &message);
        self.check(cx, result);
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        if send.kind() == SendKind::Read && outcome.is_sent() {
            let result = self.read(cx, conn);
            self.check(cx, result);
        }
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        // Only the sends of a writer can be refused: a reader has at most one read in flight.
        let result = self.go(cx, conn);
        self.check(cx, result);
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        self.check(cx, Err(Failure::new(format!("the connection has ended: {reason}"))));
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.check(cx, Err(Failure::no_connection(&error, "`kv server`")));
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, _: u64) {
        cx.stop();
    }
}

/// Stores values of all keys repeatedly, and reads them at the same time. Returns the results, or `None` if the user interrupted the
/// run before the first read.
///
/// # Errors
/// A value was not complete, a value was older than a value of the same key that the same reader has read before, the server cannot be
/// reached, or a connection has ended.
pub fn run(server: SocketAddr, plan: BenchPlan, config: Config) -> Result<(Option<BenchFigures>, Ending), Failure> {
    let mut reactor = Reactor::new(config)?;
    let interrupt = Interrupt::on_signals()?;
    interrupt.stops(reactor.handle());
    reactor.context().connect(server)?;
    let (figures, value) = (BenchFigures::default(), Vec::new());
    let mut bench = Bench { plan, server, roles: Vec::new(), figures, since: None, failure: None, value };
    reactor.run(&mut bench)?;
    if let Some(failure) = bench.failure {
        return Err(failure);
    }
    let Some(since) = bench.since else { return Ok((None, Ending::Interrupted)) };
    let figures = bench.figures(since.elapsed().as_nanos());
    let ending = if interrupt.is_raised() { Ending::Interrupted } else { Ending::Complete };
    Ok((Some(figures), ending))
}

#[cfg(test)]
mod tests {
    use rdma_reactor::RemoteRegion;

    use super::*;
    use crate::kv::table::Geometry;

    #[test]
    fn a_value_is_made_of_one_number() {
        assert_eq!(number(&[7_u64.to_le_bytes(), 7_u64.to_le_bytes()].concat()), Some(7));
        assert_eq!(number(&[7_u64.to_le_bytes(), 8_u64.to_le_bytes()].concat()), None);
        assert_eq!(number(&[1; 7]), None);
    }

    #[test]
    fn the_stores_before_the_first_read_do_not_count() {
        let geometry = Geometry { slots: 16, max_value: 8 };
        let region = RemoteRegion { address: 0, len: geometry.table_len(), key: 0 };
        let hello = TableHello { geometry, region };
        let bench = Bench {
            plan: BenchPlan { readers: 1, keys: 8, time: Duration::from_secs(1) },
            server: ([127, 0, 0, 1], 1).into(),
            roles: vec![ConnectionRole::New, ConnectionRole::Writer { hello, sent: 12, stored: 11 }],
            figures: BenchFigures::default(),
            since: None,
            failure: None,
            value: Vec::new(),
        };
        assert_eq!(bench.figures(5), BenchFigures { writes: 3, nanos: 5, ..BenchFigures::default() });
    }
}
