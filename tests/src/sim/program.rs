//! The simulated program on a node. It opens connections, sends, keeps messages and closes. It makes any call in any callback, and
//! checks every callback.

use std::collections::BTreeMap;
use std::fmt::Arguments;
use std::fs::File;
use std::time::Duration;

use rdma_reactor::stream::Streams;
use rdma_reactor::{
    Blocked, ConnectOptions, ConnectionId, Context, DetachedMessage, Interest, IoId, ListenerId, SendBuffer,
    SendErrorKind, SendKind, TimerId,
};

use super::audit::{ACTIVE, Arrival, Audit, End, PASSIVE, Pair, STREAM, Stand, is_stream, payload, request_data};
use super::fabric::{Shared, lock};
use super::flow::Flows;
use super::poller::virtual_ns;
use super::regions::Memories;
use super::rng::{Rng, mix};
use super::swarm::{Call, MS, NodeOptions, WorkOptions};
use super::tcp::address;
use super::threads::Threads;

/// The port on which each node listens.
const PORT: u16 = 7471;
/// The smallest window, in messages, that must have room for a message of the program besides the
/// reactor's own early messages.
const LEAST_WINDOW: u32 = 8;
/// The largest accepted delay, in ns, of a timer or of another action with a deadline. The time for which the node is paused is not part of
/// the delay.
const LATE: u64 = 100 * MS;

#[derive(Debug)]
pub(super) struct Timer {
    pub(super) id: TimerId,
    pub(super) due: u64,
    pub(super) paused: u64,
}

/// Returns true if a node uses quiet sends. One node in four does.
pub(super) fn is_quiet(seed: u64, node: usize) -> bool {
    Rng::new(mix(seed) ^ node as u64, "quiet").index(4) == 0
}

/// The state of the program on one node.
#[derive(Debug)]
pub struct State {
    pub(super) node: usize,
    pub(super) options: NodeOptions,
    pub(super) work: WorkOptions,
    /// True if the reactor does not call `on_send_complete` for copied messages.
    pub(super) quiet: bool,
    /// The length of the longest message that each node accepts.
    pub(super) max_messages: Vec<u32>,
    /// The number of receives that each node grants at the start of a connection; 0 if that number varies.
    pub(super) windows: Vec<u32>,
    pub(super) rng: Rng,
    pub(super) fabric: Shared,
    pub(super) threads: Threads,
    pub(super) memories: Memories,
    /// The byte streams of the node.
    pub streams: Streams<Flows>,
    /// The connections whose last callback was not called yet. Each has its cookie and its side.
    pub live: BTreeMap<ConnectionId, (u64, usize)>,
    pub(super) stale: Vec<ConnectionId>,
    listener: Option<ListenerId>,
    /// The descriptors that the program has registered.
    pub(super) watched: BTreeMap<IoId, File>,
    pub(super) timers: BTreeMap<u64, Timer>,
    next_timer: u64,
    next_cookie: u64,
    pub(super) kept: Vec<(DetachedMessage, Vec<u8>)>,
    buffers: Vec<SendBuffer>,
    budget: u32,
    /// The number of connections that must still be opened, each to replace one that ends.
    pub(super) storm: u32,
    /// True if there are no more random calls, and only the remaining messages are sent.
    pub calm: bool,
}

/// Access to the program's state during a callback.
#[derive(Debug)]
pub struct Program<'a> {
    /// The state of this node.
    pub state: &'a mut State,
    /// The expected state of all nodes.
    pub audit: &'a mut Audit,
}

