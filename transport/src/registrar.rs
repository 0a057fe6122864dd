//! Registration of memory on other threads than the one that drives the provider.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::error::Result;
use crate::mem::Memory;
use crate::mr::Access;

/// Registers memory of one device on any thread, for a provider that another thread drives
/// ([`OffLoopRegistration::registrar`](crate::roles::OffLoopRegistration::registrar)).
pub trait Registrar: Send + Sync + fmt::Debug {
    /// Registers a part of a memory. **Blocks** while its pages are pinned: about a quarter of a second for a gibibyte.
    ///
    /// # Errors
    /// As [`Provider::register`](crate::Provider::register).
    fn register(&self, memory: &Arc<Memory>, range: Range<usize>, access: Access) -> Result<Registration>;
}

/// A registration that a [`Registrar`] has made, and that is no region of a provider yet:
/// [`OffLoopRegistration::adopt`](crate::roles::OffLoopRegistration::adopt) makes it one. Dropping it gives the registration back.
pub struct Registration {
    provider: &'static str,
    state: Box<dyn Any + Send>,
}

impl Registration {
    /// Wraps what the provider of this name wants to find again.
    pub fn new<T: Any + Send>(provider: &'static str, state: T) -> Self {
        Self { provider, state: Box::new(state) }
    }

    /// Unwraps what its provider put in.
    ///
    /// # Errors
    /// The registration comes back when it is of a provider of another kind.
    pub fn into_state<T: Any>(self) -> std::result::Result<T, Self> {
        let Self { provider, state } = self;
        state.downcast().map(|state| *state).map_err(|state| Self { provider, state })
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registration({})", self.provider)
    }
}
