//! The callbacks of the program on a node. Each callback compares its arguments with the audit.

use std::os::fd::AsRawFd;

use rdma_reactor::{
    ConnectError, ConnectRequest, ConnectionId, Context, Decision, DisconnectReason, Handler, Immediate, IoId, Message,
    Outcome, Readiness, SendErrorKind, SendId, SendKind, TimerId,
};

use super::audit::payload;
use super::audit::{ACTIVE, Arrival, PASSIVE, Stand, cookie_of, is_stream, request_data};
use super::fabric::lock;
use super::poller::virtual_ns;
use super::program::Program;
use super::rng::mix;
use super::swarm::MS;
use super::threads::Said;

impl Handler<Said> for Program<'_> {
    fn on_connect_request(&mut self, cx: &mut Context<'_>, request: ConnectRequest<'_>) -> Decision {
        let cookie = cookie_of(request.private_data);
        let Some((cookie, pair)) = cookie.and_then(|cookie| Some((cookie, self.audit.pairs.get_mut(&cookie)?))) else {
            self.state.check(false, format_args!("a request from no node: {request:?}"));
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
            let cookie =
                cookie_of(cx.connection(conn).private_data()).filter(|cookie| self.audit.pairs.contains_key(cookie));
            let Some(cookie) = cookie else {
                return self.state.check(false, format_args!("{conn} is a connection that no node opened"));
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
        let apart = lock(&self.state.fabric).are_apart([node, peer]);
        self.state.check(!apart, format_args!("{conn}: on_connect, and one side requires shared memory in vain"));
        let max = self.state.max_messages[node].min(self.state.max_messages[peer]) as usize;
        self.state.note(format_args!("on_connect {conn}: {cookie:x}, with node{peer}"));
        self.state.check(!again && for_us && !closed, format_args!("{conn}: on_connect again, or for another node"));
        self.state
            .check(cx.connection(conn).buffer_size() == Some(max), format_args!("{conn}: max_message is not {max}"));
        if side == ACTIVE {
            let said = cx.connection(conn).private_data().to_vec();
            self.state.check(pair.answers.contains(&said), format_args!("{conn}: the peer did not say {said:?}"));
            let bound = MS * (self.state.options.connect_timeout / MS + 1);
            self.state.check(self.state.is_within(pair.opened, bound), format_args!("{conn}: up too late"));
        }
        let both = pair.ends.iter().all(|end| end.announced);
        self.audit.connected += u64::from(both);
        if let Some((_, _, end)) = self.end(conn) {
            end.max = max;
        }
        cx.connection(conn).set_user(cookie);
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
            return self.state.check(false, format_args!("{conn}: a message on a connection that does not exist"));
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
        self.state.check(open, format_args!("{conn}: a message before on_connect or after the close"));
        let due = next.is_some_and(|(_, arrival)| arrival == Arrival::Message);
        self.state.check(due && sequence < sent, format_args!("{conn}: message {sequence} of {sent}, not {next:?}"));
        self.state.check(*message == *expected, format_args!("{conn}: message {sequence} has other bytes"));
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
            return self.state.check(false, format_args!("{conn}: a completion on a connection that does not exist"));
        };
        if is_stream(cookie) {
            return self.mischief(cx, Some(conn));
        }
        // A large message completes when the peer has fetched it. All other sends must complete in order.
        let stand = end.sends.remove(&send.sequence());
        let large = matches!(stand, Some(Stand::Message { large: true }));
        let fetched = |stand: &Stand| matches!(stand, Stand::Message { large: true });
        let in_order = large || end.sends.range(..send.sequence()).all(|(_, stand)| fetched(stand));
        let after_failure = outcome.is_sent() && end.failed && !large;
        end.failed |= !outcome.is_sent();
        end.fetched_late += u64::from(large && end.closed.is_some());
        let tells = send.kind() == SendKind::Message || end.coming.iter().any(|&(nth, _)| nth == send.sequence());
        if outcome.is_sent() && tells {
            end.sent.insert(send.sequence());
        } else if large {
            end.unfetched = Some(end.unfetched.map_or(send.sequence(), |first| first.min(send.sequence())));
        }
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
        self.state.check(announced, format_args!("{conn}: on_disconnect without on_connect"));
        self.state.check(open == 0, format_args!("{conn}: on_disconnect with {open} sends not completed"));
        let pair = &self.audit.pairs[&cookie];
        let just = pair.judge_reason(side, &reason, &lock(&self.state.fabric));
        self.state.check(just, format_args!("{conn} ({cookie:x}, side {side}) ended: {reason:?}, of {pair:?}"));
        // A stream may be shut down for writing without being closed. Such a stream may need a credit to send the end of its direction. The
        // wait for this credit has no time limit, so this check excludes such a stream.
        if let Some(closed) = closed.filter(|_| !shut) {
            // If a turn of the node is late, the reactor postpones its last deadline once. So the bound includes two flush timeouts in
            // addition to the close timeout.
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
            return self.state.check(false, format_args!("{conn}: on_connect_error of no node"));
        };
        let announced = end.announced;
        end.ended = Some(error.to_string());
        end.over = Some(now);
        let kept = side == ACTIVE && !announced;
        self.state.check(kept, format_args!("{conn}: on_connect_error, side {side}, announced: {announced}"));
        // On a connection of the node to itself, the passive end may have given way in this turn.
        lock(&self.state.fabric).note_dropped(self.state.node, &cx.stats().connections);
        let pair = &self.audit.pairs[&cookie];
        let just = pair.judge_error(&error, &lock(&self.state.fabric));
        let apart = lock(&self.state.fabric).are_apart(pair.ends.each_ref().map(|end| end.node));
        self.audit.apart +=
            u64::from(apart && matches!(error, ConnectError::Rejected { .. } | ConnectError::Transport(_)));
        let pair = &self.audit.pairs[&cookie];
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

    fn on_io_ready(&mut self, cx: &mut Context<'_>, io: IoId, _: Readiness) {
        let Some(file) = self.state.watched.get(&io) else {
            return self.state.check(false, format_args!("{io:?} is ready, but not watched"));
        };
        let bytes = lock(&self.state.fabric).read_own(self.state.node, file.as_raw_fd());
        self.state.note(format_args!("on_io_ready {io:?}: {bytes}"));
        self.mischief(cx, None);
    }

    fn on_wake(&mut self, cx: &mut Context<'_>, message: Said) {
        self.state.note(format_args!("on_wake: {message:?}"));
        let kept = self.state.threads.heard(self.state.node, message);
        self.state.check(kept, format_args!("{message:?} is not the next one"));
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
