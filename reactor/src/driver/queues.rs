//! The completion queues and channels: which are polled, in which order, and when they are armed.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;

use rdma_transport::cq::Notify;
use rdma_transport::provider::{Channel, Drive, Provider};
use rdma_transport::wc::WorkCompletion;

use super::Driver;
use super::stages::Stages;
use crate::config::Config;
use crate::device::cq::{CompletionQueue, CqIndex};
use crate::error::Error;
use crate::providers::{MAX_PROVIDERS, device_of};
use crate::seam::poller::Interest;

/// The number of completions polled from a queue at a time.
const BATCH: usize = 256;

/// The index of no queue.
const NO_QUEUE: CqIndex = (usize::MAX, usize::MAX);

/// Returns true if the token of an edge is that of a connection-manager channel: the index of the provider. The tokens of the completion
/// channels follow, by the index of their device.
pub(crate) const fn is_of_connection_manager(token: usize) -> bool {
    token < MAX_PROVIDERS
}

/// The completions that were polled from a queue last.
#[derive(Debug)]
struct CompletionBatch {
    completions: Vec<WorkCompletion>,
    queue: CqIndex,
    /// True if the queue returned as many as were requested, and may hold more.
    full: bool,
    /// True if the completions were polled before their stage, and wait for it.
    early: bool,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Queues {
    batch: CompletionBatch,
    /// The queues to poll, round robin.
    ready: VecDeque<CqIndex>,
    /// True during stage 7: the queues of sends that are posted now are polled once more in it.
    polling: bool,
    /// True if all queues were seen empty in stage 7, and no event has happened since that a provider completes
    /// immediately.
    quiet: bool,
    /// The number of completions to poll from a queue before its stage.
    early_limit: usize,
    /// The number of completions of the batch that do not count, because their connections never came up.
    pub(super) spared: usize,
}

impl Queues {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            batch: CompletionBatch { completions: Vec::with_capacity(BATCH), queue: (0, 0), full: false, early: false },
            ready: VecDeque::new(),
            polling: false,
            quiet: false,
            spared: 0,
            early_limit: BATCH.min(config.completions.per_turn as usize),
        }
    }

    /// Polls up to `limit` completions from a queue. Returns true if there were any.
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

    /// Polls a queue before its stage. Returns true if it has completions.
    fn poll_early(
        &mut self,
        provider: &mut dyn Provider,
        queue: CqIndex,
        cq: &mut CompletionQueue,
    ) -> rdma_transport::Result<bool> {
        self.batch.early = self.poll(provider, queue, cq, self.early_limit)?;
        Ok(self.batch.early)
    }

    /// Returns a completion of the batch, and the index of its device.
    #[inline]
    pub(crate) fn completion(&self, nth: usize) -> Option<(usize, &WorkCompletion)> {
        Some((self.batch.queue.0, self.batch.completions.get(nth)?))
    }

    /// Adds a queue to the list of those to poll, unless it is in it.
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

    /// Returns true if there may be completions whose connections are not known yet.
    #[inline]
    pub(crate) fn has_unseen(&self) -> bool {
        self.queues.batch.early || !self.queues.ready.is_empty()
    }

    /// Watches the channels of new providers and devices. After an error the next call continues with the channel that could not be
    /// watched.
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
            // A device without attributes was removed again.
            if provider.device(id).is_some() {
                self.watch(provider.channel(Channel::Completions(id))?, MAX_PROVIDERS + index)?;
            }
            self.devices.watched();
        }
        self.stages.remove(Stages::CHANNELS);
        Ok(())
    }

    /// Watches a channel. The channel of a device that was dropped and is used again is still watched: it is watched anew, so that an
    /// already readable channel raises an edge.
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

    /// Polls like [`Driver::poll_any`], but only if something has happened since all queues were seen empty. Completions that a device adds
    /// meanwhile are found after the arming.
    #[inline]
    pub(crate) fn poll_if_changed(&mut self) -> bool {
        !self.queues.quiet && self.poll_any()
    }

    /// Polls the completion queues until one has completions. Returns true if one has.
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
                        // Its connections must be notified of that, which is work.
                        self.fail_device(index, &error);
                        return true;
                    }
                }
            }
        }
        false
    }

    /// Arms the queues that are not armed, after taking all events of those that were. Polls each newly armed queue once more, because a
    /// completion between the last poll and the arming has raised no event; a queue that was armed throughout raises one. Also polls the
    /// queues that must be seen empty. Returns true if there is a completion.
    pub(crate) fn arm(&mut self) -> bool {
        for index in 0..self.devices.len() {
            match self.arm_device(index) {
                Ok(false) => {}
                Ok(true) => return true,
                Err(error) => {
                    // Its connections must be notified of that, which is work.
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
                    cq.armed = cfg!(planted = "never-armed-again");
                }
                if cfg!(planted = "one-event-per-edge") {
                    break;
                }
            }
        }
        for (at, cq) in device.cqs.iter_mut().enumerate() {
            if cq.armed && !cq.awaited {
                continue;
            }
            let arms = !cq.armed;
            if arms {
                provider.req_notify(cq.id, Notify::Any)?;
                cq.armed = true;
                self.stats.completions.arms += 1;
            }
            if !cfg!(planted = "no-poll-after-arming") && self.queues.poll_early(provider, (index, at), cq)? {
                self.stats.completions.arm_races += u64::from(arms);
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Checks if a provider's deadline has passed, after the operating system was asked for edges, or because it will not be for a while.
    pub(crate) fn check_providers(&mut self) {
        if self.providers.next_deadline().is_some_and(|deadline| deadline <= self.now) {
            self.note(Stages::PROVIDERS | Stages::EVENTS);
        }
    }

    /// Runs stage 6: lets the providers make progress. It does not read the events of the completion queues, which are polled immediately;
    /// the next arming reads them.
    pub(crate) fn drive(&mut self) {
        if self.providers.progress(self.now, Drive::Full) && !cfg!(planted = "rest-of-the-edges-forgotten") {
            self.note(Stages::PROVIDERS);
        }
        self.queues.quiet = false;
        self.devices.iter_mut().for_each(|device| device.has_events = true);
    }

    /// Runs one round of a busy poll of the providers.
    #[inline]
    pub(crate) fn spin(&mut self) {
        self.queues.quiet = false;
        // Bytes that are left raise no edge again.
        if self.providers.progress(self.now, Drive::Spin) && !cfg!(planted = "busy-poll-hides-the-rest") {
            self.note(Stages::PROVIDERS);
        }
    }

    /// Begins stage 7. A batch that was polled before comes first; then each queue that is not armed, or whose events were not taken yet,
    /// is polled in its turn, however busy the others are. A queue that was just polled empty is not polled again. Returns true if there is
    /// a batch that was polled before.
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

    /// Continues stage 7 for the posts of now. Returns true if there is a batch that was polled before.
    pub(crate) const fn resume_polling(&mut self) -> bool {
        self.queues.polling = true;
        std::mem::replace(&mut self.queues.batch.early, false)
    }

    /// Notes that completions were added to `queue` while sends were posted. Stage 7 polls that queue again, so that they need no other
    /// turn.
    #[inline]
    pub(super) fn completed_in_post(&mut self, queue: CqIndex) {
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

    /// Polls the next batch of stage 7, of at most `limit` completions. Returns true if there is one.
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

    /// Begins to handle the batch. Its queue may hold more if it returned as many as were requested. If not, the poll before the arming is
    /// soon enough for completions that arrive meanwhile, and the sends of this batch are posted first. Returns the number of completions.
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
            // The queue has raised an event by now, or is about to. If it has not, because these completions came before the arming, it
            // must be seen empty before anything sleeps.
            device.has_events = true;
            cq.awaited = true;
        }
        len
    }

    /// Ends the batch. Returns the number of its completions that do not count towards the turn's budget.
    #[inline]
    pub(crate) fn end_batch(&mut self) -> usize {
        let CompletionBatch { completions, queue, .. } = &self.queues.batch;
        if let Some(cq) = self.devices.cq(*queue) {
            cq.handled(completions.len());
        }
        std::mem::take(&mut self.queues.spared)
    }
}
