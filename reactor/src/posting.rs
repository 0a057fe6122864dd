//! Stage 11: what the turn has gathered goes to the devices, and receives are posted again.

use rdma_transport::wr::{RecvWr, SendFlags, SgeList};

use crate::config::Framing;
use crate::connection::{Connection, Ending, Phase};
use crate::core::Core;
use crate::device::Device;
use crate::error::{DisconnectReason, Error};
use crate::frame::{HEADER_LEN, Header, Kind};
use crate::id::{ConnectionId, SendId, WorkId, WorkKind};
use crate::stats::Stats;

impl Core {
    #[inline]
    pub(crate) fn mark_dirty(&mut self, id: ConnectionId) {
        if let Some(c) = self.connections.get_mut(id.0) {
            c.mark_dirty(&mut self.dirty);
        }
    }

    /// Posts what the turn has gathered, if anything.
    #[inline]
    pub(crate) fn flush(&mut self) {
        if self.config.shared_receives.is_some() {
            self.settle_shared();
        }
        if !self.dirty.is_empty() {
            self.flush_connections();
        }
        if self.endpoints.are_dirty() {
            self.flush_endpoints();
        }
    }

    /// Receives first when the sends are to grant them.
    fn flush_connections(&mut self) {
        let mut dirty = std::mem::take(&mut self.dirty);
        for id in dirty.drain(..) {
            if let Some(c) = self.connections.get_mut(id.0) {
                c.dirty = false;
                self.flush_one(id);
            }
        }
        // Posting marks nothing dirty: the emptied list goes back with its capacity.
        if self.dirty.is_empty() {
            self.dirty = dirty;
        }
    }

    /// Takes the cork out, and posts what a connection has gathered now.
    pub(crate) fn uncork(&mut self, id: ConnectionId) {
        let Some(c) = self.connections.get_mut(id.0) else { return };
        c.corked = false;
        self.flush_one(id);
    }

    fn flush_one(&mut self, id: ConnectionId) {
        // As long as the peer has enough to go on with, what it waits for goes out first.
        let posted = if self.connections.get(id.0).is_some_and(Connection::owes_little) {
            self.post_sends(id).and_then(|()| self.post_receives(id))
        } else {
            self.post_receives(id).and_then(|()| {
                if self.connections.get(id.0).is_some_and(|c| c.transfers.is_active()) {
                    self.pump_transfers(id)?;
                }
                self.post_sends(id)
            })
        };
        if let Err(error) = posted {
            log::warn!("{id}: posting failed: {error}");
            self.end(id, Ending::Disconnect(DisconnectReason::Internal(error.to_string())));
            if let Some(c) = self.connections.get_mut(id.0) {
                // It may be the device that is going.
                c.provisional |= matches!(c.ending, Some(Ending::Disconnect(DisconnectReason::Internal(_))));
            }
        }
    }

    /// Queues the message that opens the peer's side, before anything the user sends.
    pub(crate) fn queue_hello(&mut self, id: ConnectionId) {
        self.queue_message(id, Kind::Hello, &[], None);
    }

    pub(crate) fn post_receives(&mut self, id: ConnectionId) -> Result<(), Error> {
        let Some(c) = self.connections.get_mut(id.0) else { return Ok(()) };
        if c.share.is_some() {
            return self.renew_share(id);
        }
        let (Some(qp), Some(device)) = (c.qp, self.devices[c.device].as_mut()) else { return Ok(()) };
        if c.reposts.is_empty() || (c.phase >= Phase::Draining && !c.exchanges()) {
            return Ok(());
        }
        self.receive_chain.clear();
        let size = device.pool.stride();
        let count = c.reposts.len();
        for buffer in c.reposts.drain(..) {
            let (posted, sge) = device.pool.post(buffer, size);
            let wr_id = WorkId { kind: WorkKind::Recv, connection: id, sequence: 0 }.pack();
            self.receive_chain.push(RecvWr { wr_id, sges: SgeList::one(sge) });
            c.receives.push_back(posted);
        }
        if let Err(failed) = self.provider.post_recv(qp, &self.receive_chain) {
            for _ in failed.posted..count {
                if let Some(posted) = c.receives.pop_back() {
                    c.reposts.push(posted.done());
                }
            }
            return Err(failed.error.into());
        }
        c.rx.posted(count as u32);
        Ok(())
    }

    fn post_sends(&mut self, id: ConnectionId) -> Result<(), Error> {
        let Some(c) = self.connections.get_mut(id.0) else { return Ok(()) };
        let (Some(qp), Some(device)) = (c.qp, self.devices[c.device].as_mut()) else { return Ok(()) };
        if c.phase > Phase::Draining || c.phase < Phase::Open || c.is_holding_back() {
            return Ok(());
        }
        if c.framing == Framing::Credits {
            let control = c.due_control();
            if let Some(kind) = control {
                queue_control(c, device, kind, &mut self.stats);
            }
            let message = c.sends.iter_mut().rev().find_map(|send| send.buffer.as_mut());
            if std::mem::take(&mut c.chained_message)
                && let Some(message) = message
            {
                // A message shows life, and brings the newest grant. A question stays one until it is asked.
                c.owes.pong = false;
                c.owes.ping &= control != Some(Kind::Ping);
                message.patch(device.pool.slabs(), 4, &c.rx.grant().to_le_bytes());
            }
        }
        let Some(last) = c.chain.last_mut() else { return Ok(()) };
        last.flags |= SendFlags::SIGNALED;
        c.unsignaled = 0;
        self.stats.doorbells += 1;
        match self.provider.post_send(qp, &c.chain) {
            Ok(()) => c.chain.clear(),
            Err(failed) => {
                c.chain.drain(..failed.posted);
                return Err(failed.error.into());
            }
        }
        Ok(())
    }
}

/// Adds a control message to a connection's chain. A credit and a slot are there: data never takes the last ones.
fn queue_control(c: &mut Connection, device: &mut Device, kind: Kind, stats: &mut Stats) {
    debug_assert!(c.has_room_for_control());
    stats.pings += u64::from(kind == Kind::Ping);
    stats.credit_updates += u64::from(kind == Kind::Credit);
    push_message(c, device, kind, &[], None);
}

/// Adds a message of ours to a connection's chain; the newest grant is put in when it is posted.
pub(crate) fn push_message(c: &mut Connection, device: &mut Device, kind: Kind, payload: &[u8], name: Option<SendId>) {
    let Some(mut buffer) = device.pool.take() else { return };
    let bytes = device.pool.slabs().bytes_mut(&mut buffer);
    bytes[..HEADER_LEN].copy_from_slice(&Header { kind, grant: c.rx.told() }.emit());
    bytes[HEADER_LEN..HEADER_LEN + payload.len()].copy_from_slice(payload);
    let (posted, sge) = device.pool.post(buffer, HEADER_LEN + payload.len());
    c.push_send(posted, sge, name);
}
