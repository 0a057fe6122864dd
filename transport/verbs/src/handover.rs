//! Connect requests that move from one provider to another, with `rdma_migrate_id`(3).
//!
//! No thread may read an event channel while an id moves to or from it, but the thread of each provider reads the channel of its provider.
//! So the id moves through a private channel: the old provider's thread moves the id there, and the new provider's thread moves it to the
//! new provider's channel. Events that arrive during the handover move with the id.

use std::sync::Arc;

use super::channel::EventChannel;
use super::entry::{IdEntry, IdState};
use super::hub::{DeviceHub, STALE_ID};
use super::id::RawId;
use rdma_transport::cm::{CmId, ReadDepth};
use rdma_transport::error::{Result, TransportError};
use rdma_transport::provider::DeviceId;

/// A connect request of rdma_cm that is detached from its provider. It has no queue pair yet.
#[derive(Debug)]
pub(super) struct DetachedId {
    id: RawId,
    read_depth: ReadDepth,
}

impl DetachedId {
    /// Detaches a connect request that has no queue pair.
    pub(super) fn detach(hub: &mut DeviceHub, id: CmId) -> Result<Self> {
        let channel = Arc::new(EventChannel::open()?);
        let raw = Arc::get_mut(&mut hub.id_mut(id)?.raw);
        raw.ok_or(TransportError::InvalidState { call: "detach", state: "in use" })?.migrate(&channel)?;
        let IdEntry { raw, device, read_depth, .. } = hub.ids.remove(id.0).ok_or(STALE_ID)?;
        hub.leave_device(device);
        let id = Arc::into_inner(raw).ok_or(STALE_ID)?;
        Ok(Self { id, read_depth })
    }

    /// Attaches a connect request that another provider has detached.
    pub(super) fn attach(self, hub: &mut DeviceHub) -> Result<(CmId, DeviceId)> {
        let Self { mut id, read_depth } = self;
        id.migrate(hub.manager()?)?;
        let mut entry = IdEntry::new(Arc::new(id), IdState::RequestReceived);
        entry.read_depth = read_depth;
        let key = hub.add(entry);
        // Events that moved with the id have made no edge on this provider's channel, so read the channel without an
        // edge.
        hub.event_set.channel = true;
        hub.connector.wake();
        let device = hub.assign_device(key).inspect_err(|_| hub.discard(key))?;
        Ok((CmId(key), device))
    }
}
