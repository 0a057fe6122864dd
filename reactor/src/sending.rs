//! What a program sends: checked, copied to a pooled buffer if need be, and queued for the end of the turn.

use std::sync::Arc;

use crate::buffer::SendBuffer;
use crate::config::Framing;
use crate::connection::Phase;
use crate::core::Core;
use crate::error::{SendError, SendErrorKind};
use crate::frame::{HEADER_LEN, Header, Kind};
use crate::id::{ConnectionId, SendId, SendKind};
use crate::pool::Buffer;
use crate::posting::push_message;

impl Core {
    #[inline]
    pub(crate) fn send(&mut self, id: ConnectionId, payload: &[u8]) -> Result<SendId, SendErrorKind> {
        let c = self.connections.get_mut(id.0).ok_or(SendErrorKind::Closed)?;
        if let Err(kind) = c.check_send(payload.len()) {
            let large = payload.len() as u64 <= c.largest_message && matches!(kind, SendErrorKind::TooLong { .. });
            return if large { self.send_large(id, payload) } else { Err(self.refuse_send(id, kind)) };
        }
        let device = self.devices[c.device].as_mut().ok_or(SendErrorKind::Closed)?;
        let Some(mut buffer) = device.pool.take() else {
            debug_assert!(false, "every send slot has a buffer promised");
            return Err(SendErrorKind::WouldBlock);
        };
        let header = c.header_len();
        device.pool.slabs().bytes_mut(&mut buffer)[header..header + payload.len()].copy_from_slice(payload);
        Ok(self.queue_send(id, buffer, payload.len()))
    }

    pub(crate) fn buffer(&mut self, id: ConnectionId) -> Option<SendBuffer> {
        let c = self.connections.get(id.0).filter(|c| c.phase == Phase::Open)?;
        let device = self.devices[c.device].as_mut()?;
        let buffer = device.take_for_user(&mut *self.provider)?;
        Some(SendBuffer {
            len: 0,
            capacity: c.max_message.min(device.pool.stride() - HEADER_LEN),
            buffer: Some(buffer),
            slabs: Arc::clone(device.pool.slabs()),
            home: Arc::clone(&device.home),
        })
    }

    #[allow(clippy::result_large_err)]
    pub(crate) fn send_buffer(&mut self, id: ConnectionId, buffer: SendBuffer) -> Result<SendId, SendError> {
        let Some(c) = self.connections.get_mut(id.0) else {
            return Err(SendError { kind: SendErrorKind::Closed, buffer });
        };
        // Of another reactor, or of a device this connection is not on: its memory is not registered there.
        let ours = buffer.home.channel.same_channel(&self.return_to) && buffer.home.pool == c.device;
        let check = if ours { c.check_send(buffer.len) } else { Err(SendErrorKind::Closed) };
        if let Err(kind) = check {
            let kind = self.refuse_send(id, kind);
            return Err(SendError { kind, buffer });
        }
        let framing = c.framing;
        let Some(device) = self.devices[c.device].as_mut() else {
            return Err(SendError { kind: SendErrorKind::Closed, buffer });
        };
        let slabs = Arc::clone(device.pool.slabs());
        device.pool.unlend();
        match buffer.into_parts() {
            Some((mut buffer, len)) => {
                if framing == Framing::Raw {
                    // The room kept for the header is not wanted: the payload starts the message.
                    slabs.bytes_mut(&mut buffer).copy_within(HEADER_LEN..HEADER_LEN + len, 0);
                }
                Ok(self.queue_send(id, buffer, len))
            }
            None => unreachable!("a SendBuffer holds its buffer until it is dropped"),
        }
    }

    /// Notes that a message was not taken.
    pub(crate) fn refuse_send(&mut self, id: ConnectionId, kind: SendErrorKind) -> SendErrorKind {
        if kind == SendErrorKind::WouldBlock { self.would_block(id, false) } else { kind }
    }

    /// Notes that a send was refused for want of room. `for_slot`: it needs no credit.
    pub(crate) fn would_block(&mut self, id: ConnectionId, for_slot: bool) -> SendErrorKind {
        if let Some(c) = self.connections.get_mut(id.0) {
            c.blocked_for_slot = for_slot && (!c.blocked || c.blocked_for_slot);
            c.blocked_copy = 0;
            c.block(self.now);
            if c.corked {
                // What is held back goes: room comes of nothing else.
                self.mark_dirty(id);
            }
        }
        self.stats.send_stalls += 1;
        SendErrorKind::WouldBlock
    }

    /// Queues a message of ours with a short payload. The caller knows of a credit and a place for it.
    pub(crate) fn queue_message(&mut self, id: ConnectionId, kind: Kind, payload: &[u8], name: Option<SendId>) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        let Some(device) = self.devices[c.device].as_mut() else { return };
        push_message(c, device, kind, payload, name);
        self.mark_dirty(id);
    }

    /// Queues a data message whose payload is in place.
    #[inline]
    pub(crate) fn queue_send(&mut self, id: ConnectionId, mut buffer: Buffer, len: usize) -> SendId {
        let c = self.connections.get_mut(id.0).expect("checked by the caller");
        let device = self.devices[c.device].as_mut().expect("an open connection has a device");
        if c.framing == Framing::Credits {
            let header = Header { kind: Kind::Data, grant: c.rx.told() };
            device.pool.slabs().bytes_mut(&mut buffer)[..HEADER_LEN].copy_from_slice(&header.emit());
        }
        let send = c.next_send_id(SendKind::Message);
        let (posted, sge) = device.pool.post(buffer, c.header_len() + len);
        c.push_send(posted, sge, Some(send));
        self.stats.messages_sent += 1;
        self.stats.bytes_sent += len as u64;
        self.mark_dirty(id);
        send
    }

    pub(crate) fn writable(&self, id: ConnectionId) -> usize {
        let Some(c) = self.connections.get(id.0).filter(|c| c.phase == Phase::Open) else { return 0 };
        match c.framing {
            Framing::Credits => {
                c.free_slots().min((c.tx.available_for_data() as usize).saturating_sub(c.transfers.credits()))
            }
            Framing::Raw => c.free_slots(),
        }
    }

    /// Whether a send would have to wait for room; one that has failed already does not.
    pub(crate) fn must_wait(&self, id: ConnectionId) -> bool {
        self.connections.get(id.0).is_some_and(|c| match c.phase {
            Phase::Open => !c.has_room(),
            phase => phase < Phase::Open,
        })
    }
}
