//! A reactor inside a loop on io_uring. `embed-io-uring` polls the reactor's descriptor once for
//! each turn; `embed-io-uring --multishot` has one poll that reports each edge.
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::error::Error;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use io_uring::squeue::Entry;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode};
use nix::errno::Errno;
use nix::poll::PollFlags;
use nix::sys::eventfd::{EfdFlags, EventFd};
use rdma_reactor_examples::embed::{Load, Server};

const REACTOR: u64 = 0;
const OTHER: u64 = 1;
const HEARTBEAT: Duration = Duration::from_millis(2);

fn main() -> Result<(), Box<dyn Error>> {
    let multishot = match std::env::args().nth(1).as_deref() {
        None => false,
        Some("--multishot") => true,
        Some(other) => return Err(format!("{other}: the only argument is --multishot").into()),
    };
    let server = Server::start()?;
    let mut reactor = Load::reactor(&server)?;
    let mut load = Load::default();

    let mut ring = IoUring::new(8).map_err(|error| {
        format!("io_uring is not available: {error}; containers often forbid it (--security-opt seccomp=unconfined)")
    })?;
    // Another source of this loop: an eventfd, which the loop itself triggers periodically.
    let other = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
    let readable = PollFlags::POLLIN.bits() as u32;
    let poll = |fd: &dyn AsFd| opcode::PollAdd::new(Fd(fd.as_fd().as_raw_fd()), readable);
    let poll_reactor = poll(&reactor).multi(multishot).build().user_data(REACTOR);
    let poll_other = poll(&other).build().user_data(OTHER);
    post(&mut ring, &poll_reactor)?;
    post(&mut ring, &poll_other)?;
    let (mut heartbeat, mut heartbeats) = (Instant::now() + HEARTBEAT, 0);

    // True if the last turn has not done all of its work.
    let mut more = false;
    while !load.done {
        let due = reactor.next_deadline().map_or(heartbeat, |at| at.min(heartbeat));
        let left = if more { Duration::ZERO } else { due.saturating_duration_since(Instant::now()) };
        match ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&Timespec::from(left))) {
            // The deadline has passed, or a signal has ended the wait.
            Err(error) if [Errno::ETIME as i32, Errno::EINTR as i32].map(Some).contains(&error.raw_os_error()) => {}
            result => drop(result?),
        }
        let completions: Vec<_> = ring.completion().collect();
        let mut readable = false;
        for completion in completions {
            if completion.result() < 0 {
                return Err(std::io::Error::from_raw_os_error(-completion.result()).into());
            }
            match completion.user_data() {
                REACTOR => {
                    readable = true;
                    if !cqueue::more(completion.flags()) {
                        post(&mut ring, &poll_reactor)?;
                    }
                }
                _ => {
                    other.read()?;
                    heartbeats += 1;
                    post(&mut ring, &poll_other)?;
                }
            }
        }
        let now = Instant::now();
        if now >= heartbeat {
            heartbeat = now + HEARTBEAT;
            other.write(1)?;
        }
        if more || readable || reactor.next_deadline().is_some_and(|at| at <= now) {
            more = reactor.turn(&mut load, Duration::ZERO)?.more;
        }
    }
    server.stop()?;
    load.report(heartbeats)
}

/// Adds an operation to the submission queue. The next wait submits it.
fn post(ring: &mut IoUring, operation: &Entry) -> Result<(), Box<dyn Error>> {
    // SAFETY: the operations are polls, which use no memory of this process.
    Ok(unsafe { ring.submission().push(operation) }?)
}
