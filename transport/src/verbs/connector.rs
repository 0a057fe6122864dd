//! Threads for the calls that block on iWARP: `rdma_connect` blocks until TCP has connected, and the destruction of an id
//! blocks until its handshake is over.
//!
//! A call starts a thread when no thread is idle, up to a bound; beyond it, calls wait for a thread. An idle thread ends after
//! a while. A thread owns the id that it works on together with the provider, and the last of the two to let go destroys it.
//! Nobody waits for a thread.
//!
//! A connect to a peer that does not answer at all blocks for minutes, and so does the removal of its device. When the id is
//! released, the connect is interrupted by a signal to its thread: `SIGURG`, which a program without a handler for it ignores.
//! The first connect on iWARP installs a handler that does nothing, unless the program has a handler of its own; then there is
//! no interruption. All other signals are blocked in these threads.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use mio::Waker;

use super::id::{RawId, Terms};
use crate::error::Error;
use crate::slab::Key;

/// Number of connect calls that may block at the same time. As many releases may block beside them.
const THREADS: usize = 64;
/// The signal that interrupts a call.
const SIGNAL: c_int = libc::SIGURG;
/// Time after which the signal is sent again: it may have come just before the call that it is to interrupt.
const AGAIN: Duration = Duration::from_millis(10);
/// How long an idle thread waits for its next call.
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
    /// Threads inside a connect call, each with the address of its id.
    connecting: Vec<(usize, libc::pthread_t)>,
    failed: Vec<Failed>,
}

impl Queue {
    fn interrupt(&self, id: &Arc<RawId>) {
        if !signal_is_ours() {
            return;
        }
        for (_, thread) in self.connecting.iter().filter(|(address, _)| *address == address_of(id)) {
            // SAFETY: a thread is in the list only while it runs, and leaves it under the lock that is held here. The
            // signal has a handler.
            unsafe { libc::pthread_kill(*thread, SIGNAL) };
        }
    }
}

fn address_of(id: &Arc<RawId>) -> usize {
    Arc::as_ptr(id).addr()
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

    /// The next call to make; `None` when there was none for a while, and the thread ends.
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
        mask_signals();
        while let Some(job) = self.next_job() {
            match job {
                Job::Connect { key, id, terms } => self.connect(key, &id, &terms),
                Job::Release(id) => self.release(id),
            }
        }
    }

    fn connect(&self, key: Key, id: &Arc<RawId>, terms: &Terms) {
        // SAFETY: no arguments.
        let thread = unsafe { libc::pthread_self() };
        self.lock().connecting.push((address_of(id), thread));
        // If the id is abandoned from here on, this thread is interrupted.
        let result = if id.is_abandoned() { Ok(()) } else { id.connect(terms) };
        self.lock().connecting.retain(|(address, _)| *address != address_of(id));
        if let Err(Error::Io { source: error, .. }) = result {
            self.fail(key, error);
        }
    }

    fn release(&self, id: Arc<RawId>) {
        // Only a thread inside a connect call can still hold the id.
        while Arc::strong_count(&id) > 1 {
            self.lock().interrupt(&id);
            thread::park_timeout(AGAIN);
        }
        drop(id);
    }

    fn fail(&self, key: Key, error: io::Error) {
        self.lock().failed.push(Failed { key, error });
        if let Err(error) = self.waker.wake() {
            log::error!("a failed connect cannot be reported: {error}");
        }
    }
}

impl Connector {
    /// A connector that wakes `waker` when a connect call has failed.
    pub(super) fn new(waker: Waker) -> Self {
        Self { shared: Arc::new(Shared { queue: Mutex::default(), work: Condvar::new(), waker }) }
    }

    /// Calls `rdma_connect`. A failure comes out of [`Connector::take_failed`]; success comes as an event of the id.
    pub(super) fn connect(&self, key: Key, id: Arc<RawId>, terms: Terms) -> io::Result<()> {
        signal_is_ours();
        self.submit(Job::Connect { key, id, terms })
    }

    /// Destroys an id as soon as nobody else holds it.
    pub(super) fn release(&self, id: Arc<RawId>) {
        id.abandon();
        {
            let mut queue = self.shared.lock();
            queue.jobs.retain(|job| !matches!(job, Job::Connect { id: waiting, .. } if Arc::ptr_eq(waiting, &id)));
            queue.interrupt(&id);
        }
        if let Err(error) = self.submit(Job::Release(id)) {
            log::warn!("no thread to destroy an id on: {error}");
        }
    }

    fn submit(&self, job: Job) -> io::Result<()> {
        let mut queue = self.shared.lock();
        // A release goes first: it ends, and lets others end.
        let bound = match job {
            Job::Connect { .. } => {
                queue.jobs.push_back(job);
                THREADS
            }
            Job::Release(_) => {
                queue.jobs.push_front(job);
                2 * THREADS
            }
        };
        if queue.idle >= queue.jobs.len() {
            self.shared.work.notify_one();
            return Ok(());
        }
        if queue.threads >= bound {
            return Ok(());
        }
        let shared = Arc::clone(&self.shared);
        let thread = thread::Builder::new().name("rdma-connect".into()).stack_size(STACK);
        match thread.spawn(move || shared.run()) {
            Ok(_) => queue.threads += 1,
            // One of the threads that exist takes the call later.
            Err(_) if queue.threads > 0 => {}
            Err(error) => {
                // Without threads this is the only call. It may own an id, which is destroyed without the lock.
                let job = queue.jobs.pop_back();
                drop(queue);
                drop(job);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Connect calls that have failed since this was last asked.
    pub(super) fn take_failed(&self) -> Vec<Failed> {
        std::mem::take(&mut self.shared.lock().failed)
    }

    /// Makes the provider's channel readable for an event that did not come from the system.
    pub(super) fn wake(&self) {
        if let Err(error) = self.shared.waker.wake() {
            log::error!("waking the connection-manager channel: {error}");
        }
    }
}

extern "C" fn nothing(_: c_int) {}

/// Whether the signal may be sent. The first call installs the handler.
fn signal_is_ours() -> bool {
    static OURS: OnceLock<bool> = OnceLock::new();
    *OURS.get_or_init(|| {
        let mut before = MaybeUninit::<libc::sigaction>::uninit();
        // SAFETY: asks only, into a place for the result.
        if unsafe { libc::sigaction(SIGNAL, ptr::null(), before.as_mut_ptr()) } != 0 {
            return false;
        }
        // SAFETY: filled by the call.
        if unsafe { before.assume_init_ref() }.sa_sigaction != libc::SIG_DFL {
            log::info!("SIGURG is in use: connects that hang are not interrupted");
            return false;
        }
        // SAFETY: all fields are numbers, and zero is an empty mask and no flags: a call is not restarted.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = nothing as extern "C" fn(c_int) as usize;
        // SAFETY: the handler does nothing, which is safe at any time.
        unsafe { libc::sigaction(SIGNAL, &raw const action, ptr::null_mut()) == 0 }
    })
}

/// Blocks the program's signals in this thread, so that the program's own threads get them.
fn mask_signals() {
    let mut mask = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: a place for a mask, filled by the first call and used by the others; changes this thread only.
    unsafe {
        libc::sigfillset(mask.as_mut_ptr());
        libc::sigdelset(mask.as_mut_ptr(), SIGNAL);
        libc::pthread_sigmask(libc::SIG_SETMASK, mask.as_ptr(), ptr::null_mut());
    }
}
