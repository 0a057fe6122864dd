//! Messages longer than one buffer. The sender offers its memory to the receiver. The receiver reads the message from that memory, and then
//! reports to the sender that the message was fetched.
//!
//! An offer has a position in the order of messages: messages that were sent after it are delivered only after the offered message was
//! fetched. An offered message is fetched with several RDMA Reads, so that other messages and pings are not delayed. If a transfer makes no
//! progress for `Timeouts::transfer`, its connection ends, because other connections need the memory that the transfer occupies.
//!
//! [`incoming`](super::incoming) has the state of one message that is being fetched. [`shortage`](super::shortage) manages the memory for
//! such messages.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rdma_transport::slab::Key;
use rdma_transport::wc::{Failure, WcStatus};
use rdma_transport::wr::{SendOp, SgeList};

use super::effects::{Action, Arrived, Event, Fragments};
use super::frame::{Immediate, MessageKind, Offer, TransferProgress};
use super::incoming::{IncomingMessage, PIECES, STRIDE, Sink};
use super::keepalive::LOOK_AGAIN;
use super::send_queue::SendQueueEntry;
use super::shortage::Shortage;
use super::{Connection, Env, Need};
use crate::device::pool::Buffer;
use crate::error::{Blocked, Outcome, PeerViolation, SendErrorKind};
use crate::id::{OfferId, SendId, SendKind};
use crate::limits::{CONTROL_CREDITS, HEADER_LEN, MAX_CONTROL, MAX_TRANSFERS};
use crate::memory::landing::{Landing, Offered};
use crate::memory::operations::Locals;
use crate::memory::region::{Region, RemoteRegion};
use crate::memory::region_memory::Hold;
use crate::security::channel::tail;

/// The largest number of transfer timeouts for which a peer may report that it waits for memory. During this time, the local side must keep
/// the memory of the messages that it has offered to the peer.
const WAITS: u32 = 4;

/// The number of checks within one transfer timeout.
const LOOKS: u32 = 8;

/// Returns the time from one check of the transfer timeout `limit` to the next.
pub(super) fn look_interval(limit: Duration) -> Duration {
    (limit / LOOKS).max(LOOK_AGAIN)
}

/// The memory of a message that the local side offers.
#[derive(Debug)]
pub(crate) enum OfferSource {
    /// A copy, which is freed when the peer has fetched the message. `reported` is true if the end
    /// of the message is reported to the program.
    Copy { region: Box<Region>, reported: bool },
    /// A region of the program.
    Lent(Key, Hold),
}

/// The kinds of messages that may be offered to the peer. They differ in the capacity that a
/// refused message waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OfferKind {
    /// The message is copied, which needs memory. It may be sent in fragments instead.
    Copied,
    /// The message stays in a region. It may be sent in fragments instead.
    Lent,
    /// The message stays in a region, and has a tag. Fragments have no tag, so the message can only be offered.
    Tagged,
}

/// A message that the local side has offered and the peer has not fetched yet.
#[derive(Debug)]
pub(super) struct OutgoingMessage {
    number: u32,
    send: SendId,
    pub(super) source: OfferSource,
    len: u64,
    /// The number of bytes that the peer has reported as fetched.
    fetched: u64,
}

/// An event that has arrived, and that is delivered only after earlier events.
#[derive(Debug)]
enum Held {
    /// An offered message. This variant only marks the message's position among the waiting events:
    /// the message itself is in `incoming`, in the same order.
    Transfer,
    Message {
        buffer: Buffer,
        end: u32,
    },
    Immediate(Immediate),
    /// A message in several buffers.
    Fragments(Box<Fragments>),
}

/// The *absences* of the local side while a transfer waits for the peer: the times in which the
/// local side takes no turns.
#[derive(Clone, Copy, Debug)]
struct Absence {
    /// The time since which the transfer has made no progress.
    of: Instant,
    /// The sum of the times by which the checks of the transfer timeout were late.
    late: Duration,
    /// The extra time of the peer. A late check shows an absence of the local side that began at an
    /// unknown time after the previous check. This time covers the uncertainty.
    grace: Duration,
}

impl Absence {
    /// Creates the record of a wait that begins at `now`, without absences.
    const fn none(now: Instant) -> Self {
        Self { of: now, late: Duration::ZERO, grace: Duration::ZERO }
    }

