//! Traits for readiness, the clock and randomness, and their implementations on the operating system.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Token};

use super::wake::Wake;

bitflags::bitflags! {
    /// The readiness to watch a descriptor for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Interest: u8 {
        /// There is something to read or accept, or the end.
        const READABLE = 1;
        /// There is room to write, or a connect has ended.
        const WRITABLE = 2;
    }
}

/// News on a descriptor. An end or an error counts as readable and writable, too; the read or write that follows shows
/// which it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Readiness {
    /// Read or accept until `WouldBlock`.
    pub readable: bool,
    /// Write until `WouldBlock`.
    pub writable: bool,
    /// The other end has closed, or there is an error. The bytes that are there can be read, and no more come.
    pub closed: bool,
}

impl Readiness {
    /// Makes a readiness of the three values.
    ///
    /// ```
    /// use rdma_reactor::Readiness;
    ///
    /// let readiness = Readiness::new(true, false, false);
    /// assert!(readiness.readable && !readiness.closed);
    /// ```
    #[must_use]
    pub const fn new(readable: bool, writable: bool, closed: bool) -> Self {
        Self { readable, writable, closed }
    }
}

/// An edge: something is new on a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The token that the descriptor was registered with.
    pub token: usize,
    /// The news.
    pub readiness: Readiness,
}

/// Edge-triggered readiness of a few descriptors (EPOLLET, `epoll`(7)).
pub trait Poller: Send + fmt::Debug {
    /// Watches a descriptor that is not watched yet; its edges are reported as `token`.
    ///
    /// # Errors
    /// The system's error; `InvalidInput` when `interest` is empty.
    fn register(&mut self, fd: RawFd, token: usize, interest: Interest) -> io::Result<()>;

    /// Stops watching a descriptor.
    ///
    /// # Errors
    /// The system's error.
    fn deregister(&mut self, fd: RawFd) -> io::Result<()>;

    /// Waits for edges, at most `timeout` (`None`: as long as it takes), and appends them. The call may return early
    /// and without edges.
    ///
    /// # Errors
    /// The system's error; an interrupted wait is no error.
    fn wait(&mut self, timeout: Option<Duration>, edges: &mut Vec<Edge>) -> io::Result<()>;

    /// The waker of this poller, for other threads.
    fn waker(&self) -> Arc<dyn Wake>;

    /// The descriptor of the poller, to nest it in an outer loop.
    fn as_fd(&self) -> BorrowedFd<'_>;
}

/// Monotonic time.
pub trait Clock: Send + fmt::Debug {
    /// Returns the current time, which never runs backwards.
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
    /// Makes a poller with one epoll descriptor and one eventfd.
    ///
    /// # Errors
    /// The system's error, usually that there are no descriptors left.
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
/// Panics when the system has no randomness, which may happen very early at boot. There is no safe way on then.
#[allow(clippy::disallowed_methods, reason = "the one place that reads randomness")]
pub fn system_entropy() -> Entropy {
    Box::new(|bytes| getrandom::fill(bytes).expect("the system's source of randomness"))
}

/// Lets other threads that are ready have the processor of this one.
pub(crate) fn give_way() {
    std::thread::yield_now();
}
