//! The completion queues and the channels: the order in which queues are polled, and the times at which they are armed.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;

use rdma_transport::cq::Notify;
use rdma_transport::provider::{Channel, Drive, Provider};
use rdma_transport::wc::WorkCompletion;

use crate::config::Config;
use crate::device::cq::{CompletionQueue, CqIndex};
use crate::driver::Driver;
use crate::driver::stages::Stages;
use crate::error::Error;
use crate::providers::{MAX_PROVIDERS, device_of};
use crate::seam::poller::Interest;

/// The largest number of completions that are polled from a queue with one call.
const BATCH: usize = 256;

/// An index that no queue has.
const NO_QUEUE: CqIndex = (usize::MAX, usize::MAX);

/// Returns true if a poller token is that of a connection-manager channel. Such a token is the index of the provider. The tokens of
/// completion channels are larger: `MAX_PROVIDERS` plus the index of the device.
pub(crate) const fn is_of_connection_manager(token: usize) -> bool {
    token < MAX_PROVIDERS
}

/// The completions that the last poll of a queue has returned, in the order of the queue.
#[derive(Debug)]
struct CompletionBatch {
    completions: Vec<WorkCompletion>, // bound: completions
    queue: CqIndex,
    /// True if the poll returned as many completions as its limit allowed, so that the queue may have more.
    full: bool,
    /// True if the poll took place before stage 7, and the completions wait for that stage.
    early: bool,
}

/// The completion queues of all devices, and the batch of completions that is being handled.
#[derive(Debug)]
pub(crate) struct Queues {
    batch: CompletionBatch,
    /// The queues that stage 7 must still poll, in this order.
    ready: VecDeque<CqIndex>, // bound: completions
    /// True during stage 7. If a send is posted during this stage and completes when it is posted, its completion queue is polled again.
    polling: bool,
    /// True if stage 7 found all queues empty, and nothing has happened since that could have added a completion without an event.
    quiet: bool,
    /// The largest number of completions that are polled from a queue before stage 7.
    early_limit: usize,
    /// The number of completions of the batch that do not count towards the limit of the turn, because their connections are ending without
    /// having been up.
    pub(in crate::driver) spared: usize,
}

impl Queues {
    pub(in crate::driver) fn new(config: &Config) -> Self {
        Self {
            batch: CompletionBatch { completions: Vec::with_capacity(BATCH), queue: (0, 0), full: false, early: false },
            ready: VecDeque::new(),
            polling: false,
            quiet: false,
            spared: 0,
            early_limit: BATCH.min(config.completions.per_turn as usize),
        }
    }

    /// Polls up to `limit` completions from a queue into the batch. Returns true if there were any.
    #[inline]
    fn poll(
        &mut self,
        provider: &mut dyn Provider,
        queue: CqIndex,
        cq: &mut CompletionQueue,
        limit: usize,
    ) -> rdma_transport::Result<bool> {
        debug_assert!(!self.batch.early, "the batch that was polled before is lost");
        self.batch.completions.clear();
        let count = provider.poll_cq(cq.id, limit, &mut self.batch.completions)?;
        if count == 0 {
            cq.drained();
            return Ok(false);
        }
        (self.batch.queue, self.batch.full) = (queue, count >= limit);
        Ok(true)
    }

    /// Polls a queue before stage 7, and keeps the completions for stage 7. Returns true if there were any completions.
    fn poll_early(
        &mut self,
        provider: &mut dyn Provider,
        queue: CqIndex,
        cq: &mut CompletionQueue,
    ) -> rdma_transport::Result<bool> {
        self.batch.early = self.poll(provider, queue, cq, self.early_limit)?;
        Ok(self.batch.early)
    }

    /// Returns the completion `nth` of the batch, with the index of its device.
    #[inline]
    pub(crate) fn completion(&self, nth: usize) -> Option<(usize, &WorkCompletion)> {
        Some((self.batch.queue.0, self.batch.completions.get(nth)?))
    }

    /// Adds a queue to the list of queues that stage 7 must still poll, unless it is in that list already.
    #[inline]
    fn make_ready(&mut self, queue: CqIndex, cq: &mut CompletionQueue) {
        if !std::mem::replace(&mut cq.ready, true) {
            self.ready.push_back(queue);
        }
    }
}

impl Driver {
    pub(crate) const fn queues(&self) -> &Queues {
        &self.queues
    }

    /// Returns true if there may be completions that were not passed to their connections or backlogs yet.
    #[inline]
    pub(crate) fn has_unseen(&self) -> bool {
        self.queues.batch.early || !self.queues.ready.is_empty()
    }

