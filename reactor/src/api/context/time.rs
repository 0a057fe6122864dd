//! Timers, and descriptors of the program's own.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use super::Context;
use crate::driver::Due;
use crate::id::{IoId, TimerId};
use crate::seam::poller::Interest;
use crate::seam::timer::FOREVER;

impl Context<'_> {
    /// Calls `on_timer` with `token` once, after `delay`. Resolution is about a millisecond while asleep.
    pub fn set_timer(&mut self, delay: Duration, token: u64) -> TimerId {
        let now = self.driver.now();
        // A delay past what the clock can express never fires in anyone's life.
        let at = now.checked_add(delay).unwrap_or(now + FOREVER);
        let key = self.driver.timers_mut().insert(at, Due::Program(token));
        // An outer loop that waits has to ask for the deadline again.
        self.driver.ring();
        TimerId::new(self.driver.tag(), key)
    }

    /// Takes a timer back; `false` when it has fired or was cancelled, or is another reactor's.
    pub fn cancel_timer(&mut self, timer: TimerId) -> bool {
        let Some(key) = timer.key(self.driver.tag()) else { return false };
        self.driver.timers_mut().cancel(key).is_some()
    }

    /// Watches a descriptor of the program's own, such as a socket of std or mio, a pipe or a timer: `on_io_ready`
    /// follows, edge-triggered. Make it non-blocking, and on each call read or write until `WouldBlock`: what is
    /// left is not reported again. An edge may come for nothing.
    ///
    /// The descriptor stays the program's: take it back with [`Context::deregister_io`] before closing it.
    ///
    /// # Errors
    /// What the system says: it is registered here already, or is a file, which is always ready. `InvalidInput` when
    /// `interest` is empty.
    pub fn register_io(&mut self, source: &impl AsFd, interest: Interest) -> io::Result<IoId> {
        let tag = self.driver.tag();
        let os = self.driver.os_mut();
        os.io.add(&mut *os.poller, source.as_fd(), interest).map(|key| IoId::new(tag, key))
    }

    /// Stops watching; no `on_io_ready` follows. `false` when the descriptor was not watched any more.
    pub fn deregister_io(&mut self, io: IoId) -> bool {
        let Some(key) = io.key(self.driver.tag()) else { return false };
        let os = self.driver.os_mut();
        os.io.remove(&mut *os.poller, key)
    }
}
