//! The stages that run in every turn. These stages wait, poll completions, make the callbacks for
//! these completions, and post the work requests that the callbacks have queued. The other stages
//! run only if [`World::is_due`](crate::driver::World::is_due) returns true.

use std::time::Duration;

use super::Reactor;
use super::deliver::Delivery;
use crate::api::handler::Handler;
use crate::error::Error;

impl<M> Reactor<M> {
    /// Runs the stages of a turn. `docs/loop.md` describes them and their order. Returns true if the reactor made progress. If a stage
    /// returns an error, the next turn does the remaining work of that stage.
    #[inline]
    pub(super) fn stages<H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        timeout: Option<Duration>,
    ) -> Result<bool, Error> {
        let Self { driver, endpoints, receiver, lender, .. } = self;
        driver.stats.turns.taken += 1;
        let mut delivery = Delivery { driver, endpoints, receiver, handler, lender, progressed: false };
        // Posts the work requests that the program has queued outside of a turn. The reactor must not sleep before that.
        delivery.flush();
        // A turn that has made a callback does not sleep.
        let timeout = if delivery.progressed { Some(Duration::ZERO) } else { timeout };
        // Stages 1 to 3: poll without sleeping, arm the completion queues, and sleep.
        self.idle_wait.wait(delivery.driver, timeout)?;
        if delivery.driver.is_due() {
            // Stages 4 to 6: connection managers, devices and providers.
            delivery.first_stages()?;
        }
        // Stage 7: completion queues, and the work requests that the callbacks of this stage have queued.
        let now = delivery.driver.now;
        if delivery.completions() {
            self.idle_wait.found(now);
        }
        if delivery.driver.is_due() {
            // Stages 8 to 11: timers, descriptors and other threads, ended connections, and the remaining work requests.
            delivery.last_stages(self.idle_wait.program_edges())?;
        }
        Ok(delivery.progressed)
    }
}

impl<M, H: Handler<M> + ?Sized> Delivery<'_, M, H> {
    /// Runs stage 7. It handles, in this order:
    /// - the backlogs of connections, the oldest first,
    /// - the completion queues in turn, until all are empty or the turn's limit is reached,
    /// - the collected work requests, which this stage posts, and after that the completion queues to which this posting has added
    ///   completions.
    ///
    /// Returns true if the queues had completions.
    #[inline]
    fn completions(&mut self) -> bool {
        self.driver.fair.begin_turn(&mut self.driver.world);
        let mut budget = self.driver.config.completions.per_turn as usize;
        if self.driver.fair.is_behind() {
            self.progressed = true;
            // Backlogs use at most half of the turn's limit. The other half is for the completions of other connections, which wait in the
            // queues.
            let mut left = budget.div_ceil(2);
            budget -= left;
            self.backlogs(&mut left);
            budget += left;
        }
        let early = self.driver.queues.begin_polling(&mut self.driver.world);
        let found = self.batches(early, &mut budget);
        // A call outside of a turn may have queued callbacks. These callbacks are made here, even if there was no completion.
        self.events();
        // Work requests are posted here, and not only in stage 11, so that replies to messages do not wait for stages 8 to 10.
        self.post_and_look(&mut budget) || found
    }

    /// Runs the last part of stage 7 again, because the program may have made requests after the turn. Returns true if the queues had
    /// completions.
    pub(super) fn resume(&mut self) -> bool {
        let mut budget = self.driver.config.completions.per_turn as usize;
        let found = self.driver.queues.resume_polling() && self.batches(true, &mut budget);
        self.events();
        self.post_and_look(&mut budget) || found
    }

    /// Posts the collected work requests, and handles the completions that this posting has
    /// caused. The callbacks of these completions may queue further work requests, which are also
    /// posted. The completions of these further work requests are handled later, so that the next
    /// stages are not delayed. Returns true if this function has handled completions.
    #[inline]
    fn post_and_look(&mut self, budget: &mut usize) -> bool {
        self.flush();
        let found = *budget > 0 && self.driver.queues.has_unseen() && self.batches(false, budget);
        self.driver.queues.end_polling();
        if found {
            self.flush();
        }
        found
    }

    /// Handles the completions of the queues that stage 7 must still poll, up to `budget`
    /// completions. After that, calls `on_writable` or `on_datagram_writable` for connections and
    /// endpoints on which a refused send would be accepted now. Returns true if there were
    /// completions.
    ///
    /// If `early` is true, a batch was polled before this stage. This batch is handled even if it exceeds `budget`, because its completions
    /// were already removed from the queue.
    #[inline]
    fn batches(&mut self, early: bool, budget: &mut usize) -> bool {
        let any = early || (*budget > 0 && self.driver.next_batch(*budget));
        let mut found = any;
        while found {
            self.progressed = true;
            let len = self.driver.queues.begin_batch(&mut self.driver.world);
            *budget = budget.saturating_sub(len);
            let some = if crate::planted("tail-of-a-batch-dropped") { len.min(8) } else { len };
            for nth in 0..some {
                if let Some(number) = self.driver.complete(nth) {
                    self.endpoint_completion(number, nth);
                }
                self.events();
            }
            *budget += self.driver.queues.end_batch(&mut self.driver.world);
            found = *budget > 0 && self.driver.next_batch(*budget);
        }
        while self.driver.large.next_writable(&mut self.driver.world) || self.endpoints.next_writable() {
            self.events();
        }
        any
    }

    /// Passes completion `nth` of the batch to the endpoint `number`, which posted the completed work request.
    #[cold]
    fn endpoint_completion(&mut self, number: u64, nth: usize) {
        if let Some(&wc) = self.driver.queues.completion(nth).map(|(_, wc)| wc) {
            self.endpoints.completed(self.driver, number, &wc);
        }
    }

    /// Handles the backlogs of connections, the oldest first, up to `budget` completions. Each connection handles at most as many
    /// completions as its limits permit.
    #[cold]
    fn backlogs(&mut self, budget: &mut usize) {
        let mut waiting = self.driver.fair.take_waiting();
        while *budget > 0 {
            let Some(id) = waiting.pop_front() else { break };
            while *budget > 0 {
                let Some(wc) = self.driver.fair.next_deferred(&mut self.driver.world, id) else { break };
                *budget -= 1;
                self.driver.complete_deferred(id, &wc);
                self.events();
            }
            if *budget == 0 {
                self.driver.fair.wait_on(&self.driver.world, id);
            }
        }
        self.driver.fair.put_waiting(waiting);
    }

    /// Posts the collected work requests of all connections and endpoints.
    #[inline(always)]
    pub(super) fn flush(&mut self) {
        if self.driver.has_to_flush() {
            self.flush_connections();
        }
        self.endpoints.flush(self.driver);
    }

    /// Posts the collected work requests of all connections. If a connection comes up meanwhile, calls its `on_connect`, and continues.
    fn flush_connections(&mut self) {
        self.driver.flush();
        while self.driver.effects.has_connected() {
            self.events();
            self.driver.flush();
        }
    }
}