    /// Adds the time by which a check of the transfer timeout `limit` is late. The grace is at most
    /// `limit`, so that the wait for the peer ends even if all checks are late.
    fn add(&mut self, late: Duration, limit: Duration) {
        let interval = look_interval(limit);
        self.late += late;
        if late >= interval {
            self.grace = limit.min(self.grace + interval);
        }
    }
}

/// The state of all large messages of a connection. `None` until the connection has its first large message.
#[derive(Debug, Default)]
pub(crate) struct Transfers(Option<Box<Active>>);

/// The state of all large messages, of a connection that has had at least one.
#[derive(Debug)]
pub(super) struct Active {
    /// The number that identifies the next offer of the local side.
    next: u32,
    pub(super) outgoing: VecDeque<OutgoingMessage>, // bound: copies
    pub(super) incoming: VecDeque<IncomingMessage>, // bound: large-messages
    held: VecDeque<Held>,                           // bound: receives, large-messages
    /// The numbers of the offers that were fetched or refused and not reported to the peer yet,
    /// each with the kind of its report.
    fetched: VecDeque<(u32, MessageKind)>, // bound: large-messages
    /// Memory of the program for messages that will not arrive. Reads in flight may still write to
    /// this memory, so it stays registered until the end of the connection. The `Landing` is `None`
    /// if the memory stays registered forever, because the queue pair could not be destroyed.
    lost: Vec<(Offered, Option<Landing>)>, // bound: large-messages
    /// The number of Reads in flight for large messages.
    pub(super) pieces: usize,
    /// The time of the last progress of the Reads: a Read ended, or one was posted while no other was in flight.
    pub(super) read: Instant,
    pub(super) shortage: Shortage,
    /// The time at which the peer last reported that it has fetched something. The time is also set when a message is offered while no
    /// other offer is in flight.
    answered: Instant,
    /// The time at which the peer last reported that it waits for memory.
    peer_waited: Option<Instant>,
    /// The absences of the local side since the transfers last made progress.
    absence: Absence,
    /// A message of which some fragments have not arrived. Until its last fragment, no other message may arrive.
    joining: Option<Box<Fragments>>,
    /// The allocation of the last message in several buffers, for reuse.
    spare: Option<Box<Fragments>>,
}

impl Active {
    /// Returns the number of reports to the peer that are due: of fetched or refused messages, of progress, and of a wait for memory.
    fn due_reports(&self) -> usize {
        let waits = self.shortage.owes_report();
        self.fetched.len() + usize::from(waits) + usize::from(self.incoming.iter().any(IncomingMessage::owes_progress))
    }
}

impl Transfers {
    /// Returns the state of the large messages. `None` if the connection has had no large message.
    pub(super) fn active(&self) -> Option<&Active> {
        self.0.as_deref()
    }

    /// Returns the state of the large messages, to change it. `None` if the connection has had no large message.
    pub(super) fn active_mut(&mut self) -> Option<&mut Active> {
        self.0.as_deref_mut()
    }

    /// Returns the state of the large messages. Creates it for the first one.
    fn activate(&mut self, now: Instant) -> &mut Active {
        self.0.get_or_insert_with(|| {
            Box::new(Active {
                next: 0,
                outgoing: VecDeque::new(),
                incoming: VecDeque::new(),
                held: VecDeque::new(),
                fetched: VecDeque::new(),
                lost: Vec::new(),
                pieces: 0,
                read: now,
                shortage: Shortage::default(),
                answered: now,
                peer_waited: None,
                absence: Absence::none(now),
                joining: None,
                spare: None,
            })
        })
    }

    /// Returns true if there are messages that were offered to the peer and that the peer has not fetched.
    pub(crate) fn offers(&self) -> bool {
        self.0.as_ref().is_some_and(|active| !active.outgoing.is_empty())
    }

    /// Returns true if the local side may offer another message.
    pub(crate) fn has_room(&self) -> bool {
        self.0.as_ref().is_none_or(|active| active.outgoing.len() < MAX_TRANSFERS)
    }

