//! The data path: passes sends to connections, posts work requests to devices, and passes completions to connections. Only this file posts
//! the work requests of connections, and finds the connection of a completion.

use rdma_transport::TransportError;
use rdma_transport::provider::{PostError, Posted, Provider};
use rdma_transport::qp::QpId;
use rdma_transport::wc::{WcOpcode, WorkCompletion};
use rdma_transport::wr::RecvWr;

use crate::conn::recv_queue::Completed;
use crate::conn::{Connection, Env};
use crate::device::Device;
use crate::driver::memory::large::LargePayload;
use crate::driver::pending::PendingSlot;
use crate::driver::stages::Stages;
use crate::driver::table::{ConnectionLink, ConnectionSlot, DeviceBinding};
use crate::driver::{Driver, World};
use crate::error::{Error, SendErrorKind};
use crate::id::{ConnectionId, SendId, WorkRequestId};

impl Driver {
    /// Sends a copy of `payload`. A payload that is too long for one buffer is sent in several buffers, or offered to the peer, which then
    /// reads it from local memory.
    pub(crate) fn send(&mut self, id: ConnectionId, payload: &[u8]) -> Result<SendId, SendErrorKind> {
        let Some((slot, mut env, provider)) = self.world.at_with_provider(id) else {
            return Err(SendErrorKind::Closed);
        };
        if let Some(qp) = slot.link.qp {
            let now = |header: &[u8]| provider.immediate_sends().is_some_and(|role| role.send_now(qp, header, payload));
            if let Some(id) = slot.conn.send_now(payload.len(), &mut env, now) {
                self.act();
                return Ok(id);
            }
        }
        match slot.conn.send(payload, &mut env) {
            Err(SendErrorKind::TooLong { len, max }) if len <= max => {
                let sent = self.large.send_large(&mut self.world, id, LargePayload::Bytes(payload));
                self.act();
                sent
            }
            other => {
                self.act();
                other
            }
        }
    }

    /// Passes the completion `nth` of the batch to its connection. If the connection has reached its limit for this turn, a later turn
    /// passes the completion. Returns `None`, except if the completion is that of an endpoint. In this case, returns the endpoint's number,
    /// and the caller must handle the completion.
    #[inline]
    pub(crate) fn complete(&mut self, nth: usize) -> Option<u64> {
        let Self { world, queues, fair, .. } = self;
        let World { table, devices, config, now, effects, stats, stages, .. } = world;
        let (device, wc) = queues.completion(nth)?;
        let work = WorkRequestId::of(wc.wr_id);
        let slot = match work {
            WorkRequestId::Send { entry, .. } | WorkRequestId::Recv { entry } => table.of_work(entry),
            WorkRequestId::SharedRecv { slot: index } => {
                // If the connection of this completion has already ended, the buffer of the receive is returned to the shared queue.
                let shared = devices.get_mut(device).and_then(|device| device.buffers.shared.as_mut());
                shared.and_then(|shared| {
                    let owner = shared.owner(wc.qp);
                    let slot = owner.and_then(|id| table.get_mut(id));
                    if slot.is_none() {
                        if let Some(buffer) = shared.take(index) {
                            shared.give(buffer);
                        }
                    }
                    slot
                })
            }
            WorkRequestId::Endpoint(number) => return Some(number),
            WorkRequestId::Unknown => None,
        };
        let Some(slot) = slot else {
            stats.completions.stale += 1;
            return None;
        };
        let (conn, link) = (&slot.conn, &slot.link);
        if slot.allowance.admit_or_defer(conn.id(), wc, fair, || never_came_up(conn, link)) {
            let mut env = Env { now: *now, config, device, buffers: devices.buffers(device), effects, stats };
            take(slot, work, wc, &mut env);
            if slot.conn.state().is_ending() {
                queues.spared += usize::from(never_came_up(&slot.conn, &slot.link));
                stages.insert(Stages::ENDS);
            }
            self.act();
        } else {
            stats.completions.deferred += 1;
        }
        None
    }

    /// Passes a completion from the backlog of a connection to that connection.
    pub(crate) fn complete_deferred(&mut self, id: ConnectionId, wc: &WorkCompletion) {
        let Some((slot, mut env)) = self.world.at(id) else { return };
        take(slot, WorkRequestId::of(wc.wr_id), wc, &mut env);
        if slot.conn.state().is_ending() {
            self.world.note(Stages::ENDS);
        }
        self.act();
    }

