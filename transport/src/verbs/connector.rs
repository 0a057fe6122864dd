//! Threads for the calls that block on iWARP: `rdma_connect` until TCP has connected, and the destruction of an id
//! until its handshake is over.
//!
//! A thread is started when a call is to be made and none is idle, up to a bound; more calls wait for a thread. An
//! idle thread goes after a while. Threads own the ids they work on together with the provider: whoever lets go last
//! destroys. They are never waited for.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use mio::Waker;

use super::id::{RawId, Terms};
use crate::error::Error;
use crate::slab::Key;

/// Calls that block at the same time.
const THREADS: usize = 64;
/// How long a thread waits for its next call.
const IDLE: Duration = Duration::from_secs(1);
const STACK: usize = 256 * 1024;

#[derive(Debug)]
enum Job {
    Connect { key: Key, id: Arc<RawId>, terms: Terms },
    Release(Arc<RawId>),
}

/// A connect call that failed.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) key: Key,
    pub(super) error: io::Error,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    failed: Vec<Failed>,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
    waker: Waker,
}

/// Hands calls to threads.
#[derive(Debug)]
pub(super) struct Connector {
    shared: Arc<Shared>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Nothing panics while it holds the lock.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next call to make; `None` when there was none for a while and the thread is to end.
    fn next_job(&self) -> Option<Job> {
        let mut queue = self.lock();
        if queue.jobs.is_empty() {
            queue.idle += 1;
            let waited = self.work.wait_timeout_while(queue, IDLE, |queue| queue.jobs.is_empty());
            (queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
            queue.idle -= 1;
        }
        let job = queue.jobs.pop_front();
        queue.threads -= usize::from(job.is_none());
        job
    }

    fn run(&self) {
        while let Some(job) = self.next_job() {
            match job {
                Job::Connect { key, id, terms } if !id.is_abandoned() => {
                    if let Err(Error::Io { source: error, .. }) = id.connect(&terms) {
                        self.fail(key, error);
                    }
                }
                Job::Connect { id, .. } | Job::Release(id) => drop(id),
            }
        }
    }

    fn fail(&self, key: Key, error: io::Error) {
        self.lock().failed.push(Failed { key, error });
        if let Err(error) = self.waker.wake() {
            log::error!("a failed connect cannot be reported: {error}");
        }
    }
}

impl Connector {
    /// Failures wake `waker`.
    pub(super) fn new(waker: Waker) -> Self {
        Self { shared: Arc::new(Shared { queue: Mutex::default(), work: Condvar::new(), waker }) }
    }

    /// Calls `rdma_connect`; failure comes out of [`Connector::take_failed`], success as an event of the id.
    pub(super) fn connect(&self, key: Key, id: Arc<RawId>, terms: Terms) -> io::Result<()> {
        self.submit(Job::Connect { key, id, terms })
    }

    /// Destroys an id, when nobody else holds it any more.
    pub(super) fn release(&self, id: Arc<RawId>) {
        id.abandon();
        if let Err(error) = self.submit(Job::Release(id)) {
            log::warn!("no thread to destroy an id on: {error}");
        }
    }

    fn submit(&self, job: Job) -> io::Result<()> {
        let mut queue = self.shared.lock();
        queue.jobs.push_back(job);
        if queue.idle >= queue.jobs.len() {
            self.shared.work.notify_one();
            return Ok(());
        }
        if queue.threads == THREADS {
            return Ok(());
        }
        let shared = Arc::clone(&self.shared);
        let thread = thread::Builder::new().name("rdma-connect".into()).stack_size(STACK);
        match thread.spawn(move || shared.run()) {
            Ok(_) => queue.threads += 1,
            // One of those there are takes it later.
            Err(_) if queue.threads > 0 => {}
            Err(error) => {
                let job = queue.jobs.pop_back();
                // It may own an id: that is destroyed without the lock.
                drop(queue);
                drop(job);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Connect calls that failed since.
    pub(super) fn take_failed(&self) -> Vec<Failed> {
        std::mem::take(&mut self.shared.lock().failed)
    }

    /// Makes the channel readable for something that did not come from the system.
    pub(super) fn wake(&self) {
        if let Err(error) = self.shared.waker.wake() {
            log::error!("waking the connection-manager channel: {error}");
        }
    }
}
