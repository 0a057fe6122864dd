//! Completion queues.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::chains::RECEIVE;
use super::device::RawDevice;
use super::ffi::{QueueName, check, failure, has_event, non_null};
use super::moderation;
use super::qp_numbers::QpNumbers;
use super::status::{wc_opcode, wc_status};
use super::sys::{
    ibv_ack_cq_events, ibv_cq, ibv_create_cq, ibv_destroy_cq, ibv_get_cq_event, ibv_poll_cq, ibv_req_notify_cq, ibv_wc,
    ibv_wc_flags,
};
use rdma_transport::caps::Moderation;
use rdma_transport::cq::Notify;
use rdma_transport::datagram::DatagramSource;
use rdma_transport::error::{Result, TransportError};
use rdma_transport::mr::RemoteKey;
use rdma_transport::slab::Key;
use rdma_transport::wc::{WcOpcode, WorkCompletion};

/// The maximum number of completions that one `ibv_poll_cq` call returns.
const BATCH: usize = 32;
/// The number of events that one `ibv_ack_cq_events` call acknowledges. Each call takes a lock, so fewer calls are
/// faster.
const ACK_BATCH: u32 = 64;

/// A buffer for the completions of one poll. A device does not write the fields that have no meaning for a completion. These fields are
/// zero, or have values from an earlier completion.
pub(super) struct Batch([ibv_wc; BATCH]);

impl Default for Batch {
    fn default() -> Self {
        // SAFETY: all fields are numbers, for which zeros are valid.
        Self(unsafe { std::mem::zeroed() })
    }
}

/// A completion queue of libibverbs, which is destroyed when this value is dropped.
#[derive(Debug)]
pub(super) struct RawCq {
    raw: *mut ibv_cq,
    name: QueueName,
    /// The number of events that were read but are not acknowledged yet.
    unacknowledged: AtomicU32,
    device: Arc<RawDevice>,
}

// SAFETY: libibverbs protects the data of a queue by a lock. The last owner destroys the queue once.
unsafe impl Send for RawCq {}
// SAFETY: libibverbs protects the data of a queue by a lock, so several threads may use the queue at the same time.
unsafe impl Sync for RawCq {}

impl RawCq {
    pub(super) fn create(device: &Arc<RawDevice>, entries: u32, vector: u32, key: Key) -> Result<Self> {
        let vector = c_int::try_from(vector).unwrap_or(c_int::MAX);
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        let name = QueueName::new(key);
        // SAFETY: the context and the channel are live. The queue's context is a number, which is never used as a
        // pointer.
        let raw = unsafe { ibv_create_cq(device.context(), entries, name.context(), device.channel(), vector) };
        let raw = non_null("ibv_create_cq", raw)?;
        Ok(Self { raw, name, unacknowledged: AtomicU32::new(0), device: Arc::clone(device) })
    }

    pub(super) const fn as_ptr(&self) -> *mut ibv_cq {
        self.raw
    }

    pub(super) fn moderate(&self, to: Moderation) -> Result<()> {
        // SAFETY: the queue is live.
        unsafe { moderation::set(self.raw, to) }
    }

    pub(super) fn is_on(&self, device: &Arc<RawDevice>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }

    /// Moves up to `max` completions from the queue to `out`. Returns the number of completions.
    /// If a call of `ibv_poll_cq` fails, `out` has the completions of the earlier calls. The queue
    /// then counts as failed, because the failed call may have consumed completions.
    pub(super) fn poll(
        &self,
        max: usize,
        numbers: &QpNumbers,
        batch: &mut Batch,
        out: &mut Vec<WorkCompletion>,
    ) -> Result<usize> {
        let mut taken = 0;
        while taken < max {
            let want = BATCH.min(max - taken);
            // SAFETY: the queue is live, and the buffer has room for `want` completions.
            let rc = unsafe { ibv_poll_cq(self.raw, want as c_int, batch.0.as_mut_ptr()) };
            if rc < 0 {
                return Err(TransportError::io("ibv_poll_cq", failure(rc)));
            }
            let count = (rc as usize).min(want);
            out.extend(batch.0[..count].iter().map(|wc| completion(wc, numbers)));
            taken += count;
            if count < want {
                break;
            }
        }
        Ok(taken)
    }

    /// Requests one event for the next completion of the kind `notify`.
    pub(super) fn arm(&self, notify: Notify) -> Result<()> {
        // SAFETY: the queue is live.
        check("ibv_req_notify_cq", unsafe { ibv_req_notify_cq(self.raw, i32::from(notify == Notify::Solicited)) })
    }

    /// Counts one more event that must be acknowledged. If [`ACK_BATCH`] events are counted, acknowledges them all and
    /// returns true. Otherwise returns false.
    fn count_event(&self) -> bool {
        let due = self.unacknowledged.fetch_add(1, Ordering::Relaxed) + 1 >= ACK_BATCH;
        if due {
            self.acknowledge();
        }
        due
    }