    /// Returns true if a flush may have Reads of large messages, or reports about large messages, to post.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.0.as_ref().is_some_and(|active| !active.incoming.is_empty() || !active.fetched.is_empty())
    }

    /// Returns true if a message that arrives now must wait for an earlier message: one that is being fetched, or one of which some
    /// fragments have not arrived.
    #[inline]
    pub(crate) fn holds(&self) -> bool {
        self.0.as_ref().is_some_and(|active| !active.held.is_empty() || active.joining.is_some())
    }

    /// Returns the message of which some fragments have not arrived.
    pub(super) fn joining(&self) -> Option<&Fragments> {
        self.0.as_ref()?.joining.as_deref()
    }

    /// Returns the message of which some fragments have not arrived, or a new one without fragments.
    pub(super) fn join(&mut self, device: usize, now: Instant) -> &mut Fragments {
        let active = self.activate(now);
        let spare = &mut active.spare;
        active.joining.get_or_insert_with(|| {
            let new = || Box::new(Fragments { parts: Vec::new(), len: 0, following: 0, since: now, device });
            spare.take().unwrap_or_else(new)
        })
    }

    /// Removes and returns the message whose last fragment has just arrived, so that it can be delivered. If earlier events wait for
    /// delivery, adds the message after these events and returns `None`.
    pub(super) fn take_joined(&mut self) -> Option<Box<Fragments>> {
        let active = self.0.as_mut()?;
        let joined = active.joining.take()?;
        if active.held.is_empty() {
            return Some(joined);
        }
        active.held.push_back(Held::Fragments(joined));
        None
    }

    /// Keeps the allocation of a message in several buffers for reuse.
    pub(super) fn recycle(&mut self, mut fragments: Box<Fragments>) {
        if let Some(active) = &mut self.0 {
            fragments.parts.clear();
            active.spare = Some(fragments);
        }
    }

    /// Returns the number of credits that are reserved for reports to the peer: one for each report that is due.
    #[inline]
    pub(crate) fn credits(&self) -> usize {
        self.0.as_ref().map_or(0, |active| active.due_reports())
    }

    /// Returns the number of slots in the send queue that are reserved: one for each report to the peer that is due, and one for a Read if
    /// no Read of a large message is in flight and one must be posted.
    #[inline]
    pub(crate) fn slots(&self) -> usize {
        self.0.as_ref().map_or(0, |active| {
            let unread = |transfer: &IncomingMessage| transfer.requested < transfer.total;
            active.due_reports() + usize::from(active.pieces == 0 && active.incoming.iter().any(unread))
        })
    }

    /// Returns four numbers: the messages that the peer has not fetched yet, the messages that are being fetched from the peer, the events
    /// that wait for delivery, and the fetched messages that were not reported to the peer.
    #[cfg(test)]
    pub(super) fn queued(&self) -> [usize; 4] {
        self.0.as_ref().map_or([0; 4], |a| [a.outgoing.len(), a.incoming.len(), a.held.len(), a.fetched.len()])
    }

    /// Returns the time at which the peer last reported that it has fetched something. `None` if no offer is in flight.
    pub(crate) fn fetched_at(&self) -> Option<Instant> {
        let active = self.0.as_ref()?;
        (!active.outgoing.is_empty()).then_some(active.answered)
    }

    /// Returns true if the peer's last report about an offer was that it waits for memory.
    pub(crate) fn peer_waits(&self) -> bool {
        self.0.as_ref().is_some_and(|active| active.peer_waited.is_some_and(|waited| waited >= active.answered))
    }

    /// Returns the earliest time since which a transfer has made no progress. `None` if no transfer waits for the peer.
    ///
    /// While a peer reports that it waits for memory, it does not count as stalled. This holds for at most [`WAITS`] times `limit`.
    fn stands_since(&self, limit: Duration) -> Option<Instant> {
        let active = self.0.as_ref()?;
        let reads = (active.pieces > 0).then_some(active.read);
        let offers = self.fetched_at().map(|answered| {
            let waited = active.peer_waited.map_or(answered, |waited| waited.min(answered + limit * (WAITS - 1)));
            waited.max(answered)
        });
        let parts = active.joining.as_ref().map(|fragments| fragments.since);
        [reads, offers, parts].into_iter().flatten().min()
    }

    /// Returns the time at which the connection ends, unless a transfer makes progress. `None` if
    /// no transfer waits for the peer. `late` is the time by which this check is late, because the
    /// local side took no turn.
    ///
    /// While the local side takes no turns, it neither reads nor answers the peer's messages. So
    /// the delays of the late checks do not count against the peer.
    pub(crate) fn ends_at(&mut self, limit: Duration, late: Duration, now: Instant) -> Option<Instant> {
        let since = self.stands_since(limit)?;
        let active = self.active_mut()?;
        if active.absence.of != since {
            active.absence = Absence { of: since, ..Absence::none(now) };
        }
        // If the wait began after the check was due, only the time since its beginning counts.
        active.absence.add(late.min(now.saturating_duration_since(since)), limit);
        Some(since + limit + active.absence.late + active.absence.grace)
    }
}

impl Connection {
    // Sending.

