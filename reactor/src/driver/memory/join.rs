//! Joins the parts of messages that arrived in several buffers. The program receives such a message in one block of memory.

use crate::conn::effects::Fragments;
use crate::device::return_channel::{JoinedMessage, PoolId};
use crate::driver::Driver;
use crate::id::ConnectionId;
use crate::limits::HEADER_LEN;
use crate::memory::budget::MemoryUse;

impl Driver {
    /// Copies the fragments of a message to one block of memory. If the memory budget covers this block, the receives of the fragments are
    /// freed now. Otherwise the receives stay occupied until the program releases the message. This limits the memory that a peer can use.
    pub(crate) fn join(&mut self, id: ConnectionId, mut fragments: Box<Fragments>) -> JoinedMessage {
        let (device, len) = (fragments.device, fragments.len);
        let accounted = self.take_fetched(id, len);
        let mut bytes = self.large.joins.take(len);
        let buffers = self.devices.buffers(device);
        let shared = self.table.get(id).is_some_and(|slot| slot.conn.receives().is_shared());
        let parts = if crate::planted("last-fragment-forgotten") { fragments.parts.len() - 1 } else { usize::MAX };
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
        if let Some(slot) = self.table.get_mut(id) {
            slot.conn.recycle(fragments);
        }
        JoinedMessage { bytes, receives }
    }

    /// Releases a joined message that the program has not kept after its callback.
    pub(crate) fn end_joined(
        &mut self,
        id: ConnectionId,
        device: usize,
        JoinedMessage { bytes, receives }: JoinedMessage,
    ) {
        if receives.is_empty() {
            self.settle(MemoryUse::Fetched, bytes.len(), Some(id));
        }
        let shared = self.table.get(id).is_some_and(|slot| slot.conn.receives().is_shared());
        for buffer in receives {
            self.devices.buffers(device).free_receive(buffer, shared);
        }
        self.large.joins.keep(bytes);
        self.expect_trim();
    }

    /// Notes that the program keeps a joined message, which occupies this many receives.
    pub(crate) fn keep_joined(&mut self, id: ConnectionId, receives: usize) {
        for _ in 0..receives {
            self.keep_message(id);
        }
    }

    /// Releases a joined message that the program kept after its callback.
    pub(in crate::driver) fn take_joined_home(
        &mut self,
        pool: PoolId,
        joined: JoinedMessage,
        of: Option<ConnectionId>,
    ) {
        let JoinedMessage { bytes, receives } = joined;
        if receives.is_empty() {
            self.settle(MemoryUse::Fetched, bytes.len(), of);
        }
        for buffer in receives {
            self.take_home(pool, buffer, of);
        }
        self.large.joins.keep(bytes);
        self.expect_trim();
    }
}