    fn acknowledge(&self) {
        let count = self.unacknowledged.swap(0, Ordering::Relaxed);
        if count > 0 {
            // SAFETY: the queue is live, and `count` of its events were read and not acknowledged before.
            unsafe { ibv_ack_cq_events(self.raw, count) }
        }
    }
}

impl Drop for RawCq {
    fn drop(&mut self) {
        // Acknowledge all events first, because `ibv_destroy_cq` waits until every event of the queue is acknowledged.
        self.acknowledge();
        // SAFETY: no queue pair uses this queue any more, because each queue pair keeps its completion queues alive by
        // an `Arc`.
        if let Err(error) = check("ibv_destroy_cq", unsafe { ibv_destroy_cq(self.raw) }) {
            local_log!(Warn, "{error}");
        }
    }
}

fn completion(wc: &ibv_wc, numbers: &QpNumbers) -> WorkCompletion {
    // SAFETY: both fields of the union are 32-bit numbers, and any value is valid. The flags decide which field is
    // used.
    let (immediate, invalidated) = unsafe {
        let data = &wc.imm_data_invalidated_rkey_union;
        (data.imm_data, data.invalidated_rkey)
    };
    let failed = wc.status != 0;
    let has = |flag: ibv_wc_flags| !failed && wc.wc_flags & flag.0 != 0;
    WorkCompletion {
        wr_id: wc.wr_id & !RECEIVE,
        qp: numbers.find(wc.qp_num),
        status: wc_status(wc.status),
        // In a failed completion the opcode may be that of an earlier completion. So a bit of the `wr_id` decides
        // between receive and send.
        opcode: match (failed, wc.wr_id & RECEIVE != 0) {
            (false, _) => wc_opcode(wc.opcode),
            (true, true) => WcOpcode::Recv,
            (true, false) => WcOpcode::Send,
        },
        vendor_error: if failed { wc.vendor_err } else { 0 },
        byte_len: wc.byte_len,
        immediate: has(ibv_wc_flags::IBV_WC_WITH_IMM).then(|| u32::from_be(immediate)),
        invalidated: has(ibv_wc_flags::IBV_WC_WITH_INV).then_some(RemoteKey(invalidated)),
        source: DatagramSource {
            qp_number: wc.src_qp,
            lid: wc.slid,
            service_level: wc.sl,
            path_bits: wc.dlid_path_bits & !DatagramSource::GLOBAL
                | if has(ibv_wc_flags::IBV_WC_GRH) { DatagramSource::GLOBAL } else { 0 },
        },
    }
}

/// A completion queue in the provider's table.
#[derive(Debug)]
pub(super) struct Cq {
    /// The queue; `None` after the device was removed.
    pub(super) raw: Option<Arc<RawCq>>,
    pub(super) device: u32,
    entries: u32,
    /// The number of entries that are reserved for the work requests of existing queue pairs.
    reserved: u32,
    /// The number of entries that were reserved for queue pairs that are destroyed. The queue may still have completions of these queue
    /// pairs. So the entries become free when a poll finds the queue empty.
    released: u32,
    /// The entries of queue pairs that the program has destroyed, and the device has not yet.
    retiring: u32,
    /// The number of send and receive queues that use this completion queue.
    users: u32,
    pub(super) armed: bool,
    /// True if the queue has failed and its connections were notified. The queue is not polled any more.
    pub(super) failed: bool,
    /// The number of shared receive queues whose receives may complete in this queue.
    pub(super) shared: u32,
    /// Completions that the provider has polled for its own purposes, and that the program has not polled yet.
    pub(super) stash: VecDeque<WorkCompletion>, // bound: completions
}

impl Cq {
    /// Returns an entry that has no queue yet. The queue is created later, with the key of this entry.
    pub(super) const fn new(device: u32, entries: u32) -> Self {
        Self {
            raw: None,
            device,
            entries,
            reserved: 0,
            released: 0,
            retiring: 0,
            users: 0,
            armed: false,
            failed: false,
            shared: 0,
            stash: VecDeque::new(),
        }
    }

    /// Returns the queue if `name` is its name. Returns `None` for the name of another queue, or if the queue was
    /// released.
    pub(super) fn named(&self, name: QueueName) -> Option<&Arc<RawCq>> {
        self.raw.as_ref().filter(|raw| raw.name == name)
    }

    pub(super) const fn entries(&self) -> u32 {
        self.entries
    }

    /// Moves up to `max` completions from the stash to `out`. Returns the number of completions.
    #[inline]
    pub(super) fn take_stash(&mut self, max: usize, out: &mut Vec<WorkCompletion>) -> usize {
        if self.stash.is_empty() {
            return 0;
        }
        let count = max.min(self.stash.len());
        out.extend(self.stash.drain(..count));
        count
    }

    pub(super) const fn is_used(&self) -> bool {
        self.users > 0
    }

