//! What other threads may do to a reactor.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};

use crate::id::ConnectionId;
use crate::seam::sync::AtomicUsize;
use crate::seam::wake::WakeFlag;

/// Why a reactor did not take something from another thread. It comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandleError<T> {
    /// The reactor was dropped.
    #[error("the reactor is gone")]
    Gone(T),
    /// As much as `Config::handle_queue` allows is on its way already: try again later.
    #[error("the reactor has a full queue of what other threads sent: wait, or raise handle_queue")]
    Full(T),
}

/// Something that another thread asks for.
#[derive(Debug)]
pub(crate) enum HandleCommand<M> {
    Message(M),
    Send(ConnectionId, Vec<u8>),
}

/// A reactor, seen from other threads: clone it, send it around. Nothing here blocks, and everything is harmless when
/// the reactor is gone. A reactor that sleeps is woken once for all that comes until it looks. Where the reactor has a real-time
/// priority, see "Real-time priorities" in [the loop](crate::guide::the_loop).
///
/// ```
/// use rdma_reactor::{Config, Context, Handler, ProviderChoice, Reactor};
///
/// /// Adds up what other threads have worked out.
/// struct Sum(u64);
///
/// impl Handler<u64> for Sum {
///     fn on_wake(&mut self, cx: &mut Context<'_>, part: u64) {
///         self.0 += part;
///         if self.0 == 55 {
///             cx.stop();
///         }
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut reactor = Reactor::with_messages(Config::default().provider(ProviderChoice::Iwarp))?;
/// let remote = reactor.handle();
/// let worker = std::thread::spawn(move || (1..=10).try_for_each(|part| remote.post(part)));
/// reactor.run(&mut Sum(0))?;
/// worker.join().expect("a worker")?;
/// # Ok(())
/// # }
/// ```
pub struct ReactorHandle<M = ()> {
    flag: Arc<WakeFlag>,
    commands: Sender<HandleCommand<M>>,
    /// Commands that the reactor has not done with.
    queued: Arc<AtomicUsize>,
    limit: usize,
}

impl<M> Clone for ReactorHandle<M> {
    fn clone(&self) -> Self {
        let (flag, queued) = (Arc::clone(&self.flag), Arc::clone(&self.queued));
        Self { flag, commands: self.commands.clone(), queued, limit: self.limit }
    }
}

impl<M> fmt::Debug for ReactorHandle<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReactorHandle({} of {} queued)", self.queued.load(Ordering::Relaxed), self.limit)
    }
}

impl<M> ReactorHandle<M> {
    /// Has [`crate::Handler::on_wake`] called with a message.
    ///
    /// # Errors
    /// The reactor is gone, or its queue is full; with the message.
    pub fn post(&self, message: M) -> Result<(), HandleError<M>> {
        self.command(HandleCommand::Message(message)).map_err(|error| {
            error.map(|command| match command {
                HandleCommand::Message(message) => message,
                HandleCommand::Send(..) => unreachable!("what comes back is what was given"),
            })
        })
    }

