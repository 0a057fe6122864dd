//! A reactor as a task of tokio's current-thread runtime, together with another task.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::error::Error;
use std::time::Duration;

use rdma_reactor::{Handler, Reactor};
use rdma_reactor_examples::embed::{Load, Server, on_tokio};

const HEARTBEAT: Duration = Duration::from_millis(2);

/// Takes turns of a reactor until its handler reports that it is done.
async fn drive<H: Handler>(
    reactor: &mut Reactor,
    handler: &mut H,
    done: impl Fn(&H) -> bool,
) -> Result<(), Box<dyn Error>> {
    let readable = on_tokio(reactor)?;
    loop {
        let more = reactor.turn(handler, Duration::ZERO)?.more;
        if done(handler) {
            return Ok(());
        }
        if more {
            // The other tasks of the runtime run before the next turn.
            tokio::task::yield_now().await;
            continue;
        }
        let deadline = reactor.next_deadline();
        let due = async {
            match deadline {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // tokio reports readiness by edges, so the readiness is cleared before the next turn. That turn handles all events up to now.
            // Events from now on make the descriptor readable again.
            ready = readable.readable() => ready?.clear_ready(),
            () = due => {}
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let server = Server::start()?;
    let mut reactor = Load::reactor(&server)?;
    let (mut load, mut heartbeats) = (Load::default(), 0);
    let other = async {
        let mut interval = tokio::time::interval(HEARTBEAT);
        loop {
            interval.tick().await;
            heartbeats += 1;
        }
    };
    tokio::select! {
        driven = drive(&mut reactor, &mut load, |load| load.done) => driven?,
        () = other => {}
    }
    server.stop()?;
    load.report(heartbeats)
}
