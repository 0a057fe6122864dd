//! The completion queues and the channels: the order in which queues are polled, and the times at which they are armed.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;

use rdma_transport::cq::Notify;
use rdma_transport::provider::{Channel, Drive, Provider};
use rdma_transport::wc::WorkCompletion;

use crate::config::Config;
use crate::device::cq::{CompletionQueue, CqIndex};
use crate::driver::World;
use crate::driver::stages::Stages;
use crate::error::Error;
use crate::providers::{MAX_PROVIDERS, device_of};
use crate::seam::poller::{Interest, Poller};

/// The largest number of completions that are polled from a queue with one call.
const BATCH: usize = 256;

/// The result of polling: true if there are completions. Otherwise, the index of the device that
/// has failed, and its error.
pub(crate) type Polled = Result<bool, (usize, rdma_transport::TransportError)>;

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
    pub(crate) quiet: bool,
    /// The largest number of completions that are polled from a queue before stage 7.
    early_limit: usize,
    /// The number of completions of the batch that do not count towards the limit of the turn, because their connections are ending without
    /// having been up.
    pub(crate) spared: usize,
}

impl Queues {
    pub(crate) fn new(config: &Config) -> Self {
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

    /// Returns true if there may be completions that were not passed to their connections or backlogs yet.
    #[inline]
    pub(crate) fn has_unseen(&self) -> bool {
        self.batch.early || !self.ready.is_empty()
    }

    /// Registers the channels of new providers and devices with the poller. If the registration of a channel fails, the next call starts
    /// with that channel.
    pub(crate) fn watch_channels(world: &mut World) -> Result<(), Error> {
        if !world.stages.contains(Stages::CHANNELS) {
            return Ok(());
        }
        if world.providers.unwatched().is_some() {
            world.note(Stages::EVENTS);
        }
        while let Some(provider) = world.providers.unwatched() {
            watch(&mut *world.os.poller, world.providers.get(provider).channel(Channel::ConnectionManager)?, provider)?;
            world.providers.note_watched();
        }
        while let Some(index) = world.devices.fresh() {
            let (number, id) = device_of(index);
            let provider = world.providers.get(number);
            // The device is not watched if its provider has no attributes of it any more, because it was removed in the meantime.
            if provider.device(id).is_some() {
                watch(&mut *world.os.poller, provider.channel(Channel::Completions(id))?, MAX_PROVIDERS + index)?;
            }
            world.devices.watched();
        }
        world.stages.remove(Stages::CHANNELS);
        Ok(())
    }

    /// Polls the completion queues until one of them returns completions.
    pub(crate) fn poll_all(&mut self, world: &mut World) -> Polled {
        let World { devices, providers, .. } = world;
        for index in 0..devices.len() {
            let Some(device) = devices.get_mut(index).filter(|device| !device.removed) else { continue };
            for (at, cq) in device.cqs.iter_mut().enumerate() {
                if self.poll_early(providers.of_device(index), (index, at), cq).map_err(|error| (index, error))? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Arms the completion queues for the wait that follows. Returns true if there is something to handle instead.
    ///
    /// First, all completion events are read. A queue that has raised an event is not armed any more. After that, each queue that is not
    /// armed is armed, and polled once more, because a completion that arrived between the last poll and the arming has raised no event. A
    /// queue that is still armed raises an event when a completion arrives, so it is not polled. The exception is a queue that must be
    /// found empty first (`awaited`): it is polled too.
    pub(crate) fn arm(&mut self, world: &mut World) -> Polled {
        for index in 0..world.devices.len() {
            if self.arm_device(world, index).map_err(|error| (index, error))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    #[inline]
    fn arm_device(&mut self, world: &mut World, index: usize) -> rdma_transport::Result<bool> {
        let Some(device) = world.devices.get_mut(index).filter(|device| !device.removed) else { return Ok(false) };
        let provider = world.providers.of_device(index);
        if std::mem::take(&mut device.has_events) {
            while let Some(id) = provider.next_completion_event(device.id)? {
                world.stats.completions.events += 1;
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
                world.stats.completions.arms += 1;
            }
            if !crate::planted("no-poll-after-arming") && self.poll_early(provider, (index, at), cq)? {
                world.stats.completions.arm_races += u64::from(arms);
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Sets the flags of stages 4 to 6, so that these stages run, if the deadline of a provider has passed.
    pub(crate) fn check_providers(world: &mut World) {
        if world.providers.next_deadline().is_some_and(|deadline| deadline <= world.now) {
            world.note(Stages::PROVIDERS | Stages::EVENTS);
        }
    }

    /// Runs stage 6: the providers send and receive. Completion events are not read here: stage 7 polls all queues without them, and the
    /// next arming reads them.
    pub(crate) fn drive(&mut self, world: &mut World) {
        if world.providers.progress(world.now, Drive::Full) && !crate::planted("rest-of-the-edges-forgotten") {
            world.note(Stages::PROVIDERS);
        }
        self.quiet = false;
        world.devices.iter_mut().for_each(|device| device.has_events = true);
    }

    /// Lets the providers make progress in one round of a busy poll.
    #[inline]
    pub(crate) fn spin(&mut self, world: &mut World) {
        self.quiet = false;
        // If `progress` returns true, a provider has not read all bytes that have arrived. The
        // operating system reports no further edge for the remaining bytes, so stage 6 must run.
        if world.providers.progress(world.now, Drive::Spin) && !crate::planted("busy-poll-hides-the-rest") {
            world.note(Stages::PROVIDERS);
        }
    }

    /// Begins stage 7. Returns true if a batch was polled before this stage. The caller must handle that batch first.
    ///
    /// Selects the queues that this stage polls in turn: all queues that are not armed, or may have raised an event. The queue of the
    /// earlier batch is not selected if the earlier poll has emptied it.
    pub(crate) fn begin_polling(&mut self, world: &mut World) -> bool {
        let World { devices, .. } = world;
        self.polling = true;
        let early = std::mem::take(&mut self.batch.early);
        let polled = if early && !self.batch.full { self.batch.queue } else { NO_QUEUE };
        for index in 0..devices.len() {
            let Some(device) = devices.get_mut(index).filter(|device| !device.removed) else { continue };
            for (at, cq) in device.cqs.iter_mut().enumerate() {
                if (device.has_events || !cq.armed) && polled != (index, at) {
                    self.make_ready((index, at), cq);
                }
            }
        }
        early
    }

    /// Begins stage 7 again after it has ended, because the program has made requests since then. Returns true if a batch was polled before
    /// this call. The caller must handle that batch first.
    pub(crate) const fn resume_polling(&mut self) -> bool {
        self.polling = true;
        std::mem::replace(&mut self.batch.early, false)
    }

    /// Notes that posting sends has added completions to `queue`. During stage 7, the queue is polled again, so that these completions are
    /// handled in the same turn.
    #[inline]
    pub(crate) fn completed_in_post(&mut self, world: &mut World, queue: CqIndex) {
        self.quiet = false;
        if self.polling {
            if let Some(cq) = world.devices.cq(queue) {
                self.make_ready(queue, cq);
            }
        }
    }

    /// Ends stage 7.
    pub(crate) fn end_polling(&mut self) {
        self.polling = false;
        self.quiet = !self.has_unseen();
    }

    /// Polls the next batch of stage 7, with at most `limit` completions. Returns true if there is one.
    #[inline]
    pub(crate) fn next_batch(&mut self, world: &mut World, limit: usize) -> Polled {
        while let Some((index, at)) = self.ready.pop_front() {
            let Some(device) = world.devices.get_mut(index) else { continue };
            let Some(cq) = device.cqs.get_mut(at) else { continue };
            cq.ready = false;
            if device.removed {
                continue;
            }
            let polled = self.poll(world.providers.of_device(index), (index, at), cq, BATCH.min(limit));
            if polled.map_err(|error| (index, error))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Begins to handle the batch. Returns the number of its completions.
    ///
    /// If the poll returned as many completions as its limit allowed, the queue is polled again later in this stage. Otherwise the queue is
    /// not polled again in this stage, so that the sends of the callbacks of this batch are posted sooner. Completions that arrive in the
    /// meantime are found by the poll before the next arming.
    #[inline]
    pub(crate) fn begin_batch(&mut self, world: &mut World) -> usize {
        let (queue, len) = (self.batch.queue, self.batch.completions.len());
        world.stats.completions.polled += len as u64;
        let Some(device) = world.devices.get_mut(queue.0) else { return len };
        let Some(cq) = device.cqs.get_mut(queue.1) else { return len };
        if self.batch.full {
            self.make_ready(queue, cq);
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
    pub(crate) fn end_batch(&mut self, world: &mut World) -> usize {
        let CompletionBatch { completions, queue, .. } = &self.batch;
        if let Some(cq) = world.devices.cq(*queue) {
            cq.handled(completions.len());
        }
        std::mem::take(&mut self.spared)
    }
}

/// Registers a channel with the poller. If the channel is already registered, because its device
/// was closed and opened again, registers it anew. Only a new registration reports a channel that
/// was readable before.
fn watch(poller: &mut dyn Poller, fd: RawFd, token: usize) -> Result<(), Error> {
    let watched = match poller.register(fd, token, Interest::READABLE) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            poller.deregister(fd).and_then(|()| poller.register(fd, token, Interest::READABLE))
        }
        other => other,
    };
    watched.map_err(Error::Poll)
}
