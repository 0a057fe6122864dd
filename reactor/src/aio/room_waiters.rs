//! The tasks that wait for room on a connection: for slots in the send queue, for credits from the peer, or for memory.
//!
//! There is one queue for each kind of need. So a task that waits for credits from the peer does not delay a task that needs only a slot in
//! the send queue. If tasks of several queues need the same room, the task that has waited longest gets it. A task that gets room is
//! *notified*: it is woken, and attempts its operation when it is polled. No more tasks are notified than there is room for.
//!
//! No task waits forever: as long as a task is in a queue and not notified, the reactor will call `on_writable`, and that call notifies
//! tasks again. The reactor makes the call for one of two reasons: the reactor has refused an attempt of a task of that queue
//! ([`NeedQueue::blocked`]), or this module has called [`Context::await_room`] ([`RoomWaiters::awaits_room`]).

use std::task::Waker;

use super::wait_queue::{WaitQueue, WaiterId};
use crate::{Blocked, ConnectionId, Context};

/// The kind of operation that a task attempts.
#[derive(Clone, Copy, Debug)]
pub(super) enum AttemptKind {
    /// A message with this number of bytes.
    Message(usize),
    /// An RDMA Read or Write.
    Operation,
    /// An operation that a closure of the program posts ([`super::AsyncConnection::operate`]). It may be a message, or a read, or a write.
    Any,
}

/// The resources that an attempt needs, as far as they are known before the attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NeedKind {
    /// An operation that needs only slots in the send queue.
    Slots,
    /// An operation that needs slots in the send queue. It also needs credits if it turns out to be a message.
    Unknown,
    /// A message that fits one buffer. It needs one slot in the send queue and one credit.
    Credit,
    /// A message that is longer than one buffer. If the reactor sends it in parts, each part needs a slot and a credit. If the reactor
    /// offers it to the peer, and the peer reads it, the offer needs one slot and one credit. The message may also have to wait for the end
    /// of another large message, or for memory.
    Transfer,
}

/// All kinds of needs. The position of a kind is the index of its queue in [`RoomWaiters::queues`].
const KINDS: [NeedKind; 4] = [NeedKind::Slots, NeedKind::Unknown, NeedKind::Credit, NeedKind::Transfer];

/// The kind and the amount of room that an attempt needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct TaskNeed {
    kind: NeedKind,
    /// The largest number of credits or slots that the attempt can use.
    weight: u32,
}

impl TaskNeed {
    pub(super) fn of(attempt: AttemptKind, cx: &mut Context<'_>, conn: ConnectionId) -> Self {
        match attempt {
            AttemptKind::Operation => Self { kind: NeedKind::Slots, weight: 1 },
            AttemptKind::Any => Self { kind: NeedKind::Unknown, weight: 1 },
            AttemptKind::Message(len) => match cx.connection(conn).buffer_size() {
                // At the attempt, the reactor either sends this message in parts, each of which
                // needs a credit, or offers it to the peer, which needs one credit. So the weight,
                // the largest need, is the number of parts. If fewer credits are free, the task is
                // notified only while no other task is notified.
                Some(size) if len > size => {
                    let parts = u16::try_from(len.div_ceil(size)).unwrap_or(u16::MAX);
                    Self { kind: NeedKind::Transfer, weight: parts.into() }
                }
                Some(_) | None => Self { kind: NeedKind::Credit, weight: 1 },
            },
        }
    }

    /// Returns the need of a task whose attempt was refused because of `why`. The refusal may show that the task needs other resources than
    /// were known before the attempt.
    const fn after(self, why: Blocked) -> Self {
        let kind = match (self.kind, why) {
            (_, Blocked::Transfers | Blocked::Memory) => NeedKind::Transfer,
            (NeedKind::Slots | NeedKind::Unknown, Blocked::Window) => NeedKind::Credit,
            (kind, _) => kind,
        };
        Self { kind, ..self }
    }
}

/// The free room of a connection at a moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct FreeRoom {
    /// Free slots in the send queue.
    slots: usize,
    /// The number of messages that the reactor would accept now, if each of them fits into one
    /// buffer. Each needs a slot and a credit.
    messages: usize,
}

