//! Connect requests that move from one provider to another, with `rdma_migrate_id`(3).
//!
//! No thread may read an event channel while an id moves to or from it, but the thread of each provider reads the channel of its provider.
//! So the id moves through a private channel: the old provider's thread moves the id there, and the new provider's thread moves it to the
//! new provider's channel. Events that arrive during the handover move with the id.

use std::sync::Arc;

use super::NAME;
use super::channel::EventChannel;
use super::core::Verbs;
use super::entry::{IdEntry, IdState};
use super::exchange_socket::DetachedStream;
use super::hub::STALE_ID;
use super::id::RawId;
use crate::cm::{CmId, Detached, ReadDepth};
use crate::error::{Result, TransportError};
use crate::provider::DeviceId;

/// A connect request of rdma_cm that is detached from its provider. It has no queue pair yet.
#[derive(Debug)]
struct DetachedId {
    id: RawId,
    read_depth: ReadDepth,
}

impl Verbs {
    pub(super) fn detach_request(&mut self, id: CmId) -> Result<Detached> {
        let entry = self.hub.id_mut(id)?;
        if entry.state != IdState::RequestReceived {
            return Err(TransportError::InvalidState { call: "detach", state: entry.state.name() });
        }
        if entry.qp.is_some() {
            return Err(TransportError::InvalidState { call: "detach", state: "with a queue pair" });
        }
        if entry.raw.uses_exchange() {
            return self.detach_stream(id);
        }
        let channel = Arc::new(EventChannel::open()?);
        let entry = self.hub.id_mut(id)?;
        let raw = Arc::get_mut(&mut entry.raw);
        raw.ok_or(TransportError::InvalidState { call: "detach", state: "in use" })?.migrate(&channel)?;
        let IdEntry { raw, device, read_depth, .. } = self.hub.ids.remove(id.0).ok_or(STALE_ID)?;
        self.hub.leave_device(device);
        self.settle();
        let id = Arc::into_inner(raw).ok_or(STALE_ID)?;
        Ok(Detached::new(NAME, DetachedId { id, read_depth }))
    }

    pub(super) fn attach_request(&mut self, request: Detached) -> Result<(CmId, DeviceId)> {
        let request = match request.into_state::<DetachedStream>() {
            Ok(moving) => return self.attach_stream(moving),
            Err(request) => request,
        };
        let DetachedId { mut id, read_depth } = request.into_state().map_err(|_| TransportError::Unsupported {
            provider: NAME,
            feature: "connect requests of other providers",
        })?;
        id.migrate(self.hub.manager()?)?;
        let mut entry = IdEntry::new(Arc::new(id), IdState::RequestReceived);
        entry.read_depth = read_depth;
        let key = self.hub.add(entry);
        // Events that moved with the id have made no edge on this provider's channel, so read the channel without an
        // edge.
        self.hub.event_set.channel = true;
        self.hub.connector.wake();
        match self.hub.assign_device(key) {
            Ok(device) => Ok((CmId(key), device)),
            Err(error) => {
                self.discard(key);
                Err(error)
            }
        }
    }
}
