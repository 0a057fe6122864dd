//! Creation and polling of queues. Each queue is created within the limits of its device. Before the provider creates a
//! send or receive queue, it reserves entries in the completion queue for all work requests of that queue.

use std::collections::VecDeque;
use std::sync::Arc;

use super::NAME;
use super::capabilities::{max_datagram, port_attr};
use super::chains::Chains;
use super::cq::{self, Batch, Cq, RawCq};
use super::devices::Device;
use super::entry::{IdEntry, IdState, RetiringQp};
use super::ffi::QueueName;
use super::hub::DeviceHub;
use super::id::{Queues, Service};
use super::qp::{Qp, init_attr};
use super::srq::{RawSrq, Srq};
use rdma_transport::caps::Features;
use rdma_transport::cm::CmId;
use rdma_transport::cq::{CqAttr, Notify};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::event::DeviceEventKind;
use rdma_transport::provider::{CqId, DeviceId};
use rdma_transport::qp::{QpAttr, QpId, SrqId};
use rdma_transport::slab::{Key, Slab};
use rdma_transport::srq::SrqAttr;
use rdma_transport::wc::{WcOpcode, WorkCompletion};

const NO_SRQ: TransportError =
    TransportError::Unsupported { provider: NAME, feature: "shared receive queues on this device" };

pub(super) const STALE_QP: TransportError = TransportError::Stale { object: "queue pair" };
pub(super) const STALE_CQ: TransportError = TransportError::Stale { object: "completion queue" };
pub(super) const STALE_SRQ: TransportError = TransportError::Stale { object: "shared receive queue" };

/// The maximum number of completions that one poll moves to the stash.
const BATCH: usize = 64;

/// The completion queues, the shared receive queues, and the queue pairs that are destroyed later.
#[derive(Default)]
pub(super) struct DeviceQueues {
    pub(super) cqs: Slab<Cq>,   // bound: completions
    pub(super) srqs: Slab<Srq>, // local: one for each device
    batch: Batch,
    pub(super) chains: Chains,
    /// Queue pairs that are destroyed when their last shared receive has completed, or when their
    /// time limit has passed. The list is in the order of the time limits.
    pub(super) retiring: VecDeque<RetiringQp>, // bound: ending-ids
    /// The number of calls that have acknowledged completion events.
    pub(super) acknowledgements: u64,
}

impl DeviceQueues {
    pub(super) fn make_cq(&mut self, hub: &DeviceHub, device: DeviceId, attr: &CqAttr) -> Result<CqId> {
        let CqAttr { entries, vector, moderation } = *attr;
        let entry = hub.live_device(device)?;
        attr.check(NAME, &entry.info.capabilities)?;
        let open = Arc::clone(entry.live()?);
        // The queue's context contains the key of its entry in the table, so create the entry first.
        let key = self.cqs.insert(Cq::new(device.0, entries));
        let made = RawCq::create(&open, entries, vector, key).and_then(|raw| {
            moderation.map_or(Ok(()), |to| raw.moderate(to))?;
            Ok(raw)
        });
        match made {
            Ok(raw) => {
                if let Some(cq) = self.cqs.get_mut(key) {
                    cq.raw = Some(Arc::new(raw));
                }
                Ok(CqId(key))
            }
            Err(error) => {
                self.cqs.remove(key);
                Err(error.on(&open.name))
            }
        }
    }

    pub(super) fn drop_cq(&mut self, hub: &mut DeviceHub, cq: CqId) -> Result<()> {
        if self.cqs.get(cq.0).ok_or(STALE_CQ)?.is_used() {
            return Err(TransportError::InvalidState { call: "destroy_cq", state: "using the completion queue" });
        }
        if let Some(cq) = self.cqs.remove(cq.0) {
            hub.devices[cq.device as usize].armed -= usize::from(cq.armed);
        }
        Ok(())
    }

