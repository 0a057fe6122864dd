//! A mix of requests: lengths from 1 B to 256 KiB, each answered with the same bytes, one at a time.

use std::net::SocketAddr;
use std::time::Instant;

use clap::ValueEnum;
use rdma_reactor::{
    Config, ConnectError, ConnectionId, Context, DisconnectReason, Handler, Message, ProviderChoice, Reactor,
    SendErrorKind,
};

use crate::pingpong::failure::Failure;

use super::pair;

/// The length of the longest request, as a power of two.
const LONGEST: u32 = 18;
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// The buffers of both sides.
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

/// Returns the lengths of requests, bytes, evenly spread over the powers of two. They are always the same.
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
        // The window is open, because only one request is in flight.
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

/// Sends a request after the answer to the last one.
struct MixClient {
    lengths: Vec<usize>,
    /// The number of answers so far, and below it the number that is not measured.
    answers: usize,
    warmup: usize,
    bytes: Vec<u8>,
    started: Instant,
    /// Requests per second, or the failure.
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

/// Runs the client. Returns requests per second; a tenth more requests warm up.
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