    /// Posts the work requests that connections have collected in this turn. Stops early if a
    /// connection comes up meanwhile (`Effects::has_connected`): no callback of another connection
    /// may use the new connection before its `on_connect`. In this case, the caller makes the
    /// callbacks, and flushes again.
    #[inline]
    pub(crate) fn flush(&mut self) {
        if self.world.config.shared_receives.is_none() {
            return self.post_marked();
        }
        self.world.devices.settle_shared(&mut self.world.providers);
        self.ask_for_receives();
        self.post_marked();
        // A connection that renewed its claim in this flush may have released receives, which
        // other connections wait for.
        if self.ask_for_receives() && !self.world.effects.has_connected() {
            self.post_marked();
            if self.ask_for_receives() {
                // This may be the last flush of the turn, so another turn is triggered.
                self.world.os.wake.wake();
            }
        }
    }

    #[inline]
    fn post_marked(&mut self) {
        match self.world.effects.to_post[..] {
            [] => {}
            [only] => {
                self.world.effects.to_post.clear();
                self.post(only, true);
                self.act();
            }
            _ => self.post_all(),
        }
    }

    /// Adds the connections that wait for shared receives to the list of connections with work
    /// requests to post, if there are enough receives for them now, so that they renew their
    /// claims. Returns true if there are such connections.
    fn ask_for_receives(&mut self) -> bool {
        let due = self.world.devices.iter_mut().filter_map(|device| device.buffers.shared.as_mut());
        let due = due.flat_map(|shared| shared.claims.take_due()).collect::<Vec<_>>();
        for &id in &due {
            self.input(id, |conn, env| conn.mark(env));
        }
        !due.is_empty()
    }

    /// Returns true if the next flush has shared receives for a connection that waits for them.
    pub(crate) fn has_due_receives(&self) -> bool {
        self.world.config.shared_receives.is_some() && self.world.devices.iter().any(Device::has_due_receives)
    }

    /// Returns true if [`Driver::flush`] may have something to do.
    #[inline]
    pub(crate) fn has_to_flush(&self) -> bool {
        !self.world.effects.to_post.is_empty() || self.world.config.shared_receives.is_some()
    }

    /// Posts the collected work requests of the connections in the list `to_post`, until one of them comes up.
    fn post_all(&mut self) {
        let mut list = std::mem::take(&mut self.world.effects.to_post);
        let mut posted = 0;
        while posted < list.len() && !self.world.effects.has_connected() {
            self.post(list[posted], true);
            posted += 1;
        }
        list.drain(..posted);
        // The list is put back, so that its allocation is reused. If memory was released while
        // this function ran, `ask_for_memory` has added the connections that wait for memory to
        // `to_post`. The next flush posts their work requests.
        list.append(&mut self.world.effects.to_post);
        self.world.effects.to_post = list;
        self.act();
    }

    /// Posts the collected work requests of a connection. If the sends carry a grant for new receives, the receives are posted before the
    /// sends. If `ask` is true and a large message of the connection needs memory, requests this memory first.
    fn post(&mut self, id: ConnectionId, ask: bool) {
        let World { table, devices, providers, config, now, effects, stats, .. } = &mut self.world;
        let Some(slot) = table.get_mut(id) else { return };
        if ask && slot.conn.wants_memory().is_some() {
            self.large.find_memory(&mut self.world, id);
            self.act();
            return self.post(id, false);
        }
        let mut completed = None;
        if let Some(qp) = slot.link.qp {
            let provider = providers.numbered(slot.link.cm.provider);
            let device = slot.link.binding.map_or(usize::MAX, |binding| binding.device);
            let (buffers, chain) = devices.buffers_and_chain(device);
            let mut env = Env { now: *now, config, device, buffers, effects, stats };
            let posted = if slot.conn.sends_first() {
                post_sends(slot, &mut env, provider, qp)
                    .and_then(|any| post_receives(slot, &mut env, provider, qp, chain).map(|()| any))
            } else {
                post_receives(slot, &mut env, provider, qp, chain).and_then(|()| {
                    slot.conn.pump_transfers(&mut env);
                    if slot.conn.has_lists() {
                        slot.conn.pump_lists(&mut env);
                    }
                    post_sends(slot, &mut env, provider, qp)
                })
            };
            match posted {
                Ok(Posted::Pending) => {}
                Ok(Posted::Completed) => completed = slot.link.binding.as_ref().map(DeviceBinding::queue),
                Err(error) => posting_failed(slot, &mut env, &error),
            }
        }
        slot.conn.unmark();
        if let Some(queue) = completed {
            self.queues.completed_in_post(&mut self.world, queue);
        }
    }