    /// Reserves `depth` entries, so that the completions of all work requests of a send or receive queue fit in the
    /// completion queue. Fails if fewer entries are free.
    pub(super) fn reserve(&mut self, depth: u32) -> Result<()> {
        let kept = u64::from(self.released) + u64::from(self.retiring);
        let reserved = u64::from(self.reserved) + kept + u64::from(depth);
        if reserved > self.entries.into() {
            let range = "at most the entries it was created with";
            return Err(TransportError::OutOfRange {
                what: "work requests on the completion queue",
                value: reserved,
                range,
            });
        }
        self.reserved += depth;
        self.users += 1;
        Ok(())
    }

    /// Cancels a reservation of `depth` entries, because the work queue could not be created.
    pub(super) fn cancel(&mut self, depth: u32) {
        self.reserved = self.reserved.saturating_sub(depth);
        self.users = self.users.saturating_sub(1);
    }

    /// Releases the `depth` completion-queue entries that were reserved for a destroyed work queue.
    /// They become free when a poll finds the completion queue empty.
    pub(super) fn release(&mut self, depth: u32) {
        self.cancel(depth);
        self.released += depth;
    }

    /// Releases the `depth` entries of a send queue whose queue pair is destroyed later. Until
    /// then, it may add completions. The program may destroy the completion queue already.
    pub(super) fn retire(&mut self, depth: u32) {
        self.cancel(depth);
        self.retiring += depth;
    }

    /// Records that a queue pair whose entries were retired is destroyed.
    pub(super) fn retired(&mut self, depth: u32) {
        self.retiring -= depth;
        self.released += depth;
    }

    /// Records that a poll found the queue empty. The entries of destroyed queue pairs are free now.
    #[inline]
    pub(super) fn drained(&mut self) {
        self.released = 0;
    }
}

/// Reads the next event of a device's completion channel. Returns the key of the event's queue,
/// `Key::NONE` if this provider does not have the queue, or `None` if no event is available.
/// `owned` returns this provider's queue with a given name. Adds the number of acknowledging calls
/// to `acknowledgements`.
pub(super) fn next_event(
    device: &RawDevice,
    acknowledgements: &mut u64,
    owned: impl Fn(QueueName) -> Option<(Key, Arc<RawCq>)>,
) -> Result<Option<Key>> {
    let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the channel is live, and the pointers are to memory for the results.
    let get = || unsafe { ibv_get_cq_event(device.channel(), &raw mut cq, &raw mut context) };
    if !has_event("ibv_get_cq_event", get)? {
        return Ok(None);
    }
    let found = owned(QueueName::of(context));
    let acknowledged = match &found {
        Some((_, raw)) => raw.count_event(),
        None => {
            // SAFETY: the event of this queue is not acknowledged, so the queue still exists: destroying it waits for
            // the acknowledgement.
            unsafe { ibv_ack_cq_events(cq, 1) }
            true
        }
    };
    *acknowledgements += u64::from(acknowledged);
    Ok(Some(found.map_or(Key::NONE, |(key, _)| key)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a completion with an error, mlx5 does not write the opcode. The completion still has the opcode of the
    /// previous completion in the same entry of the completion queue.
    #[test]
    fn what_failed_is_told_by_its_number_and_not_by_the_opcode() {
        let numbers = QpNumbers::default();
        // SAFETY: all fields are numbers, for which zeros are valid.
        let mut wc: ibv_wc = unsafe { std::mem::zeroed() };
        for (number, stale, wanted) in [(RECEIVE | 5, 0, WcOpcode::Recv), (5, 128, WcOpcode::Send)] {
            (wc.wr_id, wc.status, wc.opcode, wc.vendor_err, wc.wc_flags) = (number, 5, stale, 0x68, 2);
            let seen = completion(&wc, &numbers);
            assert_eq!((seen.wr_id, seen.opcode, seen.vendor_error, seen.immediate), (5, wanted, 0x68, None));
        }
        (wc.wr_id, wc.status, wc.opcode) = (RECEIVE | 6, 0, 129);
        let seen = completion(&wc, &numbers);
        assert_eq!((seen.wr_id, seen.opcode, seen.vendor_error), (6, WcOpcode::RecvWriteWithImmediate, 0));
    }

    #[test]
    fn room_is_kept_for_every_work_request() {
        let mut cq = Cq::new(0, 8);
        cq.reserve(6).unwrap();
        assert!(matches!(cq.reserve(3), Err(TransportError::OutOfRange { value: 9, .. })));
        cq.reserve(2).unwrap();
        cq.cancel(2);
        assert!(cq.is_used());
        cq.release(6);
        assert!(!cq.is_used());
        assert!(cq.reserve(3).is_err(), "completions may still be in it");
        cq.drained();
        cq.reserve(8).unwrap();
        assert!(cq.reserve(u32::MAX).is_err());
    }
}
