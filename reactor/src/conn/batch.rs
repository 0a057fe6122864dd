//! Posts the pieces of lists: the RDMA Reads or Writes that the program has requested as one transfer.
//!
//! The pieces of a list are added to the send queue in order and in batches, each batch when slots are free. A batch has at most as many
//! pieces as a third of the send queue, and only its last piece is signaled. The pieces of all lists of a connection use at most two thirds
//! of the send queue. So lists never fill the send queue, and leave slots for other sends between two batches. Pieces need no buffers of
//! the library.
//!
//! If a send of the program is refused while lists wait for slots, or if the sends of the program
//! use all slots, the next free slots are reserved for the lists. A refused send gets the slots
//! that become free after those. So neither lists nor sends starve. The same applies to credits.

use rdma_transport::wr::{SendOp, SgeList};

use super::effects::{Action, Event};
use super::frame::{Immediate, MessageKind};
use super::list::{CONFIRMATION_LEN, List, ListDirection, ListPart, Order, PartState, Stop};
use super::send_queue::SendQueueEntry;
use super::state::{Ending, State};
use super::{Connection, Env};
use crate::config::Framing;
use crate::error::{DisconnectReason, Outcome};
use crate::id::TransferId;
use crate::memory::list::{Leases, TransferEnd, TransferNotification};
use crate::memory::operations::Locals;

/// The largest number of batches of one list that one flush posts. A later flush posts more, at the
/// latest when a posted batch has ended. With only one batch in flight, the peer would be idle from
/// the end of that batch until the next batch arrives.
const BATCHES: usize = 2;

impl Connection {
    /// Returns true if the connection has a list that has not ended.
    #[inline]
    pub(crate) fn has_lists(&self) -> bool {
        self.sends.lists.is_active()
    }

    /// Returns true if a large message from the peer or a list is in progress: both add work
    /// requests to the send queue without a call of the program.
    #[inline]
    pub(super) fn feeds_itself(&self) -> bool {
        self.transfers.is_active() || self.has_lists()
    }

    /// Returns true if a close waits for a large message that the peer fetches, or for a list.
    pub(super) fn delays_its_close(&self) -> bool {
        self.transfers.offers() || self.has_lists()
    }

    /// Starts the transfer of a list that has passed all checks. Returns the id of the transfer.
    pub(crate) fn begin_list(&mut self, order: Order, env: &mut Env<'_>) -> TransferId {
        let lists = &mut self.sends.lists;
        let id = TransferId::new(lists.next);
        lists.next += 1;
        let step = |any: bool| if any { PartState::Waits } else { PartState::Ended };
        let (confirmation, notification) = (step(order.confirmation.is_some()), step(order.notification.is_some()));
        lists.waiting.push_back(List {
            id,
            order,
            posted: 0,
            ended: 0,
            succeeded: 0,
            confirmation,
            notification,
            stop: None,
            failure: None,
        });
        self.want(env, Action::Deadline);
        self.mark(env);
        id
    }

    /// Cancels a list: no more of its pieces are posted. Returns false if there is no list with this id.
    pub(crate) fn cancel_list(&mut self, id: TransferId, env: &mut Env<'_>) -> bool {
        let Some(at) = self.sends.lists.waiting.iter().position(|list| list.id == id) else { return false };
        let list = &mut self.sends.lists.waiting[at];
        list.stop.get_or_insert(Stop::Cancelled);
        self.end_list_if_over(at, env);
        true
    }

    /// Ends the lists whose deadline has passed. If a work request of such a list is in the send queue, the whole connection ends, because
    /// a posted work request cannot be withdrawn.
    pub(super) fn lists_due(&mut self, env: &mut Env<'_>) {
        let mut late = false;
        let mut at = 0;
        while let Some(list) = self.sends.lists.waiting.get_mut(at) {
            if list.is_late(env.now) {
                late |= list.is_posted();
                list.stop = Some(Stop::Deadline);
            }
            at += usize::from(!self.end_list_if_over(at, env));
        }
        if late {
            self.end(Ending::decided(DisconnectReason::TransferTimeout), env);
        }
    }

