//! The interfaces between the reactor and the operating system: readiness, time, randomness, and wake-ups by other threads. A simulation
//! provides its own [`poller::Poller`], [`poller::Clock`] and [`poller::Entropy`].

pub(crate) mod io;
pub(crate) mod poller;
pub(crate) mod sync;
pub(crate) mod timer;
pub(crate) mod wake;
