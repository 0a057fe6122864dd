//! A reactor as an event source of a calloop event loop, together with a timer of calloop.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::error::Error;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use calloop::generic::Generic;
use calloop::timer::{TimeoutAction, Timer};
use calloop::{EventLoop, Interest, Mode, PostAction};
use rdma_reactor::{Reactor, Turn};
use rdma_reactor_examples::embed::{Load, Server};

const HEARTBEAT: Duration = Duration::from_millis(2);

/// The state that calloop passes to every callback.
struct App {
    reactor: Reactor,
    load: Load,
    turn: Turn,
    heartbeats: u64,
}

impl App {
    fn turn(&mut self) -> std::io::Result<()> {
        self.turn = self.reactor.turn(&mut self.load, Duration::ZERO).map_err(std::io::Error::other)?;
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let server = Server::start()?;
    let reactor = Load::reactor(&server)?;
    let mut app = App { reactor, load: Load::default(), turn: Turn::default(), heartbeats: 0 };

    let mut event_loop: EventLoop<'_, App> = EventLoop::try_new()?;
    // A `Generic` source owns its descriptor, but the app owns the reactor. So the source gets a duplicate of the reactor's descriptor.
    let descriptor = app.reactor.as_fd().try_clone_to_owned()?;
    let source = Generic::new(descriptor, Interest::READ, Mode::Level);
    event_loop.handle().insert_source(source, |_, _, app: &mut App| {
        app.turn()?;
        Ok(PostAction::Continue)
    })?;
    event_loop.handle().insert_source(Timer::from_duration(HEARTBEAT), |_, (), app: &mut App| {
        app.heartbeats += 1;
        TimeoutAction::ToDuration(HEARTBEAT)
    })?;

    while !app.load.done {
        let deadline = app.reactor.next_deadline();
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        // If the last turn has not done all of its work, the reactor's descriptor is readable, so `dispatch` returns immediately.
        event_loop.dispatch(left, &mut app)?;
        if deadline.is_some_and(|at| at <= Instant::now()) {
            app.turn()?;
        }
    }
    server.stop()?;
    app.load.report(app.heartbeats)
}
