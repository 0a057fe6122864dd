//! [`Ledger`]: a list of the outstanding work requests of one side. The harness checks each completion against it.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use crate::handle::{CqId, QpId};
use crate::slab::Key;
use crate::wc::{WcOpcode, WorkCompletion};
use crate::wr::SendClass;

/// An outstanding work request of a send queue.
#[derive(Debug)]
pub(super) struct LedgerSend {
    pub(super) wr_id: u64,
    pub(super) class: SendClass,
    pub(super) signaled: bool,
    pub(super) len: usize,
}

impl LedgerSend {
    const fn answered(&self) -> bool {
        matches!(self.class, SendClass::Read | SendClass::Atomic)
    }
}

/// The ranges of memory in which a receive places its message.
pub(super) type RecvRanges = Vec<Range<usize>>;

/// The outstanding work requests of a queue pair.
#[derive(Debug)]
struct QueuePairWork {
    cq: CqId,
    sends: VecDeque<LedgerSend>,
    receives: VecDeque<(u64, RecvRanges)>,
}

/// The outstanding work requests of one side.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    work: BTreeMap<Key, QueuePairWork>,
    /// The work requests of the queue pair that was destroyed last. Their completions may still be
    /// polled, and name the destroyed queue pair or none.
    left: Option<QueuePairWork>,
    shared: BTreeMap<u64, RecvRanges>,
}

impl Ledger {
    /// Adds a queue pair. All its work requests complete in the queue `cq`.
    pub(super) fn add(&mut self, qp: QpId, cq: CqId) {
        let work = QueuePairWork { cq, sends: VecDeque::new(), receives: VecDeque::new() };
        assert!(self.work.insert(qp.0, work).is_none(), "two queue pairs have the handle {qp:?}");
    }

    /// Records that a queue pair was destroyed. The ledger accepts its completions until [`Ledger::forget`] is called.
    pub(super) fn destroyed(&mut self, qp: QpId) {
        self.left = self.work.remove(&qp.0);
    }

    /// Records that all completions of the queue pair that was destroyed last were polled. From now on, the ledger
    /// accepts no completion of that queue pair.
    pub(super) fn forget(&mut self) {
        self.left = None;
    }

    fn of(&mut self, qp: QpId) -> &mut QueuePairWork {
        let work = self.work.get_mut(&qp.0).or(self.left.as_mut());
        work.unwrap_or_else(|| panic!("a completion of {qp:?}, which does not exist"))
    }

    pub(super) fn sent(&mut self, qp: QpId, sent: LedgerSend) {
        self.of(qp).sends.push_back(sent);
    }

    pub(super) fn receives(&mut self, qp: QpId, wr_id: u64, ranges: RecvRanges) {
        self.of(qp).receives.push_back((wr_id, ranges));
    }

    pub(super) fn shares(&mut self, wr_id: u64, ranges: RecvRanges) {
        self.shared.insert(wr_id, ranges);
    }

    /// Returns the number of work requests of a queue pair that have not completed yet. Unsignaled sends do not count.
    pub(super) fn outstanding(&mut self, qp: QpId) -> usize {
        let work = self.of(qp);
        work.receives.len() + work.sends.iter().filter(|sent| sent.signaled).count()
    }

    /// Checks a completion that was polled from `cq`, and removes the completed work request from the ledger. Returns
    /// the ranges of the memory of a receive, and `None` for a send.
    pub(super) fn complete(&mut self, cq: CqId, wc: &WorkCompletion) -> Option<RecvRanges> {
        let shared = self.shared.remove(&wc.wr_id);
        let work = self.of(wc.qp);
        assert_eq!(work.cq, cq, "a completion on another queue: {wc:?}");
        let ranges = shared.or_else(|| {
            let at = work.receives.iter().position(|(wr_id, _)| *wr_id == wc.wr_id)?;
            assert_eq!(at, 0, "a receive completes before an earlier one: {wc:?}, {:?}", work.receives);
            work.receives.pop_front().map(|(_, ranges)| ranges)
        });
        let is_receive = wc.opcode.is_receive();
        if let Some(ranges) = ranges {
            assert!(is_receive, "the completion of a receive: {wc:?}");
            let room: usize = ranges.iter().map(ExactSizeIterator::len).sum();
            let fits = wc.opcode == WcOpcode::RecvWriteWithImmediate || wc.byte_len as usize <= room;
            assert!(fits || !wc.status.is_success(), "more than the {room} bytes of the receive: {wc:?}");
            return Some(ranges);
        }
        assert!(!is_receive, "a receive that is done, or was never posted: {wc:?}");
        let at = work.sends.iter().position(|sent| sent.wr_id == wc.wr_id);
        let at = at.unwrap_or_else(|| panic!("a work request that is done, or was never posted: {wc:?}"));
        // Reads and atomics complete in order among themselves. Sends may complete before earlier Reads and atomics.
        let answered = work.sends[at].answered();
        let overtakes = |sent: &LedgerSend| sent.signaled && (answered || !sent.answered());
        let overtaken = work.sends.range(..at).find(|sent| overtakes(sent));
        assert!(overtaken.is_none(), "completes before an earlier work request: {wc:?}, {overtaken:?}");
        let sent = work.sends.remove(at);
        // The unsignaled sends that were posted before the completed send are done as well.
        let mut nth = 0;
        work.sends.retain(|sent| {
            nth += 1;
            nth > at || sent.signaled
        });
        if let Some(LedgerSend { class, len, .. }) = sent.filter(|_| wc.status.is_success()) {
            let fits = match class {
                SendClass::Send => wc.opcode == WcOpcode::Send,
                SendClass::Write => wc.opcode == WcOpcode::Write,
                // A device may report a Read of 0 bytes as a Write.
                SendClass::Read => wc.opcode == WcOpcode::Read || len == 0 && wc.opcode == WcOpcode::Write,
                SendClass::Atomic => wc.opcode == WcOpcode::Atomic,
            };
            assert!(fits, "the completion of a {class:?}: {wc:?}");
        }
        None
    }
}