    /// Returns the memory that copies of offered messages occupy, in bytes.
    pub(crate) fn copies(&self) -> usize {
        self.transfers.active().map_or(0, |active| {
            let copied = |source: &OfferSource| match source {
                OfferSource::Copy { region, .. } => region.len(),
                OfferSource::Lent(..) => 0,
            };
            active.outgoing.iter().map(|outgoing| copied(&outgoing.source)).sum()
        })
    }

    /// Returns true if a message of `len` bytes may be offered: the connection is open, the peer accepts this length, and the number of
    /// offers in flight is below the maximum.
    pub(crate) fn may_offer(&self, len: usize) -> bool {
        self.state.is_open() && len as u64 <= self.terms.max_message && self.transfers.has_room()
    }

    /// Checks that a message of `len` bytes can be offered now.
    pub(crate) fn check_offer(&mut self, len: usize, kind: OfferKind, env: &mut Env<'_>) -> Result<(), SendErrorKind> {
        if !self.state.is_open() {
            return Err(SendErrorKind::Closed);
        }
        if len as u64 > self.terms.max_message {
            let max = usize::try_from(self.terms.max_message).unwrap_or(usize::MAX);
            return Err(SendErrorKind::TooLong { len, max });
        }
        let room = match self.room_for_message() {
            Ok(()) if !self.transfers.has_room() => Err(Blocked::Transfers),
            other => other,
        };
        room.map_err(|blocked| {
            self.refuse_transfer(len, kind, env);
            SendErrorKind::WouldBlock(blocked)
        })
    }

    /// Notes that a send of a message longer than one buffer was refused for lack of capacity.
    pub(crate) fn refuse_transfer(&mut self, len: usize, kind: OfferKind, env: &mut Env<'_>) {
        let parts = self.parts(len).filter(|_| kind != OfferKind::Tagged).unwrap_or(usize::MAX);
        self.refuse(Need::Transfer { parts, copy: if kind == OfferKind::Copied { len } else { 0 } }, env);
    }

    /// Offers a message that [`Connection::check_offer`] has allowed.
    pub(crate) fn offer(
        &mut self,
        region: RemoteRegion,
        tag: Option<u64>,
        mut source: OfferSource,
        env: &mut Env<'_>,
    ) -> SendId {
        let send = self.sends.name(SendKind::Message);
        if let OfferSource::Copy { reported, .. } = &mut source {
            *reported |= self.sends.reports_copies();
        }
        let active = self.transfers.activate(env.now);
        let first = active.outgoing.is_empty();
        if first {
            active.answered = env.now;
        }
        let number = active.next;
        active.next = number.wrapping_add(1);
        active.outgoing.push_back(OutgoingMessage { number, send, source, len: region.len, fetched: 0 });
        let offer = Offer { number, region, tag };
        self.push_control(MessageKind::Offer, offer.emit(&mut [0; MAX_CONTROL]), None, env);
        env.stats.messages.sent += 1;
        env.stats.messages.bytes_sent += region.len;
        if first {
            self.watch_transfers(env);
        }
        send
    }

    /// Handles the peer's report that it has fetched a message, or that its program refuses the message.
    pub(super) fn fetched(&mut self, number: u32, outcome: Outcome, env: &mut Env<'_>) -> Result<(), PeerViolation> {
        const UNKNOWN: PeerViolation = PeerViolation::MalformedMessage;
        let active = self.transfers.0.as_mut().ok_or(UNKNOWN)?;
        let at = active.outgoing.iter().position(|outgoing| outgoing.number == number).ok_or(UNKNOWN)?;
        let outgoing = active.outgoing.remove(at).ok_or(UNKNOWN)?;
        active.answered = env.now;
        self.ask_writable(env);
        self.end_offer(outgoing, outcome, env);
        Ok(())
    }

    /// Handles the peer's report that it has fetched a part of a message. If `done` is 0, the report says that the peer waits for memory.
    pub(super) fn progressed(&mut self, progress: TransferProgress, env: &Env<'_>) -> Result<(), PeerViolation> {
        const IMPOSSIBLE: PeerViolation = PeerViolation::MalformedMessage;
        let active = self.transfers.0.as_mut().ok_or(IMPOSSIBLE)?;
        let found = active.outgoing.iter_mut().find(|outgoing| outgoing.number == progress.number);
        let outgoing = found.ok_or(IMPOSSIBLE)?;
        if progress.done == 0 && outgoing.fetched == 0 {
            active.peer_waited = Some(env.now);
            return Ok(());
        }
        // Each report must cover at least `STRIDE` more bytes than the report before it. Otherwise a peer could report progress forever.
        let possible = outgoing.fetched + STRIDE..outgoing.len + tail(outgoing.len);
        if !possible.contains(&progress.done) {
            return Err(IMPOSSIBLE);
        }
        outgoing.fetched = progress.done;
        active.answered = env.now;
        Ok(())
    }