    /// Ends all lists at the end of the connection.
    pub(super) fn fail_lists(&mut self, env: &mut Env<'_>) {
        while let Some(mut list) = self.sends.lists.take_over(0) {
            if list.is_late(env.now) {
                list.stop.get_or_insert(Stop::Deadline);
            }
            self.end_list(list, env);
        }
    }

    /// Makes sure that the memory of posted pieces is never deregistered, because the queue pair could not be destroyed, so the device may
    /// still access that memory.
    pub(super) fn forsake_lists(&mut self) {
        for list in self.sends.lists.waiting.iter_mut().filter(|list| list.is_posted()) {
            list.order.leases = Leases::default();
        }
    }

    /// Adds pieces to the send queue while it has free slots, the oldest list first. After the last
    /// piece of a list, adds the Read that confirms the list and the message that notifies the
    /// peer, if the program requested them.
    #[inline(never)]
    pub(crate) fn pump_lists(&mut self, env: &mut Env<'_>) {
        if !matches!(self.state, State::Open | State::Draining) {
            return;
        }
        // The lists are taken out of `self.sends` while this function runs. In this time, `self.sends.room` counts the slots that are
        // reserved for lists as free.
        let mut lists = std::mem::take(&mut self.sends.lists);
        let (reserved, queued) = (self.transfers.slots(), self.sends.len());
        lists.missing = (0, 0);
        let mut at = 0;
        while let Some(list) = lists.waiting.get_mut(at) {
            if list.is_late(env.now) {
                // A late list posts no more pieces. The timer for its deadline calls `lists_due`, which handles the pieces that are posted
                // already.
                list.stop.get_or_insert(Stop::Deadline);
            }
            for nth in 0..BATCHES {
                if !list.is_going() || list.unposted() == 0 {
                    break;
                }
                let (most, room) = (self.sends.batch(), self.sends.room(reserved));
                let (count, bytes) = list.batch(most, room, (lists.pieces, lists.bytes));
                if nth == 0 {
                    lists.missing.0 = if count == 0 { most.min(list.unposted()) } else { 0 };
                }
                self.sends.push_batch(&list.order, list.posted..list.posted + count);
                lists.pieces += count;
                lists.bytes += bytes;
                list.posted += count;
            }
            if list.is_going() && list.unposted() > 0 {
                break;
            }
            if list.is_going() && list.confirmation == PartState::Waits {
                if self.sends.room(reserved) > 0 {
                    list.confirmation = self.push_confirmation(list.number(), &mut list.order);
                } else if !crate::planted("a-confirmation-reserves-nothing") {
                    lists.missing.0 = 1;
                }
            }
            if list.wants_notification() {
                lists.missing = (usize::from(self.sends.room(reserved) == 0), usize::from(self.credits() == 0));
                if lists.missing == (0, 0) {
                    list.notification = PartState::Posted;
                    self.push_notification(list, env);
                }
            }
            if list.is_over() {
                if let Some(list) = lists.waiting.remove(at) {
                    self.end_list(list, env);
                }
            } else {
                at += 1;
            }
        }
        // If the sends of the program use all slots or credits, the next ones are reserved for the
        // lists, although no send was refused.
        let is_full = self.sends.room(reserved) == 0 && !crate::planted("a-full-queue-reserves-nothing");
        lists.reserved = match (self.sends.len() > queued, is_full) {
            (true, _) => (0, 0),
            (false, true) => lists.missing,
            (false, false) => (lists.reserved.0.min(lists.missing.0), lists.missing.1),
        };
        self.sends.lists = lists;
    }