    /// Sends on a connection, behind what this thread sent there before. While the connection's window is closed, it
    /// waits; it is dropped, and counted in [`crate::MessageStats::handle_sends_dropped`], when the connection is or goes
    /// away, or takes only shorter messages. Once it is sent, `on_send_complete` follows as for any send.
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, ReactorHandle};
    ///
    /// /// Sends on two connections of a reactor, from another thread.
    /// fn broadcast(remote: &ReactorHandle, to: [ConnectionId; 2], text: &str) {
    ///     for conn in to {
    ///         if let Err(error) = remote.send(conn, text) {
    ///             eprintln!("{conn}: {error}");
    ///         }
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// The reactor is gone, or its queue is full; with the bytes.
    pub fn send(&self, conn: ConnectionId, payload: impl Into<Vec<u8>>) -> Result<(), HandleError<Vec<u8>>> {
        self.command(HandleCommand::Send(conn, payload.into())).map_err(|error| {
            error.map(|command| match command {
                HandleCommand::Send(_, payload) => payload,
                HandleCommand::Message(_) => unreachable!("what comes back is what was given"),
            })
        })
    }

    /// Makes [`crate::Reactor::run`] return after its current turn, or the next `run` at once. A program that calls
    /// [`crate::Reactor::turn`] is not told: it drains, see [`ReactorHandle::drain`], and asks [`crate::Reactor::is_drained`].
    pub fn stop(&self) {
        self.flag.stop();
    }

    /// Drains it, see [`crate::Context::drain`]. Ignored while it drains already.
    pub fn drain(&self, deadline: Duration) {
        self.flag.drain(deadline);
    }

    /// Makes a sleeping reactor take a turn.
    pub fn wake(&self) {
        self.flag.wake();
    }

    fn command(&self, command: HandleCommand<M>) -> Result<(), HandleError<HandleCommand<M>>> {
        if self.queued.fetch_add(1, Ordering::Relaxed) >= self.limit {
            self.queued.fetch_sub(1, Ordering::Relaxed);
            // What a reactor has left behind makes no room any more.
            let gone = self.flag.is_abandoned();
            return Err(if gone { HandleError::Gone(command) } else { HandleError::Full(command) });
        }
        #[cfg(planted = "called-before-it-is-there")]
        self.flag.wake();
        if let Err(error) = self.commands.send(command) {
            self.queued.fetch_sub(1, Ordering::Relaxed);
            return Err(HandleError::Gone(error.0));
        }
        #[cfg(not(planted = "called-before-it-is-there"))]
        self.flag.wake();
        Ok(())
    }
}

impl<T> HandleError<T> {
    /// What came back.
    pub fn into_inner(self) -> T {
        match self {
            Self::Gone(value) | Self::Full(value) => value,
        }
    }

    fn map<U>(self, convert: impl FnOnce(T) -> U) -> HandleError<U> {
        match self {
            Self::Gone(value) => HandleError::Gone(convert(value)),
            Self::Full(value) => HandleError::Full(convert(value)),
        }
    }
}

/// The reactor's end of its [`ReactorHandle`]s.
pub(crate) struct Commands<M> {
    remote: ReactorHandle<M>,
    receiver: Receiver<HandleCommand<M>>,
}

impl<M> fmt::Debug for Commands<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Commands({:?})", self.remote)
    }
}

impl<M> Drop for Commands<M> {
    fn drop(&mut self) {
        self.remote.flag.abandon();
    }
}

impl<M> Commands<M> {
    pub(crate) fn new(flag: Arc<WakeFlag>, limit: u32) -> Self {
        let (sender, receiver) = crossbeam_channel::unbounded();
        Self {
            remote: ReactorHandle {
                flag,
                commands: sender,
                queued: Arc::new(AtomicUsize::new(0)),
                limit: limit as usize,
            },
            receiver,
        }
    }

    pub(crate) fn handle(&self) -> ReactorHandle<M> {
        self.remote.clone()
    }

    /// The next command, in each thread's order.
    pub(crate) fn next(&self) -> Option<HandleCommand<M>> {
        self.receiver.try_recv().ok()
    }

    /// The reactor has done with a command: there is room for another.
    pub(crate) fn done(&self) {
        self.remote.queued.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seam::wake::Wake;
    use std::io;

    #[derive(Debug)]
    struct Nobody;

    impl Wake for Nobody {
        fn wake(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reactor_that_goes_with_a_full_queue_is_gone() {
        let commands = Commands::new(Arc::new(WakeFlag::new(Arc::new(Nobody))), 2);
        let remote = commands.handle();
        assert_eq!((remote.post(1), remote.post(2)), (Ok(()), Ok(())));
        assert_eq!(remote.post(3), Err(HandleError::Full(3)));
        drop(commands);
        assert_eq!((remote.post(4), remote.post(5)), (Err(HandleError::Gone(4)), Err(HandleError::Gone(5))));
    }
}
