//! The public types with which a program uses a reactor: the handler that it implements, the context that a callback
//! receives, messages and buffers, and handles for other threads.

pub(crate) mod context;
pub(crate) mod handle;
pub(crate) mod handler;
#[cfg(all(loom_model, test))]
mod interleavings;
pub(crate) mod message;
