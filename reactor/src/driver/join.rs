//! Messages in several buffers, put together for the program.

use super::Driver;
use crate::conn::effects::Fragments;
use crate::device::return_channel::{JoinedMessage, PoolId};
use crate::id::ConnectionId;
use crate::limits::HEADER_LEN;
use crate::memory::budget::Account;

impl Driver {
    /// Copies the parts of a message to memory of its own. Their buffers are free afterwards, if that memory is accounted for.
    pub(crate) fn join(&mut self, id: ConnectionId, mut fragments: Box<Fragments>) -> JoinedMessage {
        let (device, len) = (fragments.device, fragments.len);
        let accounted = self.take_fetched(id, len);
        let mut bytes = self.large.joins.take(len);
        let buffers = self.devices.buffers(device);
        let shared = self.table.get(id).is_some_and(|seat| seat.conn.receives().is_shared());
        let parts = if cfg!(planted = "last-fragment-forgotten") { fragments.parts.len() - 1 } else { usize::MAX };
        for (buffer, end) in fragments.parts.iter().take(parts) {
            bytes.extend_from_slice(&buffers.pool.slabs().bytes(buffer, *end as usize)[HEADER_LEN..]);
        }
        let mut receives = Vec::new();
        for (buffer, _) in fragments.parts.drain(..) {
            if accounted {
                buffers.free_receive(buffer, shared);
            } else {
                receives.push(buffer);
            }
        }
        if let Some(seat) = self.table.get_mut(id) {
            seat.conn.recycle(fragments);
        }
        JoinedMessage { bytes, receives }
    }

    /// The program has not kept a message.
    pub(crate) fn end_joined(
        &mut self,
        id: ConnectionId,
        device: usize,
        JoinedMessage { bytes, receives }: JoinedMessage,
    ) {
        if receives.is_empty() {
            self.settle(Account::Fetched, bytes.len(), Some(id));
        }
        let shared = self.table.get(id).is_some_and(|seat| seat.conn.receives().is_shared());
        for buffer in receives {
            self.devices.buffers(device).free_receive(buffer, shared);
        }
        self.large.joins.keep(bytes);
        self.expect_trim();
    }

    /// The program keeps a message that uses up so many receives.
    pub(crate) fn keep_joined(&mut self, id: ConnectionId, receives: usize) {
        for _ in 0..receives {
            self.keep_message(id);
        }
    }

    /// A message that the program kept comes back.
    pub(super) fn take_joined_home(&mut self, pool: PoolId, joined: JoinedMessage, of: Option<ConnectionId>) {
        let JoinedMessage { bytes, receives } = joined;
        if receives.is_empty() {
            self.settle(Account::Fetched, bytes.len(), of);
        }
        for buffer in receives {
            self.take_home(pool, buffer, of);
        }
        self.large.joins.keep(bytes);
        self.expect_trim();
    }
}
