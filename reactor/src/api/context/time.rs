//! Timers, and file descriptors that the program registers.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use super::Context;
use crate::driver::TimerPurpose;
use crate::id::{IoId, TimerId};
use crate::seam::poller::Interest;
use crate::seam::timer::FOREVER;

impl Context<'_> {
    /// Sets a timer. The reactor calls `on_timer` once, with `token`, when `delay` has passed. The delay begins with
    /// this call, and not with the turn in which the current callback runs. While the reactor sleeps, the resolution is
    /// about a millisecond.
    ///
    /// A timer that `on_timer` sets expires in a later turn, even if the delay is zero. So a program can do long work in
    /// slices, one for each timer: the reactor serves its connections between them.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use rdma_reactor::{Config, Context, Handler, ProviderChoice, Reactor, TimerId};
    ///
    /// /// Counts three ticks, a millisecond apart.
    /// struct Ticks(u64);
    ///
    /// impl Handler for Ticks {
    ///     fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, token: u64) {
    ///         self.0 += 1;
    ///         if token == 3 {
    ///             cx.stop();
    ///         } else {
    ///             cx.set_timer(Duration::from_millis(1), token + 1);
    ///         }
    ///     }
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (mut reactor, mut ticks) = (Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?, Ticks(0));
    /// reactor.context().set_timer(Duration::from_millis(1), 1);
    /// reactor.run(&mut ticks)?;
    /// assert_eq!(ticks.0, 3);
    /// # Ok(())
    /// # }
    /// ```
    pub fn set_timer(&mut self, delay: Duration, token: u64) -> TimerId {
        self.driver.look_at_clock();
        let now = self.driver.now();
        // If the sum overflows, because the delay is very long, the timer expires in `FOREVER` (30 years) instead.
        let at = now.checked_add(delay).unwrap_or(now + FOREVER);
        let key = self.driver.timers_mut().insert(at, TimerPurpose::Program(token));
        // A program that embeds the reactor in its own loop may be waiting for a later deadline than that of the new
        // timer. `ring` wakes the program, so that it queries the reactor's next deadline again.
        self.driver.ring();
        TimerId::new(self.driver.tag(), key)
    }

    /// Cancels a timer. Returns `true` if it was pending. Returns `false` if it has expired, was cancelled before, or
    /// belongs to another reactor.
    pub fn cancel_timer(&mut self, timer: TimerId) -> bool {
        let Some(key) = timer.key(self.driver.tag()) else { return false };
        self.driver.timers_mut().cancel(key).is_some()
    }

    /// Watches a file descriptor of the program, such as a socket of std or mio, a pipe or a timerfd. The reactor calls
    /// `on_io_ready` when the descriptor becomes ready; such a call may also be spurious. The descriptor must be
    /// non-blocking. Readiness is edge-triggered: in each `on_io_ready`, read or write until `WouldBlock`. If the
    /// program stops earlier, the reactor does not call `on_io_ready` again for the remaining data.
    ///
    /// The program still owns the descriptor. It must call [`Context::deregister_io`] before it closes the descriptor.
    ///
    /// ```
    /// use std::io::{ErrorKind, Read, Write};
    /// use std::os::unix::net::UnixStream;
    ///
    /// use rdma_reactor::{Config, Context, Handler, Interest, IoId, ProviderChoice, Reactor, Readiness};
    ///
    /// /// Reads from a socket beside its connections.
    /// struct Program {
    ///     socket: UnixStream,
    ///     read: Vec<u8>,
    /// }
    ///
    /// impl Handler for Program {
    ///     fn on_io_ready(&mut self, cx: &mut Context<'_>, io: IoId, _: Readiness) {
    ///         let mut bytes = [0; 16];
    ///         loop {
    ///             match self.socket.read(&mut bytes) {
    ///                 Ok(0) => {
    ///                     cx.deregister_io(io);
    ///                     return cx.stop();
    ///                 }
    ///                 Ok(len) => self.read.extend_from_slice(&bytes[..len]),
    ///                 Err(error) if error.kind() == ErrorKind::WouldBlock => return,
    ///                 Err(error) => panic!("{error}"),
    ///             }
    ///         }
    ///     }
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (mut other, socket) = UnixStream::pair()?;
    /// socket.set_nonblocking(true)?;
    /// let mut reactor = Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?;
    /// reactor.context().register_io(&socket, Interest::READABLE)?;
    /// other.write_all(b"from outside")?;
    /// drop(other);
    /// let mut program = Program { socket, read: Vec::new() };
    /// reactor.run(&mut program)?;
    /// assert_eq!(program.read, b"from outside");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The error of the system, if the descriptor is registered already, or is a regular file (`epoll`(7) does not
    /// support these). `InvalidInput` if `interest` is empty.
    pub fn register_io(&mut self, source: &impl AsFd, interest: Interest) -> io::Result<IoId> {
        let tag = self.driver.tag();
        let os = self.driver.os_mut();
        os.io.add(&mut *os.poller, source.as_fd(), interest).map(|key| IoId::new(tag, key))
    }

    /// Stops watching a file descriptor. The reactor does not call `on_io_ready` for the descriptor any more. Returns
    /// `true` if the descriptor was watched until now, and `false` otherwise.
    pub fn deregister_io(&mut self, io: IoId) -> bool {
        let Some(key) = io.key(self.driver.tag()) else { return false };
        let os = self.driver.os_mut();
        os.io.remove(&mut *os.poller, key)
    }
}
