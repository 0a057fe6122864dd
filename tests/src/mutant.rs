//! A provider that forwards calls to another one and has one deliberate defect. Each defect violates one promise of the contract of
//! `Provider`.
//!
//! The provider conformance suite must detect each defect. No other test may use this provider: the suite accesses memory only by copies,
//! so the defects cannot make references invalid.

use std::collections::{BTreeMap, BTreeSet};

use rdma_transport::mem::EntryAccess;
use rdma_transport::slab::Key;

use crate::delegate::*;

/// A deliberate defect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Defect {
    /// No defect. The suite must pass.
    None,
    /// A poll returns its completions in reverse order.
    Backwards,
    /// Every third event of a completion queue is lost.
    LostEvent,
    /// Every fifth completion is returned twice.
    Twice,
    /// A destroyed queue pair gets an additional completion, after all real ones were polled.
    AfterDestroy,
    /// The peer can still use a key after `invalidate`.
    KeyOutlivesInvalidate,
    /// The peer can still use a key after `deregister`.
    KeyOutlivesDeregister,
    /// `restrict` reports success but has no effect.
    RestrictsNothing,
    /// Only every second call of `req_notify` arms the queue.
    NotArmed,
    /// An armed queue raises its event twice.
    ArmedForEver,
    /// An unsignaled send never completes, so its slot in the send queue is never free.
    UnsignaledNeverDone,
    /// If only a part of a chain was posted, the error says that nothing was posted.
    PostedWrong,
    /// One receive in each flush never completes.
    ForgottenFlush,
    /// The handle of a destroyed completion queue is reused for the next queue.
    HandleTwice,
    /// The completion of a receive reports one byte more than the receive's buffers can hold.
    TooLong,
    /// The private data of a reject is dropped.
    SilentReject,
    /// A `Disconnected` event is dropped.
    LostDisconnect,
    /// A queue can be destroyed while a queue pair uses it.
    UsedQueueDestroyed,
    /// The provider always reports that a connection has unread data.
    AlwaysUnread,
    /// A fenced send does not wait for earlier reads.
    FenceIgnored,
    /// Every third connection-manager event arrives without a new edge: the getter returns `None` once, and returns the event in a later
    /// call.
    LostCmEdge,
    /// After a queue pair was destroyed, the provider writes to the memory of one of its receives.
    WritesAfterDestroy,
}

impl Defect {
    /// All defects except for [`Defect::None`].
    pub const ALL: [Self; 21] = [
        Self::Backwards,
        Self::LostEvent,
        Self::Twice,
        Self::AfterDestroy,
        Self::KeyOutlivesInvalidate,
        Self::KeyOutlivesDeregister,
        Self::RestrictsNothing,
        Self::NotArmed,
        Self::ArmedForEver,
        Self::UnsignaledNeverDone,
        Self::PostedWrong,
        Self::ForgottenFlush,
        Self::HandleTwice,
        Self::TooLong,
        Self::SilentReject,
        Self::LostDisconnect,
        Self::UsedQueueDestroyed,
        Self::AlwaysUnread,
        Self::FenceIgnored,
        Self::LostCmEdge,
        Self::WritesAfterDestroy,
    ];
}

/// The provider with a defect, see the [module](self).
#[derive(Debug)]
pub struct Mutant<P> {
    inner: P,
    defect: Defect,
    /// The number of times so far that the defect could have shown itself.
    occasions: u64,
    /// The number of unsignaled sends of each queue pair.
    unsignaled: BTreeMap<Key, usize>,
    /// The additional completions, each with the number of empty polls before it is returned.
    made_up: Vec<(WorkCompletion, u32)>,
    /// The last receive that was posted to each queue pair, with the completion queue of the queue pair.
    receives: BTreeMap<Key, (RecvWr, CqId)>,
    /// A receive of a queue pair that was destroyed. The next poll writes to the memory of this receive.
    late: Option<RecvWr>,
    /// The connection-manager event that a later call returns.
    held: Option<CmEvent>,
    /// The completion queue of each queue pair.
    queues: BTreeMap<Key, CqId>,
    /// The reused handles of completion queues, each with the queue to which it now refers.
    handles: BTreeMap<Key, CqId>,
    /// The handle of a destroyed completion queue, which the next queue reuses.
    free: Option<Key>,
    /// The queue pairs that have lost a receive: the completion of that receive was dropped.
    robbed: BTreeSet<Key>,
    /// The completion queue whose next event is a repetition.
    again: Option<CqId>,
}

