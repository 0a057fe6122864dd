//! The tasks that wait for room on a connection.
//!
//! There is one queue for each kind of need, because a task that waits for the peer must not delay one that does not. Room that several
//! queues need goes to the task that has waited longest. As many tasks are notified as there is room for.
//!
//! A task that is not notified is never forgotten, because `on_writable` follows: either an attempt of its queue was refused
//! ([`NeedQueue::blocked`]), or [`Context::await_room`] was called ([`RoomWaiters::awaits_room`]).

use std::task::Waker;

use super::wait_queue::{WaitQueue, WaiterId};
use crate::{Blocked, ConnectionId, Context};

/// The kind of operation that a task attempts.
#[derive(Clone, Copy, Debug)]
pub(super) enum AttemptKind {
    /// A message of this length, bytes.
    Message(usize),
    /// An RDMA Read or Write.
    Operation,
    /// An operation that a closure of the program posts. It may be a message.
    Any,
}

/// The resources that an attempt needs, as far as they are known before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NeedKind {
    /// Slots in the send queue.
    Slots,
    /// Slots, and possibly credits.
    Unknown,
    /// A slot and a credit: a message that fits one buffer.
    Credit,
    /// A message longer than one buffer. Either a slot and a credit for each part, or one of each for an offer. It may also wait for
    /// the end of another large message, or for memory.
    Transfer,
}

/// All kinds, in the order of [`RoomWaiters::queues`].
const KINDS: [NeedKind; 4] = [NeedKind::Slots, NeedKind::Unknown, NeedKind::Credit, NeedKind::Transfer];

/// The need of an attempt.
#[derive(Clone, Copy, Debug)]
pub(super) struct TaskNeed {
    kind: NeedKind,
    /// Largest number of credits, or slots, that the attempt uses.
    weight: u32,
}

impl TaskNeed {
    pub(super) fn of(attempt: AttemptKind, cx: &Context<'_>, conn: ConnectionId) -> Self {
        match attempt {
            AttemptKind::Operation => Self { kind: NeedKind::Slots, weight: 1 },
            AttemptKind::Any => Self { kind: NeedKind::Unknown, weight: 1 },
            AttemptKind::Message(len) => match cx.buffer_size(conn) {
                // A message that is offered needs one credit only. The weight of all parts makes it wait until no task is notified.
                Some(size) if len > size => {
                    let parts = u16::try_from(len.div_ceil(size)).unwrap_or(u16::MAX);
                    Self { kind: NeedKind::Transfer, weight: parts.into() }
                }
                Some(_) | None => Self { kind: NeedKind::Credit, weight: 1 },
            },
        }
    }

    /// Returns the need of an attempt that was refused.
    const fn after(self, why: Blocked) -> Self {
        let kind = match (self.kind, why) {
            (_, Blocked::Transfers | Blocked::Memory) => NeedKind::Transfer,
            (NeedKind::Slots | NeedKind::Unknown, Blocked::Window) => NeedKind::Credit,
            (kind, _) => kind,
        };
        Self { kind, ..self }
    }
}

/// The free room of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct FreeRoom {
    /// Free slots in the send queue.
    slots: usize,
    /// Number of messages that would be accepted: each needs a slot and a credit.
    messages: usize,
}

impl FreeRoom {
    pub(super) fn of(cx: &Context<'_>, conn: ConnectionId) -> Self {
        Self { slots: cx.free_slots(conn), messages: cx.writable(conn) }
    }
}

/// The position of a task in one of the queues.
#[derive(Debug)]
pub(super) struct Ticket {
    arrival: u64,
    need: TaskNeed,
    waiter: WaiterId,
}

/// The tasks whose needs are of one kind, in order of arrival.
#[derive(Debug, Default)]
struct NeedQueue {
    waiters: WaitQueue,
    /// True if an attempt of this queue was refused. The next one waits for `on_writable`, which follows.
    blocked: bool,
}

