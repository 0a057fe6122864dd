//! The shortage of memory for large messages: which message needs memory next, whether the peer answers reads, and the wait of the
//! local side.
//!
//! Memory goes to peers that answer Reads. Unless there is plenty, a peer that has answered none lately is first asked for a few
//! bytes, which are dropped: a *probe*. So offers that nobody can fetch hold no memory. A receiver that waits for memory of its
//! own reports that to the sender, whose limit in time is on the peer's silence and not on this wait.

use std::time::{Duration, Instant};

use rdma_transport::wr::{SendOp, SgeList};

use super::effects::Action;
use super::incoming::{Incoming, PIECES, STRIDE, Sink};
use super::send_queue::Entry;
use super::state::Ending;
use super::{Connection, Env};
use crate::error::DisconnectReason;
use crate::memory::operations::{Holds, Locals};
use crate::memory::region::Region;

/// Length of a probe, bytes. A message that is shorter is read as a whole.
pub(crate) const PROBE: u64 = 64;

/// Time for which an answer to a read shows that the peer answers reads.
const PROOF: Duration = Duration::from_secs(2);

/// Time after which a side that still waits for memory says so again, and sends another probe, at most. The answer is there
/// before the one to the last probe counts no longer.
const WAIT_NEWS: Duration = Duration::from_secs(1);

/// A wait for memory of this side.
#[derive(Clone, Copy, Debug)]
struct Wait {
    /// Time of the last report to the peer.
    told: Instant,
    /// The peer is to hear of it.
    owed: bool,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Shortage {
    /// Time at which the peer last answered a read.
    shown: Option<Instant>,
    /// Memory for probes, while the next message waits for memory of its own.
    probe: Option<Box<Region>>,
    /// A probe is on its way. It was posted while no other read was, and reads end in order: it is the first one to end.
    probing: bool,
    /// The wait of the next message that needs memory.
    wait: Option<Wait>,
}

impl Shortage {
    /// Whether the peer is to be notified that the local side waits for memory.
    pub(super) fn owes_report(&self) -> bool {
        self.wait.is_some_and(|wait| wait.owed)
    }

    /// Notes that the peer was notified.
    pub(super) fn reported(&mut self) {
        if let Some(wait) = &mut self.wait {
            wait.owed = false;
        }
    }

    /// Notes that the peer has answered a read. Returns `true` if the read was a probe.
    pub(super) const fn answered(&mut self, now: Instant) -> bool {
        self.shown = Some(now);
        std::mem::replace(&mut self.probing, false)
    }

    /// Ends the wait and returns the memory for probes. A probe that is on its way holds its memory until it ends.
    pub(super) const fn end(&mut self) -> Option<Box<Region>> {
        self.wait = None;
        self.probe.take()
    }
}

/// Time between two reports that this side waits for memory.
fn wait_news(env: &Env<'_>) -> Duration {
    WAIT_NEWS.min(env.config.timeouts.transfer / 4)
}

impl Connection {
    /// Length of the next message that needs memory, bytes. That is the oldest message, or one behind it if the reads of those
    /// before it are about to be posted: memory that is not read into yet is memory that others wait for.
    pub(crate) fn wants_memory(&self) -> Option<usize> {
        let active = self.transfers.active()?;
        let at = active.incoming.iter().position(Incoming::wants_memory)?;
        let unread = active.incoming.iter().take(at).map(|before| before.total - before.asked).sum::<u64>();
        let soon = active.pieces < PIECES && unread < STRIDE;
        (at == 0 || soon).then(|| active.incoming[at].offer.region.len as usize)
    }

    /// Takes memory for the message that [`Connection::wants_memory`] means.
    pub(crate) fn give_memory(&mut self, region: Region) {
        let Some(active) = self.transfers.active_mut() else { return };
        if let Some(transfer) = active.incoming.iter_mut().find(|transfer| transfer.wants_memory()) {
            transfer.sink = Sink::Library(Box::new(region));
        }
        drop(active.shortage.end());
    }

    /// Whether the peer has shown lately that it answers reads.
    pub(crate) fn has_shown(&self, now: Instant) -> bool {
        let lately = |shown| now.saturating_duration_since(shown) <= PROOF;
        self.transfers.active().and_then(|active| active.shortage.shown).is_some_and(lately)
    }

    /// Whether a probe is to be sent: no read is on its way that would show the same, and the last answer begins to age.
    pub(crate) fn may_probe(&self, now: Instant) -> bool {
        let fresh = |shown| now.saturating_duration_since(shown) < PROOF / 4;
        let active = self.transfers.active();
        active.is_some_and(|active| active.pieces == 0 && !active.shortage.shown.is_some_and(fresh))
            && self.sends.room(0) > 0
    }

    /// Time at which the last read ended, and the memory of messages that are being fetched, bytes; `None` if no read is on
    /// its way for them.
    pub(crate) fn stalled(&self) -> Option<(Instant, usize)> {
        let active = self.transfers.active().filter(|active| active.pieces > 0)?;
        let held = active.incoming.iter().filter_map(Incoming::region);
        let bytes = held.map(|region| region.len()).sum();
        (bytes > 0).then_some((active.read, bytes))
    }

    /// Whether there is memory for a probe.
    pub(crate) fn has_probe(&self) -> bool {
        self.transfers.active().is_some_and(|active| active.shortage.probe.is_some())
    }

    /// Takes memory for probes.
    pub(crate) fn take_probe(&mut self, region: Region) {
        if let Some(active) = self.transfers.active_mut() {
            active.shortage.probe = Some(Box::new(region));
        }
    }

    /// Reads a few bytes of the next message that needs memory, to see whether the peer answers.
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
        self.sends.push_operation(Entry::piece(len as u32), SendOp::Read(remote.address()), locals);
        (active.pieces, active.read, active.shortage.probing) = (active.pieces + 1, env.now, true);
        self.watch_transfers(env);
    }

    /// Notes that there is no memory for the next message now. The peer hears of it, if it understands that.
    pub(crate) fn wait_for_memory(&mut self, env: &mut Env<'_>) {
        let owed = self.terms.waiting;
        let Some(active) = self.transfers.active_mut() else { return };
        if active.shortage.wait.is_none() {
            active.shortage.wait = Some(Wait { told: env.now, owed });
            self.want(env, Action::LookBy(env.now + wait_news(env)));
        }
    }

    /// Has the peer hear again that this side waits for memory, and be probed again, when that is due. Returns the time of the
    /// next report.
    pub(super) fn renew_wait(&mut self, env: &mut Env<'_>) -> Option<Instant> {
        let (tells, every) = (self.terms.waiting, wait_news(env));
        let wait = self.transfers.active_mut()?.shortage.wait.as_mut()?;
        if env.now < wait.told + every {
            return Some(wait.told + every);
        }
        *wait = Wait { told: env.now, owed: tells };
        self.mark(env);
        Some(env.now + every)
    }

    /// Ends the connection: it has memory that others wait for, and its peer answers no reads.
    pub(crate) fn give_way(&mut self, env: &mut Env<'_>) {
        log::info!("{}: {} answers no reads, and others wait for the memory", self.id, self.peer.address);
        self.end(Ending::decided(DisconnectReason::TransferTimeout), env);
    }
}