    /// Registers the channels of new providers and devices with the poller. If the registration of a channel fails, the next call starts
    /// with that channel.
    pub(crate) fn watch_channels(&mut self) -> Result<(), Error> {
        if !self.is_noted(Stages::CHANNELS) {
            return Ok(());
        }
        if self.providers.unwatched().is_some() {
            self.note(Stages::EVENTS);
        }
        while let Some(provider) = self.providers.unwatched() {
            self.watch(self.providers.get(provider).channel(Channel::ConnectionManager)?, provider)?;
            self.providers.note_watched();
        }
        while let Some(index) = self.devices.fresh() {
            let (number, id) = device_of(index);
            let provider = self.providers.get(number);
            // The device is not watched if its provider has no attributes of it any more, because it was removed in the meantime.
            if provider.device(id).is_some() {
                self.watch(provider.channel(Channel::Completions(id))?, MAX_PROVIDERS + index)?;
            }
            self.devices.watched();
        }
        self.stages.remove(Stages::CHANNELS);
        Ok(())
    }

    /// Registers a channel with the poller. If the channel is already registered, because its device was closed and opened again, registers
    /// it anew. Only a new registration reports a channel that was readable before.
    fn watch(&mut self, fd: RawFd, token: usize) -> Result<(), Error> {
        let poller = &mut self.os.poller;
        let watched = match poller.register(fd, token, Interest::READABLE) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                poller.deregister(fd).and_then(|()| poller.register(fd, token, Interest::READABLE))
            }
            other => other,
        };
        watched.map_err(Error::Poll)
    }

    /// Polls like [`Driver::poll_any`]. Does not poll if all queues were found empty, and the reactor has done nothing since then that
    /// could add a completion. If a device has added a completion since then, the poll that follows the arming of the queue finds this
    /// completion. If the queue was armed already, it raises an event.
    #[inline]
    pub(crate) fn poll_if_changed(&mut self) -> bool {
        !self.queues.quiet && self.poll_any()
    }

    /// Polls the completion queues until one of them returns completions. Returns true if there are completions, or ended connections, to
    /// handle.
    #[inline]
    pub(crate) fn poll_any(&mut self) -> bool {
        self.has_unseen() || self.fair.is_behind() || self.poll_all()
    }

    fn poll_all(&mut self) -> bool {
        let Self { devices, queues, providers, .. } = self;
        for index in 0..devices.len() {
            let Some(device) = devices.get_mut(index).filter(|device| !device.removed) else { continue };
            for (at, cq) in device.cqs.iter_mut().enumerate() {
                match queues.poll_early(providers.of_device(index), (index, at), cq) {
                    Ok(false) => {}
                    Ok(true) => return true,
                    Err(error) => {
                        // Polling the device has failed. The program must be notified of the ended connections, so there is something to
                        // handle.
                        self.fail_device(index, &error);
                        return true;
                    }
                }
            }
        }
        false
    }

    /// Arms the completion queues for the wait that follows. Returns true if there is something to handle instead.
    ///
    /// First, all completion events are read. A queue that has raised an event is not armed any more. After that, each queue that is not
    /// armed is armed, and polled once more, because a completion that arrived between the last poll and the arming has raised no event. A
    /// queue that is still armed raises an event when a completion arrives, so it is not polled. The exception is a queue that must be
    /// found empty first (`awaited`): it is polled too.
    pub(crate) fn arm(&mut self) -> bool {
        for index in 0..self.devices.len() {
            match self.arm_device(index) {
                Ok(false) => {}
                Ok(true) => return true,
                Err(error) => {
                    // Arming the queues of the device has failed. The program must be notified of the ended connections, so there is
                    // something to handle.
                    self.fail_device(index, &error);
                    return true;
                }
            }
        }
        false
    }

    fn arm_device(&mut self, index: usize) -> rdma_transport::Result<bool> {
        let Some(device) = self.devices.get_mut(index).filter(|device| !device.removed) else { return Ok(false) };
        let provider = self.providers.of_device(index);
        if std::mem::take(&mut device.has_events) {
            while let Some(id) = provider.next_completion_event(device.id)? {
                self.stats.completions.events += 1;
                if let Some(cq) = device.cqs.iter_mut().find(|cq| cq.id == id) {
                    cq.armed = crate::planted("never-armed-again");
                }
                if crate::planted("one-event-per-edge") {
                    break;
                }
            }
        }
        for (at, cq) in device.cqs.iter_mut().enumerate() {
            if cq.armed && (!cq.awaited || crate::planted("an-armed-queue-is-never-polled")) {
                continue;
            }
            let arms = !cq.armed;
            if arms {
                provider.req_notify(cq.id, Notify::Any)?;
                cq.armed = true;
                self.stats.completions.arms += 1;
            }
            if !crate::planted("no-poll-after-arming") && self.queues.poll_early(provider, (index, at), cq)? {
                self.stats.completions.arm_races += u64::from(arms);
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Sets the flags of stages 4 to 6, so that these stages run, if the deadline of a provider has passed.
    pub(crate) fn check_providers(&mut self) {
        if self.providers.next_deadline().is_some_and(|deadline| deadline <= self.now) {
            self.note(Stages::PROVIDERS | Stages::EVENTS);
        }
    }

    /// Runs stage 6: the providers send and receive. Completion events are not read here: stage 7 polls all queues without them, and the
    /// next arming reads them.
    pub(crate) fn drive(&mut self) {
        if self.providers.progress(self.now, Drive::Full) && !crate::planted("rest-of-the-edges-forgotten") {
            self.note(Stages::PROVIDERS);
        }
        self.queues.quiet = false;
        self.devices.iter_mut().for_each(|device| device.has_events = true);
    }

    /// Lets the providers make progress in one round of a busy poll.
    #[inline]
    pub(crate) fn spin(&mut self) {
        self.queues.quiet = false;
        // A provider has not read all bytes that have arrived. The operating system reports no further edge for the remaining bytes, so
        // stage 6 must run.
        if self.providers.progress(self.now, Drive::Spin) && !crate::planted("busy-poll-hides-the-rest") {
            self.note(Stages::PROVIDERS);
        }
    }

    /// Begins stage 7. Returns true if a batch was polled before this stage. The caller must handle that batch first.
    ///
    /// Selects the queues that this stage polls in turn: all queues that are not armed, or may have raised an event. The queue of the
    /// earlier batch is not selected if the earlier poll has emptied it.
    pub(crate) fn begin_polling(&mut self) -> bool {
        let Self { devices, queues, .. } = self;
        queues.polling = true;
        let early = std::mem::take(&mut queues.batch.early);
        let polled = if early && !queues.batch.full { queues.batch.queue } else { NO_QUEUE };
        for index in 0..devices.len() {
            let Some(device) = devices.get_mut(index).filter(|device| !device.removed) else { continue };
            for (at, cq) in device.cqs.iter_mut().enumerate() {
                if (device.has_events || !cq.armed) && polled != (index, at) {
                    queues.make_ready((index, at), cq);
                }
            }
        }
        early
    }

    /// Begins stage 7 again after it has ended, because the program has made requests since then. Returns true if a batch was polled before
    /// this call. The caller must handle that batch first.
    pub(crate) const fn resume_polling(&mut self) -> bool {
        self.queues.polling = true;
        std::mem::replace(&mut self.queues.batch.early, false)
    }

    /// Notes that posting sends has added completions to `queue`. During stage 7, the queue is polled again, so that these completions are
    /// handled in the same turn.
    #[inline]
    pub(in crate::driver) fn completed_in_post(&mut self, queue: CqIndex) {
        self.queues.quiet = false;
        if self.queues.polling {
            if let Some(cq) = self.devices.cq(queue) {
                self.queues.make_ready(queue, cq);
            }
        }
    }

    /// Ends stage 7.
    pub(crate) fn end_polling(&mut self) {
        self.queues.polling = false;
        self.queues.quiet = !self.has_unseen();
    }

    /// Polls the next batch of stage 7, with at most `limit` completions. Returns true if there is one.
    #[inline]
    pub(crate) fn next_batch(&mut self, limit: usize) -> bool {
        while let Some((index, at)) = self.queues.ready.pop_front() {
            let Some(device) = self.devices.get_mut(index) else { continue };
            let Some(cq) = device.cqs.get_mut(at) else { continue };
            cq.ready = false;
            if device.removed {
                continue;
            }
            match self.queues.poll(self.providers.of_device(index), (index, at), cq, BATCH.min(limit)) {
                Ok(false) => {}
                Ok(true) => return true,
                Err(error) => self.fail_device(index, &error),
            }
        }
        false
    }

    /// Begins to handle the batch. Returns the number of its completions.
    ///
    /// If the poll returned as many completions as its limit allowed, the queue is polled again later in this stage. Otherwise the queue is
    /// not polled again in this stage, so that the sends of the callbacks of this batch are posted sooner. Completions that arrive in the
    /// meantime are found by the poll before the next arming.
    #[inline]
    pub(crate) fn begin_batch(&mut self) -> usize {
        let (queue, len) = (self.queues.batch.queue, self.queues.batch.completions.len());
        self.stats.completions.polled += len as u64;
        let Some(device) = self.devices.get_mut(queue.0) else { return len };
        let Some(cq) = device.cqs.get_mut(queue.1) else { return len };
        if self.queues.batch.full {
            self.queues.make_ready(queue, cq);
        }
        if cq.armed {
            // The queue of this batch is armed. Either the batch has raised an event, which must be read, or the batch arrived before the
            // arming and raises no event. So the queue must be polled until it is empty before the reactor sleeps.
            device.has_events = true;
            cq.awaited = true;
        }
        len
    }

    /// Ends the batch. Returns the number of its completions that do not count towards the limit of the turn.
    #[inline]
    pub(crate) fn end_batch(&mut self) -> usize {
        let CompletionBatch { completions, queue, .. } = &self.queues.batch;
        if let Some(cq) = self.devices.cq(*queue) {
            cq.handled(completions.len());
        }
        std::mem::take(&mut self.queues.spared)
    }
}
