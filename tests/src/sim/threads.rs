//! What other threads say to the reactors, as far as one thread can tell: in the middle of turns, in callbacks, and
//! while everybody sleeps.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdma_reactor::{Remote, RemoteError};

/// One thing that was said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said {
    /// By which thread.
    pub thread: usize,
    /// How many that thread had said before, to the same reactor.
    pub nth: u64,
}

#[derive(Debug)]
struct Listener {
    remote: Remote<Said>,
    /// What may be on its way at once.
    limit: u64,
    gone: bool,
    /// By thread: said, and heard.
    said: BTreeMap<usize, (u64, u64)>,
}

impl Listener {
    fn unheard(&self) -> u64 {
        self.said.values().map(|(said, heard)| said - heard).sum()
    }
}

/// The other threads, and the books of what they have said.
#[derive(Clone, Debug, Default)]
pub struct Threads(Arc<Mutex<Vec<Listener>>>);

impl Threads {
    fn listeners(&self) -> MutexGuard<'_, Vec<Listener>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more reactor, the next by number.
    pub fn listen(&self, remote: Remote<Said>, limit: u32) {
        self.listeners().push(Listener { remote, limit: limit.into(), gone: false, said: BTreeMap::new() });
    }

    /// A thread says something to a node.
    ///
    /// # Errors
    /// What came of it, if it should not have.
    pub fn say(&self, node: usize, thread: usize) -> Result<(), String> {
        let mut listeners = self.listeners();
        let listener = &mut listeners[node];
        let unheard = listener.unheard();
        let (said, _) = listener.said.entry(thread).or_default();
        let message = Said { thread, nth: *said };
        let result = listener.remote.post(message);
        let kept = match result {
            Ok(()) => !listener.gone && unheard < listener.limit,
            Err(RemoteError::Full(back)) => !listener.gone && unheard == listener.limit && back == message,
            Err(RemoteError::Gone(back)) => listener.gone && back == message,
        };
        *said += u64::from(result.is_ok());
        if listener.gone {
            // Harmless, all of it.
            listener.remote.wake();
            listener.remote.stop();
        }
        if kept { Ok(()) } else { Err(format!("said to node{node}, {unheard} unheard: {result:?}")) }
    }

    /// A node has heard something; whether it was the next of its thread.
    #[must_use]
    pub fn heard(&self, node: usize, said: Said) -> bool {
        let mut listeners = self.listeners();
        let (all, heard) = listeners[node].said.entry(said.thread).or_default();
        let kept = *heard == said.nth && said.nth < *all;
        *heard += 1;
        kept
    }

    /// How much a node that is there has not heard yet.
    #[must_use]
    pub fn unheard(&self, node: usize) -> u64 {
        let listeners = self.listeners();
        if listeners[node].gone { 0 } else { listeners[node].unheard() }
    }

    /// A node's reactor was dropped.
    pub fn gone(&self, node: usize) {
        self.listeners()[node].gone = true;
    }
}
