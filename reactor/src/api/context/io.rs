//! File descriptors that the program registers.

use std::io;
use std::os::fd::AsFd;

use crate::driver::Driver;
use crate::id::IoId;
use crate::seam::poller::Interest;

/// The operations on file descriptors of the program, from [`Context::io`](crate::Context::io).
#[derive(Debug)]
pub struct IoContext<'a> {
    pub(super) driver: &'a mut Driver,
}

impl IoContext<'_> {
    /// Watches a file descriptor of the program, such as a socket of std or mio, a pipe or a
    /// timerfd. The reactor calls `on_io_ready` when the descriptor becomes ready; such a call may
    /// also be spurious. The descriptor must be non-blocking. Readiness is edge-triggered: in each
    /// `on_io_ready`, read or write until `WouldBlock`. If the program stops earlier, the reactor
    /// does not call `on_io_ready` again for the remaining data.
    ///
    /// The program still owns the descriptor. It must call [`IoContext::deregister`] before it
    /// closes the descriptor.
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
    ///                     cx.io().deregister(io);
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
    /// reactor.context().io().register(&socket, Interest::READABLE)?;
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
    /// The error of the system, if the descriptor is registered already, or is a regular file
    /// (`epoll`(7) does not support these). `InvalidInput` if `interest` is empty.
    pub fn register(&mut self, source: &impl AsFd, interest: Interest) -> io::Result<IoId> {
        let tag = self.driver.tag();
        let os = &mut self.driver.os;
        os.io.add(&mut *os.poller, source.as_fd(), interest).map(|key| IoId::new(tag, key))
    }

    /// Stops watching a file descriptor. The reactor does not call `on_io_ready` for the descriptor
    /// any more. Returns `true` if the descriptor was watched until now, and `false` otherwise.
    pub fn deregister(&mut self, io: IoId) -> bool {
        let Some(key) = io.key(self.driver.tag()) else { return false };
        let os = &mut self.driver.os;
        os.io.remove(&mut *os.poller, key)
    }
}
