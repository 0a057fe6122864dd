//! Readiness, the clock and randomness, as traits and as the operating system has them.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Token};

use super::wake::Wake;

bitflags::bitflags! {
    /// What to watch a descriptor for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Interest: u8 {
        /// Something to read or accept, or the end.
        const READABLE = 1;
        /// Room to write, or the end of a connect.
        const WRITABLE = 2;
    }
}

/// What is new on a descriptor. An end or an error counts as readable and writable, too: the read or write that follows
/// says which it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Readiness {
    /// Read or accept until `WouldBlock`.
    pub readable: bool,
    /// Write until `WouldBlock`.
    pub writable: bool,
    /// The other end has closed, or there is an error: what is there can be read, no more comes.
    pub closed: bool,
}

impl Readiness {
    /// A readiness with these three.
    #[must_use]
    pub const fn new(readable: bool, writable: bool, closed: bool) -> Self {
        Self { readable, writable, closed }
    }
}

/// Something is new on a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    /// What the descriptor was registered as.
    pub token: usize,
    /// What is new.
    pub readiness: Readiness,
}

/// Edge-triggered readiness of a few descriptors (EPOLLET, `epoll`(7)).
pub trait Poller: Send + fmt::Debug {
    /// Watches a descriptor that is not watched yet; its edges are reported as `token`.
    ///
    /// # Errors
    /// What the system says; `InvalidInput` when `interest` is empty.
    fn register(&mut self, fd: RawFd, token: usize, interest: Interest) -> io::Result<()>;

    /// Stops watching.
    ///
    /// # Errors
    /// What the system says.
    fn deregister(&mut self, fd: RawFd) -> io::Result<()>;

    /// Waits for edges, at most `timeout` (`None`: as long as it takes), and appends them. May return early and
    /// with nothing.
    ///
    /// # Errors
    /// What the system says; an interrupted wait is no error.
    fn wait(&mut self, timeout: Option<Duration>, edges: &mut Vec<Edge>) -> io::Result<()>;

    /// What wakes this poller from other threads.
    fn waker(&self) -> Arc<dyn Wake>;

    /// The descriptor to nest in an outer loop.
    fn as_fd(&self) -> BorrowedFd<'_>;
}

/// Monotonic time.
pub trait Clock: Send + fmt::Debug {
    /// Now. Never runs backwards.
    fn now(&mut self) -> Instant;
}

/// Fills a slice with unpredictable bytes.
pub type Entropy = Box<dyn FnMut(&mut [u8]) + Send>;

/// The token of the waker; `register` is never called with it.
const WAKE: Token = Token(usize::MAX);

/// [`Poller`] on mio.
#[derive(Debug)]
pub struct MioPoller {
    poll: mio::Poll,
    events: Events,
    waker: Arc<MioWaker>,
}

#[derive(Debug)]
struct MioWaker(mio::Waker);

impl Wake for MioWaker {
    fn wake(&self) -> io::Result<()> {
        self.0.wake()
    }
}

impl MioPoller {
    /// A poller with one epoll descriptor and one eventfd.
    ///
    /// # Errors
    /// What the system says; usually that there are no descriptors left.
    pub fn new() -> io::Result<Self> {
        let poll = mio::Poll::new()?;
        let waker = Arc::new(MioWaker(mio::Waker::new(poll.registry(), WAKE)?));
        Ok(Self { poll, events: Events::with_capacity(64), waker })
    }
}

impl Poller for MioPoller {
    fn register(&mut self, fd: RawFd, token: usize, interest: Interest) -> io::Result<()> {
        let readable = interest.contains(Interest::READABLE).then_some(mio::Interest::READABLE);
        let writable = interest.contains(Interest::WRITABLE).then_some(mio::Interest::WRITABLE);
        let both = readable.zip(writable).map(|(readable, writable)| readable | writable);
        let interest = both.or(readable).or(writable).ok_or(io::ErrorKind::InvalidInput)?;
        self.poll.registry().register(&mut SourceFd(&fd), Token(token), interest)
    }

    fn deregister(&mut self, fd: RawFd) -> io::Result<()> {
        self.poll.registry().deregister(&mut SourceFd(&fd))
    }

    fn wait(&mut self, timeout: Option<Duration>, edges: &mut Vec<Edge>) -> io::Result<()> {
        match self.poll.poll(&mut self.events, timeout) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            other => other?,
        }
        edges.extend(self.events.iter().filter(|event| event.token() != WAKE).map(|event| {
            let closed = event.is_read_closed() || event.is_write_closed() || event.is_error();
            let readiness = Readiness::new(event.is_readable() || closed, event.is_writable() || closed, closed);
            Edge { token: event.token().0, readiness }
        }));
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::clone(&self.waker) as Arc<dyn Wake>
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poll.registry().as_fd()
    }
}

/// The system's monotonic clock.
#[derive(Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[allow(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    fn now(&mut self) -> Instant {
        Instant::now()
    }
}

/// The system's source of randomness.
///
/// # Panics
/// When the system has none, as it may very early at boot: there is no safe way on.
#[allow(clippy::disallowed_methods, reason = "the one place that reads randomness")]
pub fn system_entropy() -> Entropy {
    Box::new(|bytes| getrandom::fill(bytes).expect("the system's source of randomness"))
}
