//! Bytes into the message that goes out at the end of the turn.

use rdma_transport::wr::{SendOp, SgeList};

use crate::config::Framing;
use crate::connection::Phase;
use crate::core::Core;
use crate::error::SendErrorKind;
use crate::frame::{HEADER_LEN, Kind};
use crate::id::ConnectionId;

impl Core {
    /// Lets `fill` put bytes behind those of the last message that is not posted yet, or into a new one, and say how
    /// many; it gets room for at least one. Nothing is sent if it has none.
    pub(crate) fn append(
        &mut self,
        id: ConnectionId,
        fill: impl FnOnce(&mut [u8]) -> usize,
    ) -> Result<usize, SendErrorKind> {
        let c = self.connections.get_mut(id.0).filter(|c| c.phase == Phase::Open).ok_or(SendErrorKind::Closed)?;
        let device = self.devices[c.device].as_mut().ok_or(SendErrorKind::Closed)?;
        let start = c.header_len();
        let end = start + c.max_message.min(device.pool.stride() - HEADER_LEN);
        // The last work request of the chain is that of the last send.
        if let (Some(wr), Some(send)) = (c.chain.last_mut(), c.sends.back_mut())
            && let (SendOp::Send, Some(message)) = (wr.op, send.buffer.as_mut())
        {
            let written = wr.sges.total_len();
            let bytes = message.unposted(device.pool.slabs());
            let is_data = c.framing == Framing::Raw || bytes[0] == Kind::Data.raw();
            if is_data && (start + 1..end).contains(&written) {
                let len = fill(&mut bytes[written..end]).min(end - written);
                wr.sges = SgeList::one(device.pool.sge(message, written + len));
                self.stats.bytes_sent += len as u64;
                return Ok(len);
            }
        }
        if let Err(kind) = c.check_send(1) {
            return Err(self.refuse_send(id, kind));
        }
        let mut buffer = device.pool.take().expect("every send slot has a buffer promised");
        let len = fill(&mut device.pool.slabs().bytes_mut(&mut buffer)[start..end]).min(end - start);
        if len == 0 {
            device.pool.give(buffer);
        } else {
            self.queue_send(id, buffer, len);
        }
        Ok(len)
    }
}
