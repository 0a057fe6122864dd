//! The behaviour while memory for large messages is scarce: the order in which messages get memory, the peers that must first answer a
//! Read, and the reports to a peer that the local side waits for memory.
//!
//! If memory is scarce, only peers that have answered a Read within the last 2 seconds get memory. Other peers must first answer a *probe*:
//! a Read of a few bytes, which are dropped. So a peer that offers messages and answers no Reads holds no memory.
//!
//! A receiver that waits for memory reports this to the sender. The sender extends the time limit of the transfer by the time of this wait,
//! up to a maximum.

use std::time::{Duration, Instant};

use rdma_transport::wr::{SendOp, SgeList};

use super::incoming::{IncomingMessage, PIECES, STRIDE, Sink};
use super::send_queue::SendQueueEntry;
use super::state::Ending;
use super::{Connection, Env};
use crate::error::DisconnectReason;
use crate::memory::operations::{Holds, Locals};
use crate::memory::region::Region;

/// The largest length of a probe, in bytes. If the message is shorter, the probe reads all of it.
pub(crate) const PROBE: u64 = 64;

/// If a peer has answered a Read within this time, it counts as a peer that answers.
const PROOF: Duration = Duration::from_secs(2);

/// The interval at which the local side sends a report and a probe to the peer while the local side waits for memory. It is shorter than
/// `PROOF`, so that the next answer arrives before the last answer is older than `PROOF`.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// The state of a connection while memory for large messages is scarce.
#[derive(Debug, Default)]
pub(super) struct Shortage {
    /// The time at which the peer last answered a Read.
    shown: Option<Instant>,
    /// The memory for probes, which exists while a message waits for memory.
    probe: Option<Box<Region>>,
    /// True if a probe is in flight. A probe is posted while no other Read is in flight, and Reads end in order. So the next Read that ends
    /// is the probe.
    probing: bool,
    /// The current wait for memory, if a message waits.
    wait: Option<MemoryWait>,
}

/// A wait of the local side for memory.
#[derive(Clone, Copy, Debug)]
struct MemoryWait {
    /// The time of the last report to the peer.
    reported: Instant,
    /// True if a report to the peer is due.
    owed: bool,
}

impl Shortage {
    /// Returns true if the peer must be notified now that the local side waits for memory.
    pub(super) fn owes_report(&self) -> bool {
        self.wait.is_some_and(|wait| wait.owed)
    }

    /// Notes that the peer was notified that the local side waits for memory.
    pub(super) fn reported(&mut self) {
        if let Some(wait) = &mut self.wait {
            wait.owed = false;
        }
    }

    /// Notes that the peer has answered a Read. Returns true if the Read was a probe.
    pub(super) const fn answered(&mut self, now: Instant) -> bool {
        self.shown = Some(now);
        std::mem::replace(&mut self.probing, false)
    }

    /// Ends the wait and returns the memory for probes. If a probe is in flight, that memory stays registered until the probe ends.
    pub(super) const fn end(&mut self) -> Option<Box<Region>> {
        self.wait = None;
        self.probe.take()
    }
}

/// Returns the interval between two reports to the peer that the local side waits for memory.
fn report_interval(env: &Env<'_>) -> Duration {
    REPORT_INTERVAL.min(env.config.timeouts.transfer / 4)
}

impl Connection {
    /// Returns the length of the next message that needs memory, in bytes. `None` if no message needs memory now.
    ///
    /// The next message is the oldest message without memory. It needs memory now only if the Reads of all messages before it will be
    /// posted soon. Otherwise its memory would be unused for a long time.
    pub(crate) fn wants_memory(&self) -> Option<usize> {
        let active = self.transfers.active()?;
        let at = active.incoming.iter().position(IncomingMessage::wants_memory)?;
        let unread = active.incoming.iter().take(at).map(|before| before.total - before.requested).sum::<u64>();
        let soon = active.pieces < PIECES && unread < STRIDE;
        (at == 0 || soon).then(|| active.incoming[at].offer.region.len as usize)
    }

    /// Assigns memory to the message that [`Connection::wants_memory`] selects.
    pub(crate) fn give_memory(&mut self, region: Region) {
        let Some(active) = self.transfers.active_mut() else { return };
        if let Some(transfer) = active.incoming.iter_mut().find(|transfer| transfer.wants_memory()) {
            transfer.sink = Sink::Library(Box::new(region));
        }
        drop(active.shortage.end());
    }