impl FreeRoom {
    pub(super) fn of(cx: &mut Context<'_>, conn: ConnectionId) -> Self {
        Self { slots: cx.connection(conn).free_slots(), messages: cx.writable(conn) }
    }
}

/// The position of a task in one of the queues of [`RoomWaiters`].
#[derive(Debug)]
pub(super) struct Ticket {
    arrival: u64,
    need: TaskNeed,
    waiter: WaiterId,
}

/// The tasks that have the same kind of need, in order of arrival.
#[derive(Debug, Default)]
struct NeedQueue {
    waiters: WaitQueue,
    /// True from the refusal of an attempt of a task of this queue until the reactor calls `on_writable`. While `blocked` is true, no task
    /// of this queue is notified.
    blocked: bool,
}

impl NeedQueue {
    /// Returns the arrival number and the weight of the task that is to be notified next. Returns `None` if the queue is blocked, or if no
    /// task waits to be notified.
    fn next(&self) -> Option<(u64, u32)> {
        if self.blocked { None } else { self.waiters.oldest() }
    }
}

/// The precedence of a task whose attempt was refused although the task had been notified. This happens if the reactor sends a control
/// message, usually a grant of credits, between the notification and the attempt. The control message uses a slot and a credit, as any
/// message does. The task will be notified again. Without precedence, other tasks that are notified together with this task and polled
/// earlier could use up the room again and again. So until this task is removed from its queue, [`RoomWaiters::notify`] stops when the
/// notified tasks have more weight than at the time of the refusal.
#[derive(Clone, Copy, Debug)]
struct Precedence {
    arrival: u64,
    /// The sum of the weights of the other tasks that were notified at the time of the refusal.
    notified: usize,
}

/// The tasks that wait for room, see the [module](self).
#[derive(Debug, Default)]
pub(super) struct RoomWaiters {
    /// The queues, one for each [`NeedKind`].
    queues: [NeedQueue; KINDS.len()],
    /// The number of tasks in all queues, including those that are notified.
    tasks: usize,
    /// The number of tasks that were added so far. It is also the arrival number of the newest task. Arrival numbers give the order of
    /// tasks that are in different queues.
    arrivals: u64,
    /// True from the call of [`Context::await_room`], which requests `on_writable`, until the reactor calls `on_writable`.
    awaits_room: bool,
    precedence: Option<Precedence>,
    /// The reason for the most recent refusal of an attempt; `None` before the first refusal.
    last_refusal: Option<Blocked>,
}

impl RoomWaiters {
    /// Returns true if all queues are empty. A notified task stays in its queue until it is
    /// removed.
    #[inline]
    pub(super) const fn is_empty(&self) -> bool {
        self.tasks == 0
    }

    const fn queue(&self, kind: NeedKind) -> &NeedQueue {
        &self.queues[kind as usize]
    }

    const fn queue_mut(&mut self, kind: NeedKind) -> &mut NeedQueue {
        &mut self.queues[kind as usize]
    }

    /// Returns the number of credits or slots that the notified tasks of all queues will use at most. It is the sum of their weights.
    fn notified(&self) -> usize {
        self.queues.iter().map(|queue| queue.waiters.notified()).sum()
    }

    /// Returns true if the connection has room for `need` in addition to the room that the notified tasks will use.
    fn has_room(&self, need: TaskNeed, room: FreeRoom) -> bool {
        let notified = |kind| self.queue(kind).waiters.notified();
        let credits = notified(NeedKind::Unknown) + notified(NeedKind::Credit) + notified(NeedKind::Transfer);
        let enough = match need.kind {
            NeedKind::Slots => true,
            // No message can be sent now. But an operation of unknown kind may be a read or a write, which needs no credit.
            NeedKind::Unknown if room.messages == 0 => true,
            // If no notified task may use credits, a large message may be attempted even with fewer credits than it has parts: the reactor
            // then offers the message to the peer.
            _ => room.messages > 0 && (credits == 0 || credits + need.weight as usize <= room.messages),
        };
        enough && credits + notified(NeedKind::Slots) < room.slots
    }