impl State {
    /// Returns the state of a node whose program has done nothing yet.
    #[must_use]
    pub fn new(
        seed: u64,
        node: usize,
        nodes: &[NodeOptions],
        work: &WorkOptions,
        fabric: Shared,
        threads: Threads,
    ) -> Self {
        let linger = Duration::from_nanos(nodes[node].close_timeout);
        Self {
            streams: Streams::new(Flows::new(seed, node, work, Shared::clone(&fabric))).linger(linger),
            threads,
            memories: Memories::new(work.operations),
            node,
            options: nodes[node].clone(),
            work: work.clone(),
            quiet: is_quiet(seed, node),
            max_messages: nodes.iter().map(|options| options.max_message).collect(),
            windows: vec![0; nodes.len()],
            rng: Rng::new(mix(seed) ^ node as u64, "program"),
            fabric,
            live: BTreeMap::new(),
            stale: Vec::new(),
            listener: None,
            watched: BTreeMap::new(),
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

    /// Returns the virtual time, and the total time for which this node was paused.
    pub(super) fn times(&self) -> (u64, u64) {
        let fabric = lock(&self.fabric);
        (fabric.now(), fabric.paused(self.node))
    }

    /// Returns true if at most `bound` ns have passed since the times `since`. The time for which the node was paused is not counted.
    pub(super) fn is_within(&self, since: (u64, u64), bound: u64) -> bool {
        let (now, paused) = self.times();
        now <= since.0 + bound + LATE + (paused - since.1)
    }

    /// Drops some of the messages that the program has kept, or all of them.
    pub fn release(&mut self, all: bool) {
        let count = if all { self.kept.len() } else { self.rng.index(self.kept.len() + 1) };
        for _ in 0..count {
            let at = self.rng.index(self.kept.len());
            let (message, expected) = self.kept.swap_remove(at);
            self.check(*message == *expected, format_args!("a kept message of {} has changed", message.connection()));
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

    /// Starts to listen, unless the node already does.
    pub fn listen(&mut self, cx: &mut Context<'_>) {
        if self.state.listener.is_none() {
            match cx.listen(address(self.state.node, PORT)) {
                Ok(listener) => {
                    self.state.listener = Some(listener);
                    lock(&self.state.fabric).note_listening(self.state.node, true);
                }
                Err(error) => self.state.check(false, format_args!("listening failed: {error}")),
            }
        }
    }

    /// Stops listening.
    pub fn close_listener(&mut self, cx: &mut Context<'_>) {
        if let Some(listener) = self.state.listener.take() {
            cx.listeners().close(listener);
            lock(&self.state.fabric).note_listening(self.state.node, false);
            self.state.check(
                cx.listeners().local_address(listener).is_none(),
                format_args!("a closed listener has an address"),
            );
        }
    }

    /// Opens a connection to a random node. In rare cases, this is the node itself.
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

    /// Closes a connection, and records the time.
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

    /// Sends the next message of a connection. Returns true if the reactor has accepted the message.
    fn send(&mut self, cx: &mut Context<'_>, id: ConnectionId, in_place: bool) -> bool {
        let quiet = self.state.quiet;
        let Some((cookie, side, end)) = self.end(id) else { return false };
        let (sequence, max, next) = (end.accepted, end.max, end.posted);
        let open = end.closed.is_none();
        let usable = open && end.announced;
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
            // The connection may already be up, before the program is notified. A large message may also be refused because the memory for
            // large messages is used up.
            Err(SendErrorKind::WouldBlock(_)) => open && (room == 0 || usable && bytes.len() > max),
            // The connection may already be ending, before the program is notified.
            Err(SendErrorKind::Closed) => room == 0,
            _ => false,
        };
        self.state.check(expected, format_args!("send {sequence} on {id}: {result:?} with room for {room}"));
        // While a peer takes no turns, the messages that the reactor itself sends must leave room
        // for the first message of the program.
        let window = self.state.windows[self.audit.pairs[&cookie].ends[1 - side].node];
        let Some((_, _, end)) = self.end(id) else { return false };
        let unused = window >= LEAST_WINDOW && end.posted == 0 && end.heard() == 0;
        if unused && result == Err(SendErrorKind::WouldBlock(Blocked::Window)) {
            self.state.check(false, format_args!("{id}: no room for the first message"));
            return false;
        }
        match result {
            Ok(_) => {
                end.accepted += 1;
                let sequence = if quiet { end.pass() } else { end.take(Stand::Message { large: bytes.len() > max }) };
                end.coming.push_back((sequence, Arrival::Message));
            }
            Err(SendErrorKind::WouldBlock(_)) => end.refused(false),
            _ => {}
        }
        result.is_ok()
    }

    /// Sends the remaining messages of a connection, until one is refused. While the program still makes random calls, sends only a random
    /// number of the messages.
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

    /// Ends the random calls. Sends the remaining messages of each connection, and one additional message on each connection.
    pub fn settle(&mut self, cx: &mut Context<'_>) {
        self.state.calm = true;
        self.state.release(true);
        self.listen(cx);
        for id in self.state.live.keys().copied().collect::<Vec<_>>() {
            let end = self.end(id).filter(|(cookie, _, end)| end.announced && !is_stream(*cookie));
            if let Some((_, _, end)) = end {
                end.goal = end.goal.max(end.accepted) + 1;
                self.pump(cx, id);
            }
        }
    }

    /// Cancels all timers.
    pub fn cancel_timers(&mut self, cx: &mut Context<'_>) {
        for (token, timer) in std::mem::take(&mut self.state.timers) {
            let cancelled = cx.timers().cancel(timer.id);
            self.state.check(cancelled, format_args!("timer {token} did not exist before it fired"));
        }
    }

    /// Copies the state of this node's streams to the audit.
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

    /// Opens a connection in place of one that has ended, if connections of the storm must still be replaced.
    pub(super) fn reopen(&mut self, cx: &mut Context<'_>) {
        if !self.state.calm && self.state.storm > 0 {
            self.state.storm -= 1;
            self.open(cx);
        }
    }

    /// Makes a random call. `about` is the connection of the current callback.
    pub(super) fn mischief(&mut self, cx: &mut Context<'_>, about: Option<ConnectionId>) {
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
            // On the connection of a stream, a message would become a part of the stream, so none is sent.
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
            // The program rarely closes the connection of the callback, so that most connections do some work before they end.
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
                    let (cancelled, again) = (cx.timers().cancel(timer.id), cx.timers().cancel(timer.id));
                    let kept = cancelled && !again;
                    self.state.check(kept, format_args!("cancelling timer {token}: {cancelled}, then {again}"));
                }
            }
            (Call::Release, _) => self.state.release(false),
            (Call::Look, Some(id)) => self.look(cx, id),
            (Call::TooLong, Some(id)) => {
                if let Some(max) = cx.connection(id).max_message() {
                    let result = cx.send(id, &vec![0; max as usize + 1]);
                    let kept = matches!(result, Err(SendErrorKind::TooLong { .. } | SendErrorKind::Closed));
                    self.state.check(kept, format_args!("a message too long for {id}: {result:?}"));
                }
            }
            (Call::Watch, _) => self.watch(cx),
            (Call::Speak, _) => {
                let node = self.state.rng.index(self.state.max_messages.len());
                let said = self.state.threads.say(node, self.state.node);
                self.state.check(said.is_ok(), format_args!("{said:?}"));
            }
            (Call::Dawdle, _) => {
                let mut fabric = lock(&self.state.fabric);
                match fabric.slowness.clone() {
                    None => {
                        let time = self.state.rng.skewed(1_000..=300 * MS);
                        fabric.pause(self.state.node, time);
                    }
                    Some(slowness) if slowness.affects(self.state.node) => {
                        let time = self.state.rng.skewed(1_000..=slowness.longest);
                        fabric.stall(time);
                    }
                    Some(_) => {}
                }
            }
            _ => {}
        }
    }

