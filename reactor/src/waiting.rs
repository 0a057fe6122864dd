//! Stages 1 to 3: polls, arms, and sleeps only if there is nothing to do.

use std::time::{Duration, Instant};

use rdma_transport::provider::Drive;

use crate::config::Wait;
use crate::error::Error;
use crate::reactor::{BATCH, Reactor};

/// While there is always work, the operating system is still asked for edges: this often while it has some, and half
/// as often each time that it has none, down to [`LOOK_SELDOM`].
pub(crate) const LOOK_OFTEN: Duration = Duration::from_micros(50);
const LOOK_SELDOM: Duration = Duration::from_millis(1);
/// Empty rounds of polling between two looks at the clock.
const ROUNDS: u32 = 8;

impl<M> Reactor<M> {
    /// Stage 1: polls without sleeping while the budget lasts.
    pub(crate) fn spin(&mut self, sleep_until: Option<Option<Instant>>) -> Result<(), Error> {
        if self.has_more() {
            return Ok(());
        }
        let from = self.core.now;
        let adaptive = self.core.config.wait == Wait::Adaptive;
        let budget = match self.core.config.wait {
            Wait::Event => return Ok(()),
            Wait::Spin(budget) => budget,
            Wait::Adaptive => {
                // Who does not want to wait wants no polling either; what the flush has completed ends no idle time.
                if sleep_until == Some(Some(from)) || self.poll_any()? {
                    return Ok(());
                }
                let budget = self.adaptive.budget(from);
                if budget.is_zero() {
                    return Ok(());
                }
                budget
            }
        };
        let mut until = from.checked_add(budget);
        for deadline in [sleep_until.flatten(), self.next_deadline()].into_iter().flatten() {
            until = Some(until.map_or(deadline, |until| until.min(deadline)));
        }
        let hit = self.spin_until(until)?;
        self.core.stats.spin_hits += u64::from(hit);
        self.core.stats.spin_misses += u64::from(!hit);
        if adaptive {
            self.adaptive.polled(self.core.now.saturating_duration_since(from), hit);
        }
        Ok(())
    }

    /// Polls until there is a completion, and says so; or something else to do.
    fn spin_until(&mut self, until: Option<Instant>) -> Result<bool, Error> {
        loop {
            let mut more = false;
            for _ in 0..ROUNDS {
                self.core.stats.spins += 1;
                more = self.core.provider.progress(self.core.now, Drive::Spin);
                self.provider_pending |= more;
                if self.poll_any()? {
                    return Ok(true);
                }
                if more || self.core.wake.is_pending() {
                    break;
                }
            }
            self.core.now = self.clock.now();
            if until.is_some_and(|until| self.core.now >= until) || more {
                return Ok(false);
            }
            if self.core.now.saturating_duration_since(self.last_wait) > self.look_again {
                self.look(Some(Duration::ZERO))?;
            }
            if !self.edges.is_empty() || self.core.wake.is_pending() {
                return Ok(false);
            }
        }
    }

    /// Completions to ask a queue for before its turn.
    pub(crate) fn most(&self) -> usize {
        BATCH.min(self.core.config.completions_per_turn as usize)
    }

    /// Polls the completion queues until one has something; whether one has.
    pub(crate) fn poll_any(&mut self) -> Result<bool, Error> {
        if self.has_completions() {
            return Ok(true);
        }
        let most = self.most();
        for (d, device) in self.core.devices.iter_mut().enumerate() {
            let Some(device) = device else { continue };
            for (i, cq) in device.cqs.iter_mut().enumerate() {
                self.batch.clear();
                if self.core.provider.poll_cq(cq.id, most, &mut self.batch)? > 0 {
                    self.batch_of = Some((d, i));
                    return Ok(true);
                }
                cq.drained();
            }
        }
        Ok(false)
    }

    /// Stages 2 and 3: arms what is not armed, looks once more, and sleeps only if there is nothing to do.
    pub(crate) fn arm_and_wait(&mut self, sleep_until: Option<Option<Instant>>) -> Result<(), Error> {
        let mut timeout = None;
        let mut busy = self.has_more() || !self.edges.is_empty() || self.poll_any()?;
        if !busy {
            self.arm()?;
            if self.poll_any()? {
                self.core.stats.arm_races += 1;
                busy = true;
            }
        }
        if busy || self.core.wake.is_pending() {
            // A flood that has to wait for its next share must not keep the others' edges from being seen.
            let recent = self.core.now.saturating_duration_since(self.last_wait) < self.look_again;
            if recent && !self.core.fair.is_behind() {
                return Ok(());
            }
            timeout = Some(Duration::ZERO);
        } else {
            for deadline in [sleep_until.flatten(), self.next_deadline()].into_iter().flatten() {
                let left = deadline.saturating_duration_since(self.core.now);
                timeout = Some(timeout.map_or(left, |t: Duration| t.min(left)));
            }
            self.adaptive.sleeps();
        }
        self.look(timeout)
    }

    /// Arms the queues that are not armed, after taking all events of those that were.
    pub(crate) fn arm(&mut self) -> Result<(), Error> {
        for device in self.core.devices.iter_mut().flatten() {
            if std::mem::take(&mut device.has_events) {
                while let Some(id) = self.core.provider.next_completion_event(device.id)? {
                    self.core.stats.completion_events += 1;
                    if let Some(cq) = device.cqs.iter_mut().find(|cq| cq.id == id) {
                        cq.armed = false;
                    }
                }
            }
            for cq in &mut device.cqs {
                if !cq.armed {
                    self.core.provider.req_notify(cq.id)?;
                    cq.armed = true;
                    self.core.stats.arms += 1;
                }
            }
        }
        Ok(())
    }

    /// Asks the operating system for edges.
    pub(crate) fn look(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        let before = self.edges.len();
        self.looked = true;
        self.core.poller.wait(timeout, &mut self.edges).map_err(Error::Poll)?;
        self.core.stats.waits += 1;
        self.core.stats.empty_waits += u64::from(self.edges.len() == before);
        self.core.now = self.clock.now();
        self.last_wait = self.core.now;
        if self.edges.len() > before {
            self.edge = Some(self.core.now);
            self.look_again = LOOK_OFTEN;
        } else {
            self.look_again = (self.look_again * 2).min(LOOK_SELDOM);
        }
        Ok(())
    }
}