    /// Returns true if the free slots are reserved for a task that arrived before `arrival`, and whose attempt was refused because its
    /// operation needs several slots. Tasks that arrived later must not use these slots. Otherwise the earlier task might wait forever.
    fn reserves_slots(&self, arrival: u64) -> bool {
        let reserves =
            |queue: &NeedQueue| queue.blocked && queue.waiters.oldest().is_some_and(|(oldest, _)| oldest < arrival);
        [NeedKind::Slots, NeedKind::Unknown].iter().any(|&kind| reserves(self.queue(kind)))
    }

    /// Returns the arrival number and the need of the next task to notify among the tasks that may use credits. Returns `None` if no such
    /// task waits.
    fn next_message(&self, room: FreeRoom) -> Option<(u64, TaskNeed)> {
        // While no message can be sent, only tasks with the need `Unknown` can proceed: their operations may be reads or writes, which need
        // no credits.
        let kinds = if room.messages > 0 { &KINDS[1..] } else { &KINDS[1..2] };
        let oldest = |&kind| self.queue(kind).next().map(|(arrival, weight)| (arrival, TaskNeed { kind, weight }));
        kinds.iter().filter_map(oldest).min_by_key(|&(arrival, _)| arrival)
    }

    /// Returns the need of the next task to notify: the task that has waited longest among the tasks for which there is room. Returns
    /// `None` if no task can proceed.
    fn next(&self, room: FreeRoom) -> Option<TaskNeed> {
        let operation = self.queue(NeedKind::Slots).next();
        let operation = operation.map(|(arrival, weight)| (arrival, TaskNeed { kind: NeedKind::Slots, weight }));
        let both = [operation, self.next_message(room)].into_iter().flatten();
        let (arrival, need) =
            both.filter(|&(_, need)| self.has_room(need, room)).min_by_key(|&(arrival, _)| arrival)?;
        if self.reserves_slots(arrival) { None } else { Some(need) }
    }

    /// Returns true if there is room for a new task in addition to the room that the earlier tasks need.
    fn has_spare_room(&self, need: TaskNeed, room: FreeRoom) -> bool {
        let is_next = need.kind == NeedKind::Slots || self.next_message(room).is_none();
        is_next && self.has_room(need, room) && !self.reserves_slots(u64::MAX)
    }

    /// Returns true if a new task may attempt its operation now. Returns false if the new task must first wait in a queue, because earlier
    /// tasks wait for the same room.
    pub(super) fn can_proceed(&self, need: TaskNeed, room: FreeRoom) -> bool {
        self.queue(need.kind).waiters.is_empty() && self.has_spare_room(need, room)
    }

    /// Returns `None` if a message that cannot wait for room may be attempted now. If the tasks in
    /// the queues need the room, returns the reason why the reactor last refused an attempt.
    pub(super) fn refusal(&self, need: TaskNeed, room: FreeRoom) -> Option<Blocked> {
        let free = self.queue(need.kind).waiters.oldest().is_none() && self.has_spare_room(need, room);
        if free || room.messages == 0 { None } else { self.last_refusal }
    }

    /// Adds a task at the end of the queue for `need`. Returns the position of the task.
    pub(super) fn push(&mut self, need: TaskNeed, waker: &Waker) -> Ticket {
        (self.tasks, self.arrivals) = (self.tasks + 1, self.arrivals + 1);
        let arrival = self.arrivals;
        Ticket { arrival, need, waiter: self.queue_mut(need.kind).waiters.push(arrival, need.weight, waker) }
    }

    /// Returns true if the task is notified: it may attempt its operation when it is polled.
    pub(super) fn is_notified(&self, ticket: &Ticket) -> bool {
        self.queue(ticket.need.kind).waiters.is_notified(&ticket.waiter)
    }

    /// Sets the waker of a task. Returns the old waker, as [`WaitQueue::set_waker`] does.
    pub(super) fn set_waker(&mut self, ticket: &Ticket, waker: &Waker) -> Option<Waker> {
        self.queue_mut(ticket.need.kind).waiters.set_waker(&ticket.waiter, waker)
    }

