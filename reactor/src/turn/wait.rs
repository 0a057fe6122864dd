//! Stages 1 to 3 of a turn: poll, arm the completion queues, and sleep if there is nothing to do.

use std::time::{Duration, Instant};

use super::adaptive::Adaptive;
use crate::config::Wait;
use crate::driver::Driver;
use crate::driver::run::queues::{Queues, is_of_connection_manager};
use crate::driver::stages::Stages;
use crate::error::Error;
use crate::seam::io::is_of_program;
use crate::seam::poller::{Edge, give_way};

/// `look_interval / FIRST` is the shortest interval between two checks for edges under load. Each check that finds nothing doubles the
/// interval, up to [`Config::look_interval`](crate::Config::look_interval).
const FIRST: u32 = 20;

/// The number of rounds of polling, without a completion, between two readings of the clock.
const ROUNDS: u32 = 8;

/// If polling finds no completion for this time, the thread yields its processor, because the peer may be waiting for the same processor.
const GIVE_WAY: Duration = Duration::from_micros(50);

/// The state of a reactor's waiting: the estimates of the adaptive wait, and the checks for edges of the operating system.
#[derive(Debug)]
pub(super) struct IdleWait {
    adaptive: Adaptive,
    /// A buffer for the edges that one check returns. The buffer is empty between two checks.
    edges: Vec<Edge>, // bound: turn
    /// The edges of the program's descriptors that stage 9 has not handled yet.
    program_edges: Vec<Edge>, // local: descriptors of the program
    /// The time at which the next check for edges takes place, even if the reactor has other work.
    look_at: Instant,
    /// The time from the last check for edges to the next one, while the reactor has other work.
    interval: Duration,
    /// True if this turn has checked for edges.
    looked: bool,
    /// The total number of completions that the reactor had polled at the time when this turn found edges. `None` if this turn has found no
    /// edges.
    woken: Option<u64>,
}

