//! Timers of the program.

use std::time::Duration;

use crate::driver::{Driver, TimerPurpose};
use crate::id::TimerId;
use crate::seam::timer::FOREVER;

/// The operations on timers, from [`Context::timers`](crate::Context::timers).
#[derive(Debug)]
pub struct TimerContext<'a> {
    pub(super) driver: &'a mut Driver,
}

impl TimerContext<'_> {
    /// Sets a timer. The reactor calls `on_timer` once, with `token`, when `delay` has passed. The
    /// delay begins with this call, and not with the turn in which the current callback runs. While
    /// the reactor sleeps, the resolution is about a millisecond.
    ///
    /// A timer that `on_timer` sets expires in a later turn, even if the delay is zero. So a
    /// program can do long work in slices, one for each timer: the reactor serves its connections
    /// between them.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use rdma_reactor::{Config, Context, Handler, ProviderChoice, Reactor, TimerId};
    ///
    /// /// Counts three ticks, a millisecond apart.
    /// struct Ticks(u64);
    ///
    /// impl Handler for Ticks {
    ///     fn on_timer(&mut self, cx: &mut Context<'_>, _: TimerId, token: u64) {
    ///         self.0 += 1;
    ///         if token == 3 {
    ///             cx.stop();
    ///         } else {
    ///             cx.timers().set(Duration::from_millis(1), token + 1);
    ///         }
    ///     }
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (mut reactor, mut ticks) = (Reactor::new(Config::default().provider(ProviderChoice::Iwarp))?, Ticks(0));
    /// reactor.context().timers().set(Duration::from_millis(1), 1);
    /// reactor.run(&mut ticks)?;
    /// assert_eq!(ticks.0, 3);
    /// # Ok(())
    /// # }
    /// ```
    pub fn set(&mut self, delay: Duration, token: u64) -> TimerId {
        self.driver.look_at_clock();
        let now = self.driver.now;
        // If the sum overflows, because the delay is very long, the timer expires in `FOREVER` (30
        // years) instead.
        let at = now.checked_add(delay).unwrap_or(now + FOREVER);
        let key = self.driver.timers.insert(at, TimerPurpose::Program(token));
        // A program that embeds the reactor in its own loop may be waiting for a later deadline
        // than that of the new timer. `ring` wakes the program, so that it queries the reactor's
        // next deadline again.
        self.driver.ring();
        TimerId::new(self.driver.tag(), key)
    }

    /// Cancels a timer. Returns `true` if it was pending. Returns `false` if it has expired, was
    /// cancelled before, or belongs to another reactor.
    pub fn cancel(&mut self, timer: TimerId) -> bool {
        let Some(key) = timer.key(self.driver.tag()) else { return false };
        self.driver.timers.cancel(key).is_some()
    }
}
