//! The owners of connection-manager ids: the connection, listener or endpoint that an event is for.

use std::time::Instant;

use rdma_transport::cm::CmId;
use rdma_transport::slab::Key;

use crate::id::ConnectionId;
use crate::providers::{Handle, Providers};

/// The owner of a connection-manager id.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CmIdOwner {
    Connection(ConnectionId),
    Listener(Key),
    /// A datagram endpoint, or its lookup of a peer. `EndpointToken` encodes the number.
    Endpoint(u64),
}

/// The owners of all connection-manager ids of a reactor.
#[derive(Debug, Default)]
pub(crate) struct Owners {
    /// The owners. The first index is the provider, and the second index is the slot number of the
    /// connection-manager id. A slot number is reused for later ids, so the whole id is stored too.
    all: Vec<Vec<Option<(CmId, CmIdOwner)>>>, // bound: connections
}

impl Owners {
    pub(crate) fn own(&mut self, cm: Handle<CmId>, owner: CmIdOwner) {
        let (provider, slot) = (cm.provider, cm.id.0.slot() as usize);
        if self.all.len() <= provider {
            self.all.resize(provider + 1, Vec::new());
        }
        let owners = &mut self.all[provider];
        if owners.len() <= slot {
            owners.resize(slot + 1, None);
        }
        owners[slot] = Some((cm.id, owner));
    }

    pub(crate) fn disown(&mut self, cm: Handle<CmId>) {
        if self.owner(cm).is_some() {
            self.all[cm.provider][cm.id.0.slot() as usize] = None;
        }
    }

    pub(crate) fn owner(&self, cm: Handle<CmId>) -> Option<CmIdOwner> {
        let owners = self.all.get(cm.provider)?;
        owners.get(cm.id.0.slot() as usize)?.filter(|(id, _)| *id == cm.id).map(|(_, owner)| owner)
    }

    /// Destroys a connection-manager id that has no queue pair.
    pub(crate) fn discard(&mut self, providers: &mut Providers, cm: Handle<CmId>, now: Instant) {
        self.disown(cm);
        let (provider, id) = providers.of(cm);
        if let Err(error) = provider.destroy_id(id, now) {
            local_log!(Error, "destroying an id: {error}");
        }
    }
}
