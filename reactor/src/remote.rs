//! What other threads may do to a reactor.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};

use crate::context::Context;
use crate::core::Core;
use crate::error::SendErrorKind;
use crate::handler::Handler;
use crate::id::ConnectionId;

/// Wakes a poller that may be asleep, from any thread.
pub trait Wake: Send + Sync + fmt::Debug {
    /// Makes the poller's next or current wait return.
    ///
    /// # Errors
    /// What the system says; the poller may be gone.
    fn wake(&self) -> io::Result<()>;
}

/// Coalesces wake-ups: between two turns, one is enough.
#[derive(Debug)]
pub(crate) struct WakeFlag {
    pending: AtomicBool,
    stop: AtomicBool,
    /// The reactor was dropped.
    gone: AtomicBool,
    /// Time to drain in, ms, plus 1; 0 when nobody asked for it.
    drain: AtomicU64,
    waker: Arc<dyn Wake>,
}

impl WakeFlag {
    pub(crate) fn new(waker: Arc<dyn Wake>) -> Self {
        let no = || AtomicBool::new(false);
        Self { pending: no(), stop: no(), gone: no(), drain: AtomicU64::new(0), waker }
    }

    pub(crate) fn wake(&self) {
        if !self.pending.swap(true, Ordering::AcqRel) {
            self.ring();
        }
    }

    /// Wakes even if somebody has called before: the poller may have seen that call already.
    pub(crate) fn wake_again(&self) {
        self.pending.store(true, Ordering::Release);
        self.ring();
    }

    fn ring(&self) {
        if let Err(error) = self.waker.wake() {
            log::debug!("waking the reactor: {error}");
        }
    }

    /// Whether somebody called and was not heard yet.
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Whether somebody called since the last time; what they brought is to be looked at after this.
    pub(crate) fn take(&self) -> bool {
        // A plain load first: this is asked every turn, and a swap would take the cache line from the other threads.
        self.pending.load(Ordering::Relaxed) && self.pending.swap(false, Ordering::AcqRel)
    }

    fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake();
    }

    pub(crate) fn take_stop(&self) -> bool {
        self.stop.load(Ordering::Relaxed) && self.stop.swap(false, Ordering::AcqRel)
    }

    pub(crate) fn drain(&self, deadline: Duration) {
        let ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        self.drain.store(ms.saturating_add(1), Ordering::Release);
        self.wake();
    }

    pub(crate) fn take_drain(&self) -> Option<Duration> {
        if self.drain.load(Ordering::Relaxed) == 0 {
            return None;
        }
        self.drain.swap(0, Ordering::AcqRel).checked_sub(1).map(Duration::from_millis)
    }
}

/// Commands taken in one turn before the other stages get theirs.
const COMMANDS_PER_TURN: usize = 1024;

/// Why a reactor did not take something from another thread. It comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RemoteError<T> {
    /// The reactor was dropped.
    #[error("the reactor is gone")]
    Gone(T),
    /// As much as `Config::remote_queue` allows is on its way already: try again later.
    #[error("the reactor has a full queue of what other threads sent: wait, or raise remote_queue")]
    Full(T),
}

#[derive(Debug)]
enum Command<M> {
    Message(M),
    Send(ConnectionId, Vec<u8>),
}

/// A reactor, seen from other threads: clone it, send it around. Nothing here blocks, and everything is harmless when
/// the reactor is gone. A reactor that sleeps is woken once for all that comes until it looks.
pub struct Remote<M = ()> {
    flag: Arc<WakeFlag>,
    commands: Sender<Command<M>>,
    /// Commands that the reactor has not done with.
    queued: Arc<AtomicUsize>,
    limit: usize,
}

impl<M> Clone for Remote<M> {
    fn clone(&self) -> Self {
        let (flag, queued) = (Arc::clone(&self.flag), Arc::clone(&self.queued));
        Self { flag, commands: self.commands.clone(), queued, limit: self.limit }
    }
}

impl<M> fmt::Debug for Remote<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Remote({} of {} queued)", self.queued.load(Ordering::Relaxed), self.limit)
    }
}

impl<M> Remote<M> {
    /// Has [`crate::Handler::on_wake`] called with a message.
    ///
    /// # Errors
    /// The reactor is gone, or its queue is full; with the message.
    pub fn post(&self, message: M) -> Result<(), RemoteError<M>> {
        self.command(Command::Message(message)).map_err(|error| {
            error.map(|command| match command {
                Command::Message(message) => message,
                Command::Send(..) => unreachable!("what comes back is what was given"),
            })
        })
    }

    /// Sends on a connection, behind what this thread sent there before. While the connection's window is closed, it
    /// waits; it is dropped, and counted in [`crate::Stats::remote_sends_dropped`], when the connection is or goes
    /// away, or takes only shorter messages. Once it is sent, `on_send_complete` follows as for any send.
    ///
    /// # Errors
    /// The reactor is gone, or its queue is full; with the bytes.
    pub fn send(&self, conn: ConnectionId, payload: impl Into<Vec<u8>>) -> Result<(), RemoteError<Vec<u8>>> {
        self.command(Command::Send(conn, payload.into())).map_err(|error| {
            error.map(|command| match command {
                Command::Send(_, payload) => payload,
                Command::Message(_) => unreachable!("what comes back is what was given"),
            })
        })
    }