    /// Removes a task from its queue. Returns the waker of the task; `None` if the task was notified. The caller must drop the waker as
    /// with [`WaitQueue::remove`].
    pub(super) fn remove(&mut self, ticket: Ticket) -> Option<Waker> {
        self.tasks -= 1;
        self.precedence = self.precedence.filter(|first| first.arrival != ticket.arrival);
        self.queue_mut(ticket.need.kind).waiters.remove(ticket.waiter)
    }

    /// Records that an attempt was refused, queues the task, and returns the position of the task. `ticket` is `Ok` with the position of a
    /// task that was notified, or `Err` with the need of a new task. A notified task gets its old position again. A new task, and a task
    /// whose need has changed, is added at the end of the queue for its need.
    pub(super) fn refused(
        &mut self,
        ticket: Result<Ticket, TaskNeed>,
        why: Blocked,
        room: FreeRoom,
        waker: &Waker,
    ) -> Ticket {
        self.last_refusal = Some(why);
        let need = ticket.as_ref().map_or_else(|need| *need, |ticket| ticket.need).after(why);
        // The tasks of a blocked queue wait until the reactor calls `on_writable`, that is, until
        // the connection has room for the refused operation. A refused message may need more room
        // than the next message in the queue `Credit`. So if the connection has no room for any
        // message now, the queue `Credit` is not blocked. Instead, `notify` requests an
        // `on_writable` for the time at which one message can be sent.
        self.queue_mut(need.kind).blocked = need.kind != NeedKind::Credit || room.messages > 0;
        match ticket {
            Ok(ticket) if ticket.need.kind == need.kind => {
                self.queue_mut(need.kind).waiters.requeue(&ticket.waiter, waker);
                if self.precedence.is_none_or(|first| first.arrival > ticket.arrival)
                    && matches!(why, Blocked::Window | Blocked::Queue)
                {
                    self.precedence = Some(Precedence { arrival: ticket.arrival, notified: self.notified() });
                }
                ticket
            }
            Ok(ticket) => {
                self.remove(ticket);
                self.push(need, waker)
            }
            Err(_) => self.push(need, waker),
        }
    }

    /// Handles `on_writable`: tasks of all queues may be notified again.
    pub(super) fn unblock(&mut self) {
        self.awaits_room = false;
        self.queues.iter_mut().for_each(|queue| queue.blocked = false);
    }

    /// Notifies the tasks for which there is room: adds their wakers to `ready`. Requests `on_writable` for tasks that still wait.
    pub(super) fn notify(&mut self, cx: &mut Context<'_>, conn: ConnectionId, ready: &mut Vec<Waker>) {
        let waits = |this: &Self| this.queues.iter().any(|queue| queue.next().is_some());
        if !waits(self) {
            return;
        }
        let room = FreeRoom::of(cx, conn);
        while let Some(need) = self.next(room) {
            if self.precedence.is_some_and(|first| self.notified() > first.notified) {
                break;
            }
            ready.extend(self.queue_mut(need.kind).waiters.notify());
        }
        if waits(self) && !self.awaits_room {
            self.await_room(cx, conn, ready);
        }
    }

    /// Requests the callback `on_writable`, which the reactor calls when the connection has more room. If the connection is not open, the
    /// reactor would never call `on_writable`. So all tasks are notified instead: their attempts then fail.
    pub(super) fn await_room(&mut self, cx: &mut Context<'_>, id: ConnectionId, ready: &mut Vec<Waker>) {
        let for_slots = [NeedKind::Slots, NeedKind::Unknown].iter().any(|&kind| self.queue(kind).next().is_some());
        self.awaits_room = cx.await_room(id, if for_slots { Blocked::Queue } else { Blocked::Window });
        if !self.awaits_room {
            self.notify_all(ready);
        }
    }

    /// Notifies all tasks, because the connection is not open: adds their wakers to `ready`.
    pub(super) fn notify_all(&mut self, ready: &mut Vec<Waker>) {
        for queue in &mut self.queues {
            ready.extend(std::iter::from_fn(|| queue.waiters.notify()));
        }
    }
}
