//! The tasks that wait for room on a connection.
//!
//! They wait in several lines, by what they need, because a task that waits for the peer must not hold up one that does not. Room
//! that several lines need goes to the task that has waited longest. As many tasks have their turn as there is room for.
//!
//! A task that waits without a turn is never forgotten, because `on_writable` is due then: an attempt of its line was refused
//! ([`Line::stuck`]), or [`Context::await_room`] was called ([`Writers::awaits_room`]).

use std::task::Waker;

use super::waiters::{Place, Waiters};
use crate::{Blocked, ConnectionId, Context};

/// The things that a task attempts.
#[derive(Clone, Copy, Debug)]
pub(super) enum Attempt {
    /// A message of so many bytes.
    Message(usize),
    /// A read or a write.
    Operation,
    /// An operation that the program makes itself: that may be a message.
    Any,
}

/// The things that an attempt needs, as far as they are known before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Places in the send queue.
    Places,
    /// Places, and perhaps more.
    Unknown,
    /// A place and a credit: a message that fits one buffer.
    Credit,
    /// A place and a credit for each of its parts, or for one, and the end of another large message, or memory: a message past
    /// one buffer.
    Transfer,
}

/// The lines, by [`Kind`].
const KINDS: [Kind; 4] = [Kind::Places, Kind::Unknown, Kind::Credit, Kind::Transfer];

/// The need of an attempt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    kind: Kind,
    /// Number of credits, or places, that it takes at most.
    weight: u32,
}

impl Need {
    pub(super) fn of(attempt: Attempt, cx: &Context<'_>, conn: ConnectionId) -> Self {
        match attempt {
            Attempt::Operation => Self { kind: Kind::Places, weight: 1 },
            Attempt::Any => Self { kind: Kind::Unknown, weight: 1 },
            Attempt::Message(len) => match cx.buffer_size(conn) {
                // A message that the peer fetches needs one credit only. It then waits until no task has its turn.
                Some(size) if len > size => {
                    let parts = u16::try_from(len.div_ceil(size)).unwrap_or(u16::MAX);
                    Self { kind: Kind::Transfer, weight: parts.into() }
                }
                Some(_) | None => Self { kind: Kind::Credit, weight: 1 },
            },
        }
    }

    /// Returns the need of an attempt that was refused.
    const fn after(self, why: Blocked) -> Self {
        let kind = match (self.kind, why) {
            (_, Blocked::Transfers | Blocked::Memory) => Kind::Transfer,
            (Kind::Places | Kind::Unknown, Blocked::Window) => Kind::Credit,
            (kind, _) => kind,
        };
        Self { kind, ..self }
    }
}

/// The room of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Places in the send queue.
    places: usize,
    /// Messages that would be accepted: a place and a credit for each.
    messages: usize,
}

impl Room {
    pub(super) fn of(cx: &Context<'_>, conn: ConnectionId) -> Self {
        Self { places: cx.free_slots(conn), messages: cx.writable(conn) }
    }
}

/// The place of a task in one of the lines.
#[derive(Debug)]
pub(super) struct Ticket {
    arrival: u64,
    need: Need,
    place: Place,
}

/// The tasks whose needs are of one kind, in order of arrival.
#[derive(Debug, Default)]
struct Line {
    waiters: Waiters,
    /// An attempt of this line was refused: the next one waits for `on_writable`, which follows.
    stuck: bool,
}

impl Line {
    /// Returns the arrival and the weight of the task that is called next, unless the line is stuck.
    fn next(&self) -> Option<(u64, u32)> {
        if self.stuck { None } else { self.waiters.oldest() }
    }
}

