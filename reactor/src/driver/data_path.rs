//! The data path: sends go to their connection, work requests to the devices, and completions back to their connection.
//! Nobody else posts the work requests of connections, and no completion finds its connection elsewhere.

use rdma_transport::provider::{PostError, Posted, Provider};
use rdma_transport::qp::QpId;
use rdma_transport::wc::{WcOpcode, WorkCompletion};
use rdma_transport::wr::RecvWr;

use super::Driver;
use super::large::Payload;
use super::pending::Waits;
use super::stages::Stages;
use super::table::{Link, Place, Seat};
use crate::conn::recv_queue::Completed;
use crate::conn::{Connection, Env};
use crate::error::{Error, SendErrorKind};
use crate::id::{ConnectionId, SendId, WorkRequestId};

impl Driver {
    /// Sends a copy of `payload`, which the peer fetches if it does not fit one buffer.
    pub(crate) fn send(&mut self, id: ConnectionId, payload: &[u8]) -> Result<SendId, SendErrorKind> {
        let Some((seat, mut env, provider)) = self.at_with_provider(id) else { return Err(SendErrorKind::Closed) };
        if let Some(qp) = seat.link.qp {
            let now = |header: &[u8]| provider.immediate_sends().is_some_and(|role| role.send_now(qp, header, payload));
            if let Some(id) = seat.conn.send_now(payload.len(), &mut env, now) {
                self.act();
                return Ok(id);
            }
        }
        match seat.conn.send(payload, &mut env) {
            Err(SendErrorKind::TooLong { len, max }) if len <= max => self.send_large(id, Payload::Bytes(payload)),
            other => {
                self.act();
                other
            }
        }
    }

    // Completions.

    /// The work request of the batch's `nth` completion has completed: its connection is found, once, and takes the completion
    /// now or in a later turn. A guest's completion is not taken: its number comes back.
    #[inline]
    pub(crate) fn complete(&mut self, nth: usize) -> Option<u64> {
        let Self { table, devices, queues, fair, config, now, effects, stats, stages, .. } = self;
        let (device, wc) = queues.completion(nth)?;
        let work = WorkRequestId::of(wc.wr_id);
        let seat = match work {
            WorkRequestId::Send { place, .. } | WorkRequestId::Recv { place } => table.of_work(place),
            WorkRequestId::SharedRecv { place } => {
                // The receive of a connection that ended before its completion was polled is posted again.
                let shared = devices.get_mut(device).and_then(|device| device.buffers.shared.as_mut());
                shared.and_then(|shared| {
                    let owner = shared.owner(wc.qp);
                    let seat = owner.and_then(|id| table.get_mut(id));
                    if seat.is_none() {
                        if let Some(buffer) = shared.take(place) {
                            shared.give(buffer);
                        }
                    }
                    seat
                })
            }
            WorkRequestId::Endpoint(number) => return Some(number),
            WorkRequestId::Unknown => None,
        };
        let Some(seat) = seat else {
            stats.completions.stale += 1;
            return None;
        };
        let (conn, link) = (&seat.conn, &seat.link);
        if seat.allowance.admit_or_defer(conn.id(), wc, fair, || never_came_up(conn, link)) {
            let mut env = Env { now: *now, config, device, buffers: devices.buffers(device), effects, stats };
            take(seat, work, wc, &mut env);
            if seat.conn.state().is_ending() {
                queues.spared += usize::from(never_came_up(&seat.conn, &seat.link));
                stages.insert(Stages::ENDS);
            }
            self.act();
        } else {
            stats.completions.deferred += 1;
        }
        None
    }

    /// As [`Driver::complete`], for a completion that was put off.
    pub(crate) fn complete_deferred(&mut self, id: ConnectionId, wc: &WorkCompletion) {
        let Some((seat, mut env)) = self.at(id) else { return };
        take(seat, WorkRequestId::of(wc.wr_id), wc, &mut env);
        if seat.conn.state().is_ending() {
            self.note(Stages::ENDS);
        }
        self.act();
    }

