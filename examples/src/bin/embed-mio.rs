//! A reactor inside a mio event loop, together with another event source.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::error::Error;
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use rdma_reactor_examples::embed::{Load, Server};

const REACTOR: Token = Token(0);
const OTHER: Token = Token(1);
const HEARTBEAT: Duration = Duration::from_millis(2);

fn main() -> Result<(), Box<dyn Error>> {
    let server = Server::start()?;
    let mut reactor = Load::reactor(&server)?;
    let mut load = Load::default();

    let mut poll = Poll::new()?;
    poll.registry().register(&mut SourceFd(&reactor.as_raw_fd()), REACTOR, Interest::READABLE)?;
    // Another source of this mio loop: a waker, which the loop itself triggers periodically.
    let other = Waker::new(poll.registry(), OTHER)?;
    let (mut heartbeat, mut heartbeats) = (Instant::now() + HEARTBEAT, 0);

    // True if the last turn has not done all of its work. `more` can start as false: the reactor already has a connect to process, so its
    // descriptor is readable and the first `poll` returns immediately.
    let mut more = false;
    let mut events = Events::with_capacity(8);
    while !load.done {
        let due = reactor.next_deadline().map_or(heartbeat, |at| at.min(heartbeat));
        let left = if more { Duration::ZERO } else { due.saturating_duration_since(Instant::now()) };
        match poll.poll(&mut events, Some(left)) {
            // A signal has ended the wait, for example when the program continues after Ctrl-Z. There are no events.
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            result => result?,
        }

        heartbeats += events.iter().filter(|event| event.token() == OTHER).count() as u64;
        let now = Instant::now();
        if now >= heartbeat {
            heartbeat = now + HEARTBEAT;
            other.wake()?;
        }
        let readable = events.iter().any(|event| event.token() == REACTOR);
        if more || readable || reactor.next_deadline().is_some_and(|at| at <= now) {
            more = reactor.turn(&mut load, Duration::ZERO)?.more;
        }
    }
    server.stop()?;
    load.report(heartbeats)
}
