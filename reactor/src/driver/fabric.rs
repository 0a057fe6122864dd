//! The provider in use, and the owners of its connection-manager ids.

use rdma_transport::cm::CmId;
use rdma_transport::provider::Provider;
use rdma_transport::slab::Key;

use crate::id::ConnectionId;

/// The owner of a connection-manager id.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Owner {
    Connection(ConnectionId),
    Listener(Key),
    /// Something else than a connection, which has numbered it itself.
    Guest(u64),
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Fabric {
    pub(crate) provider: Box<dyn Provider>,
    /// The provider's connection-manager channel is not watched yet.
    fresh: bool,
    /// By slot of the id.
    owners: Vec<Option<(CmId, Owner)>>,
}

impl Fabric {
    pub(crate) const fn new(provider: Box<dyn Provider>) -> Self {
        Self { provider, fresh: true, owners: Vec::new() }
    }

    /// Notes that the provider's channel is watched.
    pub(super) const fn watched(&mut self) {
        self.fresh = false;
    }

    /// Whether the provider's channel is to be watched.
    #[inline]
    pub(crate) const fn is_fresh(&self) -> bool {
        self.fresh
    }

    pub(crate) fn own(&mut self, cm: CmId, owner: Owner) {
        let slot = cm.0.slot() as usize;
        if self.owners.len() <= slot {
            self.owners.resize(slot + 1, None);
        }
        self.owners[slot] = Some((cm, owner));
    }

    pub(crate) fn disown(&mut self, cm: CmId) {
        if self.owner(cm).is_some() {
            self.owners[cm.0.slot() as usize] = None;
        }
    }

    pub(crate) fn owner(&self, cm: CmId) -> Option<Owner> {
        self.owners.get(cm.0.slot() as usize)?.filter(|(id, _)| *id == cm).map(|(_, owner)| owner)
    }
}
