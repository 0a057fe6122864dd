//! Stages 1 to 3: polls, arms, and sleeps only if there is nothing to do.

use std::time::{Duration, Instant};

use super::adaptive::Adaptive;
use crate::config::{Config, Wait};
use crate::driver::Driver;
use crate::error::Error;
use crate::seam::io::is_of_program;
use crate::seam::poller::{Clock, Edge};

/// While there is always work, the operating system is still asked for edges: this often while it has some, and half
/// as often each time that it has none, down to [`POLL_OS_SELDOM`].
const POLL_OS_OFTEN: Duration = Duration::from_micros(50);
const POLL_OS_SELDOM: Duration = Duration::from_millis(1);

/// Empty rounds of polling between two looks at the clock.
const ROUNDS: u32 = 8;

/// How a reactor waits, and what the operating system has said.
#[derive(Debug)]
pub(super) struct Waiting {
    clock: Box<dyn Clock>,
    adaptive: Adaptive,
    /// This turn's edges of the reactor's own channels.
    edges: Vec<Edge>,
    /// This turn's edges of the program's descriptors.
    program_edges: Vec<Edge>,
    /// This turn has asked the operating system for edges.
    polled_os: bool,
    last_os_poll: Instant,
    /// Time from that to the next look while there is work.
    os_poll_interval: Duration,
    /// When this turn's edges came, until its first callback.
    edge: Option<Instant>,
    /// Completions that there had been when an edge led to some in this turn.
    woken: Option<u64>,
}

/// Until when to sleep at most; `Until(None)`: for ever.
type Until = Option<Option<Instant>>;

impl Waiting {
    pub(super) fn new(config: &Config, clock: Box<dyn Clock>, now: Instant) -> Self {
        Self {
            clock,
            adaptive: Adaptive::new(config.poll_share, now),
            edges: Vec::with_capacity(16),
            program_edges: Vec::new(),
            polled_os: false,
            last_os_poll: now,
            os_poll_interval: POLL_OS_OFTEN,
            edge: None,
            woken: None,
        }
    }

    pub(super) fn now(&mut self) -> Instant {
        self.clock.now()
    }

    /// Stages 1 to 3. `more`: some stage has something left to do.
    pub(super) fn wait(&mut self, driver: &mut Driver, more: bool, timeout: Option<Duration>) -> Result<(), Error> {
        self.polled_os = false;
        let until: Until = timeout.map(|timeout| driver.now().checked_add(timeout));
        if !more {
            self.spin(driver, until)?;
        }
        self.arm_and_wait(driver, more, until)?;
        self.program_edges.extend(self.edges.extract_if(.., |edge| is_of_program(edge.token)));
        Ok(())
    }

    /// Stage 1: polls without sleeping while the budget lasts.
    fn spin(&mut self, driver: &mut Driver, until: Until) -> Result<(), Error> {
        let from = driver.now();
        let wait = driver.config().wait;
        let budget = match wait {
            Wait::Event => return Ok(()),
            Wait::Spin(budget) => budget,
            Wait::Adaptive => {
                // A caller that does not want to wait wants no polling either; what the flush has completed ends no idle time.
                if until == Some(Some(from)) || driver.poll_any() {
                    return Ok(());
                }
                let budget = self.adaptive.budget(from);
                if budget.is_zero() {
                    return Ok(());
                }
                budget
            }
        };
        let mut end = from.checked_add(budget);
        for deadline in [until.flatten(), driver.next_deadline()].into_iter().flatten() {
            end = Some(end.map_or(deadline, |end| end.min(deadline)));
        }
        let hit = self.spin_until(driver, end)?;
        let turns = &mut driver.counters().turns;
        turns.spin_hits += u64::from(hit);
        turns.spin_misses += u64::from(!hit);
        if wait == Wait::Adaptive {
            self.adaptive.polled(driver.now().saturating_duration_since(from), hit);
        }
        Ok(())
    }

    /// Polls until there is a completion, and says so; or something else to do.
    fn spin_until(&mut self, driver: &mut Driver, end: Option<Instant>) -> Result<bool, Error> {
        loop {
            let mut more = false;
            for _ in 0..ROUNDS {
                driver.counters().turns.spins += 1;
                more = driver.spin();
                if driver.poll_any() {
                    return Ok(true);
                }
                if more || driver.os().wake.is_pending() {
                    break;
                }
            }
            driver.set_now(self.clock.now());
            if end.is_some_and(|end| driver.now() >= end) || more {
                return Ok(false);
            }
            if driver.now().saturating_duration_since(self.last_os_poll) > self.os_poll_interval {
                self.poll_os(driver, Some(Duration::ZERO))?;
            }
            if !self.edges.is_empty() || driver.os().wake.is_pending() {
                return Ok(false);
            }
        }
    }