    /// Registers a descriptor of the program, or deregisters the oldest one.
    fn watch(&mut self, cx: &mut Context<'_>) {
        if self.state.watched.len() < 2 && self.state.rng.chance(700) {
            // Only the number of the descriptor matters; nothing reads the file.
            let file = File::open("/dev/null").expect("/dev/null");
            let io = cx.io().register(&file, Interest::READABLE);
            self.state.note(format_args!("watches {io:?}"));
            match io {
                Ok(io) => _ = self.state.watched.insert(io, file),
                Err(error) => self.state.check(false, format_args!("watching: {error}")),
            }
        } else if let Some((io, _)) = self.state.watched.pop_first() {
            let (first, again) = (cx.io().deregister(io), cx.io().deregister(io));
            self.state.check(first && !again, format_args!("watching {io:?} no more: {first}, then {again}"));
        }
    }

    fn touch_stale(&mut self, cx: &mut Context<'_>) {
        if self.state.stale.is_empty() {
            return;
        }
        let at = self.state.rng.index(self.state.stale.len());
        let id = self.state.stale[at];
        cx.close(id);
        cx.connection(id).set_user(1);
        let kept = cx.send(id, b"stale") == Err(SendErrorKind::Closed)
            && cx.buffer(id).is_none()
            && cx.connection(id).user().is_none()
            && cx.connection(id).buffer_size().is_none()
            && cx.connection(id).peer_address().is_none()
            && cx.connection(id).private_data().is_empty()
            && cx.writable(id) == 0;
        self.state.check(kept, format_args!("{id} is stale, but a call succeeded"));
    }

    fn set_timer(&mut self, cx: &mut Context<'_>) {
        let token = self.state.next_timer;
        self.state.next_timer += 1;
        let delay = if self.state.rng.chance(200) { 0 } else { self.state.rng.skewed(1_000..=500 * MS) };
        let id = cx.timers().set(Duration::from_nanos(delay), token);
        let due = virtual_ns(cx.now()) + delay;
        let (_, paused) = self.state.times();
        self.state.timers.insert(token, Timer { id, due, paused });
    }

    fn look(&mut self, cx: &mut Context<'_>, id: ConnectionId) {
        let Some((cookie, _, end)) = self.end(id) else { return };
        let (announced, max) = (end.announced, end.max);
        let user = cx.connection(id).user();
        let kept = user == Some(if announced { cookie } else { 0 });
        self.state.check(kept, format_args!("{id} has {user:?} attached, not {cookie:x}"));
        let now = cx.connection(id).buffer_size();
        self.state.check(now == announced.then_some(max), format_args!("{id}: max_message is {now:?}, was {max}"));
        self.state.check(cx.connection(id).peer_address().is_some(), format_args!("{id} has no peer"));
    }
}
