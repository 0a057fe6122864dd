//! A reactor inside a program's own epoll loop. `embed-epoll` watches the reactor's descriptor level-triggered; `embed-epoll --edge`
//! watches it edge-triggered.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::error::Error;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use rdma_reactor_examples::embed::{Load, Server};

const REACTOR: u64 = 0;
const OTHER: u64 = 1;
const HEARTBEAT: Duration = Duration::from_millis(2);

fn main() -> Result<(), Box<dyn Error>> {
    let edge = match std::env::args().nth(1).as_deref() {
        None => EpollFlags::empty(),
        Some("--edge") => EpollFlags::EPOLLET,
        Some(other) => return Err(format!("{other}: the only argument is --edge").into()),
    };
    let server = Server::start()?;
    let mut reactor = Load::reactor(&server)?;
    let mut load = Load::default();

    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    epoll.add(&reactor, EpollEvent::new(EpollFlags::EPOLLIN | edge, REACTOR))?;
    // Another source of this epoll loop: an eventfd, which the loop itself triggers periodically.
    let other = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
    epoll.add(&other, EpollEvent::new(EpollFlags::EPOLLIN, OTHER))?;
    let (mut heartbeat, mut heartbeats) = (Instant::now() + HEARTBEAT, 0);

    // True if the last turn has not done all of its work. `more` can start as false: the reactor already has a connect to process, so its
    // descriptor is readable and the first `wait` returns immediately.
    let mut more = false;
    while !load.done {
        let due = reactor.next_deadline().map_or(heartbeat, |at| at.min(heartbeat));
        let left = if more { Duration::ZERO } else { due.saturating_duration_since(Instant::now()) };
        let mut events = [EpollEvent::empty(); 8];
        // epoll takes the timeout in milliseconds. The remaining time is rounded up. If it were rounded down, `wait` would repeatedly
        // return just before the deadline.
        let timeout = EpollTimeout::try_from(left + Duration::from_micros(999))?;
        let count = match epoll.wait(&mut events, timeout) {
            // A signal has ended the wait, for example when the program continues after Ctrl-Z.
            Err(Errno::EINTR) => 0,
            result => result?,
        };
        let events = &events[..count];

        if events.iter().any(|event| event.data() == OTHER) {
            other.read()?;
            heartbeats += 1;
        }
        let now = Instant::now();
        if now >= heartbeat {
            heartbeat = now + HEARTBEAT;
            other.write(1)?;
        }
        let readable = events.iter().any(|event| event.data() == REACTOR);
        if more || readable || reactor.next_deadline().is_some_and(|at| at <= now) {
            more = reactor.turn(&mut load, Duration::ZERO)?.more;
        }
    }
    server.stop()?;
    load.report(heartbeats)
}