/// A task that had its turn and was refused: after the room was counted, the reactor sent a control message, nearly always a grant,
/// which uses a credit and a slot as a message does. Others that are called with the task, and polled before it, could take the
/// rest of the room again and again. So until it has gone, at most one task at a time is called.
#[derive(Clone, Copy, Debug)]
struct Precedence {
    arrival: u64,
    /// What the others may take that had their turns already.
    called: usize,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Writers {
    /// By [`Kind`].
    lines: [Line; KINDS.len()],
    /// Number of tasks that stand in the lines.
    tasks: usize,
    /// Number of tasks that have ever joined.
    arrivals: u64,
    /// `on_writable` follows when there is more room for those that wait.
    awaits_room: bool,
    precedence: Option<Precedence>,
    /// The reason of the last refusal.
    why: Option<Blocked>,
}

impl Writers {
    /// Returns true if no task waits, and none has its turn.
    #[inline]
    pub(super) const fn is_empty(&self) -> bool {
        self.tasks == 0
    }

    const fn line(&self, kind: Kind) -> &Line {
        &self.lines[kind as usize]
    }

    const fn line_mut(&mut self, kind: Kind) -> &mut Line {
        &mut self.lines[kind as usize]
    }

    /// Returns how much the tasks may take that have their turn.
    fn called(&self) -> usize {
        self.lines.iter().map(|line| line.waiters.called()).sum()
    }

    /// Returns true if there is room for a need beside what the tasks may take that have their turn.
    fn has_room(&self, need: Need, room: Room) -> bool {
        let called = |kind| self.line(kind).waiters.called();
        let credits = called(Kind::Unknown) + called(Kind::Credit) + called(Kind::Transfer);
        let for_it = match need.kind {
            Kind::Places => true,
            // What is not a message can go while the window is closed.
            Kind::Unknown if room.messages == 0 => true,
            // A large message that is alone is offered if there are too few credits for its parts.
            _ => room.messages > 0 && (credits == 0 || credits + need.weight as usize <= room.messages),
        };
        for_it && credits + called(Kind::Places) < room.places
    }

    /// Returns true if an operation that takes several places waits for them, and came before `arrival`: who came later must
    /// leave the places to it.
    fn gathers_places(&self, arrival: u64) -> bool {
        let gathers = |line: &Line| line.stuck && line.waiters.oldest().is_some_and(|(oldest, _)| oldest < arrival);
        [Kind::Places, Kind::Unknown].iter().any(|&kind| gathers(self.line(kind)))
    }

    /// Returns the next of the tasks that may take credits.
    fn next_message(&self, room: Room) -> Option<(u64, Need)> {
        // Without credits, only those can go that may need none.
        let kinds = if room.messages > 0 { &KINDS[1..] } else { &KINDS[1..2] };
        let oldest = |&kind| self.line(kind).next().map(|(arrival, weight)| (arrival, Need { kind, weight }));
        kinds.iter().filter_map(oldest).min_by_key(|&(arrival, _)| arrival)
    }

    /// Returns the task that is called next.
    fn next(&self, room: Room) -> Option<Need> {
        let operation = self.line(Kind::Places).next();
        let operation = operation.map(|(arrival, weight)| (arrival, Need { kind: Kind::Places, weight }));
        let both = [operation, self.next_message(room)].into_iter().flatten();
        let (arrival, need) =
            both.filter(|&(_, need)| self.has_room(need, room)).min_by_key(|&(arrival, _)| arrival)?;
        if self.gathers_places(arrival) { None } else { Some(need) }
    }

    /// Returns true if a newcomer takes nothing away from the tasks that came before it.
    fn leaves_enough(&self, need: Need, room: Room) -> bool {
        let is_next = need.kind == Kind::Places || self.next_message(room).is_none();
        is_next && self.has_room(need, room) && !self.gathers_places(u64::MAX)
    }

    /// Returns true if a newcomer may try at once.
    pub(super) fn lets_pass(&self, need: Need, room: Room) -> bool {
        self.line(need.kind).waiters.is_empty() && self.leaves_enough(need, room)
    }

    /// Returns the reason why a message that cannot wait is refused, though there is room: it is for those that wait.
    pub(super) fn refuses(&self, need: Need, room: Room) -> Option<Blocked> {
        let free = self.line(need.kind).waiters.oldest().is_none() && self.leaves_enough(need, room);
        if free || room.messages == 0 { None } else { self.why }
    }