    /// Returns true if the peer has answered a Read within `PROOF` before `now`.
    pub(crate) fn has_shown(&self, now: Instant) -> bool {
        let lately = |shown| now.saturating_duration_since(shown) <= PROOF;
        self.transfers.active().and_then(|active| active.shortage.shown).is_some_and(lately)
    }

    /// Returns true if a probe should be sent: no Read is in flight, the send queue has a free slot, and the peer has answered no Read
    /// within a quarter of `PROOF` before `now`.
    pub(crate) fn may_probe(&self, now: Instant) -> bool {
        let fresh = |shown| now.saturating_duration_since(shown) < PROOF / 4;
        let active = self.transfers.active();
        active.is_some_and(|active| active.pieces == 0 && !active.shortage.shown.is_some_and(fresh))
            && self.sends.room(0) > 0
    }

    /// Returns the time of the last progress of the Reads in flight, and the size of the library's memory that is assigned to large
    /// messages of this connection, in bytes. `None` if no Read is in flight, or if this size is 0.
    pub(crate) fn stalled(&self) -> Option<(Instant, usize)> {
        let active = self.transfers.active().filter(|active| active.pieces > 0)?;
        let held = active.incoming.iter().filter_map(IncomingMessage::region);
        let bytes = held.map(|region| region.len()).sum();
        (bytes > 0).then_some((active.read, bytes))
    }

    /// Returns true if the connection has memory for a probe.
    pub(crate) fn has_probe(&self) -> bool {
        self.transfers.active().is_some_and(|active| active.shortage.probe.is_some())
    }

    /// Sets the memory for probes.
    pub(crate) fn take_probe(&mut self, region: Region) {
        if let Some(active) = self.transfers.active_mut() {
            active.shortage.probe = Some(Box::new(region));
        }
    }

    /// Reads a few bytes of the next message that needs memory, to check that the peer answers.
    pub(crate) fn probe(&mut self, env: &mut Env<'_>) {
        let Some(active) = self.transfers.active_mut() else { return };
        let Some(region) = &mut active.shortage.probe else { return };
        let Some(transfer) = active.incoming.iter().find(|transfer| transfer.wants_memory()) else { return };
        let len = transfer.offer.region.len.min(PROBE);
        let entry = region.lend_mut(0..len as usize);
        let (Some((sge, hold)), Some(remote)) = (entry, transfer.offer.region.part(0, len)) else { return };
        let mut holds = Holds::default();
        holds[0] = Some((region.key(), hold));
        let locals = Locals { sges: SgeList::one(sge), holds };
        self.sends.push_operation(SendQueueEntry::piece(len as u32), SendOp::Read(remote.address()), locals);
        (active.pieces, active.read, active.shortage.probing) = (active.pieces + 1, env.now, true);
        self.watch_transfers(env);
    }

    /// Notes that the next message cannot get memory now. A report to the peer becomes due.
    pub(crate) fn wait_for_memory(&mut self, env: &mut Env<'_>) {
        let Some(active) = self.transfers.active_mut() else { return };
        if active.shortage.wait.is_none() {
            active.shortage.wait = Some(MemoryWait { reported: env.now, owed: true });
            self.look_by(env.now + report_interval(env), env);
        }
    }

    /// If the interval since the last report to the peer has passed, schedules a report and a probe now. Returns the time at which the next
    /// report becomes due. `None` if the local side does not wait for memory.
    pub(super) fn renew_wait(&mut self, env: &mut Env<'_>) -> Option<Instant> {
        let every = report_interval(env);
        let wait = self.transfers.active_mut()?.shortage.wait.as_mut()?;
        if env.now < wait.reported + every {
            return Some(wait.reported + every);
        }
        *wait = MemoryWait { reported: env.now, owed: true };
        self.mark(env);
        Some(env.now + every)
    }

    /// Ends the connection, because the peer answers no Reads, and other connections wait for the memory that the peer's messages occupy.
    pub(crate) fn give_way(&mut self, env: &mut Env<'_>) {
        let (id, peer, limit) = (self.id, self.peer.address, &mut env.effects.log_limit);
        peer_log!(limit, env.now, Stalled, Info, peer, "{id}: {peer} answers no reads, and others wait for the memory");
        self.end(Ending::decided(DisconnectReason::TransferTimeout), env);
    }
}
