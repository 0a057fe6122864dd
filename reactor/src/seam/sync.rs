//! The atomic numbers and the locks that other threads share with a reactor. With `cfg(loom)` they are those of the model checker
//! loom, which runs the tests in `api/interleavings.rs` in every order of the threads.

#[cfg(not(loom))]
pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize},
};

#[cfg(loom)]
pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize},
};