impl IdleWait {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            adaptive: Adaptive::new(now),
            edges: Vec::with_capacity(16),
            program_edges: Vec::new(),
            look_at: now,
            interval: Duration::ZERO,
            looked: false,
            woken: None,
        }
    }

    /// Runs stages 1 to 3: polls, arms and sleeps. `timeout` is the longest time to sleep.
    #[inline]
    pub(super) fn wait(&mut self, driver: &mut Driver, timeout: Option<Duration>) -> Result<(), Error> {
        self.looked = false;
        let begun = driver.now;
        if !driver.has_work() {
            self.spin(driver, timeout)?;
        }
        // The queues are polled before they are armed, because a completion that is polled now
        // raises no event later.
        let idle = !driver.has_work() && !driver.poll_if_changed() && !driver.arm() && !driver.has_due_receives();
        if idle && !driver.os.wake.is_pending() {
            self.sleep(driver, begun, timeout)?;
        } else {
            // The reactor checks for edges regularly, even if it has other work, or completions were deferred to this turn. So a connection
            // with very many completions cannot delay the handling of other connections' edges.
            let is_due = driver.now >= self.look_at && !crate::planted("no-look-under-load");
            if is_due || driver.fair.is_behind() {
                self.look(driver, Some(Duration::ZERO))?;
            }
        }
        if idle && !driver.stages.contains(Stages::PROVIDERS) {
            // The reactor had nothing to do, and no provider has received anything. So the reactor has handled everything that has arrived
            // from peers until now.
            driver.world.table.caught_up(driver.world.now);
        }
        Ok(())
    }

    /// Runs stage 1: polls without sleeping, for as long as the configured wait permits.
    #[inline]
    fn spin(&mut self, driver: &mut Driver, timeout: Option<Duration>) -> Result<(), Error> {
        let from = driver.now;
        let wait = driver.config.wait;
        let budget = match wait {
            Wait::Event => return Ok(()),
            Wait::Spin(budget) => budget,
            // With a timeout of zero, the caller does not want the reactor to wait, so the reactor does not poll for longer. If posts
            // before this stage have caused completions, the idle time has not begun, so the reactor does not poll here either.
            Wait::Adaptive if timeout == Some(Duration::ZERO) || driver.poll_if_changed() => return Ok(()),
            Wait::Adaptive => self.adaptive.budget(from),
        };
        if budget.is_zero() {
            return Ok(());
        }
        let hit = rounds(driver) || self.spin_on(driver, timeout, budget)?;
        let turns = &mut driver.stats.turns;
        turns.spin_hits += u64::from(hit);
        turns.spin_misses += u64::from(!hit);
        if wait == Wait::Adaptive {
            self.adaptive.polled(driver.now.saturating_duration_since(from), hit);
        }
        Ok(())
    }

    /// Continues polling after the first rounds have found nothing. Returns true if there is a completion.
    #[inline(never)]
    fn spin_on(&mut self, driver: &mut Driver, timeout: Option<Duration>, budget: Duration) -> Result<bool, Error> {
        let from = driver.now;
        let mut end = from.checked_add(budget);
        for deadline in [timeout.and_then(|timeout| from.checked_add(timeout)), driver.next_deadline()] {
            end = [end, deadline].into_iter().flatten().min();
        }
        let mut give_way_at = from + GIVE_WAY;
        loop {
            driver.look_at_clock();
            let now = driver.now;
            if now >= self.look_at {
                self.look(driver, Some(Duration::ZERO))?;
            }
            if end.is_some_and(|end| now >= end) || driver.has_work() || driver.os.wake.is_pending() {
                return Ok(false);
            }
            if now >= give_way_at && !crate::planted("spinning-never-gives-way") {
                give_way();
                give_way_at = now + GIVE_WAY;
            }
            if rounds(driver) {
                return Ok(true);
            }
        }
    }

    /// Runs stage 3: sleeps until an edge arrives, the next deadline passes, or `timeout` has passed since `begun`.
    fn sleep(&mut self, driver: &mut Driver, begun: Instant, timeout: Option<Duration>) -> Result<(), Error> {
        self.adaptive.sleeps();
        let mut left = timeout;
        if timeout != Some(Duration::ZERO) {
            if driver.now != begun {
                let spent = driver.now.saturating_duration_since(begun);
                left = timeout.map(|timeout| timeout.saturating_sub(spent));
            }
            if let Some(deadline) = driver.next_deadline() {
                let due = deadline.saturating_duration_since(driver.now);
                left = Some(left.map_or(due, |left| left.min(due)));
            }
        }
        self.look(driver, left)
    }

    /// Waits for edges for at most `timeout`, and sets the flags of the stages that handle them.
    fn look(&mut self, driver: &mut Driver, timeout: Option<Duration>) -> Result<(), Error> {
        self.looked = true;
        driver.os.poller.wait(timeout, &mut self.edges).map_err(Error::Poll)?;
        if timeout != Some(Duration::ZERO) {
            driver.look_at_clock();
        }
        let (found, most) = (!self.edges.is_empty(), driver.config.look_interval);
        self.interval = if found { most / FIRST } else { most.min(self.interval * 2).max(most / FIRST) };
        self.look_at = driver.now + self.interval;
        let stats = &mut driver.stats;
        stats.turns.waits += 1;
        stats.turns.empty_waits += u64::from(!found);
        if found {
            self.woken = Some(stats.completions.polled);
        }
        for edge in self.edges.drain(..) {
            let turns = &mut driver.stats.turns;
            if is_of_program(edge.token) {
                self.program_edges.push(edge);
                driver.note(Stages::DESCRIPTORS);
            } else if is_of_connection_manager(edge.token) {
                turns.cm_edges += 1;
                driver.note(Stages::EVENTS);
            } else {
                turns.completion_edges += 1;
                driver.note(Stages::PROVIDERS);
            }
        }
        Queues::check_providers(&mut driver.world);
        Ok(())
    }

    /// Arms each completion queue that is not armed, and polls it once more. Checks for edges,
    /// unless this turn has done so already. Called before the program waits for the reactor's
    /// descriptor. Returns true if there is something to do.
    pub(super) fn look_before_sleep(&mut self, driver: &mut Driver) -> Result<bool, Error> {
        if driver.arm() {
            return Ok(true);
        }
        if !self.looked {
            self.look(driver, Some(Duration::ZERO))?;
        }
        Ok(driver.has_work())
    }

    /// Returns the edges of the program's descriptors that stage 9 has not handled yet.
    pub(super) const fn program_edges(&mut self) -> &mut Vec<Edge> {
        &mut self.program_edges
    }

    /// Notes that completions were found at `now`, after the queues had been empty.
    #[inline]
    pub(super) fn found(&mut self, now: Instant) {
        self.adaptive.found(now);
    }

    /// Updates the counters of wake-ups at the end of a turn.
    #[inline]
    pub(super) fn end_turn(&mut self, driver: &mut Driver) {
        if let Some(before) = self.woken.take() {
            let stats = &mut driver.stats;
            let polled = stats.completions.polled - before;
            stats.turns.wakes += u64::from(polled > 0);
            stats.turns.wake_completions += polled;
        }
    }
}

/// Runs up to [`ROUNDS`] rounds of polling without reading the clock. Returns true if there is a completion.
#[inline]
fn rounds(driver: &mut Driver) -> bool {
    for _ in 0..ROUNDS {
        driver.stats.turns.spins += 1;
        driver.queues.spin(&mut driver.world);
        if driver.poll_any() {
            return true;
        }
        if driver.has_work() || driver.os.wake.is_pending() {
            break;
        }
    }
    false
}
