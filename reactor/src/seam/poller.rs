//! The traits for readiness and time, the type of a source of randomness, and their implementations on the operating system.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Token};
pub use rdma_transport_embedded::iwarp::Entropy;

use super::wake::Wake;

bitflags::bitflags! {
    /// The kinds of readiness to watch a descriptor for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Interest: u8 {
        /// Data can be read from the descriptor, a connection can be accepted, or the end of the stream has been reached.
        const READABLE = 1;
        /// The descriptor can be written to, or a connect has ended.
        const WRITABLE = 2;
    }
}

/// The readiness of a descriptor. At the end of a stream, and after an error, `readable` and `writable` are also set. The next read or
/// write shows whether the stream has ended or an error has occurred.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Readiness {
    /// The descriptor is readable: read or accept until `WouldBlock`.
    pub readable: bool,
    /// The descriptor is writable: write until `WouldBlock`.
    pub writable: bool,
    /// The other end has closed the stream, or an error has occurred. Bytes that have arrived can still be read. No more bytes will arrive.
    pub closed: bool,
}

impl Readiness {
    /// Creates a readiness from the three values.
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

/// An edge: the event that a descriptor has become ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The token that the descriptor was registered with.
    pub token: usize,
    /// The readiness of the descriptor.
    pub readiness: Readiness,
}

/// Edge-triggered readiness of a few descriptors (EPOLLET, `epoll`(7)).
pub trait Poller: Send + fmt::Debug {
    /// Watches a descriptor that is not watched yet. The edges of the descriptor are reported with `token`.
    ///
    /// # Errors
    /// The system's error; `InvalidInput` if `interest` is empty.
    fn register(&mut self, fd: RawFd, token: usize, interest: Interest) -> io::Result<()>;

    /// Stops watching a descriptor.
    ///
    /// # Errors
    /// The system's error.
    fn deregister(&mut self, fd: RawFd) -> io::Result<()>;

    /// Waits for edges and appends them to `edges`. `timeout` is the longest time to wait; `None` means no limit. The call may return early
    /// and without edges.
    ///
    /// # Errors
    /// The system's error; an interrupted wait is no error.
    fn wait(&mut self, timeout: Option<Duration>, edges: &mut Vec<Edge>) -> io::Result<()>;

    /// Returns the waker that other threads use to end a wait of this poller.
    fn waker(&self) -> Arc<dyn Wake>;

    /// Returns a descriptor that becomes readable when an edge is pending, for use in an outer event loop.
    fn as_fd(&self) -> BorrowedFd<'_>;
}

/// A monotonic clock.
pub trait Clock: Send + fmt::Debug {
    /// Returns the current time, which never runs backwards.
    fn now(&mut self) -> Instant;
}

/// The token of the waker. Descriptors must not be registered with this token.
const WAKE: Token = Token(usize::MAX);

/// The implementation of [`Poller`] with the crate mio.
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
    /// Creates a poller with one epoll descriptor and one eventfd.
    ///
    /// # Errors
    /// The system's error, usually because the limit on open descriptors has been reached.
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

/// Returns a source of randomness that reads from the operating system.
///
/// # Panics
/// Panics if the system provides no randomness, which may happen very early at boot. Without randomness, values such as keys would be
/// predictable.
#[allow(clippy::disallowed_methods, reason = "the one place that reads randomness")]
pub fn system_entropy() -> Entropy {
    Box::new(|bytes| getrandom::fill(bytes).expect("the system provides randomness"))
}

/// Yields the processor to other runnable threads.
pub(crate) fn give_way() {
    std::thread::yield_now();
}