impl NeedQueue {
    /// Returns the arrival and the weight of the task that is notified next, unless the queue is blocked.
    fn next(&self) -> Option<(u64, u32)> {
        if self.blocked { None } else { self.waiters.oldest() }
    }
}

/// A notified task that was refused. After the room was counted, the reactor sent a control message, nearly always a grant, which uses a
/// credit and a slot as a message does. Tasks that are notified with this one, but polled first, could use the remaining room every time.
/// So until this task is removed, at most one further task is notified at a time.
#[derive(Clone, Copy, Debug)]
struct Precedence {
    arrival: u64,
    /// The weights of the other tasks that were notified at that time.
    notified: usize,
}

/// The tasks that wait for room, see the [module](self).
#[derive(Debug, Default)]
pub(super) struct RoomWaiters {
    /// The queues, by [`NeedKind`].
    queues: [NeedQueue; KINDS.len()],
    /// Number of tasks in the queues, notified or not.
    tasks: usize,
    /// Number of tasks that were ever added.
    arrivals: u64,
    /// True if [`Context::await_room`] has requested `on_writable`.
    awaits_room: bool,
    precedence: Option<Precedence>,
    /// The reason of the last refusal.
    last_refusal: Option<Blocked>,
}

impl RoomWaiters {
    /// Returns true if there is no task, notified or not.
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

    /// Returns the sum of the weights of the notified tasks.
    fn notified(&self) -> usize {
        self.queues.iter().map(|queue| queue.waiters.notified()).sum()
    }

    /// Returns true if there is room for a need in addition to the notified tasks.
    fn has_room(&self, need: TaskNeed, room: FreeRoom) -> bool {
        let notified = |kind| self.queue(kind).waiters.notified();
        let credits = notified(NeedKind::Unknown) + notified(NeedKind::Credit) + notified(NeedKind::Transfer);
        let enough = match need.kind {
            NeedKind::Slots => true,
            // An operation that is not a message can be posted while the window is closed.
            NeedKind::Unknown if room.messages == 0 => true,
            // If no other task is notified, a large message may go: it is offered if there are too few credits for its parts.
            _ => room.messages > 0 && (credits == 0 || credits + need.weight as usize <= room.messages),
        };
        enough && credits + notified(NeedKind::Slots) < room.slots
    }

    /// Returns true if an operation that arrived before `arrival` waits for several slots. Later tasks must not use them.
    fn reserves_slots(&self, arrival: u64) -> bool {
        let reserves =
            |queue: &NeedQueue| queue.blocked && queue.waiters.oldest().is_some_and(|(oldest, _)| oldest < arrival);
        [NeedKind::Slots, NeedKind::Unknown].iter().any(|&kind| reserves(self.queue(kind)))
    }

    /// Returns the next task that may use credits.
    fn next_message(&self, room: FreeRoom) -> Option<(u64, TaskNeed)> {
        // Without credits, only tasks of `Unknown` need can proceed.
        let kinds = if room.messages > 0 { &KINDS[1..] } else { &KINDS[1..2] };
        let oldest = |&kind| self.queue(kind).next().map(|(arrival, weight)| (arrival, TaskNeed { kind, weight }));
        kinds.iter().filter_map(oldest).min_by_key(|&(arrival, _)| arrival)
    }

    /// Returns the task that is notified next.
    fn next(&self, room: FreeRoom) -> Option<TaskNeed> {
        let operation = self.queue(NeedKind::Slots).next();
        let operation = operation.map(|(arrival, weight)| (arrival, TaskNeed { kind: NeedKind::Slots, weight }));
        let both = [operation, self.next_message(room)].into_iter().flatten();
        let (arrival, need) =
            both.filter(|&(_, need)| self.has_room(need, room)).min_by_key(|&(arrival, _)| arrival)?;
        if self.reserves_slots(arrival) { None } else { Some(need) }
    }