    /// Schedules the first check of the transfer timeout, because a transfer is in flight and may
    /// stall.
    pub(super) fn watch_transfers(&mut self, env: &mut Env<'_>) {
        self.look_by(env.now + look_interval(env.config.timeouts.transfer), env);
    }

    fn end_offer(&self, outgoing: OutgoingMessage, outcome: Outcome, env: &mut Env<'_>) {
        let reported = match outgoing.source {
            OfferSource::Copy { region, reported } => {
                self.want(env, Action::Discard(region));
                reported || outcome == Outcome::Refused
            }
            OfferSource::Lent(key, hold) => {
                if hold.done() {
                    self.want(env, Action::Unused(key));
                }
                true
            }
        };
        if reported {
            self.tell(env, Event::Sent { send: outgoing.send, count: 1, outcome });
        }
    }

    /// Ends all transfers at the end of the connection. Offered messages that the peer has not
    /// fetched fail. Messages from the peer that are being fetched are dropped.
    pub(super) fn fail_transfers(&mut self, env: &mut Env<'_>) {
        self.discard_held(env);
        let Some(active) = &mut self.transfers.0 else { return };
        for outgoing in std::mem::take(&mut active.outgoing) {
            self.end_offer(outgoing, Outcome::Failed(WcStatus::Flushed.into()), env);
        }
        // The queue pair is destroyed, so no Read in flight can write to the program's memory any more.
        for (offered, landing) in
            self.transfers.0.as_mut().map(|active| std::mem::take(&mut active.lost)).into_iter().flatten()
        {
            self.end_landing(offered, landing, Err(WcStatus::Flushed.into()), env);
        }
    }

    /// Makes sure that the program's memory into which Reads are posted is never reused, because the queue pair could not be destroyed, so
    /// the device may still write to that memory. The ends of these messages are still reported to the program.
    pub(super) fn forsake_landings(&mut self) {
        let Some(active) = self.transfers.active_mut().filter(|active| active.pieces > 0) else { return };
        active.lost.iter_mut().for_each(|(_, landing)| *landing = None);
        for transfer in &mut active.incoming {
            if matches!(transfer.sink, Sink::Program(_)) && transfer.requested > transfer.done {
                active.lost.push((transfer.offered(), None));
                transfer.sink = Sink::Unanswered;
            }
        }
    }

    /// Ends a message that was read into the program's memory: releases that memory, and reports `result` to the program.
    fn end_landing(&self, offered: Offered, landing: Option<Landing>, result: Result<(), Failure>, env: &mut Env<'_>) {
        if let Some(region) = landing.and_then(Landing::done) {
            self.want(env, Action::Unused(region));
        }
        self.tell(env, Event::Landed(Box::new((offered, result))));
    }

    /// Frees all messages that wait for delivery or are being fetched, because nothing more is delivered to the program. Memory of the
    /// program stays registered until the end of the connection, because Reads into it may still be in flight.
    pub(super) fn discard_held(&mut self, env: &mut Env<'_>) {
        let shared = self.receives.is_shared();
        let Some(active) = &mut self.transfers.0 else { return };
        let (held, incoming) = (std::mem::take(&mut active.held), std::mem::take(&mut active.incoming));
        active.fetched.clear();
        let probe = active.shortage.end();
        let joining = active.joining.take().map(Held::Fragments);
        let mut regions = Vec::new();
        for transfer in incoming {
            let offered = transfer.offered();
            match transfer.sink {
                Sink::Library(region) => regions.push(region),
                Sink::Program(landing) => active.lost.push((offered, Some(landing))),
                Sink::Unanswered | Sink::Wanted => {}
            }
        }
        for held in held.into_iter().chain(joining) {
            match held {
                Held::Transfer => {}
                Held::Message { buffer, .. } => {
                    self.receives.release();
                    env.buffers.free_receive(buffer, shared);
                }
                Held::Immediate(_) => self.receives.release(),
                Held::Fragments(fragments) => self.discard_fragments(*fragments, env),
            }
        }
        for region in regions.into_iter().chain(probe) {
            self.want(env, Action::Discard(region));
        }
    }

