//! Simulated other threads, which send messages to reactors. In reality, everything runs in one thread. So the simulation chooses when a
//! message is sent: during turns, in callbacks, or while all nodes sleep.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdma_reactor::{HandleError, ReactorHandle};

/// A message of a simulated thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said {
    /// The number of the thread that has sent the message.
    pub thread: usize,
    /// The number of earlier messages of this thread to the same reactor.
    pub nth: u64,
}

#[derive(Debug)]
struct Listener {
    remote: ReactorHandle<Said>,
    /// The largest number of messages in flight to this reactor.
    limit: u64,
    gone: bool,
    /// For each thread, the number of messages that it has sent to this reactor, and the number of those that have arrived.
    said: BTreeMap<usize, (u64, u64)>,
}

impl Listener {
    fn unheard(&self) -> u64 {
        self.said.values().map(|(said, heard)| said - heard).sum()
    }
}

/// All simulated threads, with the records of their messages.
#[derive(Clone, Debug, Default)]
pub struct Threads(Arc<Mutex<Vec<Listener>>>);

impl Threads {
    fn listeners(&self) -> MutexGuard<'_, Vec<Listener>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a reactor. The reactor gets the next node number.
    pub fn listen(&self, remote: ReactorHandle<Said>, limit: u32) {
        self.listeners().push(Listener { remote, limit: limit.into(), gone: false, said: BTreeMap::new() });
    }

    /// Sends a message from a thread to the reactor of a node.
    ///
    /// # Errors
    /// The call has returned an unexpected result.
    pub fn say(&self, node: usize, thread: usize) -> Result<(), String> {
        let mut listeners = self.listeners();
        let listener = &mut listeners[node];
        let unheard = listener.unheard();
        let (said, _) = listener.said.entry(thread).or_default();
        let message = Said { thread, nth: *said };
        let result = listener.remote.post(message);
        let kept = match result {
            Ok(()) => !listener.gone && unheard < listener.limit,
            Err(HandleError::Full(back)) => !listener.gone && unheard == listener.limit && back == message,
            Err(HandleError::Gone(back)) => listener.gone && back == message,
        };
        *said += u64::from(result.is_ok());
        if listener.gone {
            // After the reactor was dropped, these calls must have no effect.
            listener.remote.wake();
            listener.remote.stop();
        }
        if kept { Ok(()) } else { Err(format!("said to node{node}, {unheard} unheard: {result:?}")) }
    }

    /// Records that a node has received a message. Returns true if it was the next message of its thread.
    #[must_use]
    pub fn heard(&self, node: usize, said: Said) -> bool {
        let mut listeners = self.listeners();
        let (all, heard) = listeners[node].said.entry(said.thread).or_default();
        let kept = *heard == said.nth && said.nth < *all;
        *heard += 1;
        kept
    }

    /// Returns the number of messages that a node has not received yet. It is 0 for a dropped reactor.
    #[must_use]
    pub fn unheard(&self, node: usize) -> u64 {
        let listeners = self.listeners();
        if listeners[node].gone { 0 } else { listeners[node].unheard() }
    }

    /// Removes all reactors. Their wakers hold a reference to the network, and the network holds a reference to these threads. This call
    /// breaks the cycle, so that the network and the threads are dropped.
    pub fn disperse(&self) {
        self.listeners().clear();
    }

    /// Records that the reactor of a node was dropped.
    pub fn gone(&self, node: usize) {
        self.listeners()[node].gone = true;
    }
}
