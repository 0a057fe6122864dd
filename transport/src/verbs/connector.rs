//! Threads for the calls that block on iWARP: `rdma_connect` blocks until TCP has connected, and the destruction of an id
//! blocks until its handshake is over.
//!
//! A call starts a thread when no thread is idle, up to a bound; beyond it, calls wait for a thread. An idle thread ends after
//! a while. The thread and the provider share the ownership of an id, and the last of the two owners destroys it.
//! Nothing waits for a thread.
//!
//! A connect to a peer that does not answer at all blocks for minutes, and so does the removal of its device. When the id is
//! released, the connect is interrupted by a signal to its thread. The call must not be restarted then (`SA_RESTART`), and how a
//! signal is handled holds for the whole process, so it is one that nobody else sends: the first connect on iWARP takes the
//! highest real-time signal that is at its default, and gives it a handler that does ignore_signal. A handler of the program is
//! never replaced. If the program has a handler for every real-time signal, or installs one for this signal later, connects are not
//! interrupted. All other signals are blocked in these threads.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use mio::Waker;

use super::id::{ConnectOffer, RawId};
use crate::error::Error;
use crate::slab::Key;

/// The number of connect calls that may block at the same time. The same number of releases may block in addition.
const THREADS: usize = 64;
/// The interval at which the signal is sent again: it may arrive just before the call that it is to interrupt.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(10);
/// The time after which an idle thread ends.
const IDLE: Duration = Duration::from_secs(1);
const STACK: usize = 256 * 1024;

#[derive(Debug)]
enum Job {
    Connect { key: Key, id: Arc<RawId>, offer: ConnectOffer },
    Release(Arc<RawId>),
}

/// A connect call that failed.
#[derive(Debug)]
pub(super) struct FailedConnect {
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
    failed: Vec<FailedConnect>,
}

impl Queue {
    fn interrupt(&self, id: &Arc<RawId>) {
        let Some(signal) = signal() else { return };
        for (_, thread) in self.connecting.iter().filter(|(address, _)| *address == address_of(id)) {
            // SAFETY: a thread is in the list only while it runs, and leaves it under the lock that is held here. The
            // signal has a handler.
            unsafe { libc::pthread_kill(*thread, signal) };
        }
    }
}

fn address_of(id: &Arc<RawId>) -> usize {
    Arc::as_ptr(id).addr()
}

#[derive(Debug)]
struct ConnectorShared {
    queue: Mutex<Queue>,
    work: Condvar,
    waker: Waker,
}

/// Runs blocking calls on threads.
#[derive(Debug)]
pub(super) struct Connector {
    shared: Arc<ConnectorShared>,
}

impl ConnectorShared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Nothing panics while it holds the lock.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the next call; `None` after [`IDLE`] without one, and then the thread ends.
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
                Job::Connect { key, id, offer } => self.connect(key, &id, &offer),
                Job::Release(id) => self.release(id),
            }
        }
    }

    fn connect(&self, key: Key, id: &Arc<RawId>, offer: &ConnectOffer) {
        // SAFETY: no arguments.
        let thread = unsafe { libc::pthread_self() };
        self.lock().connecting.push((address_of(id), thread));
        // From here on, abandoning the id interrupts this thread.
        let result = if id.is_abandoned() { Ok(()) } else { id.connect(offer) };
        self.lock().connecting.retain(|(address, _)| *address != address_of(id));
        if let Err(Error::Io { source: error, .. }) = result {
            self.fail(key, error);
        }
    }

    fn release(&self, id: Arc<RawId>) {
        // Only a thread inside a connect call can still hold the id.
        while Arc::strong_count(&id) > 1 {
            self.lock().interrupt(&id);
            thread::park_timeout(SIGNAL_INTERVAL);
        }
        drop(id);
    }

    fn fail(&self, key: Key, error: io::Error) {
        self.lock().failed.push(FailedConnect { key, error });
        if let Err(error) = self.waker.wake() {
            log::error!("a failed connect cannot be reported: {error}");
        }
    }
}

impl Connector {
    /// Returns a connector that wakes `waker` when a connect call has failed.
    pub(super) fn new(waker: Waker) -> Self {
        Self { shared: Arc::new(ConnectorShared { queue: Mutex::default(), work: Condvar::new(), waker }) }
    }

    /// Calls `rdma_connect`. [`Connector::take_failed`] returns a failure; success is an event of the id.
    pub(super) fn connect(&self, key: Key, id: Arc<RawId>, offer: ConnectOffer) -> io::Result<()> {
        signal();
        self.submit(Job::Connect { key, id, offer })
    }

    /// Destroys an id as soon as it has no other owner.
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
        // A release goes first, because it ends and unblocks other calls.
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
            // One of the existing threads runs the call later.
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

    /// Returns the connect calls that have failed since the last call.
    pub(super) fn take_failed(&self) -> Vec<FailedConnect> {
        std::mem::take(&mut self.shared.lock().failed)
    }

