//! Stages 1 to 3 of a turn poll, arm, and sleep only if there is nothing to do.

use std::time::{Duration, Instant};

use super::adaptive::Adaptive;
use crate::config::{Config, Wait};
use crate::driver::Driver;
use crate::error::Error;
use crate::seam::io::is_of_program;
use crate::seam::poller::Edge;

/// Shortest time between two requests for edges while there is always work. The time doubles with each request that
/// finds no edge, up to [`POLL_OS_SELDOM`].
const POLL_OS_OFTEN: Duration = Duration::from_micros(50);
const POLL_OS_SELDOM: Duration = Duration::from_millis(1);

/// Number of empty rounds of polling between two looks at the clock.
const ROUNDS: u32 = 8;

/// The waiting of a reactor: its estimates, and the edges that the operating system has reported.
#[derive(Debug)]
pub(super) struct Waiting {
    adaptive: Adaptive,
    /// This turn's edges of the reactor's own channels.
    edges: Vec<Edge>,
    /// This turn's edges of the program's descriptors.
    program_edges: Vec<Edge>,
    /// This turn has asked the operating system for edges.
    polled_os: bool,
    last_os_poll: Instant,
    /// Time from the last request for edges to the next one while there is work.
    os_poll_interval: Duration,
    /// Time at which this turn's edges came; `None` after the first completions of the turn were found.
    edge: Option<Instant>,
    /// Number of completions polled before an edge led to some in this turn.
    woken: Option<u64>,
}

/// The caller's limit of sleeping; `None`: it set no timeout, `Some(None)`: its timeout is too far away to be a time.
type Until = Option<Option<Instant>>;

impl Waiting {
    pub(super) fn new(config: &Config, now: Instant) -> Self {
        Self {
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

    /// Takes stages 1 to 3. `more`: some stage has something left to do.
    pub(super) fn wait(&mut self, driver: &mut Driver, more: bool, timeout: Option<Duration>) -> Result<(), Error> {
        self.polled_os = false;
        let until: Until = timeout.map(|timeout| driver.now().checked_add(timeout));
        if !more {
            self.spin(driver, until)?;
        }
        self.arm_and_wait(driver, more, until)?;
        if self.edges.iter().any(|edge| is_of_program(edge.token)) {
            self.program_edges.extend(self.edges.extract_if(.., |edge| is_of_program(edge.token)));
        }
        Ok(())
    }

    /// Takes stage 1: polls without sleeping while the budget lasts.
    fn spin(&mut self, driver: &mut Driver, until: Until) -> Result<(), Error> {
        let from = driver.now();
        let wait = driver.config().wait;
        let budget = match wait {
            Wait::Event => return Ok(()),
            Wait::Spin(budget) => budget,
            Wait::Adaptive => {
                // A caller that does not want to wait wants no polling either. Completions from the flush end no idle
                // time.
                if until == Some(Some(from)) || driver.poll_news() {
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

    /// Polls until there is a completion, something else to do, or `end` has passed. Returns whether there is a
    /// completion.
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
            driver.look_at_clock();
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

    /// Takes stages 2 and 3: arms the queues that are not armed, polls once more, and sleeps only if there is nothing
    /// to do.
    fn arm_and_wait(&mut self, driver: &mut Driver, more: bool, until: Until) -> Result<(), Error> {
        let mut timeout = None;
        // A busy poll may have stopped at the provider's bound, with octets left that raise no edge again.
        let pending = driver.queues().provider_pending && !cfg!(planted = "busy-poll-hides-the-rest");
        let mut busy = more || pending || driver.has_work() || !self.edges.is_empty() || driver.poll_news();
        if !busy {
            busy = driver.arm();
        }
        if busy || driver.os().wake.is_pending() {
            // A flood that has to wait for its next turn must not hide the edges of others.
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
        driver.look_at_clock();
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

    /// Arms, and looks once more at everything, before the caller of a turn sleeps on the reactor's descriptor. Returns
    /// whether there is something to do.
    pub(super) fn look_before_sleep(&mut self, driver: &mut Driver) -> Result<bool, Error> {
        if driver.arm() {
            return Ok(true);
        }
        if !self.polled_os {
            self.poll_os(driver, Some(Duration::ZERO))?;
        }
        Ok(!self.edges.is_empty())
    }

    /// Takes the edges with `token`, a channel of the reactor's own, out of this turn's edges. Returns whether there
    /// were any.
    pub(super) fn take_edge(&mut self, driver: &mut Driver, token: usize) -> bool {
        let had = self.edges.iter().any(|edge| edge.token == token);
        if had {
            self.edges.retain(|edge| edge.token != token);
            driver.counters().turns.cm_edges += 1;
        }
        had
    }

    /// This turn's edges of the program's descriptors.
    pub(super) const fn program_edges(&mut self) -> &mut Vec<Edge> {
        &mut self.program_edges
    }

    /// Takes stage 6: drives the provider. Returns whether there may be news from the connection manager.
    pub(super) fn drive(&mut self, driver: &mut Driver) -> bool {
        driver.counters().turns.completion_edges += self.edges.len() as u64;
        let news = driver.drive(!self.edges.is_empty());
        self.edges.clear();
        news
    }

    /// Notes that there are completions, and that their callbacks follow.
    pub(super) fn found(&mut self, driver: &mut Driver) {
        self.adaptive.found(driver.now());
        if let Some(edge) = self.edge.take() {
            let time = driver.os_mut().clock.now().saturating_duration_since(edge);
            let stats = driver.counters();
            self.woken = Some(stats.completions.polled);
            stats.turns.wakes += 1;
            stats.turns.wake_time += time;
            stats.turns.wake_time_max = stats.turns.wake_time_max.max(time);
        }
    }

    /// Closes the accounts of a turn that has ended.
    pub(super) fn end_turn(&mut self, driver: &mut Driver) {
        self.edge = None;
        if let Some(before) = self.woken.take() {
            let stats = driver.counters();
            stats.turns.wake_completions += stats.completions.polled - before;
        }
    }
}