    /// Queues the confirmation of the list with this number: a Read after the last piece. When this Read ends, the peer's memory has all
    /// bytes of the list. Returns the new state of the confirmation: `Posted`, or `Ended` if nothing was queued because all pieces are
    /// empty.
    fn push_confirmation(&mut self, list: u32, order: &mut Order) -> PartState {
        let Order { pieces, confirmation: Some(region), .. } = order else { return PartState::Ended };
        let Some(last) = pieces.iter().rfind(|piece| !piece.is_empty()) else {
            order.direction = ListDirection::PlacedWrite;
            return PartState::Ended;
        };
        let len = last.len().min(CONFIRMATION_LEN);
        let Some((sge, hold)) = region.lend_mut(0..len) else { return PartState::Ended };
        let mut locals = Locals { sges: SgeList::one(sge), holds: Default::default() };
        locals.holds[0] = Some((region.key(), hold));
        self.sends.push_operation(
            SendQueueEntry::of_list(ListPart::Confirmation { list }),
            SendOp::Read(last.remote.address()),
            locals,
        );
        PartState::Posted
    }

    /// Queues the message that notifies the peer at the end of a list. The caller has checked that
    /// a credit and a send queue slot are available.
    fn push_notification(&mut self, list: &List, env: &mut Env<'_>) {
        let (order, part) = (&list.order, ListPart::Notification { list: list.number() });
        let immediate;
        let (kind, payload) = match &order.notification {
            Some(TransferNotification::Message(payload)) => (MessageKind::Data, &payload[..]),
            Some(TransferNotification::Immediate(value)) => {
                let len = order.pieces.iter().map(|piece| piece.remote.len).sum::<u64>();
                immediate = Immediate { value: *value, len: u32::try_from(len).unwrap_or(u32::MAX) }.emit();
                (MessageKind::Immediate, &immediate[..])
            }
            None => return,
        };
        let Some(buffer) = env.buffers.pool.take() else {
            debug_assert!(false, "a buffer is promised for every slot of the send queue");
            return;
        };
        let (posted, sge) = match self.framing {
            Framing::Credits => env.buffers.pool.post_copy(buffer, &self.header(kind).emit(), payload),
            Framing::Raw => env.buffers.pool.post_copy(buffer, &[], payload),
        };
        self.sends.push(SendQueueEntry::of_list(part).with(posted), SendOp::Send, SgeList::one(sge));
    }

    /// Handles the end of `count` pieces. Pieces end in the order of posting, so these are pieces of the oldest list that has pieces in
    /// flight.
    #[inline(never)]
    pub(super) fn pieces_ended(&mut self, count: usize, outcome: Outcome, env: &mut Env<'_>) {
        let lists = &mut self.sends.lists;
        let Some(at) = lists.waiting.iter().position(|list| list.posted > list.ended) else { return };
        lists.pieces -= count;
        lists.bytes -= lists.waiting[at].end_pieces(count, outcome);
        self.end_list_if_over(at, env);
    }

    /// Handles the end of a list's confirmation or notification. Notifications may end in another order than the lists began, because a
    /// list of Reads sends its notification only after its last piece has ended.
    pub(super) fn part_ended(&mut self, part: ListPart, outcome: Outcome, env: &mut Env<'_>) {
        let (ListPart::Confirmation { list } | ListPart::Notification { list }) = part else { return };
        let Some(at) = self.sends.lists.waiting.iter().position(|of| of.number() == list) else { return };
        self.sends.lists.waiting[at].end_part(part, outcome);
        self.end_list_if_over(at, env);
    }

    /// Ends the list at index `at` if it has nothing more to post and nothing in flight. Returns true if it has ended.
    fn end_list_if_over(&mut self, at: usize, env: &mut Env<'_>) -> bool {
        if !self.sends.lists.waiting.get(at).is_some_and(List::is_over) {
            return false;
        }
        if let Some(list) = self.sends.lists.take_over(at) {
            self.end_list(list, env);
        }
        true
    }

    fn end_list(&self, list: List, env: &mut Env<'_>) {
        let (outcome, there) = list.result();
        let List { id, order: Order { pieces, leases, confirmation, .. }, posted, .. } = list;
        for key in leases.done() {
            self.want(env, Action::Unused(key));
        }
        if let Some(region) = confirmation {
            self.want(env, Action::Discard(region));
        }
        let end = TransferEnd { outcome, pieces, there, unknown: posted - there };
        self.tell(env, Event::Transferred(Box::new((id, end))));
        // The list may have ended without a completion, and may have released send queue slots and
        // credits that a refused send waits for.
        self.ask_writable(env);
    }
}
