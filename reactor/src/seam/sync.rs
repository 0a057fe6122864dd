//! The atomics and locks that the reactor shares with other threads. With `cfg(loom_model)` they
//! come from the model checker loom, which runs the tests in `api/interleavings.rs` with every
//! possible interleaving of the threads.

#[cfg(not(loom_model))]
pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize},
};

#[cfg(loom_model)]
pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize},
};
