//! Requests to end the program. They come from signals, such as Ctrl-C, or from other threads.

use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rdma_reactor::ReactorHandle;

use super::failure::Failure;

/// A flag that requests the end of the program. Signals or other threads raise it.
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
    /// Makes a request that SIGINT, SIGTERM or SIGHUP raises. A second signal ends the program immediately.
    ///
    /// # Errors
    /// The system refused the signal handler.
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

    /// Requests the end of the program. Returns true if it was already requested.
    pub fn raise(&self) -> bool {
        let before = self.shared.raised.swap(true, Ordering::SeqCst);
        if let Some(reactor) = &*self.shared.reactor.lock().unwrap_or_else(PoisonError::into_inner) {
            reactor.stop();
        }
        before
    }

    /// Returns true if the end of the program is requested.
    #[must_use]
    pub fn is_raised(&self) -> bool {
        self.shared.raised.load(Ordering::SeqCst)
    }

    /// Stops this reactor when the end of the program is requested. If it is requested already, stops the reactor immediately.
    pub fn stops(&self, reactor: ReactorHandle) {
        *self.shared.reactor.lock().unwrap_or_else(PoisonError::into_inner) = Some(reactor.clone());
        if self.is_raised() {
            reactor.stop();
        }
    }
}
