//! The ledger of one side: the work requests that are not done, against which each completion is checked.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use crate::handle::{CqId, QpId};
use crate::slab::Key;
use crate::wc::{WcOpcode, WorkCompletion};
use crate::wr::SendClass;

/// A posted work request of a send queue.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) wr_id: u64,
    pub(super) class: SendClass,
    pub(super) signaled: bool,
    pub(super) len: usize,
}

impl Sent {
    const fn answered(&self) -> bool {
        matches!(self.class, SendClass::Read | SendClass::Atomic)
    }
}

/// The places that a receive names.
pub(super) type Places = Vec<Range<usize>>;

#[derive(Debug)]
struct Work {
    cq: CqId,
    sends: VecDeque<Sent>,
    receives: VecDeque<(u64, Places)>,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Ledger {
    work: BTreeMap<Key, Work>,
    /// The work of the queue pair that is being destroyed. Its completions may still come, and name that queue pair or none.
    left: Option<Work>,
    shared: BTreeMap<u64, Places>,
}

impl Ledger {
    /// Adds a queue pair, all of whose work completes on `cq`.
    pub(super) fn add(&mut self, qp: QpId, cq: CqId) {
        let work = Work { cq, sends: VecDeque::new(), receives: VecDeque::new() };
        assert!(self.work.insert(qp.0, work).is_none(), "two queue pairs have the handle {qp:?}");
    }

    /// Takes note that a queue pair is destroyed. Completions of its work may come until [`Ledger::forget`].
    pub(super) fn destroyed(&mut self, qp: QpId) {
        self.left = self.work.remove(&qp.0);
    }

    /// Takes note that the completions of the queue pair that was destroyed last were polled.
    pub(super) fn forget(&mut self) {
        self.left = None;
    }

    fn of(&mut self, qp: QpId) -> &mut Work {
        let work = self.work.get_mut(&qp.0).or(self.left.as_mut());
        work.unwrap_or_else(|| panic!("a completion of {qp:?}, which does not exist"))
    }

    pub(super) fn sent(&mut self, qp: QpId, sent: Sent) {
        self.of(qp).sends.push_back(sent);
    }

    pub(super) fn receives(&mut self, qp: QpId, wr_id: u64, places: Places) {
        self.of(qp).receives.push_back((wr_id, places));
    }

    pub(super) fn shares(&mut self, wr_id: u64, places: Places) {
        self.shared.insert(wr_id, places);
    }

    /// Number of work requests of a queue pair that must still complete.
    pub(super) fn outstanding(&mut self, qp: QpId) -> usize {
        let work = self.of(qp);
        work.receives.len() + work.sends.iter().filter(|sent| sent.signaled).count()
    }

    /// Takes note of a completion that was polled from `cq`. Returns the places of its receive, if it is one.
    pub(super) fn complete(&mut self, cq: CqId, wc: &WorkCompletion) -> Option<Places> {
        let shared = self.shared.remove(&wc.wr_id);
        let work = self.of(wc.qp);
        assert_eq!(work.cq, cq, "a completion on another queue: {wc:?}");
        let places = shared.or_else(|| {
            let at = work.receives.iter().position(|(wr_id, _)| *wr_id == wc.wr_id)?;
            assert_eq!(at, 0, "a receive completes before an earlier one: {wc:?}, {:?}", work.receives);
            work.receives.pop_front().map(|(_, places)| places)
        });
        let is_receive = wc.opcode.is_receive();
        if let Some(places) = places {
            assert!(is_receive, "the completion of a receive: {wc:?}");
            let room: usize = places.iter().map(ExactSizeIterator::len).sum();
            let fits = wc.opcode == WcOpcode::RecvWriteWithImmediate || wc.byte_len as usize <= room;
            assert!(fits || !wc.status.is_success(), "more than the {room} bytes of the receive: {wc:?}");
            return Some(places);
        }
        assert!(!is_receive, "a receive that is done, or was never posted: {wc:?}");
        let at = work.sends.iter().position(|sent| sent.wr_id == wc.wr_id);
        let at = at.unwrap_or_else(|| panic!("a work request that is done, or was never posted: {wc:?}"));
        // Reads and atomics keep their order among themselves; sends may overtake them.
        let answered = work.sends[at].answered();
        let overtakes = |sent: &Sent| sent.signaled && (answered || !sent.answered());
        let overtaken = work.sends.range(..at).find(|sent| overtakes(sent));
        assert!(overtaken.is_none(), "completes before an earlier work request: {wc:?}, {overtaken:?}");
        let sent = work.sends.remove(at);
        // Unsignaled sends before it are done with it.
        let mut nth = 0;
        work.sends.retain(|sent| {
            nth += 1;
            nth > at || sent.signaled
        });
        if let Some(Sent { class, len, .. }) = sent.filter(|_| wc.status.is_success()) {
            let fits = match class {
                SendClass::Send => wc.opcode == WcOpcode::Send,
                SendClass::Write => wc.opcode == WcOpcode::Write,
                // A Read of nothing may be reported as a Write.
                SendClass::Read => wc.opcode == WcOpcode::Read || len == 0 && wc.opcode == WcOpcode::Write,
                SendClass::Atomic => wc.opcode == WcOpcode::Atomic,
            };
            assert!(fits, "the completion of a {class:?}: {wc:?}");
        }
        None
    }
}
