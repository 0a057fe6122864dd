//! The handle with which other threads post messages to a reactor, send messages on its
//! connections, and wake, stop or drain it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};

use crate::id::ConnectionId;
use crate::seam::sync::AtomicUsize;
use crate::seam::wake::WakeFlag;

/// The reason why a reactor did not accept a message or a send from another thread. It contains the rejected value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandleError<T> {
    /// The reactor was dropped.
    #[error("the reactor was dropped")]
    Gone(T),
    /// The queue is full: `Config::handle_queue` messages and sends are queued already. Try again later.
    #[error("the reactor's queue for other threads is full: wait, or raise handle_queue")]
    Full(T),
}

/// A message or a send that another thread has queued.
#[derive(Debug)]
// bound: commands
pub(crate) enum HandleCommand<M> {
    Message(M),
    Send(ConnectionId, Vec<u8>),
}

/// A handle to a reactor for other threads. A handle can be cloned and moved to another thread. No method blocks. If
/// the reactor was dropped, the methods that return a `Result` return [`HandleError::Gone`], and the other methods do
/// nothing.
///
/// A call wakes a sleeping reactor with one system call. Further calls make no system call until the reactor has
/// processed the queue. If the reactor's thread has a real-time priority, see "Real-time priorities" in [the
/// loop](crate::guide::the_loop).
///
/// ```
/// use rdma_reactor::{Config, Context, Handler, ProviderChoice, Reactor};
///
/// /// Adds up the results of other threads.
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
    /// Number of queued commands: those that the reactor has not processed yet.
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
    /// Queues a message for the program of the reactor. The reactor calls [`crate::Handler::on_wake`] with the message.
    ///
    /// # Errors
    /// The reactor was dropped, or its queue is full. The error contains the message.
    pub fn post(&self, message: M) -> Result<(), HandleError<M>> {
        self.command(HandleCommand::Message(message), self.limit).map_err(|error| {
            error.map(|command| match command {
                HandleCommand::Message(message) => message,
                HandleCommand::Send(..) => unreachable!("an error has the command that was passed"),
            })
        })
    }

    /// Queues a message for the program of the reactor, also if the queue is full. Drops the
    /// message if the reactor was dropped. The caller bounds the number of such messages.
    #[cfg(feature = "tokio")]
    pub(crate) fn post_past_limit(&self, message: M) {
        _ = self.command(HandleCommand::Message(message), usize::MAX);
    }

    /// Queues a message to send on a connection. The reactor sends the messages from one thread in
    /// the order in which the thread has queued them. A message waits until the connection is
    /// established, and until the peer's window and the send queue have room for it. After the
    /// reactor has sent it, `on_send_complete` follows as for any send.
    ///
    /// The reactor drops the message if the connection is closed, if the message is longer than the peer accepts, or if
    /// there is no memory for a large message. In these cases it increments
    /// [`crate::MessageStats::handle_sends_dropped`].
    ///
    /// ```
    /// use rdma_reactor::{ConnectionId, ReactorHandle};
    ///
    /// /// Sends a text on two connections, from another thread.
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
    /// The reactor was dropped, or its queue is full. The error contains the bytes.
    pub fn send(&self, conn: ConnectionId, payload: impl Into<Vec<u8>>) -> Result<(), HandleError<Vec<u8>>> {
        self.command(HandleCommand::Send(conn, payload.into()), self.limit).map_err(|error| {
            error.map(|command| match command {
                HandleCommand::Send(_, payload) => payload,
                HandleCommand::Message(_) => unreachable!("an error has the command that was passed"),
            })
        })
    }

    /// Makes [`crate::Reactor::run`] return after its current turn. If the program is not in a call of `run` now, its
    /// next call of `run` returns after at most one turn, which does not wait. A program that calls
    /// [`crate::Reactor::turn`] itself is not notified of the stop. Such a program uses [`ReactorHandle::drain`] and
    /// [`crate::Reactor::is_drained`] instead.
    pub fn stop(&self) {
        self.flag.stop();
    }

    /// Drains the reactor, as [`crate::Context::drain`] does. `deadline` is rounded down to whole milliseconds. Ignored
    /// if the reactor is draining already.
    pub fn drain(&self, deadline: Duration) {
        self.flag.drain(deadline);
    }

    /// Wakes the reactor if it sleeps, so that it runs a turn.
    pub fn wake(&self) {
        self.flag.wake();
    }

    fn command(&self, command: HandleCommand<M>, limit: usize) -> Result<(), HandleError<HandleCommand<M>>> {
        if self.queued.fetch_add(1, Ordering::Relaxed) >= limit {
            self.queued.fetch_sub(1, Ordering::Relaxed);
            // The queue is full. If the reactor was dropped, nothing empties the queue any more, so every later call
            // also finds the queue full. For such a call the error is `Gone`, and not `Full`.
            let gone = self.flag.is_abandoned();
            return Err(if gone { HandleError::Gone(command) } else { HandleError::Full(command) });
        }
        if crate::planted("called-before-it-is-there") {
            self.flag.wake();
        }
        if let Err(error) = self.commands.send(command) {
            self.queued.fetch_sub(1, Ordering::Relaxed);
            return Err(HandleError::Gone(error.0));
        }
        if !crate::planted("called-before-it-is-there") {
            self.flag.wake();
        }
        Ok(())
    }
}

impl<T> HandleError<T> {
    /// Returns the value that the reactor did not accept.
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

/// The receiving end of a reactor's command queue. [`ReactorHandle`]s are the sending ends of the queue.
pub(crate) struct Commands<M> {
    remote: ReactorHandle<M>,
    receiver: Receiver<HandleCommand<M>>, // bound: commands
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

    /// Returns the next queued command; `None` if the queue is empty. The commands of one thread are returned in the
    /// order in which the thread queued them.
    pub(crate) fn next(&self) -> Option<HandleCommand<M>> {
        self.receiver.try_recv().ok()
    }

    /// Notes that the reactor has processed a command, so that handles may queue another one.
    pub(crate) fn done(&self) {
        self.remote.queued.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seam::wake::NoWake;

    #[test]
    fn a_reactor_that_goes_with_a_full_queue_is_gone() {
        let commands = Commands::new(Arc::new(WakeFlag::new(Arc::new(NoWake))), 2);
        let remote = commands.handle();
        assert_eq!((remote.post(1), remote.post(2)), (Ok(()), Ok(())));
        assert_eq!(remote.post(3), Err(HandleError::Full(3)));
        #[cfg(feature = "tokio")]
        {
            remote.post_past_limit(6);
            let queued: Vec<_> = std::iter::from_fn(|| commands.next()).collect();
            assert!(matches!(queued[..], [_, _, HandleCommand::Message(6)]), "{queued:?}");
        }
        drop(commands);
        assert_eq!((remote.post(4), remote.post(5)), (Err(HandleError::Gone(4)), Err(HandleError::Gone(5))));
    }
}