    /// Creates a shared receive queue. Its receives may have up to `attr.max_sge` scatter/gather entries; 0 means as
    /// many as the device supports.
    pub(super) fn make_srq(&mut self, hub: &DeviceHub, device: DeviceId, attr: &SrqAttr) -> Result<SrqId> {
        let SrqAttr { max_wr, max_sge: wanted_sge } = *attr;
        let entry = hub.live_device(device)?;
        let capabilities = &entry.info.capabilities;
        if !capabilities.features.contains(Features::SHARED_RECEIVE_QUEUE) {
            return Err(NO_SRQ);
        }
        attr.check(capabilities)?;
        let (open, max_sge) = (Arc::clone(entry.live()?), capabilities.max_sge.min(entry.limits.shared_sge));
        let max_sge = if wanted_sge == 0 { max_sge } else { wanted_sge.min(max_sge) };
        let key = self.srqs.insert(Srq::new(device.0, max_wr, max_sge));
        match RawSrq::create(&open, max_wr, max_sge, key) {
            Ok(raw) => {
                if let Some(srq) = self.srqs.get_mut(key) {
                    srq.raw = Some(Arc::new(raw));
                }
                Ok(SrqId(key))
            }
            Err(error) => {
                self.srqs.remove(key);
                Err(error.on(&open.name))
            }
        }
    }

    pub(super) fn drop_srq(&mut self, srq: SrqId) -> Result<()> {
        let entry = self.srqs.get_mut(srq.0).ok_or(STALE_SRQ)?;
        if entry.is_used() {
            return Err(TransportError::InvalidState { call: "destroy_srq", state: "using the shared receive queue" });
        }
        entry.destroy()?;
        for cq in entry.targets() {
            if let Some(cq) = self.cqs.get_mut(cq.0) {
                cq.release(entry.depth());
                cq.shared -= 1;
            }
        }
        self.srqs.remove(srq.0);
        Ok(())
    }

    pub(super) fn make_qp(&mut self, hub: &mut DeviceHub, id: CmId, attr: &QpAttr) -> Result<QpId> {
        let srq = attr.srq;
        let entry = hub.id(id)?;
        if !matches!(entry.state, IdState::Resolved | IdState::RequestReceived | IdState::Bound) {
            return Err(TransportError::InvalidState { call: "create_qp", state: entry.state.name() });
        }
        if entry.qp.is_some() {
            return Err(TransportError::InvalidState { call: "create_qp", state: "with a queue pair" });
        }
        let device = entry.device.ok_or(TransportError::InvalidState { call: "create_qp", state: "on no device" })?;
        let capabilities = &hub.devices[device.0 as usize].info.capabilities;
        if entry.raw.service() == Service::Datagram && !capabilities.features.contains(Features::DATAGRAMS) {
            return Err(TransportError::Unsupported { provider: NAME, feature: "datagrams on this device" });
        }
        attr.check(capabilities)?;
        self.cqs.get_mut(attr.send_cq.0).ok_or(STALE_CQ)?.reserve(attr.max_send_wr)?;
        let made = self.reserve_receives(attr, srq).and_then(|attached| {
            self.make_qp_on(hub, id, device, attr).inspect_err(|_| self.cancel_receives(attr, srq, attached))
        });
        let qp = match made {
            Ok(qp) => qp,
            Err(error) => {
                if let Some(cq) = self.cqs.get_mut(attr.send_cq.0) {
                    cq.cancel(attr.max_send_wr);
                }
                return Err(error);
            }
        };
        let handle = QpId(id.0);
        hub.devices[device.0 as usize].numbers.insert(qp.number, handle);
        hub.id_mut(id)?.qp = Some(qp);
        Ok(handle)
    }

    /// Reserves entries in the completion queue for a queue pair's receives. For a shared receive queue, entries are
    /// reserved only once in each completion queue, even if several queue pairs use both queues. Returns true if this
    /// call has reserved the entries for a shared receive queue.
    fn reserve_receives(&mut self, attr: &QpAttr, srq: Option<SrqId>) -> Result<bool> {
        let cq = self.cqs.get_mut(attr.recv_cq.0).ok_or(STALE_CQ)?;
        let Some(srq) = srq else { return cq.reserve(attr.max_recv_wr).map(|()| false) };
        let srq = self.srqs.get_mut(srq.0).ok_or(STALE_SRQ)?;
        let attached = srq.attach(attr.recv_cq);
        if attached {
            cq.reserve(srq.depth()).inspect_err(|_| srq.forget(attr.recv_cq))?;
            cq.shared += 1;
        }
        Ok(attached)
    }

