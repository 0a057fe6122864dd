//! Requests to end the program: Ctrl-C, other signals, other threads.

use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rdma_reactor::ReactorHandle;

use super::failure::Failure;

/// A request to end, from a signal or another thread.
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    raised: AtomicBool,
    reactor: Mutex<Option<ReactorHandle>>,
}

impl Interrupt {
    /// Makes a request that SIGINT, SIGTERM and SIGHUP raise. The second signal ends the program at once.
    ///
    /// # Errors
    /// The system refused the handler.
    pub fn on_signals() -> Result<Self, Failure> {
        let interrupt = Self::default();
        let of_handler = interrupt.clone();
        ctrlc::set_handler(move || {
            if of_handler.raise() {
                process::exit(130);
            }
        })
        .map_err(|error| Failure::new(format!("cannot handle signals: {error}")))?;
        Ok(interrupt)
    }

    /// Asks for the end; returns whether somebody has asked before.
    pub fn raise(&self) -> bool {
        let before = self.shared.raised.swap(true, Ordering::SeqCst);
        if let Some(reactor) = &*self.shared.reactor.lock().unwrap_or_else(PoisonError::into_inner) {
            reactor.stop();
        }
        before
    }

    /// Whether somebody has asked.
    #[must_use]
    pub fn is_raised(&self) -> bool {
        self.shared.raised.load(Ordering::SeqCst)
    }

    /// Stops this reactor when somebody asks, or at once if somebody has asked already.
    pub fn stops(&self, reactor: ReactorHandle) {
        *self.shared.reactor.lock().unwrap_or_else(PoisonError::into_inner) = Some(reactor.clone());
        if self.is_raised() {
            reactor.stop();
        }
    }
}