    /// Makes [`crate::Reactor::run`] return after its current turn.
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

    fn command(&self, command: Command<M>) -> Result<(), RemoteError<Command<M>>> {
        if self.queued.fetch_add(1, Ordering::Relaxed) >= self.limit {
            self.queued.fetch_sub(1, Ordering::Relaxed);
            // What a reactor has left behind makes no room any more.
            let gone = self.flag.gone.load(Ordering::Acquire);
            return Err(if gone { RemoteError::Gone(command) } else { RemoteError::Full(command) });
        }
        if let Err(error) = self.commands.send(command) {
            self.queued.fetch_sub(1, Ordering::Relaxed);
            return Err(RemoteError::Gone(error.0));
        }
        self.flag.wake();
        Ok(())
    }
}

impl<T> RemoteError<T> {
    /// What came back.
    pub fn into_inner(self) -> T {
        match self {
            Self::Gone(value) | Self::Full(value) => value,
        }
    }

    fn map<U>(self, convert: impl FnOnce(T) -> U) -> RemoteError<U> {
        match self {
            Self::Gone(value) => RemoteError::Gone(convert(value)),
            Self::Full(value) => RemoteError::Full(convert(value)),
        }
    }
}

/// The reactor's end of its [`Remote`]s.
pub(crate) struct Inbox<M> {
    remote: Remote<M>,
    commands: Receiver<Command<M>>,
    /// Sends that wait for room, in order.
    waiting: BTreeMap<ConnectionId, VecDeque<Vec<u8>>>,
    /// There may be commands.
    pub(crate) pending: bool,
}

impl<M> fmt::Debug for Inbox<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Inbox({:?}, {} connections waited for)", self.remote, self.waiting.len())
    }
}

impl<M> Drop for Inbox<M> {
    fn drop(&mut self) {
        self.remote.flag.gone.store(true, Ordering::Release);
    }
}

impl<M> Inbox<M> {
    pub(crate) fn new(flag: Arc<WakeFlag>, limit: u32) -> Self {
        let (sender, commands) = crossbeam_channel::unbounded();
        let remote = Remote { flag, commands: sender, queued: Arc::default(), limit: limit as usize };
        Self { remote, commands, waiting: BTreeMap::new(), pending: false }
    }

    pub(crate) fn remote(&self) -> Remote<M> {
        self.remote.clone()
    }

    /// Does what other threads asked for, within the turn's bound.
    pub(crate) fn serve<H: Handler<M> + ?Sized>(&mut self, core: &mut Core, handler: &mut H, progressed: &mut bool) {
        if !self.waiting.is_empty() {
            self.send_waiting(core);
        }
        if !std::mem::take(&mut self.pending) {
            return;
        }
        for _ in 0..COMMANDS_PER_TURN {
            let Ok(command) = self.commands.try_recv() else { return };
            *progressed = true;
            core.stats.remote_commands += 1;
            match command {
                Command::Message(message) => {
                    self.done();
                    handler.on_wake(&mut Context { core }, message);
                }
                Command::Send(conn, payload) => {
                    let mut queue = self.waiting.remove(&conn).unwrap_or_default();
                    let waits = !queue.is_empty();
                    queue.push_back(payload);
                    if waits || !self.pump(core, conn, &mut queue) {
                        self.waiting.insert(conn, queue);
                    }
                }
            }
        }
        self.pending = true;
    }

    fn send_waiting(&mut self, core: &mut Core) {
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.retain(|&conn, queue| !self.pump(core, conn, queue));
        self.waiting = waiting;
    }

    /// Sends what there is room for; whether that is all.
    fn pump(&self, core: &mut Core, conn: ConnectionId, queue: &mut VecDeque<Vec<u8>>) -> bool {
        while let Some(payload) = queue.front() {
            if core.must_wait(conn) {
                return false;
            }
            match core.send(conn, payload) {
                Ok(_) => {}
                Err(SendErrorKind::WouldBlock) => return false,
                Err(error) => {
                    log::debug!("{conn}: a send of {} bytes from another thread is dropped: {error}", payload.len());
                    core.stats.remote_sends_dropped += 1;
                }
            }
            queue.pop_front();
            self.done();
        }
        true
    }

    fn done(&self) {
        self.remote.queued.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Nobody;

    impl Wake for Nobody {
        fn wake(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reactor_that_goes_with_a_full_queue_is_gone() {
        let inbox = Inbox::new(Arc::new(WakeFlag::new(Arc::new(Nobody))), 2);
        let remote = inbox.remote();
        assert_eq!((remote.post(1), remote.post(2)), (Ok(()), Ok(())));
        assert_eq!(remote.post(3), Err(RemoteError::Full(3)));
        drop(inbox);
        assert_eq!((remote.post(4), remote.post(5)), (Err(RemoteError::Gone(4)), Err(RemoteError::Gone(5))));
    }
}
