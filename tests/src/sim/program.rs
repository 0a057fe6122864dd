//! The program on a node: opens, sends, keeps, closes, and in any callback calls anything; and checks every callback.

use std::collections::BTreeMap;
use std::fmt::Arguments;
use std::time::Duration;

use rdma_reactor::stream::Streams;
use rdma_reactor::{
    ConnectError, ConnectOptions, ConnectRequest, ConnectionId, Context, Decision, DetachedMessage, DisconnectReason,
    Handler, Immediate, ListenerId, Message, Outcome, SendBuffer, SendErrorKind, SendId, SendKind, TimerId,
};

use super::audit::{
    ACTIVE, Arrival, Audit, End, PASSIVE, Pair, STREAM, Stand, cookie_of, is_stream, payload, request_data,
};
use super::fabric::{Shared, lock};
use super::flow::Flows;
use super::one_sided::Memories;
use super::poller::virtual_ns;
use super::rng::{Rng, mix};
use super::swarm::{Call, MS, NodeOptions, WorkOptions};
use super::tcp::address;
use super::threads::{Said, Threads};

/// The port every node listens on.
const PORT: u16 = 7471;
/// A timer, and whatever else is due, may be this late while the node runs, ns.
const LATE: u64 = 100 * MS;

#[derive(Debug)]
struct Timer {
    id: TimerId,
    due: u64,
    paused: u64,
}

/// What the program on a node knows.
#[derive(Debug)]
pub struct State {
    pub(super) node: usize,
    pub(super) options: NodeOptions,
    pub(super) work: WorkOptions,
    /// Of all nodes.
    max_messages: Vec<u32>,
    pub(super) rng: Rng,
    pub(super) fabric: Shared,
    threads: Threads,
    pub(super) memories: Memories,
    /// Byte streams.
    pub streams: Streams<Flows>,
    /// Connections that have not had their last callback: cookie and side.
    pub live: BTreeMap<ConnectionId, (u64, usize)>,
    stale: Vec<ConnectionId>,
    listener: Option<ListenerId>,
    timers: BTreeMap<u64, Timer>,
    next_timer: u64,
    next_cookie: u64,
    kept: Vec<(DetachedMessage, Vec<u8>)>,
    buffers: Vec<SendBuffer>,
    budget: u32,
    /// Connections that are still to be opened in the place of others.
    storm: u32,
    /// No more random calls: only the messages that are still to be sent.
    pub calm: bool,
}

/// The program, in a callback.
#[derive(Debug)]
pub struct Program<'a> {
    /// What it knows.
    pub state: &'a mut State,
    /// The books of all nodes.
    pub audit: &'a mut Audit,
}

impl State {
    /// The program of a node that has done nothing yet.
    #[must_use]
    pub fn new(
        seed: u64,
        node: usize,
        nodes: &[NodeOptions],
        work: &WorkOptions,
        fabric: Shared,
        threads: Threads,
    ) -> Self {
        Self {
            streams: Streams::new(Flows::new(seed, node, work, Shared::clone(&fabric))),
            threads,
            memories: Memories::new(work.operations),
            node,
            options: nodes[node].clone(),
            work: work.clone(),
            max_messages: nodes.iter().map(|options| options.max_message).collect(),
            rng: Rng::new(mix(seed) ^ node as u64, "program"),
            fabric,
            live: BTreeMap::new(),
            stale: Vec::new(),
            listener: None,
            timers: BTreeMap::new(),
            next_timer: 0,
            next_cookie: 0,
            kept: Vec::new(),
            buffers: Vec::new(),
            budget: work.budget,
            storm: work.storm,
            calm: false,
        }
    }

    pub(super) fn note(&self, what: Arguments<'_>) {
        lock(&self.fabric).note(self.node, what);
    }

    pub(super) fn check(&self, kept: bool, what: Arguments<'_>) {
        if !kept {
            lock(&self.fabric).violation(format!("node{}: {what}", self.node));
        }
    }

    /// Virtual time, and how much of it this node did not run.
    pub(super) fn times(&self) -> (u64, u64) {
        let fabric = lock(&self.fabric);
        (fabric.now(), fabric.paused(self.node))
    }

