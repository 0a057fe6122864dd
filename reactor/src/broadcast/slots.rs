//! The memory of messages: each place has one message, for all receivers on all devices.

use std::sync::Arc;

use crate::transport::mem::Memory;
use crate::{ConnectionId, Context, Error, Region, RegionOptions, SendErrorKind, SendId, transport};

/// A message in its place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parcel {
    pub(super) slot: usize,
    pub(super) len: usize,
}

/// A place for a message.
#[derive(Debug)]
struct Slot {
    memory: Arc<Memory>,
    /// The memory as each device knows it, in the order of [`Slots::devices`].
    regions: Vec<Region>,
    /// Number of queues and sends that need the message.
    holders: usize,
}

#[derive(Debug)]
pub(super) struct Slots {
    /// Empty until the first receiver joins.
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Names of the devices that the memory is registered with.
    devices: Vec<String>,
    pub(super) options: RegionOptions,
    count: usize,
    len: usize,
    /// A message that is copied out to be sent.
    scratch: Vec<u8>,
}

impl Slots {
    pub(super) const fn new(count: usize, len: usize, options: RegionOptions) -> Self {
        Self { slots: Vec::new(), free: Vec::new(), devices: Vec::new(), options, count, len, scratch: Vec::new() }
    }

    /// Length of a place, bytes.
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// The index of a connection's device; registers the memory with it if it is a new one.
    pub(super) fn device(&mut self, cx: &mut Context<'_>, conn: ConnectionId) -> Result<usize, Error> {
        let name = cx.device(conn).ok_or(Error::Gone("connection"))?.to_owned();
        if let Some(known) = self.devices.iter().position(|device| *device == name) {
            return Ok(known);
        }
        while self.slots.len() < self.count {
            let memory = Memory::new(self.len);
            let memory = memory.map_err(|source| transport::Error::Memory { bytes: self.len, source })?;
            self.free.push(self.slots.len());
            self.slots.push(Slot { memory: Arc::new(memory), regions: Vec::new(), holders: 0 });
        }
        let register = |slot: &Slot| cx.register_memory(conn, Arc::clone(&slot.memory), &self.options);
        let regions = self.slots.iter().map(register).collect::<Result<Vec<_>, _>>()?;
        self.slots.iter_mut().zip(regions).for_each(|(slot, region)| slot.regions.push(region));
        self.devices.push(name);
        Ok(self.devices.len() - 1)
    }

    /// Puts a message in a free place, which its caller holds; `None` if there is none.
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

    /// Sends a message from its place, or a copy of it where that cannot be. Returns the place that the send holds, if it does.
    pub(super) fn send(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnectionId,
        device: usize,
        Parcel { slot: at, len }: Parcel,
    ) -> Result<(SendId, Option<usize>), SendErrorKind> {
        let slot = &self.slots[at];
        match cx.send_region(conn, &slot.regions[device], 0..len) {
            Ok(send) => return Ok((send, Some(at))),
            Err(refused @ (SendErrorKind::WouldBlock(_) | SendErrorKind::Closed)) => return Err(refused),
            // A message past one buffer that peers may not fetch, or memory of a device that was away meanwhile.
            Err(_) => {}
        }
        self.scratch.resize(len, 0);
        let inside = slot.memory.copy_out(0, &mut self.scratch);
        debug_assert!(inside, "it was put there");
        cx.reporting(conn, |cx| cx.send(conn, &self.scratch)).map(|send| (send, None))
    }
}