    /// Cancels `reserve_receives`, because the queue pair could not be created. `attached` is the
    /// result of `reserve_receives`. If it is false, an earlier queue pair has reserved the entries
    /// for the shared queue, and they stay reserved.
    fn cancel_receives(&mut self, attr: &QpAttr, srq: Option<SrqId>, attached: bool) {
        let Some(cq) = self.cqs.get_mut(attr.recv_cq.0) else { return };
        let Some(srq) = srq else { return cq.cancel(attr.max_recv_wr) };
        let Some(srq) = self.srqs.get_mut(srq.0) else { return };
        if attached {
            srq.forget(attr.recv_cq);
            cq.cancel(srq.depth());
            cq.shared -= 1;
        } else {
            srq.detach(attr.recv_cq);
        }
    }

    fn make_qp_on(&self, hub: &DeviceHub, id: CmId, device: DeviceId, attr: &QpAttr) -> Result<Qp> {
        let id_raw = &hub.id(id)?.raw;
        let device = &hub.devices[device.0 as usize];
        let open = device.live()?;
        let owned = |cq: CqId| self.cqs.get(cq.0).and_then(|cq| cq.raw.clone()).ok_or(STALE_CQ);
        let shared = match attr.srq {
            Some(srq) => Some(self.srqs.get(srq.0).and_then(|srq| srq.raw.clone()).ok_or(STALE_SRQ)?),
            None => None,
        };
        let queues = Queues { send: owned(attr.send_cq)?, recv: owned(attr.recv_cq)?, shared };
        let elsewhere = queues.shared.as_ref().is_some_and(|shared| !shared.is_on(open));
        if elsewhere || !queues.send.is_on(open) || !queues.recv.is_on(open) {
            return Err(TransportError::InvalidState { call: "create_qp", state: "on another device than its queues" });
        }
        let service = id_raw.service();
        let mut capabilities = device.info.capabilities;
        if service == Service::Datagram {
            // The ports of a device may have different MTUs.
            capabilities.max_datagram = max_datagram(&port_attr(open.context(), id_raw.port())?);
        }
        let capabilities = &capabilities;
        let name = QueueName::new(id.0);
        let mut made = init_attr(service, attr, capabilities, &queues, name);
        let raw = match id_raw.create_qp(&mut made, queues.clone()) {
            // Inline data is optional, so try again without it. Together with the requested number of scatter/gather
            // entries, inline data may exceed a limit of the device.
            Err(_) if attr.max_inline > 0 => {
                made = init_attr(service, &QpAttr { max_inline: 0, ..*attr }, capabilities, &queues, name);
                let raw = id_raw.create_qp(&mut made, queues).map_err(|error| error.on(&open.name))?;
                made.cap.max_inline_data = 0;
                raw
            }
            other => other.map_err(|error| error.on(&open.name))?,
        };
        Ok(Qp::new((raw, name), &made, attr, attr.srq, capabilities, device.limits.driver))
    }

    /// Releases the entries that a destroyed queue pair has reserved. All remaining completions of the queue pair are
    /// in its completion queues already.
    pub(super) fn release_entries(&mut self, qp: &Qp) {
        self.leave_queues(qp, Cq::release);
    }

    /// Calls `leave` for each completion queue in which a queue pair has reserved entries, with
    /// their number. Detaches the queue pair from its shared queue.
    pub(super) fn leave_queues(&mut self, qp: &Qp, leave: impl Fn(&mut Cq, u32)) {
        if let Some(cq) = self.cqs.get_mut(qp.attr.send_cq.0) {
            leave(cq, qp.attr.max_send_wr);
        }
        let Some(srq) = qp.srq else {
            if let Some(cq) = self.cqs.get_mut(qp.attr.recv_cq.0) {
                leave(cq, qp.attr.max_recv_wr);
            }
            return;
        };
        if let Some(srq) = self.srqs.get_mut(srq.0) {
            srq.detach(qp.attr.recv_cq);
        }
    }