    /// Posts the collected sends of a connection now, without waiting for the end of the turn.
    pub(crate) fn post_sends_of(&mut self, id: ConnectionId) {
        if let Some((slot, mut env, provider)) = self.world.at_with_provider(id) {
            // A handshake that ends here would bring the connection up within a callback.
            if let Some(qp) = slot.link.qp.filter(|_| slot.conn.state().is_announced()) {
                slot.conn.corked = false;
                if let Err(error) = post_sends(slot, &mut env, provider, qp) {
                    posting_failed(slot, &mut env, &error);
                }
            }
        }
        self.act();
    }

    /// Polls the completion queues until one of them returns completions. Returns true if there are
    /// completions, or ended connections, to handle.
    #[inline]
    pub(crate) fn poll_any(&mut self) -> bool {
        self.queues.has_unseen() || self.fair.is_behind() || self.poll_all()
    }

    fn poll_all(&mut self) -> bool {
        let polled = self.queues.poll_all(&mut self.world);
        polled.unwrap_or_else(|failed| self.fail_device(&failed))
    }

    /// Polls like [`Driver::poll_any`]. Does not poll if all queues were found empty, and the
    /// reactor has done nothing since then that could add a completion. If a device has added a
    /// completion since then, the poll that follows the arming of the queue finds this completion.
    /// If the queue was armed already, it raises an event.
    #[inline]
    pub(crate) fn poll_if_changed(&mut self) -> bool {
        !self.queues.quiet && self.poll_any()
    }

    /// Arms the completion queues for the wait that follows, as
    /// [`Queues::arm`](super::queues::Queues::arm) says. Returns true if there is something to
    /// handle instead.
    pub(crate) fn arm(&mut self) -> bool {
        let armed = self.queues.arm(&mut self.world);
        armed.unwrap_or_else(|failed| self.fail_device(&failed))
    }

    /// Polls the next batch of stage 7, with at most `limit` completions. Returns true if there is
    /// one.
    #[inline]
    pub(crate) fn next_batch(&mut self, limit: usize) -> bool {
        loop {
            match self.queues.next_batch(&mut self.world, limit) {
                Ok(found) => return found,
                Err(failed) => _ = self.fail_device(&failed),
            }
        }
    }

    /// Ends the connections of a device that has failed. Returns true: the program must be notified
    /// of the ended connections, so there is something to handle.
    #[cold]
    fn fail_device(&mut self, (index, error): &(usize, TransportError)) -> bool {
        self.world.fail_device(*index, error);
        self.settle();
        true
    }

    /// Returns true if the next turn already has work to do, so that the reactor must not sleep
    /// before that turn.
    #[inline]
    pub(crate) fn has_work(&self) -> bool {
        // If a send that was made outside of a turn has completed when it was posted, its callback
        // is pending. After stage 7, the program or a timer may have released capacity that a
        // refused send waits for.
        let calls = self.world.effects.has_events() || !self.world.effects.to_ask.is_empty();
        let stages = self.world.stages.intersects(Stages::WORK);
        // The poll before a sleep may show that all completions of an ended connection were
        // handled. The receives of that connection are then free for connections that wait.
        let due = || self.has_due_receives() && !crate::planted("an-ended-connection-wakes-no-claim");
        calls || stages || self.queues.has_unseen() || self.fair.is_behind() || due()
    }
}

/// Returns true if a peer opened this connection, and it is ending without having been up. The
/// completions of such a connection are not limited, because they cause no callbacks, and because
/// new connections may need its slot in the limit on pending connections.
const fn never_came_up(conn: &Connection, link: &ConnectionLink) -> bool {
    matches!(link.waits, Some(PendingSlot::ToEnd(_))) && !conn.state().is_announced()
}

