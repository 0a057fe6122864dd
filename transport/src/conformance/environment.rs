//! The clock and the poller of a case's providers.

use std::fmt;
use std::os::fd::RawFd;
use std::time::Instant;

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};

/// A clock and a poller for the providers of a case. They are those of the system ([`System`]), or
/// virtual ones.
pub trait Environment: fmt::Debug {
    /// Returns the current time, which never runs backwards.
    fn now(&mut self) -> Instant;

    /// Watches a descriptor of the provider of `side` for edges. The watch ends when the environment is dropped.
    fn watch(&mut self, side: usize, descriptor: RawFd);

    /// Waits until a watched descriptor has an edge, or until the time `until`. Appends the side of each edge to
    /// `edges`. May return early.
    fn wait(&mut self, until: Instant, edges: &mut Vec<usize>);
}

/// The clock of the system, and an edge-triggered poller (`epoll`(7)).
#[derive(Debug)]
pub struct System {
    poll: Poll,
    events: Events,
}

impl System {
    /// Makes a clock and a poller of the system.
    ///
    /// # Panics
    /// If the system has no descriptors left.
    #[must_use]
    #[allow(clippy::new_without_default, reason = "it takes a descriptor")]
    pub fn new() -> Self {
        Self { poll: Poll::new().expect("a descriptor"), events: Events::with_capacity(64) }
    }
}

impl Environment for System {
    #[allow(clippy::disallowed_methods, reason = "this is the clock")]
    fn now(&mut self) -> Instant {
        Instant::now()
    }

    fn watch(&mut self, side: usize, descriptor: RawFd) {
        let mut source = SourceFd(&descriptor);
        self.poll.registry().register(&mut source, Token(side), Interest::READABLE).expect("a descriptor to poll");
    }

    fn wait(&mut self, until: Instant, edges: &mut Vec<usize>) {
        let left = until.saturating_duration_since(self.now());
        match self.poll.poll(&mut self.events, Some(left)) {
            Ok(()) => edges.extend(self.events.iter().map(|event| event.token().0)),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => panic!("cannot poll: {error}"),
        }
    }
}
