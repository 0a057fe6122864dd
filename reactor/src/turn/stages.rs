//! The stages that do not run in every turn. Each one runs if its flag in [`Stages`] is set, or a timer has expired.

use super::deliver::Delivery;
use crate::api::handler::Handler;
use crate::driver::run::queues::Queues;
use crate::driver::stages::Stages;
use crate::driver::{CmStep, TimerPurpose};
use crate::error::Error;
use crate::seam::poller::Edge;

/// The largest number of connection-manager events that are handled in one turn. Device events have a separate limit of the same size.
const EVENTS_PER_TURN: usize = 256;

/// The largest number of connect requests from peers that are handled in one turn. The same limit
/// holds for connect requests from other reactors. A request costs as much time as many messages,
/// so without a limit, peers that connect all the time would delay established connections and
/// handshakes in progress.
const REQUESTS_PER_TURN: usize = 8;

/// The largest number of expired timers that are handled in one turn.
const TIMERS_PER_TURN: usize = 1024;

impl<M, H: Handler<M> + ?Sized> Delivery<'_, M, H> {
    /// Runs stages 4 to 6.
    #[cold]
    pub(super) fn first_stages(&mut self) -> Result<(), Error> {
        Queues::watch_channels(&mut self.driver.world)?;
        if self.driver.stages.take(Stages::EVENTS) {
            self.connection_managers()?;
        }
        if self.driver.stages.take(Stages::PROVIDERS) {
            self.driver.queues.drive(&mut self.driver.world);
        }
        Ok(())
    }

    /// Runs stages 8 to 11.
    #[cold]
    pub(super) fn last_stages(&mut self, edges: &mut Vec<Edge>) -> Result<(), Error> {
        self.timers();
        if self.driver.stages.take(Stages::DESCRIPTORS) {
            self.descriptors(edges);
        }
        self.calls();
        if self.driver.stages.take(Stages::OTHERS | Stages::WAITING_SENDS) {
            self.others();
        }
        // A callback may have opened a device, whose channel must be watched.
        Queues::watch_channels(&mut self.driver.world)?;
        if self.driver.stages.take(Stages::ENDS) {
            self.ends();
        }
        self.driver.finish_drain(!self.endpoints.is_empty());
        // The cached lender may belong to a device that was removed. The cache would keep the memory of that device allocated, so it is
        // cleared.
        *self.lender = None;
        self.flush();
        Ok(())
    }

    /// Runs stage 4, the events of connection managers. If all were handled, also runs stage 5, the events of devices.
    fn connection_managers(&mut self) -> Result<(), Error> {
        // If an error or the limit ends this stage early, the flag for events stays set, so that the next turn handles the remaining
        // events.
        self.driver.note(Stages::EVENTS);
        let mut requests = 0;
        for _ in 0..EVENTS_PER_TURN {
            match self.driver.next_cm()? {
                CmStep::Nothing => {
                    self.devices();
                    return Ok(());
                }
                CmStep::Done => {}
                CmStep::Request(request) => {
                    self.place(request);
                    requests += 1;
                }
                CmStep::Endpoint(number, cm, kind) => self.endpoints.cm_event(self.driver, number, cm, kind),
            }
            self.progressed = true;
            self.events();
            if requests == REQUESTS_PER_TURN {
                // Requests may arrive all the time, and device events must not wait for all of them.
                self.devices();
                self.driver.note(Stages::EVENTS);
                break;
            }
        }
        Ok(())
    }

    /// Runs stage 5: the events of devices.
    fn devices(&mut self) {
        for _ in 0..EVENTS_PER_TURN {
            let Some(report) = self.driver.next_device_event() else {
                self.driver.stages.take(Stages::EVENTS);
                return;
            };
            self.progressed = true;
            if let Some(device) = report.failed {
                self.endpoints.end_on_device(self.driver, device);
            }
            if let Some(event) = report.event {
                self.device_event(&event);
            }
        }
    }

    /// Runs stage 8: the timers that have expired. A timer that a callback of this stage sets waits
    /// for the next turn, even if its delay is zero. So a program that divides its work into
    /// slices, and starts each slice by a timer, does not delay connections.
    fn timers(&mut self) {
        self.driver.stages.take(Stages::TIMERS);
        let (expired, mut left) = (self.driver.timers.expired(self.driver.now), TIMERS_PER_TURN);
        while let Some((key, due)) = self.driver.next_due(&expired, &mut left) {
            match due {
                TimerPurpose::Program(token) => self.timer(key, token),
                TimerPurpose::Endpoint(number) => self.endpoints.on_timer(self.driver, number),
                TimerPurpose::Drain if self.driver.drain_overdue() => self.endpoints.close_all(self.driver, true),
                _ => {}
            }
            self.events();
        }
        self.progressed |= left < TIMERS_PER_TURN;
        self.events();
        if left == 0 {
            self.driver.note(Stages::TIMERS);
        }
    }

    /// Runs the first part of stage 9: descriptors of the program that have become ready.
    fn descriptors(&mut self, edges: &mut Vec<Edge>) {
        for Edge { token, readiness } in edges.drain(..) {
            // A callback may have deregistered the descriptor after the edge was reported.
            if let Some(key) = self.driver.os.io.find(token) {
                self.progressed = true;
                self.driver.stats.turns.io_edges += 1;
                self.io_ready(key, readiness);
            }
        }
        self.events();
    }

    /// Runs the second part of stage 9: handles the buffers and regions that other threads have
    /// released, and a request to stop. Refused sends that wait for the released memory are checked
    /// in the next turn.
    fn calls(&mut self) {
        if self.driver.os.wake.take() {
            self.progressed = true;
            self.driver.note(Stages::OTHERS);
            self.driver.take_returned();
            if self.driver.os.wake.take_stop() {
                self.driver.stop = true;
            }
            self.driver.check_inbox();
        }
    }

    /// Runs the last part of stage 9: connect requests from other reactors, commands from other
    /// threads, and the start of a drain.
    fn others(&mut self) {
        let mut left = REQUESTS_PER_TURN;
        while let Some(request) = self.driver.acceptor.next_arrival(&mut self.driver.world, &mut left) {
            self.progressed = true;
            self.answer(request);
            self.events();
        }
        if left == 0 {
            self.driver.note(Stages::OTHERS);
        }
        self.receiver.begin(self.driver);
        while let Some(message) = self.receiver.next_message(self.driver) {
            self.woken(message);
        }
        self.progressed |= self.receiver.end(self.driver);
        if let Some(deadline) = self.driver.begin_drain() {
            self.progressed = true;
            self.drain(deadline);
        }
        self.events();
    }

    /// Runs stage 10: releases the connections and endpoints that have ended.
    fn ends(&mut self) {
        while let Some(device) = self.driver.devices.next_failed() {
            self.endpoints.end_on_device(self.driver, device);
        }
        for id in self.driver.take_ended() {
            self.progressed = true;
            let last = self.driver.finish(id);
            self.events();
            if let Some(event) = last {
                self.driver.table.begin_last_callback(id);
                self.event(id, event);
            }
            self.driver.release(id);
        }
        self.progressed |= self.endpoints.finish_ended(self.driver);
        self.events();
    }
}
