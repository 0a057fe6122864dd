//! Posts lists through the send queue.
//!
//! A list waits beside the send queue, and its pieces enter the queue in batches, in order: as many as a third of the queue holds, of which
//! the last one is signaled. So lists use at most two thirds of the queue, no memory but that of the program, and all other sends have a
//! turn between two batches. A refused send of the program reserves the next slots for the lists, if they wait for some, and gets those
//! behind; so neither starves the other.

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

/// The largest number of batches that one flush posts. A flush follows the end of a batch, so with one batch at a time the peer would be
/// idle from the end of a batch until the next one has reached it.
const BATCHES: usize = 2;

impl Connection {
    /// Returns true if there is a list that has not ended.
    #[inline]
    pub(crate) fn has_lists(&self) -> bool {
        self.sends.lists.is_active()
    }

    /// Returns true if a large message or a list may add more work requests to the send queue by itself.
    #[inline]
    pub(super) fn feeds_itself(&self) -> bool {
        self.transfers.is_active() || self.has_lists()
    }

    /// Returns true if a close waits for a large message that the peer fetches, or for a list.
    pub(super) fn delays_its_close(&self) -> bool {
        self.transfers.offers() || self.has_lists()
    }

    /// Begins a transfer of a list that was checked.
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
        self.watch_lists(env);
        self.mark(env);
        id
    }

    /// Cancels a list: nothing more of it is posted. Returns false if there is no such list.
    pub(crate) fn cancel_list(&mut self, id: TransferId, env: &mut Env<'_>) -> bool {
        let Some(at) = self.sends.lists.waiting.iter().position(|list| list.id == id) else { return false };
        let list = &mut self.sends.lists.waiting[at];
        list.stop.get_or_insert(Stop::Cancelled);
        self.end_list_if_over(at, env);
        true
    }

    /// Handles the deadlines of lists. Lists without posted pieces end now, and those with posted pieces end with the connection.
    pub(crate) fn lists_due(&mut self, env: &mut Env<'_>) {
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
            return self.end(Ending::decided(DisconnectReason::TransferTimeout), env);
        }
        self.watch_lists(env);
    }

    /// Schedules a check of the next deadline of a list.
    fn watch_lists(&self, env: &mut Env<'_>) {
        if let Some(at) = self.sends.lists.next_deadline() {
            self.want(env, Action::ListsBy(at));
        }
    }

    /// Ends all lists at the end of the connection.
    pub(super) fn fail_lists(&mut self, env: &mut Env<'_>) {
        while let Some(list) = self.sends.lists.take_over(0) {
            self.end_list(list, env);
        }
    }

    /// Leaves the posted work requests' memory to a queue pair that continues to use it.
    pub(super) fn forsake_lists(&mut self) {
        for list in self.sends.lists.waiting.iter_mut().filter(|list| list.is_posted()) {
            list.order.leases = Leases::default();
        }
    }

    /// Adds pieces to the send queue as far as there are slots, the oldest list first, and the notifications behind the
    /// last ones.
    #[inline(never)]
    pub(crate) fn pump_lists(&mut self, env: &mut Env<'_>) {
        if !matches!(self.state, State::Open | State::Draining) {
            return;
        }
        // The reserved slots belong to the lists during this call.
        let mut lists = std::mem::take(&mut self.sends.lists);
        let (places, queued) = (self.transfers.places(), self.sends.len());
        lists.missing = (0, 0);
        let mut at = 0;
        while let Some(list) = lists.waiting.get_mut(at) {
            if list.is_late(env.now) {
                // The posted pieces are handled when the timer of the deadline expires.
                list.stop.get_or_insert(Stop::Deadline);
            }
            for nth in 0..BATCHES {
                if !list.is_going() || list.unposted() == 0 {
                    break;
                }
                let (most, room) = (self.sends.batch(), self.sends.room(places));
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
            if list.is_going() && list.confirmation == PartState::Waits && self.sends.room(places) > 0 {
                list.confirmation = self.push_confirmation(&mut list.order);
            }
            if list.wants_notification() {
                lists.missing = (usize::from(self.sends.room(places) == 0), usize::from(self.credits() == 0));
                if lists.missing == (0, 0) {
                    list.notification = PartState::Posted;
                    self.push_notification(&list.order, env);
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
        let reserved = if self.sends.len() > queued { (0, 0) } else { lists.reserved };
        lists.reserved = (reserved.0.min(lists.missing.0), reserved.1.min(lists.missing.1));
        self.sends.lists = lists;
    }

    /// Queues the Read behind the last piece. If all pieces are empty, there is nothing to confirm.
    fn push_confirmation(&mut self, order: &mut Order) -> PartState {
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
            SendQueueEntry::of_list(ListPart::Confirmation),
            SendOp::Read(last.remote.address()),
            locals,
        );
        PartState::Posted
    }

    /// Queues the message behind the last piece. The caller has checked that there are a credit and a slot.
    fn push_notification(&mut self, order: &Order, env: &mut Env<'_>) {
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
        self.sends.push(SendQueueEntry::of_list(ListPart::Notification).with(posted), SendOp::Send, SgeList::one(sge));
    }

    /// Handles the end of pieces of one list. They end in the order of their lists.
    #[inline(never)]
    pub(super) fn pieces_ended(&mut self, count: usize, outcome: Outcome, env: &mut Env<'_>) {
        let lists = &mut self.sends.lists;
        let Some(at) = lists.waiting.iter().position(|list| list.posted > list.ended) else { return };
        lists.pieces -= count;
        lists.bytes -= lists.waiting[at].end_pieces(count, outcome);
        self.end_list_if_over(at, env);
    }

    /// Handles the end of a work request behind the pieces of a list.
    pub(super) fn part_ended(&mut self, part: ListPart, outcome: Outcome, env: &mut Env<'_>) {
        let is_posted = |list: &List| {
            [list.confirmation, list.notification][usize::from(part == ListPart::Notification)] == PartState::Posted
        };
        let Some(at) = self.sends.lists.waiting.iter().position(is_posted) else { return };
        self.sends.lists.waiting[at].end_part(part, outcome);
        self.end_list_if_over(at, env);
    }

    /// Ends a list if nothing is left to do for it. Returns true if it has ended.
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
    }
}