    /// Makes the provider's channel readable for an event that did not come from the system.
    pub(super) fn wake(&self) {
        if let Err(error) = self.shared.waker.wake() {
            log::error!("waking the connection-manager channel: {error}");
        }
    }
}

extern "C" fn ignore_signal(_: c_int) {}

/// Returns the handler of a signal; `None` if the system does not report it.
fn disposition(signal: c_int) -> Option<libc::sighandler_t> {
    let mut now = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: asks only, into a place for the result, which is filled if the call succeeds.
    unsafe { (libc::sigaction(signal, ptr::null(), now.as_mut_ptr()) == 0).then(|| now.assume_init_ref().sa_sigaction) }
}

/// Installs the handler of a signal. Returns its address.
fn install(signal: c_int) -> Option<libc::sighandler_t> {
    // SAFETY: all fields are numbers, and zero is an empty mask and no flags: a call is not restarted.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = ignore_signal as extern "C" fn(c_int) as libc::sighandler_t;
    // SAFETY: the handler does ignore_signal, which is safe at any time.
    let installed = unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) } == 0;
    installed.then_some(action.sa_sigaction)
}

/// Returns the signal that interrupts a call, if one is available and still has the handler. The first call chooses it.
fn signal() -> Option<c_int> {
    static CHOSEN: OnceLock<Option<(c_int, libc::sighandler_t)>> = OnceLock::new();
    let chosen = CHOSEN.get_or_init(|| {
        let mut all = (libc::SIGRTMIN()..=libc::SIGRTMAX()).rev();
        let free = |&signal: &c_int| disposition(signal) == Some(libc::SIG_DFL);
        let found = all.find_map(|signal| Some((signal, install(Some(signal).filter(free)?)?)));
        if found.is_none() {
            log::info!("the program uses all real-time signals: blocked connects are not interrupted");
        }
        found
    });
    chosen.filter(|&(signal, handler)| disposition(signal) == Some(handler)).map(|(signal, _)| signal)
}

/// Blocks the program's signals in this thread, so that the program's own threads get them.
fn mask_signals() {
    let mut mask = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: a place for a mask, filled by the first call and used by the others; changes this thread only.
    unsafe {
        libc::sigfillset(mask.as_mut_ptr());
        if let Some(signal) = signal() {
            libc::sigdelset(mask.as_mut_ptr(), signal);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, mask.as_ptr(), ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A signal with a handler interrupts system calls of every thread, so the handler is on a signal of our own: a program that
    /// gets `SIGURG` for its sockets goes on without a handler, and its own handlers stay.
    #[test]
    fn signals_of_the_program_are_left_alone() {
        let before: Vec<_> = (1..libc::SIGRTMIN()).map(disposition).collect();
        let signal = signal().expect("a real-time signal that nobody uses");
        assert_eq!((1..libc::SIGRTMIN()).map(disposition).collect::<Vec<_>>(), before);
        assert!((libc::SIGRTMIN()..=libc::SIGRTMAX()).contains(&signal));
        let used = (libc::SIGRTMIN()..=libc::SIGRTMAX()).filter(|&signal| disposition(signal) != Some(libc::SIG_DFL));
        assert_eq!(used.collect::<Vec<_>>(), [signal], "one is enough");
        // A program that takes the signal for itself is not sent it.
        // SAFETY: ignores a signal of ours; its handler is installed again below.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
        assert_eq!(super::signal(), None);
        install(signal).expect("a handler");
        assert_eq!(super::signal(), Some(signal));
        the_signal_interrupts_a_call();
    }

    /// It interrupts a call that blocks, and the call is not restarted.
    #[expect(clippy::disallowed_methods, reason = "another thread is what it is about")]
    fn the_signal_interrupts_a_call() {
        let mut ends = [0; 2];
        // SAFETY: a place for two descriptors.
        assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
        let signal = signal().expect("a real-time signal that nobody uses");
        let (tell, told) = std::sync::mpsc::channel();
        let thread = thread::spawn(move || {
            mask_signals();
            // SAFETY: no arguments.
            tell.send(unsafe { libc::pthread_self() }).unwrap();
            let mut byte = 0_u8;
            // SAFETY: a place for one byte. Nobody writes one.
            let rc = unsafe { libc::read(ends[0], (&raw mut byte).cast(), 1) };
            (rc, io::Error::last_os_error().raw_os_error())
        });
        let target = told.recv().unwrap();
        // The first signals may come before the call.
        crate::patience::until("the call is interrupted", || {
            // SAFETY: the thread was not joined, so that its name is its own.
            unsafe { libc::pthread_kill(target, signal) };
            thread::park_timeout(SIGNAL_INTERVAL);
            thread.is_finished().then_some(())
        });
        assert_eq!(thread.join().unwrap(), (-1, Some(libc::EINTR)));
    }
}
