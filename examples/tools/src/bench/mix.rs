//! Requests of mixed length, from 1 B to 256 KiB. The server sends each request back. Only one request is in flight.

use std::net::SocketAddr;
use std::time::Instant;

use clap::ValueEnum;
use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, ProviderChoice, Reactor,
    SendErrorKind,
};

use crate::pingpong::failure::Failure;

use super::pair;

/// The binary logarithm of the longest request's length.
const LONGEST: u32 = 18;
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// The sizes of the buffers on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Buffers {
    /// The default sizes
    Default,
    /// Each buffer holds the longest request
    Large,
}

fn reactor(buffers: Buffers) -> Result<Reactor, Failure> {
    let config = Config::default().provider(ProviderChoice::Iwarp);
    let config = match buffers {
        Buffers::Default => config,
        Buffers::Large => config.buffer_size(1 << LONGEST).large_messages(|l| l.max_message = 1 << LONGEST),
    };
    Reactor::new(config).map_err(Failure::new)
}

/// Returns an endless sequence of request lengths, in bytes. The lengths are evenly distributed over the powers of two. The sequence is
/// the same in every run.
fn lengths() -> impl Iterator<Item = usize> {
    let states = std::iter::successors(Some(SEED), |&state| {
        let state = state ^ (state << 13);
        let state = state ^ (state >> 7);
        Some(state ^ (state << 17))
    });
    states.skip(1).map(|state| {
        let share = (state >> 11) as f64 / (1_u64 << 53) as f64;
        (share * f64::from(LONGEST)).exp2().round() as usize
    })
}

struct MixServer;

impl Handler for MixServer {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        // Credit is available, because only one request is in flight. So an error is a failure of the connection.
        if cx.send(conn, &message).is_err() {
            cx.close(conn);
        }
    }
}

/// Runs the server, which prints its address and answers until it is killed.
///
/// # Errors
/// A system call failed.
pub fn serve(buffers: Buffers) -> Result<(), Failure> {
    pair::serve(reactor(buffers)?, &mut MixServer)
}

/// The client, which sends the next request when the last one is answered.
// local: lengths of the benchmark
struct MixClient {
    lengths: Vec<usize>,
    /// The number of answers so far. The first `warmup` answers are not measured.
    answers: usize,
    warmup: usize,
    bytes: Vec<u8>,
    started: Instant,
    /// The requests per second, or the failure. `None` during the run.
    result: Option<Result<f64, Failure>>,
}

impl MixClient {
    fn request(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        match cx.send(conn, &self.bytes[..self.lengths[self.answers]]) {
            Ok(_) | Err(SendErrorKind::WouldBlock(_)) => {}
            Err(error) => self.end(cx, Err(Failure::new(error))),
        }
    }

    fn end(&mut self, cx: &mut Context<'_>, result: Result<f64, Failure>) {
        self.result.get_or_insert(result);
        cx.stop();
    }
}

impl Handler for MixClient {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.request(cx, conn);
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let length = self.lengths[self.answers];
        if message.len() != length {
            let wrong = format!("an answer of {} bytes to a request of {length}", message.len());
            return self.end(cx, Err(Failure::new(wrong)));
        }
        self.answers += 1;
        if self.answers == self.warmup {
            self.started = Instant::now();
        }
        match self.answers == self.lengths.len() {
            true => {
                let measured = (self.answers - self.warmup) as f64;
                self.end(cx, Ok(measured / self.started.elapsed().as_secs_f64()));
            }
            false => self.request(cx, conn),
        }
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.request(cx, conn);
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, _: ConnectionId, error: ConnectError) {
        self.end(cx, Err(Failure::new(error)));
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, _: ConnectionId, reason: DisconnectReason) {
        self.end(cx, Err(Failure::new(reason)));
    }
}

/// Runs the client. Returns the number of requests per second. Measures `count` requests, after an unmeasured warm-up of `count / 10`
/// requests.
///
/// # Errors
/// A system call failed, or the server went away.
pub fn measure(buffers: Buffers, server: SocketAddr, count: usize) -> Result<f64, Failure> {
    let mut reactor = reactor(buffers)?;
    let warmup = count.div_ceil(10);
    let mut client = MixClient {
        lengths: lengths().take(warmup + count).collect(),
        answers: 0,
        warmup,
        bytes: vec![0; 1 << LONGEST],
        started: Instant::now(),
        result: None,
    };
    reactor.context().connect(server).map_err(Failure::new)?;
    reactor.run(&mut client).map_err(Failure::new)?;
    client.result.unwrap_or_else(|| Err(Failure::new("the client was stopped")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_spread_over_the_powers_of_two() {
        let lengths: Vec<_> = lengths().take(18_000).collect();
        assert!(lengths.iter().all(|length| (1..=1 << LONGEST).contains(length)));
        for power in 2..LONGEST {
            let count = lengths.iter().filter(|length| (1 << power..2 << power).contains(*length)).count();
            assert!((850..1150).contains(&count), "{count} between two powers from {power}");
        }
    }
}
