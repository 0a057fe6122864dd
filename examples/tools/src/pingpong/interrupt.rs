//! Requests by signals or by other threads to end the program.

use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rdma_reactor::ReactorHandle;

use super::failure::Failure;
use crate::signals;

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
    /// Makes a flag that SIGINT, SIGTERM or SIGHUP raises, but not a SIGHUP that is ignored already. A second signal ends the program
    /// immediately.
    ///
    /// # Errors
    /// The system refused the signal handler.
    pub fn on_signals() -> Result<Self, Failure> {
        let interrupt = Self::default();
        let of_handler = interrupt.clone();
        signals::on_signals(move || {
            if of_handler.raise() {
                process::exit(130);
            }
        })?;
        Ok(interrupt)
    }

    /// Raises the flag, which requests the end of the program. Returns true if the flag was already raised.
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

    /// Makes this flag stop a reactor when the flag is raised. If the flag is raised already, stops the reactor immediately.
    pub fn stops(&self, reactor: ReactorHandle) {
        *self.shared.reactor.lock().unwrap_or_else(PoisonError::into_inner) = Some(reactor.clone());
        if self.is_raised() {
            reactor.stop();
        }
    }
}
