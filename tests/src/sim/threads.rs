//! Other threads that send messages to the reactors, as far as one thread can simulate them: in the middle of turns, in
//! callbacks, and while all nodes sleep.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdma_reactor::{HandleError, ReactorHandle};

/// One message of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said {
    /// The number of the thread.
    pub thread: usize,
    /// The number of messages that this thread has sent to the same reactor before.
    pub nth: u64,
}

#[derive(Debug)]
struct Listener {
    remote: ReactorHandle<Said>,
    /// The largest number of messages in flight.
    limit: u64,
    gone: bool,
    /// The numbers of messages sent and received, by thread.
    said: BTreeMap<usize, (u64, u64)>,
}

impl Listener {
    fn unheard(&self) -> u64 {
        self.said.values().map(|(said, heard)| said - heard).sum()
    }
}

/// The other threads, and the records of their messages.
#[derive(Clone, Debug, Default)]
pub struct Threads(Arc<Mutex<Vec<Listener>>>);

impl Threads {
    fn listeners(&self) -> MutexGuard<'_, Vec<Listener>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a reactor, with the next number.
    pub fn listen(&self, remote: ReactorHandle<Said>, limit: u32) {
        self.listeners().push(Listener { remote, limit: limit.into(), gone: false, said: BTreeMap::new() });
    }

    /// Sends a message from a thread to a node.
    ///
    /// # Errors
    /// An unexpected result.
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
            // These calls have no effect.
            listener.remote.wake();
            listener.remote.stop();
        }
        if kept { Ok(()) } else { Err(format!("said to node{node}, {unheard} unheard: {result:?}")) }
    }

    /// Notes that a node has received a message. Returns true if it was the next one of its thread.
    #[must_use]
    pub fn heard(&self, node: usize, said: Said) -> bool {
        let mut listeners = self.listeners();
        let (all, heard) = listeners[node].said.entry(said.thread).or_default();
        let kept = *heard == said.nth && said.nth < *all;
        *heard += 1;
        kept
    }

    /// Returns the number of messages that an existing node has not received yet.
    #[must_use]
    pub fn unheard(&self, node: usize) -> u64 {
        let listeners = self.listeners();
        if listeners[node].gone { 0 } else { listeners[node].unheard() }
    }

    /// Forgets all reactors. Their wakers hold the network, which holds these threads; without this call neither would be dropped.
    pub fn disperse(&self) {
        self.listeners().clear();
    }

    /// Notes that a node's reactor was dropped.
    pub fn gone(&self, node: usize) {
        self.listeners()[node].gone = true;
    }
}