/// Passes a completion to its connection.
#[inline]
fn take(slot: &mut ConnectionSlot, work: WorkRequestId, wc: &WorkCompletion, env: &mut Env<'_>) {
    let taken = match work {
        WorkRequestId::Send { sequence, .. } => slot.conn.sent(sequence, wc.result(), env),
        _ => {
            let shared_slot = if let WorkRequestId::SharedRecv { slot } = work { slot } else { 0 };
            let written = matches!(wc.opcode, WcOpcode::RecvWriteWithImmediate);
            let immediate = if written { wc.immediate } else { None };
            let completed = Completed { result: wc.result(), len: wc.byte_len, immediate, invalidated: wc.invalidated };
            slot.conn.received(shared_slot, &completed, env)
        }
    };
    if !taken {
        let (id, peer, limit) = (slot.conn.id(), slot.conn.peer(), &mut env.effects.log_limit);
        let work = "a work request that is not posted";
        peer_log!(limit, env.now, Failed, Warn, peer, "{id}: a completion of {work} ({})", wc.status);
        env.stats.completions.stale += 1;
    }
}

/// Ends a connection, because a device has refused its work requests.
#[cold]
fn posting_failed(slot: &mut ConnectionSlot, env: &mut Env<'_>, error: &Error) {
    let (id, peer, limit) = (slot.conn.id(), slot.conn.peer(), &mut env.effects.log_limit);
    peer_log!(limit, env.now, Failed, Warn, peer, "{id}: posting failed: {error}");
    slot.conn.posting_failed(error.to_string(), env);
}

/// Posts the chain of a connection. If the chain is empty and sends were completed when they were posted, rings the doorbell for those
/// sends.
#[inline]
fn post_sends(
    slot: &mut ConnectionSlot,
    env: &mut Env<'_>,
    provider: &mut dyn Provider,
    qp: QpId,
) -> Result<Posted, Error> {
    let chain = slot.conn.ready_chain(env);
    let count = chain.len();
    let posted = if count > 0 {
        provider.post_send(qp, chain)
    } else if slot.conn.sends.is_unrung() && !crate::planted("immediate-sends-never-rung") {
        Ok(provider.immediate_sends().map_or(Posted::Pending, |role| role.ring(qp)))
    } else {
        return Ok(Posted::Pending);
    };
    env.stats.messages.doorbells += 1;
    match posted {
        Ok(posted) => {
            slot.conn.sends.taken(count);
            slot.conn.sends.rung();
            Ok(posted)
        }
        Err(failed) => {
            slot.conn.sends.taken(failed.posted);
            let waits = slot.conn.awaits_sends();
            full_or_failed(failed, waits).map(|()| Posted::Completed)
        }
    }
}

#[inline]
fn post_receives(
    slot: &mut ConnectionSlot,
    env: &mut Env<'_>,
    provider: &mut dyn Provider,
    qp: QpId,
    chain: &mut Vec<RecvWr>,
) -> Result<(), Error> {
    slot.conn.renew_claim(env);
    if !slot.conn.receives_due() { Ok(()) } else { post_own_receives(slot, env, provider, qp, chain) }
}

/// Posts all free receives of a connection's own receive queue.
pub(crate) fn post_own_receives(
    slot: &mut ConnectionSlot,
    env: &mut Env<'_>,
    provider: &mut dyn Provider,
    qp: QpId,
    chain: &mut Vec<RecvWr>,
) -> Result<(), Error> {
    let id = slot.conn.id();
    let count = slot.conn.receives.prepare(id, &mut env.buffers.pool, chain);
    if count == 0 {
        return Ok(());
    }
    match provider.post_recv(qp, chain) {
        Ok(()) => {
            slot.conn.receives_posted(count);
            Ok(())
        }
        Err(failed) => {
            let receives = &mut slot.conn.receives;
            receives.unprepare(&mut env.buffers.pool, count as usize - failed.posted);
            let waits = receives.posted() > 0;
            slot.conn.receives_posted(failed.posted as u32);
            full_or_failed(failed, waits)
        }
    }
}

/// Returns the error of a failed post. If `waits` is true, a full queue is no error: a posted work request will complete and free a slot,
/// and the post is tried again after that.
fn full_or_failed(failed: PostError, waits: bool) -> Result<(), Error> {
    match failed.error {
        TransportError::QueueFull { .. } if waits => Ok(()),
        error => Err(error.into()),
    }
}
