//! A provider that forwards calls to another one and has a deliberate defect: it assigns one handle twice. The second object of a kind gets
//! the handle of the first. Calls with this handle apply to the second object. Events and completions of both objects carry this handle.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::delegate::*;
use rdma_transport::slab::Key;

/// The kind of handle that is assigned twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as the handles")]
pub enum Kind { Cm, Cq, Qp }

/// The handles of one kind, in both directions: from an assigned handle to its object, and from an object to its handle.
#[derive(Debug, Default)]
struct Handles { inner: BTreeMap<Key, Key>, outer: BTreeMap<Key, Key>, first: Option<Key>, twice: bool, done: Arc<AtomicBool> }

impl Handles {
    fn hand_out(&mut self, inner: Key) -> Key {
        let first = *self.first.get_or_insert(inner);
        let again = self.twice && inner != first && !self.done.swap(true, Ordering::Relaxed);
        let outer = if again { first } else { inner };
        self.inner.insert(outer, inner);
        self.outer.insert(inner, outer);
        outer
    }
    fn inner(&self, outer: Key) -> Key { self.inner.get(&outer).copied().unwrap_or(outer) }
    fn outer(&self, inner: Key) -> Key { self.outer.get(&inner).copied().unwrap_or(inner) }
}

/// The provider with this defect, see the [module](self).
#[derive(Debug)]
pub struct Twice<P> { inner: P, ids: Handles, cqs: Handles, qps: Handles }

impl<P: Provider> Twice<P> {
    /// Makes a provider with this defect that forwards calls to `inner`.
    pub fn new(inner: P, kind: Kind) -> Self {
        let done = Arc::default();
        let handles = |of| Handles { twice: kind == of, done: Arc::clone(&done), ..Handles::default() };
        Self { inner, ids: handles(Kind::Cm), cqs: handles(Kind::Cq), qps: handles(Kind::Qp) }
    }
    /// Returns a flag that is set when a handle was assigned twice.
    pub fn struck(&self) -> Arc<AtomicBool> { Arc::clone(&self.ids.done) }
    fn id(&self, id: CmId) -> CmId { CmId(self.ids.inner(id.0)) }
    fn cq(&self, cq: CqId) -> CqId { CqId(self.cqs.inner(cq.0)) }
    fn qp(&self, qp: QpId) -> QpId { QpId(self.qps.inner(qp.0)) }
}

// SAFETY: calls are forwarded. A handle that is assigned twice violates promise 6 of the contract. Each post still reaches a queue pair of
// the inner provider and completes there. The inner provider keeps all other promises.
unsafe impl<P: Provider> Provider for Twice<P> {
    delegate!(
        self.inner:
        name device device_at channel next_deadline progress listen register deregister
    );
    fn local_address(&self, id: CmId) -> Option<SocketAddr> { self.inner.local_address(self.id(id)) }
    fn resolve(&mut self, peer: SocketAddr, options: &PathOptions, deadline: Instant) -> Result<CmId> {
        let id = self.inner.resolve(peer, options, deadline)?;
        Ok(CmId(self.ids.hand_out(id.0)))
    }
    fn connect(&mut self, id: CmId, param: &ConnectParam<'_>) -> Result<()> { self.inner.connect(self.id(id), param) }
    fn accept(&mut self, id: CmId, param: &ConnectParam<'_>, now: Instant) -> Result<()> {
        self.inner.accept(self.id(id), param, now)
    }
    fn reject(&mut self, id: CmId, data: &[u8], now: Instant) -> Result<()> { self.inner.reject(self.id(id), data, now) }
    fn disconnect(&mut self, id: CmId, now: Instant) -> Result<()> { self.inner.disconnect(self.id(id), now) }
    fn destroy_id(&mut self, id: CmId, now: Instant) -> Result<()> { self.inner.destroy_id(self.id(id), now) }
    fn next_cm_event(&mut self, now: Instant) -> Result<Option<CmEvent>> {
        let event = self.inner.next_cm_event(now)?;
        Ok(event.map(|event| CmEvent { id: CmId(self.ids.outer(event.id.0)), ..event }))
    }
    fn create_cq(&mut self, device: DeviceId, attr: &CqAttr) -> Result<CqId> {
        let cq = self.inner.create_cq(device, attr)?;
        Ok(CqId(self.cqs.hand_out(cq.0)))
    }
    fn destroy_cq(&mut self, cq: CqId) -> Result<()> { self.inner.destroy_cq(self.cq(cq)) }
    fn create_qp(&mut self, id: CmId, attr: &QpAttr) -> Result<QpId> {
        let (send_cq, recv_cq) = (self.cq(attr.send_cq), self.cq(attr.recv_cq));
        let qp = self.inner.create_qp(self.id(id), &QpAttr { send_cq, recv_cq, ..*attr })?;
        Ok(QpId(self.qps.hand_out(qp.0)))
    }
    fn post_recv(&mut self, qp: QpId, chain: &[RecvWr]) -> Post<()> { self.inner.post_recv(self.qp(qp), chain) }
    fn post_send(&mut self, qp: QpId, chain: &[SendWr]) -> Post<Posted> { self.inner.post_send(self.qp(qp), chain) }
    fn poll_cq(&mut self, cq: CqId, max: usize, out: &mut Vec<WorkCompletion>) -> Result<usize> {
        let (cq, before) = (self.cq(cq), out.len());
        let count = self.inner.poll_cq(cq, max, out)?;
        out[before..].iter_mut().for_each(|wc| wc.qp = QpId(self.qps.outer(wc.qp.0)));
        Ok(count)
    }
    fn req_notify(&mut self, cq: CqId, notify: Notify) -> Result<()> { self.inner.req_notify(self.cq(cq), notify) }
    fn next_completion_event(&mut self, on: DeviceId) -> Result<Option<CqId>> {
        let cq = self.inner.next_completion_event(on)?;
        Ok(cq.map(|cq| CqId(self.cqs.outer(cq.0))))
    }
    roles!(
        none:
        shared_receives remote_keys liveness extensions handover off_loop_registration
        foreign_memory datagrams adapter immediate_sends shared_memory exchange device_events
    );
}