    /// Adds a task.
    pub(super) fn join(&mut self, need: Need, waker: &Waker) -> Ticket {
        (self.tasks, self.arrivals) = (self.tasks + 1, self.arrivals + 1);
        let arrival = self.arrivals;
        Ticket { arrival, need, place: self.line_mut(need.kind).waiters.join(arrival, need.weight, waker) }
    }

    /// Returns true if a task has its turn.
    pub(super) fn has_turn(&self, ticket: &Ticket) -> bool {
        self.line(ticket.need.kind).waiters.has_turn(&ticket.place)
    }

    /// See [`Waiters::renew`].
    pub(super) fn renew(&mut self, ticket: &Ticket, waker: &Waker) -> Option<Waker> {
        self.line_mut(ticket.need.kind).waiters.renew(&ticket.place, waker)
    }

    /// See [`Waiters::leave`].
    pub(super) fn leave(&mut self, ticket: Ticket) -> Option<Waker> {
        self.tasks -= 1;
        self.precedence = self.precedence.filter(|first| first.arrival != ticket.arrival);
        self.line_mut(ticket.need.kind).waiters.leave(ticket.place)
    }

    /// Notes that an attempt was refused. A task that had its turn waits where it has waited; a newcomer, and a task that turns
    /// out to need something else, joins its line.
    pub(super) fn refused(&mut self, ticket: Result<Ticket, Need>, why: Blocked, room: Room, waker: &Waker) -> Ticket {
        self.why = Some(why);
        let need = ticket.as_ref().map_or_else(|need| *need, |ticket| ticket.need).after(why);
        // The next message of the line may need less than this one: `await_room` is called for it, and not again in vain.
        self.line_mut(need.kind).stuck = need.kind != Kind::Credit || room.messages > 0;
        match ticket {
            Ok(ticket) if ticket.need.kind == need.kind => {
                self.line_mut(need.kind).waiters.go_back(&ticket.place, waker);
                if self.precedence.is_none_or(|first| first.arrival > ticket.arrival)
                    && matches!(why, Blocked::Window | Blocked::Queue)
                {
                    self.precedence = Some(Precedence { arrival: ticket.arrival, called: self.called() });
                }
                ticket
            }
            Ok(ticket) => {
                self.leave(ticket);
                self.join(need, waker)
            }
            Err(_) => self.join(need, waker),
        }
    }

    /// Handles `on_writable`: each line may try again.
    pub(super) fn reopen(&mut self) {
        self.awaits_room = false;
        self.lines.iter_mut().for_each(|line| line.stuck = false);
    }

    /// Gives a turn to each task that there is room for; adds their wakers.
    pub(super) fn call(&mut self, cx: &mut Context<'_>, conn: ConnectionId, ready: &mut Vec<Waker>) {
        let waits = |this: &Self| this.lines.iter().any(|line| line.next().is_some());
        if !waits(self) {
            return;
        }
        let room = Room::of(cx, conn);
        while let Some(need) = self.next(room) {
            if self.precedence.is_some_and(|first| self.called() > first.called) {
                break;
            }
            ready.extend(self.line_mut(need.kind).waiters.call());
        }
        if waits(self) && !self.awaits_room {
            self.await_room(cx, conn, ready);
        }
    }

    /// Has `on_writable` called when there is more room. On a connection that is not open any more, all tasks are called, to learn
    /// that.
    pub(super) fn await_room(&mut self, cx: &mut Context<'_>, id: ConnectionId, ready: &mut Vec<Waker>) {
        let for_places = [Kind::Places, Kind::Unknown].iter().any(|&kind| self.line(kind).next().is_some());
        self.awaits_room = cx.await_room(id, if for_places { Blocked::Queue } else { Blocked::Window });
        if !self.awaits_room {
            self.end(ready);
        }
    }

    /// Calls all tasks.
    pub(super) fn end(&mut self, ready: &mut Vec<Waker>) {
        for line in &mut self.lines {
            ready.extend(std::iter::from_fn(|| line.waiters.call()));
        }
    }
}