    /// Whether no more than `bound` has passed since, the time that the node did not run aside.
    pub(super) fn is_within(&self, since: (u64, u64), bound: u64) -> bool {
        let (now, paused) = self.times();
        now <= since.0 + bound + LATE + (paused - since.1)
    }

    /// Lets go of some of the messages that were kept.
    pub fn release(&mut self, all: bool) {
        let count = if all { self.kept.len() } else { self.rng.index(self.kept.len() + 1) };
        for _ in 0..count {
            let at = self.rng.index(self.kept.len());
            let (message, expected) = self.kept.swap_remove(at);
            self.check(*message == *expected, format_args!("a kept message of {} changed", message.connection()));
            drop(message);
        }
        if all {
            self.buffers.clear();
        }
    }
}

impl Program<'_> {
    pub(super) fn end(&mut self, id: ConnectionId) -> Option<(u64, usize, &mut End)> {
        let &(cookie, side) = self.state.live.get(&id)?;
        let end = &mut self.audit.pairs.get_mut(&cookie)?.ends[side];
        Some((cookie, side, end))
    }

    /// Starts listening, if it does not.
    pub fn listen(&mut self, cx: &mut Context<'_>) {
        if self.state.listener.is_none() {
            match cx.listen(address(self.state.node, PORT)) {
                Ok(listener) => self.state.listener = Some(listener),
                Err(error) => self.state.check(false, format_args!("listening failed: {error}")),
            }
        }
    }

    /// Stops listening.
    pub fn close_listener(&mut self, cx: &mut Context<'_>) {
        if let Some(listener) = self.state.listener.take() {
            cx.close_listener(listener);
            self.state.check(cx.local_address(listener).is_none(), format_args!("a closed listener has an address"));
        }
    }

    /// Opens a connection to some node, seldom this one.
    pub fn open(&mut self, cx: &mut Context<'_>) {
        let state = &mut *self.state;
        let nodes = state.max_messages.len();
        let step = if state.rng.chance(80) { 0 } else { 1 + state.rng.index(nodes - 1) };
        let peer = (state.node + step) % nodes;
        let kind = if state.rng.chance(state.work.streams) { STREAM } else { 0 };
        let cookie = state.next_cookie << 4 | kind | state.node as u64;
        state.next_cookie += 1;
        let options = ConnectOptions::new().private_data(request_data(cookie));
        let result = cx.connect_with(address(peer, PORT), options);
        state.note(format_args!("connect {cookie:x} to node{peer}: {result:?}"));
        let Ok(id) = result else { return };
        state.check(!state.live.contains_key(&id) && !state.stale.contains(&id), format_args!("{id} is not new"));
        state.live.insert(id, (cookie, ACTIVE));
        let mut pair = Pair { opened: state.times(), ..Pair::default() };
        pair.ends[ACTIVE] = End { node: state.node, id: Some(id), ..End::default() };
        pair.ends[PASSIVE].node = peer;
        self.audit.pairs.insert(cookie, pair);
    }

    /// Closes a connection.
    pub fn close(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        let times = self.state.times();
        self.state.note(format_args!("close {id}"));
        cx.close(id);
        self.state.streams.handler.cut(id);
        if let Some((_, _, end)) = self.end(id) {
            end.closed.get_or_insert(times);
            end.blocked = false;
        }
    }

    /// Sends the next message of a connection; whether it was taken.
    fn send(&mut self, cx: &mut Context<'_>, id: ConnectionId, in_place: bool) -> bool {
        let Some((cookie, side, end)) = self.end(id) else { return false };
        let (sequence, max, next) = (end.accepted, end.max, end.posted);
        let usable = end.announced && end.closed.is_none();
        let bytes = payload(cookie, side, sequence, max);
        let room = cx.writable(id);
        let in_place = in_place && bytes.len() <= max;
        let result = match in_place.then(|| cx.buffer(id)).flatten() {
            None => cx.send(id, &bytes),
            Some(mut buffer) => {
                buffer.set_len(bytes.len());
                if buffer.len() == bytes.len() {
                    buffer.copy_from_slice(&bytes);
                    cx.send_buffer(id, buffer).map_err(|error| error.kind)
                } else {
                    self.state.check(false, format_args!("a buffer of {} for {max}", buffer.capacity()));
                    return false;
                }
            }
        };
        self.state.note(format_args!("send {sequence} on {id}, {} bytes: {result:?}", bytes.len()));
        let expected = match result {
            Ok(send) => usable && room > 0 && (send.sequence(), send.kind()) == (next, SendKind::Message),
            // Messages past one buffer need memory besides.
            Err(SendErrorKind::WouldBlock) => usable && (room == 0 || bytes.len() > max),
            // It may be on its way out without having been told yet.
            Err(SendErrorKind::Closed) => room == 0,
            _ => false,
        };
        self.state.check(expected, format_args!("send {sequence} on {id}: {result:?} with room for {room}"));
        let Some((_, _, end)) = self.end(id) else { return false };
        match result {
            Ok(_) => {
                end.accepted += 1;
                let sequence = end.take(Stand::Message { large: bytes.len() > max });
                end.coming.push_back((sequence, Arrival::Message));
            }
            Err(SendErrorKind::WouldBlock) => end.refused(false),
            _ => {}
        }
        result.is_ok()
    }

    /// Sends what a connection still wants to send.
    pub fn pump(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        let most = if self.state.calm { u64::MAX } else { self.state.rng.range(0..=self.state.work.burst) };
        for _ in 0..most {
            match self.end(id) {
                Some((cookie, _, end)) if end.announced && end.accepted < end.goal && !is_stream(cookie) => {}
                _ => return,
            }
            let in_place = self.state.rng.chance(300);
            if !self.send(cx, id, in_place) {
                return;
            }
        }
    }

    /// No more mischief: what is still wanted is sent, and one more message each.
    pub fn settle(&mut self, cx: &mut Context<'_>) {
        self.state.calm = true;
        self.state.release(true);
        self.listen(cx);
        for id in self.state.live.keys().copied().collect::<Vec<_>>() {
            if let Some((cookie, _, end)) = self.end(id)
                && end.announced
                && !is_stream(cookie)
            {
                end.goal = end.goal.max(end.accepted) + 1;
                self.pump(cx, id);
            }
        }
    }

    /// Cancels all timers.
    pub fn cancel_timers(&mut self, cx: &mut Context<'_>) {
        for (token, timer) in std::mem::take(&mut self.state.timers) {
            let cancelled = cx.cancel_timer(timer.id);
            self.state.check(cancelled, format_args!("timer {token} was gone before it fired"));
        }
    }

    /// Enters into the books what the streams of this node have done.
    pub fn note_flows(&mut self) {
        let times = self.state.times();
        for (id, flow) in &self.state.streams.handler.flows {
            let (cookie, side) = flow.who;
            let pair = self.audit.pairs.get_mut(&cookie).expect("it was opened");
            let was = &pair.ends[side].flow;
            let (more, news) = (flow.read - was.read, flow.end.is_some() && was.end.is_none());
            self.audit.streamed += more;
            let peer = &pair.ends[1 - side].flow;
            let possible = flow.read <= peer.written && (!news || peer.shut && flow.end == Some(peer.written));
            self.state.check(possible, format_args!("{id}: {flow:?} has read more or an end, of {peer:?}"));
            let end = &mut pair.ends[side];
            end.flow = flow.clone();
            if flow.closed || flow.shut && flow.hangups > 0 {
                end.closed.get_or_insert(times);
            }
        }
    }

    pub(super) fn any(&mut self) -> Option<ConnectionId> {
        let count = self.state.live.len();
        let nth = self.state.rng.index(count.max(1));
        self.state.live.keys().nth(nth).copied()
    }

    /// Opens a connection in the place of one that is gone.
    fn reopen(&mut self, cx: &mut Context<'_>) {
        if !self.state.calm && self.state.storm > 0 {
            self.state.storm -= 1;
            self.open(cx);
        }
    }

    /// Calls anything.
    fn mischief(&mut self, cx: &mut Context<'_>, about: Option<ConnectionId>) {
        if self.state.memories.budget > 0 {
            self.operate(cx, about);
        }
        if self.state.calm || self.state.work.kinds.is_empty() {
            return;
        }
        for _ in 0..self.state.rng.range(0..=self.state.work.calls) {
            if self.state.budget == 0 {
                return;
            }
            self.state.budget -= 1;
            let kind = self.state.rng.pick(&self.state.work.kinds);
            self.call(cx, kind, about);
        }
    }

    fn call(&mut self, cx: &mut Context<'_>, kind: Call, about: Option<ConnectionId>) {
        let any = self.any();
        let stream = any.and_then(|id| self.state.live.get(&id)).is_some_and(|&(cookie, _)| is_stream(cookie));
        match (kind, any) {
            // What is sent there would be bytes of the stream.
            (Call::Send | Call::SendBuffer | Call::TooLong, _) if stream => {}
            (Call::Send, Some(id)) => {
                self.send(cx, id, false);
            }
            (Call::SendBuffer, Some(id)) => {
                self.send(cx, id, true);
            }
            (Call::HoldBuffer, Some(id)) => {
                let held = self.state.buffers.len();
                if held > 2 {
                    let at = self.state.rng.index(held);
                    self.state.buffers.swap_remove(at);
                } else if let Some(buffer) = cx.buffer(id) {
                    self.state.buffers.push(buffer);
                }
            }
            // A connection's end is rare among what happens to it.
            (Call::CloseSelf, _) if self.state.rng.chance(200) => {
                if let Some(id) = about {
                    self.close(cx, id);
                }
            }
            (Call::CloseOther, Some(id)) if self.state.rng.chance(200) => self.close(cx, id),
            (Call::Stale, _) => self.touch_stale(cx),
            (Call::Connect, _) => self.open(cx),
            (Call::Relisten, _) => {
                self.close_listener(cx);
                if self.state.rng.chance(700) {
                    self.listen(cx);
                }
            }
            (Call::SetTimer, _) => self.set_timer(cx),
            (Call::CancelTimer, _) => {
                if let Some((token, timer)) = self.state.timers.pop_first() {
                    let (cancelled, again) = (cx.cancel_timer(timer.id), cx.cancel_timer(timer.id));
                    let kept = cancelled && !again;
                    self.state.check(kept, format_args!("cancelling timer {token}: {cancelled}, then {again}"));
                }
            }
            (Call::Release, _) => self.state.release(false),
            (Call::Look, Some(id)) => self.look(cx, id),
            (Call::TooLong, Some(id)) => {
                if let Some(max) = cx.largest_message(id) {
                    let result = cx.send(id, &vec![0; max as usize + 1]);
                    let kept = matches!(result, Err(SendErrorKind::TooLong { .. } | SendErrorKind::Closed));
                    self.state.check(kept, format_args!("a message too long for {id}: {result:?}"));
                }
            }
            (Call::Speak, _) => {
                let node = self.state.rng.index(self.state.max_messages.len());
                let said = self.state.threads.say(node, self.state.node);
                self.state.check(said.is_ok(), format_args!("{said:?}"));
            }
            (Call::Dawdle, _) => {
                let time = self.state.rng.skewed(1_000..=300 * MS);
                lock(&self.state.fabric).pause(self.state.node, time);
            }
            _ => {}
        }
    }

    fn touch_stale(&mut self, cx: &mut Context<'_>) {
        if self.state.stale.is_empty() {
            return;
        }
        let at = self.state.rng.index(self.state.stale.len());
        let id = self.state.stale[at];
        cx.close(id);
        cx.set_user(id, 1);
        let kept = cx.send(id, b"stale") == Err(SendErrorKind::Closed)
            && cx.buffer(id).is_none()
            && cx.user(id).is_none()
            && cx.max_message(id).is_none()
            && cx.peer_address(id).is_none()
            && cx.private_data(id).is_empty()
            && cx.writable(id) == 0;
        self.state.check(kept, format_args!("{id} is stale, and somebody answers"));
    }

    fn set_timer(&mut self, cx: &mut Context<'_>) {
        let token = self.state.next_timer;
        self.state.next_timer += 1;
        let delay = if self.state.rng.chance(200) { 0 } else { self.state.rng.skewed(1_000..=500 * MS) };
        let id = cx.set_timer(Duration::from_nanos(delay), token);
        let due = virtual_ns(cx.now()) + delay;
        let (_, paused) = self.state.times();
        self.state.timers.insert(token, Timer { id, due, paused });
    }

    fn look(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        let Some((cookie, _, end)) = self.end(id) else { return };
        let (announced, max) = (end.announced, end.max);
        let user = cx.user(id);
        let kept = user == Some(if announced { cookie } else { 0 });
        self.state.check(kept, format_args!("{id} has {user:?} attached, not {cookie:x}"));
        let now = cx.max_message(id);
        self.state.check(now == announced.then_some(max), format_args!("{id}: max_message is {now:?}, was {max}"));
        self.state.check(cx.peer_address(id).is_some(), format_args!("{id} has no peer"));
    }
}

