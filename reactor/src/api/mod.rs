//! The types that a program uses: the handler that it implements, the context of a callback, messages and buffers, and
//! handles for other threads.

pub(crate) mod context;
pub(crate) mod handle;
pub(crate) mod handler;
#[cfg(all(loom_model, test))]
mod interleavings;
pub(crate) mod message;