    // Posting.

    /// Posts what the turn has gathered, if anything.
    #[inline]
    pub(crate) fn flush(&mut self) {
        if self.config.shared_receives.is_some() {
            self.devices.settle_shared(&mut self.providers);
        }
        match self.effects.to_post[..] {
            [] => {}
            [only] => {
                self.effects.to_post.clear();
                self.post(only, true);
                self.act();
            }
            _ => self.post_all(),
        }
    }

    /// Posts what all connections on the list have gathered.
    fn post_all(&mut self) {
        let mut list = std::mem::take(&mut self.effects.to_post);
        list.drain(..).for_each(|id| self.post(id, true));
        // Posting puts nothing on the list: it goes back with its memory.
        debug_assert!(self.effects.to_post.is_empty(), "a connection was marked while others were posted");
        self.effects.to_post = list;
        self.act();
    }

    /// Posts what a connection has gathered. Receives go first when the sends are to grant them. `ask`: memory that the connection wants
    /// for a large message is looked for first.
    fn post(&mut self, id: ConnectionId, ask: bool) {
        let Self { table, devices, providers, config, now, effects, stats, .. } = self;
        let Some(seat) = table.get_mut(id) else { return };
        if ask && seat.conn.wants_memory().is_some() {
            self.find_memory(id);
            return self.post(id, false);
        }
        let mut completed = None;
        if let Some(qp) = seat.link.qp {
            let provider = providers.numbered(seat.link.cm.provider);
            let device = seat.link.place.map_or(usize::MAX, |place| place.device);
            let (buffers, chain) = devices.buffers_and_chain(device);
            let mut env = Env { now: *now, config, device, buffers, effects, stats };
            let posted = if seat.conn.sends_first() {
                post_sends(seat, &mut env, provider, qp)
                    .and_then(|any| post_receives(seat, &mut env, provider, qp, chain).map(|()| any))
            } else {
                post_receives(seat, &mut env, provider, qp, chain).and_then(|()| {
                    seat.conn.pump_transfers(&mut env);
                    if seat.conn.has_lists() {
                        seat.conn.pump_lists(&mut env);
                    }
                    post_sends(seat, &mut env, provider, qp)
                })
            };
            match posted {
                Ok(Posted::Pending) => {}
                Ok(Posted::Completed) => completed = seat.link.place.as_ref().map(Place::queue),
                Err(error) => {
                    log::warn!("{id}: posting failed: {error}");
                    seat.conn.posting_failed(error.to_string(), &mut env);
                }
            }
        }
        seat.conn.unmark();
        if let Some(queue) = completed {
            self.completed_in_post(queue);
        }
    }

    /// Posts the sends that a connection has gathered, in the middle of a turn.
    pub(crate) fn post_sends_of(&mut self, id: ConnectionId) {
        if let Some((seat, mut env, provider)) = self.at_with_provider(id) {
            if let Some(qp) = seat.link.qp {
                seat.conn.uncork();
                if let Err(error) = post_sends(seat, &mut env, provider, qp) {
                    log::warn!("{id}: posting failed: {error}");
                    seat.conn.posting_failed(error.to_string(), &mut env);
                }
            }
        }
        self.act();
    }

    /// As [`Driver::at`], with the provider.
    pub(super) fn at_with_provider(&mut self, id: ConnectionId) -> Option<(&mut Seat, Env<'_>, &mut dyn Provider)> {
        let Self { table, devices, providers, config, now, effects, stats, .. } = self;
        let seat = table.get_mut(id)?;
        let provider = providers.numbered(seat.link.cm.provider);
        let device = seat.link.place.map_or(usize::MAX, |place| place.device);
        let buffers = devices.buffers(device);
        let env = Env { now: *now, config, device, buffers, effects, stats };
        Some((seat, env, provider))
    }
}