impl Handler<Said> for Program<'_> {
    fn on_connect_request(&mut self, cx: &mut Context<'_>, request: ConnectRequest<'_>) -> Decision {
        let cookie = cookie_of(request.private_data);
        let Some((cookie, pair)) = cookie.and_then(|cookie| Some((cookie, self.audit.pairs.get_mut(&cookie)?))) else {
            self.state.check(false, format_args!("a request of nobody: {request:?}"));
            return Decision::Accept;
        };
        let answer = match self.state.rng.below(3) {
            0 => Vec::new(),
            _ => request_data(mix(cookie))[..8].to_vec(),
        };
        let refuse = !self.state.calm && self.state.rng.chance(self.state.work.refuse);
        pair.initiators.push(request.peer);
        pair.answers.push(answer.clone());
        pair.taken = !refuse;
        self.state.note(format_args!(
            "request {cookie:x} from {}: {}",
            request.peer,
            if refuse { "no" } else { "yes" }
        ));
        self.mischief(cx, None);
        if refuse {
            Decision::Reject(answer)
        } else if answer.is_empty() {
            Decision::Accept
        } else {
            Decision::AcceptWith(answer)
        }
    }

    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        if !self.state.live.contains_key(&conn) {
            let cookie = cookie_of(cx.private_data(conn)).filter(|cookie| self.audit.pairs.contains_key(cookie));
            let Some(cookie) = cookie else {
                return self.state.check(false, format_args!("{conn} is a connection of nobody"));
            };
            self.state.check(!self.state.stale.contains(&conn), format_args!("{conn} is not new"));
            self.state.live.insert(conn, (cookie, PASSIVE));
        }
        let node = self.state.node;
        let goal = self.state.rng.range(0..=self.state.work.messages);
        let Some((cookie, side, end)) = self.end(conn) else { return };
        let (again, for_us) = (end.announced, end.node == node);
        (end.id, end.announced, end.goal) = (Some(conn), true, if is_stream(cookie) { 0 } else { goal.max(1) });
        let closed = end.closed.is_some();
        let pair = &self.audit.pairs[&cookie];
        let peer = pair.ends[1 - side].node;
        let max = self.state.max_messages[node].min(self.state.max_messages[peer]) as usize;
        self.state.note(format_args!("on_connect {conn}: {cookie:x}, with node{peer}"));
        self.state.check(!again && for_us && !closed, format_args!("{conn}: on_connect again, or of another's"));
        self.state.check(cx.max_message(conn) == Some(max), format_args!("{conn}: max_message is not {max}"));
        if side == ACTIVE {
            let said = cx.private_data(conn).to_vec();
            self.state.check(pair.answers.contains(&said), format_args!("{conn}: the peer did not say {said:?}"));
            let bound = MS * (self.state.options.connect_timeout / MS + 1);
            self.state.check(self.state.is_within(pair.opened, bound), format_args!("{conn}: up too late"));
        }
        let both = pair.ends.iter().all(|end| end.announced);
        self.audit.connected += u64::from(both);
        if let Some((_, _, end)) = self.end(conn) {
            end.max = max;
        }
        cx.set_user(conn, cookie);
        if is_stream(cookie) {
            self.state.streams.handler.next = (cookie, side);
            Handler::<Said>::on_connect(&mut self.state.streams, cx, conn);
            self.note_flows();
        }
        self.pump(cx, conn);
        self.mischief(cx, Some(conn));
    }

    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        let Some((cookie, side, end)) = self.end(conn) else {
            return self.state.check(false, format_args!("{conn}: a message on a connection that is gone"));
        };
        let (sequence, open, max) = (end.received, end.announced && end.closed.is_none(), end.max);
        if is_stream(cookie) {
            self.state.note(format_args!("on_recv {conn}: {} bytes", message.len()));
            Handler::<Said>::on_recv(&mut self.state.streams, cx, conn, message);
            self.note_flows();
            return self.mischief(cx, Some(conn));
        }
        end.received += 1;
        self.audit.messages += 1;
        let from = (cookie, 1 - side);
        let peer = &mut self.audit.pairs.get_mut(&cookie).expect("it was opened").ends[from.1];
        let (sent, next) = (peer.accepted, peer.coming.pop_front());
        self.audit.arrived(from, next.map_or(0, |(sequence, _)| sequence));
        let expected = payload(cookie, 1 - side, sequence, max);
        self.state.note(format_args!("on_recv {conn}: {sequence}, {} bytes", message.len()));
        self.state.check(open, format_args!("{conn}: a message before it is up or after it was closed"));
        let due = next.is_some_and(|(_, arrival)| arrival == Arrival::Message);
        self.state.check(due && sequence < sent, format_args!("{conn}: message {sequence} of {sent}, not {next:?}"));
        self.state.check(*message == *expected, format_args!("{conn}: message {sequence} is another"));
        if !self.state.calm && self.state.rng.chance(self.state.work.detach) {
            self.state.kept.push((message.detach(), expected));
        }
        if self.state.calm || self.state.rng.chance(300) {
            self.pump(cx, conn);
        } else if self.state.storm > 0 && self.state.rng.chance(200) {
            self.close(cx, conn);
        }
        self.mischief(cx, Some(conn));
    }

    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        let Some((cookie, _, end)) = self.end(conn) else {
            return self.state.check(false, format_args!("{conn}: a completion on a connection that is gone"));
        };
        if is_stream(cookie) {
            return self.mischief(cx, Some(conn));
        }
        // Messages past one buffer end when they were fetched, all else in order.
        let stand = end.sends.remove(&send.sequence());
        let large = matches!(stand, Some(Stand::Message { large: true }));
        let fetched = |stand: &Stand| matches!(stand, Stand::Message { large: true });
        let in_order = large || end.sends.range(..send.sequence()).all(|(_, stand)| fetched(stand));
        let after_failure = outcome.is_sent() && end.failed;
        end.failed |= !outcome.is_sent();
        end.fetched_late += u64::from(large && end.closed.is_some());
        let tells = send.kind() == SendKind::Message || end.coming.iter().any(|&(nth, _)| nth == send.sequence());
        end.sent += u64::from(outcome.is_sent() && tells);
        self.state.note(format_args!("on_send_complete {conn}: {send:?} {outcome:?}"));
        self.state
            .check(stand.is_some() && in_order, format_args!("{conn}: {send:?} completed, out of order or again"));
        if let Some(Stand::Operation(operation)) = stand {
            self.operated(conn, send, operation, outcome);
        }
        self.state.check(!after_failure, format_args!("{conn}: {send:?} was sent after one that was not"));
        self.pump(cx, conn);
        self.mischief(cx, Some(conn));
    }

    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        let Some((cookie, _, end)) = self.end(conn) else {
            return self.state.check(false, format_args!("{conn}: writable, and gone"));
        };
        let (owed, for_slot) = (std::mem::take(&mut end.blocked), end.for_slot);
        let room = cx.writable(conn);
        self.state.note(format_args!("on_writable {conn}: room for {room}"));
        if is_stream(cookie) {
            Handler::<Said>::on_writable(&mut self.state.streams, cx, conn);
            self.note_flows();
            return self.mischief(cx, Some(conn));
        }
        self.state
            .check(owed && (room > 0 || for_slot), format_args!("{conn}: on_writable, owed: {owed}, room for {room}"));
        self.pump(cx, conn);
        self.mischief(cx, Some(conn));
    }

    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        self.state.note(format_args!("on_disconnect {conn}: {reason:?}"));
        let (now, _) = self.state.times();
        Handler::<Said>::on_disconnect(&mut self.state.streams, cx, conn, reason.clone());
        self.note_flows();
        let Some((cookie, side, end)) = self.end(conn) else {
            return self.state.check(false, format_args!("{conn}: a second on_disconnect"));
        };
        end.ended = Some(reason.to_string());
        end.over = Some(now);
        end.blocked = false;
        let (announced, open, closed) = (end.announced, end.sends.len(), end.closed);
        let (fetched, shut) = (end.fetched_late, end.flow.shut && !end.flow.closed);
        self.state.check(announced, format_args!("{conn}: on_disconnect of what was never up"));
        self.state.check(open == 0, format_args!("{conn}: on_disconnect with {open} sends not completed"));
        let pair = &self.audit.pairs[&cookie];
        let just = pair.judge_reason(side, &reason, &lock(&self.state.fabric));
        self.state.check(just, format_args!("{conn} ({cookie:x}, side {side}) ended: {reason:?}, of {pair:?}"));
        // A stream that was not closed waits for room to say its end, for as long as it takes.
        if let Some(closed) = closed.filter(|_| !shut) {
            // The last deadline is put off once when the node is behind.
            let bound = (1 + fetched) * self.state.options.close_timeout + 2 * self.state.options.flush_timeout;
            let bound = if is_stream(cookie) { bound + self.state.options.close_timeout } else { bound };
            self.state.check(self.state.is_within(closed, bound), format_args!("{conn}: closed too late"));
        }
        self.state.check(cx.writable(conn) == 0, format_args!("{conn}: gone, and writable"));
        let refused = cx.send(conn, b"late") == Err(SendErrorKind::Closed);
        self.state.check(refused, format_args!("{conn}: gone, and sends"));
        self.forget_regions_of((cookie, side));
        self.state.live.remove(&conn);
        cx.close(conn);
        self.reopen(cx);
        self.mischief(cx, None);
        self.state.stale.push(conn);
    }

    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        self.state.note(format_args!("on_connect_error {conn}: {error:?}"));
        let (now, _) = self.state.times();
        let Some((cookie, side, end)) = self.end(conn) else {
            return self.state.check(false, format_args!("{conn}: on_connect_error of nobody's"));
        };
        let announced = end.announced;
        end.ended = Some(error.to_string());
        end.over = Some(now);
        let kept = side == ACTIVE && !announced;
        self.state.check(kept, format_args!("{conn}: on_connect_error, side {side}, announced: {announced}"));
        let pair = &self.audit.pairs[&cookie];
        let just = pair.judge_error(&error, &lock(&self.state.fabric));
        self.state.check(just, format_args!("{conn}: could not be connected: {error:?}, of {pair:?}"));
        let bound = self.state.options.connect_timeout + 2 * self.state.options.flush_timeout;
        self.state.check(self.state.is_within(pair.opened, bound), format_args!("{conn}: given up too late"));
        self.state.live.remove(&conn);
        self.reopen(cx);
        self.mischief(cx, None);
        self.state.stale.push(conn);
    }

    fn on_immediate(&mut self, cx: &mut Context<'_>, conn: ConnectionId, immediate: Immediate) {
        self.immediate(conn, immediate.value, immediate.len);
        self.mischief(cx, Some(conn));
    }

    fn on_wake(&mut self, cx: &mut Context<'_>, message: Said) {
        self.state.note(format_args!("on_wake: {message:?}"));
        let kept = self.state.threads.heard(self.state.node, message);
        self.state.check(kept, format_args!("{message:?} is not what comes next"));
        self.mischief(cx, None);
    }

    fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, token: u64) {
        Handler::<Said>::on_timer(&mut self.state.streams, cx, timer, token);
        self.note_flows();
        if self.state.streams.handler.timer.take().is_none() {
            return;
        }
        let Some(set) = self.state.timers.remove(&token) else {
            return self.state.check(false, format_args!("timer {token} fired, and was not set"));
        };
        let now = virtual_ns(cx.now());
        let kept = set.id == timer && now >= set.due && self.state.is_within((set.due, set.paused), 0);
        self.state.note(format_args!("on_timer {token}"));
        self.state.check(kept, format_args!("timer {token} was due at {}, fired at {now}", set.due));
        self.mischief(cx, None);
    }
}
