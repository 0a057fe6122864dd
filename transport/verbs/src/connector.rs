//! Private threads for the calls that block on iWARP. `rdma_connect` blocks until TCP has connected. Destroying an id blocks until its
//! handshake has ended.
//!
//! A call starts a new thread if no thread is idle and the number of threads is below a limit. At the limit, calls wait for a thread. A
//! thread that is idle for the time `IDLE` ends. The thread and the provider share the ownership of an id, and the last owner destroys the
//! id. The provider never waits for a thread.
//!
//! `rdma_connect` to a peer that does not answer blocks for minutes. While it blocks, the kernel cannot finish the removal of the id's
//! device. So when the program destroys the id, the provider interrupts `rdma_connect` by sending a signal to the thread that is inside the
//! call. For this, the signal needs a handler without `SA_RESTART`, so that the system call is not restarted.
//!
//! The handling of a signal applies to the whole process, so the provider must not use a signal of the program. The first connect on iWARP
//! chooses the highest real-time signal that has its default handling, and installs a handler that does nothing. The provider never
//! replaces a handler of the program. If the program has a handler for every real-time signal, or later installs one for the chosen signal,
//! connects are not interrupted. All other signals are blocked in these threads.

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
use rdma_transport::error::TransportError;
use rdma_transport::slab::Key;

/// The maximum number of threads for connect calls. In addition, the same number of threads can run releases, which are
/// calls that destroy an id.
const THREADS: usize = 64;
/// The interval at which the signal is repeated. A signal has no effect if it arrives just before the call that it
/// should interrupt.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(10);
/// The time after which an idle thread ends.
const IDLE: Duration = Duration::from_secs(1);
const STACK: usize = 256 * 1024;

/// A connect call that has failed.
#[derive(Debug)]
pub(super) struct FailedConnect {
    pub(super) key: Key,
    pub(super) error: io::Error,
}

#[derive(Debug)]
enum Job {
    Connect { key: Key, id: Arc<RawId>, offer: ConnectOffer },
    Release(Arc<RawId>),
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>, // bound: ending-ids
    threads: usize,
    idle: usize,
    /// The threads that are inside a connect call, each with the memory address of its id.
    connecting: Vec<(usize, libc::pthread_t)>, // local: threads
    failed: Vec<FailedConnect>, // local: connects of the program
}

impl Queue {
    fn interrupt(&self, id: &Arc<RawId>) {
        let Some(signal) = signal() else { return };
        for (_, thread) in self.connecting.iter().filter(|(address, _)| *address == address_of(id)) {
            // SAFETY: the thread is still running: it removes itself from the list before it ends, for which it needs
            // the lock that this function holds now. The signal has a handler.
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

/// Runs blocking calls on private threads.
#[derive(Debug)]
pub(super) struct Connector {
    shared: Arc<ConnectorShared>,
}

impl ConnectorShared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // No code panics while it holds the lock, so a poisoned lock needs no check.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next call to run, and returns it. Returns `None` if no call was queued for the time [`IDLE`]. In
    /// this case the thread ends.
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
        // SAFETY: the call has no arguments.
        let thread = unsafe { libc::pthread_self() };
        self.lock().connecting.push((address_of(id), thread));
        // This thread is in the list `connecting` now. If the program destroys the id from now on, the provider
        // interrupts this thread. If the program has already destroyed the id, do not connect.
        let result = if id.is_abandoned() { Ok(()) } else { id.connect(offer) };
        self.lock().connecting.retain(|(address, _)| *address != address_of(id));
        if let Err(TransportError::Io { source: error, .. }) = result {
            self.fail(key, error);
        }
    }

    fn release(&self, id: Arc<RawId>) {
        // The provider has released the id, so only a thread inside a connect call can still own it. Interrupt that
        // thread.
        while Arc::strong_count(&id) > 1 {
            self.lock().interrupt(&id);
            thread::park_timeout(SIGNAL_INTERVAL);
        }
        drop(id);
    }

    fn fail(&self, key: Key, error: io::Error) {
        self.lock().failed.push(FailedConnect { key, error });
        if rdma_transport::planted("a-failed-connect-wakes-nobody") {
            return;
        }
        if let Err(error) = self.waker.wake() {
            local_log!(Error, "a failed connect cannot be reported: {error}");
        }
    }
}

impl Connector {
    /// Makes a connector. When a connect call has failed, the connector wakes the provider by `waker`.
    pub(super) fn new(waker: Waker) -> Self {
        Self { shared: Arc::new(ConnectorShared { queue: Mutex::default(), work: Condvar::new(), waker }) }
    }

    /// Calls `rdma_connect` on a thread. If the call fails, [`Connector::take_failed`] returns the failure. If it
    /// succeeds, the connection manager reports an event of the id.
    pub(super) fn connect(&self, key: Key, id: Arc<RawId>, offer: ConnectOffer) -> io::Result<()> {
        signal();
        self.submit(Job::Connect { key, id, offer })
    }

    /// Destroys an id on a thread, as soon as no other thread uses it.
    pub(super) fn release(&self, id: Arc<RawId>) {
        id.abandon();
        {
            let mut queue = self.shared.lock();
            queue.jobs.retain(|job| !matches!(job, Job::Connect { id: waiting, .. } if Arc::ptr_eq(waiting, &id)));
            queue.interrupt(&id);
        }
        if let Err(error) = self.submit(Job::Release(id)) {
            local_log!(Warn, "no thread to destroy an id on: {error}");
        }
    }