impl<P: Provider> Mutant<P> {
    /// Makes a provider with this defect that forwards calls to `inner`.
    pub fn new(inner: P, defect: Defect) -> Self {
        let (unsignaled, receives, queues, handles, robbed) = Default::default();
        Self {
            inner,
            defect,
            occasions: 0,
            unsignaled,
            made_up: Vec::new(),
            receives,
            late: None,
            held: None,
            queues,
            handles,
            free: None,
            robbed,
            again: None,
        }
    }

    fn is(&self, defect: Defect) -> bool {
        self.defect == defect
    }

    /// Counts one more occasion to show the defect, if this provider has the defect. Returns true at every `nth` occasion. Always returns
    /// false if this provider does not have the defect.
    fn strikes(&mut self, defect: Defect, nth: u64) -> bool {
        self.occasions += u64::from(self.is(defect));
        self.is(defect) && self.occasions % nth == 0
    }

    /// Returns the completion queue to which a handle refers.
    fn queue(&self, cq: CqId) -> CqId {
        self.handles.get(&cq.0).copied().unwrap_or(cq)
    }

    /// Returns the handle that refers to a completion queue.
    fn handle(&self, cq: CqId) -> CqId {
        self.handles.iter().find(|(_, of)| **of == cq).map_or(cq, |(key, _)| CqId(*key))
    }
}