/// Whether a connection that a peer opened ends and was never up. It has no callbacks, and holds a place that others may want.
const fn never_came_up(conn: &Connection, link: &Link) -> bool {
    matches!(link.waits, Some(Waits::ToEnd(_))) && !conn.state().is_announced()
}

/// Gives a completion to its connection.
#[inline]
fn take(seat: &mut Seat, work: WorkRequestId, wc: &WorkCompletion, env: &mut Env<'_>) {
    let taken = match work {
        WorkRequestId::Send { sequence, .. } => seat.conn.sent(sequence, wc.result(), env),
        _ => {
            let place = if let WorkRequestId::SharedRecv { place } = work { place } else { 0 };
            let written = matches!(wc.opcode, WcOpcode::RecvWriteWithImmediate);
            let immediate = if written { wc.immediate } else { None };
            let completed = Completed { result: wc.result(), len: wc.byte_len, immediate, invalidated: wc.invalidated };
            seat.conn.received(place, &completed, env)
        }
    };
    if !taken {
        log::warn!("{}: a completion of a work request that is not posted ({})", seat.conn.id(), wc.status);
        env.stats.completions.stale += 1;
    }
}

/// Posts the sends that are ready, and rings for those that have ended with their post.
#[inline]
fn post_sends(seat: &mut Seat, env: &mut Env<'_>, provider: &mut dyn Provider, qp: QpId) -> Result<Posted, Error> {
    let chain = seat.conn.ready_chain(env);
    let count = chain.len();
    let posted = if count > 0 {
        provider.post_send(qp, chain)
    } else if seat.conn.sends_mut().is_unrung() && !cfg!(planted = "immediate-sends-never-rung") {
        Ok(provider.immediate_sends().map_or(Posted::Pending, |role| role.ring(qp)))
    } else {
        return Ok(Posted::Pending);
    };
    env.stats.messages.doorbells += 1;
    match posted {
        Ok(posted) => {
            seat.conn.sends_mut().taken(count);
            seat.conn.sends_mut().rung();
            Ok(posted)
        }
        Err(failed) => {
            seat.conn.sends_mut().taken(failed.posted);
            let waits = seat.conn.awaits_sends();
            full_or_failed(failed, waits).map(|()| Posted::Completed)
        }
    }
}

#[inline]
fn post_receives(
    seat: &mut Seat,
    env: &mut Env<'_>,
    provider: &mut dyn Provider,
    qp: QpId,
    chain: &mut Vec<RecvWr>,
) -> Result<(), Error> {
    seat.conn.renew_claim(env);
    if !seat.conn.receives_due() { Ok(()) } else { post_own_receives(seat, env, provider, qp, chain) }
}

/// Posts the receives of a connection's own that are free.
pub(super) fn post_own_receives(
    seat: &mut Seat,
    env: &mut Env<'_>,
    provider: &mut dyn Provider,
    qp: QpId,
    chain: &mut Vec<RecvWr>,
) -> Result<(), Error> {
    let id = seat.conn.id();
    let count = seat.conn.receives_mut().prepare(id, &mut env.buffers.pool, chain);
    if count == 0 {
        return Ok(());
    }
    match provider.post_recv(qp, chain) {
        Ok(()) => {
            seat.conn.receives_posted(count);
            Ok(())
        }
        Err(failed) => {
            let receives = seat.conn.receives_mut();
            receives.unprepare(&mut env.buffers.pool, count as usize - failed.posted);
            let waits = receives.posted() > 0;
            seat.conn.receives_posted(failed.posted as u32);
            full_or_failed(failed, waits)
        }
    }
}

/// A full queue is backpressure, as long as something in it is to complete.
fn full_or_failed(failed: PostError, waits: bool) -> Result<(), Error> {
    match failed.error {
        rdma_transport::Error::QueueFull { .. } if waits => Ok(()),
        error => Err(error.into()),
    }
}