    fn submit(&self, job: Job) -> io::Result<()> {
        let mut queue = self.shared.lock();
        // A release is queued in front of all connects, because the release interrupts a running connect of its id,
        // which frees that connect's thread.
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
            // The new thread could not be started. One of the existing threads runs the call later.
            Err(_) if queue.threads > 0 => {}
            Err(error) => {
                // There is no thread, so the new job is the only one in the queue. The job may be the last owner of an
                // id. Drop the job after the lock is released, because destroying an id may block.
                let job = queue.jobs.pop_back();
                drop(queue);
                drop(job);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Returns the connect calls that have failed since the last call of this function.
    pub(super) fn take_failed(&self) -> Vec<FailedConnect> {
        std::mem::take(&mut self.shared.lock().failed)
    }

    /// Makes the provider's connection-manager channel readable. Called after the provider itself has queued an event
    /// for the program.
    pub(super) fn wake(&self) {
        if let Err(error) = self.shared.waker.wake() {
            local_log!(Error, "waking the connection-manager channel: {error}");
        }
    }
}

extern "C" fn ignore_signal(_: c_int) {}

/// Returns the handler of a signal. Returns `None` if the system call fails.
fn disposition(signal: c_int) -> Option<libc::sighandler_t> {
    let mut now = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: a null pointer means that the handler is not changed. The call writes the current handler to `now`, which
    // is read only if the call has succeeded.
    unsafe { (libc::sigaction(signal, ptr::null(), now.as_mut_ptr()) == 0).then(|| now.assume_init_ref().sa_sigaction) }
}

/// Installs, for a signal, a handler that does nothing. Returns the address of the handler, or `None` if the system
/// call fails.
fn install(signal: c_int) -> Option<libc::sighandler_t> {
    // SAFETY: all fields are numbers. Zeros mean an empty mask and no flags; without `SA_RESTART`, an interrupted call
    // is not restarted.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = ignore_signal as extern "C" fn(c_int) as libc::sighandler_t;
    // SAFETY: the handler `ignore_signal` does nothing, which is safe at any time.
    let installed = unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) } == 0;
    installed.then_some(action.sa_sigaction)
}

/// Returns the signal that interrupts a connect. The first call chooses it. Returns `None` if there was no free signal,
/// or if the program has replaced the handler.
fn signal() -> Option<c_int> {
    static CHOSEN: OnceLock<Option<(c_int, libc::sighandler_t)>> = OnceLock::new();
    let chosen = CHOSEN.get_or_init(|| {
        let mut all = (libc::SIGRTMIN()..=libc::SIGRTMAX()).rev();
        let free = |&signal: &c_int| disposition(signal) == Some(libc::SIG_DFL);
        let found = all.find_map(|signal| Some((signal, install(Some(signal).filter(free)?)?)));
        if found.is_none() {
            local_log!(Info, "the program uses all real-time signals: blocked connects are not interrupted");
        }
        found
    });
    chosen.filter(|&(signal, handler)| disposition(signal) == Some(handler)).map(|(signal, _)| signal)
}

/// Blocks all signals but the provider's own in this thread, so that the program's threads receive the program's
/// signals.
fn mask_signals() {
    let mut mask = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigfillset` initialises the mask before the other calls use it. The calls change only the signal mask of
    // this thread.
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

    /// A signal with a handler interrupts system calls on every thread. So the provider must not install a handler for a signal that the
    /// program may receive, such as `SIGURG` for its sockets, and must not replace the program's handlers.
    #[test]
    fn signals_of_the_program_are_left_alone() {
        let before: Vec<_> = (1..libc::SIGRTMIN()).map(disposition).collect();
        let signal = signal().expect("a real-time signal that nobody uses");
        assert_eq!((1..libc::SIGRTMIN()).map(disposition).collect::<Vec<_>>(), before);
        assert!((libc::SIGRTMIN()..=libc::SIGRTMAX()).contains(&signal));
        let used = (libc::SIGRTMIN()..=libc::SIGRTMAX()).filter(|&signal| disposition(signal) != Some(libc::SIG_DFL));
        assert_eq!(used.collect::<Vec<_>>(), [signal], "one is enough");
        // If the program changes the handling of the chosen signal, the provider no longer sends it.
        // SAFETY: the call changes the handling of the signal that the provider has chosen. The test installs the handler
        // again afterwards.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
        assert_eq!(super::signal(), None);
        install(signal).expect("a handler");
        assert_eq!(super::signal(), Some(signal));
        the_signal_interrupts_a_call();
    }

    /// The signal interrupts a call that blocks, and the system does not restart the call.
    #[expect(clippy::disallowed_methods, reason = "another thread is what it is about")]
    fn the_signal_interrupts_a_call() {
        let mut ends = [0; 2];
        // SAFETY: the pointer is to memory for two descriptors.
        assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
        let signal = signal().expect("a real-time signal that nobody uses");
        let (sender, receiver) = std::sync::mpsc::channel();
        let thread = thread::spawn(move || {
            mask_signals();
            // SAFETY: the call has no arguments.
            sender.send(unsafe { libc::pthread_self() }).unwrap();
            let mut byte = 0_u8;
            // SAFETY: the pointer is to memory for one byte. Nothing writes to the pipe, so the call blocks.
            let rc = unsafe { libc::read(ends[0], (&raw mut byte).cast(), 1) };
            (rc, io::Error::last_os_error().raw_os_error())
        });
        let target = receiver.recv().unwrap();
        // The first signals may arrive before the thread is inside the call, so repeat them.
        crate::patience::until("the call is interrupted", || {
            // SAFETY: the thread was not joined, so its handle is valid.
            unsafe { libc::pthread_kill(target, signal) };
            thread::park_timeout(SIGNAL_INTERVAL);
            thread.is_finished().then_some(())
        });
        assert_eq!(thread.join().unwrap(), (-1, Some(libc::EINTR)));
    }
}
