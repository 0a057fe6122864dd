//! The memory of published messages. Each slot holds one message. All receivers on all devices send the message from its slot.

use std::sync::Arc;

use crate::transport::mem::Memory;
use crate::{ConnectionId, Context, Error, Region, RegionOptions, SendErrorKind, SendId, transport};

/// A message that is stored in a slot: the index of the slot, and the length of the message.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoredMessage {
    pub(super) slot: usize,
    pub(super) len: usize,
}

/// A slot for one message.
#[derive(Debug)]
struct MessageSlot {
    memory: Arc<Memory>,
    /// The registrations of `memory`: one for each device, in the order of [`Slots::devices`].
    regions: Vec<Region>, // local: one for each device
    /// The number of users of the slot: the receivers whose queues contain the message, the sends of the message in flight, and the call of
    /// `publish` that stored the message. If this number is 0, the slot is free.
    holders: usize,
    /// The number of sends in flight from the slot.
    sends: usize,
}

#[derive(Debug)]
pub(super) struct Slots {
    /// The slots. The list is empty until the first receiver joins.
    slots: Vec<MessageSlot>, // bound: broadcasts
    free: Vec<usize>, // bound: broadcasts
    /// The names of the devices with which the memory of all slots is registered.
    devices: Vec<String>, // local: the devices
    pub(super) options: RegionOptions,
    /// The number of slots from which a send is in flight.
    sending: usize,
    depth: usize,
    len: usize,
    /// A buffer for a copy of a message. It is used if a connection cannot send the message from its slot.
    scratch: Vec<u8>, // local: one message of the program
}

impl Slots {
    pub(super) const fn new(depth: usize, len: usize, options: RegionOptions) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            devices: Vec::new(),
            options,
            sending: 0,
            depth,
            len,
            scratch: Vec::new(),
        }
    }

    /// Returns the number of slots. A message that is published always finds a free slot:
    ///
    /// - All queues together hold at most `depth` slots. Each queue that is not empty ends with the
    ///   last published message and has no gap, so it contains at most the last `depth` messages.
    /// - The sends in flight hold at most `2 * depth - 1` slots.
    const fn count(&self) -> usize {
        self.depth.saturating_mul(3)
    }

    /// Returns true if a receiver may send a message from the slot `at`. Otherwise the receiver
    /// must send a copy. `held` is the number of slots from which sends to this receiver are in
    /// flight. One receiver may occupy about half of the slots for sends in flight. So a single
    /// stuck receiver does not force the others to send copies.
    fn may_send_from(&self, at: usize, held: usize) -> bool {
        held < self.depth && (self.slots[at].sends > 0 || self.sending < self.depth.saturating_mul(2) - 1)
    }

    /// Returns the length of each slot, in bytes.
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// Returns the index of a connection's device in `devices`. If the device is not in the list yet, first registers the memory of all
    /// slots with the device, and adds the device.
    pub(super) fn device(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<usize, Error> {
        let name = cx.connection(conn).device().ok_or(Error::Gone("connection"))?.to_owned();
        if let Some(known) = self.devices.iter().position(|device| *device == name) {
            return Ok(known);
        }
        while self.slots.len() < self.count() {
            let memory = Memory::new(self.len);
            let memory = memory.map_err(|source| transport::TransportError::Memory { bytes: self.len, source })?;
            self.free.push(self.slots.len());
            self.slots.push(MessageSlot { memory: Arc::new(memory), regions: Vec::new(), holders: 0, sends: 0 });
        }
        let register = |slot: &MessageSlot| cx.regions().register_memory(conn, Arc::clone(&slot.memory), &self.options);
        let regions = self.slots.iter().map(register).collect::<Result<Vec<_>, _>>()?;
        self.slots.iter_mut().zip(regions).for_each(|(slot, region)| slot.regions.push(region));
        self.devices.push(name);
        Ok(self.devices.len() - 1)
    }

    /// Copies a message to a free slot, and returns the index of the slot. When the message was sent to or queued for all receivers, the
    /// caller must call `release` with that index. Returns `None` if there are no slots, because no
    /// receiver has joined.
    pub(super) fn take(&mut self, message: &[u8]) -> Option<usize> {
        let at = *self.free.last()?;
        let slot = &mut self.slots[at];
        if !slot.memory.copy_in(0, message) {
            return None;
        }
        slot.holders = 1;
        self.free.pop()
    }

    pub(super) fn hold(&mut self, at: usize) {
        self.slots[at].holders += 1;
    }

    pub(super) fn release(&mut self, at: usize) {
        let slot = &mut self.slots[at];
        slot.holders -= 1;
        if slot.holders == 0 {
            self.free.push(at);
        }
    }

    /// Records that a send from the slot is in flight. The slot is not reused before that send has
    /// completed.
    pub(super) fn hold_for_send(&mut self, at: usize) {
        self.hold(at);
        self.slots[at].sends += 1;
        self.sending += usize::from(self.slots[at].sends == 1);
    }

    /// Releases the slot after a send from it has completed.
    pub(super) fn release_after_send(&mut self, at: usize) {
        self.slots[at].sends -= 1;
        self.sending -= usize::from(self.slots[at].sends == 0);
        self.release(at);
    }

    /// Sends a message from its slot, or from a copy if the connection cannot send from the slot,
    /// or if the receiver holds too many slots: `held` is their number. Returns the id of the send.
    /// Also returns the index of the slot if the message is sent from there, and `None` if it is
    /// sent from a copy.
    pub(super) fn send(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnectionId,
        (device, held): (usize, usize),
        StoredMessage { slot: at, len }: StoredMessage,
    ) -> Result<(SendId, Option<usize>), SendErrorKind> {
        let slot = &self.slots[at];
        if self.may_send_from(at, held) {
            match cx.send_region(conn, &slot.regions[device], 0..len) {
                Ok(send) => return Ok((send, Some(at))),
                Err(refused @ (SendErrorKind::WouldBlock(_) | SendErrorKind::Closed)) => return Err(refused),
                // The message cannot be sent from the slot, but a copy of it can be sent. This
                // happens if the message is longer than one buffer and the peer may not read the
                // slot, or if the device was removed, which ended the registration of the slot.
                Err(_) => {}
            }
        }
        self.scratch.resize(len, 0);
        let inside = slot.memory.copy_out(0, &mut self.scratch);
        debug_assert!(inside, "a stored message is within its slot");
        cx.reporting(conn, |cx| cx.send(conn, &self.scratch)).map(|send| (send, None))
    }
}
