//! Stage 7: completions become callbacks.

use std::sync::Arc;

use rdma_transport::cm::DisconnectCause;
use rdma_transport::wc::{WcOpcode, WcStatus, WorkCompletion};

use crate::buffer::{Content, Home, Message, Returned};
use crate::config::Framing;
use crate::connection::{Ending, Phase};
use crate::context::Context;
use crate::core::Core;
use crate::error::{DisconnectReason, Outcome, PeerViolation};
use crate::frame::{HEADER_LEN, Header, Kind};
use crate::handler::{Handler, Immediate};
use crate::id::{ConnectionId, WorkId, WorkKind};
use crate::pool::{Buffer, Slabs};
use crate::region::Region;
use crate::rendezvous::Offer;

impl Core {
    /// Handles a batch of completions of one device.
    pub(crate) fn completions<M, H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        device: usize,
        batch: &[WorkCompletion],
    ) {
        self.stats.completions += batch.len() as u64;
        let Some((mut slabs, home)) = self.home(device) else { return };
        for wc in batch {
            let shared;
            let (work, wc) = match WorkId::unpack(wc.wr_id) {
                Some(work) => (work, wc),
                None => match self.shared_completion(device, wc) {
                    Some(Some((work, numbered))) => {
                        shared = numbered;
                        (work, &shared)
                    }
                    Some(None) => continue,
                    None => {
                        self.endpoint_completed(handler, wc);
                        continue;
                    }
                },
            };
            if self.has_its_turn(work.connection, wc) {
                self.completed(handler, work, wc, &mut slabs, &home);
            }
        }
    }

    /// What messages of a device borrow instead of the core: the callbacks get the core.
    pub(crate) fn home(&self, device: usize) -> Option<(Arc<Slabs>, Arc<Home>)> {
        let device = self.devices.get(device)?.as_ref()?;
        Some((Arc::clone(device.pool.slabs()), Arc::clone(&device.home)))
    }

    /// Handles one completion.
    #[inline]
    pub(crate) fn completed<M, H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        work: WorkId,
        wc: &WorkCompletion,
        slabs: &mut Arc<Slabs>,
        home: &Arc<Home>,
    ) {
        match work.kind {
            WorkKind::Send => self.send_completed(handler, work.connection, work.sequence, wc.status),
            WorkKind::Recv => self.received(handler, work, wc, slabs, home),
        }
    }

    fn send_completed<M, H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        id: ConnectionId,
        sequence: u16,
        status: WcStatus,
    ) {
        let ended = self.connections.get(id.0).and_then(|c| Some((c.sends_ended_by(sequence)?, c.answers > 0)));
        let Some((count, answers)) = ended else {
            log::warn!("{id}: a completion of a send that is not posted ({status})");
            self.stats.stale_completions += 1;
            return;
        };
        let last = if status.is_success() { Outcome::Sent } else { Outcome::Failed(status) };
        if answers {
            if let Some(c) = self.connections.get_mut(id.0) {
                c.note_ends(count, last);
            }
            while let Some(outcome) = self.connections.get(id.0).and_then(|c| c.sends.front()?.ended) {
                self.end_send(handler, id, outcome);
            }
        } else {
            for nth in 1..=count {
                // Sends before the one that failed were only not signaled.
                self.end_send(handler, id, if nth < count { Outcome::Sent } else { last });
            }
        }
        let Some(c) = self.connections.get_mut(id.0) else { return };
        self.endings_moved |= c.phase > Phase::Open;
        if c.blocked {
            self.writable.push(id);
        }
        let (failed, transferring) = (!status.is_success() && c.phase < Phase::Flushing, c.transfers.is_active());
        if transferring {
            // Their work requests may have waited for a place.
            self.mark_dirty(id);
        }
        if failed {
            self.work_request_failed(id, status);
        }
    }

    /// A work request of a connection that nobody ended: whatever ended it is about to be known.
    fn work_request_failed(&mut self, id: ConnectionId, status: WcStatus) {
        self.end(id, Ending::Disconnect(DisconnectReason::Transport(DisconnectCause::WorkRequest(status))));
        if let Some(c) = self.connections.get_mut(id.0) {
            c.provisional = status == WcStatus::Flushed && matches!(c.ending, Some(Ending::Disconnect(_)));
        }
    }

    /// Ends the oldest send of a connection and tells the user.
    pub(crate) fn end_send<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H, id: ConnectionId, outcome: Outcome) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        let Some(send) = c.pop_send() else { return };
        if let (Some(buffer), Some(device)) = (send.buffer, self.devices[c.device].as_mut()) {
            device.pool.give(buffer.done());
        }
        if send.holds {
            self.release_holds(id);
        }
        if send.piece > 0 && outcome.is_sent() {
            self.piece_arrived(handler, id, send.piece);
        }
        if let Some(send) = send.id {
            handler.on_send_complete(&mut Context { core: self }, id, send, outcome);
        }
    }

    fn received<M, H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        work: WorkId,
        wc: &WorkCompletion,
        slabs: &mut Arc<Slabs>,
        home: &Arc<Home>,
    ) {
        let id = work.connection;
        let Some(c) = self.connections.get_mut(id.0) else { return };
        let taken = match &mut c.share {
            None => c.receives.pop_front().map(crate::pool::Posted::done),
            Some(share) => {
                let shared = self.devices[c.device].as_mut().and_then(|device| device.shared.as_mut());
                let taken = shared.and_then(|shared| shared.take(work.sequence));
                if taken.is_some() {
                    share.take();
                    // One that is kept calls for another, too.
                    c.mark_dirty(&mut self.dirty);
                }
                taken
            }
        };
        let Some(buffer) = taken else {
            log::warn!("{id}: a completion of a receive that is not posted ({})", wc.status);
            self.stats.stale_completions += 1;
            return;
        };
        self.endings_moved |= c.phase > Phase::Open;
        if !wc.status.is_success() {
            let status = wc.status;
            if c.phase == Phase::Connecting && status == WcStatus::Flushed && c.share.is_none() {
                // The connection manager is about to say why there will be no connection.
                c.reposts.push(buffer);
                return;
            }
            let flushing = c.phase == Phase::Flushing || (c.phase == Phase::Connecting && status == WcStatus::Flushed);
            self.recycle(id, buffer);
            if !flushing {
                self.work_request_failed(id, status);
            }
            return;
        }
        c.last_heard = self.now;
        c.pinged = false;
        c.unheard = false;
        let c = match wc.invalidated {
            None => c,
            Some(key) => {
                self.invalidated(key);
                let Some(c) = self.connections.get_mut(id.0) else { return };
                c
            }
        };
        if let (WcOpcode::RecvWriteWithImmediate, Some(immediate)) = (wc.opcode, wc.immediate) {
            self.written(handler, id, buffer, Immediate { value: immediate, len: wc.byte_len });
            return;
        }
        let len = wc.byte_len as usize;
        if c.framing == Framing::Raw {
            if !c.announced && !c.active {
                self.announce(handler, id);
            }
            self.deliver(handler, id, buffer, 0, len, slabs, home);
            return;
        }
        let header = Header::parse(slabs.bytes(&buffer, len)).map(|(header, _)| header);
        let violation = match header {
            None => Some(PeerViolation::MalformedMessage),
            Some(_) if !c.rx.received() => Some(PeerViolation::CreditOverrun),
            Some(header) if c.tx.grant(header.grant).is_err() => Some(PeerViolation::InvalidGrant),
            // The hello opens a connection, and only that does.
            Some(header) if c.announced == (header.kind == Kind::Hello) => Some(PeerViolation::MalformedMessage),
            Some(_) => None,
        };
        if let Some(violation) = violation {
            self.violation(id, buffer, violation);
            return;
        }
        if c.blocked {
            self.writable.push(id);
        }
        if let (Some(share), Some(header)) = (&mut c.share, &header)
            && matches!(header.kind, Kind::Data | Kind::Offer | Kind::Immediate)
        {
            share.count();
        }
        match header.map(|header| header.kind) {
            Some(Kind::Data) => {
                if let Some(buffer) = self.hold_message(id, buffer, len) {
                    self.deliver(handler, id, buffer, HEADER_LEN, len, slabs, home);
                }
            }
            Some(Kind::Offer) => {
                let offered = Offer::parse(&slabs.bytes(&buffer, len)[HEADER_LEN..]);
                let taken = offered.map_or(Err(PeerViolation::MalformedMessage), |offer| self.offered(id, offer));
                match taken {
                    Ok(()) => self.recycle(id, buffer),
                    Err(violation) => self.violation(id, buffer, violation),
                }
            }
            Some(Kind::Fetched) => {
                let bytes = <[u8; 4]>::try_from(&slabs.bytes(&buffer, len)[HEADER_LEN..]);
                self.recycle(id, buffer);
                if !bytes.is_ok_and(|bytes| self.fetched(handler, id, u32::from_le_bytes(bytes))) {
                    self.violated(id, PeerViolation::MalformedMessage);
                }
            }
            Some(Kind::Immediate) => match Immediate::parse(&slabs.bytes(&buffer, len)[HEADER_LEN..]) {
                Some(immediate) => {
                    self.recycle(id, buffer);
                    self.deliver_immediate(handler, id, immediate);
                }
                None => self.violation(id, buffer, PeerViolation::MalformedMessage),
            },
            Some(Kind::Hello) => {
                self.recycle(id, buffer);
                self.announce(handler, id);
            }
            Some(Kind::Ping) => {
                c.owes.pong = true;
                self.recycle(id, buffer);
            }
            Some(Kind::Credit | Kind::Pong) | None => self.recycle(id, buffer),
        }
    }

    fn violation(&mut self, id: ConnectionId, buffer: Buffer, violation: PeerViolation) {
        self.recycle(id, buffer);
        self.violated(id, violation);
    }

    /// Ends the connection of a peer that has broken the protocol.
    pub(crate) fn violated(&mut self, id: ConnectionId, violation: PeerViolation) {
        if let Some(c) = self.connections.get(id.0) {
            log::warn!("{id}: {} broke the protocol: {violation}", c.peer);
        }
        self.end(id, Ending::Disconnect(DisconnectReason::PeerViolation(violation)));
    }

    /// A write with immediate data has used a receive: no header came with it.
    fn written<M, H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        id: ConnectionId,
        buffer: Buffer,
        immediate: Immediate,
    ) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        if c.framing == Framing::Credits && !(c.announced && c.rx.received()) {
            self.violation(id, buffer, PeerViolation::CreditOverrun);
            return;
        }
        let first = !c.announced && !c.active;
        if let Some(share) = &mut c.share {
            share.count();
        }
        self.recycle(id, buffer);
        if first {
            self.announce(handler, id);
        }
        self.deliver_immediate(handler, id, immediate);
    }

    fn deliver_immediate<M, H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        id: ConnectionId,
        immediate: Immediate,
    ) {
        if !self.hold_immediate(id, immediate) {
            self.tell_immediate(handler, id, immediate);
        }
    }

    pub(crate) fn tell_immediate<M, H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        id: ConnectionId,
        immediate: Immediate,
    ) {
        if self.connections.get(id.0).is_some_and(crate::connection::Connection::delivers) {
            handler.on_immediate(&mut Context { core: self }, id, immediate);
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of one message, used once")]
    fn deliver<M, H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        id: ConnectionId,
        buffer: Buffer,
        start: usize,
        end: usize,
        slabs: &mut Arc<Slabs>,
        home: &Arc<Home>,
    ) {
        let Some(c) = self.connections.get_mut(id.0).filter(|c| c.delivers()) else {
            self.recycle(id, buffer);
            return;
        };
        // In the user's hands from here on: what is detached may come back before the callback returns.
        c.detached += 1;
        self.stats.messages_received += 1;
        self.stats.bytes_received += (end - start) as u64;
        let mut slot = Some(buffer);
        let message =
            Message { connection: id, content: Content::Pooled { start, end, buffer: &mut slot, slabs, home } };
        handler.on_recv(&mut Context { core: self }, id, message);
        if let Some(buffer) = slot {
            self.take_home(home.pool, buffer, Some(id));
        }
        // The callback may have grown the pool.
        if let Some(device) = self.devices[home.pool].as_ref()
            && !Arc::ptr_eq(slabs, device.pool.slabs())
        {
            *slabs = Arc::clone(device.pool.slabs());
        }
    }

    /// Delivers a message that was held.
    pub(crate) fn deliver_pooled<M, H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        id: ConnectionId,
        buffer: Buffer,
        start: usize,
        end: usize,
    ) {
        let Some((mut slabs, home)) = self.connections.get(id.0).and_then(|c| self.home(c.device)) else { return };
        self.deliver(handler, id, buffer, start, end, &mut slabs, &home);
    }

    /// Delivers a message that was fetched.
    pub(crate) fn deliver_region<M, H: Handler<M> + ?Sized>(
        &mut self,
        handler: &mut H,
        id: ConnectionId,
        mut region: Option<Region>,
    ) {
        let Some(len) = region.as_ref().map(Region::len) else { return };
        if self.connections.get(id.0).is_some_and(crate::connection::Connection::delivers) {
            self.stats.messages_received += 1;
            self.stats.bytes_received += len as u64;
            let message = Message { connection: id, content: Content::Region(&mut region) };
            handler.on_recv(&mut Context { core: self }, id, message);
        }
    }

    /// A receive buffer is free again: posted at the end of the turn, or given back when nothing is posted any more.
    #[inline]
    pub(crate) fn recycle(&mut self, id: ConnectionId, buffer: Buffer) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        if let Some(share) = &mut c.share {
            share.give();
            if let Some(shared) = self.devices[c.device].as_mut().and_then(|device| device.shared.as_mut()) {
                shared.give(buffer);
            }
            self.mark_dirty(id);
            return;
        }
        if c.phase >= Phase::Draining && !c.exchanges() {
            if let Some(device) = self.devices[c.device].as_mut() {
                device.pool.give(buffer);
            }
            return;
        }
        c.reposts.push(buffer);
        c.mark_dirty(&mut self.dirty);
    }

    /// Tells users that there is room again: once per refusal.
    pub(crate) fn writables<M, H: Handler<M> + ?Sized>(&mut self, handler: &mut H) {
        if self.writable.is_empty() {
            return;
        }
        let mut candidates = std::mem::take(&mut self.writable);
        for id in candidates.drain(..) {
            let Some(c) = self.connections.get_mut(id.0) else { continue };
            if c.is_unblocked() && self.copied_bytes + c.blocked_copy <= self.config.transfer_memory {
                c.blocked = false;
                let stall = self.now.saturating_duration_since(c.blocked_since);
                c.stalled += stall;
                self.stats.stall_time += stall;
                handler.on_writable(&mut Context { core: self }, id);
            }
        }
        // Callbacks complete nothing, so nothing was added meanwhile: keep the capacity.
        if self.writable.is_empty() {
            self.writable = candidates;
        }
    }

    /// Stage 9: buffers that came home from the user.
    pub(crate) fn take_returned(&mut self) {
        while let Ok(returned) = self.returned.try_recv() {
            match returned {
                Returned::Buffer { pool, buffer, receive_of } => self.take_home(pool, buffer, receive_of),
                Returned::Region(key) => self.drop_region(key),
            }
        }
    }

    /// A buffer is back from the user's hands.
    pub(crate) fn take_home(&mut self, pool: usize, buffer: Buffer, receive_of: Option<ConnectionId>) {
        match receive_of.and_then(|id| self.connections.get_mut(id.0)) {
            Some(c) => {
                c.detached -= 1;
                let id = c.id;
                self.recycle(id, buffer);
            }
            None => {
                if let Some(device) = self.devices.get_mut(pool).and_then(Option::as_mut) {
                    // One of the shared queue that a connection that is gone had kept, or any in its place.
                    let buffer = match &mut device.shared {
                        Some(shared) if receive_of.is_some() => shared.give_astray(buffer),
                        _ => Some(buffer),
                    };
                    if let Some(buffer) = buffer {
                        device.pool.unlend();
                        device.pool.give(buffer);
                        self.expect_trim();
                    }
                }
            }
        }
    }
}
