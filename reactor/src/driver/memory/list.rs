//! Lists, which are transfers of many Reads or Writes: the checks before they start, and the timer for their deadlines.

use std::time::Instant;

use rdma_transport::caps::Features;
use rdma_transport::wr::Sge;

use crate::config::Framing;
use crate::conn::list::{CONFIRMATION_LEN, ListDirection, Order};
use crate::driver::stages::Stages;
use crate::driver::{Driver, TimerPurpose};
use crate::error::SendErrorKind;
use crate::id::{ConnectionId, TransferId};
use crate::memory::budget::MemoryUse;
use crate::memory::list::{Piece, Transfer, TransferNotification, TransferOptions};

impl Driver {
    /// Checks a list of Reads or Writes, and starts the transfer of the list. Returns the id of the transfer.
    pub(crate) fn transfer(
        &mut self,
        id: ConnectionId,
        mut transfer: Transfer<'_>,
        pieces: Vec<Piece>,
        options: &TransferOptions,
    ) -> Result<TransferId, SendErrorKind> {
        let slot = self.open_slot(id)?;
        let conn = &slot.conn;
        let (raw, max) = (conn.framing() == Framing::Raw, conn.terms().buffer_size);
        match &options.notification {
            Some(TransferNotification::Message(payload)) if payload.len() > max => {
                return Err(SendErrorKind::TooLong { len: payload.len(), max });
            }
            Some(TransferNotification::Immediate(_)) if raw => {
                return Err(self.lacks(id, "immediate data behind a list"));
            }
            _ => {}
        }
        if self.hides_memory(slot) {
            return Err(SendErrorKind::PlainRemoteMemory);
        }
        let sinks = transfer.is_read() && self.features(slot).contains(Features::OPEN_READ_SINKS);
        for region in (0..transfer.len()).filter_map(|index| transfer.region(index)) {
            self.check_local(slot, region, &(0..region.len()))?;
            if sinks && !self.registry.is_sink(region.key()) {
                return Err(SendErrorKind::NotASink);
            }
        }
        let longest = self.device_of(slot).map_or(0, |device| device.max_message);
        let longest = usize::try_from(longest.min(Sge::MAX_LEN.into())).unwrap_or(usize::MAX);
        let direction = match transfer {
            Transfer::Read(_) => ListDirection::Read,
            Transfer::Write(_) if self.features(slot).contains(Features::ACKNOWLEDGED_WRITES) => {
                ListDirection::PlacedWrite
            }
            Transfer::Write(_) => ListDirection::Write,
        };
        let confirmation = if direction == ListDirection::Write && options.confirm {
            Some(Box::new(self.block(id, CONFIRMATION_LEN, MemoryUse::Program).map_err(|error| {
                failure_log!(self, id, "memory for a read of {CONFIRMATION_LEN} bytes: {error}");
                SendErrorKind::NoMemory { len: CONFIRMATION_LEN }
            })?))
        } else {
            None
        };
        let leases = transfer.lease(&pieces, longest)?;
        self.look_at_clock();
        let deadline = self.now.checked_add(options.within);
        let order =
            Order { pieces, leases, direction, deadline, notification: options.notification.clone(), confirmation };
        self.input(id, |conn, env| conn.begin_list(order, env)).ok_or(SendErrorKind::Closed)
    }

    /// Cancels a list, so that no more of its pieces are posted. Returns false if there is no such list.
    pub(crate) fn cancel_transfer(&mut self, id: ConnectionId, transfer: TransferId) -> bool {
        // If the program has closed the connection, the close may have waited for this list, so stage 10 checks if the connection can end
        // now.
        self.note(Stages::ENDS);
        self.ring();
        self.input(id, |conn, env| conn.cancel_list(transfer, env)).unwrap_or(false)
    }

    /// Schedules the check of the deadlines of the connection's lists for the time `at`. Replaces an earlier schedule.
    pub(in crate::driver) fn watch_lists(&mut self, id: ConnectionId, at: Instant) {
        let Some(slot) = self.table.get_mut(id) else { return };
        if let Some(timer) = slot.link.lists.take() {
            self.timers.cancel(timer);
        }
        slot.link.lists = Some(self.timers.insert(at, TimerPurpose::Lists(id)));
    }

    /// Handles the timer for the deadlines of a connection's lists.
    pub(in crate::driver) fn lists_due(&mut self, id: ConnectionId) {
        let Some(slot) = self.table.get_mut(id) else { return };
        slot.link.lists = None;
        self.input(id, |conn, env| conn.lists_due(env));
        // If the program has closed the connection, the close may have waited for these lists, so stage 10 checks if the connection can end
        // now.
        self.note(Stages::ENDS);
    }
}