    /// Polls the completion queue for the shared receives of `gone`, a queue pair that is being
    /// destroyed. Stores all completions in the stash, from which the program's next polls take
    /// them. The caller calls this before and after it destroys the queue pair.
    pub(super) fn stash_completions(&mut self, hub: &mut DeviceHub, key: Key, gone: &Qp) {
        let cq = gone.attr.recv_cq;
        let Some(entry) = self.cqs.get(cq.0) else { return };
        let Some(raw) = entry.raw.as_ref().filter(|_| !entry.failed) else { return };
        let (mut aside, mut failed) = (Vec::new(), None);
        let device = &hub.devices[entry.device as usize];
        // Stop after as many completions as the queue has entries, so that the loop ends even if
        // new completions arrive all the time. These stay in the queue for later polls.
        while aside.len() < entry.entries() as usize {
            match raw.poll(BATCH, &device.numbers, &mut self.batch, &mut aside) {
                Ok(BATCH) => {}
                Ok(_) => break,
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        self.count_shared(hub, cq, &aside, Some((QpId(key), gone)));
        if let Some(entry) = self.cqs.get_mut(cq.0) {
            entry.stash.extend(aside);
        }
        if let Some(error) = failed {
            self.queue_call_failed(hub, cq, &error);
        }
    }

    /// Updates the count of outstanding receives of each shared queue whose receives are in `polled`. `gone` is a queue pair that was
    /// removed from the table, but whose completions may be in `polled`.
    fn count_shared(&mut self, hub: &DeviceHub, cq: CqId, polled: &[WorkCompletion], gone: Option<(QpId, &Qp)>) {
        for wc in polled {
            if !matches!(wc.opcode, WcOpcode::Recv | WcOpcode::RecvWriteWithImmediate) {
                continue;
            }
            let live = hub.ids.get(wc.qp.0).and_then(|id| id.qp.as_ref());
            let gone = || gone.filter(|gone| gone.0 == wc.qp).map(|gone| gone.1);
            let retiring =
                || self.retiring.iter().find(|retiring| retiring.key == wc.qp.0).map(|retiring| &retiring.qp);
            let Some(qp) = live.or_else(gone).or_else(retiring) else { continue };
            debug_assert_eq!(qp.attr.recv_cq, cq, "receives complete on one queue");
            if let Some(srq) = qp.srq.and_then(|srq| self.srqs.get_mut(srq.0)) {
                srq.polled();
            }
        }
    }

    /// Polls a completion queue for the program. If the poll fails, the queue is marked as failed
    /// and is not polled again, and the connections that use the queue end. The call still returns
    /// the completions that it took before the failure.
    pub(super) fn poll(
        &mut self,
        hub: &mut DeviceHub,
        cq: CqId,
        max: usize,
        out: &mut Vec<WorkCompletion>,
    ) -> Result<usize> {
        let start = out.len();
        let entry = self.cqs.get_mut(cq.0).ok_or(STALE_CQ)?;
        let stashed = entry.take_stash(max, out);
        let Some(raw) = entry.raw.as_ref().filter(|_| !entry.failed) else { return Ok(stashed) };
        let device = &hub.devices[entry.device as usize];
        let polled = raw.poll(max - stashed, &device.numbers, &mut self.batch, out);
        let taken = out.len() - start - stashed;
        if let Err(error) = polled {
            self.queue_call_failed(hub, cq, &error);
        }
        let Some(entry) = self.cqs.get_mut(cq.0) else { return Ok(stashed) };
        if stashed + taken < max {
            entry.drained();
        }
        if entry.shared > 0 {
            self.count_shared(hub, cq, &out[start + stashed..], None);
        }
        Ok(stashed + taken)
    }

    /// Handles the error of a call on a completion queue: the queue has failed. After the removal
    /// of the device such errors are expected, and have no effect, because the removal ends the
    /// connections.
    fn queue_call_failed(&mut self, hub: &mut DeviceHub, queue: CqId, error: &TransportError) {
        let removed = self.cqs.get(queue.0).is_some_and(|cq| hub.devices[cq.device as usize].removed);
        if !removed {
            self.queue_failed(hub, queue, &error.to_string());
        }
    }

    /// Marks a completion queue as failed, because completions are lost. Ends the connections whose
    /// queue pairs use the queue.
    fn queue_failed(&mut self, hub: &mut DeviceHub, queue: CqId, why: &str) {
        let Some(cq) = self.cqs.get_mut(queue.0).filter(|cq| !cq.failed) else { return };
        cq.failed = true;
        let device = &mut hub.devices[cq.device as usize];
        device.armed -= usize::from(cq.armed);
        cq.armed = false;
        let why = format!("{}: {why}", device.info.name);
        local_log!(Error, "{why}");
        let on_it = |id: &IdEntry| id.qp.as_ref().is_some_and(|qp| qp.completes_to(queue));
        hub.path_failed(on_it, &why);
        // If a poll or the arming of the queue has found the failure, nothing else makes the
        // connection-manager channel readable.
        hub.connector.wake();
    }

    /// Processes the event that a shared receive queue has failed. Ends the connections whose queue
    /// pairs use the queue.
    pub(super) fn srq_failed(&mut self, hub: &mut DeviceHub, device: usize, name: QueueName) {
        let ours = |srq: &Srq| srq.raw.as_ref().is_some_and(|raw| raw.name == name);
        let Some((key, _)) = self.srqs.at(name.slot()).filter(|(_, srq)| ours(srq)) else {
            log::trace!("an event of a shared receive queue that is not this provider's");
            return;
        };
        let srq = SrqId(key);
        local_log!(Error, "{}: a shared receive queue failed", hub.devices[device].info.name);
        hub.device_event(device, DeviceEventKind::SharedReceiveQueueFailed(srq));
        let on_it = |id: &IdEntry| id.qp.as_ref().is_some_and(|qp| qp.srq == Some(srq));
        let why = format!("{}: the shared receive queue failed", hub.devices[device].info.name);
        hub.path_failed(on_it, &why);
    }

    /// Destroys all queues of a removed device. The handles of the queues stay valid.
    pub(super) fn release(&mut self, device: DeviceId) {
        for key in self.cqs.keys() {
            if let Some(cq) = self.cqs.get_mut(key).filter(|cq| cq.device == device.0) {
                cq.armed = false;
                cq.raw = None;
            }
        }
        for key in self.srqs.keys() {
            if let Some(srq) = self.srqs.get_mut(key).filter(|srq| srq.device == device.0) {
                if let Err(error) = srq.destroy() {
                    local_log!(Error, "{error}: the shared receive queue is left as it is");
                }
            }
        }
    }

    /// Requests one event for the next completion of the kind `notify`.
    pub(super) fn arm(&mut self, hub: &mut DeviceHub, cq: CqId, notify: Notify) -> Result<()> {
        let entry = self.cqs.get_mut(cq.0).ok_or(STALE_CQ)?;
        let Some(raw) = entry.raw.as_ref().filter(|_| !entry.failed) else { return Ok(()) };
        let device = &mut hub.devices[entry.device as usize];
        if notify == Notify::Solicited && !device.info.capabilities.features.contains(Features::SOLICITED_EVENTS) {
            return Err(TransportError::Unsupported {
                provider: NAME,
                feature: "events of solicited completions on this device",
            });
        }
        match raw.arm(notify) {
            Ok(()) => {
                device.armed += usize::from(!entry.armed);
                entry.armed = true;
            }
            Err(error) => self.queue_call_failed(hub, cq, &error),
        }
        Ok(())
    }

    /// Returns the queue of the next completion event of a device. Fails if the completion channel
    /// has failed.
    pub(super) fn next_event(&mut self, device: &mut Device) -> Result<Option<CqId>> {
        // If no queue is armed, no event can arrive, so the system call is skipped.
        while device.armed > 0 {
            let Some(raw) = &device.raw else { break };
            let cqs = &self.cqs;
            let owned = |name: QueueName| {
                let (key, cq) = cqs.at(name.slot())?;
                Some((key, Arc::clone(cq.named(name)?)))
            };
            let Some(key) = cq::next_event(raw, &mut self.acknowledgements, owned)? else { break };
            if let Some(cq) = self.cqs.get_mut(key) {
                device.armed -= usize::from(cq.armed);
                cq.armed = false;
                return Ok(Some(CqId(key)));
            }
        }
        Ok(None)
    }

    /// Processes the event that a completion queue overran.
    pub(super) fn overran(&mut self, hub: &mut DeviceHub, name: QueueName) {
        // The completion queue may belong to another provider in this process, which then reports
        // its failure.
        if let Some((key, _)) = self.cqs.at(name.slot()).filter(|(_, cq)| cq.named(name).is_some()) {
            self.queue_failed(hub, CqId(key), "the completion queue overran");
        }
    }
}
