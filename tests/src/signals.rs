//! Sends signals to one thread. Each signal interrupts the system call that the thread is executing.

use std::io;
use std::marker::PhantomData;
use std::mem;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

static CAUGHT: AtomicU64 = AtomicU64::new(0);

extern "C" fn catch(_: libc::c_int) {
    CAUGHT.fetch_add(1, Ordering::Relaxed);
}

/// A thread that repeatedly sends SIGUSR1 to the thread that has created this value.
#[derive(Debug)]
pub struct Signals {
    before: u64,
    over: Arc<AtomicBool>,
    sender: Option<JoinHandle<()>>,
    /// Prevents the value from moving to another thread than the one that has created it.
    stays: PhantomData<*const ()>,
}

impl Signals {
    /// Starts to send signals, with this pause between two of them.
    ///
    /// # Panics
    /// Panics if the signal handler cannot be installed.
    #[must_use]
    #[allow(clippy::disallowed_methods, reason = "another thread sends")]
    pub fn start(pause: Duration) -> Self {
        // SAFETY: an all-zero `sigaction` is valid and has no flags. Without SA_RESTART, interrupted system calls return EINTR. The
        // handler accesses only an atomic number.
        let installed = unsafe {
            let mut action: libc::sigaction = mem::zeroed();
            action.sa_sigaction = catch as *const () as usize;
            libc::sigaction(libc::SIGUSR1, &raw const action, ptr::null_mut())
        };
        assert_eq!(installed, 0, "{}", io::Error::last_os_error());
        // SAFETY: this call has no preconditions.
        let thread = unsafe { libc::pthread_self() } as usize;
        let over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&over);
        let sender = thread::spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                // SAFETY: the thread that gets the signal exists. It owns the `Signals` value, which cannot move to another thread.
                // Dropping this value waits until the sending thread has ended.
                unsafe { libc::pthread_kill(thread as libc::pthread_t, libc::SIGUSR1) };
                thread::sleep(pause);
            }
        });
        Self { before: CAUGHT.load(Ordering::Relaxed), over, sender: Some(sender), stays: PhantomData }
    }

    /// Returns the number of signals that this process has caught since [`Signals::start`].
    #[must_use]
    pub fn caught(&self) -> u64 {
        CAUGHT.load(Ordering::Relaxed) - self.before
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(sender) = self.sender.take() {
            let ended = sender.join();
            assert!(ended.is_ok() || thread::panicking(), "the sender of signals has panicked");
        }
    }
}
