//! A poller with calls that a test can make fail.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use rdma_reactor::{Edge, Interest, Poller, Wake};

use super::{Call, Gate};

/// A [`Poller`] that queries a [`Gate`] before it registers a descriptor and before it waits.
#[derive(Debug)]
pub struct GatedPoller<P> {
    inner: P,
    gate: Gate,
}

impl<P: Poller> GatedPoller<P> {
    /// Makes a poller that queries `gate` before calls of `inner`.
    pub const fn new(inner: P, gate: Gate) -> Self {
        Self { inner, gate }
    }
}

impl<P: Poller> Poller for GatedPoller<P> {
    fn register(&mut self, fd: RawFd, token: usize, interest: Interest) -> io::Result<()> {
        self.gate.system(Call::PollerRegister)?;
        self.inner.register(fd, token, interest)
    }
    fn deregister(&mut self, fd: RawFd) -> io::Result<()> {
        self.inner.deregister(fd)
    }
    fn wait(&mut self, timeout: Option<Duration>, edges: &mut Vec<Edge>) -> io::Result<()> {
        self.gate.system(Call::PollerWait)?;
        self.inner.wait(timeout, edges)
    }
    fn waker(&self) -> Arc<dyn Wake> {
        self.inner.waker()
    }
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}