// SAFETY: calls are forwarded. The defects violate the contract, but the only user, the conformance suite, never gets references to the
// memory.
unsafe impl<P: Provider> Provider for Mutant<P> {
    delegate!(
        self.inner:
        device device_at channel next_deadline progress listen local_address resolve connect accept
        disconnect register shared_receives extensions immediate_sends shared_memory
    );
    fn name(&self) -> &'static str {
        "mutant"
    }
    fn reject(&mut self, id: CmId, private_data: &[u8], now: Instant) -> Result<()> {
        let data = if self.is(Defect::SilentReject) { &[] } else { private_data };
        self.inner.reject(id, data, now)
    }
    fn destroy_id(&mut self, id: CmId, now: Instant) -> Result<()> {
        match self.receives.remove(&id.0) {
            Some((wr, cq)) if self.is(Defect::AfterDestroy) => {
                let wc = WorkCompletion::new(QpId(id.0), wr.wr_id, WcOpcode::Recv, WcStatus::Flushed, 0);
                self.made_up.push((wc, 2));
                self.queues.insert(id.0, cq);
            }
            Some((wr, _)) if self.is(Defect::WritesAfterDestroy) => self.late = Some(wr),
            _ => {}
        }
        self.inner.destroy_id(id, now)
    }
    fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>> {
        if let Some(held) = self.held.take() {
            return Ok(Some(held));
        }
        loop {
            match self.inner.next_cm_event(now)? {
                Some(event) if self.strikes(Defect::LostCmEdge, 3) => {
                    self.held = Some(event);
                    return Ok(None);
                }
                Some(CmEvent { kind: CmEventKind::Disconnected(_), .. }) if self.is(Defect::LostDisconnect) => {}
                event => return Ok(event),
            }
        }
    }
    fn deregister(&mut self, region: MrId) -> Result<()> {
        if self.is(Defect::KeyOutlivesDeregister) { Ok(()) } else { self.inner.deregister(region) }
    }
    fn create_cq(&mut self, device: DeviceId, attr: &CqAttr) -> Result<CqId> {
        let cq = self.inner.create_cq(device, attr)?;
        Ok(match self.free.take() {
            Some(key) => {
                self.handles.insert(key, cq);
                CqId(key)
            }
            None => cq,
        })
    }
    fn destroy_cq(&mut self, cq: CqId) -> Result<()> {
        let result = self.inner.destroy_cq(self.queue(cq));
        self.handles.remove(&cq.0);
        self.free = self.free.or((result.is_ok() && self.is(Defect::HandleTwice)).then_some(cq.0));
        match result {
            Err(TransportError::InvalidState { .. }) if self.is(Defect::UsedQueueDestroyed) => Ok(()),
            other => other,
        }
    }
    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId> {
        let (send_cq, recv_cq) = (self.queue(attr.send_cq), self.queue(attr.recv_cq));
        let qp = self.inner.create_qp(id, &QpAttr { send_cq, recv_cq, ..*attr })?;
        self.queues.insert(qp.0, recv_cq);
        Ok(qp)
    }
    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> std::result::Result<(), PostError> {
        if let (Some(last), Some(cq)) = (chain.last(), self.queues.get(&qp.0)) {
            self.receives.insert(qp.0, (*last, *cq));
        }
        let wrong = self.is(Defect::PostedWrong);
        let result = self.inner.post_recv(qp, chain);
        result.map_err(|error| PostError { posted: if wrong { 0 } else { error.posted }, ..error })
    }
    fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> std::result::Result<Posted, PostError> {
        if self.is(Defect::UnsignaledNeverDone) {
            const DEPTH: usize = 16;
            let quiet = self.unsignaled.entry(qp.0).or_default();
            *quiet += chain.iter().filter(|wr| !wr.flags.contains(SendFlags::SIGNALED)).count();
            if *quiet > DEPTH {
                return Err(PostError {
                    posted: 0,
                    error: TransportError::QueueFull { queue: "send", depth: DEPTH as u32 },
                });
            }
        }
        let mut chain = chain.to_vec();
        if self.is(Defect::FenceIgnored) {
            chain.iter_mut().for_each(|wr| wr.flags.remove(SendFlags::FENCE));
        }
        let wrong = self.is(Defect::PostedWrong);
        let result = self.inner.post_send(qp, &chain);
        result.map_err(|error| PostError { posted: if wrong { 0 } else { error.posted }, ..error })
    }
    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> {
        for sge in self.late.take().iter().flat_map(|wr| wr.sges.as_slice()) {
            // SAFETY: the contract is violated here deliberately. The memory belongs to a station, which exists until the end of the
            // test case and gives no references to it.
            unsafe { EntryAccess::new() }.fill(sge, b"late");
        }
        let (cq, before) = (self.queue(cq), out.len());
        self.inner.poll_cq(cq, max, out)?;
        if out.len() == before {
            let due = |(wc, left): &mut (WorkCompletion, u32)| {
                *left = left.saturating_sub(u32::from(self.queues.get(&wc.qp.0) == Some(&cq)));
                *left == 0
            };
            if let Some(at) = self.made_up.iter_mut().position(due) {
                out.push(self.made_up.remove(at).0);
            }
        }
        if self.is(Defect::Backwards) {
            out[before..].reverse();
        }
        if self.is(Defect::ForgottenFlush) {
            let mut at = before;
            while at < out.len() {
                let wc = out[at];
                let flushed = wc.status == WcStatus::Flushed && wc.opcode == WcOpcode::Recv;
                if flushed && self.robbed.insert(wc.qp.0) {
                    out.remove(at);
                } else {
                    at += 1;
                }
            }
        }
        if let Some(last) = out[before..].last().copied() {
            if out.len() - before < max && self.strikes(Defect::Twice, 5) {
                out.push(last);
            }
            if self.is(Defect::TooLong) && last.opcode == WcOpcode::Recv {
                out.last_mut().expect("there is one").byte_len += 300;
            }
        }
        Ok(out.len() - before)
    }
    fn req_notify(&mut self, cq: CqId, notify: Notify) -> Result<()> {
        let cq = self.queue(cq);
        if self.strikes(Defect::NotArmed, 2) { Ok(()) } else { self.inner.req_notify(cq, notify) }
    }
    fn next_completion_event(&mut self, device: DeviceId) -> Result<Option<CqId>> {
        if let Some(again) = self.again.take() {
            return Ok(Some(again));
        }
        let mut event = self.inner.next_completion_event(device)?.map(|cq| self.handle(cq));
        if event.is_some() && self.strikes(Defect::LostEvent, 3) {
            event = self.inner.next_completion_event(device)?;
        }
        self.again = event.filter(|_| self.is(Defect::ArmedForEver));
        Ok(event)
    }
    roles!(own: remote_keys liveness);
    roles!(
        none:
        handover off_loop_registration foreign_memory datagrams adapter exchange device_events
    );
}

impl<P: Provider> RemoteKeys for Mutant<P> {
    fn restrict(&mut self, region: MrId, qp: QpId) -> Result<bool> {
        if self.is(Defect::RestrictsNothing) {
            return Ok(true);
        }
        self.inner.remote_keys().map_or(Ok(false), |keys| keys.restrict(region, qp))
    }
    fn invalidate(&mut self, region: MrId) -> Result<()> {
        if self.is(Defect::KeyOutlivesInvalidate) {
            return Ok(());
        }
        self.inner.remote_keys().map_or(Ok(()), |keys| keys.invalidate(region))
    }
}

impl<P: Provider> Liveness for Mutant<P> {
    fn last_heard(&self, qp: QpId) -> Option<Instant> {
        self.inner.liveness()?.last_heard(qp)
    }
    fn has_unread(&self, qp: QpId) -> bool {
        self.is(Defect::AlwaysUnread) || self.inner.liveness().is_some_and(|liveness| liveness.has_unread(qp))
    }
}