    // Receiving.

    /// Handles an offer from the peer.
    pub(super) fn offered(&mut self, offer: Offer, env: &mut Env<'_>) -> Result<(), PeerViolation> {
        if !self.state.delivers() {
            return Ok(());
        }
        let open = self.state.is_open();
        let active = self.transfers.activate(env.now);
        if !open {
            // The connection is ending, so the message cannot be fetched any more. All later messages wait for this message, and are
            // dropped at the end of the connection.
            active.held.push_back(Held::Transfer);
            return Ok(());
        }
        let len = offer.region.len;
        if len > env.config.large.max_message {
            return Err(PeerViolation::InvalidOffer);
        }
        let known = active.incoming.iter().any(|transfer| transfer.offer.number == offer.number)
            || active.fetched.iter().any(|&(number, _)| number == offer.number);
        // `known` is also true until the local side has reported a message with this number as
        // fetched, because no other offer may use the number before that report. The peer has
        // numbered the segments of this message already. So they are counted here, in the order of
        // the offers, even if the program refuses the message.
        let segments = self.opener.as_mut().map(|opener| opener.begin(len));
        let incoming = IncomingMessage::new(offer, segments);
        let wraps = offer.region.address.checked_add(incoming.total).is_none();
        let full = active.incoming.len() + active.fetched.len() >= MAX_TRANSFERS;
        if len == 0 || full || known || wraps {
            return Err(PeerViolation::InvalidOffer);
        }
        let offered = incoming.offered();
        active.incoming.push_back(incoming);
        active.held.push_back(Held::Transfer);
        self.tell(env, Event::Offered(offered));
        Ok(())
    }

    /// Returns the offered message with this id. `None` if it does not exist, or if the program has already decided about it.
    fn unanswered(&mut self, offer: OfferId) -> Option<&mut IncomingMessage> {
        self.transfers.active_mut()?.incoming.iter_mut().find(|transfer| transfer.is_unanswered(offer))
    }

    /// Returns the length of the offered message with this id, in bytes. `None` if the program has already decided about the message.
    pub(crate) fn offered_len(&self, offer: OfferId) -> Option<u64> {
        let mut incoming = self.transfers.active()?.incoming.iter();
        incoming.find(|transfer| transfer.is_unanswered(offer)).map(|transfer| transfer.offer.region.len)
    }

    /// Accepts an offer: the message will be read into memory of the program.
    pub(crate) fn land(&mut self, offer: OfferId, landing: Landing, env: &mut Env<'_>) {
        if let Some(transfer) = self.unanswered(offer) {
            transfer.sink = Sink::Program(landing);
            self.mark(env);
        }
    }

    /// Refuses an offer. Returns false if the offer does not exist, or the program has already decided about it.
    pub(crate) fn refuse_offer(&mut self, offer: OfferId, env: &mut Env<'_>) -> bool {
        let Some(active) = self.transfers.active_mut() else { return false };
        let Some(at) = active.incoming.iter().position(|transfer| transfer.is_unanswered(offer)) else { return false };
        // No Read was posted for the message. The message is removed from `incoming` and from `held`, so that the peer can offer another
        // message instead.
        active.incoming.remove(at);
        let mut transfers = (0..active.held.len()).filter(|&index| matches!(active.held[index], Held::Transfer));
        if let Some(index) = transfers.nth(at) {
            active.held.remove(index);
        }
        active.fetched.push_back((offer.0, MessageKind::Refused));
        self.deliver_held(env);
        self.mark(env);
        true
    }

    /// Accepts an offer if the program has not decided about it: the message will be read into memory of the library.
    pub(crate) fn settle_offer(&mut self, offer: OfferId, env: &mut Env<'_>) {
        if let Some(transfer) = self.unanswered(offer) {
            transfer.sink = Sink::Wanted;
            self.mark(env);
        }
    }

    /// Makes a message wait until the events before it are delivered.
    pub(super) fn hold_message(&mut self, buffer: Buffer, end: u32, now: Instant) {
        self.receives.hold();
        self.transfers.activate(now).held.push_back(Held::Message { buffer, end });
    }

    /// Makes immediate data wait until the events before it are delivered. The buffer of its receive is already free. But the receive still
    /// counts as occupied, so that the peer's credits limit the number of waiting events.
    pub(super) fn hold_immediate(&mut self, immediate: Immediate, now: Instant) {
        self.receives.hold();
        self.transfers.activate(now).held.push_back(Held::Immediate(immediate));
    }