    /// Returns true if a new task can proceed without using the room of the tasks that arrived before it.
    fn has_spare_room(&self, need: TaskNeed, room: FreeRoom) -> bool {
        let is_next = need.kind == NeedKind::Slots || self.next_message(room).is_none();
        is_next && self.has_room(need, room) && !self.reserves_slots(u64::MAX)
    }

    /// Returns true if a new task may attempt its operation without waiting.
    pub(super) fn can_proceed(&self, need: TaskNeed, room: FreeRoom) -> bool {
        self.queue(need.kind).waiters.is_empty() && self.has_spare_room(need, room)
    }

    /// Returns the reason to refuse a message that does not wait, because the room is for the waiting tasks. Returns `None` if the message
    /// may be attempted.
    pub(super) fn refusal(&self, need: TaskNeed, room: FreeRoom) -> Option<Blocked> {
        let free = self.queue(need.kind).waiters.oldest().is_none() && self.has_spare_room(need, room);
        if free || room.messages == 0 { None } else { self.last_refusal }
    }

    /// Adds a task.
    pub(super) fn push(&mut self, need: TaskNeed, waker: &Waker) -> Ticket {
        (self.tasks, self.arrivals) = (self.tasks + 1, self.arrivals + 1);
        let arrival = self.arrivals;
        Ticket { arrival, need, waiter: self.queue_mut(need.kind).waiters.push(arrival, need.weight, waker) }
    }

    /// Returns true if a task is notified.
    pub(super) fn is_notified(&self, ticket: &Ticket) -> bool {
        self.queue(ticket.need.kind).waiters.is_notified(&ticket.waiter)
    }

    /// Sets the waker of a task, see [`WaitQueue::set_waker`].
    pub(super) fn set_waker(&mut self, ticket: &Ticket, waker: &Waker) -> Option<Waker> {
        self.queue_mut(ticket.need.kind).waiters.set_waker(&ticket.waiter, waker)
    }

    /// Removes a task, see [`WaitQueue::remove`].
    pub(super) fn remove(&mut self, ticket: Ticket) -> Option<Waker> {
        self.tasks -= 1;
        self.precedence = self.precedence.filter(|first| first.arrival != ticket.arrival);
        self.queue_mut(ticket.need.kind).waiters.remove(ticket.waiter)
    }

    /// Records that an attempt was refused. A notified task is queued again at its old position. A new task, and a task whose need has
    /// changed, is added to the queue of its need.
    pub(super) fn refused(
        &mut self,
        ticket: Result<Ticket, TaskNeed>,
        why: Blocked,
        room: FreeRoom,
        waker: &Waker,
    ) -> Ticket {
        self.last_refusal = Some(why);
        let need = ticket.as_ref().map_or_else(|need| *need, |ticket| ticket.need).after(why);
        // Without room for a message, the queue of credits is not blocked: its next message may need less than this one, so
        // `notify` calls `await_room` for it.
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

    /// Handles `on_writable`: all queues may attempt again.
    pub(super) fn unblock(&mut self) {
        self.awaits_room = false;
        self.queues.iter_mut().for_each(|queue| queue.blocked = false);
    }

    /// Notifies the tasks that there is room for. Adds their wakers to `ready`.
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

    /// Requests `on_writable` for when there is more room. If the connection is not open, notifies all tasks instead.
    pub(super) fn await_room(&mut self, cx: &mut Context<'_>, id: ConnectionId, ready: &mut Vec<Waker>) {
        let for_slots = [NeedKind::Slots, NeedKind::Unknown].iter().any(|&kind| self.queue(kind).next().is_some());
        self.awaits_room = cx.await_room(id, if for_slots { Blocked::Queue } else { Blocked::Window });
        if !self.awaits_room {
            self.notify_all(ready);
        }
    }

    /// Notifies all tasks.
    pub(super) fn notify_all(&mut self, ready: &mut Vec<Waker>) {
        for queue in &mut self.queues {
            ready.extend(std::iter::from_fn(|| queue.waiters.notify()));
        }
    }
}
