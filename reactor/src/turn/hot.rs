//! The hot loop: waits, polls completions, calls their callbacks, and posts the work requests of these.
//! [`Driver::is_due`](crate::driver::Driver::is_due) guards the other stages of a turn.

use std::time::Duration;

use super::Reactor;
use super::deliver::Delivery;
use crate::api::handler::Handler;
use crate::error::Error;

impl<M> Reactor<M> {
    /// Runs the stages of a turn; `docs/loop.md` describes them and their order. Returns true if the reactor made progress. The work that a
    /// failed stage leaves is done in the next turn.
    #[inline]
    pub(super) fn stages<H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        timeout: Option<Duration>,
    ) -> Result<bool, Error> {
        let Self { driver, endpoints, receiver, lender, .. } = self;
        driver.counters().turns.taken += 1;
        let mut delivery = Delivery { driver, endpoints, receiver, handler, lender, progressed: false };
        // Requests from outside of a turn are posted before anything sleeps.
        delivery.flush();
        // 1. spin  2. arm  3. wait
        self.idle_wait.wait(delivery.driver, timeout)?;
        if delivery.driver.is_due() {
            // 4. connection managers  5. devices  6. providers
            delivery.first_stages()?;
        }
        // 7. completion queues, and the posts that follow from them
        let now = delivery.driver.now();
        if delivery.completions() {
            self.idle_wait.found(now);
        }
        if delivery.driver.is_due() {
            // 8. timers  9. descriptors, other threads  10. ends  11. flush
            delivery.last_stages(self.idle_wait.program_edges())?;
        }
        Ok(delivery.progressed)
    }
}

impl<M, H: Handler<M> + ?Sized> Delivery<'_, M, H> {
    /// Runs stage 7: first the backlogs of connections, the oldest first; then the completion queues in turn, until all are empty or the
    /// turn's budget is used up; then the posts, and their queues once more. Returns true if there were completions in the queues.
    #[inline]
    fn completions(&mut self) -> bool {
        self.driver.begin_turn();
        let mut budget = self.driver.config().completions.per_turn as usize;
        if self.driver.is_behind() {
            self.progressed = true;
            // Backlogs get at most half of the turn, because the messages of other connections wait in the queues
            // meanwhile.
            let mut left = budget.div_ceil(2);
            budget -= left;
            self.backlogs(&mut left);
            budget += left;
        }
        let early = self.driver.begin_polling();
        let found = self.batches(early, &mut budget);
        // A call from outside of a turn may have left events.
        self.events();
        // Flush now: replies must not wait for timers and later stages.
        self.post_and_look(&mut budget) || found
    }

    /// Runs the rest of stage 7 once more, for a program that makes requests when the turn is over.
    pub(super) fn resume(&mut self) -> bool {
        let mut budget = self.driver.config().completions.per_turn as usize;
        let found = self.driver.resume_polling() && self.batches(true, &mut budget);
        self.events();
        self.post_and_look(&mut budget) || found
    }

    /// Posts the gathered work requests, and polls once more the queues whose work completed during the post. It does so only once, so that
    /// the later stages get their turn.
    #[inline]
    fn post_and_look(&mut self, budget: &mut usize) -> bool {
        self.flush();
        let found = *budget > 0 && self.driver.has_unseen() && self.batches(false, budget);
        self.driver.end_polling();
        if found {
            self.flush();
        }
        found
    }

    /// Handles the completions of queues that are ready, while `budget` lasts, and reports capacity for sends. `early`: a batch was polled
    /// earlier. It is always handled, because its completions are in no queue any more. Returns true if there were completions.
    #[inline]
    fn batches(&mut self, early: bool, budget: &mut usize) -> bool {
        let any = early || (*budget > 0 && self.driver.next_batch(*budget));
        let mut found = any;
        while found {
            self.progressed = true;
            let len = self.driver.begin_batch();
            *budget = budget.saturating_sub(len);
            let some = if cfg!(planted = "tail-of-a-batch-dropped") { len.min(8) } else { len };
            for nth in 0..some {
                if let Some(number) = self.driver.complete(nth) {
                    self.endpoint_completion(number, nth);
                }
                self.events();
            }
            *budget += self.driver.end_batch();
            found = *budget > 0 && self.driver.next_batch(*budget);
        }
        while self.driver.next_writable() || self.endpoints.next_writable() {
            self.events();
        }
        any
    }

    /// Passes the batch's `nth` completion to the endpoint that posted its work request.
    #[cold]
    fn endpoint_completion(&mut self, number: u64, nth: usize) {
        if let Some(&wc) = self.driver.queues().completion(nth).map(|(_, wc)| wc) {
            self.endpoints.completed(self.driver, number, &wc);
        }
    }

    /// Gives each connection with a backlog its share of the turn, the oldest first, while `budget` lasts.
    #[cold]
    fn backlogs(&mut self, budget: &mut usize) {
        let mut waiting = self.driver.take_waiting();
        while *budget > 0 {
            let Some(id) = waiting.pop_front() else { break };
            while *budget > 0 {
                let Some(wc) = self.driver.next_deferred(id) else { break };
                *budget -= 1;
                self.driver.complete_deferred(id, &wc);
                self.events();
            }
            if *budget == 0 {
                self.driver.wait_on(id);
            }
        }
        self.driver.put_waiting(waiting);
    }

    /// Posts all gathered work requests.
    #[inline]
    pub(super) fn flush(&mut self) {
        self.driver.flush();
        self.endpoints.flush(self.driver);
    }
}