    /// Returns true if a message that arrives now must wait until earlier events are delivered.
    #[inline]
    pub(super) fn is_holding(&self) -> bool {
        self.transfers.holds() && self.state.delivers()
    }

    /// Queues Reads of offered messages and reports to the peer, as far as send queue slots and
    /// credits are available.
    pub(crate) fn pump_transfers(&mut self, env: &mut Env<'_>) {
        if !self.state.is_open() {
            return;
        }
        let Some(mut active) = self.transfers.0.take() else { return };
        let mut begun = false;
        'transfers: for transfer in &mut active.incoming {
            while active.pieces < PIECES && self.sends.room(0) > 0 {
                if transfer.requested == transfer.total {
                    continue 'transfers;
                }
                let (from, len) = transfer.read_at(transfer.requested);
                let memory = RemoteRegion { len: transfer.total, ..transfer.offer.region };
                let (Some(remote), Some((sge, holds))) = (memory.part(from, len), transfer.lend(from, len)) else {
                    break 'transfers;
                };
                transfer.requested += len;
                if active.pieces == 0 {
                    active.read = env.now;
                    begun = true;
                }
                active.pieces += 1;
                let locals = Locals { sges: SgeList::one(sge), holds };
                self.sends.push_operation(SendQueueEntry::piece(len as u32), SendOp::Read(remote.address()), locals);
            }
            if active.pieces == PIECES || self.sends.room(0) == 0 {
                break;
            }
        }
        self.push_reports(&mut active.fetched, CONTROL_CREDITS, env);
        if active.fetched.is_empty() && self.tx.available_for_data() > 0 && self.sends.room(0) > 0 {
            if let Some(transfer) = active.incoming.iter_mut().find(|transfer| transfer.owes_progress()) {
                transfer.reported = transfer.done;
                let progress = TransferProgress { number: transfer.offer.number, done: transfer.done };
                self.push_control(MessageKind::Progress, &progress.emit(), None, env);
            }
        }
        if active.shortage.owes_report() && self.tx.available_for_data() > 0 && self.sends.room(0) > 0 {
            if let Some(transfer) = active.incoming.iter().find(|transfer| transfer.wants_memory()) {
                active.shortage.reported();
                let progress = TransferProgress { number: transfer.offer.number, done: 0 };
                self.push_control(MessageKind::Progress, &progress.emit(), None, env);
            }
        }
        self.transfers.0 = Some(active);
        if begun {
            self.watch_transfers(env);
        }
    }

    /// Queues the reports of fetched and refused messages, as far as send queue slots and credits
    /// are available. The last `reserved` credits are not used.
    fn push_reports(&mut self, fetched: &mut VecDeque<(u32, MessageKind)>, reserved: u32, env: &mut Env<'_>) {
        while self.tx.available() > reserved && self.sends.room(0) > 0 {
            let Some((number, kind)) = fetched.pop_front() else { break };
            self.push_control(kind, &number.to_le_bytes(), None, env);
            self.sends.hurry();
        }
    }

    /// Queues the reports of the messages that were fetched or refused before the program closed the connection. Without its report, the
    /// peer's send would fail although the message has arrived. Only the credit for the goodbye is kept, because no other message follows.
    pub(super) fn push_last_reports(&mut self, env: &mut Env<'_>) {
        let due = self.transfers.active_mut().map(|active| std::mem::take(&mut active.fetched));
        if let Some(mut fetched) = due.filter(|_| self.state.is_open()) {
            self.push_reports(&mut fetched, 1, env);
        }
    }

    /// Handles the end of a Read of a large message. The caller adds the connection to the list of those that have work requests to post,
    /// so that the next Reads are posted.
    pub(super) fn piece_arrived(&mut self, len: u32, env: &mut Env<'_>) {
        self.keepalive.heard = env.now;
        let Some(active) = &mut self.transfers.0 else { return };
        active.pieces = active.pieces.saturating_sub(1);
        active.read = env.now;
        if active.shortage.answered(env.now) {
            return;
        }
        // Reads end in the order of posting, so this Read belongs to the oldest message that is not complete.
        let Some(transfer) = active.incoming.iter_mut().find(|transfer| !transfer.is_whole()) else { return };
        transfer.done += u64::from(len);
        let opened = self.opener.as_mut().map_or(Ok(true), |opener| transfer.open(u64::from(len), opener));
        match opened {
            Ok(true) => {}
            Ok(false) => return self.violated(PeerViolation::NotAuthentic, env),
            Err(error) => {
                let why = format!("memory for a copy of a message: {error}");
                return self.posting_failed(why, env);
            }
        }
        if transfer.is_whole() {
            let number = transfer.offer.number;
            active.fetched.push_back((number, MessageKind::Fetched));
            self.deliver_held(env);
        }
    }

    /// Notes that a Read of a large message has failed. The caller ends the connection.
    pub(super) fn piece_failed(&mut self) {
        if let Some(active) = &mut self.transfers.0 {
            active.pieces = active.pieces.saturating_sub(1);
        }
    }

    /// Delivers the waiting events in order, up to the first message that is still being fetched.
    fn deliver_held(&mut self, env: &mut Env<'_>) {
        let shared = self.receives.is_shared();
        let delivers = self.state.delivers();
        while let Some(active) = &mut self.transfers.0 {
            match active.held.front() {
                Some(Held::Transfer) if !active.incoming.front().is_some_and(IncomingMessage::is_whole) => return,
                None => return,
                Some(_) => {}
            }
            match active.held.pop_front() {
                Some(Held::Transfer) => {
                    let Some(transfer) = active.incoming.pop_front() else { return };
                    let offered = transfer.offered();
                    if delivers {
                        env.stats.messages.received += 1;
                        env.stats.messages.bytes_received += offered.len;
                    }
                    match transfer.sink {
                        Sink::Library(mut region) if delivers => {
                            region.truncate(offered.len as usize);
                            self.tell(env, Event::Fetched(region));
                        }
                        Sink::Library(region) => self.want(env, Action::Discard(region)),
                        Sink::Program(landing) => self.end_landing(offered, Some(landing), Ok(()), env),
                        Sink::Unanswered | Sink::Wanted => {}
                    }
                }
                Some(Held::Message { buffer, end }) => {
                    self.receives.release();
                    if delivers {
                        let arrived = Arrived {
                            buffer: Some(buffer),
                            start: HEADER_LEN as u32,
                            end,
                            device: env.device as u16,
                            shared,
                        };
                        self.deliver(arrived, env);
                    } else {
                        env.buffers.free_receive(buffer, shared);
                    }
                }
                Some(Held::Immediate(immediate)) => {
                    self.receives.release();
                    if delivers {
                        self.tell(env, Event::Immediate(immediate));
                    }
                }
                Some(Held::Fragments(fragments)) if delivers => self.deliver_fragments(fragments, env),
                Some(Held::Fragments(fragments)) => self.discard_fragments(*fragments, env),
                None => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(8);
    const SECOND: Duration = Duration::from_secs(1);

    /// Simulates the checks of a transfer that makes no progress. `late(n)` is the delay of check
    /// `n`. Returns the time after which the transfer is given up, without these delays.
    fn patience(late: impl Fn(u32) -> Duration) -> Duration {
        #[allow(clippy::disallowed_methods, reason = "a point in time to count from")]
        let start = Instant::now();
        let mut transfers = Transfers::default();
        transfers.activate(start).pieces = 1;
        let (mut due, mut absent) = (start + look_interval(LIMIT), Duration::ZERO);
        for nth in 0.. {
            let now = due + late(nth);
            absent += late(nth);
            let end = transfers.ends_at(LIMIT, late(nth), now).expect("a Read is in flight");
            if end <= now {
                return now - start - absent;
            }
            due = end.min(now + look_interval(LIMIT));
        }
        unreachable!("there is an end")
    }

    #[test]
    fn only_the_time_in_which_the_local_side_takes_turns_counts() {
        assert_eq!(patience(|_| Duration::ZERO), LIMIT);
        assert_eq!(patience(|_| SECOND / 10), LIMIT);
        // An absence that ends shortly before the limit, one that ends long after it, and several
        // of both.
        for absences in [&[(0, 7)][..], &[(5, 100)], &[(7, 100)], &[(0, 9), (1, 7)], &[(2, 5), (4, 9), (6, 30), (8, 7)]]
        {
            let late =
                |nth| absences.iter().find(|(at, _)| *at == nth).map_or(Duration::ZERO, |(_, late)| SECOND * *late);
            // An absence of some seconds may have begun right after the check before it.
            let grace = SECOND * absences.len() as u32;
            assert_eq!(patience(late), LIMIT + grace, "{absences:?}");
        }
    }

    #[test]
    fn a_transfer_has_a_limit_even_if_all_checks_are_late() {
        assert_eq!(patience(|_| 100 * LIMIT), 2 * LIMIT);
    }
}
