//! Registration of memory on threads other than the one that drives the provider.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::error::Result;
use crate::mem::Memory;
use crate::mr::Access;

/// An object that registers memory for one device. Any thread can use it while another thread drives the provider.
/// [`OffLoopRegistration::registrar`](crate::roles::OffLoopRegistration::registrar) returns it.
pub trait Registrar: Send + Sync + fmt::Debug {
    /// Registers a part of a memory. **Blocks** while the pages are pinned: about 250 ms per GiB.
    ///
    /// # Errors
    /// The errors of [`Provider::register`](crate::Provider::register).
    fn register(&self, memory: &Arc<Memory>, range: Range<usize>, access: Access) -> Result<Registration>;
}

/// A registration that a [`Registrar`] has made. The provider turns the registration into a region in
/// [`OffLoopRegistration::adopt`](crate::roles::OffLoopRegistration::adopt). If the program drops the registration
/// instead, the memory is deregistered.
pub struct Registration {
    provider: &'static str,
    state: Box<dyn Any + Send>,
}

impl Registration {
    /// Makes a registration. `provider` is the name of the provider whose registrar made it. `state` is the data that
    /// this provider needs to adopt the registration.
    pub fn new<T: Any + Send>(provider: &'static str, state: T) -> Self {
        Self { provider, state: Box::new(state) }
    }

    /// Returns the `state` that was passed to [`Registration::new`].
    ///
    /// # Errors
    /// Returns the registration unchanged if its state is not a `T`: a provider of another kind made it.
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