    /// Stages 2 and 3: arms what is not armed, looks once more, and sleeps only if there is nothing to do.
    fn arm_and_wait(&mut self, driver: &mut Driver, more: bool, until: Until) -> Result<(), Error> {
        let mut timeout = None;
        let mut busy = more || driver.has_work() || !self.edges.is_empty() || driver.poll_any();
        if !busy {
            driver.arm();
            if driver.poll_any() {
                driver.counters().completions.arm_races += 1;
                busy = true;
            }
            // A device that could not be armed has failed.
            busy |= driver.has_work();
        }
        if busy || driver.os().wake.is_pending() {
            // A flood that has to wait for its next turn must not keep the others' edges from being seen.
            let recent = driver.now().saturating_duration_since(self.last_os_poll) < self.os_poll_interval;
            if recent && !driver.is_behind() {
                return Ok(());
            }
            timeout = Some(Duration::ZERO);
        } else {
            for deadline in [until.flatten(), driver.next_deadline()].into_iter().flatten() {
                let left = deadline.saturating_duration_since(driver.now());
                timeout = Some(timeout.map_or(left, |timeout: Duration| timeout.min(left)));
            }
            self.adaptive.sleeps();
        }
        self.poll_os(driver, timeout)
    }

    /// Asks the operating system for edges.
    fn poll_os(&mut self, driver: &mut Driver, timeout: Option<Duration>) -> Result<(), Error> {
        let before = self.edges.len();
        self.polled_os = true;
        driver.os_mut().poller.wait(timeout, &mut self.edges).map_err(Error::Poll)?;
        driver.set_now(self.clock.now());
        let turns = &mut driver.counters().turns;
        turns.waits += 1;
        turns.empty_waits += u64::from(self.edges.len() == before);
        self.last_os_poll = driver.now();
        if self.edges.len() > before {
            self.edge = Some(driver.now());
            self.os_poll_interval = POLL_OS_OFTEN;
        } else {
            self.os_poll_interval = (self.os_poll_interval * 2).min(POLL_OS_SELDOM);
        }
        Ok(())
    }

    /// Before the caller of a turn sleeps on the reactor's descriptor: arms, and looks once more at everything. Whether there
    /// is something to do.
    pub(super) fn look_before_sleep(&mut self, driver: &mut Driver) -> Result<bool, Error> {
        driver.arm();
        if driver.poll_any() || driver.has_work() {
            return Ok(true);
        }
        if !self.polled_os {
            self.poll_os(driver, Some(Duration::ZERO))?;
        }
        Ok(!self.edges.is_empty())
    }

    /// Whether there was an edge of a channel of the reactor's own.
    pub(super) fn take_edge(&mut self, driver: &mut Driver, token: usize) -> bool {
        let before = self.edges.len();
        self.edges.retain(|edge| edge.token != token);
        let had = self.edges.len() < before;
        driver.counters().turns.cm_edges += u64::from(had);
        had
    }

    /// This turn's edges of the program's descriptors.
    pub(super) const fn program_edges(&mut self) -> &mut Vec<Edge> {
        &mut self.program_edges
    }

    /// Stage 6: lets the provider move. Whether there may be news from the connection manager.
    pub(super) fn drive(&mut self, driver: &mut Driver) -> bool {
        driver.counters().turns.completion_edges += self.edges.len() as u64;
        let news = driver.drive(!self.edges.is_empty());
        self.edges.clear();
        news
    }

    /// There are completions, and callbacks follow.
    pub(super) fn found(&mut self, driver: &mut Driver) {
        self.adaptive.found(driver.now());
        if let Some(edge) = self.edge.take() {
            let time = self.clock.now().saturating_duration_since(edge);
            let stats = driver.counters();
            self.woken = Some(stats.completions.polled);
            stats.turns.wakes += 1;
            stats.turns.wake_time += time;
            stats.turns.wake_time_max = stats.turns.wake_time_max.max(time);
        }
    }

    /// A turn has ended.
    pub(super) fn end_turn(&mut self, driver: &mut Driver) {
        self.edge = None;
        if let Some(before) = self.woken.take() {
            let stats = driver.counters();
            stats.turns.wake_completions += stats.completions.polled - before;
        }
    }
}
